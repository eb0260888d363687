"""flash_attn_ext in the simulator: every kernel of it; which one is chosen, and what is refused."""
from inspect import signature
from itertools import product
from types import SimpleNamespace

import numba
import numpy as np
import pytest

from cuda_simulator import SimulatedMachine, run_in_simulator
from ggml_py.base.storage import bytes_of
from ggml_py.kernels.arith import div, exp, fma, mul, sub
from ggml_py.kernels.call import Call, Operand, Unsupported
from ggml_py.kernels.cuda import flash_attn_ext as attention
from ggml_py.kernels.cuda import flash_attn_ext_act as attention_act
from ggml_py.kernels.cuda import flash_attn_ext_any as any_kernel
from ggml_py.kernels.cuda import flash_attn_ext_few as few_kernel
from ggml_py.kernels.cuda import flash_attn_ext_narrow as narrow_kernel
from ggml_py.kernels.cuda import flash_attn_ext_tile as tile_kernel
from ggml_py.kernels.cuda.flash_attn_ext import MOST_CHANNELS, AttentionShape
from ggml_py.kernels.cuda.flash_attn_ext_act import fills_chunks, flash_attn_ext_combine_act
from ggml_py.kernels.cuda.flash_attn_ext_combine import flash_attn_ext_combine, heads_together, most_pieces, piece_floats
from ggml_py.kernels.cuda.flash_attn_ext_limbs import limb_words, tile_of
from ggml_py.kernels.cuda.launch import RESERVED, even_bytes
from ggml_py.kernels.cuda.set_rows import TYPES
from ggml_py.testing import assert_bitwise_equal
from matmul_comparisons import seeded
from op_comparisons import SCALES_OF_Q8_0, check_flash_attn_ext
from op_runs import GUARD_BYTES, POISON, define, result_arrays

H200 = SimpleNamespace(n_multiprocessors=132, shared_limit=227 << 10, warpgroups=True)
OTHER = SimpleNamespace(n_multiprocessors=132, shared_limit=227 << 10, warpgroups=False)  # as large, of another kind
SMALL = SimpleNamespace(n_multiprocessors=132, shared_limit=99 << 10, warpgroups=False)


def attention_call(op="flash_attn_ext", types=("f16", "f16"), n=1, heads=(4, 2), dims=(64, 64), n_ctx=256, device=H200, row_v=0,
                   window=0, sinks=False, addresses=None, apart=False) -> Call:
    """row_v: of V's rows, where they are no whole heads of dims[1]. addresses: by operand; without them there is no memory."""
    (n_head, n_head_kv), (dim_k, dim_v), (type_k, type_v), addresses = heads, dims, types, addresses or {}
    shapes = dict(q=("f32", (n, n_head * dim_k)), k=(type_k, (n_ctx, n_head_kv * dim_k)), seq=("i32", (n,)), pos=("i32", (n,)),
                  v=(type_v, (n_ctx, row_v or n_head_kv * dim_v)), present=("u8", (1, n_ctx)),
                  sinks=("f32", (n_head,)) if sinks else None)
    shapes |= {"out": ("f32", (n, n_head * dim_v))} if op == "flash_attn_ext" else {"act": ("act", (n, n_head * dim_v))}
    values = {name: shape and Operand(*shape, addresses.get(name)) for name, shape in shapes.items()}
    params = dict(n_head=n_head, n_head_kv=n_head_kv, scale=0.5, window=window, n_embd_head_v=dim_v if row_v else 0, softcap=0.0,
                  apart=apart)
    return Call(op, "attention", device, {**values, **params}, Operand("f32", (), addresses.get("scratch")))


def planned(call: Call) -> Call:
    call.plan = attention.plan(call)
    return call


def test_in_the_simulator():
    run_in_simulator(__file__, "-m", "not slow")


@pytest.mark.slow
def test_the_others_in_the_simulator():
    run_in_simulator(__file__, "-m", "slow")


@pytest.fixture
def machine():
    return SimulatedMachine()


@pytest.mark.parametrize("types, heads, dims, tokens, n_ctx, n_warps", [
    *((types, heads, dims, tokens, n_ctx, n_warps) for n_warps in (16, 8) for types, heads, dims, tokens, n_ctx in [
        (("f16", "f16"), (3, 1), (64, 64), [(0, 129)], 131), (("f16", "f16"), (4, 4), (80, 8), [(0, 0)], 1),
        (("f16", "f16"), (4, 1), (128, 128), [(0, 128)], 1200)]),
    (("q8_0", "f16"), (8, 1), (32, 136), [(0, 127)], 128, 16), (("q8_0", "q8_0"), (2, 1), (224, 64), [(0, 4)], 5, 16),
    (("f16", "f16"), (5, 1), (64, 136), [(0, 129)], 130, 16), (("f16", "q8_0"), (4, 4), (80, 8), [(0, 0)], 1, 16),
    (("q8_0", "q8_0"), (4, 4), (80, 40), [(0, 4)], 5, 16)], ids=str)
def simulate_few(machine, types, heads, dims, tokens, n_ctx, n_warps):
    """Keys on both sides of a piece's end, with one, two, three and four blocks and slabs of channels, whole and short."""
    shape = AttentionShape("few", heads[0] // heads[1], 2, n_warps)
    check_flash_attn_ext(machine, types, tokens, heads, dims, n_ctx, holes=[(0, p) for p in (3,) if p < tokens[-1][1]],
                         shape=shape)


@pytest.mark.parametrize("types, heads, dims, tokens, n_ctx", [
    (("f16", "f16"), (3, 1), (64, 64), [(0, 129)], 131), (("f16", "f16"), (4, 4), (80, 8), [(0, 0)], 1),
    (("f16", "q8_0"), (16, 2), (104, 128), [(0, 128)], 200), (("q8_0", "f16"), (5, 1), (64, 120), [(0, 127)], 128),
    (("q8_0", "q8_0"), (2, 1), (128, 64), [(0, 130)], 131)], ids=str)
@pytest.mark.parametrize("n_splits", [None, 2])
def simulate_narrow(machine, types, heads, dims, tokens, n_ctx, n_splits):
    """One and two tiles of heads, blocks and slabs of channels, whole and short; several KV heads; keys on both sides of a
    piece's end."""
    check_flash_attn_ext(machine, types, tokens, heads, dims, n_ctx, holes=[(0, p) for p in (3,) if p < tokens[-1][1]],
                         shape=AttentionShape("narrow", heads[0] // heads[1], n_splits))


@pytest.mark.parametrize("kernel, type_, n_splits, n_warps", [
    ("few", "f16", 2, 16), ("few", "f16", 2, 8), ("narrow", "f16", 2, None), ("narrow", "q8_0", 2, None),
    ("narrow", "f16", None, None)])
def simulate_in_rounds(machine, kernel, type_, n_splits, n_warps):
    """A block with two pieces, another with one, or a block with three; a piece without a visible key; two sequences, one of a
    single key."""
    check_flash_attn_ext(machine, (type_, type_), [(1, 0), (0, 258)], (1, 1), (64, 64), 259, [(0, p) for p in range(128, 256)],
                         shape=AttentionShape(kernel, 1, n_splits, n_warps))


@pytest.mark.parametrize("heads, dims, sinks", [((4, 1), (64, 128), True), ((16, 2), (64, 64), False)], ids=str)
def simulate_narrow_act(machine, heads, dims, sinks):
    """Activations by the block that has all pieces of its heads; one without a visible key is between two."""
    check_flash_attn_ext(machine, ("f16", "f16"), [(0, 258), (1, 3)], heads, dims, 259, [(0, p) for p in range(128, 256)],
                         shape=AttentionShape("narrow", heads[0] // heads[1], None), sinks=sinks, act=True)


@pytest.mark.parametrize("types, heads, dims, n_splits", [
    (("f16", "f16"), (3, 1), (80, 8), None), (("q8_0", "q8_0"), (2, 1), (32, 96), None), (("f32", "f32"), (2, 1), (16, 16), 2),
    (("f16", "q8_0"), (4, 4), (5, 8), 1), (("q8_0", "f16"), (1, 1), (32, 3), 2), (("f32", "f16"), (1, 1), (9, 9), None),
    (("f16", "f32"), (9, 1), (72, 10), 2)],
    ids=str)
def simulate_any(machine, types, heads, dims, n_splits):
    """Two pieces, the second of two keys; every form of K and V with wide loads, without,
    and with a last block shorter than 64 channels."""
    shape = AttentionShape("any", heads_together(heads[0] // heads[1]), n_splits)
    check_flash_attn_ext(machine, types, [(0, 129)], heads, dims, n_ctx=131, holes=[(0, 17)], shape=shape)


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("n_splits", [None, 2])
def simulate_any_of_sequences(machine, type_, n_splits):
    """Two sequences in any order; a piece without a visible key; a query at position 0."""
    check_flash_attn_ext(machine, (type_, type_), [(1, 0), (0, 258)], (1, 1), (32, 32), n_ctx=259,
                         holes=[(0, p) for p in range(128, 256)],
                         shape=AttentionShape("any", 1, n_splits))


@pytest.mark.parametrize("types, heads, dims, tokens", [
    (("f16", "f16"), (3, 1), (64, 64), [(0, p) for p in range(126, 133)]),
    (("q8_0", "f16"), (2, 2), (32, 72), [(0, 0), (0, 129)]), (("q8_0", "q8_0"), (4, 4), (40, 72), [(0, 2), (0, 3)]),
    (("f16", "q8_0"), (8, 1), (128, 32), [(1, 2), (0, 128), (0, 127), (1, 0)])], ids=str)
@pytest.mark.parametrize("n_splits", [None, 1, 2])
def simulate_tile(machine, types, heads, dims, tokens, n_splits):
    """Rows of a warp that see one and two pieces, of two sequences, in any order; more than one warp,
    the last with rows of no token; holes."""
    shape = AttentionShape("tile", heads[0] // heads[1], n_splits, n_warps=4)
    check_flash_attn_ext(machine, types, tokens, heads, dims, n_ctx=133, holes=[(0, 5), (0, 128)]
                         if (0, 128) not in tokens else [(0, 5)], shape=shape)


@pytest.mark.slow
@pytest.mark.parametrize("shape, types", [
    *((AttentionShape("tile", 2, n_splits, 4), ("f16", "q8_0")) for n_splits in (None, 1)),
    *((AttentionShape("narrow", 2, n_splits), ("f16", "q8_0")) for n_splits in (None, 2)),
    (AttentionShape("few", 2, 2, 8), ("f16", "f16"))], ids=str)
@pytest.mark.parametrize("architecture", [800, 1000, 1200])
def simulate_other_architectures(machine, monkeypatch, shape, types, architecture):
    """Where less is kept on its way."""
    monkeypatch.setattr("ggml_py.kernels.cuda.simulator.ARCHITECTURE", architecture)
    check_flash_attn_ext(machine, types, [(0, 129), (1, 0)], (2, 1), (64, 64), n_ctx=131, holes=[(0, 5)], shape=shape)


@pytest.mark.slow
@pytest.mark.parametrize("n_splits", [None, 2])
def simulate_tile_without_a_piece(machine, n_splits):
    """A piece without a visible key between two; blocks of eight warps, two of them;
    a block with two pieces beside one with a single one."""
    check_flash_attn_ext(machine, ("f16", "f16"), [(0, 258), *((1, p) for p in range(16))], (8, 1), (8, 8), n_ctx=259,
                         holes=[(0, p) for p in range(128, 256)],
                         shape=AttentionShape("tile", 8, n_splits, n_warps=8))


@pytest.mark.slow
@pytest.mark.parametrize("types, heads, dims, n_splits, sinks", [
    (("f16", "f16"), (8, 1), (256, 256), None, False), (("q8_0", "f16"), (2, 1), (256, 200), None, True),
    (("f16", "q8_0"), (2, 1), (136, 160), None, False), (("q8_0", "q8_0"), (2, 2), (256, 256), 2, False)], ids=str)
def simulate_large_heads(machine, types, heads, dims, n_splits, sinks):
    """Of which registers do not hold everything at once."""
    check_flash_attn_ext(machine, types, [(0, 129), (1, 0), (0, 2)], heads, dims, n_ctx=131, holes=[(0, 5)], sinks=sinks,
                         shape=AttentionShape("tile", heads[0] // heads[1], n_splits, n_warps=4))


@pytest.mark.slow
@pytest.mark.parametrize("types, heads, dims, n_splits, sinks, window, softcap", [
    (("f16", "f16"), (4, 1), (512, 512), None, True, 0, 0.0), (("q8_0", "f16"), (1, 1), (288, 72), None, False, 100, 0.0),
    (("f16", "q8_0"), (2, 1), (64, 320), None, False, 0, 1.5), (("f16", "f16"), (2, 2), (328, 512), 2, False, 0, 0.0)], ids=str)
def simulate_keys_and_values_by_turns(machine, types, heads, dims, n_splits, sinks, window, softcap):
    """Two sequences in a block; pieces that some warps do not see, one without a visible key."""
    check_flash_attn_ext(machine, types, [(0, 140), (1, 0), (0, 2), *((1, p) for p in range(1, 17))], heads, dims, n_ctx=141,
                         holes=[(0, 5)], sinks=sinks, window=window, softcap=softcap,
                         shape=AttentionShape("tile", heads[0] // heads[1], n_splits, n_warps=4))


@pytest.mark.parametrize("types, tokens, heads, dims, n_ctx, others", [
    # Pieces in places that were used before, a warp whose rows see all keys of some and not of others
    (("f16", "f16"), [(0, p) for p in range(500, 504)], (4, 1), (128, 128), 520, {}),
    (("q8_0", "f16"), [(1, 2), (0, 128), (0, 127), (1, 0)], (8, 1), (128, 64), 133, dict(holes=[(0, 5)])),
    (("f16", "f16"), [(0, p) for p in range(300, 306)], (2, 1), (64, 64), 400, dict(window=130, sinks=True)),
    (("f16", "q8_0"), [(0, p) for p in range(120, 130)], (4, 2), (96, 128), 200, dict(softcap=1.5)),
    (("f16", "f16"), [(0, 0), (0, 1), (0, 600)], (1, 1), (72, 80), 700, dict(holes=[(0, p) for p in range(128, 256)])),
    (("f16", "f16"), [(2, 700), (0, 3)], (1, 1), (8, 8), 701, dict(act=True))], ids=str)
def simulate_group(machine, types, tokens, heads, dims, n_ctx, others):
    """Products of warpgroups over limbs made once: one block and two of channels, whole and short, sequences without a token, a
    piece without a visible key, windows, sinks, caps."""
    check_flash_attn_ext(machine, types, tokens, heads, dims, n_ctx,
                         shape=AttentionShape("group", heads[0] // heads[1], None, 8), **others)


@pytest.mark.parametrize("special", [[("q", 0, 3, np.nan), ("v", 0, 0, 1e-35)], [("k", 0, 1, np.inf)], [("v", 0, 130, np.nan)]],
                         ids=str)
def simulate_group_special(machine, special):
    check_flash_attn_ext(machine, ("f16", "f16"), [(0, 0), (0, 1), (0, 3), (0, 129), (0, 130)], (1, 1), (64, 64), n_ctx=131,
                         special=special, shape=AttentionShape("group", 1, None, 8))


SPECIAL_CASES = [("q", 0, 3, np.nan), ("k", 0, 1, np.inf), ("v", 0, 2, np.nan), ("v", 0, 0, 1e-35)]


@pytest.mark.parametrize("kernel, n_warps, type_",
                         [("few", 16, "f16"), ("few", 8, "f16"), ("narrow", None, "f16"), ("narrow", None, "q8_0"),
                          ("any", None, "f32"), ("any", None, "f16"), ("any", None, "q8_0"), ("tile", 4, "q8_0")])
@pytest.mark.parametrize("special", SPECIAL_CASES, ids=str)
def simulate_special(machine, kernel, n_warps, type_, special):
    dim = 64 if kernel == "narrow" else 32
    check_flash_attn_ext(machine, (type_, type_), [(0, 3)], (1, 1), (dim, dim), n_ctx=4, special=(special,),
                         shape=AttentionShape(kernel, 1, 1, n_warps))


@pytest.mark.parametrize("kernel, n_warps", [("narrow", None), ("few", 16), ("tile", 4)])
@pytest.mark.parametrize("types, dims, factors, special", SCALES_OF_Q8_0, ids=str)
def simulate_scales_of_q8_0(machine, kernel, n_warps, types, dims, factors, special):
    check_flash_attn_ext(machine, types, [(0, 3), (0, 4)], (1, 1), dims, n_ctx=5, special=special, factors=factors,
                         shape=AttentionShape(kernel, 1, 1, n_warps))


@pytest.mark.slow
@pytest.mark.parametrize("kernel, n_warps, types, heads, dims, window", [
    *((kernel, n_warps, ("f16", "f16"), (3, 1), (32, 64), window)
      for kernel, n_warps in (("few", 16), ("few", 8), ("narrow", None)) for window in (1, 127, 131)),
    ("few", 16, ("q8_0", "q8_0"), (4, 2), (32, 32), 131),
    *(("any", None, ("f32", "f32"), (2, 1), (9, 9), window) for window in (1, 127, 131)),
    ("any", None, ("f16", "q8_0"), (2, 2), (8, 16), 127),
    *(("tile", 4, ("f16", "f16"), (8, 1), (64, 64), window) for window in (1, 131))], ids=str)
def simulate_window_and_sinks(machine, kernel, n_warps, types, heads, dims, window):
    """Queries that see one key, no key of their first piece, and both ends of a window; more pieces than blocks; holes."""
    tokens = [(1, 0), (0, 300), (1, 129)] if kernel == "tile" else [(0, 300)]
    shape = AttentionShape(kernel, heads_together(heads[0] // heads[1]), 2
                           if kernel in ("few", "narrow") or types[0] == "f32" or window == 131 else None, n_warps)
    check_flash_attn_ext(machine, types, tokens, heads, dims, 301, [(0, 290), (0, 175)], shape=shape, window=window, sinks=True)


@pytest.mark.parametrize("kernel, n_warps", [("few", 16), ("few", 8), ("narrow", None), ("any", None), ("tile", 4)])
def simulate_sinks(machine, kernel, n_warps):
    check_flash_attn_ext(machine, ("f16", "f16"), [(0, 0), (0, 130)], (4, 2), (32, 16), 131,
                         shape=AttentionShape(kernel, 2, 1 if kernel == "few" else None, n_warps), sinks=True)


@pytest.mark.parametrize("kernel, n_warps, type_, n_splits", [
    ("few", 16, "f16", 1), ("few", 8, "f16", 2), ("narrow", None, "f16", None), ("few", 16, "q8_0", 1),
    ("narrow", None, "q8_0", 2), ("any", None, "f32", None), ("any", None, "q8_0", 2),
    ("tile", 4, "f16", None), ("tile", 4, "q8_0", 2)])
def simulate_ring(machine, kernel, n_warps, type_, n_splits):
    """Pieces on both sides of the end of a ring, and one that has been written over."""
    tokens = [(0, 300), (0, 301), (1, 5), (1, 6)] if kernel == "tile" else [(0, 301), (1, 5)]
    dim = 64 if kernel == "narrow" else 32
    check_flash_attn_ext(machine, (type_, type_), tokens, (4, 2), (dim, dim), 512, holes=[(0, 290), (0, 200)],
                         shape=AttentionShape(kernel, 2, n_splits, n_warps), window=120, ring=256)


@pytest.mark.parametrize("kernel, n_warps, types", [("few", 16, "f16"), ("few", 8, "f16"), ("narrow", None, "f16"),
                                                    ("any", None, "f32"), ("any", None, "q8_0"), ("tile", 4, "f16")])
def simulate_softcap(machine, kernel, n_warps, types):
    """Of scores, of which some are far beyond it."""
    shape = AttentionShape(kernel, 2, 1 if kernel == "few" else None, n_warps)
    check_flash_attn_ext(machine, (types, types), [(0, 0), (0, 130)], (4, 2), (32, 32), 131, shape=shape, window=100, softcap=1.5)


@pytest.mark.slow
@pytest.mark.parametrize("kernel, n_warps, types, n_head, dims", [
    ("few", 16, "f16", 9, (288, 264)), ("few", 16, "q8_0", 3, (288, 256)), ("few", 16, "f16", 2, (72, 64)),
    ("few", 8, "f16", 2, (72, 64)),
    ("any", None, "f16", 2, (12, 8)),
    ("any", None, "f32", 2, (72, 64)), ("tile", 4, "q8_0", 2, (160, 128))], ids=str)
def simulate_latent(machine, kernel, n_warps, types, n_head, dims):
    """Values in K's cache: rows longer than their heads, of octets or not; heads that do not lie in registers;
    several blocks of a KV head."""
    shape = AttentionShape(kernel, heads_together(n_head), 2 if kernel == "few" else None, n_warps)
    check_flash_attn_ext(machine, (types, types), [(0, 129)], (n_head, 1), dims, 130, [(0, 7)], shape=shape, latent=True)


@numba.njit
def combined(m, l, o, out, sink=None):
    """Section 8 of numerics. m, l: f32 [n]; o: f32 [n, Dv]."""
    M, L, O = np.float32(-np.inf), np.float32(0), np.zeros(out.size, np.float32)
    for i in range(m.size):
        if l[i] != 0:
            new = m[i] if m[i] > M else M
            a, b = exp(sub(M, new)), exp(sub(m[i], new))
            L = fma(L, a, mul(l[i], b))
            for c in range(out.size):
                O[c] = fma(O[c], a, mul(o[i, c], b))
            M = new
    if sink is not None:
        new = sink if sink > M else M
        a = exp(sub(M, new))
        L, O = fma(L, a, exp(sub(sink, new))), np.array([mul(x, a) for x in O], np.float32)
    for c in range(out.size):
        out[c] = div(O[c], L)


def combined_by(machine, launch, result, pieces, position, heads, dim_v, n_ctx, window=0, sinks=None):
    """What a combination makes of the pieces of a token at a position. result: "out" or "act"."""
    op, dtype, shape = *(("flash_attn_ext", "f32") if result == "out" else ("flash_attn_ext_act", "act")), (1, heads * dim_v)
    size = bytes_of(dtype, shape)
    before = np.full(size + GUARD_BYTES, POISON, np.uint8)
    data = {"pos": np.array([position], np.int32), "sinks": sinks, "scratch": pieces, result: before}
    addresses = {name: machine.upload(array) for name, array in data.items() if array is not None}
    heads, has_sinks = (heads, heads), sinks is not None
    machine.run(launch(attention_call(op, ("f32", "f32"), 1, heads, (1, dim_v), n_ctx, machine.target, 0, window, has_sinks,
                                      addresses)))
    found = machine.download(addresses[result], np.uint8, size + GUARD_BYTES)
    assert (found[size:] == POISON).all(), "written behind the end"
    return result_arrays(found[:size], dtype, shape)


@pytest.mark.parametrize("n_pieces, dim_v", [(1, 3), (2, 36), (33, 5), (256, 4), (300, 8), (530, 4)])
def simulate_combine(machine, n_pieces, dim_v):
    """More pieces than links at a time, and than a round; some without visible keys, with anything in m and o;
    zeros of both signs."""
    name = f"flash_attn_ext_combine[n_pieces={n_pieces}, dim_v={dim_v}]"
    rng, n_ctx, row = seeded(name), 128 * (n_pieces + 1), -(-dim_v // 4) * 4
    m, l = rng.normal(0, 3, (2, n_pieces)).astype(np.float32), rng.uniform(1, 99, (2, n_pieces)).astype(np.float32)
    o = rng.normal(0, 9, (2, n_pieces, dim_v)).astype(np.float32)
    o[:, :, ::3] *= np.float32(-0.0)
    l[rng.random(l.shape) < 0.2], l[:, 0] = 0, 1
    m[l == 0], o[l == 0] = 1000, np.nan
    pieces = np.full(piece_floats(1, 2, n_ctx, dim_v), np.nan, np.float32)
    pieces[:2 * (n_pieces + 1) * row].reshape(2, n_pieces + 1, row)[:, :-1, :dim_v] = o
    pieces[2 * (n_pieces + 1) * row:].reshape(2, n_pieces + 1, 2)[:, :-1] = np.stack([m, l], 2)
    expected = np.empty((2, dim_v), np.float32)
    for head in range(2):
        combined(m[head], l[head], o[head], expected[head])
    found = combined_by(machine, flash_attn_ext_combine, "out", pieces, 128 * n_pieces - 7, 2, dim_v, n_ctx)
    assert_bitwise_equal(found[0], expected.reshape(1, -1), name)


@pytest.mark.parametrize("n_pieces, heads, dim_v, begin, left_out, sinks", [
    (1, 2, 64, 0, 0, False), (133, 2, 128, 0, 0.2, False), (33, 1, 512, 0, 0.2, False), (3, 9, 32, 2, 0.2, False),
    (90, 3, 64, 1, 0.2, False),
    (140, 2, 128, 0, 0, False), (96, 2, 64, 0, 0.01, False), (133, 2, 128, 0, 0.2, True), (300, 3, 64, 0, 0, True)])
def simulate_combine_act(machine, n_pieces, heads, dim_v, begin, left_out, sinks):
    """More pieces than a round, and than slots; heads that are less and more than a chunk, which the last one does not fill; a
    window; pieces that are left out, none, some or few, with anything in m and o; zeros of both signs; sinks below and above the
    largest m."""
    name = (f"flash_attn_ext_combine_act[n_pieces={n_pieces}, heads={heads}, dim_v={dim_v}, begin={begin}, left_out={left_out}, "
            f"sinks={sinks}]")
    rng, n_ctx, there = seeded(name), 128 * (n_pieces + begin + 1), slice(begin, begin + n_pieces)
    m, l = rng.normal(0, 3, (2, heads, n_pieces)).astype(np.float32)
    l = np.abs(l) + np.float32(1)
    o = rng.normal(0, 9, (heads, n_pieces, dim_v)).astype(np.float32)
    o[:, :, ::3] *= np.float32(-0.0)
    l[rng.random(l.shape) < left_out], l[:, 0] = 0, 1
    m[l == 0], o[l == 0] = 1000, np.nan
    n_all = n_pieces + begin + 1
    pieces = np.full(piece_floats(1, heads, n_ctx, dim_v), np.nan, np.float32)
    pieces[:heads * n_all * dim_v].reshape(heads, n_all, dim_v)[:, there] = o
    pieces[heads * n_all * dim_v:].reshape(heads, n_all, 2)[:, there] = np.stack([m, l], 2)
    expected, logits = (np.empty((heads, dim_v), np.float32),
                        m.max(1, where=l != 0, initial=-9) + np.linspace(-1, 1, heads, dtype=np.float32))
    for head in range(heads):
        combined(m[head], l[head], o[head], expected[head], logits[head] if sinks else None)
    window = 0 if begin == 0 else 128 * n_pieces - 7 - 5
    where = 128 * (n_pieces + begin) - 7, heads, dim_v, n_ctx, window
    found = combined_by(machine, flash_attn_ext_combine_act, "act", pieces, *where, logits if sinks else None)
    for part, a, b in zip(("q", "d", "sums"), found, define("quantize", expected.reshape(1, -1))[0], strict=True):
        assert_bitwise_equal(a, b, f"{name} {part}")


@pytest.mark.parametrize("heads, dims, tokens, given", [
    ((3, 1), (16, 64), [(0, 130)], dict(sinks=True)), ((2, 2), (8, 40), [(0, 2), (1, 129)], {}),
    ((2, 1), (8, 128), [(0, 130)], dict(window=3, sinks=True))], ids=str)
def simulate_act(machine, heads, dims, tokens, given):
    """Combined into activations, where heads fill chunks, and quantized behind."""
    check_flash_attn_ext(machine, ("f16", "f16"), tokens, heads, dims, 131, [(tokens[-1][0], 7)], act=True, **given)


def simulate_act_of_many(machine, monkeypatch):
    """One kernel gives attention, another one quantizes it."""
    monkeypatch.setattr("ggml_py.kernels.cuda.flash_attn_ext.few_tokens", lambda n, n_ctx, apart: False)
    monkeypatch.setattr("ggml_py.kernels.cuda.flash_attn_ext.MOST_ROWS", 0)
    check_flash_attn_ext(machine, ("f16", "f16"), [(0, p) for p in range(3)], (4, 2), (8, 64), 5, act=True)


# Launch values, without the simulator

@pytest.mark.parametrize("group, heads", [(1, 1), (3, 3), (7, 7), (8, 8), (9, 3), (11, 1), (12, 6), (128, 8)])
def test_heads_together(group, heads):
    assert heads_together(group) == heads


@pytest.mark.parametrize("types, n, heads, dims, n_ctx, shape", [
    (("f16", "f16"), 1, (32, 8), (128, 128), 4096, AttentionShape("few", 4, 16, 16)),
    (("f16", "f16"), 1, (32, 8), (128, 128), 4224, AttentionShape("narrow", 4, 33)),    # two pieces for each multiprocessor
    (("f16", "f16"), 1, (32, 8), (128, 128), 32768, AttentionShape("narrow", 4, 64)),   # 66 would have four pieces too
    (("f16", "f16"), 1, (32, 4), (128, 128), 32768, AttentionShape("narrow", 8, 128)),
    (("q8_0", "q8_0"), 1, (32, 8), (128, 128), 32768, AttentionShape("narrow", 4, 64)),
    (("q8_0", "q8_0"), 1, (32, 8), (128, 128), 2048, AttentionShape("few", 4, 16, 16)),
    (("q8_0", "q8_0"), 1, (32, 4), (128, 128), 32768, AttentionShape("narrow", 8, 128)),
    (("q8_0", "q8_0"), 8, (9, 3), (64, 64), 100, AttentionShape("few", 3, 1, 16)),
    (("f16", "q8_0"), 32, (32, 8), (128, 128), 8192, AttentionShape("narrow", 4)),
    (("q8_0", "f16"), 1, (32, 8), (96, 128), 8192, AttentionShape("few", 4, 16, 16)),
    (("f16", "f16"), 1, (8, 4), (256, 256), 32768, AttentionShape("few", 2, 32, 16)),
    (("f32", "f32"), 1, (32, 8), (128, 128), 32768, AttentionShape("any", 4, 64)),
    (("f16", "f16"), 1, (16, 1), (576, 512), 4096, AttentionShape("few", 8, 32, 16)),
    (("f32", "f32"), 1, (16, 1), (576, 512), 4096, AttentionShape("any", 8, 32)),
    (("f16", "f16"), 512, (16, 1), (576, 512), 4096, AttentionShape("any", 8)),
    (("f16", "f16"), 512, (16, 16), (192, 128), 4096, AttentionShape("tile", 1, n_warps=4)),
    (("f16", "f16"), 1, (4, 4), (65, 64), 128, AttentionShape("any", 1, 1)),
    (("f32", "f16"), 33, (32, 8), (128, 128), 4096, AttentionShape("any", 4, 2)),
    (("f16", "f16"), 512, (8, 4), (256, 256), 4096, AttentionShape("tile", 2, n_warps=4)),  # too many floats
    (("f16", "f16"), 2048, (16, 2), (256, 256), 4096, AttentionShape("tile", 8, n_warps=8)),
    (("f32", "f32"), 512, (8, 4), (256, 256), 4096, AttentionShape("any", 2)),
    (("f16", "f16"), 512, (8, 4), (264, 256), 4096, AttentionShape("tile", 2, n_warps=4)),
    (("f16", "f16"), 2048, (16, 2), (512, 512), 4096, AttentionShape("tile", 8, n_warps=4)),
    (("f16", "f16"), 2048, (16, 2), (520, 512), 4096, AttentionShape("any", 8)),
    (("f16", "f16"), 32, (32, 8), (128, 128), 8193, AttentionShape("tile", 4, 33, 4)),
    (("f16", "f16"), 256, (32, 8), (128, 128), 4096, AttentionShape("tile", 4, n_warps=4)),
    (("f16", "f16"), 512, (32, 8), (128, 128), 8192, AttentionShape("group", 4, n_warps=8)),
    (("q8_0", "f16"), 512, (9, 3), (64, 64), 4096, AttentionShape("tile", 3, 7, 4)),
    (("f16", "f16"), 512, (9, 3), (64, 64), 200, AttentionShape("tile", 3, 2, 4)),   # a piece for each block
    (("q8_0", "f16"), 512, (9, 3), (64, 64), 16384, AttentionShape("tile", 3, n_warps=4))], ids=str)
def test_attention_shape(types, n, heads, dims, n_ctx, shape):
    call = planned(attention_call(types=types, n=n, heads=heads, dims=dims, n_ctx=n_ctx))
    assert call.plan == shape
    n_words = (limb_words(1, n_ctx, heads[1], *dims) if shape.kernel == "group" else
               piece_floats(n, heads[0], n_ctx, dims[1]) if shape.n_splits else None)
    assert attention.scratch(call) == (n_words and ("f32", (n_words,)))


@pytest.mark.parametrize("changes", [
    dict(device=OTHER), dict(device=SMALL), dict(dims=(136, 128)), dict(dims=(128, 136)), dict(n_ctx=1 << 19),
    dict(n=320), dict(types=("f32", "f16"))], ids=str)
def test_limbs_are_not_made(changes):
    """Of other GPUs, larger heads, contexts whose limbs are too many, few rows, other caches."""
    case = dict(n=512, heads=(32, 8), dims=(128, 128), n_ctx=8192)
    assert planned(attention_call(**case)).plan.kernel == "group"
    assert planned(attention_call(**case | changes)).plan.kernel != "group"


@pytest.mark.parametrize("n, n_ctx, shape", [
    (7, 512, AttentionShape("few", 4, 2, 16)),
    (16, 512, AttentionShape("narrow", 4, 4)),
    (24, 512, AttentionShape("narrow", 4, 2)),
    (33, 4096, AttentionShape("narrow", 4)),
    (128, 32768, AttentionShape("narrow", 4))])
def test_attention_of_many_sequences(n, n_ctx, shape):
    assert planned(attention_call(n=n, heads=(32, 8), dims=(128, 128), n_ctx=n_ctx, apart=True)).plan == shape


@pytest.mark.parametrize("n, expected",
                         [(1, 1 * 4 * 3 * (8 + 2)), (32, 32 * 4 * 3 * (8 + 2)), (2048, 2048 * 4 * 3 * (8 + 2)), (2049, None)])
def test_scratch_of_pieces(n, expected):
    """Three pieces in a context of 300 keys, heads of 7 values."""
    assert attention.scratch(planned(attention_call(n=n, dims=(8, 7), n_ctx=300))) == (expected and ("f32", (expected,)))


class Name(str):
    """In the place of an address."""
    def __add__(self, n_bytes):
        return Name(f"{self!s} + {n_bytes}")


class Names:
    """A device whose launches are names of kernels, and their arguments by name."""
    n_multiprocessors, shared_limit, warpgroups = H200.n_multiprocessors, H200.shared_limit, True

    def launch(self, kernel, grid, block, args, shared=0):
        name, parameters = kernel.name.split("[")[0], signature(kernel.function).parameters
        return name.removeprefix("flash_attn_ext_"), dict(zip(parameters, args, strict=True))


READ = {name: name for name in ("q", "k", "v", "seq", "pos", "present")}
SIZES = dict(n_ctx=300, span=9, scale=0.5)
N_FLOATS = 4 * 7 * 4 * 40  # bytes
OF_BATCH = dict(seq="seq", pos="pos", n=7, n_ctx=300, n_head_kv=1, window=9)
LIMBS, GROUP = {**OF_BATCH, "k": "k", "v": "v", "present": "present", "row_v": 64}, {**OF_BATCH, "q": "q", "scale": 0.5}


@pytest.mark.parametrize("op, shape, dim_v, sinks, row_v, expected", [
    ("flash_attn_ext", AttentionShape("few", 4, 2, 16), 64, True, 0,
     [("few", {**READ, **SIZES, "pieces": "scratch", "cell_v": 64}),
      ("combine", dict(pos="pos", pieces="scratch", sinks="sinks", out="out", n_ctx=300, dim_v=64, window=9))]),
    ("flash_attn_ext", AttentionShape("tile", 4, None, 4), 64, True, 72,
     [("tile", {**READ, **SIZES, "sinks": "sinks", "out": "out", "n": 7, "n_head_kv": 1, "row_v": 72, "n_falling": 1})]),
    ("flash_attn_ext", AttentionShape("tile", 4, 3, 4), 64, False, 0,
     [("tile", {**READ, **SIZES, "sinks": "q", "out": "scratch", "n": 7, "n_head_kv": 1, "row_v": 64, "n_falling": 1}),
      ("combine", dict(pos="pos", pieces="scratch", sinks="out", out="out", n_ctx=300, dim_v=64, window=9))]),
    ("flash_attn_ext", AttentionShape("group", 4, None, 8), 64, True, 0,
     [("limbs", {**LIMBS, "limbs": "scratch"}),
      ("group", {**GROUP, "limbs": "scratch", "sinks": "sinks", "out": "out"})]),
    ("flash_attn_ext_act", AttentionShape("group", 4, None, 8), 64, False, 0,
     [("limbs", {**LIMBS, "limbs": f"scratch + {4 * 7 * 4 * 64}"}),
      ("group", {**GROUP, "limbs": f"scratch + {4 * 7 * 4 * 64}", "sinks": "q", "out": "scratch + 0"}),
      ("quantize", dict(x="scratch + 0", act="act", n=7, k=256))]),
    ("flash_attn_ext", AttentionShape("any", 4, None), 40, True, 72,
     [("any", {**READ, **SIZES, "sinks": "sinks", "out": "out", "step_v": 72, "n_splits": 1})]),
    ("flash_attn_ext", AttentionShape("narrow", 4), 64, True, 0,
     [("narrow", {**READ, **SIZES, "sinks": "sinks", "out": "out", "row_v": 32})]),
    ("flash_attn_ext_act", AttentionShape("narrow", 4), 64, False, 0,
     [("narrow", {**READ, **SIZES, "sinks": "q", "out": "act", "row_v": 32})]),
    ("flash_attn_ext_act", AttentionShape("narrow", 4), 40, False, 0,
     [("narrow", {**READ, **SIZES, "sinks": "q", "out": "scratch + 0", "row_v": 20}),
      ("quantize", dict(x="scratch + 0", act="act", n=7, k=160))]),
    ("flash_attn_ext_act", AttentionShape("few", 4, 2, 8), 64, False, 0,
     [("few", {**READ, **SIZES, "pieces": "scratch", "cell_v": 64}),
      ("combine_act", dict(pos="pos", pieces="scratch", sinks="scratch", act="act", n_ctx=300, n_head=4, window=9))]),
    ("flash_attn_ext_act", AttentionShape("any", 4, 2), 40, True, 72,
     [("any", {**READ, **SIZES, "sinks": "q", "out": f"scratch + {N_FLOATS}", "step_v": 72, "n_splits": 2}),
      ("combine", dict(pos="pos", pieces=f"scratch + {N_FLOATS}", sinks="sinks", out="scratch + 0", n_ctx=300, dim_v=40,
                       window=9)),
      ("quantize", dict(x="scratch + 0", act="act", n=7, k=160))]),
    ("flash_attn_ext_act", AttentionShape("tile", 4, None, 8), 64, True, 0,
     [("tile", {**READ, **SIZES, "sinks": "sinks", "out": "scratch + 0", "n": 7, "n_head_kv": 1, "row_v": 64, "n_falling": 1}),
      ("quantize", dict(x="scratch + 0", act="act", n=7, k=256))])], ids=str)
def test_what_is_launched(op, shape, dim_v, sinks, row_v, expected):
    """Each operand must come to the parameter that it is meant for."""
    addresses = {name: Name(name) for name in (*READ, "sinks", "out", "act", "scratch")}
    call = attention_call(op, ("f16", "f16"), 7, (4, 1), (72, dim_v), 300, Names(), row_v, 9, sinks, addresses)
    call.plan = shape
    launches = getattr(attention if op == "flash_attn_ext" else attention_act, op)(call)
    assert [*getattr(launches, "launches", [launches])] == expected


@pytest.mark.parametrize("dim_v, fills",
                         [(32, True), (64, True), (96, False), (128, True), (256, True), (384, False), (512, True), (16, False),
                          (80, False)])
def test_scratch_of_activations(dim_v, fills):
    assert fills_chunks(dim_v) == fills

    def n_floats(n):
        call = planned(attention_call("flash_attn_ext_act", n=n, heads=(3, 3), dims=(64, dim_v), n_ctx=300))
        dtype, (floats,) = attention_act.scratch(call)
        assert dtype == "f32"
        return floats
    assert n_floats(1) == piece_floats(1, 3, 300, dim_v) + (0 if fills else 3 * dim_v)
    assert n_floats(3000) == 9000 * dim_v


@pytest.mark.parametrize("n, n_head, n_ctx, window, declined", [
    (1, 32, 8193, 0, True), (4, 32, 32768, 0, True), (1, 32, 8192, 0, False), (5, 32, 32768, 0, False),  # few pieces; many blocks
    (1, 32, 32768, 8065, False), (1, 32, 32768, 8066, True), (1, 66, 32768, 0, True), (1, 133, 32768, 0, False)])
def test_attention_that_is_quantized_apart(n, n_head, n_ctx, window, declined):
    call = planned(attention_call("flash_attn_ext_act", n=n, heads=(n_head, n_head), dims=(128, 128), n_ctx=n_ctx, window=window))
    assert attention_act.declines(call) is declined


def test_tiles_of_small_devices():
    assert attention.plan(attention_call(n=2048, heads=(32, 8), dims=(128, 128), n_ctx=4096, device=SMALL)).n_warps == 4
    assert attention.plan(attention_call(n=2048, heads=(16, 16), dims=(192, 128), n_ctx=4096, device=SMALL)).kernel == "any"
    assert attention.plan(attention_call(n=2048, heads=(16, 2), dims=(256, 256), n_ctx=4096, device=SMALL)).kernel == "any"


def test_rows_that_are_not_octets():
    assert attention.plan(attention_call(heads=(4, 1), dims=(72, 64), n_ctx=4096, row_v=72, device=SMALL)).kernel == "few"
    assert attention.plan(attention_call(heads=(4, 1), dims=(72, 64), n_ctx=4096, row_v=76, device=SMALL)).kernel == "any"


@pytest.mark.parametrize("window", [1, 2, 127, 128, 129, 130, 257])
def test_pieces_that_a_window_reaches(window):
    reached = max((p >> 7) - (max(0, p - window + 1) >> 7) + 1 for p in range(1000))
    assert most_pieces(4096, window) == reached and most_pieces(100, window) == 1
    n_splits = attention.plan(attention_call(heads=(64, 8), n_ctx=4096, window=window, device=SMALL)).n_splits
    assert n_splits == reached


@pytest.mark.parametrize("layout, most", [
    *((lambda dim, heads, types=types: any_kernel.shared_layout(*types, dim, dim, heads), MOST_CHANNELS)
      for types in product(TYPES, TYPES)),
    (lambda dim, heads: few_kernel.shared_layout(dim, dim, heads, 16), few_kernel.MOST_CHANNELS),
    (lambda dim, heads: tile_kernel.shared_layout(dim, dim, 4, False), 128)])
def test_shared_memory_of_the_largest_head_fits_every_device(layout, most):
    """99 KiB a block are the least that devices of compute capability 8.0 or later give. Parts begin on 16 bytes, in order,
    apart."""
    *starts, end = layout(most, 8)
    assert all(start % 4 == 0 for start in starts) and starts == sorted(starts) and 4 * end <= 99 << 10


@pytest.mark.parametrize("heads", range(1, 9))
def test_blocks_of_eight_warps_share_a_multiprocessor(heads):
    """Two with the largest heads that they take; a block takes 1 KiB more than it asks for."""
    assert few_kernel.block_warps("f16", "f16", 128, 128, 2) == 8 and few_kernel.block_warps("q8_0", "f16", 128, 128, 2) == 16
    assert few_kernel.RESIDENT[8] * (4 * few_kernel.shared_layout(128, 128, heads, 8).n_words + 1024) <= 100 << 10


@pytest.mark.parametrize("types", list(product(("f16", "q8_0"), repeat=2)), ids=str)
@pytest.mark.parametrize("heads", range(1, 9))
def test_blocks_of_narrow_heads_share_a_multiprocessor(types, heads):
    """Four on a GPU as large as an H100. Queries lie where p comes later, or behind all else."""
    layout = narrow_kernel.shared_layout(*types, 128, 128, heads)
    call = attention_call(types=types, n=80, heads=(heads, 1), dims=(128, 128), n_ctx=4096, apart=True)
    assert narrow_kernel.resident(call) == 4
    starts = list(layout[:-3])
    assert all(start % 4 == 0 for start in layout) and starts == sorted(starts)
    assert all(start % 32 == 0 for start, type_ in zip((layout.keys, layout.values), types) if type_ == "f16")  # FLIP
    end = layout.n_words if layout.q == layout.p else layout.n_words - 2 * (256 + 8)
    assert layout.q in (layout.p, end) and layout.q_d == layout.q + 2 * 256 and layout.q_d + 2 * 8 <= layout.n_words


@pytest.mark.parametrize("n_blocks", [1, 132, 133, 256, 264, 396, 397, 2000])
@pytest.mark.parametrize("limit", [99 << 10, 227 << 10])
def test_blocks_lie_evenly(n_blocks, limit):
    """No multiprocessor holds more than an even share; a block that wants more than that leaves gets what it wants."""
    share, n_bytes = -(-n_blocks // 132), even_bytes(32000, n_blocks, 132, limit)
    resident = (limit + RESERVED) // (n_bytes + RESERVED)
    assert n_bytes >= 32000 and resident == min(share, (limit + RESERVED) // (32000 + RESERVED)) and n_bytes <= limit


@pytest.mark.parametrize("given, kernel", [
    ({}, "narrow"), (dict(dims=(136, 128)), "few"), (dict(types=("q8_0", "f16"), dims=(32, 64)), "few"),
    (dict(types=("q8_0", "f16"), dims=(64, 40)), "narrow"), (dict(heads=(4, 1), dims=(72, 64), row_v=72, n=140), "few"),
    (dict(heads=(4, 1), dims=(128, 128), device=SMALL, n=140), "few"),
    (dict(types=("q8_0", "q8_0"), heads=(4, 1), dims=(128, 128), device=SMALL, n=140), "narrow"),
    (dict(types=("q8_0", "q8_0"), heads=(8, 1), dims=(128, 128), device=SMALL, n=140), "few"),
    (dict(types=("f32", "f16")), "any")], ids=str)
def test_which_heads_are_narrow(given, kernel):
    assert planned(attention_call(apart=True, n_ctx=4096, **{"heads": (4, 2), "n": 80, **given})).plan.kernel == kernel


@pytest.mark.parametrize("given, message", [
    (dict(types=("f16", "bf16")), "type of V is bf16, allowed: f32, f16, q8_0"),
    (dict(dims=(577, 64)), "head size of K is 577, allowed: 1 to 576"),
    (dict(types=("q8_0", "f16"), dims=(24, 64)), "row of K is 48, allowed: a multiple of 32 for q8_0"),
    (dict(n=0), "n is 0, allowed: at least 1"),
    (dict(window=-1), "window is -1, allowed: at least 1, or 0 for none"),
    (dict(row_v=192), "row of V is 192, allowed: 128, or more for one KV head"),
    (dict(heads=(4, 1), row_v=56), "row of V is 56, allowed: 64, or more for one KV head"),
    (dict(types=("f16", "q8_0"), heads=(4, 1), dims=(64, 32), row_v=72), "row of V is 72, allowed: a multiple of 32 for q8_0"),
    (dict(heads=(5, 2)), "n_head is 5, allowed: a multiple of n_head_kv = 2")])
def test_refusals(given, message):
    for module in attention, attention_act:
        with pytest.raises(Unsupported) as error:
            module.check(attention_call(module.__name__.rpartition(".")[2], **given))
        assert str(error.value) == message


def test_parts_of_a_tile():
    """Each on 16 bytes, as bulk copies want it."""
    for dims in (8, 8), (64, 72), (128, 128):
        tile = tile_of(*dims)
        assert all(at % 4 == 0 for at in tile), dims
        assert limb_words(2, 129, 3, *dims) == 2 * 2 * 3 * tile.n_words
