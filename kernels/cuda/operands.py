"""What the launch functions of products read of a `Call`: formats, addresses and sizes of its matrices, and where ids that are
not experts are left."""
from typing import Any, NamedTuple

from ...quant.formats import format_of
from ..call import Call, Operand
from .launch import need
from .ptx import device, i32, quotient, remainder

FAULT = 4  # word of a dispatch table at which ids that are not experts are left where nobody asks for them


def addresses(*operands: Operand) -> tuple[Any, ...]:
    return tuple(operand.data for operand in operands)


def is_quantized(op: str, names: tuple[str, ...]) -> bool:
    """Whether the formats of an op's matrices are quantized. Unsupported where some are and others are not, ValueError for an
    unknown one."""
    kinds = {format_of(name, op).is_quantized for name in names}
    need(len(kinds) == 1, "types", ", ".join(names), "all quantized or all float")
    return True in kinds


class Gated(NamedTuple):
    """Of the matrices gate and up: their formats, whether biases are added to the products, and the addresses of both matrices
    and of both biases. Without biases those are the result's, and nothing is read there."""
    names: tuple[str, str]
    biased: bool
    addresses: tuple[Any, ...]


def gated_of(call: Call) -> Gated:
    """Of an op with the operands gate, up, gate_bias and up_bias and the result out."""
    gate, up, gate_bias, up_bias, out = call.gate, call.up, call.gate_bias, call.up_bias, call.out
    need((gate_bias is None) == (up_bias is None), "bias", "of one product only", "of both or of none")
    biases = (out, out) if gate_bias is None else (gate_bias, up_bias)
    return Gated((gate.dtype, up.dtype), gate_bias is not None, addresses(gate, up, *biases))


class QKV(NamedTuple):
    """Of three products with one x: the matrices' formats and numbers of rows, whether biases are added, and the addresses of
    matrices, biases and results. Without biases those are the results', and nothing is read there."""
    names: tuple[str, ...]
    n_rows: tuple[int, ...]
    biased: bool
    words: tuple[Any, ...]
    biases: tuple[Any, ...]
    outs: tuple[Any, ...]


def qkv_of(call: Call) -> QKV:
    """Of an op with the operands q, k, v, q_bias, k_bias and v_bias and the results q_out, k_out and v_out."""
    matrices, outs, biased = (call.q, call.k, call.v), addresses(call.q_out, call.k_out, call.v_out), call.q_bias is not None
    names, n_rows = zip(*((w.dtype, w.shape[0]) for w in matrices))
    biases = addresses(call.q_bias, call.k_bias, call.v_bias) if biased else outs
    return QKV(names, n_rows, biased, addresses(*matrices), biases, outs)


# Matrices of experts, or of heads

class Pairs(NamedTuple):
    """Sizes of the products of pairs, a token and one of its experts each, in the order in which kernels take them. The heads of
    a token are its experts."""
    n_matrices: int
    n_rows: int     # of a matrix
    n_cols: int
    n: int          # rows of x
    n_pairs: int
    n_used: int     # pairs of a token
    x_rows: int     # rows of x of a token, of which rank j takes row j % x_rows; 1 for heads, each of which has its own

    @property
    def n_tokens(self) -> int:
        return self.n_pairs // self.n_used


@device
def row_of_pair(pair, n_used, x_rows):
    """The row of x that a pair multiplies. n_used, x_rows: of `Pairs`."""
    token = quotient(pair, n_used)
    return i32(token * x_rows + remainder(i32(pair - token * n_used), x_rows))


def matrices_of(call: Call) -> tuple[Operand, ...]:
    """w, or gate and up."""
    return (call.gate, call.up) if call.op == "mul_mat_id_glu" else (call.w,)


def pairs_of(call: Call) -> Pairs:
    """Of mul_mat_id, mul_mat_id_glu or mul_mat_heads. Unsupported for sizes that cannot be."""
    (n_matrices, n_rows, n_cols), n = matrices_of(call)[0].shape, call.x.shape[0]
    if call.op == "mul_mat_heads":
        n_pairs, n_used, x_rows = n, n_matrices, 1
    else:
        n_tokens, n_used = call.ids.shape
        n_pairs, x_rows = n_tokens * n_used, n // n_tokens if n_tokens else 1
    least = ("n_expert", n_matrices), ("n_rows", n_rows), ("n_cols", n_cols), ("n_used", n_used), ("x_rows_per_token", x_rows)
    for what, size in least:
        need(size >= 1, what, size, "at least 1")
    need(1 <= n_pairs < 1 << 28, "n_tokens * n_used", n_pairs, f"1..{(1 << 28) - 1}")
    need(n_used % x_rows == 0, "x_rows_per_token", x_rows, f"divisors of n_used, {n_used}")
    need(n_pairs % n_used == 0, "n", n, f"multiples of n_head, {n_used}")
    return Pairs(n_matrices, n_rows, n_cols, n, n_pairs, n_used, x_rows)


def constants_of(call: Call) -> tuple[float, float]:
    """alpha and limit of swiglu_oai, zeros of other activations: kernels are made for them."""
    return (float(call.alpha), float(call.limit)) if call.act == "swiglu_oai" else (0.0, 0.0)


def fault_of(call: Call) -> tuple[Any, int]:
    """Where the first id that is not an expert is left: (address of int32 [4], the number that is left with it). Where nobody
    asks, that is in the dispatch table."""
    return call.fault or (call.scratch.data + 4 * FAULT, 1)


def late_error(call: Call, pair: int, found: int) -> str:
    """The message of what is left there: a pair, and its id."""
    n_used, n_expert = call.ids.shape[1], matrices_of(call)[0].shape[0]
    return f"{call.name}: token {pair // n_used} has expert {found} at rank {pair % n_used}, allowed: 0 to {n_expert - 1}"
