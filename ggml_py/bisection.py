"""The first node that differs between two settings, by running both again and comparing rows of every node (`recording`).

The first run leaves a digest of each token's rows of each result; the second is compared with it as it goes, in its own order, and stops at the first that
differs: all that these rows depend on was compared before, as far as both runs have it. Then the first run is repeated to the same node. What a fused node
computes on the way is no result of it; nodes that were not compared are held, on either side, until what they lead to is. Each held node, and the one that
differs on both sides, is at last computed by its definition (`kernels/reference`) from what it read: a kernel that gives something else is to blame.
"""
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np

from .axes import Setting, play
from .backends.cpu import CPUBackend
from .files import writing
from .graph import Tensor
from .recording import Arrays, Batch, Capture, RecordedContext, bytes_of, is_cache, one_nan, recompute, results, rows_on_host
from .testing import Difference, difference

PARTS = "q", "d", "sums"             # of activation blocks
ADDRESSING = {"seq", "rows", "dst", "present", "out_ids"}  # inputs that differ between settings


class _Stop(Exception):
    pass


@dataclass
class FirstDifference:
    """What `first_difference` finds. Two values each are those of the default setting and of the other one."""
    settings: tuple[str, str]
    name: str            # of the result that differs
    op: str
    kernel: str
    shape: tuple[int, ...]
    where: str           # "", or the part of activation blocks
    n_different: int     # elements of the rows that both runs computed in this micro-batch
    n: int
    first: tuple[int, ...]
    patterns: tuple[str, str]
    values: tuple[float, float]
    max_ulps: float | None
    inputs: dict[str, str]  # operand -> equal, different, or only in one of the two graphs
    culprits: list[str]  # kernels that do not give what their definition does
    captures: tuple[list[Capture], list[Capture]] = field(repr=False)  # what each run computed on the way to the node, and the node

    @property
    def inputs_equal(self) -> bool:
        return "different" not in self.inputs.values()

    def __str__(self):
        a, b = self.settings
        ulps = "" if self.max_ulps is None else f"; at most {self.max_ulps:.0f} ULPs apart"
        where = f" ({self.where})" if self.where else ""
        (p, q), (x, y) = self.patterns, self.values
        what = f"{self.n_different} of {self.n} differ, first at {self.first}: {p} != {q} ({x:.9g}, {y:.9g}){ulps}" if self.n_different else (
            "differed, and did not when it was looked at: it comes and goes")
        lines = [f"first node that differs: {self.name}{where}, {self.op} {list(self.shape)}, {self.kernel}",
                 f"  {a} against {b}: {what}",
                 f"  inputs: {', '.join(f'{name} {state}' for name, state in self.inputs.items())}"]
        lines += [f"  not as defined: {culprit}" for culprit in self.culprits]
        if self.n_different and not self.culprits:
            lines.append("  both sides are as defined for what they read: " + (
                "memory was written over between nodes" if self.inputs_equal else "an input differs that no node of this run computed"))
        return "\n".join(lines)

    def as_dict(self) -> dict:
        """For JSON, which has no NaN and no infinity: these are strings."""
        plain = lambda x: x if x is None or np.isfinite(x) else str(x)
        shown = {name: value for name, value in vars(self).items() if name != "captures"}
        return {**shown, "values": [plain(v) for v in self.values], "max_ulps": plain(self.max_ulps), "inputs_equal": self.inputs_equal}

    def save(self, folder: Path) -> None:
        """The captured nodes, default.npz and other.npz the last of each, and run.py."""
        node = self.captures[1][-1].node
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for side, captures in zip(("default", "other"), self.captures):
                for i, capture in enumerate(captures):
                    capture.save(folder / f"{side}{f'-before-{len(captures) - 1 - i}' if i < len(captures) - 1 else ''}.npz")
            (folder / "run.py").write_text(SCRIPT.format(title=f"{node.name}: {self.kernel}", file="run.py"))


class _Side:
    """One setting, run with a visitor until that raises _Stop or it ends."""

    def __init__(self, model, windows, setting: Setting):
        """compared: names of this micro-batch's results that were compared. held: nodes that were not, which lead to others that are still to be."""
        self.model, self.windows, self.setting, self.held, self.compared = model, windows, setting, {}, set()

    def run(self, visit) -> bool:
        """Whether it was stopped."""
        def each(node, batch, backend):
            if node is self.context.current.nodes[0]:
                self.held, self.compared = {}, set()
            visit(node, batch, backend)

        try:
            with self.setting.conditions(), RecordedContext(each, self.model, **self.setting.context_settings(self.windows)) as self.context:
                for _ in play(self.context, self.windows, self.setting):
                    pass
        except _Stop:
            return True
        return False

    def capture(self, node: Tensor, batch: Batch, backend) -> Capture:
        program = self.context.current
        return Capture(node, batch, backend, {*program.inputs, *(tensor for each in program.nodes for tensor in each.written)})

    def settle(self, node: Tensor, batch: Batch, backend, compared: set[str]) -> None:
        """Holds a node, or releases what led to one of which a result was compared, and so is as it should be."""
        if compared.isdisjoint(tensor.name for tensor in results(node)):
            self.held[node] = self.capture(node, batch, backend)
        else:
            self.release(node)

    def release(self, node: Tensor) -> None:
        sources = {tensor for source in node.src for tensor in (source, source.base)}  # the base of a view is a node's, that of a cache none
        for held in [held for held in self.held if not sources.isdisjoint(held.written)]:
            del self.held[held]
            self.release(held)

    def stop(self, node: Tensor, batch: Batch, backend) -> None:
        self.stopped = self.capture(node, batch, backend).load()
        self.held = [held.load() for held in self.held.values()]
        raise _Stop


def first_difference(model_a, model_b, windows: np.ndarray, a: Setting, b: Setting, window: int) -> FirstDifference | None:
    """The first node whose rows differ between settings a and b of windows [n, c], the `window` of which is known to differ, or None if none does
    now that every node is waited for. Models are those of the devices of a and b."""
    mine = b.windows(windows)
    one = mine[window:window + 1]
    side_a, side_b = _Side(model_a, one, a), _Side(model_b, mine if b.order else mine[:window + 1], b)  # b as it was: with what came before
    digests: dict[tuple[str, bytes], bytes] = {}
    names: set[str] = set()

    def record(node, batch, backend):
        for name, key, data in _rows(node, batch, backend):
            names.add(name)
            digests[name, key] = blake2b(data, digest_size=12).digest()

    found = []

    def compare(node, batch, backend):
        for name, key, data in _rows(node, batch, backend):
            if name in names:
                side_b.compared.add(name)
            if (name, key) in digests and digests[name, key] != blake2b(data, digest_size=12).digest():
                found.append((name, key))
                side_b.stop(node, batch, backend)
        side_b.settle(node, batch, backend, side_b.compared)

    side_a.run(record)
    if not side_b.run(compare):
        return None
    (name, key), = found

    def reach(node, batch, backend):
        if name in {tensor.name for tensor in results(node)} and key in batch.keys:
            side_a.stop(node, batch, backend)
        side_a.settle(node, batch, backend, side_b.compared)

    if not side_a.run(reach):
        raise RuntimeError(f"bisection: {name} was there and is not any more")
    return _report(side_a, side_b, name, key)


def _rows(node: Tensor, batch: Batch, backend):
    """(name, key, bytes of the token's rows) for each token and result of a node."""
    for tensor in results(node):
        if (rows := batch.rows(tensor)) is not None:
            arrays, n = rows_on_host(backend, tensor, rows.reshape(-1)), rows.shape[1]
            for i, key in enumerate(batch.keys):
                yield tensor.name, key, bytes_of(tensor, arrays, slice(i * n, (i + 1) * n))


def _report(side_a: _Side, side_b: _Side, name: str, key: bytes) -> FirstDifference:
    a, b = side_a.stopped, side_b.stopped
    tensor_a, tensor_b = ({t.name: t for t in results(each.node)}[name] for each in (a, b))
    where, diff, key = _common(a, tensor_a, b, tensor_b, key)
    inputs = {source.name: _state(source, arrays, a, b, key) for source, arrays in zip(b.node.src, b.operands) if source.name not in ADDRESSING}
    culprits = [f"{capture.node.name}, {capture.kernel} on {capture.device}, in: {side.setting.axis}, {side.setting.name}"
                for side in (side_a, side_b) for capture in (*side.held, side.stopped) if not as_defined(capture, key)]
    settings = tuple(f"{side.setting.axis}, {side.setting.name} on {side.setting.device}" for side in (side_a, side_b))
    return FirstDifference(settings, name, b.node.op, b.kernel, tensor_b.shape, where, diff.n_different, diff.n, diff.first, diff.patterns,
                           tuple(float(v) for v in diff.values), diff.max_ulps, inputs, culprits,
                           ([*side_a.held, a], [*side_b.held, b]))


def _common(a: Capture, tensor_a: Tensor, b: Capture, tensor_b: Tensor, key: bytes):
    """The part and the difference of the rows that both captures have, whose places are those in b, and the first token whose rows differ: not the one of
    the key where what the first run gave comes and goes."""
    at = dict(zip(a.batch.keys, a.batch.rows(tensor_a)))
    pairs = [(*pair, token) for token, rows in zip(b.batch.keys, b.batch.rows(tensor_b)) if token in at for pair in zip(at[token], rows)]
    for part, x, y in zip(PARTS, a.results[tensor_a.name], b.results[tensor_b.name]):
        x, y = (one_nan(array[[pair[i] for pair in pairs]], tensor_b.dtype) for i, array in enumerate((x, y)))
        if diff := difference(x, y):
            _, row, token = pairs[diff.first[0]]
            return part if tensor_b.dtype == "act" else "", replace(diff, first=(int(row), *diff.first[1:])), token
    return "", Difference(0, sum(a.size for a in b.results[tensor_b.name]), (), ("", ""), (0.0, 0.0), None), key  # not any more


def _state(source: Tensor, arrays: Arrays, a: Capture, b: Capture, key: bytes) -> str:
    """Whether an operand of b's node is what a's node of that operand read, for the token whose rows differ."""
    twin = next((i for i, other in enumerate(a.node.src) if other.name == source.name), None)
    if twin is None:
        return "only in one"
    other = a.node.src[twin]
    if is_cache(source):
        rows = [each.batch.visible(key) for each in (a, b)]
    elif a.passing[twin]:
        rows = [each.batch.rows_of(tensor, key) for each, tensor in ((a, other), (b, source))]
    else:
        rows = [slice(min(len(arrays[0]), len(a.operands[twin][0])))] * 2  # a weight; rope tables may be longer for one
    same = bytes_of(source, a.operands[twin], rows[0]) == bytes_of(source, arrays, rows[1])
    return "equal" if same else "different"


def as_defined(capture: Capture, key: bytes) -> bool:
    """Whether a captured node gave, for a token, what its definition gives from what it read."""
    one = capture.only(key)
    expected = recompute(one, CPUBackend("reference"))
    for tensor in results(capture.node):
        rows = capture.batch.rows_of(tensor, key)
        rows = slice(None) if rows is None else rows
        if bytes_of(tensor, capture.results[tensor.name], rows) != bytes_of(tensor, expected[tensor.name], rows if one is capture else slice(None)):
            return False
    return True


SCRIPT = '''"""{title}

Runs the op by its definition, or on the device that is named: python {file} [cpu|cuda:0]
"""
import sys
from pathlib import Path

from ggml_py.backends import open_backend
from ggml_py.backends.cpu import CPUBackend
from ggml_py.recording import Capture, recompute
from ggml_py.testing import difference

backend = open_backend(sys.argv[1]) if sys.argv[1:] else CPUBackend("reference")
for path in sorted(Path(__file__).parent.glob("*.npz")):
    capture = Capture.read(path)
    for name, arrays in recompute(capture, backend).items():
        for found, recorded in zip(arrays, capture.results[name]):
            print(f"{{path.name}}: {{capture.kernel}}, {{name}}: {{difference(found, recorded) or 'the same bits'}}")
'''

