"""Make a perplexity that others can confirm, or confirm one that was made on another machine.

    python examples/verify.py -m smollm2 --text text.txt ppl.json              # on one machine
    python examples/verify.py -m smollm2 --text text.txt ppl.json --confirm    # on another
"""
import argparse
import json
from pathlib import Path

from ggml_py import Model
from ggml_py.base.defaults import TEXT
from ggml_py.check.attestation import NotConfirmed, confirm, read_attestation, sampled
from ggml_py.engine.settings import Settings
from ggml_py.engine.windows import read_text
from ggml_py.files.pull import file_sha256
from ggml_py.measure.perplexity import attest_perplexity


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attestation", type=Path)
    parser.add_argument("-m", "--model", default="smollm2", help="a GGUF file, or a name (ggml-py pull)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("-c", "--n-ctx", type=int, default=512, help="tokens of a window")
    parser.add_argument("--chunks", type=int, default=2, help="windows at most")
    parser.add_argument("--confirm", action="store_true", help="compute again what the attestation says")
    parser.add_argument("--sample", type=int, metavar="K", help="of it only so many windows, drawn at random")
    asked = parser.parse_args(argv)
    text = read_text(asked.text)
    with Model.load(asked.model, device=asked.device) as model:
        if not asked.confirm:
            settings = Settings(n_ctx=asked.n_ctx, n_chunks=asked.chunks)
            document = attest_perplexity(model, file_sha256(asked.text), model.tokenizer.encode(text), settings)
            asked.attestation.write_text(json.dumps(document, indent=1) + "\n")
            print(f"perplexity {document['result']['ppl']}, root {document['merkle_root']}")
            return 0
        document = read_attestation(asked.attestation)
        try:
            print(confirm(document, model, text, sampled(document, asked.sample)))
        except NotConfirmed as difference:
            print(difference)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
