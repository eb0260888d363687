"""Weight tiles on the device: the unpackings of quant/ over global or shared memory,
with PTX where it has an instruction for them."""
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ...quant import tile, words
from ...quant.formats import Format, format_of
from ...quant.words import ONES, SUMMED, u64
from .ptx import (add2, as_f32, before_blackwell, constant, device, distances4, dot2, dot4, dp4a, f16_to_f32, fma2, hidden, i32,
                  implied, ldc, ldc4, lds, lds4, mad, mul, prmt, rotate, shr, u32)


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


@device
def upper(w):
    """w >> 16, as a product."""
    return dot2(w, u32(0x0100), u32(0))


def lookup_nibbles(levels):
    """(w) -> int32 words of the levels of its low nibbles, and of its high ones: four nibbles at a time from both halves of the
    table by prmt, then a choice by the nibbles' bit 3; of up to eight levels by one prmt. Of two constants of an instruction one
    is hidden: one that the assembler knows it moves to a register anew for every instruction, which made a fifth of them."""
    table = np.resize(np.asarray(levels, np.int8), 16).view(np.uint32)
    t1, t3, word = u32(table[1]), u32(table[3]), hidden((table[0], table[2], 0x44444444))

    @device
    def few(w):
        w, t0 = u32(w), word(0)
        a, c = prmt(t0, t1, w), prmt(t0, t1, upper(w))
        return i32(prmt(a, c, u32(0x6420))), i32(prmt(a, c, u32(0x7531)))

    @device
    def sixteen(w):
        w, t0, t2, fours = u32(w), word(0), word(1), word(2)
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
    word = hidden((b, c, d, 0x64646464))  # as in lookup_nibbles

    @device
    def two(w):
        y = add2(w, minus_middle)
        return fma2(fma2(fma2(y, a, word(0)), y, word(1)), y, word(2))

    @device
    def four(w):
        w, exponents = u32(w), word(3)
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
    levels, ones = np.array(levels), u32(0xffffffff)
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
    # The nibbles of ~w count the last half from its end, and their bit 3 is set where those of w do not
    tables = [table.astype(np.int8)[::1 - 2 * i].copy().view(np.uint32) for i, table in enumerate(tables)]
    # Of two constants of a prmt one is hidden, as in lookup_nibbles
    word = hidden(table[0] for table in tables)
    first, last = u32(tables[0][1]), u32(tables[-1][1])

    @device
    def one(w):
        w, t = u32(w), word(0)
        return i32(prmt(t, first, w)), i32(prmt(t, first, upper(w)))

    @device
    def two(w):
        x, y = one(w)
        t = word(1)
        if before_blackwell():
            v, u = dot2(w, u32(0x00ff), ones), dot2(w, u32(0xff00), ones)
        else:  # a register less
            v = u32(~u32(w))
            u = upper(v)
        return x, y, i32(prmt(t, last, v)), i32(prmt(t, last, u))
    return Terms(len(tables), rest, one if len(tables) == 1 else two)


def lookup_each(levels):
    """`words.Primitives.lookup_each` by `terms`, whose bytes a dot product adds."""
    n_terms, constant, of_nibbles = terms(levels)
    assert n_terms == 2, levels

    @device
    def level(words, n):
        place = i32(u32(1) << u32(8 * (n & 3)))
        first, last = (words[1], words[3]) if n & 4 else (words[0], words[2])
        return dp4a(first, place, dp4a(last, place, i32(constant)))
    return of_nibbles, level


@device
def quarters(w, v):
    """Selectors of prmt, one for each quarter of a table of 32: codes are the nibbles of w and, in the uppermost bits of the
    nibbles of v, their fifth bits. A selector's uppermost bit is set where the code is another quarter's."""
    eights = u32(0x88888888)
    return u32(w | (v & eights)), implied(w, v, eights), u32(w | (~v & eights)), u32(w ^ ((~w | v) & eights))


def five_bit_terms(levels):
    """(w, v) as of `quarters` -> for each of four terms, whose sum is the level, int32 words of the codes in the low half and in
    the high half. Where the code is another quarter's, a term is the sign of its quarter's: -1 of the first two."""
    tables = np.array(levels) + np.repeat([1, 2], 16)
    assert tables.min() >= -128 and tables[:16].max() < 0 <= tables[16:].min(), levels
    tables = tables.astype(np.int8).view(np.uint32).reshape(4, 2)
    word, (first, second, third, fourth) = hidden(tables[:, 0]), map(u32, tables[:, 1])  # as in lookup_nibbles

    @device
    def terms_of(a, b, c, d):
        return (i32(prmt(word(0), first, a)), i32(prmt(word(1), second, b)), i32(prmt(word(2), third, c)),
                i32(prmt(word(3), fourth, d)))

    @device
    def of_codes(w, v):
        a, b, c, d = quarters(w, v)
        return terms_of(a, b, c, d), terms_of(upper(a), upper(b), upper(c), upper(d))
    return of_codes


def pairs_of_codes(levels):
    """(w, v) as of `quarters` -> int32 words of pairs of levels, of two codes each. levels: 32 pairs of eight int8 levels: a code
    is first looked up as two counts of three bits, of which one word is that of four quarters which is not 0."""
    eight, counts = np.unique(levels, return_inverse=True)
    counts = counts.reshape(4, 8, 2).astype(np.uint8)
    tables, eight = (counts[..., 0] | counts[..., 1] << 4).view(np.uint32), eight.astype(np.int8).view(np.uint32)
    # as in lookup_nibbles; a sum with a hidden 1 as a factor is made by the pipe of products
    word = hidden((*tables[:, 0], eight[0], 1))
    (first, second, third, fourth), last = map(u32, tables[:, 1]), u32(eight[1])

    @device
    def pairs(a, b, c, d):
        a, b = i32(prmt(word(0), first, a)), i32(prmt(word(1), second, b))
        c, d, one = i32(prmt(word(2), third, c)), i32(prmt(word(3), fourth, d)), i32(word(5))
        w = u32(mad(a, one, mad(b, one, mad(c, one, d))))
        return i32(prmt(word(4), last, w)), i32(prmt(word(4), last, upper(w)))

    @device
    def of_codes(w, v):
        a, b, c, d = quarters(w, v)
        return pairs(a, b, c, d) + pairs(upper(a), upper(b), upper(c), upper(d))
    return of_codes


def signed8(table):
    """`words.Primitives.signed8`: an entry is a word of eight nibbles, which are selectors of prmt from the three levels (bits
    0..1) and, where the sign is set in bit 2, from their negatives."""
    def make(levels, parity):
        values, entries = np.unique(levels, return_inverse=True)
        assert values.shape == (3,) and levels.shape[1:] == (8,), (values, levels.shape)
        positive, b = (np.array([*(sign * values), 0], np.int8).view(np.uint32) for sign in (1, -1))
        word, b = hidden(positive), b[0]  # as in lookup_nibbles
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
            a = word(0)
            return i32(prmt(a, b, w)), i32(prmt(a, b, upper(w)))
        return eight
    return make


def primitives(table=None):
    """table: `words.Primitives.table`, where codebooks lie; without one they are arrays beside the code."""
    native = {"table": table} if table else {}
    portable = words.primitives(device, f16=f16_to_f32, f32=as_f32, mul=mul, shr=shr,
                                byte=device(lambda w, i: prmt(w, u32(0), u32(i) | u32(0x4440))),
                                weighed=device(lambda w, i, factor, more: dot4(w, u32(u32(factor) << u32(8 * i)),
                                                                               i32(more))),
                                signed_byte=device(lambda w, i: dp4a(i32(w), i32(u32(1) << u32(8 * i)), i32(0))),
                                half_plus=device(lambda w, i, more: dot2(w, u32(u32(1) << u32(8 * i)), u32(more))),
                                bytes_of=prmt, field=field,
                                half=device(lambda w, i: prmt(w, u32(0), u32(i) * u32(0x22) + u32(0x4410))),
                                odd_bytes=device(lambda v, w: prmt(u32(v), u32(w), u32(0x7351))),
                                top_bytes=device(lambda a, b, c, d: prmt(prmt(a, b, u32(0x73)), prmt(c, d, u32(0x73)),
                                                                         u32(0x5410))),
                                distances=device(lambda w: distances4(w, u32(SUMMED) * ONES)),
                                lookup_nibbles=lookup_nibbles, lookup_each=lookup_each, lookup_codes=lookup_codes, **native)
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

    @property
    def n_words(self) -> int:
        """Of the codebooks, up to the next 16 bytes."""
        return -(-self.n_entries // 4) * 4


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
