"""An independent forward pass in float64 numpy for F32 models of llama, qwen2, qwen3 and qwen3moe: dense softmax attention,
library functions, no blocks."""
import gguf
import numpy as np


def norm(x, w, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w


def rope(x, base, neox, factors):
    """x: [n_tokens, n_head, head], positions 0, 1, ..."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * base ** (-np.arange(half) / half) / factors
    a, b = (x[..., :half], x[..., half:]) if neox else (x[..., 0::2], x[..., 1::2])
    c, s = np.cos(angle), np.sin(angle)
    pair = a * c - b * s, a * s + b * c
    return np.concatenate(pair, -1) if neox else np.stack(pair, -1).reshape(x.shape)


def experts(product, h, used):
    """Of each token the `used` likeliest, by their softmax among themselves (probabilities over their sum)."""
    y, scores = np.zeros_like(h), product("ffn_gate_inp.weight", h)
    for i, row in enumerate(h):
        chosen = np.argsort(-scores[i], kind="stable")[:used]
        p = np.exp(scores[i, chosen] - scores[i].max())
        for weight, e in zip(p / p.sum(), chosen):
            gate, up = (product(f"ffn_{part}_exps.weight", row[None], e) for part in ("gate", "up"))
            y[i] += weight * product("ffn_down_exps.weight", gate / (1 + np.exp(-gate)) * up, e)[0]
    return y


def logits(path, tokens, seen=lambda name, expert, x: None) -> np.ndarray:
    """float64 [n_tokens, n_vocab] of one sequence. seen: is told what each matrix is multiplied with, x float64 [n, n_cols];
    expert: which matrix of a stack, else 0."""
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    key = lambda name: reader.fields[f"{arch}.{name}"].contents()
    w = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors}
    n_head, n_head_kv, eps = key("attention.head_count"), key("attention.head_count_kv"), key("attention.layer_norm_rms_epsilon")
    factors, n = w.get("rope_freqs.weight", 1.0), len(tokens)
    mask = np.triu(np.full((n, n), -np.inf), 1)
    x = w["token_embd.weight"][tokens]
    for i in range(key("block_count")):
        get = lambda name: w.get(f"blk.{i}.{name}")

        def product(name, x, expert=None):
            seen(f"blk.{i}.{name}", expert or 0, x)
            return x @ (get(name) if expert is None else get(name)[expert]).T
        h = norm(x, get("attn_norm.weight"), eps)
        heads = {}
        for part, count in ("q", n_head), ("k", n_head_kv), ("v", n_head_kv):
            y = product(f"attn_{part}.weight", h)
            if get(f"attn_{part}.bias") is not None:
                y = y + get(f"attn_{part}.bias")
            y = y.reshape(n, count, -1)
            if get(f"attn_{part}_norm.weight") is not None:
                y = norm(y, get(f"attn_{part}_norm.weight"), eps)
            heads[part] = rope(y, key("rope.freq_base"), arch != "llama", factors) if part != "v" else y
        out = []
        for j in range(n_head):
            g = j * n_head_kv // n_head
            s = heads["q"][:, j] @ heads["k"][:, g].T / np.sqrt(heads["q"].shape[-1]) + mask
            p = np.exp(s - s.max(-1, keepdims=True))
            out.append(p / p.sum(-1, keepdims=True) @ heads["v"][:, g])
        x = x + product("attn_output.weight", np.concatenate(out, -1))
        h = norm(x, get("ffn_norm.weight"), eps)
        if get("ffn_gate_inp.weight") is not None:
            x = x + experts(product, h, key("expert_used_count"))
            continue
        gate = product("ffn_gate.weight", h)
        x = x + product("ffn_down.weight", gate / (1 + np.exp(-gate)) * product("ffn_up.weight", h))
    return norm(x, w["output_norm.weight"], eps) @ w.get("output.weight", w["token_embd.weight"]).T
