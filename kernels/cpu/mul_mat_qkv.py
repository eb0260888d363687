"""The products of three matrices, such as those of Q, K and V, with one x, biases added to all or to none, one after the other."""
from functools import partial

from ..reference import mul_mat_qkv as reference
from .elementwise import add
from .mul_mat import mul_mat

mul_mat_qkv = partial(reference.mul_mat_qkv, mul_mat=mul_mat, add=add)  # as in kernels/reference
