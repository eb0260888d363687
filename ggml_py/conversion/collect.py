"""Importance matrices of a model and a text: of each matrix product, squares of its float32 inputs, summed over the tokens.

Inputs are taken before they are quantized to activation blocks. The model runs node by node, nothing fused, a window at a time.
Sums are float64, `s + x * x` in the order of the tokens (of a token's experts by rank), so they have the same bits for every size
of a micro-batch, number of threads and device; a file holds them rounded to float32.
"""
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..base.errors import ParameterError, UserError
from ..base.progress import Progress, Told
from ..check.evaluate import arrays_on_host
from ..check.recording import Batch, RecordedContext
from ..engine.settings import Settings, check_context
from ..engine.windows import is_elsewhere, split_windows, with_bos
from ..graph.graph import Node, Tensor
from ..kernels.cpu.sum_squares import add_squares
from .imatrix import ImportanceMatrix, Sums

OUTPUT = "output.weight"
ADDED_BESIDE = 4  # inputs that may wait to be added while the next ones come from a device
PRODUCTS = "mul_mat", "mul_mat_id", "mul_mat_heads"  # operands: w, x, and of experts ids


@dataclass
class _Running:
    """Of one matrix, or of a stack. values: float64 [n_matrices, n_cols]. counts: int64, of experts, or one for all."""
    values: np.ndarray
    counts: np.ndarray


@dataclass
class SquareSums:
    """What a `RecordedContext` calls behind each node. wants: by the name of a weight. thread: adds, one input behind the other,
    of which most_waiting may wait for it. context: set before the first."""
    wants: Callable[[str], bool]
    thread: ThreadPoolExecutor
    most_waiting: int
    context: RecordedContext | None = None
    waiting: deque[Future] = field(default_factory=deque)
    found: dict[str, _Running] = field(default_factory=dict)
    batch: Batch | None = None
    rows: dict[Tensor, np.ndarray] = field(default_factory=dict)  # inputs of products to come; of activation blocks as floats
    readers: Counter[Tensor] = field(default_factory=Counter)     # products to come that read it
    origin: dict[Tensor, Tensor] = field(default_factory=dict)    # of what was brought from another device
    added: set[tuple[str, Tensor]] = field(default_factory=set)   # one matrix may be several weights, some rows in each

    def __call__(self, node: Node, batch: Batch, backend) -> None:
        if batch is not self.batch:
            self._begin(batch)
        if node.op == "quantize" and self.readers[node.results[0]]:
            self.rows[node.results[0]] = arrays_on_host(backend, node.src[0])[0]
        if not self._is_wanted(node):
            return
        name, x = self._weight(node), self._input(node)
        if x not in self.rows:  # floats
            self.rows[x] = arrays_on_host(backend, node.src[1])[0]
        if (name, x) not in self.added:
            self.added.add((name, x))
            self._add(node, name, self.rows[x], backend)
        self.readers[x] -= 1
        if not self.readers[x]:
            del self.rows[x]

    def _begin(self, batch: Batch) -> None:
        assert self.context is not None
        program = self.context.current
        self.batch, self.rows, self.added = batch, {}, set()
        self.origin = {copy.results[0]: copy.src[0] for copy in program.crossings}
        self.readers = Counter(self._input(node) for node in program.nodes if self._is_wanted(node))

    def _first(self, tensor: Tensor) -> Tensor:
        while tensor in self.origin:
            tensor = self.origin[tensor]
        return tensor

    def _input(self, node: Node) -> Tensor:
        return self._first(node.src[1])

    def _weight(self, node: Node) -> str:
        return self._first(node.src[0]).name

    def _is_wanted(self, node: Node) -> bool:
        return node.op in PRODUCTS and self.wants(self._weight(node))

    def _add(self, node: Node, name: str, rows: np.ndarray, backend) -> None:
        """rows: float32 [n, n_cols]."""
        n_matrices = node.src[0].shape[0] if node.op != "mul_mat" else 1
        to = np.arange(len(rows)) % n_matrices  # of heads
        if node.op == "mul_mat_id":  # the product of token i and rank j is of its row j mod b of b
            ids = arrays_on_host(backend, node.src[2])[0]
            n, used = ids.shape
            rows = rows.reshape(n, -1, rows.shape[1])
            rows = np.ascontiguousarray(rows[:, np.arange(used) % rows.shape[1]]).reshape(n * used, -1)
            to = ids.reshape(-1).astype(np.int64)
        running = self.found.get(name)
        if running is None:
            n_counts = n_matrices if node.op == "mul_mat_id" else 1
            running = self.found[name] = _Running(np.zeros((n_matrices, rows.shape[1])), np.zeros(n_counts, np.int64))
        self.waiting.append(self.thread.submit(add_squares, running.values, rows, to))
        self.settle(self.most_waiting)
        running.counts += np.bincount(to, minlength=n_matrices)[:len(running.counts)]

    def settle(self, n: int = 0) -> None:
        """All but n inputs are added."""
        while len(self.waiting) > n:
            self.waiting.popleft().result()


def collect(model, tokens, settings: Settings, dataset: str, path: Path, log=None, process_output: bool = False,
            progress: Told | None = None) -> ImportanceMatrix:
    """The importance matrix of a text, by windows of settings.n_ctx tokens as llama-imatrix has them; of matrices in layers, and
    with `process_output` of the output head. dataset: names the text. path: where it will be written. log: a stream for
    a bar, if it is a terminal. progress: is told how many windows are done, and of how many."""
    placement = model.architecture.placement
    if placement.columns:
        raise ParameterError("split_mode", "devices that share columns have parts of a product's inputs; allowed: layer, none")
    check_context(model, settings.n_ctx)
    windows = with_bos(model, split_windows(tokens, settings))
    wants = lambda name: name.startswith("blk.") or (process_output and name == OUTPUT)
    thread = ThreadPoolExecutor(1, "ggml-py-squares")
    sums = SquareSums(wants, thread, ADDED_BESIDE if is_elsewhere(model) else 0)
    with thread, RecordedContext(sums, model, n_ctx=settings.n_ctx, n_ubatch=min(settings.n_ubatch, settings.n_batch),
                                 no_fuse="all", type_k=settings.type_k, type_v=settings.type_v, graphs=False,
                                 kv_write=settings.kv_write, n_threads_batch=settings.n_threads_batch) as context:
        sums.context = context
        context.observer = lambda *told: None  # then all tokens go through the last layer, also without logits
        with Progress(log, "importance matrix", len(windows), told=progress) as bar:
            for window in windows:
                context.clear()
                context.decode(window, logits="all" if process_output else "none")
                bar.advance()
        sums.settle()
    for name, running in sums.found.items():
        if not np.isfinite(running.values).all():
            raise UserError(f"{model.file.path}: the inputs of {name} are not finite on this text, or their squares too large")
    entries = {name: Sums(running.values.reshape(-1).astype(np.float32), running.counts) for name, running in sums.found.items()}
    return ImportanceMatrix(path, entries, [dataset], len(windows), settings.n_ctx)
