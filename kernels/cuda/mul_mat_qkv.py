"""The products of three matrices, such as those of Q, K and V, with one x, and their biases: one kernel where mmq_few takes all of them, else one after the
other."""
from ...quant.formats import format_of
from .elementwise import add
from .launch import Launches, check
from .mmq_few import FewShape, mmq_few_qkv
from .mul_mat import check_sizes, mul_mat, mul_mat_shape


def mul_mat_qkv(target, types, words, x, outs, n_rows, n_cols, n, biases=()):
    """types, words, outs, n_rows: three of each, formats, addresses of tiles and of float32 [n, rows], and numbers of rows; x, n_cols, n: as of `mul_mat`;
    biases: addresses of three float32 [rows], added to the products, or none. The formats are all quantized or all float."""
    kinds = [format_of(type_, "mul_mat_qkv").is_quantized for type_ in types]
    check("mul_mat_qkv", len(set(kinds)) == 1, "types", ", ".join(types), "all quantized or all float")
    for rows in n_rows:
        check_sizes("mul_mat_qkv", rows, n_cols, n)
    device = target.n_multiprocessors, target.shared_limit, target.warpgroups
    if all(isinstance(mul_mat_shape(type_, rows, n_cols, n, *device), FewShape) for type_, rows in zip(types, n_rows)):
        return mmq_few_qkv(target, tuple(types), words, x, outs, n_rows, n_cols, n, biases=biases)
    products = [mul_mat(target, type_, matrix, x, out, rows, n_cols, n) for type_, matrix, out, rows in zip(types, words, outs, n_rows)]
    return Launches((*products, *(add(target, out, bias, out, n, rows, 1) for out, bias, rows in zip(outs, biases, n_rows))))
