"""Recording: which rows of a result are a token's."""
import numpy as np
import pytest

from ggml_py.graph.graph import Graph, Tensor
from ggml_py.check.recording import Batch

BATCH = Batch(np.int32([0, 1, 1]), np.int32([4, 0, 1]), np.arange(3), [b"a", b"b", b"c"], n_ctx=10)


def test_rows_of_tokens():
    """Of experts and heads there are several rows a token, one behind the other; reshaped, they are one."""
    assert BATCH.rows(Tensor("x", "f32", (3, 8))).tolist() == [[0], [1], [2]]
    g, heads = Graph(), Tensor("x", "f32", (12, 2))
    assert BATCH.rows(heads).tolist() == np.arange(12).reshape(3, 4).tolist()
    assert BATCH.rows_of(heads, b"b").tolist() == [4, 5, 6, 7]
    assert BATCH.rows(g.scale(heads, factor=2.0).view((3, 8), name="view")).tolist() == [[0], [1], [2]]
    assert BATCH.rows(Tensor("x", "f32", (4, 8))) is None and BATCH.rows_of(Tensor("x", "f32", (4, 8)), b"b") == slice(None)


def test_rows_of_a_cache_are_cells():
    g, cache = Graph(), Tensor("cache_k-0", "f16", (20, 8))
    written = g.set_rows(cache, Tensor("x", "f32", (3, 8)), Tensor("rows", "i64", (3,)))
    assert BATCH.rows(written).tolist() == BATCH.rows(written.view((20, 8))).tolist() == [[4], [10], [11]]


def test_rows_of_some_tokens_are_not_known():
    batch = Batch(BATCH.seq, BATCH.pos, np.arange(2, 3), BATCH.keys, 10)
    with pytest.raises(ValueError, match="recording: x: rows are known where all tokens have logits, got 1 of 3"):
        batch.rows(Tensor("x", "f32", (3, 8)))
