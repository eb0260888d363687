"""The kernels of a machine (simulator or GPU) for everything but matrices, against kernels/reference, bit for bit."""
import numpy as np

from ggml_py.kernels.cuda import add_rms_norm as cuda_add_rms_norm
from ggml_py.kernels.cuda import add_rms_norm_mul_mat as cuda_add_rms_norm_mul_mat
from ggml_py.kernels.cuda import argmax as cuda_argmax
from ggml_py.kernels.cuda import elementwise as cuda_elementwise
from ggml_py.kernels.cuda import experts as cuda_experts
from ggml_py.kernels.cuda import flash_attn_ext as cuda_flash_attn_ext
from ggml_py.kernels.cuda import flash_attn_ext_act as cuda_flash_attn_ext_act
from ggml_py.kernels.cuda import glu as cuda_glu
from ggml_py.kernels.cuda import heads as cuda_heads
from ggml_py.kernels.cuda import mul_mat_argmax as cuda_mul_mat_argmax
from ggml_py.kernels.cuda import mul_mat_glu as cuda_mul_mat_glu
from ggml_py.kernels.cuda import mul_mat_qkv as cuda_mul_mat_qkv
from ggml_py.kernels.cuda import quantize as cuda_quantize
from ggml_py.kernels.cuda import rms_norm as cuda_rms_norm
from ggml_py.kernels.cuda import rms_norm_act as cuda_rms_norm_act
from ggml_py.kernels.cuda import rope as cuda_rope
from ggml_py.kernels.cuda import rope_set_rows as cuda_rope_set_rows
from ggml_py.kernels.cuda import routing as cuda_routing
from ggml_py.kernels.cuda import set_rows as cuda_set_rows
from ggml_py.kernels.cuda import soft_max as cuda_soft_max
from ggml_py.kernels.cuda import swiglu_act as cuda_swiglu_act
from ggml_py.kernels.cuda import topk_moe as cuda_topk_moe
from ggml_py.kernels.cuda.flash_attn_ext_combine import piece_floats
from ggml_py.kernels.reference import (add_rms_norm, add_rms_norm_mul_mat, argmax, elementwise, experts, flash_attn_ext, flash_attn_ext_act, glu, heads,
                                       mul_mat, mul_mat_argmax, mul_mat_glu, mul_mat_qkv, rms_norm, rms_norm_act, rope, rope_set_rows, routing, set_rows,
                                       soft_max, swiglu_act, topk_moe)
from ggml_py.quant import tile
from ggml_py.quant.activation import split_limbs
from ggml_py.quant.formats import CHUNK, format_of
from ggml_py.testing import assert_bitwise_equal
from matmul_comparisons import GUARD, SPECIAL, activation_buffer, activations, chunk_limbs, reference_activations, run, seeded
from random_weights import random_weight
from test_moe_ops import router_rows

EPS = np.float32(1e-5)


def compare(machine, launch_function, operands, expected, name, *sizes, in_place=False) -> None:
    """launch_function(target, *addresses of operands, address of out, *sizes) must write `expected`; in_place: over its first operand as well."""
    addresses = [machine.upload(a) for a in operands]
    assert_bitwise_equal(run(machine, launch_function, addresses, expected.size, *sizes).reshape(expected.shape), expected, name)
    if in_place:
        machine.run(launch_function(machine.target, *addresses, addresses[0], *sizes))
        assert_bitwise_equal(machine.download(addresses[0], np.float32, expected.shape), expected, f"{name} in place")
    machine.free()


def check_rms_norm(machine, n_rows, n_cols, special=False) -> None:
    name = f"rms_norm[n_rows={n_rows}, n_cols={n_cols}{', special' * special}]"
    rng = seeded(name)
    x, w, expected = activations(n_rows, n_cols, rng), activations(1, n_cols, rng)[0], np.empty((n_rows, n_cols), np.float32)
    if special:
        x[:, 0] = np.resize(SPECIAL, n_rows)
    rms_norm.rms_norm(x, w, EPS, expected)
    compare(machine, cuda_rms_norm.rms_norm, (x, w), expected, name, n_rows, n_cols, EPS, in_place=True)


def check_add_rms_norm(machine, n_rows, n_cols, eps=EPS) -> None:
    name = f"add_rms_norm[n_rows={n_rows}, n_cols={n_cols}, eps={eps}]"
    rng = seeded(name)
    x, y, w = edges(n_rows, n_cols, rng), edges(n_rows, n_cols, rng), activations(1, n_cols, rng)[0]
    out, total = np.empty_like(x), np.empty_like(x)
    add_rms_norm.add_rms_norm(x, y, w, np.float32(eps), out, total)
    at = machine.upload(np.full(total.size + GUARD, np.nan, np.float32))
    found = run(machine, lambda target, x, y, w, out, *sizes: cuda_add_rms_norm.add_rms_norm(target, x, y, w, out, at, *sizes),
                [machine.upload(a) for a in (x, y, w)], out.size, n_rows, n_cols, eps)
    assert_bitwise_equal(found.reshape(out.shape), out, name)
    check_floats(machine, at, total, f"{name} total")
    machine.free()


def check_floats(machine, at, expected, name) -> None:
    """At an address lie the expected floats, and behind them the guard of NaN."""
    found = machine.download(at, np.float32, expected.size + GUARD)
    assert np.isnan(found[expected.size:]).all(), f"{name}: written behind the end"
    assert_bitwise_equal(found[:expected.size].reshape(expected.shape), expected, name)


def check_glu(machine, op, n_rows, n_cols) -> None:
    """op: swiglu, geglu or reglu."""
    name = f"{op}[n_rows={n_rows}, n_cols={n_cols}]"
    rng = seeded(name)
    g, u, expected = edges(n_rows, n_cols, rng), activations(n_rows, n_cols, rng), np.empty((n_rows, n_cols), np.float32)
    getattr(elementwise if op == "swiglu" else glu, op)(g, u, expected)
    compare(machine, getattr(cuda_elementwise if op == "swiglu" else cuda_glu, op), (g, u), expected, name, n_rows, n_cols, in_place=True)


def check_mul_mat_glu(machine, act, types, n_rows, n_cols, n, biased) -> None:
    """types: of gate and up."""
    name = f"mul_mat_glu[{act}, {types}, n_rows={n_rows}, n_cols={n_cols}, n={n}{', biased' * biased}]"
    rng = seeded(name)
    words = [tile.pack(random_weight(format_of(t), n_rows, n_cols, rng), t, n_rows, n_cols).reshape(-1).view(np.uint32) for t in types]
    biases = tuple(activations(2, n_rows, rng)) if biased else ()
    x = activations(n, n_cols, rng)
    operands = reference_activations(x) if format_of(types[0]).is_quantized else (x,)
    expected, scratch = np.empty((n, n_rows), np.float32), np.empty((n, n_rows), np.float32)
    mul_mat_glu.mul_mat_glu(act, *types)(*words, operands, biases, expected, scratch)
    at = machine.upload(np.full(scratch.size + GUARD, np.nan, np.float32))
    addresses = [machine.upload(a) for a in (*words, activation_buffer(*operands, n, n_cols) if len(operands) > 1 else x, *biases)]
    if not biased:
        addresses += None, None
    found = run(machine, lambda target, *args: cuda_mul_mat_glu.mul_mat_glu(target, act, *types, *args, at), addresses, expected.size, n_rows, n_cols, n)
    assert_bitwise_equal(found.reshape(expected.shape), expected, name)
    assert np.isnan(machine.download(at, np.float32, scratch.size + GUARD)[scratch.size:]).all(), f"{name}: written behind the end of scratch"
    machine.free()


def check_mul_mat_qkv(machine, types, n_rows, n_cols, n, biased) -> None:
    """types, n_rows: of the three matrices."""
    name = f"mul_mat_qkv[{types}, n_rows={n_rows}, n_cols={n_cols}, n={n}{', biased' * biased}]"
    rng = seeded(name)
    words = [tile.pack(random_weight(format_of(t), m, n_cols, rng), t, m, n_cols).reshape(-1).view(np.uint32) for t, m in zip(types, n_rows)]
    x, expected = activations(n, n_cols, rng), [np.empty((n, m), np.float32) for m in n_rows]
    operands = reference_activations(x) if format_of(types[0]).is_quantized else (x,)
    biases = tuple(activations(1, m, rng)[0] for m in n_rows) if biased else ()
    mul_mat_qkv.mul_mat_qkv(*types)(words, operands, biases, expected)
    outs = [machine.upload(np.full(out.size + GUARD, np.nan, np.float32)) for out in expected]
    x = machine.upload(activation_buffer(*operands, n, n_cols) if len(operands) > 1 else x)
    machine.run(cuda_mul_mat_qkv.mul_mat_qkv(machine.target, types, tuple(map(machine.upload, words)), x, tuple(outs), n_rows, n_cols, n,
                                             tuple(map(machine.upload, biases))))
    for part, at, out in zip("qkv", outs, expected):
        check_floats(machine, at, out, f"{name} {part}")
    machine.free()


def check_add_rms_norm_mul_mat(machine, types, n_rows, n_cols, act=None, biased=False, kind=0, eps=EPS) -> None:
    """Of Q, K and V with n_rows each, or, with an activation, of gate and up. kind: which row of `edges` is added to an ordinary one."""
    name = f"add_rms_norm_mul_mat[{act or 'qkv'}, {types}, n_rows={n_rows}, n_cols={n_cols}, kind={kind}, eps={eps}{', biased' * biased}]"
    rng, rows = seeded(name), n_rows if act is None else (n_rows,) * 2
    words = [tile.pack(random_weight(format_of(t), m, n_cols, rng), t, m, n_cols).reshape(-1).view(np.uint32) for t, m in zip(types, rows)]
    x, y, w = edges(kind + 1, n_cols, rng)[kind:], activations(1, n_cols, rng), activations(1, n_cols, rng)[0]
    if kind > 1:
        y[:] = x[:, ::-1]
    biases = tuple(activations(1, m, rng)[0] for m in rows) if biased else ()
    total, expected = np.empty_like(x), [np.empty((1, m), np.float32) for m in (rows if act is None else rows[:1])]
    at = [machine.upload(np.full(out.size + GUARD, np.nan, np.float32)) for out in (total, *expected)]
    addresses = [machine.upload(a) for a in (x, y, w)]
    matrices, added = tuple(map(machine.upload, words)), tuple(map(machine.upload, biases))
    if act is None:
        add_rms_norm_mul_mat.add_rms_norm_mul_mat_qkv(*types)(x, y, w, np.float32(eps), words, biases, expected, total)
        launch = cuda_add_rms_norm_mul_mat.add_rms_norm_mul_mat_qkv(machine.target, *addresses, eps, at[0], types, matrices, tuple(at[1:]), n_rows, n_cols, added)
    else:
        reference = add_rms_norm_mul_mat.add_rms_norm_mul_mat_glu(act, *types)
        reference(x, y, w, np.float32(eps), *words, biases, *expected, np.empty((1, n_rows), np.float32), total)
        launch = cuda_add_rms_norm_mul_mat.add_rms_norm_mul_mat_glu(machine.target, *addresses, eps, at[0], act, *types, *matrices, *(added or (None, None)),
                                                                    at[1], n_rows, n_cols)
    machine.run(launch)
    for i, (address, out) in enumerate(zip(at, (total, *expected))):
        check_floats(machine, address, out, f"{name} {f'product {i}' if i else 'total'}")
    machine.free()


def check_binary(machine, op, n_rows, n_cols, y_rows) -> None:
    """op: add or mul."""
    name = f"{op}[n_rows={n_rows}, n_cols={n_cols}, y_rows={y_rows}]"
    rng = seeded(name)
    x, y, expected = activations(n_rows, n_cols, rng), activations(y_rows, n_cols, rng), np.empty((n_rows, n_cols), np.float32)
    x.reshape(-1)[-len(SPECIAL):] = SPECIAL[:x.size]
    getattr(elementwise, op)(x, y, expected)
    compare(machine, getattr(cuda_elementwise, op), (x, y), expected, name, n_rows, n_cols, y_rows, in_place=True)


def check_scale(machine, n_rows, n_cols, a) -> None:
    name = f"scale[n_rows={n_rows}, n_cols={n_cols}, a={a}]"
    x, expected = activations(n_rows, n_cols, seeded(name)), np.empty((n_rows, n_cols), np.float32)
    elementwise.scale(x, np.float32(a), expected)
    compare(machine, cuda_elementwise.scale, (x,), expected, name, n_rows, n_cols, a, in_place=True)


def argmax_cases(k: int) -> np.ndarray:
    """float32 [n, k]: random rows, one with its largest value twice, of zeros of both signs, of equal, infinite and small values, and with a NaN."""
    rng = seeded(f"argmax {k}")
    x = activations(8, k, rng)
    x[0, k // 2] = x[0, -1] = 1e30
    x[1] = rng.choice([-0.0, 0.0], k)
    x[2] = -np.inf
    x[3] = -x[3]**2 - 1
    x[4] = rng.choice(SPECIAL[np.isfinite(SPECIAL)], k)
    x[5, rng.integers(k)] = np.inf
    x[6, rng.integers(k)] = np.nan
    return x


def check_argmax(machine, k) -> None:
    x = argmax_cases(k)
    expected = np.empty(len(x), np.int32)
    argmax.argmax(x, expected)
    scratch, out = machine.upload(np.zeros(cuda_argmax.scratch_words(len(x)), np.int32)), machine.upload(np.full(len(x), -7, np.int32))
    machine.run(cuda_argmax.argmax(machine.target, machine.upload(x), out, *x.shape, scratch))
    assert machine.download(out, np.int32, len(x)).tolist() == expected.tolist(), f"argmax[k={k}]"
    machine.free()


def product_rows(type_, weight, x):
    """(words, operands of the definition, product f32 [n, n_rows]) of a weight's bytes."""
    fmt, n_rows, n_cols = format_of(type_), len(weight), x.shape[1]
    words = tile.pack(weight, fmt, n_rows, n_cols).reshape(-1).view(np.uint32)
    operands, product = reference_activations(x) if fmt.is_quantized else (x,), np.empty((len(x), n_rows), np.float32)
    mul_mat.mul_mat(type_)(words, *operands, product)
    return words, operands, product


def check_mul_mat_argmax(machine, type_, n_rows, n_cols, n, zeros=False) -> None:
    """The first token's largest product is that of two rows half the matrix apart; the others are its negative, of zeros, with a NaN, random. zeros: all
    products are, of both signs, by MXFP4's least scale."""
    name = f"mul_mat_argmax[{type_}, n_rows={n_rows}, n_cols={n_cols}, n={n}{', zeros' * zeros}]"
    rng = seeded(name)
    weight, x = random_weight(format_of(type_), n_rows, n_cols, rng), activations(n, n_cols, rng)
    if zeros:
        weight.reshape(n_rows, -1, format_of(type_).type_size)[..., 0] = 0
        x *= np.float32(2.0**-40)
    else:
        x[1:2] = -x[:1]
        x[2::4] = 0
        x[3::4, rng.integers(n_cols)] = np.nan
        best = product_rows(type_, weight, x[:1])[2].argmax()
        weight[(best + n_rows // 2) % n_rows] = weight[best]
    words, operands, product = product_rows(type_, weight, x)
    if zeros:
        assert not product.any() and {False, True} == set(np.signbit(product[0])), name
    else:
        assert (product[0] == product[0].max()).sum() == 1 + (n_rows > 1), name
    expected = np.empty(n, np.int32)
    mul_mat_argmax.mul_mat_argmax(type_)(words, operands, expected, np.empty_like(product))
    n_scratch = cuda_mul_mat_argmax.scratch_words(machine.target, type_, n_rows, n_cols, n)
    out, scratch = (machine.upload(np.full(size + GUARD, -7, np.int32)) for size in (n, n_scratch))
    x = activation_buffer(*operands, n, n_cols) if len(operands) > 1 else x
    machine.run(cuda_mul_mat_argmax.mul_mat_argmax(machine.target, type_, machine.upload(words), machine.upload(x), out, n_rows, n_cols, n, scratch))
    for what, at, size in (("out", out, n), ("scratch", scratch, n_scratch)):
        found = machine.download(at, np.int32, size + GUARD)
        assert (found[size:] == -7).all(), f"{name}: written behind the end of {what}"
        assert what == "scratch" or found[:n].tolist() == expected.tolist(), name
    machine.free()


def check_rope(machine, n, n_head, dim, n_rot, neox) -> None:
    name = f"rope[n={n}, n_head={n_head}, dim={dim}, n_rot={n_rot}, neox={neox}]"
    rng = seeded(name)
    x, expected = activations(n * n_head, dim, rng).reshape(n, n_head, dim), np.empty((n, n_head, dim), np.float32)
    pos, angles = rng.integers(0, 9, n).astype(np.int32), rng.uniform(0, 6, (9, n_rot // 2))
    table = np.stack([np.cos(angles), np.sin(angles)], axis=2).astype(np.float32)
    rope.rope(x, pos, table, neox, expected)
    compare(machine, cuda_rope.rope, (x, pos, table), expected, name, n, n_head, dim, n_rot, neox, in_place=True)


# Mixture of experts

ROW_OPS = {"soft_max": (soft_max.soft_max, cuda_soft_max.soft_max), "sigmoid": (elementwise.sigmoid, cuda_elementwise.sigmoid),
           "normalize": (routing.normalize, cuda_routing.normalize), "mask_groups": (routing.mask_groups, cuda_routing.mask_groups)}


def check_row_op(machine, op, n_cols, *params) -> None:
    """op: of ROW_OPS."""
    name = f"{op}[{n_cols}{''.join(f', {p}' for p in params)}]"
    reference, launch_function = ROW_OPS[op]
    x = router_rows(n_cols, seeded(name))
    expected = np.empty_like(x)
    reference(x, *params, expected)
    compare(machine, launch_function, (x,), expected, name, *x.shape, *params, in_place=True)


def check_top_k(machine, n_cols, k) -> None:
    """And take_columns of another row, by the columns that were found, by any, and by some that there are not."""
    name = f"top_k[{n_cols}, k={k}]"
    rng = seeded(name)
    x, y = router_rows(n_cols, rng), activations(12, n_cols, rng)
    ids, values = np.empty((len(x), k), np.int32), np.empty((len(x), k), np.float32)
    routing.top_k(x, ids)
    found = run(machine, cuda_routing.top_k, [machine.upload(x)], ids.size, *x.shape, k).view(np.int32).reshape(ids.shape)
    assert np.array_equal(found, ids), name
    for columns in ids, rng.integers(0, n_cols, ids.shape).astype(np.int32):
        routing.take_columns(y, columns, values, name)
        compare(machine, cuda_routing.take_columns, (y, columns), values, f"take_columns {name}", *y.shape, k)
    columns[0, 0], columns[3, -1], columns[5, 0], columns[7, -1] = -1, n_cols, np.iinfo(np.int32).min, np.iinfo(np.int32).max
    values[0, 0] = values[3, -1] = values[5, 0] = values[7, -1] = np.nan
    compare(machine, cuda_routing.take_columns, (y, columns), values, f"take_columns {name}, no such columns", *y.shape, k)


def check_topk_moe(machine, gating, n_expert, k, biased, groups, norm, factor) -> None:
    """groups: (n_group, n_group_used)."""
    name = f"topk_moe[{gating}, {n_expert}, k={k}, biased={biased}, groups={groups}, norm={norm}, factor={factor}]"
    rng = seeded(name)
    x, bias = router_rows(n_expert, rng), activations(1, n_expert, rng)[0]
    weights, ids = np.empty((len(x), k), np.float32), np.empty((len(x), k), np.int32)
    topk_moe.topk_moe(gating)(x, bias if biased else bias[:0], *groups, norm, np.float32(factor), weights, ids)
    at_weights, at_ids = (machine.upload(np.full(ids.size + GUARD, np.nan, np.float32)) for _ in range(2))
    machine.run(cuda_topk_moe.topk_moe(machine.target, gating, machine.upload(x), machine.upload(bias) if biased else None, at_weights, at_ids,
                                       *x.shape, k, *groups, norm, factor))
    check_floats(machine, at_weights, weights, name)
    check_floats(machine, at_ids, ids.view(np.float32), f"{name} ids")
    machine.free()


def check_experts(machine, n, n_used, m, n_expert=9) -> None:
    """add_id and scale_id, with ids that are experts and some that are none, and weighted_sum."""
    name = f"experts[n={n}, n_used={n_used}, m={m}]"
    rng = seeded(name)
    x, b, w = edges(n * n_used, m, rng), activations(n_expert, m, rng), activations(n, n_used, rng)
    expected, total = np.empty_like(x), np.empty((n, m), np.float32)
    for op, of_experts in ("add_id", b), ("scale_id", b[:, 0].copy()):
        ids, launch = rng.integers(0, n_expert, (n, n_used)).astype(np.int32), getattr(cuda_experts, op)
        getattr(experts, op)(x, of_experts, ids, expected, name)
        compare(machine, launch, (x, of_experts, ids), expected, f"{op} {name}", *x.shape, n_expert, in_place=True)
        ids.reshape(-1)[-4:], expected[-4:] = np.int32([np.iinfo(np.int32).min, np.iinfo(np.int32).max, -1, n_expert])[-ids.size:], np.nan
        compare(machine, launch, (x, of_experts, ids), expected, f"{op} {name}, no such experts", *x.shape, n_expert)
    experts.weighted_sum(x.reshape(n, n_used, m), w, total)
    compare(machine, cuda_experts.weighted_sum, (x, w), total, f"weighted_sum {name}", n, n_used, m)


def check_swiglu_oai(machine, n_rows, n_cols, alpha=1.702, limit=7.0) -> None:
    name = f"swiglu_oai[n_rows={n_rows}, n_cols={n_cols}, alpha={alpha}, limit={limit}]"
    rng = seeded(name)
    g, u, expected = edges(n_rows, n_cols, rng), edges(n_rows, n_cols, rng)[::-1].copy(), np.empty((n_rows, n_cols), np.float32)
    glu.swiglu_oai(g, u, np.float32(alpha), np.float32(limit), expected)
    compare(machine, cuda_glu.swiglu_oai, (g, u), expected, name, n_rows, n_cols, alpha, limit, in_place=True)


def check_heads(machine, n, n_head, dim, first, count, dim_y) -> None:
    name = f"heads[n={n}, n_head={n_head}, dim={dim}, {first}..{first + count - 1}, dim_y={dim_y}]"
    rng = seeded(name)
    x, y = (edges(n * n_head, d, rng).reshape(n, n_head, d) for d in (dim, dim_y))
    expected = np.empty((n, n_head, count), np.float32)
    heads.slice_heads(x, first, expected)
    compare(machine, cuda_heads.slice_heads, (x,), expected, f"slice_heads {name}", n, n_head, dim, first, count)
    expected = np.empty((n, n_head, dim + dim_y), np.float32)
    for other in y, y[:, :1].copy():
        heads.concat_heads(x, other, expected)
        compare(machine, cuda_heads.concat_heads, (x, other), expected, f"concat_heads {name}", n, n_head, other.shape[1], dim, dim_y)


# What makes activations

def edges(n: int, k: int, rng) -> np.ndarray:
    """float32 [n, k]: rows of many magnitudes, of values of SPECIAL, of zeros, of an amax around 2^-100, of a zero, a special value in its last column,
    one after the other."""
    x = activations(n, k, rng)
    x[1::4] = rng.choice(SPECIAL, x[1::4].shape)
    x[2::4] = 0
    x[3::4] *= np.float32(2.0**-104)
    x[2::8, -1] = rng.choice(SPECIAL)
    return x


def check_act(machine, launch_function, reference, operands, name, n, k, *params, totals=(), scratch=None) -> None:
    """launch_function(target, *addresses of operands, address of activations, *addresses of totals, n, k, *params) must write what
    reference(*operands, *params, q, d, sums, *totals) does. totals: float32 arrays of further results. scratch: address and number of
    the floats in front of a guard of NaN."""
    n_chunks = -(-k // CHUNK)
    q, d, sums = np.empty((n, n_chunks * CHUNK), np.int16), np.empty((n, n_chunks), np.float32), np.empty((n, n_chunks * 16), np.int32)
    reference(*operands, *params, q, d, sums, *totals)
    planes = cuda_quantize.activation_planes(n, k)
    act = machine.upload(np.full(planes.n_bytes + GUARD, 0x55, np.uint8))
    at = [machine.upload(np.full(total.size + GUARD, np.nan, np.float32)) for total in totals]
    machine.run(launch_function(machine.target, *map(machine.upload, operands), act, *at, n, k, *params))
    found = machine.download(act, np.uint8, planes.n_bytes + GUARD)
    assert (found[planes.n_bytes:] == 0x55).all(), f"{name}: written behind the end of the buffer"
    for plane, first, expected in zip(planes._fields, planes, (*split_limbs(q), d, sums, chunk_limbs(sums))):
        assert_bitwise_equal(found[first:first + expected.nbytes].view(expected.dtype).reshape(expected.shape), expected, f"{name} {plane}")
    for i, (address, total) in enumerate(zip(at, totals)):
        check_floats(machine, address, total, f"{name} total {i}")
    if scratch:
        assert np.isnan(machine.download(scratch[0], np.float32, scratch[1] + GUARD)[-GUARD:]).all(), f"{name}: written behind the end of scratch"
    machine.free()


def check_rms_norm_act(machine, n, k, eps=EPS) -> None:
    name = f"rms_norm_act[n={n}, k={k}, eps={eps}]"
    rng = seeded(name)
    operands = edges(n, k, rng), activations(1, k, rng)[0]
    check_act(machine, cuda_rms_norm_act.rms_norm_act, rms_norm_act.rms_norm_act, operands, name, n, k, np.float32(eps))


def check_add_rms_norm_act(machine, n, k, eps=EPS) -> None:
    """add_rms_norm_act, and add_rms_norm_and_act."""
    for op, totals in ("add_rms_norm_act", 1), ("add_rms_norm_and_act", 2):
        name = f"{op}[n={n}, k={k}, eps={eps}]"
        rng = seeded(name)
        operands = edges(n, k, rng), edges(n, k, rng), activations(1, k, rng)[0]
        check_act(machine, getattr(cuda_add_rms_norm, op), getattr(add_rms_norm, op), operands, name, n, k, np.float32(eps),
                  totals=tuple(np.empty((totals, n, k), np.float32)))


def check_swiglu_act(machine, n, k) -> None:
    name = f"swiglu_act[n={n}, k={k}]"
    rng = seeded(name)
    check_act(machine, cuda_swiglu_act.swiglu_act, swiglu_act.swiglu_act, (edges(n, k, rng), activations(n, k, rng)), name, n, k)


# The KV cache

def empty_cache(type_, n_cells, k) -> np.ndarray:
    """Of all ones: every value reads as NaN."""
    dtype, n = {"f32": (np.float32, k), "f16": (np.uint16, k), "q8_0": (np.uint8, k // 32 * 34)}[type_]
    return np.frombuffer(b"\xff" * (n_cells * n * np.dtype(dtype).itemsize), dtype).reshape(n_cells, n).copy()


def comparable(type_, cache) -> np.ndarray:
    """As floats where NaNs may differ in their bits: f32 and f16 as they are, of q8_0 the scales and levels as float32."""
    if type_ == "q8_0":
        blocks = cache.reshape(len(cache), -1, 34)
        return np.concatenate([blocks[..., :2].copy().view(np.float16), blocks[..., 2:].view(np.int8)], axis=2, dtype=np.float32)
    return cache.view(np.float16) if type_ == "f16" else cache


def check_set_rows(machine, type_, rows, k, n_cells, special=False) -> None:
    name = f"set_rows[{type_}, rows={rows[:8]}, k={k}, n_cells={n_cells}{', special' * special}]"
    rng, rows = seeded(name), np.array(rows, np.int64)
    x, expected = activations(len(rows), k, rng), empty_cache(type_, n_cells, k)
    if type_ == "q8_0":
        x = (np.rint(x * 64) / 64).astype(np.float32)
        x[:, ::32] = 63.5  # d = 0.5: levels are 2 x, ties among them
    if special:
        x.reshape(-1)[::32] = np.resize(SPECIAL, -(-x.size // 32))
    cache = machine.upload(expected)
    set_rows.set_rows(type_)(x, rows, expected)
    machine.run(cuda_set_rows.set_rows(machine.target, type_, machine.upload(x), machine.upload(rows), cache, len(rows), k))
    found = machine.download(cache, expected.dtype, expected.shape)
    assert_bitwise_equal(comparable(type_, found), comparable(type_, expected), name)
    machine.free()


def check_cpy_rows(machine, type_, rows, k, n_cells) -> None:
    """cpy_rows_indirect to the addresses of `rows`, and cpy_rows side by side from the first of them on, write what set_rows does."""
    name = f"cpy_rows[{type_}, rows={rows[:8]}, k={k}, n_cells={n_cells}]"
    rng, rows = seeded(name), np.array(rows, np.int64)
    x, expected = activations(len(rows), k, rng), empty_cache(type_, n_cells, k)
    for op, to in ("cpy_rows_indirect", rows), ("cpy_rows", rows[0] + np.arange(len(rows))):
        written = expected.copy()
        cache, at = machine.upload(written), machine.upload(x)
        set_rows.set_rows(type_)(x, to, written)
        if op == "cpy_rows":
            launch = cuda_set_rows.cpy_rows(machine.target, type_, at, cache + int(to[0]) * written.strides[0], len(rows), k)
        else:
            dst = machine.upload(machine.number(cache) + to * written.strides[0])
            launch = cuda_set_rows.cpy_rows_indirect(machine.target, type_, at, dst, cache, len(rows), k)
        machine.run(launch)
        found = machine.download(cache, expected.dtype, expected.shape)
        assert_bitwise_equal(comparable(type_, found), comparable(type_, written), f"{op} {name}")
        machine.free()


def check_rope_set_rows(machine, types, rows, heads, dims, n_rot, neox, n_cells, normed, indirect) -> None:
    """types: of the caches of K and V; rows: cells written; heads: (n_head, n_head_kv); dims: of K and V; normed: the heads of Q and K before; indirect:
    cells by their addresses."""
    (type_k, type_v), (n_head, n_head_kv), (dim, dim_v), n = types, heads, dims, len(rows)
    name = f"rope_set_rows[{types}, rows={rows[:8]}, heads={heads}, dims={dims}, n_rot={n_rot}, neox={neox}, normed={normed}, indirect={indirect}]"
    rng = seeded(name)
    norms = [activations(1, dim, rng)[0] for _ in range(2 * normed)]
    q, k = (activations(n * count, dim, rng).reshape(n, count, dim) for count in heads)
    v, angles = activations(n, n_head_kv * dim_v, rng), rng.uniform(0, 6, (9, n_rot // 2))
    pos, rows = rng.integers(0, 9, n).astype(np.int32), np.array(rows, np.int64)
    table = np.stack([np.cos(angles), np.sin(angles)], axis=2).astype(np.float32)
    caches, q_out = [empty_cache(type_k, n_cells, n_head_kv * dim), empty_cache(type_v, n_cells, n_head_kv * dim_v)], np.empty_like(q)
    at_caches, at_q = [machine.upload(cache) for cache in caches], machine.upload(np.full(q.size + GUARD, np.nan, np.float32))
    rope_set_rows.rope_set_rows(type_k, type_v, False)(q, k, v, norms, EPS, pos, table, neox, rows, rows, q_out, *caches)
    at_norms = [machine.upload(w) for w in norms]
    dst = [machine.upload(machine.number(at) + rows * cache.strides[0] if indirect else rows) for at, cache in zip(at_caches, caches)]
    machine.run(cuda_rope_set_rows.rope_set_rows(machine.target, type_k, type_v, *map(machine.upload, (q, k, v)), at_norms, EPS,
                                                 *map(machine.upload, (pos, table)), indirect, *dst, at_q, *at_caches,
                                                 n, n_head, n_head_kv, dim, n_rot, neox, n_head_kv * dim_v))
    check_floats(machine, at_q, q_out, f"{name} q")
    for what, type_, at, expected in zip("kv", types, at_caches, caches):
        found = machine.download(at, expected.dtype, expected.shape)
        assert_bitwise_equal(comparable(type_, found), comparable(type_, expected), f"{name} {what}")
    machine.free()


def check_flash_attn_ext(machine, types, tokens, heads, dims, n_ctx, holes=(), special=(), shape=None, window=None, sinks=False, latent=False, act=False) -> None:
    """types: of K and V. tokens: (sequence, position) of each query. heads: (n_head, n_head_kv). dims: of K and V. holes: (sequence, position) of keys
    that are missing. special: ("q", "k" or "v", sequence, position, value) puts a value into channel 1 of all heads of that row.
    Missing and later keys are NaN in the cache. shape: an AttentionShape other than the one that is chosen. latent: V is K's cache, of one KV head.
    act: flash_attn_ext_act."""
    (type_k, type_v), (n_head, n_head_kv), (dim_k, dim_v), n = types, heads, dims, len(tokens)
    name = f"flash_attn_ext[{types}, tokens={tokens[:4]}.., n={n}, heads={heads}, dims={dims}, n_ctx={n_ctx}, holes={list(holes)[:4]}, special={special}{f', {shape}' if shape else ''}]"
    given = {"window": window} if window else {}
    name += " act" * act + f" {given}" * bool(given) + " sinks" * sinks + " latent" * latent
    rng = seeded(name)
    seq, pos = np.array(tokens, np.int32).T.copy()
    n_seq = int(seq.max()) + 1
    present = np.zeros((n_seq, n_ctx), np.uint8)
    for s in range(n_seq):
        present[s, :pos[seq == s].max(initial=-1) + 1] = 1
    for s, p in holes:
        present[s, p] = 0
    q = activations(n * n_head, dim_k, rng).reshape(n, n_head, dim_k)
    cells = np.flatnonzero(present)
    k, v = activations(len(cells) * n_head_kv, dim_k, rng), activations(len(cells) * n_head_kv, dim_v, rng)
    for what, s, p, value in special:
        if what == "q":
            q[tokens.index((s, p)), :, 1] = value
        else:
            row = int(np.searchsorted(cells, s * n_ctx + p)) * n_head_kv
            (k if what == "k" else v)[row:row + n_head_kv, 1] = value
    caches = []
    for type_, x, dim in ((type_k, k, dim_k), (type_v, v, dim_v)):
        caches.append(empty_cache(type_, n_seq * n_ctx, n_head_kv * dim))
        set_rows.set_rows(type_)(x.reshape(len(cells), -1), cells.astype(np.int64), caches[-1])
    if latent:
        caches[1] = caches[0]
    scale, expected = np.float32(dim_k**-0.5), np.empty((n, n_head, dim_v), np.float32)
    more = {"sinks": rng.normal(0, 3, n_head).astype(np.float32)} if sinks else {}
    flash_attn_ext.flash_attn_ext(type_k, type_v)(q, *caches, n_head_kv, seq, pos, present, scale, expected, **given, **more)
    if not special:
        assert np.isfinite(expected).all(), name
    n_floats = cuda_flash_attn_ext_act.act_scratch_floats(n, n_head, dim_v, n_ctx) if act else piece_floats(n, n_head, n_ctx, dim_v)
    scratch = np.full(n_floats + GUARD, np.nan, np.float32)
    at, addresses = machine.upload(scratch), [machine.upload(a) for a in (q, *caches, seq, pos, present)]
    there = {**given, **{key: machine.upload(x) for key, x in more.items()}, **({"row_v": dim_k} if latent else {})}
    if act:
        def launch(target, *args):
            *args, n, _ = args
            return cuda_flash_attn_ext_act.flash_attn_ext_act(target, type_k, type_v, *args, n, n_head, n_head_kv, dim_k, dim_v, n_ctx, scale, at, **there)

        def reference(q, k, v, seq, pos, present, *act):
            flash_attn_ext_act.flash_attn_ext_act(type_k, type_v)(q, k, v, n_head_kv, seq, pos, present, scale, np.empty_like(expected), act, **given, **more)
        return check_act(machine, launch, reference, (q, *caches, seq, pos, present), name, n, n_head * dim_v, scratch=(at, n_floats))
    found = run(machine, lambda target, *args: cuda_flash_attn_ext.flash_attn_ext(target, type_k, type_v, *args, at, shape, **there), addresses, expected.size,
                n, n_head, n_head_kv, dim_k, dim_v, n_ctx, scale)
    assert_bitwise_equal(found.reshape(expected.shape), expected, name)
    assert np.isnan(machine.download(at, np.float32, scratch.shape)[-GUARD:]).all(), f"{name}: written behind the end of scratch"
    machine.free()
