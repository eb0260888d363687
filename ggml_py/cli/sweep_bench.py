"""ggml-py sweep-bench: how speed falls as the context grows."""
import sys

from .. import __version__
from .loading import devices_of, load, placement_of, settings_of, typed
from .options import one_model, random_tokens
from .values import at_least, one_of


def options(p) -> None:
    one_model(p, "the sweep ends here; 8192 by default, or what the model was trained for if that is less", n_ubatch=512)
    p.add_argument("-n", "--n-gen", type=at_least(1), metavar="N",
                   help="tokens generated in a row; a quarter of -ub by default, the tokens of a prompt")
    random_tokens(p)
    p.add_argument("-o", "--output-format", type=one_of("md", "jsonl"), default="md", metavar="md|jsonl",
                   help="a table, or a line of JSON for each row of it")


def run(options, load_model) -> None:
    from ..kernels.threads import get_num_threads
    from ..measure.sweep import print_sweep, sweep
    with load(options, load_model) as model:
        settings = settings_of(options, n_ctx=options.n_ctx or min(8192, model.n_ctx_train))
        placement = placement_of(options, devices_of(options))
        about = dict(version=__version__, model=options.hf or options.model, device="/".join(model.backends),
                     device_name=model.backend.name,
                     n_kv_max=settings.n_ctx, n_batch=settings.n_batch, n_ubatch=settings.n_ubatch, type_k=settings.type_k,
                     type_v=settings.type_v, flash_attn=options.flash_attn, no_fuse=",".join(settings.no_fuse),
                     graphs=int(settings.graphs), kv_write=settings.kv_write, placement=typed(placement),
                     n_threads=get_num_threads(), seed=options.seed)
        print("sweep-bench:", ", ".join(f"{name} = {value}" for name, value in about.items()), file=sys.stderr)
        rows = sweep(model, settings, options.n_gen or max(1, settings.n_ubatch // 4), options.seed, options.warm_up, sys.stderr)
        print_sweep(rows, about, sys.stdout, options.output_format)
