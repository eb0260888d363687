"""Many texts, one by one and side by side: python bench/generate_many.py --models /dev/shm --out bench/results/NAME.json

Prompts of 128 to 384 random tokens, each continued to 512 positions with the likeliest tokens, so that texts end one after
another and others begin beside them. A row is a model and a number of texts side by side (`Model.generate_many`, n_seq_max); its
speed is of generated tokens, prompts and the first call's capturing of graphs included, kernels compiled before. Of the first
texts, which `Model.generate` continues one by one, the ids must be the same.
"""
import argparse
import sys
import time
from pathlib import Path

import checkout  # noqa: F401
import numpy as np

from ggml_py.engine.model import Model
from whole_models import record_rows

MODELS = ("llama-3-8b", "Q4_K"), ("qwen3-30b-a3b", "Q4_K")
N_POSITIONS, N_PROMPT = 512, (128, 385)


def timed(action) -> tuple[list, float]:
    start = time.perf_counter()
    found = action()
    return found, time.perf_counter() - start


def row(model: Model, name: str, n_texts: int, n_alone: int, n_together: int) -> dict:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, model.n_vocab, rng.integers(*N_PROMPT)).tolist() for _ in range(n_texts)]
    settings: dict = {"max_tokens": None, "n_ctx": N_POSITIONS}
    several = lambda chosen: model.generate_many(chosen, n_seq_max=n_together, **settings)
    one_by_one = lambda chosen: [model.generate(prompt, **settings) for prompt in chosen]
    several(prompts[:2 * n_together])
    one_by_one(prompts[:2])
    found, seconds = timed(lambda: several(prompts))
    alone, seconds_alone = timed(lambda: one_by_one(prompts[:n_alone]))
    if [each.ids for each in found[:n_alone]] != [each.ids for each in alone]:
        raise SystemExit(f"{name}: {n_together} side by side have other ids than one by one")
    n, m = (sum(len(each.ids) for each in texts) for texts in (found, alone))
    return {"model": name, "texts": n_texts, "side_by_side": n_together, "avg_ts": round(n / seconds, 1),
            "one_by_one_ts": round(m / seconds_alone, 1)}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", type=Path, required=True, help="a folder with room for 24 GB; /dev/shm keeps them in memory")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--only", help="models, such as llama-3-8b:Q4_K")
    p.add_argument("--device", default="cuda:0")
    p.add_argument("--side-by-side", default="8,64", help="numbers of texts")
    p.add_argument("--texts", type=int, default=256, help="of them all")
    p.add_argument("--alone", type=int, default=8, help="of these, so many are generated one by one too")
    options = p.parse_args()
    keys = {f"{shape}:{type_}": (shape, type_) for shape, type_ in MODELS}
    return record_rows(p, "generate_many.py", options, keys, options.side_by_side,
                       lambda model, name, n: row(model, name, options.texts, options.alone, n))


if __name__ == "__main__":
    sys.exit(main())
