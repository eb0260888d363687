"""Products of few tokens with the matrices of experts and heads in the simulator."""
from dataclasses import astuple

import numpy as np
import pytest

from cuda_simulator import SimulatedMachine, run_in_simulator
from expert_comparisons import check_mul_mat_heads, check_mul_mat_id, check_mul_mat_id_glu, id_call
from ggml_py.kernels.call import Call, Operand
from ggml_py.kernels.cuda import mmq_few_id
from ggml_py.kernels.cuda.few_slots import shared_words
from ggml_py.kernels.cuda.launch import RESERVED
from ggml_py.kernels.cuda.mmq_few import FewShape, threads_of
from ggml_py.kernels.cuda.mmq_few_id import MAX_WARPS, all_warps, id_shape, id_shape_of, padded, table_words
from ggml_py.quant.formats import FORMATS
from matmul_comparisons import seeded

LIMIT = 227 << 10


def test_in_the_simulator():
    run_in_simulator(__file__)


@pytest.mark.parametrize("limit", [LIMIT, 99 << 10])
@pytest.mark.parametrize("name", [fmt.name for fmt in FORMATS.values() if fmt.is_quantized])
def test_id_shapes_fit(name, limit):
    for names in ((name,), (name, name)):
        for n_matrices, n_rows, n_cols, n_pairs, n in ((128, 768, 2048, 8, 1), (128, 768, 2048, 256, 32), (32, 2880, 2880, 4, 1),
                                                       (16, 512, 128, 256, 16)):
            shape = id_shape(names, n_matrices, n_rows, n_cols - n_cols % FORMATS[name].block_size or 256, n_pairs, n, 132, limit)
            assert shape.n_bytes <= limit and shape.n_warps <= MAX_WARPS[shape.n_tokens]
            n_all = shape.n_threads // 32
            resident = min(limit // (shape.n_bytes + RESERVED) + 1, all_warps(names, shape.n_tokens) // n_all)
            assert shape.grid[0] <= 132 * resident and shape.n_threads <= threads_of(shape.n_tokens, MAX_WARPS[shape.n_tokens])
            assert (limit + RESERVED) // (shape.n_bytes + RESERVED) <= -(-shape.grid[0] // 132), "more than an even share"


@pytest.mark.parametrize("name, n, expected",
                         [("Q4_K", 1, (1, 8, 8, (192, 1))), ("Q8_0", 1, (1, 4, 8, (192, 1))), ("Q4_K", 32, (4, 4, 8, (396, 1)))])
def test_id_shape(name, n, expected):
    """One token and eight experts: every row tile of every expert has a block, and all of them are resident."""
    assert astuple(id_shape((name,), 128, 768, 2048, 8 * n, n, 132, LIMIT))[:4] == expected


@pytest.mark.parametrize("n, rows, expected", [(1, 8, 1), (4, 32, 4), (32, 256, 4), (33, 264, 4), (64, 512, 4)])
def test_pairs_of_a_group(n, rows, expected):
    """As many as one of the experts has on average, and no fewer than take about as long."""
    assert id_shape(("Q4_K",), 128, 768, 2048, rows, n, 132, LIMIT).n_tokens == expected
    assert id_shape(("Q4_K",), 8, 768, 2048, rows, n, 132, LIMIT).n_tokens == (1 if n == 1 else 4 if n == 4 else 16)
    assert id_shape(("Q8_0",), 128, 768, 2048, rows, n, 132, LIMIT).n_tokens == (1 if n == 1 else 8)


@pytest.fixture
def machine():
    return SimulatedMachine()


def shape_for(names, n_rows, n_cols, n_pairs, n_tokens, n_warps, n_blocks):
    """For up to 16 matrices."""
    n_items, n_warps = -(-n_rows // 32) * n_pairs, min(n_warps, -(-n_cols // 256))
    return id_shape_of(names, n_items, 16, n_cols, n_pairs, n_tokens, n_warps, n_blocks)


FORMS = [("Q8_0", 33, 288), ("Q4_0", 2, 288), ("Q5_1", 2, 32), ("NVFP4", 1, 64), ("Q1_0", 2, 128), ("TQ2_0", 2, 256),
         ("Q2_K", 1, 256), ("Q3_K", 3, 256),
         ("IQ2_XS", 2, 256), ("Q6_K", 2, 256), ("Q4_K", 33, 512), ("MXFP4", 2, 64)]


@pytest.mark.parametrize("name, n_rows, n_cols", FORMS)
def simulate_one_token(machine, name, n_rows, n_cols):
    """More row tiles than blocks."""
    check_mul_mat_id(machine, name, 4, n_rows, n_cols, [[2, 0, 3]], 1, shape_for((name,), n_rows, n_cols, 3, 1, 2, 2))


@pytest.mark.parametrize("name, n_rows, n_cols", FORMS[:1] + FORMS[-2:])
def simulate_tokens(machine, name, n_rows, n_cols):
    shape = shape_for((name,), n_rows, n_cols, 6, 4, 2, 2)
    check_mul_mat_id(machine, name, 4, n_rows, n_cols, [[2, 0], [0, 3], [3, 0]], 2, shape)


@pytest.mark.parametrize("ids, n_tokens, first", [
    ([[1, 1, 1, 1]], 1, None), ([[0, 9, -1, 2]], 1, 1), ([[3, -2147483648]], 1, 0),  # the same expert; no experts
    ([[0]] * 9, 4, None), ([[0]] * 8, 4, None),                                        # full groups of one expert, and a part
    ([[1, 1], [0, 1], [1, 0]], 4, None), ([[2, 1], [0, 2], [-1, 2147483647]], 4, 4), ([[2], [-1], [3]], 4, 1), ([[3], [3]], 4, 0),
    ([[5], [1]], 8, 0)],
    ids=str)
def simulate_any_ids(machine, ids, n_tokens, first):
    """Of three experts; no matrix is read beyond them, and the first pair that has none is left in `fault`,
    but for an earlier one."""
    for left in ([0, 0, 0, 0], [1, 2, 3, 4]):
        fault = machine.upload(np.int32(left))
        check_mul_mat_id(machine, "Q8_0", 3, 5, 64, ids, 1, shape_for(("Q8_0",), 5, 64, np.size(ids), n_tokens, 1, 3), (fault, 5))
        expected = left if first is None or left[0] else [5, first, np.ravel(ids)[first], 0]
        assert list(machine.download(fault, np.int32, 4)) == expected


@pytest.mark.parametrize("n_warps", [1, 3])
def simulate_many_pairs(machine, n_warps):
    """Several times 32 pairs, a part of a 32, more pairs than threads, and groups on both sides of each 32."""
    ids = seeded("many pairs").integers(-1, 12, (34, 3))
    ids[5:9] = 3
    check_mul_mat_id(machine, "Q8_0", 11, 1, 32, ids, 1, shape_for(("Q8_0",), 1, 32, ids.size, 4, n_warps, 2))


@pytest.mark.parametrize("n_blocks, n_warps", [(1, 1), (1, 3), (2, 2), (5, 1), (7, 2)])
def simulate_launch_shapes(machine, n_blocks, n_warps):
    """The bits do not depend on the shape of the launch: three row tiles, some groups, three chunks."""
    ids = seeded("launch shapes").integers(0, 6, (5, 3))
    check_mul_mat_id(machine, "Q4_0", 6, 65, 576, ids, 3, shape_for(("Q4_0",), 65, 576, ids.size, 4, n_warps, n_blocks))


def simulate_one_warp_that_multiplies(machine):
    """Two row tiles of four chunks to each block, experts with one pair and with two."""
    n_bytes = 4 * (shared_words(("Q8_0",), 4, 1, 4, 4) + table_words(6, 4, 3))
    check_mul_mat_id(machine, "Q8_0", 3, 33, 800, [[0, 1], [1, 0], [1, 2]], 1, FewShape(4, 1, 4, (2, 1), n_bytes))


@pytest.mark.parametrize("act, types, n_rows, n_cols, ids, b, biased, n_tokens", [
    ("silu", ("Q8_0", "Q8_0"), 33, 288, [[2, 0, 1]], 1, False, 1),
    ("silu", ("Q4_K", "Q6_K"), 2, 256, [[0, 1], [1, 2], [7, 1]], 2, False, 4),
    ("gelu", ("Q4_0", "Q4_0"), 40, 64, [[1, 0], [1, 2]], 1, True, 4),
    ("swiglu_oai", ("MXFP4", "Q8_0"), 33, 64, [[1, -1]], 2, True, 1),
    ("swiglu_oai", ("MXFP4", "MXFP4"), 3, 288, [[1], [2], [1]], 1, True, 8)], ids=str)
def simulate_glu(machine, act, types, n_rows, n_cols, ids, b, biased, n_tokens):
    shape = shape_for(types, n_rows, n_cols, np.size(ids), n_tokens, 2, 3)
    check_mul_mat_id_glu(machine, act, types, 3, n_rows, n_cols, ids, b, biased, shape)


@pytest.mark.parametrize("name, n_head, n_rows, n_cols, n, n_tokens",
                         [("Q8_0", 3, 33, 288, 1, 1), ("Q4_0", 2, 34, 64, 5, 4), ("Q5_1", 3, 2, 32, 2, 4)])
def simulate_heads(machine, name, n_head, n_rows, n_cols, n, n_tokens):
    check_mul_mat_heads(machine, name, n_head, n_rows, n_cols, n, shape_for((name,), n_rows, n_cols, n * n_head, n_tokens, 1, 4))


def simulate_chosen_shape(machine):
    check_mul_mat_id(machine, "Q8_0", 4, 33, 64, [[2, 0], [1, 2]])
    check_mul_mat_heads(machine, "Q8_0", 2, 33, 64, 1)


@pytest.mark.parametrize("sizes, message", [
    ((4, 5, 32, 1, 2, 3), "x_rows_per_token is 3, allowed: divisors of n_used, 2"),
    ((4, 5, 32, 65, 8, 1), "n_tokens \\* n_used is 520, allowed: 1..512"),
    ((0, 5, 32, 1, 2, 1), "n_expert is 0"), ((4, 0, 32, 1, 2, 1), "n_rows is 0"), ((4, 5, 32, 1, 0, 1), "n_used is 0")])
def test_refuses(sizes, message):
    with pytest.raises(ValueError, match=message):
        mmq_few_id.mmq_few_id(id_call("Q8_0", *sizes))


def test_refuses_parts_of_tokens():
    operands = {"w": Operand("Q8_0", (2, 5, 32)), "x": Operand("act", (5, 32)), "out": Operand("f32", (5, 5))}
    with pytest.raises(ValueError, match="n is 5, allowed: multiples of n_head, 2"):
        mmq_few_id.mmq_few_heads(Call("mul_mat_heads", "node", None, operands))


def test_table_words():
    assert [padded(n) for n in (1, 16, 17)] == [16, 16, 32] and (table_words(8, 1, 5), table_words(17, 4, 5)) == (32, 208)
