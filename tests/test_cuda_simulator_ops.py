"""rms_norm, elementwise operations, what is fused, rope, set_rows and the small ops of experts in the simulator; and what their launch functions
refuse."""
from types import SimpleNamespace

import pytest

from cuda_simulator import SimulatedMachine, run_in_simulator
from ggml_py.kernels.cuda import argmax as cuda_argmax
from ggml_py.kernels.cuda import quantize as cuda_quantize
from ggml_py.kernels.cuda import mmq_few
from ggml_py.kernels.cuda import rms_norm as cuda_rms_norm
from ggml_py.kernels.cuda.add_rms_norm import add_rms_norm, add_rms_norm_act, add_rms_norm_and_act
from ggml_py.kernels.cuda.add_rms_norm_mul_mat import add_rms_norm_mul_mat_glu, add_rms_norm_mul_mat_qkv, row_words
from ggml_py.kernels.cuda.elementwise import add
from ggml_py.kernels.cuda.experts import weighted_sum
from ggml_py.kernels.cuda.glu import swiglu_oai
from ggml_py.kernels.cuda.heads import concat_heads, slice_heads
from ggml_py.kernels.cuda.mul_mat_argmax import mul_mat_argmax, scratch_words
from ggml_py.kernels.cuda.mul_mat_glu import mul_mat_glu
from ggml_py.kernels.cuda.mul_mat_qkv import mul_mat_qkv
from ggml_py.kernels.cuda.rms_norm import n_threads, rms_norm
from ggml_py.kernels.cuda.rms_norm_act import rms_norm_act
from ggml_py.kernels.cuda.rope import rope
from ggml_py.kernels.cuda.rope_set_rows import rope_set_rows
from ggml_py.kernels.cuda.routing import mask_groups, top_k
from ggml_py.kernels.cuda.set_rows import cpy_rows_indirect, set_rows
from ggml_py.kernels.cuda.soft_max import soft_max
from ggml_py.kernels.cuda.swiglu_act import swiglu_act
from ggml_py.kernels.cuda.topk_moe import topk_moe
from ggml_py.ops import MOST_NORMED
from ggml_py.quant.formats import FORMATS
from op_comparisons import (check_add_rms_norm, check_add_rms_norm_act, check_add_rms_norm_mul_mat, check_argmax, check_binary, check_cpy_rows,
                            check_experts, check_glu, check_heads, check_mul_mat_argmax, check_mul_mat_glu, check_mul_mat_qkv, check_rms_norm,
                            check_rms_norm_act, check_rope, check_rope_set_rows, check_row_op, check_scale, check_set_rows, check_swiglu_act,
                            check_swiglu_oai, check_top_k, check_topk_moe)


def test_in_the_simulator():
    run_in_simulator(__file__)


@pytest.fixture
def machine():
    return SimulatedMachine()


@pytest.mark.parametrize("n_rows, n_cols, special", [(1, 1, False), (1, 129, False), (2, 1030, False), (12, 64, True)])
def simulate_rms_norm(machine, n_rows, n_cols, special):
    check_rms_norm(machine, n_rows, n_cols, special)


@pytest.mark.parametrize("n, k", [(1, 1), (8, 255), (1, 256), (4, 257), (4, 576), (1, 1000)])
def simulate_rms_norm_act(machine, n, k):
    check_rms_norm_act(machine, n, k)


def simulate_rms_norm_in_rounds(machine, monkeypatch):
    """Rows longer than four columns a thread: two whole rounds and a part."""
    monkeypatch.setattr(cuda_rms_norm, "MOST_THREADS", 256)
    check_rms_norm(machine, 2, 2060)
    check_rms_norm_act(machine, 2, 2600)
    check_add_rms_norm(machine, 2, 2060)
    check_add_rms_norm_act(machine, 2, 2600)


@pytest.mark.parametrize("n, k", [(1, 1), (8, 255), (1, 256), (4, 257), (4, 576), (1, 1000)])
def simulate_add_rms_norm(machine, n, k):
    check_add_rms_norm(machine, n, k)
    check_add_rms_norm_act(machine, n, k)


@pytest.mark.parametrize("n, k", [(1, 1), (8, 255), (1, 256), (4, 257), (4, 576), (1, 1000)])
def simulate_swiglu_act(machine, n, k, monkeypatch):
    check_swiglu_act(machine, n, k)
    monkeypatch.setattr(cuda_quantize, "MOST_BLOCKS", 1)  # several chunks a block
    check_swiglu_act(machine, n, k)


@pytest.mark.parametrize("op, n_rows, n_cols, y_rows", [("add", 2, 257, 2), ("add", 3, 5, 1), ("mul", 1, 256, 1), ("mul", 3, 20, 1)])
def simulate_binary(machine, op, n_rows, n_cols, y_rows):
    check_binary(machine, op, n_rows, n_cols, y_rows)


@pytest.mark.parametrize("op", ["swiglu", "geglu", "reglu"])
@pytest.mark.parametrize("n_rows, n_cols", [(1, 1), (4, 40), (1, 257)])
def simulate_glu(machine, op, n_rows, n_cols):
    check_glu(machine, op, n_rows, n_cols)


@pytest.mark.parametrize("act, types, n_rows, n_cols, n, biased", [
    ("silu", ("Q4_K", "Q4_K"), 33, 256, 1, False), ("gelu", ("Q8_0", "Q4_1"), 1, 288, 2, True), ("relu", ("Q6_K", "IQ4_XS"), 34, 256, 1, False),
    ("silu", ("F16", "F32"), 3, 21, 2, True), ("relu", ("BF16", "BF16"), 33, 7, 1, True)], ids=str)
def simulate_mul_mat_glu(machine, act, types, n_rows, n_cols, n, biased):
    check_mul_mat_glu(machine, act, types, n_rows, n_cols, n, biased)


@pytest.mark.parametrize("types, n_rows, n_cols, n, biased", [
    (("Q4_K", "Q4_K", "Q6_K"), (65, 33, 1), 256, 1, True), (("Q8_0", "Q4_1", "Q5_0"), (3, 34, 32), 288, 3, False), (("Q8_0",) * 3, (2, 33, 1), 32, 2, True),
    (("F16", "F32", "BF16"), (3, 1, 33), 21, 2, True)], ids=str)
def simulate_mul_mat_qkv(machine, types, n_rows, n_cols, n, biased):
    check_mul_mat_qkv(machine, types, n_rows, n_cols, n, biased)


@pytest.mark.parametrize("types, n_rows, n_cols, act, biased, kind", [
    (("Q4_K", "Q4_K", "Q6_K"), (33, 1, 34), 256, None, True, 0), (("Q8_0", "Q4_1", "Q5_0"), (3, 34, 32), 288, None, False, 0),
    (("Q4_1",) * 3, (40, 9, 9), 576, None, False, 0), (("IQ2_S", "Q8_0"), 34, 512, "silu", False, 0),
    *((("Q4_1", "Q8_0"), 3, 32, "relu", False, kind) for kind in range(8)), *((("Q8_0",) * 3, (3, 2, 1), 544, None, False, kind) for kind in range(1, 4))],
    ids=str)
def simulate_add_rms_norm_mul_mat(machine, types, n_rows, n_cols, act, biased, kind):
    check_add_rms_norm_mul_mat(machine, types, n_rows, n_cols, act, biased, kind)


def simulate_row_of_more_chunks_than_warps(machine, monkeypatch):
    monkeypatch.setitem(mmq_few.MAX_WARPS, 1, 2)
    mmq_few.few_shape.cache_clear()
    check_add_rms_norm_mul_mat(machine, ("Q4_1", "Q8_0"), 20, 1312, "gelu", True)
    mmq_few.few_shape.cache_clear()


def simulate_scale(machine):
    check_scale(machine, 2, 257, 0.1)


@pytest.fixture
def small_argmax(monkeypatch):
    """Blocks of two warps and few parts."""
    for name, n in ("THREADS", 64), ("MOST_THREADS", 64), ("PARTS", 3):
        monkeypatch.setattr(cuda_argmax, name, n)


@pytest.mark.parametrize("k, n_parts", [(3, 4), (300, 2), (200, 70)])
def simulate_argmax(machine, small_argmax, k, n_parts, monkeypatch):
    """More parts than columns, rounds of columns in a part, rounds of parts."""
    monkeypatch.setattr(cuda_argmax, "PARTS", n_parts)
    check_argmax(machine, k)


@pytest.mark.parametrize("type_, n_rows, n_cols, n, zeros", [
    ("Q8_0", 1, 32, 2, False), ("Q4_K", 65, 512, 1, False), ("Q6_K", 34, 256, 5, False), ("Q4_1", 70, 288, 17, False), ("MXFP4", 66, 32, 2, True),
    ("F16", 67, 21, 5, False), ("F32", 1, 300, 1, False)], ids=str)
def simulate_mul_mat_argmax(machine, small_argmax, type_, n_rows, n_cols, n, zeros):
    check_mul_mat_argmax(machine, type_, n_rows, n_cols, n, zeros)


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("n, n_head, dim, n_rot", [(1, 1, 2, 2), (2, 5, 6, 6), (2, 3, 71, 68)])
def simulate_rope(machine, n, n_head, dim, n_rot, neox):
    check_rope(machine, n, n_head, dim, n_rot, neox)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("type_, k", [("f32", 129), ("f16", 129), ("q8_0", 32 * 13)])
def simulate_set_rows(machine, type_, k, special):
    check_set_rows(machine, type_, [3, 0], k, 4, special)


@pytest.mark.parametrize("type_, k", [("f32", 129), ("f16", 129), ("q8_0", 32 * 13)])
def simulate_cpy_rows(machine, type_, k):
    check_cpy_rows(machine, type_, [2, 0], k, 4)


@pytest.mark.parametrize("types, heads, dims, n_rot, neox, normed, indirect", [
    (("f16", "f16"), (5, 1), (6, 6), 6, True, False, False), (("f32", "f16"), (2, 2), (71, 70), 68, False, False, True),
    (("f16", "f32"), (1, 1), (2, 1), 2, False, True, True), (("f32", "f32"), (5, 1), (130, 3), 64, True, True, False)], ids=str)
def simulate_rope_set_rows(machine, types, heads, dims, n_rot, neox, normed, indirect):
    check_rope_set_rows(machine, types, [3, 0], heads, dims, n_rot, neox, 4, normed, indirect)


@pytest.mark.parametrize("op, n_cols, params", [
    ("soft_max", 5, ()), ("soft_max", 60, ()), ("soft_max", 257, ()), ("soft_max", 512, ()), ("sigmoid", 257, ()), ("normalize", 5, ()), ("normalize", 40, ()),
    ("mask_groups", 60, (4, 2)), ("mask_groups", 160, (8, 3)), ("mask_groups", 2, (1, 1)), ("mask_groups", 256, (128, 5))], ids=str)
def simulate_row_op(machine, op, n_cols, params):
    check_row_op(machine, op, n_cols, *params)


@pytest.mark.parametrize("n_cols, k", [(1, 1), (8, 8), (60, 4), (257, 2), (512, 3)])
def simulate_top_k(machine, n_cols, k):
    check_top_k(machine, n_cols, k)


@pytest.mark.parametrize("gating, n_expert, k, biased, groups, norm, factor", [
    ("softmax", 8, 2, False, (0, 0), True, 1), ("sigmoid", 60, 6, True, (4, 2), True, 2.5), ("softmax_of_chosen", 32, 4, False, (0, 0), False, 1),
    ("softmax", 160, 3, True, (8, 3), False, 16), ("sigmoid", 257, 2, True, (0, 0), True, 0.3), ("softmax_of_chosen", 40, 32, True, (0, 0), True, 1),
    ("softmax", 512, 2, False, (1, 1), False, 1)])
def simulate_topk_moe(machine, gating, n_expert, k, biased, groups, norm, factor):
    check_topk_moe(machine, gating, n_expert, k, biased, groups, norm, factor)


@pytest.mark.parametrize("n, n_used, m", [(1, 1, 1), (2, 8, 33), (3, 9, 257)])
def simulate_experts(machine, n, n_used, m):
    check_experts(machine, n, n_used, m)


@pytest.mark.parametrize("n_rows, n_cols", [(1, 1), (4, 40), (1, 257)])
def simulate_swiglu_oai(machine, n_rows, n_cols):
    check_swiglu_oai(machine, n_rows, n_cols)


@pytest.mark.parametrize("n, n_head, dim, first, count, dim_y", [(1, 1, 1, 0, 1, 1), (3, 5, 24, 6, 11, 10), (1, 2, 192, 128, 64, 3)])
def simulate_heads(machine, n, n_head, dim, first, count, dim_y):
    check_heads(machine, n, n_head, dim, first, count, dim_y)


# Launch values, without the simulator

@pytest.mark.parametrize("n_cols, threads", [(1, 128), (512, 128), (513, 256), (576, 256), (1024, 256), (4096, 1024), (4097, 1024), (1 << 20, 1024)])
def test_threads_of_a_normed_row(n_cols, threads):
    assert n_threads(n_cols) == threads


def test_every_gpu_has_room_for_a_row():
    """Of the longest rows that the fused ops take, beside the codebooks and the weights of a warp, whatever the formats."""
    for fmt in FORMATS.values():
        if fmt.is_quantized:
            shape = mmq_few.few_shape((fmt.name,) * 3, 4096, MOST_NORMED, 1, 132, 99 << 10, row_words(MOST_NORMED))
            assert shape.n_bytes <= 99 << 10 and shape.n_warps >= 4, (fmt.name, shape)


@pytest.mark.parametrize("type_, n_rows, n_cols, n, expected", [
    ("Q4_K", 128256, 4096, 1, 4008 * 2), ("Q8_0", 49153, 576, 3, 1537 * 3 * 2), ("Q8_0", 49152, 576, 512, 512 * (49152 + 64 * 2)),
    ("F16", 100, 4096, 2, 2 * (100 + 64 * 2))])
def test_scratch_of_logits_that_are_not_kept(type_, n_rows, n_cols, n, expected):
    """Two words a row tile, where few tokens are multiplied by quantized weights."""
    assert scratch_words(SimpleNamespace(n_multiprocessors=132, shared_limit=227 << 10, warpgroups=True), type_, n_rows, n_cols, n) == expected


def test_refusals():
    for refused, message in [
        (lambda: rms_norm(None, 0, 0, 0, 0, 5, 1e-5), "rms_norm: n_rows is 0, allowed: at least 1"),
        (lambda: rms_norm_act(None, 0, 0, 0, 3, 0, 1e-5), "rms_norm_act: k is 0, allowed: at least 1"),
        (lambda: add_rms_norm(None, 0, 0, 0, 0, 0, 3, 0, 1e-5), "add_rms_norm: n_cols is 0, allowed: at least 1"),
        (lambda: add_rms_norm_act(None, 0, 0, 0, 0, 0, 0, 5, 1e-5), "add_rms_norm_act: n is 0, allowed: at least 1"),
        (lambda: add_rms_norm_and_act(None, 0, 0, 0, 0, 0, 0, 3, 0, 1e-5), "add_rms_norm_and_act: k is 0, allowed: at least 1"),
        (lambda: mul_mat_glu(None, "tanh", "Q8_0", "Q8_0", 0, 0, 0, None, None, 0, 5, 32, 1, 0), "mul_mat_glu: act is tanh, allowed: silu, gelu, relu"),
        (lambda: mul_mat_glu(None, "silu", "Q8_0", "Q8_0", 0, 0, 0, 0, None, 0, 5, 32, 1, 0),
         "mul_mat_glu: bias is of one product only, allowed: of both or of none"),
        (lambda: mul_mat_argmax(None, "Q8_0", 0, 0, 0, 0, 32, 1, 0), "mul_mat_argmax: n_rows is 0, allowed: at least 1"),
        (lambda: mul_mat_qkv(None, ("Q8_0", "F16", "Q8_0"), (0, 0, 0), 0, (0, 0, 0), (5, 5, 5), 32, 1),
         "mul_mat_qkv: types is Q8_0, F16, Q8_0, allowed: all quantized or all float"),
        (lambda: mul_mat_qkv(None, ("Q8_0",) * 3, (0, 0, 0), 0, (0, 0, 0), (5, 0, 5), 32, 1), "mul_mat_qkv: n_rows is 0, allowed: at least 1"),
        (lambda: add_rms_norm_mul_mat_qkv(None, 0, 0, 0, 0.0, 0, ("F16", "Q8_0", "Q8_0"), (0,) * 3, (0,) * 3, (5, 5, 5), 32),
         "add_rms_norm_mul_mat_qkv: type is F16, allowed: quantized types"),
        (lambda: add_rms_norm_mul_mat_glu(None, 0, 0, 0, 0.0, 0, "silu", "Q8_0", "Q8_0", 0, 0, None, None, 0, 5, 34),
         "add_rms_norm_mul_mat_glu: n_cols is 34, allowed: a multiple of 4"),
        (lambda: add_rms_norm_mul_mat_glu(SimpleNamespace(n_multiprocessors=4, shared_limit=99 << 10), 0, 0, 0, 0.0, 0, "silu", "Q8_0", "Q8_0", 0, 0, None, None, 0, 5, 32768),
         "add_rms_norm_mul_mat_glu: n_cols is 32768, allowed: rows that leave room in 101376 bytes of shared memory"),
        (lambda: swiglu_act(None, 0, 0, 0, 65536, 5), "swiglu_act: n is 65536, allowed: 1..65535"),
        (lambda: add(None, 0, 0, 0, 4, 5, 2), "add: y_rows is 2, allowed: 1 or 4"),
        (lambda: rope(None, 0, 0, 0, 0, 1, 1, 64, 66, True), "rope: n_rot is 66, allowed: even, 2 to 64"),
        (lambda: set_rows(None, "q4_0", 0, 0, 0, 1, 32), "set_rows: type is q4_0, allowed: f32, f16, q8_0"),
        (lambda: set_rows(None, "q8_0", 0, 0, 0, 1, 40), "set_rows: k is 40, allowed: a multiple of 32 for q8_0"),
        (lambda: rope_set_rows(None, "q8_0", "f16", 0, 0, 0, (), 0, 0, 0, False, *[0] * 5, 1, 1, 1, 32, 32, True, 32), "rope_set_rows: type of K is q8_0, allowed: f32, f16"),
        (lambda: soft_max(None, 0, 0, 3, 513), "soft_max: n_cols is 513, allowed: 1..512"),
        (lambda: top_k(None, 0, 0, 3, 8, 9), "top_k: k is 9, allowed: 1..8"),
        (lambda: mask_groups(None, 0, 0, 3, 8, 8, 1), "mask_groups: n_group is 8, allowed: groups of two or more equal ones of 8 columns"),
        (lambda: mask_groups(None, 0, 0, 3, 8, 4, 5), "mask_groups: n_group_used is 5, allowed: 1..4"),
        (lambda: topk_moe(None, "tanh", 0, None, 0, 0, 1, 8, 2, 0, 0, True, 1), "topk_moe: gating is tanh, allowed: softmax, sigmoid, softmax_of_chosen"),
        (lambda: topk_moe(None, "softmax", 0, None, 0, 0, 1, 64, 33, 0, 0, True, 1), "topk_moe: k is 33, allowed: 1..32"),
        (lambda: topk_moe(None, "softmax", 0, None, 0, 0, 1, 60, 6, 8, 3, True, 1),
         "topk_moe: n_group is 8, allowed: groups of two or more equal ones of 60 columns"),
        (lambda: weighted_sum(None, 0, 0, 0, 3, 0, 5), "weighted_sum: n_used is 0, allowed: at least 1"),
        (lambda: swiglu_oai(None, 0, 0, 0, 1, 1, 1.7, 0), "swiglu_oai: limit is 0, allowed: above 0"),
        (lambda: slice_heads(None, 0, 0, 1, 2, 8, 4, 5), "slice_heads: channels is 4..8, allowed: 0..7"),
        (lambda: concat_heads(None, 0, 0, 0, 1, 4, 2, 8, 8), "concat_heads: n_head_y is 2, allowed: 1 or 4"),
        (lambda: cpy_rows_indirect(None, "q8_0", 0, 0, 0, 0, 32), "cpy_rows_indirect: n is 0, allowed: at least 1"),
    ]:
        with pytest.raises(ValueError) as error:
            refused()
        assert str(error.value) == message
