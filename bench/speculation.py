"""Generation with drafts against generation without: python bench/speculation.py --models /dev/shm --out bench/results/NAME.json

Drafts are forced: of each, as many tokens are right as a row of the table says, and the next is wrong. They come from a text that
was generated before, so they cost nothing ("known"), or a NextN block makes as many, which are put aside ("mtp"). Each row is
measured with drafts of a fixed length and with those of `Speculation`, which learns. The text must be the one without drafts.
"""
import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import checkout  # noqa: F401

from fixed_drafts import Fixed
from ggml_py.engine.generate import generate
from ggml_py.engine.model import Model
from ggml_py.engine.mtp import MTP
from ggml_py.engine.sampling import Sampling
from ggml_py.engine.speculation import Source, Speculation
from records import dump
from whole_models import begun_record, chosen, verdict, written

N_PROMPT, N_DRAFT = 32, 3


class Figure(NamedTuple):
    """What must and should be reached with this many right of N_DRAFT. share: over the speed without drafts, else t/s."""
    source: str
    n_right: int
    must: float
    goal: float
    share: bool = True


TABLE = {
    ("llama-3-8b", "Q4_K", 0): [Figure("known", 3, 1300, 1700, share=False), Figure("known", 0, 0.9, 0.97)],
    ("qwen3.6-35b-a3b", "Q4_K", 1): [Figure("mtp", n, *figures) for n, figures in
                                     enumerate([(0.8, 0.9), (1.2, 1.5), (1.6, 2.0), (2.0, 2.6)])],
}


class Forced:
    """Drafts whose first n_right tokens are those that come and the next is not, at the price of those of another source."""

    def __init__(self, text: list[int], n_right: int, n_vocab: int, source: Source | None = None):
        self.text, self.n_right, self.n_vocab, self.source = text, n_right, n_vocab, source
        self.name = "known" if source is None else source.name

    def begin(self, context) -> None:
        if self.source is not None:
            self.source.begin(context)

    def draft(self, tokens: list[int], n: int) -> list[int]:
        if self.source is not None:
            self.source.draft(tokens, n)
        found = self.text[len(tokens):len(tokens) + n]
        return [token if i != self.n_right else (token + 1) % self.n_vocab for i, token in enumerate(found)]

    def end(self) -> None:
        if self.source is not None:
            self.source.end()

    def close(self) -> None:
        pass


def timed(context, prompt: list[int], n: int, speculation: Speculation | None, clock: Callable = time.perf_counter):
    """Ids, and tokens a second from the first one on."""
    context.clear()
    tokens = generate(context, prompt, n + 1, Sampling(0.0), lambda token: False, speculation)
    ids = [next(tokens)]
    start = clock()
    ids += tokens
    return ids, n / (clock() - start)


def measure(model: Model, figures: list[Figure], n: int, n_repetitions: int) -> list[dict]:
    """A row for each figure and way of choosing lengths, behind one without drafts. RuntimeError where a text is another one."""
    prompt, rows = list(range(1, N_PROMPT + 1)), []
    n_ctx = N_PROMPT + n + 1 + N_DRAFT
    with model.new_context(n_ctx, n_rollback=N_DRAFT + 1) as context:
        ids, _ = timed(context, prompt, n, None)
        plain = statistics.median(timed(context, prompt, n, None)[1] for _ in range(n_repetitions))
        rows.append({"source": "none", "avg_ts": round(plain, 1)})
        mtp = MTP(model, n_ctx) if model.has_nextn else None
        for figure in figures:
            for kind in Fixed, Speculation:
                source = Forced(prompt + ids, figure.n_right, model.n_vocab, mtp if figure.source == "mtp" else None)
                speeds, drafted = [], None
                for i in range(n_repetitions + 1):  # the first one compiles and captures
                    drafted = kind(source, N_DRAFT)
                    found, speed = timed(context, prompt, n, drafted)
                    if found != ids:
                        raise RuntimeError(f"{figure.source}, {figure.n_right} right: another text than without drafts")
                    speeds += [speed] * (i > 0)
                speed = statistics.median(speeds)
                rows.append({"source": figure.source, "n_right": figure.n_right, "n_draft": N_DRAFT,
                             "lengths": "fixed" if kind is Fixed else "learned", "avg_ts": round(speed, 1),
                             "share": round(speed / plain, 3), "drafted": drafted.n_drafted, "accepted": drafted.n_accepted,
                             "steps": drafted.n_steps, "must": figure.must, "goal": figure.goal,
                             "verdict": verdict(speed / plain if figure.share else speed, figure)})
        if mtp is not None:
            mtp.close()
    return rows


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", type=Path, required=True, help="a folder with room for 26 GB; /dev/shm keeps them in memory")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--only", help="models, such as llama-3-8b")
    p.add_argument("--device", default="cuda:0")
    p.add_argument("-n", type=int, default=128, help="tokens of a text")
    p.add_argument("-r", type=int, default=5, help="repetitions")
    options = p.parse_args()
    names = chosen(p, options.only, [shape for shape, *_ in TABLE])
    record, device = begun_record(p, "speculation.py", options.device)
    rows = []
    for (shape, type_, n_nextn), figures in TABLE.items():
        if shape not in names:
            continue
        path = written(options.models, shape, type_, n_nextn)
        with Model.load(str(path), device, nextn=n_nextn > 0) as model:
            for row in measure(model, figures, options.n, options.r):
                rows.append({"model": f"{shape}:{type_}", **row})
                print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
        options.out.write_text(dump(record, "rows", rows))  # what was measured stays, should a later model fail
    return 0


if __name__ == "__main__":
    sys.exit(main())
