"""Every case of every CUDA kernel for every compute capability, by the rules of `cuda_code`:

    python tests/scripts/compile_kernels.py [-n PROCESSES] [NAME of kernels ...]

Prints a line for each that breaks a rule and exits with 1 if there is one. Takes forty minutes of one core, less where the disk
cache has some.
"""
import argparse
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path

import with_helpers  # noqa: F401  (for what is next)
from cuda_code import COMPUTE_CAPABILITIES, KERNELS, PER_PROCESS, check_kernel, ptxas


def wrong(case) -> str | None:
    name, cc = case
    with tempfile.TemporaryDirectory() as folder:
        try:
            check_kernel(name, cc, Path(folder))
        except Exception as error:
            return f"{name} for {cc[0]}.{cc[1]}: {type(error).__name__}: {error}"


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="*", metavar="NAME", help="what kernels' names begin with; all by default")
    p.add_argument("-n", type=int, default=2, metavar="PROCESSES")
    options = p.parse_args()
    if ptxas() is None:
        p.error("no ptxas: it is in the CUDA toolkit, and in the Python package nvidia-cuda-nvcc")
    names = [name for name in KERNELS if name.startswith(tuple(options.names) or "")]
    arch = {name: make(*args).arch for name, (make, args) in KERNELS.items()}
    cases = [(name, cc) for name in names for cc in COMPUTE_CAPABILITIES if arch[name] is None or arch[name][:2] == cc]
    n_wrong = 0
    with get_context("spawn").Pool(options.n, maxtasksperchild=PER_PROCESS) as pool:
        for message in pool.imap_unordered(wrong, cases):
            if message:
                n_wrong += 1
                print(message, flush=True)
    print(f"{len(cases)} kernels compiled, {n_wrong} wrong")
    return int(n_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
