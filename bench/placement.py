"""Speeds of models that lie on a GPU and the CPU: python bench/placement.py --models /dev/shm --out bench/results/NAME.json

A prompt of 512 tokens, one of 2048, and generation, for each placement of the table; beside them what the CPU's cores read at
most (`read_GB_s`). The last logits of each placement must be those of the model that is on the GPU as a whole.
"""
import argparse
import sys
import time
from pathlib import Path
from typing import NamedTuple

import checkout  # noqa: F401
import numpy as np

from ggml_py.base.placement import ExpertsOnHost, PlacementOptions
from ggml_py.engine.context import Context
from ggml_py.engine.model import Model
from ggml_py.kernels import threads
from ggml_py.kernels.compile import jit
from records import dump
from whole_models import begun_record, chosen, median_seconds, verdict, written

N_PROMPTS, N_CTX, N_UBATCH = (512, 2048), 4096, 2048


class Row(NamedTuple):
    """options: of `PlacementOptions`. must and goal: tokens a second, of the prompts, then generation."""
    name: str
    options: dict
    must: tuple[float, ...] = (0, 0, 0)
    goal: tuple[float, ...] = (0, 0, 0)


class Speed(NamedTuple):
    must: float
    goal: float


TABLE = {
    ("llama-3-8b", "Q4_K"): [
        Row("all", {}),
        Row("-ngl 16", {"n_gpu_layers": 16}, (3000, 6500, 35), (6000, 10000, 60)),
        Row("-ngl 0", {"n_gpu_layers": 0}, (1700, 4500, 20), (4000, 9000, 30))],
    ("qwen3-30b-a3b", "Q4_K"): [
        Row("all", {}),
        Row("-cmoe", {"overrides": (ExpertsOnHost(),)}, (900, 3000, 45), (1500, 6000, 80)),
        Row("-cmoe --hot-experts 2048", {"overrides": (ExpertsOnHost(),), "hot_experts": 2 << 30}, (900, 3000, 55),
            (1500, 6000, 100)),
        Row("-cmoe --hot-experts 4096", {"overrides": (ExpertsOnHost(),), "hot_experts": 4 << 30}, (900, 3000, 65),
            (1500, 6000, 130)),
        Row("-ncmoe 24", {"overrides": (ExpertsOnHost(24),)}, (1600, 5000, 75), (3000, 9000, 150))],
}


@threads.device
def sum_part(u, args):
    words, sums, n = args
    part, total = words[u * n:(u + 1) * n], np.uint64(0)
    for i in range(n):
        total += part[i]
    sums[u] = total


each_part = threads.sharing(sum_part)


@jit(parallel=True)
def sum_words(control, words, sums):
    each_part(control, sums.size, (words, sums, words.size // sums.size))


def read_GB_s(n_bytes: int = 1 << 30) -> float:
    """1e9 bytes a second that all threads together read of memory, at best."""
    words, sums, seconds = np.ones(n_bytes // 8, np.uint64), np.zeros(256, np.uint64), []
    for _ in range(12):
        start = time.perf_counter()
        sum_words(words, sums)
        seconds.append(time.perf_counter() - start)
    return n_bytes / min(seconds) / 1e9


def speeds(context: Context, prompts: list[np.ndarray], n: int, n_repetitions: int) -> list[float]:
    """Tokens a second of each prompt, and of n generated ones behind 16."""
    def prompt(tokens):
        context.clear()
        context.decode(tokens, logits="argmax")

    found = [len(tokens) / median_seconds(lambda tokens=tokens: prompt(tokens), n_repetitions, 2) for tokens in prompts]
    prompt(prompts[0][:16])
    return [*found, n / median_seconds(lambda: list(context.greedy(1, n)), n_repetitions, 2)]


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", type=Path, required=True, help="a folder with room for 23 GB; /dev/shm keeps them in memory")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--only", help="models, such as llama-3-8b")
    p.add_argument("--rows", help="placements, such as --rows=all,-cmoe; the first one's logits are those of the others")
    p.add_argument("--device", default="cuda:0")
    p.add_argument("-n", type=int, default=48, help="tokens that are generated")
    p.add_argument("-r", type=int, default=5, help="repetitions")
    options = p.parse_args()
    names = chosen(p, options.only, [shape for shape, _ in TABLE])
    record, device = begun_record(p, "placement.py", options.device)
    record["threads"], record["read_GB_s"] = threads.get_num_threads(), round(read_GB_s(), 1)
    rows: list[dict] = []
    rng = np.random.default_rng(0)
    for (shape, type_), placements in TABLE.items():
        if shape not in names:
            continue
        path, expected = written(options.models, shape, type_), None
        prompts = [rng.integers(0, 300, n).astype(np.int32) for n in N_PROMPTS]
        for row in placements:
            if options.rows and row.name not in options.rows.split(","):
                continue
            with Model.load(str(path), placement=PlacementOptions((device,), **row.options)) as model:
                with model.new_context(N_CTX, n_ubatch=N_UBATCH) as context:
                    found = speeds(context, prompts, options.n, options.r)
                    context.clear()
                    logits = np.concatenate([context.decode(prompts[0]), context.decode([1])])
                expected = logits if expected is None else expected
                if not np.array_equal(logits.view(np.uint32), expected.view(np.uint32)):
                    raise RuntimeError(f"{shape}, {row.name}: other logits than all on {device}")
                rows.append({"model": f"{shape}:{type_}", "placement": row.name, "weights": model.weight_bytes(),
                             **{name: round(speed, 1) for name, speed in zip(("pp512", "pp2048", "tg"), found)},
                             "must": row.must, "goal": row.goal,
                             "verdicts": [verdict(speed, Speed(*each)) for speed, *each in zip(found, row.must, row.goal)]})
                print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
            options.out.write_text(dump(record, "rows", rows))  # what was measured stays, should a later one fail
    return 0


if __name__ == "__main__":
    sys.exit(main())
