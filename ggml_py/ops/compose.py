"""Fused ops: each is a template, a function that builds it of primitive ops. All that is known of a fused op comes from its
template:

- its shape rule and its definition: the parts that the template builds for given operands;
- its fall-back: a device without a kernel of its own runs the parts;
- the pattern that the fuse pass looks for: the template, built with placeholders in the place of operands and parameters.

docs/numerics.md defines nothing for them: their bits are those of the parts one after the other, intermediates are only kept out
of memory.
"""
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from .node import Builder, Node, Tensor
from .primitive import is_leaf
from .table import OPS, ShapeError, declare

NEAREST = 4  # nodes that are looked at for a part that nothing leads to; those further back are of other layers


@dataclass(frozen=True)
class Free:
    """In a pattern: a parameter, any value of which is taken."""
    name: str


class _Recorder(Builder):
    """Builds the parts of a pattern: nodes whose tensors are placeholders, without dtype and shape."""

    def make(self, op, src, params, name) -> Node:
        part = Node(name, op, src, {**OPS[op].defaults, **params})
        part.results = tuple(Tensor(what, "", (), node=part) for what in OPS[op].results)
        return part

    def need(self, condition, message) -> None:
        pass


class _Replay(Builder):
    """Builds a template of nodes that are there: checks what the template needs."""

    def __init__(self, nodes):
        super().__init__()
        self.found = iter(nodes)

    def make(self, op, src, params, name) -> Node:
        return next(self.found)


@dataclass
class Match:
    """Where a pattern was found. nodes: of each part, in the template's order; src, params: of the fused op;
    results: in its order."""
    nodes: list[Node]
    src: tuple[Tensor, ...]
    params: dict[str, Any]
    results: tuple[Tensor, ...]


Bound = dict[Any, Any]  # what was found for a pattern's parts (nodes), placeholders (tensors) and parameters (by name)


def _bind(part: Node, node: Node, bound: Bound) -> bool:
    """Binds a part, and the parts that make its operands, to a node that is `_alike`. Where that fails, bound is of no use any
    more."""
    if part in bound:
        return bound[part] is node
    if node in bound.values():
        return False
    bound[part] = node
    for name, value in part.params.items():
        if isinstance(value, Free):
            value = bound.setdefault(value.name, node.params[name])
        if value != node.params[name]:
            return False
    bound.update(zip(part.results, node.results))
    for x, tensor in zip(part.src, node.src):
        if x.node is None:
            if bound.setdefault(x, tensor) is not tensor:
                return False
        elif tensor.node is None or tensor.is_view or not _bind(x.node, tensor.node, bound) or bound[x] is not tensor:
            return False
    return True


def _alike(part: Node, node: Node | None) -> bool:
    """Whether the ops of a part and of all that make its operands are those of a node and its makers."""
    if node is None or node.op != part.op or len(node.src) != len(part.src):
        return False
    for x, tensor in zip(part.src, node.src):  # noqa: SIM110, since all() takes twice as long
        if x.node is not None and not _alike(x.node, tensor.node):
            return False
    return True


def _with(part: Node, node: Node, bound: Bound) -> Bound | None:
    """What is bound, and the part with it; None where the node is another."""
    if not _alike(part, node):
        return None
    trial = dict(bound)
    return trial if _bind(part, node, trial) else None


class Pattern:
    """A template with placeholders: one of its variants."""

    def __init__(self, template: "Template", fixed: dict[str, Any], n_operands: int):
        op = OPS[template.op]
        self.template, self.fixed = template, fixed
        self.operands = [Tensor(name, "", ()) for name in op.operands[:n_operands]]
        recorder = _Recorder()
        self.results = template.results_of(recorder, self.operands, {name: fixed.get(name, Free(name)) for name in op.params})
        self.parts = recorder.nodes
        self.anchor = self.parts[-1]
        self.hops = [*self._hops()]

    def _hops(self) -> Iterator[tuple[Node, int]]:
        """(part, number of an operand): the parts that nothing leads to from the last one, in the order in which they are looked
        for among the readers of an operand that is bound by then."""
        found: set[Node] = set()

        def reach(part: Node) -> None:
            found.add(part)
            for x in part.src:
                if x.node is not None:
                    reach(x.node)

        reach(self.anchor)
        while missing := [part for part in reversed(self.parts) if part not in found]:
            bound = {x for part in found for x in (*part.src, *part.results)}
            part, i = next((part, i) for part in missing for i, x in enumerate(part.src) if x in bound)
            yield part, i
            reach(part)

    def find(self, node: Node, readers: dict[Tensor, list[Node]], index: dict[Node, int]) -> Match | None:
        """The match whose last part is this node, or None. readers: of each tensor. Parts that nothing leads to from the last one
        are looked for among the readers of what is bound, those nearest before the node first."""
        bound = _with(self.anchor, node, self.fixed)
        for part, i in self.hops:
            if bound is None:
                return None
            x = bound[part.src[i]]
            candidates = [each for each in readers[x] if each.op == part.op and each.src[i] is x and index[each] < index[node]]
            nearest = sorted(candidates, key=index.__getitem__, reverse=True)[:NEAREST]
            bound = next((found for each in nearest if (found := _with(part, each, bound)) is not None), None)
        if bound is None:
            return None
        op = OPS[self.template.op]
        match = Match([bound[part] for part in self.parts], tuple(bound[x] for x in self.operands),
                      {name: bound.get(name, op.defaults.get(name)) for name in op.params},
                      tuple(bound[x] for x in self.results))
        return match if self.template.takes(match) else None


@dataclass(eq=False)
class Template:
    """function: (g, *operands, **parameters) -> the results; an optional operand that is absent is None.
    variants: values of the parameters that decide which parts there are; a parameter that a variant does not name may have any
    value."""
    op: str
    function: Callable
    variants: list[dict[str, Any]]

    def results_of(self, g, operands, params) -> tuple:
        op = OPS[self.op]
        results = self.function(g, *operands, *[None] * (len(op.operands) - len(operands)), **params)
        return results if isinstance(results, tuple) else (results,)

    def build(self, node: Node) -> tuple[tuple[Node, ...], tuple[Tensor, ...]]:
        """(parts, results) for a node's operands and parameters."""
        op, g = OPS[self.op], _Parts(node)
        results = self.results_of(g, node.src, node.params)
        for what, result in zip(op.results, results, strict=True):
            if not result.is_state:
                result.name = node.name if what == op.results[0] else f"{node.name}-{what}"
        return tuple(g.nodes), results

    def takes(self, match: Match) -> bool:
        """Whether the template's own needs are met."""
        try:
            self.results_of(_Replay(match.nodes), match.src, match.params)
        except ShapeError:
            return False
        return True

    @cached_property
    def patterns(self) -> list[Pattern]:
        """Of all variants, those with more parts first."""
        op = OPS[self.op]
        counts = {len(op.operands), len(op.operands) - op.n_optional}
        found = [Pattern(self, fixed, n) for fixed in self.variants for n in counts]
        return sorted(found, key=lambda pattern: -len(pattern.parts))


class _Parts(Builder):
    """Builds the parts of a node, named after it."""

    def __init__(self, node: Node):
        super().__init__(node.device)
        self.node = node

    def apply(self, op, /, *src, name="", **params):
        return super().apply(op, *src, name=f"{self.node.name}-{op}-{len(self.nodes)}", **params)

    def refusal(self, name, op, src, error) -> Exception:
        """The fused op refuses what one of its parts does."""
        return ShapeError(f"{op}: {error}")


def fused(operands: str, params: str = "", results: str = "out", variants=({},), **kwargs):
    """Declares the decorated template as the op of its name."""
    def decorate(function):
        name = function.__name__
        declare(name, operands, function, params, results, template=Template(name, function, variants), **kwargs)
        return function
    return decorate


def choices(**values) -> list[dict[str, Any]]:
    """Every combination of values. ANY: the parameter is not fixed."""
    return [{name: value for name, value in zip(values, combination) if value is not ANY}
            for combination in product(*values.values())]


ANY = object()
GLU = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}  # activations -> their gated linear units
GATINGS = "softmax", "sigmoid", "softmax_of_chosen"
BIASED = "choice", "logits"  # what a router's bias is added to


def biased(g, product, bias):
    """The product, or its sum with a bias, one row."""
    if bias is None:
        return product
    g.need(lambda: bias.dtype == "f32" and bias.shape == product.shape[1:], "biases must be f32 [m]")
    return g.add(product, bias)


# The fuse pass runs in the order of this file: larger templates stand before those that they contain.

@fused("x y att_norm:weight q:weight k:weight v:weight pos table:whole cache_k:state cache_v:state dst seq present:whole "
       "o:weight ffn_norm:weight gate:weight up:weight down:weight", "n_head n_head_kv neox scale eps", "out sum cache_k cache_v")
def dense_layer(g, x, y, att_norm, q, k, v, pos, table, cache_k, cache_v, dst, seq, present, o,  # noqa: PLR0913  as many as operands
                ffn_norm, gate, up, down, *, n_head, n_head_kv, neox, scale, eps):
    """A layer of a dense model, of the sum x + y that the one before leaves: attention, and the feed-forward block, whose term is
    the first result; the second is the sum that it belongs to."""
    g.need(lambda: is_leaf(dst), "dst must be an input: kernels read it before those ahead of them have ended")
    *qkv, total = add_rms_norm_mul_mat_qkv(g, x, y, att_norm, q, k, v, None, None, None, eps=eps)
    q, cache_k, cache_v = rope_set_rows(g, *qkv, pos, table, cache_k, cache_v, dst, None, None, n_head=n_head,
                                        n_head_kv=n_head_kv, neox=neox, eps=None, slot_k=None, slot_v=None)
    act = flash_attn_ext_act(g, q, cache_k, cache_v, seq, pos, present, None, n_head=n_head, n_head_kv=n_head_kv, scale=scale)
    gated, total = add_rms_norm_mul_mat_glu(g, total, g.mul_mat(o, act), ffn_norm, gate, up, None, None, eps=eps, act="silu")
    return g.mul_mat(down, g.quantize(gated)), total, cache_k, cache_v


@fused("x y w:weight q:weight k:weight v:weight q_bias:weight k_bias:weight v_bias:weight", "eps", "q_out k_out v_out sum",
       n_optional=3, module="add_rms_norm_mul_mat")
def add_rms_norm_mul_mat_qkv(g, x, y, w, q, k, v, q_bias, k_bias, v_bias, *, eps):  # noqa: PLR0913  as many as operands
    """mul_mat_qkv of add_rms_norm_act(x, y, w), and the sum."""
    act, total = add_rms_norm_act(g, x, y, w, eps=eps)
    return *mul_mat_qkv(g, q, k, v, act, q_bias, k_bias, v_bias), total


@fused("x y w:weight gate:weight up:weight gate_bias:weight up_bias:weight", "eps act", "out sum", choices(act=GLU),
       n_optional=2, module="add_rms_norm_mul_mat")
def add_rms_norm_mul_mat_glu(g, x, y, w, gate, up, gate_bias, up_bias, *, eps, act):
    """mul_mat_glu of add_rms_norm_act(x, y, w), and the sum."""
    norm, total = add_rms_norm_act(g, x, y, w, eps=eps)
    return mul_mat_glu(g, gate, up, norm, gate_bias, up_bias, act=act), total


@fused("x y w:weight router:weight bias:weight", "eps k gating norm factor bias_of", "act out sum weights ids",
       choices(gating=GATINGS, norm=[True, False], factor=[ANY, 1.0], bias_of=BIASED), n_optional=1,
       defaults={"factor": 1.0, "bias_of": "choice"})
def add_rms_norm_topk_moe(g, x, y, w, router, bias, *, eps, k, gating, norm, factor, bias_of):  # noqa: PLR0913  as many as operands
    """add_rms_norm_and_act(x, y, w), and topk_moe of the product of a router with that norm, without groups."""
    act, out, total = add_rms_norm_and_act(g, x, y, w, eps=eps)
    g.need(lambda: is_leaf(router) and (bias is None or is_leaf(bias)),
           "router and bias must be weights: kernels read them before those ahead of them have ended")
    return act, out, total, *topk_moe(g, g.mul_mat(router, out), bias, k=k, gating=gating, norm=norm, factor=factor, n_group=0,
                                      n_group_used=0, bias_of=bias_of)


@fused("gate:weight up:weight x ids gate_bias:weight up_bias:weight", "act alpha limit may_skip", "out",
       choices(act=[*GLU, "swiglu_oai"]), n_optional=2, defaults={"alpha": 0.0, "limit": 0.0, "may_skip": False})
def mul_mat_id_glu(g, gate, up, x, ids, gate_bias, up_bias, *, act, alpha, limit, may_skip):  # noqa: PLR0913  as many as operands
    """A gated linear unit of two products with the matrices of experts, to each of which a bias may be added.
    swiglu_oai alone takes alpha and limit."""
    g.need(lambda: gate.shape == up.shape, "gate and up must have one shape")
    a, b = (g.mul_mat_id(w, x, ids, may_skip=may_skip) for w in (gate, up))
    if gate_bias is not None:
        a, b = (g.add_id(product, bias, ids, may_skip=may_skip) for product, bias in ((a, gate_bias), (b, up_bias)))
    return g.swiglu_oai(a, b, alpha=alpha, limit=limit) if act == "swiglu_oai" else unit(g, a, b, act)


def unit(g, gate, up, act):
    if act not in GLU:
        raise ShapeError(f"act must be one of {', '.join(GLU)}, not {act!r}")
    return getattr(g, GLU[act])(gate, up)


@fused("gate:weight up:weight x gate_bias:weight up_bias:weight", "act", "out", choices(act=GLU), n_optional=2)
def mul_mat_glu(g, gate, up, x, gate_bias, up_bias, *, act):
    """A gated linear unit of two products of one x, to each of which a bias may be added."""
    a, b = g.mul_mat(gate, x), g.mul_mat(up, x)
    return unit(g, biased(g, a, gate_bias), biased(g, b, up_bias), act)


@fused("state:slots qkv:whole a:whole dt:weight of_head:weight b:whole runs:whole", "n_head_k n_head_v tiled", "out state",
       overwrites={"state": "state"}, module="gated_delta_net")
def gated_delta_net_gates(g, state, qkv, a, dt, of_head, b, runs, **params):
    """gated_delta_net with the gates softplus(a + dt) * of_head and sigmoid(b)."""
    g.need(lambda: dt.shape == of_head.shape == a.shape[1:], "dt and of_head must be one row")
    g_ = g.mul(g.softplus(g.add(a, dt)), of_head)
    return g.gated_delta_net(state, qkv, g_, g.sigmoid(b), runs, **params)


@fused("z x w:weight", "eps", "act")
def rms_norm_swiglu_act(g, z, x, w, *, eps):
    """quantize(swiglu(z, rms_norm(x, w))): heads that are normed, times silu of z."""
    g.need(lambda: is_leaf(w), "w must be a weight")
    return g.quantize(g.swiglu(z, g.rms_norm(x, w, eps=eps)))


@fused("x gate", "", "act")
def mul_sigmoid_act(g, x, gate):
    return g.quantize(g.mul(x, g.sigmoid(gate)))


@fused("x", "", "act")
def relu_sqr_act(g, x):
    return g.quantize(g.relu_sqr(x))


@fused("gate up", "", "act")
def swiglu_act(g, gate, up):
    return g.quantize(g.swiglu(gate, up))


@fused("q:weight k:weight v:weight x q_bias:weight k_bias:weight v_bias:weight", "", "q_out k_out v_out", n_optional=3)
def mul_mat_qkv(g, q, k, v, x, q_bias, k_bias, v_bias):
    """The products of three matrices with one x, to each of which a bias may be added."""
    products = [g.mul_mat(w, x) for w in (q, k, v)]
    return tuple(biased(g, product, bias) for product, bias in zip(products, (q_bias, k_bias, v_bias)))


@fused("q k v pos table:whole cache_k:state cache_v:state dst q_norm:weight k_norm:weight",
       "n_head n_head_kv neox eps slot_k slot_v", "q_out cache_k cache_v",
       choices(slot_k=[None, ANY]), n_optional=2, defaults={"eps": None, "slot_k": None, "slot_v": None})
def rope_set_rows(g, q, k, v, pos, table, cache_k, cache_v, dst, q_norm, k_norm, *,  # noqa: PLR0913  as many as operands
                  n_head, n_head_kv, neox, eps, slot_k, slot_v):
    """Q and K rotated, their heads normed first where there are weights for it, and K and V written to cells of their caches: by
    number, or, where slots are given, by address."""
    g.need(lambda: all(map(is_leaf, (pos, table))),
           "pos and table must be inputs: kernels read them before those ahead of them have ended")
    if q_norm is not None:
        g.need(lambda: is_leaf(q_norm) and is_leaf(k_norm),
               "norms must be weights: kernels read them before those ahead of them have ended")
        g.need(lambda: q_norm.shape == (q.shape[1] // n_head,) and k_norm.shape == (k.shape[1] // n_head_kv,),
               "norms must be of one head")
        q, k = g.rms_norm(q, q_norm, eps=eps), g.rms_norm(k, k_norm, eps=eps)
    q = g.rope(q, pos, table, n_head=n_head, neox=neox)
    k = g.rope(k, pos, table, n_head=n_head_kv, neox=neox)
    if slot_k is None:
        return q, g.set_rows(cache_k, k, dst), g.set_rows(cache_v, v, dst)
    return q, g.cpy_rows_indirect(cache_k, k, dst, slot=slot_k), g.cpy_rows_indirect(cache_v, v, dst, slot=slot_v)


@fused("q k:state v:state seq pos present:whole sinks:weight", "n_head n_head_kv scale window n_embd_head_v softcap apart",
       "act", n_optional=1, defaults={"window": 0, "n_embd_head_v": 0, "softcap": 0.0, "apart": False})
def flash_attn_ext_act(g, q, k, v, seq, pos, present, sinks, **params):
    return g.quantize(g.flash_attn_ext(q, k, v, seq, pos, present, *[sinks] * (sinks is not None), **params))


@fused("logits bias:weight", "k gating norm factor n_group n_group_used bias_of", "weights ids",
       choices(gating=GATINGS, norm=[True, False], factor=[ANY, 1.0], n_group=[ANY, 0], bias_of=BIASED), n_optional=1,
       defaults={"factor": 1.0, "n_group": 0, "n_group_used": 0, "bias_of": "choice"})
def topk_moe(g, logits, bias, *, k, gating, norm, factor, n_group, n_group_used, bias_of):
    """The weights of k experts, and their ids: softmax or sigmoid of the logits, chosen by their sum with the bias in the groups
    that mask_groups leaves (n_group > 0), or, for the softmax of the chosen, by the logits; normalized or not, times factor.
    bias_of: "logits": the bias is added to the logits, before all else."""
    for what, value, allowed in (("gating", gating, GATINGS), ("bias_of", bias_of, BIASED)):
        if value not in allowed:
            raise ShapeError(f"{what} must be one of {', '.join(allowed)}, not {value!r}")
    if bias is not None:
        g.need(lambda: bias.dtype == "f32" and bias.shape == logits.shape[-1:], "bias must be f32 [X]")
        if bias_of == "logits":
            logits, bias = g.add(logits, bias), None
    probs = {"softmax": g.soft_max, "sigmoid": g.sigmoid}[gating](logits) if gating != "softmax_of_chosen" else logits
    chosen_by = probs
    if bias is not None:
        chosen_by = g.add(chosen_by, bias)
    if n_group:
        chosen_by = g.mask_groups(chosen_by, n_group=n_group, n_group_used=n_group_used)
    ids = g.top_k(chosen_by, k=k)
    weights = g.take_columns(probs, ids)
    if gating == "softmax_of_chosen":
        weights = g.soft_max(weights)
    if norm:
        weights = g.normalize(weights)
    return (weights if factor == 1.0 else g.scale(weights, factor=factor)), ids


@fused("w:weight x bias:weight", "", "out")
def mul_mat_bias(g, w, x, bias):
    return biased(g, g.mul_mat(w, x), bias)


@fused("x b:weight ids w", "may_skip", "out", defaults={"may_skip": False}, module="experts")
def weighted_sum_biased(g, x, b, ids, w, *, may_skip):
    """weighted_sum(add_id(x, b, ids), w)."""
    return g.weighted_sum(g.add_id(x, b, ids, may_skip=may_skip), w)


@fused("x w y gate", "", "out", module="experts")
def weighted_sum_gated(g, x, w, y, gate):
    """weighted_sum(x, w), and y times sigmoid of its gate, one a token."""
    return g.add(g.weighted_sum(x, w), g.weighted_sum(y, g.sigmoid(gate)))


@fused("w:weight x", "", "out")
def mul_mat_argmax(g, w, x):
    return g.argmax(g.mul_mat(w, x))


@fused("x y w:weight", "eps", "act sum", module="add_rms_norm")
def add_rms_norm_act(g, x, y, w, *, eps):
    """quantize(rms_norm(add(x, y), w)), over whole rows, and the sum."""
    act, _, total = add_rms_norm_and_act(g, x, y, w, eps=eps)
    return act, total


@fused("x y w:weight", "eps", "act out sum", module="add_rms_norm")
def add_rms_norm_and_act(g, x, y, w, *, eps):
    """The same, and that norm as floats."""
    out, total = add_rms_norm(g, x, y, w, eps=eps)
    _whole_rows(g, total, w)
    return g.quantize(out), out, total


def _whole_rows(g, x, w) -> None:
    g.need(lambda: w.shape == x.shape[1:], "w must be as long as a row")
    g.need(lambda: is_leaf(w), "w must be a weight: kernels read it before those ahead of them have ended")


@fused("x w:weight", "eps", "act")
def rms_norm_act(g, x, w, *, eps):
    """quantize(rms_norm(x, w)), over whole rows."""
    _whole_rows(g, x, w)
    return g.quantize(g.rms_norm(x, w, eps=eps))


@fused("x y w:weight", "eps", "out sum")
def add_rms_norm(g, x, y, w, *, eps):
    """rms_norm(add(x, y), w), and the sum."""
    g.need(lambda: y.shape == x.shape, "y must have x's shape")
    total = g.add(x, y)
    return g.rms_norm(total, w, eps=eps), total


FUSED = {name: op.template for name, op in OPS.items() if op.template}
