"""The row of a matrix whose product with x is the largest: the product, then its argmax."""
from functools import partial

from ..reference import mul_mat_argmax as reference
from .argmax import argmax
from .mul_mat import mul_mat

mul_mat_argmax = partial(reference.mul_mat_argmax, mul_mat=mul_mat, argmax=argmax)  # as in kernels/reference
