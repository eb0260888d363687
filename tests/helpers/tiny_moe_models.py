"""Small random GGUF models with experts that tests write themselves: every such architecture, weights of several types."""
from pathlib import Path

import gguf
import numpy as np

from ggml_py.quant.quantize import quantize

SOFTMAX, SIGMOID = 1, 2
DEFAULTS = dict(n_layer=2, n_embd=64, n_head=4, n_head_kv=2, head=32, n_rot=32, n_ff=96, n_vocab=70, n_ctx=256,
                n_expert=6, n_used=2, n_ff_exp=64, n_shared=1, n_dense=1, norm=True, scale=0.0, gating=SOFTMAX, groups=(0, 0),
                window=20,
                q_lora=0, kv_lora=64, n_nope=32, head_v=32, absorbed=False, yarn=None)
ARCHITECTURES = {
    "qwen3moe": {}, "gpt-oss": dict(n_layer=3), "glm4moe": dict(gating=SIGMOID, scale=1.5, n_rot=16),
    "bailingmoe2": dict(n_expert=8, gating=SIGMOID, scale=2.5, groups=(4, 2), n_rot=16, head=16),
    "deepseek2": dict(norm=False),
    "deepseek2-mla": dict(arch="deepseek2", q_lora=48, absorbed=True, n_expert=12, gating=SIGMOID, scale=2.5, groups=(3, 2)),
}


class Tensors:
    """Random tensors for a file. given: float32 by name, instead of random ones; receives the others."""

    def __init__(self, writer: gguf.GGUFWriter, types: tuple[str, ...], rng: np.random.Generator, given: dict):
        self.writer, self.types, self.rng, self.given, self.n_matrices = writer, types, rng, given, 0

    def matrix(self, name: str, *shape: int, std=0.15) -> None:
        """[..., rows, columns], of the next type."""
        x = self.given.setdefault(name, (self.rng.standard_normal(shape) * std).astype(np.float32))
        type_ = self.types[self.n_matrices % len(self.types)]
        self.n_matrices += 1
        if type_ == "F32" or shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_]][0]:
            self.writer.add_tensor(name, x)
        else:
            self.writer.add_tensor(name, quantize(x.reshape(-1, shape[-1]), type_).reshape(*shape[:-1], -1),
                                   raw_dtype=gguf.GGMLQuantizationType[type_])

    def vector(self, name: str, *shape: int, mean=0.0) -> None:
        self.floats(name, lambda: mean + 0.1 * self.rng.standard_normal(shape))

    def floats(self, name: str, values) -> None:
        """Float32 of any shape; values: () -> array."""
        self.writer.add_tensor(name, self.given.setdefault(name, values().astype(np.float32)))


def write_moe_model(path: Path, kind: str, types: tuple[str, ...] = ("F32",), seed: int = 0, tensors: dict | None = None,
                    **settings) -> Path:
    """kind: an architecture of ARCHITECTURES. types: of the matrices, one after the other, again and again. settings: see
    DEFAULTS; `keys` adds metadata {key: (GGUFWriter method, value)}, `more` tensors, float32 by name. tensors: float32 by name,
    instead of random ones; receives the others."""
    keys, more = settings.pop("keys", {}), settings.pop("more", {})
    c = {**DEFAULTS, **ARCHITECTURES[kind], **settings}
    arch = c.get("arch", kind)
    w = gguf.GGUFWriter(path, arch)
    write_keys(w, arch, c)
    for key, (method, value) in keys.items():
        getattr(w, f"add_{method}")(f"{arch}.{key}", value)

    t, e = Tensors(w, types, np.random.default_rng(seed), {} if tensors is None else tensors), c["n_embd"]
    t.matrix("token_embd.weight", c["n_vocab"], e, std=1.0)
    t.vector("output_norm.weight", e, mean=1)
    t.matrix("output.weight", c["n_vocab"], e)
    for i in range(c["n_layer"]):
        p = f"blk.{i}."
        t.vector(p + "attn_norm.weight", e, mean=1)
        t.vector(p + ("post_attention_norm.weight" if arch in ("glm4moe", "gpt-oss") else "ffn_norm.weight"), e, mean=1)
        write_attention(t, p, arch, c)
        if arch in ("deepseek2", "glm4moe", "bailingmoe2") and i < c["n_dense"]:
            t.matrix(p + "ffn_gate.weight", c["n_ff"], e)
            t.matrix(p + "ffn_up.weight", c["n_ff"], e)
            t.matrix(p + "ffn_down.weight", e, c["n_ff"])
        else:
            write_experts(t, p, arch, c)
    for name, x in more.items():
        w.add_tensor(name, x)
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    return path


def write_keys(w: gguf.GGUFWriter, arch: str, c: dict) -> None:
    w.add_block_count(c["n_layer"]); w.add_context_length(c["n_ctx"])
    w.add_embedding_length(c["n_embd"]); w.add_feed_forward_length(c["n_ff"])
    w.add_head_count(c["n_head"]); w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_dimension_count(c["n_rot"]); w.add_rope_freq_base(10000.0)
    w.add_vocab_size(c["n_vocab"]); w.add_tokenizer_model("no_vocab")
    w.add_expert_count(c["n_expert"]); w.add_expert_used_count(c["n_used"]); w.add_expert_feed_forward_length(c["n_ff_exp"])
    if arch in ("deepseek2", "glm4moe", "bailingmoe2"):
        w.add_leading_dense_block_count(c["n_dense"]); w.add_expert_shared_count(c["n_shared"])
        w.add_expert_weights_norm(c["norm"]); w.add_expert_weights_scale(c["scale"])
        w.add_uint32(f"{arch}.expert_gating_func", c["gating"])
    if c["groups"][0]:
        w.add_expert_group_count(c["groups"][0]); w.add_expert_group_used_count(c["groups"][1])
    if arch == "gpt-oss":
        w.add_sliding_window(c["window"])
    if arch == "deepseek2":
        head_k = c["n_nope"] + c["n_rot"]
        w.add_kv_lora_rank(c["kv_lora"]); w.add_head_count_kv(1 if c["absorbed"] else c["n_head"])
        if c["q_lora"]:
            w.add_q_lora_rank(c["q_lora"])
        if c["absorbed"]:
            w.add_key_length(c["kv_lora"] + c["n_rot"]); w.add_value_length(c["kv_lora"])
            w.add_key_length_mla(head_k); w.add_value_length_mla(c["head_v"])
        else:
            w.add_key_length(head_k); w.add_value_length(c["head_v"])
    else:
        w.add_head_count_kv(c["n_head_kv"]); w.add_key_length(c["head"]); w.add_value_length(c["head"])
    if c["yarn"]:
        factor, n_ctx_orig, log_mul = c["yarn"]
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(factor); w.add_rope_scaling_orig_ctx_len(n_ctx_orig)
        if log_mul:
            w.add_rope_scaling_yarn_log_mul(log_mul)


def write_attention(t: Tensors, p: str, arch: str, c: dict) -> None:
    """p: what the names of the layer begin with."""
    e, n_head, q, kv = c["n_embd"], c["n_head"], c["n_head"] * c["head"], c["n_head_kv"] * c["head"]
    if arch == "deepseek2":
        if c["q_lora"]:
            t.matrix(p + "attn_q_a.weight", c["q_lora"], e)
            t.vector(p + "attn_q_a_norm.weight", c["q_lora"], mean=1)
        t.matrix(p + ("attn_q_b.weight" if c["q_lora"] else "attn_q.weight"), n_head * (c["n_nope"] + c["n_rot"]),
                 c["q_lora"] or e)
        t.matrix(p + "attn_kv_a_mqa.weight", c["kv_lora"] + c["n_rot"], e)
        t.vector(p + "attn_kv_a_norm.weight", c["kv_lora"], mean=1)
        if c["absorbed"]:
            t.matrix(p + "attn_k_b.weight", n_head, c["kv_lora"], c["n_nope"])
            t.matrix(p + "attn_v_b.weight", n_head, c["head_v"], c["kv_lora"])
        else:
            t.matrix(p + "attn_kv_b.weight", n_head * (c["n_nope"] + c["head_v"]), c["kv_lora"])
    elif arch == "bailingmoe2":
        t.matrix(p + "attn_qkv.weight", q + 2 * kv, e)
    else:
        for part, n in ("q", q), ("k", kv), ("v", kv):
            t.matrix(f"{p}attn_{part}.weight", n, e)
            if arch in ("glm4moe", "gpt-oss"):
                t.vector(f"{p}attn_{part}.bias", n)
    if arch in ("qwen3moe", "bailingmoe2"):
        t.vector(p + "attn_q_norm.weight", c["head"], mean=1)
        t.vector(p + "attn_k_norm.weight", c["head"], mean=1)
    t.matrix(p + "attn_output.weight", e, n_head * c["head_v"] if arch == "deepseek2" else q)
    if arch == "gpt-oss":
        t.vector(p + "attn_output.bias", e)
        t.vector(p + "attn_sinks.weight", n_head)


def write_experts(t: Tensors, p: str, arch: str, c: dict) -> None:
    """p: what the names of the layer begin with."""
    e, n_expert, ff = c["n_embd"], c["n_expert"], c["n_ff_exp"]
    t.floats(p + "ffn_gate_inp.weight", lambda: 0.3 * t.rng.standard_normal((n_expert, e)))
    for part, n_out, n_in in ("gate", ff, e), ("up", ff, e), ("down", e, ff):
        t.matrix(f"{p}ffn_{part}_exps.weight", n_expert, n_out, n_in)
        if arch == "gpt-oss":
            t.vector(f"{p}ffn_{part}_exps.bias", n_expert, n_out)
    if arch == "gpt-oss":
        t.vector(p + "ffn_gate_inp.bias", n_expert)
    if c["gating"] == SIGMOID:
        t.vector(p + "exp_probs_b.bias", n_expert)
    if arch in ("deepseek2", "glm4moe", "bailingmoe2") and c["n_shared"]:
        ff *= c["n_shared"]
        t.matrix(p + "ffn_gate_shexp.weight", ff, e)
        t.matrix(p + "ffn_up_shexp.weight", ff, e)
        t.matrix(p + "ffn_down_shexp.weight", e, ff)
