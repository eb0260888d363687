"""docs/numerics.md as code: one module per operation, scalar loops in the page's order. Nobody optimises it; every executor equals it.

Arrays are C-contiguous numpy arrays, `out` is the caller's; n counts tokens, k columns, m rows of a weight.
"""
