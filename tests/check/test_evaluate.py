"""check/evaluate: what it leaves alone."""
import numpy as np
import pytest
from op_runs import cache, plain

from ggml_py.backends.cpu import CPUBackend
from ggml_py.check.evaluate import evaluate


@pytest.mark.parametrize("room", ["reference", "cpu"])
def test_a_state_stays_as_it_was_on_the_host(room):
    """A CPU keeps what is uploaded where its memory is aligned: a kernel would write into the caller's array."""
    before, backend = cache("cache", "f32", np.ones((5, 64), np.float32)), CPUBackend(room)
    aligned = backend.empty(before.arrays[0].nbytes).view(np.float32).reshape(5, 64)
    aligned[:] = before.arrays[0]
    before.arrays = aligned,
    x, rows = plain("x", np.zeros((1, 64), np.float32)), plain("rows", np.array([3]))
    (after,), = evaluate(backend, "set_rows", [before, x, rows], {})
    assert (after[3] == 0).all() and (np.delete(after, 3, 0) == 1).all() and (aligned == 1).all()
