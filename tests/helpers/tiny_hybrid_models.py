"""Small random GGUF models that tests write themselves of which some blocks are recurrent, of short convolutions or Mamba 2, and
others attention or feed-forward: every such architecture, weights of several types."""
from pathlib import Path

import gguf
import numpy as np

from tiny_moe_models import Tensors

RECURRENT, ATTENTION, FFN = "raf"
DEFAULTS = dict(blocks="rar", n_embd=64, n_head=4, n_head_kv=2, head=16, n_ff=96, n_vocab=70, n_ctx=256, taps=4, n_state=16,
                n_group=2, n_head_ssm=4, n_inner=96, n_expert=6, n_used=2, n_ff_exp=64, n_ff_shared=32, n_latent=0, n_dense=0,
                finetuned=False, conv_bias=True)
KINDS = {"lfm2": dict(taps=3), "lfm2moe": dict(taps=3, n_dense=1), "nemotron_h": dict(blocks="rfar"),
         "nemotron_h_moe": dict(blocks="rfaf", n_latent=32),
         "granitehybrid": dict(n_group=1, n_inner=128),
         "granitehybrid-dense": dict(arch="granitehybrid", n_inner=128, n_expert=0, n_ff_shared=0, finetuned=True,
                                     conv_bias=False)}


def write_hybrid_model(path: Path, kind: str, types: tuple[str, ...] = ("F32",), seed: int = 0, tensors: dict | None = None,
                       **settings) -> Path:
    """kind: of KINDS. types: of the matrices, one after the other, again and again. settings: see DEFAULTS; `keys` adds metadata
    {key: (GGUFWriter method, value)}, `without` leaves out tensors by the ends of their names. tensors: float32 by name, instead
    of random ones; receives the others."""
    keys, without = settings.pop("keys", {}), settings.pop("without", ())
    c = {**DEFAULTS, **KINDS[kind], **settings}
    arch = c.get("arch", kind)
    w = gguf.GGUFWriter(path, arch)
    write_keys(w, arch, c)
    for key, (method, value) in keys.items():
        w.kv_data[0].pop(f"{arch}.{key}", None)
        if method:
            getattr(w, f"add_{method}")(f"{arch}.{key}", value)
    t, e = Tensors(w, types, np.random.default_rng(seed), {} if tensors is None else tensors), c["n_embd"]
    t.matrix("token_embd.weight", c["n_vocab"], e, std=1.0 if arch.startswith("nemotron") else 0.3)
    t.vector("token_embd_norm.weight" if arch.startswith("lfm2") else "output_norm.weight", e, mean=1)
    if arch.startswith("nemotron"):
        t.matrix("output.weight", c["n_vocab"], e)
    for i, block in enumerate(c["blocks"]):
        p, with_experts = f"blk.{i}.", c["n_expert"] and arch not in ("lfm2", "nemotron_h") and i >= c["n_dense"]
        t.vector(p + "attn_norm.weight", e, mean=1)
        if block == ATTENTION:
            write_attention(t, p, arch, c)
        elif block == RECURRENT:
            (write_short_conv if arch.startswith("lfm2") else write_mamba2)(t, p, c)
        if block == FFN or not arch.startswith("nemotron"):
            if not arch.startswith("nemotron"):
                t.vector(p + "ffn_norm.weight", e, mean=1)
            (write_experts if with_experts else write_ffn)(t, p, arch, c)
    w.tensors[0] = {name: info for name, info in w.tensors[0].items() if not name.endswith(tuple(without))}
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    return path


def write_keys(w: gguf.GGUFWriter, arch: str, c: dict) -> None:
    blocks, nemotron = c["blocks"], arch.startswith("nemotron")
    w.add_block_count(len(blocks)); w.add_context_length(c["n_ctx"]); w.add_embedding_length(c["n_embd"])
    width = c["n_ff_exp"] if arch == "nemotron_h_moe" or (arch == "granitehybrid" and c["n_expert"]) else c["n_ff"]
    w.add_feed_forward_length([width * (block == FFN) for block in blocks] if nemotron else width)
    w.add_head_count(c["n_head"]); w.add_head_count_kv([c["n_head_kv"] * (block == ATTENTION) for block in blocks])
    w.add_layer_norm_rms_eps(1e-5); w.add_vocab_size(c["n_vocab"]); w.add_tokenizer_model("no_vocab")
    if nemotron:
        w.add_layer_norm_eps(1e-5); w.add_key_length(c["head"]); w.add_value_length(c["head"])
    if arch.startswith("lfm2"):
        w.add_shortconv_l_cache(c["taps"]); w.add_rope_freq_base(10000.0)
    else:
        w.add_ssm_conv_kernel(c["taps"]); w.add_ssm_state_size(c["n_state"]); w.add_ssm_group_count(c["n_group"])
        w.add_ssm_time_step_rank(c["n_head_ssm"]); w.add_ssm_inner_size(c["n_inner"])
    if arch == "granitehybrid":
        w.add_rope_dimension_count(c["head"]); w.add_rope_freq_base(10000.0); w.add_rope_scaling_finetuned(c["finetuned"])
        w.add_attention_scale(0.1); w.add_embedding_scale(4.0); w.add_residual_scale(0.3); w.add_logit_scale(2.0)
    if c["n_expert"] and arch not in ("lfm2", "nemotron_h"):
        w.add_expert_count(c["n_expert"]); w.add_expert_used_count(c["n_used"])
        if arch != "lfm2moe":
            w.add_expert_shared_feed_forward_length(c["n_ff_shared"])
        if arch != "granitehybrid":
            w.add_expert_feed_forward_length(c["n_ff_exp"])
    if arch == "lfm2moe":
        w.add_leading_dense_block_count(c["n_dense"]); w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if arch == "nemotron_h_moe":
        w.add_expert_shared_count(1); w.add_expert_weights_norm(True); w.add_expert_weights_scale(2.5)
        w.add_expert_group_count(1)
        if c["n_latent"]:
            w.add_moe_latent_size(c["n_latent"])


def write_attention(t: Tensors, p: str, arch: str, c: dict) -> None:
    """p: what the names of the block begin with."""
    e, dim = c["n_embd"], c["head"]
    for part, n in ("q", c["n_head"]), ("k", c["n_head_kv"]), ("v", c["n_head_kv"]):
        t.matrix(f"{p}attn_{part}.weight", n * dim, e)
    if arch.startswith("lfm2"):
        t.vector(p + "attn_q_norm.weight", dim, mean=1)
        t.vector(p + "attn_k_norm.weight", dim, mean=1)
    t.matrix(p + "attn_output.weight", e, c["n_head"] * dim)


def write_short_conv(t: Tensors, p: str, c: dict) -> None:
    e = c["n_embd"]
    t.matrix(p + "shortconv.in_proj.weight", 3 * e, e)
    t.floats(p + "shortconv.conv.weight", lambda: 0.4 * t.rng.standard_normal((e, c["taps"])))
    t.matrix(p + "shortconv.out_proj.weight", e, e)


def write_mamba2(t: Tensors, p: str, c: dict) -> None:
    n_head, n_inner, n_group = c["n_head_ssm"], c["n_inner"], c["n_group"]
    n_channels = n_inner + 2 * n_group * c["n_state"]
    t.matrix(p + "ssm_in.weight", n_inner + n_channels + n_head, c["n_embd"])
    t.floats(p + "ssm_conv1d.weight", lambda: 0.4 * t.rng.standard_normal((n_channels, c["taps"])))
    if c["conv_bias"]:
        t.vector(p + "ssm_conv1d.bias", n_channels)
    t.vector(p + "ssm_dt.bias", n_head)
    t.floats(p + "ssm_a", lambda: -np.exp(0.5 * t.rng.standard_normal((n_head, 1))))
    t.vector(p + "ssm_d", n_head, 1, mean=1)
    t.vector(p + "ssm_norm.weight", n_group, n_inner // n_group, mean=1)
    t.matrix(p + "ssm_out.weight", c["n_embd"], n_inner)


def write_ffn(t: Tensors, p: str, arch: str, c: dict, n_ff: int = 0, kind: str = "") -> None:
    e, n_ff = c["n_embd"], n_ff or c["n_ff"]
    for part in ("up",) if arch.startswith("nemotron") else ("gate", "up"):
        t.matrix(f"{p}ffn_{part}{kind}.weight", n_ff, e)
    t.matrix(f"{p}ffn_down{kind}.weight", e, n_ff)


def write_experts(t: Tensors, p: str, arch: str, c: dict) -> None:
    e, n, n_ff, n_in = c["n_embd"], c["n_expert"], c["n_ff_exp"], c["n_latent"] or c["n_embd"]
    t.floats(p + "ffn_gate_inp.weight", lambda: 0.3 * t.rng.standard_normal((n, e)))
    for part in ("up",) if arch == "nemotron_h_moe" else ("gate", "up"):
        t.matrix(f"{p}ffn_{part}_exps.weight", n, n_ff, n_in)
    t.matrix(f"{p}ffn_down_exps.weight", n, n_in, n_ff)
    if arch != "granitehybrid":
        t.vector(p + "exp_probs_b.bias", n)
    if c["n_latent"]:
        t.matrix(p + "ffn_latent_down.weight", n_in, e)
        t.matrix(p + "ffn_latent_up.weight", e, n_in)
    if arch != "lfm2moe" and c["n_ff_shared"]:
        write_ffn(t, p, arch, c, c["n_ff_shared"], "_shexp")
