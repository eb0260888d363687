"""Generation of many sequences together: python bench/sequences.py --models /dev/shm --out bench/results/NAME.json

Each sequence has a prompt, and all go on token by token in one micro-batch, each with the likeliest token of its last step. A row
is a model and a number of sequences: tokens a second of all together, the median over the steps.
"""
import argparse
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import checkout  # noqa: F401
import numpy as np

from ggml_py.engine.model import Model
from whole_models import record_rows

N_SEQUENCES = 4, 16, 64
# (shape, type) -> t/s of llama.cpp on one H200, by the number of sequences
LLAMA_CPP = {("llama-3-8b", "Q4_K"): {16: 2022, 32: 3107, 64: 4257}, ("qwen3-30b-a3b", "Q4_K"): {4: 627, 16: 899, 64: 1683},
             ("qwen3.6-35b-a3b", "Q4_K"): {4: 564, 16: 1093, 64: 2175}}


def steps_together(model: Model, n: int, n_behind: int, n_steps: int) -> list[float]:
    """Seconds of each step. The first ones, which compile and capture, are left out."""
    n_warm_up, rng = 3, np.random.default_rng(0)
    with model.new_context(n * (n_behind + 1 + n_warm_up + n_steps), n_seq_max=n) as context:
        prompts = rng.integers(0, model.n_vocab, (n, n_behind))
        tokens = [rows[-1] for rows in context.decode_batch(enumerate(prompts), "argmax")]
        times = [time.perf_counter() for _ in context.greedy_batch(enumerate(tokens), 1 + n_warm_up + n_steps)]
    return [after - before for before, after in pairwise(times[n_warm_up:])]


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", type=Path, required=True, help="a folder with room for 43 GB; /dev/shm keeps them in memory")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--only", help="models, such as llama-3-8b:Q4_K")
    p.add_argument("--device", default="cuda:0")
    p.add_argument("--sequences", default=",".join(map(str, N_SEQUENCES)), help="numbers of them")
    p.add_argument("--behind", type=int, default=512, help="tokens of each prompt")
    p.add_argument("--steps", type=int, default=32)
    options = p.parse_args()
    keys = {f"{shape}:{type_}": (shape, type_) for shape, type_ in LLAMA_CPP}

    def row(model: Model, name: str, n: int) -> dict:
        seconds = statistics.median(steps_together(model, n, options.behind, options.steps))
        return {"model": name, "sequences": n, "behind": options.behind, "avg_ts": round(n / seconds, 1),
                "llama_cpp": LLAMA_CPP[keys[name]].get(n)}
    return record_rows(p, "sequences.py", options, keys, options.sequences, row)


if __name__ == "__main__":
    sys.exit(main())
