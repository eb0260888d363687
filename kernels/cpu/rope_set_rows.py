"""Q rotated, K rotated and written to its cache, V written to its cache."""
from ..reference import rope_set_rows as reference
from .rope import rope
from .set_rows import set_rows


def rope_set_rows(type_k, type_v):
    """function(q f32 [n, heads, dim], k f32 [n, KV heads, dim], v f32 [n, columns], pos, table, neox as of rope, rows i64 [n], q_out like q, cache_k, cache_v)."""
    return reference.rope_set_rows(type_k, type_v, rope, set_rows)
