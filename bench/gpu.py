"""Times the CUDA kernels and writes a record: python bench/gpu.py --out bench/results/NAME.json [--only mmvq,mmq,...] [--types
Q4_K,...]

One line a case of bench/cuda_cases.py: kernel, type, sizes, median us, bytes, GB/s (1 GB = 1e9 bytes), share of a
device-to-device copy measured in the same run. Kernels are compiled before, by a process for each core; a second run finds them
on disk.
"""
import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path

import checkout  # noqa: F401

from cuda_cases import SUITES, Case, compile_all, row, selected, work
from figures import Row, limits, verdict
from gpu_timing import GPU
from records import conditions, dump


def measure(gpu: GPU, case: Case) -> Row:
    made = work(gpu, case)
    measured = row(case, gpu.time(made.launches), made)
    gpu.check_outputs(measured.name)
    gpu.free()
    return measured


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--only", help=f"suites: {','.join(SUITES)}")
    p.add_argument("--types", help="types of weights or caches, f32 for the rest: Q4_K,f16")
    options = p.parse_args()
    from ggml_py.backends.cuda import unavailable
    try:
        cases = selected(options.only, options.types)
    except ValueError as error:
        p.error(str(error))
    reason = unavailable(0)
    if reason:
        p.error(reason)

    started = time.perf_counter()
    compile_all(cases)
    compile_seconds = time.perf_counter() - started
    gpu = GPU()
    copy_GB_s = gpu.copy_GB_s()
    record = {"command": " ".join(["bench/gpu.py", *sys.argv[1:]]), **conditions(gpu.backend), "l2_bytes": gpu.l2_bytes,
              "compile_seconds": round(compile_seconds, 1), "copy_GB_s": round(copy_GB_s, 1)}
    print(f"{record['device']}, driver {record['driver']}, L2 {gpu.l2_bytes / 1e6:.0f} MB, copy {copy_GB_s:.0f} GB/s, "
          f"kernels ready in {compile_seconds:.0f} s", flush=True)
    rows = []
    for case in cases:
        rows.append(measure(gpu, case))
        limit = limits(rows[-1], rows, copy_GB_s)
        print(rows[-1].line(copy_GB_s) + (f"   must {limit.must:.1f} us: {verdict(rows[-1], limit)}" if limit else ""),
              flush=True)
        # what was measured stays, should a later case fail
        options.out.write_text(dump(record, "rows", [asdict(row) for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
