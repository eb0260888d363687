"""compute-sanitizer over the kernel tests on a GPU:

    python tests/scripts/sanitize.py [memcheck racecheck initcheck synccheck] [-n PROCESSES]

Prints a line for each tool, and on stderr what it and the tests say. Exits with 1 if a tool reports anything or a test fails,
with 2 where it cannot run. The tests are those of every kernel, of one format of each form, a few cases of each, and decode
steps, eager and replayed, so that all four tools take minutes. Not among them is a kernel that no model runs: `spin`, of the
tests of transfers; it has no memory. (pytest has this file as a plugin.)
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from random import Random

import pytest

import with_helpers  # noqa: F401  (for what is next)
from places import ROOT, environment

TOOLS = {"memcheck": [], "racecheck": ["--racecheck-report", "all"], "initcheck": [], "synccheck": []}
FORMS = "F16", "Q4_1", "Q8_0", "Q2_K", "Q4_K", "Q6_K", "NVFP4", "MXFP4"
FILES = ("tests/kernels/cuda/test_gpu_ops.py", "tests/kernels/cuda/test_gpu_matmul.py",
         "tests/kernels/cuda/test_gpu_mul_mat_id.py", "tests/backends/test_gpu_graphs.py")
SELECTION = ("gpu_ops and not shapes and not special and not 14336 and not 100003"
             " or gpu_graphs and (verification or arena)"
             " or gpu_mul_mat_id and not models and not any_ids and not 8192 and not 65536 and not 2048 and not 2880"
             " and (test_dispatch or rows_on or test_groups_of_pairs or test_any_block or test_mul_mat_heads or test_glu"
             f" or test_mul_mat_id and ({' or '.join(FORMS)}))"
             " or gpu_matmul and not extremes and not models and (test_quantize or take_rows or test_dequantize or "
             f"{' or '.join(FORMS)})")
# racecheck does not know that behind `syncwarp` one lane arrives at an mbarrier for all (docs/kernels-log.md, "Products of
# float16"), as it does in mmq_half and, with several tokens, in mmq_few. Names of Q, K and V do not say how many there are
UNKNOWN = {"racecheck": " and not mmq_half and not qkv and not tiles_in_a_row and not (mmq_few and not -1])"}
MOST = 4  # cases of a test
SUMMARY = re.compile(r"=+ (?:ERROR|RACECHECK) SUMMARY: (.*)")
CLEAN = re.compile(r"0 errors\b|0 hazards displayed \(0 errors, 0 warnings\)")
PASSED = re.compile(r"^(?:=+ )?(\d+ passed)\b", re.MULTILINE)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Keeps MOST cases of each test, drawn at random, always the same. Those that `-k` leaves out are gone by then."""
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    kept = {item for each in cases.values() for item in Random(0).sample(each, min(MOST, len(each)))}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def compute_sanitizer() -> str | None:
    """Of a toolkit, or of the Python package nvidia-cuda-sanitizer-api."""
    folders = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    try:
        import nvidia
        folders += [path for root in nvidia.__path__ for path in sorted(Path(root).glob("*/bin"))]
    except ImportError:
        pass
    found = [shutil.which("compute-sanitizer", path=str(folder)) for folder in (*folders, "/usr/local/cuda/bin")]
    return next(filter(None, found), None) or shutil.which("compute-sanitizer")


def problem(returncode: int, output: str) -> str | None:
    """What is wrong with a run of a tool over the tests, or None."""
    summaries = SUMMARY.findall(output)
    if not summaries:
        return "the tool gave no summary"
    reports = [summary for summary in summaries if not CLEAN.match(summary)]
    if reports:
        return "; ".join(reports)
    if returncode or not PASSED.search(output):
        return f"the tests did not pass (exit code {returncode})"
    return None


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("tools", nargs="*", metavar="TOOL", help="of memcheck, racecheck, initcheck, synccheck; all by default")
    p.add_argument("-n", type=int, default=0, metavar="PROCESSES", help="that share the tests of a tool; all in one by default")
    options = p.parse_args()
    tools = options.tools or list(TOOLS)
    if not set(tools) <= set(TOOLS):
        p.error(f"unknown tool {', '.join(sorted(set(tools) - set(TOOLS)))}; known: {', '.join(TOOLS)}")
    from cuda_simulator import no_gpu
    reason, sanitizer = no_gpu(), compute_sanitizer()
    if reason:
        p.error(f"no GPU to check kernels on: {reason}")
    if not sanitizer:
        p.error("no compute-sanitizer: it is in the CUDA toolkit, and in the Python package nvidia-cuda-sanitizer-api")
    shared = ["-n", str(options.n), "--dist", "worksteal"] if options.n else []
    failed = False
    for tool in tools:
        command = [sanitizer, "--tool", tool, *TOOLS[tool], "--error-exitcode", "99", "--target-processes", "all",
                   sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "sanitize", *shared, "-k",
                   f"({SELECTION}){UNKNOWN.get(tool, '')}", *FILES]
        output = []
        with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True) as process:
            for line in process.stdout:  # as it comes: a tool that is stopped has said how far it got
                output.append(line)
                print(line, end="", file=sys.stderr, flush=True)
        output = "".join(output)
        wrong = problem(process.returncode, output)
        print(f"{tool}: {wrong or 'clean, ' + PASSED.search(output)[1]}", flush=True)
        failed |= wrong is not None
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
