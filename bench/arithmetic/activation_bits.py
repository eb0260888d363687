"""What rounded activations cost a likelihood (docs/numerics.md, section 11), place by place and by their bits:

    python bench/arithmetic/activation_bits.py wiki.test.raw [MODEL.gguf]

SmolLM2, or another small dense `llama`, in float32 numpy, 2 x 512 tokens of the text; what enters a product is rounded to b bits
a block, to levels of at most 127 * 2^(b-8). Prints the difference from no rounding, of single tokens: root mean square, maximum.
"""
import sys
from itertools import product
from pathlib import Path

import numpy as np

from ggml_py import Tokenizer
from ggml_py.files.gguf import GGUFFile
from ggml_py.files.pull import pull
from ggml_py.quant.dequantize import dequantize

N, WINDOWS, PIECE = 512, 2, 128
F16 = "cache in f16"
PLACES = {"Q, K, V": "attn_norm", "attn_output": "attn_output", "gate, up": "ffn_norm", "ffn_down": "ffn_down",
          "head": "output_norm"}
ATTENTION = {"q": (15, 64), "k": (15, 64), "v": (15, 1 << 20), "p": (15, PIECE)}   # of a cache in f16 (section 8)


def rounded(x, bits, block):
    """x, float32 [..., n], with `bits` bits in each `block` of columns."""
    n, top = x.shape[-1], 127 * 2 ** (bits - 8)
    block = min(block, n)
    y = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -n % block)]).reshape(*x.shape[:-1], -1, block)
    d = np.maximum(np.abs(y).max(-1, keepdims=True), np.float32(2**-100)) / np.float32(top)
    return (np.rint(y / d) * d).reshape(*x.shape[:-1], -1)[..., :n]


class Llama:
    """Weights in float32, and a forward pass in which `places` says how what enters each product is rounded: place, or
    (place, layer) -> (bits, block)."""

    def __init__(self, path):
        with GGUFFile.open(path) as file:
            self.w = {name: np.array(dequantize(file.data(name), info.type.name, tuple(reversed(info.shape)), name), np.float32)
                      for name, info in file.tensors.items()}
            key = lambda name: file.metadata[f"llama.{name}"]
            self.layers, self.eps = key("block_count"), np.float32(key("attention.layer_norm_rms_epsilon"))
            self.heads, self.kv_heads = key("attention.head_count"), key("attention.head_count_kv")
            half = key("rope.dimension_count") // 2
            angle = np.arange(N)[:, None, None] * key("rope.freq_base") ** (-np.arange(half) / half)
        self.cos, self.sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.w[name]

    def rope(self, x):
        a, b = x[..., 0::2], x[..., 1::2]
        return np.stack((a * self.cos - b * self.sin, a * self.sin + b * self.cos), -1).reshape(x.shape)

    def attention(self, q, k, v, places):
        """q: [n, heads, channels]; softmax in pieces of keys, whose p times the scales of V are rounded together."""
        causal, out = np.tril(np.ones((N, N), bool)), np.empty_like(q)
        for j in range(self.heads):
            g = j * self.kv_heads // self.heads
            s = np.where(causal, q[:, j] @ k[:, g].T / np.float32(q.shape[-1] ** 0.5), -np.inf)
            e = np.exp(s - s.max(-1, keepdims=True))
            p = e
            if "p" in places:
                scale = np.abs(v[:, g]).max(-1)
                p = rounded(e * scale, *places["p"]) / scale
            out[:, j] = p @ v[:, g] / e.sum(-1, keepdims=True)
        return out.reshape(N, -1)

    def likelihoods(self, tokens, places):
        """float64 [n - 1]: of each next token."""
        def at(place, x, layer=None):
            found = places.get(place) or places.get((place, layer))
            return rounded(x, *found) if found else x

        x = self.w["token_embd.weight"][tokens]
        for i in range(self.layers):
            times = lambda x, name: x @ self.w[f"blk.{i}.{name}.weight"].T
            h = at("attn_norm", self.norm(x, f"blk.{i}.attn_norm.weight"), i)
            q, k, v = (times(h, f"attn_{part}").reshape(N, n, -1) for part, n in
                       (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)))
            q, k = self.rope(q), self.rope(k)
            if F16 in places:
                k, v = (each.astype(np.float16).astype(np.float32) for each in (k, v))
            out = self.attention(at("q", q), at("k", k), at("v", v), places)
            x = x + times(at("attn_output", out, i), "attn_output")
            h = at("ffn_norm", self.norm(x, f"blk.{i}.ffn_norm.weight"), i)
            gate = times(h, "ffn_gate")
            x = x + times(at("ffn_down", gate / (1 + np.exp(-gate)) * times(h, "ffn_up"), i), "ffn_down")
        h = at("output_norm", self.norm(x, "output_norm.weight"))[:-1]
        logits = h @ self.w.get("output.weight", self.w["token_embd.weight"]).T
        logits -= logits.max(-1, keepdims=True)
        return logits[np.arange(N - 1), tokens[1:]] - np.log(np.exp(logits).sum(-1, dtype=np.float64))


def cases():
    for bits, block in [(8, 32), *product((13, 15, 17, 19, 22), (256, 32))]:
        yield f"{bits} bits per {block}, f32 cache", dict.fromkeys(PLACES.values(), (bits, block))
    for name, place in PLACES.items():
        yield f"15 bits per 256, {name} alone", {place: (15, 256)}
    yield "15 bits per 256, ffn_down of layer 11 alone", {("ffn_down", 11): (15, 256)}
    yield "K and V in f16, no other rounding", {F16: True}
    for name, how in ATTENTION.items():
        yield f"attention: {name} in 15 bits, alone", {name: how}
    yield "f16 cache, fixed point", {F16: True, **ATTENTION}
    yield "15 bits per 256, f16 cache, fixed point", {F16: True, **ATTENTION, **dict.fromkeys(PLACES.values(), (15, 256))}


if __name__ == "__main__":
    path = Path(sys.argv[2]) if len(sys.argv) > 2 else pull("smollm2", sys.stderr)
    tokens = Tokenizer.from_gguf(path).encode(Path(sys.argv[1]).read_text(encoding="utf-8")[:20000])
    windows, model = np.array(tokens[:N * WINDOWS]).reshape(WINDOWS, N), Llama(path)
    exact = np.array([model.likelihoods(window, {}) for window in windows])
    for name, places in cases():
        off = np.array([model.likelihoods(window, places) for window in windows]) - exact
        print(f"{name:48} {np.sqrt((off * off).mean()):.1e} {np.abs(off).max():.1e}", flush=True)
