"""The products of three matrices, such as those of Q, K and V, with one x, and their biases: one kernel where mmq_few or blocks
of mmq for few tokens take all of them, else one after the other."""
from functools import lru_cache

from ...quant.formats import format_of
from ..call import Call
from .elementwise import add, check_grid
from .launch import Launches
from .mmq import NUMBER_BYTES, Block, hopper_blocks, mmq_qkv, team_blocks
from .mmq_few import FewShape, mmq_few_qkv, qkv_shape
from . import mul_mat
from .mul_mat import FEWEST_OF_WARPGROUPS, block_us, check_sizes, fastest, few_us, limits, mul_mat_shape, part_of, products
from .operands import is_quantized, qkv_of

QKV_ROWS = 64  # of a block of one launch


def check(call: Call) -> None:
    names, n_rows, *_ = qkv_of(call)
    is_quantized(call.op, names)
    for rows in n_rows:
        check_sizes(rows, call.x.n_cols, call.x.n_rows)


@lru_cache(None)
def team_shape(names: tuple[str, ...], n_rows: tuple[int, ...], n_cols: int, n: int, n_multiprocessors: int, shared_limit: int,
               warpgroups: bool) -> Block | None:
    """The block of mmq_qkv where one launch is faster than others. names: formats of the matrices, of so many rows."""
    if n <= FEWEST_OF_WARPGROUPS or not warpgroups:
        return None
    room = shared_limit - NUMBER_BYTES
    blocks = (*(block for block in team_blocks(names, room) if block.n_teams > 1),
              *(block for block in hopper_blocks(names, room) if block.rows == QKV_ROWS))
    if not blocks:
        return None
    device, together = (n_multiprocessors, shared_limit), QKV_ROWS * sum(-(-rows // QKV_ROWS) for rows in n_rows)
    us, block = fastest(names, blocks, together, n_cols, n, *device)
    apart = [(name, rows, mul_mat_shape(name, rows, n_cols, n, *device, warpgroups)) for name, rows in zip(names, n_rows)]
    if all(isinstance(shape, FewShape) for *_, shape in apart):
        return block if us < few_us(names, together, n_cols, n, n_multiprocessors) else None
    others_us = sum(block_us((name,), shape, rows, n_cols, n, *device) if isinstance(shape, Block) and shape.warpgroups
                    else few_us((name,), rows, n_cols, n, n_multiprocessors) for name, rows, shape in apart)
    return block if us < others_us else None


def plan(call: Call) -> FewShape | Block | None:
    """Of the one kernel; None where the products are computed one after the other."""
    names, n_rows, *_ = qkv_of(call)
    (n, n_cols), device = call.x.shape, limits(call.device)
    block = team_shape(names, n_rows, n_cols, n, *device) if all(format_of(name).is_quantized for name in names) else None
    if block is not None:
        for out in (call.q_out, call.k_out, call.v_out):
            check_grid(out)  # of the biases' additions
        return block
    if all(isinstance(mul_mat_shape(name, rows, n_cols, n, *device), FewShape) for name, rows in zip(names, n_rows)):
        return qkv_shape(names, n_rows, n_cols, n, *device[:2])
    for out in (call.q_out, call.k_out, call.v_out):
        check_grid(out)  # of the biases' additions
    return None


def scratch(call: Call) -> tuple[str, tuple[int]] | None:
    """The largest of the products one after the other, which share it."""
    if call.plan is not None:
        return None
    wanted = [mul_mat.scratch(part_of(call, w, out)) for w, out in matrices(call)]
    return max(filter(None, wanted), key=lambda each: each[1], default=None)


def matrices(call: Call) -> list:
    return [(call.q, call.q_out), (call.k, call.k_out), (call.v, call.v_out)]


def mul_mat_qkv(call: Call):
    """q_out, k_out, v_out = q x + q_bias, k x + k_bias, v x + v_bias.

    q, k, v: tiles of weights [m, k], each of its own m, on 16 bytes, all quantized or all float; x: as of `mul_mat`; biases:
    f32 [m], or none is there; results: f32 [n, m]."""
    if isinstance(call.plan, FewShape):
        return mmq_few_qkv(call)
    made = [mmq_qkv(call)] if call.plan else products(call, matrices(call))
    biases = (call.q_bias, call.q_out), (call.k_bias, call.k_out), (call.v_bias, call.v_out)
    return Launches((*made, *(add(call.part("add", x=out, y=bias, out=out)) for bias, out in biases if bias is not None)))
