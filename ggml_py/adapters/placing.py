"""Where a model lies, by arguments of plain numbers and texts, as other programs pass them."""
from collections.abc import Sequence

from ..base.errors import ParameterError
from ..base.placement import ExpertsOnHost, Override, PlacementOptions


def placement_of(device: str, *, n_gpu_layers: int | None = None, split_mode: str = "layer",
                 tensor_split: str | Sequence[float] = (), main_gpu: int = 0, kv_offload: bool = True,
                 overrides: str | Sequence[str] = (), cpu_moe: bool | int = False,
                 hot_experts: float = 0) -> PlacementOptions | None:
    """What `PlacementOptions` says of these names; None where all lies on one device.

    device: one, or several with / between.   tensor_split: numbers, or a text with / between.   overrides: "REGEX=DEVICE", or a
    text of several with ; between.   cpu_moe: the experts lie on the CPU, of all layers or of the first so many."""
    devices = tuple(device.split("/"))
    asked: list[Override | ExpertsOnHost] = []
    for text in overrides.split(";") if isinstance(overrides, str) else overrides:
        pattern, equals, where = text.rpartition("=")
        if not equals:
            raise ParameterError("overrides", f"must be REGEX=DEVICE, got {text!r}")
        asked.append(Override(pattern, where))
    if cpu_moe:
        asked.append(ExpertsOnHost(None if cpu_moe is True else cpu_moe))
    try:
        parts = tuple(map(float, tensor_split.split("/") if isinstance(tensor_split, str) else tensor_split))
    except ValueError:
        raise ParameterError("tensor_split", f"must be numbers with / between, got {tensor_split!r}") from None
    found = PlacementOptions(devices, n_gpu_layers, tuple(asked), split_mode, parts, main_gpu, kv_offload, (), hot_experts)
    return None if found == PlacementOptions(devices[:1]) else found


PLACING = tuple(placement_of.__kwdefaults__ or ())  # the names of its arguments
