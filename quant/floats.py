"""F32, F16, BF16: float weights, read from the same tiles eight columns at a time."""
from .words import u32


def f32(p, ldw):
    as_f32 = p.f32

    @p.jit
    def values(t, q):
        return (as_f32(ldw(t, 2 * q, 0)), as_f32(ldw(t, 2 * q, 1)), as_f32(ldw(t, 2 * q, 2)), as_f32(ldw(t, 2 * q, 3)),
                as_f32(ldw(t, 2 * q + 1, 0)), as_f32(ldw(t, 2 * q + 1, 1)), as_f32(ldw(t, 2 * q + 1, 2)),
                as_f32(ldw(t, 2 * q + 1, 3)))
    return values


def _halves(p, ldw, low, high):
    @p.jit
    def values(t, q):
        a, b, c, d = ldw(t, q, 0), ldw(t, q, 1), ldw(t, q, 2), ldw(t, q, 3)
        return low(a), high(a), low(b), high(b), low(c), high(c), low(d), high(d)
    return values


def f16(p, ldw):
    to_f32 = p.f16

    @p.jit
    def low(w):
        return to_f32(u32(w) & u32(0xffff))

    @p.jit
    def high(w):
        return to_f32(u32(w) >> u32(16))
    return _halves(p, ldw, low, high)


def bf16(p, ldw):
    as_f32 = p.f32

    @p.jit
    def low(w):
        return as_f32(u32(w) << u32(16))

    @p.jit
    def high(w):
        return as_f32(u32(w) & u32(0xffff0000))
    return _halves(p, ldw, low, high)
