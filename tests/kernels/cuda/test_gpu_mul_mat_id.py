"""Sorted dispatch and the products with experts on a GPU: the comparisons of the simulator at sizes of real models,
and a fault through a program."""
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
from hypothesis import given, settings
from hypothesis import strategies as st

from cuda_simulator import GPUMachine, no_gpu
from expert_comparisons import check_dispatch, check_mul_mat_heads, check_mul_mat_id, check_mul_mat_id_glu
from ggml_py.graph.graph import Graph, Tensor
from ggml_py.kernels.cuda import mul_mat_id
from ggml_py.kernels.cuda.mmq_few_id import id_shape_of
from ggml_py.kernels.cuda.mmq import Block, GroupedShape, grouped_bytes, most_quads, warpgroups_pay
from ggml_py.graph.program import Arenas, Program
from ggml_py.quant.formats import FORMATS
from ggml_py.quant.tile import tile_bytes
from matmul_comparisons import seeded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(no_gpu() is not None, reason=str(no_gpu()))]
WEIGHTS = [fmt.name for fmt in FORMATS.values() if fmt.planes]


@pytest.fixture(scope="module")
def machine():
    return GPUMachine()


def random_ids(n, u, n_expert):
    """A token's experts are different."""
    return seeded(f"{n} {u} {n_expert}").permuted(np.tile(np.arange(n_expert, dtype=np.int32), (n, 1)), axis=1)[:, :u].copy()


@pytest.mark.parametrize("n, u, n_expert, tokens",
                         [(1, 8, 128, 16), (512, 8, 128, 48), (8192, 8, 256, 64), (512, 32, 512, 16), (33, 6, 60, 16),
                          (1, 1, 1, 16)])
def test_dispatch(machine, n, u, n_expert, tokens):
    check_dispatch(machine, random_ids(n, u, n_expert).reshape(-1), n_expert, tokens)


@pytest.mark.parametrize("n_pairs", [1, 31, 33, 1024, 65536])
def test_dispatch_to_one_expert(machine, n_pairs):
    check_dispatch(machine, np.full(n_pairs, 300), 512, 16)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_dispatch_of_any_ids(machine, data):
    n_expert, n = data.draw(st.integers(1, 512)), data.draw(st.integers(1, 70000))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    ids = rng.integers(0, data.draw(st.integers(1, n_expert)), n).astype(np.int32)
    for place in data.draw(st.lists(st.integers(0, n - 1), max_size=4)):
        ids[place] = data.draw(st.integers(-(1 << 31), (1 << 31) - 1))
    check_dispatch(machine, ids, n_expert, data.draw(st.integers(1, 64)))


@pytest.mark.parametrize("few_rows", [0, mul_mat_id.FEW_ROWS])
@pytest.mark.parametrize("n", [1, 9, 100])
@pytest.mark.parametrize("name", WEIGHTS)
def test_mul_mat_id(machine, monkeypatch, name, n, few_rows):
    """289 rows, ten row tiles of which the last has one row; three chunks."""
    monkeypatch.setattr(mul_mat_id, "FEW_ROWS", few_rows)
    check_mul_mat_id(machine, name, 6, 289, 768, random_ids(n, 2, 6))


@pytest.mark.parametrize("n_tokens", [1, 4, 8, 16])
@pytest.mark.parametrize("name", [fmt.name for fmt in FORMATS.values() if fmt.is_quantized])
def test_groups_of_pairs(machine, name, n_tokens):
    """More row tiles than blocks, three chunks to two warps; experts without pairs, with a few, with full groups and a part."""
    ids = np.concatenate([np.full(n, e) for e, n in enumerate((0, 1, n_tokens, 2 * n_tokens + 1, 3))] + [[6, -1]])
    ids = seeded("groups").permutation(ids).reshape(-1, 1)
    check_mul_mat_id(machine, name, 6, 289, 768, ids, plan=id_shape_of((name,), 10 * ids.size, 6, 768, ids.size, n_tokens, 2, 17))


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0"])
@pytest.mark.parametrize("n", [1, 4, 8, 32, 64])
def test_few_tokens_of_models(machine, name, n):
    check_mul_mat_id(machine, name, 128, 768, 2048, random_ids(n, 8, 128))


@pytest.mark.parametrize("block", [
    *(Block(2, 1, quads, True, slots) for quads in (4, 8, 12, 16) for slots in (2, 3)),
    *(Block(row_tiles, groups, quads) for row_tiles in (4, 2, 1) for groups, quads in ((1, 4), (1, 8), (2, 8)))], ids=repr)
@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q4_K", "Q6_K", "Q2_K", "NVFP4", "IQ2_XXS", "TQ2_0", "Q8_0"])
def test_any_block(machine, name, block):
    """The bits do not depend on the block; experts with none to more than two items of rows."""
    fmt = FORMATS[name]
    possible = machine.target.warpgroups and warpgroups_pay(fmt) if block.warpgroups else block.quads <= most_quads(fmt)
    if not possible or grouped_bytes((name,), block) > machine.target.shared_limit:
        pytest.skip("no such block")
    ids = np.concatenate([np.full(n, e) for e, n in enumerate((0, 1, block.tokens, 2 * block.tokens + 1, 3))])
    check_mul_mat_id(machine, name, 6, 129, 512, seeded("block").permutation(ids).reshape(-1, 1), plan=GroupedShape(block, 2))


@pytest.mark.parametrize("name, n_expert, n_rows, n_cols, n, u, b", [
    ("Q4_K", 128, 768, 2048, 512, 8, 1), ("Q8_0", 128, 768, 2048, 128, 8, 1), ("Q4_K", 128, 2048, 768, 64, 8, 8),
    ("MXFP4", 32, 2880, 2880, 33, 4, 1),
    ("Q6_K", 64, 1408, 2048, 100, 6, 1), ("Q8_0", 512, 64, 256, 300, 32, 4), ("F16", 16, 100, 500, 40, 4, 2)])
def test_mul_mat_id_of_models(machine, name, n_expert, n_rows, n_cols, n, u, b):
    check_mul_mat_id(machine, name, n_expert, n_rows, n_cols, random_ids(n, u, n_expert), b)


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "Q5_1", "F32"])
def test_rows_on_one_expert_and_no_experts(machine, name):
    check_mul_mat_id(machine, name, 40, 65, 512, np.full((200, 4), 39))
    check_mul_mat_id(machine, name, 40, 65, 512, np.full((3, 4), 40))
    check_mul_mat_id(machine, name, 40, 65, 512, np.where(random_ids(50, 4, 40) % 7 == 0, -5, random_ids(50, 4, 40)), 4)


HEADS = pytest.mark.parametrize("name, n_head, n_rows, n_cols, n", [
    ("Q8_0", 16, 512, 128, 1), ("Q8_0", 16, 128, 512, 65), ("Q4_K", 128, 128, 512, 3), ("F16", 8, 33, 100, 5),
    ("Q4_0", 3, 40, 64, 33)])


@HEADS
def test_mul_mat_heads(machine, name, n_head, n_rows, n_cols, n):
    check_mul_mat_heads(machine, name, n_head, n_rows, n_cols, n)


@HEADS
def test_mul_mat_heads_sorted(machine, monkeypatch, name, n_head, n_rows, n_cols, n):
    """None are few."""
    monkeypatch.setattr(mul_mat_id, "FEW_ROWS", 0)
    check_mul_mat_heads(machine, name, n_head, n_rows, n_cols, n)


GATED = pytest.mark.parametrize("act, types, n_expert, n_rows, n_cols, n, u", [
    ("silu", ("Q4_K", "Q4_K"), 128, 768, 2048, 130, 8), ("swiglu_oai", ("MXFP4", "MXFP4"), 32, 2880, 2880, 20, 4),
    ("gelu", ("Q8_0", "Q6_K"), 8, 100, 768, 9, 2), ("relu", ("Q5_1", "Q2_K"), 8, 100, 768, 300, 2),
    ("silu", ("IQ2_XXS", "IQ3_S"), 8, 64, 512, 40, 2)], ids=str)
BIASED = pytest.mark.parametrize("biased", [False, True])


@BIASED
@GATED
def test_glu(machine, act, types, n_expert, n_rows, n_cols, n, u, biased):
    """In blocks that sort pairs for themselves where there are few."""
    check_mul_mat_id_glu(machine, act, types, n_expert, n_rows, n_cols, random_ids(n, u, n_expert), 1, biased)


@BIASED
@GATED
def test_glu_sorted(machine, monkeypatch, act, types, n_expert, n_rows, n_cols, n, u, biased):
    """None are few."""
    monkeypatch.setattr(mul_mat_id, "FEW_ROWS", 0)
    check_mul_mat_id_glu(machine, act, types, n_expert, n_rows, n_cols, random_ids(n, u, n_expert), 1, biased)


@BIASED
def test_glu_of_floats(machine, biased):
    check_mul_mat_id_glu(machine, "swiglu_oai", ("BF16", "F32"), 4, 40, 300, random_ids(7, 2, 4), 1, biased)


@pytest.mark.parametrize("type_", ["F32", "Q8_0"])
@pytest.mark.parametrize("graphs", [False, True])
def test_faults_are_raised_with_the_outputs(machine, graphs, type_):
    """Eagerly and from a graph, from `dispatch` and from mmq_few_id; the next run is told nothing of it."""
    backend, n_expert = machine.backend, 5
    g = Graph("cuda:0")
    x, ids = g.input("x", "f32", (3, 256)), g.input("ids", "i32", (3, 2))
    tiles = np.zeros(n_expert * 2 * tile_bytes(FORMATS[type_]), np.uint8)
    w = Tensor("w", type_, (n_expert, 40, 256), device="cuda:0", buffer=backend.upload(tiles))
    g.outputs = [g.mul_mat_id(w, x, ids, name="up")]
    program, cache = Program(g, Arenas({"cuda:0": backend})), {"cuda:0": backend.new_graphs()} if graphs else None
    values = {"x": np.ones((3, 256), np.float32), "ids": np.int32([[0, 1], [2, 3], [4, 0]])}
    for _ in range(3):  # the second run of a key is captured
        assert not program.run(values, graphs=cache, key="key")[0].any()
        with pytest.raises(IndexError, match="^up: token 1 has expert 5 at rank 0, allowed: 0 to 4$"):
            program.run({**values, "ids": np.int32([[0, 1], [5, -1], [7, 0]])}, graphs=cache, key="key")
