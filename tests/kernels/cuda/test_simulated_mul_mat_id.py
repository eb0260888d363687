"""Sorted dispatch and the products with experts in the simulator, and the shapes of their launches."""
from math import sqrt

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cuda_simulator import SimulatedMachine, run_in_simulator
from expert_comparisons import (check_dispatch, check_mul_mat_heads, check_mul_mat_id, check_mul_mat_id_glu,
                                dispatch_call, id_call)
from ggml_py.kernels.call import Call, Operand, Unsupported
from ggml_py.kernels.cuda import mul_mat_id, mul_mat_id_glu
from ggml_py.kernels.cuda.dispatch import MOST_EXPERTS, dispatch, dispatch_table
from ggml_py.kernels.cuda.launch import RESERVED
from ggml_py.kernels.cuda.mmq import Block, GroupedShape, grouped_bytes, resident
from ggml_py.kernels.cuda.mul_mat_id import FEWEST_TOKENS, grouped_shape, likely_rows
from ggml_py.quant.formats import FORMATS
from matmul_comparisons import seeded

QUANTIZED = [fmt.name for fmt in FORMATS.values() if fmt.is_quantized]
KIB = 1 << 10
LIMITS = 227 * KIB, 163 * KIB, 99 * KIB  # bytes of shared memory of a block on GPUs of compute capability 9.0, 8.0 and 8.6


def test_in_the_simulator():
    run_in_simulator(__file__)


# Shapes

@pytest.mark.parametrize("n_expert, n_pairs", [(1, 1), (8, 16), (128, 8), (128, 256), (128, 1024), (128, 4096), (512, 1 << 20)])
def test_likely_rows(n_expert, n_pairs):
    mean = n_pairs / n_expert
    assert -2.5 / n_expert <= likely_rows(n_expert, n_pairs) - (mean + 2.5 * sqrt(mean)) < 1


@pytest.mark.parametrize("limit, warpgroups", [(LIMITS[0], True), *((limit, False) for limit in LIMITS)])
@pytest.mark.parametrize("name", QUANTIZED)
def test_grouped_shapes_fit(name, limit, warpgroups):
    """Every format has blocks for any GPU; they take at least the rows of an item that tables have room for,
    and more for more rows."""
    shapes = [grouped_shape((name,), n, limit, warpgroups) for n in (1, 16, 17, 33, 49, 1000)]
    for shape in shapes:
        assert shape.block.tokens >= FEWEST_TOKENS and 1 <= shape.n_resident <= resident(shape.block)
        assert shape.n_resident * (grouped_bytes((name,), shape.block) + RESERVED) <= limit + RESERVED
    assert [s.block.tokens for s in shapes] == sorted(s.block.tokens for s in shapes)
    if limit == LIMITS[0]:
        assert all(shape.n_resident >= 2 for shape in shapes[:2]) and [s.block.tokens for s in shapes[:2]] == [16, 16]


@pytest.mark.parametrize("n_expert, n_pairs, expected", [
    (128, 8, True), (128, 256, True), (128, 1024, False), (8, 32, True), (8, 33, False), (512, 2048, False)])
def test_is_few(n_expert, n_pairs, expected):
    assert mul_mat_id.is_few(n_expert, n_pairs) == expected


@pytest.mark.parametrize("name, n_tokens, expected", [
    ("Q4_K", 32, (64, 16)), ("Q4_K", 128, (64, 16)), ("Q4_K", 512, (64, 48)), ("Q8_0", 512, (64, 48)), ("Q8_0", 4096, (64, 64)),
    ("Q4_1", 128, (128, 16))])
def test_shape_of_128_experts(name, n_tokens, expected):
    block = grouped_shape((name,), likely_rows(128, 8 * n_tokens), LIMITS[0], True).block
    assert (block.rows, block.tokens) == expected


# Dispatch

@pytest.fixture
def machine():
    return SimulatedMachine()


RANDOM = seeded("dispatch")


@pytest.mark.parametrize("ids, n_expert, tokens", [
    ([0], 1, 16),
    ([5] * 40, 8, 16),                                 # all on one expert, three items
    ([511, 0, 511, 256], MOST_EXPERTS, 16),            # experts without rows
    (np.tile([3, 3, 1], 11), 4, 4),                    # ids repeated in a token
    (np.arange(130)[::-1] % 130, 130, 1),
    (RANDOM.integers(0, 60, 300), 60, 48),             # several groups of a warp
    (RANDOM.integers(0, 3, 257), 3, 5),
    ([-1, 3, 4, 1 << 30, -(1 << 31), 0], 4, 2),        # no experts
    (RANDOM.integers(-1, 42, 3100), 41, 16),           # several blocks
    ([7, 7, 7], 7, 2)], ids=lambda p: str(p)[:24])
def simulate_dispatch(machine, ids, n_expert, tokens):
    check_dispatch(machine, ids, n_expert, tokens)


def simulate_first_fault_stays(machine):
    check_dispatch(machine, [0, 9], 4, 2, (1, 5, 77, 0))


@settings(max_examples=30, deadline=None)
@given(st.data())
def simulate_dispatch_of_any_ids(data):
    n_expert, tokens = data.draw(st.integers(1, 140)), data.draw(st.integers(1, 20))
    few = st.sampled_from(data.draw(st.lists(st.integers(-2, n_expert + 1), min_size=1, max_size=4)))
    ids = data.draw(st.lists(st.one_of(few, st.integers(0, n_expert - 1), st.integers(-(1 << 31), (1 << 31) - 1)), min_size=1,
                             max_size=150))
    check_dispatch(SimulatedMachine(), ids, n_expert, tokens)


@given(st.integers(1, 512), st.integers(1, 1 << 20), st.integers(1, 64))
@example(128, 4096, 48)
def test_tables_hold_all_items(n_expert, n_pairs, tokens):
    """The most items: every expert but one has one row."""
    at = dispatch_table(n_expert, n_pairs, tokens)
    n = min(n_expert, n_pairs)
    assert at.n_items >= n - 1 + -(-(n_pairs - (n - 1)) // tokens)
    assert at.bounds - at.items == 4 * at.n_items and at.items % 4 == 0


@pytest.mark.parametrize("n_expert, n_pairs, message", [
    (513, 8, "n_expert is 513, allowed: 1..512"), (0, 8, "n_expert is 0"), (8, 0, "n_pairs is 0, allowed: 1..268435455")])
def test_dispatch_checks(n_expert, n_pairs, message):
    with pytest.raises(ValueError, match=message):
        dispatch(dispatch_call(n_expert, (n_pairs, 1)), 16)


# Products

@pytest.mark.parametrize("type_, n_rows, n_cols, block", [
    ("Q4_K", 33, 256, Block(1, 1, 8)), ("Q8_0", 2, 288, Block(1, 1, 4)), ("Q6_K", 40, 256, Block(2, 1, 4)),
    ("Q5_1", 2, 32, Block(1, 1, 4)),
    ("IQ2_XS", 2, 256, Block(1, 1, 4)), ("Q2_K", 1, 256, Block(1, 1, 4)), ("NVFP4", 1, 64, Block(1, 1, 4)),
    ("Q1_0", 2, 256, Block(1, 1, 4)),
    ("Q3_K", 1, 256, Block(1, 1, 4))], ids=str)
def simulate_mul_mat_id(machine, type_, n_rows, n_cols, block):
    """An expert without rows, one with more than an item's; more items than blocks; ids that are no experts."""
    ids = [[1, 0], [1, 1], [1, 9]] if block.quads < 8 else [[1, 1]] * 17 + [[0, 1], [3, -1]]
    check_mul_mat_id(machine, type_, 4, n_rows, n_cols, ids, plan=GroupedShape(block, 1))


@pytest.mark.parametrize("type_, n_cols",
                         [("Q8_0", 288), ("Q4_K", 512), ("Q6_K", 256), ("NVFP4", 64), ("Q2_K", 256), ("IQ2_XS", 256)])
@pytest.mark.parametrize("quads", [4, 12])
def simulate_warpgroups(machine, type_, n_cols, quads):
    """Half a warpgroup, of which the simulator asks for warps only."""
    check_mul_mat_id(machine, type_, 3, 31, n_cols, [[2, 0], [2, 2]], plan=GroupedShape(Block(1, 1, quads, True), 1))


@pytest.mark.parametrize("b", [1, 2, 4])
@pytest.mark.parametrize("type_", ["Q8_0", "F16"])
def simulate_rows_of_a_token(machine, type_, b):
    check_mul_mat_id(machine, type_, 5, 3, 64, seeded("rows").integers(0, 5, (2, 4)), b)


@pytest.mark.parametrize("type_", ["F32", "BF16"])
def simulate_float_weights(machine, type_):
    check_mul_mat_id(machine, type_, 3, 33, 300, [[2, 0], [3, 2], [-1, 2]])


@pytest.mark.parametrize("type_, plan", [("F32", None), ("Q8_0", None), ("Q4_K", GroupedShape(Block(1, 1, 4), 1))], ids=str)
def simulate_mul_mat_heads(machine, type_, plan):
    check_mul_mat_heads(machine, type_, 3, 33, 256, 2, plan)


@pytest.mark.parametrize("act, types, n_rows, n_cols, biased", [
    ("silu", ("Q8_0", "Q8_0"), 33, 288, False), ("swiglu_oai", ("Q4_K", "Q6_K"), 2, 256, True),
    ("relu", ("IQ2_XXS", "IQ3_S"), 1, 256, True),
    ("gelu", ("F16", "F32"), 3, 64, True), ("swiglu_oai", ("F32", "F32"), 2, 32, False)], ids=str)
def simulate_glu(machine, monkeypatch, act, types, n_rows, n_cols, biased):
    """Behind `dispatch`."""
    monkeypatch.setattr(mul_mat_id, "FEW_ROWS", 0)
    check_mul_mat_id_glu(machine, act, types, 3, n_rows, n_cols, [[2, 0], [2, 3], [1, 2]], 2, biased)


@pytest.mark.parametrize("change, message", [
    ({"n_used": 3, "b": 2}, "x_rows_per_token is 2, allowed: divisors of n_used, 3"),
    ({"n_tokens": 0}, r"n_tokens \* n_used is 0, allowed: 1..268435455"),
    ({"n_rows": 0}, "n_rows is 0, allowed: at least 1"),
    ({"type_": "Q9_9"}, "mul_mat_id: .*Q9_9")])
def test_checks(change, message):
    args = {"type_": "Q8_0", "n_expert": 4, "n_rows": 32, "n_cols": 32, "n_tokens": 2, "n_used": 2, "b": 1} | change
    with pytest.raises(ValueError, match=message):
        mul_mat_id.plan(id_call(*args.values()))


@pytest.mark.parametrize("change, message", [
    ({"up": Operand("F16", (4, 40, 256))}, "types is Q8_0, F16, allowed: all quantized or all float"),
    ({"act": "tanh"}, "act is tanh, allowed: silu, gelu, relu, swiglu_oai"),
    ({"act": "swiglu_oai", "limit": 0.0}, "limit is 0.0, allowed: above 0"),
    ({"may_skip": True}, "may_skip is True, allowed: False: ids are experts"),
    ({"up_bias": Operand("f32", (4, 40))}, "bias is of one product only, allowed: of both or of none"),
    ({"gate_bias": Operand("f32", (4, 40)), "up_bias": Operand("f32", (3, 40))},
     "rows of a bias is 3, allowed: those of 4 experts")], ids=str)
def test_glu_refuses(change, message):
    matrix = Operand("Q8_0", (4, 40, 256))
    operands = {"gate": matrix, "up": matrix, "x": Operand("act", (2, 256)), "ids": Operand("i32", (2, 3)), "gate_bias": None,
                "up_bias": None, "out": Operand("f32", (6, 40)), "act": "silu", "alpha": 1.7, "limit": 7.0,
                "may_skip": False}
    call = Call("mul_mat_id_glu", "node", None, operands | change)
    with pytest.raises(Unsupported, match=message):
        mul_mat_id_glu.check(call)
        mul_mat_id_glu.plan(call)
