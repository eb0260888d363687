"""KL divergence of SmolLM2-135M by type, for docs/formats.md: python bench/type_kl.py [--types Q4_K,IQ4_XS] [--chunks 2]

The source is SmolLM2 as F32, dequantized from its Q4_1. For each type that has an encoder, every matrix that llama-quantize would
quantize and whose columns are whole blocks becomes that type, without an importance matrix; all else stays F32. Results are added
to bench/results/formats/kl.json.
"""
import argparse
import json
import sys
import tempfile
from functools import reduce
from operator import add
from pathlib import Path

import checkout  # noqa: F401
import numpy as np

import ggml_py
from ggml_py.base.defaults import TEXT
from ggml_py.conversion.convert import convert
from ggml_py.conversion.mixes import is_kept
from ggml_py.conversion.plan import Asked, Change, keys_of, plan
from ggml_py.engine.model import Model
from ggml_py.engine.settings import Settings
from ggml_py.engine.windows import decode_windows, read_text, split_windows
from ggml_py.files.gguf import GGUFFile
from ggml_py.files.pull import resolve
from ggml_py.kernels.threads import get_num_threads
from ggml_py.measure.kl_divergence import Statistics, compare_window, encode
from ggml_py.quant.encode import ENCODERS
from ggml_py.quant.formats import FORMATS

RECORD = Path(__file__).resolve().parent / "results" / "formats" / "kl.json"


def changed(file: GGUFFile, type_: str) -> list[Change]:
    arch = file.get("general.architecture", "str")

    def is_changed(tensor) -> bool:
        return not is_kept(arch, tensor.name, tensor.shape) and tensor.shape[0] % FORMATS[type_].block_size == 0
    return [Change(tensor, type_ if is_changed(tensor) else "F32", type_) for tensor in file.tensors.values()]


def logits(path: Path, windows: np.ndarray, settings: Settings):
    with Model.load(path, "cpu") as model:
        yield from decode_windows(model, windows, settings, sys.stderr)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--types", default=",".join(name for name in ENCODERS if FORMATS[name].is_quantized))
    p.add_argument("--chunks", type=int, default=2, help="windows of 512 tokens")
    options = p.parse_args()
    settings = Settings(n_ctx=512, n_batch=512, n_chunks=options.chunks)
    with tempfile.TemporaryDirectory() as folder, GGUFFile.open(resolve("smollm2", sys.stderr)) as original:
        source, path, asked = Path(folder) / "f32.gguf", Path(folder) / "type.gguf", Asked("F32", allow_requantize=True)
        convert(original, plan(original, asked), keys_of(original, asked), source)
        with Model.load(source, "cpu") as model:
            windows = split_windows(model.tokenizer.encode(read_text(TEXT)), settings)
        base = [encode(rows) for rows in logits(source, windows, settings)]
        for type_ in options.types.split(","):
            with GGUFFile.open(source) as file:
                changes = changed(file, type_)
                convert(file, changes, keys_of(file, asked), path, n_threads=get_num_threads())
            compared = [compare_window(rows, records, window[settings.n_ctx // 2 + 1:])
                        for rows, records, window in zip(logits(path, windows, settings), base, windows)]
            kld, n = Statistics(reduce(add, compared)).kld, sum(not change.is_copy for change in changes)
            record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
            n_tokens = sum(len(each.kld) for each in compared)
            record |= {"command": "bench/type_kl.py", "version": ggml_py.__version__, "n_tokens": n_tokens}
            record.setdefault("types", {})[type_] = {"kl": round(kld.value, 6), "error": round(kld.error, 6), "n_tensors": n}
            RECORD.write_text(json.dumps(record, indent=1) + "\n")
            print(f"{type_}: {kld:.6f}, {n} tensors", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
