"""The CUDA kernels of a machine (`cuda_simulator`) for everything but products with matrices, against their definitions, bit for
bit (`op_runs`)."""
from dataclasses import replace

import numpy as np

from ggml_py.check.evaluate import Value
from ggml_py.kernels.call import Call, Operand
from ggml_py.kernels.cuda.cpy import cpy
from ggml_py.ops.table import OPS
from ggml_py.testing import assert_bitwise_equal
from cpu_comparisons import router_rows
from matmul_comparisons import EPS, SPECIAL, activations, edges, seeded
from op_runs import check_op, define, empty_cache, launch_op


def case(op: str, **sizes) -> tuple[str, np.random.Generator]:
    """Its name, and what its operands are drawn with."""
    name = f"{op}[{', '.join(f'{what}={size}' for what, size in sizes.items())}]"
    return name, seeded(name)


# Norms, elementwise operations, and what makes activations of them

def check_rms_norm(machine, n_rows, n_cols, special=False) -> None:
    name, rng = case("rms_norm", n_rows=n_rows, n_cols=n_cols, special=special)
    x, w = activations(n_rows, n_cols, rng), activations(1, n_cols, rng)[0]
    if special:
        x[:, 0] = np.resize(SPECIAL, n_rows)
    check_op(machine, name, "rms_norm", x, w, eps=EPS, in_place="x")


def check_add_rms_norm(machine, n_rows, n_cols, eps=EPS) -> None:
    name, rng = case("add_rms_norm", n_rows=n_rows, n_cols=n_cols, eps=eps)
    rows = edges(n_rows, n_cols, rng), edges(n_rows, n_cols, rng), activations(1, n_cols, rng)[0]
    check_op(machine, name, "add_rms_norm", *rows, eps=eps)


def check_rms_norm_act(machine, n, k, eps=EPS) -> None:
    name, rng = case("rms_norm_act", n=n, k=k, eps=eps)
    check_op(machine, name, "rms_norm_act", edges(n, k, rng), activations(1, k, rng)[0], eps=eps)


def check_add_rms_norm_act(machine, n, k, eps=EPS) -> None:
    """add_rms_norm_act, and add_rms_norm_and_act."""
    for op in "add_rms_norm_act", "add_rms_norm_and_act":
        name, rng = case(op, n=n, k=k, eps=eps)
        check_op(machine, name, op, edges(n, k, rng), edges(n, k, rng), activations(1, k, rng)[0], eps=eps)


def check_binary(machine, op, n_rows, n_cols, y_rows) -> None:
    """op: add or mul."""
    name, rng = case(op, n_rows=n_rows, n_cols=n_cols, y_rows=y_rows)
    x, y = activations(n_rows, n_cols, rng), activations(y_rows, n_cols, rng)
    x.reshape(-1)[-len(SPECIAL):] = SPECIAL[:x.size]
    check_op(machine, name, op, x, y if y_rows == n_rows else y[0], in_place="x")


def check_scale(machine, n_rows, n_cols, factor) -> None:
    name, rng = case("scale", n_rows=n_rows, n_cols=n_cols, factor=factor)
    check_op(machine, name, "scale", activations(n_rows, n_cols, rng), factor=factor, in_place="x")


def check_glu(machine, op, n_rows, n_cols) -> None:
    """op: swiglu, geglu or reglu."""
    name, rng = case(op, n_rows=n_rows, n_cols=n_cols)
    check_op(machine, name, op, edges(n_rows, n_cols, rng), activations(n_rows, n_cols, rng), in_place="gate")


def check_swiglu_oai(machine, n_rows, n_cols, alpha=1.702, limit=7.0) -> None:
    name, rng = case("swiglu_oai", n_rows=n_rows, n_cols=n_cols, alpha=alpha, limit=limit)
    gate, up = edges(n_rows, n_cols, rng), edges(n_rows, n_cols, rng)[::-1]
    check_op(machine, name, "swiglu_oai", gate, up, alpha=alpha, limit=limit, in_place="gate")


def check_swiglu_act(machine, n, k) -> None:
    name, rng = case("swiglu_act", n=n, k=k)
    check_op(machine, name, "swiglu_act", edges(n, k, rng), activations(n, k, rng))


def check_rms_norm_swiglu_act(machine, n, n_head, dim) -> None:
    name, rng = case("rms_norm_swiglu_act", n=n, n_head=n_head, dim=dim)
    z, x = edges(n, n_head * dim, rng), edges(n, n_head * dim, rng)[::-1]
    check_op(machine, name, "rms_norm_swiglu_act", z, x, activations(1, dim, rng)[0], eps=EPS)


def check_mul_sigmoid_act(machine, n, k) -> None:
    name, rng = case("mul_sigmoid_act", n=n, k=k)
    check_op(machine, name, "mul_sigmoid_act", activations(n, k, rng), edges(n, k, rng))


def check_relu_sqr_act(machine, n, k) -> None:
    name, rng = case("relu_sqr_act", n=n, k=k)
    check_op(machine, name, "relu_sqr_act", edges(n, k, rng))


def check_weighted_sum_gated(machine, n, n_used, k) -> None:
    name, rng = case("weighted_sum_gated", n=n, n_used=n_used, k=k)
    rows = activations(n * n_used, k, rng), activations(n, n_used, rng), edges(n, k, rng), edges(n, 1, rng)
    check_op(machine, name, "weighted_sum_gated", *rows)


def check_weighted_sum_biased(machine, n, n_used, k) -> None:
    """Some ids are no experts."""
    name, rng = case("weighted_sum_biased", n=n, n_used=n_used, k=k)
    ids = rng.integers(0, 3, (n, n_used)).astype(np.int32)
    rows = edges(n * n_used, k, rng), activations(3, k, rng), ids, activations(n, n_used, rng)
    check_op(machine, name, "weighted_sum_biased", *rows)


def check_argmax(machine, k) -> None:
    """Rows with their largest value twice, of zeros of both signs, of equal, infinite and small values, and with a NaN."""
    name, rng = case("argmax", k=k)
    x = activations(8, k, rng)
    x[0, k // 2] = x[0, -1] = 1e30
    x[1] = rng.choice([-0.0, 0.0], k)
    x[2] = -np.inf
    x[3] = -x[3]**2 - 1
    x[4] = rng.choice(SPECIAL[np.isfinite(SPECIAL)], k)
    x[5, rng.integers(k)] = np.inf
    x[6, rng.integers(k)] = np.nan
    check_op(machine, name, "argmax", x)


def draw_rows(k, rng) -> tuple[np.ndarray, np.ndarray]:
    """Logits, float32 [22, k], and the settings of a draw of each: rows as of `check_argmax`, rows whose values are close or
    equal, and settings at their bounds."""
    x = activations(22, k, rng)
    x[0, k // 2] = x[0, -1] = 1e30
    x[1], x[2], x[3] = rng.choice([-0.0, 0.0], k), -np.inf, -x[3]**2 - 1
    x[4], x[5, rng.integers(k, size=3)] = rng.choice(SPECIAL[~np.isnan(SPECIAL)], k), np.inf
    x[6, rng.integers(k)] = np.nan
    x[7], x[8], x[9] = rng.integers(0, 3, k), rng.standard_normal(k) * 1e-6, np.arange(k) * np.float32(0.01)
    x[10:] = rng.standard_normal((12, k)) * 3
    top_k = rng.integers(1, min(k, 64) + 1, len(x)).astype(np.float64)
    top_k[:10:2] = min(k, 64)
    settings = np.stack([top_k, rng.uniform(0.1, 2, len(x)), rng.uniform(0.3, 1, len(x)), rng.uniform(0, 0.2, len(x)),
                         rng.uniform(0, 1, len(x))], axis=1)
    settings[10:20, 1:] = [[0, 1, 0, 0.5], [1e6, 1, 0, 0.999], [1e-300, 1, 0, 0.999], [1, 0, 0, 0.7], [1, 1, 1, 0.7],
                           [1, 1, 0, 1 - 2.0**-53], [1, 1, 0, 0], [5, 0.999999, 1e-9, 0.99], [0.7, 0.95, 0.05, 0.6],
                           [0.05, 1, 0, 0.9]]
    settings[[12, 15], 0] = min(k, 64)
    return x, settings


def check_draw(machine, k, rows=slice(None)) -> None:
    name, rng = case("draw", k=k)
    x, settings = draw_rows(k, rng)
    (found,), = check_op(machine, name, "draw", x[rows], settings[rows])
    assert ((found < 0) == np.isnan(x[rows]).any(1)).all()


def check_log_soft_max(machine, k, n_ids) -> None:
    """Rows as of check_argmax, by columns that there are and by some that there are not; likelihoods of float64 are near."""
    name, rng = case("log_soft_max", k=k, n_ids=n_ids)
    x = activations(9, k, rng)
    x[0], x[1], x[2] = rng.choice([-0.0, 0.0], k), -np.inf, -300
    x[2, -1] = -0.0  # all others vanish
    x[3, rng.integers(k)] = -np.inf
    x[4] = rng.choice(SPECIAL[np.isfinite(SPECIAL)], k)
    x[5, rng.integers(k)] = np.inf
    x[6, rng.integers(k)] = np.nan
    ids = rng.integers(0, k, (len(x), n_ids)).astype(np.int32)
    ids[2, 0] = k - 1
    (found,), = check_op(machine, name, "log_soft_max", x, ids)
    row = x[8].astype(np.float64)
    exact = row - (row.max() + np.log(np.exp(row - row.max()).sum()))
    np.testing.assert_allclose(found[8], exact[ids[8]], rtol=2e-6, atol=2e-6)
    assert np.isnan(found[[1, 5, 6]]).all() and not np.isnan(found[[0, 2, 3, 7, 8]]).any() and found[2, 0] == 0
    ids[:4, 0] = -1, k, np.iinfo(np.int32).min, np.iinfo(np.int32).max
    (found,), = check_op(machine, f"{name}, no columns", "log_soft_max", x, ids)
    assert np.isnan(found[:4, 0]).all()


# Mixture of experts

def check_row_op(machine, op, n_cols, *params) -> None:
    """op: soft_max, sigmoid, normalize or mask_groups."""
    name, rng = case(op, n_cols=n_cols, params=params)
    check_op(machine, name, op, router_rows(n_cols, rng), **dict(zip(OPS[op].params, params)), in_place="x")


def check_top_k(machine, n_cols, k) -> None:
    """And take_columns of another row, by the columns that were found, by any, and by some that there are not."""
    name, rng = case("top_k", n_cols=n_cols, k=k)
    x, y = router_rows(n_cols, rng), activations(12, n_cols, rng)
    check_op(machine, name, "top_k", x, k=k)
    (ids,), = define("top_k", x, k=k)
    for columns in ids, rng.integers(0, n_cols, ids.shape).astype(np.int32):
        check_op(machine, f"take_columns {name}", "take_columns", y, columns)
    (expected,), = define("take_columns", y, columns)
    places = (0, 3, 5, 7), (0, -1, 0, -1)
    columns[places], expected[places] = (-1, n_cols, np.iinfo(np.int32).min, np.iinfo(np.int32).max), np.nan
    (found,), = launch_op(machine, "take_columns", y, columns)
    assert_bitwise_equal(found, expected, f"take_columns {name}, no such columns")


def check_topk_moe(machine, gating, n_expert, k, biased, groups, norm, factor, bias_of="choice") -> None:
    """groups: (n_group, n_group_used)."""
    name, rng = case("topk_moe", gating=gating, n_expert=n_expert, k=k, biased=biased, groups=groups, norm=norm, factor=factor)
    rows = router_rows(n_expert, rng), activations(1, n_expert, rng)[0]
    params = dict(k=k, gating=gating, norm=norm, factor=factor, n_group=groups[0], n_group_used=groups[1], bias_of=bias_of)
    check_op(machine, name, "topk_moe", *rows[:1 + biased], **params)


# Heads and their rotation

def check_heads(machine, n, n_head, dim, first, count, dim_y) -> None:
    name, rng = case("heads", n=n, n_head=n_head, dim=dim, first=first, count=count, dim_y=dim_y)
    x, y = (edges(n * n_head, d, rng).reshape(n, -1) for d in (dim, dim_y))
    check_op(machine, f"slice_heads {name}", "slice_heads", x, n_head=n_head, first=first, n=count)
    for n_head_y in n_head, 1:
        check_op(machine, f"concat_heads {name}", "concat_heads", x, y[:, :n_head_y * dim_y], n_head=n_head, n_head_y=n_head_y)


def angles(n, n_rot, rng) -> tuple[np.ndarray, np.ndarray]:
    """Positions of n tokens, and a table of cosines and sines for nine of them."""
    x = rng.uniform(0, 6, (9, n_rot // 2))
    return rng.integers(0, 9, n).astype(np.int32), np.stack([np.cos(x), np.sin(x)], axis=2).astype(np.float32)


def check_rope(machine, n, n_head, dim, n_rot, neox) -> None:
    name, rng = case("rope", n=n, n_head=n_head, dim=dim, n_rot=n_rot, neox=neox)
    x = activations(n * n_head, dim, rng).reshape(n, -1)
    check_op(machine, name, "rope", x, *angles(n, n_rot, rng), n_head=n_head, neox=neox, in_place="x")


# Copies, and the KV cache

def check_cpy(machine, n_bytes, first, to) -> None:
    """Bytes from byte `first` of an array to byte `to` of another one, of which the rest stays as it is."""
    rng = seeded(f"cpy[{n_bytes}, {first}, {to}]")
    source, before = (rng.integers(0, 256, at + n_bytes + 64, np.uint8) for at in (first, to))
    x, dst = machine.upload(source), machine.upload(before)
    operands = dict(x=Operand("u8", (n_bytes,), x + first), dst=Operand("u8", (n_bytes,), dst + to))
    machine.run(cpy(Call("cpy", "copy", machine.target, operands)))
    before[to:to + n_bytes] = source[first:first + n_bytes]
    assert_bitwise_equal(machine.download(dst, np.uint8, before.size), before, f"cpy of {n_bytes} bytes from {first} to {to}")
    machine.free()


def row_addresses(cache: Value, rows) -> np.ndarray:
    """Of a cache's rows, from its first byte on."""
    return rows * cache.arrays[0].strides[0]


def check_set_rows(machine, type_, rows, k, n_cells, special=False) -> None:
    name, rng = case("set_rows", type=type_, rows=rows[:8], k=k, n_cells=n_cells, special=special)
    x, rows = activations(len(rows), k, rng), np.array(rows, np.int64)
    if type_ == "q8_0":
        x = (np.rint(x * 64) / 64).astype(np.float32)
        x[:, ::32] = 63.5  # d = 0.5: levels are 2 x, ties among them
    if special:
        x.reshape(-1)[::32] = np.resize(SPECIAL, -(-x.size // 32))
    check_op(machine, name, "set_rows", empty_cache("cache", type_, n_cells, k, 0xff), x, rows)


def check_cpy_rows(machine, type_, rows, k, n_cells) -> None:
    """cpy_rows_indirect to the addresses of `rows`, and cpy_rows side by side from the first of them on,
    write what set_rows does."""
    name, rng = case("cpy_rows", type=type_, rows=rows[:8], k=k, n_cells=n_cells)
    x, cache, rows = activations(len(rows), k, rng), empty_cache("cache", type_, n_cells, k, 0xff), np.array(rows, np.int64)
    dst = np.stack([np.full_like(rows, -1), row_addresses(cache, rows)])
    for found, to in ((check_op(machine, f"{name} indirect", "cpy_rows_indirect", cache, x, dst, slot=1), rows),
                      (check_op(machine, name, "cpy_rows", cache, x, cell=int(rows[0])), rows[0] + np.arange(len(rows)))):
        assert_bitwise_equal(found[0][0], define("set_rows", cache, x, to)[0][0], name)


def check_rope_set_rows(machine, types, rows, heads, dims, n_rot, neox, n_cells, normed, indirect) -> None:
    """types: of the caches of K and V; rows: cells written; heads: (n_head, n_head_kv); dims: of K and V; normed: the heads of Q
    and K before; indirect: cells by their addresses."""
    (n_head, n_head_kv), (dim, dim_v), n = heads, dims, len(rows)
    name, rng = case("rope_set_rows", types=types, rows=rows[:8], heads=heads, dims=dims, n_rot=n_rot, neox=neox, normed=normed,
                     indirect=indirect)
    columns, rows = (n_head * dim, n_head_kv * dim, n_head_kv * dim_v), np.array(rows, np.int64)
    caches = [empty_cache(f"cache-{i}", type_, n_cells, k, 0xff) for i, (type_, k) in enumerate(zip(types, columns[1:]))]
    dst = np.stack([row_addresses(caches[1], rows), np.full_like(rows, -1), row_addresses(caches[0], rows)]) if indirect else rows
    rows, norms = [activations(n, k, rng) for k in columns], activations(2, dim, rng) if normed else []
    params = dict(n_head=n_head, n_head_kv=n_head_kv, neox=neox, eps=EPS if normed else None)
    params |= dict(slot_k=2, slot_v=0) if indirect else {}
    check_op(machine, name, "rope_set_rows", *rows, *angles(n, n_rot, rng), *caches, dst, *norms, **params)


def filled_cache(name: str, type_: str, n_cells: int, cells: np.ndarray, x: np.ndarray) -> Value:
    """Rows x in those cells, NaN in the others."""
    empty = empty_cache(name, type_, n_cells, x.shape[1], 0xff)
    return replace(empty, arrays=define("set_rows", empty, x, cells)[0])


# Types, dims, factors and special values of q8_0 blocks, as of `check_flash_attn_ext`: far apart and zeros; a d of 0 of levels
# that are not 0, also under a query so large that their product would be infinite; an infinite d of a score that would be -inf
SCALES_OF_Q8_0 = [
    (("q8_0", "q8_0"), (128, 128), (1, 2.0**-12, 0.125, 0, 1e-9), ()), (("q8_0", "f16"), (64, 64), (1, 1e-3), ()),
    (("q8_0", "q8_0"), (64, 64), (1e-9,), (("q", 0, 3, 3e38),)),
    (("q8_0", "q8_0"), (128, 128), (1,), (("k", 0, 1, 1e9), ("q", 0, 3, -1), ("v", 0, 2, 1)))]


def check_flash_attn_ext(machine, types, tokens, heads, dims, n_ctx, holes=(), special=(), shape=None, window=0, sinks=False,
                         latent=False, act=False, softcap=0.0, ring=0, factors=()) -> None:
    """types: of K and V. tokens: (sequence, position) of each query. heads: (n_head, n_head_kv). dims: of K and V. holes:
    (sequence, position) of keys that are missing. special: ("q", "k" or "v", sequence, position, value) puts a value into channel
    1 of all heads of that row. Missing and later keys are NaN in the cache. shape: an AttentionShape other than the one that is
    chosen. latent: V is K's cache, of one KV head.
    act: flash_attn_ext_act. ring: cells of a sequence, where they are fewer than positions. factors: one of them, at random, is
    what each 32 channels of a key or a value are multiplied by."""
    op, (n_head, n_head_kv), (dim_k, dim_v), n = "flash_attn_ext_act" if act else "flash_attn_ext", heads, dims, len(tokens)
    name, rng = case(op, types=types, tokens=tokens[:4], n=n, heads=heads, dims=dims, n_ctx=n_ctx, holes=list(holes)[:4],
                     special=special, shape=shape, window=window, sinks=sinks, latent=latent,
                     softcap=softcap, ring=ring)
    seq, pos = np.array(tokens, np.int32).T
    n_seq = int(seq.max()) + 1
    present = np.zeros((n_seq, n_ctx), np.uint8)
    for s in range(n_seq):
        present[s, :pos[seq == s].max(initial=-1) + 1] = 1
    for s, p in holes:
        present[s, p] = 0
    q, cells = activations(n * n_head, dim_k, rng).reshape(n, n_head, dim_k), np.flatnonzero(present)
    k, v = (activations(len(cells) * n_head_kv, dim, rng).reshape(len(cells), n_head_kv, dim) for dim in dims)
    if factors:
        for x in (k, v):
            x *= np.repeat(rng.choice(np.float32(factors), (*x.shape[:2], x.shape[2] // 32)), 32, axis=2)
    for what, s, p, value in special:
        if what == "q":
            q[tokens.index((s, p)), :, 1] = value
        else:
            (k if what == "k" else v)[np.searchsorted(cells, s * n_ctx + p), :, 1] = value
    kept, n_cells = np.ones(len(cells), bool), n_seq * n_ctx
    if ring:
        s, p = np.divmod(cells, n_ctx)
        kept = p >= np.array([pos[seq == each].max(initial=-1) + 1 - ring for each in s])
        n_cells, cells = n_seq * ring, s * ring + p % ring
    cache_k, cache_v = (filled_cache(what, type_, n_cells, cells[kept], x.reshape(len(cells), -1)[kept])
                        for what, type_, x in zip("kv", types, (k, v)))
    operands = [q.reshape(n, -1), cache_k, cache_k if latent else cache_v, seq, pos, present]
    if sinks:
        operands.append(rng.normal(0, 3, n_head).astype(np.float32))
    params = dict(n_head=n_head, n_head_kv=n_head_kv, scale=dim_k**-0.5, window=window or 0, softcap=softcap,
                  n_embd_head_v=dim_v if latent else 0)
    (expected,) = check_op(machine, name, op, *operands, plan=shape, **params)
    assert special or all(np.isfinite(part).all() for part in expected), name
