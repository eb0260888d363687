"""A placement that fits the free memory of the devices, where a model as a whole does not (`--fit`)."""
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ..base.defaults import MARGIN, N_UBATCH
from ..base.errors import UserError
from ..base.placement import EXPERTS, HOST, ExpertsOnHost, PlacementOptions
from ..files.gguf import GGUFFile
from ..graph.split import WINDOW
from . import model_class

WIDE_ROWS = 3     # of a layer's widest, that a micro-batch holds at a time: 2048 tokens of Llama-3-8B take 356 MB


@dataclass(frozen=True)
class Fit:
    """What must fit beside the weights: a context of n_seq_max sequences of n_ctx positions and micro-batches of n_ubatch tokens,
    and `margin` bytes."""
    n_ctx: int
    n_seq_max: int = 1
    type_k: str = "f16"
    type_v: str = "f16"
    n_ubatch: int = N_UBATCH
    margin: int = MARGIN

    def taken(self, file: GGUFFile, options: PlacementOptions, nextn: bool) -> dict[str, int]:
        """Bytes on each device, about; of the host without the margin."""
        model = model_class(file)(file, options)
        model.check_tensors(nextn)
        hp = model.hp
        n_ff, n_used, n_ff_expert = (max(model.keys.per_block(name, hp.n_block, 0)) for name in (
            "feed_forward_length", "expert_used_count", "expert_feed_forward_length"))
        row = max(n_ff, hp.n_embd, n_used * max(n_ff_expert, hp.n_embd))
        arena = WIDE_ROWS * 4 * self.n_ubatch * row + (WINDOW if model.placement.offload is not None else 0)
        found = model.weight_bytes() + model.context_bytes(self.n_ctx, self.n_seq_max, self.type_k, self.type_v,
                                                           n_ubatch=self.n_ubatch)
        offload = model.placement.offload
        devices = dict.fromkeys([*model.placement.devices, *([offload.device] if offload is not None else [])])
        return {device: found[device] + (0 if device == HOST else arena + self.margin) for device in devices}


def candidates(options: PlacementOptions, n_layer: int, names: Iterable[str]) -> list[PlacementOptions]:
    """The fastest first, each with less on the devices than the one before. Experts go to the host before layers do: a token
    reads a few of them, and all of a layer's other weights. names: of the tensors."""
    found = [options]
    with_experts = [int(block[1]) for name in names if (block := re.match(rf"blk\.([0-9]+){EXPERTS}", name))]
    if with_experts:
        found += [replace(options, overrides=(ExpertsOnHost(n),)) for n in range(min(with_experts) + 1, n_layer)]
        found.append(replace(options, overrides=(ExpertsOnHost(),)))
    return found + [replace(found[-1], n_gpu_layers=n) for n in range(n_layer, -1, -1)]


def fitted(file: GGUFFile, options: PlacementOptions, free: Mapping[str, int], fit: Fit, nextn: bool = False) -> PlacementOptions:
    """The first of the candidates that fits the free bytes of each device. options: of devices alone. UserError, with the
    numbers, where none does."""
    if len(options.shared) > 1 and not options.tensor_split:
        options = replace(options, tensor_split=tuple(float(max(free[device], 1)) for device in options.devices))
    model = model_class(file)(file, options)
    tried = candidates(options, model.hp.n_layer, file.tensors)

    def fits(i: int) -> bool:
        return all(n_bytes <= free[device] for device, n_bytes in fit.taken(file, tried[i], nextn).items() if device != HOST)
    if fits(0):
        return options
    low, high = 1, len(tried) - 1
    if not fits(high):
        taken = fit.taken(file, tried[high], nextn)
        raise UserError(f"{file.path}: no placement fits; with all weights on the CPU, "
                        + "; ".join(f"{device} needs {taken[device]:,} bytes and has {free[device]:,} free"
                                    for device in taken if device != HOST and taken[device] > free[device]))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return tried[low]
