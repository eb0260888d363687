"""The products of three matrices, such as those of Q, K and V, with one x: one kernel where mmq_few takes all of them, else one after the other."""
from ...quant.formats import format_of
from .launch import Launches, check
from .mmq_few import FewShape, mmq_few_qkv
from .mul_mat import check_sizes, mul_mat, mul_mat_shape


def mul_mat_qkv(target, types, words, x, outs, n_rows, n_cols, n):
    """types, words, outs, n_rows: three of each, formats, addresses of tiles and of float32 [n, rows], and numbers of rows; x, n_cols, n: as of `mul_mat`.
    The formats are all quantized or all float."""
    kinds = [format_of(type_, "mul_mat_qkv").is_quantized for type_ in types]
    check("mul_mat_qkv", len(set(kinds)) == 1, "types", ", ".join(types), "all quantized or all float")
    for rows in n_rows:
        check_sizes("mul_mat_qkv", rows, n_cols, n)
    device = target.n_multiprocessors, target.shared_limit, target.warpgroups
    if all(isinstance(mul_mat_shape(type_, rows, n_cols, n, *device), FewShape) for type_, rows in zip(types, n_rows)):
        return mmq_few_qkv(target, tuple(types), words, x, outs, n_rows, n_cols, n)
    return Launches(tuple(mul_mat(target, type_, matrix, x, out, rows, n_cols, n) for type_, matrix, out, rows in zip(types, words, outs, n_rows)))
