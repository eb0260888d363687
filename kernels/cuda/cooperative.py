"""Device functions that all threads of a block call together, since they hold barriers and shared arrays."""
from numba import cuda

from .ptx import SIMULATED, device


def cooperative(function):
    """`device` for such a function. The simulator's barriers and shared arrays are those of the running block; numba puts them where a module
    says `cuda`, for the length of a call, but only into modules of kernels and of functions that it knows of."""
    return cuda.jit(device=True)(function) if SIMULATED else device(function)
