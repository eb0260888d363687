"""CUDA graphs: the launches of a step as one, captured once and replayed (docs/graphs.md).

A graph holds the kernels, grids, sizes and addresses of the step that it was captured from. So a step may be replayed only where
nothing of these changes: what differs from token to token is data in device memory (ids, positions, cells, presence of keys), and
how many keys there are, kernels read from the positions. A cache finds graphs by a `Key` of everything that shapes launches, and
replays one for the very steps that it was captured from; if they were bound anew since, as after the arena grew, it captures them
again.
"""
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SHAPES = 32  # of micro-batches that a context is ready for: it keeps so many programs, and their graphs


class Key(NamedTuple):
    """Everything that shapes the launches of a context's steps."""
    n_tokens: int
    n_outputs: int
    wanted: str
    no_fuse: frozenset[str]
    type_k: str
    type_v: str
    kv_write: str
    hidden: bool = False
    apart: bool = False


@dataclass
class Counters:
    """Of runs: eager and replayed ones; of graphs: captured, captured again for other steps, dropped.
    refusals: runs by their reason, also counted as eager."""
    eager: int = 0
    replays: int = 0
    captures: int = 0
    updates: int = 0
    evictions: int = 0
    refusals: Counter = field(default_factory=Counter)

    def __str__(self):
        return "\n".join([f"CUDA graphs: {self.captures} captures, {self.replays} replays, {self.updates} updates, "
                          f"{self.evictions} evictions; {self.eager} eager runs, {self.refusals.total()} of them refused",
                          *(f"refused {n} times: {reason}" for reason, n in self.refusals.items())])


@dataclass
class _Entry:
    steps: list[Callable]
    graph: Any = None  # cuda.core.graph.Graph, from the second run on


class GraphCache:
    """The graphs of a context. The first run of a key is eager, which also loads the code of its kernels; the second is captured:
    what comes once, like most parts of a prompt, costs nothing, and any shape that comes again is replayed, be it a token, drafts
    to verify or windows of a text."""

    def __init__(self, backend, most: int = SHAPES):
        """backend: has `run(steps)`, `new_graph_builder()` and `launch(graph)`. most: shapes,
        the first parts of keys, that are remembered; the graphs of the least recently used go. As many as its context keeps
        programs, which go in the same order: a graph that outlived its program could never be replayed, since a program that is
        made anew has new steps, and a program without its graphs would have them captured again. On several devices it has a
        graph for each of its runs on this one."""
        self.backend, self.most = backend, most
        self.entries: OrderedDict[Sequence[Hashable], _Entry] = OrderedDict()
        self.counters = Counters()

    def run(self, key: Sequence[Hashable], steps: list[Callable]) -> None:
        """Runs the steps of a key, callables of a stream or a graph builder."""
        if key not in self.entries:
            self.backend.run(steps)
            self._enter(key, steps)
            self.counters.eager += 1
        else:
            self.replay(self.ready(key, steps))

    def ready(self, key: Sequence[Hashable], steps: list[Callable]) -> Any:
        """The graph of a key, captured from these steps if it was not."""
        if key not in self.entries:
            self._enter(key, steps)
        self.entries.move_to_end(key)
        entry = self.entries[key]
        if entry.graph is None or entry.steps is not steps:
            self._capture(entry, steps)
        return entry.graph

    def replay(self, graph: Any) -> None:
        self.backend.launch(graph)
        self.counters.replays += 1

    def _enter(self, key: Sequence[Hashable], steps: list[Callable]) -> None:
        self.entries[key] = _Entry(steps)
        shapes = dict.fromkeys(shape for shape, *_ in self.entries)
        if len(shapes) > self.most:
            oldest = next(iter(shapes))
            for old in [old for old in self.entries if old[0] == oldest]:
                if (graph := self.entries.pop(old).graph) is not None:
                    graph.close()  # one that still runs is freed when it ends
                    self.counters.evictions += 1

    def refuse(self, reason: str) -> None:
        """Counts a run that was eager because its steps must not be captured."""
        self.counters.eager += 1
        self.counters.refusals[reason] += 1

    def _capture(self, entry: _Entry, steps: list[Callable]) -> None:
        """On a stream of the builder's own: whatever else is put into the backend's stream meanwhile is no part of the graph."""
        builder = self.backend.new_graph_builder()
        try:
            builder.begin_building()
            for step in steps:
                step(builder)
            graph = builder.end_building().complete()
        finally:
            builder.close()
        if entry.graph is None:
            self.counters.captures += 1
        else:
            entry.graph.close()
            self.counters.updates += 1
        entry.steps, entry.graph = steps, graph

    def close(self) -> None:
        for entry in self.entries.values():
            if entry.graph is not None:
                entry.graph.close()
        self.entries.clear()
