"""dense_layer by its definition and by its kernel."""
import numpy as np

from matmul_comparisons import activations, random_matrix, seeded
from op_comparisons import filled_cache
from op_runs import check_op


def check_dense_layer(machine, types, n_cols, heads, dim, n_ff, n_ctx, position, n_rot=0, neox=False, plan=None, holes=(),
                      zeros=False, behind=0) -> None:
    """types: of Q, K, V, the output, gate, up and down. heads: (n_head, n_head_kv). position: of the token, which is of the
    second of two sequences. holes: positions before it that are missing. zeros: x and y are zeros. behind: so many cells before
    that of its position are its key and value written."""
    (n_head, n_head_kv), n_rot = heads, n_rot or dim
    name = (f"dense_layer[{types}, {n_cols=}, {heads=}, {dim=}, {n_ff=}, {n_ctx=}, {position=}, {n_rot=}, {neox=}, {plan=}, "
            f"{holes=}{', zeros' * zeros}{f', {behind=}' * (behind > 0)}]")
    rng, (q_cols, kv_cols) = seeded(name), (n_head * dim, n_head_kv * dim)
    x, y, norms = activations(1, n_cols, rng), activations(1, n_cols, rng), activations(2, n_cols, rng)
    if zeros:
        x[:], y[:] = 0, 0
    rows = q_cols, kv_cols, kv_cols, n_cols, n_ff, n_ff, n_cols
    columns = n_cols, n_cols, n_cols, q_cols, n_cols, n_cols, n_ff
    names = "q", "k", "v", "o", "gate", "up", "down"
    q, k, v, o, gate, up, down = (random_matrix(*each, rng) for each in zip(names, types, rows, columns))
    turns = np.outer(np.arange(n_ctx), 100.0**-np.linspace(0, 1, n_rot // 2))
    table = np.stack([np.cos(turns), np.sin(turns)], -1).astype(np.float32)
    present = np.zeros((2, n_ctx), np.uint8)
    present[1, :position + 1] = 1
    present[1, list(holes)] = 0
    n_cached = position + (behind > 0)
    caches = [filled_cache(f"cache_{part}", "f16", 2 * n_ctx, n_ctx + np.arange(n_cached), activations(n_cached, kv_cols, rng))
              for part in "kv"]
    check_op(machine, name, "dense_layer", x, y, norms[0], q, k, v, np.int32([position]), table, *caches,
             np.int64([n_ctx + position - behind]), np.int32([1]), present, o, norms[1], gate, up, down, plan=plan, n_head=n_head,
             n_head_kv=n_head_kv, neox=neox, scale=dim**-0.5, eps=np.float32(1e-5))
