"""What llama4 and phi3 do beyond the length of llama.cpp's records: chunks, temperatures, frequency divisors by the length of the
context; against float64 numpy."""
from functools import partial

import gguf
import numpy as np
import pytest

from ggml_py.base.errors import UserError
from ggml_py.base.rope_table import Temperature
from ggml_py.engine.model import Model
from ggml_py.models import llama4
from ggml_py.state.chunked_cache import ChunkedKVCache
from ggml_py.testing import assert_bitwise_equal
from numpy_transformer import norm, rope
from tiny_layer_models import write_layer_model
from tiny_models import run

ROWS = 512  # of a matrix of scores at a time


def attention(q, k, v, chunk: int) -> np.ndarray:
    """q: [n, heads, channels], k, v: [n, heads of KV, channels]. chunk: 0 for none. Returns [n, heads * channels]."""
    n, n_head, dim = q.shape
    out, keys = np.empty((n, n_head, dim)), np.arange(n)
    for first in range(0, n, ROWS):
        rows = np.arange(first, min(first + ROWS, n))[:, None]
        seen = (keys <= rows) & (keys >= (rows // chunk * chunk if chunk else 0))
        for head in range(n_head):
            kv = head * k.shape[1] // n_head
            s = np.where(seen, q[first:first + ROWS, head] @ k[:, kv].T / np.sqrt(dim), -np.inf)
            p = np.exp(s - s.max(-1, keepdims=True))
            out[first:first + ROWS, head] = p / p.sum(-1, keepdims=True) @ v[:, kv]
    return out.reshape(n, -1)


def unit(x, gate, up, down):
    g = x @ gate.T
    return (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T


def logits(path, tokens, chunk: int) -> np.ndarray:
    """float64 [n, n_vocab] of an F32 model."""
    reader = gguf.GGUFReader(path)
    key = lambda name: reader.fields[f"llama4.{name}"].contents()
    w = {t.name: t.data.astype(np.float64) for t in reader.tensors}
    eps, step, n_used = key("attention.layer_norm_rms_epsilon"), key("interleave_moe_layer_step"), key("expert_used_count")
    x, n = w["token_embd.weight"][tokens], len(tokens)
    temperature = 1 + 0.1 * np.log((np.arange(n) + 1) // chunk + 1)[:, None, None]
    for il in range(key("block_count")):
        get = lambda name: w[f"blk.{il}.{name}.weight"]
        h = norm(x, get("attn_norm"), eps)
        q, k, v = ((h @ get(f"attn_{part}").T).reshape(n, key(f"attention.head_count{kv}"), -1)
                   for part, kv in (("q", ""), ("k", "_kv"), ("v", "_kv")))
        if (il + 1) % 4 == 0:
            q = q * temperature
        else:
            q, k = (rope(each, key("rope.freq_base"), False, 1.0) for each in (q, k))
            if key("expert_count") != 128:
                q, k = norm(q, 1, eps), norm(k, 1, eps)
        x = x + attention(q, k, v, 0 if (il + 1) % 4 == 0 else chunk) @ get("attn_output").T
        h = norm(x, get("ffn_norm"), eps)
        if (il + 1) % step:
            x = x + unit(h, get("ffn_gate"), get("ffn_up"), get("ffn_down"))
            continue
        routed, router = np.zeros_like(x), h @ get("ffn_gate_inp").T
        for rank in range(n_used):
            ids = np.argsort(-router, axis=1, kind="stable")[:, rank]
            weight = 1 / (1 + np.exp(-router[np.arange(n), ids]))
            for expert in np.unique(ids):
                mine = ids == expert
                matrices = (get(f"ffn_{part}_exps")[expert] for part in ("gate", "up", "down"))
                routed[mine] += unit(h[mine] * weight[mine, None], *matrices)
        x = x + routed + unit(h, *(get(f"ffn_{part}_shexp") for part in ("gate", "up", "down")))
    return norm(x, w["output_norm.weight"], eps) @ w["output.weight"].T


def with_chunks(monkeypatch, chunk: int) -> None:
    """llama4 whose chunks, and steps of temperature, are shorter."""
    monkeypatch.setattr(llama4, "CHUNK", chunk)
    monkeypatch.setattr(llama4.Llama4, "temperature", Temperature(0.1, 1, chunk))
    monkeypatch.setattr(llama4.Llama4, "cache_class", partial(ChunkedKVCache, chunk))


def is_close(found, expected) -> bool:
    return np.abs(found - expected).max() < 3e-4 * expected.std()


@pytest.mark.parametrize("kind, settings", [("llama4", {}), ("llama4-two", {}), ("llama4", dict(n_expert=128, n_ff_exp=32))],
                         ids=["one expert", "two experts", "128 experts"])
def test_chunks_temperatures_and_experts(kind, settings, tmp_path, monkeypatch):
    """Three chunks of 128; the same bits in micro-batches that cross their borders, and beside another sequence."""
    with_chunks(monkeypatch, 128)
    path, tokens = write_layer_model(tmp_path / "m.gguf", kind, **settings), np.random.default_rng(3).integers(0, 70, 300)
    exact = dict(n_ctx=384, type_k="f32", type_v="f32")
    with Model.load(path, device="cpu") as model:
        found = run(model, tokens, **exact)
        assert is_close(found, logits(path, tokens, 128)) and not is_close(found, logits(path, tokens, 1 << 20))
        for settings in dict(n_ubatch=33), dict(n_ubatch=1), dict(no_fuse="all", kv_write="cpy"):
            assert_bitwise_equal(run(model, tokens, **exact, **settings), found, f"{settings}")
        with model.new_context(n_ctx=2 * 384, n_seq_max=2, n_ubatch=50, type_k="f32", type_v="f32") as context:
            a, b = context.decode_batch([(1, tokens[:200]), (0, tokens)], logits="all")
            assert_bitwise_equal(a, found[:200], "the shorter sequence")
            assert_bitwise_equal(b, found, "the longer one")
            context.seq_rm(0, 250)
            assert_bitwise_equal(context.decode(tokens[250:], logits="all"), found[250:], "taken back and gone on")
        with pytest.raises(UserError, match="^n_ctx: 300 positions of a sequence are not whole chunks, allowed: up to 128, "):
            model.new_context(300)


@pytest.mark.slow
def test_beyond_8192_positions(tmp_path):
    path = write_layer_model(tmp_path / "m.gguf", "llama4", n_embd=32, n_head=2, n_head_kv=1, head=16, n_rot=16, n_ff=32,
                             n_ff_exp=32)
    tokens = np.random.default_rng(3).integers(0, 70, 8300)
    with Model.load(path, device="cpu") as model:
        found = run(model, tokens, n_ctx=16384, type_k="f32", type_v="f32")
    assert is_close(found, logits(path, tokens, 8192))


def test_divisors_by_the_length_of_the_context(tmp_path):
    """phi3: the long ones in contexts of more positions than the original one."""
    tensors: dict[str, np.ndarray] = {}
    path = write_layer_model(tmp_path / "m.gguf", "phi3", tensors=tensors)
    with Model.load(path, device="cpu") as model:
        for n_ctx, length in (64, "short"), (65, "long"):
            angles = np.arange(n_ctx)[:, None] * 10000.0 ** (-np.arange(12) / 12) / tensors[f"rope_factors_{length}.weight"]
            [table] = model.architecture.new_rope_tables(n_ctx).values()
            found = model.backend.data(table)
            assert np.abs(found - np.stack([np.cos(angles), np.sin(angles)], axis=2)).max() < 1e-6
            model.architecture.free_rope_tables({("", "cpu"): table})
