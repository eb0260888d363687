"""Products with the matrices of experts and heads, of a machine (simulator or GPU), against kernels/reference, bit for bit."""
import numpy as np

from ggml_py.kernels.cuda import mmq_few_id
from ggml_py.kernels.reference import mul_mat_id as reference
from ggml_py.kernels.reference.mul_mat_id_glu import mul_mat_id_glu
from ggml_py.quant import tile
from ggml_py.quant.formats import format_of
from ggml_py.testing import assert_bitwise_equal
from matmul_comparisons import GUARD, activation_buffer, activations, reference_activations, run, seeded
from random_weights import random_weight

ALPHA, LIMIT = np.float32(1.702), np.float32(7)


def expert_words(type_, n_expert, n_rows, n_cols, rng) -> np.ndarray:
    """uint32 [n_expert, words of a matrix]."""
    tiles = [tile.pack(random_weight(format_of(type_), n_rows, n_cols, rng), type_, n_rows, n_cols) for _ in range(n_expert)]
    return np.stack([t.reshape(-1).view(np.uint32) for t in tiles])


def drawn_ids(n: int, u: int, n_expert: int, rng) -> np.ndarray:
    """int32 [n, u], no expert twice in a row where there are enough."""
    return np.stack([rng.permutation(max(n_expert, u))[:u] % n_expert for _ in range(n)]).astype(np.int32)


def run_with_ids(machine, launch, operands, ids, shape, n_expert, name) -> np.ndarray:
    """The result [n u, m] of launch(operands' addresses, ids, fault, node, out), whose fault names the first pair without an expert."""
    fault = machine.upload(np.zeros(4, np.int32))
    found = run(machine, lambda target, *args: launch(target, *args[:-2], args[-2], fault, args[-1]), (*map(machine.upload, operands), machine.upload(ids)),
                shape[0] * shape[1])
    bad = np.flatnonzero((ids < 0) | (ids >= n_expert))
    expected = [5, bad[0], ids.ravel()[bad[0]], 0] if len(bad) else [0, 0, 0, 0]
    assert list(machine.download(fault, np.int32, 4)) == expected, name
    return found.reshape(shape)


def check_mmq_few_id(machine, type_, n_expert, n_rows, n_cols, ids, b=1, shape=None) -> None:
    """ids: int32 [n, u], some of them no experts; b: rows of x for each token."""
    name = f"mmq_few_id[{type_}, X={n_expert}, n_rows={n_rows}, n_cols={n_cols}, ids={ids.shape}, b={b}]"
    rng = seeded(name)
    words, x = expert_words(type_, n_expert, n_rows, n_cols, rng), reference_activations(activations(len(ids) * b, n_cols, rng))
    valid, expected = (ids >= 0) & (ids < n_expert), np.empty((ids.size, n_rows), np.float32)
    reference.mul_mat_id(type_)(words, *x, np.where(valid, ids, 0).astype(np.int32), expected, name)
    expected[~valid.ravel()] = np.nan

    def launch(target, words, act, ids_, fault, out):
        return mmq_few_id.mmq_few_id(target, type_, words, act, ids_, out, n_expert, n_rows, n_cols, *ids.shape, b, fault, 5, shape)
    found = run_with_ids(machine, launch, (words, activation_buffer(*x, len(ids) * b, n_cols)), ids, expected.shape, n_expert, name)
    assert_bitwise_equal(found, expected, name)
    machine.free()


def check_mmq_few_id_glu(machine, act, types, n_expert, n_rows, n_cols, ids, b=1, biased=False, shape=None) -> None:
    """types: of gate and up."""
    name = f"mmq_few_id_glu[{act}, {types}, X={n_expert}, n_rows={n_rows}, n_cols={n_cols}, ids={ids.shape}, b={b}{', biased' * biased}]"
    rng = seeded(name)
    words, x = [expert_words(t, n_expert, n_rows, n_cols, rng) for t in types], reference_activations(activations(len(ids) * b, n_cols, rng))
    biases = tuple(activations(2 * n_expert, n_rows, rng).reshape(2, n_expert, n_rows)) if biased else ()
    valid, expected = (ids >= 0) & (ids < n_expert), np.empty((ids.size, n_rows), np.float32)
    mul_mat_id_glu(act, *types)(*words, x, np.where(valid, ids, 0).astype(np.int32), biases, ALPHA, LIMIT, expected, np.empty_like(expected), name)
    expected[~valid.ravel()] = np.nan

    def launch(target, *addresses):
        gate, up, act_, *others, ids_, fault, out = addresses
        return mmq_few_id.mmq_few_id_glu(target, act, types, gate, up, act_, ids_, *(others or (None, None)), ALPHA, LIMIT, out, n_expert, n_rows, n_cols,
                                         *ids.shape, b, fault, 5, shape)
    operands = *words, activation_buffer(*x, len(ids) * b, n_cols), *biases
    assert_bitwise_equal(run_with_ids(machine, launch, operands, ids, expected.shape, n_expert, name), expected, name)
    machine.free()


def check_mmq_few_heads(machine, type_, n_head, n_rows, n_cols, n, shape=None) -> None:
    """n: tokens."""
    name = f"mmq_few_heads[{type_}, H={n_head}, n_rows={n_rows}, n_cols={n_cols}, n={n}]"
    rng = seeded(name)
    words, x = expert_words(type_, n_head, n_rows, n_cols, rng), reference_activations(activations(n * n_head, n_cols, rng))
    expected = np.empty((n * n_head, n_rows), np.float32)
    reference.mul_mat_heads(type_)(words, *x, expected)
    found = run(machine, lambda target, *args: mmq_few_id.mmq_few_heads(target, type_, *args, shape=shape),
                (machine.upload(words), machine.upload(activation_buffer(*x, n * n_head, n_cols))), expected.size, n_head, n_rows, n_cols, n * n_head)
    assert_bitwise_equal(found.reshape(expected.shape), expected, name)
    machine.free()
