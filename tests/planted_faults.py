"""Faults as they happen, each in a backend of the CPU: what `ggml-py verify` must catch, and bisection must name.

Twins take the operands that the binders of `ggml_py/backends/cpu.py` give. Their arithmetic is numpy's in float32, which is the definition's but where
they say so.
"""
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Callable

import numpy as np

from ggml_py.axes import settings_of
from ggml_py.backends.cpu import CPUBackend
from ggml_py.backends.transfers import Pending
from ggml_py.gguf_file import GGUFFile
from ggml_py.kernels.cpu.mul_mat import mul_mat
from ggml_py.kernels.reference.experts import weighted_sum
from ggml_py.kernels.reference.rope_set_rows import rope_set_rows
from ggml_py.kernels.reference.topk_moe import topk_moe
from ggml_py.model import Model
from ggml_py.quant.activation import quantize_activations
from ggml_py.verify import Verification
from tiny_models import write_model
from tiny_moe_models import ARCHITECTURES, DEFAULTS, write_moe_model

F32 = np.float32


def write(path, kind: str):
    """A model of a kind: an architecture, or "tied"."""
    if kind == "tied":
        return write_tied_model(path)
    return write_moe_model(path, kind, ("Q8_0",)) if kind in ARCHITECTURES else write_model(path, kind, ("Q8_0",), n_embd=288, n_ff=160)


class FaultyBackend(CPUBackend):
    """twins: op -> twin of what the room has for it, a kernel or what makes one of types."""

    def __init__(self, twins: dict, device: str = "cpu"):
        super().__init__(device=device)
        self.twins = twins

    def kernel(self, op: str):
        kernel = super().kernel(op)
        return self.twins[op](kernel) if op in self.twins else kernel


def after(change):
    """A twin of a kernel that is called with its operands: change(*operands) behind it."""
    def twin(kernel):
        def faulty(*operands):
            kernel(*operands)
            change(*operands)
        return faulty
    return twin


def made(twin):
    """The same for kernels that are made of types."""
    return lambda make: lambda *types: twin(make(*types))


def instead(kernel):
    """A twin that has nothing of the kernel."""
    return lambda _: kernel


def verify(path, windows, axes, backends: dict, **settings) -> Verification:
    """A verification that has run, on models of backends by device, in their order."""
    models = {device: Model(GGUFFile.open(path), backend) for device, backend in backends.items()}
    verification = Verification(lambda device: nullcontext(models[device]), windows, settings_of(axes, list(backends), windows.shape, **settings))
    verification.run()
    return verification


def caught_by(verification: Verification) -> set[str]:
    """The axes of the settings that differ."""
    return {result.setting.axis for result in verification.results if result.status == "different"}


# Norms: every op that has one gets the twin, so that the graph passes do not show it

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
    """Twins of every op that norms, which take norm(x, w, eps) -> y."""
    def act(h, q, d, sums):
        for out, value in zip((q, d, sums), quantize_activations(h)):
            out[...] = value

    def rms_norm(x, w, eps, out):
        out[...] = norm(x, w, eps)

    def rms_norm_act(x, w, eps, *blocks):
        act(norm(x, w, eps), *blocks)

    def add_rms_norm(x, y, w, eps, out, total):
        total[...] = x + y
        out[...] = norm(total, w, eps)

    def add_rms_norm_act(x, y, w, eps, *others):
        *blocks, total = others
        total[...] = x + y
        act(norm(total, w, eps), *blocks)

    def add_rms_norm_and_act(x, y, w, eps, *others):
        *blocks, out, total = others
        add_rms_norm(x, y, w, eps, out, total)
        act(out, *blocks)
    products = dict.fromkeys(("add_rms_norm_mul_mat_qkv", "add_rms_norm_mul_mat_glu"), lambda make: partial(make, add_rms_norm_act=add_rms_norm_act))
    return {**{kernel.__name__: instead(kernel) for kernel in (rms_norm, rms_norm_act, add_rms_norm, add_rms_norm_act, add_rms_norm_and_act)}, **products}


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

def contracted_rope(x, pos, table, neox, out):
    """a c - b s with one rounding less: products of float32 are exact in float64."""
    n_rot = 2 * table.shape[1]
    half = n_rot // 2
    first, second = (slice(0, half), slice(half, n_rot)) if neox else (slice(0, n_rot, 2), slice(1, n_rot, 2))
    c, s = (table[pos, :, i][:, None, :] for i in (0, 1))
    a, b = x[..., first], x[..., second]
    y = x.copy()
    y[..., first] = (a.astype(np.float64) * c - (b * s)).astype(F32)
    y[..., second] = (a.astype(np.float64) * s + (b * c)).astype(F32)
    out[...] = y


def contracted_rope_set_rows(type_k, type_v, indirect):
    return rope_set_rows(type_k, type_v, indirect, rope=contracted_rope)


# Gated units

def rough_swiglu(gate, up):
    """exp by 2^x, whose argument is rounded once more than it should be, as fast ones do."""
    return gate / (F32(1) + np.exp2((-gate * F32(1.442695)).astype(F32))) * up


def rough_glu(gate, up, out):
    out[...] = rough_swiglu(gate, up)


def rough_glu_act(gate, up, q, d, sums):
    for out, value in zip((q, d, sums), quantize_activations(rough_swiglu(gate, up))):
        out[...] = value


def rough_mul_mat_glu(act, gate_type, up_type):
    assert act == "silu"

    def kernel(gate_words, up_words, x, biases, out, scratch):
        mul_mat(gate_type)(gate_words, *x, out)
        mul_mat(up_type)(up_words, *x, scratch)
        out[...] = rough_swiglu(out, scratch)
    return kernel


# Experts

def write_tied_model(path):
    """A model whose experts are equals in pairs to the router, and to nobody else; of three that a token uses, one is without the other of its pair."""
    n_expert, n_embd, rng = DEFAULTS["n_expert"], DEFAULTS["n_embd"], np.random.default_rng(0)
    routers = {f"blk.{i}.ffn_gate_inp.weight": (0.3 * rng.standard_normal((n_expert // 2, n_embd))).astype(F32).repeat(2, axis=0)
               for i in range(DEFAULTS["n_layer"])}
    return write_moe_model(path, "qwen3moe", ("Q8_0", "F16"), tensors=routers, n_used=3)


def unstable_top_k():
    """Of equal values the one that comes first, each time in another order."""
    rng = np.random.default_rng(0)

    def top_k(x, ids):
        order = rng.permutation(x.shape[1])
        ids[...] = order[np.argsort(-x[:, order], axis=1, kind="stable")[:, :ids.shape[1]]]
    return {"top_k": instead(top_k), "topk_moe": instead(lambda gating: topk_moe(gating, top_k=top_k))}


def experts_as_they_come():
    """The outputs of a token's experts are added in another order each time."""
    rng = np.random.default_rng(0)

    def shuffled_sum(x, w, out):
        order = rng.permutation(w.shape[1])
        weighted_sum(np.ascontiguousarray(x[:, order]), np.ascontiguousarray(w[:, order]), out)
    return {"weighted_sum": instead(shuffled_sum)}


def tile_across_experts(kernel):
    """The rows of a batch are sorted by expert, and a tile of 16 has the matrix of its first one."""
    def faulty(*operands):
        *operands, ids, out, name = operands
        order = np.argsort(ids, axis=None, kind="stable")
        of_tiles = ids.ravel()[order[np.arange(len(order)) // 16 * 16]]
        kernel(*operands, of_tiles[np.argsort(order)].reshape(ids.shape), out, name)
    return faulty


def in_order_of_dispatch(kernel):
    """Rows are left as they were sorted by expert."""
    def faulty(*operands):
        kernel(*operands)
        ids, out = operands[3], operands[7]
        out[...] = out[np.argsort(ids.reshape(-1), kind="stable")]
    return faulty


def of_other_heads(kernel):
    """Each head is multiplied by the matrix of the one before it."""
    return lambda words, *operands: kernel(np.roll(words, 1, axis=0), *operands)


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
    """backend: makes one with the fault, of a device's name. axes: those of one device that must catch it, none if only other devices, or goldens, see it.
    ops: of the node that bisection must name. model: the kind of one that has it."""
    name: str
    backend: Callable
    axes: frozenset[str]
    ops: frozenset[str]
    model: str = "llama"


def in_kernels(name: str, axes: str, twins, model: str = "llama") -> Fault:
    """twins: those of FaultyBackend, or what makes them anew."""
    make = twins if callable(twins) else lambda: twins
    return Fault(name, lambda device: FaultyBackend(make(), device), frozenset(axes.split()), frozenset(make()), model)


FAULTS = [
    in_kernels("a sum in another order for some batch sizes", "ubatch", norms(other_order)),
    in_kernels("a tree whose shape follows the number of rows", "ubatch pieces", norms(tree_of_rows)),
    in_kernels("a scatter by atomics", "rerun", lambda: norms(arrival_order())),
    in_kernels("a contraction of multiply and add", "", {"rope": instead(contracted_rope), "rope_set_rows": instead(contracted_rope_set_rows)}),
    in_kernels("an approximate exponential", "",
               {"swiglu": instead(rough_glu), "swiglu_act": instead(rough_glu_act), "mul_mat_glu": instead(rough_mul_mat_glu),
                "add_rms_norm_mul_mat_glu": lambda make: partial(make, mul_mat_glu=rough_mul_mat_glu)}),
    in_kernels("a stale compiled kernel", "", norms(stale)),
    in_kernels("a top-k with unstable ties", "rerun", unstable_top_k, "tied"),
    in_kernels("an expert sum in arrival order", "rerun", experts_as_they_come, "tied"),
    in_kernels("a tile of rows across two experts", "ubatch pieces", {"mul_mat_id": made(tile_across_experts)}, "qwen3moe"),
    in_kernels("rows of experts in the order of their dispatch", "ubatch pieces", {"mul_mat_id_glu": made(in_order_of_dispatch)}, "qwen3moe"),
    in_kernels("heads with each other's matrices", "", {"mul_mat_heads": made(of_other_heads)}, "deepseek2-mla"),
]
