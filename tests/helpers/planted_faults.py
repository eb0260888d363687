"""Faults as they happen, each in a backend of the CPU: what `ggml-py verify` must catch, and bisection must name.

A twin takes a call of a node and the step that a kernel gave for it, and returns the faulty step: (call, step) -> step. The
arithmetic of twins is numpy's in float32, which is the definition's but where they say so.
"""
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from collections.abc import Callable

import numpy as np

from composing_cpu import ComposingCPU
from ggml_py.check.axes import settings_of
from ggml_py.backends.cpu import CPUBackend
from ggml_py.backends.transfers import Pending
from ggml_py.files.gguf import GGUFFile
from ggml_py.kernels.call import Call
from ggml_py.kernels.cpu.gated_delta_net import gated_delta_net
from ggml_py.kernels.cpu.ssm_conv import ssm_conv
from ggml_py.kernels.cpu.ssm_scan import ssm_scan
from ggml_py.kernels.cpu.mul_mat_id import mul_mat_heads, mul_mat_id
from ggml_py.kernels.together import steps
from ggml_py.kernels.reference.experts import weighted_sum_arrays
from ggml_py.engine.model import Model
from ggml_py.ops.compose import FUSED
from ggml_py.check.verify import Verification
from tiny_delta_net_models import KINDS, write_delta_net_model
from tiny_hybrid_models import KINDS as HYBRID, write_hybrid_model
from tiny_models import write_model
from tiny_moe_models import ARCHITECTURES, DEFAULTS, write_moe_model

F32 = np.float32


def write(path, kind: str):
    """A model of a kind: an architecture, or "tied"."""
    if kind == "tied":
        return write_tied_model(path)
    if kind in KINDS:
        return write_delta_net_model(path, kind, ("Q8_0",))
    if kind in HYBRID:
        return write_hybrid_model(path, kind, ("Q8_0",))
    return (write_moe_model(path, kind, ("Q8_0",)) if kind in ARCHITECTURES
            else write_model(path, kind, ("Q8_0",), n_embd=288, n_ff=160))


class FaultyBackend(ComposingCPU):
    """twins: op -> twin of its steps. in_parts: also where the op is a part of a fused node."""

    def __init__(self, twins: dict[str, Callable], device: str = "cpu", in_parts: bool = True):
        super().__init__(device=device)
        self.twins, self.in_parts = twins, in_parts

    def bind(self, node):
        return self.with_twin(node, super().bind(node))

    def bind_part(self, part):
        step = super().bind_part(part)
        return self.with_twin(part, step) if self.in_parts else step

    def with_twin(self, node, step):
        return self.twins[node.op](self.call(node, bound=True), step) if node.op in self.twins else step


def after(change):
    """A twin that calls change(call) behind the step."""
    return lambda call, step: steps(step, partial(change, call))


def instead(kernel):
    """A twin that has nothing of the step: kernel(call) in its place."""
    return lambda call, step: partial(kernel, call)


def in_nodes(prefix: str, twin):
    """The twin of nodes whose names begin so; others are as they should be."""
    return lambda call, step: twin(call, step) if call.name.startswith(prefix) else step


def with_parts(ops) -> frozenset[str]:
    """Primitive ops, and all fused ones that have one of them as a part: those of nodes in which a twin shows."""
    parts = {name: {part.op for pattern in template.patterns for part in pattern.parts} for name, template in FUSED.items()}
    return frozenset(ops) | {name for name, of_name in parts.items() if of_name & set(ops)}


def verify(path, windows, axes, backends: dict, make: Callable | None = None, **settings) -> Verification:
    """A verification that has run, on models of backends by device, in their order. make: device -> its backend where there are
    several; else those, and what is right."""
    models = {device: Model(GGUFFile.open(path), backend) for device, backend in backends.items()}
    make = make or (lambda device: backends.get(device) or CPUBackend(device=device))

    def load(device, placement=None):
        if placement is None:
            return nullcontext(models[device])
        return Model(GGUFFile.open(path), *map(make, placement.needed), placement=placement)
    verification = Verification(load, windows, settings_of(axes, list(backends), windows.shape, **settings))
    verification.run()
    return verification


def caught_by(verification: Verification) -> set[str]:
    """The axes of the settings that differ."""
    return {result.setting.axis for result in verification.results if result.status == "different"}


# Norms

def sum128(squares: np.ndarray) -> np.ndarray:
    """The sum of docs/numerics.md, over the last axis, of products that were rounded."""
    return tree_sum(squares, 128)


def tree_sum(values: np.ndarray, n_partials: int) -> np.ndarray:
    padded = np.zeros((*values.shape[:-1], -(-values.shape[-1] // n_partials), n_partials), F32)
    padded.reshape(*values.shape[:-1], -1)[..., :values.shape[-1]] = values
    partial = padded[..., 0, :]
    for i in range(1, padded.shape[-2]):
        partial = partial + padded[..., i, :]
    while partial.shape[-1] > 1:
        half = partial.shape[-1] // 2
        partial = partial[..., :half] + partial[..., half:]
    return partial[..., 0]


def norm(x, w, eps, sum_squares=sum128, scaled=lambda x, r, w: x * r * w):
    r = F32(1) / np.sqrt(sum_squares(x * x) / F32(x.shape[-1]) + eps)
    return scaled(x, r[:, None], w)


def norms(norm) -> dict:
    """The twin of norms by norm(x, w, eps) -> y."""
    def rms_norm(call):
        k = call.w.shape[0]
        call.out.data.reshape(-1, k)[...] = norm(call.x.data.reshape(-1, k), call.w.data, F32(call.eps))
    return {"rms_norm": instead(rms_norm)}


def other_order(x, w, eps):
    """Small batches are summed from the other end."""
    return norm(x, w, eps, sum_squares=lambda s: tree_sum(s[:, ::-1] if len(s) < 16 else s, 128))


def tree_of_rows(x, w, eps):
    """As many partial sums as leave a machine of 2048 threads busy."""
    return norm(x, w, eps, sum_squares=lambda s: tree_sum(s, max(2, 1 << (2048 // len(s)).bit_length() - 1)))


def arrival_order():
    """Partial sums are added as they arrive, each time in another order: a scatter by atomics."""
    rng = np.random.default_rng(0)
    return lambda x, w, eps: norm(x, w, eps, sum_squares=lambda s: tree_sum(s[:, rng.permutation(s.shape[1])], 2))


def stale(x, w, eps):
    """Compiled of the source as it was: the weight was multiplied by the reciprocal first."""
    return norm(x, w, eps, scaled=lambda x, r, w: x * (r * w))


# Rotation

def contracted_rope(call):
    """a c - b s with one rounding less: products of float32 are exact in float64."""
    x, out, table = call.x.heads(call.n_head), call.out.heads(call.n_head), call.table.data
    n_rot = 2 * table.shape[1]
    half = n_rot // 2
    first, second = (slice(0, half), slice(half, n_rot)) if call.neox else (slice(0, n_rot, 2), slice(1, n_rot, 2))
    c, s = (table[call.pos.data, :, i][:, None, :] for i in (0, 1))
    a, b = x[..., first], x[..., second]
    y = x.copy()
    y[..., first] = (a.astype(np.float64) * c - (b * s)).astype(F32)
    y[..., second] = (a.astype(np.float64) * s + (b * c)).astype(F32)
    out[...] = y


# Gated units

def rough_swiglu(call):
    """exp by 2^x, whose argument is rounded once more than it should be, as fast ones do."""
    gate = call.gate.data
    call.out.data[...] = gate / (F32(1) + np.exp2((-gate * F32(1.442695)).astype(F32))) * call.up.data


# Experts

def write_tied_model(path):
    """A model whose experts are equals in pairs to the router, and to nobody else; of three that a token uses,
    one is without the other of its pair."""
    n_expert, n_embd, rng = DEFAULTS["n_expert"], DEFAULTS["n_embd"], np.random.default_rng(0)
    routers = {f"blk.{i}.ffn_gate_inp.weight": (0.3 * rng.standard_normal((n_expert // 2, n_embd))).astype(F32).repeat(2, axis=0)
               for i in range(DEFAULTS["n_layer"])}
    return write_moe_model(path, "qwen3moe", ("Q8_0", "F16"), tensors=routers, n_used=3)


def unstable_top_k():
    """Of equal values the one that comes first, each time in another order, of each token in its own."""
    rng = np.random.default_rng(0)

    def top_k(call):
        x = call.x.data
        order = rng.permuted(np.tile(np.arange(x.shape[1]), (len(x), 1)), axis=1)
        places = np.argsort(-np.take_along_axis(x, order, axis=1), axis=1, kind="stable")[:, :call.k]
        call.ids.data[...] = np.take_along_axis(order, places, axis=1)
    return {"top_k": instead(top_k)}


def experts_as_they_come():
    """The outputs of a token's experts are added in another order each time, of each token in its own."""
    rng = np.random.default_rng(0)

    def shuffled_sum(call):
        w = call.w.data
        order = rng.permuted(np.tile(np.arange(w.shape[1]), (len(w), 1)), axis=1)
        x = np.take_along_axis(call.x.data.reshape(*w.shape, -1), order[:, :, None], axis=1)
        weighted_sum_arrays(x, np.take_along_axis(w, order, axis=1), call.out.data)
    return {"weighted_sum": instead(shuffled_sum)}


def with_other(call, **operands):
    """The call with other operands."""
    return Call(call.op, call.name, call.device, {**call.values, **operands}, call.scratch)


def tile_across_experts(call, step):
    """The rows of a batch are sorted by expert, and a tile of 16 has the matrix of its first one."""
    of_tiles = np.empty_like(call.ids.data)
    product = mul_mat_id(with_other(call, ids=call.ids._replace(data=of_tiles)))

    def faulty():
        order = np.argsort(call.ids.data, axis=None, kind="stable")
        first_of_tile = call.ids.data.ravel()[order[np.arange(len(order)) // 16 * 16]]
        of_tiles.ravel()[order] = first_of_tile
        product()
    return faulty


def in_order_of_dispatch(call):
    """Rows are left as they were sorted by expert."""
    call.out.data[...] = call.out.data[np.argsort(call.ids.data.reshape(-1), kind="stable")]


def of_other_heads(call, step):
    """Each head is multiplied by the matrix of the one before it."""
    words = np.roll(call.w.data.reshape(call.w.shape[0], -1), 1, axis=0)
    return mul_mat_heads(with_other(call, w=call.w._replace(data=words)))


# Recurrent layers

def with_runs(change):
    """A twin whose kernel has another table of runs: change(runs, call), in place."""
    def twin(call, step):
        module = {"ssm_conv": ssm_conv, "ssm_scan": ssm_scan, "gated_delta_net": gated_delta_net}[call.op]
        changed = np.empty_like(call.runs.data)
        faulty = module(Call(call.op, call.name, call.device, {**call.values, "runs": call.runs._replace(data=changed)}))

        def run():
            changed[...] = call.runs.data
            change(changed, call)
            faulty()
        return run
    return twin


def restarted(runs, call):
    """Each micro-batch begins with an empty state."""
    runs[:, 2] = -1


def neighbours(runs, call):
    """The slot behind the right one."""
    runs[:, 2] = np.where(runs[:, 2] < 0, -1, (runs[:, 2] + 1) % len(call.state.data))


def late_snapshots(call):
    """The states before the last token are those of the token behind."""
    for run in call.runs.data:
        for i in range(min(run[1], len(run) - 3) - 1, 0, -1):
            call.state.data[run[3 + i]] = call.state.data[run[2 + i]]


def decayed_twice(call, step):
    """The state that a run begins with."""
    g = np.empty_like(call.g.data)
    faulty = gated_delta_net(Call(call.op, call.name, call.device, {**call.values, "g": call.g._replace(data=g)}))

    def run():
        g[...] = call.g.data
        g[call.runs.data[call.runs.data[:, 1] > 0, 0]] *= 2
        faulty()
    return run


def never_taken_back():
    """The columns that a convolution read last, whatever was taken back since."""
    last = {}

    def latest(runs, call):
        for run in runs:
            if run[1]:
                state = call.state.data.ctypes.data
                run[2] = last.get(state, run[2]) if run[2] >= 0 else -1
                last[state] = run[3]
    return {"ssm_conv": with_runs(latest)}


# Caches

def first_come():
    """A cell is not written again while a text goes on: that of a guess that was taken back stays."""
    written = defaultdict(set)  # of each cache

    def set_rows(call, step):
        def faulty():
            cache, rows = call.cache.data, call.rows.data
            held = written[cache.ctypes.data]
            if 0 in rows:
                held.clear()
            kept = np.array([row for row in rows if row in held], np.int64)
            before = cache[kept]
            step()
            cache[kept] = before
            held.update(rows.tolist())
        return faulty
    return {"set_rows": set_rows}


def without_the_last_expert(call):
    """The matrices of the last of the experts in use have not come; what was there is taken for their products."""
    call.out.data[...] = np.where((call.ids.data == call.ids.data.max()).reshape(-1, 1), F32(0), call.out.data)


# What is not in kernels

class StaleGraphs:
    """Replays what it has seen under a key, also where the memory that it was captured with has been given back."""

    def __init__(self, backend):
        self.backend, self.steps, self.most, self.counters = backend, {}, 0, "stale"

    def run(self, key, steps):
        self.backend.run(self.steps.setdefault(key, steps))

    def close(self):
        self.steps.clear()


class StaleGraphsBackend(CPUBackend):
    """Buffers that are given back are written over by others."""

    def new_graphs(self):
        return StaleGraphs(self)

    def free(self, buffer):
        buffer[:] = 0


class HastyBackend(CPUBackend):
    """A read that does not wait for the kernels before it, which take their time where there are more than so many."""
    busy = False

    def __init__(self, in_time: int = 1, device: str = "cpu"):
        super().__init__(device=device)
        self.in_time = in_time

    def run(self, steps):
        super().run(steps)
        self.busy = len(steps) > self.in_time

    def read(self, buffer, offset, n_bytes):
        data, self.busy, busy = super().read(buffer, offset, n_bytes).result(), False, self.busy
        if busy:
            data[-64:] = self.late.integers(0, 255, min(64, data.size), np.uint8)
        return Pending(data)

    late = np.random.default_rng(0)


@dataclass(frozen=True)
class Fault:
    """backend: makes one with the fault, of a device's name. axes: those of one device that must catch it, none if only other
    devices, or goldens, see it.
    ops: of the node that bisection must name. model: the kind of one that has it."""
    name: str
    backend: Callable
    axes: frozenset[str]
    ops: frozenset[str]
    model: str = "llama"


def in_kernels(name: str, axes: str, twins, model: str = "llama") -> Fault:
    """twins: those of FaultyBackend, or what makes them anew."""
    make = twins if callable(twins) else lambda: twins
    return Fault(name, lambda device: FaultyBackend(make(), device), frozenset(axes.split()), with_parts(make()), model)


# Of what sequences keep from call to call: where a window is one call, nothing is wrong
KEPT_FAULTS = [
    in_kernels("a rejected draft that stays in its cell", "speculation", first_come),  # no other axis writes a cell twice
    in_kernels("a state that restarts", "ubatch pieces", {"gated_delta_net": with_runs(restarted)}, "qwen35"),
    in_kernels("a neighbour's slot", "ubatch pieces", {"gated_delta_net": with_runs(neighbours)}, "qwen35moe"),
    in_kernels("a snapshot one token late", "speculation", {"gated_delta_net": after(late_snapshots)}, "qwen35"),
    in_kernels("decay applied twice", "ubatch pieces", {"gated_delta_net": decayed_twice}, "qwen3next"),
    in_kernels("a convolution that is not taken back", "speculation", never_taken_back, "qwen35"),
    in_kernels("a scan that restarts", "ubatch pieces", {"ssm_scan": with_runs(restarted)}, "nemotron_h"),
    in_kernels("a scan's snapshot one token late", "speculation", {"ssm_scan": after(late_snapshots)}, "nemotron_h"),
    in_kernels("a short convolution that is not taken back", "speculation", never_taken_back, "lfm2"),
]

FAULTS = [
    in_kernels("a sum in another order for some batch sizes", "ubatch", norms(other_order)),
    in_kernels("a tree whose shape follows the number of rows", "ubatch pieces", norms(tree_of_rows)),
    in_kernels("a scatter by atomics", "rerun", lambda: norms(arrival_order())),
    in_kernels("a contraction of multiply and add", "", {"rope": instead(contracted_rope)}),
    in_kernels("an approximate exponential", "", {"swiglu": instead(rough_swiglu)}),
    in_kernels("a stale compiled kernel", "", norms(stale)),
    in_kernels("a top-k with unstable ties", "rerun", unstable_top_k, "tied"),
    in_kernels("an expert sum in arrival order", "rerun", experts_as_they_come, "tied"),
    in_kernels("a tile of rows across two experts", "ubatch pieces", {"mul_mat_id": tile_across_experts}, "qwen3moe"),
    in_kernels("rows of experts in the order of their dispatch", "ubatch pieces", {"mul_mat_id_glu": after(in_order_of_dispatch)},
               "qwen3moe"),
    in_kernels("heads with each other's matrices", "", {"mul_mat_heads": of_other_heads}, "deepseek2-mla"),
]
