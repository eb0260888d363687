"""Whole loads of mutated models. Each must compute a prompt and a token, or end in one UserError of one line, within a second and
64 MiB beyond the file.

    python tests/scripts/fuzz_loads.py --n 200000 [--seed 0] [--first 0] [--all-types] [--keep-going]

The models are those of tests/helpers/tiny_*.py. A case changes one to three things in one of them: the value, type
or length of a metadata key; the type, shape, name or data of a tensor; one dimension everywhere; bytes of the header
(fuzz_gguf.py). Then the file is loaded, a context is made, and two batches are decoded. Case i of a seed depends on nothing else:
`--seed S --first I --n 1` runs exactly that case again.
"""
import argparse
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")  # the models are tiny, and a thread that waits counts as time

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as Q, GGUFValueType as V
from numba.core import event

import with_helpers  # noqa: F401  (for what is next)
from fuzz_gguf import MUTATIONS as HEADER_MUTATIONS, OWN, SIZES, Field, file_fields, joined, tensor_n_bytes
from ggml_py.base.errors import UserError
from ggml_py.engine.model import Model
from ggml_py.files.gguf import GGUFFile
from ggml_py.kernels.compile import compiled
from tiny_delta_net_models import KINDS, write_delta_net_model
from tiny_hybrid_models import KINDS as HYBRID, write_hybrid_model
from tiny_layer_models import QUICK as LAYERED, write_layer_model
from tiny_models import write_model
from tiny_moe_models import write_moe_model

MAX_SECONDS = 1.0
MAX_EXTRA_BYTES = 64 << 20  # beyond what the process holds and the file
MAX_WAIT = 20  # seconds until a case that does not end is stopped


# Valid models, as keys and tensors.

@dataclass
class Whole:
    """keys: key -> (type, value; a list for an array); tensors: name -> (type, shape with ne0 first, bytes)."""
    keys: dict
    tensors: dict
    options: dict = field(default_factory=dict)  # of Model.load

    @classmethod
    def read(cls, path: Path, **options) -> "Whole":
        with GGUFFile.open(path) as file:
            plain = lambda value: value.item() if isinstance(value, np.generic) else value
            listed = lambda value: value if isinstance(value, (bool, int, float, str)) else [plain(v) for v in value]
            return cls({key: (file.metadata_types[key], listed(value)) for key, value in file.metadata.items()},
                       {t.name: (Q[t.type.name], t.shape, file.data(t.name).tobytes()) for t in file.tensors.values()}, options)

    def fields(self) -> list[Field]:
        """The file's fields, in file order."""
        return file_fields([(key, *value) for key, value in self.keys.items()],
                           [(name, *tensor) for name, tensor in self.tensors.items()])

    @property
    def n_block(self) -> int:
        return len({name.split(".")[1] for name in self.tensors if name.startswith("blk.")})


SMALL = dict(n_embd=32, n_head=2, n_head_kv=1, head=16, n_ff=48, n_vocab=24, n_ctx=64)
SMALL_MOE = {**SMALL, "n_rot": 16, "n_ff_exp": 32, "n_expert": 4, "kv_lora": 32, "n_nope": 16, "head_v": 16, "q_lora": 32}
SMALL_LAYERS = {**SMALL, "n_ff": 32, "n_rot": 16, "n_ff_exp": 32, "n_expert": 4, "n_ff_shexp": 16}
YARN = dict(keys={"rope.scaling.type": ("string", "yarn"), "rope.scaling.factor": ("float32", 4.0),
                  "rope.scaling.original_context_length": ("uint32", 16),
                  "rope.scaling.attn_factor": ("float32", 1.0)})
NEXTN = {f"blk.2.nextn.{name}.weight": np.ones(shape, np.float32) for name, shape in
         dict(eh_proj=(32, 64), enorm=(32,), hnorm=(32,), embed_tokens=(24, 32), shared_head_norm=(32,)).items()}
BYTE_LEVEL = {"tokenizer.ggml.model": (V.STRING, "gpt2"), "tokenizer.ggml.pre": (V.STRING, "qwen2"),
              "tokenizer.ggml.tokens": (V.STRING, ["Ġ", "a", "Ġa", *"bcdefghijklmnopqrst", "<|im_end|>", "aa"]),
              "tokenizer.ggml.token_type": (V.INT32, [1] * 22 + [3, 1]), "tokenizer.ggml.merges": (V.STRING, ["Ġ a", "a a"]),
              "tokenizer.ggml.eos_token_id": (V.UINT32, 22)}
TOKENS = ["<unk>", "<s>", "</s>", "▁a", "▁", "a", *(f"<0x{i:02X}>" for i in range(18))]
VOCABULARY = {"tokenizer.ggml.model": (V.STRING, "llama"), "tokenizer.ggml.tokens": (V.STRING, TOKENS),
              "tokenizer.ggml.scores": (V.FLOAT32, [-0.5 * i for i in range(24)]),
              "tokenizer.ggml.token_type": (V.INT32, [2, 3, 3, 1, 1, 1, *[6] * 18]),
              "tokenizer.ggml.bos_token_id": (V.UINT32, 1)}


def models(folder: Path) -> dict[str, Whole]:
    """One or two of each architecture, float32 but for one."""
    dense = {
        "llama": ("llama", {}), "llama-q8": ("llama", dict(tied=True)),
        "llama-longrope": ("llama", dict(n_layer=1, keys={"rope.scaling.type": ("string", "longrope")})),
        "qwen2": ("qwen2", dict(qkv_bias=True)), "qwen2-fused": ("qwen2", dict(qkv_bias=True, fused_qkv=True, n_layer=1)),
        "qwen3": ("qwen3", YARN),
    }
    found = {}
    for name, (arch, settings) in dense.items():
        path = write_model(folder / f"{name}.gguf", arch, ("Q8_0", "F16") if name == "llama-q8" else ("F32",),
                           **{**SMALL, **settings})
        found[name] = Whole.read(path)
    moe = {"qwen3moe": {}, "gpt-oss": {}, "bailingmoe2": dict(n_expert=8, head=16), "deepseek2": dict(q_lora=0),
           "deepseek2-mla": dict(n_expert=12, yarn=(4.0, 16, 0.0707)),
           "glm4moe": dict(n_layer=3, n_rot=8, more=NEXTN,
                           keys={"nextn_predict_layers": ("uint32", 1), "rope.dimension_sections": ("array", [1, 1, 1, 1])})}
    for kind, settings in moe.items():
        found[kind] = Whole.read(write_moe_model(folder / f"{kind}.gguf", kind, **{**SMALL_MOE, **settings}),
                                 **({"nextn": True} if kind == "glm4moe" else {}))
    for kind in KINDS:
        found[kind] = Whole.read(write_delta_net_model(folder / f"{kind}.gguf", kind, **{**SMALL_MOE, "n_rot": 8, "dim": 8}))
    for kind in LAYERED:
        settings = SMALL_LAYERS if not kind.startswith("gemma4") else {}  # whose keys have heads of other sizes
        found[kind] = Whole.read(write_layer_model(folder / f"{kind}.gguf", kind, **settings))
    for kind in HYBRID:
        found[kind] = Whole.read(write_hybrid_model(folder / f"{kind}.gguf", kind))
    found["llama"].keys |= VOCABULARY
    found["qwen2"].keys |= BYTE_LEVEL
    found["llama"].tensors["rope_freqs.weight"] = Q.F32, (8,), np.linspace(1, 4, 8, dtype=np.float32).tobytes()
    for which in "long", "short":
        found["llama-longrope"].tensors[f"rope_factors_{which}.weight"] = Q.F32, (8,), np.ones(8, np.float32).tobytes()
    return found


# Mutations: each changes a Whole in place.

INTEGERS = [0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 255, 256, 257, 1000, 65535, 65536, 10**6, 2**24,
            2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
FLOATS = [0.0, -0.0, 1e-45, 1e-38, 1e-30, 1e-10, 1e-5, 0.5, 1.0, 1.0000001, 2.0, 10.0, 1e4, 1e10, 1e30, 3.4e38, float("inf"),
          float("nan")]
FLOATS += [-value for value in FLOATS]
WORDS = ["", "none", "linear", "yarn", "longrope", "llama", "qwen2", "qwen3", "qwen3moe", "gpt-oss", "deepseek2", "glm4moe",
         "bailingmoe2", "qwen3next", "qwen35", "qwen35moe", "gpt2", "no_vocab", *LAYERED, *HYBRID,
         "x\ny", "\x1b[2J", "x" * 300]
RANGES = {V.UINT8: (0, 255), V.INT8: (-128, 127), V.UINT16: (0, 2**16 - 1), V.INT16: (-2**15, 2**15 - 1),
          V.UINT32: (0, 2**32 - 1), V.INT32: (-2**31, 2**31 - 1),
          V.UINT64: (0, 2**64 - 1), V.INT64: (-2**63, 2**63 - 1)}
# What architectures read, whether the model has it or not; without the architecture's name.
U32_KEYS = """block_count nextn_predict_layers embedding_length context_length vocab_size feed_forward_length attention.head_count
    attention.head_count_kv attention.key_length attention.value_length attention.key_length_mla attention.value_length_mla
    attention.kv_lora_rank attention.q_lora_rank attention.sliding_window attention.sliding_window_pattern
    rope.dimension_count rope.dimension_sections rope.scaling.original_context_length expert_count expert_used_count
    expert_feed_forward_length expert_shared_feed_forward_length expert_shared_count expert_gating_func expert_group_count
    expert_group_used_count leading_dense_block_count ssm.conv_kernel ssm.state_size ssm.group_count ssm.time_step_rank
    ssm.inner_size full_attention_interval attention.recurrent_layers shortconv.l_cache moe_latent_size""".split()
F32_KEYS = """attention.layer_norm_rms_epsilon rope.freq_base rope.scaling.factor rope.scale_linear rope.scaling.attn_factor
    rope.scaling.yarn_log_multiplier expert_weights_scale""".split()
OTHER_KEYS = {"rope.scaling.type": V.STRING, "expert_weights_norm": V.BOOL}
OPTIONAL_TENSORS = """attn_q.bias attn_k.bias attn_v.bias attn_output.bias attn_qkv.weight attn_qkv.bias
    attn_q_norm.weight attn_k_norm.weight post_attention_norm.weight attn_q.weight attn_q.scale attn_output.scale ffn_gate.bias
    ffn_up.bias ffn_down.bias ffn_down.scale exp_probs_b.bias ffn_gate_inp.bias ffn_gate_up_exps.weight
    ffn_up_exps.bias ffn_down_exps.scale ffn_gate.weight attn_k_b.scale ssm_in.weight ssm_out.scale ssm_ba.weight
    ffn_gate_inp_shexp.weight ssm_conv1d.bias ssm_d""".split()
GLOBAL_TENSORS = """output.weight output.bias output.scale rope_freqs.weight rope_factors_long.weight
    rope_factors_short.weight""".split()
REFUSED_TYPES = [Q.I8, Q.I16, Q.I32, Q.I64, Q.F64, Q.Q8_1, Q.Q8_K]
FEW_TYPES = [Q.F32, Q.F16, Q.Q8_0]


def hostile(rng: random.Random, type: V, value):
    """Another value of a type; near `value` sometimes, where it is a number of this type."""
    if type == V.STRING:
        return rng.choice(WORDS)
    if type == V.BOOL:
        return not value
    if type in RANGES:
        low, high = RANGES[type]
        value = value if isinstance(value, int) else 1
        near = [value - 1, value + 1, value * 2, value // 2, value + 16, value * 16]
        return min(max(rng.choice([*INTEGERS, *near, *near, -1, -2**31]), low), high)
    value = value if isinstance(value, float) else 1.0
    return float(np.float32(rng.choice([*FLOATS, value * 2, value / 2, value * 1000])))


def key_of(rng, model: Whole) -> str:
    """One of the architecture's keys mostly."""
    arch = model.keys.get("general.architecture", (V.STRING, ""))[1]
    own = [key for key in model.keys if key.startswith(f"{arch}.")]
    return rng.choice(own if own and rng.random() < 0.9 else list(model.keys))


def set_value(rng, model):
    key = key_of(rng, model)
    type, value = model.keys[key]
    if isinstance(value, list):
        value = list(value)
        if value:
            i = rng.randrange(len(value))
            value[i] = hostile(rng, type, value[i])
        model.keys[key] = type, value
    else:
        model.keys[key] = type, hostile(rng, type, value)


def set_type(rng, model):
    key = key_of(rng, model)
    type = rng.choice([t for t in V if t != V.ARRAY])
    model.keys[key] = type, hostile(rng, type, model.keys[key][1])


def set_array(rng, model):
    key = key_of(rng, model)
    type, value = model.keys[key]
    value = value[0] if isinstance(value, list) and value else value
    type = rng.choice([type, type, V.UINT32, V.INT32, V.BOOL, V.FLOAT32, V.UINT64, V.STRING])
    fitting = {V.STRING: str, V.BOOL: bool, V.FLOAT32: float, V.FLOAT64: float}.get(type, int)
    same = value if isinstance(value, fitting) and not (fitting is int and isinstance(value, bool)) else hostile(rng, type, value)
    n = rng.choice([0, 1, model.n_block, model.n_block, model.n_block - 1, model.n_block + 1, 4, 1000])
    model.keys[key] = type, [hostile(rng, type, value) if rng.random() < 0.3 else same for _ in range(max(n, 0))]


def drop_key(rng, model):
    del model.keys[key_of(rng, model)]


def add_key(rng, model):
    arch = model.keys.get("general.architecture", (V.STRING, "llama"))[1]
    types = {**dict.fromkeys(U32_KEYS, V.UINT32), **dict.fromkeys(F32_KEYS, V.FLOAT32), **OTHER_KEYS}
    key = rng.choice(list(types))
    model.keys[f"{arch}.{key}"[:200]] = types[key], hostile(rng, types[key], 1)


def refit(model: Whole, name: str, type: Q, shape: tuple[int, ...]) -> None:
    """The tensor with another type and shape, its bytes again and again; a shape that is too large for a file has fewer bytes."""
    data = model.tensors[name][2]
    n_bytes = min(tensor_n_bytes(type, shape), 1 << 20)
    model.tensors[name] = type, shape, (data * (n_bytes // max(len(data), 1) + 1))[:n_bytes]


def set_tensor_type(rng, model):
    name = rng.choice(list(model.tensors))
    type = rng.choice(ALLOWED_TYPES if rng.random() < 0.6 else REFUSED_TYPES)
    refit(model, name, type, model.tensors[name][1])


def set_shape(rng, model):
    name = rng.choice(list(model.tensors))
    type, shape, _ = model.tensors[name]
    shape = list(shape)
    change = rng.randrange(6)
    i = rng.randrange(len(shape))
    if change == 0:
        shape[i] = rng.choice([1, 2, 3, 31, 32, 33, 64, 256, 1000])
    elif change == 1:
        shape[i] = max(1, shape[i] + rng.choice([-32, -16, -1, 1, 16, 32]))
    elif change == 2:
        shape.reverse()
    elif change == 3:
        shape = [int(np.prod(shape))] if rng.random() < 0.5 else [*shape, 1][:4]
    elif change == 4:
        shape = [*shape, rng.choice([2, 4])][:4]
    else:
        shape[i] = rng.choice([2**16, 2**20, 2**31, 2**32, 2**40])
    refit(model, name, type, tuple(shape))


def drop_tensor(rng, model):
    del model.tensors[rng.choice(list(model.tensors))]


def drop_block(rng, model):
    i = rng.randrange(model.n_block or 1)
    model.tensors = {name: t for name, t in model.tensors.items() if not name.startswith(f"blk.{i}.")} or model.tensors


def rename_tensor(rng, model):
    name = rng.choice(list(model.tensors))
    other = rng.choice([name.replace("blk.0", "blk.1"), name.replace("blk.1", f"blk.{rng.choice([2, 7, 10**6, 2**32, 10**20])}"),
                        name.replace("weight", "bias"),
                        name.replace("weight", "scale"), rng.choice(list(model.tensors)), name + "x", "blk.-1.attn_norm.weight",
                        "blk.x.attn_norm.weight", "blk.01.x"])
    model.tensors[other[:64]] = model.tensors.pop(name)


def add_tensor(rng, model):
    """A tensor that an architecture may read where it is there; often of a shape that fits."""
    i = rng.randrange(model.n_block + 1)
    name = rng.choice([f"blk.{i}.{rng.choice(OPTIONAL_TENSORS)}", f"blk.{i}.{rng.choice(OPTIONAL_TENSORS)}",
                       rng.choice(GLOBAL_TENSORS)])
    like = model.tensors.get(f"{name.rpartition('.')[0]}.weight", (Q.F32, (32, 1), b""))[1]
    shape = rng.choice([(1,), (8,), like[-1:], like[1:] or (32,), like])
    n = min(int(np.prod(shape)), 1 << 20)  # of a shape that another mutation made there may be too few bytes
    model.tensors[name] = Q.F32, tuple(shape), np.full(n, rng.choice([0, 1, -1, 0.5, np.nan, np.inf, 1e30]), np.float32).tobytes()


def set_data(rng, model):
    name = rng.choice(list(model.tensors))
    type, shape, data = model.tensors[name]
    if type == Q.F32 and rng.random() < 0.7:
        values = np.frombuffer(data, np.float32).copy()
        values[rng.randrange(len(values)):] = rng.choice(FLOATS)
        data = values.tobytes()
    else:
        data = rng.choice([bytes(len(data)), b"\xff" * len(data), rng.randbytes(len(data))])
    model.tensors[name] = type, shape, data


def resize(rng, model):
    """One number becomes another, in all shapes and in the keys, or in most of them: a model of other dimensions."""
    sizes = sorted({n for _, shape, _ in model.tensors.values() for n in shape if n > 1})
    old = rng.choice(sizes)
    new = rng.choice([1, 2, 3, 5, 8, 12, 16, 20, 31, 32, 33, 40, 48, 64, 65, 100, 127, 128, 256, 260, 300])
    sloppy = rng.random() < 0.2
    for name, (type, shape, _) in list(model.tensors.items()):
        if old in shape and not (sloppy and rng.random() < 0.1):
            other = tuple(new if n == old else n for n in shape)
            refit(model, name, type if other[0] % SIZES[type][0] == 0 else Q.F32, other)
    for key, (type, value) in list(model.keys.items()):
        if type == V.UINT32 and value == old and not (sloppy and rng.random() < 0.1):
            model.keys[key] = type, new


STRUCTURED = [set_value] * 8 + [set_type] * 2 + [set_array] * 2 + [drop_key] + [add_key] * 4 + [set_tensor_type] * 3
STRUCTURED += [set_shape] * 3 + [drop_tensor] * 2 + [drop_block] + [rename_tensor] * 2 + [add_tensor] * 2 + [set_data]
STRUCTURED += [resize] * 3
ALLOWED_TYPES = list(FEW_TYPES)


def mutated(rng: random.Random, model: Whole) -> tuple[list[str], bytes]:
    """What was done, and the bytes of the file."""
    model, done = replace(model, keys=dict(model.keys), tensors=dict(model.tensors)), []
    in_header = rng.random() < 0.1
    for _ in range(rng.choice([0, 1] if in_header else [1, 1, 1, 2, 3])):
        mutation = rng.choice(STRUCTURED)
        if len(model.tensors) > 2 and len(model.keys) > 2:
            mutation(rng, model)
            done.append(mutation.__name__)
    fields = model.fields()
    if in_header:
        mutation = rng.choice(HEADER_MUTATIONS)
        mutation(rng, fields)
        done.append(f"header {mutation.__name__}")
    return done, joined(fields)


# Running cases.

def exercise(rng: random.Random, path: Path, options: dict) -> None:
    """Loads the file, makes a context and decodes a prompt of three tokens and one token."""
    with Model.load(path, device="cpu", **options) as model:
        model.describe()
        tokens = [min(id, model.n_vocab - 1) for id in (1, 0, 3, 2)]
        if model.tokenizer.model != "no_vocab":
            model.tokenizer.encode("a a")
        types = rng.choice([("f16", "f16"), ("f32", "f32"), ("f16", "f32")])
        # Fused kernels take several weights: every mix of their types would be compiled. Fused or not is one in tests of models.
        no_fuse = "all" if any(t.type.name != "F32" for t in model.file.tensors.values()) else rng.choice(["all", ()])
        with model.new_context(n_ctx=16, type_k=types[0], type_v=types[1], no_fuse=no_fuse) as context:
            assert context.decode(tokens[:3], logits="all").shape == (3, model.n_vocab)
            context.decode(tokens[3:], logits="argmax")


class Limits:
    """Holds a case to MAX_EXTRA_BYTES of address space above what the process has, and to MAX_WAIT seconds. Compiling kernels is
    not part of a case."""

    def __init__(self):
        self.hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        self.is_on = False
        event.register("numba:compile", self.Listener(self))

    class Listener(event.Listener):
        def __init__(self, limits):
            self.limits, self.depth = limits, 0

        def on_start(self, event):
            self.depth += 1
            if self.limits.is_on and self.depth == 1:
                self.limits.lift()

        def on_end(self, event):
            self.depth -= 1
            if self.limits.is_on and self.depth == 0:
                self.limits.set()

    def set(self) -> None:
        n_mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (n_mapped + MAX_EXTRA_BYTES, self.hard))
        signal.setitimer(signal.ITIMER_REAL, MAX_WAIT)

    def lift(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (self.hard, self.hard))

    def __enter__(self):
        self.is_on = True
        self.set()

    def __exit__(self, *exception):
        self.is_on = False
        self.lift()


class TooLong(Exception):
    pass


def stop(signum, frame):
    raise TooLong(f"not over after {MAX_WAIT} s")


def check_message(error: UserError) -> None:
    text = str(error)
    assert "\n" not in text and len(text) < 2000 and text.isprintable(), text
    assert "more than cpu has" not in text, text  # a MemoryError: so small a context takes no more than the file


def run_case(seed: int, i: int, base: dict[str, Whole], folder: Path, limits: Limits) -> tuple[str, list[str], str, float]:
    """Model, mutations, the refusal or "", and seconds without compilation of case i. Any other exception is a fault."""
    rng = random.Random(f"{seed}:{i}")
    kind = rng.choice(list(base))
    done, data = mutated(rng, base[kind])
    path, state = folder / f"{i}.gguf", rng.getstate()
    path.write_bytes(data)
    try:
        for attempt in range(3):  # what a first one loads or compiles, and what else the machine does, is not the file's fault
            rng.setstate(state)
            compiling = compiled.seconds
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                start, refusal = time.process_time(), ""
                try:
                    with limits:
                        exercise(rng, path, base[kind].options)
                except UserError as error:
                    check_message(error)
                    refusal = str(error)
                except MemoryError:
                    if attempt == 2:
                        raise
                    continue
            seconds = time.process_time() - start - (compiled.seconds - compiling)
            if seconds < MAX_SECONDS:
                break
        assert seconds < MAX_SECONDS, f"{seconds:.1f} s, allowed {MAX_SECONDS}"
        return kind, done, refusal, seconds
    finally:
        path.unlink()


def fuzz(n: int, seed: int = 0, first: int = 0, keep_going: bool = False, out=None) -> dict:
    """Runs cases first .. first + n - 1. keep_going: faults are counted, not raised."""
    signal.signal(signal.SIGALRM, stop)
    report = dict(n=n, n_loaded=0, n_refused=0, slowest=(0.0, -1), faults=Counter(), examples={}, refusals=Counter(),
                  loaded=Counter())
    with tempfile.TemporaryDirectory() as folder:
        folder, limits = Path(folder), Limits()
        base = models(folder)
        for model in base.values():  # unmutated, all load; it also warms up everything that the limit shall not count
            path = folder / "m.gguf"
            path.write_bytes(joined(model.fields()))
            for i in range(8):
                exercise(random.Random(i), path, model.options)
            path.unlink()
        for i in range(first, first + n):
            if out and (i - first) % 1000 == 0:
                print(f"{i - first}: {report['n_loaded']} loaded, {report['n_refused']} refused, "
                      f"{report['faults'].total()} faults", file=out, flush=True)
            try:
                _, done, refusal, seconds = run_case(seed, i, base, folder, limits)
            except Exception as error:
                note = f"replay: --seed {seed} --first {i} --n 1"
                if not keep_going:
                    error.add_note(note)
                    raise
                frame = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno} {frame.name}: {str(error)[:100]}"
                if out:
                    print(f"{where} ({note})", file=out, flush=True)
                report["faults"][where] += 1
                report["examples"].setdefault(where, i)
                continue
            report["n_refused" if refusal else "n_loaded"] += 1
            if not refusal:
                report["loaded"].update(done)
            else:
                report["refusals"][" ".join(refusal.split(": ", 1)[-1].split()[:4])] += 1
            report["slowest"] = max(report["slowest"], (seconds, i))
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--all-types", action="store_true",
                        help="tensors of every type that weights can have; their kernels are compiled first, for minutes")
    parser.add_argument("--keep-going", action="store_true", help="count faults, do not stop at the first")
    parser.add_argument("--verbose", action="store_true")
    a = parser.parse_args()
    if a.all_types:
        ALLOWED_TYPES[:] = [t for t in [*GGML_QUANT_SIZES, *OWN] if t not in REFUSED_TYPES]
    start = time.perf_counter()
    r = fuzz(a.n, a.seed, a.first, a.keep_going, sys.stderr if a.verbose else None)
    print(f"{r['n']} mutations: {r['n_loaded']} loaded, {r['n_refused']} refused, {r['faults'].total()} faults, "
          f"slowest {1000 * r['slowest'][0]:.1f} ms (case {r['slowest'][1]}), {time.perf_counter() - start:.0f} s")
    for where, count in r["faults"].most_common():
        print(f"{count:6} {where} (case {r['examples'][where]})")
    if a.verbose:
        for what, count in [*r["refusals"].most_common(60), *r["loaded"].most_common()]:
            print(f"{count:6} {what}", file=sys.stderr)
    return int(bool(r["faults"]))


if __name__ == "__main__":
    sys.exit(main())
