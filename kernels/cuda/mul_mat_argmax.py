"""out = argmax(W x): where mmq_few multiplies, blocks keep the best row of a tile, and a second launch the best of those; else the product, then `argmax`."""
from ...quant.formats import format_of
from ...quant.tile import ROWS
from .argmax import argmax, argmax_of_parts, scratch_words as argmax_words
from .launch import Launches
from .mmq_few import FewShape, mmq_few_argmax
from .mul_mat import check_sizes, mul_mat, mul_mat_shape


def fused_shape(target, type_, n_rows: int, n_cols: int, n: int) -> FewShape | None:
    """Of the kernel that leaves no product in memory; None where there is none."""
    shape = mul_mat_shape(format_of(type_, "mul_mat_argmax"), n_rows, n_cols, n, target.n_multiprocessors, target.shared_limit, target.warpgroups)
    return shape if isinstance(shape, FewShape) else None


def scratch_words(target, type_, n_rows: int, n_cols: int, n: int) -> int:
    """int32 of scratch memory: pairs of each row tile, or the product, and behind it that of `argmax`."""
    if fused_shape(target, type_, n_rows, n_cols, n):
        return n * -(-n_rows // ROWS) * 2
    return n * n_rows + argmax_words(n)


def mul_mat_argmax(target, type_, words, x, out, n_rows, n_cols, n, scratch):
    """out[i] = the first row of the largest product with x[i], or -1. words, x: as of `mul_mat`; out: address of int32 [n]; scratch: of int32
    [scratch_words], on 16 bytes, left with anything in it."""
    check_sizes("mul_mat_argmax", n_rows, n_cols, n)
    shape = fused_shape(target, type_, n_rows, n_cols, n)
    if shape:
        best = mmq_few_argmax(target, type_, words, x, scratch, n_rows, n_cols, n, shape)
        return Launches((best, argmax_of_parts(target, scratch, out, n, -(-n_rows // ROWS))))
    product = mul_mat(target, type_, words, x, scratch, n_rows, n_cols, n)
    return Launches((product, argmax(target, scratch, out, n, n_rows, scratch + 4 * n * n_rows)))
