"""Products of the matrices of experts with a token's rows of float32, of which each block makes the activations that it
multiplies: a warp those of its chunk, while the weights of that come. Where a warp had more chunks, one launch of `quantize` for
all blocks takes less."""
from ...quant.formats import CHUNK
from ...quant.tile import ROWS
from ..call import Call
from .launch import need
from .mmq_few import FewShape
from .mmq_few_id import id_shape_of, quantize_mmq_few_id
from .mul_mat_id import plan as plan_of_product, scratch as scratch
from .operands import late_error as late_error, pairs_of


def check(call: Call) -> None:
    need(not call.may_skip, "may_skip", call.may_skip, "False: ids are experts")
    need(call.ids.shape[0] == 1, "n_tokens", call.ids.shape[0], "1")


def plan(call: Call) -> FewShape:
    """As many warps and blocks as of mul_mat_id. Unsupported where a block has several row tiles, or a warp several chunks."""
    sizes, shape = pairs_of(call), plan_of_product(call)
    need(isinstance(shape, FewShape), "n_used", sizes.n_pairs, "as many as mmq_few_id takes")
    n_tiles, n_chunks = -(-sizes.n_rows // ROWS) * sizes.n_pairs, -(-sizes.n_cols // CHUNK)
    need(n_tiles <= shape.grid[0], "n_used * n_tiles", n_tiles, f"up to {shape.grid[0]}, a block each")
    need(n_chunks <= shape.n_warps, "n_cols", sizes.n_cols, f"up to {CHUNK * shape.n_warps}, a warp for each {CHUNK}")
    return id_shape_of((call.w.dtype,), n_tiles, sizes.n_cols, sizes.n_pairs, 1, shape.n_warps, n_tiles, True)


def quantize_mul_mat_id(call: Call):
    """out[j] = w[ids[0, j]] quantize(x[j % b]).

    w, ids, out, scratch: as of `mul_mat_id`; x: f32 [b, k] on 16 bytes, b a divisor of u."""
    return quantize_mmq_few_id(call)
