"""`ggml-py bench`: how fast prompts and generation are, in the manner of llama-bench.

A test is a prompt of n_prompt random tokens, then n_gen greedy steps from a random token, behind n_depth tokens that are in the
cache already. It runs WARM_UPS times untimed, so that kernels are compiled and loaded and graphs captured, then n_repetitions
times; before each, the cache is cut back to n_depth positions, untimed. A prompt is decoded in logical batches of n_batch tokens,
and only its last token has logits; of every generated token the id comes to the host. The clock stops when the last of these is
in the host's memory, so everything is computed.
"""
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .. import __version__
from ..backends import open_backend
from ..base.defaults import N_BATCH, N_UBATCH
from ..base.errors import ParameterError, UserError
from ..base.progress import Progress
from ..engine.settings import Settings, new_context
from ..kernels.threads import set_num_threads
from .bandwidth import copy_GB_s, weight_bytes_per_token
from .statistics import mean_and_deviation

DEFAULTS = dict(n_batch=N_BATCH, n_ubatch=N_UBATCH, type_k="f16", type_v="f16", no_fuse="", graphs=1, kv_write="set_rows",
                placement="")


@dataclass(frozen=True)
class Test:
    n_prompt: int
    n_gen: int
    n_depth: int = 0

    @property
    def n_ctx(self) -> int:
        return self.n_depth + self.n_prompt + self.n_gen

    @property
    def name(self) -> str:
        """As llama-bench names it: pp512, tg128, pp512+tg128, tg128 @ d4096."""
        parts = [f"{kind}{n}" for kind, n in (("pp", self.n_prompt), ("tg", self.n_gen)) if n]
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")


@dataclass(frozen=True)
class Config:
    """What a test runs on and with. device: or several that share the model, with / between. no_fuse: names of graph passes left
    out, with commas between. placement: what lies on which, as options."""
    model: str
    device: str
    n_threads: int
    n_batch: int
    n_ubatch: int
    type_k: str
    type_v: str
    no_fuse: str
    graphs: int               # 1: steps are replayed from CUDA graphs
    kv_write: str
    placement: str


@dataclass(frozen=True)
class Result:
    """One test. t/s are tokens of prompt and generation together over the time of a repetition; avg and stddev: arithmetic mean
    and sample standard deviation over the repetitions (0 of one)."""
    version: str
    device: str
    device_name: str
    n_threads: int            # of the CPU
    model_filename: str
    model_type: str
    model_size: int           # bytes of the tensors in the file
    model_n_params: int
    n_batch: int
    n_ubatch: int             # at most n_batch
    type_k: str
    type_v: str
    flash_attn: int           # 1: attention is one fused op here
    no_fuse: str
    graphs: int
    kv_write: str
    placement: str
    seed: int
    n_prompt: int
    n_gen: int
    n_depth: int
    test_time: str            # when the test began, UTC
    avg_ns: float
    stddev_ns: float
    avg_ts: float
    stddev_ts: float
    copy_GB_s: float          # of the device's memory, read plus write
    bytes_per_token: float | None  # weights, K and V that a generated token reads, the mean over n_gen; None behind a prompt
    memory_share: float | None     # bytes_per_token * avg_ts / copy_GB_s
    samples_ns: list
    samples_ts: list

    @property
    def test(self) -> str:
        return Test(self.n_prompt, self.n_gen, self.n_depth).name


def tests_of(n_prompt: list[int], n_gen: list[int], n_pg: list[tuple[int, int]], n_depth: list[int]) -> list[Test]:
    """For each depth: the prompts, the generations, the pairs (prompt, generation). Those without a token are left out;
    ParameterError if none is left."""
    parts = [*((n, 0) for n in n_prompt), *((0, n) for n in n_gen), *n_pg]
    tests = [Test(*part, depth) for depth in n_depth for part in parts if any(part)]
    if not tests:
        raise ParameterError("n_prompt", "no test is left, as n_gen and n_pg are 0 too")
    return list(dict.fromkeys(tests))


def configs_of(models, devices, n_threads, n_batch=(), n_ubatch=(), type_k=(), type_v=(),  # noqa: PLR0913 (settings)
               no_fuse: str = "", graphs: int = 1, kv_write: str = "set_rows", placement: str = "") -> list[Config]:
    """All combinations of these lists, those of one model on one device side by side; the default for an empty one.
    A micro-batch is at most a batch."""
    others = (values or [DEFAULTS[name]]
              for name, values in dict(n_batch=n_batch, n_ubatch=n_ubatch, type_k=type_k, type_v=type_v).items())
    combinations = itertools.product(models, devices, n_threads, *others)
    return list(dict.fromkeys(Config(m, d, t, b, min(ub, b), k, v, no_fuse, graphs, kv_write, placement)
                              for m, d, t, b, ub, k, v in combinations))


def unusual(configs: list[Config]) -> list[str]:
    """Names of the fields that differ from the default or from config to config; the threads also where a CPU computes."""
    names = [name for name, default in DEFAULTS.items() if {getattr(config, name) for config in configs} != {default}]
    threads = len({config.n_threads for config in configs}) > 1 or any(config.device == "cpu" for config in configs)
    return ["n_threads", *names] if threads else names


def random_tokens(model, n: int, seed: int) -> np.ndarray:
    """int32 [n]: uniform over the vocabulary, the same for the same seed; the first is the BOS where the vocabulary wants one."""
    tokens = np.random.default_rng(seed).integers(0, model.n_vocab, n, dtype=np.int32)
    if model.tokenizer.add_bos:
        tokens[:1] = model.tokenizer.bos_id
    return tokens


def decode_prompt(context, tokens: np.ndarray, n_batch: int) -> None:
    """Decode in batches; returns when the logits of the last token, the only ones, are there."""
    for first in range(0, len(tokens), n_batch):
        context.decode(tokens[first:first + n_batch], logits="last" if first + n_batch >= len(tokens) else "none")


def decode_one_by_one(context, tokens: np.ndarray) -> None:
    """len(tokens) greedy steps, of which the first decodes tokens[0] and each other what is likeliest after the one before;
    returns when the last id is on the host."""
    if len(tokens):
        deque(context.greedy(int(tokens[0]), len(tokens)), maxlen=0)


WARM_UPS = 2  # the first loads kernels, the second captures graphs


def run_test(context, test: Test, tokens: np.ndarray, n_batch: int, n_repetitions: int, warm_up: bool) -> list[int]:
    """ns of each repetition.   tokens: int32 [test.n_ctx]"""
    depth, prompt, generated = np.split(tokens, np.cumsum([test.n_depth, test.n_prompt]))
    decode_prompt(context, depth, n_batch)
    context.checkpoint()

    def repetition() -> int:
        context.seq_rm(0, test.n_depth)
        start = time.perf_counter_ns()
        decode_prompt(context, prompt, n_batch)
        decode_one_by_one(context, generated)
        return time.perf_counter_ns() - start

    for _ in range(WARM_UPS if warm_up else 0):
        repetition()
    return [repetition() for _ in range(n_repetitions)]


def model_type(file) -> str:
    """Architecture, number of parameters, and the type that most of them have: llama 8.03B Q4_K."""
    n_values: Counter[str] = Counter()
    for tensor in file.tensors.values():
        n_values[tensor.type.name] += math.prod(tensor.shape)
    (most, _), = n_values.most_common(1)
    return f"{file.get('general.architecture', 'str')} {in_short(n_values.total())} {most}"


def in_short(n: int) -> str:
    """8030261248 -> 8.03B"""
    unit, name = (1e9, "B") if n >= 1e9 else (1e6, "M")
    return f"{n / unit:.2f}{name}"


@lru_cache(None)
def copy_GB_s_of(device: str) -> float:
    """Measured before a model takes the memory. device: of several the first."""
    with closing(open_backend(device.split("/")[0])) as backend:
        return copy_GB_s(backend)


@dataclass(frozen=True)
class Manner:
    """How every test is run. seed: of the random tokens. n_threads_batch: of `Model.new_context`. delay: seconds before a
    test."""
    n_repetitions: int
    seed: int = 0
    warm_up: bool = True
    verbose: bool = False
    n_threads_batch: int | None = None
    delay: int = 0


def measure(model, config: Config, test: Test, manner: Manner, log, placement: str) -> Result:
    """placement: what lies on which device, as options."""
    seed = manner.seed
    began, tokens = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), random_tokens(model, test.n_ctx, seed)
    settings = Settings(n_batch=config.n_batch, n_ubatch=config.n_ubatch, type_k=config.type_k, type_v=config.type_v,
                        no_fuse=tuple(filter(None, config.no_fuse.split(","))), graphs=bool(config.graphs),
                        kv_write=config.kv_write, verbose=manner.verbose, n_threads_batch=manner.n_threads_batch)
    set_num_threads(config.n_threads)
    with new_context(model, settings, test.n_ctx, 1, log) as context:
        samples_ns = run_test(context, test, tokens, config.n_batch, manner.n_repetitions, manner.warm_up)
        n_bytes = None
        if not test.n_prompt:
            n_keys = test.n_depth + (test.n_gen + 1) / 2  # the mean over the generated tokens, each of which sees itself as well
            n_bytes = weight_bytes_per_token(model.file) + context.memory.bytes_of_token(n_keys)
    samples_ts = [1e9 * (test.n_prompt + test.n_gen) / ns for ns in samples_ns]
    (avg_ns, stddev_ns), (avg_ts, stddev_ts) = map(mean_and_deviation, (samples_ns, samples_ts))
    tensors, copy = model.file.tensors.values(), copy_GB_s_of(config.device)
    return Result(
        version=__version__, device=config.device, device_name=model.backend.name, n_threads=config.n_threads,
        model_filename=config.model, model_type=model_type(model.file), model_size=sum(t.n_bytes for t in tensors),
        model_n_params=sum(math.prod(t.shape) for t in tensors),
        n_batch=config.n_batch, n_ubatch=config.n_ubatch, type_k=config.type_k, type_v=config.type_v, flash_attn=1,
        no_fuse=config.no_fuse, graphs=config.graphs, kv_write=config.kv_write,
        placement=placement, seed=seed,
        n_prompt=test.n_prompt, n_gen=test.n_gen, n_depth=test.n_depth, test_time=began,
        avg_ns=avg_ns, stddev_ns=stddev_ns, avg_ts=avg_ts, stddev_ts=stddev_ts, copy_GB_s=copy, bytes_per_token=n_bytes,
        memory_share=n_bytes and n_bytes * avg_ts / (1e9 * copy), samples_ns=samples_ns, samples_ts=samples_ts)


def bench(configs: list[Config], tests: list[Test], load_model, writer, log, manner: Manner,
          placed: Callable[[Any], str]) -> None:
    """Runs every test with every config and hands the results to a writer (`result_formats`). load_model: of (path, device).
    placed: what a model chose about its placement when it was loaded, as options."""
    with Progress(log, "bench", len(configs) * len(tests), beside=writer.out) as progress, writer:
        for (path, device), group in itertools.groupby(configs, key=lambda config: (config.model, config.device)):
            copy_GB_s_of(device)
            with load_model(path, device) as model:
                for test in tests:
                    if test.n_ctx > model.n_ctx_train:
                        raise UserError(f"bench: {test.name} takes a context of {test.n_ctx} tokens, {model.file.path} was "
                                        f"trained on at most {model.n_ctx_train}")
                for config, test in itertools.product(group, tests):
                    time.sleep(manner.delay)
                    writer.write(measure(model, config, test, manner, log, placed(model) or config.placement))
                    progress.advance()
