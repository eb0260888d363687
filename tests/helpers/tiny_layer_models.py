"""Small random GGUF models that tests write themselves, of architectures whose layers are declared by the names of their
tensors: weights of several types."""
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np

from tiny_moe_models import Tensors

SIZES = dict(n_layer=2, n_embd=64, n_head=4, n_head_kv=2, head=32, n_rot=32, n_ff=96, n_vocab=70, n_ctx=256, n_expert=6, n_used=2,
             n_ff_exp=64, n_ff_shexp=48, n_per_layer=8)
ATTENTION, FFN, BIASES = "attn_q attn_k attn_v attn_output", "ffn_gate ffn_up ffn_down", "attn_q.bias attn_k.bias attn_v.bias"
NORMS, POST_NORMS, QK_NORMS = "attn_norm ffn_norm", "post_attention_norm post_ffw_norm", "attn_q_norm attn_k_norm"
QK_NORMS_OF_ROWS = "attn_q_norm:rows attn_k_norm:rows"
EXPERTS, SHARED = "ffn_gate_inp ffn_gate_exps ffn_up_exps ffn_down_exps", "ffn_gate_shexp ffn_up_shexp ffn_down_shexp"
LLAMA = f"{NORMS} {ATTENTION} {FFN}"
WITH_EXPERTS = dict(expert_count="n_expert", expert_used_count="n_used", expert_feed_forward_length="n_ff_exp")


@dataclass(frozen=True)
class Kind:
    """layer: names of the tensors of a layer, ".weight" where no other end is given; a function of its number where they differ.
    keys: further metadata: value, or the name of a size. sizes: others than SIZES. more: names of tensors of no layer."""
    layer: str | Callable[[int], str] = LLAMA
    keys: dict = field(default_factory=dict)
    sizes: dict = field(default_factory=dict)
    more: str = "output"
    arch: str = ""  # where the kind is one of several
    eps: str = "attention.layer_norm_rms_epsilon"
    of_layer: Callable[[int], dict] = lambda il: {}  # sizes of a layer that are others than those of all


def experts(layer: str, more: str = "") -> str:
    return f"{layer.replace(FFN, EXPERTS)} {more}"


FUSED = LLAMA.replace("attn_q attn_k attn_v", "attn_qkv").replace(FFN, "ffn_up_fused ffn_down")
POST = f"{ATTENTION} {FFN} {POST_NORMS}"
VISION = {"rope.dimension_sections": [6, 5, 4, 0]}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
PARALLEL, LAYER_NORM_EPS = f"attn_norm {ATTENTION} {FFN}", "attention.layer_norm_epsilon"
MORE_BIASES = "attn_norm.bias ffn_norm.bias attn_output.bias ffn_up.bias ffn_down.bias"
SCALES = {"embedding_scale": 3.0, "residual_scale": 0.22, "attention.scale": 0.1, "logit_scale": 6.0}
GEMMA4 = {"attention.sliding_window": 20, "attention.sliding_window_pattern": [True, False, True, False],
          "attention.key_length_swa": 16, "attention.value_length_swa": 16, "rope.dimension_count_swa": 16,
          "embedding_length_per_layer_input": 0, "rope.freq_base": 1e6, "final_logit_softcapping": 4.0}
GEMMA4_EXPERTS = (f"{POST_NORMS} {QK_NORMS} ffn_gate_inp ffn_gate_inp.scale ffn_gate_up_exps ffn_down_exps ffn_down_exps.scale "
                  "pre_ffw_norm_2 post_ffw_norm_1 post_ffw_norm_2")
KINDS = {
    "phi3": Kind(FUSED, {"rope.scaling.original_context_length": 64, "attention.sliding_window": 3}, dict(n_rot=24),
                 "output rope_factors_long rope_factors_short"),
    "glm4": Kind(f"{LLAMA} {POST_NORMS} {BIASES}".replace(FFN, "ffn_up_fused ffn_down"), sizes=dict(n_rot=16)),
    "olmo2": Kind(f"{POST} {QK_NORMS_OF_ROWS}"),
    "olmo3": Kind(f"{POST} {QK_NORMS_OF_ROWS}", {**YARN, "attention.sliding_window": 20}, dict(n_layer=4), arch="olmo2"),
    "olmoe": Kind(experts(LLAMA, f"{QK_NORMS_OF_ROWS}"), {**WITH_EXPERTS, "expert_feed_forward_length": None}, dict(n_ff=64)),
    "smollm3": Kind(sizes=dict(n_layer=4), more=""),
    "minimax-m2": Kind(experts(LLAMA, f"{QK_NORMS_OF_ROWS} exp_probs_b.bias"), {**WITH_EXPERTS, "expert_gating_func": 2},
                       dict(n_rot=16, n_ff=64)),
    "seed_oss": Kind(f"{LLAMA} {BIASES}".replace("ffn_norm", "post_attention_norm")),
    "ernie4_5": Kind(more=""),
    "ernie4_5-moe": Kind(lambda il: experts(LLAMA, f"{SHARED} exp_probs_b.bias") if il else LLAMA, {
        **WITH_EXPERTS, "leading_dense_block_count": 1, "expert_shared_feed_forward_length": "n_ff_shexp"}),
    "hunyuan-dense": Kind(f"{LLAMA} {QK_NORMS}", more=""),
    "hunyuan-moe": Kind(experts(LLAMA, f"{QK_NORMS} {SHARED}"),
                        {**WITH_EXPERTS, "expert_shared_feed_forward_length": "n_ff_shexp"}, dict(n_ff=64)),
    "exaone4": Kind(f"{POST} {QK_NORMS}"),
    "exaone4-swa": Kind(f"{POST} {QK_NORMS}", {"attention.sliding_window": 20},
                        dict(n_layer=64, n_embd=32, n_head=2, n_head_kv=1, head=16, n_rot=16, n_ff=32), arch="exaone4"),
    "granite": Kind(keys=SCALES, more=""),
    "granitemoe": Kind(experts(LLAMA, SHARED), {**SCALES, **WITH_EXPERTS, "expert_shared_feed_forward_length": "n_ff_shexp",
                                                "rope.scaling.finetuned": False}, dict(n_ff=64), ""),
    "cohere2": Kind(PARALLEL, {"logit_scale": 0.5, "attention.sliding_window": 20}, dict(n_layer=4), "", eps=LAYER_NORM_EPS),
    "command-r": Kind(PARALLEL, {"logit_scale": 0.5}, more="", eps=LAYER_NORM_EPS),
    "command-r-plus": Kind(f"{PARALLEL} attn_q_norm:heads attn_k_norm:heads", {"logit_scale": 0.5},
                           dict(n_layer=64, n_embd=32, n_head=2, n_head_kv=1, head=16, n_rot=16, n_ff=32), "", "command-r",
                           LAYER_NORM_EPS),
    "starcoder2": Kind(f"{LLAMA.replace('ffn_gate ', '')} {BIASES} {MORE_BIASES}", more="output_norm.bias", eps=LAYER_NORM_EPS),
    "mistral3": Kind(keys={**YARN, "rope.scaling.yarn_log_multiplier": 1.0, "rope.scaling.yarn_beta_fast": 0.5,
                           "rope.scaling.yarn_beta_slow": 0.1, "attention.temperature_scale": 0.1}),
    "mistral3-moe": Kind(experts(LLAMA), {**WITH_EXPERTS, "expert_feed_forward_length": None}, dict(n_ff=64), arch="mistral3"),
    "llama4": Kind(lambda il: experts(LLAMA, SHARED.replace("shexp", "shexp:wide")) if il % 2 else LLAMA,
                   {**WITH_EXPERTS, "interleave_moe_layer_step": 2}, dict(n_layer=4, n_used=1)),
    "llama4-two": Kind(experts(LLAMA, SHARED.replace("shexp", "shexp:wide")),
                       {**WITH_EXPERTS, "interleave_moe_layer_step": 1}, arch="llama4"),
    "qwen2moe": Kind(experts(LLAMA, f"{BIASES} {SHARED} ffn_gate_inp_shexp"),
                     {**WITH_EXPERTS, "expert_shared_feed_forward_length": "n_ff_shexp"}),
    "qwen2vl": Kind(f"{LLAMA} {BIASES}", VISION),
    "qwen3vl": Kind(f"{LLAMA} {QK_NORMS}", VISION),
    "gemma": Kind(more=""),
    "gemma2": Kind(f"{LLAMA} {POST_NORMS}", {"attention.sliding_window": 20, "attn_logit_softcapping": 6.0,
                                            "final_logit_softcapping": 4.0}, more=""),
    "gemma3": Kind(f"{LLAMA} {POST_NORMS} {QK_NORMS}", {
        "attention.sliding_window": 20, "attention.sliding_window_pattern": 2, "rope.freq_base": 1e6,
        "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}),
    "gemma4": Kind(f"{LLAMA} {POST_NORMS} {QK_NORMS} inp_gate proj post_norm layer_output_scale", {
        **GEMMA4, "embedding_length_per_layer_input": "n_per_layer", "attention.shared_kv_layers": 2}, dict(n_layer=4),
        "rope_freqs per_layer_token_embd per_layer_model_proj per_layer_proj_norm",
        of_layer=lambda il: dict(head=32 if il % 2 else 16)),
    "gemma4-moe": Kind(lambda il: f"{LLAMA.replace('attn_v ', '') if il % 2 else LLAMA} {GEMMA4_EXPERTS}", {
        **GEMMA4, **WITH_EXPERTS, "attention.head_count_kv": [2, 1, 2, 1]}, dict(n_layer=4), "rope_freqs", arch="gemma4",
        of_layer=lambda il: dict(head=32, n_head_kv=1) if il % 2 else dict(head=16)),
    "qwen3vlmoe": Kind(experts(LLAMA, QK_NORMS), {**VISION, **WITH_EXPERTS}),
}
QUICK = [kind for kind, declared in KINDS.items() if declared.sizes.get("n_layer", 0) < 64]


def shapes(c: dict) -> dict[str, tuple[int, ...]]:
    """Of every tensor that a kind may name (numpy order); those of one size are vectors."""
    e, q, kv, ff, n, fx, fs = (c[k] for k in ("n_embd", "n_head", "n_head_kv", "n_ff", "n_expert", "n_ff_exp", "n_ff_shexp"))
    q, kv = q * c["head"], kv * c["head"]
    return {
        "token_embd": (c["n_vocab"], e), "output": (c["n_vocab"], e), "output_norm": (e,),
        **dict.fromkeys(("rope_factors_long", "rope_factors_short"), (c["n_rot"] // 2,)),
        **dict.fromkeys(f"{NORMS} {POST_NORMS}".split(), (e,)), **dict.fromkeys(QK_NORMS.split(), (c["head"],)),
        "attn_q_norm:rows": (q,), "attn_k_norm:rows": (kv,),
        "attn_q_norm:heads": (c["n_head"], c["head"]), "attn_k_norm:heads": (c["n_head_kv"], c["head"]),
        **dict.fromkeys("output_norm.bias attn_norm.bias ffn_norm.bias attn_output.bias ffn_down.bias".split(), (e,)),
        "ffn_up.bias": (ff,),
        "attn_q": (q, e), "attn_k": (kv, e), "attn_v": (kv, e), "attn_qkv": (q + 2 * kv, e), "attn_output": (e, q),
        "attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,),
        "ffn_gate": (ff, e), "ffn_up": (ff, e), "ffn_up_fused": (2 * ff, e), "ffn_down": (e, ff),
        "ffn_gate_inp": (n, e), "ffn_gate_exps": (n, fx, e), "ffn_up_exps": (n, fx, e), "ffn_down_exps": (n, e, fx),
        "exp_probs_b.bias": (n,), "ffn_gate_up_exps": (n, 2 * fx, e), "ffn_down_exps.scale": (n,), "ffn_gate_inp.scale": (e,),
        **dict.fromkeys(("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2", "post_norm"), (e,)),
        "inp_gate": (c["n_per_layer"], e), "proj": (e, c["n_per_layer"]), "layer_output_scale": (1,),
        "rope_freqs": (c["n_rot"] // 2,),
        "per_layer_token_embd": (c["n_vocab"], c["n_per_layer"] * c["n_layer"]),
        "per_layer_model_proj": (c["n_per_layer"] * c["n_layer"], e), "per_layer_proj_norm": (c["n_per_layer"],),
        "ffn_gate_shexp:wide": (fx, e), "ffn_up_shexp:wide": (fx, e), "ffn_down_shexp:wide": (e, fx),
        "ffn_gate_shexp": (fs, e), "ffn_up_shexp": (fs, e), "ffn_down_shexp": (e, fs), "ffn_gate_inp_shexp": (e,),
    }


def write_layer_model(path: Path, kind: str, types: tuple[str, ...] = ("F32",), seed: int = 0, tensors: dict | None = None,
                      **settings) -> Path:
    """types: of the matrices, one after the other, again and again. settings: sizes; `keys`, further metadata, of which None is
    left out; `without`, a tensor that is left out. tensors: float32 by name, instead of random ones; receives the others."""
    declared = KINDS[kind]
    keys, without = {**declared.keys, **settings.pop("keys", {})}, settings.pop("without", None)
    c = {**SIZES, **declared.sizes, **settings}
    arch = declared.arch or kind
    w = gguf.GGUFWriter(path, arch)
    w.add_vocab_size(c["n_vocab"]); w.add_tokenizer_model("no_vocab")
    for key, value in {
            "block_count": c["n_layer"], "context_length": c["n_ctx"], "embedding_length": c["n_embd"],
            "feed_forward_length": c["n_ff"], "attention.head_count": c["n_head"], "attention.head_count_kv": c["n_head_kv"],
            "attention.key_length": c["head"], "attention.value_length": c["head"], "rope.dimension_count": c["n_rot"],
            "rope.freq_base": 10000.0, declared.eps: 1e-5, **keys}.items():
        value = c.get(value, value) if isinstance(value, str) else value
        add = {bool: w.add_bool, int: w.add_uint32, float: w.add_float32, str: w.add_string, list: w.add_array}
        if value is not None:
            add[type(value)](f"{arch}.{key}", value)
    t = Tensors(w, types, np.random.default_rng(seed), {} if tensors is None else tensors)

    def add_tensor(p: str, name: str, shapes_there: dict) -> None:
        shape, full = shapes_there[name], p + name.split(":")[0].removesuffix("_fused") + ".weight" * ("." not in name)
        if full == without:
            return
        if len(shape) == 1 or "norm" in name:
            is_near_one = any(part in name for part in ("norm", "scale", "freqs")) and "bias" not in name
            t.vector(full, *shape, mean=2 if "factors" in name else int(is_near_one))
        elif name == "ffn_gate_inp":
            t.floats(full, lambda: 0.3 * t.rng.standard_normal(shape))
        else:
            t.matrix(full, *shape, std=1.0 if name == "token_embd" else 0.15)

    for name in f"token_embd output_norm {declared.more}".split():
        add_tensor("", name, shapes(c))
    for il in range(c["n_layer"]):
        for name in (declared.layer(il) if callable(declared.layer) else declared.layer).split():
            add_tensor(f"blk.{il}.", name, shapes({**c, **declared.of_layer(il)}))
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    return path
