"""Small random GGUF models with gated delta nets that tests write themselves: every such architecture, weights of several
types."""
from pathlib import Path

import gguf
import numpy as np

from tiny_moe_models import Tensors

DEFAULTS = dict(n_layer=3, n_embd=64, n_head=4, n_head_kv=2, head=32, n_rot=16, n_ff=96, n_vocab=70, n_ctx=256, interval=2,
                taps=4, dim=16, n_head_k=2, n_head_v=4, n_expert=6, n_used=2, n_ff_exp=64, sections=(3, 2, 2, 0), legacy=False,
                nextn=0)
KINDS = {"qwen3next": {}, "qwen3next-legacy": dict(arch="qwen3next", legacy=True, dim=32), "qwen35": dict(n_head_v=6),
         "qwen35moe": {}}


def write_delta_net_model(path: Path, kind: str, types: tuple[str, ...] = ("F32",), seed: int = 0, tensors: dict | None = None,
                          **settings) -> Path:
    """kind: of KINDS. types: of the matrices, one after the other, again and again. settings: see DEFAULTS; `keys` adds metadata
    {key: (GGUFWriter method, value)}. tensors: float32 by name, instead of random ones; receives the others."""
    keys = settings.pop("keys", {})
    c = {**DEFAULTS, **KINDS[kind], **settings}
    arch = c.get("arch", kind)
    w = gguf.GGUFWriter(path, arch)
    write_keys(w, arch, c)
    for key, (method, value) in keys.items():
        getattr(w, f"add_{method}")(f"{arch}.{key}", value)
    t, e = Tensors(w, types, np.random.default_rng(seed), {} if tensors is None else tensors), c["n_embd"]
    t.matrix("token_embd.weight", c["n_vocab"], e, std=1.0)
    t.vector("output_norm.weight", e, mean=1)
    t.matrix("output.weight", c["n_vocab"], e)
    for i in range(c["n_layer"] + c["nextn"]):
        p, is_nextn = f"blk.{i}.", i >= c["n_layer"]
        if is_nextn:
            t.matrix(p + "nextn.eh_proj.weight", e, 2 * e)
            for name in "enorm", "hnorm", "shared_head_norm":
                t.vector(f"{p}nextn.{name}.weight", e, mean=1)
        t.vector(p + "attn_norm.weight", e, mean=1)
        t.vector(p + "post_attention_norm.weight", e, mean=1)
        (write_delta_net if (i + 1) % c["interval"] and not is_nextn else write_gated_attention)(t, p, arch, c)
        if arch == "qwen35":
            write_ffn(t, p, e, c["n_ff"])
        else:
            t.floats(p + "ffn_gate_inp.weight", lambda: 0.3 * t.rng.standard_normal((c["n_expert"], e)))
            for part, n_out, n_in in ("gate", c["n_ff_exp"], e), ("up", c["n_ff_exp"], e), ("down", e, c["n_ff_exp"]):
                t.matrix(f"{p}ffn_{part}_exps.weight", c["n_expert"], n_out, n_in)
            t.vector(p + "ffn_gate_inp_shexp.weight", e)
            write_ffn(t, p, e, c["n_ff_exp"], "_shexp")
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    return path


def write_keys(w: gguf.GGUFWriter, arch: str, c: dict) -> None:
    w.add_block_count(c["n_layer"] + c["nextn"]); w.add_nextn_predict_layers(c["nextn"]); w.add_context_length(c["n_ctx"])
    w.add_embedding_length(c["n_embd"]); w.add_feed_forward_length(c["n_ff"])
    w.add_head_count(c["n_head"]); w.add_head_count_kv(c["n_head_kv"])
    w.add_key_length(c["head"]); w.add_value_length(c["head"])
    w.add_layer_norm_rms_eps(1e-5); w.add_rope_dimension_count(c["n_rot"]); w.add_rope_freq_base(10000.0)
    w.add_vocab_size(c["n_vocab"]); w.add_tokenizer_model("no_vocab")
    w.add_ssm_conv_kernel(c["taps"]); w.add_ssm_state_size(c["dim"]); w.add_ssm_group_count(c["n_head_k"])
    w.add_ssm_time_step_rank(c["n_head_v"]); w.add_ssm_inner_size(c["n_head_v"] * c["dim"])
    w.add_full_attention_interval(c["interval"])
    if arch != "qwen3next":
        w.add_rope_dimension_sections(list(c["sections"]))
    if arch != "qwen35":
        w.add_expert_count(c["n_expert"]); w.add_expert_used_count(c["n_used"]); w.add_expert_feed_forward_length(c["n_ff_exp"])
        w.add_expert_shared_feed_forward_length(c["n_ff_exp"])


def write_gated_attention(t: Tensors, p: str, arch: str, c: dict) -> None:
    """p: what the names of the layer begin with."""
    e, dim = c["n_embd"], c["head"]
    for part, n in ("q", 2 * c["n_head"]), ("k", c["n_head_kv"]), ("v", c["n_head_kv"]):
        t.matrix(f"{p}attn_{part}.weight", n * dim, e)
    t.vector(p + "attn_q_norm.weight", dim, mean=1)
    t.vector(p + "attn_k_norm.weight", dim, mean=1)
    t.matrix(p + "attn_output.weight", e, c["n_head"] * dim)


def write_delta_net(t: Tensors, p: str, arch: str, c: dict) -> None:
    """p: what the names of the layer begin with."""
    e, n_v, n_values = c["n_embd"], c["n_head_v"], c["n_head_v"] * c["dim"]
    n_channels = 2 * c["n_head_k"] * c["dim"] + n_values
    if c["legacy"]:
        t.matrix(p + "ssm_in.weight", n_channels + n_values, e)
    else:
        t.matrix(p + "attn_qkv.weight", n_channels, e)
        t.matrix(p + "attn_gate.weight", n_values, e)
    if arch == "qwen3next":
        t.matrix(p + "ssm_ba.weight", 2 * n_v, e)
    else:
        t.matrix(p + "ssm_beta.weight", n_v, e)
        t.matrix(p + "ssm_alpha.weight", n_v, e)
    t.floats(p + "ssm_conv1d.weight", lambda: 0.4 * t.rng.standard_normal((n_channels, c["taps"])))
    t.floats(p + "ssm_a", lambda: -np.exp(0.5 * t.rng.standard_normal(n_v)))
    t.vector(p + "ssm_dt.bias", n_v)
    t.vector(p + "ssm_norm.weight", c["dim"], mean=1)
    t.matrix(p + "ssm_out.weight", e, n_values)


def write_ffn(t: Tensors, p: str, e: int, n_ff: int, kind: str = "") -> None:
    t.matrix(f"{p}ffn_gate{kind}.weight", n_ff, e)
    t.matrix(f"{p}ffn_up{kind}.weight", n_ff, e)
    t.matrix(f"{p}ffn_down{kind}.weight", e, n_ff)
