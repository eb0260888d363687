"""From how many rows on weights of the host are brought to a GPU: measured, kept, and used where nobody asked for a number."""
from dataclasses import replace

import pytest

from ggml_py.backends.cpu import CPUBackend
from ggml_py.base.placement import HOST, OFFLOADED_ROWS, PlacementOptions
from ggml_py.kernels import compile as kernels
from ggml_py.models import offload_rates
from ggml_py.models.offload_rates import ROWS, first_slower, rows_that_pay, with_measured_rows
from ggml_py.ops.node import Tensor


class GPU(CPUBackend):
    asynchronous = True


@pytest.fixture
def here(tmp_path, monkeypatch):
    """(backends of the host and of what stands for a GPU, the placement of a layer on each); small matrices, an empty cache."""
    monkeypatch.setattr(offload_rates, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(offload_rates, "N_BYTES", 1 << 20)
    placement = PlacementOptions(("cuda:0",), n_gpu_layers=1).place(1, 1, False)
    return {HOST: CPUBackend(), "cuda:0": GPU(device="cuda:0")}, placement


@pytest.mark.parametrize("dtype", ["Q4_K", "F16"])
def test_a_number_is_measured_once(here, monkeypatch, dtype):
    backends, placement = here
    assert placement.offload.n_rows is None and placement.offload.pays("mul_mat", 99, OFFLOADED_ROWS)
    assert not placement.offload.pays("mul_mat", 99, OFFLOADED_ROWS - 1)
    weights = [Tensor("a", dtype, (64, 256), HOST), Tensor("b", "Q8_0", (64, 256), "cuda:0"), Tensor("c", "f32", (4096,), HOST)]
    found = with_measured_rows(placement, backends, weights)
    n = found.offload.n_rows
    assert n in ROWS and found == replace(placement, offload=replace(placement.offload, n_rows=n))
    assert found.offload.pays("mul_mat", 1, n) and not found.offload.pays("mul_mat", 1, n - 1)
    monkeypatch.setattr(offload_rates, "computing", lambda *args: pytest.fail("measured again"))
    assert with_measured_rows(placement, backends, weights) == found


def test_another_device_another_type_and_damage_are_measured(here, monkeypatch):
    backends, _ = here
    answers = iter([2, 64, 3, 4])
    monkeypatch.setattr(offload_rates, "first_slower", lambda *args: next(answers))
    host, device = backends.values()
    assert rows_that_pay("Q4_K", host, device) == 2 and rows_that_pay("Q6_K", host, device) == 64
    monkeypatch.setattr(GPU, "name", "other")
    assert rows_that_pay("Q4_K", host, device) == 3 == rows_that_pay("Q4_K", host, device)
    for path in offload_rates.cache_folder().iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert rows_that_pay("Q4_K", host, device) == 4
    kernels.compiled.rejected.clear()


@pytest.mark.parametrize("offload, n_rows", [((("all", 5),), 5), ((("all", None),), float("inf")), ((("mul_mat", 5),), None)])
def test_what_was_asked_for_is_not_measured(here, offload, n_rows):
    backends, _ = here
    placement = PlacementOptions(("cuda:0",), n_gpu_layers=1, offload=offload).place(1, 1, False)
    assert placement.offload.n_rows == n_rows
    found = with_measured_rows(placement, backends, [Tensor("a", "Q4_K", (64, 256), HOST)])
    assert (found == placement) == (n_rows is not None)
    assert with_measured_rows(placement, backends, []) == placement


def test_the_first_that_is_slower_each_time():
    """A CPU that was another program's for a while is asked again."""
    answers = iter([9, 1, 9, 9, 1, 9, 9, 9])
    assert first_slower(lambda n: next(answers), 5) == 3
    assert [first_slower(lambda n: n, limit) for limit in (0.5, 1, 5, 64, 65)] == [1, 1, 6, 64, 64]
