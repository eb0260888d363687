"""Graph passes: rewrites of a graph before it is planned. None changes a bit; each can be switched off by its name."""
from collections import defaultdict
from typing import Callable, NamedTuple

from .errors import UserError
from .graph import Graph, Tensor
from .ops import GLU, OPS, ShapeError


class Match(NamedTuple):
    """What a pass found before a node: operands and parameters of the fused op, and the nodes whose work it takes over, those first that stay results."""
    src: tuple[Tensor, ...]
    params: dict
    taken: list[Tensor]
    into: Tensor | None = None  # the node that becomes the fused one, if it is not the one that was looked at


def chain(producer: str, consumer: str) -> Callable[[Tensor], Match | None]:
    """A node of op `consumer` whose operand x is made by `producer`: the fused op has the operands of both, the producer's first, and the parameters."""
    at = OPS[consumer].operands.index("x")

    def match(node: Tensor) -> Match | None:
        if node.op == consumer and node.src[at].op == producer:
            made = node.src[at]
            return Match((*made.src, *node.src[:at], *node.src[at + 1:]), {**made.params, **node.params}, [made])
        return None
    return match


def product(node: Tensor, op: str = "mul_mat", add: str = "add") -> Match | None:
    """Operands of the op and, where a bias is added, what is added."""
    if node.op == add and node.src[0].op == op:
        return Match((*node.src[0].src, *node.src[1:]), {}, [node.src[0], node])
    return Match(node.src, {}, [node]) if node.op == op else None


def gated_products(node: Tensor) -> Match | None:
    """A gated linear unit of two products of one x, with biases in both or in none."""
    found = [product(source) for source in node.src] if node.op in GLU else []
    if not found or None in found or len(found[0].src) != len(found[1].src) or found[0].src[1] is not found[1].src[1]:
        return None
    (gate, x, *gate_bias), (up, _, *up_bias) = found[0].src, found[1].src
    return Match((gate, up, x, *gate_bias, *up_bias), {"act": GLU[node.op]}, [*found[0].taken, *found[1].taken])


def gated_products_of_experts(node: Tensor) -> Match | None:
    """The same with the matrices, and biases, of the same experts."""
    units = {**GLU, "swiglu_oai": "swiglu_oai"}
    found = [product(source, "mul_mat_id", "add_id") for source in node.src] if node.op in units else []
    if not found or None in found or len(found[0].src) != len(found[1].src):
        return None
    (gate, x, ids, *gate_bias), (up, also_x, also_ids, *up_bias) = found[0].src, found[1].src
    if x is not also_x or any(each is not ids for each in (also_ids, *gate_bias[1:], *up_bias[1:])):
        return None
    params = {"alpha": 0.0, "limit": 0.0, **node.params, "act": units[node.op]}
    return Match((gate, up, x, ids, *gate_bias[:1], *up_bias[:1]), params, [*found[0].taken, *found[1].taken])


def products_of_attention(node: Tensor) -> Match | None:
    """The products that Q, K and V of an attention begin with, by three matrices of one x, V's last; with their biases, if all have one."""
    if node.op != "flash_attn_ext":
        return None
    products, sums = zip(*(_beginning(source) for source in node.src[:3]))
    q, k, v = products
    if len(set(products)) < 3 or any(each.op != "mul_mat" or each.src[1] is not v.src[1] for each in products):
        return None
    src = q.src[0], k.src[0], *v.src
    if None in sums:
        return Match(src, {}, [q, k], into=v)
    return Match((*src, *(each.src[1] for each in sums)), {}, [*sums[:2], *products], into=sums[2])


def _beginning(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """What is scaled, added to, normed, rotated and put into a cache to give x; and what adds a row to that."""
    operand, then = {"scale": 0, "add": 0, "rms_norm": 0, "rope": 0, "set_rows": 1, "cpy_rows": 1, "cpy_rows_indirect": 1}, None
    while x.op in operand:
        x, then = x.src[operand[x.op]], x
    return x, then if then is not None and then.op == "add" and len(then.src[1].shape) == 1 else None


def rotated_and_cached(node: Tensor) -> Match | None:
    """Q of an attention rotated, and K, rotated the same way, and V put into the same cells of their caches, V last; and the norms of Q and K before that,
    if there are both."""
    if node.op != "flash_attn_ext":
        return None
    q, k, v = node.src[:3]
    if q.op != "rope" or k.op not in ("set_rows", "cpy_rows_indirect") or v.op != k.op or k.src[1].op != "rope":
        return None
    (cache_k, rotated, dst), (cache_v, values, also_dst) = k.src, v.src
    (x, *angles), (y, *also_angles) = q.src, rotated.src
    if dst is not also_dst or q.params["neox"] != rotated.params["neox"] or any(a is not b for a, b in zip(angles, also_angles)):
        return None
    params = {"n_head": q.params["n_head"], "n_head_kv": rotated.params["n_head"], "neox": q.params["neox"], "eps": 0.0,
              "slots": None if k.op == "set_rows" else (k.params["slot"], v.params["slot"])}
    norms, taken = (), [q, k, rotated]
    if x.op == y.op == "rms_norm" and x.params == y.params:
        taken += x, y
        params["eps"] = x.params["eps"]
        (x, q_norm), (y, k_norm) = x.src, y.src
        norms = q_norm, k_norm
    return Match((cache_v, cache_k, values, y, x, *angles, dst, *norms), params, taken, into=v)


def routing(node: Tensor) -> Match | None:
    """The choice of the experts whose outputs a node adds by weight, and their weights."""
    if node.op != "weighted_sum":
        return None
    taken, params = [], {"factor": 1.0, "n_group": 0, "n_group_used": 0, "gating": "softmax_of_chosen"}

    def step(x: Tensor, *ops: str) -> Tensor:
        """The first operand of x, which is taken, if x is of one of these ops; else x."""
        if x.op not in ops:
            return x
        taken.append(x)
        params.update({key: value for key, value in x.params.items() if key in ("factor", "n_group", "n_group_used", "k")})
        return x.src[0]
    weights = node.src[1]
    x = step(weights, "scale")
    scaled, normalized = x, step(x, "normalize")
    params["norm"] = normalized is not scaled
    chosen = step(normalized, "soft_max")
    if chosen.op != "take_columns" or chosen.src[1].op != "top_k":
        return None
    probs, ids = chosen.src
    taken.append(chosen)
    by = step(ids, "top_k")
    by = step(by, "mask_groups")
    bias = by.src[1:] if by.op == "add" and by.src[0] is probs else ()
    by = step(by, "add") if bias else by
    logits = probs if chosen is not normalized else step(probs, "soft_max", "sigmoid")
    if by is not probs or chosen is normalized and logits is probs:
        return None
    if logits is not probs:
        params["gating"] = {"soft_max": "softmax"}.get(probs.op, probs.op)
    taken.remove(ids)
    return Match((logits, *bias), params, [ids, *(each for each in taken if each is not weights)], into=weights)


# Name of the pass and of the op it makes -> what it looks for. A node becomes the fused node, in its place, where
#
# - the op, defined as the composition of what is taken, takes the operands and parameters by its shape rule,
# - all that is taken is on the node's device, which does not decline,
# - nobody else reads a result that is taken, and it is no output; but for those that the fused op gives as well, as add_rms_norm gives the sum, and
#   further results of what is taken: their other readers only have to stand behind the node,
# - no in-place op between what is taken and the node writes an operand, and no other node there reads a cache that what is taken writes.
#
# They run in this order: add_rms_norm_and_act looks at norms that have other readers than quantize, which the passes before it leave (a router and its
# experts read one norm), swiglu_act at what mul_mat_glu and mul_mat_id_glu leave, mul_mat_qkv at what rope_set_rows takes, which looks at the
# attention that flash_attn_ext_act takes; the products of a norm at what makes both.
PASSES = {
    "rms_norm_act": chain("rms_norm", "quantize"),
    "add_rms_norm_act": chain("add", "rms_norm_act"),
    "add_rms_norm": chain("add", "rms_norm"),
    "add_rms_norm_and_act": chain("add_rms_norm", "quantize"),
    "mul_mat_glu": gated_products,
    "mul_mat_id_glu": gated_products_of_experts,
    "swiglu_act": chain("swiglu", "quantize"),
    "mul_mat_qkv": products_of_attention,
    "rope_set_rows": rotated_and_cached,
    "flash_attn_ext_act": chain("flash_attn_ext", "quantize"),
    "topk_moe": routing,
    "mul_mat_argmax": chain("mul_mat", "argmax"),
    "add_rms_norm_mul_mat_qkv": chain("add_rms_norm_act", "mul_mat_qkv"),
    "add_rms_norm_mul_mat_glu": chain("add_rms_norm_act", "mul_mat_glu"),
}


def switched_off(no_fuse) -> frozenset[str]:
    """no_fuse: names of passes, or "all". Returns the names of the passes left out; UserError for one that is unknown."""
    names = frozenset([no_fuse] if isinstance(no_fuse, str) else no_fuse)
    for name in sorted(names - {*PASSES, "all"}):
        raise UserError(f"no_fuse: {name!r} is no graph pass; allowed: {', '.join(PASSES)}, all")
    return frozenset(PASSES) if "all" in names else names


def fuse(graph: Graph, no_fuse=(), declines: Callable[[str, str, Match], bool] = lambda device, op, match: False) -> None:
    """Runs the passes that no_fuse does not name, in the order of the table. What a fused node took over is then live no more, or its second result.
    declines: (device, op, match) -> whether what would be fused stays as it is, as it takes the device less time."""
    off = switched_off(no_fuse)
    for name, find in PASSES.items():
        if name not in off:
            _run(name, find, graph, declines)


def _run(op: str, find: Callable, graph: Graph, declines: Callable) -> None:
    nodes = graph.live()
    index, readers = {node: i for i, node in enumerate(nodes)}, defaultdict(set)
    for node in nodes:
        for source in node.src:
            readers[source].add(node)

    def may_fuse(node: Tensor, match: Match, given: list[Tensor], further: list[Tensor]) -> bool:
        """given: what is taken and stays a result; further: results of what is taken."""
        first = min(index[each] for each in match.taken)
        others = {each: readers[each] - {node, *match.taken} for each in (*match.taken, *further)}
        between = [each for each in nodes[first:index[node]] if each not in match.taken]
        return (_takes(op, match) and all(each.device == node.device and index[each] <= index[node] for each in match.taken)
                and all(index[reader] > index[node] for each in (*given, *further) for reader in others[each])
                and not any(others[each] or each in graph.outputs for each in match.taken if each not in given)
                and not _caches(between) & {source.base for source in match.src}
                and not _caches(match.taken) & {source.base for each in between for source in each.src})

    for found in nodes:
        match = find(found)
        if match is None:
            continue
        node, taken = match.into or found, sorted(set(match.taken), key=index.get)
        further = [tensor for each in taken for tensor in each.also]
        given = match.taken[:len(OPS[op].also) - len(further) - len(node.also)]
        if may_fuse(node, match, given, further) and not declines(node.device, op, match):
            node.op, node.src, node.params, node.also = op, match.src, match.params, (*given, *further, *node.also)
            node.replaces = tuple(name for each in (*taken, node) for name in each.replaces or (each.name,))
            for each in taken:
                each.also = ()
            for each in given:
                each.alias = each.base if each.in_place else None
                each.op, each.src, each.params, each.replaces = None, (), {}, ()
                graph.nodes.remove(each)


def _caches(nodes: list[Tensor]) -> set[Tensor]:
    """What in-place nodes write into."""
    return {tensor.base for node in nodes if node.in_place for tensor in node.written if tensor.base is not tensor}


def _takes(op: str, match: Match) -> bool:
    """Whether an op takes the operands and parameters of a match."""
    try:
        OPS[op].result(match.params, *match.src)
    except ShapeError:
        return False
    return True
