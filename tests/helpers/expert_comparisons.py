"""Sorted dispatch and the products with experts of a machine (`cuda_simulator`) against their definitions, bit for bit
(`op_runs`)."""
import numpy as np

from ggml_py.check.evaluate import Value
from ggml_py.kernels.call import Call, Operand
from ggml_py.kernels.cuda.dispatch import dispatch, dispatch_table
from ggml_py.kernels.reference.dispatch import sort_by_expert
from ggml_py.quant.formats import format_of
from ggml_py.testing import assert_bitwise_equal
from matmul_comparisons import GUARD, activations, edges, seeded
from op_runs import POISON, check_op, define, launch_op, product_input, weight
from random_weights import random_weight

ALPHA, LIMIT = 1.702, 7.0
NODE = 3
INT32 = np.iinfo(np.int32)


def dispatch_call(n_expert: int, ids_shape, target=None, ids=None, table=None, left=None) -> Call:
    """What `dispatch` reads of a call of mul_mat_id. ids, table, left: addresses."""
    operands = {"w": Operand("Q8_0", (n_expert, 32, 256)), "ids": Operand("i32", ids_shape, ids)}
    return Call("mul_mat_id", "node", target, operands, Operand("i32", (1,), table), fault=(left, NODE))


def id_call(type_, n_expert, n_rows, n_cols, n_tokens, n_used, b) -> Call:
    """Of mul_mat_id, without memory."""
    operands = {"w": Operand(type_, (n_expert, n_rows, n_cols)), "x": Operand("act", (n_tokens * b, n_cols)),
                "ids": Operand("i32", (n_tokens, n_used)), "out": Operand("f32", (n_tokens * n_used, n_rows))}
    return Call("mul_mat_id", "node", None, operands, Operand("i32", (1,), 0))


def routed(n, n_used, n_expert, name):
    """Ids of experts, one of which has most of the pairs, and some that are none."""
    ids = np.minimum(seeded(name).integers(0, 2 * n_expert, (n, n_used)), n_expert - 1).astype(np.int32)
    ids[0, 0], ids[-1, -1] = -1, n_expert
    return ids


def check_dispatch(machine, ids, n_expert: int, tokens: int, fault=(0, 0, 0, 0)) -> None:
    """ids: int32 [n_pairs], of any value. fault: what is left in it before."""
    ids = np.asarray(ids, np.int32)
    n_pairs, known = len(ids), (ids >= 0) & (ids < n_expert)
    at = dispatch_table(n_expert, n_pairs, tokens)
    table, left = machine.upload(np.full(at.n_words + GUARD, -7, np.int32)), machine.upload(np.int32(fault))
    machine.run(dispatch(dispatch_call(n_expert, (n_pairs, 1), machine.target, machine.upload(ids), table, left), tokens))
    found, left = machine.download(table, np.int32, at.n_words + GUARD), machine.download(left, np.int32, 4)
    machine.free()
    bounds, order = found[at.bounds:at.bounds + n_expert + 1], found[at.order:at.order + n_pairs]
    expected, sorted_ = np.empty(n_expert + 1, np.int64), np.empty(known.sum(), np.int64)
    sort_by_expert(ids[known], expected, sorted_)
    assert (bounds == expected).all(), (bounds, expected)
    assert (order[:len(sorted_)] == np.flatnonzero(known)[sorted_]).all(), order
    assert (order[len(sorted_):] == np.flatnonzero(~known)).all(), order  # so `order` is a permutation
    items = [(e, row, min(tokens, expected[e + 1] - row)) for e in range(n_expert)
             for row in range(expected[e], expected[e + 1], tokens)]
    assert found[0] == len(items) <= at.n_items, (found[0], at.n_items)
    assert (found[at.items:at.items + 4 * len(items)].reshape(-1, 4)[:, :3] == np.int32(items).reshape(-1, 3)).all()
    assert (found[at.n_words:] == -7).all(), "written behind the end of the table"
    first = np.flatnonzero(~known)[:1]
    assert list(left[:3]) == ([NODE, *first, *ids[first]] if len(first) and not fault[0] else list(fault[:3])), left


def stack(name, type_, n_matrices, n_rows, n_cols, rng) -> Value:
    blocks = [random_weight(format_of(type_), n_rows, n_cols, rng) for _ in range(n_matrices)]
    return weight(name, type_, np.stack(blocks), n_cols)


def check_with_ids(machine, name, op, operands, ids, n_expert, **options) -> None:
    """`check_op` of operands, of which None stands for the ids; where one is no expert, its row of the result must stay as it
    is."""
    ids = np.asarray(ids, np.int32)
    known = ((ids >= 0) & (ids < n_expert)).reshape(-1)

    def with_ids(values):
        return [values if operand is None else operand for operand in operands]
    params = {key: value for key, value in options.items() if key not in ("plan", "fault", "settled")}
    (expected,), = define(op, *with_ids(np.clip(ids, 0, n_expert - 1)), **params)
    expected.view(np.uint8)[~known] = POISON
    (found,), = launch_op(machine, op, *with_ids(ids), **options)
    assert_bitwise_equal(found, expected, name)


def check_mul_mat_id(machine, type_, n_expert, n_rows, n_cols, ids, b=1, plan=None, fault=None, x=None) -> None:
    """ids: [n, u]. b: rows of x of a token. With ids that are settled, and not."""
    n, u = np.shape(ids)
    name = f"mul_mat_id[{type_}, X={n_expert}, n_rows={n_rows}, n_cols={n_cols}, ids={(n, u)}, b={b}]"
    rng = seeded(name)
    w, x = stack("w", type_, n_expert, n_rows, n_cols, rng), activations(n * b, n_cols, rng) if x is None else x
    operands = w, product_input(type_, x), None
    for settled in (), ("ids",):
        check_with_ids(machine, name, "mul_mat_id", operands, ids, n_expert, plan=plan, fault=fault, settled=settled)


def check_mul_mat_heads(machine, type_, n_head, n_rows, n_cols, n, plan=None) -> None:
    """n: tokens."""
    name = f"mul_mat_heads[{type_}, H={n_head}, n_rows={n_rows}, n_cols={n_cols}, n={n}]"
    rng = seeded(name)
    w, x = stack("w", type_, n_head, n_rows, n_cols, rng), product_input(type_, activations(n * n_head, n_cols, rng))
    check_op(machine, name, "mul_mat_heads", w, x, plan=plan)


def check_mul_mat_id_glu(machine, act, types, n_expert, n_rows, n_cols, ids, b=1, biased=False, plan=None, x=None) -> None:
    """types: of gate and up."""
    n, u = np.shape(ids)
    sizes = f"X={n_expert}, n_rows={n_rows}, n_cols={n_cols}, ids={(n, u)}, b={b}"
    name = f"mul_mat_id_glu[{act}, {types}, {sizes}{', biased' * biased}]"
    rng = seeded(name)
    matrices = [stack(f"w-{i}", t, n_expert, n_rows, n_cols, rng) for i, t in enumerate(types)]
    x = product_input(types[0], activations(n * b, n_cols, rng) if x is None else x)
    biases = [activations(n_expert, n_rows, rng) for _ in range(2 * biased)]
    constants = {"alpha": ALPHA, "limit": LIMIT} if act == "swiglu_oai" else {}
    check_with_ids(machine, name, "mul_mat_id_glu", (*matrices, x, None, *biases), ids, n_expert, plan=plan, act=act, **constants)


def check_experts(machine, n, n_used, m, n_expert=9) -> None:
    """add_id and scale_id, with ids that are experts and some that are none, and weighted_sum."""
    name = f"experts[n={n}, n_used={n_used}, m={m}]"
    rng = seeded(name)
    x, b, w = edges(n * n_used, m, rng), activations(n_expert, m, rng), activations(n, n_used, rng)
    for op, of_experts in ("add_id", b), ("scale_id", b[:, 0]):
        ids = rng.integers(0, n_expert, (n, n_used)).astype(np.int32)
        (expected,), = check_op(machine, f"{op} {name}", op, x, of_experts, ids, in_place="x")
        ids.reshape(-1)[-4:], expected[-4:] = np.int32([INT32.min, INT32.max, -1, n_expert])[-ids.size:], np.nan
        (found,), = launch_op(machine, op, x, of_experts, ids)
        assert_bitwise_equal(found, expected, f"{op} {name}, no such experts")
    check_op(machine, f"weighted_sum {name}", "weighted_sum", x, w)
