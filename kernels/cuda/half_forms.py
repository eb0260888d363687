"""Which formats are multiplied by `mmq_half` on Hopper, and which sums its products form. Those of float16 are float32, and exact
while all are integers and no partial sum can pass 2^24.

Of *packed* formats a level times its integer scale is one float16 (`half_product`). Of *scaled* ones, whose scales are floats of
32 columns or 16, a level is one, and so are 128 hi and lo, which one sum may add (`half_scaled`). Levels that are twice a small
float, of a sign, two bits of the exponent and one of the mantissa (E2M1), are *halved*: a code is a float16 once its bits are
moved. Limbs are then doubled.

Of *split* ones, with integer scales and no minima, a level times its scale is no float16, or the sums of a chunk would often pass
2^24. Products are those of int8, of two limbs of a weight (`split_product`).
"""
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ...quant.formats import CHUNK, Format
from ...quant.words import Looked
from .tile_form import form
from .weights import shared_unpacker

EXACT = 1 << 24             # up to which all integers are float32
MOST_HIGH, MOST_LOW = 127, 64  # of limbs
SLOWER = "TQ2_0",           # formats whose int8 products take less
LEAST_REACH = 48 * CHUNK    # `most_reach` of formats with weights of both signs: limbs of normal activations seldom have more
MOST_SCALE = 127            # integer scale of formats without bit fields: 128 more is a byte. Split ones may have -128
MOST_SPLIT = 2**15 - 128    # below it weights are two int8
SMALL_UNITS = 1 << 14       # what a small float counts, over the float16 of its bits


class HalfForm(NamedTuple):
    scaled: bool = False
    halved: bool = False
    split: bool = False   # whether weights are two int8
    width: int = 0        # of packed ones, bits of the fields in which codes lie, 8 where levels are bytes
    tops: bool = False    # whether codes have bits above their fields
    parts: int = 1        # the fewest parts of a chunk of which all sums are exact: 1, as of all but packed ones, 2 or 4
    signed: bool = False  # of packed ones, whether weights have both signs


def largest_weight(fmt: Format) -> int:
    """Level times integer scale."""
    return fmt.max_level * fmt.max_isc


def most_reach(fmt: Format) -> int:
    """Of a packed format, the largest reach of the limbs of a chunk with which all its sums are exact (`half_product`)."""
    return EXACT // largest_weight(fmt)


def parts_of(fmt: Format) -> int | None:
    """Of a packed format, as of `HalfForm`; None where there would be more."""
    return next((n for n in (1, 2, 4) if largest_weight(fmt) * MOST_HIGH * (CHUNK // n) <= EXACT), None)


def is_packed(fmt: Format) -> bool:
    """With integer scales, whose bounds hold (`half_product`), and are seldom passed: of codes in bit fields, for 32 columns or,
    of two bits, 16; or of levels in bytes. Where weights have one sign, limbs of 64, half of the largest, with signs by turns are
    within `most_reach`."""
    fields, parts = shared_unpacker(fmt.name).unpacker.bit_fields, parts_of(fmt)
    if fmt.group != CHUNK or parts is None or largest_weight(fmt) > 2048:
        return False
    if fields is None:
        return not fmt.has_min and fmt.max_isc <= MOST_SCALE and (parts == 1 or most_reach(fmt) >= LEAST_REACH)
    if fmt.sub != 8 * fields.width:
        return False
    if parts == 1:
        return fmt.zero in (0, 1 << fields.width if fields.tops else 0)
    return fields.width == 4 and not fmt.zero and most_reach(fmt) >= CHUNK // 2 * 64


def are_small_floats(source) -> bool:
    """source: of a quarter, as of `quant.words.Parts`."""
    if not isinstance(source, Looked) or len(source.levels) != 16:
        return False
    codes = np.arange(16, dtype=np.uint16)
    values = (codes >> 3 << 15 | (codes & 7) << 9).view(np.float16).astype(np.float32)
    return np.array_equal(values * SMALL_UNITS * 2, source.levels)


def is_scaled(fmt: Format) -> bool:
    """With a float scale of each 32 or 16 columns, in their order, whose sums are exact; codes count levels from -zero on, or are
    small floats."""
    unpack, counted = shared_unpacker(fmt.name).unpacker, fmt.zero > 0 or fmt.has_min
    return (not form(fmt).integer and fmt.group in (16, 32) and not unpack.pairs and (counted or are_small_floats(unpack.source))
            and fmt.max_level * 32 * (128 * MOST_HIGH + MOST_LOW) <= EXACT)


def is_split(fmt: Format) -> bool:
    """Whether a weight is two int8, 256 h + l."""
    return (form(fmt).integer and fmt.group == CHUNK and fmt.sub in (16, 32) and not fmt.has_min
            and fmt.max_isc <= MOST_SCALE + 1 and largest_weight(fmt) < MOST_SPLIT)


@lru_cache(None)
def half_form(fmt: Format) -> HalfForm | None:
    """None: not by `mmq_half`."""
    unpack = shared_unpacker(fmt.name).unpacker
    if is_packed(fmt):
        fields = unpack.bit_fields
        if fields is None:
            return HalfForm(width=8, parts=parts_of(fmt), signed=True)
        return HalfForm(width=fields.width, tops=fields.tops is not None, parts=parts_of(fmt), signed=fmt.zero > 0)
    if is_scaled(fmt):
        return HalfForm(scaled=True, halved=are_small_floats(unpack.source))
    return HalfForm(split=True) if is_split(fmt) else None


def has_halves(fmt: Format) -> bool:
    """Whether `mmq_half` may be chosen."""
    return half_form(fmt) is not None and fmt.name not in SLOWER
