"""Small files whose tensors meet every rule of the mixes, and how a plan for one is written in a line.

A record (tests/conversion/llama_quantize.json) has for each case and type of file a letter for each tensor, in the order of the
new file: LETTERS[i] is TYPES[i].
"""
import string
from pathlib import Path

import gguf
import numpy as np

from ggml_py.conversion.imatrix import ImportanceMatrix, Sums
from ggml_py.quant.formats import FORMATS

TYPES = [fmt.name for fmt in FORMATS.values() if fmt.own_id is None and fmt.planes]
LETTERS = string.ascii_uppercase + string.ascii_lowercase
N_ROWS = 2
# Of one layer: name -> columns
def layer(names: str, **others: int) -> dict[str, int]:
    return {**dict.fromkeys(names.split(), 256), **others}


DENSE = layer("attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down")
EXPERTS = layer("attn_q attn_k attn_v attn_output ffn_gate_inp ffn_gate_exps ffn_up_exps ffn_down_exps", attn_q_norm=64)
LATENT = layer("attn_q_a attn_q_b attn_kv_a_mqa attn_output ffn_gate_inp ffn_gate_exps ffn_up_exps ffn_down_exps ffn_gate_shexp "
               "ffn_up_shexp ffn_down_shexp", attn_kv_b=512)
LATENT_KEYS = {"expert_used_count": 2, "leading_dense_block_count": 1, "attention.q_lora_rank": 256,
               "attention.kv_lora_rank": 512, "attention.key_length_mla": 64, "attention.value_length_mla": 64,
               "expert_feed_forward_length": 256, "expert_shared_count": 1, "expert_weights_scale": 1.0, "expert_gating_func": 1}
# name -> (architecture, layers, heads, heads of K and V, experts, has an output head, a layer, more keys)
CASES = {
    "llama": ("llama", 16, 4, 4, 0, True, DENSE, {}),
    "llama-gqa-tied": ("llama", 17, 8, 2, 0, False, DENSE, {}),
    "llama-uneven": ("llama", 8, 4, 2, 0, False, {**DENSE, "attn_v": 48, "ffn_down": 288}, {}),
    "llama-70b": ("llama", 80, 8, 4, 0, True, {"attn_v": 256}, {}),
    "falcon": ("falcon", 16, 4, 4, 0, True, layer("attn_qkv attn_output ffn_up ffn_down"),
               {"attention.layer_norm_epsilon": 1e-5}),
    "qwen3moe-8": ("qwen3moe", 16, 8, 2, 8, True, EXPERTS, {"expert_used_count": 2}),
    "qwen3moe-16": ("qwen3moe", 9, 4, 4, 16, True, EXPERTS, {"expert_used_count": 2}),
    "deepseek2": ("deepseek2", 9, 4, 1, 6, True, LATENT, LATENT_KEYS),
}


def write_case(path: Path, name: str) -> Path:
    arch, n_layer, n_head, n_head_kv, n_expert, has_output, of_layer, keys = CASES[name]
    n_embd = of_layer.get("attn_q", 256)
    w = gguf.GGUFWriter(path, arch)
    w.add_block_count(n_layer); w.add_context_length(64); w.add_embedding_length(n_embd); w.add_feed_forward_length(256)
    w.add_head_count(n_head); w.add_head_count_kv(n_head_kv); w.add_layer_norm_rms_eps(1e-5); w.add_vocab_size(N_ROWS)
    w.add_rope_dimension_count(64); w.add_key_length(64); w.add_value_length(64)
    if n_expert:
        w.add_expert_count(n_expert)
    for key, value in keys.items():
        (w.add_float32 if isinstance(value, float) else w.add_uint32)(f"{arch}.{key}", value)
    w.add_tokenizer_model("no_vocab")
    n_cols_of = {"token_embd": n_embd, "output_norm": 0, **({"output": n_embd} if has_output else {})}
    n_cols_of |= {f"blk.{i}.{part}": n for i in range(n_layer) for part, n in {"attn_norm": 0, **of_layer}.items()}
    for tensor, n_cols in n_cols_of.items():
        stack = (n_expert,) if tensor.endswith("_exps") else ()
        shape = (*stack, N_ROWS, n_cols) if n_cols and not tensor.endswith("q_norm") else (n_cols or n_embd,)
        w.add_tensor(f"{tensor}.weight", np.zeros(shape, np.float32))
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    return path


def write_imatrix(path: Path, name: str) -> Path:
    """Of one tensor, which is enough for mixes that have another choice where there is one."""
    part, n_cols = next(iter(CASES[name][6].items()))
    values = Sums(np.ones(n_cols, np.float32), np.array([1]))
    ImportanceMatrix(path, {f"blk.0.{part}.weight": values}, ["text"], 1, 512).write(path)
    return path


def line(types: list[str]) -> str:
    return "".join(LETTERS[TYPES.index(type)] for type in types)
