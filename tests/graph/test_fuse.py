"""Graph passes: on and off they give the same bits, and what lies just outside their conditions is left alone."""
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
from fake_model import FakeModel
from hypothesis import given, settings, strategies as st

from ggml_py import cli
from composing_cpu import H200, ComposingCPU
from ggml_py.backends.base import KernelBackend
from ggml_py.base.errors import UserError
from ggml_py.files.gguf import GGUFFile
from ggml_py.graph.graph import Graph, Tensor
from ggml_py.engine.model import Model
from ggml_py.graph.fuse import PASSES, fuse, switched_off
from ggml_py.kernels.cuda.add_rms_norm_mul_mat import MOST_NORMED
from ggml_py.kernels.cuda.add_rms_norm_topk_moe import shape_of
from ggml_py.ops.compose import GLU
from ggml_py.ops.table import OPS
from ggml_py.graph.program import Arenas, Program
from ggml_py.testing import assert_bitwise_equal
from pass_graphs import (a_bias_in_one_product, a_bias_of_rows, a_product_is_an_output, a_product_is_read_elsewhere,
                         a_product_is_read_without_its_bias, a_product_is_scaled, all_of_k_is_read, also_a_float_product,
                         also_an_output, attention, attention_and_product, attention_is_read_elsewhere, attention_of_a_norm,
                         biased_experts, biased_rows,
                         both, CELLS, float_and_quantized_products, float_and_quantized_q, float_weights, gated, gated_heads,
                         gated_rows, glu, K, k_and_v_are_one_product, layer, leaf, likeliest,
                         likeliest_of_biased_logits,
                         likeliest_on_another_device, logits_of_a_cache_written_before_the_likeliest, matrix, N, norm,
                         norm_and_sum_are_outputs, norm_is_an_output, norm_of_a_made_weight, norm_of_heads,
                         norm_quantized_on_another_device, norm_read_before_it_is_quantized, normed, normed_heads, norms_differ,
                         one_gate, one_side_is_no_product, only_q_is_normed, operand_written_between, product_of_later,
                         product_operand_written_between, product_with_itself, products_of_two_inputs, products_on_two_devices,
                         q_is_biased_before_k_is_made, q_is_read_after, q_is_read_before_v_is_written, residual,
                         residual_of_heads, rotated_k_is_read, routed, shared_expert, squared, start, sum_has_two_norms,
                         sum_is_an_output, sum_on_another_device, sum_read_before_its_norm, sum_read_before_the_products,
                         sum_with_one_row,
                         term_written_between, the_cache_is_read_between, the_cache_is_written_before_attention_is_quantized,
                         three_products, two_devices, v_is_made_first, v_of_another_input, v_on_another_device, vector,
                         whole_layer)
from places import ROOT
from tiny_models import write_model


PARTS_OF_A_LAYER = ["add_rms_norm_mul_mat_qkv", "rope_set_rows", "flash_attn_ext_act", "mul_mat", "add_rms_norm_mul_mat_glu",
                    "quantize", "mul_mat"]


def ops(nodes):
    return [node.op for node in nodes]


def fused(g, no_fuse=()):
    """The nodes that a GPU would run."""
    devices = {device: ComposingCPU(device) for device in ("cpu", "other")}
    return fuse(g, no_fuse, lambda node: devices[node.device].accepts(node))


def run(g, no_fuse=()):
    """The outputs, and the ops that ran, but for copies between devices."""
    rng = np.random.default_rng(5)
    x = {name: rng.standard_normal((N, K)).astype(np.float32) for name in "xy"}
    x["x"][1] *= np.float32(2.0**-120)
    x["x"][2, 7] = np.inf
    arenas = Arenas({device: ComposingCPU(device) for device in ("cpu", "other")})
    program = Program(g, arenas, no_fuse, lambda node: node.device)
    return (program.run({name: np.resize(x[name], tensor.shape) for name, tensor in g.inputs.items()}),
            [node.op for node in program.nodes if node not in program.crossings])


@pytest.mark.parametrize("build, fused", [
    (normed, ["rms_norm_act", "mul_mat", "mul_mat"]),
    (gated, ["swiglu_act", "mul_mat"]),
    (gated_heads, ["rms_norm_swiglu_act", "mul_mat"]),
    (gated_rows, ["mul_sigmoid_act", "mul_mat"]),
    (squared, ["relu_sqr_act", "mul_mat"]),
    (shared_expert, ["weighted_sum_gated"]),
    (biased_rows, ["rms_norm_act", "mul_mat_bias", "mul_mat_bias"]),
    (biased_experts, ["weighted_sum_biased", "add"]),
    (both, ["rms_norm_act", "mul_mat", "mul_mat", "add", "swiglu_act", "mul_mat", "add"]),
    (layer, ["add_rms_norm_act", "mul_mat_glu", "quantize", "mul_mat", "add_rms_norm_act", "mul_mat"]),
    (lambda: residual("Q8_0", "Q4_1"), ["add_rms_norm_act", "mul_mat", "mul_mat", "mul"]),
    (lambda: residual("F32"), ["add_rms_norm", "mul_mat", "mul"]),
    (lambda: residual("F32", "Q8_0"), ["add_rms_norm_and_act", "mul_mat", "mul_mat", "mul"]),
    (lambda: residual("Q8_0", "F16", "Q4_1"), ["add_rms_norm_and_act", "mul_mat", "mul_mat", "mul_mat", "mul"]),
    (norm_and_sum_are_outputs, ["add_rms_norm_and_act", "mul_mat", "mul"]),
    # twice: the second is of what the first gives
    (norm_read_before_it_is_quantized, ["add_rms_norm_and_act", "mul_mat", "quantize", "mul_mat", "mul"]),
    (lambda: norm_read_before_it_is_quantized(lambda g, total, h: g.scale(h, factor=2.0)),
     ["add_rms_norm", "scale", "quantize", "mul_mat", "quantize", "mul_mat", "mul"]),
    (lambda: norm_read_before_it_is_quantized(lambda g, total, h: g.scale(total, factor=2.0)),
     ["add_rms_norm", "scale", "quantize", "mul_mat", "quantize", "mul_mat", "mul"]),
    (norm_of_a_made_weight, ["rms_norm", "add_rms_norm", "quantize", "mul_mat", "mul_mat"]),
    (norm_quantized_on_another_device, ["add_rms_norm", "quantize", "mul_mat"]),
    (residual_of_heads, ["add_rms_norm", "quantize", "mul_mat"]),
    (sum_is_an_output, ["add_rms_norm_act", "mul_mat", "mul"]),
    (sum_has_two_norms, ["add_rms_norm_act", "mul_mat", "mul", "rms_norm_act", "mul_mat"]),
    *((lambda op=op: glu(op), ["quantize", "mul_mat_glu"]) for op in GLU.values()),
    (lambda: glu(types=("F32", "F16")), ["mul_mat_glu"]),
        (lambda: glu(biased=(True, True)), ["quantize", "mul_mat_glu"]),
    (lambda: glu("geglu", ("BF16", "BF16"), (True, True)), ["mul_mat_glu"]),
    *((lambda types=types: attention(types, (types[0] == "f16",) * 2), ["mul_mat", "mul_mat", "rope_set_rows", "flash_attn_ext"])
      for types in (("f16", "f16"), ("f32", "f16"), ("f32", "f32"), ("q8_0", "q8_0"), ("q8_0", "f16"))),
    (q_is_read_after, ["mul_mat", "mul_mat", "rope_set_rows", "flash_attn_ext", "scale"]),
    (lambda: attention(("f16", "f32"), indirect=True), ["mul_mat", "mul_mat", "rope_set_rows", "flash_attn_ext"]),
    (attention_and_product, ["mul_mat", "mul_mat", "rope_set_rows", "flash_attn_ext_act", "mul_mat"]),
    (lambda: attention_and_product(types=("f32", "f32"), rows_of_v="other rows"),
     ["mul_mat", "mul_mat", "rope", "rope", "set_rows", "set_rows", "flash_attn_ext_act", "mul_mat"]),
    (normed_heads, ["mul_mat", "mul_mat", "rope_set_rows", "flash_attn_ext"]),
    (only_q_is_normed, ["mul_mat", "mul_mat", "rms_norm", "rope_set_rows", "flash_attn_ext"]),
    (norms_differ, ["mul_mat", "mul_mat", "rms_norm", "rms_norm", "rope_set_rows", "flash_attn_ext"]),
    (lambda: attention(qkv=three_products()), ["quantize", "mul_mat_qkv", "rope_set_rows", "flash_attn_ext"]),
    (lambda: attention(qkv=three_products(("F32", "BF16", "F16")), norms=(1e-5, 1e-5)),
     ["mul_mat_qkv", "rope_set_rows", "flash_attn_ext"]),
    (lambda: attention(("q8_0", "f32"), qkv=three_products(("Q8_0",) * 3)),
     ["quantize", "mul_mat_qkv", "rope_set_rows", "flash_attn_ext"]),
    (lambda: attention(qkv=three_products(biased=(True, False, True)), indirect=True),
     ["quantize", "mul_mat_qkv", "add", "add", "rope_set_rows", "flash_attn_ext"]),
    (lambda: attention(qkv=three_products(biased=(True,) * 3)), ["quantize", "mul_mat_qkv", "rope_set_rows", "flash_attn_ext"]),
    (lambda: attention(qkv=three_products(("F16", "F32", "F32"), (True,) * 3)),
     ["mul_mat_qkv", "rope_set_rows", "flash_attn_ext"]),
    (v_is_made_first, ["mul_mat_qkv", "rope", "rope", "set_rows", "set_rows", "flash_attn_ext"]),
    (all_of_k_is_read, ["quantize", "mul_mat_qkv", "add", "rope_set_rows", "flash_attn_ext"]),
    (attention_of_a_norm, ["add_rms_norm_mul_mat_qkv", "rope_set_rows", "flash_attn_ext", "scale"]),
    (lambda: attention_of_a_norm(biased=(True,) * 3), ["add_rms_norm_mul_mat_qkv", "rope_set_rows", "flash_attn_ext", "scale"]),
    (lambda: attention_of_a_norm(cells=CELLS[:2]),
     ["add_rms_norm_act", "mul_mat_qkv", "rope_set_rows", "flash_attn_ext", "scale"]),
    (lambda: attention_of_a_norm(weights=("F32",) * 3),
     ["add_rms_norm", "mul_mat_qkv", "rope_set_rows", "flash_attn_ext", "scale"]),
    (lambda: attention_of_a_norm(lambda g, total: norm(g, g.scale(total, factor=3.0))),
     ["add", "scale", "rms_norm_act", "mul_mat_qkv", "rope_set_rows", "flash_attn_ext", "scale"]),
    # the norm's activations are read elsewhere
    (lambda: attention_of_a_norm(read=lambda g, total: g.mul_mat(matrix("a"), g.nodes[1].results[0])),
     ["add_rms_norm_act", "mul_mat_qkv", "rope_set_rows", "flash_attn_ext", "mul_mat"]),
    (lambda: attention_of_a_norm(read=lambda g, total: total), ["add_rms_norm_mul_mat_qkv", "rope_set_rows", "flash_attn_ext"]),
    (sum_read_before_the_products, ["add_rms_norm_act", "scale", "mul_mat_glu", "add"]),
    (lambda: layer(1), ["add_rms_norm_mul_mat_glu", "quantize", "mul_mat", "add_rms_norm_act", "mul_mat"]),
    (one_gate, ["add_rms_norm_mul_mat_glu", "scale"]),
    (lambda: one_gate(biased=(True, True)), ["add_rms_norm_mul_mat_glu", "scale"]),
    (lambda: one_gate(MOST_NORMED), ["add_rms_norm_mul_mat_glu", "scale"]),
    (lambda: one_gate(MOST_NORMED + 32), ["add_rms_norm_act", "mul_mat_glu", "scale"]),
    (lambda: one_gate(258, ("F16", "F16")), ["add_rms_norm", "mul_mat_glu", "scale"]),
    (whole_layer, ["dense_layer", "add"]),
    (lambda: whole_layer(neox=(False, False)), ["dense_layer", "add"]),
    *((lambda given=given: whole_layer(**given), [*PARTS_OF_A_LAYER, *end])
      for given, end in (({"act": "geglu"}, ["add"]), ({"window": 5}, ["add"]), ({"eps": 1e-6}, ["add"]),
                         ({"indirect": True}, ["add"]), ({"types": ("f32", "f32")}, ["add"]), ({"n_ff": 4128}, ["add"]),
                         ({"read_first": True}, ["add", "scale"]))),
    (lambda: whole_layer(made_rows=True), ["cpy", *PARTS_OF_A_LAYER, "add"]),
    (lambda: whole_layer(o_bias=True), [*PARTS_OF_A_LAYER[:3], "mul_mat_bias", *PARTS_OF_A_LAYER[4:], "add"]),
    (lambda: whole_layer(2), ["add_rms_norm_act", "mul_mat_qkv", *PARTS_OF_A_LAYER[1:4], "add_rms_norm_act", "mul_mat_glu",
                              "quantize", "mul_mat", "add"]),
    *((lambda given=given: routed(**given), ["add_rms_norm_topk_moe", "mul_mat", "mul"])
      for given in ({}, {"router": "F16", "bias_of": "logits"}, {"gating": "sigmoid", "bias_of": "choice"})),
    *((lambda given=given: routed(**given), ["add_rms_norm_and_act", "mul_mat", "topk_moe", "mul_mat", "mul"])
      for given in ({"n": 2}, {"grouped": True})),
    (lambda: routed(product_first=True), ["add_rms_norm_and_act", "mul_mat", "mul_mat", "topk_moe", "mul"]),
    (lambda: routed(router="Q8_0"), ["add_rms_norm_and_act", "mul_mat", "topk_moe", "mul_mat", "mul"]),
    (likeliest, ["add_rms_norm_act", "mul_mat_argmax"]),
    (lambda: likeliest("F16"), ["add_rms_norm", "mul_mat_argmax"]),
    (lambda: likeliest("F16", lambda g, logits: [g.mul_mat(matrix("a"), logits.node.src[1])]),
     ["add_rms_norm_and_act", "mul_mat_argmax", "mul_mat"]),
])
def test_fused_and_unfused_give_the_same_bits(build, fused):
    g, plain = build(), build()
    (results, used), (expected, separate) = run(g), run(plain, "all")
    assert used == fused and not set(PASSES) & set(separate)
    for found, wanted in zip(results, expected, strict=True):
        assert_bitwise_equal(found, wanted, build.__name__)


def names(node):
    return [part.name for part in node.parts]


def test_a_fused_node_keeps_its_parts():
    assert {node.name: names(node) for node in fused(both())} == {
        "norm-act": ["norm", "norm-act"], "gate": [], "up": [], "add-4": [], "swiglu-act": ["swiglu", "swiglu-act"], "down": [],
        "add-8": []}
    nodes = fused(layer())
    assert list(map(names, nodes)) == [["inp", "norm", "norm-act"], ["gate", "up", "swiglu"], [], [], ["out", "norm", "norm-act"],
                                       []]
    assert [[tensor.name for tensor in node.results] for node in nodes] == [
        ["norm-act", "inp"], ["swiglu"], ["swiglu-act"], ["down"], ["norm-act", "out"], ["head"]]
    node = fused(attention_of_a_norm())[0]
    assert names(node) == ["total", "norm", "norm-act", "q product", "kk product", "vvv product"]
    assert [tensor.name for tensor in node.results] == ["q product", "kk product", "vvv product", "total"]
    assert [(node.name, names(node)) for node in fused(likeliest())] == [("norm-act", ["total", "norm", "norm-act"]),
                                                                         ("likeliest", ["logits", "likeliest"])]
    node = fused(residual("F32", "Q8_0"))[0]
    assert names(node) == ["total", "norm", "norm-act"]
    assert [tensor.name for tensor in node.results] == ["norm-act", "norm", "total"]


def test_what_a_fused_node_writes_into_caches_is_theirs():
    """It lives for its writes alone, gives rotated Q memory of its own, and the caches as they are."""
    g = attention()
    node, = (each for each in fused(g) if each.op == "rope_set_rows")
    q, k, v = node.results
    assert (node.name, q.name, k.name, v.name) == ("cached v", "q", "cached k", "cached v")
    assert names(node) == ["q", "rotated k", "cached k", "cached v"]
    operands = node.operands
    assert (k.root, v.root, q.root) == (operands["cache_k"], operands["cache_v"], q) and node.written == (k.root, v.root)
    built = Graph()
    x, y, _ = (built.input(name, "f32", (N, n)) for name, n in (("x", K), ("y", 96), ("z", 96)))
    q, k, v = built.rope_set_rows(x, y, y, *(operands[name] for name in ("pos", "table", "cache_k", "cache_v", "dst")), n_head=9,
                                  n_head_kv=3, neox=True,
                                  name="made")
    assert [(t.name, t.shape) for t in (q, k, v)] == [("made", (N, K)), ("made-set_rows-2", (8, 96)),
                                                      ("made-set_rows-3", (8, 96))]
    assert (k.root, v.root) == (operands["cache_k"], operands["cache_v"])


@pytest.mark.parametrize("build", [
    q_is_biased_before_k_is_made, float_and_quantized_q, v_of_another_input, k_and_v_are_one_product, product_with_itself,
    v_on_another_device,
    also_a_float_product, also_an_output, norm_is_an_output, float_weights, norm_of_heads, two_devices, operand_written_between,
    sum_read_before_its_norm, sum_with_one_row, sum_on_another_device, term_written_between,
    a_bias_in_one_product, a_bias_of_rows, float_and_quantized_products, products_of_two_inputs, a_product_is_read_elsewhere,
    a_product_is_an_output,
    a_product_is_read_without_its_bias, a_product_is_scaled, one_side_is_no_product, products_on_two_devices,
    product_operand_written_between,
    lambda: attention(neox=(True, False)),
    lambda: attention(rows_of_v="other rows"),
    lambda: attention(v_first=True), q_is_read_before_v_is_written, rotated_k_is_read, the_cache_is_read_between,
    attention_is_read_elsewhere, the_cache_is_written_before_attention_is_quantized])
def test_left_alone(build):
    """But for biases of single products."""
    g, plain = build(), build()
    before = ops(g.live())
    (results, used), (expected, _) = run(g, "mul_mat_bias"), run(plain, "all")
    assert used == before
    for found, wanted in zip(results, expected, strict=True):
        assert_bitwise_equal(found, wanted, build.__name__)


@pytest.mark.parametrize("build, used", [
    (lambda: likeliest(read=lambda g, logits: [logits]), ["add_rms_norm_act", "mul_mat", "argmax"]),
    (lambda: likeliest("F32", lambda g, logits: [g.scale(logits, factor=2.0)]), ["add_rms_norm", "mul_mat", "argmax", "scale"]),
    (likeliest_of_biased_logits, ["quantize", "mul_mat_bias", "argmax"]),
    (likeliest_on_another_device, ["add_rms_norm", "mul_mat", "argmax"]),
    (logits_of_a_cache_written_before_the_likeliest, ["mul_mat", "set_rows", "argmax"])])
def test_logits_that_are_kept(build, used):
    """They are an output as well, are read elsewhere or are no product, of another device or of what is written over."""
    (results, found), (expected, _) = run(build()), run(build(), "all")
    assert found == used
    for a, b in zip(results, expected, strict=True):
        assert_bitwise_equal(a, b, f"{used}")


def test_a_write_before_or_elsewhere_does_not_matter():
    g, x, y = start()
    rows = leaf("rows", "i64", np.arange(N))
    cache, other = (leaf(name, "f32", np.ones((N, K), np.float32)) for name in ("cache", "other"))
    h = norm(g, g.set_rows(cache, x, rows))
    g.set_rows(other, y, rows)
    g.outputs = [product_of_later(g, h)]
    assert ops(fused(g)) == ["set_rows", "set_rows", "rms_norm_act", "mul_mat"]


def test_dead_readers_do_not_matter():
    g = normed()
    g.add(*g.nodes[0].results * 2)
    assert ops(fused(g))[0] == "rms_norm_act"


def random_graph(seed):
    """Of what passes look at, in any order: sums are read before and after they are normed, products by one and by many."""
    rng = random.Random(seed)
    g = Graph()
    n = rng.choice((1, N))
    tensors = [g.input(name, "f32", (n, K)) for name in "xy"]
    weights = [matrix(name, type_, n_rows=K) for name, type_ in (("q", "Q8_0"), ("qq", "Q4_1"), ("f", "F16"))]
    for _ in range(rng.randrange(3, 16)):
        g.device = "cpu" if rng.random() < 0.9 else "other"
        op, (x, y) = rng.choice(["add", "rms_norm", "mul_mat", "products",
                                 "swiglu"]), rng.choices(tensors[-3:], (1, 1, 4)[-len(tensors):], k=2)
        if op == "rms_norm":
            tensors.append(norm(g, x))
        elif op == "mul_mat":
            tensors.append(g.mul_mat(rng.choice(weights), x))
        elif op == "products":
            made = [g.mul_mat(rng.choice(weights), x) for _ in range(2)]
            tensors.append(g.swiglu(*([g.add(each, vector("bias")) for each in made] if rng.random() < 0.5 else made)))
        else:
            tensors.append(g.apply(op, x, y))
    g.outputs = rng.sample(tensors[2:], min(3, len(tensors) - 2))
    return g


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_any_graph_fused_and_unfused_gives_the_same_bits(seed):
    for found, wanted in zip(run(random_graph(seed))[0], run(random_graph(seed), "all")[0], strict=True):
        assert_bitwise_equal(found, wanted, f"random_graph({seed})")


def test_passes_make_ops():
    assert set(PASSES) == {op.name for op in OPS.values() if op.template} | {"elide"}


# Declined by a device

def test_what_a_device_declines_stays_and_is_fused_otherwise():
    asked = []

    def accepts(node):
        asked.append((node.op, len(node.src)))
        return node.op not in ("mul_mat_glu", "add_rms_norm_mul_mat_glu")
    assert ops(fuse(layer(), accepts=accepts)) == ["add_rms_norm_act", "mul_mat", "mul_mat", "swiglu_act", "mul_mat",
                                                   "add_rms_norm_act", "mul_mat"]
    assert ("mul_mat_glu", 3) in asked and not any(op == "mul_mat_qkv" for op, _ in asked)  # only what could be fused


def accepted(op, operands, target=H200, **params):
    """Whether a GPU takes a node."""
    cuda = KernelBackend("cuda")
    cuda.target, cuda.device = target, "cuda:0"
    g = Graph("cuda:0")
    g.apply(op, *operands, **params)
    return cuda.accepts(g.nodes[0])


# swiglu_act could not follow
@pytest.mark.parametrize("types, n, biased, act, warpgroups, declined", [
    (("Q4_K", "Q4_K"), 512, False, "silu", True, True), (("Q8_0", "Q4_K"), 33, False, "silu", True, True),
    (("Q4_K", "Q5_1"), 512, False, "silu", True, True), (("Q5_1", "Q5_1"), 512, False, "silu", False, False),
    # few tokens; without warpgroups
    (("Q4_K", "Q4_K"), 8, False, "silu", True, False), (("Q4_K", "Q4_K"), 512, False, "silu", False, False),
    (("F16", "F16"), 512, False, "silu", True, False),
    (("Q4_K", "Q4_K"), 512, True, "silu", True, False), (("Q4_K", "Q4_K"), 512, False, "gelu", True, False)])
def test_products_that_a_gpu_computes_apart(types, n, biased, act, warpgroups, declined):
    gate, up = (Tensor(name, type_, (14336, 4096)) for name, type_ in zip(("gate", "up"), types))
    biases = [Tensor(name, "f32", (14336,)) for name in ("gate_bias", "up_bias")] if biased else []
    target = SimpleNamespace(cc=(9, 0), n_multiprocessors=132, shared_limit=227 << 10, warpgroups=warpgroups,
                             halves=warpgroups)
    x = Tensor("x", "f32" if types[0] == "F16" else "act", (n, 4096))
    assert accepted("mul_mat_glu", (gate, up, x, *biases), target, act=act) is not declined


def test_products_with_minima_where_float16_is_not_exact():
    """Such formats have warpgroups by products of float16 alone."""
    gate, up = (Tensor(name, "Q5_1", (14336, 4096)) for name in ("gate", "up"))
    target = SimpleNamespace(cc=(9, 0), n_multiprocessors=132, shared_limit=227 << 10, warpgroups=True, halves=False)
    assert accepted("mul_mat_glu", (gate, up, Tensor("x", "act", (512, 4096))), target, act="silu")


@pytest.mark.parametrize("n, n_head, n_ctx, window, declined", [
    (1, 32, 8193, 0, True), (4, 32, 32768, 0, True), (1, 32, 8192, 0, False), (5, 32, 32768, 0, False),  # few pieces; many blocks
    (1, 32, 32768, 8065, False), (1, 32, 32768, 8066, True), (1, 66, 32768, 0, True), (1, 133, 32768, 0, False)])
def test_attention_that_a_gpu_quantizes_apart(n, n_head, n_ctx, window, declined):
    q, cache = Tensor("q", "f32", (n, 128 * n_head)), Tensor("cache", "f16", (n_ctx, 128 * n_head))
    seq, present = Tensor("seq", "i32", (n,)), Tensor("present", "u8", (1, n_ctx))
    assert accepted("flash_attn_ext_act", (q, cache, cache, seq, seq, present), n_head=n_head, n_head_kv=n_head, scale=0.1,
                    window=window) is not declined


def test_layers_that_a_gpu_computes_by_parts():
    def layer(n_cols=576, n_head=9, n_head_kv=3, dim=64, n_ff=1536, n_ctx=1024, cc=(9, 0)):
        q_cols, kv_cols = n_head * dim, n_head_kv * dim
        x, norm = Tensor("x", "f32", (1, n_cols)), Tensor("norm", "f32", (n_cols,))
        q, k, o, gate, down = (Tensor("w", "Q4_1", shape) for shape in ((q_cols, n_cols), (kv_cols, n_cols), (n_cols, q_cols),
                                                                        (n_ff, n_cols), (n_cols, n_ff)))
        one, cache = Tensor("pos", "i32", (1,)), Tensor("cache", "f16", (2 * n_ctx, kv_cols))
        target = SimpleNamespace(cc=cc, n_multiprocessors=132, shared_limit=227 << 10, warpgroups=True)
        return accepted("dense_layer", (x, x, norm, q, k, k, one, Tensor("table", "f32", (n_ctx, dim // 2, 2)), cache, cache,
                                        Tensor("dst", "i64", (1,)), one, Tensor("present", "u8", (2, n_ctx)), o, norm, gate, gate,
                                        down), target, n_head=n_head, n_head_kv=n_head_kv, neox=True, scale=0.1, eps=1e-5)
    assert layer() and layer(n_cols=512, n_head=8, n_head_kv=2)
    assert layer(n_ctx=1536) and layer(n_cols=512, n_head=8, n_head_kv=2, n_ctx=2048)
    assert not layer(n_ctx=1537)                # no room for the pieces
    assert layer(n_cols=512, n_head=8, n_head_kv=8, n_ctx=1024) and not layer(n_cols=512, n_head=8, n_head_kv=8, n_ctx=1025)
    assert not layer(n_cols=1024, n_ff=4096)    # nor for the weights, or more than 16 multiprocessors should read
    assert not layer(n_cols=560) and not layer(n_head=12, n_head_kv=1) and not layer(dim=40)
    assert not layer(cc=(10, 0))


def test_routing_that_a_gpu_computes_by_parts():
    def routing(n_expert=128, n_cols=2048, n=1, type_="F32", k=8, cc=(9, 0)):
        x, norm = Tensor("x", "f32", (n, n_cols)), Tensor("norm", "f32", (n_cols,))
        target = SimpleNamespace(cc=cc, n_multiprocessors=132, shared_limit=227 << 10, warpgroups=True)
        return accepted("add_rms_norm_topk_moe", (x, x, norm, Tensor("w", type_, (n_expert, n_cols))), target, eps=1e-5, k=k,
                        gating="softmax", norm=True)
    assert routing() and routing(256) and routing(32, 2880) and routing(512, type_="BF16", n_cols=1024)
    assert [shape_of("F32", *sizes, 226 << 10).n_blocks for sizes in ((128, 2048), (256, 2048), (8, 64))] == [8, 16, 2]
    assert not routing(512)                                   # no room for the router
    assert not routing(n_cols=MOST_NORMED + 4) and not routing(n_cols=2046)
    assert not routing(n=2) and not routing(k=33) and not routing(cc=(10, 0))


def test_the_table_of_the_docs():
    page = ROOT / "docs" / "graphs.md"
    if not page.is_file():
        pytest.skip("needs the checkout")
    section = page.read_text().split("## Graph passes")[1].split("\n## ")[0]
    assert [line.split("|")[2].strip(" `") for line in section.splitlines() if line.startswith("| ")][2:] == list(PASSES)


# Switched off by name

def test_each_pass_is_switched_off_alone():
    assert switched_off(()) == frozenset() and switched_off("all") == switched_off(["all"]) == frozenset(PASSES)
    for build in both, layer, lambda: residual("F32"), lambda: residual("F32", "Q8_0"), likeliest:
        for name in PASSES:
            alone = set(ops(fused(build(), [each for each in PASSES if each != name]))) & set(PASSES)
            assert alone <= {name} and name not in ops(fused(build(), (name,)))


# some are float and others quantized
@pytest.mark.parametrize("arch, types, never", [
    ("llama", ("Q8_0",), set()), ("qwen2", ("Q8_0", "Q5_1", "Q4_0"), set()),
    ("qwen3", ("Q4_1", "Q8_0", "F16", "Q5_0"),
     {"mul_mat_glu", "mul_mat_qkv", "add_rms_norm_mul_mat_qkv", "add_rms_norm_mul_mat_glu", "dense_layer"})])
def test_models(arch, types, never, tmp_path):
    """Prompts and single tokens, with and without logits, whatever is fused."""
    tokens = np.random.default_rng(1).integers(0, 70, 40).astype(np.int32)
    with Model(GGUFFile.open(write_model(tmp_path / "m.gguf", arch, types)), ComposingCPU()) as model:
        def logits(no_fuse):
            with model.new_context(n_ctx=64, no_fuse=no_fuse) as context:
                first = context.decode(tokens[:30], logits="all")
                context.decode(tokens[30:39], logits="none")
                last = context.decode(tokens[39:])
                context.seq_rm(0, 39)
                assert context.decode(tokens[39:], logits="argmax") == last.argmax()
                return np.concatenate([first, last]), {node.op for program in context.programs.values() for node in program.nodes}
        expected, plain = logits("all")
        assert not plain & set(PASSES)
        made = set()
        norms = "add_rms_norm_act", "add_rms_norm_and_act"
        for no_fuse in [(), *PASSES, norms, (*norms, "rms_norm_act")]:
            found, used = logits(no_fuse)
            assert_bitwise_equal(found, expected, f"{arch} without {no_fuse or 'nothing'}")
            assert not used & switched_off(no_fuse)
            made |= used
        elsewhere = {"topk_moe", "add_rms_norm_topk_moe", "mul_mat_id_glu", "weighted_sum_gated", "weighted_sum_biased",
                     "mul_mat_bias", "rms_norm_swiglu_act",
                     "mul_sigmoid_act", "relu_sqr_act", "elide", "gated_delta_net_gates"}
        assert made & set(PASSES) == set(PASSES) - never - elsewhere  # tests/models, test_elide.py


def test_unknown_passes_are_named(tmp_path, capsys):
    with Model.load(write_model(tmp_path / "m.gguf"), device="cpu") as model, pytest.raises(UserError) as error:
        model.new_context(no_fuse=["swiglu_act", "swigl"])
    allowed = ("'swigl' is not a graph pass; allowed: " + ", ".join((*PASSES, "all")))
    assert str(error.value) == f"no_fuse: {allowed}"
    assert cli.execute(["run", "-m", "x", "-p", "x", "--no-fuse", "rms_norm_act,swigl"]) == 2
    assert f"argument --no-fuse: {allowed}" in capsys.readouterr().err


def test_help_says_that_nothing_is_left_out_by_default(capsys):
    with pytest.raises(SystemExit):
        cli.execute(["run", "--help"])
    out = capsys.readouterr().out
    *_, section = re.findall(r"^\S.*:$", out[:out.index("\n  --no-fuse")], re.MULTILINE)
    assert section.endswith("which change the speed, never a bit):")
    help = " ".join(out.split())
    assert ("graph passes left out, none by default (docs/graphs.md; an unknown name lists them) "
            "--no-graphs") in help and "(default: 0.0)" in help


@pytest.mark.parametrize("option, no_fuse",
                         [([], ()), (["--no-fuse", "all"], ("all",)),
                          (["--no-fuse", "swiglu_act,rms_norm_act"], ("swiglu_act", "rms_norm_act"))])
def test_commands_hand_the_option_on(option, no_fuse, tmp_path):
    model, asked = FakeModel(), []
    new_context = model.new_context
    model.new_context = lambda **settings: asked.append(settings["no_fuse"]) or new_context(**settings)
    path = write_model(tmp_path / "m.gguf")
    (tmp_path / "text").write_text("a text of a few words")
    np.save(tmp_path / "tokens.npy", np.arange(4))
    for command in (["perplexity", "-f", tmp_path / "text", "-c", 8],
                    ["logits", "--tokens", tmp_path / "tokens.npy", "-o", tmp_path / "out.npy"],
                    ["run", "-p", "x", "-n", 1]):
        assert cli.execute([*map(str, command), "-m", str(path), *option], lambda path, device: model) == 0
    assert asked == [no_fuse] * 3
