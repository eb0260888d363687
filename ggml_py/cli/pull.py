"""ggml-py pull: a model by its name."""
import sys


def options(p) -> None:
    p.add_argument("model", metavar="NAME", help="smollm2")


def run(options, load_model) -> None:
    from ..files.pull import pull
    print(pull(options.model, sys.stderr))
