"""CUDA kernels, equal to kernels/reference bit for bit.

ptx          intrinsics: every float operation, every access to global memory; what kernel modules are written in
cooperative  device functions with barriers
launch       a kernel and its launch as values; compiling to PTX, the disk cache, loading
simulator    the same kernel functions in numba's CUDA simulator, on arrays in host memory
weights      weight tiles on the device: wide loads for the unpackings of quant/
quantize, mul_mat, get_rows   quantized and float matrices
rms_norm_act, swiglu_act   what makes activations, fused with quantize
rms_norm, elementwise, rope, set_rows, flash_attn_ext   everything else of a layer
"""
