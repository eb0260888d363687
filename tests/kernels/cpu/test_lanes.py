"""kernels/cpu/lanes: unpackings as vectors. What they give is tested where it is multiplied (test_mul_mat)."""
import numpy as np
import pytest
from llvmlite import ir

from ggml_py.kernels.cpu.lanes import Lanes, traced
from ggml_py.quant.words import u32


def lanes(n=16):
    module = ir.Module()
    vector = ir.VectorType(ir.IntType(32), n)
    function = ir.Function(module, ir.FunctionType(vector, [vector]), "f")
    return Lanes(ir.IRBuilder(function.append_basic_block()), function.args[0])


def test_casts_leave_vectors_as_they_are():
    @traced
    def both(w, n):
        return u32(w), u32(n)
    w = lanes()
    assert both(w, 7)[0] is w and both(w, 7)[1] == np.uint32(7) and type(both(w, 7)[1]) is np.uint32


def test_numbers_of_numpy_leave_operations_to_vectors():
    w = lanes()
    for found in (np.uint32(3) & w, 3 + w, np.int32(-1) - w, w >> np.uint32(4)):
        assert isinstance(found, Lanes) and found.value.type == w.value.type
    assert "<i32 4294967295, i32 4294967295" in str((np.int32(-1) - w).value)


def test_a_vector_is_not_a_condition():
    w = lanes()
    with pytest.raises(TypeError, match=r"^a vector is not one condition: `Primitives\.select` takes it$"):
        bool(w < np.uint32(2))
