"""GGUF files (versions 2 and 3, little-endian), read by memory map: metadata, tensor table, and each tensor's bytes as they lie
in the file.

    with GGUFFile.open("model.gguf") as file:
        file.get("general.architecture", "str")       # 'llama'; a missing key or another type is a GGUFError
        file.tensors["token_embd.weight"]             # TensorInfo(name, shape, type, offset, n_bytes, part)
        file.data("token_embd.weight")                # uint8 [n_bytes], read-only, a view of the file

Layout of a file (integers little-endian; string = u64 length in bytes, then UTF-8):

    'GGUF'  u32 version  u64 n_tensors  u64 n_keys
    n_keys    x  string key   u32 type  value              array value = u32 element type, u64 count, elements
    n_tensors x  string name  u32 n_dims  u64 ne[n_dims]  u32 type  u64 offset from the data section
    zeros up to a multiple of general.alignment (32 if absent), then the data section; tensors start at multiples of it

Opening reads this header once and keeps keys, names and the places of values. Values are decoded when asked for, numbers as views
of the file. Every count, length and offset in the file is compared with the bytes that are there before anything is read or
allocated because of it. So a bad file costs no more than a good one of its size, and ends in one `GGUFError`, which names the
file, the key or tensor, what was found and what is allowed.
"""
import math
import mmap
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFValueType

from ..base.errors import UserError, quoted
from ..quant.formats import FORMATS
from ..quant.interleaved import INTERLEAVED

# Limits that the format itself sets.
MAX_KEY_BYTES = 65_535
MAX_TENSOR_NAME_BYTES = 64
# Our limits on counts, above what the largest models have. A header that reaches all of them takes 41 MiB of Python objects and
# 0.9 s (measured).
MAX_KEYS = 16_384
MAX_TENSORS = 65_536
MAX_NAMES_BYTES = 8 << 20  # keys and tensor names of one file together
MAX_STRINGS = 4 << 20  # elements of string arrays of one file together

DEFAULT_ALIGNMENT = 32
SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # length, key, type, value
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # length, name, n_dims, ne, type, offset

# Value types: name in errors and in `get`, numpy dtype of the stored number.
_NAMES = {
    GGUFValueType.UINT8: "u8", GGUFValueType.INT8: "i8", GGUFValueType.UINT16: "u16", GGUFValueType.INT16: "i16",
    GGUFValueType.UINT32: "u32", GGUFValueType.INT32: "i32", GGUFValueType.UINT64: "u64", GGUFValueType.INT64: "i64",
    GGUFValueType.FLOAT32: "f32", GGUFValueType.FLOAT64: "f64", GGUFValueType.BOOL: "bool", GGUFValueType.STRING: "str",
}
_DTYPES = {type: np.dtype("?" if name == "bool" else f"<{name[0]}{int(name[1:]) // 8}")
           for type, name in _NAMES.items() if name != "str"}
_KINDS = frozenset(_NAMES.values()) | {f"arr[{name}]" for name in _NAMES.values()}
_REQUIRED = object()
_NOTHING = np.empty(0, np.uint8)  # stands for the bytes of a file that is closed


class GGUFError(UserError):
    """A GGUF file that cannot be used, or a key that is missing or of another type. One line: file, key or tensor, found,
    allowed."""


class StringArray(Sequence[str]):
    """The strings of an array value, decoded together when the first is asked for.

    buffer: uint8 [n_bytes], per string a u64 length in bytes and its UTF-8, already checked to end where the buffer ends.
    Bytes that are not UTF-8 become backslash escapes, which keeps different strings different.
    """

    def __init__(self, buffer: np.ndarray, n_strings: int):
        self._buffer, self._n_strings = buffer, n_strings
        self._strings: list[str] | None = None

    def _decoded(self) -> list[str]:
        view = self._buffer.data  # before the question: another thread may let go of it
        if self._strings is None:
            strings, stop = [], 0
            for _ in range(self._n_strings):
                start = stop + 8
                stop = start + _U64.unpack_from(view, stop)[0]
                strings.append(str(view[start:stop], "utf-8", "backslashreplace"))
            self._strings, self._buffer = strings, _NOTHING
        return self._strings

    def __len__(self) -> int:
        return self._n_strings

    def __getitem__(self, index):
        return self._decoded()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded())

    def __repr__(self) -> str:
        return f"<StringArray of {self._n_strings} strings>"


class Type(NamedTuple):
    """Of a tensor. header_bytes: in front of each row. n_rows: so many rows are one group. plain: the type as which the rows of
    an interleaved one are read."""
    name: str
    block_size: int
    type_size: int
    header_bytes: int = 0
    n_rows: int = 1
    plain: str = ""

    @property
    def read_as(self) -> str:
        return self.plain or self.name


TYPES = {int(type): Type(type.name, *GGML_QUANT_SIZES[type]) for type in GGML_QUANT_SIZES}
TYPES |= {fmt.type_id: Type(fmt.name, fmt.block_size, fmt.type_size, fmt.header_bytes) for fmt in FORMATS.values()
          if fmt.is_in_files}
TYPES |= {t.type_id: Type(t.name, t.plain.block_size, t.type_size, t.header_bytes, t.n_rows, t.plain.name)
          for t in INTERLEAVED.values()}
REFUSED = {36: "I2_S of BitNet", 134: "IQ1_BN of BitNet", 135: "IQ2_BN of BitNet", 335: "IQ2_BN_R4 of BitNet",
           151: "Q8_KV of caches", 398: "Q8_KV_R8 of caches",
           **dict.fromkeys((97, 98, 99, 136, 147, 148, 149, 150), "which holds activations"),
           **{type_id: f"{name}, which is made in memory" for type_id, name in
              ((230, "BF16_R16"), (397, "Q8_K_R16"), (399, "Q8_K_R8"))}}


class TensorInfo(NamedTuple):
    """One row of the tensor table. shape: ne0, the contiguous dimension, first;
    offset: bytes from the start of file number `part`."""
    name: str
    shape: tuple[int, ...]
    type: Type
    offset: int
    n_bytes: int
    part: int


class _Entry(NamedTuple):
    """Where a metadata value lies: bytes start..stop of the file. length: elements of an array, None for a scalar."""
    type: GGUFValueType
    length: int | None
    start: int
    stop: int

    @property
    def kind(self) -> str:
        return _NAMES[self.type] if self.length is None else f"arr[{_NAMES[self.type]}]"


class Metadata(Mapping[str, Any]):
    """Key -> value, decoded on access: bool, int, float, str; arrays as read-only numpy views of the file,
    string arrays as `StringArray`."""

    def __init__(self, path: Path, buffer: np.ndarray, entries: dict[str, _Entry]):
        self._path, self._buffer, self._entries = path, buffer, entries
        self._arrays: dict[str, StringArray] = {}

    def __getitem__(self, key: str) -> Any:
        entry = self._entries[key]
        if key in self._arrays:
            return self._arrays[key]
        if self._buffer is _NOTHING:
            raise GGUFError(f"{self._path}: key {quoted(key)}: the file is closed")
        span = self._buffer[entry.start:entry.stop]
        if entry.type == GGUFValueType.STRING:
            if entry.length is None:
                return str(span.data, "utf-8", "backslashreplace")
            return self._arrays.setdefault(key, StringArray(span, entry.length))  # kept, so that it is decoded once
        values = span.view(_DTYPES[entry.type])
        return values if entry.length is not None else values.item()

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def raw(self, key: str) -> bytes:
        """Type and value of a key, as they lie in the file."""
        type, length, start, stop = self._entries[key]
        if length is not None:
            head = struct.pack("<IIQ", GGUFValueType.ARRAY, type, length)
        else:
            head = _U32.pack(type) + _U64.pack(stop - start) * (type == GGUFValueType.STRING)
        return head + self._buffer[start:stop].tobytes()

    @property
    def types(self) -> dict[str, GGUFValueType]:
        """Value type of each key; of arrays, the type of the elements."""
        return {key: entry.type for key, entry in self._entries.items()}

    def typed(self, key: str, kind: str, default: Any = _REQUIRED) -> Any:
        """See `GGUFFile.get`."""
        allowed = kind.replace("arr[int]", "arr[bool]|arr[u32]|arr[i32]").split("|")
        assert _KINDS.issuperset(allowed), f"unknown kind {kind!r}"
        entry = self._entries.get(key)
        if entry is None:
            if default is _REQUIRED:
                raise GGUFError(f"{self._path}: key {quoted(key)} is missing, must be there with a value of type "
                                f"{' or '.join(allowed)}")
            return default
        if entry.kind not in allowed:
            raise GGUFError(f"{self._path}: key {quoted(key)} is of type {entry.kind}, must be of type {' or '.join(allowed)}")
        return self[key]

    def close(self) -> None:
        self._buffer = _NOTHING
        self._arrays.clear()

    def __repr__(self) -> str:
        return f"<Metadata of {str(self._path)!r}: {len(self)} keys>"


class GGUFFile:
    """An open GGUF file, or all files of a split model. Open it with `GGUFFile.open`.

    path: the file opened; paths: all of them, by part. version and alignment: of the first part.
    metadata: key -> value (`Metadata`), of the first part; metadata_types: key -> GGUFValueType, of arrays the type of the
    elements.
    tensors: name -> `TensorInfo`, in file order, of all parts.
    The files must not be shortened while they are open.
    """

    def __init__(self, parts: list["_Part"], mapped: bool = True):
        first = parts[0]
        self.path, self.paths = first.path, tuple(part.path for part in parts)
        self.version, self.alignment = first.version, first.alignment
        self.metadata, self.metadata_types = first.metadata, first.metadata.types
        self.tensors: dict[str, TensorInfo] = {}
        for i, part in enumerate(parts):
            if len(self.tensors) + len(part.tensors) > MAX_TENSORS:
                raise part.error(f"parts 1 to {i + 1} have {len(self.tensors) + len(part.tensors)} tensors, "
                                 f"allowed are {MAX_TENSORS}")
            for tensor in part.tensors:
                if tensor.name in self.tensors:
                    raise part.error(f"tensor {quoted(tensor.name)} is in part {self.tensors[tensor.name].part + 1}, too, "
                                     "must be in one part only")
                self.tensors[tensor.name] = tensor._replace(part=i)
        self._buffers, self._maps, self.mapped = [part.buffer for part in parts], [part.map for part in parts], mapped

    @classmethod
    def open(cls, path: str | os.PathLike[str], mapped: bool = True) -> Self:
        """Opens a file by memory map. The first part of a split model (`NAME-00001-of-0000N.gguf`) opens all parts;
        a later one is refused. mapped: tensors are views of the map too; else each is read when it is asked for."""
        first = _Part(Path(path))
        n_parts = first.metadata.typed("split.count", "u16", default=1)
        if n_parts <= 1:
            return cls([first], mapped)
        part_no = first.metadata.typed("split.no", "u16")
        if part_no >= n_parts:
            raise first.error(f"key 'split.no' is {part_no}, must be less than {n_parts}, the value of key 'split.count'")
        name = SPLIT_NAME.fullmatch(first.path.name)
        if name is None or (int(name[2]), int(name[3])) != (part_no + 1, n_parts):
            raise first.error(f"this file is part {part_no + 1} of {n_parts}, "
                              f"must be named NAME-{part_no + 1:05d}-of-{n_parts:05d}.gguf")
        path_of = lambda i: first.path.with_name(f"{name[1]}-{i + 1:05d}-of-{n_parts:05d}.gguf")
        if part_no > 0:
            raise first.error(f"this file is part {part_no + 1} of {n_parts}, must be the first part: open {path_of(0)}")
        n_tensors = first.metadata.typed("split.tensors.count", "i32")
        parts = [first]
        for i in range(1, n_parts):
            part = _Part(path_of(i))
            for key, expected in ("split.no", i), ("split.count", n_parts):
                found = part.metadata.typed(key, "u16")
                if found != expected:
                    raise part.error(f"key {key!r} is {found}, must be {expected}")
            parts.append(part)
        file = cls(parts, mapped)
        if len(file.tensors) != n_tensors:
            raise first.error(f"the {n_parts} parts have {len(file.tensors)} tensors, must have {n_tensors}, "
                              "the value of key 'split.tensors.count'")
        return file

    def get(self, key: str, kind: str, default: Any = _REQUIRED) -> Any:
        """The value of a key that must have one of the given types, exactly as stored: a u32 is not an i32.

        kind: u8 to u64, i8 to i64, f32, f64, bool, str, arr[u8] to arr[str]; alternatives are separated by |;
        arr[int] is arr[bool]|arr[u32]|arr[i32].
        default is returned for a missing key; without one that is a GGUFError, as another type always is.
        """
        return self.metadata.typed(key, kind, default)

    def get_key_or_arr(self, key: str, n: int, kind: str = "u32", default: Any = _REQUIRED) -> list:
        """n values, one per block: those of an array of n elements, or one scalar repeated n times.

        kind: u32, i32 (arrays of either may be bool, u32 or i32) or f32. default: a scalar, or n values.
        """
        limits = {"u32": (0, 2**32 - 1), "i32": (-2**31, 2**31 - 1), "f32": (-math.inf, math.inf)}
        assert kind in limits, f"unknown kind {kind!r}"
        if key not in self.metadata and default is not _REQUIRED:
            return list(default) if isinstance(default, (list, tuple)) else [default] * n
        value = self.get(key, f"{kind}|arr[f32]" if kind == "f32" else f"{kind}|arr[int]")
        values = [v + 0 for v in value.tolist()] if isinstance(value, np.ndarray) else [value] * n  # + 0: bools become ints
        if len(values) != n:
            raise GGUFError(f"{self.path}: key {quoted(key)} has {len(values)} values, must have {n}, "
                            "or be a single value for all")
        low, high = limits[kind]
        for i, v in enumerate(values):
            if v < low or v > high:
                raise GGUFError(f"{self.path}: key {quoted(key)} has {v} as value {i}, must have {low} to {high}")
        return values

    def data(self, name: str) -> np.ndarray:
        """The bytes of a tensor: uint8 [n_bytes], a read-only view of the file, or read from it."""
        tensor = self._known(name)
        if not self.mapped:
            return self.read(name, 0, tensor.n_bytes)
        return self._buffers[tensor.part][tensor.offset:tensor.offset + tensor.n_bytes]

    def read(self, name: str, first: int, last: int) -> np.ndarray:
        """The bytes [first, last) of a tensor, read from the file: uint8. For what is needed once this is much faster than a view
        of the map, where each page is a fault; and other threads run meanwhile."""
        tensor = self._known(name)
        data = np.empty(last - first, np.uint8)
        with open(self.paths[tensor.part], "rb") as file:
            file.seek(tensor.offset + first)
            if file.readinto(data.data) != data.size:
                raise GGUFError(f"{self.paths[tensor.part]}: tensor {quoted(name)}: the file is shorter than when it was opened")
        return data

    def _known(self, name: str) -> TensorInfo:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise GGUFError(f"{self.path}: tensor {quoted(name)} is not one of the file's {len(self.tensors)} tensors")
        if not self._buffers:
            raise GGUFError(f"{self.path}: tensor {quoted(name)}: the file is closed")
        return tensor

    def release(self, name: str) -> None:
        """Lets go of the memory that has the bytes of a tensor. What asks for them again reads the file again."""
        tensor, page = self.tensors[name], mmap.PAGESIZE
        first, end = -(-tensor.offset // page) * page, (tensor.offset + tensor.n_bytes) // page * page
        if first < end and self._buffers and hasattr(mmap, "MADV_DONTNEED"):
            self._maps[tensor.part].madvise(mmap.MADV_DONTNEED, first, end - first)

    def close(self) -> None:
        """Closes the files. Arrays that `data` gave stay valid: a file stays mapped as long as there is one."""
        self._buffers, self._maps = [], []
        self.metadata.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<GGUFFile {str(self.path)!r}: {len(self.metadata)} keys, {len(self.tensors)} tensors>"


class _Part:
    """One mapped file and what its header says: buffer (uint8 [size]), version, alignment, metadata, tensors (list of
    TensorInfo)."""

    def __init__(self, path: Path):
        self.path = path
        try:
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):  # before open: a pipe would wait for its writer
                raise self.error("this is not a regular file")
            if status.st_size < 24:
                raise self.error(f"the file has {status.st_size} bytes, must have at least 24, the shortest GGUF header")
            with open(path, "rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as e:
            raise self.error(f"cannot be opened: {e.strerror}") from None
        self.buffer = np.frombuffer(self.map, np.uint8)
        self.size, self._pos, self._names_bytes, self._n_strings = len(self.map), 4, 0, 0

        magic = self.map[:4]
        if magic != b"GGUF":
            raise self.error(f"this is not a GGUF file: it starts with {magic!r}, must start with b'GGUF'")
        self.version = self._u32("version")
        if int.from_bytes(_U32.pack(self.version), "big") in (1, 2, 3):
            raise self.error(f"this is a big-endian GGUF file (its version reads {self.version:#010x}), "
                             "must be a little-endian one")
        if self.version not in (2, 3):
            raise self.error(f"the file is of GGUF version {self.version}, must be of version 2 or 3")
        n_tensors = self._u64("n_tensors")
        n_keys = self._u64("n_keys")
        self._check_count("keys", n_keys, _MIN_KEY_BYTES, MAX_KEYS)
        self._check_count("tensors", n_tensors, _MIN_TENSOR_BYTES, MAX_TENSORS)

        self.metadata = Metadata(path, self.buffer, self._read_keys(n_keys))
        self.alignment = self.metadata.typed("general.alignment", "u32", DEFAULT_ALIGNMENT)
        if self.alignment.bit_count() != 1:
            raise self.error(f"key 'general.alignment' is {self.alignment}, must be a power of 2")
        self.tensors = self._read_tensors(n_tensors)

    def error(self, what: str) -> GGUFError:
        return GGUFError(f"{self.path}: {what}")

    # Reading in order. Every read goes through _take, which refuses what lies past the end of the file.

    def _take(self, n_bytes: int, what: str) -> int:
        """Moves the position over n_bytes and returns where they start."""
        start = self._pos
        if n_bytes > self.size - start:
            raise self.error(f"{what} takes {n_bytes} bytes from offset {start}, but the file ends at {self.size}")
        self._pos = start + n_bytes
        return start

    def _u32(self, what: str) -> int:
        return _U32.unpack_from(self.map, self._take(4, what))[0]

    def _u64(self, what: str) -> int:
        return _U64.unpack_from(self.map, self._take(8, what))[0]

    def _name(self, what: str, max_bytes: int) -> str:
        n_bytes = self._u64(f"length of {what}")
        self._names_bytes += n_bytes
        if not 1 <= n_bytes <= max_bytes:
            raise self.error(f"{what} has {n_bytes} bytes, must have 1 to {max_bytes}")
        if self._names_bytes > MAX_NAMES_BYTES:
            raise self.error(f"keys and tensor names up to {what} have {self._names_bytes} bytes together, "
                             f"allowed are {MAX_NAMES_BYTES}")
        start = self._take(n_bytes, what)
        name = self.map[start:self._pos]
        try:
            return name.decode()
        except UnicodeDecodeError:
            raise self.error(f"{what} is {quoted(name)}, must be UTF-8") from None

    def _check_count(self, what: str, n: int, min_bytes: int, limit: int | None = None) -> None:
        """n items of at least min_bytes each must fit into the rest of the file."""
        fits = (self.size - self._pos) // min_bytes
        if n > fits:
            raise self.error(f"there should be {n} {what} from offset {self._pos}, but the remaining {self.size - self._pos} "
                             f"bytes of the file hold at most {fits}")
        if limit is not None and n > limit:
            raise self.error(f"the file has {n} {what}, allowed are {limit}")

    # The two tables of the header.

    def _read_keys(self, n_keys: int) -> dict[str, _Entry]:
        entries: dict[str, _Entry] = {}
        for i in range(n_keys):
            key = self._name(f"key {i}", MAX_KEY_BYTES)
            if key in entries:
                raise self.error(f"key {quoted(key)} appears twice")
            who = f"key {quoted(key)}"
            type, count = self._u32(f"type of {who}"), None
            if type == GGUFValueType.ARRAY:
                type, count = self._u32(f"element type of {who}"), self._u64(f"count of {who}")
                if type == GGUFValueType.ARRAY:
                    raise self.error(f"{who} is an array of arrays, allowed are arrays of numbers, bools and strings")
            if type not in _NAMES:
                raise self.error(f"{who} has unknown value type {type}, allowed are 0 to {max(GGUFValueType)}")
            entries[key] = self._read_value(who, GGUFValueType(type), count)
        return entries

    def _read_value(self, who: str, type: GGUFValueType, count: int | None) -> _Entry:
        n = 1 if count is None else count
        if type != GGUFValueType.STRING:
            self._check_count(f"{_NAMES[type]} values of {who}", n, _DTYPES[type].itemsize)
            start = self._take(n * _DTYPES[type].itemsize, who)
            if type == GGUFValueType.BOOL and (top := int(self.buffer[start:self._pos].max(initial=0))) > 1:
                raise self.error(f"{who} is of type bool and has the byte {top}, must have 0 or 1")
        elif count is None:
            start = self._take(self._u64(f"length of {who}"), who)
        else:
            self._n_strings += n
            self._check_count(f"strings of {who}", n, 8)
            if self._n_strings > MAX_STRINGS:
                raise self.error(f"arrays up to {who} have {self._n_strings} strings together, allowed are {MAX_STRINGS}")
            start = self._pos
            self._pos = self._end_of_strings(who, n)
        return _Entry(type, count, start, self._pos)

    def _end_of_strings(self, who: str, n: int) -> int:
        """Where n strings end. Each length is added to the position. One that leads past the end of the file is noticed when the
        next length is read, or after the last string."""
        unpack, buffer, stop = _U64.unpack_from, self.map, self._pos
        i = start = 0
        try:
            for i in range(n):  # noqa: B007  told below
                start = stop
                stop += unpack(buffer, start)[0] + 8
        except (struct.error, OverflowError):
            i, stop = i - 1, start
        if stop > self.size:
            raise self.error(f"string {i} of {n} of {who} ends at offset {stop}, but the file ends at {self.size}")
        return stop

    def _read_tensors(self, n_tensors: int) -> list[TensorInfo]:
        tensors, names = [], set()
        for i in range(n_tensors):
            name = self._name(f"name of tensor {i}", MAX_TENSOR_NAME_BYTES)
            who = f"tensor {quoted(name)}"
            if name in names:
                raise self.error(f"{who} appears twice")
            names.add(name)
            n_dims = self._u32(f"n_dims of {who}")
            if not 1 <= n_dims <= 4:
                raise self.error(f"{who} has {n_dims} dimensions, must have 1 to 4")
            shape = struct.unpack_from(f"<{n_dims}Q", self.map, self._take(8 * n_dims, f"shape of {who}"))
            n_values = math.prod(shape)
            if not 1 <= n_values < 2**63:
                raise self.error(f"{who} of shape {shape} has {n_values} values, must have 1 to 2^63 - 1")
            type_id = self._u32(f"type of {who}")
            if type_id not in TYPES:
                found = f"type {type_id}, {REFUSED[type_id]}" if type_id in REFUSED else f"unknown type {type_id}"
                raise self.error(f"{who} has {found}, allowed are "
                                 f"{', '.join(f'{t} ({type.name})' for t, type in TYPES.items())}")
            type = TYPES[type_id]
            if shape[0] % type.block_size:
                raise self.error(f"{who}: {type.name} rows must be a multiple of {type.block_size} values, got {shape[0]}")
            if math.prod(shape[1:2]) % type.n_rows:
                raise self.error(f"{who}: {type.name} matrices must have a multiple of {type.n_rows} rows, got "
                                 f"{math.prod(shape[1:2])}")
            offset = self._u64(f"offset of {who}")
            if offset % self.alignment:
                raise self.error(f"{who} has offset {offset}, must be a multiple of general.alignment, {self.alignment}")
            n_bytes = n_values // shape[0] * type.header_bytes + n_values // type.block_size * type.type_size
            tensors.append(TensorInfo(name, shape, type, offset, n_bytes, 0))

        data_start = -(-self._pos // self.alignment) * self.alignment
        tensors = [t._replace(offset=data_start + t.offset) for t in tensors]
        end, before = data_start, ""
        for t in sorted(tensors, key=lambda t: t.offset):
            who = f"tensor {quoted(t.name)} ({t.type.name}, shape {t.shape})"
            if t.offset + t.n_bytes > self.size:
                raise self.error(f"{who} takes {t.n_bytes} bytes from offset {t.offset}, but the file ends at {self.size}")
            if t.offset < end:
                raise self.error(f"{who} starts at offset {t.offset}, before the end of tensor {quoted(before)} at {end}")
            end, before = t.offset + t.n_bytes, t.name
        return tensors
