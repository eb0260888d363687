"""The format table: one row per GGUF tensor type. Everything about a type is looked up here, by name or by type id."""
from dataclasses import dataclass
from functools import cached_property
from math import prod
from collections.abc import Callable

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from . import floats, fp4, i_quants, ik_quants, k_quants, legacy, ternary
from .words import Unpacker, unpacker

CHUNK = 256  # columns of a row that are unpacked together; every block size divides it


@dataclass(frozen=True)
class Format:
    """A tensor type. Quantized ones unpack chunks of 256 columns to
    value[c] = d[c / group] * isc[c / sub] * level[c] - m[c / group] * imin[c / sub]   (order and rounding: `words.Unpacker`)."""
    name: str
    block_size: int                 # columns in a block
    fields: tuple                   # of (name, bytes): a block's fields, in file order
    header: tuple                   # of a row's, before its blocks; in a tile before those of each chunk. Then a block is a chunk
    planes: tuple = ()              # of tuples of names: the fields' order in a tile; a plane holds, block by block, its fields
    parts: Callable | None = None   # quantized: (Primitives, ldw, ld4, ld2) -> words.Parts; the loads: `tile.loads`
    values: Callable | None = None  # float: (Primitives, ldw) -> device function (t, q) -> 8 float32, columns 8q..8q+7
    zero: int = 0                   # level = code - zero
    sub: int = 0                    # columns with one integer scale and minimum
    group: int = 0                  # columns with one float scale and minimum
    max_level: int = 0              # bounds of |level|, |isc| and |imin|; a format without minima has max_imin = 0
    max_isc: int = 0
    max_imin: int = 0
    dtype: str | None = None        # numpy's name of a plain type's values
    own_id: int | None = None       # of a type that the package gguf does not know

    @cached_property
    def type_id(self) -> int:
        """In files."""
        return GGMLQuantizationType[self.name] if self.own_id is None else self.own_id

    @cached_property
    def type_size(self) -> int:
        """Bytes in a block: the sum of its fields."""
        return sum(size for _, size in self.fields)

    @cached_property
    def header_bytes(self) -> int:
        return sum(size for _, size in self.header)

    @property
    def is_in_files(self) -> bool:
        """Not only what interleaved rows are read as."""
        return self.name != "IQ1_M_R1"

    @property
    def is_quantized(self) -> bool:
        return self.parts is not None

    def unpack(self, p, ldw, ld4, ld2) -> Unpacker:
        """The unpacking of a quantized format for a target: its `Primitives`, and loads as those of `tile.loads`."""
        assert self.parts is not None, self.name
        return unpacker(p, self.zero, self.parts(p, ldw, ld4, ld2), self.sub)

    @property
    def has_min(self) -> bool:
        return self.max_imin > 0

    def row_bytes(self, n_cols: int, name: str = "tensor") -> int:
        """Bytes of a row of n_cols values in the file: whole blocks, or the tensor is refused by name."""
        if n_cols % self.block_size:
            raise ValueError(f"{name}: {self.name} rows must be a multiple of {self.block_size} values, got {n_cols}")
        return self.header_bytes + n_cols // self.block_size * self.type_size

    # A row's chunk in a tile: `chunk_bytes` = 16 n_pieces + 4 n_words + 2 n_halves, in piece order.

    @cached_property
    def chunk_bytes(self) -> int:
        return self.header_bytes + CHUNK // self.block_size * self.type_size

    @property
    def n_pieces(self) -> int:
        return self.chunk_bytes // 16

    @property
    def n_words(self) -> int:
        return self.chunk_bytes % 16 // 4

    @property
    def n_halves(self) -> int:
        return self.chunk_bytes % 4 // 2

    @cached_property
    def piece_order(self) -> np.ndarray:
        """int64 [chunk_bytes]: byte i of a chunk in piece order is byte piece_order[i] of the chunk in the file, behind the row's
        header if there is one."""
        offsets, offset = {}, 0
        for field, size in (*self.header, *self.fields):
            offsets[field] = range(offset, offset + size)
            offset += size
        order = np.array([block * self.type_size + byte for plane in self.planes for block in range(CHUNK // self.block_size)
                          for field in plane for byte in offsets[field]])
        assert np.array_equal(np.sort(order), np.arange(self.chunk_bytes)), self.name
        order.setflags(write=False)
        return order


def check_bytes(fmt, data: np.ndarray, shape: tuple[int, ...], name: str) -> np.ndarray:
    """The bytes of a tensor [..., n_cols] as uint8 [n_rows, row_bytes], without a copy; refuses another number of them. fmt: a
    `Format`, or what has its `name` and `row_bytes`."""
    n_rows, row_bytes = prod(shape[:-1]), fmt.row_bytes(shape[-1], name)
    data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    if data.size != n_rows * row_bytes:
        raise ValueError(f"{name}: {fmt.name} of shape {tuple(shape)} takes {n_rows * row_bytes} bytes, got {data.size}")
    return data.reshape(n_rows, row_bytes)


FORMATS: dict[str, Format] = {}


def _row(name, block_size, fields, planes="", parts=None, *numbers, header="", **kwargs):
    """Enters a type. fields: "d:2 qs:16" in file order; planes: "qs d+m" in tile order, fields joined by + alternate block by
    block. header: as fields, of a row."""
    header, fields = (tuple((field, int(size)) for field, size in (f.split(":") for f in part.split())) for part in
                      (header, fields))
    fmt = Format(name, block_size, fields, header, tuple(tuple(plane.split("+")) for plane in planes.split()), parts,
                 **dict(zip(("zero", "sub", "group", "max_level", "max_isc", "max_imin"), numbers)), **kwargs)
    assert name not in FORMATS, name
    assert fmt.own_id is not None or (fmt.block_size, fmt.type_size) == GGML_QUANT_SIZES[GGMLQuantizationType[name]], name
    assert not header or block_size == CHUNK, name
    FORMATS[name] = fmt


# name     block  fields in file order                    planes of a tile          parts            zero, sub, group,
#                                                                                                    |level|, |isc|, |imin|
_row("F32",       1, "value:4",                           "value",                  values=floats.f32, dtype="float32")
_row("F16",       1, "value:2",                           "value",                  values=floats.f16, dtype="float16")
_row("BF16",      1, "value:2",                           "value",                  values=floats.bf16)
_row("Q4_0",     32, "d:2 qs:16",                         "qs d",                   legacy.q4_0,      8, 32,  32,   8,   1)
_row("Q4_1",     32, "d:2 m:2 qs:16",                     "qs d+m",                 legacy.q4_1,      0, 32,  32,  15,   1,  1)
_row("Q5_0",     32, "d:2 qh:4 qs:16",                    "qs qh d",                legacy.q5_0,     16, 32,  32,  16,   1)
_row("Q5_1",     32, "d:2 m:2 qh:4 qs:16",                "qs qh d+m",              legacy.q5_1,      0, 32,  32,  31,   1,  1)
_row("Q8_0",     32, "d:2 qs:32",                         "qs d",                   legacy.q8_0,      0, 32,  32, 128,   1)
_row("Q2_K",    256, "scales:16 qs:64 d:2 dmin:2",        "qs scales d dmin",       k_quants.q2_k,    0, 16, 256,   3,  15, 15)
_row("Q3_K",    256, "hmask:32 qs:64 scales:12 d:2",      "qs hmask scales d",      k_quants.q3_k,    4, 16, 256,   4,  32)
_row("Q4_K",    256, "d:2 dmin:2 scales:12 qs:128",       "qs d dmin scales",       k_quants.q4_k,    0, 32, 256,  15,  63, 63)
_row("Q5_K",    256, "d:2 dmin:2 scales:12 qh:32 qs:128", "qs qh d dmin scales",    k_quants.q5_k,    0, 32, 256,  31,  63, 63)
_row("Q6_K",    256, "ql:128 qh:64 scales:16 d:2",        "ql qh scales d",         k_quants.q6_k,   32, 16, 256,  32, 128)
_row("IQ1_S",   256, "d:2 qs:32 qh:16",                   "qs qh d",                i_quants.iq1_s,   9, 32, 256,   9,  15)
_row("IQ1_M",   256, "qs:32 qh:16 scales:8",              "qs qh scales",           i_quants.iq1_m,   9, 16, 256,   9,  15)
_row("IQ2_XXS", 256, "d:2 qs:64",                         "qs d",                   i_quants.iq2_xxs, 0, 32, 256,  43,  31)
_row("IQ2_XS",  256, "d:2 qs:64 scales:8",                "qs scales d",            i_quants.iq2_xs,  0, 16, 256,  43,  31)
_row("IQ2_S",   256, "d:2 qs:32 signs:32 qh:8 scales:8",  "qs signs qh scales d",   i_quants.iq2_s,   0, 16, 256,  43,  31)
_row("IQ3_XXS", 256, "d:2 qs:64 scales:32",               "qs scales d",            i_quants.iq3_xxs, 0, 32, 256,  62,  31)
_row("IQ3_S",   256, "d:2 qs:64 qh:8 signs:32 scales:4",  "qs signs qh scales d",   i_quants.iq3_s,   0, 32, 256,  15,  31)
_row("IQ4_NL",   32, "d:2 qs:16",                         "qs d",                   legacy.iq4_nl,    0, 32,  32, 127,   1)
_row("IQ4_XS",  256, "d:2 scales_h:2 scales_l:4 qs:128",  "qs d scales_h scales_l", i_quants.iq4_xs,  0, 32, 256, 127,  32)
_row("TQ1_0",   256, "qs:48 qh:4 d:2",                    "qs qh d",                ternary.tq1_0,    1, 32, 256,   1,   1)
_row("TQ2_0",   256, "qs:64 d:2",                         "qs d",                   ternary.tq2_0,    1, 32, 256,   2,   1)
_row("MXFP4",    32, "e:1 qs:16",                         "qs e",                   fp4.mxfp4,        0, 32,  32,  12,   1)
_row("NVFP4",    64, "d:4 qs:32",                         "qs d",                   fp4.nvfp4,        0, 16,  16,  12,   1)
_row("Q1_0",    128, "d:2 qs:16",                         "qs d",                   ternary.q1_0,     1, 32, 128,   1,   1)


def _own(own_id, *row):
    """Enters a type that gguf does not know. row: as of `_row`, with the header last where rows have one."""
    *values, header = row if isinstance(row[-1], str) else (*row, "")
    _row(*values, header=header, own_id=own_id)


# of ik_llama.cpp
_own(133, "Q6_0",     32, "d:2 qh:8 qs:16",                   "qs qh d",         ik_quants.q6_0,     32, 32,  32,  32,   1)
_own(137, "IQ2_K",   256, "d:2 x:2 sc:8 qs:64",               "qs sc d x",       ik_quants.iq2_k,     0, 16, 256,  31,   8)
_own(138, "IQ3_K",   256, "d:2 x:2 sh:2 sl:8 qs:64 qh:32",    "qs qh sl d x sh", ik_quants.iq3_k,     0, 16, 256,  63,  31)
_own(139, "IQ4_K",   256, "d:2 x:2 sh:4 sl:8 qs:128",         "qs d x sh sl",    ik_quants.iq4_k,     0, 16, 256, 127,  32)
_own(140, "IQ5_K",   256, "d:2 x:2 sh:4 sl:8 qs:128 qh:32",   "qs qh d x sh sl", ik_quants.iq5_k,     0, 16, 256, 126,  32)
_own(141, "IQ6_K",   256, "d:2 x:2 sc:16 qs:128 qh:64",       "qs qh sc d x",    ik_quants.iq6_k,     0, 16, 256, 127, 128)
_own(145, "IQ2_KS",  256, "x:2 sc:4 qs:64",                   "qs sc d x",       ik_quants.iq2_ks,    0, 32, 256,  31,  16, "d:2")
_own(156, "IQ3_KS",  256, "x:2 sc:4 qs:64 qh:32",             "qs qh sc d x",    ik_quants.iq3_ks,    0, 32, 256,  63,  16, "d:2")
_own(157, "IQ2_KL",  256, "x:2 sc:4 qs:64 qh:16",             "qs qh sc d x",    ik_quants.iq2_kl,    0, 32, 256,  63,  32, "d:2")
_own(144, "IQ4_KS",  256, "sc:8 qs:128",                      "qs sc d",         ik_quants.iq4_ks,    0, 32, 256, 127, 127, "d:4")
_own(146, "IQ4_KSS", 256, "qs:128",                           "qs d",            ik_quants.iq4_kss,   0, 32, 256, 127, 127, "d:4")
_own(152, "IQ5_KS",  256, "sc:8 qs:128 qh:32",                "qs qh sc d",      ik_quants.iq5_ks,    0, 32, 256, 126, 127, "d:4")
_own(158, "IQ1_KT",  256, "sh:8 ql:32 qh:16",                 "ql qh sh d",      ik_quants.iq1_kt,    0, 32, 256, 126, 127, "d:4")
_own(153, "IQ2_KT",  256, "sc:4 ql:64",                       "ql sc d",         ik_quants.iq2_kt,    0, 32, 256, 126, 127, "d:4")
_own(154, "IQ3_KT",  256, "sc:4 ql:64 qh:32",                 "ql qh sc d",      ik_quants.iq3_kt,    0, 32, 256, 126,  15, "d:4")
_own(155, "IQ4_KT",  256, "w:32 ql:64 qh:32",                 "ql qh w d",       ik_quants.iq4_kt,    0, 32, 256, 126,  64, "d:4")

# The rows of IQ1_M_R4 (`interleaved`), and with its id
_own(229, "IQ1_M_R1", 256, "qs:32 qh:16 scales:8",           "qs qh scales d",  i_quants.iq1_m_r1,   9, 16, 256,   9,  15, "d:2")

_row("I8",         1, "value:1", dtype="int8")
_row("I16",        1, "value:2", dtype="int16")
_row("I32",        1, "value:4", dtype="int32")
_row("I64",        1, "value:8", dtype="int64")
_row("F64",        1, "value:8", dtype="float64")


def format_of(type_: "Format | str | int", name: str = "tensor") -> Format:
    """The row of a type given as a row, a name ("Q4_K") or a GGUF type id. name: who asks, for the error."""
    if isinstance(type_, Format):
        return type_
    if isinstance(type_, str) and type_ in FORMATS:
        return FORMATS[type_]
    if not isinstance(type_, str) and type_ in _BY_ID:
        return _BY_ID[type_]
    known = ", ".join(f"{fmt.name} ({int(fmt.type_id)})" for fmt in FORMATS.values())
    raise ValueError(f"{name}: unknown tensor type {type_!r}; known: {known}")


_BY_ID = {int(fmt.type_id): fmt for fmt in FORMATS.values()}
