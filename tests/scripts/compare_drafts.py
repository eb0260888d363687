"""Texts of SmolLM2 with drafts and without: the same ids and the same logits of the tokens that are chosen, or exit code 1.

    python tests/scripts/compare_drafts.py [--prompts 200] [-n 16] [--device cpu] [--draft-type Q4_0] [--json FILE]

Prompts are pieces of the demo's text, each continued greedily and by three seeds, first without drafts, then with n-grams, with a
draft model, which is SmolLM2 in another type, and with drafts that are wrong from a given index on, each index in turn. Prints a
line for each: texts, how many differ, drafts, and those that were accepted.
"""
import argparse
import json
import platform
import sys
import tempfile
import time
from hashlib import sha256
from importlib import resources
from pathlib import Path

import gguf
import numpy as np

import with_helpers  # noqa: F401  (for what is next)
from ggml_py.engine.generate import generate
from ggml_py.engine.model import Model
from ggml_py.engine.sampling import Sampling
from ggml_py.engine.speculation import DraftModel, NGrams, Source, Speculation
from ggml_py.files.pull import pull
from ggml_py.quant.dequantize import dequantize
from ggml_py.quant.quantize import quantize
from ggml_py.testing import one_nan

SAMPLINGS = [Sampling(0.0), *(Sampling(0.8, seed=seed) for seed in (1, 2, 3))]


def in_type(path: Path, out: Path, type_: str) -> Path:
    """The model with its matrices, but for the embedding, in another type."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        shape = tuple(reversed(tensor.shape.tolist()))
        if len(shape) > 1 and "blk." in tensor.name:
            x = dequantize(tensor.data.reshape(-1).view(np.uint8), tensor.tensor_type.name, shape, tensor.name)
            writer.add_tensor(tensor.name, quantize(x, type_).reshape(shape[0], -1), raw_dtype=gguf.GGMLQuantizationType[type_])
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


class WrongFrom:
    """What is known to come, but for the draft's index `at`, which goes one further with each draft."""
    name = "drafts that are wrong at each index in turn"

    def __init__(self, n_vocab: int):
        self.n_vocab, self.at = n_vocab, 0

    def begin(self, context) -> None:
        pass

    def end(self) -> None:
        pass

    def draft(self, tokens: list[int], n: int) -> list[int]:
        found = self.text[len(tokens):len(tokens) + n]
        i, self.at = self.at % n, self.at + 1
        return [token if j != i else (token + 1) % self.n_vocab for j, token in enumerate(found)]

    def close(self) -> None:
        pass


def continued(context, prompt: list[int], n: int, sampling: Sampling, speculation) -> tuple[list[int], str]:
    """The new ids, and a digest of the logits that they were chosen from."""
    digest = sha256()
    context.clear()
    ids = list(generate(context, prompt, n, sampling, lambda token: False, speculation,
                        see=lambda row: digest.update(one_nan(row).tobytes())))
    return ids, digest.hexdigest()


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--prompts", type=int, default=200)
    p.add_argument("-n", type=int, default=16, help="new tokens of a text")
    p.add_argument("--device", default="cpu")
    p.add_argument("--draft-type", default="Q4_0")
    p.add_argument("--draft-max", type=int, default=4)
    p.add_argument("--json", type=Path)
    options = p.parse_args()
    path, rng = pull("smollm2", sys.stderr), np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder, Model.load(path, options.device) as model, Model.load(
            in_type(path, Path(folder) / "draft.gguf", options.draft_type), options.device) as other:
        text = model.tokenizer.encode((resources.files("ggml_py") / "demo" / "prose.txt").read_text())
        lengths = rng.integers(8, 48, options.prompts)
        prompts = [text[at:at + n] for at, n in zip(rng.integers(0, len(text) - 48, options.prompts), lengths)]
        wrong = WrongFrom(model.n_vocab)
        sources: list[Source] = [NGrams(), DraftModel(other, model, 48 + options.n, draft_max=options.draft_max), wrong]
        speculations = [Speculation(source, options.draft_max) for source in sources]
        n_different, seconds = dict.fromkeys(sources, 0), dict.fromkeys([None, *sources], 0.0)
        with model.new_context(48 + options.n, n_rollback=options.draft_max + 1) as context:
            for i, prompt in enumerate(prompts):
                for sampling in SAMPLINGS:
                    expected = None
                    for speculation in [None, *speculations]:
                        began = time.perf_counter()
                        found = continued(context, prompt, options.n, sampling, speculation)
                        seconds[speculation and speculation.source] += time.perf_counter() - began
                        if expected is None:
                            expected, wrong.text = found, prompt + found[0]
                        elif found != expected:
                            n_different[speculation.source] += 1
                print(f"\r{i + 1} of {len(prompts)} prompts", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        n_texts, rows = len(prompts) * len(SAMPLINGS), []
        for speculation in speculations:
            n_rejected = speculation.n_drafted - speculation.n_accepted
            rows.append({"source": speculation.source.name, "texts": n_texts, "tokens": n_texts * options.n,
                         "different": n_different[speculation.source], "drafted": speculation.n_drafted,
                         "accepted": speculation.n_accepted, "rejected": n_rejected,
                         "seconds": round(seconds[speculation.source], 1), "seconds_without": round(seconds[None], 1)})
            print(", ".join(f"{name} {value}" for name, value in rows[-1].items()))
            speculation.source.close()
        if options.json:
            about = {"device": model.backend.name, "python": platform.python_version(), "draft_type": options.draft_type,
                     "command": " ".join(["python", "tests/scripts/compare_drafts.py", *sys.argv[1:]])}
            options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return int(any(row["different"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
