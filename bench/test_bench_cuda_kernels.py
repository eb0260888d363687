"""The CUDA kernels: the cases of bench/cuda_cases.py. A round is one replay of a captured graph between two CUDA events; its time
is that of one launch, as in bench/gpu.py. `extra_info` has GB/s (1 GB = 1e9 bytes) and TOP/s of the median, and the share of a
device-to-device copy's GB/s."""
import checkout  # noqa: F401
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
from cuda_cases import Case, row, selected, work
from gpu_timing import REPETITIONS, LaunchClock, Timing

pytestmark = pytest.mark.gpu
CLOCK = LaunchClock()


def param(case: Case):
    return pytest.param(case.kernel, case.type, case.sizes, case.cache, id=case.id,
                        marks=pytest.mark.benchmark(group=case.kernel, timer=CLOCK))


@pytest.mark.parametrize("kernel, type, sizes, cache", [param(case) for case in selected(None, None)])
def test_bench(benchmark, gpu, copy_GB_s, kernel, type, sizes, cache):
    case = Case(kernel, type, sizes, cache)
    made = work(gpu, case)
    with gpu.replays(made.launches) as replay:
        benchmark.pedantic(CLOCK.advance, [replay], rounds=REPETITIONS)
    gpu.check_outputs(case.id)
    if benchmark.stats:  # none with --benchmark-disable
        measured = row(case, Timing(*(1e6 * benchmark.stats[key] for key in ("median", "min", "max"))), made)
        benchmark.extra_info.update(GB_s=measured.GB_s, of_copy=measured.GB_s / copy_GB_s)
        if made.n_ops:
            benchmark.extra_info.update(TOP_s=measured.TOP_s)
