"""Hyperparameters: the numbers that a file states about its architecture. None is believed before it is checked.

- `Keys` reads a number only within bounds.
- `Keys.block_count` compares the number of blocks with the names of the tensors, before anything is done for each block.
- All other sizes are compared with the tensors by building the model's graphs on paper first (`weights.Paper`). The building
  blocks ask for each tensor by the shape that follows from the hyperparameters; memory is asked for when all of them fit. On
  paper numbers are `Stated`: they remember the keys that they follow from, so that the error about a tensor names them.
"""
import re
from dataclasses import dataclass, replace

import numpy as np

from ..base.errors import UserError, quoted
from ..base.exact_math import log
from ..base.rope_table import RopeSettings
from ..files.gguf import GGUFFile

SCALING = ("none", "linear", "yarn", "longrope")
LARGEST = 2**31 - 1  # of any integer: positions, rows and columns are 32-bit numbers in kernels
MOST_BLOCKS = 512  # the largest models have fewer than 200
LEAST_FACTOR, MOST_FACTOR = 1e-3, 1e6  # of what multiplies or divides: rope scaling, attention, the weights of experts
BLOCK = re.compile(r"blk\.(0|[1-9][0-9]*)\.")
_REQUIRED = object()


class Stated(int):
    """An integer that a file states, or that follows from such integers by + - * // %.

    keys: what it follows from, name of the key -> value."""
    keys: dict[str, int]

    def __new__(cls, value: int, keys: dict[str, int]) -> "Stated":
        number = super().__new__(cls, value)
        number.keys = keys
        return number


def _remembering(operation):
    def method(self, other):
        value = operation(self, other)
        return value if value is NotImplemented else Stated(value, {**self.keys, **getattr(other, "keys", {})})
    return method


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    for _method in (f"__{_name}__", f"__r{_name}__"):
        setattr(Stated, _method, _remembering(getattr(int, _method)))


def because(*numbers) -> str:
    """For the end of an error: the keys that these numbers follow from, with their values; "" when none is known."""
    keys = {key: value for number in numbers for key, value in getattr(number, "keys", {}).items()}
    return ": " * bool(keys) + ", ".join(f"{key} is {value}" for key, value in keys.items())


class Keys:
    """Reads the keys of a file's own architecture. A value out of bounds is a UserError that names key, value and bounds.

    on_paper: integers are `Stated`.
    """

    def __init__(self, file: GGUFFile, on_paper: bool = False):
        self.file, self.on_paper = file, on_paper
        self.architecture = file.get("general.architecture", "str")

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def __contains__(self, key: str) -> bool:
        return self.name(key) in self.file.metadata

    def error(self, key: str, value, must: str, *others) -> UserError:
        """must: what is allowed. others: numbers that what is allowed follows from."""
        found, others = (f"is {value}", others) if key in self else (f"is missing, which stands for {value}", (value, *others))
        return UserError(f"{self.file.path}: {self.name(key)} {found}, must be {must}{because(*others)}")

    def stated(self, value: int, name: str) -> int:
        """The value of a key, as it is remembered."""
        return Stated(value, {name: value}) if self.on_paper else value

    def _bounded(self, key: str, value: int, least: int, most: int) -> int:
        if not least <= value <= most:
            raise self.error(key, value, f"{least} to {most}", least, most)
        return value

    def integer(self, key: str, default=_REQUIRED, least: int = 0, most: int = LARGEST) -> int:
        """A u32, or the default where the key is missing."""
        if key not in self and default is not _REQUIRED:
            return self._bounded(key, default, least, most)
        return self._bounded(key, self.stated(self.file.get(self.name(key), "u32"), self.name(key)), least, most)

    def per_block(self, key: str, n: int, default=_REQUIRED, least: int = 0, most: int = LARGEST, kind: str = "u32") -> list[int]:
        """n integers, one for each block: an array, or one number for all. default: a number, or n."""
        if key not in self and default is not _REQUIRED:
            values = list(default) if isinstance(default, (list, tuple)) else [default] * n
        else:
            name = self.name(key)
            values = self.file.get_key_or_arr(name, n, kind)
            is_array = isinstance(self.file.metadata[name], np.ndarray)
            values = [self.stated(value, f"{name}[{i}]" if is_array else name) for i, value in enumerate(values)]
        return [self._bounded(key, value, least, most) for value in values]

    def real(self, key: str, default=_REQUIRED, least: float = LEAST_FACTOR, most: float = MOST_FACTOR,
             zero: bool = False) -> float:
        """An f32, or the default where the key is missing. zero: 0 is allowed too; it says that there is none."""
        if key not in self and default is not _REQUIRED:
            return default
        value = self.file.get(self.name(key), "f32")
        if not (least <= value <= most or (zero and value == 0)):  # NaN is not within any bounds
            raise self.error(key, value, "0 or " * zero + f"{least:g} to {most:g}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return self.file.get(self.name(key), "bool", default)

    def flags(self, key: str, n: int) -> list[bool]:
        """Of an array with one for each block, which must be there."""
        self.file.get(self.name(key), "arr[int]")
        return [bool(flag) for flag in self.per_block(key, n)]

    def block_count(self) -> int:
        """The number of blocks, which must be that of the blocks in the names of tensors: blk.0, blk.1 and so on."""
        n_block = self.integer("block_count", most=2**32 - 1)
        found = {int(match[1]) for name in self.file.tensors if (match := BLOCK.match(name))}
        must = f"the number of blocks that have tensors: there are {len(found)}"
        for i in range(min(n_block, len(found) + 1)):
            if i not in found:
                raise self.error("block_count", n_block, f"{must}, and none is blk.{i}")
        if len(found) > n_block:
            raise self.error("block_count", n_block, f"{must}, up to blk.{max(found)}")
        if not 1 <= n_block <= MOST_BLOCKS:
            raise self.error("block_count", n_block, f"1 to {MOST_BLOCKS}")
        return n_block


@dataclass(frozen=True)
class Windows:
    """What an architecture says of its layers that see only the last positions. None: its files must say it."""
    size: int | None = None     # positions that they see, a query's own among them; 0: there is no such layer
    pattern: int | None = None  # the last of each so many layers sees all, 0: none does; None: the file has a list
    base: float | None = None   # of their rotary angles; None: that of the other layers
    scaled: bool = True         # their rotary angles are scaled as those of the other layers
    heads: bool = False         # the file must say the sizes of their heads; else they are those of the other layers

    def read(self, keys: Keys, n_block: int) -> list[int]:
        """How many positions each block sees; 0: all. What a file says of layers, a list or a number, it says for all blocks."""
        size_key, key = "attention.sliding_window", "attention.sliding_window_pattern"
        size = keys.integer(size_key, _REQUIRED if self.size is None else self.size, least=int(self.size != 0))
        if self.pattern is None or isinstance(keys.file.metadata.get(keys.name(key)), np.ndarray):
            windowed = keys.flags(key, n_block)
            if any(windowed) and not size:
                raise keys.error(size_key, size, f"positive, since {keys.name(key)} has blocks with a window")
        else:
            n = keys.integer(key, self.pattern)
            windowed = [not n or il % n < n - 1 for il in range(n_block)]
        return [size if each else 0 for each in windowed]

    def read_head(self, keys: Keys, part: str, size: int) -> int:
        """Channels of the keys or values (part: "key", "value") of layers with a window; size: of the others."""
        return keys.integer(f"attention.{part}_length_swa", _REQUIRED if self.heads else size, least=1)

    def read_rope(self, keys: Keys, head: int, others: RopeSettings) -> RopeSettings | None:
        """Of layers with a window, whose heads have so many channels; None: that of the others is theirs too."""
        n_rot = read_n_rot(keys, "rope.dimension_count_swa", head, head if self.heads else others.n_rot)
        base = read_base(keys, "rope.freq_base_swa", self.base or others.freq_base)
        if not self.scaled:
            return RopeSettings(n_rot, base)
        rope = replace(others, n_rot=n_rot, freq_base=base)
        return None if rope == others else rope


def read_n_rot(keys: Keys, key: str, head: int, default: int) -> int:
    """The rotated channels of heads of so many channels."""
    n_rot = keys.integer(key, default)
    if n_rot % 2 or not 0 < n_rot <= head:
        raise keys.error(key, n_rot, f"even and 2 to {head}, the channels of a head", head)
    return n_rot


def read_base(keys: Keys, key: str, default: float) -> float:
    return keys.real(key, default, least=2, most=1e30)


@dataclass(frozen=True)
class Hparams:
    """Numbers of a transformer with plain attention. Heads may differ from layer to layer; lists have one for each block, also of
    those behind the layers."""
    n_layer: int
    n_embd: int
    n_vocab: int  # as the vocabulary or the key states it; 0: neither does
    n_ctx_train: int
    n_head: list[int]
    n_head_kv: list[int]
    n_embd_head_k: list[int]
    n_embd_head_v: list[int]
    n_ff: list[int]
    eps: float
    rope: RopeSettings
    n_block: int  # layers, and NextN blocks behind them
    windows: list[int]  # how many positions a query sees, its own and those before it; 0: all
    rope_windowed: RopeSettings | None  # of blocks with a window; None: `rope`

    @classmethod
    def read(cls, keys: Keys, windows: Windows | None = None, without_kv: bool = False,
             eps: str = "attention.layer_norm_rms_epsilon") -> "Hparams":
        """windows: of architectures whose layers may have them. without_kv: layers may have no KV heads. eps: its key."""
        n_block = keys.block_count()
        n_layer = n_block - keys.integer("nextn_predict_layers", 0, most=n_block - 1)
        n_embd, n_ctx = keys.integer("embedding_length", least=1), keys.integer("context_length", least=1)
        n_head = keys.per_block("attention.head_count", n_block, 0)
        n_head_kv = keys.per_block("attention.head_count_kv", n_block, n_head)
        for il, (heads, heads_kv) in enumerate(zip(n_head[:n_layer], n_head_kv)):
            if heads < 1:
                raise keys.error("attention.head_count", heads, f"1 or more in layer {il}")
            if (heads_kv < 1 or heads % heads_kv) and not (without_kv and heads_kv == 0):
                raise keys.error("attention.head_count_kv", heads_kv,
                                 f"{'0 or ' * without_kv}a divisor of the {heads} heads of layer {il}")
        k = keys.integer("attention.key_length", n_embd // n_head[0], least=1)
        v = keys.integer("attention.value_length", n_embd // n_head[0], least=1)
        rope = cls.read_rope(keys, k, n_ctx)
        sizes, heads_k, heads_v, rope_windowed = [0] * n_block, [k] * n_block, [v] * n_block, None
        if windows is not None and any(sizes := windows.read(keys, n_block)):
            k_windowed, v_windowed = windows.read_head(keys, "key", k), windows.read_head(keys, "value", v)
            heads_k, heads_v = [k_windowed if n else k for n in sizes], [v_windowed if n else v for n in sizes]
            rope_windowed = windows.read_rope(keys, k_windowed, rope)
        n_ff = keys.per_block("feed_forward_length", n_block, 0)
        return cls(n_layer, n_embd, cls.read_vocabulary(keys), n_ctx, n_head, n_head_kv, heads_k, heads_v, n_ff,
                   keys.real(eps, least=0, most=1), rope, n_block, sizes, rope_windowed)

    @staticmethod
    def read_vocabulary(keys: Keys) -> int:
        """The number of tokens, or of rows that a file without them states; 0 where it states none."""
        key = "tokenizer.ggml.tokens"
        tokens = keys.file.get(key, "arr[str]", None)
        return keys.integer("vocab_size", 0) if tokens is None else keys.stated(len(tokens), f"the length of {key}")

    @staticmethod
    def read_rope(keys: Keys, head: int, n_ctx: int) -> RopeSettings:
        """How heads of so many channels are rotated."""
        n_rot = read_n_rot(keys, "rope.dimension_count", head, head)
        scaling = keys.file.get(keys.name("rope.scaling.type"), "str", "linear")
        if scaling not in SCALING:
            raise keys.error("rope.scaling.type", quoted(scaling), f"one of {', '.join(SCALING)}")
        factor = keys.real("rope.scaling.factor", keys.real("rope.scale_linear", 0.0, zero=True), zero=True) or 1.0
        if scaling == "none":
            factor = 1.0
        yarn = scaling == "yarn"
        attn_factor = keys.real("rope.scaling.attn_factor", 1.0)
        if yarn:
            # The rope op multiplies by 1 + 0.1 ln s; for s > 1 llama.cpp's own factor leaves just that, for s <= 1 it cancels it
            ln = float(log(factor))
            attn_factor *= (0.1 * ln + 1 if factor > 1 else 1.0) / (1 + 0.1 * ln)
        n_ctx_orig = keys.integer("rope.scaling.original_context_length", 0) or n_ctx
        base = read_base(keys, "rope.freq_base", 10000.0)
        return RopeSettings(n_rot, base, 1.0 / factor, yarn, attn_factor, n_ctx_orig)
