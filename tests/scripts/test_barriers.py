"""barriers.py: a barrier that is left out is missed, one that nothing needs is told,
and the places that need not be missed are there."""
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
import barriers
from places import ROOT

TESTS = ROOT / "tests" / "kernels" / "cuda" / "test_simulated_mul_mat_id.py"


def barrier(file: str, text: str) -> str:
    return next(name for name, line in barriers.in_sources().items() if name.startswith(f"{file}:") and text == line)


def test_a_barrier_is_missed():
    said = barriers.verdict(barrier("dispatch.py", "cuda.syncthreads()"), [TESTS])
    assert said.startswith("missed by test_simulated_mul_mat_id.py::simulate_")


@pytest.mark.parametrize("file, text, failed, said", [
    ("dispatch.py", "cuda.syncthreads()", None, "NOT MISSED"),
    ("dispatch.py", "cuda.syncthreads()", "a test", "missed by a test"),
    ("dispatch.py", "syncwarp()", "a test", "missed by a test"),
    ("dispatch.py", "syncwarp()", None, f"not missed: {barriers.ALLOWED['dispatch.py', 'syncwarp()']}"),
    ("tile_product.py", "syncwarp()  # the factors are there", None, "NOT MISSED")])
def test_verdict(file, text, failed, said, monkeypatch):
    monkeypatch.setattr(barriers, "failed_test", lambda tests, **variables: failed)
    assert barriers.verdict(barrier(file, text), [TESTS]) == said


def test_a_barrier_that_no_test_reaches():
    assert barriers.verdict(barrier("dispatch.py", "cuda.syncthreads()"), []) == "NOT REACHED"


def test_what_is_allowed_is_there():
    assert all(barrier(file, text) for file, text in barriers.ALLOWED) and len(barriers.TESTS) >= 7
