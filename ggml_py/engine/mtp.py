"""Drafts of a model's own NextN (MTP) block: behind the layers, it predicts the token after next from a token and what the layers
made of those before it.

The block has a memory of its own, which follows the model's: behind each micro-batch of the context it runs over the same
tokens, each with the result of the model's last norm at the position before. To draft, it is given the last token, which the
model has not seen yet, and goes on from its own results. Ids and results go from one step of a draft to the next on the device,
as in `Context.greedy`; what a draft wrote to the block's memory is taken back before the model's own results come.
"""
from collections import OrderedDict

import numpy as np

from ..backends.cuda_graphs import SHAPES
from ..base.errors import ParameterError
from ..graph.program import Arenas, Outputs, Program
from .context import Context
from .model import Model
from .speculation import probability_of_best

SEQ = 0  # whose text it follows


class MTP:
    """A source of drafts (`speculation.Source`). A draft ends at a token to which the block gives a probability below p_min."""
    name = "mtp"

    def __init__(self, model: Model, n_ctx: int, p_min: float = 0.0, type_k: str = "f16", type_v: str = "f16"):
        """model: one that was loaded with nextn; n_ctx: positions of a text. ParameterError for one without such a block."""
        if not 0 <= p_min <= 1:
            raise ParameterError("draft_p_min", f"must be 0 to 1, got {p_min!r}")
        if not model.has_nextn:
            raise ParameterError("draft_source", f"mtp: {model.file.path} has no NextN block, or was loaded without it; allowed: "
                                                 "Model.load(nextn=True) of a model that has one")
        architecture = model.architecture
        self.model, self.p_min, self.n_ctx = model, p_min, n_ctx
        self.memory = architecture.new_nextn_memory(n_ctx, type_k, type_v)
        self.tables = architecture.new_nextn_rope_tables(n_ctx)
        self.arenas = Arenas(model.backends)
        self.programs: OrderedDict[tuple[int, str], Program] = OrderedDict()
        self.replays = {device: cache for device, backend in model.backends.items()
                        if (cache := backend.new_graphs()) is not None}
        self.context: Context | None = None

    def begin(self, context: Context) -> None:
        """Of a text that the context continues."""
        if context.model is not self.model:
            raise ParameterError("draft_source", "mtp: the context is of another model")
        self.end()
        self.memory.clear()
        self.first, self.hidden = 0, np.zeros((0, self.model.architecture.hp.n_embd), np.float32)
        context.observer = self._see
        self.context = context

    def end(self) -> None:
        """The text goes no further: the context has no more to tell."""
        if self.context is not None:
            self.context.observer = None
            self.context = None

    def _see(self, tokens: np.ndarray, seq: np.ndarray, pos: np.ndarray, hidden: np.ndarray) -> None:
        """What a micro-batch computed. hidden: float32 [n, n_embd]."""
        mine = seq == SEQ
        if not mine.any():
            return
        tokens, pos, hidden = tokens[mine], pos[mine], hidden[mine]
        first = int(pos[0])
        before = np.concatenate([self._at(first - 1), hidden[:-1]])
        self.memory.seq_rm(0, first, self.n_ctx)
        self._queue("none", tokens, before, pos)
        self.first, self.hidden = first, hidden

    def _at(self, position: int) -> np.ndarray:
        """The model's result at a position, [1, n_embd], of the micro-batch that was seen last; zeros before the first."""
        i = position - self.first
        return self.hidden[i:i + 1] if 0 <= i < len(self.hidden) else np.zeros((1, self.hidden.shape[1]), np.float32)

    def draft(self, tokens: list[int], n: int) -> list[int]:
        assert self.context is not None, "draft is called behind begin"
        position = self.context.memory.length(SEQ)  # of the last token
        n = min(n, self.n_ctx - position)
        if n < 1 or not self.first <= position - 1 < self.first + len(self.hidden):
            return []
        self.memory.seq_rm(0, position, self.n_ctx)
        token, hidden = np.array([tokens[-1]], np.int32), self._at(position - 1)
        found = self._sure(token, hidden, position, n) if self.p_min else self._likeliest(token, hidden, position, n)
        self.memory.seq_rm(0, position, self.n_ctx)
        return found

    def _likeliest(self, token, hidden, position: int, n: int) -> list[int]:
        steps: list[Outputs] = []
        for i in range(n):
            steps.append(self._queue("argmax", token, hidden, np.array([position + i], np.int32)))
            token, hidden = (steps[-1], 0), (steps[-1], 1)
        ids = [int(step.result()[0][0]) for step in steps]
        return ids[:ids.index(-1)] if -1 in ids else ids  # behind a NaN nothing is likely

    def _sure(self, token, hidden, position: int, n: int) -> list[int]:
        found: list[int] = []
        for i in range(n):
            logits, hidden = self._queue("all", token, hidden, np.array([position + i], np.int32)).result()
            if probability_of_best(logits[0]) < self.p_min:
                break
            token = np.array([logits[0].argmax()], np.int32)
            found.append(int(token[0]))
        return found

    def _queue(self, logits: str, tokens, hidden, pos: np.ndarray) -> Outputs:
        values = {"tokens": tokens, "hidden": hidden, "pos": pos, "out_ids": np.arange(len(pos), dtype=np.int32),
                  **self.memory.values(np.zeros(len(pos), np.int32), pos, len(pos))}
        with self.model.lock:
            return self._program(len(pos), logits).queue(values, self.replays, (len(pos), logits))

    def _program(self, n_tokens: int, logits: str) -> Program:
        key = n_tokens, logits
        program = self.programs.get(key)
        if program is None or program.generation != self.arenas.generation:
            architecture = self.model.architecture
            graph = architecture.build_nextn(self.memory, self.tables, n_tokens, architecture.hp.n_layer, logits)
            program = self.programs[key] = Program(graph, self.arenas, offload=architecture.placement.offload,
                                                    columns=[*architecture.placement.columns])
        self.programs.move_to_end(key)
        while len(self.programs) > SHAPES:
            self.programs.popitem(last=False)
        return program

    def close(self) -> None:
        self.end()
        for cache in self.replays.values():
            cache.close()
        self.programs.clear()
        self.arenas.close()
        self.memory.close()
        self.model.architecture.free_rope_tables(self.tables)
