"""The interleaved types of ik_llama.cpp (`Q4_K_R4`, `IQ4_XS_R8`): R rows of a plain type, their bits mixed block by block.

They are read as rows of their plain type: `Interleaved.plain_rows` puts the bits back. Each bit of a plain row is a bit of the
group of R rows, or the sum of two modulo 2. A type states where that bit is (a `Place`); a program of byte operations follows.
Facts: ik_llama.cpp's `iqk_quantize.cpp`.
"""
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from .entries import jit
from .formats import FORMATS, Format
from .layouts import layout

LANES = 64  # blocks whose bits are moved at once, by vector instructions
HEADER = "header"  # the field in front of a group's blocks
Place = tuple[str, int, int]  # field, byte and bit of a group's block
Source = Callable[[int, int, int], tuple[Place, ...]]  # (row k of the group, n, bit) of a plain field -> places, to be summed


@dataclass(frozen=True)
class Interleaved:
    """A group of n_rows rows is their headers, then blocks of as many columns as the plain type's."""
    name: str
    type_id: int                        # in files
    plain: Format
    n_rows: int                         # of a group
    fields: tuple[tuple[str, int], ...]  # of a group's block: (name, bytes), in file order
    sources: dict[str, Source]          # by plain field, headers included
    header_bytes: int                   # of a row
    type_size: int                      # bytes of a row's block

    @cached_property
    def programs(self) -> tuple[np.ndarray, np.ndarray]:
        """How the plain rows' headers, and their blocks, are made: int32 [n, 6] of (row, byte of it, byte of the group's headers
        and block, left shift, right shift, mask). What goes to one byte is summed modulo 2."""
        starts, at = {HEADER: 0}, self.n_rows * self.header_bytes
        for field, size in self.fields:
            starts[field], at = at, at + size
        return self._program(self.plain.header, starts), self._program(self.plain.fields, starts)

    def source(self, k: int, field: str, i: int, bit: int) -> tuple[Place, ...]:
        """Where bit `bit` of byte i of a plain field of row k is in the group."""
        return self.sources[field](k, *layout(self.plain.name, field).place(i, bit))

    def _program(self, fields, starts: dict[str, int]) -> np.ndarray:
        masks: dict[tuple[int, int, int, int], int] = {}
        places = product(range(self.n_rows), [(field, i) for field, size in fields for i in range(size)], range(8))
        offsets = dict(zip((field for field, _ in fields), np.cumsum([0, *(size for _, size in fields)]).tolist()))
        for k, (field, i), bit in places:
            for source, byte, place in self.source(k, field, i, bit):
                key = k, offsets[field] + i, starts[source] + byte, bit - place
                masks[key] = masks.get(key, 0) | 1 << bit
        return np.array([(k, to, source, max(shift, 0), max(-shift, 0), mask) for (k, to, source, shift), mask in masks.items()],
                        np.int32).reshape(-1, 6)

    def row_bytes(self, n_cols: int, name: str = "tensor") -> int:
        """Bytes of a group of rows of n_cols values over its rows."""
        self.plain.row_bytes(n_cols, name)
        return self.header_bytes + n_cols // self.plain.block_size * self.type_size

    def plain_rows(self, rows: np.ndarray, n_cols: int) -> Callable[[int, int], np.ndarray]:
        """rows: uint8 [rows, row_bytes], groups as in the file. Returns (first, last) -> these rows of the plain type, uint8."""
        groups = rows.reshape(len(rows) // self.n_rows, -1)

        def plain(first: int, last: int) -> np.ndarray:
            start, end = first // self.n_rows, -(-last // self.n_rows)
            out = np.zeros((end - start, self.n_rows, self.plain.row_bytes(n_cols)), np.uint8)
            _run(*self.programs, groups[start:end], out, n_cols // self.plain.block_size,
                 self.n_rows * self.header_bytes, self.n_rows * self.type_size, self.plain.header_bytes, self.plain.type_size)
            return out.reshape(-1, out.shape[-1])[first - start * self.n_rows:last - start * self.n_rows]
        return plain


@jit
def _run(header_program, block_program, groups, out, n_blocks, n_header, n_block, header_bytes, type_size):
    """LANES blocks at a time: byte i of them in row i of `taken`, behind the group's headers; byte i of their plain rows, row by
    row, in row i of `made`."""
    taken = np.empty((n_header + n_block, LANES), np.uint8)
    made = np.empty((out.shape[1] * type_size, LANES), np.uint8)
    for g in range(len(groups)):
        group, rows = groups[g], out[g]
        for i in range(len(header_program)):
            k, to, source, left, right, mask = header_program[i]
            rows[k, to] ^= (group[source] << left >> right) & mask
        for i in range(n_header):
            taken[i] = group[i]
        for first in range(0, n_blocks, LANES):
            n = min(LANES, n_blocks - first)
            for lane in range(n):
                at = n_header + (first + lane) * n_block
                for i in range(n_block):
                    taken[n_header + i, lane] = group[at + i]
            made[:] = 0
            for i in range(len(block_program)):
                k, to, source, left, right, mask = block_program[i]
                a, b = taken[source], made[k * type_size + to]
                up, down, bits = np.uint8(left), np.uint8(right), np.uint8(mask)
                for lane in range(LANES):
                    b[lane] ^= np.uint8(np.uint8(np.uint8(a[lane] << up) >> down) & bits)
            for k in range(len(rows)):
                for lane in range(n):
                    at = header_bytes + (first + lane) * type_size
                    for i in range(type_size):
                        rows[k, at + i] = made[k * type_size + i, lane]


# Where a group has a bit: (row k, n, bit), n and bit as `layouts.layout` gives them -> places

def items(field, size=1):
    """`size` bytes of each row."""
    return lambda k, n, bit: ((field, size * k + n, bit),)


def in_turn(field, run=1, n_rows=4):
    """`run` bytes of each row, then the next ones."""
    return lambda k, n, bit: ((field, run * (n_rows * (n // run) + k) + n % run, bit),)


def packed(field, size, width, n_rows=4, first=0):
    """`width` bits of scales, from bit `first` of them on, in turn; those of scale p of all in byte p % size."""
    def places(k, n, bit):
        p = n_rows * n + k
        return (field, p % size, width * (p // size) + bit - first),
    return places


def split(low, high, first=4):
    """The bits below `first`; the others."""
    return lambda k, n, bit: (low if bit < first else high)(k, n, bit)


def nibbles(k, n, bit):
    return ("qs", 64 * (n // 32) + 32 * (n // 4 % 2) + 16 * (n // 16 % 2) + 4 * k + n % 4, 4 * (n // 8 % 2) + bit),


def nibble_pairs(k, n, bit):
    """Whole bytes of eight rows."""
    return in_turn("qs", 4, 8)(k, n % 16, 4 * (n // 16) + bit)


def above_nibbles(width, size):
    """`width` bits above the nibbles; field qh of `size` bytes."""
    def places(k, n, bit):
        _, byte, high = nibbles(k, n, 0)[0]
        return ("qh", byte % size, width * (byte // size) + high + bit),
    return places


def four_columns(field, order=(0, 4, 8, 12)):
    """Two bits of columns so far apart."""
    return lambda k, n, bit: ((field, 16 * (n // 16) + 4 * k + n % 4, 2 * order.index(n % 16 // 4 * 4) + bit),)


def eight_columns(*order):
    """A bit of columns so far apart."""
    return lambda k, n, bit: (("qh", 16 * (n // 32) + 4 * k + n % 4, order.index(n % 32 // 4 * 4)),)


def selecting(k, n, bit):
    return ("x", 4 * (n % 2) + k, n // 2),


def six_bit_minima(k, n, bit):
    p, minimum = 4 * (n % 8) + k, n // 8
    return ("lo", p, 4 * minimum + bit) if bit < 4 else ("hi", p % 16, 4 * (p // 16) + 2 * minimum + bit - 4),


def signs_and_scale(k, ib, at):
    """Bit `at` of the word of 32 columns: four times seven signs, four bits of a scale. sas: bytes of t and a bit of the scale,
    the lowest; the signs are t ^ t >> 1."""
    if at >= 28:
        return ("sas", 16 * ib + 4 * k + at - 28, 0),
    byte, sign = 16 * ib + 4 * k + at // 7, at % 7
    return tuple(("sas", byte, bit) for bit in (sign, sign + 1) if bit)


def iq2_xxs(k, n, bit):
    ib, byte = divmod(n, 8)
    return signs_and_scale(k, ib, 8 * (byte - 4) + bit) if byte >= 4 else (("qs", 16 * ib + 4 * k + byte, bit),)


def iq2_xs(k, n, bit):
    """16 bits: an entry in nine, and t above, where the plain type has the signs, t ^ t << 1."""
    byte = 8 * (4 * (n // 8) + k) + n % 8
    return tuple(("qs", byte, b) for b in ((bit, bit - 1) if n % 2 and bit > 1 else (bit,)))


A, B, C = (0, 4, 8, 12, 16, 20, 24, 28), (0, 8, 4, 12, 16, 24, 20, 28), (0, 8, 16, 24, 4, 12, 20, 28)
INTERLEAVED: dict[str, Interleaved] = {}


def _row(name: str, type_id: int, fields: str, header=None, plain=None, **sources: Source) -> None:
    """Enters a type. fields: "d:8 qs:64" of a group's block. header: bytes of a row's, where they are not the plain type's.
    sources: by plain field; without one, items of the group's field of that name."""
    fmt, n_rows = FORMATS[plain or name.rpartition("_R")[0]], int(name.rpartition("_R")[2])
    sizes = tuple((field, int(size)) for field, size in (f.split(":") for f in fields.split()))
    of_header = {field: items(HEADER, size) for field, size in fmt.header}
    of_blocks = {field: items(field, size) for field, size in fmt.fields} | sources
    header = fmt.header_bytes if header is None else header
    type_size = sum(size for _, size in sizes) // n_rows
    assert plain or header or type_size == fmt.type_size, name
    INTERLEAVED[name] = Interleaved(name, type_id, fmt, n_rows, sizes, of_header | of_blocks, header, type_size)


SH, SL, IN_TURN = packed("sh", 16, 2), packed("sl", 32, 4), in_turn("scales")

_row("Q4_0_R8",    202, "d:16 qs:128",      qs=nibble_pairs)
_row("Q5_0_R4",    206, "d:8 qh:16 qs:64",  qs=nibbles, qh=above_nibbles(1, 16))
_row("Q6_0_R4",    233, "d:8 qh:32 qs:64",  qs=nibbles, qh=above_nibbles(2, 32))
_row("Q8_0_R8",    208, "d:16 qs:256",      qs=in_turn("qs", 4, 8))
_row("IQ4_NL_R4",  220, "d:8 qs:64",        qs=nibbles)
_row("MXFP4_R8",   353, "e:8 qs:128",       qs=nibble_pairs)
_row("Q2_K_R4",    210, "d:8 dmin:8 scales:64 qs:256",          scales=IN_TURN, qs=four_columns("qs"))
_row("Q3_K_R4",    211, "d:8 hi:16 lo:32 qh:128 qs:256",
     scales=split(packed("lo", 32, 4), packed("hi", 16, 2, first=4)), hmask=eight_columns(*A), qs=four_columns("qs"))
_row("Q4_K_R4",    212, "d:8 dmin:8 hi:16 lo:32 qs:512",        scales=six_bit_minima, qs=nibbles)
_row("Q5_K_R4",    213, "d:8 dmin:8 hi:16 lo:32 qh:128 qs:512", scales=six_bit_minima, qs=nibbles, qh=eight_columns(*B))
_row("Q6_K_R4",    214, "d:8 scales:64 qh:256 qs:512",          scales=IN_TURN, ql=nibbles, qh=four_columns("qh", (0, 8, 4, 12)))
_row("IQ2_XXS_R4", 216, "d:8 sas:128 qs:128",                   qs=iq2_xxs)
_row("IQ2_XS_R4",  217, "d:8 qs:256 scales:32",                 qs=iq2_xs, scales=IN_TURN)
_row("IQ2_S_R4",   222, "d:8 qs:128 qh:32 signs:128 scales:32",
     qs=in_turn("qs", 4), signs=in_turn("signs", 4), qh=in_turn("qh"), scales=IN_TURN)
_row("IQ3_XXS_R4", 218, "d:8 sas:128 qs:256",
     qs=in_turn("qs", 8), scales=lambda k, n, bit: signs_and_scale(k, n // 4, 8 * (n % 4) + bit))
_row("IQ3_S_R4",   221, "d:8 qs:256 qh:32 signs:128 scales:16", qh=in_turn("qh"), scales=packed("scales", 16, 4),
     qs=lambda k, n, bit: (("qs", 32 * (n // 8) + 8 * (n % 4) + n // 4 % 2 * 4 + k, bit),),
     signs=lambda k, n, bit: (("signs", 4 * (4 * (n // 4) + k) + bit % 4, 2 * (n % 4) + bit // 4),))
_row("IQ1_S_R4",   219, "block:192", header=2, d=items(HEADER, 2),
     qs=lambda k, n, bit: (("block", 24 * (n // 4) + 4 * (n % 4) + k, bit),),
     qh=lambda k, n, bit: (("block", 24 * (n // 2) + 16 + 2 * k + n % 2, bit),))
_row("IQ1_M_R4",   229, "block:224", plain="IQ1_M_R1", scales=lambda k, n, bit: (("block", 28 * n + 24 + k, bit),),
     qs=lambda k, n, bit: (("block", 28 * (n // 4) + 4 * (n % 4) + k, bit),),
     qh=lambda k, n, bit: (("block", 28 * (n // 2) + 16 + 4 * (n % 2) + k, bit),))
_row("IQ4_XS_R8",  223, "d:16 hi:16 lo:32 qs:1024",             scales_h=packed("hi", 16, 2, 8), scales_l=packed("lo", 32, 4, 8),
     qs=lambda k, n, bit: (("qs", 128 * (n // 32) + 32 * (n % 32 // 8) + 4 * k + n % 4, 4 * (n // 4 % 2) + bit),))
_row("IQ2_K_R4",   337, "d:8 x:8 sl:32 qs:256",                 x=selecting, sc=SL, qs=four_columns("qs"))
_row("IQ3_K_R4",   338, "d:8 x:8 sh:8 sl:32 qs:256 qh:128",
     x=selecting, sh=packed("sh", 8, 1), sl=SL, qs=four_columns("qs"), qh=eight_columns(*A))
_row("IQ4_K_R4",   339, "d:8 x:8 sh:16 sl:32 qs:512",           x=selecting, sh=SH, sl=SL, qs=nibbles)
_row("IQ5_K_R4",   340, "d:8 x:8 sh:16 sl:32 qs:512 qh:128",    x=selecting, sh=SH, sl=SL, qs=nibbles, qh=eight_columns(*C))
_row("IQ4_KS_R4",  344, "scales:32 qs:512",                     sc=IN_TURN, qs=nibbles)
_row("IQ5_KS_R4",  352, "scales:32 qs:512 qh:128",              sc=IN_TURN, qs=nibbles, qh=eight_columns(*C))
