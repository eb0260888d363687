"""The row of a matrix whose product with x is the largest: mul_mat, then argmax."""
from .argmax import argmax
from .mul_mat import mul_mat


def mul_mat_argmax(type_, mul_mat=mul_mat, argmax=argmax):
    """kernel(words, x, out i32 [n], scratch f32 [n, m]): words as of `mul_mat`; x: a tuple, (q, d, sums) or (f32 [n, k],). scratch is left with anything
    in it."""
    product = mul_mat(type_)

    def mul_mat_argmax(words, x, out, scratch):
        product(words, *x, scratch)
        argmax(scratch, out)
    return mul_mat_argmax
