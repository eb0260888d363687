"""Q rotated, K rotated and written to its cache, V written to its cache (numerics, sections 5 to 7)."""
import numpy as np

from .rope import rope
from .set_rows import set_rows


def rope_set_rows(type_k, type_v, rope=rope, set_rows=set_rows):
    """function(q f32 [n, heads, dim], k f32 [n, KV heads, dim], v f32 [n, columns], pos, table, neox as of rope, rows i64 [n], q_out like q, cache_k, cache_v)."""
    set_k, set_v = set_rows(type_k), set_rows(type_v)

    def write(q, k, v, pos, table, neox, rows, q_out, cache_k, cache_v):
        rope(q, pos, table, neox, q_out)
        rotated = np.empty_like(k)
        rope(k, pos, table, neox, rotated)
        set_k(rotated.reshape(len(k), -1), rows, cache_k)
        set_v(v, rows, cache_v)
    return write
