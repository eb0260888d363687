"""kernels/cpu against kernels/reference, bit for bit: the comparison, and what it is made with."""
from dataclasses import replace
from zlib import crc32

import numpy as np
from op_runs import cache, values, weight
from random_weights import random_weight

from ggml_py.backends.cpu import CPUBackend
from ggml_py.base.storage import Arrays
from ggml_py.check.evaluate import Value, evaluate
from ggml_py.ops.table import OPS
from ggml_py.quant.formats import FORMATS
from ggml_py.testing import assert_bitwise_equal

f32 = np.float32
SPECIAL = f32([0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-38, 2.0**-101, 2.0**-100, 3e38, -3e38, 1])
# One type of each form.
FORMS = {(fmt.is_quantized or fmt.name, fmt.sub, fmt.group, fmt.has_min): fmt.name for fmt in FORMATS.values() if fmt.planes}


def seeded(name: str) -> np.random.Generator:
    return np.random.default_rng(crc32(name.encode()))


def numbers(shape, rng) -> np.ndarray:
    """float32 of many magnitudes; in every third row one in a hundred is a value of SPECIAL."""
    x = (rng.standard_normal(shape) * np.exp2(rng.integers(-12, 12, shape))).astype(f32)
    chosen = rng.random(shape) < 0.01
    chosen[1::3] = chosen[2::3] = False
    x[chosen] = rng.choice(SPECIAL, np.count_nonzero(chosen))
    return x


class FilledBackend(CPUBackend):
    """Memory that no kernel has written holds one byte everywhere.
    kernel: on arrays, in the place of the one that the room has for the op."""

    def __init__(self, room: str, byte: int, kernel=None):
        super().__init__(room)
        self.byte, self.kernel = byte, kernel

    def empty(self, n_bytes):
        buffer = super().empty(n_bytes)
        buffer[:] = self.byte
        return buffer

    def step(self, call):
        return self.module(call.op).op(call, kernel=self.kernel) if self.kernel else super().step(call)


def compute(op: str, *operands: Value | np.ndarray, room: str = "cpu", name: str = "", **params) -> tuple[Arrays, ...]:
    """The results, in the op table's order, by the kernels of a folder of kernels/. name: the node's."""
    return evaluate(CPUBackend(room), op, values(op, operands), params, name)


def compare(name: str, op: str, *operands: Value | np.ndarray, kernel=None, **params) -> tuple[Arrays, ...]:
    """kernels/cpu, or a kernel of it, must give the definition's bits, which are returned. It must write all of a result: memory
    holds different bytes for the two before."""
    operands, backends = values(op, operands), (FilledBackend("reference", 1), FilledBackend("cpu", 2, kernel))
    expected, found = (evaluate(backend, op, operands, params) for backend in backends)
    for what, a, b in zip(OPS[op].results, found, expected, strict=True):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_bitwise_equal(x, y, f"{op}[{name}] {what} {i}")
    return expected


def only_array(results: tuple[Arrays, ...]) -> np.ndarray:
    """Of the only result."""
    (array,), = results
    return array


# Weights

def matrix(type_: str, n_rows: int, n_cols: int, rng) -> Value:
    return weight("w", type_, random_weight(FORMATS[type_], n_rows, n_cols, rng), n_cols)


def stack(type_: str, n_matrices: int, n_rows: int, n_cols: int, rng) -> Value:
    data = random_weight(FORMATS[type_], n_matrices * n_rows, n_cols, rng)
    return weight("w", type_, data.reshape(n_matrices, n_rows, -1), n_cols)


def matrix_of(stack: Value, i: int) -> Value:
    """One matrix of a stack."""
    return replace(stack, shape=stack.shape[1:], arrays=(stack.arrays[0].reshape(stack.shape[0], -1)[i],))


# Attention

def attention_case(type_k, type_v, n_head, n_head_kv, dim, dv, n_ctx, tokens, rng, present=None, special=False):
    """(operands, parameters). tokens: (sequence, position) of each. Cells that are not present hold NaN, and must not matter."""
    n_seq = 1 + max((s for s, _ in tokens), default=0)
    present = np.ones((n_seq, n_ctx), np.uint8) if present is None else present
    caches = []
    for name, type_, width in (("k", type_k, dim), ("v", type_v, dv)):
        x = rng.standard_normal((n_seq * n_ctx, n_head_kv * width)).astype(f32) * f32(3)
        if special:
            rows = rng.choice(len(x), 40, replace=False)
            x[rows, rng.integers(0, x.shape[1], 40)] = np.resize(SPECIAL, 40)
            x[rows[:3]] = 0
        x[present.ravel() == 0] = np.nan
        caches.append(cache(name, type_, x))
    q = rng.standard_normal((len(tokens), n_head, dim)).astype(f32) * f32(2)
    if special and len(q) > 4:
        q[0], q[1, 0, 0], q[2, 0, 1], q[3] = 0, np.nan, np.inf, 2.0**-120
    seq, pos = np.array([s for s, _ in tokens], np.int32), np.array([p for _, p in tokens], np.int32)
    operands = q.reshape(len(tokens), n_head * dim), *caches, seq, pos, present
    return operands, {"n_head": n_head, "n_head_kv": n_head_kv, "scale": dim**-0.5}


def compare_attention(name, case, *, kernel=None, **params) -> None:
    operands, fixed = case
    types = ", ".join(each.dtype for each in operands[1:3])
    compare(f"{types}, {name}", "flash_attn_ext", *operands, kernel=kernel, **fixed, **params)


def positions(*runs):
    """(sequence, position) tokens of runs (sequence, first position, count)."""
    return [(s, p) for s, first, count in runs for p in range(first, first + count)]


def holes(n_seq, n_ctx):
    """Sequence 0 lost its cells 100..299 (a whole piece and parts of two), the last one every third."""
    present = np.ones((n_seq, n_ctx), np.uint8)
    present[0, 100:300] = 0
    present[-1, 1::3] = 0
    return present


# Routing

N_EXPERT = [8, 60, 128, 160, 257, 512]


def router_rows(n_expert, rng):
    """float32 [n, n_expert]: rows of many values and of few, so that there are ties; of one value; with zeros of both signs,
    infinities and NaN."""
    x = numbers((12, n_expert), rng)
    x[1], x[2], x[3] = rng.choice(f32([0.25, 0.5]), n_expert), 0.125, rng.choice(f32([-0.0, 0]), n_expert)
    x[4], x[5], x[6] = np.nan, -np.inf, np.inf
    x[7, ::3], x[8, :-1], x[9] = np.nan, np.nan, rng.choice(SPECIAL, n_expert)
    return x
