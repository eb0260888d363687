"""Products with the activations of add_rms_norm_act, of one row: one after the other, as in kernels/reference."""
from functools import partial

from ..reference import add_rms_norm_mul_mat as reference
from .add_rms_norm import add_rms_norm_act
from .mul_mat_glu import mul_mat_glu
from .mul_mat_qkv import mul_mat_qkv

add_rms_norm_mul_mat_qkv = partial(reference.add_rms_norm_mul_mat_qkv, add_rms_norm_act=add_rms_norm_act, mul_mat_qkv=mul_mat_qkv)
add_rms_norm_mul_mat_glu = partial(reference.add_rms_norm_mul_mat_glu, add_rms_norm_act=add_rms_norm_act, mul_mat_glu=mul_mat_glu)
