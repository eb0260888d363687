"""Q and K normed, if wanted, and rotated, K written to its cache, V written to its cache."""
from ..reference import rope_set_rows as reference
from .rms_norm import rms_norm
from .rope import rope
from .set_rows import set_rows


def rope_set_rows(type_k, type_v, indirect):
    """function(q f32 [n, heads, dim], k f32 [n, KV heads, dim], v f32 [n, columns], norms, eps, pos, table, neox as of rope, dst_k i64 [n], dst_v i64 [n],
    q_out like q, cache_k, cache_v). norms: two weights f32 [dim], of Q and of K, or none. dst_k, dst_v: cells, or addresses of rows if indirect."""
    return reference.rope_set_rows(type_k, type_v, indirect, rms_norm, rope, set_rows)
