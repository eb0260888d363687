"""The products of three matrices, such as those of Q, K and V, with one x, biases added to all or to none: mul_mat and add of each."""
from .elementwise import add
from .mul_mat import mul_mat


def mul_mat_qkv(*types, mul_mat=mul_mat, add=add):
    """kernel(words, x, biases, outs): for each of the types the words of a matrix [m, k] and out f32 [n, m], as of `mul_mat`; x: a tuple, (q, d, sums) or
    (f32 [n, k],); biases: of each, f32 [m], or ()."""
    products = [mul_mat(each) for each in types]

    def mul_mat_qkv(words, x, biases, outs):
        for product, matrix, out in zip(products, words, outs, strict=True):
            product(matrix, *x, out)
        for out, bias in zip(outs, biases):
            add(out, bias.reshape(1, -1), out)
    return mul_mat_qkv
