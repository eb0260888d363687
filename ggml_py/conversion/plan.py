"""Which type each tensor of a file is to have, and why: a mix (`mixes`), what was asked for beside it, and what rows allow."""
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ..base.errors import ParameterError, UserError
from ..files.gguf import GGUFFile, TensorInfo
from ..files.gguf_writer import Entry, string, u32
from ..quant.formats import FORMATS
from ..quant.interleaved import INTERLEAVED
from .imatrix import ImportanceMatrix
from .mixes import (COPY, EMBEDDINGS, FALLBACKS, FLOATS, OUTPUT, Mix, Model, Place, choose, is_kept, kind_of,
                    layer_of, mix_of, needs_imatrix)

FLOAT_TYPES = tuple(mix.type for mix in FLOATS)


@dataclass(frozen=True)
class Asked:
    """What the types of a new file follow from, by the names of llama-quantize's options. type: of the file, COPY for none;
    tensor_types: (pattern, type), of which the first that is found in a name counts."""
    type: str
    output_tensor_type: str | None = None
    token_embedding_type: str | None = None
    tensor_types: Sequence[tuple[str, str]] = ()
    pure: bool = False
    allow_requantize: bool = False
    leave_output_tensor: bool = False

    @property
    def mix(self) -> Mix | None:
        """None: every tensor keeps its type."""
        return None if self.type.upper() == COPY else mix_of(self.type)


@dataclass(frozen=True)
class Change:
    """A tensor and its type in the new file. wanted: what the type would be if rows allowed every one. imatrix: whether columns
    are weighted; needs_imatrix: whether they would have to be and are not."""
    tensor: TensorInfo
    type: str
    wanted: str
    imatrix: bool = False
    needs_imatrix: bool = False

    @property
    def is_copy(self) -> bool:
        return self.type == self.tensor.type.name

    @property
    def entry(self) -> Entry:
        return Entry(self.tensor.name, self.tensor.shape, self.type)


def plan(file: GGUFFile, asked: Asked, imatrix: ImportanceMatrix | None = None) -> list[Change]:
    """The tensors of the new file in its order, which is llama.cpp's: by layer, then by name. UserError for what cannot be."""
    mix, names = asked.mix, sorted(file.tensors, key=lambda name: (layer_of(name), name))
    arch, model, counts = file.get("general.architecture", "str"), model_of(file, imatrix is not None), Counter[str]()
    kept = {name for name in names if mix is None or is_kept(arch, name, file.tensors[name].shape)
            or (name == OUTPUT and asked.leave_output_tensor)}
    for pattern, _ in asked.tensor_types:
        if not any(re.search(pattern, name) for name in names if name not in kept):
            raise ParameterError("tensor_types", f"{pattern!r} is found in no name of the {len(names) - len(kept)} tensors of "
                                                 f"{file.path} that can change")
    if imatrix is not None:
        imatrix.check(file)
    changes = []
    for name in names:
        tensor = file.tensors[name]
        if mix is None or name in kept:
            changes.append(Change(tensor, tensor.type.name, tensor.type.name))
            continue
        wanted = named(asked, name, model.tied)
        if wanted is None:
            wanted = mix.type
            if not asked.pure and mix not in FLOATS:
                kind = kind_of(name)
                wanted = choose(mix, name, place_of(model, mix, tensor, kind, counts[kind]))
                counts[kind] += 1
        changes.append(checked(file, asked, mix, tensor, wanted, imatrix))
    return changes


def named(asked: Asked, name: str, tied: bool) -> str | None:
    """The type that was asked for, for this tensor alone."""
    found = next((type for pattern, type in asked.tensor_types if re.search(pattern, name)), None)
    if name == OUTPUT and asked.output_tensor_type:
        return asked.output_tensor_type
    if name == EMBEDDINGS[0] and asked.token_embedding_type:
        return asked.token_embedding_type
    if name in EMBEDDINGS:
        return found or asked.token_embedding_type or (asked.output_tensor_type if tied else None)
    return found


def model_of(file: GGUFFile, imatrix: bool) -> Model:
    arch = file.get("general.architecture", "str")

    def number(key: str, default: int) -> int:
        """Of the first layer, where each has its own."""
        value = file.get(f"{arch}.{key}", "u32|i32|arr[int]", default)
        return int(value) if isinstance(value, int) else int(value[0]) if len(value) else default
    n_head = number("attention.head_count", 0)
    n_head_kv = number("attention.head_count_kv", n_head)
    return Model(arch, number("block_count", 0), number("expert_count", 0), n_head // n_head_kv if n_head_kv else 0,
                 sum(kind_of(name) == "attn_v" for name in file.tensors), OUTPUT not in file.tensors, imatrix)


def place_of(model: Model, mix: Mix, tensor: TensorInfo, kind: str, count: int) -> Place:
    i = count
    if kind.startswith("ffn") and model.n_expert > 1 and 0 <= layer_of(tensor.name) < model.n_layer:
        i = layer_of(tensor.name)
    return Place(model, kind, count, i, model.n_attn_v if kind == "attn_v" else model.n_layer,
                 prod(tensor.shape[2:]) > 1, tensor.shape[0] % FORMATS[mix.type].block_size > 0)


def checked(file: GGUFFile, asked: Asked, mix: Mix, tensor: TensorInfo, wanted: str, imatrix: ImportanceMatrix | None) -> Change:
    """With the type that its rows allow, or UserError."""
    who, name, n_cols = f"{file.path}: tensor {tensor.name}", tensor.type.name, tensor.shape[0]
    fits = lambda type: n_cols % FORMATS[type].block_size == 0
    type = wanted
    if not fits(wanted):
        type = FALLBACKS.get(wanted, "" if FORMATS[wanted].block_size > 32 else "F16")
        if not type:
            raise ParameterError("type", f"{who} cannot be {wanted}: its rows have {n_cols} values, must have a multiple of "
                                         f"{FORMATS[wanted].block_size}, and no type of smaller blocks stands for it; allowed: "
                                         "another by tensor_types")
        type = type if fits(type) else "F16"
    if type == name:
        return Change(tensor, type, wanted)
    is_float = name in FLOAT_TYPES
    if not is_float and name not in INTERLEAVED and not (name in FORMATS and FORMATS[name].is_quantized):
        raise UserError(f"{who} is of type {name}, which cannot be made {type}; allowed: floats and quantized types")
    if not is_float and not asked.allow_requantize:
        raise ParameterError("allow_requantize", f"{who} is {name} already and would be {type}; a second quantization loses more "
                                                 "than one, and must be asked for")
    has_weights = imatrix is not None and FORMATS[type].is_quantized and imatrix.has(tensor)
    return Change(tensor, type, wanted, has_weights, needs_imatrix(mix, tensor.name, type) and not has_weights)


def check_imatrix(file: GGUFFile, changes: list[Change], imatrix: ImportanceMatrix | None) -> None:
    """UserError for a tensor that needs an importance matrix and has none."""
    for change in changes:
        if change.needs_imatrix:
            lacks = "none is given" if imatrix is None else f"{imatrix.path} has no entry for it"
            raise ParameterError("imatrix", f"{file.path}: tensor {change.tensor.name} needs one to be {change.type}, without "
                                            f"the result is worth nothing, and {lacks}")


def keys_of(file: GGUFFile, asked: Asked, imatrix: ImportanceMatrix | None = None) -> Mapping[str, bytes]:
    """The new file's metadata: the old one's but for the marks of its parts; what llama-quantize adds stands at the end."""
    made = {"general.quantization_version": u32(2)}
    if asked.mix is not None:
        made["general.file_type"] = u32(asked.mix.number)
    if imatrix is not None:
        made["quantize.imatrix.file"] = string(str(imatrix.path)[:127])
        if imatrix.datasets:
            made["quantize.imatrix.dataset"] = string(imatrix.datasets[0][:127])
        made["quantize.imatrix.entries_count"] = u32(len(imatrix.entries))
        if imatrix.chunk_count > 0:
            made["quantize.imatrix.chunks_count"] = u32(imatrix.chunk_count)
    kept = [key for key in file.metadata if key not in made and not key.startswith("split.")]
    return {key: file.metadata.raw(key) for key in kept} | made
