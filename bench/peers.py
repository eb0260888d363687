"""Other engines under the same lamp: python bench/peers.py -m model.gguf [--devices cpu,cuda:0] [-c 512] [--chunks 2]

Runs the axes of `ggml-py verify` that an engine has on the same tokens, here and in llama-cpp-python (extra `peers`), and prints
how many different digests each axis gives. Sequences in one batch, launches, cache writes and graph passes are not for its Python
interface to choose: those axes are left out.
"""
import argparse
import platform
import sys
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

import checkout  # noqa: F401
import numpy as np

from ggml_py.kernels import threads
from ggml_py import __version__
from ggml_py.check.axes import settings_of
from ggml_py.backends import device_of, present_devices
from ggml_py.base.defaults import TEXT
from ggml_py.base.errors import UserError
from ggml_py.check.verify import Result, Verification
from ggml_py.engine.model import Model
from ggml_py.engine.windows import first_windows, read_text, with_bos

AXES = ["rerun", "ubatch", "pieces", "threads", "device"]


class PeerContext:
    """What `axes.play` needs of a context, of one sequence. llama: a llama_cpp.Llama that keeps the logits of all tokens."""

    def __init__(self, llama):
        self.llama, self.programs = llama, {}

    def clear(self) -> None:
        self.llama.reset()

    def decode_batch(self, batch, logits: str) -> list[np.ndarray]:
        (_, tokens), = batch
        first = self.llama.n_tokens
        self.llama.eval([int(token) for token in tokens])
        return [np.array(self.llama.scores[first:self.llama.n_tokens], np.float32)]


class PeerModel:
    """Makes contexts by the class `llama_cpp.Llama`, all layers on the GPU or none."""
    fitted, backends = None, MappingProxyType({})  # as of `Model`

    def __init__(self, Llama, path: str, device: str):
        self.Llama, self.path, self.device = Llama, path, device

    @contextmanager
    def new_context(self, *, n_ctx: int, n_seq_max: int, n_ubatch: int, **_):
        assert n_seq_max == 1
        n_threads = threads.get_num_threads()
        gpu = (dict(n_gpu_layers=0) if self.device == "cpu"
               else dict(n_gpu_layers=-1, main_gpu=int(self.device.partition(":")[2]), split_mode=0))
        llama = self.Llama(model_path=self.path, n_ctx=n_ctx, n_batch=n_ctx, n_ubatch=n_ubatch, n_threads=n_threads,
                           n_threads_batch=n_threads, logits_all=True,
                           flash_attn=True, verbose=False, **gpu)
        try:
            yield PeerContext(llama)
        finally:
            llama.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        pass


def n_digests(results: list[Result], axis: str) -> tuple[int, int]:
    """How many different digests the settings of an axis and the default one give, and how many settings these are. Settings on
    fewer tokens count as the default one where they have its digest for these."""
    default, mine = results[0], [result for result in results[1:] if result.setting.axis == axis and not result.setting.reason]
    digests = {default.digest if result.digest == result.expected else result.digest for result in (default, *mine)}
    return len(digests), len(mine) + 1


def count(load, windows: np.ndarray, devices: list[str]) -> dict[str, tuple[int, int]]:
    """Of each axis that is not empty here; "all" of them together."""
    with Verification(load, windows, settings_of(AXES, devices, windows.shape)) as verification:
        verification.run()
    results = verification.results
    counts = {axis: n_digests(results, axis) for axis in AXES}
    ran = [result for result in results if not result.setting.reason]
    total = len({results[0].digest if result.digest == result.expected else result.digest for result in ran}), len(ran)
    return {**{axis: found for axis, found in counts.items() if found[1] > 1}, "all": total}


def table(columns: dict[str, dict[str, tuple[int, int]]]) -> str:
    """Markdown: a row an axis, a column an engine."""
    axes = next(iter(columns.values()))
    rows = [["axis", "settings", *columns], ["---", "---:", *["---:"] * len(columns)],
            *([axis, str(n), *(str(found[axis][0]) for found in columns.values())] for axis, (_, n) in axes.items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(argv=None, Llama=None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-m", "--model", required=True)
    p.add_argument("-f", "--file", type=Path, default=TEXT)
    p.add_argument("-c", "--ctx-size", type=int, default=512)
    p.add_argument("--chunks", type=int, default=2)
    p.add_argument("--devices", help="with commas between; all that are present by default")
    options = p.parse_args(argv)
    peer = "llama-cpp-python"
    if Llama is None:
        try:
            from llama_cpp import Llama
        except ImportError:
            print(f"peers: {peer} is not installed; install ggml-bitwise[peers]", file=sys.stderr)
            return 2
        peer += f" {version(peer)}"
    try:
        devices = [device_of(name) for name in options.devices.split(",")] if options.devices else present_devices()
        with Model.load(options.model, device=devices[0]) as model:
            windows = with_bos(model,
                               first_windows(model.tokenizer.encode(read_text(options.file)), options.ctx_size, options.chunks))
            names = [model.backend.name]
    except UserError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2
    columns = {f"ggml-py {__version__}": count(lambda device: Model.load(options.model, device=device), windows, devices),
               peer: count(lambda device: PeerModel(Llama, options.model, device), windows, devices)}
    print(f"Different digests of the logits of {len(windows)} windows of {windows.shape[1]} tokens, {Path(options.model).name}, "
          f"on {', '.join(devices)} "
          f"({names[0]}; {platform.machine()}, {threads.MOST} threads):\n")
    print(table(columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
