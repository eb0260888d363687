"""One op on one backend, from values on the host: how definitions, captures and tests compute it."""
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base.storage import Arrays, as_arrays, as_bytes, n_bytes
from ..graph.fuse import lower
from ..graph.graph import Graph, Node, Tensor


@dataclass(eq=False)
class Value:
    """A tensor on the host. arrays: as `base.storage.as_arrays` gives them. One value that is two operands is one memory."""
    name: str
    dtype: str
    shape: tuple[int, ...]
    arrays: Arrays


def make_node(backend, op: str, operands: Sequence[Value], params: dict[str, Any],
              name: str = "") -> tuple[Node, dict[Value, Tensor]]:
    """A node of a graph of its own, and the leaves that stand for its operands."""
    layout = lambda dtype: backend.activations.name if dtype == "act" else ""
    leaves = {value: Tensor(value.name, value.dtype, tuple(value.shape), backend.device, layout=layout(value.dtype))
              for value in operands}
    graph = Graph(backend.device)
    graph.apply(op, *(leaves[value] for value in operands), name=name or op, **params)
    for node in graph.nodes[0].primitives() + graph.nodes:
        for result in node.results:
            if result.base is None:
                result.layout = layout(result.dtype)
    return graph.nodes[0], leaves


def evaluate(backend, op: str, operands: Sequence[Value], params: dict[str, Any], name: str = "") -> tuple[Arrays, ...]:
    """The results of an op, in the order of the op table, computed by a backend: by its kernel, or, of a fused op without one, by
    those of its parts.

    Operands that name rows of a state by address have addresses from the state's first byte on. No operand's arrays are written
    to."""
    node, leaves = make_node(backend, op, operands, params, name)
    buffers = []

    def give_memory(tensor: Tensor, data: np.ndarray | None = None) -> None:
        tensor.buffer = backend.empty(n_bytes(tensor)) if data is None else backend.upload(data)
        buffers.append(tensor.buffer)
    try:
        for leaf, data in contents(node, leaves, backend.address):
            # a CPU may keep what is uploaded, and writes into states
            give_memory(leaf, data.copy() if leaf in node.written else data)
        nodes = lower([node], lambda each: backend.has_kernel(each.op))
        for each in nodes:
            backend.prepare(each)
            for tensor in filter(None, (*each.results, each.scratch)):
                if tensor.root.buffer is None:
                    give_memory(tensor.root)
        backend.run([backend.bind(each) for each in nodes])
        return tuple(arrays_on_host(backend, result) for result in node.results)
    finally:
        for buffer in buffers:
            backend.free(buffer)


def contents(node: Node, leaves: dict[Value, Tensor], address: Callable[[Tensor], int]) -> Iterator[tuple[Tensor, np.ndarray]]:
    """(leaf, its bytes), states before the operands that name their rows by address, to which that of the state is added: it must
    have memory by then."""
    tables = named_rows(node)
    for value, leaf in sorted(leaves.items(), key=lambda pair: any(pair[1] is table for table, _, _ in tables)):
        arrays = value.arrays
        for table, row, state in tables:
            if table is leaf:
                arrays = arrays[0].copy(),
                arrays[0][row] += address(state)
        yield leaf, as_bytes(arrays, value.dtype, value.shape, leaf.layout)


def arrays_on_host(backend, tensor: Tensor) -> Arrays:
    """A tensor's values, copied."""
    return as_arrays(backend.read(*tensor.memory, n_bytes(tensor)).result(), tensor.dtype, tensor.shape, tensor.layout)


def named_rows(node: Node) -> list[tuple[Tensor, int, Tensor]]:
    """Where a node, or a part of it, names rows of a state by address: (the tensor that holds the addresses, its row,
    the state)."""
    return [(operands[table].root, each.params["slot"], operands[state].root)
            for each in node.primitives() for operands in [dict(zip(each.declared.operands, each.src))]
            for table, state in each.declared.addresses.items()]
