"""Leaves out each barrier of the CUDA kernels in turn, in the simulator, and expects a test to fail:

    python tests/scripts/barriers.py [-n PROCESSES] [NAME of a kernels' file ...]

Barriers are what one line calls: syncthreads, syncwarp, also within `leave`, `apart`, `cluster.meet`, the waits for copies and
for a phase of `mbarrier` (not those for the kernel before, which do nothing in the simulator, nor for `wgmma`, some of which only
free registers). Prints a line each; exits with 1 if one is not missed, or a syncthreads, syncwarp or `apart` not reached, and
ALLOWED does not say why. Takes half an hour of one core. (pytest has this file as a plugin.)
"""
import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import with_helpers  # noqa: F401  (for what is next)
from cuda_simulator import simulated
from places import ROOT

TESTS = sorted((ROOT / "tests" / "kernels" / "cuda").glob("test_simulated_*.py"))
# of the tests' process: a barrier; where it writes down all that it came to
LEFT_OUT, SEEN = "GGML_PY_BARRIER_LEFT_OUT", "GGML_PY_BARRIERS_SEEN"
KERNELS = ROOT / "kernels" / "cuda"
BARRIERS = r"\b(syncthreads|syncwarp|apart)\(\)|\bleave\((lane|tid)\b"
COMPILER = "holds back the compiler, not the lanes"
TOGETHER = "in the simulator, lanes of a warp go on before other warps do"
ALLOWED = {  # a file and the text of its line: why the barrier need not be missed
    ("add_rms_norm_mul_mat.py", "syncwarp()  # all lanes have loaded the chunk"):
        "`redux_max` waits for all lanes, and for what they loaded; racecheck does not know",
    ("dispatch.py", "syncwarp()"): "`match` waits for all lanes as well; it orders memory",
    ("flash_attn_ext_few_stages.py",
     "syncwarp()  # the work on one slab after that on the other, or it takes all registers"): COMPILER,
    ("flash_attn_ext_group.py", "mbarrier.leave(lane, s, v_done + turn * mbarrier.WORDS)"): TOGETHER,
    ("flash_attn_ext_group.py", "mbarrier.leave(tid & 31, s, k_done + turn * mbarrier.WORDS)"): TOGETHER,
    ("flash_attn_ext_tile_rows.py", "apart()"): COMPILER,
    ("half_product.py", "leave(lane, shared, i32(barriers.done + (piece - 1) * mbarrier.WORDS))"): TOGETHER,
    ("half_product.py", "leave(lane, shared, i32(barriers.done + last * mbarrier.WORDS))"): TOGETHER,
    ("half_product.py", "leave(lane, shared, i32(barriers.done + piece * mbarrier.WORDS))"): TOGETHER,
    ("half_scaled.py", "leave(lane, shared, i32(barriers.done + piece * mbarrier.WORDS))"): TOGETHER,
    ("split_product.py", "leave(lane, shared, i32(barriers.done + (strip - 1) * mbarrier.WORDS))"): TOGETHER,
    ("split_product.py", "leave(lane, shared, i32(barriers.done + (n_pieces - 1) * mbarrier.WORDS))"): TOGETHER,
    ("mmq_half.py", "mbarrier.leave(lane, shared, i32(rest_done + turns.rest * mbarrier.WORDS))"): TOGETHER,
    ("tile_product.py", "apart()"): COMPILER,
    ("token_product.py", "apart()"): COMPILER,
    ("token_product.py",
     "syncwarp()  # what is loaded for the other half is loaded behind it: registers"): COMPILER,
}


def pytest_configure(config):
    """Puts a function that can leave itself out around each barrier, before kernels' modules take it."""
    from numba import cuda

    from ggml_py.kernels.cuda import cluster, mbarrier, ptx
    left_out, seen = os.environ.get(LEFT_OUT), set()
    own = {module.__file__ for module in (cluster, mbarrier, ptx)} | {__file__}

    def watched(barrier):
        def call(*args):
            frame = sys._getframe(1)
            while frame.f_code.co_filename in own:
                frame = frame.f_back
            name = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            seen.add(name)
            if name != left_out:
                barrier(*args)
        return call
    for module, name in ((cuda, "syncthreads"), (ptx, "syncwarp"), (mbarrier, "syncwarp"), (cluster, "syncwarp"),
                         (ptx, "copies_wait"), (mbarrier, "wait"), (cluster, "meet")):
        setattr(module, name, watched(getattr(module, name)))
    wait_but = ptx.copies_wait_but
    ptx.copies_wait_but = lambda n: watched(wait_but(n))
    if SEEN in os.environ:
        config.add_cleanup(lambda: Path(os.environ[SEEN]).write_text("\n".join(sorted(seen))))


def failed_test(tests: Path, **variables) -> str | None:
    """The first simulated test of a file that fails, or the file itself where it does not end."""
    try:
        done = simulated(str(tests), "-p", "barriers", **variables)
    except subprocess.TimeoutExpired:
        return f"{tests.name}, which does not end"
    failed = [line.removeprefix("FAILED ").partition(" - ")[0] for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    if done.returncode and not failed:
        raise RuntimeError(f"{tests.name}: exit code {done.returncode}\n{done.stdout}")
    return failed[0].rpartition("/")[2] if failed else None


def barriers_of(tests: Path) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        seen = Path(folder) / "seen"
        failed = failed_test(tests, **{SEEN: str(seen)})
        if failed:
            raise RuntimeError(f"{failed} fails with all barriers in place")
        return seen.read_text().splitlines()


def in_sources() -> dict[str, str]:
    """The text of each line of the kernels that calls syncthreads, syncwarp, apart or `leave`, by file and number."""
    return {f"{path.name}:{i}": line.strip() for path in sorted(KERNELS.glob("*.py"))
            if path.name not in ("ptx.py", "cluster.py", "mbarrier.py")
            for i, line in enumerate(path.read_text().splitlines(), 1) if re.search(BARRIERS, line)}


def verdict(barrier: str, files: list[Path]) -> str:
    """missed by a test, allowed, NOT MISSED or NOT REACHED. files: those whose tests come to it."""
    caught = next(filter(None, (failed_test(tests, **{LEFT_OUT: barrier}) for tests in files)), None)
    reason = ALLOWED.get((barrier.partition(":")[0], in_sources().get(barrier)))
    return f"missed by {caught}" if caught else f"not missed: {reason}" if reason else "NOT MISSED" if files else "NOT REACHED"


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="*", help="files of kernels/cuda, such as mmq.py; all if none is given")
    p.add_argument("-n", type=int, default=1, help="processes at a time")
    options = p.parse_args()
    bad = 0
    with ThreadPoolExecutor(options.n) as pool:
        files: dict[str, list[Path]] = {barrier: [] for barrier in in_sources()}
        for tests, found in zip(TESTS, pool.map(barriers_of, TESTS)):
            for barrier in found:
                files.setdefault(barrier, []).append(tests)
        files = {barrier: tests for barrier, tests in files.items()
                 if not options.names or barrier.partition(":")[0] in options.names}
        for barrier, said in zip(files, pool.map(verdict, files, files.values())):
            print(f"{barrier}: {said}", flush=True)
            bad += said.isupper()
    print(f"{len(files)} barriers, {bad} that no test misses and nothing explains")
    return 1 if bad or not files else 0


if __name__ == "__main__":
    sys.exit(main())
