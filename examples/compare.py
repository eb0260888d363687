"""What do quantizations lose? The KL divergence of models to one that they were made of, on a text, and a plot of it.

    ggml-py quantize f16.gguf q4.gguf Q4_K_M
    ggml-py quantize f16.gguf q2.gguf Q2_K
    python examples/compare.py f16.gguf q4.gguf q2.gguf --text text.txt --plot kl.svg

The plot needs matplotlib.
"""
import argparse
from pathlib import Path

import numpy as np

from ggml_py import Model
from ggml_py.base.defaults import TEXT
from ggml_py.engine.settings import Settings
from ggml_py.engine.windows import read_text
from ggml_py.measure.kl_divergence import Statistics, compare_models


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("-c", "--n-ctx", type=int, default=512, help="tokens of a window")
    parser.add_argument("--chunks", type=int, default=4, help="windows at most")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where the plot goes: .svg, .png or .pdf")
    asked = parser.parse_args(argv)
    settings, found = Settings(n_ctx=asked.n_ctx, n_chunks=asked.chunks), {}
    with Model.load(asked.base, device=asked.device) as base:
        tokens = base.tokenizer.encode(read_text(asked.text))
        for path in asked.models:
            with Model.load(path, device=asked.device) as model:
                of = found[path.name] = compare_models(model, base, tokens, settings)
            print(f"{path.name}: mean KL divergence {of.kld:.6f}, perplexity {of.ppl:.4f} (of {asked.base.name} "
                  f"{of.ppl_base:.4f}), same top token {of.same_top.times(100):.2f} %")
    if asked.plot:
        plot(found, asked.base.name, asked.plot)


def plot(found: dict[str, Statistics], base: str, path: Path) -> None:
    """Which share of the tokens has at least a KL divergence."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, statistics in found.items():
        kld = np.sort(np.maximum(statistics.comparison.kld, 1e-12))[::-1]
        axes.loglog(kld, np.arange(1, len(kld) + 1) / len(kld), label=f"{name} (mean {statistics.kld.value:.2g})")
    axes.set(xlabel=f"KL divergence to {base}, nats", ylabel="share of tokens with as much or more")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
