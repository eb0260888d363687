"""What comes before and after the products with experts: rows of biases, scales, and the weighted sum (numerics, section 9).
One thread an element."""
from numba import cuda

from . import ptx
from ..arith import NAN
from ..call import Call, Operand
from .elementwise import THREADS, by_element, check_grid
from .launch import F32, I32, Kernel, N, factory, need
from .operands import addresses
from .ptx import device, f32, fma, i32, i64, ld, st

RANKS, BIASED_RANKS = 8, 4  # of which all values are loaded before the first is added


@factory([("add_id",), ("scale_id",)])
def by_experts_kernel(op):
    """x and what belongs to an expert: a row that is added, or a factor."""
    operation, rows = {"add_id": (ptx.add, True), "scale_id": (ptx.mul, False)}[op]

    def kernel(x, of_experts, ids, out, n_cols, n_expert):
        column = cuda.blockIdx.y * THREADS + cuda.threadIdx.x
        if column < n_cols:
            i, expert = i64(cuda.blockIdx.x) * n_cols + column, ld(ids, cuda.blockIdx.x)
            value = NAN
            if 0 <= expert < n_expert:
                value = ld(of_experts, i64(expert) * n_cols + column if rows else expert)
            st(out, i, operation(ld(x, i), value))
    return Kernel(kernel, (F32, F32, I32, F32, N, N), THREADS)


def rank_sum(n_ranks, value):
    """(operands, w, token, column, n_used, n_cols) -> the sum over a token's ranks, in order, of value times weight.
    value: (operands, row, column, n_cols) -> that of a row of a token and a rank; n_ranks values are loaded at a time."""
    @device
    def total_of(operands, w, token, column, n_used, n_cols):
        values, weights = cuda.local.array(n_ranks, f32), cuda.local.array(n_ranks, f32)
        total, j = f32(0), i32(0)
        while j < n_used:
            for i in range(n_ranks):
                row = token * n_used + min(i32(j + i), i32(n_used - 1))
                values[i], weights[i] = value(operands, row, column, n_cols), ld(w, row)
            for i in range(n_ranks):
                total = fma(values[i], weights[i], total) if j + i < n_used else total
            j = i32(j + n_ranks)
        return total
    return total_of


@device
def value_of_rank(x, row, column, n_cols):
    return ld(x, row * n_cols + column)


@factory([()])
def weighted_sum_kernel():
    total_of = rank_sum(RANKS, value_of_rank)

    def kernel(x, w, out, n_used, n_cols):
        token, column = i64(cuda.blockIdx.x), cuda.blockIdx.y * THREADS + cuda.threadIdx.x
        if column < n_cols:
            st(out, token * n_cols + column, total_of(x, w, token, column, n_used, n_cols))
    return Kernel(kernel, (F32, F32, F32, N, N), THREADS)


@factory([()])
def weighted_sum_biased_kernel():
    @device
    def biased(operands, row, column, n_cols):
        x, b, ids, n_expert = operands
        expert, bias = ld(ids, row), NAN
        if 0 <= expert < n_expert:
            bias = ld(b, i64(expert) * n_cols + column)
        return ptx.add(ld(x, row * n_cols + column), bias)
    total_of = rank_sum(BIASED_RANKS, biased)

    def kernel(x, b, ids, w, out, n_used, n_cols, n_expert):
        token, column = i64(cuda.blockIdx.x), cuda.blockIdx.y * THREADS + cuda.threadIdx.x
        if column < n_cols:
            st(out, token * n_cols + column, total_of((x, b, ids, n_expert), w, token, column, n_used, n_cols))
    return Kernel(kernel, (F32, F32, I32, F32, F32, N, N, N), THREADS)


@factory([()])
def weighted_sum_gated_kernel():
    def kernel(x, w, y, gate, out, n_used, n_cols):
        token, column = i64(cuda.blockIdx.x), cuda.blockIdx.y * THREADS + cuda.threadIdx.x
        if column < n_cols:
            shared = fma(ld(y, token * n_cols + column), ptx.sigmoid(ld(gate, token)), f32(0))
            total, j = f32(0), i32(0)
            while j < n_used:
                total = fma(ld(x, (token * n_used + j) * n_cols + column), ld(w, token * n_used + j), total)
                j = i32(j + 1)
            st(out, token * n_cols + column, ptx.add(total, shared))
    return Kernel(kernel, (F32, F32, F32, F32, F32, N, N), THREADS)


def check(call: Call) -> None:
    check_grid(call.out)
    if call.op.startswith("weighted_sum"):
        need(call.w.n_cols >= 1, "n_used", call.w.n_cols, "at least 1")
    need(not call.values.get("may_skip"), "may_skip", True, "False: ids are experts")


def by_experts(call: Call, of_experts: Operand):
    return by_element(call, by_experts_kernel(call.op), *addresses(call.x, of_experts, call.ids, call.out), call.out.n_cols,
                      of_experts.shape[0])


def add_id(call: Call):
    """out[i u + j] = x[i u + j] + b[ids[i, j]], NaN where there is no such expert.

    x, out: f32 [n u, m], one memory or apart; b: f32 [X, m]; ids: i32 [n, u]."""
    return by_experts(call, call.b)


def scale_id(call: Call):
    """out[i u + j] = x[i u + j] * s[ids[i, j]], NaN where there is no such expert.

    x, out: f32 [n u, m], one memory or apart; s: f32 [X]; ids: i32 [n, u]."""
    return by_experts(call, call.s)


def weighted_sum(call: Call):
    """out[i] = the sum of x[i u + j] * w[i, j] in the order of j.   x: f32 [n u, m]; w: f32 [n, u]; out: f32 [n, m]."""
    return by_element(call, weighted_sum_kernel(), *addresses(call.x, call.w, call.out), call.w.n_cols, call.out.n_cols)


def weighted_sum_biased(call: Call):
    """out[i] = the sum of (x[i u + j] + b[ids[i, j]]) * w[i, j] in the order of j.

    x, b, ids: as of `add_id`; w, out: as of `weighted_sum`."""
    args = addresses(call.x, call.b, call.ids, call.w, call.out)
    return by_element(call, weighted_sum_biased_kernel(), *args, call.w.n_cols, call.out.n_cols, call.b.shape[0])


def weighted_sum_gated(call: Call):
    """out[i] = the sum of x[i u + j] * w[i, j] in the order of j, plus y[i] * sigmoid(gate[i]).

    x: f32 [n u, m]; w: f32 [n, u]; y, out: f32 [n, m]; gate: f32 [n, 1]."""
    args = addresses(call.x, call.w, call.y, call.gate, call.out)
    return by_element(call, weighted_sum_gated_kernel(), *args, call.w.n_cols, call.out.n_cols)
