"""Leaves out each barrier of the CUDA kernels in turn, in the simulator, and expects a test to fail: python tests/barriers.py [-n PROCESSES] [NAME of a kernels' file ...]

Barriers are what one line calls: syncthreads, syncwarp, the waits for copies and for a phase of `mbarrier`. Prints a line each; exits with 1 if one is not missed
and ALLOWED does not say why. Takes half an hour of one core. (pytest has this file as a plugin.)
"""
import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = sorted(path for path in (ROOT / "tests").glob("test_cuda_simulator_*.py") if path.stem.rpartition("_")[2] not in ("graphs", "verify"))
LEFT_OUT, SEEN = "GGML_PY_BARRIER_LEFT_OUT", "GGML_PY_BARRIERS_SEEN"  # of the tests' process: a barrier; where it writes down all that it came to
ALLOWED = {  # function of a file: why a barrier of it need not be missed
    ("argmax.py", "best"): "the last one: of what all threads get, its kernels use what the first one wrote itself",
    ("dispatch.py", "kernel"): "those of warps: `match` waits for all lanes as well; they order memory",
    ("flash_attn_ext_few.py", "leave_slab"): "holds back the compiler, not the lanes",
    ("tile_product.py", "multiply_token"): "holds back the compiler, not the lanes",
}


def pytest_configure(config):
    """Puts a function that can leave itself out around each barrier, before kernels' modules take it."""
    from numba import cuda

    from ggml_py.kernels.cuda import mbarrier, ptx, simulator
    left_out, seen = os.environ.get(LEFT_OUT), set()
    own = {module.__file__ for module in (mbarrier, ptx, simulator)} | {__file__}

    def watched(barrier):
        def call(*args):
            frame = sys._getframe(1)
            while frame.f_code.co_filename in own:
                frame = frame.f_back
            name = f"{Path(frame.f_code.co_filename).name} {frame.f_code.co_name} {frame.f_lineno}"
            seen.add(name)
            if name != left_out:
                barrier(*args)
        return call
    cuda.syncthreads, ptx.syncwarp, ptx.copies_wait, mbarrier.wait = map(watched, (cuda.syncthreads, ptx.syncwarp, ptx.copies_wait, mbarrier.wait))
    wait_but = ptx.copies_wait_but
    ptx.copies_wait_but = lambda n: watched(wait_but(n))
    if SEEN in os.environ:
        config.add_cleanup(lambda: Path(os.environ[SEEN]).write_text("\n".join(sorted(seen))))


def failed_test(tests: Path, **variables) -> str | None:
    """The first simulated test of a file that fails."""
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "barriers", "-o", "python_functions=simulate_*", str(tests)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": path} | variables, capture_output=True, text=True)
    failed = [line.split(" ")[1] for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    if done.returncode and not failed:
        raise RuntimeError(f"{tests.name}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return failed[0].rpartition("/")[2] if failed else None


def barriers_of(tests: Path) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        seen = Path(folder) / "seen"
        failed = failed_test(tests, **{SEEN: str(seen)})
        if failed:
            raise RuntimeError(f"{failed} fails with all barriers in place")
        return seen.read_text().splitlines()


def verdict(barrier: str, files: list[Path]) -> str:
    """missed by a test, allowed, or NOT MISSED."""
    caught = next(filter(None, (failed_test(tests, **{LEFT_OUT: barrier}) for tests in files)), None)
    file, function, _ = barrier.split(" ")
    reason = ALLOWED.get((file, function))
    return f"missed by {caught}" if caught else f"not missed: {reason}" if reason else "NOT MISSED"


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="*", help="files of kernels/cuda, such as mmq.py; all if none is given")
    p.add_argument("-n", type=int, default=1, help="processes at a time")
    options = p.parse_args()
    bad = 0
    with ThreadPoolExecutor(options.n) as pool:
        files: dict[str, list[Path]] = {}
        for tests, found in zip(TESTS, pool.map(barriers_of, TESTS)):
            for barrier in found:
                if not options.names or barrier.split(" ")[0] in options.names:
                    files.setdefault(barrier, []).append(tests)
        for barrier, said in zip(files, pool.map(verdict, files, files.values())):
            print(f"{barrier}: {said}", flush=True)
            bad += said == "NOT MISSED"
    print(f"{len(files)} barriers, {bad} that no test misses and nothing explains")
    return 1 if bad or not files else 0


if __name__ == "__main__":
    sys.exit(main())
