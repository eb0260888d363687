"""The types of files, as tables: which type each tensor gets. Facts: llama.cpp's `llama-quant.cpp` and `quantize.cpp` (as of
llama-cpp-python 0.3.36), for ik_llama.cpp's types its `llama-quantize.cpp`. docs/quantize.md has the same tables."""
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..base.errors import ParameterError
from ..quant.encode import ENCODERS


class Mix(NamedTuple):
    """A type of files. number: general.file_type. type: of each tensor for which no rule has another."""
    name: str
    number: int
    type: str


def _mixes(text: str) -> list[Mix]:
    """name:number, or name:number:type where the type has another name."""
    return [Mix(name, int(number), *(type or [name])) for name, number, *type in (word.split(":") for word in text.split())]


FLOATS = _mixes("F32:0 F16:1 BF16:32")
USUAL = _mixes("Q4_0:2 Q4_1:3 Q5_0:8 Q5_1:9 Q8_0:7 Q2_K:10 Q2_K_S:21:Q2_K Q3_K_S:11:Q3_K Q3_K_M:12:Q3_K Q3_K_L:13:Q3_K "
               "Q4_K_S:14:Q4_K Q4_K_M:15:Q4_K Q5_K_S:16:Q5_K Q5_K_M:17:Q5_K Q6_K:18 IQ3_XXS:23 IQ3_XS:22:IQ3_S IQ3_S:26 "
               "IQ3_M:27:IQ3_S IQ4_NL:25 IQ4_XS:30 TQ1_0:36 TQ2_0:37 Q1_0:40")
LOW = _mixes("IQ1_S:24 IQ1_M:31 IQ2_XXS:19 IQ2_XS:20 IQ2_S:28:IQ2_XS IQ2_M:29:IQ2_S")
FP4 = _mixes("MXFP4_MOE:38:MXFP4 NVFP4:39")
IK = _mixes("Q6_0:135 IQ2_K:138 IQ3_K:139 IQ4_K:140 IQ5_K:141 IQ6_K:142 IQ2_KS:147 IQ3_KS:154 IQ2_KL:155 IQ4_KS:145 IQ4_KSS:148 "
            "IQ5_KS:150 IQ1_KT:156 IQ2_KT:151 IQ3_KT:152 IQ4_KT:153")
QUANTIZED = [*USUAL, *LOW, *FP4, *IK]
MIXES = {mix.name: mix for mix in (*FLOATS, *QUANTIZED) if mix.type in ENCODERS}
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
COPY = "COPY"  # of files: every tensor keeps its type

# Kinds of tensors: the first part that is found in the name. Where a file has no output head, its embedding is one
PARTS = {"attn_qkv.weight": "attn_v", "attn_kv_b.weight": "attn_v", "attn_v.weight": "attn_v", "attn_k.weight": "attn_k",
         "attn_q.weight": "attn_q", "attn_output.weight": "attn_output", "ffn_up": "ffn_up", "ffn_gate": "ffn_gate",
         "ffn_down": "ffn_down"}
EMBEDDINGS = "token_embd.weight", "per_layer_token_embd.weight"
OUTPUT = "output.weight"

# Of all lines for a tensor's kind and file, the first choice that holds: CONDITION:TYPE (& between conditions), or TYPE alone;
# where none holds, the type of the file's row. "usual", "low" and "quantized" are the lists above
RULES = """
output            | quantized                                             | falcon:Q8_0 uneven:Q8_0
output            | Q8_0 MXFP4_MOE                                        | Q8_0
output            | low IQ3_XXS                                           | Q5_K
output            | IQ2_K IQ3_K IQ2_KS IQ3_KS IQ2_KL IQ1_KT IQ2_KT IQ3_KT | tied:IQ4_K Q5_K
output            | IQ4_KS IQ4_KSS                                        | tied:IQ5_K
output            | IQ6_K                                                 | IQ6_K
output            | quantized                                             | Q6_K
any               | MXFP4_MOE                                             | stack:MXFP4 Q8_0
token_embd        | IQ1_S IQ1_M IQ2_XXS IQ2_XS                            | Q2_K
token_embd        | IQ2_S IQ2_M IQ3_XXS IQ3_KT                            | IQ3_S
token_embd        | TQ1_0 TQ2_0                                           | Q4_K
attn_v            | low                                                   | gqa:Q4_K experts>=4:Q4_K
attn_v            | IQ2_S IQ2_M                                           | IQ3_S
attn_v            | low                                                   | Q2_K
attn_k            | low                                                   | experts=8:Q4_K
attn_output       | low                                                   | experts=8:Q5_K
attn_output       | IQ1_S IQ1_M                                           | IQ2_XXS
attn_output       | IQ2_S IQ2_M                                           | IQ3_S
ffn_down          | IQ2_S IQ2_M                                           | count<n/8:IQ3_S
ffn_down          | low                                                   | count<n/8:Q2_K
attn_v attn_k     | usual                                                 | experts=8:Q8_0
attn_v            | Q2_K                                                  | gqa:Q4_K Q3_K
attn_v            | Q2_K_S IQ3_XXS IQ3_XS IQ3_S                           | gqa:Q4_K
attn_v            | IQ3_XXS                                               | !imatrix:IQ3_S
attn_v            | IQ3_M                                                 | Q4_K
attn_v            | Q3_K_M                                                | i<2:Q5_K Q4_K
attn_v            | Q3_K_L                                                | Q5_K
attn_v            | Q4_K_S                                                | i<4:Q5_K
attn_v            | Q4_K_M Q5_K_M                                         | more:Q6_K
attn_v            | IQ4_NL IQ4_XS                                         | gqa:Q5_K
attn_k attn_q     | IQ3_XXS                                               | IQ2_S
attn_k attn_q     | IQ3_XS                                                | IQ3_XXS
attn_output       | Q2_K Q3_K_S Q3_K_M Q4_K_S Q4_K_M IQ3_XXS IQ3_XS IQ3_S IQ3_M IQ4_NL IQ4_XS | !falcon&experts=8:Q5_K
attn_output       | Q3_K_L                                                | falcon:Q4_K !experts=8:Q5_K
attn_output       | Q2_K                                                  | !falcon:Q3_K
attn_output       | IQ3_XXS                                               | !falcon:IQ3_S
attn_output       | Q3_K_M IQ3_M                                          | !falcon:Q4_K
ffn_down          | Q4_0                                                  | imatrix&i<n/8:Q4_1
ffn_down          | Q5_0                                                  | imatrix&i<n/8:Q5_1
ffn_down          | Q2_K                                                  | Q3_K
ffn_down          | Q2_K_S                                                | i<n/8:Q4_K
ffn_down          | Q3_K_M                                                | i<n/16:Q5_K !falcon:Q4_K more:Q4_K
ffn_down          | Q3_K_L                                                | falcon:Q4_K Q5_K
ffn_down          | Q4_K_S                                                | !falcon&i<n/8:Q5_K
ffn_down          | Q4_K_M                                                | falcon&i<n/16:Q6_K falcon&more:Q5_K !falcon&more:Q6_K
ffn_down          | Q5_K_M                                                | more:Q6_K
ffn_down          | IQ3_XXS                                               | !imatrix&i<n/8:Q4_K !imatrix:Q3_K
ffn_down          | IQ3_M                                                 | i<n/8:Q4_K experts=8&more:Q4_K
ffn_down          | IQ4_NL IQ4_XS                                         | !imatrix&i<n/8:Q5_K
ffn_gate ffn_up   | IQ3_XS                                                | middle:IQ3_XXS
"""


@dataclass(frozen=True)
class Model:
    """What rules ask of a file. n_gqa: heads of queries for one of keys, in the first layer. n_attn_v: tensors of that kind."""
    arch: str
    n_layer: int
    n_expert: int
    n_gqa: int
    n_attn_v: int
    tied: bool
    imatrix: bool


@dataclass(frozen=True)
class Place:
    """A tensor's. count: of those of its kind before it; i: its layer where there are experts, else count; n: of how many."""
    model: Model
    kind: str
    count: int
    i: int
    n: int
    is_stack: bool
    is_uneven: bool  # its rows are no whole blocks of the file's type


CONDITIONS: dict[str, tuple[Callable[[Place], bool], str]] = {
    "falcon": (lambda p: p.model.arch == "falcon", "the architecture is falcon"),
    "tied": (lambda p: p.model.tied, "the file has no output head: the embedding is one"),
    "imatrix": (lambda p: p.model.imatrix, "with an importance matrix"),
    "uneven": (lambda p: p.is_uneven, "rows are no whole blocks of the file's type"),
    "stack": (lambda p: p.is_stack and (p.model.arch != "bailingmoe3" or p.kind.startswith("ffn")),
              "three dimensions, as experts have (of bailingmoe3: of a feed-forward block)"),
    "experts=8": (lambda p: p.model.n_expert == 8, "8 experts"),
    "experts>=4": (lambda p: p.model.n_expert >= 4, "4 or more experts"),
    "gqa": (lambda p: p.model.n_gqa >= 4, "4 or more heads of queries for one of keys"),
    "i<2": (lambda p: p.i < 2, "one of the first 2"),
    "i<4": (lambda p: p.i < 4, "one of the first 4"),
    "i<n/8": (lambda p: p.i < p.n // 8, "in the first eighth of the layers"),
    "i<n/16": (lambda p: p.i < p.n // 16, "in the first sixteenth of the layers"),
    "count<n/8": (lambda p: p.count < p.n // 8, "one of the first, as many as an eighth of the layers"),
    "middle": (lambda p: p.n // 8 <= p.i < 7 * p.n // 8, "neither in the first nor in the last eighth of the layers"),
    "more": (lambda p: p.i < p.n // 8 or p.i >= 7 * p.n // 8 or (p.i - p.n // 8) % 3 == 2,
             "in the first or last eighth of the layers, or the last of three between"),
}

# For rows that are no whole blocks; F16 where they are none of these either. Those of ik_llama.cpp's types for 4 bits and less
# were its choice before it had trellis types, which are no smaller blocks here
FALLBACKS = {**dict.fromkeys(["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"], "IQ4_NL"),
             **dict.fromkeys(["Q2_K", "Q3_K", "TQ1_0", "TQ2_0"], "Q4_0"), "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0",
             **dict.fromkeys(["IQ2_K", "IQ3_K", "IQ2_KS", "IQ3_KS", "IQ2_KL", "IQ4_KS", "IQ4_KSS"], "IQ4_NL"),
             **dict.fromkeys(["IQ1_KT", "IQ2_KT", "IQ3_KT", "IQ4_KT"], "IQ4_NL"),
             "IQ4_K": "Q5_0", "IQ5_KS": "Q5_0", "IQ5_K": "Q6_0", "IQ6_K": "Q8_0"}
# Without an importance matrix these are worth nothing, but in embedding and output head; Q2_K in files of Q2_K_S
NEEDS_IMATRIX = frozenset(["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"])
# 70B: of these architectures and numbers of layers attn_v has Q5_K where it would have Q3_K or Q4_K ("usual" alone)
SEVENTY = ("llama", 80), ("deci", 80), ("olmo", 80), ("qwen2", 80), ("jais2", 68)

# Names of matrices that stay as they are: parts of them, and whole ones
KEPT_PARTS = ("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel", "per_layer_model_proj",
              "ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight", "indexer.q_proj.weight",
              *(f"time_mix_{part}.weight" for part in ("first", "w0", "w1", "w2", "v0", "v1", "v2", "a0", "a1", "a2", "g1", "g2",
                                                       "decay_w1", "decay_w2", "lerp_fused")),
              "attn_rel_b.weight", ".position_embd", "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd",
              ".patch_merger", "a.rvq.codebook", "mm.a.code_embd")
KEPT_NAMES = "position_embd.weight", "token_types.weight"
KEPT_IN = {"glm5-next": ("hc_", "indexer.attn_q_b", "indexer.attn_k", "indexer.proj", "indexer_compressor_gate",
                         "indexer_compressor_ape", "ssm_f_a.weight", "ssm_f_b.weight", "ssm_g_a.weight", "ssm_g_b.weight",
                         "ssm_beta.weight", "attn_kv_a_mqa.weight", "attn_k_b.weight", "attn_v_b.weight")}
AT_LEAST_Q8 = {"glm5-next": ("attn_q_a", "attn_q_b", "nextn.eh_proj")}  # Q8_0 in every mix


class Rule(NamedTuple):
    kinds: list[str]
    mixes: list[str]
    choices: list[tuple[list[str], str]]  # conditions, type

    @classmethod
    def read(cls, line: str) -> "Rule":
        kinds, files, choices = (part.split() for part in line.split("|"))
        groups = {"usual": USUAL, "low": LOW, "quantized": QUANTIZED}
        named = [[mix.name for mix in groups[word]] if word in groups else [word] for word in files]
        return cls(kinds, [name for each in named for name in each], [(conditions.split("&") if conditions else [], type)
                                  for conditions, _, type in (choice.rpartition(":") for choice in choices)])

    def is_for(self, kind: str, mix: Mix) -> bool:
        return mix.name in self.mixes and (kind in self.kinds or self.kinds == ["any"])


_RULES = [Rule.read(line) for line in RULES.strip().splitlines()]


def holds(condition: str, place: Place) -> bool:
    return CONDITIONS[condition.removeprefix("!")][0](place) != condition.startswith("!")


def mix_of(text: str) -> Mix:
    """By name, in any case, or by number."""
    name = ALIASES.get(text.upper(), text.upper())
    for mix in MIXES.values():
        if name in (mix.name, str(mix.number)):
            return mix
    known = ", ".join(f"{mix.name} ({mix.number})" for mix in MIXES.values())
    raise ParameterError("type", f"{text!r} is not known; allowed: {known}, {', '.join(ALIASES)}, {COPY}")


def is_kept(arch: str, name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor stays as it is in every mix. shape: ne0 first."""
    return (all(n == 1 for n in shape[1:]) or not name.endswith("weight") or name in KEPT_NAMES
            or any(part in name for part in (*KEPT_PARTS, *KEPT_IN.get(arch, ()))))


def kind_of(name: str) -> str:
    if name in EMBEDDINGS or name == OUTPUT:
        return "output" if name == OUTPUT else "token_embd"
    return next((kind for part, kind in PARTS.items() if part in name), "other")


def layer_of(name: str) -> int:
    """-1: of none."""
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1


def choose(mix: Mix, name: str, place: Place) -> str:
    """The type that a mix has for a tensor there."""
    kind = "output" if place.model.tied and place.kind == "token_embd" else place.kind
    if any(part in name for part in AT_LEAST_Q8.get(place.model.arch, ())):
        return "Q8_0"
    choices = (choice for rule in _RULES if rule.is_for(kind, mix) for choice in rule.choices)
    type = next((type for conditions, type in choices if all(holds(each, place) for each in conditions)), mix.type)
    is_70b = (place.model.arch, place.model.n_layer) in SEVENTY and (place.model.arch != "llama" or place.model.n_gqa > 1)
    return "Q5_K" if is_70b and kind == "attn_v" and mix in USUAL and type in ("Q3_K", "Q4_K") else type


def needs_imatrix(mix: Mix, name: str, type: str) -> bool:
    return name not in (*EMBEDDINGS, OUTPUT) and (type in NEEDS_IMATRIX or (mix.name, type) == ("Q2_K_S", "Q2_K"))
