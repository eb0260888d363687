"""CUDA kernels, equal to kernels/reference bit for bit.

ptx          intrinsics: every float operation, every access to global memory; what kernel modules are written in
launch       a kernel and its launch as values; compiling to PTX, the disk cache, loading; how kernels of a stream overlap
compile_workers   many kernels compiled at once
simulator    the same kernel functions on the host, a greenlet a thread, on its arrays
weights      weight tiles on the device: loads for the unpackings of quant/
operands     what launch functions of products read of a call
quantize     activations
mul_mat      matrix products: the choice among mmvq (float weights), mmq_few and mmq
tile_form, tile_product, token_product   a chunk of a row tile times a few tokens, or one, on tensor cores
ending       what becomes of a total
few_slots, few_product, tile_walk   how chunks come into a block of mmq_few, how it multiplies and adds, and goes from one row
             tile to the next
block, exchange   the shape of a block of mmq; how teams of warps, and blocks of a cluster, share the chunks of a row
mul_mat_glu  gate, up and their activation
mul_mat_qkv  three matrices with one x
mul_mat_argmax   a matrix, and the row of the largest product
draw         one of the largest values of a row, chosen as `engine.sampling` does
add_rms_norm_topk_moe   of one token, a norm, a router's product and the routing: one cluster
add_rms_norm_mul_mat   both of one token, whose activations each block makes
mul_mat_id, mul_mat_id_glu   matrices of experts: the choice between mmq_few_id (each block sorts few pairs) and dispatch
             (sorted once) before mmq
hot_experts  which experts are asked for that have copies in slots
get_rows, dequantize   rows and whole tensors as floats
rms_norm_act, add_rms_norm, swiglu_act, flash_attn_ext_act   what makes activations, fused with quantize
rms_norm, elementwise, glu, rope, set_rows   everything else of a layer but
flash_attn_ext   attention: the choice among flash_attn_ext_few and _narrow (pieces side by side, which _combine puts together;
             _narrow reads what _rows copies), _tile (many queries; on Hopper _group, over what _limbs makes), on tensor cores,
             and _any (every type and head size). What blocks do with a piece: _few_stages, _tile_limbs, _tile_rows
fixed_point, lane_floats, flash_attn_ext_queries   of attention: limbs in registers, floats in shared memory and over lanes,
             limbs of queries
cpy          bytes, from one place to another; and to measure the bandwidth of memory

A large kernel is cut into stages, device functions that a reader can name: copy, unpack, multiply, fold, store. Each is made by a
function of what is known when the kernel is compiled, which its file keeps in one NamedTuple; the docstring of that function says
the formula, the arrays with dtype and shape, who holds them (lane, warp, shared memory) and which barrier protects them. What
stages hand on at run time travels in NamedTuples too. A cut must not change the compiled code: where one with `ptx.device` does,
one with `ptx.stage` does not.
"""
