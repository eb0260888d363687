"""Perplexity and KL divergence of whole models: python bench/evaluation.py --models /dev/shm --out bench/results/NAME.json

A row is a model and a length of windows: tokens a second of `ggml-py perplexity` alone, of one that writes a base file, and of
one that compares the model with that file, each with the digest of all logits and with the root of the windows' digests
(`--root`). The text is random tokens; kernels are compiled and graphs captured before. The file has two bytes for each token id
and scored position: 4 GB for 32768 tokens in windows of 512 of a vocabulary of 128,256.
"""
import argparse
import io
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import checkout  # noqa: F401
import numpy as np

from ggml_py.engine.model import Model
from ggml_py.engine.settings import Settings
from ggml_py.measure import kl_divergence
from ggml_py.measure.perplexity import perplexity
from whole_models import record_rows

MODELS = ("llama-3-8b", "Q4_K"), ("smollm2-135m", "Q4_1")


def row(model: Model, name: str, n_ctx: int, n_tokens: int, folder: Path) -> dict:
    if model._tokenizer is None:  # files of `synth` have no vocabulary
        model._tokenizer = SimpleNamespace(add_bos=False)
    tokens, path = np.random.default_rng(0).integers(0, model.n_vocab, n_tokens).tolist(), folder / "evaluation.kld"
    n_before = 2 * max(n_ctx, 2048)  # tokens that do not count

    def base(windows: np.ndarray) -> AbstractContextManager:
        return kl_divergence.base_writer(path, model.n_vocab, windows)

    def scored(n: int, root: bool, base=None) -> None:
        perplexity(model, tokens[:n], Settings(n_ctx=n_ctx), io.StringIO(), io.StringIO(), base, root=root)

    def compared(n: int, root: bool) -> None:
        kl_divergence.compare(model, kl_divergence.BaseFile(path), Settings(n_ctx=n_ctx, n_chunks=n // n_ctx), io.StringIO(),
                              io.StringIO(), root=root)
    result = {"model": name, "n_ctx": n_ctx, "tokens": n_tokens // n_ctx * n_ctx}
    try:
        for key, run in (("perplexity", scored), ("base", lambda *args: scored(*args, base)), ("compared", compared)):
            run(n_before, True)
            for root in False, True:
                start = time.perf_counter()
                run(n_tokens, root)
                result[f"{key}{'_root' * root}_ts"] = round(result["tokens"] / (time.perf_counter() - start), 1)
    finally:
        path.unlink(missing_ok=True)
    return result


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", type=Path, required=True, help="a folder with room for 10 GB; /dev/shm keeps them in memory")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--only", help="models, such as llama-3-8b:Q4_K")
    p.add_argument("--device", default="cuda:0")
    p.add_argument("--windows", default="512", help="lengths of them")
    p.add_argument("--tokens", type=int, default=32768, help="of the text")
    options = p.parse_args()
    keys = {f"{shape}:{type_}": (shape, type_) for shape, type_ in MODELS}
    return record_rows(p, "evaluation.py", options, keys, options.windows,
                       lambda model, name, n: row(model, name, n, options.tokens, options.models))


if __name__ == "__main__":
    sys.exit(main())
