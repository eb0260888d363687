"""The primitive ops: each is defined by itself, in docs/numerics.md and as code in kernels/reference.
Fused ops are made of them (`compose`)."""
from math import prod

from ..kernels.draws import SETTINGS
from ..quant.formats import FORMATS
from .table import Shape, declare, need, op


def is_leaf(t) -> bool:
    """Whether no node writes it."""
    return t.maker is None


def is_matrix(t) -> bool:
    return t.dtype in FORMATS and len(t.shape) == 2


def is_stack(t) -> bool:
    return t.dtype in FORMATS and len(t.shape) == 3


def _rows(x) -> None:
    need(x.dtype == "f32" and len(x.shape) == 2 and x.shape[1] > 0, "x must be f32 [n, k]")


def _ids(ids) -> None:
    need(ids.dtype == "i32" and len(ids.shape) == 2, "ids must be i32 [n, u]")


# Rows and products of matrices

@op("w:weight ids")
def get_rows(_, w, ids):
    need(is_matrix(w), "w must be a weight matrix")
    need(ids.dtype == "i32" and len(ids.shape) == 1, "ids must be i32 [n]")
    return Shape("f32", (ids.shape[0], w.shape[1]))


@op("x:whole ids", module="get_rows")
def take_rows(_, x, ids):
    need(x.dtype == "f32" and ids.dtype == "i32" and len(ids.shape) == 1, "x must be f32 [r, k] and ids i32 [n]")
    return Shape("f32", (ids.shape[0], x.shape[1]))


@op("x", results="act")
def quantize(_, x):
    need(x.dtype == "f32" and len(x.shape) == 2, "x must be f32 [n, k]")
    return Shape("act", x.shape)


def _factors(w, x) -> None:
    wanted = "act" if FORMATS[w.dtype].is_quantized else "f32"
    need(x.dtype == wanted and len(x.shape) == 2, f"x must be {wanted} for a {w.dtype} weight")
    need(w.shape[-1] == x.shape[1], f"w has {w.shape[-1]} columns, x {x.shape[1]}")


@op("w:weight x")
def mul_mat(_, w, x):
    need(is_matrix(w), "w must be a weight matrix [m, k]")
    _factors(w, x)
    return Shape("f32", (x.shape[0], w.shape[0]))


@op("w:weight x ids", "may_skip", defaults={"may_skip": False})
def mul_mat_id(_, w, x, ids):
    """Row i u + j is the product of w[ids[i, j]] and row i b + j % b of x; b rows a token, 1 or another divisor of u.
    may_skip: an id of -1 stands for no expert, and that row is 0."""
    need(is_stack(w), "w must be weight matrices [X, m, k]")
    _factors(w, x)
    _ids(ids)
    n, u = ids.shape
    b = x.shape[0] // n if n else 1
    need(u > 0, "a token must have one expert at least")
    need(x.shape[0] == n * b and b > 0 and u % b == 0,
         f"x has {x.shape[0]} rows, allowed for ids of {n} tokens with {u} experts: a divisor of {u} for each token")
    return Shape("f32", (n * u, w.shape[1]))


@op("w:weight x", module="mul_mat_id")
def mul_mat_heads(_, w, x):
    """Row i is the product of w[i % H] and row i of x."""
    need(is_stack(w), "w must be weight matrices [H, m, k]")
    _factors(w, x)
    need(x.shape[0] % w.shape[0] == 0, f"x has {x.shape[0]} rows, not whole tokens of {w.shape[0]} heads")
    return Shape("f32", (x.shape[0], w.shape[1]))


# Experts

@op("x b:weight ids", "may_skip", module="experts", defaults={"may_skip": False})
def add_id(_, x, b, ids):
    """Row i u + j of x plus row ids[i, j] of b; may_skip: as it is where the id is -1."""
    _ids(ids)
    need(x.dtype == b.dtype == "f32" and len(b.shape) == 2, "x and b must be f32, b [X, m]")
    need(x.shape == (prod(ids.shape), b.shape[1]), f"x must be [{prod(ids.shape)}, {b.shape[1]}]")
    return Shape("f32", x.shape)


@op("x s:weight ids", "may_skip", module="experts", defaults={"may_skip": False})
def scale_id(_, x, s, ids):
    """Row i u + j of x times s[ids[i, j]]; may_skip: as it is where the id is -1."""
    _ids(ids)
    need(x.dtype == s.dtype == "f32" and len(x.shape) == 2 and len(s.shape) == 1, "x and s must be f32, x [n u, m] and s [X]")
    need(x.shape[0] == prod(ids.shape),
         f"x must have {prod(ids.shape)} rows, for {ids.shape[0]} tokens with {ids.shape[1]} experts")
    return Shape("f32", x.shape)


@op("x w", module="experts")
def weighted_sum(_, x, w):
    """Row i is the sum of x[i u + j] w[i, j] over the u ranks j."""
    need(x.dtype == w.dtype == "f32" and len(x.shape) == len(w.shape) == 2, "x and w must be f32 [n u, m] and [n, u]")
    need(x.shape[0] == prod(w.shape), f"x must have {prod(w.shape)} rows, for {w.shape[0]} tokens with {w.shape[1]} experts")
    return Shape("f32", (w.shape[0], x.shape[1]))


@op("counts:whole ids slots:whole", "n_slots", results="hot cold counts", module="hot_experts")
def split_ids(_, counts, ids, slots):
    """For matrices of which some have copies in slots. slots: of each matrix its slot, -1 for none.

    hot: the slots of ids, n_slots for those that have none. cold: the ids that have no slot, -1 for the others. counts: how often
    each matrix was asked for; these are added."""
    _ids(ids)
    need(counts.dtype == slots.dtype == "i32" and counts.shape == slots.shape and len(slots.shape) == 1,
         "counts and slots must be i32 [X]")
    return Shape("i32", ids.shape), Shape("i32", ids.shape), Shape("i32", counts.shape)


@op("x y ids", module="hot_experts")
def pick_rows(_, x, y, ids):
    """Row i u + j is that of x, or that of y where ids[i, j] is -1."""
    _ids(ids)
    need(x.dtype == y.dtype == "f32" and x.shape == y.shape and len(x.shape) == 2, "x and y must be f32 of one shape, [n u, m]")
    need(x.shape[0] == prod(ids.shape), f"x must have {prod(ids.shape)} rows, one for each of ids")
    return Shape("f32", x.shape)


@op("x")
def soft_max(_, x):
    _rows(x)
    return Shape("f32", x.shape)


@op("x ids")
def log_soft_max(_, x, ids):
    """The logarithm of each row's softmax at columns ids, NaN where there is no such column."""
    _rows(x)
    _ids(ids)
    need(ids.shape[0] == x.shape[0], f"ids must have {x.shape[0]} rows")
    return Shape("f32", ids.shape)


@op("x", "k", results="ids", module="routing")
def top_k(params, x):
    """The columns of the k largest values, in order."""
    _rows(x)
    need(0 < params["k"] <= x.shape[1], f"k is {params['k']}, of {x.shape[1]} columns")
    return Shape("i32", (x.shape[0], params["k"]))


@op("x", "n_group n_group_used", module="routing")
def mask_groups(params, x):
    """-infinity but in the groups whose two largest values have the largest sums."""
    _rows(x)
    n, used = params["n_group"], params["n_group_used"]
    need(n > 0 and x.shape[1] % n == 0 and x.shape[1] // n > 1, f"{x.shape[1]} columns are not {n} groups of two or more")
    need(0 < used <= n, f"n_group_used is {used}, of {n} groups")
    return Shape("f32", x.shape)


@op("x ids", module="routing")
def take_columns(_, x, ids):
    _rows(x)
    _ids(ids)
    need(ids.shape[0] == x.shape[0], f"ids must have {x.shape[0]} rows")
    return Shape("f32", ids.shape)


@op("x", module="routing")
def normalize(_, x):
    """Rows divided by their sums, or by 2^-14 where that is less."""
    _rows(x)
    return Shape("f32", x.shape)


# Heads

@op("x", "n_head first n", module="heads")
def slice_heads(params, x):
    """Channels first .. first + n - 1 of each head."""
    _rows(x)
    n_head, first, n = params["n_head"], params["first"], params["n"]
    need(x.shape[1] % n_head == 0, f"{x.shape[1]} columns are not {n_head} heads")
    need(first >= 0 and n > 0 and first + n <= x.shape[1] // n_head,
         f"channels {first} to {first + n - 1} in heads of {x.shape[1] // n_head}")
    return Shape("f32", (x.shape[0], n_head * n))


@op("x y", "n_head n_head_y", module="heads")
def concat_heads(params, x, y):
    """The channels of each head of x, and behind them those of the same head of y, or of its only one."""
    need(x.dtype == y.dtype == "f32" and len(x.shape) == len(y.shape) == 2 and x.shape[0] == y.shape[0],
         "x and y must be f32 [n, heads]")
    n_head, n_head_y = params["n_head"], params["n_head_y"]
    need(n_head_y in (1, n_head) and x.shape[1] % n_head == 0 and y.shape[1] % n_head_y == 0,
         f"{x.shape[1]} and {y.shape[1]} columns are not {n_head} and {n_head_y} heads")
    return Shape("f32", (x.shape[0], x.shape[1] + y.shape[1] // n_head_y * n_head))


# One row, or one element, at a time

@op("x w:weight", "eps")
def rms_norm(_, x, w):
    """Over runs of len(w) columns: whole rows, or each head of a row."""
    need(x.dtype == w.dtype == "f32" and len(w.shape) == 1, "x and w must be f32, w [k]")
    need(x.shape[-1] % w.shape[0] == 0, f"rows of {x.shape[-1]} are not whole runs of {w.shape[0]}")
    return Shape("f32", x.shape)


@op("x w:weight b:weight", "eps", n_optional=1)
def layer_norm(_, x, w, *b):
    """Over runs of len(w) columns, without their mean: whole rows, or each head of a row. A bias may be added."""
    need(x.dtype == w.dtype == "f32" and len(w.shape) == 1, "x and w must be f32, w [k]")
    need(all(t.dtype == "f32" and t.shape == w.shape for t in b), f"b must be f32 [{w.shape[0]}]")
    need(x.shape[-1] % w.shape[0] == 0, f"rows of {x.shape[-1]} are not whole runs of {w.shape[0]}")
    return Shape("f32", x.shape)


@op("x", "n_head dim eps")
def l2_norm(params, x):
    """The first n_head runs of dim columns of each row divided by their lengths; the columns behind them as they are."""
    _rows(x)
    n_head, dim = params["n_head"], params["dim"]
    need(dim > 0 and 0 < n_head * dim <= x.shape[1], f"rows of {x.shape[1]} do not have {n_head} runs of {dim}")
    return Shape("f32", x.shape)


def _elementwise(_, x, y):
    need(x.dtype == y.dtype == "f32", "both operands must be f32")
    need(y.shape in (x.shape, x.shape[-1:]), "the second operand must have the first one's shape or be one row of it")
    return Shape("f32", x.shape)


declare("add", "x y", _elementwise, module="elementwise")
declare("mul", "x y", _elementwise, module="elementwise")


def _unary(_, x):
    need(x.dtype == "f32", "x must be f32")
    return Shape("f32", x.shape)


declare("scale", "x", _unary, "factor", module="elementwise")
declare("sigmoid", "x", _unary, module="elementwise")
declare("softplus", "x", _unary, module="elementwise")
declare("relu_sqr", "x", _unary, module="elementwise")
declare("gelu", "x", _unary, module="elementwise")


@op("x", "cap", module="elementwise")
def softcap(params, x):
    """cap times tanh of x / cap."""
    need(params["cap"] > 0, f"cap must be positive, got {params['cap']}")
    return _unary(params, x)


def _glu(_, gate, up):
    need(gate.dtype == up.dtype == "f32" and gate.shape == up.shape, "gate and up must be f32 of one shape")
    return Shape("f32", gate.shape)


declare("swiglu", "gate up", _glu, module="elementwise")
declare("geglu", "gate up", _glu, module="glu")
declare("reglu", "gate up", _glu, module="glu")


@op("gate up", "alpha limit", module="glu")
def swiglu_oai(params, gate, up):
    """gpt-oss's: gate up to limit, up within -limit .. limit plus 1, and sigmoid of alpha times gate."""
    need(params["limit"] > 0, f"limit must be positive, got {params['limit']}")
    return _glu(params, gate, up)


@op("x")
def argmax(_, x):
    """The first column of the largest value of each row, -1 where one is NaN."""
    _rows(x)
    return Shape("i32", x.shape[:1])


@op("x settings")
def draw(_, x, settings):
    """A column of the largest values of each row, drawn by its settings, -1 where a value is NaN."""
    _rows(x)
    wanted = x.shape[0], len(SETTINGS)
    need(settings.dtype == "f64" and settings.shape == wanted, f"settings must be f64 {list(wanted)}")
    return Shape("i32", x.shape[:1])


@op("x pos table:whole", "n_head neox")
def rope(params, x, pos, table):
    need(x.dtype == "f32" and pos.dtype == "i32" and pos.shape == x.shape[:1], "x must be f32 [n, k], pos i32 [n]")
    need(x.shape[1] % params["n_head"] == 0, f"{x.shape[1]} columns are not {params['n_head']} heads")
    need(2 * table.shape[1] <= x.shape[1] // params["n_head"],
         f"{2 * table.shape[1]} rotated channels in heads of {x.shape[1] // params['n_head']}")
    return Shape("f32", x.shape)


# The KV cache, and attention

def _rows_of_cache(cache, x):
    need(x.dtype == "f32" and len(x.shape) == 2, "x must be f32 [n, k]")
    need(cache.shape[1] == x.shape[1], f"cache has {cache.shape[1]} columns, x {x.shape[1]}")
    return Shape(cache.dtype, cache.shape)


@op("cache:state x rows", results="cache")
def set_rows(_, cache, x, rows):
    need(rows.dtype == "i64" and rows.shape == x.shape[:1], "rows must be i64 [n]")
    return _rows_of_cache(cache, x)


@op("cache:state x", "cell", module="set_rows", results="cache", step_params=("cell",))
def cpy_rows(params, cache, x):
    """Cache rows cell .. cell + n - 1 = x. The destination is part of the node."""
    need(0 <= params["cell"] <= cache.shape[0] - x.shape[0],
         f"cells {params['cell']} to {params['cell'] + x.shape[0] - 1} of {cache.shape[0]}")
    return _rows_of_cache(cache, x)


@op("cache:state x dst", "slot", module="set_rows", results="cache", addresses={"dst": "cache"})
def cpy_rows_indirect(params, cache, x, dst):
    """The cache row at address dst[slot, i] = x[i]."""
    need(dst.dtype == "i64" and dst.shape[1:] == x.shape[:1] and 0 <= params["slot"] < dst.shape[0],
         f"dst must be i64 [more than slot = {params['slot']}, n]")
    return _rows_of_cache(cache, x)


@op("q k:state v:state seq pos present:whole sinks:weight", "n_head n_head_kv scale window n_embd_head_v softcap apart",
    n_optional=1, defaults={"window": 0, "n_embd_head_v": 0, "softcap": 0.0, "apart": False})
def flash_attn_ext(params, q, k, v, seq, pos, present, *sinks):
    """window: positions that a query sees, 0 for all. n_embd_head_v: of the one KV head of v, which may be k,
    only so many channels; 0 for all. A sequence has as many cells as positions, or, with a window, a ring of fewer, a multiple of
    128, where position p is cell p % ring: those that a query sees lie there. softcap: scores become softcap times tanh of
    score / softcap; 0: they do not. apart: the micro-batch has few tokens of each of several sequences, which decides the kernel
    at most."""
    n, n_head, n_head_kv = q.shape[0], params["n_head"], params["n_head_kv"]
    need(n_head % n_head_kv == 0, f"{n_head} heads are not whole groups of {n_head_kv} KV heads")
    need(q.shape[1] % n_head == 0 and k.shape[1] == q.shape[1] // n_head * n_head_kv,
         f"q {q.shape} and k {k.shape} do not have heads of one size")
    need(v.shape[1] % n_head_kv == 0, f"v's {v.shape[1]} columns are not {n_head_kv} heads")
    head_v = params["n_embd_head_v"] or v.shape[1] // n_head_kv
    need(not params["n_embd_head_v"] or (n_head_kv == 1 and 0 < head_v <= v.shape[1]),
         f"n_embd_head_v is {head_v}, of {n_head_kv} heads in {v.shape[1]} columns")
    n_seq, n_ctx = present.shape
    ring = k.shape[0] // n_seq
    is_ring = ring % 128 == 0 and 0 < params["window"] <= ring < n_ctx
    need(k.shape[0] == v.shape[0] == n_seq * ring and (ring == n_ctx or is_ring),
         f"k has {k.shape[0]} cells, v {v.shape[0]}, present {n_seq * n_ctx}, the window {params['window']}")
    need(seq.shape == pos.shape == (n,), f"seq and pos must be [{n}]")
    need(all(map(is_leaf, (seq, pos, *sinks))),
         "seq and pos must be inputs, sinks weights: kernels read them before those ahead of them have ended")
    need(params["window"] >= 0, f"window is {params['window']}, must be positive, or 0 for none")
    need(params["softcap"] >= 0, f"softcap is {params['softcap']}, must be positive, or 0 for none")
    need(all(s.dtype == "f32" and s.shape == (n_head,) for s in sinks), f"sinks must be f32 [{n_head}]")
    return Shape("f32", (n, head_v * n_head))


# What recurrent layers remember: a row of a state for each sequence, and rows of the states before it (`state.recurrent`).
# runs: i32 [r, 3 + K], of each sequence in the micro-batch, whose tokens lie one behind the other:
#     first, n     its tokens are the rows first .. first + n - 1; n may be 0
#     source       the row of the state before them; -1 for zeros
#     K rows       to which the states go after its last token, the one before that, and so on; -1: it is not kept
# The row `source` may be one that is written: it is read before.

def _recurrent(state, runs) -> None:
    need(state.dtype == "f32" and len(state.shape) == 2, "state must be f32 [rows, values]")
    need(runs.dtype == "i32" and len(runs.shape) == 2 and runs.shape[1] > 3, "runs must be i32 [r, 3 + K], K at least 1")
    need(is_leaf(runs), "runs must be an input")


@op("state:slots x:whole w:weight runs:whole bias:weight", "activation", results="out state", overwrites={"state": "state"},
    n_optional=1, defaults={"activation": "silu"})
def ssm_conv(params, state, x, w, runs, *bias):
    """Each channel's sum, with weights, of its values at the last tokens, plus a bias where there is one, and silu of that or,
    with the activation "none", as it is; state: the values at the tokens before."""
    _recurrent(state, runs)
    need(params["activation"] in ("silu", "none"), f"activation is {params['activation']!r}, must be silu or none")
    need(x.dtype == w.dtype == "f32" and len(x.shape) == len(w.shape) == 2 and w.shape[0] == x.shape[1] and w.shape[1] > 1,
         "x and w must be f32, x [n, channels], w [channels, 2 or more]")
    need(state.shape[1] == (w.shape[1] - 1) * x.shape[1], f"rows of state must have {(w.shape[1] - 1) * x.shape[1]} values")
    need(all(b.dtype == "f32" and b.shape == x.shape[1:] for b in bias), f"bias must be f32 [{x.shape[1]}]")
    return Shape("f32", x.shape), Shape("f32", state.shape)


@op("state:slots x:whole dt:whole bias:weight a:weight d:weight runs:whole", "n_head n_group n_state", results="out state",
    overwrites={"state": "state"})
def ssm_scan(params, state, x, dt, bias, a, d, runs):
    """x: of each token n_head heads of x, n_group groups of n_state values of B, as many of C; head j has the group
    j / (n_head / n_group)."""
    _recurrent(state, runs)
    _rows(x)
    n_head, n_group, n_state = params["n_head"], params["n_group"], params["n_state"]
    need(n_group > 0 and n_head > 0 and n_head % n_group == 0, f"{n_head} heads are not {n_group} groups of one size")
    need(n_state > 0 and n_state % 8 == 0, f"n_state is {n_state}, must be a multiple of 8")
    inner = x.shape[1] - 2 * n_group * n_state
    need(inner > 0 and inner % n_head == 0,
         f"{x.shape[1]} columns are not {n_head} heads and twice {n_group} groups of {n_state}")
    need(dt.dtype == "f32" and dt.shape == (x.shape[0], n_head), f"dt must be f32 [n, {n_head}]")
    need(all(t.dtype == "f32" and prod(t.shape) == n_head for t in (bias, a, d)), f"bias, a and d must be f32 [{n_head}]")
    need(state.shape[1] == inner * n_state, f"rows of state must have {inner * n_state} values")
    return Shape("f32", (x.shape[0], inner)), Shape("f32", state.shape)


@op("state:slots qkv:whole g:whole beta:whole runs:whole", "n_head_k n_head_v tiled", results="out state",
    overwrites={"state": "state"})
def gated_delta_net(params, state, qkv, g, beta, runs):
    """qkv: of each token n_head_k heads of q, as many of k, n_head_v heads of v. tiled: value head j has the key head
    j % n_head_k; else j / (n_head_v / n_head_k)."""
    _recurrent(state, runs)
    _rows(qkv)
    n_k, n_v = params["n_head_k"], params["n_head_v"]
    need(n_k > 0 and n_v > 0 and n_v % n_k == 0, f"{n_v} value heads are not whole groups of {n_k} key heads")
    dim = qkv.shape[1] // (2 * n_k + n_v)
    need(dim * (2 * n_k + n_v) == qkv.shape[1] and dim % 8 == 0,
         f"{qkv.shape[1]} columns are not {2 * n_k + n_v} heads of a multiple of 8 channels")
    need(all(t.dtype == "f32" and t.shape == (qkv.shape[0], n_v) for t in (g, beta)), f"g and beta must be f32 [n, {n_v}]")
    need(state.shape[1] == n_v * dim * dim, f"rows of state must have {n_v * dim * dim} values")
    return Shape("f32", (qkv.shape[0], n_v * dim)), Shape("f32", state.shape)


@op("x dst:state", results="dst")
def cpy(_, x, dst):
    """dst = x. Where x is on another device than dst, its layout becomes that of dst's device."""
    need(x.dtype == dst.dtype and x.shape == dst.shape, "dst must have x's dtype and shape")
    return Shape(dst.dtype, dst.shape)
