"""Codes and scales to the bytes of blocks, by the layouts of the fields (`layouts`)."""
from functools import lru_cache

import numpy as np

from .entries import jit
from .formats import Format
from .layouts import layout

Arrays = dict[str, np.ndarray]  # what a field's bits come from (`layouts.Layout.what`): unsigned [n_blocks, items of a block]


@jit
def _put(program, source, out):
    for block in range(len(out)):
        for i in range(len(program)):
            to, n, left, right, mask = program[i]
            out[block, to] |= (np.uint32(source[block, n]) << np.uint32(left) >> np.uint32(right)) & np.uint32(mask)


@lru_cache(None)
def _program(name: str, field: str, size: int) -> np.ndarray:
    """int32 [n, 5]: (byte of the field, item of the array, left shift, right shift, mask)."""
    at = layout(name, field)
    masks: dict[tuple[int, int, int], int] = {}  # (byte, item, shift) -> bits of the byte
    for i in range(size):
        for bit in range(8):
            n, place = at.place(i, bit)
            key = i, n, bit - at.first - place
            masks[key] = masks.get(key, 0) | 1 << bit
    return np.array([(i, n, max(shift, 0), max(-shift, 0), mask) for (i, n, shift), mask in masks.items()], np.int32)


def packed(fmt: Format, arrays: Arrays) -> np.ndarray:
    """uint8 [n_blocks, type_size]"""
    out, at = np.zeros((len(next(iter(arrays.values()))), fmt.type_size), np.uint8), 0
    for field, size in fmt.fields:
        _put(_program(fmt.name, field, size), arrays[layout(fmt.name, field).what], out[:, at:at + size])
        at += size
    return out


def half(d: np.ndarray) -> np.ndarray:
    """float64 of float16 values [...] -> uint8 [..., 2], its bytes."""
    return d.astype(np.float16)[..., None].view(np.uint8)


def bit_fields(values: np.ndarray, width: int, n: int) -> np.ndarray:
    """n neighbours of `width` bits each in a number, the first lowest: [n_blocks, items] -> uint64 [n_blocks, items / n]"""
    parts = values.astype(np.uint64).reshape(len(values), -1, n)
    return (parts << (np.arange(n, dtype=np.uint64) * np.uint64(width))).sum(axis=2, dtype=np.uint64)


def little_endian(values: np.ndarray, n_bytes: int) -> np.ndarray:
    """[n_blocks, items] -> uint8 [n_blocks, items * n_bytes]"""
    return values.astype(f"<u{n_bytes}").view(np.uint8)


def base_three(digits: np.ndarray) -> np.ndarray:
    """uint8 [n_blocks, 5, n] of digits 0..2, the most significant first -> uint8 [n_blocks, n]: the fraction in base 3, rounded
    up to 256ths (`ternary.tq1_0`)."""
    value = sum(digits[:, n].astype(np.uint32) * 3 ** (4 - n) for n in range(5))
    return ((value * 256 + 242) // 243).astype(np.uint8)
