"""The products of three matrices, such as those of Q, K and V, with one x: with few tokens one kernel (mmq_few), else one after the other."""
from ...quant.formats import format_of
from .launch import Launches, check
from .mmq_few import FewShape
from .mul_mat import mul_mat, mul_mat_shape


def mul_mat_qkv(target, types, words, x, outs, n_rows, n_cols, n):
    """types, words, outs, n_rows: three of each, of formats, addresses of tiles and of float32 [n, rows], and rows; x, n_cols, n: as of `mul_mat`.
    The formats are all quantized or all float."""
    of_three = types, words, outs, n_rows
    check("mul_mat_qkv", all(len(each) == 3 for each in of_three), "matrices", "/".join(str(len(each)) for each in of_three), "three of everything")
    return Launches(tuple(mul_mat(target, type_, matrix, x, out, rows, n_cols, n) for type_, matrix, out, rows in zip(*of_three)))
