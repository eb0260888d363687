"""The operations on the CPU: parallel over tokens, heads or rows, loops that LLVM vectorises, and the same bits as
kernels/reference.

An op's function is that of kernels/reference with another kernel on the same arrays; fused ops have one here only where it is
faster than its parts. How many threads share a loop never changes a result.
"""
