"""The routing of a token in one (numerics, section 9): gating, bias, groups, top_k, weights. One warp a token;
lane j has expert and weight of rank j."""
from functools import lru_cache

from numba import cuda

from .launch import F32, I32, Kernel, N, SCALAR_F32, factory, need
from .ptx import add, device, f32, i32, i64, mul, sigmoid, st
from .routing import check_groups, mask_row, next_column, normalize_row, rank_row
from .soft_max import soft_max_row
from .warp_row import VALUES, check_rows, load_row, n_values, take_from_row

GATINGS = "softmax", "sigmoid", "softmax_of_chosen"
BIASED = "choice", "logits"
MOST_USED = 32


@lru_cache(None)
def route_of(gating: str, n: int, bias_of: str | None, grouped: bool):
    """The function by which a warp routes a token. n: values of a lane; bias_of: None where there is no bias."""
    of_logits, of_choice = bias_of == "logits", bias_of == "choice"
    is_softmax, is_sigmoid, of_chosen = (gating == each for each in GATINGS)
    soft_max, mask, ranks_of, choose, take = soft_max_row(n), mask_row(n), rank_row(n), next_column(n), take_from_row(n)
    soft_max_of_chosen, normalize = soft_max_row(1), normalize_row(1)

    @device
    def route(probs, by, weights, ids, token, lane, n_expert, k, n_group, n_group_used, norm, factor):
        """probs, by: of a lane, the logits and, where there is one, the bias, which are written over."""
        ranks, w = cuda.local.array(n, i32), cuda.local.array(1, f32)
        if of_logits:
            for i in range(n):
                probs[i] = add(probs[i], by[i])
        if is_softmax:
            soft_max(probs, n_expert, lane)
        for i in range(n):
            if is_sigmoid:
                probs[i] = sigmoid(probs[i])
            by[i] = add(probs[i], by[i]) if of_choice else probs[i]
        if grouped:
            mask(by, n_expert, n_group, n_group_used, lane)
        ranks_of(by, n_expert, lane, ranks)
        expert, j = i32(0), i32(0)
        while j < k:
            chosen = choose(ranks, lane)
            expert = chosen if lane == j else expert
            j = i32(j + 1)
        w[0] = take(probs, expert)
        if of_chosen:
            soft_max_of_chosen(w, k, lane)
        if norm:
            normalize(w, k, lane)
        if lane < k:
            st(weights, i64(token) * k + lane, mul(w[0], factor))
            st(ids, i64(token) * k + lane, expert)
    return route


@factory([(GATINGS[i % 3], n, bias_of, bias_of == "choice") for i, n in enumerate(VALUES) for bias_of in (None, *BIASED)])
def topk_moe_kernel(gating, n, bias_of, grouped):
    load, route, has_bias = load_row(n), route_of(gating, n, bias_of, grouped), bias_of is not None

    def kernel(logits, bias, weights, ids, n_expert, k, n_group, n_group_used, norm, factor):
        probs, by = cuda.local.array(n, f32), cuda.local.array(n, f32)
        lane = i32(cuda.threadIdx.x)
        if has_bias:
            load(bias, i64(0), n_expert, lane, by)
        load(logits, i64(cuda.blockIdx.x) * n_expert, n_expert, lane, probs)
        route(probs, by, weights, ids, cuda.blockIdx.x, lane, n_expert, k, n_group, n_group_used, norm, factor)
    return Kernel(kernel, (F32, F32, F32, I32, N, N, N, N, N, SCALAR_F32), 32)


def check_routing(call, n_expert: int) -> None:
    need(call.gating in GATINGS, "gating", call.gating, ", ".join(GATINGS))
    need(call.bias_of in BIASED, "bias_of", call.bias_of, ", ".join(BIASED))
    need(1 <= call.k <= min(n_expert, MOST_USED), "k", call.k, f"1..{min(n_expert, MOST_USED)}")


def check(call):
    n_expert = call.logits.n_cols
    check_rows(call.logits)
    check_routing(call, n_expert)
    if call.n_group > 1:
        check_groups(n_expert, call.n_group, call.n_group_used)


def topk_moe(call):
    """weights, ids = those of k experts, of gating(logits) [+ bias], in the chosen groups, normed or not, times factor; with
    bias_of "logits" of gating(logits + bias).

    logits: f32 [n, up to 512]; bias: f32, a value an expert, or absent; weights: f32 [n, k]; ids: i32 [n, k]; k up to 32.
    n_group: 0 or 1 for no groups."""
    n, n_expert = call.logits.shape
    kernel = topk_moe_kernel(call.gating, n_values(n_expert), call.bias_of if call.bias else None, call.n_group > 1)
    args = (call.logits.data, (call.bias or call.logits).data, call.weights.data, call.ids.data, n_expert, call.k, call.n_group,
            call.n_group_used, int(call.norm), call.factor)
    return call.device.launch(kernel, n, 32, args)
