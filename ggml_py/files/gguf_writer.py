"""GGUF files (version 3) of tensors of any type, also of those that the package `gguf` does not know: the header, for which
types and shapes suffice, then the tensors one after the other, each in pieces. So no file is ever held in memory.

    write_gguf(path, {"general.architecture": string("llama")}, [Entry("output_norm.weight", (64,), "F32")], [[array]])

Keys are name -> bytes of type and value, as `Metadata.raw` has those of a file; this module makes others. Layout: `gguf`.
"""
import struct
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGUFValueType

from .gguf import DEFAULT_ALIGNMENT, TYPES
from .writing import replacing

IDS = {type.name: type_id for type_id, type in TYPES.items()}
ALIGNMENT = "general.alignment"


class Entry(NamedTuple):
    """A tensor to come. shape: ne0, the contiguous dimension, first. type: its name."""
    name: str
    shape: tuple[int, ...]
    type: str

    @property
    def n_bytes(self) -> int:
        type = TYPES[IDS[self.type]]
        return prod(self.shape[1:]) * (type.header_bytes + self.shape[0] // type.block_size * type.type_size)


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def u32(value: int) -> bytes:
    return struct.pack("<II", GGUFValueType.UINT32, value)


def string(text: str) -> bytes:
    return struct.pack("<I", GGUFValueType.STRING) + _text(text)


def strings(texts: Sequence[str]) -> bytes:
    return struct.pack("<IIQ", GGUFValueType.ARRAY, GGUFValueType.STRING, len(texts)) + b"".join(map(_text, texts))


def write_gguf(path: str | Path, keys: Mapping[str, bytes], entries: Sequence[Entry],
               tensors: Iterable[Iterable[np.ndarray]]) -> int:
    """Writes the file, whole or not at all, and returns its size in bytes. tensors: of each entry in order its bytes, in pieces
    of any dtype. They are asked for one by one, each when what is before it is written. UserError if it cannot be written."""
    alignment = struct.unpack("<II", keys[ALIGNMENT])[1] if ALIGNMENT in keys else DEFAULT_ALIGNMENT
    padding = lambda n: bytes(-n % alignment)
    header = [struct.pack("<4sIQQ", b"GGUF", 3, len(entries), len(keys)), *(_text(key) + value for key, value in keys.items())]
    offset = 0
    for entry in entries:
        header.append(_text(entry.name) + struct.pack(f"<I{len(entry.shape)}QIQ", len(entry.shape), *entry.shape,
                                                      IDS[entry.type], offset))
        offset += entry.n_bytes + len(padding(entry.n_bytes))
    start = b"".join(header)
    start += padding(len(start))
    with replacing(path) as file:
        file.write(start)
        for entry, pieces in zip(entries, tensors, strict=True):
            n_bytes = 0
            for piece in pieces:
                file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8))
                n_bytes += piece.nbytes
            assert n_bytes == entry.n_bytes, f"{entry.name}: {n_bytes} bytes, its shape and type take {entry.n_bytes}"
            file.write(padding(n_bytes))
    return len(start) + offset
