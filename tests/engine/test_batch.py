"""Where the tokens of a batch go."""
import numpy as np
from hypothesis import given, strategies as st

from ggml_py.engine.batch import layout

SEQUENCES = st.lists(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=1, max_size=6)


@given(SEQUENCES, st.integers(1, 12), st.permutations(range(6)))
def test_layout(sequences, n_ubatch, order):
    """By one token after the other."""
    counts, n_rows = zip(*sequences)
    seq_ids = tuple(order[:len(counts)])
    seq, within, results, micro_batches = layout(seq_ids, counts, n_rows, n_ubatch)
    tokens = [(seq_id, i, i >= n - rows) for seq_id, n, rows in zip(seq_ids, counts, n_rows) for i in range(n)]
    assert [*zip(seq.tolist(), within.tolist())] == [(seq_id, i) for seq_id, i, _ in tokens]
    assert seq.dtype == within.dtype == np.int32
    with_row = [place for place, (*_, has_row) in enumerate(tokens) if has_row]
    firsts = range(0, len(tokens), n_ubatch)
    assert [each.tokens for each in micro_batches] == [slice(first, first + n_ubatch) for first in firsts]
    for each in micro_batches:
        places = range(len(tokens))[each.tokens]
        assert [places[i] for i in each.rows] == with_row[each.of_result] == [place for place in places if place in with_row]
        assert each.n_seq == len({tokens[place][0] for place in places})
    rows_of = [[place for place in with_row if tokens[place][0] == seq_id] for seq_id in seq_ids]
    assert [with_row[rows] for rows in results] == rows_of
