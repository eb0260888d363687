"""Scales and codes for given values: what the encoders search, compiled for the CPU.

scales    how a float scale is stored, integer scales under it
vectors   float32 side by side in registers
lanes     sub-blocks side by side, as vectors take them
levels    codes of levels, of one table or of two that a sub-block selects, or of pairs
lines     codes with minima
recode    other codes for the scales found
codebook  entries of codebooks, with signs or a shift

All minimize the weighted squared error sum of w (x - value)^2 of each group of columns with one float scale d. A scale and the
codes that are nearest under it are tried for several scales around the largest value; the scale that fits those codes best
follows from them. Then d is chosen so that it suits all sub-blocks, integer scales and codes again for this d.

The order of operations is that of the source, and none is fused: the bytes are the same on every CPU.
"""
