"""The options of a perplexity by workers on many machines (`measure.corpus`), for the commands that have them."""
import os
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

from ..base.errors import UserError
from ..files.writing import check_file
from .ids import encoded
from .loading import checked_threads, load, model_path
from .parser import Parser
from .values import at_least, output

NAMES = "--ray", "--ray-workers", "--ray-log"


def options(p: Parser) -> None:
    p.add_argument("--ray", metavar="ADDRESS|local",
                   help="windows are computed by workers of this Ray cluster (auto: the one that runs here), or of one that is "
                        "started on this machine; the result is that of one machine. -m, -dev and the like are of each worker")
    p.add_argument("--ray-workers", dest="n_workers", type=at_least(1), metavar="N",
                   help="each has a model of its own, -t threads and the GPUs of -dev; as many as there is room for by default")
    p.add_argument("--ray-log", type=output(check_file), metavar="FILE",
                   help="what each window gave, as it comes; a run that was interrupted goes on where this file ends. "
                        "windows-HASH.jsonl by default, a name for this model, text and settings")


def computed(options, content: str | list[int], settings):
    """(perplexity, digests, `made_by_all` of the workers, the tokens, whether windows begin with a BOS), by the workers of --ray.
    content: of `ids.text_or_tokens`."""
    from ..check.attestation import made_by_all
    from ..files.gguf import GGUFFile
    from ..measure.corpus import Cluster, corpus_perplexity
    from ..tokenizer import Tokenizer
    path, n_workers = model_path(options.model), options.n_workers or 0
    if options.n_threads is None and options.ray == "local":
        options.n_threads = max(1, len(os.sched_getaffinity(0)) // max(n_workers, 1))
    if Path(options.model).exists():
        options.model = str(path.resolve())  # workers may be in another folder
    n_gpus = None if "auto" in (options.device or ["auto"]) else sum(name.startswith("cuda") for name in options.device)
    cluster = Cluster(options.ray, n_workers, checked_threads(options.n_threads or 1), n_gpus)
    with closing(GGUFFile.open(path)) as file:
        tokenizer = Tokenizer(file.metadata)
        tokens = encoded(content, options, tokenizer, tokenizer.n_vocab)
        ppl, digests, makers = corpus_perplexity(partial(load, options, None), file, tokens, settings, cluster, options.ray_log,
                                                 sys.stdout, sys.stderr)
        return ppl, digests, made_by_all(makers), tokens, bool(tokenizer.add_bos)


def refuse_without(options) -> None:
    for name, value in (("--ray-workers", options.n_workers), ("--ray-log", options.ray_log)):
        if value is not None:
            raise UserError(f"{name}: is of --ray, which is not given")
