"""Benchmarks as pytest cases: which of them a machine takes, the GPU that those of CUDA kernels run on, what is saved of it and
compared."""
import json
from pathlib import Path

import checkout  # noqa: F401
import pytest
from cuda_simulator import no_gpu


def pytest_ignore_collect(collection_path, config):
    """Of a folder, with a GPU the CUDA cases, else those of the CPU. Files that are named are collected always."""
    other = "test_bench_cuda_" if no_gpu() else "test_bench_cpu_"
    return True if collection_path.name.startswith(other) else None


@pytest.fixture(scope="session")
def _gpu(request):
    """The GPU; kernels of all cases have been compiled, by a process for each core."""
    if reason := no_gpu():
        pytest.skip(reason)
    from cuda_cases import Case, compile_all
    from gpu_timing import GPU
    compile_all([Case(**item.callspec.params) for item in request.session.items if "gpu" in item.fixturenames])
    return GPU()


@pytest.fixture(scope="session")
def copy_GB_s(_gpu):
    return _gpu.copy_GB_s()


@pytest.fixture
def gpu(_gpu):
    """The memory that a case takes is free again behind it."""
    yield _gpu
    _gpu.free()


# What is saved and compared

def pytest_benchmark_update_machine_info(config, machine_info):
    if not no_gpu():
        from ggml_py.backends.cuda import driver_release
        from ggml_py.kernels.cuda.launch import Target
        machine_info["gpu"] = {"name": Target().device.name, "driver": driver_release()}


def pytest_configure(config):
    """--benchmark-compare takes a record of bench/gpu.py as well: a file of its benchmarks is made in the place of saved ones."""
    wanted = config.getoption("benchmark_compare", None)
    if not isinstance(wanted, str) or not Path(wanted).is_file():
        return
    record = json.loads(Path(wanted).read_text())
    if "benchmarks" in record:  # a saved run
        return
    program = record.get("command", "an unknown program").split(" ")[0]
    if program != "bench/gpu.py":
        raise pytest.UsageError(f"--benchmark-compare: {wanted} is a record of {program}, expected a saved run or a record of "
                                "bench/gpu.py")
    folder = Path(config.getoption("benchmark_storage").removeprefix("file://")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / Path(wanted).name
    made.write_text(json.dumps(benchmarks_of(record)))
    config.option.benchmark_compare = str(made)


def benchmarks_of(record: dict) -> dict:
    """A record of bench/gpu.py as pytest-benchmark saves one. It has least, median and most of the replays, and no others: the
    rest of the statistics is of these three."""
    from cuda_cases import Case
    from pytest_benchmark.stats import Stats
    found = []
    for row in record["rows"]:
        stats = Stats()
        stats.data = [row[key] / 1e6 for key in ("us_least", "us", "us_most")]
        case = Case(*(row[key] for key in ("kernel", "type", "sizes", "cache")))
        found.append({"fullname": f"bench/test_bench_cuda_kernels.py::test_bench[{case.id}]",
                      "stats": {**stats.as_dict(), "iterations": 1}})
    return {"machine_info": {"gpu": {"name": record["device"], "driver": record["driver"]}}, "benchmarks": found}
