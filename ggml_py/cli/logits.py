"""ggml-py logits: of token ids, into a file of numpy's, or the likeliest tokens as JSON."""
import sys
from contextlib import nullcontext
from pathlib import Path

from ..base.errors import UserError
from ..files.writing import check_file, replacing
from .ids import IDS, checked_tokens, finite, json_option, read_tokens, write_json
from .loading import load, settings_of
from .options import one_model, seed
from .parser import refuse
from .values import at_least, output


def options(p) -> None:
    one_model(p, "context; the number of tokens by default")
    seed(p)
    p.add_argument("--tokens", type=Path, required=True, metavar="FILE", help=IDS)
    p.add_argument("-o", "--output", type=output(check_file), metavar="OUT.npy", help="where the logits go")
    json_option(p, "where the digest goes, and of each position the likeliest tokens behind it")
    p.add_argument("--top", dest="n_top", type=at_least(0), default=10, metavar="N", help="so many of each position, for --json")


def run(options, load_model) -> None:
    import numpy as np
    from ..check.digest import LogitsDigest
    from ..engine.settings import new_context
    if options.output is None and options.json is None:
        raise UserError("-o: is missing, and so is --json")
    refuse(options, ("--top",) * (options.json is None), "is of --json, which is not given")
    ids = read_tokens(options.tokens)
    with load(options, load_model) as model:
        tokens = np.array(checked_tokens(ids, options.tokens, model.n_vocab), np.int32)
        n_ctx = options.n_ctx or len(tokens)
        if len(tokens) > n_ctx:
            raise UserError(f"-c: {len(tokens)} tokens do not fit into a context of {n_ctx}")
        digest, likeliest = LogitsDigest(), []
        with (new_context(model, settings_of(options), n_ctx, 1, sys.stderr) as context,
              replacing(options.output) if options.output else nullcontext() as file):
            if file:
                header = {"descr": "<f4", "fortran_order": False, "shape": (len(tokens), model.n_vocab)}
                np.lib.format.write_array_header_1_0(file, header)
            for start in range(0, len(tokens), options.n_batch):
                rows = np.ascontiguousarray(context.decode(tokens[start:start + options.n_batch], logits="all"), dtype="<f4")
                if file:
                    file.write(rows)
                digest.update(rows)
                if options.json:
                    likeliest += [top(row, options.n_top) for row in rows]
        if options.json:
            write_json(options.json, model, digest=digest.hexdigest(), n_vocab=model.n_vocab, tokens=ids, top=likeliest)
    print(f"digest: {digest.hexdigest()}")


def top(row, n: int) -> list[tuple[int, float | None]]:
    """(id, natural logarithm of its probability) of the n largest logits, of equal ones the lower id first. row: float32 [V]."""
    import numpy as np
    from ..base.likelihoods import log_sum_exp
    total, = log_sum_exp(row[None])
    row = row.astype(np.float64)
    return [(int(id), finite(float(row[id] - total))) for id in np.argsort(-row, kind="stable")[:n]]
