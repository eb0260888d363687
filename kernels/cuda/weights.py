"""Weight tiles on the device: the unpackings of quant/ over global or shared memory,
with PTX where it has an instruction for them."""
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ...quant import tile, words
from ...quant.formats import Format, format_of
from ...quant.words import ONES, SUMMED, u64
from .ptx import (add2, as_f32, constant, device, distances4, f16_to_f32, fma2, i32, ldc, ldc4, lds, lds4, mul, prmt, rotate, shr,
                  u32)


@device
def pick(w4, i):
    """Word i of four."""
    low = w4[1] if i & 1 else w4[0]
    high = w4[3] if i & 1 else w4[2]
    return u32(high if i & 2 else low)


# (words, piece, i): word i of the piece at word `piece`: alone, or of the piece loaded whole, so that a lane that takes several
# words of one loads it once
global_word = device(lambda words, piece, i: pick(ldc4(words, piece), i))
shared_word = device(lambda words, piece, i: lds(words, piece + i))
shared_piece_word = device(lambda words, piece, i: pick(lds4(words, piece), i))


def _loads(fmt: Format, load, load_word, rows=tile.ROWS):
    """(ldw, ld4, ld2) of `quant.tile.loads` by load(words, i) and load_word(words, word at which a piece begins, i). t = (words,
    base, row, ...). Constants are added to what is known at run time only: they become the offset of the load, not an addition of
    their own."""
    word_plane = rows * 4 * fmt.n_pieces
    half_plane = word_plane + rows * fmt.n_words

    @device
    def ldw(t, p, i):
        words, base, row = t[:3]
        return load_word(words, base + row * 4 + p * (rows * 4), i)

    @device
    def ld4(t, k):
        words, base, row = t[:3]
        return load(words, base + row + (word_plane + k * rows))

    @device
    def ld2(t, h):
        words, base, row = t[:3]
        return u32(shr(load(words, base + (row >> 1) + (half_plane + h * (rows >> 1))), (row & 1) << 4) & u32(0xffff))
    return ldw, ld4, ld2


def loads(fmt: Format):
    """(ldw, ld4, ld2) for a lane that takes a row, by a pointer to uint32. t = (words, base, row, ...): pointer, the tile's first
    word, row in it."""
    return _loads(fmt, ldc, global_word)


def quarter_loads(fmt: Format):
    """(ldw, ld4, ld2) for lanes that each take a quarter, a word at a time from a shared array of uint32. t = (shared, base,
    row, ...)."""
    return _loads(fmt, lds, shared_word)


@device
def field(w, s, mask, up):
    """`words.Primitives.field`: a rotation, of a number of places that need not be known, and the mask."""
    return u32(rotate(w, i32(s) - i32(up)) & u32(u32(mask) << u32(up)))


def lookup_nibbles(levels):
    """(w) -> int32 words of the levels of its low nibbles, and of its high ones: four nibbles at a time from both halves of the
    table by prmt, then a choice by the nibbles' bit 3; of up to eight levels by one prmt. Of two constants of an instruction one
    is loaded: one that the assembler knows it moves to a register anew for every instruction, which made a fifth of them."""
    table = np.resize(np.asarray(levels, np.int8), 16).view(np.uint32)
    t1, t3, loaded = u32(table[1]), u32(table[3]), constant(np.array([table[0], table[2], 0x44444444], np.uint32))

    @device
    def few(w):
        w, t0 = u32(w), loaded(0)
        a, c = prmt(t0, t1, w), prmt(t0, t1, u32(w >> u32(16)))
        return i32(prmt(a, c, u32(0x6420))), i32(prmt(a, c, u32(0x7531)))

    @device
    def sixteen(w):
        w, t0, t2, fours = u32(w), loaded(0), loaded(1), loaded(2)
        index = u32(w & u32(0x77777777))
        later, choice = u32(index >> u32(16)), u32((w >> u32(1)) & fours | u32(0x32103210))
        a, b = prmt(t0, t1, index), prmt(t2, t3, index)
        c, d = prmt(t0, t1, later), prmt(t2, t3, later)
        a, c = prmt(a, b, choice), prmt(c, d, u32(choice >> u32(16)))
        return i32(prmt(a, c, u32(0x6420))), i32(prmt(a, c, u32(0x7531)))
    return few if len(levels) <= 8 else sixteen


def lookup_codes(levels, cubic):
    """`words.Primitives.lookup_codes` by the cubic, of two codes at a time: 1024 + code is a float16 whose low byte is the code,
    1280 + level one whose low byte is the level."""
    def twice(value):
        return u32(np.array([value, value], np.float16).view(np.uint32)[0])

    a, b, c, d, minus_middle = map(twice, (cubic.a, cubic.b, cubic.c, 1280 + cubic.d, -1024 - cubic.middle))
    loaded = constant(np.array([b, c, d, 0x64646464], np.uint32))  # as in lookup_nibbles

    @device
    def two(w):
        y = add2(w, minus_middle)
        return fma2(fma2(fma2(y, a, loaded(0)), y, loaded(1)), y, loaded(2))

    @device
    def four(w):
        w, exponents = u32(w), loaded(3)
        return i32(prmt(two(prmt(w, exponents, u32(0x4240))), two(prmt(w, exponents, u32(0x4341))), u32(0x6240)))
    return device(lambda a, b: (four(a), four(b)))


class Terms(NamedTuple):
    """Levels of nibbles as sums of terms, which an integer product adds, plus a constant. A term is a half of the table: prmt
    gives the level where the nibble's bit 3 is the half's, else the sign of the half's levels, which all have the same."""
    n: int              # of terms: two for 16 levels, one for less
    constant: int
    of_nibbles: object  # (w) -> for each term two int32 words: of the nibbles of w's low half, the lowest first, and of its high
                        # half


def terms(levels) -> Terms:
    """Of 4, 8 or 16 int8 levels."""
    levels, eights = np.array(levels), u32(0x88888888)
    halves = (np.resize(levels, 8),) if len(levels) <= 8 else (levels[:8], levels[8:])
    if len(halves) == 1:
        signs, rest = (0,), 0
    elif halves[0].max() < 0 <= halves[1].min():
        signs, rest = (-1, 0), 0
    else:  # all terms negative
        signs, rest = (-1, -1), int(levels.max()) + 2
    tables = [half - rest - (sum(signs) - sign) for half, sign in zip(halves, signs)]
    assert all(len(tables) == 1 or (((table < 0) == (sign < 0)).all() and abs(table).max() < 128)
               for table, sign in zip(tables, signs)), levels
    tables = [table.astype(np.int8).view(np.uint32) for table in tables]
    # Of two constants of a prmt one is loaded, as in lookup_nibbles
    loaded = constant(np.array([table[0] for table in tables], np.uint32))
    first, last = u32(tables[0][1]), u32(tables[-1][1])

    @device
    def one(w):
        w, t = u32(w), loaded(0)
        return i32(prmt(t, first, w)), i32(prmt(t, first, u32(w >> u32(16))))

    @device
    def two(w):
        v = u32(w ^ eights)
        x, y = one(w)
        t = loaded(1)
        return x, y, i32(prmt(t, last, v)), i32(prmt(t, last, u32(v >> u32(16))))
    return Terms(len(tables), rest, one if len(tables) == 1 else two)


class PairTerms(NamedTuple):
    """Pairs of levels of codes of five bits as sums of four terms and a constant: the quarters of the table, as in `Terms`."""
    constant: int
    of_codes: object  # (nibbles, fifths) -> of the first, then of the second levels: for each term two int32 words, of the codes
                      # in the low half and in the high half


def pair_terms(levels) -> PairTerms:
    """Of 32 pairs of int8 levels. All terms are negative: where a code is another quarter's, a term is -1."""
    rest = int(np.max(levels)) + 4
    tables = (np.array(levels) - rest + 3).reshape(4, 8, 2)
    assert tables.min() >= -128 and tables.max() < 0, levels
    words_ = np.ascontiguousarray(tables.transpose(2, 0, 1)).astype(np.int8).view(np.uint32)  # [level][quarter][half]
    eights, loaded = u32(0x88888888), constant(words_[..., 0].reshape(-1).copy())  # as in lookup_nibbles

    def look(k, table):
        """Both words of term k % 4 of a pair's level k // 4, by its selector."""
        return device(lambda s: (i32(prmt(loaded(k), table, s)), i32(prmt(loaded(k), table, u32(s >> u32(16))))))
    first0, first1, first2, first3, second0, second1, second2, second3 = map(look, range(8), words_[..., 1].reshape(-1))

    @device
    def of_codes(w, v):
        # Selectors: the uppermost bit of a nibble is set where the code is another quarter's
        s0, s1 = u32(w | (v & eights)), u32(w ^ (~(w & v) & eights))
        s2, s3 = u32(w | (~v & eights)), u32(w ^ ((~w | v) & eights))
        return (first0(s0) + first1(s1) + first2(s2) + first3(s3)
                + second0(s0) + second1(s1) + second2(s2) + second3(s3))
    return PairTerms(rest, of_codes)


def signed8(table):
    """`words.Primitives.signed8`: an entry is a word of eight nibbles, which are selectors of prmt from the three levels (bits
    0..1) and, where the sign is set in bit 2, from their negatives."""
    def make(levels, parity):
        values, entries = np.unique(levels, return_inverse=True)
        assert values.shape == (3,) and levels.shape[1:] == (8,), (values, levels.shape)
        positive, b = (np.array([*(sign * values), 0], np.int8).view(np.uint32) for sign in (1, -1))
        loaded, b = constant(positive), b[0]  # as in lookup_nibbles
        entry = table((entries.reshape(levels.shape) << 4 * np.arange(8)).sum(axis=1).astype(np.uint32))
        odd = u32(0x2a if parity else 0xaa)

        @device
        def eight(t, i, s):
            # Bit k of s to bit 2 of nibble k: in the sums of copies only every fourth bit is wanted, and no carry reaches one.
            even_bits = u32((u32(s) & u32(0x55)) * u32(0x00104104) & u32(0x04040404))
            odd_bits = u32((u32(s) & odd) * u32(0x00820820) & u32(0x40404040))
            if parity:
                signs = u32(even_bits | odd_bits)  # nibble 7 of the product below is the sum of the nibbles, signs in bit 2
                w = u32(u32(entry(t, i32(i)) ^ signs) ^ u64(signs) * u64(0x11111111) & u64(0x40000000))
            else:
                w = u32(u32(entry(t, i32(i)) ^ even_bits) ^ odd_bits)
            a = loaded(0)
            return i32(prmt(a, b, w)), i32(prmt(a, b, u32(w >> u32(16))))
        return eight
    return make


def primitives(table=None):
    """table: `words.Primitives.table`, where codebooks lie; without one they are arrays beside the code."""
    native = {"table": table} if table else {}
    portable = words.primitives(device, f16=f16_to_f32, f32=as_f32, mul=mul, shr=shr,
                                byte=device(lambda w, i: prmt(w, u32(0), u32(i) | u32(0x4440))),
                                field=field, half=device(lambda w, i: prmt(w, u32(0), u32(i) * u32(0x22) + u32(0x4410))),
                                odd_bytes=device(lambda v, w: prmt(u32(v), u32(w), u32(0x7351))),
                                top_bytes=device(lambda a, b, c, d: prmt(prmt(a, b, u32(0x73)), prmt(c, d, u32(0x73)),
                                                                         u32(0x5410))),
                                distances=device(lambda w: distances4(w, u32(SUMMED) * ONES)),
                                lookup_nibbles=lookup_nibbles, lookup_codes=lookup_codes, **native)
    return portable._replace(signed8=signed8(portable.table))


PRIMITIVES = primitives()


@lru_cache(None)
def unpacker(name: str) -> words.Unpacker:
    """The unpacking of a quantized format on the device."""
    fmt = format_of(name)
    return fmt.unpack(PRIMITIVES, *loads(fmt))


class Tables(NamedTuple):
    """An `Unpacker` whose codebooks lie in shared memory, where lanes that look up different entries do not wait for each
    other."""
    unpacker: words.Unpacker
    n_entries: int            # words of all codebooks, at the beginning of the shared array
    entry: Callable           # (i) -> one of them, uint32; None without any


def _with_tables(fmt: Format, loads, load) -> Tables:
    """load: (t, i) -> word i of the shared array that begins with the codebooks."""
    parts = []

    def table(entries):
        first = sum(map(len, parts))
        parts.append(np.asarray(entries, np.uint32))

        @device
        def entry(t, i):
            return u32(load(t, first + i))
        return entry

    unpack = fmt.unpack(primitives(table), *loads)
    return Tables(unpack, sum(map(len, parts)), constant(np.concatenate(parts)) if parts else None)


@lru_cache(None)
def shared_unpacker(name: str, first: int = 0) -> Tables:
    """Weights in the same shared array of uint32 as the codebooks, which begin at its word `first`: t = (shared, base,
    row) of `quarter_loads`."""
    @device
    def load(t, i):
        return lds(t[0], first + i)

    fmt = format_of(name)
    return _with_tables(fmt, quarter_loads(fmt), load)


@lru_cache(None)
def float_values(name: str):
    """(t, q) -> the float32 values of columns 8q..8q+7, of a float format on the device."""
    fmt = format_of(name)
    return fmt.values(PRIMITIVES, loads(fmt)[0])


@lru_cache(None)
def staged_values(name: str, rows: int):
    """The same of a tile of so many rows in a shared array of uint32."""
    fmt = format_of(name)
    return fmt.values(PRIMITIVES, _loads(fmt, lds, shared_piece_word, rows)[0])
