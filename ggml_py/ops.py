"""The op table: every operation is declared here once. Graphs check operands by it; backends, tests and reports look operations up in it.

Shapes are numpy's (rows outside): n = tokens, k and m = columns. dtypes: f32, i32, i64, u8; "act" = activations quantized in chunks of 256 columns
(docs/numerics.md section 3); the name of a GGUF type for weights and caches. The reference of an op is the function of its name in `module`.
"""
from dataclasses import dataclass, field
from math import prod
from typing import Callable, NamedTuple

from .quant.formats import FORMATS


class ShapeError(ValueError):
    """Operands that an op cannot take; the graph adds node and op."""


@dataclass(frozen=True)
class Op:
    name: str
    operands: tuple[str, ...]
    result: Callable  # (params, *operands) -> (dtype, shape), or ShapeError
    params: tuple[str, ...] = ()
    room: str = ""  # module in kernels/reference, kernels/cpu and kernels/cuda; the op's name unless given
    n_optional: int = 0  # the last operands of which there are all or none
    into: tuple[str, ...] = ()  # operands, caches, that it writes into; the first of all operands is one and is returned
    defaults: dict = field(default_factory=dict)  # values of parameters that need not be given
    is_view: bool = False  # the result is the first operand's memory
    also: dict = field(default_factory=dict)  # further results by name: of an operand's dtype and shape, or that operand, if it is written into; or a rule

    @property
    def module(self) -> str:
        return self.room or self.name

    @property
    def in_place(self) -> bool:
        return bool(self.into)


OPS: dict[str, Op] = {}


def op(operands: str, params: str = "", **kwargs):
    """Declares the decorated shape rule as the op of its name."""
    def declare(rule):
        OPS[rule.__name__] = Op(rule.__name__, tuple(operands.split()), rule, tuple(params.split()), **kwargs)
        return rule
    return declare


def need(condition: bool, message: str) -> None:
    if not condition:
        raise ShapeError(message)


def is_leaf(t) -> bool:
    """Whether no node writes it: a leaf, or a view of one."""
    return t.op is None or t.is_view and is_leaf(t.src[0])


def is_matrix(t) -> bool:
    return t.dtype in FORMATS and len(t.shape) == 2


@op("w ids")
def get_rows(_, w, ids):
    need(is_matrix(w), "w must be a weight matrix")
    need(ids.dtype == "i32" and len(ids.shape) == 1, "ids must be i32 [n]")
    return "f32", (ids.shape[0], w.shape[1])


@op("x ids", room="get_rows")
def take_rows(_, x, ids):
    need(x.dtype == "f32" and ids.dtype == "i32" and len(ids.shape) == 1, "x must be f32 [r, k] and ids i32 [n]")
    return "f32", (ids.shape[0], x.shape[1])


@op("x")
def quantize(_, x):
    need(x.dtype == "f32" and len(x.shape) == 2, "x must be f32 [n, k]")
    return "act", x.shape


@op("w x")
def mul_mat(_, w, x):
    need(is_matrix(w), "w must be a weight matrix [m, k]")
    _factors(w, x)
    return "f32", (x.shape[0], w.shape[0])


@op("q k v x q_bias k_bias v_bias", n_optional=3,
    also={"q": lambda params, q, k, v, x, *biases: mul_mat(params, q, x), "k": lambda params, q, k, v, x, *biases: mul_mat(params, k, x)})
def mul_mat_qkv(params, q, k, v, x, *biases):
    """mul_mat(v, x), and mul_mat(q, x) and mul_mat(k, x), the biases, where there are any, added to them."""
    need(all(b.dtype == "f32" and b.shape == w.shape[:1] for w, b in zip((q, k, v), biases)), "biases must be f32 [m]")
    mul_mat(params, q, x)
    mul_mat(params, k, x)
    return mul_mat(params, v, x)


def _factors(w, x) -> None:
    wanted = "act" if FORMATS[w.dtype].is_quantized else "f32"
    need(x.dtype == wanted and len(x.shape) == 2, f"x must be {wanted} for a {w.dtype} weight")
    need(w.shape[-1] == x.shape[1], f"w has {w.shape[-1]} columns, x {x.shape[1]}")


def is_stack(t) -> bool:
    return t.dtype in FORMATS and len(t.shape) == 3


@op("w x ids")
def mul_mat_id(_, w, x, ids):
    """Row i u + j is the product of w[ids[i, j]] and row i b + j % b of x; b rows a token, 1 or another divisor of u."""
    need(is_stack(w), "w must be weight matrices [X, m, k]")
    _factors(w, x)
    _ids(ids)
    n, u = ids.shape
    b = x.shape[0] // n if n else 1
    need(0 < u, "a token must have one expert at least")
    need(x.shape[0] == n * b and b > 0 and u % b == 0,
         f"x has {x.shape[0]} rows, allowed for ids of {n} tokens with {u} experts: a divisor of {u} for each token")
    return "f32", (n * u, w.shape[1])


@op("w x", room="mul_mat_id")
def mul_mat_heads(_, w, x):
    """Row i is the product of w[i % H] and row i of x."""
    need(is_stack(w), "w must be weight matrices [H, m, k]")
    _factors(w, x)
    need(x.shape[0] % w.shape[0] == 0, f"x has {x.shape[0]} rows, not whole tokens of {w.shape[0]} heads")
    return "f32", (x.shape[0], w.shape[1])


def _ids(ids) -> None:
    need(ids.dtype == "i32" and len(ids.shape) == 2, "ids must be i32 [n, u]")


@op("x b ids", room="experts")
def add_id(_, x, b, ids):
    """Row i u + j of x plus row ids[i, j] of b."""
    _ids(ids)
    need(x.dtype == b.dtype == "f32" and len(b.shape) == 2, "x and b must be f32, b [X, m]")
    need(x.shape == (prod(ids.shape), b.shape[1]), f"x must be [{prod(ids.shape)}, {b.shape[1]}]")
    return "f32", x.shape


@op("x s ids", room="experts")
def scale_id(_, x, s, ids):
    """Row i u + j of x times s[ids[i, j]]."""
    _ids(ids)
    need(x.dtype == s.dtype == "f32" and len(x.shape) == 2 and len(s.shape) == 1, "x and s must be f32, x [n u, m] and s [X]")
    need(x.shape[0] == prod(ids.shape), f"x must have {prod(ids.shape)} rows, for {ids.shape[0]} tokens with {ids.shape[1]} experts")
    return "f32", x.shape


@op("x w", room="experts")
def weighted_sum(_, x, w):
    """Row i is the sum of x[i u + j] w[i, j] over the u ranks j."""
    need(x.dtype == w.dtype == "f32" and len(x.shape) == len(w.shape) == 2, "x and w must be f32 [n u, m] and [n, u]")
    need(x.shape[0] == prod(w.shape), f"x must have {prod(w.shape)} rows, for {w.shape[0]} tokens with {w.shape[1]} experts")
    return "f32", (w.shape[0], x.shape[1])


def _rows(x) -> None:
    need(x.dtype == "f32" and len(x.shape) == 2 and x.shape[1] > 0, "x must be f32 [n, k]")


@op("x")
def soft_max(_, x):
    _rows(x)
    return "f32", x.shape


@op("x", "k", room="routing")
def top_k(params, x):
    """The columns of the k largest values, in order."""
    _rows(x)
    need(0 < params["k"] <= x.shape[1], f"k is {params['k']}, of {x.shape[1]} columns")
    return "i32", (x.shape[0], params["k"])


@op("x", "n_group n_group_used", room="routing")
def mask_groups(params, x):
    """-infinity but in the groups whose two largest values have the largest sums."""
    _rows(x)
    n, used = params["n_group"], params["n_group_used"]
    need(n > 0 and x.shape[1] % n == 0 and x.shape[1] // n > 1, f"{x.shape[1]} columns are not {n} groups of two or more")
    need(0 < used <= n, f"n_group_used is {used}, of {n} groups")
    return "f32", x.shape


@op("x ids", room="routing")
def take_columns(_, x, ids):
    _rows(x)
    _ids(ids)
    need(ids.shape[0] == x.shape[0], f"ids must have {x.shape[0]} rows")
    return "f32", ids.shape


@op("x", room="routing")
def normalize(_, x):
    """Rows divided by their sums, or by 2^-14 where that is less."""
    _rows(x)
    return "f32", x.shape


GATINGS = "softmax", "sigmoid", "softmax_of_chosen"


@op("logits bias", "k gating norm factor n_group n_group_used", n_optional=1,
    also={"ids": lambda params, logits, *bias: ("i32", (logits.shape[0], params["k"]))})
def topk_moe(params, logits, *bias):
    """The weights of k experts, and their ids: softmax or sigmoid of the logits, chosen by their sum with the bias in the groups that mask_groups leaves
    (n_group > 1), or, for the softmax of the chosen, by the logits; normalized or not, times factor."""
    need(params["gating"] in GATINGS, f"gating must be one of {', '.join(GATINGS)}, not {params['gating']!r}")
    need(all(b.dtype == "f32" and b.shape == logits.shape[-1:] for b in bias), "bias must be f32 [X]")
    top_k(params, logits)
    if params["n_group"] > 1:
        mask_groups(params, logits)
    return "f32", (logits.shape[0], params["k"])


@op("x", "shape", is_view=True)
def reshape(params, x):
    need(x.dtype == "f32" and prod(x.shape) == prod(params["shape"]), f"x must be f32 of {prod(params['shape'])} values")
    return "f32", tuple(params["shape"])


@op("x", "n_head first n", room="heads")
def slice_heads(params, x):
    """Channels first .. first + n - 1 of each head."""
    _rows(x)
    n_head, first, n = params["n_head"], params["first"], params["n"]
    need(x.shape[1] % n_head == 0, f"{x.shape[1]} columns are not {n_head} heads")
    need(0 <= first and 0 < n and first + n <= x.shape[1] // n_head, f"channels {first} to {first + n - 1} in heads of {x.shape[1] // n_head}")
    return "f32", (x.shape[0], n_head * n)


@op("x y", "n_head n_head_y", room="heads")
def concat_heads(params, x, y):
    """The channels of each head of x, and behind them those of the same head of y, or of its only one."""
    need(x.dtype == y.dtype == "f32" and len(x.shape) == len(y.shape) == 2 and x.shape[0] == y.shape[0], "x and y must be f32 [n, heads]")
    n_head, n_head_y = params["n_head"], params["n_head_y"]
    need(n_head_y in (1, n_head) and x.shape[1] % n_head == 0 and y.shape[1] % n_head_y == 0,
         f"{x.shape[1]} and {y.shape[1]} columns are not {n_head} and {n_head_y} heads")
    return "f32", (x.shape[0], x.shape[1] + y.shape[1] // n_head_y * n_head)


@op("x w", "eps")
def rms_norm(_, x, w):
    """Over runs of len(w) columns: whole rows, or each head of a row."""
    need(x.dtype == w.dtype == "f32" and len(w.shape) == 1, "x and w must be f32, w [k]")
    need(x.shape[-1] % w.shape[0] == 0, f"rows of {x.shape[-1]} are not whole runs of {w.shape[0]}")
    return "f32", x.shape


@op("x w", "eps")
def rms_norm_act(_, x, w):
    """quantize(rms_norm(x, w)), over whole rows."""
    need(x.dtype == w.dtype == "f32" and len(x.shape) == 2, "x and w must be f32, x [n, k]")
    need(w.shape == x.shape[1:], f"w must be [{x.shape[1]}], a whole row")
    need(is_leaf(w), "w must be a weight: kernels read it before those ahead of them have ended")
    return "act", x.shape


def _elementwise(x, y):
    need(x.dtype == y.dtype == "f32", "both operands must be f32")
    need(y.shape in (x.shape, x.shape[-1:]), "the second operand must have the first one's shape or be one row of it")
    return "f32", x.shape


@op("x y", room="elementwise")
def add(_, x, y):
    return _elementwise(x, y)


@op("x y", room="elementwise")
def mul(_, x, y):
    return _elementwise(x, y)


@op("x", "factor", room="elementwise")
def scale(_, x):
    need(x.dtype == "f32", "x must be f32")
    return "f32", x.shape


@op("x", room="elementwise")
def sigmoid(_, x):
    need(x.dtype == "f32", "x must be f32")
    return "f32", x.shape


@op("x y w", "eps", also={"sum": "x"})
def add_rms_norm(params, x, y, w):
    """rms_norm(add(x, y), w), and the sum."""
    need(y.dtype == "f32" and y.shape == x.shape, "y must be f32 of x's shape")
    return rms_norm(params, x, w)


@op("x y w", "eps", room="add_rms_norm", also={"sum": "x"})
def add_rms_norm_act(params, x, y, w):
    """quantize(rms_norm(add(x, y), w)), over whole rows, and the sum."""
    need(y.dtype == "f32" and y.shape == x.shape, "y must be f32 of x's shape")
    return rms_norm_act(params, x, w)


@op("x y w", "eps", room="add_rms_norm", also={"norm": "x", "sum": "x"})
def add_rms_norm_and_act(params, x, y, w):
    """quantize(rms_norm(add(x, y), w)), over whole rows, that norm, and the sum."""
    return add_rms_norm_act(params, x, y, w)


MOST_NORMED = 6144  # columns of a row that every block of the products behind it norms for itself: what the shared memory of all GPUs has room for


class Result(NamedTuple):
    """What a rule gives, as an operand of another one."""
    dtype: str
    shape: tuple[int, ...]


def _row_norm_act(params, x, y, w):
    n_cols = x.shape[-1]
    need(x.shape[:-1] == (1,), "x must be one row")
    need(n_cols % 4 == 0 and n_cols <= MOST_NORMED, f"x has {n_cols} columns, allowed: a multiple of 4 up to {MOST_NORMED}")
    return Result(*add_rms_norm_act(params, x, y, w))


@op("x y w q k v q_bias k_bias v_bias", "eps", room="add_rms_norm_mul_mat", n_optional=3,
    also={"sum": "x", "q": lambda _, x, y, w, q, *others: ("f32", (1, q.shape[0])), "k": lambda _, x, y, w, q, k, *others: ("f32", (1, k.shape[0]))})
def add_rms_norm_mul_mat_qkv(params, x, y, w, q, k, v, *biases):
    """mul_mat_qkv of add_rms_norm_act(x, y, w), of one row, and the sum."""
    return mul_mat_qkv(params, q, k, v, _row_norm_act(params, x, y, w), *biases)


GLU = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}  # gated linear units -> their activations


def _glu(gate, up):
    need(gate.dtype == up.dtype == "f32" and gate.shape == up.shape, "gate and up must be f32 of one shape")
    return "f32", gate.shape


@op("gate up", room="elementwise")
def swiglu(_, gate, up):
    return _glu(gate, up)


@op("gate up", room="glu")
def geglu(_, gate, up):
    return _glu(gate, up)


@op("gate up", room="glu")
def reglu(_, gate, up):
    return _glu(gate, up)


@op("gate up", "alpha limit", room="glu")
def swiglu_oai(params, gate, up):
    """gpt-oss's: gate up to limit, up within -limit .. limit plus 1, and sigmoid of alpha times gate."""
    need(params["limit"] > 0, f"limit must be positive, got {params['limit']}")
    return _glu(gate, up)


@op("gate up x gate_bias up_bias", "act", n_optional=2)
def mul_mat_glu(params, gate, up, x, *biases):
    """mul(act(mul_mat(gate, x)), mul_mat(up, x)), the biases, where there are any, added to the products first."""
    need(params["act"] in GLU.values(), f"act must be one of {', '.join(GLU.values())}, not {params['act']!r}")
    need(gate.shape == up.shape, "gate and up must have one shape")
    need(all(b.dtype == "f32" and b.shape == gate.shape[:1] for b in biases), "biases must be f32 [m]")
    mul_mat(params, up, x)
    return mul_mat(params, gate, x)


@op("x y w gate up gate_bias up_bias", "eps act", room="add_rms_norm_mul_mat", n_optional=2, also={"sum": "x"})
def add_rms_norm_mul_mat_glu(params, x, y, w, gate, up, *biases):
    """mul_mat_glu of add_rms_norm_act(x, y, w), of one row, and the sum."""
    return mul_mat_glu(params, gate, up, _row_norm_act(params, x, y, w), *biases)


@op("gate up x ids gate_bias up_bias", "act alpha limit", n_optional=2, defaults={"alpha": 0.0, "limit": 0.0})
def mul_mat_id_glu(params, gate, up, x, ids, *biases):
    """mul_mat_glu with the matrices of experts, and their biases. act may also be swiglu_oai, which takes alpha and limit."""
    need(params["act"] in (*GLU.values(), "swiglu_oai"), f"act must be one of {', '.join(GLU.values())}, swiglu_oai, not {params['act']!r}")
    need(params["act"] != "swiglu_oai" or params["limit"] > 0, f"limit must be positive, got {params['limit']}")
    need(gate.shape == up.shape, "gate and up must have one shape")
    need(all(b.dtype == "f32" and b.shape == gate.shape[:2] for b in biases), "biases must be f32 [X, m]")
    mul_mat_id(params, up, x, ids)
    return mul_mat_id(params, gate, x, ids)


@op("gate up")
def swiglu_act(_, gate, up):
    """quantize(swiglu(gate, up))."""
    need(gate.dtype == up.dtype == "f32" and gate.shape == up.shape and len(gate.shape) == 2, "gate and up must be f32 [n, k]")
    return "act", gate.shape


@op("x pos table", "n_head neox")
def rope(params, x, pos, table):
    need(x.dtype == "f32" and pos.dtype == "i32" and pos.shape == x.shape[:1], "x must be f32 [n, k], pos i32 [n]")
    need(x.shape[1] % params["n_head"] == 0, f"{x.shape[1]} columns are not {params['n_head']} heads")
    need(2 * table.shape[1] <= x.shape[1] // params["n_head"], f"{2 * table.shape[1]} rotated channels in heads of {x.shape[1] // params['n_head']}")
    return "f32", x.shape


def _rows_of_cache(cache, x):
    need(x.dtype == "f32" and len(x.shape) == 2, "x must be f32 [n, k]")
    need(cache.shape[1] == x.shape[1], f"cache has {cache.shape[1]} columns, x {x.shape[1]}")
    return cache.dtype, cache.shape


@op("cache x rows", into=("cache",))
def set_rows(_, cache, x, rows):
    need(rows.dtype == "i64" and rows.shape == x.shape[:1], "rows must be i64 [n]")
    return _rows_of_cache(cache, x)


@op("cache x", "cell", room="set_rows", into=("cache",))
def cpy_rows(params, cache, x):
    """Cache rows cell .. cell + n - 1 = x. The destination is part of the node."""
    need(0 <= params["cell"] <= cache.shape[0] - x.shape[0], f"cells {params['cell']} to {params['cell'] + x.shape[0] - 1} of {cache.shape[0]}")
    return _rows_of_cache(cache, x)


@op("cache x dst", "slot", room="set_rows", into=("cache",))
def cpy_rows_indirect(params, cache, x, dst):
    """The cache row at address dst[slot, i] = x[i]."""
    need(dst.dtype == "i64" and dst.shape[1:] == x.shape[:1] and 0 <= params["slot"] < dst.shape[0], f"dst must be i64 [more than slot = {params['slot']}, n]")
    return _rows_of_cache(cache, x)


@op("cache_v cache_k v k q pos table dst q_norm k_norm", "n_head n_head_kv neox eps slots", n_optional=2, into=("cache_v", "cache_k"),
    also={"q": "q", "k": "cache_k"})
def rope_set_rows(params, cache_v, cache_k, v, k, q, pos, table, dst, *norms):
    """set_rows(cache_v, v, dst), and rope(q) and set_rows(cache_k, rope(k), dst), the heads of q and k normed first where there are weights for it.
    slots: None, or two, those of K and V: then cpy_rows_indirect in the place of set_rows."""
    need(cache_v.dtype in ("f32", "f16") and cache_k.dtype in ("f32", "f16"), "caches must be f32 or f16")
    rope({"n_head": params["n_head"]}, q, pos, table)
    rope({"n_head": params["n_head_kv"]}, k, pos, table)
    dim = q.shape[1] // params["n_head"]
    need(dim == k.shape[1] // params["n_head_kv"], f"heads of q and k must be of one size, got {q.shape} and {k.shape}")
    need(all(w.dtype == "f32" and w.shape == (dim,) for w in norms), f"norms must be f32 [{dim}]")
    need(all(map(is_leaf, (pos, table, *norms))), "pos and table must be inputs, norms weights: kernels read them before those ahead of them have ended")
    if params["slots"] is None:
        set_rows(params, cache_k, k, dst)
        return set_rows(params, cache_v, v, dst)
    slot_k, slot_v = params["slots"]
    cpy_rows_indirect({"slot": slot_k}, cache_k, k, dst)
    return cpy_rows_indirect({"slot": slot_v}, cache_v, v, dst)


@op("q k v seq pos present sinks", "n_head n_head_kv scale window n_embd_head_v", n_optional=1, defaults={"window": 0, "n_embd_head_v": 0})
def flash_attn_ext(params, q, k, v, seq, pos, present, *sinks):
    """window: positions that a query sees, 0 for all. n_embd_head_v: of the one KV head of v, which may be k, only so many channels; 0 for all."""
    n, n_head, n_head_kv = q.shape[0], params["n_head"], params["n_head_kv"]
    need(n_head % n_head_kv == 0, f"{n_head} heads are not whole groups of {n_head_kv} KV heads")
    need(q.shape[1] % n_head == 0 and k.shape[1] == q.shape[1] // n_head * n_head_kv, f"q {q.shape} and k {k.shape} do not have heads of one size")
    need(v.shape[1] % n_head_kv == 0, f"v's {v.shape[1]} columns are not {n_head_kv} heads")
    head_v = params["n_embd_head_v"] or v.shape[1] // n_head_kv
    need(not params["n_embd_head_v"] or n_head_kv == 1 and 0 < head_v <= v.shape[1], f"n_embd_head_v is {head_v}, of {n_head_kv} heads in {v.shape[1]} columns")
    need(k.shape[0] == v.shape[0] == prod(present.shape), f"k has {k.shape[0]} cells, v {v.shape[0]}, present {prod(present.shape)}")
    need(seq.shape == pos.shape == (n,), f"seq and pos must be [{n}]")
    need(all(map(is_leaf, (seq, pos, *sinks))), "seq and pos must be inputs, sinks weights: kernels read them before those ahead of them have ended")
    need(params["window"] >= 0, f"window is {params['window']}, must be positive, or 0 for none")
    need(all(s.dtype == "f32" and s.shape == (n_head,) for s in sinks), f"sinks must be f32 [{n_head}]")
    return "f32", (n, head_v * n_head)


@op("q k v seq pos present sinks", "n_head n_head_kv scale window n_embd_head_v", n_optional=1, defaults={"window": 0, "n_embd_head_v": 0})
def flash_attn_ext_act(params, *operands):
    """quantize(flash_attn_ext(...))."""
    return "act", flash_attn_ext(params, *operands)[1]


@op("x")
def argmax(_, x):
    """The first column of the largest value of each row, -1 where one is NaN."""
    need(x.dtype == "f32" and len(x.shape) == 2 and x.shape[1] > 0, "x must be f32 [n, k]")
    return "i32", x.shape[:1]


@op("w x")
def mul_mat_argmax(params, w, x):
    """argmax(mul_mat(w, x))."""
    return argmax(params, Result(*mul_mat(params, w, x)))


@op("x")
def cpy(_, x):
    return x.dtype, x.shape
