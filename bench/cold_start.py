"""Times the start of fresh processes and writes a record: python bench/cold_start.py --device cpu -m smollm2 --out
bench/results/NAME.json

The first process finds an empty cache of compiled kernels, the others find what it left. What each of them does:
bench/first_token.py. Python's byte code is another matter: pip leaves it on disk. The record says how many sources each process
had to compile; `python -m compileall` before leaves none.
"""
import argparse
import os
import sys
import tempfile
from pathlib import Path

import checkout
from first_token import clock
from records import conditions, dump, json_of

WARM_RUNS = 5


def run(path: Path, device: str, cache: str) -> dict[str, float]:
    """What one fresh process says whose cache folders, ours and the GPU driver's, lie in `cache`.
    RuntimeError with its messages if it fails."""
    env = os.environ | {"XDG_CACHE_HOME": cache, "CUDA_CACHE_PATH": f"{cache}/driver"}
    command = [sys.executable, str(checkout.ROOT / "bench" / "first_token.py"), str(path), device]
    return json_of([*command, str(clock())], env=env)


def measure(path: Path, device: str, n_warm: int) -> list[dict]:
    """One run from an empty cache, then n_warm from what it left."""
    path.read_bytes()  # into the page cache: the speed of the disk is another matter
    with tempfile.TemporaryDirectory() as cache:
        return [{"cache": state, **run(path, device, cache)} for state in ["empty"] + ["warm"] * n_warm]


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", required=True, help="cpu or cuda:N")
    p.add_argument("-m", "--model", required=True, help="a GGUF file, or smollm2")
    p.add_argument("--out", type=Path, required=True)
    options = p.parse_args()
    from ggml_py.backends import open_backend
    from ggml_py.base.errors import UserError
    from ggml_py.files.pull import resolve
    try:
        path, backend = resolve(options.model, sys.stderr).resolve(strict=True), open_backend(options.device)
    except (UserError, OSError) as error:
        p.error(str(error))
    command = f"bench/cold_start.py --device {options.device} -m {options.model} --out {options.out}"
    record = {"command": command, **conditions(backend), "cores": len(os.sched_getaffinity(0)), "model": path.name}
    backend.close()
    text = dump(record, "runs", measure(path, options.device, WARM_RUNS))
    options.out.write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
