"""The command line: each command is one function of its options.

Exit codes: 0; 1 when `verify` finds different bits, whatever happens after that; 2 with one line on stderr for what the user can mend; 130 after
Ctrl-C (__main__.py); 141 when the reader of stdout is gone.
Anything else is a bug and shows its traceback.

Imports of weight happen inside the commands, so that mistakes and --help are answered at once.
"""
import argparse
import os
import re
import sys
from contextlib import contextmanager
from pathlib import Path

from . import __version__
from .defaults import N_BATCH, N_UBATCH
from .errors import UserError, printable
from .files import check_file, check_folder, write

CACHE_TYPES = ["f32", "f16", "q8_0"]
OF_A_PERPLEXITY, OF_A_GENERATION = ("-f", "-c", "--chunks"), ("-n", "--chat", "--temp", "--seed", "--top-k", "--top-p", "--min-p")  # of attest
CONFIRMING = "-m", "-f", "--devices", "--attestation", "--sample", "--json"  # of verify
DEMO_TEXT = Path(__file__).parent / "demo" / "prose.txt"
DEMO_MODEL = "smollm2"
NO_NODE = "no node differs where every node is waited for: the fault is in the order of work (a race, a missing barrier), or comes and goes"
VERBOSE = "describe model, memory plan, CUDA graphs, copies and compiled kernels on stderr"


# Parsing

class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that say something: not None, nor an empty list of names."""

    def _get_help_string(self, action):
        return action.help if action.default is None or action.default == () else super()._get_help_string(action)


class Given(argparse.Action):
    """Stores a value and notes that it was asked for: namespace.given, option as typed -> its first name."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, values)
        if option_string:
            namespace.given = {**namespace.given, option_string: self.option_strings[0]}


class GivenFlag(Given):
    def __init__(self, option_strings, dest, **more):
        super().__init__(option_strings, dest, nargs=0, default=False, **more)

    def __call__(self, parser, namespace, values, option_string=None):
        super().__call__(parser, namespace, True, option_string)


class Parser(argparse.ArgumentParser):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.register("action", None, Given)
        self.register("action", "store_true", GivenFlag)

    def error(self, message):
        raise UserError(f"{message} (see {self.prog} --help)")


def at_least(least: int, most: int = 2**63 - 1):
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}" if value < least else f"must be at most {most}, got {value}")
        return value
    return parse


def output(check):
    """A path of what will be written, checked before anything is computed. check: of `files`."""
    def parse(text: str) -> Path:
        path = Path(text)
        try:
            check(path)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return path
    return parse


def all_or_at_least_one(text: str) -> int:
    return -1 if text == "-1" else at_least(1)(text)


def number(low: float, high: float):
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be {low:g} to {high:g}, got {text}")
        return value
    return parse


def device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"must be auto, cpu, cuda or cuda:N, got {text!r}")
    return "cuda:0" if text == "cuda" else text


def pass_names(text: str) -> tuple[str, ...]:
    from .passes import switched_off
    names = tuple(text.split(","))
    try:
        switched_off(names)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("no_fuse: ")) from None
    return names


def numbers(least: int):
    def parse(text: str) -> list[int]:
        from .ranges import parse_numbers
        try:
            return parse_numbers(text, least)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return parse


def listed(parse_one):
    def parse(text: str) -> list:
        return [parse_one(part) for part in text.split(",")]
    return parse


def cache_type(text: str) -> str:
    if text not in CACHE_TYPES:
        raise argparse.ArgumentTypeError(f"must be {', '.join(CACHE_TYPES)}, got {text!r}")
    return text


def prompt_and_generation(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"must be PROMPT,GENERATED, got {text!r}")
    return at_least(1)(parts[0]), at_least(1)(parts[1])


def flash_attention(text: str) -> int:
    if text in ("0", "off"):
        raise argparse.ArgumentTypeError("0 is not possible: attention is one fused op on every device, whose arithmetic is part of the promise of equal bits")
    if text not in ("1", "on", "auto"):
        raise argparse.ArgumentTypeError(f"must be 1 or auto, got {text!r}")
    return 1


def build_parser() -> Parser:
    options = dict(allow_abbrev=False, formatter_class=HelpFormatter)
    parser = Parser(prog="ggml-py", description="GGUF models with the same bits on every run, batch size and device.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"ggml-py {__version__}")
    commands = parser.add_subparsers(dest="name", metavar="COMMAND", required=True)

    def command(name: str, function, help: str):
        sub = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".", **options)
        sub.set_defaults(command=function, given={})
        return sub

    def add_cache_types(sub):
        sub.add_argument("-ctk", "--cache-type-k", choices=CACHE_TYPES, default="f16", help="type of K in the KV cache")
        sub.add_argument("-ctv", "--cache-type-v", choices=CACHE_TYPES, default="f16", help="type of V in the KV cache")

    def add_no_fuse(sub):
        sub.add_argument("--no-fuse", type=pass_names, default=(), metavar="NAME[,NAME]|all",
                         help="graph passes left out, none by default (docs/graphs.md; an unknown name lists them); changes the speed, never a bit")

    def add_graphs(sub):
        sub.add_argument("--no-graphs", action="store_true", help="launch every kernel by itself, never from a CUDA graph; changes the speed, never a bit")
        sub.add_argument("--kv-write", choices=["set_rows", "cpy"], default="set_rows",
                         help="cells of the KV cache by number or by address; changes the speed, never a bit")

    def add_flash_attention(sub):
        sub.add_argument("-fa", "--flash-attn", type=flash_attention, default=1, help="1 or auto: attention is always the fused op")

    def add_tokens_and_warm_up(sub):
        sub.add_argument("--seed", type=at_least(0), default=0, help="of the random tokens")
        sub.add_argument("--no-warmup", action="store_true", help="count the first runs as well, which compile and load kernels and capture graphs")

    def add_sampling(sub):
        sub.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
        sub.add_argument("--temp", type=number(0, 1e6), default=0.0, help="0: always the likeliest token")
        sub.add_argument("--seed", type=at_least(0), default=0, help="of the draws; the same seed is the same text")
        sub.add_argument("--top-k", type=at_least(0), default=40, help="0: off")
        sub.add_argument("--top-p", type=number(0, 1), default=0.95, help="1: off")
        sub.add_argument("--min-p", type=number(0, 1), default=0.05, help="0: off")

    def add_model(sub, n_ctx: int | None, n_ctx_help: str, model: str | None = None, n_ubatch: int = N_UBATCH):
        sub.add_argument("-m", "--model", default=model, required=model is None, help="a GGUF file, or smollm2")
        sub.add_argument("-c", "--ctx-size", type=at_least(1), default=n_ctx, help=n_ctx_help)
        sub.add_argument("-b", "--batch-size", type=at_least(1), default=N_BATCH, help="tokens of a logical batch")
        sub.add_argument("-ub", "--ubatch-size", type=at_least(1), default=n_ubatch,
                         help="tokens computed at once; changes speed and memory, never a bit")
        add_cache_types(sub)
        sub.add_argument("--device", type=device, default="auto", help="auto, cpu, cuda or cuda:N")
        sub.add_argument("-t", "--threads", type=at_least(1), default=None, help="CPU threads; all by default")
        add_no_fuse(sub)
        add_graphs(sub)
        sub.add_argument("--verbose", action="store_true", help=VERBOSE)

    sub = command("perplexity", perplexity_command, "perplexity of a text, or KL divergence to a base file")
    add_model(sub, None, "tokens of a window; 512, or as in the base file that is compared with", DEMO_MODEL)
    sub.add_argument("-f", "--file", type=Path, default=DEMO_TEXT, help="a UTF-8 text")
    sub.add_argument("--chunks", type=all_or_at_least_one, default=-1, help="windows at most; -1: all")
    sub.add_argument("--ppl-stride", type=at_least(0), default=0, help="distance of overlapping windows; 0: windows side by side")
    sub.add_argument("--kl-divergence-base", "--save-all-logits", type=Path, metavar="FILE",
                     help="the base file, written unless --kl-divergence is given")
    sub.add_argument("--kl-divergence", action="store_true", help="compare with the base file, on its tokens")

    sub = command("pull", pull_command, "fetch a model by name and print its path")
    sub.add_argument("model", metavar="NAME", help="smollm2")

    sub = command("logits", logits_command, "logits of token ids, float32 [n, n_vocab]")
    add_model(sub, None, "context; the number of tokens by default")
    sub.add_argument("--tokens", type=Path, required=True, metavar="FILE.npy", help="token ids, one-dimensional")
    sub.add_argument("-o", "--output", type=output(check_file), required=True, metavar="OUT.npy", help="where the logits go")

    sub = command("info", info_command, "metadata, tensors by type, memory needed")
    sub.add_argument("model", metavar="MODEL", help="a GGUF file, or smollm2")
    sub.add_argument("-c", "--ctx-size", type=at_least(1), default=4096, help="positions that the KV cache is reckoned for")
    add_cache_types(sub)

    sub = command("run", run_command, "continue a prompt, or answer it with --chat")
    add_model(sub, None, "context; prompt and new tokens by default")
    sub.add_argument("-p", "--prompt", required=True, help="the text to continue")
    sub.add_argument("-n", "--n-predict", type=all_or_at_least_one, default=128, help="new tokens at most; -1: until the model ends or -c is full")
    add_sampling(sub)

    sub = command("verify", verify_command, "the same logits by every setting that must not matter, or a second time what an attestation says")
    sub.add_argument("-m", "--model", default=DEMO_MODEL, help="a GGUF file, or smollm2")
    sub.add_argument("-f", "--file", type=Path, default=DEMO_TEXT, help="a UTF-8 text")
    sub.add_argument("-c", "--ctx-size", type=at_least(2), default=512, help="tokens of a window")
    sub.add_argument("--chunks", type=at_least(1), default=4, help="windows at most")
    add_cache_types(sub)
    sub.add_argument("--axes", type=listed(str), metavar="NAME[,NAME]",
                     help="of rerun, ubatch, pieces, sequences, threads, launch, kv_write, fusion, noise and device, all by default; one must run here")
    sub.add_argument("--reruns", type=at_least(1), default=2, help="of the default setting")
    sub.add_argument("--devices", type=listed(device), metavar="LIST", help="of cpu, cuda and cuda:N; all that are present by default")
    sub.add_argument("--json", type=output(check_file), metavar="FILE", help="the results, or what was confirmed, for machines")
    sub.add_argument("--dump", type=output(check_folder), metavar="DIR",
                     help="where inputs and outputs of the first node that differs go, with a script that runs it")
    sub.add_argument("--attestation", type=Path, metavar="FILE", help=f"compute what it attests, and nothing else; takes {', '.join(CONFIRMING)}, one device")
    sub.add_argument("--sample", type=at_least(1), metavar="K", help="of an attestation only so many windows, drawn at random")
    sub.add_argument("--no-bisect", action="store_true", help="do not look for the first node that differs")

    sub = command("attest", attest_command, "an attestation of a perplexity, or with -p of a generation, which verify --attestation confirms")
    add_model(sub, None, "tokens of a window; 512 by default", DEMO_MODEL)
    sub.add_argument("-o", "--output", type=output(check_file), required=True, metavar="FILE", help="where the attestation goes")
    sub.add_argument("-f", "--file", type=Path, default=DEMO_TEXT, help="a UTF-8 text")
    sub.add_argument("--chunks", type=all_or_at_least_one, default=-1, help="windows at most; -1: all")
    sub.add_argument("-p", "--prompt", help="the text to continue, by the options that follow; without one the perplexity of -f by windows of -c is attested")
    sub.add_argument("-n", "--n-predict", type=at_least(1), default=128, help="new tokens at most")
    add_sampling(sub)

    sub = command("bench", bench_command, "speed of prompts and of generation, in the manner of llama-bench")
    several = dict(action="extend", default=None)
    sub.add_argument("-m", "--model", type=listed(str), required=True, metavar="MODEL[,MODEL]", help="GGUF files, or smollm2", **several)
    sub.add_argument("-p", "--n-prompt", type=numbers(0), metavar="LIST", help="tokens of a prompt: 7,512 or 1-4 or 0-100+50 or 128-1024*2; 512 by default",
                     **several)
    sub.add_argument("-n", "--n-gen", type=numbers(0), metavar="LIST", help="tokens generated one by one; 128 by default", **several)
    sub.add_argument("-pg", type=prompt_and_generation, action="append", metavar="P,N", help="a prompt and generation behind it, timed together")
    sub.add_argument("-d", "--n-depth", type=numbers(0), metavar="LIST", help="tokens in the cache before, not timed; 0 by default", **several)
    sub.add_argument("-r", "--repetitions", type=at_least(1), default=5, help="of each test")
    sub.add_argument("-b", "--batch-size", type=numbers(1), metavar="LIST", help=f"tokens of a logical batch; {N_BATCH} by default", **several)
    sub.add_argument("-ub", "--ubatch-size", type=numbers(1), metavar="LIST", help=f"tokens computed at once, at most -b; {N_UBATCH} by default", **several)
    sub.add_argument("-ctk", "--cache-type-k", type=listed(cache_type), metavar="LIST", help="types of K in the KV cache; f16 by default", **several)
    sub.add_argument("-ctv", "--cache-type-v", type=listed(cache_type), metavar="LIST", help="types of V in the KV cache; f16 by default", **several)
    add_flash_attention(sub)
    sub.add_argument("--device", type=listed(device), metavar="LIST", help="of auto, cpu, cuda and cuda:N; auto by default", **several)
    sub.add_argument("-t", "--threads", type=numbers(1), metavar="LIST", help="CPU threads; all by default", **several)
    add_no_fuse(sub)
    add_graphs(sub)
    add_tokens_and_warm_up(sub)
    sub.add_argument("-o", "--output", choices=["md", "csv", "json", "jsonl", "sql"], default="md", help="format of the results")
    sub.add_argument("--verbose", action="store_true", help=VERBOSE)

    sub = command("sweep-bench", sweep_command, "speed behind a growing context, in the manner of ik_llama.cpp's sweep-bench")
    add_model(sub, None, "the sweep ends here; 8192 by default, or what the model was trained for if that is less", n_ubatch=512)
    sub.add_argument("-n", "--n-gen", type=at_least(1), default=None, help="tokens generated in a row; a quarter of -ub by default, the tokens of a prompt")
    add_flash_attention(sub)
    add_tokens_and_warm_up(sub)
    sub.add_argument("-o", "--output-format", choices=["md", "jsonl"], default="md", help="a table, or a line of JSON for each row of it")
    return parser


# What the commands share

def refuse(options, names, why: str) -> None:
    """What does not apply is not dropped in silence. names: first names of options."""
    for given, name in options.given.items():
        if name in names:
            raise UserError(f"{given}: {why}")


def existing(path: Path) -> Path:
    if not path.exists():
        raise UserError(f"{path}: no such file")
    if path.is_dir():
        raise UserError(f"{path}: is a folder, expected a file")
    return path


@contextmanager
def load(options, load_model):
    """The model of -m on the device of --device, with the threads of -t; --verbose tells at the end what its device copied."""
    from .pull import resolve
    path = existing(resolve(options.model, sys.stderr))
    if options.threads is not None:
        import numba
        numba.set_num_threads(checked_threads(options.threads))
    with load_on(path, options.device, load_model) as model:
        yield model
        if options.verbose and (report := model.report()):
            print(report, file=sys.stderr)


def load_on(path: Path, device: str, load_model):
    if load_model is None:
        from .model import Model
        load_model = Model.load
    return load_model(path, device=device)


def checked_threads(n: int) -> int:
    import numba
    if n > numba.config.NUMBA_NUM_THREADS:
        raise UserError(f"-t: this machine has {numba.config.NUMBA_NUM_THREADS} CPU threads, got {n}")
    return n


def settings_of(options, **more):
    """What the options of add_model say about contexts."""
    from .perplexity import Settings
    return Settings(n_batch=options.batch_size, n_ubatch=options.ubatch_size, type_k=options.cache_type_k, type_v=options.cache_type_v,
                    no_fuse=options.no_fuse, graphs=not options.no_graphs, kv_write=options.kv_write, verbose=options.verbose, **more)


def sampling_of(options):
    from .sampling import Sampling
    return Sampling(options.temp, options.top_k, options.top_p, options.min_p, options.seed)


def encoded_prompt(options, tokenizer):
    """The ids of -p, at least one."""
    from .chat import encode_chat
    prompt = encode_chat(tokenizer, [{"role": "user", "content": options.prompt}]) if options.chat else tokenizer.encode(options.prompt)
    if not len(prompt):
        raise UserError("-p: the prompt has no tokens")
    return prompt


# The commands

def perplexity_command(options, load_model):
    import time
    from . import kl_divergence
    from .perplexity import perplexity, read_text, strided_perplexity
    base_path = options.kl_divergence_base
    if options.kl_divergence and base_path is None:
        raise UserError("--kl-divergence: needs --kl-divergence-base FILE to compare with")
    if options.ppl_stride and base_path is not None:
        raise UserError("--ppl-stride: base files hold windows side by side, not strided ones")
    base = kl_divergence.BaseFile(existing(base_path)) if options.kl_divergence else None
    if base and options.ctx_size not in (None, base.n_ctx):
        raise UserError(f"-c: {base_path} was made with -c {base.n_ctx}, got {options.ctx_size}")
    text = None if base else read_text(existing(options.file))
    settings = settings_of(options, n_ctx=base.n_ctx if base else options.ctx_size or 512, n_chunks=options.chunks, stride=options.ppl_stride)
    with load(options, load_model) as model:
        if base:
            kl_divergence.compare(model, base, settings, sys.stdout, sys.stderr)
            return
        print("perplexity: tokenizing the input ..", file=sys.stderr)
        start = time.perf_counter()
        tokens = model.tokenizer.encode(text)
        print(f"perplexity: tokenization took {1e3 * (time.perf_counter() - start):g} ms", file=sys.stderr)
        if settings.stride:
            strided_perplexity(model, tokens, settings, sys.stdout, sys.stderr)
            return
        writer = None
        if base_path is not None:
            print(f"perplexity: saving all logits to {base_path}", file=sys.stderr)
            writer = lambda windows: kl_divergence.base_writer(base_path, model.n_vocab, windows)
        perplexity(model, tokens, settings, sys.stdout, sys.stderr, writer)


def pull_command(options, load_model):
    from .pull import pull
    print(pull(options.model, sys.stderr))


def logits_command(options, load_model):
    import numpy as np
    from .files import replacing
    from .perplexity import LogitsDigest, new_context
    path = existing(options.tokens)
    try:
        tokens = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UserError(f"{path}: not an array file of numpy: {error}") from None
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
        found = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, np.ndarray) else "an archive"
        raise UserError(f"{path}: token ids must be a one-dimensional array of integers, at least one, got {found}")
    with load(options, load_model) as model:
        bad = np.flatnonzero((tokens < 0) | (tokens >= model.n_vocab))
        if len(bad):
            raise UserError(f"{path}: token {bad[0]} is {tokens[bad[0]]}, must be 0 to {model.n_vocab - 1}")
        n_ctx = options.ctx_size or len(tokens)
        if len(tokens) > n_ctx:
            raise UserError(f"-c: {len(tokens)} tokens do not fit into a context of {n_ctx}")
        digest = LogitsDigest()
        with new_context(model, settings_of(options), n_ctx, 1, sys.stderr) as context, replacing(options.output) as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (len(tokens), model.n_vocab)})
            for start in range(0, len(tokens), options.batch_size):
                rows = np.ascontiguousarray(context.decode(tokens[start:start + options.batch_size], logits="all"), dtype="<f4")
                file.write(rows)
                digest.update(rows)
    print(f"digest: {digest.hexdigest()}")


def info_command(options, load_model):
    from .gguf_file import GGUFFile
    from .info import print_info
    from .pull import resolve
    with GGUFFile.open(existing(resolve(options.model, sys.stderr))) as file:
        print_info(file, options.ctx_size, options.cache_type_k, options.cache_type_v, sys.stdout)


def run_command(options, load_model):
    from .perplexity import new_context
    from .sampling import generate
    from .tokenizer import Detokenizer
    sampling = sampling_of(options)
    with load(options, load_model) as model:
        tokenizer, prompt = model.tokenizer, encoded_prompt(options, model.tokenizer)
        n_ctx = options.ctx_size or (model.n_ctx_train if options.n_predict < 0 else len(prompt) + options.n_predict)
        room = n_ctx - len(prompt)
        if room < max(1, options.n_predict):
            raise UserError(f"-c: a prompt of {len(prompt)} tokens and {max(1, options.n_predict)} new ones do not fit into a context of {n_ctx}")
        n_new, text = room if options.n_predict < 0 else options.n_predict, Detokenizer(tokenizer)
        with new_context(model, settings_of(options), n_ctx, 1, sys.stderr) as context:
            for token in generate(context, prompt, n_new, sampling, tokenizer.is_end_of_generation):
                print(text.feed(token), end="", flush=True)
        print(text.finish())


def attest_command(options, load_model):
    import json
    from .attestation import attest_generation, attest_perplexity, files_sha256
    from .perplexity import read_text
    settings = settings_of(options, n_ctx=options.ctx_size or 512, n_chunks=options.chunks)
    generates = options.prompt is not None
    refuse(options, OF_A_PERPLEXITY if generates else OF_A_GENERATION,
           "is of a perplexity, and -p asks for a generation" if generates else "is of a generation, which -p asks for; without it a perplexity is attested")
    text = None if generates else read_text(existing(options.file))
    with load(options, load_model) as model:
        if generates:
            document = attest_generation(model, encoded_prompt(options, model.tokenizer), options.n_predict, sampling_of(options), settings, sys.stderr)
            print(document["result"]["text"])
        else:
            text_sha256, = files_sha256([options.file])
            document = attest_perplexity(model, text_sha256, model.tokenizer.encode(text), settings, sys.stdout, sys.stderr)
    write(options.output, json.dumps(document, indent=1).encode() + b"\n")
    print(f"root: {document['merkle_root']}")


def confirm_command(options, load_model) -> int:
    import json
    from . import NUMERICS_VERSION
    from .attestation import NotConfirmed, confirm, files_sha256, read_attestation, sampled
    from .backends import device_of
    from .perplexity import read_text
    from .pull import resolve
    refuse(options, {*options.given.values()} - {*CONFIRMING},
           f"does not apply to an --attestation, which says what to compute; allowed: {', '.join(CONFIRMING)}")
    if options.devices and len(options.devices) > 1:
        raise UserError(f"--devices: an attestation is computed on one device, got {', '.join(options.devices)}")
    document, text = read_attestation(existing(options.attestation)), None
    if document["kind"] == "generation":
        refuse(options, ("-f",), f"{options.attestation} is of a generation, whose prompt is in it")
    else:
        text, (found,) = read_text(existing(options.file)), files_sha256([options.file])
        if found != document["text"]:
            raise UserError(f"{options.file}: another text than attested: sha256 is {found}, must be {document['text']}")
    path = existing(resolve(options.model, sys.stderr))
    with load_on(path, device_of((options.devices or ["auto"])[0]), load_model) as model:
        sample = sampled(document, options.sample)
        try:
            said, code = confirm(document, model, text, sample, sys.stderr), 0
        except NotConfirmed as error:
            said, code = str(error), 1
        print(said, flush=True)
        report = {"numerics": NUMERICS_VERSION, "model": str(path), "device": model.device, "device_name": model.backend.name,
                  "attestation": str(options.attestation), "kind": document["kind"], "sha256": document["sha256"], "n_windows": len(document["windows"]),
                  "windows": [i + 1 for i in sample], "confirmed": not code, "message": said}
    if options.json:
        with behind(code):
            write(options.json, json.dumps(report, indent=1).encode() + b"\n")
    return code


def verify_command(options, load_model) -> int:
    if options.attestation is not None:
        return confirm_command(options, load_model)
    refuse(options, ("--sample",), "is of windows of an --attestation, none is given")
    refuse(options, ("--dump",) * options.no_bisect, "saves the first node that differs, which --no-bisect does not look for")
    refuse(options, ("--reruns",) * ("rerun" not in (options.axes or ["rerun"])), "is of the axis rerun, which is not among --axes")
    from .axes import AXES, check_some_run, settings_of
    from .backends import cuda, device_of, present_devices
    from .perplexity import check_context, read_text, with_bos
    from .pull import resolve
    from .verify import LiveTable, Verification, first_windows
    text, path = read_text(existing(options.file)), existing(resolve(options.model, sys.stderr))
    devices = list(dict.fromkeys(map(device_of, options.devices))) if options.devices else present_devices()
    with load_on(path, devices[0], load_model) as model:
        check_context(model, options.ctx_size)
        windows = with_bos(model, first_windows(model.tokenizer.encode(text), options.ctx_size, options.chunks))
        axes = options.axes or list(AXES)
        settings = settings_of(axes, devices, windows.shape, options.reruns, cuda.unavailable(0) or "no GPU among --devices",
                               options.cache_type_k, options.cache_type_v)
        check_some_run(axes, settings)
        difference, table = None, LiveTable(sys.stdout, windows)
        with Verification(lambda device: load_on(path, device, load_model), windows, settings, table) as verification:
            verification.models[devices[0]] = model
            with table:
                verification.run()
            print(verification.verdict(), flush=True)
            code, mismatch = 0 if verification.confirmed else 1, verification.first_mismatch()
            if mismatch and not options.no_bisect:
                print("verify: looking for the first node that differs ..", file=sys.stderr)
                difference = verification.bisect(mismatch)
                print(difference or NO_NODE, flush=True)
        if difference and options.dump:
            with behind(code):
                difference.save(options.dump)
    if options.json:
        with behind(code):
            write(options.json, verification.report(str(path), difference and difference.as_dict()).encode())
    return code


def bench_command(options, load_model):
    import numba
    from .backends import device_of
    from .benchmark import bench, configs_of, tests_of, unusual
    from .pull import resolve
    from .result_formats import WRITERS
    tests = tests_of(options.n_prompt or [512], options.n_gen or [128], options.pg or [], options.n_depth or [0])
    models = [str(existing(resolve(name, sys.stderr))) for name in options.model]
    devices = [device_of(name) for name in options.device or ["auto"]]
    n_threads = [checked_threads(n) for n in options.threads or [numba.get_num_threads()]]
    configs = configs_of(models, devices, n_threads, options.batch_size, options.ubatch_size, options.cache_type_k, options.cache_type_v,
                         ",".join(options.no_fuse), int(not options.no_graphs), options.kv_write)
    writer = WRITERS[options.output](sys.stdout, unusual(configs))
    bench(configs, tests, lambda path, device: load_on(path, device, load_model), writer, sys.stderr, options.repetitions, options.seed, not options.no_warmup,
          options.verbose)


def sweep_command(options, load_model):
    import numba
    from .sweep import print_sweep, sweep
    with load(options, load_model) as model:
        settings = settings_of(options, n_ctx=options.ctx_size or min(8192, model.n_ctx_train))
        about = dict(version=__version__, model=options.model, device=model.device, device_name=model.backend.name, n_kv_max=settings.n_ctx,
                     n_batch=settings.n_batch, n_ubatch=settings.n_ubatch, type_k=settings.type_k, type_v=settings.type_v, flash_attn=options.flash_attn,
                     no_fuse=",".join(settings.no_fuse), graphs=int(settings.graphs), kv_write=settings.kv_write, n_threads=numba.get_num_threads(),
                     seed=options.seed)
        print("sweep-bench:", ", ".join(f"{name} = {value}" for name, value in about.items()), file=sys.stderr)
        rows = sweep(model, settings, options.n_gen or max(1, settings.n_ubatch // 4), options.seed, not options.no_warmup, sys.stderr)
        print_sweep(rows, about, sys.stdout, options.output_format)


# Errors

def fail(message: str) -> int:
    print("ggml-py: error:", printable(" ".join(message.split())), file=sys.stderr)
    return 2


@contextmanager
def behind(code: int):
    """What goes wrong behind a mismatch, code 1, is said, and does not hide it behind exit code 2."""
    try:
        yield
    except UserError as error:
        if not code:
            raise
        fail(str(error))


def execute(argv=None, load_model=None) -> int:
    """Run one command; see __main__.main."""
    if (sys.stdout.encoding or "utf-8").lower() != "utf-8":
        sys.stdout.reconfigure(errors="replace")  # a terminal without ± or Δ shows a question mark
    try:
        options = build_parser().parse_args(argv)
        code = options.command(options, load_model) or 0
        sys.stdout.flush()
        if getattr(options, "verbose", False):
            from .kernels.compile import compiled
            print(f"{compiled.n_kernels} kernels compiled in {compiled.seconds:.1f} s", file=sys.stderr)
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at exit
        return 141
    except UserError as error:
        return fail(str(error))
    except OSError as error:
        if error.filename is None:
            raise
        return fail(f"{error.filename}: {error.strerror}")
