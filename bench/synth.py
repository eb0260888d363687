"""Writes a model of a known shape whose weights are random blocks: python bench/synth.py llama-3-8b Q4_K -o model.gguf

Speed depends on shapes and types alone, and these files are written as fast as a disk takes them: the rows of a type and length
come from one pool of random blocks, written again and again, each tensor from a row of its own. A path in /dev/shm keeps the file
in memory. Scales are such that a matrix keeps the size of what it multiplies (weights of mean 0 and variance 1 / columns), so
that activations, scores and logits are those of a real model in size. There is no vocabulary: such a model takes token ids.
"""
import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import checkout  # noqa: F401
import gguf
import numpy as np
from gguf import GGUFWriter

from ggml_py.quant.dequantize import dequantize
from ggml_py.quant.formats import FORMATS, Format
from gguf_tensors import add_tensor
from random_weights import random_weight

POOL_BYTES = 16 << 20  # of one type and row length
TAPS = 4               # of the convolution before a gated delta net or a scan
OF_HEADS = "ssm_a", "ssm_d", "ssm_norm.weight"  # of Mamba 2 they have two dimensions, and are no matrices
SAMPLE_ROWS = 32       # of a pool, from which the size of its values is taken
# instead of blocks of 256, as llama.cpp chooses; IQ4_NL for the others
SMALLER_BLOCKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
# F16, of which quantizers are timed, and all quantized ones of files; gguf cannot read Q1_0
TYPES = ["F16", *(fmt.name for fmt in FORMATS.values() if fmt.is_in_files and fmt.is_quantized and fmt.name != "Q1_0")]
MIXES = {"MXFP4_MOE": ("MXFP4", "Q8_0")}  # as gpt-oss is published: of experts, of the other matrices


@dataclass(frozen=True)
class Shape:
    """What a model's tensors and metadata follow from. keys: further metadata, key without architecture -> (value,
    its method of GGUFWriter)."""
    arch: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head: int                        # channels of a head of Q and K; of V as well, but in deepseek2
    n_ff: int
    n_vocab: int
    n_ctx: int
    freq_base: float
    output: str | None = "Q6_K"      # type of the output head; None: tied to the embedding
    embedding: str | None = None     # type of the embedding; None: that of the other matrices
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_exp: int = 0
    n_expert_shared: int = 0         # deepseek2, from here on
    n_layer_dense: int = 0
    kv_lora: int = 0
    n_rot: int = 0
    head_v: int = 0
    n_head_k: int = 0                # gated delta nets, but for every fourth layer: heads of q and k, of v, and their channels
    n_head_delta: int = 0
    delta: int = 0
    blocks: str = ""                 # of hybrids, again and again: M for Mamba 2, * for attention, E for experts alone
    n_ff_shared: int = 0             # of their shared expert
    n_head_ssm: int = 0              # of Mamba 2: heads, their channels, values of a channel, groups
    head_ssm: int = 0
    n_state: int = 0
    n_group: int = 0
    n_nextn: int = 0                 # NextN (MTP) blocks behind the layers, with attention
    keys: dict = field(default_factory=dict)


SHAPES = {
    "llama-3-8b": Shape("llama", 32, 4096, 32, 8, 128, 14336, 128256, 131072, 500000.0),
    "smollm2-135m": Shape("llama", 30, 576, 9, 3, 64, 1536, 49152, 8192, 100000.0, output=None, embedding="Q8_0"),
    "qwen3-30b-a3b": Shape("qwen3moe", 48, 2048, 32, 4, 128, 6144, 151936, 40960, 1000000.0, n_expert=128, n_expert_used=8,
                           n_ff_exp=768),
    "deepseek-v2-lite": Shape("deepseek2", 27, 2048, 16, 16, 192, 10944, 102400, 163840, 10000.0, n_expert=64, n_expert_used=6,
                              n_ff_exp=1408,
                              n_expert_shared=2, n_layer_dense=1, kv_lora=512, n_rot=64, head_v=128, keys={
                                  "rope.scaling.type": ("yarn", "string"), "rope.scaling.factor": (40.0, "float32"),
                                  "rope.scaling.original_context_length": (4096, "uint32"),
                                  "rope.scaling.yarn_log_multiplier": (0.0707, "float32")}),
}
_DELTA_NET = dict(head=256, n_rot=64, n_head_k=16, n_head_delta=32, delta=128, n_expert_shared=1)
SHAPES |= {
    "qwen3.6-35b-a3b": Shape("qwen35moe", 40, 2048, 16, 2, n_ff=512, n_vocab=248320, n_ctx=262144, freq_base=1e7, n_expert=256,
                             n_expert_used=8, n_ff_exp=512, **_DELTA_NET,
                             keys={"rope.dimension_sections": ([11, 11, 10, 0], "array")}),
    "qwen3-next-80b-a3b": Shape("qwen3next", 48, 2048, 16, 2, n_ff=512, n_vocab=151936, n_ctx=262144, freq_base=1e7, n_expert=512,
                                n_expert_used=10, n_ff_exp=512, **_DELTA_NET),
}
SHAPES |= {
    "nemotron-3-nano-30b-a3b": Shape(
        "nemotron_h_moe", 52, 2688, 32, 2, 128, 1856, 131072, 262144, 10000.0, n_expert=128, n_expert_used=6, n_ff_exp=1856,
        blocks="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", n_ff_shared=3712, n_head_ssm=64, head_ssm=64, n_state=128,
        n_group=8, keys={"expert_weights_norm": (True, "bool"), "expert_weights_scale": (2.5, "float32"),
                         "attention.layer_norm_epsilon": (1e-5, "float32")}),
    "granite-4.0-h-small": Shape(
        "granitehybrid", 40, 4096, 32, 8, 128, 768, 100352, 131072, 10000.0, output=None, n_expert=72, n_expert_used=10,
        n_ff_exp=768, blocks="MMMMM*MMMM", n_ff_shared=1536, n_head_ssm=128, head_ssm=64, n_state=128, n_group=1,
        keys={"rope.scaling.finetuned": (False, "bool"), "attention.scale": (0.0078125, "float32"),
              "embedding_scale": (12.0, "float32"), "residual_scale": (0.22, "float32"), "logit_scale": (16.0, "float32")}),
}
_GPT_OSS = Shape("gpt-oss", 24, 2880, 64, 8, 64, 2880, 201088, 131072, 150000.0, n_expert=32, n_expert_used=4, n_ff_exp=2880,
                 keys={"rope.scaling.type": ("yarn", "string"), "rope.scaling.factor": (32.0, "float32"),
                     "rope.scaling.original_context_length": (4096, "uint32"), "attention.sliding_window": (128, "uint32")})
SHAPES |= {
    "gemma-3-27b": Shape("gemma3", 62, 5376, 32, 16, 128, 21504, 262208, 131072, 1e6, output=None, embedding="Q6_K",
                         keys={"attention.sliding_window": (1024, "uint32"), "rope.scaling.type": ("linear", "string"),
                               "rope.scaling.factor": (8.0, "float32")}),
    "mistral-small-24b": Shape("mistral3", 40, 5120, 32, 8, 128, 32768, 131072, 131072, 1e9),
    "gpt-oss-20b": _GPT_OSS,
    "gpt-oss-120b": replace(_GPT_OSS, n_layer=36, n_expert=128),
    "llama-4-scout": Shape("llama4", 48, 5120, 40, 8, 128, 16384, 202048, 10485760, 500000.0, n_expert=16, n_expert_used=1,
                           n_ff_exp=8192, n_expert_shared=1, keys={"interleave_moe_layer_step": (1, "uint32")}),
    "minimax-m2": Shape("minimax-m2", 62, 3072, 48, 8, 128, 1536, 200064, 196608, 5e6, n_expert=256, n_expert_used=8,
                        n_ff_exp=1536, n_rot=64, keys={"expert_gating_func": (2, "uint32")}),
}
# Small ones, to try things: a layer or two of the same kinds (deepseek2 tells its forms apart by the number of layers).
_TINY = dict(n_layer=2, n_embd=256, n_head=4, n_head_kv=2, head=64, n_ff=512, n_vocab=320, n_ctx=1024)
SHAPES |= {
    "tiny-llama": replace(SHAPES["llama-3-8b"], **_TINY),
    "tiny-smollm2": replace(SHAPES["smollm2-135m"], **_TINY | dict(n_embd=192, n_head=3, n_head_kv=1)),
    "tiny-qwen3moe": replace(SHAPES["qwen3-30b-a3b"], **_TINY, n_expert=8, n_expert_used=2, n_ff_exp=256),
    "tiny-deepseek2": replace(SHAPES["deepseek-v2-lite"], **_TINY | dict(n_layer=27, n_head_kv=4), n_expert=8, n_expert_used=2,
                              n_ff_exp=96, kv_lora=64,
                              n_rot=32, head_v=32),
    "tiny-qwen35moe": replace(SHAPES["qwen3.6-35b-a3b"], **_TINY | dict(n_layer=4, n_rot=32), n_expert=8, n_expert_used=2,
                              n_ff_exp=256, n_head_k=2, n_head_delta=4, delta=32,
                              keys={"rope.dimension_sections": ([6, 5, 5, 0], "array")}),
    "tiny-qwen3next": replace(SHAPES["qwen3-next-80b-a3b"], **_TINY | dict(n_layer=4, n_rot=32), n_expert=8, n_expert_used=2,
                              n_ff_exp=256, n_head_k=2, n_head_delta=4, delta=32),
    "tiny-gemma3": replace(SHAPES["gemma-3-27b"], **_TINY),
    "tiny-mistral3": replace(SHAPES["mistral-small-24b"], **_TINY),
    "tiny-gpt-oss": replace(SHAPES["gpt-oss-20b"], **_TINY, n_expert=8, n_expert_used=2, n_ff_exp=256),
    "tiny-llama4": replace(SHAPES["llama-4-scout"], **_TINY, n_expert=8, n_ff_exp=256),
    "tiny-minimax-m2": replace(SHAPES["minimax-m2"], **_TINY | dict(n_rot=32, n_ff=256), n_expert=8, n_expert_used=2,
                               n_ff_exp=256),
    "tiny-nemotron-h-moe": replace(SHAPES["nemotron-3-nano-30b-a3b"], **_TINY | dict(n_layer=4, n_ff=256), n_expert=8,
                                   n_expert_used=2, n_ff_exp=256, blocks="ME*E", n_ff_shared=512, n_head_ssm=4, n_state=32,
                                   n_group=2),
    "tiny-granitehybrid": replace(SHAPES["granite-4.0-h-small"], **_TINY | dict(n_ff=256), n_expert=8, n_expert_used=2,
                                  n_ff_exp=256, blocks="M*", n_ff_shared=512, n_head_ssm=8, n_state=32,
                                  keys={"rope.scaling.finetuned": (False, "bool")}),
}


class TensorShape(NamedTuple):
    """type: None for that of the model."""
    name: str
    shape: tuple[int, ...]  # numpy order
    type: str | None = None


def tensors(s: Shape) -> Iterator[TensorShape]:
    """In the order of the file."""
    yield TensorShape("token_embd.weight", (s.n_vocab, s.n_embd), s.embedding)
    for i in range(s.n_layer + s.n_nextn):
        p, is_nextn = f"blk.{i}.", i >= s.n_layer
        if is_nextn:
            yield TensorShape(f"{p}nextn.eh_proj.weight", (s.n_embd, 2 * s.n_embd))
            yield from (TensorShape(f"{p}nextn.{name}.weight", (s.n_embd,)) for name in ("enorm", "hnorm", "shared_head_norm"))
        yield TensorShape(f"{p}attn_norm.weight", (s.n_embd,))
        if s.blocks:
            yield from (t._replace(name=p + t.name) for t in hybrid(s, block_of(s, i)))
            continue
        mixer = delta_net if s.delta and (i + 1) % 4 and not is_nextn else mla if s.kv_lora else attention
        yield from (t._replace(name=p + t.name) for t in mixer(s))
        yield TensorShape(f"{p}{'post_attention' if s.delta or s.arch == 'gpt-oss' else 'ffn'}_norm.weight", (s.n_embd,))
        if s.arch == "gemma3":
            yield from (TensorShape(f"{p}post_{part}_norm.weight", (s.n_embd,)) for part in ("attention", "ffw"))
        yield from (t._replace(name=p + t.name)
                    for t in (experts(s) if s.n_expert and i >= s.n_layer_dense else ffn(s, "", s.n_ff)))
    yield TensorShape("output_norm.weight", (s.n_embd,))
    if s.output:
        yield TensorShape("output.weight", (s.n_vocab, s.n_embd), s.output)


def attention(s: Shape) -> Iterator[TensorShape]:
    q, kv = s.n_head * s.head, s.n_head_kv * s.head
    rows = ("q", 2 * q if s.delta else q), ("k", kv), ("v", kv)
    yield from (TensorShape(f"attn_{part}.weight", (n, s.n_embd)) for part, n in rows)
    if s.arch.startswith(("qwen3", "gemma3")):
        yield from (TensorShape(f"attn_{part}_norm.weight", (s.head,)) for part in "qk")
    if s.arch == "minimax-m2":
        yield from (TensorShape(f"attn_{part}_norm.weight", (n,)) for part, n in rows[:2])
    yield TensorShape("attn_output.weight", (s.n_embd, q))
    if s.arch == "gpt-oss":
        yield from (TensorShape(f"attn_{part}.bias", (n,)) for part, n in (*rows, ("output", s.n_embd)))
        yield TensorShape("attn_sinks.weight", (s.n_head,))


def delta_net(s: Shape) -> Iterator[TensorShape]:
    n_values = s.n_head_delta * s.delta
    n_channels = 2 * s.n_head_k * s.delta + n_values
    yield from (TensorShape(f"attn_{part}.weight", (n, s.n_embd)) for part, n in (("qkv", n_channels), ("gate", n_values)))
    gates = [("ba", 2)] if s.arch == "qwen3next" else [("beta", 1), ("alpha", 1)]
    yield from (TensorShape(f"ssm_{part}.weight", (n * s.n_head_delta, s.n_embd)) for part, n in gates)
    yield TensorShape("ssm_conv1d.weight", (n_channels, TAPS), "F32")
    yield from (TensorShape(f"ssm_{part}", (n,)) for part, n in (("a", s.n_head_delta), ("dt.bias", s.n_head_delta),
                                                                 ("norm.weight", s.delta)))
    yield TensorShape("ssm_out.weight", (s.n_embd, n_values))


def block_of(s: Shape, i: int) -> str:
    return s.blocks[i % len(s.blocks)]


def hybrid(s: Shape, block: str) -> Iterator[TensorShape]:
    """Granite's blocks have experts behind the others."""
    yield from {"M": mamba2, "*": attention, "E": lambda s: ()}[block](s)
    if s.arch == "granitehybrid":
        yield TensorShape("ffn_norm.weight", (s.n_embd,))
    if s.arch == "granitehybrid" or block == "E":
        yield from experts(s)


def mamba2(s: Shape) -> Iterator[TensorShape]:
    n_inner = s.n_head_ssm * s.head_ssm
    n_channels = n_inner + 2 * s.n_group * s.n_state
    yield TensorShape("ssm_in.weight", (n_inner + n_channels + s.n_head_ssm, s.n_embd))
    yield TensorShape("ssm_conv1d.weight", (n_channels, TAPS), "F32")
    yield from (TensorShape(f"ssm_{part}.bias", (n,)) for part, n in (("conv1d", n_channels), ("dt", s.n_head_ssm)))
    yield from (TensorShape(f"ssm_{part}", (s.n_head_ssm, 1), "F32") for part in "ad")
    yield TensorShape("ssm_norm.weight", (s.n_group, n_inner // s.n_group), "F32")
    yield TensorShape("ssm_out.weight", (s.n_embd, n_inner))


def mla(s: Shape) -> Iterator[TensorShape]:
    """deepseek2 without q_lora, K and V from one matrix."""
    yield TensorShape("attn_q.weight", (s.n_head * s.head, s.n_embd))
    yield TensorShape("attn_kv_a_mqa.weight", (s.kv_lora + s.n_rot, s.n_embd))
    yield TensorShape("attn_kv_a_norm.weight", (s.kv_lora,))
    yield TensorShape("attn_kv_b.weight", (s.n_head * (s.head - s.n_rot + s.head_v), s.kv_lora))
    yield TensorShape("attn_output.weight", (s.n_embd, s.n_head * s.head_v))


def ffn(s: Shape, kind: str, n_ff: int, *n_expert: int) -> Iterator[TensorShape]:
    parts = ("up",) if s.arch == "nemotron_h_moe" else ("gate", "up")
    yield from (TensorShape(f"ffn_{part}{kind}.weight", (*n_expert, n_ff, s.n_embd)) for part in parts)
    yield TensorShape(f"ffn_down{kind}.weight", (*n_expert, s.n_embd, n_ff))


def experts(s: Shape) -> Iterator[TensorShape]:
    yield TensorShape("ffn_gate_inp.weight", (s.n_expert, s.n_embd), "F32")
    yield from ffn(s, "_exps", s.n_ff_exp, s.n_expert)
    if s.delta:
        yield TensorShape("ffn_gate_inp_shexp.weight", (s.n_embd,))
    if s.arch == "gpt-oss":
        yield TensorShape("ffn_gate_inp.bias", (s.n_expert,))
        yield from (TensorShape(f"ffn_{part}_exps.bias", (s.n_expert, n), "F32")
                    for part, n in (("gate", s.n_ff_exp), ("up", s.n_ff_exp), ("down", s.n_embd)))
    if s.arch in ("nemotron_h_moe", "minimax-m2"):
        yield TensorShape("exp_probs_b.bias", (s.n_expert,))
    if s.n_expert_shared or s.n_ff_shared:
        yield from ffn(s, "_shexp", s.n_ff_shared or s.n_ff_exp * s.n_expert_shared)


def add_metadata(w: GGUFWriter, s: Shape) -> None:
    blocks = [block_of(s, i) for i in range(s.n_layer)] if s.blocks else []
    w.add_block_count(s.n_layer + s.n_nextn); w.add_context_length(s.n_ctx); w.add_embedding_length(s.n_embd)
    w.add_feed_forward_length([s.n_ff * (block == "E") for block in blocks] if s.arch == "nemotron_h_moe" else s.n_ff)
    w.add_head_count(s.n_head); w.add_head_count_kv([s.n_head_kv * (block == "*") for block in blocks] or s.n_head_kv)
    w.add_key_length(s.head); w.add_value_length(s.head_v or s.head)
    w.add_layer_norm_rms_eps(1e-6 if s.n_expert
                             else 1e-5); w.add_rope_dimension_count(s.n_rot or s.head); w.add_rope_freq_base(s.freq_base)
    w.add_vocab_size(s.n_vocab); w.add_tokenizer_model("no_vocab")
    if s.n_expert:
        w.add_expert_count(s.n_expert); w.add_expert_used_count(s.n_expert_used); w.add_expert_feed_forward_length(s.n_ff_exp)
    if s.kv_lora:
        w.add_kv_lora_rank(
            s.kv_lora); w.add_leading_dense_block_count(s.n_layer_dense); w.add_expert_shared_count(s.n_expert_shared)
        w.add_expert_weights_scale(1.0); w.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    if s.delta:
        w.add_ssm_conv_kernel(TAPS); w.add_ssm_state_size(s.delta); w.add_ssm_group_count(s.n_head_k)
        w.add_ssm_time_step_rank(s.n_head_delta); w.add_ssm_inner_size(s.n_head_delta * s.delta)
        w.add_expert_shared_feed_forward_length(s.n_ff_exp)
    if s.blocks:
        w.add_ssm_conv_kernel(TAPS); w.add_ssm_state_size(s.n_state); w.add_ssm_group_count(s.n_group)
        w.add_ssm_time_step_rank(s.n_head_ssm); w.add_ssm_inner_size(s.n_head_ssm * s.head_ssm)
        w.add_expert_shared_feed_forward_length(s.n_ff_shared)
    if s.n_nextn:
        w.add_nextn_predict_layers(s.n_nextn)
    for key, (value, method) in s.keys.items():
        getattr(w, f"add_{method}")(f"{s.arch}.{key}", value)


def pool(fmt: Format, n_cols: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 [n_rows, bytes of a row]: random blocks of mean 0 and variance 1 / n_cols. n_rows is odd, so that experts,
    of even size, are not equal."""
    n_rows = POOL_BYTES // fmt.row_bytes(n_cols) | 1
    rows = random_weight(fmt, n_rows, n_cols, rng)
    sample = dequantize(rows[:SAMPLE_ROWS], fmt, (min(SAMPLE_ROWS, n_rows), n_cols))
    factor = np.float32(1 / np.sqrt(np.square(sample).mean() * n_cols))
    if not fmt.is_quantized:
        values = rows.view(fmt.dtype)  # F16, or F32, the router's
        values *= values.dtype.type(factor)
        return rows
    if fmt.header_bytes:
        rows = np.ascontiguousarray(rows)
        scales = rows[:, :fmt.header_bytes].view(np.float32 if fmt.header_bytes == 4 else np.float16)
        scales[:] = scales * factor
        return rows
    blocks, first = rows.reshape(n_rows, -1, fmt.type_size), 0
    for name, size in fmt.fields:
        if name == "e":  # powers of two
            blocks[..., first] += np.rint(np.log2(factor)).astype(np.int8).view(np.uint8)
        elif fmt.name == "NVFP4" and name == "d":  # unsigned E4M3, the upper bits of float16 but for its sign
            scales = (blocks[..., first:first + size].astype(np.uint16) << 7).view(np.float16) * factor
            bits = scales.astype(np.float16).view(np.uint16)
            blocks[..., first:first + size] = np.clip((bits + 64) >> 7, 1, 126)
        elif fmt.name == "IQ1_M" and name == "scales":  # a nibble of float16 on top of each of four words
            words, bits = blocks[..., first:first + size].view(np.uint16), np.zeros(blocks.shape[:2], np.uint16)
            for i in range(4):
                bits |= words[..., i] >> 12 << 4 * i
            bits = (bits.view(np.float16) * factor).astype(np.float16).view(np.uint16)
            for i in range(4):
                words[..., i] = words[..., i] & 0xfff | (bits >> 4 * i & 0xf) << 12
        elif name in ("d", "dmin", "m"):
            scales = blocks[..., first:first + size].view(np.float16)
            scales[:] = scales * factor
        first += size
    return rows


class Repeated:
    """A tensor's rows as GGUFWriter takes them: those of a pool from `start` on, again and again; no copy of them is made."""
    dtype = np.dtype(np.uint8)

    def __init__(self, pool: np.ndarray, start: int, n_rows: int):
        self.pool, self.start = pool, start
        self.shape, self.nbytes = (n_rows, pool.shape[1]), n_rows * pool.shape[1]

    def tofile(self, file) -> None:
        start, left = self.start, self.shape[0]
        while left:
            part = self.pool[start:start + left]
            file.write(part.reshape(-1))
            start, left = 0, left - len(part)


def tensor_type(t: TensorShape, type_: str) -> str:
    """The type of a tensor in a model of this type: vectors are F32, rows that are no whole blocks take smaller blocks. In a
    model of F16 nothing is quantized."""
    if len(t.shape) == 1:
        return "F32"
    name = type_ if type_ == "F16" and t.type != "F32" else t.type or type_
    if type_ in MIXES and name != "F32":
        name = MIXES[type_]["_exps." not in t.name]
    return name if t.shape[-1] % FORMATS[name].block_size == 0 else SMALLER_BLOCKS.get(name, "IQ4_NL")


def write(path: Path, shape: Shape, type_: str, seed: int = 0) -> Path:
    """Writes the model. type_: of the matrices, where the shape does not name another; or a mix of two.
    ValueError for a type without float16 scales or exponents."""
    if type_ not in (*TYPES, *MIXES):
        raise ValueError(f"type: {type_!r} is not one of {', '.join((*TYPES, *MIXES))}")
    rng, pools = np.random.default_rng(seed), {}
    w = GGUFWriter(path, shape.arch)
    add_metadata(w, shape)
    for t in tensors(shape):
        fmt, n_cols = FORMATS[tensor_type(t, type_)], t.shape[-1]
        if len(t.shape) == 1 or t.name.endswith(OF_HEADS):
            values = (1 + 0.1 * rng.standard_normal(t.shape)).astype(np.float32)
            w.add_tensor(t.name, -values if t.name.endswith("ssm_a") else values)  # states decay
            continue
        if (fmt.name, n_cols) not in pools:
            pools[fmt.name, n_cols] = pool(fmt, n_cols, rng)
        rows = pools[fmt.name, n_cols]
        data = Repeated(rows, int(rng.integers(len(rows))), int(np.prod(t.shape[:-1])))
        add_tensor(w, t.name, data, fmt, t.shape)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("shape", choices=SHAPES)
    p.add_argument("type", choices=[*TYPES, *MIXES])
    p.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.gguf")
    p.add_argument("--layers", type=int, help="another number of layers")
    p.add_argument("--nextn", type=int, default=0, help="NextN (MTP) blocks behind the layers")
    p.add_argument("--seed", type=int, default=0)
    options = p.parse_args()
    shape = SHAPES[options.shape]
    if options.layers is not None:
        if options.layers < 1:
            p.error(f"--layers: must be at least 1, got {options.layers}")
        shape = replace(shape, n_layer=options.layers)
    if options.nextn < 0:
        p.error(f"--nextn: must not be negative, got {options.nextn}")
    shape = replace(shape, n_nextn=options.nextn)
    start = time.perf_counter()
    write(options.output, shape, options.type, options.seed)
    seconds, n_bytes = time.perf_counter() - start, options.output.stat().st_size
    print(f"{options.output}: {n_bytes / 1e9:.2f} GB in {seconds:.1f} s, {n_bytes / seconds / 1e9:.2f} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
