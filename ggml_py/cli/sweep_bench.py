"""ggml-py sweep-bench: how speed falls as the context grows."""
import sys

from .. import __version__
from .loading import devices_of, load, placement_of, settings_of, typed
from .options import one_model, random_tokens, report
from .values import at_least, one_of


def options(p) -> None:
    one_model(p, "the sweep ends here; 8192 by default, or what the model was trained for if that is less", n_ubatch=512)
    p.add_argument("-n", "--n-gen", "--predict", "--n-predict", dest="n_gen", type=at_least(1), metavar="N",
                   help="tokens generated in a row; a quarter of -ub by default, the tokens of a prompt")
    random_tokens(p)
    report(p)
    p.add_argument("-o", "--output-format", dest="output_format", type=one_of("md", "jsonl"), default="md", metavar="md|jsonl",
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
        printed = print_sweep(rows, about, sys.stdout, options.output_format)
        if options.report:
            report_sweep(options, model, printed, about)


def report_sweep(options, model, rows, about: dict) -> None:
    from ..check.attestation import environment_of
    from .report import Chart, Table, write_report
    first, last = rows[0], rows[-1]
    kept = ", ".join(f"{what} {100 * end / begin:.0f} %" for what, end, begin in (
        ("prompts", last.speed_pp, first.speed_pp), ("generation", last.speed_tg, first.speed_tg)))
    verdict = (f"{first.speed_pp:,.1f} tokens/s of prompts and {first.speed_tg:,.1f} of generation in an empty cache; behind "
               f"{last.n_kv:,} tokens {last.speed_pp:,.1f} and {last.speed_tg:,.1f} ({kept})")
    charts = [Chart(title, [(row.n_kv, getattr(row, name)) for row in rows], "tokens in the cache", "tokens/s", text)
              for title, name, text in (("Prompts, tokens/s", "speed_pp", f"{first.pp} tokens decoded as one prompt"),
                                        ("Generation, tokens/s", "speed_tg", f"{first.tg} tokens generated one by one"))]
    columns = "tokens in the cache", "prompt, s", "tokens/s", "of the first", "generation, s", "tokens/s", "of the first"
    table = Table("Rows", columns,
                  [(f"{row.n_kv:,}", f"{row.t_pp:.3f}", f"{row.speed_pp:,.2f}", f"{100 * row.speed_pp / first.speed_pp:.0f} %",
                    f"{row.t_tg:.3f}", f"{row.speed_tg:,.2f}", f"{100 * row.speed_tg / first.speed_tg:.0f} %") for row in rows],
                  right=frozenset(range(7)))
    elsewhere = "version", "device", "device_name"
    shown = {name: str(value) for name, value in about.items() if name not in elsewhere and value != ""}
    write_report(options.report, options, f"Speed over depth: {model.file.path.name}", verdict, None, [*charts, table],
                 environment_of(model.backends.values()), **shown)
