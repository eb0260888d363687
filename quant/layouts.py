"""Where the bits of codes and scales lie in the bytes of a block, as quantizers write them and interleaved types move them.

A field without a layout holds bytes as they are.
"""
from collections.abc import Callable
from typing import NamedTuple

Place = Callable[[int, int], tuple[int, int]]  # (byte, bit) of a field -> (n, bit): of the n-th column, scale or byte


class Layout(NamedTuple):
    """A field's bits: those of the array `what`, from bit `first` on; place's bit counts from there."""
    what: str
    first: int
    place: Place


def fields_of(width: int) -> Place:
    """Fields of `width` bits, one after another."""
    return lambda i, bit: divmod(8 * i + bit, width)


def runs_of(width: int, run: int) -> Place:
    """Fields of `width` bits: the lowest ones of `run` bytes, the next ones of these bytes and so on."""
    return lambda i, bit: (run * (8 // width) * (i // run) + i % run + run * (bit // width), bit % width)


def far_nibbles(i, bit):
    """Of eight scales: those of s and s + 4 in a byte."""
    return i + 4 * (bit // 4), bit % 4


def q6_0_upper(i, bit):
    return i + 8 * (bit // 4) + 16 * (bit // 2 % 2), bit % 2


def q3_k_scales(i, bit):
    return (i + 8 * (bit // 4), bit % 4) if i < 8 else (i - 8 + 4 * (bit // 2), 4 + bit % 2)


def q4_k_scales(i, bit):
    """Eight scales, then eight minima."""
    if i >= 8:
        return i - 4 + 8 * (bit // 4), bit % 4
    return (8 * (i // 4) + i % 4, bit) if bit < 6 else (8 * (i // 4) + i % 4 + 4, bit - 2)


def codes(place: Place, first: int = 0) -> Layout:
    return Layout("codes", first, place)


def scales(place: Place, first: int = 0) -> Layout:
    return Layout("scales", first, place)


NIBBLES, TWOS, BITS = (fields_of(width) for width in (4, 2, 1))
LEGACY = runs_of(4, 16)  # nibbles of 32 columns, as in Q4_0
K_NIBBLES, K_TWOS, K_BITS = (runs_of(width, 32) for width in (4, 2, 1))
SELECTING = Layout("selected", 0, BITS)
THREE_BITS = {"qs": codes(K_TWOS), "qh": codes(K_BITS, 2)}
FIVE_BITS = {"qs": codes(K_NIBBLES), "qh": codes(K_BITS, 4)}
SIX_BIT_SCALES = {"x": SELECTING, "sh": scales(TWOS, 4), "sl": scales(NIBBLES)}

LAYOUTS: dict[str, dict[str, Layout]] = {
    "Q4_0": {"qs": codes(LEGACY)},
    "Q4_1": {"qs": codes(LEGACY)},
    "Q5_0": {"qs": codes(LEGACY), "qh": codes(BITS, 4)},
    "Q5_1": {"qs": codes(LEGACY), "qh": codes(BITS, 4)},
    "Q6_0": {"qs": codes(LEGACY), "qh": codes(q6_0_upper, 4)},
    "Q8_0": {"qs": codes(fields_of(8))},
    "Q1_0": {"qs": codes(BITS)},
    "IQ4_NL": {"qs": codes(LEGACY)},
    "MXFP4": {"qs": codes(LEGACY)},
    "NVFP4": {"qs": codes(runs_of(4, 8))},
    "TQ2_0": {"qs": codes(K_TWOS)},
    "Q2_K": {"qs": codes(K_TWOS)},
    "Q3_K": {"qs": codes(K_TWOS), "hmask": codes(K_BITS, 2), "scales": scales(q3_k_scales)},
    "Q4_K": {"qs": codes(K_NIBBLES), "scales": scales(q4_k_scales)},
    "Q5_K": {**FIVE_BITS, "scales": scales(q4_k_scales)},
    "Q6_K": {"ql": codes(runs_of(4, 64)), "qh": codes(K_TWOS, 4)},
    "IQ3_S": {"scales": scales(NIBBLES)},
    "IQ4_XS": {"qs": codes(LEGACY), "scales_h": scales(TWOS, 4), "scales_l": scales(NIBBLES)},
    "IQ2_K": {"qs": codes(K_TWOS), "x": SELECTING, "sc": scales(NIBBLES)},
    "IQ3_K": {**THREE_BITS, "x": SELECTING, "sh": Layout("signs", 0, BITS), "sl": scales(NIBBLES)},
    "IQ4_K": {"qs": codes(LEGACY), **SIX_BIT_SCALES},
    "IQ5_K": {**FIVE_BITS, **SIX_BIT_SCALES},
    "IQ6_K": {"qs": codes(K_NIBBLES), "qh": codes(K_TWOS, 4), "x": SELECTING},
    "IQ2_KS": {"qs": codes(K_TWOS), "sc": scales(NIBBLES)},
    "IQ3_KS": {**THREE_BITS, "sc": scales(far_nibbles)},
    "IQ2_KL": {"qs": codes(LEGACY), "qh": codes(runs_of(1, 16), 4), "sc": scales(far_nibbles)},
    "IQ4_KS": {"qs": codes(LEGACY)},
    "IQ5_KS": FIVE_BITS,
}


def layout(name: str, field: str) -> Layout:
    """Of a field of the type."""
    return LAYOUTS.get(name, {}).get(field) or Layout(field, 0, fields_of(8))
