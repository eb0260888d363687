"""Graph passes: rewrites of a graph before it is planned. None changes a bit; each can be switched off by its name."""
from collections import Counter
from dataclasses import dataclass

from .errors import UserError
from .graph import Graph, Tensor
from .ops import OPS, ShapeError


@dataclass(frozen=True)
class Pass:
    """Makes one node of op `name` of a node of op `producer` and one of the one-operand op `consumer`, where

    - the consumer is the only reader of the producer's result, which is no output,
    - both are on one device,
    - op `name`, defined as their composition, takes the producer's operands and parameters by its shape rule,
    - no in-place op between them writes an operand: the fused node reads it where the consumer stood.
    """
    name: str
    producer: str
    consumer: str


PASSES = {each.name: each for each in (
    Pass("rms_norm_act", "rms_norm", "quantize"),
    Pass("swiglu_act", "swiglu", "quantize"),
)}


def switched_off(no_fuse) -> frozenset[str]:
    """no_fuse: names of passes, or "all". Returns the names of the passes left out; UserError for one that is unknown."""
    names = frozenset([no_fuse] if isinstance(no_fuse, str) else no_fuse)
    for name in sorted(names - {*PASSES, "all"}):
        raise UserError(f"no_fuse: {name!r} is no graph pass; allowed: {', '.join(PASSES)}, all")
    return frozenset(PASSES) if "all" in names else names


def fuse(graph: Graph, no_fuse=()) -> None:
    """Runs the passes that no_fuse does not name. A consumer's node becomes the fused node; its producer is then live no more."""
    off = switched_off(no_fuse)
    for each in PASSES.values():
        if each.name not in off:
            _run(each, graph)


def _run(each: Pass, graph: Graph) -> None:
    nodes = graph.live()
    index, n_readers = {node: i for i, node in enumerate(nodes)}, Counter(source for node in nodes for source in node.src)
    for node in nodes:
        producer = node.src[0]
        if (node.op == each.consumer and producer.op == each.producer and n_readers[producer] == 1 and producer not in graph.outputs
                and producer.device == node.device and _takes(each.name, producer)
                and not _written(nodes[index[producer]:index[node]]) & {source.base for source in producer.src}):
            node.op, node.src, node.params = each.name, producer.src, producer.params
            node.replaces = *(producer.replaces or (producer.name,)), *(node.replaces or (node.name,))


def _takes(op: str, node: Tensor) -> bool:
    """Whether an op takes the operands and parameters of a node."""
    try:
        OPS[op].result(node.params, *node.src)
    except ShapeError:
        return False
    return True


def _written(nodes: list[Tensor]) -> set[Tensor]:
    return {node.base for node in nodes if OPS[node.op].in_place}
