"""Models of every type, two layers of a real size, on a GPU and on the CPU: python tests/scripts/compare_devices.py -n 15

The small models of the tests have small matrices, for which kernels choose other blocks than for large ones. Here a model of
each type takes texts of lengths that go by different kernels (single tokens, few, teams, clusters, prompts), and the logits must
be the same on both devices, bit for bit. Prints a line a model, and fails if one differs. A minute or two a model, most of it
compiling.
"""
import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

import with_helpers  # noqa: F401  (for what is next)
import places

sys.path.insert(0, str(places.ROOT / "bench"))
import synth
from ggml_py.engine.model import Model
from ggml_py.kernels import threads
from ggml_py.testing import digest

LENGTHS = 1, 3, 8, 16, 24, 40, 64, 100, 200
N_VOCAB = 2048
WITH_EXPERTS = "Q4_1", "Q4_K", "Q6_K", "Q8_0", "IQ4_XS", "MXFP4"


def digests(path: Path, device: str) -> Iterator[str]:
    rng = np.random.default_rng(0)
    with Model.load(path, device=device) as model, model.new_context(n_ctx=max(LENGTHS)) as context:
        for n in LENGTHS:
            context.clear()
            yield digest(context.decode(rng.integers(0, N_VOCAB, n).astype(np.int32), logits="all"))


def compare(task: tuple[str, str, str, list[str]]) -> tuple[str, list[int]]:
    """Name of a model, and the lengths whose logits differ."""
    shape, type_, folder, devices = task
    path = synth.write(Path(folder) / f"{shape}-{type_}.gguf", replace(synth.SHAPES[shape], n_layer=2, n_vocab=N_VOCAB), type_)
    with threads.using(1):
        found = [*zip(LENGTHS, *[digests(path, device) for device in devices])]
    path.unlink()
    return f"{shape} {type_}", [n for n, *each in found if len({*each}) > 1]


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("types", nargs="*", choices=[*synth.TYPES, []],  # none are checked as one choice
                   metavar="TYPE", help="all, and some with experts, by default")
    p.add_argument("-n", type=int, default=1, help="processes")
    p.add_argument("--shape", choices=synth.SHAPES, default="llama-3-8b", help="of bench/synth.py")
    p.add_argument("--devices", nargs="+", default=["cuda:0", "cpu"])
    p.add_argument("--folder", help="of the files, such as /dev/shm")
    options = p.parse_args()
    models = [(options.shape, type_) for type_ in options.types or synth.TYPES]
    if not options.types:
        models += [("qwen3-30b-a3b", type_) for type_ in WITH_EXPERTS]
    all_differ = []
    with (tempfile.TemporaryDirectory(dir=options.folder) as folder,
          multiprocessing.get_context("spawn").Pool(options.n, maxtasksperchild=1) as pool):
        for name, differ in pool.imap_unordered(compare, [(*model, folder, options.devices) for model in models]):
            print(f"{name}: {f'texts of {differ} differ' if differ else 'equal'}", flush=True)
            all_differ += [name] if differ else []
    return 1 if all_differ else 0


if __name__ == "__main__":
    sys.exit(main())
