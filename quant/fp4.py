"""MXFP4 and NVFP4: four-bit floats (E2M1) with a scale of eight bits. A level is twice the E2M1 value, so the scale is half the stored one."""
from .legacy import nibble_levels
from .words import Unpacker, ZERO, f32, u32, unit_scales

E2M1_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def mxfp4(p, ld16, ld4, ld2):
    """Blocks of 32; the scale is a power of two, 2^(e - 127). Its half is the float32 of exponent e - 1, subnormal for e = 0 and 1."""
    as_f32, shr = p.f32, p.shr

    @p.jit
    def group(t, g):
        e = shr(ld4(t, g >> 2), 8 * (g & 3)) & u32(255)
        bits = u32(0x00200000) << e if e < u32(2) else (e - u32(1)) << u32(23)
        return as_f32(bits), ZERO

    return Unpacker(nibble_levels(p, ld16, p.lookup16(E2M1_LEVELS)), unit_scales(p), group)


def nvfp4(p, ld16, ld4, ld2):
    """Groups of 16 in 8 bytes: low nibbles are columns 0..7, high ones 8..15. The scale is an unsigned E4M3, 0x7f (its NaN) being 0 as in ggml."""
    f16, mul, byte, nibbles, level = p.f16, p.mul, p.byte, p.nibbles, p.lookup16(E2M1_LEVELS)

    @p.jit
    def levels(t, j):
        a, b, c, d = ld16(t, j)
        return (level(nibbles(a, 0)), level(nibbles(b, 0)), level(nibbles(a, 4)), level(nibbles(b, 4)),
                level(nibbles(c, 0)), level(nibbles(d, 0)), level(nibbles(c, 4)), level(nibbles(d, 4)))

    @p.jit
    def group(t, g):
        e4m3 = byte(ld16(t, 8), g)
        bits = u32(0) if e4m3 == u32(127) else (e4m3 & u32(127)) << u32(7)  # as the top of a float16, whose exponent bias is larger by 8
        return mul(f16(bits), f32(2**8 / 2)), ZERO

    return Unpacker(levels, unit_scales(p), group)
