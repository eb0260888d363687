"""docs/numerics.md as code: one module per operation, scalar loops in the page's order. Nobody optimises it; every executor
equals it.

`op(call)` is a step of the op (kernels/call.py); `op_arrays` the definition on C-contiguous numpy arrays, `out` being the
caller's: n counts tokens, k columns, m rows of a weight. Fused ops have no definition of their own: they are their parts, one
after the other.
"""
