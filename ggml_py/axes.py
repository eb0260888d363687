"""The axes that no bit depends on (the table of docs/reproducibility.md), as settings: each one way to compute the logits of the same windows of tokens."""
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, count, takewhile

import numba

from .defaults import N_UBATCH
from .errors import UserError
from .passes import PASSES

AXES = {
    "rerun": "the same once more",
    "ubatch": "tokens computed at a time",
    "pieces": "a window decoded in several calls",
    "sequences": "windows decoded together, and in another order",
    "threads": "threads of the CPU",
    "launch": "kernels launched one by one, or replayed from CUDA graphs",
    "kv_write": "cells of the KV cache by number or by address",
    "fusion": "graph passes left out",
    "noise": "a second stream keeps the GPU busy",
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
    order: tuple[int, ...] = ()    # windows decoded together, sequence i that of order[i]; (): one after the other, each as sequence 0
    n_threads: int | None = None   # of the CPU
    graphs: bool = True
    kv_write: str = "set_rows"
    no_fuse: tuple[str, ...] = ()
    noise: bool = False
    n_tokens: int = 0              # only so many of the first window; 0: all windows
    type_k: str = "f16"
    type_v: str = "f16"
    reason: str = ""               # why it cannot be run here

    def windows(self, windows):
        """Those of [n, c] that are computed."""
        return windows[:1, :self.n_tokens] if self.n_tokens else windows

    def n_computed(self, windows) -> int:
        return self.windows(windows).size

    def pieces(self, c: int) -> list[tuple[int, int]]:
        """(first, end) of the calls that c tokens are decoded in."""
        cuts = [*takewhile(c.__gt__, accumulate((1 << i // 2 for i in count()), initial=0))] if self.growing else list(range(0, c, self.piece or c))
        return [(first, end) for first, end in zip(cuts, [*cuts[1:], c]) if first < end]

    def context_settings(self, windows) -> dict:
        n_seq = max(1, len(self.order))
        return dict(n_ctx=n_seq * windows.shape[1], n_seq_max=n_seq, n_ubatch=self.n_ubatch, graphs=self.graphs, kv_write=self.kv_write, no_fuse=self.no_fuse,
                    type_k=self.type_k, type_v=self.type_v)

    @contextmanager
    def conditions(self):
        """What is around a run: threads, and other work on the GPU."""
        before = numba.get_num_threads()
        try:
            if self.n_threads:
                numba.set_num_threads(self.n_threads)
            if self.noise:
                from .noise import Noise
                with Noise(self.device):
                    yield
            else:
                yield
        finally:
            numba.set_num_threads(before)


def play(context, windows, setting: Setting):
    """Yields (window, position of the first row, logits float32 [n, V]).   windows: int32 [n, c], those of the setting."""
    n, c = windows.shape
    for together in [setting.order] if setting.order else [(w,) for w in range(n)]:
        context.clear()
        for first, end in setting.pieces(c):
            rows = context.decode_batch([(seq, windows[w, first:end]) for seq, w in enumerate(together)], "all")
            for w, logits in zip(together, rows):
                yield w, first, logits


def settings_of(axes, devices: list[str], shape: tuple[int, int], reruns: int = 2, no_gpu: str = "no GPU among the devices",
                type_k: str = "f16", type_v: str = "f16") -> list[Setting]:
    """The settings of the axes on each device, the default one of the first device at the head. shape: of the windows.

    An axis that no device has is one setting with a reason. no_gpu: that of the axes of GPUs, where there is none."""
    unknown = [axis for axis in axes if axis not in AXES]
    if unknown:
        raise UserError(f"--axes: {unknown[0]!r} is no axis; allowed: {', '.join(AXES)}")
    found = [replace(shortened(setting, shape), type_k=type_k, type_v=type_v)
             for device in devices for setting in _of_device(axes, device, devices, shape, reruns)]
    gpus = [device for device in devices if device != "cpu"]
    missing = {"threads": "cpu" not in devices and "no CPU among the devices", **dict.fromkeys(("launch", "noise"), not gpus and no_gpu),
               "sequences": shape[0] == 1 and "the text is one window", "device": len(devices) == 1 and f"no device but {devices[0]}"}
    return found + [Setting(axis, AXES[axis], "", reason=missing[axis]) for axis in axes if missing.get(axis)]


def check_some_run(axes, settings: list[Setting]) -> None:
    """UserError if none of the axes that were asked for can be run here: one digest of the default setting alone would be said to be of them."""
    if not {setting.axis for setting in settings if not setting.reason} & {*axes}:
        raise UserError(f"--axes: none of these can be run here: {', '.join(f'{setting.axis} ({setting.reason})' for setting in settings if setting.reason)}")


def shortened(setting: Setting, shape: tuple[int, int]) -> Setting:
    """Of the first window only, and of it only so many tokens that a CPU is not kept waiting."""
    n_windows, c = shape
    n_tokens = CPU_MICRO_BATCHES * setting.n_ubatch
    if setting.device != "cpu" or n_tokens >= n_windows * c:
        return setting
    return replace(setting, n_tokens=min(n_tokens, c), order=setting.order and (0,))


def _of_device(axes, device: str, devices: list[str], shape: tuple[int, int], reruns: int):
    n_windows, c = shape
    on_gpu = device != "cpu"
    yield Setting("default" if device == devices[0] else "device", "one window after the other", device)
    for axis in axes:
        def setting(name, **settings):
            return Setting(axis, name, device, **settings)
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
            case "threads" if not on_gpu:
                most = numba.config.NUMBA_NUM_THREADS
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
