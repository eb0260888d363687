"""Contexts: the memory of a model's sequences, and the runs over it.

Threads may share models, contexts and tokenizers, and get the bits of one thread. The calls of a context take turns: each waits
until no other thread is in one. It is a lock and not a refusal, since the threads of a server each continue a sequence of their
own, and an error would only make them wait themselves. A turn is one call of `decode`, `decode_batch`, `seq_rm`, `clear` or
`close`, or one id of `greedy`; between two ids other threads have their turns. Contexts of one model queue one micro-batch at a
time. Threads make nothing faster; sequences in one `decode_batch` are. A context or a model must not be closed while another
thread still wants it.

Processes: on the CPU a forked process may use the model, and contexts that no other thread was using when it was forked (those
are refused); if kernels ran before, it has one thread for them (kernels/compile.py). A model on a GPU belongs to the process that
loaded it: its contexts are refused in a forked one.
"""
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from weakref import WeakSet

import numpy as np

from ..backends.cuda_graphs import SHAPES, Counters, Key
from ..backends.letters import new_office
from ..base.errors import ParameterError, UserError
from ..graph.fuse import switched_off
from ..graph.place import DeviceOf
from ..graph.program import Arenas, Outputs, Program
from ..kernels.draws import MOST_DRAWN
from ..kernels.threads import using
from ..state.recurrent import LEAST_ROLLBACK
from .batch import Batch, filled, filled_rows, layout
from .sampling import Draw, not_a_number

if TYPE_CHECKING:
    from .model import Model

MOST_APART = 4  # tokens of each sequence, on average, of a micro-batch that `flash_attn_ext` is told to be `apart`

lock_holders: WeakSet = WeakSet()  # models and contexts


def renew_locks() -> None:
    """In a forked process: the threads that held locks are not there to release them. What they did to a context is half done."""
    for each in list(lock_holders):
        if each.lock.acquire(blocking=False):
            each.lock.release()
        else:
            each.lock, each.is_half_done = RLock(), True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=renew_locks)


Tokens = Sequence[int] | np.ndarray
MOST_POSITIONS = 2**31 - 1  # of a sequence; kernels take them as 32-bit numbers


# Is told of each micro-batch that was decoded: tokens, sequences and positions, i32 [n], and the results of the model's last
# norm, f32 [n, n_embd].
Observer = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]


class Step(NamedTuple):
    """A greedy step of a token of each of several sequences that is queued: where the tokens are, and the ids to come."""
    seq_ids: np.ndarray  # int32
    positions: np.ndarray  # int32
    outputs: Outputs


class Context:
    """The sequences 0 .. n_seq_max - 1 of a model. `decode` continues a sequence, `greedy` generates.   n_ctx: positions of each
    sequence.

    Threads may share it: their calls take turns (see the top of this file)."""

    def __init__(self, model: "Model", n_ctx: int, n_ubatch: int,  # noqa: PLR0913 (those of `Model.new_context`)
                 type_k: str = "f16", type_v: str = "f16", n_seq_max: int = 1,
                 no_fuse: Iterable[str] | str = (), graphs: bool = True, kv_write: str = "set_rows",
                 device_of: DeviceOf | None = None, n_rollback: int = LEAST_ROLLBACK, n_threads_batch: int | None = None,
                 letters: bool = True):
        if n_ctx < n_seq_max:
            raise ParameterError("n_ctx", f"{n_ctx} positions do not give each of {n_seq_max} sequences one")
        if n_ctx // n_seq_max > MOST_POSITIONS:
            raise ParameterError("n_ctx", f"{n_ctx // n_seq_max} positions for each of {n_seq_max} sequences, allowed: up to "
                                          f"{MOST_POSITIONS}")
        if device_of is not None and model.architecture.placement.columns:
            raise ParameterError("device_of", "devices that share columns have parts of weights; allowed: None")
        if device_of is not None and model.architecture.hot is not None:
            raise ParameterError("device_of", "hot experts are computed where their copies are; allowed: None")
        self.no_fuse = switched_off(no_fuse)
        self.model, self.n_ubatch, self.n_ctx = model, n_ubatch, n_ctx // n_seq_max
        taken = model.architecture.context_bytes(self.n_ctx, n_seq_max, type_k, type_v, n_rollback, n_ubatch)
        take = f"{n_seq_max} sequences of {self.n_ctx} positions take"
        for device, n_bytes in taken.items():
            if n_bytes > (held := model.backends[device].memory_bytes()):
                raise ParameterError("n_ctx", f"{take} {n_bytes:,} bytes, more than {device} has, {held:,}")
        try:
            self.memory = model.architecture.new_memory(self.n_ctx, n_seq_max, type_k, type_v, kv_write,
                                                         n_rollback=n_rollback, n_ubatch=n_ubatch)
            self.rope_tables = model.architecture.new_rope_tables(self.n_ctx)
        except MemoryError as error:
            raise ParameterError("n_ctx", f"{take} {taken.total():,} bytes, more than {' and '.join(taken)} has"
                                          f"{f': {error}' * bool(str(error))}") from None
        self.device_of, self.n_threads_batch = device_of, n_threads_batch
        self.arenas = Arenas(model.backends)
        self.programs: OrderedDict[tuple, Program] = OrderedDict()
        self.cuda_graphs = {device: cache for device, backend in model.backends.items()
                            if graphs and (cache := backend.new_graphs()) is not None}
        self.replays: dict[str, Any] = self.cuda_graphs  # what takes the steps of a device
        self.office: Any = new_office(model.backends, [*self.cuda_graphs]) if letters else None
        self.settings = self.no_fuse, type_k, type_v, kv_write  # of a graph's key
        self.is_closed = False
        self.observer: Observer | None = None
        # Each size of a micro-batch has a program and graphs of its own: to make them takes longer than a GPU takes for some
        # tokens more
        self.fills = all(backend.asynchronous for backend in model.backends.values())
        self.ahead: Step | None = None  # queued before anybody asked for it, and taken back when something else is asked for
        self.lock, self.is_half_done = RLock(), False
        lock_holders.add(self)

    def _turn(self) -> RLock:
        """What is held while this thread has its turn. RuntimeError in a forked process that cannot use the context."""
        if self.model.is_of_another_process:
            raise RuntimeError(f"context: this process was forked from process {self.model.pid}, which loaded the model on "
                               f"{self.model.device}; allowed: Model.load in a process that was started by \"spawn\", or was "
                               "forked before a GPU was used")
        if self.is_half_done:
            raise RuntimeError("context: another thread was using it when this process was forked; allowed: new_context()")
        return self.lock

    def decode(self, tokens: Tokens, seq_id: int = 0, logits: str = "last") -> np.ndarray:
        """Continue a sequence. tokens: ids, at least one; logits: of "all" tokens, the "last" or "none". Returns float32 [n,
        n_vocab].

        "argmax" stands for the last token's logits, "argmaxes" for those of all, of which only the ids of the largest are brought
        to the host, int32 [1] or [n]: of equal ones the first, -1 where there is a NaN."""
        return self.decode_batch([(seq_id, tokens)], logits)[0]

    def decode_batch(self, batch: Iterable[tuple[int, Tokens]], logits: str = "last") -> list[np.ndarray]:
        """Continue several sequences together: [(seq_id, tokens), ...]. Returns for each what `decode` does.

        If it fails or is interrupted, the sequences are as they were.
        """
        if logits not in ("all", "last", "argmax", "argmaxes", "none"):
            raise UserError(f"logits: {logits!r} is not allowed; allowed: all, last, argmax, argmaxes, none")
        with self._turn():
            self._take_back()
            checked = self._checked_batch(batch)
            # rows of the result: for each sequence its last ones
            n_rows = checked.counts if logits in ("all", "argmaxes") else (int(logits != "none"),) * len(checked.counts)
            wanted = "argmax" if logits.startswith("argmax") else "logits"
            results = self._decode(checked, n_rows, wanted)
            empty = [np.empty((0, self.model.n_vocab), np.float32)] * len(checked.counts)
            return results[0] if results else empty

    def likelihoods(self, batch: Iterable[tuple[int, Tokens, Tokens]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Continue several sequences together: [(seq_id, tokens, targets), ...]; targets: an id behind each of the last tokens.

        Returns of each its targets' log-likelihoods, float32 [n], and the ids of the largest logits there, int32 [n]: natural
        logarithms, NaN as `log_soft_max` has it (docs/numerics.md, section 5), ids as of "argmaxes". Logits stay on the device.
        """
        with self._turn():
            self._take_back()
            batch = list(batch)
            checked = self._checked_batch((seq_id, tokens) for seq_id, tokens, _ in batch)
            targets = [self._ids("targets", ids) if len(ids) else np.empty(0, np.int32) for _, _, ids in batch]
            for seq_id, n, wanted in zip(checked.seq_ids, checked.counts, targets):
                if len(wanted) > n:
                    raise UserError(f"targets: sequence {seq_id} has {len(wanted)} for {n} tokens; allowed: one for each")
            n_rows = tuple(len(ids) for ids in targets)
            results = self._decode(checked, n_rows, "likelihoods", self._in_vocabulary("targets", targets))
            if not results:
                return [(np.empty(0, np.float32), np.empty(0, np.int32)) for _ in batch]
            return [(found[:, 0], best) for found, best in zip(*results)]

    def _checked_batch(self, batch: Iterable[tuple[int, Tokens]]) -> Batch:
        seq_ids, ids_of_each = [], []
        for seq_id, tokens in batch:
            self._check_sequence(seq_id)
            seq_ids.append(seq_id)
            ids_of_each.append(self._ids("tokens", tokens))
        if len({*seq_ids}) != len(seq_ids):
            raise UserError(f"decode_batch: a sequence may occur once, got {seq_ids}")
        ids = self._in_vocabulary("tokens", ids_of_each)
        starts = tuple(self.memory.length(seq_id) for seq_id in seq_ids)
        counts = tuple(each.size for each in ids_of_each)
        for seq_id, used, n in zip(seq_ids, starts, counts):
            if used + n > self.n_ctx:
                raise UserError(f"context: sequence {seq_id} has {used} of {self.n_ctx} positions in use, {n} more do not fit")
        return Batch(tuple(seq_ids), starts, counts, ids)

    def _decode(self, batch: Batch, n_rows: tuple[int, ...], wanted: str,
                targets: np.ndarray | None = None) -> list[list[np.ndarray]]:
        """Continue the sequences. Returns each output of a program (`wanted`, of `program`), of the last n_rows tokens of each
        sequence; nothing where no rows are wanted. targets: int32, one for each row."""
        if not batch.seq_ids:
            return []
        tokens = batch.tokens
        seq, within, results, micro_batches = layout(batch.seq_ids, batch.counts, n_rows, self.n_ubatch)
        pos = np.repeat(np.array(batch.starts, np.int32), batch.counts) + within
        parts: list[list[np.ndarray]] = []  # of each micro-batch with rows, its outputs
        queued: deque[tuple[slice, slice | np.ndarray, Outputs]] = deque()

        def wait() -> None:
            part, wanted_ones, outputs = queued.popleft()
            rows = outputs.result()
            if self.observer is not None:
                self.observer(tokens[part], seq[part], pos[part], rows.pop()[:len(seq[part])])
            if rows:
                parts.append([each[wanted_ones] for each in rows])

        with self._undone_if_it_fails(batch.seq_ids, batch.starts):
            for part, rows, of_result, n_seq in micro_batches:
                fed, n_more, ids = (tokens[part], seq[part], pos[part]), 0, None
                wanted_ones: slice | np.ndarray = slice(len(rows))
                if self.fills:
                    fed, n_more = filled(*fed, self.n_ubatch, self.n_ctx)
                    rows, wanted_ones = filled_rows(rows, len(fed[0]))
                if targets is not None:
                    ids = np.zeros((len(rows), 1), np.int32)
                    ids[wanted_ones, 0] = targets[of_result]
                outputs = self._queue(*fed, rows, n_seq, wanted, ids, n_more)
                queued.append((part, wanted_ones, outputs))
                # One is queued behind another; where several devices have layers, one for each of them
                while len(queued) > (len(self.model.backends) if outputs.program.runs_ahead else 0):
                    wait()
            while queued:
                wait()
        whole = (each[0] if len(each) == 1 else np.concatenate(each) for each in zip(*parts))
        return [[out[rows] for rows in results] for out in whole]

    def greedy(self, token: int, n: int, seq_id: int = 0, see: Callable[[np.ndarray], None] | None = None) -> Iterator[int]:
        """Continue a sequence by `token` and what is likeliest after it: n ids, each what `decode([the one before], seq_id,
        "argmax")` gives.   see: is given the logits, float32 [n_vocab], of each id before the id is.

        On a GPU the step that is fed an id is queued before that id is on the host. When an id is given, the sequence goes up to
        the one before it: a step that is queued beyond is taken back when the iterator is closed or anything else is asked of the
        context. UserError for a NaN, and where the context ends, IndexError for an id that is no expert. If a step fails or is
        interrupted, the sequence is as before it.
        """
        with closing(self._greedy([(seq_id, token)], n, "argmax" if see is None else "both")) as steps:
            for (position,), ((id,), *others) in steps:
                if id < 0:
                    raise not_a_number(position + 1)
                if see is not None:
                    see(others[0][0])
                yield int(id)

    def greedy_batch(self, batch: Iterable[tuple[int, int]], n: int, more: Callable[[], bool] | None = None,
                     draws: Sequence[Draw] | None = None) -> Iterator[np.ndarray]:
        """`greedy` of several sequences together, one micro-batch a step: [(seq_id, token), ...]. n times the ids of all, int32;
        -1 where there is a NaN, which goes on as id 0.

        more: is asked behind each step whether a further one is wanted. A step that is queued already is given all the same.
        draws: of each sequence, how its ids are chosen in the place of the likeliest; as `sampling.choose` does."""
        with closing(self._greedy([*batch], n, "argmax" if draws is None else "draws", more, draws)) as steps:
            for _, (ids,) in steps:
                yield ids

    def _greedy(self, fed: Sequence[tuple[int, int]], n: int, wanted: str, more: Callable[[], bool] | None = None,
                draws: Sequence[Draw] | None = None) -> Generator[tuple[np.ndarray, list[np.ndarray]]]:
        """Of each step of `greedy_batch` the positions of what was fed, and the outputs, the ids first."""
        if len(fed) > self.n_ubatch:
            raise UserError(f"greedy_batch: {len(fed)} sequences are no micro-batch; allowed: up to {self.n_ubatch}")
        for draw in draws or ():
            if not (draw.sampling.is_drawn or draw.sampling.is_argmax):
                raise UserError(f"draws: {draw.sampling} is the host's to follow; allowed: temperature 0 or top_k 1 to "
                                f"{MOST_DRAWN}, without bias and penalties")
        if draws is not None and len(draws) != len(fed):
            raise UserError(f"draws: {len(draws)} for {len(fed)} sequences; allowed: one for each")
        ahead, ids = None, np.array([token for _, token in fed])

        def settings(step: int) -> np.ndarray | None:
            if draws is None:
                return None
            return np.array([each.sampling.settings(each.position + step, self.model.n_vocab) for each in draws])
        try:
            for left in range(n, 0, -1):
                with self._turn():
                    if ahead is None or ahead is not self.ahead:
                        self._take_back()
                        batch = self._checked_batch((seq_id, [token]) for (seq_id, _), token in zip(fed, ids))
                        ahead, seq_ids, positions = None, *np.array([batch.seq_ids, batch.starts], np.int32)
                        ids = batch.tokens
                    else:
                        seq_ids, positions = ahead.seq_ids, ahead.positions
                    with self._undone_if_it_fails(seq_ids, positions):
                        self.ahead, step = None, ahead or self._greedy_step(seq_ids, positions, ids, wanted, settings(n - left))
                        runs_ahead = (left > 1 and step.outputs.program.runs_ahead and positions.max() + 1 < self.n_ctx
                                      and (more is None or more()))
                        ahead = None
                        if runs_ahead:
                            ahead = self._greedy_step(seq_ids, positions + 1, step.outputs, wanted, settings(n - left + 1))
                        found = step.outputs.result()
                        self.ahead = ahead
                ids = np.maximum(found[0], 0)
                yield positions, found
                if ahead is None and more is not None and not more():
                    return
        finally:
            # Where another thread has its turn, that thread takes the step back. Waiting for it could be for ever: a garbage
            # collection may end this generator in a thread that holds another lock.
            if ahead is not None and self.lock.acquire(blocking=False):
                try:
                    if ahead is self.ahead:
                        self._take_back()
                finally:
                    self.lock.release()

    def _greedy_step(self, seq_ids: np.ndarray, positions: np.ndarray, ids: np.ndarray | Outputs, wanted: str,
                     draws: np.ndarray | None) -> Step:
        """draws: settings of `wanted` "draws"."""
        rows = np.arange(len(seq_ids))
        return Step(seq_ids, positions, self._queue(ids, seq_ids, positions, rows, len(rows), wanted, draws=draws))

    def _take_back(self) -> None:
        """The sequences are as if no step had been queued ahead; what it writes to its cells is not there for later ones."""
        if self.ahead is not None:
            for seq_id, position in zip(self.ahead.seq_ids.tolist(), self.ahead.positions.tolist()):
                self.memory.seq_rm(seq_id, position, self.n_ctx)
            self.ahead = None

    @contextmanager
    def _undone_if_it_fails(self, seq_ids: Sequence[int] | np.ndarray,
                            starts: Sequence[int] | np.ndarray) -> Iterator[None]:
        """starts: the positions to which the sequences are taken back."""
        seq_ids, starts = np.array([seq_ids, starts]).tolist()
        for seq_id, start in zip(seq_ids, starts):
            self.memory.hold(seq_id, start)
        try:
            yield
        except BaseException:
            for seq_id, start in zip(seq_ids, starts):
                self.memory.seq_rm(seq_id, start, self.n_ctx)
            raise

    def _ids(self, name: str, tokens: Tokens) -> np.ndarray:
        """Integers of any kind, not yet looked at."""
        ids = np.asarray(tokens)
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
            raise UserError(f"{name}: must be a one-dimensional list of ids, at least one, got {ids.dtype} {list(ids.shape)}")
        return ids

    def _in_vocabulary(self, name: str, ids_of_each: list[np.ndarray]) -> np.ndarray:
        """int32, of all one behind the other."""
        ids = np.concatenate([*ids_of_each, ()], dtype=np.int64, casting="unsafe")
        if ids.size and ids.view(np.uint64).max() >= self.model.n_vocab:  # negative ones are large there
            found = next(int(each) for ids in ids_of_each for each in ids if not 0 <= each < self.model.n_vocab)
            raise UserError(f"{name}: must be 0 to {self.model.n_vocab - 1}, got {found}")
        return ids.astype(np.int32)

    def _queue(self, tokens: np.ndarray | Outputs, seq: np.ndarray, pos: np.ndarray, rows: np.ndarray, n_seq: int,
               wanted: str = "logits", targets: np.ndarray | None = None, n_more: int = 0,
               draws: np.ndarray | None = None) -> Outputs:
        """n_more: tokens at the end that fill the micro-batch up. draws: f64 [n, 5], settings of the op `draw`."""
        hot, n = self.model.architecture.hot, len(seq) - n_more
        values = {"tokens": tokens, "pos": pos, "out_ids": rows, "targets": targets, "draws": draws,
                  **self._memory_values(seq, pos, n)}
        shape = len(seq), len(rows), wanted if len(rows) else "logits"
        hidden = self.observer is not None
        apart = n_seq > 1 and n <= MOST_APART * n_seq
        with self.model.lock, using(self.n_threads_batch if len(seq) > 1 else None):
            if hot is not None:
                values |= hot.values()
            key = Key._make((*shape, *self.settings, hidden, apart))
            outputs = self.program(*shape, hidden, apart).queue(values, self.replays, key, self.office)
            if hot is not None:
                hot.queued(len(seq))
        return outputs

    def _memory_values(self, seq: np.ndarray, pos: np.ndarray, n: int) -> dict[str, np.ndarray]:
        return self.memory.values(seq, pos, n)

    def program(self, n_tokens: int, n_outputs: int, wanted: str = "logits", hidden: bool = False,
                apart: bool = False) -> Program:
        """The graph for batches of this shape, planned and bound. wanted: of `Architecture.build`. hidden: what `observer` is
        told is an output too. apart: of `flash_attn_ext`. Those of the SHAPES most recent shapes are kept: launches and inputs on
        the host, about a megabyte for 32 layers, and nothing on the device."""
        key = n_tokens, n_outputs, wanted, hidden, apart
        with self._turn():
            if self.is_closed:
                raise RuntimeError("context: it is closed, its memory is gone; allowed: new_context()")
            program = self.programs.get(key)
            if program is None or program.generation != self.arenas.generation:
                graph = self.model.architecture.build(self.memory, self.rope_tables, *key)
                placement = self.model.architecture.placement
                program = self.programs[key] = Program(graph, self.arenas, self.no_fuse, self.device_of,
                                                        placement.offload, [*placement.columns])
            self.programs.move_to_end(key)
            while len(self.programs) > SHAPES:
                self.programs.popitem(last=False)
        return program

    def __repr__(self) -> str:
        state = ", closed" if self.is_closed else ""
        return (f"<Context: {self.memory.n_seq_max} sequence{'s' * (self.memory.n_seq_max > 1)} of {self.n_ctx} positions, "
                f"K {self.settings[1]}, V {self.settings[2]}, on {self.model.device}{state}>")

    def describe(self) -> str:
        """Memory of the sequences, and how a full micro-batch with one row of logits runs."""
        n_tokens = min(self.n_ubatch, self.n_ctx * self.memory.n_seq_max)
        with self._turn():
            return (f"{self.memory.n_seq_max} sequences of {self.n_ctx} positions, {self.memory.n_bytes:,} bytes of KV cache; "
                    f"micro-batches of {n_tokens} tokens\n{self.program(n_tokens, 1).report()}")

    @property
    def counters(self) -> Counters | None:
        """Of the CUDA graphs of the model's own device; None where there are none."""
        cache = self.cuda_graphs.get(self.model.device)
        return cache and cache.counters

    def launches(self) -> str:
        """What was replayed from graphs so far, and what was not, why."""
        return "\n".join(str(cache.counters) for cache in self.cuda_graphs.values()) or "CUDA graphs: none"

    def clear(self) -> None:
        """Forget every sequence."""
        with self._turn():
            self.ahead = None
            self.memory.clear()

    def seq_rm(self, seq_id: int, p0: int = 0, p1: int = -1) -> None:
        """Forget positions p0 <= p < p1 of a sequence (p1 < 0: to its end).

        UserError for what recurrent layers cannot forget: all but a sequence's end, from a position on of which they hold a state
        (the last `n_rollback` of them) or that has a checkpoint. Layers with a window that do not hold all positions go back
        likewise."""
        self._check_sequence(seq_id)
        with self._turn():
            self._take_back()
            self.memory.seq_rm(seq_id, max(p0, 0), self.n_ctx if p1 < 0 else p1)

    def seq_cp(self, source: int, seq_id: int, n: int = -1) -> None:
        """A sequence begins anew with the first n positions of another (n < 0: all of them), as if their tokens had been decoded
        in it. Nothing is computed: a prefix that several texts share is decoded once."""
        self._check_sequence(source)
        self._check_sequence(seq_id)
        with self._turn():
            self._take_back()
            length = self.memory.length(source)
            if source == seq_id or n > length:
                raise UserError(f"seq_cp: sequence {seq_id} cannot begin with {n} positions of sequence {source}, which has "
                                f"{length}; allowed: up to {length}, of another sequence")
            self.memory.seq_cp(source, seq_id, length if n < 0 else n)

    def checkpoint(self, seq_id: int = 0) -> None:
        """Where the sequence is now it can be taken back to, however long it becomes, or copied from. Only recurrent layers need
        it; it takes the memory of one of their states. It is gone where the sequence becomes shorter."""
        self._check_sequence(seq_id)
        with self._turn():
            self._take_back()
            self.memory.checkpoint(seq_id)

    def drop_checkpoints(self, seq_id: int = 0) -> None:
        """Free those of a sequence."""
        self._check_sequence(seq_id)
        with self._turn():
            self.memory.drop_checkpoints(seq_id)

    def _check_sequence(self, seq_id: int) -> None:
        if not 0 <= seq_id < self.memory.n_seq_max:
            raise UserError(f"seq_id: must be 0 to {self.memory.n_seq_max - 1}, got {seq_id}")

    def reachable(self, seq_id: int, n: int) -> int:
        """The most positions, n at most, that `keep` can take the sequence back to."""
        self._check_sequence(seq_id)
        with self._turn():
            self._take_back()
            return self.memory.reachable(seq_id, n)

    def keep(self, seq_id: int, n: int) -> None:
        """Take a sequence back to its first n positions. RuntimeError where its memory has others then."""
        with self._turn():
            self.seq_rm(seq_id, n)
            if (found := self.memory.length(seq_id)) != n:
                raise RuntimeError(f"context: sequence {seq_id} was taken back to {n} positions and has {found}")

    def close(self) -> None:
        """Frees its memory, behind what is queued: a step of `greedy` that runs ahead ends first.
        Its iterator can be closed later, and gives no more ids."""
        if not self.model.is_of_another_process:  # whose memory it is
            with self.lock:
                self._close()

    def _close(self) -> None:
        self._take_back()
        self.is_closed = True
        for cache in self.cuda_graphs.values():
            cache.close()
        self.programs.clear()
        if self.office is not None:
            self.office.close()
        self.arenas.close()
        self.memory.close()
        self.model.architecture.free_rope_tables(self.rope_tables)
        self.rope_tables = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self.close()
