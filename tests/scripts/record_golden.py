"""Records the digests of a GPU: python tests/scripts/record_golden.py --device cuda:0 -m smollm2.gguf -o tests/golden/NAME.json

It also runs the axes of the invariance table on the device and refuses to write when two settings differ, and counts what ran off
the GPU.
"""
import argparse
import json
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version

import numpy as np

import with_helpers  # noqa: F401  (for what is next)
import goldens
from ggml_py.backends.cuda import driver_release
from ggml_py.engine.model import Model


def axes(model, tokens) -> dict[str, str]:
    """One digest a setting; they must all be equal."""
    found = {f"n_ubatch {n}": goldens.logits_digest(model, tokens, n_ubatch=n) for n in (512, 1, 7, 32)}
    found["again"] = goldens.logits_digest(model, tokens)
    found["eager"] = goldens.logits_digest(model, tokens, n_ubatch=7, graphs=False)
    found["cells by address"] = goldens.logits_digest(model, tokens, n_ubatch=7, kv_write="cpy")
    with model.new_context(n_ctx=len(tokens)) as context:
        pieces = [context.decode(tokens[i:i + 100], logits="all") for i in range(0, len(tokens), 100)]
    found["pieces of 100"] = goldens.digest(np.concatenate(pieces))
    with model.new_context(n_ctx=4 * len(tokens), n_seq_max=4, n_ubatch=96) as context:
        order = [(2, tokens[:17]), (0, tokens), (3, tokens[::-1]), (1, tokens[:150])]
        found["one of four sequences"] = goldens.digest(context.decode_batch(order, logits="all")[1])
    return found


def numba_cuda() -> str:
    """Which implementation of numba.cuda is in effect: numba_cuda, not the built-in one."""
    try:
        from numba import cuda
        return cuda.__name__ if "numba_cuda" not in cuda.__file__ else "numba_cuda"
    except ImportError:
        return "none"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in "numpy", "numba", "llvmlite", "numba-cuda", "cuda-core", "cuda-bindings":
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--device", default="cuda:0")
    p.add_argument("-m", "--model", required=True)
    p.add_argument("-o", "--output", required=True)
    options = p.parse_args()
    with Model.load(options.model, device=options.device) as model:
        record = {"numerics": goldens.NUMERICS_VERSION, "device": model.backend.name, "driver": driver_release(),
                  "numba.cuda": numba_cuda(), "versions": versions(),
                  "date": time.strftime("%Y-%m-%d"),
                  "command": f"python tests/scripts/record_golden.py --device {options.device} -m smollm2"}
        record["digests"] = {**goldens.op_digests(model.backend), **goldens.smollm2_digests(model)}
        found = axes(model, goldens.demo_tokens(model, 300))
        with model.new_context(n_ctx=8) as context:
            record["off the device, nodes"], record["off the device, copies"] = context.program(8, 8).off_device()
    for setting, digest in found.items():
        print(f"{digest[:16]}  {setting}")
    if len(set(found.values())) != 1:
        print("settings differ: nothing written", file=sys.stderr)
        return 1
    record["axes"] = {"digest": digest, "settings": list(found)}
    with open(options.output, "w") as file:
        json.dump(record, file, indent=1)
        file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
