"""The operations on the CPU: parallel over tokens, heads or rows, loops that LLVM vectorises, and the same bits as kernels/reference.

Signatures are those of the module of the same name in kernels/reference. How many threads share a loop never changes a result.
"""
