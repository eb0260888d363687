"""float32 rows to the bytes of each type: the table of encoders, a row a type.

An encoder: (format, x float32 [n_rows, n_cols], importance float32 [n_cols] or None) -> uint8 [n_rows, row_bytes]. Types without
a search take what `rounding` gives. The others minimize the sum of importance (x - value)^2 (`search`); this module says what is
searched for each, and which fields it fills (`packing`).
"""
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from . import fields, rounding
from .formats import Format
from .fp4 import E2M1_LEVELS
from .i_quants import codebook
from .ik_quants import (FIVE_BIT_LEVELS, FIVE_BIT_SHIFT, FOUR_BIT_SHIFT, PAIR_LEVELS, SIX_BIT_LEVELS, SIX_BIT_SHIFT,
                        THREE_BIT_LEVELS, THREE_BIT_SHIFT, TWO_BIT_LEVELS, TWO_BIT_SHIFT)
from .legacy import IQ4_LEVELS
from .packing import Arrays, half, packed
from .search.codebook import by_codebook
from .search.levels import by_levels, nearest_codes, nearest_levels
from .search.lines import by_lines
from .search.recode import make_even, pair_codes
from .search.scales import ANY, HALF

Encoder = Callable[[Format, np.ndarray, np.ndarray | None], np.ndarray]


@dataclass(frozen=True)
class Rounded:
    """See `rounding`. weighted: what encodes where columns have importance; None: the same."""
    rounded: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    weighted: Encoder | None = None

    def __call__(self, fmt: Format, x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        if importance is not None and self.weighted:
            return self.weighted(fmt, x, importance)
        # scales beyond float16, and those of subnormal blocks
        with np.errstate(over="ignore", divide="ignore", invalid="ignore", under="ignore"):
            return np.concatenate(self.rounded(x.reshape(-1, fmt.block_size)), axis=1).reshape(len(x), -1)


def columns(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """float32 [n_cols]: the importance, or ones."""
    return np.ones(x.shape[1], np.float32) if importance is None else importance


HALVES, FLOATS = (HALF,), (ANY,)
# Scales by their bytes, halved: the levels of E2M1 are doubled
POWERS_OF_TWO = tuple(2.0 ** (e - 128) for e in range(255))
E4M3 = tuple((b % 8 * 2.0**-9 if b < 8 else (8 + b % 8) * 2.0 ** (b // 8 - 10)) / 2 for b in range(127))


@dataclass(frozen=True)
class Levels:
    """See `search.levels`. span: how far around the scale that maps the largest value to the last level others are tried."""
    tables: tuple
    span: float
    first: int = 1
    step: int = 1
    n_scales: int = 1
    allowed: tuple = HALVES
    fields: Callable[..., Arrays] = fields.as_they_are
    recode: Callable[..., np.ndarray] | None = None  # other codes for the scales found: `search.recode`

    def __call__(self, fmt: Format, x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        n_rows, n_cols = x.shape
        group = n_cols if fmt.header else fmt.group
        sub = fmt.sub if self.n_scales > 1 else group
        codes = np.empty(x.size, np.uint8)
        j, selected = np.empty((2, x.size // sub), np.uint8)
        ds = np.empty(x.size // group)
        tables = np.stack([nearest_levels(levels) for levels in self.tables])
        ends = np.array([(np.min(levels), np.max(levels)) for levels in self.tables], float)
        code_of = np.stack([nearest_codes(levels) for levels in self.tables])
        by_levels(x.reshape(-1), columns(x, importance), sub, group, tables, ends, float(self.first), float(self.step),
                  self.n_scales, np.array(self.allowed, float), self.span, code_of, codes, j, selected, ds)
        if self.recode:
            scales = np.repeat(ds, group // sub) * (self.first + self.step * j.astype(float))
            codes = self.recode(x.reshape(-1), columns(x, importance), np.array(self.tables, float), scales, selected, codes)
        of_blocks = lambda a: a.reshape(x.size // fmt.block_size, -1)
        arrays = self.fields(of_blocks(codes), of_blocks(j), of_blocks(selected))
        if fmt.header:
            header = half(ds) if fmt.header_bytes == 2 else ds.astype("<f4").view(np.uint8).reshape(n_rows, 4)
            return np.concatenate([header, packed(fmt, arrays).reshape(n_rows, -1)], axis=1)
        if len(self.allowed) > 1:
            stored = of_blocks(np.where(ds == 0, 0, np.searchsorted(self.allowed, ds)))
            arrays |= {"d": stored, "e": stored}
        else:
            arrays["d"] = half(ds).reshape(-1, 2)
        return packed(fmt, arrays).reshape(n_rows, -1)


@dataclass(frozen=True)
class Lines:
    """Codes and minima: see `search.lines`."""
    n_scales: int = 1

    def __call__(self, fmt: Format, x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        codes = np.empty(x.size, np.uint8)
        j, k = np.empty((2, x.size // fmt.sub), np.uint8)
        ds, ms = np.empty((2, x.size // fmt.group))
        by_lines(x.reshape(-1), columns(x, importance), fmt.sub, fmt.group, np.float32(fmt.max_level), self.n_scales,
                 self.n_scales == 1, codes, j, k, ds, ms)
        j, k = (a.reshape(-1, fmt.block_size // fmt.sub) for a in (j, k))
        scales = j | k << 4 if self.n_scales == 16 else np.concatenate([j, k], axis=1)
        # the file's value is d * code + m where there are no integer scales
        d, m = half(ds).reshape(-1, 2), half(-ms if self.n_scales == 1 else ms).reshape(-1, 2)
        return packed(fmt, {"codes": codes.reshape(-1, fmt.block_size), "scales": scales, "d": d, "m": m,
                            "dmin": m}).reshape(len(x), -1)


POSITIVE, TERNARY = tuple(np.linspace(0.5, 1.3, 12).tolist()), tuple(np.linspace(0.2, 0.9, 8).tolist())


@lru_cache(None)
def grids(name: str, divisor: int) -> np.ndarray:
    """float32 [tables, columns of an entry, entries] of what d times the integer scale is multiplied with. IQ1: levels 1/8 more,
    or less."""
    entries = codebook(name).T.astype(np.float32)
    shifted = [entries + np.float32(1 / 8), entries - np.float32(1 / 8)]
    found = {"IQ1_S": shifted, "IQ1_M": [np.concatenate(shifted, axis=1)]}.get(name, [entries / np.float32(divisor)])
    return np.ascontiguousarray(np.stack(found))


@dataclass(frozen=True)
class Codebook:
    """See `search.codebook`. divisor: of the codebook's levels. fields: (codes, j, selected, signs, d's bytes), each [n_blocks,
    items] -> arrays."""
    divisor: int
    signing: int
    fields: Callable[..., Arrays]
    n_scales: int = 16
    factors: tuple[float, ...] = POSITIVE

    def __call__(self, fmt: Format, x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        n_rows, n_cols = x.shape
        tables = grids(fmt.name, self.divisor)
        width = tables.shape[1]
        codes, signs = np.empty((n_rows, n_cols // width), np.uint16), np.zeros((n_rows, n_cols // 8), np.uint8)
        j, selected = np.empty((2, n_rows, n_cols // fmt.sub), np.uint8)
        ds = np.empty((n_rows, n_cols // fmt.group))
        by_codebook(x, columns(x, importance), fmt.sub, fmt.group, tables, self.signing, np.array(self.factors), self.n_scales,
                    codes, j, selected, signs, ds)
        n_blocks, d = n_rows * n_cols // fmt.block_size, half(ds).reshape(-1, 2)
        arrays = self.fields(*(a.reshape(n_blocks, -1) for a in (codes, j, selected, signs)), d)
        return packed(fmt, {"d": d, **arrays}).reshape(n_rows, -1)


def uniform(lowest: int, highest: int) -> tuple:
    return tuple(range(lowest, highest + 1)),


def shifted(levels: tuple, shift: int) -> tuple:
    """A table, and the one that a sub-block selects."""
    return levels, tuple(level + shift for level in levels)


TWO, THREE, FOUR = (shifted(TWO_BIT_LEVELS, TWO_BIT_SHIFT), shifted(THREE_BIT_LEVELS, THREE_BIT_SHIFT),
                    shifted(IQ4_LEVELS, FOUR_BIT_SHIFT))
FIVE, SIX = shifted(FIVE_BIT_LEVELS, FIVE_BIT_SHIFT), shifted(SIX_BIT_LEVELS, SIX_BIT_SHIFT)

ENCODERS: dict[str, Encoder] = {
    "F32": Rounded(rounding.f32),
    "F16": Rounded(rounding.f16),
    "BF16": Rounded(rounding.bf16),
    "Q4_0": Rounded(rounding.q4_0, Levels(uniform(-8, 7), 0.12)),
    "Q4_1": Rounded(rounding.q4_1, Lines()),
    "Q5_0": Rounded(rounding.q5_0, Levels(uniform(-16, 15), 0.06)),
    "Q5_1": Rounded(rounding.q5_1, Lines()),
    "Q8_0": Rounded(rounding.q8_0),
    "Q6_0": Levels(uniform(-32, 31), 0.03),
    "Q1_0": Levels(((-1, 1),), 0.9),
    "IQ4_NL": Levels((IQ4_LEVELS,), 0.12),
    "MXFP4": Levels((E2M1_LEVELS,), 0.2, allowed=POWERS_OF_TWO),
    "NVFP4": Levels((E2M1_LEVELS,), 0.2, allowed=E4M3),
    "TQ1_0": Levels(uniform(-1, 1), 0.9, fields=fields.in_base_three),
    "TQ2_0": Levels(uniform(-1, 1), 0.9),
    "Q2_K": Lines(16),
    "Q4_K": Lines(64),
    "Q5_K": Lines(64),
    "Q3_K": Levels(uniform(-4, 3), 0.25, -32, 1, 64),
    "Q6_K": Levels(uniform(-32, 31), 0.03, -128, 1, 256, fields=fields.signed_bytes),
    "IQ4_XS": Levels((IQ4_LEVELS,), 0.12, -32, 1, 64),
    "IQ2_XXS": Codebook(8, 1, fields.iq2_xxs),
    "IQ2_XS": Codebook(8, 1, fields.iq2_xs),
    "IQ2_S": Codebook(8, 2, fields.iq2_s),
    "IQ3_XXS": Codebook(4, 1, fields.iq3_xxs),
    "IQ3_S": Codebook(1, 2, fields.iq3_s),
    "IQ1_S": Codebook(1, 0, fields.iq1_s, 8, TERNARY),
    "IQ1_M": Codebook(1, 0, fields.iq1_m, 8, TERNARY),
    "IQ2_K": Levels(TWO, 0.5, -8, 1, 16),
    "IQ3_K": Levels(THREE, 0.25, -31, 2, 32, fields=fields.odd_with_signs),
    "IQ4_K": Levels(FOUR, 0.12, -32, 1, 64),
    "IQ5_K": Levels(FIVE, 0.06, -32, 1, 64),
    "IQ6_K": Levels(SIX, 0.03, -128, 1, 256, fields=fields.signed_bytes),
    "IQ2_KS": Levels(TWO, 0.5, -16, 1, 32, fields=fields.selected_and_fifth_bits),
    "IQ3_KS": Levels(THREE, 0.25, -16, 1, 32, fields=fields.fifth_bits_and_selected),
    "IQ2_KL": Levels((PAIR_LEVELS,), 0.25, -32, 1, 64, fields=fields.upper_twos, recode=pair_codes),
    "IQ4_KS": Levels(FOUR, 0.12, -127, 2, 128, FLOATS, fields.odd_and_selected),
    "IQ4_KSS": Levels(FOUR, 0.12, -127, 2, 128, FLOATS, fields.gray, make_even),
    "IQ5_KS": Levels(FIVE, 0.06, -127, 2, 128, FLOATS, fields.odd_and_selected),
}
