"""Gemma 2 and 3 with as many layers as llama.cpp knows their 27B models by: the scale of scores, windows that text crosses, caps,
two bases of rotary angles; against float64 numpy."""
import gguf
import numpy as np
import pytest

from ggml_py.engine.model import Model
from ggml_py.testing import assert_bitwise_equal
from numpy_transformer import norm, rope
from tiny_layer_models import write_layer_model
from tiny_models import run

WINDOW, N = 20, 150  # of 256 positions a layer with a window has 128 cells: they are used again
SIZES = dict(n_embd=48, n_head=2, n_head_kv=1, head=16, n_rot=16, n_ff=32)  # 24 channels of the embedding for a head
GEMMA3 = {"attention.sliding_window_pattern": None, "rope.freq_base": 1e6, "final_logit_softcapping": 3.0}  # as files are: 6


def capped(x, cap):
    return cap * np.tanh(x / cap) if cap else x


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def logits(path, tokens, channels: int) -> np.ndarray:
    """float64 [n, n_vocab] of an F32 model. channels: scores are divided by the root of so many."""
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    fields = {name.removeprefix(f"{arch}."): field.contents() for name, field in reader.fields.items()}
    w = {t.name: t.data.astype(np.float64) for t in reader.tensors}
    eps, n, n_head = fields["attention.layer_norm_rms_epsilon"], len(tokens), fields["attention.head_count"]
    pattern, score_cap = (6, 0) if arch == "gemma3" else (2, fields["attn_logit_softcapping"])
    behind = np.arange(n)[:, None] - np.arange(n)  # how far a key is behind a query
    x = w["token_embd.weight"][tokens] * np.sqrt(fields["embedding_length"])
    for il in range(fields["block_count"]):
        get = lambda name: w[f"blk.{il}.{name}.weight"]
        is_windowed = (il + 1) % pattern > 0
        base, factor = (10000.0, 1.0) if is_windowed else (fields["rope.freq_base"], fields.get("rope.scaling.factor", 1.0))
        seen = (behind >= 0) & (behind < (WINDOW if is_windowed else n))
        h = norm(x, get("attn_norm"), eps)
        q, k, v = ((h @ get(f"attn_{part}").T).reshape(n, heads, -1) for part, heads in (("q", n_head), ("k", 1), ("v", 1)))
        if arch == "gemma3":
            q, k = norm(q, get("attn_q_norm"), eps), norm(k, get("attn_k_norm"), eps)
        q, k = rope(q, base, True, factor), rope(k, base, True, factor)
        heads = []
        for head in range(n_head):
            s = np.where(seen, capped(q[:, head] @ k[:, 0].T / np.sqrt(channels), score_cap), -np.inf)
            p = np.exp(s - s.max(-1, keepdims=True))
            heads.append(p / p.sum(-1, keepdims=True) @ v[:, 0])
        x = x + norm(np.concatenate(heads, -1) @ get("attn_output").T, get("post_attention_norm"), eps)
        h = norm(x, get("ffn_norm"), eps)
        y = (gelu(h @ get("ffn_gate").T) * (h @ get("ffn_up").T)) @ get("ffn_down").T
        x = x + norm(y, get("post_ffw_norm"), eps)
    head = w.get("output.weight", w["token_embd.weight"])
    return capped(norm(x, w["output_norm.weight"], eps) @ head.T, fields["final_logit_softcapping"])


@pytest.mark.parametrize("arch, n_layer, channels",
                         [("gemma2", 46, 24), ("gemma3", 62, 24), ("gemma2", 6, 16), ("gemma3", 12, 16)])
def test_layers_by_number(arch, n_layer, channels, tmp_path):
    path = write_layer_model(tmp_path / "m.gguf", arch, n_layer=n_layer, keys=GEMMA3 if arch == "gemma3" else {}, **SIZES)
    tokens, exact = np.random.default_rng(3).integers(0, 70, N), dict(n_ctx=256, type_k="f32", type_v="f32")
    with Model.load(path, device="cpu") as model:
        found = run(model, tokens, n_ubatch=33, **exact)
        difference = {n: np.abs(found - logits(path, tokens, n)).max() / found.std() for n in (16, 24)}
        assert difference[channels] < 3e-4 and difference[40 - channels] > 0.01, difference
        assert_bitwise_equal(run(model, tokens, **exact), found, "in one micro-batch")
