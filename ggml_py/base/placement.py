"""Which device has which weight, and which layer's caches and states: chosen by a few options, before anything is loaded. No bit
depends on it. Nodes follow (`graph.place`)."""
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf
from typing import NamedTuple

from .errors import ParameterError

HOST = "cpu"
SPLIT_MODES = "none", "layer", "column"
OFFLOADED_ROWS = 16  # rows of a product that take a CPU longer than bringing its matrix to a GPU, where nobody has measured
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch)?exps"  # in the names of tensors; shared experts are not among them


def device_name(kind: str, number: int) -> str:
    """Of cuda and 1 "cuda:1"; what is there once, or is the first CPU, has no number: "cpu", "auto"."""
    return f"{kind}:{number}" if number or kind == "cuda" else kind


class Override(NamedTuple):
    """Tensors in whose names a pattern is found lie on a device."""
    pattern: str
    device: str


class ExpertsOnHost(NamedTuple):
    """The experts of n layers lie on the host: of the first ones, of the last ones; None: of all. Shared experts do not."""
    n: int | None = None
    last: bool = False


def override_of(asked: Override | ExpertsOnHost, n_layer: int) -> Override:
    if isinstance(asked, Override):
        return asked
    n = n_layer if asked.n is None else min(asked.n, n_layer)
    layers = range(n_layer - n, n_layer) if asked.last else range(n)
    return Override(rf"^blk\.({'|'.join(map(str, layers))}){EXPERTS}", HOST)


@dataclass(frozen=True)
class Offload:
    """Which nodes of a micro-batch run on another device than the host, where their weights lie: these are streamed to it.

    device: of nodes whose layer is on the host; others run where their layer is. least: op -> tokens from which on, None: never.
    n_rows: of other ops, rows for each of their matrices from which on; None: `OFFLOADED_ROWS`, until a model that is loaded has
    measured it (`models.offload_rates`)."""
    device: str
    least: Mapping[str, int | None]
    n_rows: float | None = None

    def pays(self, op: str, n_tokens: int, n_rows: float) -> bool:
        """n_tokens: that a node is of; n_rows: of them for each matrix."""
        if op in self.least:
            least = self.least[op]
            return least is not None and n_tokens >= least
        return n_rows >= (OFFLOADED_ROWS if self.n_rows is None else self.n_rows)


@dataclass(frozen=True)
class Placement:
    """Of the tensors of one file.

    layers: the device of each block: of its weights, its caches and states, and of sums without weights. output: that of the last
    norm and the head. caches: that of all caches and states; None: their layer's. overrides: of weights; the first whose pattern
    is found decides. offload: None where nothing is streamed. columns: the devices that share the products of what lies on the
    first of them, and in which proportion (`graph.columns`). hot_experts: bytes on each device for copies of experts that lie on
    the host (`models.hot_experts`); below 1, of which share of them."""
    layers: tuple[str, ...]
    output: str
    embedding: str
    caches: str | None = None
    overrides: tuple[Override, ...] = ()
    offload: Offload | None = None
    columns: Mapping[str, float] = field(default_factory=dict)
    hot_experts: float = 0

    def weight(self, name: str) -> str:
        """The device of a tensor of the file."""
        for pattern, device in self.overrides:
            if re.search(pattern, name):
                return device
        if block := re.match(r"blk\.([0-9]+)\.", name):
            return self.layers[int(block[1])]
        return self.embedding if name.startswith("token_embd.") else self.output

    def memory(self, layer: int) -> str:
        """The device of a layer's caches and states."""
        return self.caches or self.layers[layer]

    @property
    def devices(self) -> list[str]:
        """Those that may have something, that of the output first."""
        caches = [] if self.caches is None else [self.caches]
        return list(dict.fromkeys([self.output, *self.layers, self.embedding, *self.columns, *caches,
                                   *(device for _, device in self.overrides)]))


@dataclass(frozen=True)
class PlacementOptions:
    """What is asked for, of any model. Names and meanings are llama.cpp's.

    devices: have the last n_gpu_layers layers, of which the output is one; the host has the others. None: all of them.
    split_mode: "layer", neighbouring layers on each of the devices, in the proportions of tensor_split, equal ones without it;
    "column", each product shared by them in these proportions; "none", all on the device of the number main_gpu.
    overrides: of weights, by their names; the first that is of a weight decides.
    kv_offload: caches and states lie where their layer does; else on the host.
    offload: of ops by name, the tokens of a micro-batch from which on weights of the host are streamed to a device, None: never;
    "all" stands for all ops that are not named. Where none is given, it is done where it pays (`Offload`).
    hot_experts: bytes on each device for copies of those experts on the host that are asked for most; below 1, of which share."""
    devices: tuple[str, ...]
    n_gpu_layers: int | None = None
    overrides: tuple[Override | ExpertsOnHost, ...] = ()
    split_mode: str = "layer"
    tensor_split: tuple[float, ...] = ()
    main_gpu: int = 0
    kv_offload: bool = True
    offload: tuple[tuple[str, int | None], ...] = ()
    hot_experts: float = 0

    def __post_init__(self):
        """ParameterError for what cannot be, before anything is opened."""
        if self.split_mode == "row":
            raise ParameterError("split_mode", "'row' is not possible: rows of a product would be summed across devices, and "
                                               f"sums have one order here; allowed: {', '.join(SPLIT_MODES)}")
        if self.split_mode not in SPLIT_MODES:
            raise ParameterError("split_mode", f"{self.split_mode!r} is not allowed; allowed: {', '.join(SPLIT_MODES)}")
        if self.n_gpu_layers is not None and self.n_gpu_layers < 0:
            raise ParameterError("n_gpu_layers", f"must be at least 0, got {self.n_gpu_layers}")
        if not 0 <= self.main_gpu < len(self.devices):
            raise ParameterError("main_gpu", f"must be 0 to {len(self.devices) - 1}, the number of one of "
                                             f"{', '.join(self.devices)}, got {self.main_gpu}")
        for name, n_tokens in self.offload:
            if n_tokens is not None and n_tokens < 1:
                raise ParameterError("offload", f"{name}: must be at least 1 token, or never, got {n_tokens}")
        parts = self.tensor_split
        if parts and (len(parts) != len(self.devices) or min(parts) < 0 or not sum(parts) > 0):
            raise ParameterError("tensor_split", f"must be {len(self.devices)} numbers, for {', '.join(self.devices)}, at least "
                                                 f"0 and not all 0, got {', '.join(f'{part:g}' for part in parts)}")
        if self.hot_experts < 0:
            raise ParameterError("hot_experts", f"must be at least 0 bytes, got {self.hot_experts}")
        if self.hot_experts and self.split_mode == "column":
            raise ParameterError("hot_experts", "devices that share products have parts of experts; allowed: 0, or another "
                                                "split_mode")
        for asked in self.overrides:
            try:
                re.compile(override_of(asked, 1).pattern)
            except re.error as error:
                raise ParameterError("overrides", f"{asked[0]!r} is not a pattern: {error}") from None

    def renamed(self, name: Callable[[str], str]) -> "PlacementOptions":
        """The same of devices by other names: name -> the one that is used, such as auto -> cuda:0."""
        overrides = tuple(Override(asked.pattern, name(asked.device)) if isinstance(asked, Override) else asked
                          for asked in self.overrides)
        return replace(self, devices=tuple(dict.fromkeys(map(name, self.devices))), overrides=overrides)

    @property
    def is_of_devices_alone(self) -> bool:
        """Whether it says no more than which devices share the layers, and how weights are offloaded."""
        return self == PlacementOptions(self.devices, offload=self.offload)

    @property
    def shared(self) -> tuple[str, ...]:
        """The devices among which layers are shared out."""
        return (self.devices[self.main_gpu],) if self.split_mode == "none" else self.devices

    @property
    def needed(self) -> list[str]:
        """The devices that must be open."""
        host = self.n_gpu_layers is not None or not self.kv_offload
        return list(dict.fromkeys([*self.shared, *[HOST] * host, *(override_of(asked, 1).device for asked in self.overrides)]))

    def asked_by(self, device: str) -> str:
        """The parameter that names a device that is needed."""
        return "device" if device in (*self.shared, HOST) else "overrides"

    def place(self, n_layer: int, n_block: int, is_tied: bool, names: Collection[str] = ()) -> Placement:
        """n_block: layers and the blocks behind them, which lie where the output does. is_tied: the head is the embedding.
        names: of the tensors; ParameterError for an override that is of none of them."""
        overrides = tuple(override_of(asked, n_layer) for asked in self.overrides)
        for asked, override in zip(self.overrides, overrides):
            if names and not any(re.search(override.pattern, name) for name in names):
                what = f"{override.pattern!r} is" if isinstance(asked, Override) else "experts are"
                raise ParameterError("overrides", f"{what} in the name of none of the {len(names)} tensors, such as "
                                                  f"{', '.join(list(names)[:3])}")
        n = n_layer + 1 if self.n_gpu_layers is None else min(self.n_gpu_layers, n_layer + 1)
        shares = self.tensor_split if self.tensor_split and len(self.shared) > 1 else [1] * len(self.shared)
        columns = {device: share for device, share in zip(self.shared, shares) if share} if self.split_mode == "column" else {}
        ends = [*accumulate(shares)]
        # The output lies on the last device and takes no layer's place: of a prompt it computes one row
        parts = [*(bisect_right(ends, i * ends[-1] / (n - 1)) for i in range(n - 1)), *[bisect_left(ends, ends[-1])] * (n > 0)]
        of_part = [next(iter(columns), self.shared[part]) for part in parts]
        *layers, output = [HOST] * (n_layer + 1 - n) + of_part
        return Placement((*layers, *[output] * (n_block - n_layer)), output, output if is_tied else layers[0],
                         None if self.kv_offload else HOST, overrides, self._offload(), columns if n and len(columns) > 1 else {},
                         self.hot_experts)

    def _offload(self) -> Offload | None:
        others = [device for device in self.shared if device != HOST and (self.offload or not device.startswith("cpu"))]
        least = dict(self.offload)
        shares_host = self.split_mode == "column" and HOST in self.devices
        if not others or HOST not in self.needed or shares_host:
            return None
        n_rows = None
        if "all" in least:
            n_rows = least.pop("all") or inf
        return Offload(others[0], least, n_rows)
