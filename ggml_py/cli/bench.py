"""ggml-py bench: how fast prompts and generation are."""
import sys

from .loading import checked_threads, model_paths, placement_of, reader, typed
from .options import add, batches, cache_types, execution, model, random_tokens
from .values import at_least, numbers, one_of, prompt_and_generation


def options(p) -> None:
    model(p, several=True)
    add(p, "-p", "--n-prompt", dest="n_prompt", type=numbers(0), default=512, several=True,
        help="tokens of a prompt: 7,512 or 1-4 or 0-100+50 or 128-1024*2")
    add(p, "-n", "--n-gen", dest="n_gen", type=numbers(0), default=128, several=True, help="tokens generated one by one")
    p.add_argument("-pg", dest="n_pg", type=prompt_and_generation, action="append", metavar="P,N",
                   help="a prompt and generation behind it, timed together")
    add(p, "-d", "--n-depth", dest="n_depth", type=numbers(0), default=0, several=True,
        help="tokens in the cache before, not timed")
    p.add_argument("-r", "--repetitions", type=at_least(1), default=5, metavar="N", help="of each test")
    batches(p, several=True)
    cache_types(p, several=True)
    execution(p, several=True)
    random_tokens(p)
    p.add_argument("--delay", type=at_least(0), default=0, metavar="S", help="seconds of rest before each test")
    formats = dict(type=one_of("md", "csv", "json", "jsonl", "sql"), metavar="md|csv|json|jsonl|sql")
    p.add_argument("-o", "--output", default="md", help="format of the results", **formats)
    p.add_argument("-oe", "--output-err", dest="output_err", help="format in which stderr has them too", **formats)


def run(options, load_model) -> None:
    from ..backends import device_of
    from ..kernels.threads import get_num_threads
    from ..measure.benchmark import Manner, bench, configs_of, tests_of, unusual
    from ..measure.result_formats import WRITERS, Both
    tests = tests_of(options.n_prompt or [512], options.n_gen or [128], options.n_pg or [], options.n_depth or [0])
    models = [*map(str, model_paths(options))]
    groups = [tuple(map(device_of, names.split("/"))) for names in options.device or ["auto"]]
    placements = {"/".join(devices): placement_of(options, devices) for devices in groups}
    n_threads = [checked_threads(n) for n in options.n_threads or [get_num_threads()]]
    configs = configs_of(models, list(placements), n_threads, options.n_batch, options.n_ubatch, options.type_k, options.type_v,
                         ",".join(options.no_fuse), int(options.graphs), options.kv_write,
                         next(map(typed, placements.values())))
    columns = unusual(configs)
    writer, *others = (WRITERS[name](stream, columns) for name, stream in ((options.output, sys.stdout),
                                                                           (options.output_err, sys.stderr)) if name)
    read = reader(options, load_model, max(test.n_ctx for test in tests))
    load = lambda path, devices: read(path, devices.split("/")[0], placements[devices])
    manner = Manner(options.repetitions, options.seed, options.warm_up, options.verbose, options.n_threads_batch, options.delay)
    bench(configs, tests, load, Both(writer, *others) if others else writer, sys.stderr, manner,
          lambda model: typed(model.fitted))
