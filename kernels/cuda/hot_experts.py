"""Experts of which some have copies in slots: which are asked for there, and whose rows are taken (numerics, section 9)."""
from numba import cuda

from ..call import Call
from .elementwise import THREADS, by_element, check_grid
from .launch import F32, I32, Kernel, N, factory, need
from .operands import addresses
from .ptx import i32, i64, ld, shuffle, st

WARPS = 4  # of a block of split_ids


@factory([()])
def split_ids_kernel():
    """A warp an expert goes through all pairs, and the one behind them takes ids that are no experts: nobody shares a word."""
    def kernel(counts, ids, slots, hot, cold, n_pairs, n_expert, n_slots):
        lane, expert = i32(cuda.threadIdx.x & 31), i32(cuda.blockIdx.x * WARPS + (cuda.threadIdx.x >> 5))
        if expert <= n_expert:
            known = expert < n_expert
            slot = ld(slots, expert) if known else i32(-1)
            pair, n = lane, i32(0)
            while pair < n_pairs:
                asked = ld(ids, pair)
                if asked == expert if known else asked < 0 or asked >= n_expert:
                    st(hot, pair, slot if slot >= 0 else i32(n_slots))
                    st(cold, pair, i32(-1) if slot >= 0 else asked)
                    n = i32(n + 1)
                pair = i32(pair + 32)
            for width in (16, 8, 4, 2, 1):
                n = i32(n + shuffle(n, lane ^ width))
            if known and lane == 0:
                st(counts, expert, i32(ld(counts, expert) + n))
    return Kernel(kernel, (I32, I32, I32, I32, I32, N, N, N), 32 * WARPS)


@factory([()])
def pick_rows_kernel():
    def kernel(x, y, ids, out, n_cols):
        column = cuda.blockIdx.y * THREADS + cuda.threadIdx.x
        if column < n_cols:
            i = i64(cuda.blockIdx.x) * n_cols + column
            st(out, i, ld(y, i) if ld(ids, cuda.blockIdx.x) == -1 else ld(x, i))
    return Kernel(kernel, (F32, F32, I32, F32, N), THREADS)


def check(call: Call) -> None:
    if call.op == "split_ids":
        need(call.ids.n_rows * call.ids.n_cols >= 1, "n_tokens * n_used", call.ids.n_rows * call.ids.n_cols, "at least 1")
    else:
        check_grid(call.out)


def split_ids(call: Call):
    """hot = slots[ids], n_slots where that is -1; cold = ids where it is, else -1; counts[ids] += 1.

    counts, slots: i32 [X]; ids, hot, cold: i32 [n, u]. An id that is no expert goes to cold as it is."""
    n_expert, (n, n_used) = call.slots.shape[0], call.ids.shape
    args = addresses(call.counts, call.ids, call.slots, call.hot, call.cold)
    return call.device.launch(split_ids_kernel(), n_expert // WARPS + 1, 32 * WARPS, (*args, n * n_used, n_expert, call.n_slots))


def pick_rows(call: Call):
    """out[i u + j] = x[i u + j], or y[i u + j] where ids[i, j] is -1.   x, y, out: f32 [n u, m]; ids: i32 [n, u]."""
    return by_element(call, pick_rows_kernel(), *addresses(call.x, call.y, call.ids, call.out), call.out.n_cols)
