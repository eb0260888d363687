"""Products with the activations of add_rms_norm_act, of one row: of Q, K and V, or gated (numerics, sections 3 to 5)."""
import numpy as np

from .add_rms_norm import add_rms_norm_act
from .mul_mat_glu import mul_mat_glu
from .mul_mat_qkv import mul_mat_qkv
from .quantize import CHUNK, SUM_COLUMNS


def row_of_activations(n_cols):
    """q, d, sums of one row, as of `quantize`."""
    n_chunks = -(-n_cols // CHUNK)
    return np.empty((1, n_chunks * CHUNK), np.int16), np.empty((1, n_chunks), np.float32), np.empty((1, n_chunks * CHUNK // SUM_COLUMNS), np.int32)


def add_rms_norm_mul_mat_qkv(*types, add_rms_norm_act=add_rms_norm_act, mul_mat_qkv=mul_mat_qkv):
    """kernel(x, y, w, eps, words, biases, outs, total): x, y, w, eps, total as of `add_rms_norm_act`, of one row; the others as of `mul_mat_qkv`."""
    products = mul_mat_qkv(*types)

    def add_rms_norm_mul_mat_qkv(x, y, w, eps, words, biases, outs, total):
        act = row_of_activations(x.shape[1])
        add_rms_norm_act(x, y, w, eps, *act, total)
        products(words, act, biases, outs)
    return add_rms_norm_mul_mat_qkv


def add_rms_norm_mul_mat_glu(act, gate_type, up_type, add_rms_norm_act=add_rms_norm_act, mul_mat_glu=mul_mat_glu):
    """kernel(x, y, w, eps, gate words, up words, biases, out, scratch, total): x, y, w, eps, total as of `add_rms_norm_act`, of one row; the others as of
    `mul_mat_glu`."""
    products = mul_mat_glu(act, gate_type, up_type)

    def add_rms_norm_mul_mat_glu(x, y, w, eps, gate_words, up_words, biases, out, scratch, total):
        act = row_of_activations(x.shape[1])
        add_rms_norm_act(x, y, w, eps, *act, total)
        products(gate_words, up_words, act, biases, out, scratch)
    return add_rms_norm_mul_mat_glu
