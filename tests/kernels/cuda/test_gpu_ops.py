"""rms_norm, elementwise operations, what is fused, rope, set_rows, flash_attn_ext, copies and the small ops of experts on a GPU
against kernels/reference, at real sizes."""
from itertools import product

import numpy as np
import pytest

from cuda_simulator import GPUMachine, no_gpu
from ggml_py.kernels.cuda.dense_layer_shape import Shape, layout
from ggml_py.kernels.cuda.flash_attn_ext import AttentionShape
from ggml_py.kernels.cuda.flash_attn_ext_combine import PIECE
from ggml_py.kernels.cuda.gated_delta_net import MANY_TOKENS
from ggml_py.kernels.cuda.mmq import block_shape, hopper_blocks
from ggml_py.kernels.cuda.set_rows import TYPES
from ggml_py.ops.compose import GATINGS
from expert_comparisons import check_experts
from matmul_comparisons import (SPECIAL, check_add_rms_norm_mul_mat, check_add_rms_norm_topk_moe, check_mul_mat_argmax,
                                check_mul_mat_bias, check_mul_mat_glu, check_mul_mat_qkv)
from op_comparisons import (SCALES_OF_Q8_0, check_add_rms_norm, check_add_rms_norm_act, check_argmax, check_binary, check_cpy,
                            check_cpy_rows, check_draw, check_flash_attn_ext, check_glu, check_heads, check_log_soft_max,
                            check_mul_sigmoid_act, check_relu_sqr_act, check_rms_norm, check_rms_norm_act,
                            check_rms_norm_swiglu_act, check_rope, check_rope_set_rows, check_row_op, check_scale,
                            check_set_rows, check_swiglu_act, check_swiglu_oai, check_top_k, check_topk_moe,
                            check_weighted_sum_biased, check_weighted_sum_gated)
from cpu_comparisons import N_EXPERT
from layer_comparisons import check_dense_layer
from recurrent_comparisons import (LENGTHS, check_gated_delta_net, check_gated_delta_net_gates, check_l2_norm, check_ssm_conv,
                                    check_ssm_scan)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def machine():
    reason = no_gpu()
    if reason:
        pytest.skip(reason)
    return GPUMachine()


@pytest.mark.parametrize("n_rows, n_cols",
                         [(1, 1), (1, 127), (2, 128), (5, 129), (512, 576), (4608, 64), (3, 1023), (3, 1024), (3, 1025),
                          (7, 14336)])
@pytest.mark.parametrize("special", [False, True])
def test_rms_norm(machine, n_rows, n_cols, special):
    check_rms_norm(machine, n_rows, n_cols, special)


COLUMNS = [1, 255, 256, 257, 576, 1000, 4095, 4096, 4097, 14336]


@pytest.mark.parametrize("k", COLUMNS)
@pytest.mark.parametrize("n", [1, 8, 300])
def test_rms_norm_act(machine, n, k):
    check_rms_norm_act(machine, n, k)
    check_rms_norm_act(machine, n, k, eps=0)


@pytest.mark.parametrize("k", COLUMNS)
@pytest.mark.parametrize("n", [1, 8, 300])
def test_add_rms_norm(machine, n, k):
    check_add_rms_norm(machine, n, k)
    check_add_rms_norm_act(machine, n, k)
    check_add_rms_norm_act(machine, n, k, eps=0)


@pytest.mark.parametrize("k", COLUMNS)
@pytest.mark.parametrize("n", [1, 8, 300])
def test_swiglu_act(machine, n, k):
    check_swiglu_act(machine, n, k)


@pytest.mark.parametrize("n, n_head, dim", [(1, 32, 128), (5, 6, 16), (300, 32, 128), (7, 5, 64), (4, 9, 32)])
def test_rms_norm_swiglu_act(machine, n, n_head, dim):
    check_rms_norm_swiglu_act(machine, n, n_head, dim)


@pytest.mark.parametrize("n, k", [(1, 4096), (8, 255), (300, 576)])
def test_mul_sigmoid_act(machine, n, k):
    check_mul_sigmoid_act(machine, n, k)


@pytest.mark.parametrize("n, k", [(1, 4096), (8, 255), (300, 576)])
def test_relu_sqr_act(machine, n, k):
    check_relu_sqr_act(machine, n, k)


@pytest.mark.parametrize("n, n_used, k", [(1, 4, 2880), (300, 10, 2048), (5, 1, 257)])
def test_weighted_sum_biased(machine, n, n_used, k):
    check_weighted_sum_biased(machine, n, n_used, k)


@pytest.mark.parametrize("n, n_used, k", [(1, 8, 2048), (300, 10, 2048), (5, 1, 257)])
def test_weighted_sum_gated(machine, n, n_used, k):
    check_weighted_sum_gated(machine, n, n_used, k)


@pytest.mark.parametrize("op", ["swiglu", "geglu", "reglu"])
@pytest.mark.parametrize("n_rows, n_cols", [(1, 1), (8, 255), (300, 1536), (300, 1537), (2, 100003)])
def test_glu(machine, op, n_rows, n_cols):
    check_glu(machine, op, n_rows, n_cols)


@pytest.mark.parametrize("act, types",
                         [("silu", ("Q4_K", "Q4_K")), ("gelu", ("Q8_0", "Q4_1")), ("relu", ("Q6_K", "IQ4_XS")),
                          ("silu", ("F16", "BF16")),
                          ("gelu", ("F32", "F32"))], ids=str)
@pytest.mark.parametrize("n", [1, 2, 8, 40, 130])
@pytest.mark.parametrize("biased", [False, True])
def test_mul_mat_glu(machine, act, types, n, biased):
    check_mul_mat_glu(machine, act, types, 130, 512, n, biased)
    check_mul_mat_glu(machine, act, types, 33, 256, n, biased)


@pytest.mark.parametrize("warpgroups", [False, True])
@pytest.mark.parametrize("act, types", [("silu", ("Q4_K", "Q4_K")), ("gelu", ("Q8_0", "Q4_1")), ("relu", ("Q6_K", "IQ4_XS"))],
                         ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_mul_mat_glu_in_blocks(machine, act, types, biased, warpgroups):
    """Of mmq, which many more rows and tokens take."""
    limit = machine.target.shared_limit
    blocks = (() if warpgroups > machine.target.warpgroups else hopper_blocks(types, limit) if warpgroups
              else (block_shape(types, limit),))
    if not blocks:
        pytest.skip("no such block")
    for block, n in product(blocks, (9, 130)):
        check_mul_mat_glu(machine, act, types, 289, 768, n, biased, block)


@pytest.mark.parametrize("types", [("Q4_K", "Q4_K", "Q6_K"), ("Q8_0",) * 3, ("Q4_1", "Q5_0", "IQ4_XS"), ("F16", "F32", "BF16")],
                         ids=str)
@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 17, 40, 64, 300])
@pytest.mark.parametrize("biased", [False, True])
def test_mul_mat_qkv(machine, types, n, biased):
    check_mul_mat_qkv(machine, types, (130, 64, 33), 512, n, biased)
    check_mul_mat_qkv(machine, types, (1, 257, 32), 1536, n, biased)
    check_mul_mat_qkv(machine, types, (4096, 1024, 1024), 256, n, biased)


@pytest.mark.parametrize("types",
                         [("Q4_K", "Q4_K", "Q6_K"), ("Q8_0",) * 3, ("Q4_1", "Q5_0", "Q4_0"), ("IQ2_S", "Q4_K", "IQ4_XS")],
                         ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_add_rms_norm_mul_mat(machine, types, biased):
    for n_cols in (256, 2048, 4096, 6144, *((32, 576, 544, 2880) if types[0] not in ("Q4_K", "IQ2_S") else ())):
        check_add_rms_norm_mul_mat(machine, types, (130, 64, 33), n_cols, biased=biased)
        check_add_rms_norm_mul_mat(machine, types[:2], 1500, n_cols, "silu", biased)
    for kind in range(1, 8):
        check_add_rms_norm_mul_mat(machine, types, (5000, 257, 32), 1024, biased=biased, kind=kind)
        check_add_rms_norm_mul_mat(machine, types[1:], 33, 1024, "gelu", biased, kind, eps=0)


@pytest.mark.parametrize("type_, n_expert, n_cols", [
    ("F32", 128, 2048), ("F32", 128, 4096), ("F32", 256, 2048), ("F16", 512, 1024), ("BF16", 32, 2880), ("F32", 60, 2052),
    ("F16", 8, 6144), ("F32", 1, 32)])
def test_add_rms_norm_topk_moe(machine, type_, n_expert, n_cols):
    """Many times, since the blocks of a cluster meet otherwise each time."""
    if machine.target.cc != (9, 0):
        pytest.skip("add_rms_norm_topk_moe is for compute capability 9.0")
    k = min(8, n_expert)
    for gating in GATINGS:
        for bias_of in (None, "choice", "logits"):
            check_add_rms_norm_topk_moe(machine, type_, n_expert, n_cols, k, gating, bias_of=bias_of)
    for kind in range(8):
        check_add_rms_norm_topk_moe(machine, type_, n_expert, n_cols, k, factor=2.5, kind=kind)
    for _ in range(20):
        check_add_rms_norm_topk_moe(machine, type_, n_expert, n_cols, 1, norm=False)


@pytest.mark.parametrize("types, n_cols, heads, n_ff", [
    (("Q4_1",) * 7, 576, (9, 3), 1536), (("Q5_0",) * 7, 576, (9, 3), 1536),
    (("Q4_1", "Q8_0", "Q5_0", "Q4_1", "Q8_0", "Q5_0", "Q4_0"), 320, (4, 4), 416),
    (("Q4_K", "Q4_K", "Q6_K", "Q4_K", "IQ2_S", "Q4_K", "Q6_K"), 512, (8, 2), 1024)], ids=str)
def test_dense_layer(machine, types, n_cols, heads, n_ff):
    """Many times, since the blocks of a cluster meet otherwise each time."""
    if machine.target.cc != (9, 0):
        pytest.skip("dense_layer is for compute capability 9.0")
    n_ctx = PIECE * layout(Shape(types, n_cols, *heads, 64, n_ff, 32, False)).n_pieces  # as long as there is room
    for position in (0, 1, 127, 128, 511, 700, n_ctx - 1):
        for neox in (False, True):
            check_dense_layer(machine, types, n_cols, heads, 64, n_ff, n_ctx, position, neox=neox,
                              holes=range(130, 256) if position == 700 else ())
    for _ in range(20):
        check_dense_layer(machine, types, n_cols, heads, 64, n_ff, n_ctx, 300)
    check_dense_layer(machine, types, n_cols, heads, 64, n_ff, n_ctx, 5, zeros=True)
    for position, behind in ((100, 30), (600, 400)):
        check_dense_layer(machine, types, n_cols, heads, 64, n_ff, n_ctx, position, behind=behind)


@pytest.mark.parametrize("op", ["add", "mul"])
@pytest.mark.parametrize("n_rows, n_cols, y_rows", [(1, 1, 1), (3, 255, 1), (300, 1536, 300), (300, 1537, 1), (2, 100003, 2)])
def test_binary(machine, op, n_rows, n_cols, y_rows):
    check_binary(machine, op, n_rows, n_cols, y_rows)


@pytest.mark.parametrize("a", [0.1, np.inf, 1e-40])
def test_scale(machine, a):
    check_scale(machine, 33, 1537, a)


@pytest.mark.parametrize("k", [1, 63, 64, 65, 16384, 16385, 49152, 128256])
def test_argmax(machine, k):
    check_argmax(machine, k)


@pytest.mark.parametrize("k", [1, 40, 512, 513, 4096, 4097, 32000, 49152, 128256, 262144])
def test_draw(machine, k):
    check_draw(machine, k)


@pytest.mark.parametrize("k, n_ids", [(2, 1), (63, 70), (128, 1), (4096, 3), (4097, 1), (128256, 1), (128256, 1100)])
def test_log_soft_max(machine, k, n_ids):
    check_log_soft_max(machine, k, n_ids)


@pytest.mark.parametrize("type_", ["Q4_K", "Q8_0", "Q6_K", "IQ4_XS", "F16", "F32"])
@pytest.mark.parametrize("n", [1, 5, 16, 17, 300])
def test_mul_mat_bias(machine, type_, n):
    for n_rows, n_cols in (1, 256), (33, 512), (1000, 1536):
        check_mul_mat_bias(machine, type_, n_rows, n_cols, n)


@pytest.mark.parametrize("type_", ["Q4_K", "Q8_0", "Q6_K", "IQ4_XS", "F16", "F32"])
@pytest.mark.parametrize("n", [1, 2, 5, 16, 17, 40, 300])
def test_mul_mat_argmax(machine, type_, n):
    for n_rows, n_cols in (1, 256), (33, 512), (1000, 1536), (35000, 256):  # the last: rounds of parts
        check_mul_mat_argmax(machine, type_, n_rows, n_cols, n)
    check_mul_mat_argmax(machine, "MXFP4", 1000, 544, n, zeros=True)


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("n, n_head, dim, n_rot",
                         [(1, 9, 64, 64), (300, 3, 64, 64), (7, 5, 80, 32), (3, 32, 128, 128), (2, 1, 576, 64), (2, 2, 7, 2)])
def test_rope(machine, n, n_head, dim, n_rot, neox):
    check_rope(machine, n, n_head, dim, n_rot, neox)


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("n, k", [(1, 192), (300, 192), (5, 4128)])
@pytest.mark.parametrize("special", [False, True])
def test_set_rows(machine, type_, n, k, special):
    rows = np.random.default_rng(n).permutation(n + 9)[:n].tolist()
    check_set_rows(machine, type_, rows, k, n + 9, special)


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("n, k", [(1, 192), (300, 192), (5, 4128)])
def test_cpy_rows(machine, type_, n, k):
    rows = [3, *(3 + np.random.default_rng(n).permutation(n - 1) + 1).tolist()]
    check_cpy_rows(machine, type_, rows, k, n + 9)


@pytest.mark.parametrize("types", [("f16", "f16"), ("f32", "f16"), ("f16", "f32"), ("f32", "f32"), ("q8_0", "q8_0"),
                                   ("q8_0", "f16")], ids=str)
@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("normed, indirect", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("n, heads, dims, n_rot",
                         [(1, (9, 3), (64, 64), 64), (300, (32, 8), (128, 128), 128), (7, (5, 5), (80, 66), 32),
                          (2, (1, 1), (7, 1), 2)])
def test_rope_set_rows(machine, types, normed, indirect, neox, n, heads, dims, n_rot):
    dims = tuple(-(-dim // 32) * 32 if type_ == "q8_0" else dim for type_, dim in zip(types, dims))
    rows = np.random.default_rng(n).permutation(n + 9)[:n].tolist()
    check_rope_set_rows(machine, types, rows, heads, dims, n_rot, neox, n + 9, normed, indirect)


@pytest.mark.parametrize("n_expert", [1, *N_EXPERT, 384])
def test_routing(machine, n_expert):
    for op in "soft_max", "sigmoid", "normalize":
        check_row_op(machine, op, n_expert)
    for k in sorted({1, min(8, n_expert), min(32, n_expert), n_expert}):
        check_top_k(machine, n_expert, k)
        check_row_op(machine, "normalize", k)
    for n_group in (n for n in (1, 2, 4, 8, n_expert // 2) if n and n_expert % n == 0 and n_expert > n):
        for used in sorted({1, (n_group + 1) // 2, n_group}):
            check_row_op(machine, "mask_groups", n_expert, n_group, used)


@pytest.mark.parametrize("gating", GATINGS)
@pytest.mark.parametrize("n_expert", [1, *N_EXPERT, 384])
def test_topk_moe(machine, gating, n_expert):
    for k, biased, groups, norm, factor in ((1, False, (0, 0), False, 1), (8, True, (0, 0), True, 2.5),
                                            (6, False, (2, 1), True, 1),
                                            (4, True, (4, 2), False, 0.3), (32, False, (8, 5), True, 1)):
        divided = n_expert % max(groups[0], 1) == 0 and n_expert > groups[0]
        check_topk_moe(machine, gating, n_expert, min(k, n_expert), biased, groups if divided else (0, 0), norm, factor)
    check_topk_moe(machine, gating, n_expert, min(4, n_expert), True, (0, 0), False, 1, "logits")


@pytest.mark.parametrize("n, n_used, m", [(1, 1, 1), (1, 8, 2048), (7, 6, 2048), (300, 4, 255), (5, 32, 257), (2, 9, 100003)])
def test_experts(machine, n, n_used, m):
    check_experts(machine, n, n_used, m, n_expert=60)


@pytest.mark.parametrize("n_rows, n_cols", [(1, 1), (8, 255), (300, 1536), (300, 1537), (2, 100003)])
def test_swiglu_oai(machine, n_rows, n_cols):
    check_swiglu_oai(machine, n_rows, n_cols)


@pytest.mark.parametrize("n, n_head, dim, first, count, dim_y",
                         [(1, 1, 1, 0, 1, 1), (7, 16, 192, 128, 64, 64), (300, 128, 128, 0, 77, 64), (3, 5, 24, 6, 11, 10)])
def test_heads(machine, n, n_head, dim, first, count, dim_y):
    check_heads(machine, n, n_head, dim, first, count, dim_y)


@pytest.mark.parametrize("n_bytes, first, to", [
    (77 << 20, 0, 32), ((16 << 20) + 4, 4, 8), ((1 << 20) + 1, 3, 1), (1, 0, 0), (16, 16, 4)])
def test_cpy(machine, n_bytes, first, to):
    check_cpy(machine, n_bytes, first, to)


def one_sequence(n, first=0):
    return [(0, p) for p in range(first, first + n)]


SEQUENCES = [(2, 5), (0, 300), (2, 6), (1, 0), (0, 301), (3, 127), (3, 128), (1, 1), (4, 255)]
HOLES = [(0, p) for p in (*range(128, 256), 0, 5, 299)] + [(2, 3), (4, 0), *((3, p) for p in range(127))]


@pytest.mark.parametrize("types", list(product(TYPES, TYPES)), ids=str)
def test_flash_attn_ext_types(machine, types):
    check_flash_attn_ext(machine, types, SEQUENCES, (9, 3), (64, 64), n_ctx=302, holes=HOLES)
    check_flash_attn_ext(machine, types, one_sequence(3, 126), (4, 4), (72, 40), n_ctx=131)


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("heads, dims, tokens", [
    ((9, 3), (64, 64), one_sequence(300)), ((4, 4), (80, 80), one_sequence(7, 125)), ((8, 2), (128, 128), one_sequence(40, 400)),
    ((16, 2), (128, 128), one_sequence(1, 4095)), ((16, 1), (576, 512), one_sequence(2, 200)),
    ((18, 2), (256, 256), one_sequence(2, 127)),
    ((5, 1), (32, 576), one_sequence(2, 130)), ((32, 8), (128, 128), one_sequence(1, 4095)),
    ((32, 8), (128, 128), one_sequence(100, 450)),
    ((9, 3), (64, 64), one_sequence(1, 511)), ((32, 4), (128, 128), one_sequence(7, 1000)),
    ((8, 8), (96, 112), one_sequence(40, 250))], ids=str)
def test_flash_attn_ext_shapes(machine, type_, heads, dims, tokens):
    check_flash_attn_ext(machine, (type_, type_), tokens, heads, dims, n_ctx=tokens[-1][1] + 1)


@pytest.mark.parametrize("types", list(product(TYPES, TYPES)), ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (4, 1), (16, 2)], ids=str)
def test_flash_attn_ext_kernels(machine, types, heads):
    """Every kernel that takes the types, in shapes that are not chosen as well: blocks with several pieces each,
    tiles of either size."""
    group = heads[0] // heads[1]
    shapes = [AttentionShape("any", group, n_splits) for n_splits in (None, 1, 2)]
    if "f32" not in types:
        n_warps = (8, 16) if types == ("f16", "f16") else (16,)
        shapes += [AttentionShape("few", group, n_splits, each) for n_splits, each in product((1, 2, 3), n_warps)]
        shapes += [AttentionShape("narrow", group, n_splits) for n_splits in (None, 1, 2, 3)]
        shapes += [AttentionShape("tile", group, n_splits, n_warps) for n_splits, n_warps in product((None, 1, 3), (4, 8))]
        shapes += [AttentionShape("group", group, None, 8)] * machine.target.warpgroups
    for dims, shape in product([(64, 64), (128, 128), (96, 32)], shapes):
        whole = {"f32": 1, "f16": 8, "q8_0": 64}  # of the channels of a head that "narrow" takes
        if shape.kernel == "narrow" and any(dim % whole[type_] for dim, type_ in zip(dims, types)):
            continue
        check_flash_attn_ext(machine, types, SEQUENCES, heads, dims, n_ctx=400, holes=HOLES, shape=shape)


@pytest.mark.parametrize("types, dims, factors, special", SCALES_OF_Q8_0, ids=str)
def test_flash_attn_ext_scales_of_q8_0(machine, types, dims, factors, special):
    for shape in (AttentionShape("narrow", 1, 1), AttentionShape("few", 1, 1, 16), AttentionShape("tile", 1, 1, 4)):
        check_flash_attn_ext(machine, types, [(0, 3), (0, 299)], (2, 2), dims, n_ctx=300, special=special, factors=factors,
                             shape=shape)


@pytest.mark.parametrize("types", list(product(TYPES, TYPES)), ids=str)
@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 290])
def test_flash_attn_ext_windows_and_sinks(machine, types, window):
    """gpt-oss's heads, with every kernel."""
    shapes = [AttentionShape("any", 8, n_splits) for n_splits in (None, 2)]
    if "f32" not in types:
        shapes += [AttentionShape(*shape) for shape in (("few", 8, 1, 16), ("few", 8, 3, 16), ("narrow", 8), ("narrow", 8, 3))]
        shapes += [AttentionShape("tile", 8, n_splits, n_warps) for n_splits, n_warps in product((None, 2), (4, 8))]
        shapes += [AttentionShape("group", 8, None, 8)] * machine.target.warpgroups
    for shape in shapes:
        check_flash_attn_ext(machine, types, SEQUENCES, (16, 2), (64, 64), n_ctx=400, holes=HOLES, shape=shape, window=window,
                             sinks=True)
    check_flash_attn_ext(machine, types, one_sequence(70, 250), (64, 8), (64, 64), n_ctx=320, window=window, sinks=True)
    check_flash_attn_ext(machine, types, one_sequence(1, 4095), (64, 8), (64, 64), n_ctx=4096, window=window)


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("tokens", [SEQUENCES, one_sequence(1, 4095), one_sequence(40, 200)], ids=lambda tokens: str(len(tokens)))
@pytest.mark.parametrize("n_head, dims", [(16, (576, 512)), (128, (576, 512)), (5, (288, 264)), (3, (96, 64)), (2, (160, 128))])
def test_flash_attn_ext_latent(machine, type_, tokens, n_head, dims):
    check_flash_attn_ext(machine, (type_, type_), tokens, (n_head, 1), dims, n_ctx=max(p for _, p in tokens) + 1, latent=True)


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("heads, dims",
                         [((9, 3), (64, 64)), ((32, 8), (128, 128)), ((4, 2), (256, 256)), ((4, 4), (80, 80)),
                          ((3, 1), (32, 512)), ((11, 1), (64, 32))], ids=str)
def test_flash_attn_ext_act(machine, type_, heads, dims):
    """Pieces combined into activations, in one round and in several, and attention that is quantized behind."""
    check_flash_attn_ext(machine, (type_, type_), SEQUENCES, heads, dims, n_ctx=302, holes=HOLES, act=True)
    check_flash_attn_ext(machine, (type_, type_), one_sequence(1, 4500), heads, dims, n_ctx=5000, act=True)
    check_flash_attn_ext(machine, (type_, type_), one_sequence(1, 4500), heads, dims, n_ctx=5000, sinks=True, act=True)
    check_flash_attn_ext(machine, (type_, type_), one_sequence(2, 4500), heads, dims, n_ctx=5000, window=300, sinks=True,
                         act=True)
    check_flash_attn_ext(machine, (type_, type_), one_sequence(50, 130), heads, dims, n_ctx=180, sinks=True, act=True)


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("tokens", [SEQUENCES, one_sequence(100, 450)], ids=lambda tokens: str(len(tokens)))
def test_flash_attn_ext_of_192_channels(machine, type_, tokens):
    check_flash_attn_ext(machine, (type_, type_), tokens, (16, 16), (192, 128), n_ctx=550)


@pytest.mark.parametrize("types, heads, dims", [
    (("f16", "f16"), (16, 2), (256, 256)), (("q8_0", "q8_0"), (16, 2), (256, 256)), (("q8_0", "f16"), (16, 2), (256, 256)),
    (("f16", "q8_0"), (4, 2), (256, 192)), (("f16", "f16"), (3, 1), (64, 256)), (("q8_0", "f16"), (2, 2), (224, 160))], ids=str)
def test_flash_attn_ext_of_256_channels(machine, types, heads, dims):
    group = heads[0] // heads[1]
    for n_splits, n_warps in product((None, 1, 3), (4, 8)):
        check_flash_attn_ext(machine, types, SEQUENCES, heads, dims, n_ctx=400, holes=HOLES,
                             shape=AttentionShape("tile", group, n_splits, n_warps))
    check_flash_attn_ext(machine, types, one_sequence(300, 450), heads, dims, n_ctx=750)
    check_flash_attn_ext(machine, types, one_sequence(100, 450), heads, dims, n_ctx=750, window=130, sinks=True)


@pytest.mark.parametrize("types, dims",
                         [(("f16", "f16"), (65, 63)), (("f32", "f32"), (3, 7)), (("f16", "f32"), (1, 1)),
                          (("f32", "f16"), (127, 129))], ids=str)
def test_flash_attn_ext_without_wide_loads(machine, types, dims):
    check_flash_attn_ext(machine, types, SEQUENCES, (6, 2), dims, n_ctx=303, holes=HOLES)


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("value", SPECIAL)
def test_flash_attn_ext_special(machine, type_, value):
    special = (("q", 0, 130, value), ("k", 0, 129, value), ("v", 0, 127, value))
    for each in special:
        check_flash_attn_ext(machine, (type_, type_), one_sequence(4, 127), (3, 1), (64, 64), n_ctx=131, special=(each,))


# Recurrent layers

@pytest.mark.parametrize("dim, n_head_k, n_head_v, tiled", [(128, 2, 4, False), (128, 1, 3, True), (64, 2, 2, True),
                                                            (32, 1, 2, True), (16, 2, 6, True)])
def test_gated_delta_net(machine, dim, n_head_k, n_head_v, tiled):
    """By either kernel, whatever the number of tokens."""
    for plan in (MANY_TOKENS, *(columns for columns in (1, 2, 4) if 32 * columns <= max(32, dim))):
        check_gated_delta_net(machine, dim, n_head_k, n_head_v, tiled, plan=plan)
        check_gated_delta_net(machine, dim, n_head_k, n_head_v, tiled, (300, 1), 1, plan)


@pytest.mark.parametrize("dim", [16, 32, 64, 128])
def test_gated_delta_net_gates(machine, dim):
    check_gated_delta_net_gates(machine, dim, 4)
    check_gated_delta_net_gates(machine, dim, 3, (70, 1))


@pytest.mark.parametrize("n_channels, taps, n_kept", [(8192, 4, 3), (257, 3, 1), (8, 2, 5)])
@pytest.mark.parametrize("lengths", [LENGTHS, (1,), (300, 2, 70)])
def test_ssm_conv(machine, n_channels, taps, n_kept, lengths):
    check_ssm_conv(machine, n_channels, taps, lengths, n_kept)


@pytest.mark.parametrize("activation, biased", [("silu", True), ("none", False), ("none", True)])
@pytest.mark.parametrize("taps", [3, 4])
def test_ssm_conv_with_bias_and_without_activation(machine, taps, activation, biased):
    check_ssm_conv(machine, 1000, taps, (300, 2, 70), 3, activation, biased)


@pytest.mark.parametrize("n_state, dim, n_head, n_group", [(128, 64, 8, 2), (128, 80, 3, 1), (64, 64, 2, 1), (32, 32, 4, 2),
                                                           (16, 6, 6, 3)])
def test_ssm_scan(machine, n_state, dim, n_head, n_group):
    """By either kernel, whatever the number of tokens."""
    for plan in MANY_TOKENS, 1, 2:
        check_ssm_scan(machine, n_state, dim, n_head, n_group, plan=plan)
        check_ssm_scan(machine, n_state, dim, n_head, n_group, (300, 1), 1, plan)


@pytest.mark.parametrize("n, n_head, dim, n_cols", [(1, 32, 128, 8192), (300, 32, 128, 8192), (3, 9, 40, 361), (2, 1, 512, 512)])
def test_l2_norm(machine, n, n_head, dim, n_cols):
    check_l2_norm(machine, n, n_head, dim, n_cols)
