"""GGUF block formats, in the order in which they are processed.

formats      the table: one row per tensor type, looked up by name or type id
words        what an unpacking is built of: operations on words of four bytes, compiled for one target
legacy, k_quants, i_quants, fp4, ternary, floats   the unpackings by family: chunk bytes -> levels, scales, minima
tile         tiles of 32 rows x 256 columns: pack, loads
dequantize   tensors to float32 on the host, by the same unpackings
layouts      where the bits of codes and scales lie in a block's bytes
rounding, search   float32 to codes and scales: by extremes, by searches for the least error
fields, packing   codes and scales to bytes
encode       the table of encoders: one per type
quantize     float32 to the file's bytes
activation   activation blocks: two int8 limbs, scales and sums
"""
