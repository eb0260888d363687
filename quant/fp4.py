"""MXFP4 and NVFP4: four-bit floats (E2M1) with a scale of eight bits. A level is twice the E2M1 value,
so the scale is half the stored one."""
from .words import NIBBLES, Looked, Parts, ZERO, f32, i32, u32, u64, unit_scales

E2M1_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def mxfp4(p, ldw, ld4, ld2):
    """Blocks of 32; the scale is a power of two, 2^(e - 127). Its half is the float32 of exponent e - 1,
    subnormal for e = 0 and 1."""
    as_f32, byte, select = p.f32, p.byte, p.select

    @p.jit
    def group(t, g):
        e = byte(ld4(t, g >> 2), g & 3)
        return as_f32(select(e < u32(2), u32(u32(0x00200000) << (e & u32(1))), u32(u32(i32(e) - i32(1)) << u32(23)))), ZERO

    return Parts(Looked(E2M1_LEVELS, ldw), unit_scales(p), group)


def nvfp4(p, ldw, ld4, ld2):
    """Groups of 16 in 8 bytes: low nibbles are columns 0..7, high ones 8..15. The scale is an unsigned E4M3,
    0x7f (its NaN) being 0 as in ggml."""
    f16, mul, byte, shr, select = p.f16, p.mul, p.byte, p.shr, p.select

    @p.jit
    def word(t, j, q):
        # The same nibbles of two groups, low or high ones: those of the second into the high places.
        first, second = shr(ldw(t, j, q & 1), 4 * (q >> 1)), u64(ldw(t, j, 2 + (q & 1))) * u64(1 if q & 2 else 16)
        return u32(first & NIBBLES | u32(second & u64(0xf0f0f0f0)))

    @p.jit
    def group(t, g):
        e4m3 = byte(ldw(t, 8, g >> 2), g & 3)
        # as the top of a float16, whose exponent bias is larger by 8
        bits = select(e4m3 == u32(127), u32(0), u32((e4m3 & u32(127)) << u32(7)))
        return mul(f16(bits), f32(2**8 / 2)), ZERO

    return Parts(Looked(E2M1_LEVELS, word), unit_scales(p), group)
