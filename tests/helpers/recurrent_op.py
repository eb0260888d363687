"""A recurrent op for tests, with two results, of which the second is a new state, and a model of one layer of it."""
import sys
from collections import Counter
from contextlib import contextmanager
from types import ModuleType
from unittest.mock import patch

import numpy as np

from ggml_py.base.storage import n_bytes
from ggml_py.engine.model import Model
from ggml_py.graph.graph import Graph, Tensor
from ggml_py.ops.table import OPS, Shape, declare, need


def recur(call):
    """out = s + x and state_out = s / 2 + x, s being rows `ids` of the state."""
    def step():
        ids = call.ids.data
        s = call.state.data[ids]
        new = np.float32(0.5) * s + call.x.data
        call.out.data[...] = s + call.x.data
        if call.rows_out is None:
            call.state_out.data[...] = new
        elif call.slot is None:
            call.state_out.data[call.rows_out.data] = new
        else:
            rows = (call.rows_out.data[call.slot] - call.state_out.data.ctypes.data) // call.state_out.data.strides[0]
            call.state_out.data[rows] = new
    return step


@contextmanager
def declared():
    """Within the block the op is in the op table, and in kernels/cpu and kernels/reference."""
    def rule(params, state, x, ids, *rows):
        need(state.dtype == x.dtype == "f32" and state.shape[1:] == x.shape[1:], "state and x must be f32 of one width")
        need(ids.shape == x.shape[:1], "ids must be as many as rows of x")
        return Shape("f32", x.shape), Shape("f32", x.shape)
    declare("recur", "state:state x ids rows_out", rule, "slot", "out state_out", n_optional=1, defaults={"slot": None},
            scatters={"state_out": "rows_out"}, overwrites={"state_out": "state"})
    modules = [f"ggml_py.kernels.{room}.recur" for room in ("cpu", "reference")]
    for name in modules:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].recur = recur
    try:
        yield
    finally:
        del OPS["recur"]
        for name in modules:
            del sys.modules[name]


class States:
    """The state of each sequence, float32 [n_seq_max, n_cols], as `state.base.Memory`. by_address: its rows are named so."""

    def __init__(self, backend, n_ctx: int, n_seq_max: int, n_cols: int, by_address: bool):
        self.n_ctx, self.n_seq_max, self.by_address, self.backend = n_ctx, n_seq_max, by_address, backend
        self.state = Tensor("state", "f32", (n_seq_max, n_cols), backend.device, buffer=backend.empty(4 * n_seq_max * n_cols))
        self.lengths = [0] * n_seq_max

    @property
    def n_bytes(self) -> int:
        return n_bytes(self.state)

    def values(self, seq, pos, n):
        assert n == len(seq), "nothing fills a micro-batch up"
        for s, p in zip(seq, pos):
            self.lengths[s] = p + 1
        rows = seq.astype(np.int64)
        addresses = self.backend.address(self.state) + 4 * self.state.shape[1] * rows
        return {"ids": seq, **({"dst": addresses[None]} if self.by_address else {"rows": rows})}

    def length(self, seq_id):
        return self.lengths[seq_id]

    def hold(self, seq_id, position):
        pass

    def seq_rm(self, seq_id, p0, p1):
        self.lengths[seq_id] = min(self.lengths[seq_id], p0)  # what the state holds is gone all the same

    def clear(self):
        self.lengths = [0] * self.n_seq_max
        self.backend.write(self.state.buffer, 0, np.zeros(self.n_bytes, np.uint8))

    def close(self):
        self.backend.free(self.state.buffer)


class Recurrent:
    """Logits of a token are twice the output of a recurrent layer. What models need of an architecture."""
    n_vocab, hot = 8, None

    def __init__(self, file, options, backends):
        self.placement = options.place(1, 1, is_tied=False)
        self.backend = backend = backends[self.placement.output]
        table = np.random.default_rng(0).standard_normal((self.n_vocab, self.n_vocab)).astype(np.float32)
        self.table = Tensor("table", "f32", table.shape, backend.device, buffer=backend.upload(table))

    def load(self, nextn):
        pass

    def context_bytes(self, n_ctx, n_seq_max, type_k, type_v, n_rollback, n_ubatch):
        return Counter({self.backend.device: 4 * n_seq_max * self.n_vocab})

    def new_memory(self, n_ctx, n_seq_max, type_k, type_v, kv_write, n_rollback, n_ubatch):
        return States(self.backend, n_ctx, n_seq_max, self.n_vocab, kv_write == "cpy")

    def new_rope_tables(self, n_ctx):
        return {}

    def free_rope_tables(self, tables):
        pass

    def build(self, memory, rope_tables, n_tokens, n_outputs, wanted="logits", hidden=False, apart=False):
        g = Graph(self.backend.device)
        x = g.take_rows(self.table, g.input("tokens", "i32", (n_tokens,)), name="inp")
        out, new = g.recur(memory.state, x, g.input("ids", "i32", (n_tokens,)), name="recur-0")
        if memory.by_address:
            g.cpy_rows_indirect(memory.state, new, g.input("dst", "i64", (1, n_tokens)), slot=0, name="put-0")
        else:
            g.set_rows(memory.state, new, g.input("rows", "i64", (n_tokens,)), name="put-0")
        g.outputs = [g.scale(out, factor=2.0, name="logits")]
        return g


def recurrent_model(backend) -> Model:
    """A model of that architecture, of no file."""
    with patch("ggml_py.engine.model.model_class", lambda file: Recurrent):
        return Model(None, backend)
