"""The first node that differs between two settings, by running both again and comparing rows of every node (`recording`).

The first run leaves a digest of each token's rows of each result; the second is compared with it as it goes, in its own order,
and stops at the first that differs: all that these rows depend on was compared before, as far as both runs have it. Then the
first run is repeated to the same node. What a fused node computes on the way is no result of it; nodes that were not compared
are held, on either side, until what they lead to is. Each held node, and the one that differs on both sides, is at last computed
by its definition (`kernels/reference`) from what it read: a kernel that gives something else is to blame. The definition of a
fused node is its parts, one after the other: where it gives the results of several, those that are right tell which parts are
not to blame.
"""
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import compress
from pathlib import Path

import numpy as np

from ..backends.cpu import CPUBackend
from ..files.writing import writing
from ..graph.graph import Node
from ..ops.table import OPS
from ..quant import tile
from ..testing import Difference, difference
from .axes import Setting, play
from .evaluate import arrays_on_host, make_node
from .recording import Batch, LiveCapture, RecordedContext, bits_of, one_nan, recompute, rows_on_host

PARTS = "q", "d", "sums"             # of activation blocks
ADDRESSING = {"seq", "rows", "dst", "present", "out_ids", "runs"}  # inputs that differ between settings


class _Stop(Exception):
    pass


@dataclass
class FirstDifference:
    """What `first_difference` finds. Two values each are those of the default setting and of the other one."""
    settings: tuple[str, str]
    name: str            # of the result that differs
    op: str
    parts: list[str]     # the ops that a fused op stands for; none of a primitive one
    kernel: str
    shape: tuple[int, ...]
    where: str           # "", or the part of activation blocks
    n_different: int     # elements of the rows that both runs computed in this micro-batch
    n: int
    first: tuple[int, ...]
    patterns: tuple[str, str]
    values: tuple[float, float]
    max_ulps: float | None
    # operand -> equal, different, only in one of the two graphs, or the state behind other tokens
    inputs: dict[str, str]
    culprits: list[str]  # kernels that do not give what their definition does; copies that are not what they are of
    # what each run computed on the way to the node, and the node
    captures: tuple[list[LiveCapture], list[LiveCapture]] = field(repr=False)

    @property
    def inputs_equal(self) -> bool:
        return "different" not in self.inputs.values()

    def __str__(self) -> str:
        a, b = self.settings
        ulps = "" if self.max_ulps is None else f"; at most {self.max_ulps:.0f} ULPs apart"
        where = f" ({self.where})" if self.where else ""
        (p, q), (x, y) = self.patterns, self.values
        what = (f"{self.n_different} of {self.n} differ, first at {self.first}: {p} != {q} ({x:.9g}, {y:.9g}){ulps}"
                if self.n_different else "differed, and did not when it was looked at: it comes and goes")
        lines = [f"first node that differs: {self.name}{where}, {self.op} {list(self.shape)}, {self.kernel}",
                 f"  {a} against {b}: {what}",
                 f"  inputs: {', '.join(f'{name} {state}' for name, state in self.inputs.items())}"]
        if self.parts and not any(_stands_for(self.parts) in culprit for culprit in self.culprits):
            lines.insert(1, f"  {self.op} {_stands_for(self.parts)}")
        lines += [f"  not as defined: {culprit}" for culprit in self.culprits]
        if self.n_different and not self.culprits:
            why = ("memory was written over between nodes" if self.inputs_equal
                   else "an input differs that no node of this run computed")
            lines.append(f"  both sides are as defined for what they read: {why}")
        return "\n".join(lines)

    def as_dict(self) -> dict:
        """For JSON, which has no NaN and no infinity: these are strings."""
        plain = lambda x: x if x is None or np.isfinite(x) else str(x)
        shown = {name: value for name, value in vars(self).items() if name != "captures"}
        return {**shown, "values": [plain(v) for v in self.values], "max_ulps": plain(self.max_ulps),
                "inputs_equal": self.inputs_equal}

    def save(self, folder: Path) -> None:
        """The captured nodes, default.npz and other.npz the last of each, and run.py."""
        last = self.captures[1][-1]
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for side, captures in zip(("default", "other"), self.captures):
                for i, capture in enumerate(captures):
                    capture.save(folder / f"{side}{f'-before-{len(captures) - 1 - i}' if i < len(captures) - 1 else ''}.npz")
            (folder / "run.py").write_text(SCRIPT.format(title=f"{last.name}: {self.kernel}", file="run.py"))


def _stands_for(ops: list[str]) -> str:
    return f"stands for {', '.join(ops)}"


class _Side:
    """One setting, run with a visitor until that raises _Stop or it ends."""

    def __init__(self, model, windows: np.ndarray, setting: Setting):
        self.model, self.windows, self.setting = model, windows, setting
        self.held: dict[Node, LiveCapture] = {}  # nodes that were not compared, which lead to others that are still to be
        self.compared: set[str] = set()  # names of this micro-batch's results that were compared
        self.batch: Batch | None = None

    def run(self, visit) -> bool:
        """Whether it was stopped."""
        def each(node, batch, backend):
            if batch is not self.batch:
                self.batch, self.held, self.compared = batch, {}, set()
            visit(node, batch, backend)

        try:
            with self.setting.conditions(), RecordedContext(each, self.model,
                                                            **self.setting.context_settings(self.windows)) as self.context:
                for _ in play(self.context, self.windows, self.setting):
                    pass
        except _Stop:
            return True
        return False

    def capture(self, node: Node, batch: Batch, backend) -> LiveCapture:
        return LiveCapture.of(node, batch, backend, self.context.current)

    def settle(self, node: Node, batch: Batch, backend, compared: set[str]) -> None:
        """Holds a node, or releases what led to one of which a result was compared, and so is as it should be."""
        if compared.isdisjoint(tensor.name for tensor in node.results):
            self.held[node] = self.capture(node, batch, backend)
        else:
            self.release(node)

    def release(self, node: Node) -> None:
        """What made the operands of a node, on whatever device, is as it should be."""
        program, makers, between = self.context.current, set[Node](), [node]
        by_letters = self.batch is not None and self.batch.letters is not None
        unseen = program.crossings | (program.mail.replaced if program.mail and by_letters else set())
        while between:
            for maker in {maker for source in between.pop().src if (maker := source.maker)} - makers:
                makers.add(maker)
                between += [maker] * (maker in unseen)
        for held in [held for held in self.held if held in makers]:
            del self.held[held]
            self.release(held)

    def stop(self, node: Node, batch: Batch, backend) -> None:
        """captures: what was held, and the node."""
        self.captures = [capture.load() for capture in (*self.held.values(), self.capture(node, batch, backend))]
        raise _Stop


def first_difference(model_a, model_b, windows: np.ndarray, a: Setting, b: Setting, window: int) -> FirstDifference | None:
    """The first node whose rows differ between settings a and b of windows [n, c], the `window` of which is known to differ, or
    None if none does now that every node is waited for. Models are those of the devices of a and b."""
    mine = b.windows(windows)
    one = mine[window:window + 1]
    # b as it was: with what came before
    side_a, side_b = _Side(model_a, one, a), _Side(model_b, mine if b.order else mine[:window + 1], b)
    digests: dict[tuple[str, bytes], bytes] = {}
    names: set[str] = set()

    def record(node, batch, backend):
        for name, key, data in _rows(node, batch, backend):
            names.add(name)
            digests[name, key] = blake2b(data, digest_size=12).digest()

    found: list[tuple[str, bytes]] = []

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
        if name in {tensor.name for tensor in node.results} and key in batch.keys:
            side_a.stop(node, batch, backend)
        side_a.settle(node, batch, backend, side_b.compared)

    if not side_a.run(reach):
        raise RuntimeError(f"bisection: {name} was there and is not any more")
    return _report(side_a, side_b, name, key)


def _rows(node: Node, batch: Batch, backend) -> Iterator[tuple[str, bytes, bytes]]:
    """(name, key, bytes of the token's rows) for each token and result of a node."""
    for tensor in node.results:
        rows = batch.rows(tensor)
        if rows is not None and (has := rows[:, 0] >= 0).any():
            arrays, n = rows_on_host(backend, tensor, rows[has].reshape(-1)), rows.shape[1]
            for i, key in enumerate(compress(batch.keys, has)):
                yield tensor.name, key, bits_of(tensor.dtype, arrays, slice(i * n, (i + 1) * n))


def _report(side_a: _Side, side_b: _Side, name: str, key: bytes) -> FirstDifference:
    a, b = side_a.captures[-1], side_b.captures[-1]
    where, diff, key = _common(a, b, name, key)
    inputs = {value.name: _state(i, a, b, key) for i, value in enumerate(b.operands) if value.name not in ADDRESSING}
    culprits = []
    for side in (side_a, side_b):
        run = f"in: {side.setting.axis}, {side.setting.name}"
        for capture in side.captures:
            if (inside := fault(capture, key)) is not None:
                where_run = f"on {capture.device}, {run}"
                culprits.append("; ".join([f"{capture.name}, {capture.kernel} {where_run}", *[inside] * bool(inside)]))
            culprits += [f"{stale}, {run}" for stale in capture.stale]
            if side.setting.placement:
                culprits += [f"{part}, {run}" for part in (*_wrong_parts(side.model, side_a.model, capture.node),
                                                           *_wrong_slots(side.model, capture.node))]
    default, other = (f"{side.setting.axis}, {side.setting.name} on {side.setting.device}" for side in (side_a, side_b))
    definition, (x, y) = _definition(b), diff.values
    parts = [part.op for part in definition.primitives()] if definition.parts else []
    return FirstDifference((default, other), name, b.op, parts, b.kernel, b.results[name].shape, where, diff.n_different, diff.n,
                           diff.first, diff.patterns, (float(x), float(y)), diff.max_ulps, inputs, culprits,
                           (side_a.captures, side_b.captures))


def _wrong_parts(model, other, node: Node) -> list[str]:
    """The operands of a node that are parts of weights (`graph.columns`), and not these parts of what the other model has."""
    wrong = []
    for key, whole in other.architecture.w.loaded.items():
        mine, at = model.architecture.w.loaded[key], 0
        for shard in mine.shards.values() if mine.is_cut and not whole.is_cut else ():
            axis = next((axis for axis, (n, m) in enumerate(zip(shard.shape, whole.shape)) if n != m))
            if shard in node.src:
                rows, = arrays_on_host(other.backends[whole.device], whole)
                found, = arrays_on_host(model.backends[shard.root.device], shard)
                # Of a table columns; of tiles whole ones
                units = rows.shape[-1] if whole.dtype == "f32" else whole.shape[axis] // tile.ROWS
                first, n = (count * units // whole.shape[axis] for count in (at, shard.shape[axis]))
                rows = rows if whole.dtype == "f32" else rows.reshape(*whole.shape[:-2], units, -1)
                expected = rows[..., first:first + n] if whole.dtype == "f32" else rows[..., first:first + n, :]
                if expected.tobytes() != found.tobytes():
                    wrong.append(f"{shard.name} is not {'columns' if whole.dtype == 'f32' else 'rows'} {at} to "
                                 f"{at + shard.shape[axis] - 1} of {whole.name}")
            at += shard.shape[axis]
    return wrong


def _wrong_slots(model, node: Node) -> list[str]:
    """The slots of hot experts that a node reads, and that are not what the table of its step says."""
    hot, wrong = model.architecture.hot, []
    for tensor, stack in hot.stacks.items() if hot is not None else ():
        if stack in node.src:
            experts, = arrays_on_host(model.backends[tensor.device], tensor)
            slots, = arrays_on_host(model.backends[stack.device], stack)
            experts, slots = experts.reshape(tensor.shape[0], -1), slots.reshape(stack.shape[0], -1)
            row = hot.slots[next(layer.row for il, layer in hot.layers.items() if tensor in hot.of_layer[il])]
            wrong += [f"slot {slot} of {stack.name} is not expert {expert}" for expert, slot in enumerate(row[:len(experts)])
                      if slot >= 0 and experts[expert].tobytes() != slots[slot].tobytes()]
            wrong += [f"{stack.name} has no zeros behind its slots"] * bool(slots[-1].any())
    return wrong


def _common(a: LiveCapture, b: LiveCapture, name: str, key: bytes) -> tuple[str, Difference, bytes]:
    """The part and the difference of the rows of a result that both captures have, whose places are those in b, and the first
    token whose rows differ: not the one of the key where what the first run gave comes and goes."""
    rows_a, rows_b = a.batch.rows(a.tensor(name)), b.batch.rows(b.tensor(name))
    assert rows_a is not None and rows_b is not None, f"{name}: its rows were compared"
    at, dtype = {token: rows for token, rows in zip(a.batch.keys, rows_a) if rows[0] >= 0}, b.results[name].dtype
    both = [(token, rows) for token, rows in zip(b.batch.keys, rows_b) if token in at and rows[0] >= 0]
    tokens = [token for token, _ in both]
    mine = np.concatenate([at[token] for token in tokens])
    other = np.concatenate([rows for _, rows in both])
    for part, x, y in zip(PARTS, a.results[name].arrays, b.results[name].arrays):
        if diff := difference(one_nan(x[mine], dtype), one_nan(y[other], dtype)):
            i, *place = diff.first
            return part if dtype == "act" else "", replace(diff, first=(int(other[i]), *place)), tokens[i // len(at[key])]
    # not any more
    return "", Difference(0, sum(array.size for array in b.results[name].arrays), (), ("", ""), (0.0, 0.0), None), key


def _state(i: int, a: LiveCapture, b: LiveCapture, key: bytes) -> str:
    """Whether operand i of b's node is what a's node of that operand read, for the token whose rows differ."""
    value = b.operands[i]
    twin = next((j for j, other in enumerate(a.operands) if other.name == value.name), None)
    if twin is None:
        return "only in one"
    places = (a, twin), (b, i)
    name, role = list(OPS[b.op].roles.items())[i]
    rows: list[np.ndarray | slice]
    if role == "slots":
        (token_a, row_a), (token_b, row_b) = (each.batch.run(key) for each in (a, b))
        if token_a != token_b:
            return "behind other tokens"
        if min(row_a, row_b) < 0:
            return "equal" if row_a == row_b else "different"
        rows = [slice(row, row + 1) for row in (row_a, row_b)]
    elif role == "state":
        rows = [each.batch.visible(key, each.operands[place].shape[0]) for each, place in places]
        if name in OPS[b.op].results:  # what cells held that are written now is no input
            now = np.concatenate([each.batch.written(key) for each, _ in places])
            rows = [each[~np.isin(np.arange(len(each)), now)] if isinstance(each, np.ndarray) else each for each in rows]
    elif a.passing[twin]:
        rows = [each.batch.rows_of(each.node.src[place], key) for each, place in places]
    else:
        # a weight; rope tables may be longer for one
        rows = [slice(min(len(each.operands[place].arrays[0]) for each, place in places))] * 2
    same = bits_of(value.dtype, a.operands[twin].arrays, rows[0]) == bits_of(value.dtype, value.arrays, rows[1])
    return "equal" if same else "different"


def fault(capture: LiveCapture, key: bytes) -> str | None:
    """None where a captured node gave, for a token, what its definition gives from what it read. Else "", or of a fused node
    which parts it stands for, and which of them gave something else, as far as its results tell."""
    one = capture.only(key)
    expected, wrong = recompute(one, CPUBackend("reference")), []
    for i, (name, value) in enumerate(capture.results.items()):
        rows = capture.batch.rows_of(capture.tensor(name), key)
        expected_rows = rows if one is capture else slice(None)
        if bits_of(value.dtype, value.arrays, rows) != bits_of(value.dtype, expected[name], expected_rows):
            wrong.append(i)
    return _parts_at_fault(capture, wrong) if wrong else None


def _definition(capture: LiveCapture) -> Node:
    """A node of the captured op, in a graph of its own."""
    return make_node(CPUBackend("reference"), capture.op, capture.operands, capture.params, capture.name)[0]


def _parts_at_fault(capture: LiveCapture, wrong: list[int]) -> str:
    """wrong: which results, by their place in the op table, are not as defined. To blame for the first of them is the part that
    gives it, or one of those before it whose results the node does not give."""
    node = _definition(capture)
    if not node.parts:
        return ""
    parts, names = node.primitives(), list(capture.results)
    given = {part: [i for i, result in enumerate(node.results) if result in part.results] for part in parts}
    right = [part for part in parts if given[part] and not set(given[part]) & set(wrong)]
    suspects = [next(part for part in parts if set(given[part]) & set(wrong))]
    for part in reversed(parts[:parts.index(suspects[0])]):
        if not given[part] and any(result in suspect.src for suspect in suspects for result in part.results):
            suspects.insert(0, part)

    def listed(chosen: list[Node]) -> str:
        return ", ".join(part.op + (f" ({', '.join(names[i] for i in given[part])})" if given[part] else "") for part in chosen)
    told = [f"as defined: {listed(right)}"] * bool(right) + [f"not as defined: {listed(suspects)}"] * (len(suspects) < len(parts))
    return "; ".join([_stands_for([part.op for part in parts]), *told])


SCRIPT = '''"""{title}

Runs the op by its definition, or on the device that is named: python {file} [cpu|cuda:0]
"""
import sys
from pathlib import Path

from ggml_py.backends import open_backend
from ggml_py.backends.cpu import CPUBackend
from ggml_py.check.recording import Capture, recompute
from ggml_py.testing import difference

backend = open_backend(sys.argv[1]) if sys.argv[1:] else CPUBackend("reference")
for path in sorted(Path(__file__).parent.glob("*.npz")):
    capture = Capture.read(path)
    for name, arrays in recompute(capture, backend).items():
        for found, recorded in zip(arrays, capture.results[name].arrays):
            print(f"{{path.name}}: {{capture.kernel}}, {{name}}: {{difference(found, recorded) or 'the same bits'}}")
'''

