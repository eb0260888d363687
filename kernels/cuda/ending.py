"""What becomes of the total of a row and a token, which matrix products add up."""
from typing import NamedTuple

from .glu import gated_unit
from .ptx import add, afresh, device, f32, i32, ld, ldc, st


@device
def row_there(row, n_rows):
    """A row that there is, for `ldc`, which may be moved before the test that there is one: the compiler does not see that it is
    the row itself."""
    return i32(min(afresh(row), n_rows - 1))


class Ending(NamedTuple):
    """Of the totals of a matrix, or of two, gate and up, one after the other. i: a total's place in `out`; row: of n_rows of the
    matrix, whose biases begin at `first`; last: of the last matrix; waiting: the first one's total."""
    waiting: object  # (out, i, last) -> it, where `finish` left it in `out`
    finish: object   # (out, i, first, row, n_rows, total, waiting, last, *biases)


STORE = Ending(waiting=device(lambda out, i, last: f32(0)),
               finish=device(lambda out, i, first, row, n_rows, total, waiting, last, bias, other_bias: st(out, i, total)))


def gate_and_store(activation, biased, alpha=0.0, limit=0.0) -> Ending:
    """out = activation(gate) * up, or swiglu_oai with its constants. The gate's total may wait in `out`, where the thread that
    put it there finds it."""
    glu = gated_unit(activation, alpha, limit)

    @device
    def waiting(out, i, last):
        return ld(out, i) if last else f32(0)

    @device
    def finish(out, i, first, row, n_rows, total, waiting, last, gate_bias, up_bias):
        if last:
            g, u = waiting, total
            if biased:
                at = i32(first + row_there(row, n_rows))
                g, u = add(g, ldc(gate_bias, at)), add(u, ldc(up_bias, at))
            st(out, i, glu(g, u))
        else:
            st(out, i, total)
    return Ending(waiting, finish)
