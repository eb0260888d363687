"""tests/barriers.py: a barrier that is left out is missed, one that nothing needs is told, and the places that need not be missed are there."""
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
import barriers  # noqa: E402

KERNELS = barriers.ROOT / "kernels" / "cuda"
TESTS = barriers.ROOT / "tests" / "test_cuda_simulator_mul_mat_id.py"


def line_of(path: Path, text: str) -> int:
    return 1 + next(i for i, line in enumerate(path.read_text().splitlines()) if text in line)


def test_a_barrier_is_missed():
    said = barriers.verdict(f"dispatch.py kernel {line_of(KERNELS / 'dispatch.py', 'cuda.syncthreads()')}", [TESTS])
    assert said.startswith("missed by test_cuda_simulator_mul_mat_id.py::simulate_")


@pytest.mark.parametrize("barrier, failed, said", [
    ("mmq.py run 1", None, "NOT MISSED"), ("mmq.py run 1", "a test", "missed by a test"), ("argmax.py best 1", "a test", "missed by a test"),
    ("argmax.py best 1", None, f"not missed: {barriers.ALLOWED['argmax.py', 'best']}")])
def test_verdict(barrier, failed, said, monkeypatch):
    monkeypatch.setattr(barriers, "failed_test", lambda tests, **variables: failed)
    assert barriers.verdict(barrier, [TESTS]) == said


def test_what_is_allowed_is_there():
    for file, function in barriers.ALLOWED:
        line_of(KERNELS / file, f"def {function}(")
    assert len(barriers.TESTS) >= 7
