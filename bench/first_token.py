"""A fresh process up to a model's first token, then every other kernel that the model needs: python bench/first_token.py MODEL
DEVICE STARTED

STARTED: `clock()` when the process was started. Prints JSON: seconds from there to the first token; of them, those until all was
imported, for opening the device, and for reading the file and putting its weights on the device; the number of Python's sources
without byte code on disk and the seconds that compiling them took; the number of kernels compiled until the end and the seconds
that took.
"""
import json
import sys
import time
from importlib.machinery import SourceFileLoader

without_byte_code: list[float] = []  # seconds of each source that was compiled


def _count_sources(to_code=SourceFileLoader.source_to_code):
    def timed(*args, **given):
        before = time.perf_counter()
        try:
            return to_code(*args, **given)
        finally:
            without_byte_code.append(time.perf_counter() - before)
    SourceFileLoader.source_to_code = timed


_count_sources()

import checkout  # noqa: F401, E402  counted

PROMPT = "Why is the sky blue?"
N_UBATCH = 512


def clock() -> float:
    """Seconds on a clock that all processes share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def first_token(path: str, device: str, started: float) -> dict[str, float]:
    from ggml_py.base.collection import put_off, settle
    put_off()  # as ggml-py does
    from ggml_py.backends import open_backend
    from ggml_py.files.gguf import GGUFFile
    from ggml_py.kernels.disk_cache import compiled
    from ggml_py.engine.model import Model
    imported = clock()
    backend = open_backend(device, expect=True)
    before = clock()
    with Model(GGUFFile.open(path), backend) as model:
        settle()
        load = clock() - before
        prompt = list(range(6)) if model.tokenizer.model == "no_vocab" else model.tokenizer.encode(PROMPT)
        with model.new_context(min(model.n_ctx_train, len(prompt) + 1 + N_UBATCH), n_ubatch=N_UBATCH) as context:
            token = context.decode(prompt)[0].argmax()
            first = clock() - started
            context.decode([token])
            context.decode([token] * (context.n_ctx - len(prompt) - 1))  # long prompts have kernels of their own
    return {"first_token_seconds": round(first, 3), "import_seconds": round(imported - started, 3),
            "device_seconds": round(before - imported, 3), "load_seconds": round(load, 3),
            "n_sources": len(without_byte_code), "source_seconds": round(sum(without_byte_code), 3),
            "n_kernels": compiled.n_kernels, "compile_seconds": round(compiled.seconds, 3)}


if __name__ == "__main__":
    print(json.dumps(first_token(sys.argv[1], sys.argv[2], float(sys.argv[3]))))
