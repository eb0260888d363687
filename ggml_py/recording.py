"""Runs whose every node can be looked at: a context that runs nodes one by one, and what rows their results have.

A row of a result belongs to a token, and by the promise of this runtime its bits depend on that token and those before it in its sequence alone. A token may
have several rows, one behind the other: of its experts, of its heads. So rows of different runs are the same rows where the tokens up to theirs are:
`Batch.keys`, a digest of them. Nothing of this is in the way of other contexts.
"""
import json
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Callable

import numpy as np

from .backends.cpu import CPUBackend
from .defaults import N_UBATCH
from .graph import Tensor
from .model import Context
from .ops import OPS
from .program import Outputs
from .quant.activation import split_limbs, split_sums
from .storage import DTYPES, n_bytes

PRODUCTS = {"mul_mat", "mul_mat_glu", "mul_mat_qkv", "mul_mat_argmax", "mul_mat_id", "mul_mat_id_glu", "mul_mat_heads"}
OF_TOKENS = {"x", "ids"}  # operands of products that are not weights
Arrays = tuple[np.ndarray, ...]  # of a tensor on the host: one; q int16, d float32 and sums int32 of activation blocks


def on_host(backend, tensor: Tensor) -> Arrays:
    """A tensor's values as the kernels of the CPU take them, copied."""
    data = backend.read(*tensor.base.storage, n_bytes(tensor)).result()
    cpu = CPUBackend()
    found = cpu.view(Tensor(tensor.name, tensor.dtype, tensor.shape, storage=(cpu.upload(data), 0)))
    if tensor.dtype != "act":
        return found,
    q, d, sums = found
    if not isinstance(backend, CPUBackend):  # planes of the high and the low limbs
        high, low = q.view(np.int8).reshape(2, *q.shape)
        q = np.int16(128) * high + low
    return q, d, sums


def rows_on_host(backend, tensor: Tensor, rows: np.ndarray) -> Arrays:
    """Rows of a tensor that is no weight, in their order; of a cache no more is read than lies between them."""
    if tensor.dtype == "act":
        return tuple(array[rows] for array in on_host(backend, tensor))
    first, n = int(rows.min()), int(np.ptp(rows)) + 1
    buffer, offset = tensor.base.storage
    part = Tensor(tensor.name, tensor.dtype, (n, *tensor.shape[1:]), storage=(buffer, offset + n_bytes(tensor) // tensor.shape[0] * first))
    return on_host(backend, part)[0][rows - first],


def to_device(backend, tensor: Tensor, arrays: Arrays):
    """A buffer of a backend with the values that `on_host` gave."""
    cpu = CPUBackend()
    data = cpu.empty(n_bytes(tensor))
    if tensor.dtype != "act":
        data[:arrays[0].nbytes] = arrays[0].reshape(-1).view(np.uint8)
    else:
        for part, array in zip(cpu.view(Tensor(tensor.name, "act", tensor.shape, storage=(data, 0))), arrays):
            part[...] = array
        if not isinstance(backend, CPUBackend):
            q, _, sums = arrays
            limbs = split_sums(sums.reshape(len(sums), -1, 16)).reshape(-1)
            data[:2 * q.size] = np.concatenate([limb.reshape(-1) for limb in split_limbs(q)]).view(np.uint8)
            data[data.size - limbs.size:] = limbs.view(np.uint8)
    return backend.upload(data)


@dataclass
class Batch:
    """A micro-batch as it runs. keys: of each token, which stands for it and those before it in its sequence."""
    seq: np.ndarray
    pos: np.ndarray
    out_ids: np.ndarray
    keys: list[bytes]
    n_ctx: int

    def rows(self, tensor: Tensor) -> np.ndarray | None:
        """The rows of each token, int64 [n, rows a token]: in a cache its cell, else as many as a result has for each, those of the first token first.
        None if they are not whole tokens'."""
        n = len(self.keys)
        if len(self.out_ids) != n:
            raise ValueError(f"recording: {tensor.name}: rows are known where all tokens have logits, got {len(self.out_ids)} of {n}")
        if is_cache(tensor):
            return (self.seq.astype(np.int64) * self.n_ctx + self.pos)[:, None]
        return np.arange(tensor.shape[0]).reshape(n, -1) if tensor.shape[0] % n == 0 else None

    def rows_of(self, tensor: Tensor, key: bytes) -> np.ndarray | None:
        """Those of one token, int64 [rows a token]."""
        rows = self.rows(tensor)
        return None if rows is None else rows[self.keys.index(key)]

    def visible(self, key: bytes) -> np.ndarray:
        """The cells of a token and those before it in its sequence."""
        i = self.keys.index(key)
        return int(self.seq[i]) * self.n_ctx + np.arange(self.pos[i] + 1)


def one_nan(array: np.ndarray, dtype: str) -> np.ndarray:
    """Rows as bits that can be compared: every NaN is the same one."""
    values = array.view(np.float16) if dtype == "f16" else array
    if values.dtype.kind != "f":
        return array
    nan = np.isnan(values)
    return np.where(nan, values.dtype.type(np.nan), values) if nan.any() else values


def bytes_of(tensor: Tensor, arrays: Arrays, rows) -> bytes:
    return b"".join(one_nan(a[rows], tensor.dtype).tobytes() for a in arrays)


def is_cache(tensor: Tensor) -> bool:
    return tensor.base.name.startswith("cache_")


def results(node: Tensor) -> list[Tensor]:
    """What a node gives, without scratch memory. Each has the name of the node that gives it in a graph without fused nodes."""
    return [tensor for tensor in node.written if not tensor.name.endswith("-scratch")]


class RecordedContext(Context):
    """visit(node, batch, backend) is called behind each node, whose step has ended: its operands and results are there to be read. A step runs as in other
    contexts, launched or, with `graphs`, as a graph of its own."""

    def __init__(self, visit: Callable, model, *, n_ctx, n_seq_max=1, n_ubatch=N_UBATCH, type_k="f16", type_v="f16", no_fuse=(), graphs=True, kv_write="set_rows"):
        super().__init__(model, n_ctx, n_ctx, n_ubatch, type_k, type_v, n_seq_max, no_fuse, graphs, kv_write)
        self.visit, self.replayer = visit, self.graphs
        if self.replayer:
            self.replayer.most = 1 << 20
        self.graphs = self  # `run` is called with the steps of a program
        self.history: dict[tuple[int, int], bytes] = {}  # (sequence, next position) -> key of the token before it
        self.single: dict[int, tuple] = {}  # id of a list of steps -> it, and lists of one step each

    def _queue(self, tokens, seq, pos, rows, greedy):
        if isinstance(tokens, Outputs):
            tokens, = tokens.result()  # keys are of ids
        keys = []
        for token, s, p in zip(tokens.tolist(), seq.tolist(), pos.tolist()):
            before = self.history.get((s, p), b"") if p else b""
            keys.append(blake2b(before + token.to_bytes(4, "little"), digest_size=12).digest())
            self.history[s, p + 1] = keys[-1]
        self.batch = Batch(seq, pos, rows, keys, self.n_ctx)
        return super()._queue(tokens, seq, pos, rows, greedy)

    def program(self, *shape):
        self.current = super().program(*shape)
        return self.current

    def run(self, key, steps) -> None:
        backend, nodes = self.model.backend, self.current.nodes
        _, single = self.single.setdefault(id(steps), (steps, [[step] for step in steps]))
        for i, (node, step) in enumerate(zip(nodes, single, strict=True)):
            if self.replayer:
                self.replayer.run((*key, i), step)
            else:
                backend.run(step)
            self.visit(node, self.batch, backend)

    def refuse(self, reason: str) -> None:
        raise RuntimeError(f"recording: {reason}")

    def launches(self) -> str:
        return str(self.replayer.counters) if self.replayer else "CUDA graphs: none"

    def close(self) -> None:
        self.graphs = self.replayer
        super().close()


def named_rows(node: Tensor) -> list[tuple[int, int, int]]:
    """Where a node names rows by their addresses: (operand that holds them, its row, operand that they are rows of)."""
    if node.op == "cpy_rows_indirect":
        return [(2, node.params["slot"], 0)]
    if node.op == "rope_set_rows" and node.params["slots"] is not None:
        slot_k, slot_v = node.params["slots"]
        return [(7, slot_k, 1), (7, slot_v, 0)]
    return []


class Capture:
    """A node of a run with all that it read and wrote, on the host. Weights and caches are read by `load`: they lie where they are."""

    def __init__(self, node: Tensor, batch: Batch, backend, passing: set[Tensor]):
        """passing: the graph's inputs and all that its nodes write, whose memory is others' later."""
        self.node, self.batch, self.backend, self.device, self.kernel = node, batch, backend, backend.device, kernel_of(node, backend)
        self.passing = [source.base in passing for source in node.src]
        self.operands = [on_host(backend, source) if passes else None for passes, source in zip(self.passing, node.src)]
        self.results = {tensor.name: on_host(backend, tensor) for tensor in results(node)}
        self.addresses = [backend.address(node.src[cache]) for *_, cache in named_rows(node)]

    def load(self) -> "Capture":
        self.operands = [on_host(self.backend, source) if arrays is None else arrays for source, arrays in zip(self.node.src, self.operands)]
        return self

    def only(self, key: bytes) -> "Capture":
        """What gives the rows of a token, for products of matrices, whose definition takes long for all of them; itself for other ops."""
        node = self.node
        if node.op not in PRODUCTS or self.batch.rows(node) is None:
            return self
        cut = {source: self.batch.rows_of(source, key) for name, source in zip(OPS[node.op].operands, node.src) if name in OF_TOKENS}
        fewer = lambda t, rows, **given: Tensor(t.name, t.dtype, (len(rows), *t.shape[1:]), **given)
        one, made = object.__new__(Capture), {source: fewer(source, rows) for source, rows in cut.items()}
        first, *also = (fewer(t, self.batch.rows_of(t, key)) for t in results(node))
        first.op, first.src, first.params, first.also = node.op, tuple(made.get(source, source) for source in node.src), node.params, tuple(also)
        one.node, one.addresses = first, self.addresses
        one.operands = [tuple(a[cut[source]] for a in arrays) if source in cut else arrays for source, arrays in zip(node.src, self.operands)]
        return one

    def save(self, path: Path) -> None:
        """As an archive of numpy, which `read` takes: memory that several operands share is there once."""
        node, shared = self.node, list(dict.fromkeys(source.base for source in self.node.src))
        src = [shared.index(source.base) for source in node.src]
        first = [src.index(i) for i in range(len(shared))]
        tensors = [*(node.src[i] for i in first), *results(node)]
        arrays = [*(self.operands[i] for i in first), *self.results.values()]
        about = {"name": node.name, "op": node.op, "params": node.params, "kernel": self.kernel, "device": self.device, "addresses": self.addresses,
                 "src": src, "tensors": [{"name": t.name, "dtype": t.dtype, "shape": t.shape} for t in tensors],
                 "alias": [shared.index(t.base) if t.base is not t else None for t in results(node)]}
        np.savez(path, about=np.array(json.dumps(about)), **{f"{i}.{j}": a for i, each in enumerate(arrays) for j, a in enumerate(each)})

    @classmethod
    def read(cls, path: Path) -> "Capture":
        archive, self = np.load(path, allow_pickle=False), cls.__new__(cls)
        about = json.loads(str(archive["about"]))
        tensors = [Tensor(t["name"], t["dtype"], tuple(t["shape"])) for t in about["tensors"]]
        arrays = [tuple(archive[f"{i}.{j}"] for j in range(3 if t.dtype == "act" else 1)) for i, t in enumerate(tensors)]
        n = len(tensors) - len(about["alias"])
        node, *also = tensors[n:]
        node.op, node.params, node.src, node.also = about["op"], about["params"], tuple(tensors[i] for i in about["src"]), tuple(also)
        for tensor, alias in zip(also, about["alias"][1:]):
            tensor.alias = None if alias is None else tensors[alias]
        self.node, self.operands, self.results = node, [arrays[i] for i in about["src"]], {t.name: a for t, a in zip(tensors[n:], arrays[n:])}
        self.addresses, self.kernel, self.device = about["addresses"], about["kernel"], about["device"]
        return self


def kernel_of(node: Tensor, backend) -> str:
    """The module of a node's kernel, and the types of weights and caches that it is made for."""
    types = ", ".join(source.dtype for source in node.src if source.dtype not in (*DTYPES, "act"))
    return f"kernels/{getattr(backend, 'room', 'cuda')}/{OPS[node.op].module}.py: {node.op}{f'[{types}]' if types else ''}"


def recompute(capture: Capture, backend) -> dict[str, Arrays]:
    """The results of a captured node by the kernel of a backend, from what it read."""
    node = capture.node
    made = {}
    for i, (source, arrays) in enumerate(zip(node.src, capture.operands)):
        for (operand, row, cache), address in zip(named_rows(node), capture.addresses):
            if operand == i:  # its addresses were those of another memory
                table = arrays[0].copy()
                table[row] += backend.address(made[node.src[cache].base]) - address
                arrays = table,
        if source.base not in made:
            made[source.base] = Tensor(source.name, source.dtype, source.shape, device=backend.device, storage=(to_device(backend, source, arrays), 0))
    also = tuple(Tensor(t.name, t.dtype, t.shape, device=backend.device, alias=made[t.base] if t.base is not t else None) for t in results(node)[1:])
    twin = Tensor(node.name, node.dtype, node.shape, node.op, tuple(made[source.base] for source in node.src), node.params, backend.device, also=also)
    if scratch := backend.scratch(twin):
        twin.also += Tensor(f"{node.name}-scratch", *scratch, device=backend.device),
    mine = [tensor for tensor in twin.written if tensor.base is tensor]
    for tensor in mine:
        tensor.storage = backend.empty(n_bytes(tensor)), 0
    try:
        backend.run([backend.bind(twin)])
        return {tensor.name: on_host(backend, tensor) for tensor in results(twin)}
    finally:
        for tensor in (*made.values(), *mine):
            backend.free(tensor.storage[0])
