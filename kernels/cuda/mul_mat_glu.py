"""out = act(gate x + its bias) * (up x + its bias). Of quantized matrices in one kernel (mmq_few, mmq); of float ones as two products, then one
thread an element, in the place of gate's product."""
from numba import cuda

from ...quant.formats import format_of
from .elementwise import BINARY, GLU, THREADS, binary, grid
from .launch import F32, Kernel, Launches, N, check, factory
from .mmq import Block, mmq_glu
from .mmq_few import FewShape, mmq_few_glu
from .mul_mat import mul_mat, quantized_shape
from .ptx import add, i64, ld, st

FEWEST_APART = 33  # tokens; with 40 both ways take as long, fewer were not timed


@factory([(act,) for act in GLU])
def biased_glu_kernel(act):
    glu = BINARY[GLU[act]]

    def kernel(out, up, gate_bias, up_bias, n_cols):  # blocks as in elementwise
        column = cuda.blockIdx.y * THREADS + cuda.threadIdx.x
        if column < n_cols:
            i = i64(cuda.blockIdx.x) * n_cols + column
            st(out, i, glu(add(ld(out, i), ld(gate_bias, column)), add(ld(up, i), ld(up_bias, column))))
    return Kernel(kernel, (F32, F32, F32, F32, N), THREADS)


def fused_shape(target, names: tuple[str, str], n_rows: int, n_cols: int, n: int) -> FewShape | Block | None:
    """Of the one kernel for gate and up of these formats; None for float ones, which have none."""
    if all(format_of(name, "mul_mat_glu").is_quantized for name in names):
        return quantized_shape(names, n_rows, n_cols, n, target.n_multiprocessors, target.shared_limit, target.warpgroups)
    return None


def takes_less_apart(target, act: str, names: tuple[str, str], biased: bool, n_rows: int, n_cols: int, n: int) -> bool:
    """Whether gate, up and `swiglu_act` as three launches take less than mul_mat_glu and `quantize`: where warpgroups multiply, whose registers the totals of
    two matrices do not fit into (docs/kernels-log.md), and no biases are to be added. names: formats of gate and up."""
    shape = fused_shape(target, names, n_rows, n_cols, n)
    return act == "silu" and not biased and n >= FEWEST_APART and isinstance(shape, Block) and shape.warpgroups


def mul_mat_glu(target, act, gate_type, up_type, gate_words, up_words, x, gate_bias, up_bias, out, n_rows, n_cols, n, scratch):
    """act: silu, gelu or relu. gate_words, up_words, x: as of mul_mat, both formats quantized or both float; gate_bias, up_bias: addresses of
    float32 [n_rows], or both None; out: address of float32 [n, n_rows]; scratch: of float32 [n, n_rows], left with anything in it."""
    check("mul_mat_glu", act in GLU, "act", act, ", ".join(GLU))
    check("mul_mat_glu", (gate_bias is None) == (up_bias is None), "bias", "of one product only", "of both or of none")
    names = gate_type, up_type
    shape = fused_shape(target, names, n_rows, n_cols, n)
    if shape is not None:
        fused = mmq_glu if isinstance(shape, Block) else mmq_few_glu
        return fused(target, act, names, gate_words, up_words, x, gate_bias, up_bias, out, n_rows, n_cols, n, shape)
    gate = mul_mat(target, gate_type, gate_words, x, out, n_rows, n_cols, n)
    up = mul_mat(target, up_type, up_words, x, scratch, n_rows, n_cols, n)
    if gate_bias is None:
        glu = binary(target, GLU[act], out, scratch, out, n, n_rows, n)
    else:
        glu = target.launch(biased_glu_kernel(act), grid("mul_mat_glu", n, n_rows), THREADS, (out, scratch, gate_bias, up_bias, n_rows))
    return Launches((gate, up, glu))
