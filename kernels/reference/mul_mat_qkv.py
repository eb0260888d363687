"""The products of three matrices, such as those of Q, K and V, with one x: mul_mat of each."""
from .mul_mat import mul_mat


def mul_mat_qkv(*types):
    """kernel(words, x, outs): for each of the types the words of a matrix [m, k] and out f32 [n, m], as of `mul_mat`; x: a tuple, (q, d, sums) or
    (f32 [n, k],)."""
    products = [mul_mat(each) for each in types]

    def mul_mat_qkv(words, x, outs):
        for product, matrix, out in zip(products, words, outs, strict=True):
            product(matrix, *x, out)
    return mul_mat_qkv
