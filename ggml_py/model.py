"""Models and contexts: the Python interface. A model is a file's weights on a device; a context is the memory of its sequences and the runs over it."""
from collections import OrderedDict
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Iterator, NamedTuple

import numpy as np

from .backends import open_backend
from .backends.cuda_graphs import SHAPES, Key
from .defaults import N_BATCH, N_UBATCH
from .errors import UserError
from .gguf_file import GGUFFile
from .models import ARCHITECTURES
from .passes import switched_off
from .program import Arenas, Outputs, Program
from .sampling import not_a_number
from .tokenizer import Tokenizer


class Model:
    """Weights on one device. Use as a context manager, or call close() to free device memory."""

    def __init__(self, file: GGUFFile, backend, nextn: bool = False):
        name = file.get("general.architecture", "str")
        if name not in ARCHITECTURES:
            raise UserError(f"{file.path}: architecture {name!r} is unknown; known: {', '.join(ARCHITECTURES)}")
        self.file, self.backend, self.architecture = file, backend, name
        self.graph = ARCHITECTURES[name](file, backend)
        self._tokenizer: Tokenizer | None = None
        self.graph.load(nextn)

    @classmethod
    def load(cls, path: str | Path, device: str = "auto", nextn: bool = False) -> "Model":
        """path: a GGUF file (the first part of a split one). device: "auto" (the first GPU if there is one), "cpu" or "cuda:N". nextn: whether the blocks that
        predict tokens further on (NextN, MTP; of glm4moe) are loaded, that is checked and on the device; nothing drafts with them yet.

        UserError (a ValueError) in one line for a file or device that cannot be used.
        """
        backend = open_backend(device)
        try:
            file = GGUFFile.open(path)
            try:
                return cls(file, backend, nextn)
            except BaseException:
                file.close()
                raise
        except BaseException:
            backend.close()
            raise

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self.file.metadata)
        return self._tokenizer

    @property
    def n_vocab(self) -> int:
        return self.graph.n_vocab

    @property
    def n_ctx_train(self) -> int:
        return self.graph.hp.n_ctx_train

    @property
    def device(self) -> str:
        return self.backend.device

    def describe(self) -> str:
        hp = self.graph.hp
        return (f"{self.file.path}: {self.architecture}, {hp.n_layer} layers of {hp.n_embd}, {hp.n_head[0]} heads, {hp.n_head_kv[0]} KV heads of {hp.n_embd_head_k}, "
                f"vocabulary {self.n_vocab}, trained for {self.n_ctx_train} positions; {self.graph.w.n_bytes:,} bytes of weights on {self.device}")

    def report(self) -> str:
        """What its device has copied so far, for --verbose; nothing of the CPU."""
        return self.backend.report()

    def new_context(self, n_ctx: int | None = None, n_batch: int = N_BATCH, n_ubatch: int = N_UBATCH, type_k: str = "f16", type_v: str = "f16",
                    n_seq_max: int = 1, no_fuse=(), graphs: bool = True, kv_write: str = "set_rows") -> "Context":
        """n_ctx: positions of all sequences together, n_ctx // n_seq_max each (default: what the model was trained for, for each sequence).
        n_batch is accepted as other engines have it; it bounds n_ubatch, the tokens computed at a time. no_fuse: names of graph passes to leave out
        (`passes.PASSES`), or "all". graphs: replay steps from CUDA graphs on a GPU. kv_write: how cells of the KV cache are named, "set_rows" or "cpy"
        (`memory.KVCache`). No bits depend on any of these."""
        return Context(self, n_ctx or self.n_ctx_train * n_seq_max, n_batch, n_ubatch, type_k, type_v, n_seq_max, no_fuse, graphs, kv_write)

    def close(self) -> None:
        self.graph.w.close()
        self.file.close()
        self.backend.close()

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


class Step(NamedTuple):
    """A greedy step of one token that is queued: the token's sequence and position, and the id to come."""
    seq_id: int
    position: int
    outputs: Outputs


class Context:
    """The sequences 0 .. n_seq_max - 1 of a model. `decode` continues a sequence, `greedy` generates."""

    def __init__(self, model: Model, n_ctx: int, n_batch: int, n_ubatch: int, type_k: str, type_v: str, n_seq_max: int, no_fuse=(),
                 graphs: bool = True, kv_write: str = "set_rows"):
        for name, value in ("n_ctx", n_ctx), ("n_batch", n_batch), ("n_ubatch", n_ubatch), ("n_seq_max", n_seq_max):
            if value < 1:
                raise UserError(f"{name}: must be at least 1, got {value}")
        if n_ctx < n_seq_max:
            raise UserError(f"n_ctx: {n_ctx} positions do not give each of {n_seq_max} sequences one")
        self.no_fuse = switched_off(no_fuse)
        self.model, self.n_ubatch, self.n_ctx = model, min(n_ubatch, n_batch), n_ctx // n_seq_max
        self.memory = model.graph.new_memory(self.n_ctx, n_seq_max, type_k, type_v, kv_write)
        self.rope_table = model.graph.new_rope_table(self.n_ctx)
        self.arenas = Arenas({model.device: model.backend})
        self.programs: OrderedDict[tuple[int, int, bool], Program] = OrderedDict()
        self.graphs = model.backend.new_graphs() if graphs else None
        self.settings = self.no_fuse, type_k, type_v, kv_write  # of a graph's key
        self.is_closed = False
        self.ahead: Step | None = None  # queued before anybody asked for it, and taken back when something else is asked for

    def decode(self, tokens, seq_id: int = 0, logits: str = "last") -> np.ndarray:
        """Continue a sequence. tokens: ids, at least one; logits: of "all" tokens, the "last" or "none". Returns float32 [n, n_vocab].

        "argmax" stands for the last token's logits, of which only the id of the largest is brought to the host, int32 [1]: of equal ones the first, -1 where
        there is a NaN."""
        return self.decode_batch([(seq_id, tokens)], logits)[0]

    def decode_batch(self, batch, logits: str = "last") -> list[np.ndarray]:
        """Continue several sequences together: [(seq_id, tokens), ...]. Returns for each what `decode` does.

        If it fails or is interrupted, the sequences are as they were.
        """
        if logits not in ("all", "last", "argmax", "none"):
            raise UserError(f"logits: {logits!r} is not allowed; allowed: all, last, argmax, none")
        self._take_back()
        batch = [(seq_id, self._checked(seq_id, tokens)) for seq_id, tokens in batch]
        if len({seq_id for seq_id, _ in batch}) != len(batch):
            raise UserError(f"decode_batch: a sequence may occur once, got {[seq_id for seq_id, _ in batch]}")
        if not batch:
            return []
        before = [self.memory.length(seq_id) for seq_id, _ in batch]
        tokens = np.concatenate([ids for _, ids in batch])
        seq = np.concatenate([np.full(len(ids), seq_id, np.int32) for seq_id, ids in batch])
        pos = np.concatenate([np.arange(start, start + len(ids), dtype=np.int32) for start, (_, ids) in zip(before, batch)])
        ends = list(accumulate(len(ids) for _, ids in batch))
        wanted = np.full(len(tokens), logits == "all")
        if logits in ("last", "argmax"):
            wanted[[end - 1 for end in ends]] = True
        parts = []
        with self._undone_if_it_fails([(seq_id, start) for start, (seq_id, _) in zip(before, batch)]):
            for first in range(0, len(tokens), self.n_ubatch):
                part = slice(first, first + self.n_ubatch)
                parts += self._queue(tokens[part], seq[part], pos[part], np.flatnonzero(wanted[part]), logits == "argmax").result()
        out = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty((0, self.model.n_vocab), np.float32)
        if len(batch) == 1:
            return [out]
        n_rows = {"all": len, "none": lambda ids: 0}.get(logits, lambda ids: 1)
        bounds = list(accumulate((n_rows(ids) for _, ids in batch), initial=0))
        return [out[first:last] for first, last in zip(bounds, bounds[1:])]

    def greedy(self, token: int, n: int, seq_id: int = 0) -> Iterator[int]:
        """Continue a sequence by `token` and what is likeliest after it: n ids, each what `decode([the one before], seq_id, "argmax")` gives.

        On a GPU the step that is fed an id is queued before that id is on the host. When an id is given, the sequence goes up to the one before it: a step
        that is queued beyond is taken back when the iterator is closed or anything else is asked of the context. UserError for a NaN, and where the
        context ends, IndexError for an id that is no expert. If a step fails or is interrupted, the sequence is as before it.
        """
        ahead = None
        try:
            for left in range(n, 0, -1):
                if ahead is None or ahead is not self.ahead:
                    self._take_back()
                    ahead, ids = None, self._checked(seq_id, [token])
                position = ahead.position if ahead else self.memory.length(seq_id)
                with self._undone_if_it_fails([(seq_id, position)]):
                    self.ahead, step = None, ahead or self._greedy_step(seq_id, position, ids)
                    runs_ahead = left > 1 and position + 1 < self.n_ctx and step.outputs.program.runs_ahead
                    ahead = self._greedy_step(seq_id, position + 1, step.outputs) if runs_ahead else None
                    (token,), = step.outputs.result()
                    self.ahead = ahead
                if token < 0:
                    raise not_a_number(position + 1)
                yield int(token)
        finally:
            if ahead is not None and ahead is self.ahead:
                self._take_back()

    def _greedy_step(self, seq_id: int, position: int, ids: np.ndarray | Outputs) -> Step:
        return Step(seq_id, position, self._queue(ids, np.int32([seq_id]), np.int32([position]), np.int32([0]), True))

    def _take_back(self) -> None:
        """The sequences are as if no step had been queued ahead; what it writes to its cell is not there for later ones."""
        if self.ahead is not None:
            self.memory.seq_rm(self.ahead.seq_id, self.ahead.position, self.n_ctx)
            self.ahead = None

    @contextmanager
    def _undone_if_it_fails(self, starts: list[tuple[int, int]]):
        """starts: (sequence, position), from which cells are taken back."""
        try:
            yield
        except BaseException:
            for seq_id, start in starts:
                self.memory.seq_rm(seq_id, start, self.n_ctx)
            raise

    def _checked(self, seq_id: int, tokens) -> np.ndarray:
        if not 0 <= seq_id < self.memory.n_seq_max:
            raise UserError(f"seq_id: must be 0 to {self.memory.n_seq_max - 1}, got {seq_id}")
        ids = np.asarray(tokens)
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
            raise UserError(f"tokens: must be a one-dimensional list of ids, at least one, got {ids.dtype} {list(ids.shape)}")
        if ids.min() < 0 or ids.max() >= self.model.n_vocab:
            raise UserError(f"tokens: must be 0 to {self.model.n_vocab - 1}, got {ids[(ids < 0) | (ids >= self.model.n_vocab)][0]}")
        used = self.memory.length(seq_id)
        if used + ids.size > self.n_ctx:
            raise UserError(f"context: sequence {seq_id} has {used} of {self.n_ctx} positions in use, {ids.size} more do not fit")
        return ids.astype(np.int32)

    def _queue(self, tokens, seq, pos, rows, greedy) -> Outputs:
        values = {"tokens": tokens, "pos": pos, "out_ids": rows, **self.memory.values(seq, pos)}
        shape = len(seq), len(rows), greedy and len(rows) > 0
        return self.program(*shape).queue(values, self.graphs, Key(*shape, *self.settings))

    def program(self, n_tokens: int, n_outputs: int, greedy: bool = False) -> Program:
        """The graph for batches of this shape, planned and bound. Those of the SHAPES most recent shapes are kept: launches and inputs on the host, about a
        megabyte for 32 layers, and nothing on the device."""
        if self.is_closed:
            raise RuntimeError("context: it is closed, its memory is gone; allowed: new_context()")
        key = n_tokens, n_outputs, greedy
        program = self.programs.get(key)
        if program is None or program.generation != self.arenas.generation:
            program = self.programs[key] = Program(self.model.graph.build(self.memory, self.rope_table, *key), self.arenas, self.no_fuse)
        self.programs.move_to_end(key)
        while len(self.programs) > SHAPES:
            self.programs.popitem(last=False)
        return program

    def describe(self) -> str:
        """Memory of the sequences, and how a full micro-batch with one row of logits runs."""
        n_tokens = min(self.n_ubatch, self.n_ctx * self.memory.n_seq_max)
        return (f"{self.memory.n_seq_max} sequences of {self.n_ctx} positions, {self.memory.n_bytes:,} bytes of KV cache; micro-batches of {n_tokens} tokens\n"
                f"{self.program(n_tokens, 1).report()}")

    def launches(self) -> str:
        """What was replayed from graphs so far, and what was not, why."""
        return str(self.graphs.counters) if self.graphs else "CUDA graphs: none"

    def clear(self) -> None:
        """Forget every sequence."""
        self.ahead = None
        self.memory.clear()

    def seq_rm(self, seq_id: int, p0: int = 0, p1: int = -1) -> None:
        """Forget positions p0 <= p < p1 of a sequence (p1 < 0: to its end)."""
        if not 0 <= seq_id < self.memory.n_seq_max:
            raise UserError(f"seq_id: must be 0 to {self.memory.n_seq_max - 1}, got {seq_id}")
        self._take_back()
        self.memory.seq_rm(seq_id, max(p0, 0), self.n_ctx if p1 < 0 else p1)

    def close(self) -> None:
        """Frees its memory, behind what is queued: a step of `greedy` that runs ahead ends first. Its iterator can be closed later, and gives no more ids."""
        self._take_back()
        self.is_closed = True
        if self.graphs:
            self.graphs.close()
        self.programs.clear()
        self.arenas.close()
        self.memory.close()
        if self.rope_table.storage:
            self.model.backend.free(self.rope_table.storage[0])
            self.rope_table.storage = None

    def __enter__(self) -> "Context":
        return self

    def __exit__(self, *exception) -> None:
        self.close()
