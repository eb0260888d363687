"""Q and K normed, if wanted, and rotated, K written to its cache, V written to its cache (numerics, sections 5 to 7)."""
import numpy as np

from .rms_norm import rms_norm
from .rope import rope
from .set_rows import cpy_rows_indirect, set_rows


def rope_set_rows(type_k, type_v, indirect, rms_norm=rms_norm, rope=rope, set_rows=set_rows):
    """function(q f32 [n, heads, dim], k f32 [n, KV heads, dim], v f32 [n, columns], norms, eps, pos, table, neox as of rope, dst_k i64 [n], dst_v i64 [n],
    q_out like q, cache_k, cache_v). norms: two weights f32 [dim], of Q and of K, or none. dst_k, dst_v: cells, or addresses of rows if indirect."""
    set_k, set_v = (cpy_rows_indirect(type_, set_rows) if indirect else set_rows(type_) for type_ in (type_k, type_v))

    def normed(x, w, eps):
        out = np.empty_like(x)
        rms_norm(x.reshape(-1, len(w)), w, eps, out.reshape(-1, len(w)))
        return out

    def write(q, k, v, norms, eps, pos, table, neox, dst_k, dst_v, q_out, cache_k, cache_v):
        if len(norms):
            q, k = normed(q, norms[0], eps), normed(k, norms[1], eps)
        rope(q, pos, table, neox, q_out)
        rotated = np.empty_like(k)
        rope(k, pos, table, neox, rotated)
        set_k(rotated.reshape(len(k), -1), dst_k, cache_k)
        set_v(v, dst_v, cache_v)
    return write
