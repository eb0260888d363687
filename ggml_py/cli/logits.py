"""ggml-py logits: of token ids, into a file of numpy's."""
import sys
from pathlib import Path

from ..base.errors import UserError
from ..files.writing import check_file, replacing
from .loading import existing, load, settings_of
from .options import one_model, seed
from .values import output


def options(p) -> None:
    one_model(p, "context; the number of tokens by default")
    seed(p)
    p.add_argument("--tokens", type=Path, required=True, metavar="FILE.npy", help="token ids, one-dimensional")
    p.add_argument("-o", "--output", type=output(check_file), required=True, metavar="OUT.npy", help="where the logits go")


def run(options, load_model) -> None:
    import numpy as np
    from ..check.digest import LogitsDigest
    from ..engine.settings import new_context
    path = existing(options.tokens)
    tokens = read_tokens(path)
    with load(options, load_model) as model:
        bad = np.flatnonzero((tokens < 0) | (tokens >= model.n_vocab))
        if len(bad):
            raise UserError(f"{path}: token {bad[0]} is {tokens[bad[0]]}, must be 0 to {model.n_vocab - 1}")
        n_ctx = options.n_ctx or len(tokens)
        if len(tokens) > n_ctx:
            raise UserError(f"-c: {len(tokens)} tokens do not fit into a context of {n_ctx}")
        digest = LogitsDigest()
        with new_context(model, settings_of(options), n_ctx, 1, sys.stderr) as context, replacing(options.output) as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": (len(tokens), model.n_vocab)}
            np.lib.format.write_array_header_1_0(file, header)
            for start in range(0, len(tokens), options.n_batch):
                rows = np.ascontiguousarray(context.decode(tokens[start:start + options.n_batch], logits="all"), dtype="<f4")
                file.write(rows)
                digest.update(rows)
    print(f"digest: {digest.hexdigest()}")


def read_tokens(path: Path):
    """int [n] of a .npy file, n >= 1."""
    import numpy as np
    try:
        tokens = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UserError(f"{path}: not an array file of numpy: {error}") from None
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
        found = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, np.ndarray) else "an archive"
        raise UserError(f"{path}: token ids must be a one-dimensional array of integers, at least one, got {found}")
    return tokens
