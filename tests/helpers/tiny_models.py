"""Small random GGUF models that tests write themselves: every architecture, weights of several types, a toy vocabulary."""
from pathlib import Path

import gguf
import numpy as np

from ggml_py.quant.quantize import quantize

DEFAULTS = dict(n_layer=2, n_embd=64, n_head=4, n_head_kv=2, head=32, n_ff=96, n_vocab=70, n_ctx=256, tied=False, qkv_bias=False,
                fused_qkv=False, rope_freqs=False)


def write_model(path: Path, arch: str = "llama", types: tuple[str, ...] = ("F32",), seed: int = 0, **settings) -> Path:
    """types: of the matrices, one after the other, again and again. settings: see DEFAULTS;
    `keys` adds metadata {key: (GGUFWriter method, value)}; `tokenizer` writes one."""
    keys = settings.pop("keys", {})
    write_tokenizer = settings.pop("tokenizer", lambda w: w.add_tokenizer_model("no_vocab"))
    c = {**DEFAULTS, **settings}
    rng = np.random.default_rng(seed)
    w = gguf.GGUFWriter(path, arch)
    w.add_block_count(c["n_layer"]); w.add_context_length(c["n_ctx"])
    w.add_embedding_length(c["n_embd"]); w.add_feed_forward_length(c["n_ff"])
    w.add_head_count(c["n_head"]); w.add_head_count_kv(c["n_head_kv"]); w.add_key_length(c["head"]); w.add_value_length(c["head"])
    w.add_layer_norm_rms_eps(1e-5); w.add_rope_dimension_count(c["head"]); w.add_rope_freq_base(10000.0)
    w.add_vocab_size(c["n_vocab"])
    write_tokenizer(w)
    for key, (method, value) in keys.items():
        getattr(w, f"add_{method}")(f"{arch}.{key}", value)
    made = [0]

    def matrix(name, n_rows, n_cols, std=0.15):
        x = (rng.standard_normal((n_rows, n_cols)) * std).astype(np.float32)
        type_ = types[made[0] % len(types)]
        made[0] += 1
        fmt = gguf.GGMLQuantizationType[type_]
        if n_cols % gguf.GGML_QUANT_SIZES[fmt][0]:
            type_, fmt = "F32", gguf.GGMLQuantizationType.F32
        if type_ == "F32":
            w.add_tensor(name, x)
        else:
            w.add_tensor(name, quantize(x, type_).reshape(n_rows, -1), raw_dtype=fmt)

    def vector(name, n, mean=0.0):
        w.add_tensor(name, (mean + 0.1 * rng.standard_normal(n)).astype(np.float32))

    e, q, kv = c["n_embd"], c["n_head"] * c["head"], c["n_head_kv"] * c["head"]
    matrix("token_embd.weight", c["n_vocab"], e, 1.0)
    vector("output_norm.weight", e, 1)
    if not c["tied"]:
        matrix("output.weight", c["n_vocab"], e)
    if c["rope_freqs"]:
        w.add_tensor("rope_freqs.weight", np.linspace(1, 4, c["head"] // 2, dtype=np.float32))
    for i in range(c["n_layer"]):
        p = f"blk.{i}."
        vector(p + "attn_norm.weight", e, 1)
        vector(p + "ffn_norm.weight", e, 1)
        for part, n in [("qkv", q + 2 * kv)] if c["fused_qkv"] else [("q", q), ("k", kv), ("v", kv)]:
            matrix(f"{p}attn_{part}.weight", n, e)
            if c["qkv_bias"]:
                vector(f"{p}attn_{part}.bias", n)
        if arch == "qwen3":
            vector(p + "attn_q_norm.weight", c["head"], 1)
            vector(p + "attn_k_norm.weight", c["head"], 1)
        matrix(p + "attn_output.weight", e, q)
        matrix(p + "ffn_gate.weight", c["n_ff"], e)
        matrix(p + "ffn_up.weight", c["n_ff"], e)
        matrix(p + "ffn_down.weight", e, c["n_ff"])
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    return path


def run(model, tokens, logits="all", **settings):
    with model.new_context(**{"n_ctx": 256, **settings}) as context:
        return context.decode(tokens, logits=logits)
