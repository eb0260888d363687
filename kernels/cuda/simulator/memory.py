"""Addresses, pointers and arrays of the simulator, which has the host's memory."""
from dataclasses import dataclass

import numpy as np

from .instructions import as_float, as_int, i32


@dataclass(frozen=True)
class Address:
    """An address in a host array; + moves it by bytes, % tells how it is aligned."""
    memory: np.ndarray  # uint8
    offset: int = 0

    def __add__(self, n_bytes: int) -> "Address":
        return Address(self.memory, self.offset + n_bytes)

    def __mod__(self, n_bytes: int) -> int:
        return (self.memory.ctypes.data + self.offset) % n_bytes


class Pointer:
    """What a kernel gets for an address: the rest of its array as elements of one type."""

    def __init__(self, address: Address, dtype: np.dtype):
        n = (address.memory.size - address.offset) // dtype.itemsize
        self.elements = np.frombuffer(address.memory, dtype, n, address.offset)
        if address.offset % dtype.itemsize:
            raise ValueError(f"byte {address.offset} is no multiple of {dtype.itemsize}")
        self.convert = (as_float if dtype.kind == "f" else as_int)(dtype.type)
        self.address, self.memory = address.memory.ctypes.data + address.offset, address.memory

    def slice(self, name, index, width):
        index = int(index)
        if not 0 <= index <= len(self.elements) - width:
            raise IndexError(f"{name}: elements {index}..{index + width - 1} of {len(self.elements)} ({self.elements.dtype})")
        n_bytes = width * self.elements.itemsize
        if (self.address + index * self.elements.itemsize) % n_bytes:
            raise ValueError(f"{name}: element {index} does not lie on {n_bytes} bytes")
        return slice(index, index + width)


def pointer_at(pointer, address):
    """Simulated addresses are those of the host's memory: one that a kernel reads must lie in the array that `pointer` points
    into."""
    first = address - pointer.memory.ctypes.data
    if not 0 <= first < pointer.memory.nbytes:
        raise IndexError(f"pointer_at: byte {first} of {pointer.memory.nbytes}")
    return Pointer(Address(pointer.memory, int(first)), pointer.elements.dtype)


def moved(pointer, n):
    return pointer_at(pointer, pointer.address + int(n))


def _widened(value):
    return value if value.itemsize >= 4 else i32(value)


def load(name, width):
    if width == 1:
        return lambda pointer, index: _widened(pointer.elements[pointer.slice(name, index, 1)][0])
    return lambda pointer, index: tuple(pointer.elements[pointer.slice(name, index, width)])


def store(name, width):
    if width == 1:
        def put(pointer, index, value):
            pointer.elements[pointer.slice(name, index, 1)] = pointer.convert(value)
    else:
        def put(pointer, index, *values):
            pointer.elements[pointer.slice(name, index, width)] = [pointer.convert(v) for v in values]
    return put


def check_elements(name, array, index, width):
    """Of an access to a shared array: elements that it has, which begin on a multiple of their number."""
    if not 0 <= index <= len(array) - width or index % width:
        raise IndexError(f"{name}: elements {index}..{index + width - 1} of {len(array)}")


def unwritten(shape, dtype):
    dtype = np.dtype(getattr(dtype, "name", dtype))  # numba's types have names
    return np.full(int(np.prod(shape)) * dtype.itemsize, 255, np.uint8).view(dtype).reshape(shape)
