"""Arrays in the scratch memory of a node, each at the start of a cache line. They are told as (dtype, shape), or None."""
import numpy as np

ALIGNMENT = 64


def _n_bytes(dtype, shape) -> int:
    return -(-np.dtype(dtype).itemsize * int(np.prod(shape)) // ALIGNMENT) * ALIGNMENT


def memory_of(arrays) -> tuple[str, tuple[int, ...]] | None:
    """What holds the arrays, as of kernels/call.py: dtype and shape."""
    there = [array for array in arrays if array]
    return ("u8", (sum(_n_bytes(*array) for array in there),)) if there else None


def arrays_in(scratch, arrays) -> list:
    """Those arrays, in the scratch memory of a call; None for None."""
    found, at = [], 0
    for array in arrays:
        if array:
            (dtype, shape), first = array, at
            at += _n_bytes(*array)
            found.append(scratch.data[first:first + np.dtype(dtype).itemsize * int(np.prod(shape))].view(dtype).reshape(shape))
        else:
            found.append(None)
    return found
