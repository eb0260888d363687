"""Runs whose every node can be looked at: a context that runs nodes one by one, and what rows their results have.

A row of a result belongs to a token, and by the promise of this runtime its bits depend on that token and those before it in its
sequence alone. A token may have several rows, one behind the other: of its experts, of its heads. So rows of different runs are
the same rows where the tokens up to theirs are: `Batch.keys`, a digest of them. Nothing of this is in the way of other contexts.
"""
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np

from .. import testing
from ..base.defaults import N_UBATCH
from ..backends.letters import PostOffice
from ..base.storage import Arrays, n_bytes
from ..engine.context import Context
from ..graph.graph import Node, Tensor
from ..graph.letters import Post, Take
from ..graph.program import Outputs, Program
from ..ops.table import OPS
from ..quant.formats import FORMATS
from .evaluate import Value, arrays_on_host, evaluate, named_rows


def rows_on_host(backend, tensor: Tensor, rows: np.ndarray) -> Arrays:
    """Rows of a tensor that is not a weight, in their order; of a state no more is read than lies between them."""
    if tensor.dtype == "act":
        return tuple(array[rows] for array in arrays_on_host(backend, tensor))
    first, n = int(rows.min()), int(np.ptp(rows)) + 1
    part = tensor.view((n, *tensor.shape[1:]), n_bytes(tensor) // tensor.shape[0] * first)
    return arrays_on_host(backend, part)[0][rows - first],


@dataclass
class Batch:
    """A micro-batch as it runs. keys: of each token, which stands for it and those before it in its sequence.
    before: operands that the node being visited has written over, as it read them. runs: the input of that name. letters: of a
    step by letters, what came in each box, in words where it is not what was posted; None by copies."""
    seq: np.ndarray
    pos: np.ndarray
    out_ids: np.ndarray
    keys: list[bytes]
    n_ctx: int
    before: dict[Tensor, Arrays] = field(default_factory=dict)
    runs: np.ndarray | None = None
    letters: dict[Tensor, list[str]] | None = None

    def rows(self, tensor: Tensor) -> np.ndarray | None:
        """The rows of each token, int64 [n, rows a token]: in a state that is written cell by cell its cell, else as many as a
        result has for each, those of the first token first; in slots the one of the state behind it, -1 where it is not kept.
        None if they are not whole tokens'."""
        n = len(self.keys)
        if len(self.out_ids) != n:
            raise ValueError(f"recording: {tensor.name}: rows are known where all tokens have logits, got {len(self.out_ids)} "
                             f"of {n}")
        if tensor.root.node is None and tensor.maker is not None and tensor.shape == tensor.root.shape:  # a state
            if role_of(tensor) == "slots":
                return self._slots()
            if role_of(tensor) == "whole":
                return None
            return (self.seq.astype(np.int64) * self.n_ctx + self.pos)[:, None] if tensor.shape[0] % self.n_ctx == 0 else None
        return np.arange(tensor.shape[0]).reshape(n, -1) if tensor.shape[0] % n == 0 else None

    def _slots(self) -> np.ndarray:
        rows = np.full((len(self.keys), 1), -1)
        assert self.runs is not None
        for first, n, _, *slots in self.runs.tolist():
            kept = slots[:n]
            rows[first + n - len(kept):first + n, 0] = kept[::-1]
        return rows

    def rows_of(self, tensor: Tensor, key: bytes) -> np.ndarray | slice:
        """Those of one token, int64 [rows a token]; all of the tensor's if they are not whole tokens'."""
        rows = self.rows(tensor)
        if rows is None:
            return slice(None)
        mine = rows[self.keys.index(key)]
        return mine[mine >= 0]

    def run(self, key: bytes) -> tuple[bytes, int]:
        """Of the run of tokens that one is in (`runs` of `ops.primitive`): the key of its first, and the slot before that."""
        i = self.keys.index(key)
        assert self.runs is not None
        first, source = next((first, source) for first, n, source, *_ in self.runs.tolist() if first <= i < first + n)
        return self.keys[first], source

    def written(self, key: bytes) -> np.ndarray:
        """The positions in the sequence of a token that the micro-batch computes."""
        return self.pos[self.seq == self.seq[self.keys.index(key)]]

    def visible(self, key: bytes, n_rows: int) -> np.ndarray | slice:
        """The cells of a token and those before it in its sequence; all rows of a state that is not written cell by cell.
        n_rows: of the state."""
        if n_rows % self.n_ctx:
            return slice(None)
        i = self.keys.index(key)
        return int(self.seq[i]) * self.n_ctx + np.arange(self.pos[i] + 1)


def role_of(state: Tensor) -> str:
    """Of the operand that a node wrote over, which is `state` now."""
    node = state.maker
    assert node is not None, state
    names = dict(zip(node.results, node.declared.results))
    return node.declared.roles.get(names.get(state, ""), "state")


def one_nan(array: np.ndarray, dtype: str) -> np.ndarray:
    """Rows as bits that can be compared: every NaN is the same one."""
    return testing.one_nan(array.view(np.float16) if dtype == "f16" else array)


def bits_of(dtype: str, arrays: Arrays, rows) -> bytes:
    return b"".join(one_nan(a[rows], dtype).tobytes() for a in arrays)


def overwritten(node: Node) -> list[Tensor]:
    """The operands that the node reads and writes a result over."""
    results = dict(zip(node.declared.results, node.results))
    operands = [(results[result], node.operands[name]) for result, name in node.declared.overwrites.items()]
    return [operand for result, operand in operands if operand is not None and result.root is operand.root]


def rows_written(node: Node) -> dict[Tensor, Tensor]:
    """The results that the node writes to rows of a state in the place of a copy (`graph.elide`), and the operand that names the
    rows of each."""
    results, operands = dict(zip(node.declared.results, node.results)), node.operands
    tables = {results[what]: operands[name] for what, name in node.declared.scatters.items()}
    return {result: table for result, table in tables.items() if table is not None}


def _given(node: Node, result: Tensor, table: Tensor | None, backend) -> Value:
    """A result of a node that has run; where it was written to rows of a state, these rows. table: the operand that names them,
    by number or by address."""
    if table is None:
        return Value(result.name, result.dtype, result.shape, arrays_on_host(backend, result))
    rows, slot = arrays_on_host(backend, table)[0], node.params.get("slot")
    if slot is not None:
        rows = (rows[slot] - backend.address(result.root)) // (n_bytes(result) // result.shape[0])
    return Value(result.name, result.dtype, (len(rows), *result.shape[1:]), rows_on_host(backend, result, rows))


class RecordedContext(Context):
    """visit(node, batch, backend) is called behind each node, whose step has ended: its operands and results are there to be
    read. A step runs as in other contexts, launched or, with `graphs`, as a graph of its own."""

    def __init__(self, visit: Callable[[Node, Batch, Any], None], model, *, n_ctx: int, n_ubatch: int = N_UBATCH, **settings):
        super().__init__(model, n_ctx, n_ubatch, **settings)
        self.visit, self.replays = visit, dict.fromkeys(model.backends, self)  # `run` is called with the steps of a run of nodes
        self.fills = False  # each row of a result is a token's
        for cache in self.cuda_graphs.values():
            cache.most = 1 << 20
        self.history: dict[tuple[int, int], bytes] = {}  # (sequence, next position) -> key of the token before it
        self.single: dict[Node, list] = {}  # its step, in a list
        self.sent: dict[Post, np.ndarray] = {}
        if self.office is not None:
            self.office = _Visits(self.office, self)

    def _queue(self, tokens, seq, pos, rows, n_seq, wanted="logits", targets=None, n_more=0, draws=None) -> Outputs:
        if isinstance(tokens, Outputs):
            tokens, = tokens.result()  # keys are of ids
        keys = []
        for token, s, p in zip(tokens.tolist(), seq.tolist(), pos.tolist()):
            before = self.history.get((s, p), b"") if p else b""
            keys.append(blake2b(before + token.to_bytes(4, "little"), digest_size=12).digest())
            self.history[s, p + 1] = keys[-1]
        self.batch = Batch(seq, pos, rows, keys, self.n_ctx)
        self.sent = {}
        return super()._queue(tokens, seq, pos, rows, n_seq, wanted, targets, draws=draws)

    def _memory_values(self, seq: np.ndarray, pos: np.ndarray, n: int) -> dict[str, np.ndarray]:
        values = super()._memory_values(seq, pos, n)
        self.batch.runs = values.get("runs")
        return values

    def seq_cp(self, source: int, seq_id: int, n: int = -1) -> None:
        super().seq_cp(source, seq_id, n)
        for position in range(1, self.memory.length(seq_id) + 1):
            self.history[seq_id, position] = self.history[source, position]

    def program(self, *shape) -> Program:
        self.current = super().program(*shape)
        return self.current

    def run(self, key, steps) -> None:
        for node, step in zip(self.current.runs[key[1]].nodes, steps, strict=True):
            self.run_node(key, node, step)

    def run_node(self, key, node: Node, step) -> None:
        backend, cache = self.model.backends[node.device], self.cuda_graphs.get(node.device)
        if node not in self.single or self.single[node][0] is not step:
            self.single[node] = [step]
        self.batch.before = {tensor: arrays_on_host(backend, tensor) for tensor in overwritten(node)}
        if cache:
            cache.run((*key, self.current.runs[key[1]].nodes.index(node)), self.single[node])
        else:
            backend.run(self.single[node])
        self.visit(node, self.batch, backend)

    def see(self, item) -> None:
        """Remembers what is posted, and compares it with what is taken."""
        if isinstance(item, Post):
            self.sent[item] = self._bytes(item.source)
        elif isinstance(item, Take):
            box, wrong = item.box, []
            found = self._bytes(box.tensor)
            for post, (part, column) in zip(box.posts, box.parts):
                n, row = post.rows
                first, stride = post.place(box, column)
                if post not in self.sent or not np.array_equal(found.reshape(n, stride)[:, first:first + row].reshape(-1),
                                                               self.sent[post]):
                    wrong.append(f"the letter of {part.name} from {post.device} to {box.device}")
            assert self.batch.letters is not None
            self.batch.letters[box.tensor] = wrong

    def _bytes(self, tensor: Tensor) -> np.ndarray:
        return self.model.backends[tensor.root.device].read(*tensor.memory, n_bytes(tensor)).result()

    def refuse(self, reason: str) -> None:
        raise RuntimeError(f"recording: {reason}")


class _Visits:
    """A post office whose steps are looked at."""

    def __init__(self, office: PostOffice, context: RecordedContext):
        self.office, self.context = office, context

    def run(self, program: Program, graphs: Any, key: tuple) -> Callable[[], Callable[[], None]]:
        self.context.batch.letters = {}
        self.office.visit(program, lambda i, node, step: self.context.run_node((key, i), node, step), self.context.see)
        return lambda: lambda: None

    def leave(self) -> None:
        self.office.leave()

    def close(self) -> None:
        self.office.close()


@dataclass
class Capture:
    """A node with all that it read and gave, on the host.

    operands: those that hold addresses have them from the first byte of the state on. What came from another device has the name
    that it has there. results: by name; what was written straight to rows of a state (`graph.elide`) as these rows, and the
    operand that names them is left out."""
    name: str
    op: str
    params: dict[str, Any]
    operands: list[Value]
    results: dict[str, Value]
    kernel: str
    device: str

    def save(self, path: Path) -> None:
        """As an archive of numpy, which `read` takes: memory that several operands share is there once."""
        values = list(dict.fromkeys(self.operands))
        tensors = [*values, *self.results.values()]
        about = {"name": self.name, "op": self.op, "params": self.params, "kernel": self.kernel, "device": self.device,
                 "operands": [values.index(value) for value in self.operands],
                 "tensors": [{"name": t.name, "dtype": t.dtype, "shape": t.shape} for t in tensors]}
        np.savez(path, np.array(json.dumps(about)), *(array for t in tensors for array in t.arrays))

    @classmethod
    def read(cls, path: Path) -> Self:
        archive = iter(np.load(path, allow_pickle=False).values())
        about = json.loads(str(next(archive)))
        values = [Value(t["name"], t["dtype"], tuple(t["shape"]), tuple(islice(archive, 3 if t["dtype"] == "act" else 1)))
                  for t in about["tensors"]]
        n = len(set(about["operands"]))
        return cls(about["name"], about["op"], about["params"], [values[i] for i in about["operands"]],
                   {value.name: value for value in values[n:]}, about["kernel"], about["device"])


def _stale(node: Node, program: Program, letters: dict[Tensor, list[str]] | None) -> list[str]:
    """Operands that were brought from other devices, and that are something else there; letters: of `Batch`."""
    if letters is not None:
        return [wrong for root in dict.fromkeys(source.root for source in node.src) for wrong in letters.get(root, ())]
    crossed = [(copy.src[0], copy.results[0]) for copy in program.crossings if copy.results[0] in node.src]
    everything = slice(None)
    return [f"the copy of {there.name} from {there.root.device} to {here.device}" for there, here in crossed
            if bits_of(there.dtype, arrays_on_host(program.backends[there.root.device], there), everything)
            != bits_of(here.dtype, arrays_on_host(program.backends[here.device], here), everything)]


@dataclass
class LiveCapture(Capture):
    """Of a node whose run is not over yet. A weight or state that is not read yet (`load`) has no arrays. passing: of each
    operand, whether its memory is others' later, as that of inputs and of results. stale: which of them were brought from another
    device and are not what they are there."""
    passing: list[bool]
    stale: list[str]
    batch: Batch
    node: Node
    backend: Any

    @classmethod
    def of(cls, node: Node, batch: Batch, backend, program: Program) -> Self:
        """Of a node that has just run. Weights, and states that no node behind it writes, are not read yet."""
        later = program.nodes[program.nodes.index(node) + 1:]
        passing = program.passing | {root for each in later for root in each.written}
        read_now = passing | {table for table, _, _ in named_rows(node)}
        copied = {copy.results[0]: copy.src[0] for copy in program.crossings}
        rows = rows_written(node)
        sources = [tensor for tensor in node.src if tensor not in rows.values()]
        values: dict[Tensor, Value] = {}  # operands that are the same memory are one value
        operands = []
        for tensor in sources:
            memory = tensor.root if tensor.shape == tensor.root.shape else tensor
            if memory not in values:
                arrays = batch.before.get(tensor) or (arrays_on_host(backend, tensor) if tensor.root in read_now else ())
                values[memory] = Value(copied.get(tensor, tensor).name, tensor.dtype, tensor.shape, arrays)
            operands.append(values[memory])
        for table, row, state in named_rows(node):
            for value, tensor in zip(operands, sources):
                if tensor.root is table:
                    value.arrays[0][row] -= backend.address(state)
        params = {**node.params, "slot": None} if rows and "slot" in node.params else node.params
        results = {tensor.name: _given(node, tensor, rows.get(tensor), backend) for tensor in node.results}
        return cls(node.name, node.op, params, operands, results, backend.kernel_name(node), backend.device,
                   [tensor.root in passing for tensor in sources], _stale(node, program, batch.letters), batch, node, backend)

    def tensor(self, name: str) -> Tensor:
        """The result of this name, of the node that was captured, or what stands for the rows of it that the node gave."""
        result, value = next(result for result in self.node.results if result.name == name), self.results[name]
        return result if result.shape == value.shape else Tensor(name, value.dtype, value.shape)

    def load(self) -> Self:
        """Reads the weights and states, which lie where they are."""
        for value, tensor in zip(self.operands, self.node.src):
            if not value.arrays:
                value.arrays = arrays_on_host(self.backend, tensor)
        return self

    def only(self, key: bytes) -> Self:
        """What gives the rows of a token, for products of matrices, whose definition takes long for all of them;
        itself for other ops."""
        roles = OPS[self.op].roles
        is_product = any(roles[name] == "weight" and len(t.shape) > 1 and t.dtype in FORMATS
                         for name, t in self.node.operands.items() if t is not None)
        if not is_product or any(result.is_state or self.batch.rows(result) is None for result in self.node.results):
            return self
        cut: dict[Value, Value] = {}
        for name, tensor, value in zip(OPS[self.op].operands, self.node.src, self.operands):
            if roles[name] == "rows" and value not in cut:
                rows = self.batch.rows_of(tensor, key)
                if isinstance(rows, slice):
                    return self
                cut[value] = Value(value.name, value.dtype, (len(rows), *value.shape[1:]), tuple(a[rows] for a in value.arrays))
        return replace(self, operands=[cut.get(value, value) for value in self.operands])


def recompute(capture: Capture, backend) -> dict[str, Arrays]:
    """The results of a captured node by the kernel of a backend, from what it read."""
    return dict(zip(capture.results, evaluate(backend, capture.op, capture.operands, capture.params, capture.name)))
