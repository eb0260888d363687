"""The axes that no bit depends on (the table of docs/reproducibility.md),
as settings: each one way to compute the logits of the same windows of tokens."""
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, count, pairwise, repeat, takewhile

import numpy as np

from ..base.defaults import N_UBATCH
from ..base.errors import ParameterError
from ..graph.fuse import PASSES
from ..kernels import threads
from ..kernels.call import HALVES, planned_without
from ..base.placement import ExpertsOnHost, HOST, Override, PlacementOptions
from ..state.recurrent import LEAST_ROLLBACK
from .noise import Noise

AXES = {
    "rerun": "the same once more",
    "ubatch": "tokens computed at a time",
    "pieces": "a window decoded in several calls",
    "sequences": "windows decoded together, and in another order",
    "prefix": "a sequence that begins with another's positions",
    "speculation": "tokens checked beside wrong guesses, which are taken back",
    "threads": "threads of the CPU",
    "launch": "kernels launched one by one, or replayed from CUDA graphs",
    "kv_write": "cells of the KV cache by number or by address",
    "fusion": "graph passes left out",
    "noise": "a second stream keeps the GPU busy",
    "products": "products without `mmq_half`, where the GPU may choose it",
    "placement": "weights, caches and nodes on several devices",
    "letters": "results handed from device to device by letters, or copied",
    "experts": "experts on the CPU, some with copies on another device",
    "device": "every other device",
}
CPU_MICRO_BATCHES = 64  # of a setting at most on a CPU: fewer tokens a micro-batch, shorter a text


@dataclass(frozen=True)
class Setting:
    """One way to compute the logits of windows [n, c]."""
    axis: str
    name: str
    device: str
    n_ubatch: int = N_UBATCH
    piece: int = 0                 # tokens of a window in a call; 0: all
    growing: bool = False          # pieces of 1, 1, 2, 2, 4, 4, ... tokens: a context's memory grows behind graphs
    # tokens of a window that sequence 0 computes; the others are of sequence 1, which begins with these
    prefix: int = 0
    n_draft: int = 0               # tokens beside the first one of a call: right ones, 0, 1, 2 and so on in turn, then wrong ones
    # windows decoded together, sequence i that of order[i]; (): one after the other, each as sequence 0
    order: tuple[int, ...] = ()
    n_threads: int | None = None   # of the CPU
    graphs: bool = True
    kv_write: str = "set_rows"
    no_fuse: tuple[str, ...] = ()
    noise: bool = False
    halves: bool = True            # whether `mmq_half` may be chosen
    n_tokens: int = 0              # only so many of the first window; 0: all windows
    type_k: str = "f16"
    type_v: str = "f16"
    letters: bool = True           # between devices that reach each other's memory
    placement: PlacementOptions | None = None  # of a model that is loaded so; None: all on the device
    reason: str = ""               # why it cannot be run here

    def windows(self, windows: np.ndarray) -> np.ndarray:
        """Those of [n, c] that are computed."""
        return windows[:1, :self.n_tokens] if self.n_tokens else windows

    def n_computed(self, windows: np.ndarray) -> int:
        return self.windows(windows).size

    def pieces(self, c: int) -> list[tuple[int, int]]:
        """(first, end) of the calls that c tokens are decoded in."""
        lengths: Iterator[int]
        if self.growing:
            lengths = (1 << i // 2 for i in count())
        elif self.n_draft:
            lengths = (1 + i % (self.n_draft + 1) for i in count())
        else:
            lengths = chain([self.prefix or self.piece or c], repeat(c if self.prefix else self.piece or c))
        return [*pairwise([*takewhile(c.__gt__, accumulate(lengths, initial=0)), c])]

    def context_settings(self, windows: np.ndarray) -> dict:
        n_seq = 2 if self.prefix else max(1, len(self.order))
        return dict(n_ctx=n_seq * windows.shape[1], n_seq_max=n_seq, n_ubatch=self.n_ubatch, graphs=self.graphs,
                    kv_write=self.kv_write, no_fuse=self.no_fuse, type_k=self.type_k, type_v=self.type_v,
                    n_rollback=max(self.n_draft + 1, LEAST_ROLLBACK), letters=self.letters)

    @contextmanager
    def conditions(self) -> Iterator[None]:
        """What is around a run: threads, other work on the GPU, and how its products may be planned."""
        with (threads.using(self.n_threads), Noise(self.device) if self.noise else nullcontext(),
              nullcontext() if self.halves else planned_without(HALVES)):
            yield


def play(context, windows: np.ndarray, setting: Setting) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yields (window, position of the first row, logits float32 [n, V]).   windows: int32 [n, c], those of the setting."""
    n, c = windows.shape
    for together in [setting.order] if setting.order else [(w,) for w in range(n)]:
        context.clear()
        for first, end in setting.pieces(c):
            n_wrong = max(setting.n_draft - (end - first - 1), 0)
            wrong = np.abs(windows[:, end:end + n_wrong] - 1)
            tokens = np.concatenate([windows[:, first:end], wrong], axis=1)
            begun = int(0 < setting.prefix <= first)  # the sequence that goes on
            if begun:
                context.seq_cp(0, begun)
            rows = context.decode_batch([(begun + seq, tokens[w]) for seq, w in enumerate(together)], "all")
            for seq, (w, logits) in enumerate(zip(together, rows)):
                if setting.n_draft:
                    context.keep(seq, end)
                yield w, first, logits[:end - first]


def settings_of(axes, devices: list[str], shape: tuple[int, int], reruns: int = 2, no_gpu: str = "no GPU among the devices",
                type_k: str = "f16", type_v: str = "f16") -> list[Setting]:
    """The settings of the axes on each device, the default one of the first device at the head. shape: of the windows.

    An axis that no device has is one setting with a reason. no_gpu: that of the axes of GPUs, where there is none."""
    unknown = [axis for axis in axes if axis not in AXES]
    if unknown:
        raise ParameterError("axes", f"{unknown[0]!r} is not an axis; allowed: {', '.join(AXES)}")
    found = [replace(shortened(setting, shape), type_k=type_k, type_v=type_v)
             for device in devices for setting in _of_device(axes, device, devices, shape, reruns)]
    missing = {"threads": "" if not all(map(is_gpu, devices)) else "no CPU among the devices",
               **dict.fromkeys(("launch", "noise", "products"), "" if any(map(is_gpu, devices)) else no_gpu),
               "sequences": "" if shape[0] > 1 else "the text is one window",
               "letters": "" if not all(map(is_gpu, devices)) or len(devices) > 1 else "one GPU",
               "device": "" if len(devices) > 1 else f"no device but {devices[0]}"}
    return found + [Setting(axis, AXES[axis], "", reason=missing[axis]) for axis in axes if missing.get(axis)]


def is_gpu(device: str) -> bool:
    """cpu:N is a CPU with memory of its own."""
    return not device.startswith(HOST)


def check_some_run(axes, settings: list[Setting]) -> None:
    """ParameterError if none of the axes that were asked for can be run here: one digest of the default setting alone would be
    said to be of them."""
    if not {setting.axis for setting in settings if not setting.reason} & {*axes}:
        reasons = ", ".join(f"{setting.axis} ({setting.reason})" for setting in settings if setting.reason)
        raise ParameterError("axes", f"none of these can be run here: {reasons}")


def shortened(setting: Setting, shape: tuple[int, int]) -> Setting:
    """Of the first window only, and of it only so many tokens that a CPU is not kept waiting."""
    n_windows, c = shape
    n_tokens = CPU_MICRO_BATCHES * (1 + setting.n_draft // 2 if setting.n_draft else setting.n_ubatch)
    if is_gpu(setting.device) or n_tokens >= n_windows * c:
        return setting
    return replace(setting, n_tokens=min(n_tokens, c), order=setting.order and (0,))


def _of_device(axes, device: str, devices: list[str], shape: tuple[int, int], reruns: int) -> Iterator[Setting]:
    n_windows, c = shape
    on_gpu = is_gpu(device)
    yield Setting("default" if device == devices[0] else "device", "one window after the other", device)
    for axis in axes:
        setting = partial(Setting, axis, device=device)
        match axis:
            case "rerun":
                yield from (setting(f"again, {i + 1}") for i in range(reruns))
            case "ubatch":
                yield from (setting(f"{n} at a time", n_ubatch=n) for n in (1, 7, 32, 512))
            case "pieces":
                yield from (setting(f"pieces of {n}", piece=n) for n in (17, 100) if n < c)
                yield setting("pieces of 1, 1, 2, 2, 4 and so on", growing=True)
            case "sequences" if n_windows > 1:
                order = tuple(range(n_windows))
                yield setting("all at once", order=order)
                yield setting("all together", order=order, piece=96)
                yield setting("in another order", order=order[1::2] + order[::2][::-1], piece=50, n_ubatch=96)
            case "prefix":
                yield from (setting(f"prefix of {n}", prefix=n) for n in (1, c // 2) if n < c)
            case "speculation":
                yield from (setting(f"drafts of {n}", n_draft=n) for n in (3, 8))
            case "threads" if not on_gpu:
                most = threads.MOST
                yield from (setting(f"{n} thread{'s' * (n > 1)}", n_threads=n) for n in sorted({1, min(2, most), most}))
            case "launch" if on_gpu:
                yield from (setting(f"eager, {n} at a time", n_ubatch=n, graphs=False) for n in (1, 512))
                yield setting("replayed, 8 at a time", n_ubatch=8)
            case "kv_write":
                yield setting("cells by address", kv_write="cpy", n_ubatch=32)
            case "fusion":
                yield from (setting(f"without {name}", no_fuse=(name,)) for name in PASSES)
                yield setting("without any", no_fuse=("all",))
                yield setting("without any, 8 at a time", no_fuse=("all",), n_ubatch=8)
            case "noise" if on_gpu:
                yield from (setting(f"busy GPU, {n} at a time", noise=True, n_ubatch=n) for n in (8, 512))
            case "products" if on_gpu:
                yield from (setting(f"without mmq_half, {n} at a time", halves=False, n_ubatch=n) for n in (100, N_UBATCH))
            case "placement":
                yield from (setting(name, placement=options) for name, options in _placements(device, devices))
            case "letters" if others := _near(device, devices):
                for name, mode in ("half of the layers on", "layer"), ("columns shared with", "column"):
                    shared = PlacementOptions((*others, device) if mode == "layer" else (device, *others), split_mode=mode)
                    yield from (setting(f"{name} {', '.join(others)}, by {how}, 8 at a time", n_ubatch=8, placement=shared,
                                        letters=how == "letters") for how in ("letters", "copies"))
            case "experts":
                other = f"{HOST}:1" if device == HOST else device
                pair = tuple(dict.fromkeys((other, device)))
                hot = PlacementOptions(pair, overrides=(ExpertsOnHost(),), hot_experts=0.5,
                                       tensor_split=(1, 1e-9)[:len(pair)])  # all layers on the first
                yield setting(f"copies of half of them on {other}, 8 at a time", placement=hot, n_ubatch=8)


def _near(device: str, devices: list[str]) -> list[str]:
    """Devices of the same kind, whose memory it may reach."""
    return [f"{HOST}:1"] if device == HOST else [each for each in devices if is_gpu(each) and each != device]


def _placements(device: str, devices: list[str]) -> Iterator[tuple[str, PlacementOptions]]:
    """The logits come from `device`."""
    first = f"{HOST}:1" if device == HOST else HOST
    for other in dict.fromkeys([first, *(each for each in devices if each not in (device, HOST))]):
        yield f"half of the layers on {other}", PlacementOptions((other, device))
        for what, pattern in ("feed-forward blocks", r"\.ffn_(up|down|gate)"), ("attention's weights", r"\.attn_"):
            yield f"{what} on {other}", PlacementOptions((device,), overrides=(Override(pattern, other),))
    if others := _near(device, devices):
        yield f"columns shared with {', '.join(others)}", PlacementOptions((device, *others), split_mode="column")
    other = f"{HOST}:1" if device == HOST else device
    yield f"feed-forward blocks streamed to {other}", PlacementOptions(
        tuple(dict.fromkeys((other, device))), overrides=(Override(r"\.ffn_(up|down|gate)", HOST),), offload=(("all", 1),))
    if device != HOST:
        yield f"caches on {HOST}", PlacementOptions((device,), kv_offload=False)
