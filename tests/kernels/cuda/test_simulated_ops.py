"""rms_norm, elementwise operations, what is fused, rope, set_rows and the small ops of experts in the simulator; and what their
modules refuse."""
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest

from cuda_simulator import SimulatedMachine, run_in_simulator
from ggml_py.base.errors import UserError
from ggml_py.check.evaluate import Value, make_node
from ggml_py.kernels.call import Call, Operand, Unsupported
from ggml_py.kernels.cuda import argmax as cuda_argmax
from ggml_py.kernels.cuda import draw as cuda_draw
from ggml_py.kernels.cuda import log_soft_max as cuda_log_soft_max
from ggml_py.kernels.cuda import quantize as cuda_quantize
from ggml_py.kernels.cuda import mmq_few
from ggml_py.kernels.cuda import rms_norm as cuda_rms_norm
from ggml_py.kernels.cuda.add_rms_norm_mul_mat import MOST_NORMED, row_words
from ggml_py.kernels.cuda.mul_mat_argmax import plan, scratch
from ggml_py.kernels.cuda.rms_norm import n_threads
from ggml_py.ops.table import OPS
from ggml_py.quant.formats import FORMATS
from expert_comparisons import check_experts
from matmul_comparisons import (activations, check_add_rms_norm_mul_mat, check_mul_mat_argmax, check_mul_mat_bias,
                                check_mul_mat_glu, check_mul_mat_qkv, seeded)
from op_comparisons import (check_add_rms_norm, check_add_rms_norm_act, check_argmax, check_binary, check_cpy,
                            check_cpy_rows, check_draw, check_glu, check_heads, check_log_soft_max, check_mul_sigmoid_act,
                            check_relu_sqr_act, check_rms_norm, check_rms_norm_act, check_rms_norm_swiglu_act, check_rope,
                            check_rope_set_rows, check_row_op, check_scale, check_set_rows, check_swiglu_act,
                            check_swiglu_oai, check_top_k, check_topk_moe, check_weighted_sum_biased,
                            check_weighted_sum_gated)
from op_runs import MachineBackend, check_op, empty_cache, plain, product_input


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


@pytest.mark.parametrize("op, n_rows, n_cols, y_rows",
                         [("add", 2, 257, 2), ("add", 3, 5, 1), ("mul", 1, 256, 1), ("mul", 3, 20, 1)])
def simulate_binary(machine, op, n_rows, n_cols, y_rows):
    check_binary(machine, op, n_rows, n_cols, y_rows)


@pytest.mark.parametrize("n, n_head, dim", [(2, 3, 128), (1, 6, 16), (3, 5, 64), (2, 9, 32)])
def simulate_rms_norm_swiglu_act(machine, n, n_head, dim):
    check_rms_norm_swiglu_act(machine, n, n_head, dim)


@pytest.mark.parametrize("n, k", [(1, 1), (4, 255), (2, 576)])
def simulate_mul_sigmoid_act(machine, n, k):
    check_mul_sigmoid_act(machine, n, k)


@pytest.mark.parametrize("n, k", [(1, 1), (4, 255), (2, 576)])
def simulate_relu_sqr_act(machine, n, k):
    check_relu_sqr_act(machine, n, k)


@pytest.mark.parametrize("n, n_used, k", [(1, 4, 40), (3, 1, 257), (2, 9, 33)])
def simulate_weighted_sum_biased(machine, n, n_used, k):
    check_weighted_sum_biased(machine, n, n_used, k)


@pytest.mark.parametrize("n, n_used, k", [(1, 8, 40), (3, 1, 257)])
def simulate_weighted_sum_gated(machine, n, n_used, k):
    check_weighted_sum_gated(machine, n, n_used, k)


@pytest.mark.parametrize("op", ["swiglu", "geglu", "reglu"])
@pytest.mark.parametrize("n_rows, n_cols", [(1, 1), (4, 40), (1, 257)])
def simulate_glu(machine, op, n_rows, n_cols):
    check_glu(machine, op, n_rows, n_cols)


@pytest.mark.parametrize("act, types, n_rows, n_cols, n, biased", [
    ("silu", ("Q4_K", "Q4_K"), 33, 256, 1, False), ("gelu", ("Q8_0", "Q4_1"), 1, 288, 2, True),
    ("relu", ("Q6_K", "IQ4_XS"), 34, 256, 1, False),
    ("silu", ("F16", "F32"), 3, 21, 2, True), ("relu", ("BF16", "BF16"), 33, 7, 1, True)], ids=str)
def simulate_mul_mat_glu(machine, act, types, n_rows, n_cols, n, biased):
    check_mul_mat_glu(machine, act, types, n_rows, n_cols, n, biased)


@pytest.mark.parametrize("types, n_rows, n_cols, n, biased", [
    (("Q4_K", "Q4_K", "Q6_K"), (65, 33, 1), 256, 1, True), (("Q8_0", "Q4_1", "Q5_0"), (3, 34, 32), 288, 3, False),
    (("Q8_0",) * 3, (2, 33, 1), 32, 2, True),
    (("F16", "F32", "BF16"), (3, 1, 33), 21, 2, True)], ids=str)
def simulate_mul_mat_qkv(machine, types, n_rows, n_cols, n, biased):
    check_mul_mat_qkv(machine, types, n_rows, n_cols, n, biased)


@pytest.mark.parametrize("types, n_rows, n_cols, act, biased, kind", [
    (("Q4_K", "Q4_K", "Q6_K"), (33, 1, 34), 256, None, True, 0), (("Q8_0", "Q4_1", "Q5_0"), (3, 34, 32), 288, None, False, 0),
    (("Q4_1",) * 3, (40, 9, 9), 576, None, False, 0), (("IQ2_S", "Q8_0"), 34, 512, "silu", False, 0),
    *((("Q4_1", "Q8_0"), 3, 32, "relu", False, kind) for kind in range(8)),
    *((("Q8_0",) * 3, (3, 2, 1), 544, None, False, kind) for kind in range(1, 4))],
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


@pytest.mark.parametrize("k, rows", [(1, slice(None)), (40, slice(None)), (130, slice(None)), (2200, slice(5, 9))], ids=str)
def simulate_draw(machine, k, rows, monkeypatch):
    """Warps of 64 columns: one of a row, three, and 35, whose lists two warps merge."""
    monkeypatch.setattr(cuda_draw, "VALUES", 2)
    monkeypatch.setattr(cuda_draw, "WIDTH", 64)
    check_draw(machine, k, rows)


@pytest.mark.parametrize("k, n_ids", [(2, 1), (130, 131), (700, 2)])
def simulate_log_soft_max(machine, k, n_ids, monkeypatch):
    """Fewer columns than threads, more ids than threads, rounds."""
    monkeypatch.setattr(cuda_log_soft_max, "n_threads", lambda n_cols: 128)
    check_log_soft_max(machine, k, n_ids)


@pytest.mark.parametrize("type_, n_rows, n_cols, n", [
    ("Q8_0", 1, 32, 1), ("Q4_K", 65, 512, 1), ("Q6_K", 34, 256, 5), ("F32", 33, 40, 1), ("F16", 67, 21, 3)], ids=str)
def simulate_mul_mat_bias(machine, type_, n_rows, n_cols, n):
    check_mul_mat_bias(machine, type_, n_rows, n_cols, n)


@pytest.mark.parametrize("type_, n_rows, n_cols, n, zeros", [
    ("Q8_0", 1, 32, 2, False), ("Q4_K", 65, 512, 1, False), ("Q6_K", 34, 256, 5, False), ("Q4_1", 70, 288, 17, False),
    ("MXFP4", 66, 32, 2, True),
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
    (("f16", "f32"), (1, 1), (2, 1), 2, False, True, True), (("f32", "f32"), (5, 1), (130, 3), 64, True, True, False),
    (("q8_0", "q8_0"), (2, 2), (64, 160), 64, False, False, True), (("q8_0", "q8_0"), (5, 1), (96, 32), 70, True, True, False),
    (("q8_0", "f16"), (1, 5), (32, 6), 2, True, False, False), (("f16", "q8_0"), (2, 1), (6, 32), 6, False, False, True)],
    ids=str)
def simulate_rope_set_rows(machine, types, heads, dims, n_rot, neox, normed, indirect):
    check_rope_set_rows(machine, types, [3, 0], heads, dims, n_rot, neox, 4, normed, indirect)


@pytest.mark.parametrize("op, n_cols, params", [
    ("soft_max", 5, ()), ("soft_max", 60, ()), ("soft_max", 257, ()), ("soft_max", 512, ()), ("sigmoid", 257, ()),
    ("normalize", 5, ()), ("normalize", 40, ()),
    ("mask_groups", 60, (4, 2)), ("mask_groups", 160, (8, 3)), ("mask_groups", 2, (1, 1)), ("mask_groups", 256, (128, 5))],
                         ids=str)
def simulate_row_op(machine, op, n_cols, params):
    check_row_op(machine, op, n_cols, *params)


@pytest.mark.parametrize("n_cols, k", [(1, 1), (8, 8), (60, 4), (257, 2), (512, 3)])
def simulate_top_k(machine, n_cols, k):
    check_top_k(machine, n_cols, k)


@pytest.mark.parametrize("gating, n_expert, k, biased, groups, norm, factor", [
    ("softmax", 8, 2, False, (0, 0), True, 1), ("sigmoid", 60, 6, True, (4, 2), True, 2.5),
    ("softmax_of_chosen", 32, 4, False, (0, 0), False, 1),
    ("softmax", 160, 3, True, (8, 3), False, 16), ("sigmoid", 257, 2, True, (0, 0), True, 0.3),
    ("softmax_of_chosen", 40, 32, True, (0, 0), True, 1),
    ("softmax", 512, 2, False, (1, 1), False, 1)])
def simulate_topk_moe(machine, gating, n_expert, k, biased, groups, norm, factor):
    check_topk_moe(machine, gating, n_expert, k, biased, groups, norm, factor)


@pytest.mark.parametrize("gating, n_expert, k, groups", [("softmax_of_chosen", 32, 4, (0, 0)), ("softmax", 60, 6, (4, 2)),
                                                         ("sigmoid", 257, 2, (0, 0))])
def simulate_bias_of_logits(machine, gating, n_expert, k, groups):
    check_topk_moe(machine, gating, n_expert, k, True, groups, False, 1, "logits")


@pytest.mark.parametrize("n, n_used, m", [(1, 1, 1), (2, 8, 33), (3, 9, 257)])
def simulate_experts(machine, n, n_used, m):
    check_experts(machine, n, n_used, m)


@pytest.mark.parametrize("n_rows, n_cols", [(1, 1), (4, 40), (1, 257)])
def simulate_swiglu_oai(machine, n_rows, n_cols):
    check_swiglu_oai(machine, n_rows, n_cols)


@pytest.mark.parametrize("n, n_head, dim, first, count, dim_y",
                         [(1, 1, 1, 0, 1, 1), (3, 5, 24, 6, 11, 10), (1, 2, 192, 128, 64, 3)])
def simulate_heads(machine, n, n_head, dim, first, count, dim_y):
    check_heads(machine, n, n_head, dim, first, count, dim_y)


@pytest.mark.parametrize("n_bytes, first, to", [
    (16 * 300, 0, 32), (16 * 3, 16, 4), (4 * 257, 8, 0), (16 * 3, 3, 16), (1, 0, 0), (515, 0, 1), (8 * 5, 8, 16)])
def simulate_cpy(machine, n_bytes, first, to):
    """By 16 bytes, by words and by bytes, as addresses and size allow."""
    check_cpy(machine, n_bytes, first, to)


def simulate_cpy_of_states(machine):
    """Of every dtype that a state has."""
    floats = activations(2, 300, seeded("cpy"))
    for value in (empty_cache("x", "q8_0", 3, 64, 7), empty_cache("x", "f16", 3, 7, 9), plain("x", np.arange(6).reshape(2, 3)),
                  plain("x", floats), product_input("Q8_0", floats)):
        dst = Value("dst", value.dtype, value.shape, tuple(np.zeros_like(part) for part in value.arrays))
        check_op(machine, f"cpy[{value.dtype}]", "cpy", value, dst)


# Launch values, without the simulator

@pytest.mark.parametrize("n_cols, threads",
                         [(1, 128), (512, 128), (513, 256), (576, 256), (1024, 256), (4096, 1024), (4097, 1024), (1 << 20, 1024)])
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
    x = Operand("act" if FORMATS[type_].is_quantized else "f32", (n, n_cols))
    device = SimpleNamespace(n_multiprocessors=132, shared_limit=227 << 10, warpgroups=True)
    call = Call("mul_mat_argmax", "logits", device, dict(w=Operand(type_, (n_rows, n_cols)), x=x, out=Operand("i32", (n,))))
    call.plan = plan(call)
    assert scratch(call) == ("i32", (expected,))


def f32(*shape):
    return Operand("f32", shape)


def ints(*shape, dtype="i32"):
    return Operand(dtype, shape)


def weights(*types, n_rows=5, n_cols=32):
    return [Operand(type_, (n_rows, n_cols)) for type_ in types]


def glu(gate, up, act="silu", gate_bias=None, up_bias=None, n_rows=5, n_cols=32):
    gate, up = weights(gate, up, n_rows=n_rows, n_cols=n_cols)
    biases = dict(gate_bias=gate_bias, up_bias=up_bias)
    return dict(gate=gate, up=up, x=Operand("act", (1, n_cols)), **biases, act=act, out=f32(1, n_rows))


def qkv(*types, n_rows=5, n_cols=32):
    matrices = {what: Operand(type_, (n_rows if what == "k" else 5, n_cols)) for what, type_ in zip("qkv", types)}
    outs = {f"{what}_out": f32(1, w.shape[0]) for what, w in matrices.items()}
    return dict(**matrices, x=Operand("act", (1, n_cols)), q_bias=None, k_bias=None, v_bias=None, **outs)


def norm(n_cols):
    return dict(x=f32(1, n_cols), y=f32(1, n_cols), w=f32(n_cols), sum=f32(1, n_cols), eps=0.0)


def rotated(type_k="f16", n_head=1, dim=32, dim_k=32, norms=(None, None), n_rot=32):
    caches = dict(cache_k=Operand(type_k, (9, dim_k)), cache_v=Operand("f16", (9, 32)), dst=ints(1, dtype="i64"))
    rows = dict(q=f32(1, dim), k=f32(1, dim_k), v=f32(1, 32), pos=ints(1), table=f32(9, n_rot // 2, 2), q_out=f32(1, dim))
    params = dict(n_head=n_head, n_head_kv=1, neox=True, eps=None, slot_k=None, slot_v=None)
    return dict(**rows, **caches, q_norm=norms[0], k_norm=norms[1], **params)


def routed(n_expert=8, k=2, gating="softmax", groups=(0, 0)):
    params = dict(k=k, gating=gating, norm=True, factor=1.0, n_group=groups[0], n_group_used=groups[1], bias_of="choice")
    return dict(logits=f32(1, n_expert), bias=None, weights=f32(1, k), ids=ints(1, k), **params)


def rows_of(op, x, **params):
    return dict(x=x, out=x, **params) if op != "top_k" else dict(x=x, ids=ints(x.n_rows, params["k"]), **params)


@pytest.mark.parametrize("op, given, message", [
    ("rms_norm", dict(x=f32(0, 5), w=f32(5), out=f32(0, 5), eps=1e-5), "n_rows is 0, allowed: at least 1"),
    ("rms_norm_act", dict(x=f32(3, 0), w=f32(0), act=Operand("act", (3, 0)), eps=1e-5), "n_cols is 0, allowed: at least 1"),
    ("add_rms_norm", dict(norm(0), out=f32(1, 0)), "n_cols is 0, allowed: at least 1"),
    ("add_rms_norm_act", dict(norm(5), x=f32(0, 5)), "n_rows is 0, allowed: at least 1"),
    ("add_rms_norm_and_act", norm(0), "n_cols is 0, allowed: at least 1"),
    ("mul_mat_glu", glu("Q8_0", "Q8_0", "tanh"), "act is tanh, allowed: silu, gelu, relu"),
    ("mul_mat_glu", glu("Q8_0", "Q8_0", gate_bias=f32(5)), "bias is of one product only, allowed: of both or of none"),
    ("mul_mat_argmax", dict(w=Operand("Q8_0", (0, 32)), x=Operand("act", (1, 32)), out=ints(1)),
     "n_rows is 0, allowed: at least 1"),
    ("mul_mat_qkv", qkv("Q8_0", "F16", "Q8_0"), "types is Q8_0, F16, Q8_0, allowed: all quantized or all float"),
    ("mul_mat_qkv", qkv("Q8_0", "Q8_0", "Q8_0", n_rows=0), "n_rows is 0, allowed: at least 1"),
    ("add_rms_norm_mul_mat_qkv", {**qkv("F16", "Q8_0", "Q8_0"), **norm(32)}, "type is F16, allowed: quantized types"),
    ("add_rms_norm_mul_mat_glu", {**glu("Q8_0", "Q8_0", n_cols=34), **norm(34)},
     "n_cols is 34, allowed: a multiple of 4 up to 6144"),
    ("add_rms_norm_mul_mat_glu", {**glu("Q8_0", "Q8_0", n_cols=32768), **norm(32768)},
     "n_cols is 32768, allowed: a multiple of 4 up to 6144"),
    ("swiglu_act", dict(gate=f32(65536, 5), up=f32(65536, 5), act=Operand("act", (65536, 5))), "n is 65536, allowed: 1..65535"),
    ("add", dict(x=f32(4, 5), y=f32(2, 5), out=f32(4, 5)), "y_rows is 2, allowed: 1 or 4"),
    ("softcap", dict(x=f32(4, 5), out=f32(4, 5), cap=0.0), "cap is 0.0, allowed: above 0"),
    ("scale", dict(x=f32(1, 65535 * 256 + 1), out=f32(1, 65535 * 256 + 1), factor=2.0),
     "n_cols is 16776961, allowed: 1 to 16776960"),
    ("rope", dict(x=f32(1, 64), pos=ints(1), table=f32(9, 33, 2), out=f32(1, 64), n_head=1, neox=True),
     "n_rot is 66, allowed: even, 2 to 64"),
    ("set_rows", dict(cache=Operand("q4_0", (9, 32)), x=f32(1, 32), rows=ints(1, dtype="i64")),
     "type is q4_0, allowed: f32, f16, q8_0"),
    ("set_rows", dict(cache=Operand("q8_0", (9, 40)), x=f32(1, 40), rows=ints(1, dtype="i64")),
     "k is 40, allowed: a multiple of 32 for q8_0"),
    ("cpy_rows_indirect", dict(cache=Operand("q8_0", (9, 32)), x=f32(0, 32), dst=ints(1, 0, dtype="i64"), slot=0),
     "n is 0, allowed: at least 1"),
    ("rope_set_rows", rotated("q4_0"), "type of K is q4_0, allowed: f32, f16, q8_0"),
    ("rope_set_rows", rotated("q8_0", dim=40, dim_k=40), "head size of K is 40, allowed: a multiple of 32 for q8_0"),
    ("rope_set_rows", rotated(dim_k=16), "head size of K is 16, allowed: 32, that of Q"),
    ("rope_set_rows", rotated(n_rot=34), "n_rot is 34, allowed: even, 2 to 32"),
    ("rope_set_rows", rotated(norms=(f32(32), None)), "norms is 1, allowed: 0 or 2"),
    ("rope_set_rows", rotated(norms=(f32(32), Operand("F16", (32,)))), "a norm is F16 [32], allowed: f32 [32]"),
    ("argmax", dict(x=f32(65536, 5), out=ints(65536)), "n is 65536, allowed: 1..65535"),
    ("soft_max", rows_of("soft_max", f32(3, 513)), "n_cols is 513, allowed: 1..512"),
    ("normalize", rows_of("normalize", f32(0, 8)), "n_rows is 0, allowed: at least 1"),
    ("top_k", rows_of("top_k", f32(3, 8), k=9), "k is 9, allowed: 1..8"),
    ("top_k", rows_of("top_k", f32(3, 513), k=9), "n_cols is 513, allowed: 1..512"),
    ("mask_groups", rows_of("mask_groups", f32(3, 8), n_group=8, n_group_used=1),
     "n_group is 8, allowed: groups of two or more equal ones of 8 columns"),
    ("mask_groups", rows_of("mask_groups", f32(3, 8), n_group=4, n_group_used=5), "n_group_used is 5, allowed: 1..4"),
    ("topk_moe", routed(gating="tanh"), "gating is tanh, allowed: softmax, sigmoid, softmax_of_chosen"),
    ("topk_moe", routed(64, 33), "k is 33, allowed: 1..32"),
    ("topk_moe", routed(513), "n_cols is 513, allowed: 1..512"),
    ("topk_moe", routed(60, 6, groups=(8, 3)), "n_group is 8, allowed: groups of two or more equal ones of 60 columns"),
    ("add_id", dict(out=f32(3, 5), may_skip=True), "may_skip is True, allowed: False: ids are experts"),
    ("mul_mat_id", dict(may_skip=True), "may_skip is True, allowed: False: ids are experts"),
    ("split_ids", dict(ids=Operand("i32", (0, 4))), "n_tokens * n_used is 0, allowed: at least 1"),
    ("weighted_sum", dict(x=f32(0, 5), w=f32(3, 0), out=f32(3, 5)), "n_used is 0, allowed: at least 1"),
    ("swiglu_oai", dict(gate=f32(1, 1), up=f32(1, 1), out=f32(1, 1), alpha=1.7, limit=0), "limit is 0, allowed: above 0"),
    ("slice_heads", dict(x=f32(1, 16), out=f32(1, 10), n_head=2, first=4, n=5), "channels is 4..8, allowed: 0..7"),
    ("concat_heads", dict(x=f32(1, 32), y=f32(1, 16), out=f32(1, 48), n_head=4, n_head_y=2), "n_head_y is 2, allowed: 1 or 4"),
    ("cpy", dict(x=Operand("Q4_K", (1, 256)), dst=Operand("Q4_K", (1, 256))),
     "type is Q4_K, allowed: f32, f16, q8_0, i32, i64, u8, act"),
    ("cpy", dict(x=f32(0, 5), dst=f32(0, 5)), "shape is [0, 5], allowed: at least one element"),
    ])
def test_refusals(op, given, message):
    device = SimpleNamespace(n_multiprocessors=4, shared_limit=99 << 10, warpgroups=False)
    with pytest.raises(Unsupported) as error:
        import_module(f"ggml_py.kernels.cuda.{OPS[op].module}").check(Call(op, "node", device, given))
    assert str(error.value) == message


def test_routing_of_many_experts():
    """topk_moe takes up to 32 of a token; of more its parts run, of up to 512 columns each.
    What no kernel takes is refused by the node's name."""
    backend, params = MachineBackend(SimpleNamespace(target=None)), dict(gating="softmax", norm=True)

    def node(n_expert, k):
        return make_node(backend, "topk_moe", [plain("logits", np.zeros((2, n_expert), np.float32))], dict(k=k, **params),
                         "routing")[0]
    assert backend.accepts(node(512, 32)) and not backend.accepts(node(64, 33)) and not backend.accepts(node(513, 8))
    for part in node(64, 33).primitives():
        backend.prepare(part)
    with pytest.raises(UserError, match="^routing: cuda:0: topk_moe: k is 33, allowed: 1..32; the device cpu takes more$"):
        backend.prepare(node(64, 33))
    with pytest.raises(UserError,
                       match="^routing-soft_max-0: cuda:0: soft_max: n_cols is 513, allowed: 1..512; the device cpu takes more$"):
        backend.prepare(node(513, 8).primitives()[0])
