"""Sorted dispatch and the products with experts of a machine (simulator or GPU) against kernels/reference, bit for bit."""
import numpy as np

from ggml_py.kernels.cuda import dispatch as cuda_dispatch
from ggml_py.kernels.cuda import mul_mat_id as cuda_mul_mat_id
from ggml_py.kernels.cuda import mul_mat_id_glu as cuda_mul_mat_id_glu
from ggml_py.kernels.cuda.launch import Launches
from ggml_py.kernels.cuda.mmq import GroupedShape, mmq_id
from ggml_py.kernels.reference import dispatch, mul_mat_id, mul_mat_id_glu
from ggml_py.quant import tile
from ggml_py.quant.formats import format_of
from ggml_py.testing import assert_bitwise_equal
from matmul_comparisons import GUARD, activation_buffer, activations, reference_activations, run, seeded
from random_weights import random_weight

ALPHA, LIMIT = np.float32(1.702), np.float32(7)
NODE = 3


def check_dispatch(machine, ids, n_expert: int, tokens: int, fault=(0, 0, 0, 0)) -> None:
    """ids: int32 [n_pairs], of any value. fault: what is left in it before."""
    ids = np.asarray(ids, np.int32)
    n_pairs, known = len(ids), (ids >= 0) & (ids < n_expert)
    at = cuda_dispatch.dispatch_table(n_expert, n_pairs, tokens)
    table, left = machine.upload(np.full(at.n_words + GUARD, -7, np.int32)), machine.upload(np.int32(fault))
    machine.run(cuda_dispatch.dispatch(machine.target, machine.upload(ids), table, n_expert, n_pairs, tokens, left, NODE))
    found, left = machine.download(table, np.int32, at.n_words + GUARD), machine.download(left, np.int32, 4)
    machine.free()
    bounds, order = found[at.bounds:at.bounds + n_expert + 1], found[at.order:at.order + n_pairs]
    expected, sorted_ = np.empty(n_expert + 1, np.int64), np.empty(known.sum(), np.int64)
    dispatch.sort_by_expert(ids[known], expected, sorted_)
    assert (bounds == expected).all(), (bounds, expected)
    assert (order[:len(sorted_)] == np.flatnonzero(known)[sorted_]).all(), order
    assert (order[len(sorted_):] == np.flatnonzero(~known)).all(), order  # so `order` is a permutation
    items = [(e, row, min(tokens, expected[e + 1] - row)) for e in range(n_expert) for row in range(expected[e], expected[e + 1], tokens)]
    assert found[0] == len(items) <= at.n_items, (found[0], at.n_items)
    assert (found[at.items:at.items + 4 * len(items)].reshape(-1, 4)[:, :3] == np.int32(items).reshape(-1, 3)).all()
    assert (found[at.n_words:] == -7).all(), "written behind the end of the table"
    first = np.flatnonzero(~known)[:1]
    assert list(left[:3]) == ([NODE, *first, *ids[first]] if len(first) and not fault[0] else list(fault[:3])), left


def stack(type_, n_matrices, n_rows, n_cols, rng) -> np.ndarray:
    fmt = format_of(type_)
    return np.stack([tile.pack(random_weight(fmt, n_rows, n_cols, rng), fmt, n_rows, n_cols).reshape(-1).view(np.uint32) for _ in range(n_matrices)])


def factors(type_, n, n_cols, rng):
    """(operands of the reference, what the kernels take)."""
    x = activations(n, n_cols, rng)
    operands = reference_activations(x) if format_of(type_).is_quantized else (x,)
    return operands, activation_buffer(*operands, n, n_cols) if len(operands) > 1 else x


def scratch(machine, n_words):
    """(address, check that nothing is written behind it)."""
    at = machine.upload(np.full(n_words + GUARD, -7, np.int32))

    def check(name):
        assert (machine.download(at, np.int32, n_words + GUARD)[n_words:] == -7).all(), f"{name}: written behind the end of scratch"
    return at, check


def in_blocks(block, n_resident=1):
    """mul_mat_id in blocks of one kind."""
    def launch(target, type_, words, x, ids, out, n_expert, n_rows, n_cols, n_tokens, n_used, b, at):
        table = cuda_dispatch.dispatch(target, ids, at, n_expert, n_tokens * n_used, block.tokens, cuda_mul_mat_id.own_fault(at), 1)
        sizes = n_expert, n_rows, n_cols, n_tokens, n_used, b
        return Launches((table, mmq_id(target, type_, words, x, at, out, *sizes, GroupedShape(block, n_resident))))
    return launch


def check_mul_mat_id(machine, type_, n_expert, n_rows, n_cols, ids, b=1, launch_function=cuda_mul_mat_id.mul_mat_id) -> None:
    """ids: [n, u]. Where one is no expert, its row of the result must stay as it is."""
    ids = np.asarray(ids, np.int32)
    name = f"mul_mat_id[{type_}, X={n_expert}, n_rows={n_rows}, n_cols={n_cols}, ids={ids.shape}, b={b}]"
    rng, (n, u) = seeded(name), ids.shape
    words, (operands, x) = stack(type_, n_expert, n_rows, n_cols, rng), factors(type_, n * b, n_cols, rng)
    expected, known = np.empty((n * u, n_rows), np.float32), ((ids >= 0) & (ids < n_expert)).reshape(-1)
    mul_mat_id.mul_mat_id(type_)(words, *operands, np.clip(ids, 0, n_expert - 1), expected, "node")
    expected[~known] = np.nan
    at, check = scratch(machine, cuda_mul_mat_id.scratch_words("mul_mat_id", type_, n_expert, n_rows, n, u))
    found = run(machine, lambda target, *args: launch_function(target, type_, *args, n_expert, n_rows, n_cols, n, u, b, at),
                [machine.upload(a) for a in (words, x, ids)], expected.size)
    assert_bitwise_equal(found.reshape(expected.shape), expected, name)
    check(name)
    machine.free()


def check_mul_mat_heads(machine, type_, n_head, n_rows, n_cols, n, launch_function=cuda_mul_mat_id.mul_mat_heads) -> None:
    """n: tokens."""
    name = f"mul_mat_heads[{type_}, H={n_head}, n_rows={n_rows}, n_cols={n_cols}, n={n}]"
    rng = seeded(name)
    words, (operands, x) = stack(type_, n_head, n_rows, n_cols, rng), factors(type_, n * n_head, n_cols, rng)
    expected = np.empty((n * n_head, n_rows), np.float32)
    mul_mat_id.mul_mat_heads(type_)(words, *operands, expected)
    found = run(machine, lambda target, *args: launch_function(target, type_, *args), [machine.upload(a) for a in (words, x)], expected.size,
                n_head, n_rows, n_cols, n * n_head)
    assert_bitwise_equal(found.reshape(expected.shape), expected, name)
    machine.free()


def check_mul_mat_id_glu(machine, act, types, n_expert, n_rows, n_cols, ids, b=1, biased=False) -> None:
    """types: of gate and up."""
    ids = np.asarray(ids, np.int32)
    name = f"mul_mat_id_glu[{act}, {types}, X={n_expert}, n_rows={n_rows}, n_cols={n_cols}, ids={ids.shape}, b={b}{', biased' * biased}]"
    rng, (n, u) = seeded(name), ids.shape
    words, (operands, x) = [stack(t, n_expert, n_rows, n_cols, rng) for t in types], factors(types[0], n * b, n_cols, rng)
    biases = tuple(activations(2 * n_expert, n_rows, rng).reshape(2, n_expert, n_rows)) if biased else ()
    expected, known = np.empty((n * u, n_rows), np.float32), ((ids >= 0) & (ids < n_expert)).reshape(-1)
    mul_mat_id_glu.mul_mat_id_glu(act, *types)(*words, operands, np.clip(ids, 0, n_expert - 1), biases, ALPHA, LIMIT, expected, np.empty_like(expected), "node")
    expected[~known] = np.nan
    at, check = scratch(machine, cuda_mul_mat_id.scratch_words("mul_mat_id_glu", types[0], n_expert, n_rows, n, u))
    addresses = [machine.upload(a) for a in (*words, x, ids, *biases)] + [None, None] * (not biased)

    def launch(target, *args):
        *operands, out = args
        return cuda_mul_mat_id_glu.mul_mat_id_glu(target, act, *types, *operands, ALPHA, LIMIT, out, n_expert, n_rows, n_cols, n, u, b, at)
    found = run(machine, launch, addresses, expected.size)
    assert_bitwise_equal(found.reshape(expected.shape), expected, name)
    check(name)
    machine.free()
