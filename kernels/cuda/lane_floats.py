"""Floats of a block of attention: as words of shared memory, and their sums and largest ones over the lanes of a warp."""
from .fixed_point import larger_float
from .ptx import add, as_f32, as_i32, device, lds, shuffle, sts


@device
def put(s, i, x):
    sts(s, i, as_i32(x))


@device
def get(s, i):
    return as_f32(lds(s, i))


@device
def add_lane(x, lane):
    return add(x, as_f32(shuffle(as_i32(x), lane)))


@device
def max_lane(x, lane):
    return larger_float(x, as_f32(shuffle(as_i32(x), lane)))


@device
def max_pattern(x, lane):
    y = shuffle(x, lane)
    return y if y > x else x


@device
def sum8(s, i):
    """The partial i that is left of 128 when halves of 64, 32 and 16 have been added."""
    even = add(add(get(s, i), get(s, i + 64)), add(get(s, i + 32), get(s, i + 96)))
    return add(even, add(add(get(s, i + 16), get(s, i + 80)), add(get(s, i + 48), get(s, i + 112))))
