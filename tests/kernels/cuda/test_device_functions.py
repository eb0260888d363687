"""Device functions are compiled by fewer passes than numba has, and their calls are typed once: no code may differ for that."""
import re

import pytest

numba_cuda = pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
from numba.core.errors import NumbaError
from numba.cuda.compiler import compile_cuda

from ggml_py.kernels.cuda import device_functions
from ggml_py.kernels.cuda.launch import I32, Kernel, compile_ptx
from ggml_py.kernels.cuda.ptx import device, i32, ld, st, u32
from cuda_code import KERNELS

SYMBOL = re.compile(r"_Z\w+|_cudapy\w+|\$L__\w+")


def code(ptx: str) -> str:
    """A kernel's body, its symbols numbered in the order in which they come."""
    numbers: dict[str, str] = {}
    body = re.sub(r"(?m)^\.extern .*\n", "", ptx.split(".entry", 1)[1])
    return SYMBOL.sub(lambda found: numbers.setdefault(found[0], f"symbol{len(numbers)}"), body)


def by_numba(function, args, return_type):
    """`device_functions._compiled`, by all of numba's passes."""
    compiled = compile_cuda(function, return_type, args, nvvm_options={"opt": 3}, cc=(8, 0), forceinline=True)
    compiled.target_context.insert_user_function(compiled.entry_point, compiled.fndesc, [compiled.library])
    return compiled


def kernel(function) -> Kernel:
    """x[0] = function(x[1]), its device functions not compiled before."""
    called = device(function)

    def body(x):
        st(x, 0, called(ld(x, 1)))
    return Kernel(body, (I32,), 32)


@pytest.mark.parametrize("name", ["rms_norm_act[True]", "mmq_few[Q4_1, 1]", "flash_attn_ext_combine[False]", "draw_first"])
def test_code_is_that_of_all_passes(name, monkeypatch):
    make, args = KERNELS[name]
    ours = compile_ptx(make.__wrapped__(*args), (9, 0))  # a kernel whose functions were not compiled before
    monkeypatch.setattr(device_functions, "_compiled", by_numba)
    assert code(compile_ptx(make.__wrapped__(*args), (9, 0))) == code(ours)


def test_types_are_asked_once():
    """Of calls that differ only in the values of their literals, where these do not matter."""
    def function(a):
        b = i32(u32(a) + u32(1))
        return i32((b << 3) + (b << 5) + (b << 7))
    kept = device_functions._signatures
    compile_ptx(kernel(function), (9, 0))
    before = dict(kept)

    def other(a):
        b = i32(u32(a) + u32(9))
        return i32((b << 11) + (b << 13) + (b << 17) + (b << 19))
    compile_ptx(kernel(other), (9, 0))
    assert kept == before


def test_print_in_a_device_function():
    """While a kernel is written."""
    def function(a):
        print("a is", a)
        return a
    assert "vprintf" in compile_ptx(kernel(function), (9, 0))


def test_what_the_passes_left_out_are_for_is_refused():
    def function(a):
        def inner(b):
            return i32(b + a)
        return inner(a)
    with pytest.raises(NumbaError):
        compile_ptx(kernel(function), (9, 0))
