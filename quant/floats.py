"""F32, F16, BF16: float weights, read from the same tiles eight columns at a time."""
from .words import u32


def f32(p, ld16):
    as_f32 = p.f32

    @p.jit
    def values(t, q):
        a, b, c, d = ld16(t, 2 * q)
        e, f, g, h = ld16(t, 2 * q + 1)
        return as_f32(a), as_f32(b), as_f32(c), as_f32(d), as_f32(e), as_f32(f), as_f32(g), as_f32(h)
    return values


def _halves(p, ld16, low, high):
    @p.jit
    def values(t, q):
        a, b, c, d = ld16(t, q)
        return low(a), high(a), low(b), high(b), low(c), high(c), low(d), high(d)
    return values


def f16(p, ld16):
    to_f32 = p.f16

    @p.jit
    def low(w):
        return to_f32(u32(w) & u32(0xffff))

    @p.jit
    def high(w):
        return to_f32(u32(w) >> u32(16))
    return _halves(p, ld16, low, high)


def bf16(p, ld16):
    as_f32 = p.f32

    @p.jit
    def low(w):
        return as_f32(u32(w) << u32(16))

    @p.jit
    def high(w):
        return as_f32(u32(w) & u32(0xffff0000))
    return _halves(p, ld16, low, high)
