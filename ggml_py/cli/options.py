"""Groups of options that commands share: a name, a meaning and a default, wherever it appears. What is parsed has the names of
the Python parameters.

several: lists, for commands that measure all combinations; such an option may be given again, and is None where it is not given.
"""
from functools import wraps
from pathlib import Path

from ..base.defaults import CHAT_DATE, DRAFT_MAX, MARGIN, MODEL, N_BATCH, N_UBATCH, TEXT
from ..base.placement import ExpertsOnHost, Override
from ..files.writing import check_file
from .parser import ListDevices, Parser
from .values import (all_or_at_least_one, at_least, day, device, devices, draft_kind, flash_attention, json_object, layers,
                     listed, logit_biases, number, numbers, offload, one_of, output, overrides, pass_names, proportions, sha256,
                     split_mode, switch)

CACHE_TYPES = "f32", "f16", "q8_0"
NO_BIT = "(which change the speed, never a bit)"


def section(title: str):
    """The options that a function declares stand under a title in --help."""
    def decorated(declare):
        @wraps(declare)
        def declare_there(p: Parser, *args, **settings) -> None:
            with p.section(title):
                declare(p, *args, **settings)
        return declare_there
    return decorated


def add(p: Parser, *names: str, type, default=None, several: bool = False, help: str, metavar: str | None = None,
        dest: str) -> None:
    """An option of one value or, if several, of a list."""
    if several:
        p.add_argument(*names, dest=dest, type=type, action="extend", metavar=metavar or "LIST",
                       help=help if default is None else f"{help}; {default} by default")
    else:
        p.add_argument(*names, dest=dest, type=type, default=default, metavar=metavar, help=help)


@section("model")
def model(p: Parser, several: bool = False) -> None:
    help = "a GGUF file, or a name that pull knows: smollm2"
    add(p, "-m", "--model", dest="model", type=listed(str) if several else str, default=MODEL, several=several,
        metavar="MODEL[,MODEL]" if several else "MODEL", help=help)
    add(p, "-hf", "-hfr", "--hf-repo", dest="hf", type=listed(str) if several else str, several=several,
        metavar="REPO[:QUANT][,REPO]" if several else "REPO[:QUANT]",
        help="a model of the hub in the place of -m, fetched where it is missing (docs/hub.md)")
    hub(p)


@section("model")
def hub(p: Parser) -> None:
    """Of a model of a hub, as `files.hub.HubModel` has them."""
    p.add_argument("-hff", "--hf-file", dest="hf_file", metavar="FILE",
                   help="this file of the repository, whatever QUANT says")
    p.add_argument("--revision", default="main", metavar="REVISION", help="a branch, a tag or a commit of the repository")
    p.add_argument("--sha256", type=listed(sha256), action="extend", metavar="SHA256[,SHA256]",
                   help="that the file must have, or each part of it")
    p.add_argument("--token", "-hft", "--hf-token", dest="token", metavar="TOKEN",
                   help="of the hub; by default that of HF_TOKEN or of `hf auth login`")
    p.add_argument("--offline", action="store_true", help="ask no hub, take what is here; HF_HUB_OFFLINE=1 says the same")


@section("context")
def cache_types(p: Parser, several: bool = False) -> None:
    parse = one_of(*CACHE_TYPES)
    for name in "k", "v":
        add(p, f"-ct{name}", f"--cache-type-{name}", dest=f"type_{name}", type=listed(parse) if several else parse,
            default="f16", several=several, metavar="LIST" if several else "TYPE",
            help=f"type of {name.upper()} in the KV cache: {', '.join(CACHE_TYPES)}")


@section("context")
def batches(p: Parser, several: bool = False, n_ubatch: int = N_UBATCH) -> None:
    parse, metavar = (numbers(1), "LIST") if several else (at_least(1), "N")
    add(p, "-b", "--batch-size", dest="n_batch", type=parse, default=N_BATCH, several=several, metavar=metavar,
        help="tokens of a logical batch")
    add(p, "-ub", "--ubatch-size", dest="n_ubatch", type=parse, default=n_ubatch, several=several, metavar=metavar,
        help="tokens computed at a time, at most -b; changes speed and memory, never a bit")


@section(f"devices and threads {NO_BIT}")
def threads(p: Parser, several: bool = False) -> None:
    parse, metavar = (numbers(1), "LIST") if several else (at_least(1), "N")
    add(p, "-t", "--threads", dest="n_threads", type=parse, several=several, metavar=metavar,
        help="CPU threads, all by default")


@section(f"devices and threads {NO_BIT}")
def attention(p: Parser) -> None:
    p.add_argument("-fa", "--flash-attn", dest="flash_attn", type=flash_attention, default=1, metavar="1|on|auto",
                   help="attention is always the fused op")


@section("what stderr tells")
def telling(p: Parser) -> None:
    """What stderr tells."""
    p.add_argument("-v", "--verbose", "--log-verbose", dest="verbose", action="store_true",
                   help="describe model, memory plan, CUDA graphs, copies and compiled kernels on stderr")
    p.add_argument("-lv", "--verbosity", "--log-verbosity", dest="verbosity", type=at_least(0), default=3, metavar="N",
                   help="0, 1: errors alone on stderr; 2: and warnings; 3: what is being done; 4 and more: --verbose")
    p.add_argument("--list-devices", action=ListDevices, help="show the devices of this machine, and exit")


@section(f"loading {NO_BIT}")
def reading(p: Parser) -> None:
    """How weights come into memory, and where to where no option says it."""
    p.add_argument("-lm", "--load-mode", dest="load_mode", type=one_of("auto", "none", "mmap", "mlock", "mmap+mlock"),
                   default="auto",
                   metavar="auto|none|mmap|mlock|mmap+mlock",
                   help="weights are taken from a memory map of the file (mmap, auto), or each is read (none, mlock); mlock: the "
                        "system must not move them to disk")
    p.add_argument("--no-mmap", dest="load_mode", action="store_const", const="none", help="-lm none")
    p.add_argument("--mmap", dest="load_mode", action="store_const", const="mmap", help="-lm mmap")
    p.add_argument("--mlock", dest="locked", action="store_true", help="the system must not move weights on the CPU to disk")
    p.add_argument("--numa", dest="numa", type=one_of("distribute", "isolate", "numactl"), metavar="distribute|isolate|numactl",
                   help="hosts whose memory is in several nodes: spread over all, threads pinned to CPUs of all; or threads "
                        "are pinned to one node; or all is as numactl has it")
    p.add_argument("--fit", "-fit", dest="fit", type=one_of("on", "off"), default="on", metavar="on|off",
                   help="where the model does not fit into the free memory of its devices, and no option says what lies where, "
                        "experts and then layers lie on the CPU, and stderr tells which")
    p.add_argument("-fitt", "--fit-target", dest="fit_target", type=at_least(0), default=MARGIN >> 20, metavar="MiB",
                   help="that --fit leaves free on each device")


def seed(p: Parser, help: str = "taken, as other tools have it; nothing is drawn here") -> None:
    p.add_argument("--seed", "-s", dest="seed", type=at_least(0), default=0, metavar="N", help=help)


@section(f"devices and threads {NO_BIT}")
def execution(p: Parser, several: bool = False) -> None:
    """On what, and how: nothing of it changes a bit. several: runs on each of the devices by itself."""
    kinds = "auto, which is the first GPU if there is one, cpu, cpu:N, cuda or cuda:N; auto by default; several"
    if several:
        p.add_argument("--device", "-dev", dest="device", type=listed(devices), action="extend",
                       metavar="DEVICE[/DEVICE][,DEVICE]",
                       help=f"{kinds} with / between share the layers, with commas they are measured one by one")
    else:
        p.add_argument("--device", "-dev", dest="device", type=listed(device), metavar="DEVICE[,DEVICE]",
                       help=f"{kinds} share the layers")
    placement(p)
    threads(p, several)
    attention(p)
    p.add_argument("--no-fuse", dest="no_fuse", type=pass_names, default=(), metavar="NAME[,NAME]|all",
                   help="graph passes left out, none by default (docs/graphs.md; an unknown name lists them)")
    p.add_argument("--no-graphs", dest="graphs", action="store_false",
                   help="launch every kernel by itself, never from a CUDA graph")
    p.add_argument("--kv-write", dest="kv_write", type=one_of("set_rows", "cpy"), default="set_rows", metavar="set_rows|cpy",
                   help="cells of the KV cache by number or by address")
    p.add_argument("-tb", "--threads-batch", dest="n_threads_batch", type=at_least(1), metavar="N",
                   help="CPU threads for micro-batches of more than one token, as -t says by default")
    reading(p)
    telling(p)


@section(f"what lies where {NO_BIT}")
def placement(p: Parser) -> None:
    """What lies on which device. The names are those of `base.placement.PlacementOptions`, and llama.cpp's options."""
    p.add_argument("-ngl", "--gpu-layers", "--n-gpu-layers", dest="n_gpu_layers", type=layers, metavar="N|all",
                   help="the last N layers lie on the devices of -dev, the others on the CPU; the output is one")
    p.add_argument("-sm", "--split-mode", dest="split_mode", type=split_mode, default="layer", metavar="none|layer|column",
                   help="several devices: neighbouring layers on each; or each product shared by all; or all on that of -mg")
    p.add_argument("-ts", "--tensor-split", dest="tensor_split", type=proportions, default=(), metavar="X,Y[,Z]",
                   help="in which proportion they share the layers or products; equally by default")
    p.add_argument("-mg", "--main-gpu", dest="main_gpu", type=at_least(0), default=0, metavar="I",
                   help="number of the device among those of -dev, from 0, for -sm none")
    p.add_argument("-nkvo", "--no-kv-offload", dest="kv_offload", action="store_false",
                   help="caches and states of all layers lie on the CPU, and attention runs there")
    pattern = dict(dest="overrides", action="append")
    p.add_argument("-cmoe", "--cpu-moe", dest="overrides", action="append_const", const=ExpertsOnHost(),
                   help="the experts of all layers lie on the CPU; this and the next two are -ot at their place on the line")
    p.add_argument("-ncmoe", "--n-cpu-moe", type=lambda text: ExpertsOnHost(at_least(1)(text)), metavar="N", **pattern,
                   help="those of the first N layers")
    p.add_argument("--ncmoe-last", type=lambda text: ExpertsOnHost(at_least(1)(text), last=True), metavar="N", **pattern,
                   help="those of the last N layers")
    p.add_argument("-ncffn", "--n-cpu-ffn", metavar="N", help="dense feed-forward weights of the first N layers lie on the CPU",
                   type=lambda text: Override(rf"blk\.({'|'.join(map(str, range(at_least(1)(text))))})\.ffn_(up|down|gate)\.",
                                              "cpu"), **pattern)
    p.add_argument("--hot-experts", dest="hot_experts", type=lambda text: at_least(0)(text) << 20, default=0, metavar="MiB",
                   help="memory of each GPU for copies of the experts on the CPU that are asked for most")
    p.add_argument("-ot", "--override-tensor", dest="overrides", action="extend", metavar="REGEX=DEVICE[,REGEX=DEVICE]",
                   type=lambda text: [Override(*pair) for pair in overrides(text)],
                   help="weights in whose names the pattern is found lie on the device; the first pattern that is found decides, "
                        "before -ngl")
    p.add_argument("--offload", dest="offload", action="extend", type=offload, metavar="NAME=N[,NAME=never]",
                   help="from N tokens on, a micro-batch brings the weights of an op that lie on the CPU to a GPU; by "
                        "default, all ops do where each matrix has rows enough (docs/placement.md; an unknown name lists "
                        "them)")
    p.add_argument("-nopo", "--no-op-offload", dest="offload", action="append_const", const=("all", None),
                   help="--offload all=never")


def context_size(p: Parser, help: str, default: int | None = None, least: int = 1) -> None:
    """0 stands for what the model was trained for."""
    p.add_argument("-c", "--ctx-size", dest="n_ctx", type=lambda text: 0 if text == "0" else at_least(least)(text),
                   default=default,
                   metavar="N", help=f"{help}; 0: what the model was trained for")


def one_model(p: Parser, context: str, n_ubatch: int = N_UBATCH) -> None:
    """What a command needs that runs one model. context: help of -c."""
    model(p)
    context_size(p, context)
    batches(p, n_ubatch=n_ubatch)
    cache_types(p)
    execution(p)


def text(p: Parser) -> None:
    p.add_argument("-f", "--file", dest="text", type=Path, default=TEXT, metavar="FILE", help="a UTF-8 text")


def chunks(p: Parser, default: int = -1) -> None:
    p.add_argument("--chunks", dest="n_chunks", type=all_or_at_least_one, default=default, metavar="N",
                   help="windows at most; -1: all")


@section("which token is chosen")
def sampling(p: Parser) -> None:
    p.add_argument("--chat", "-st", "--single-turn", dest="chat", action="store_true",
                   help="put the prompt into the model's chat template")
    p.add_argument("--date", type=day, default=CHAT_DATE, metavar="YYYY-MM-DD|today",
                   help="what a chat template is told that asks for the date")
    p.add_argument("--temp", "--temperature", dest="temperature", type=number(0, 1e6), default=0.0, metavar="T",
                   help="0: always the likeliest token")
    seed(p, "of the draws; the same seed is the same text")
    p.add_argument("--top-k", type=at_least(0), default=40, metavar="N", help="0: off")
    p.add_argument("--top-p", type=number(0, 1), default=0.95, metavar="P", help="1: off")
    p.add_argument("--min-p", type=number(0, 1), default=0.05, metavar="P", help="0: off")


@section("which token is chosen")
def further_sampling(p: Parser) -> None:
    """What changes logits before one is chosen. The names are those of `engine.sampling.Sampling`."""
    p.add_argument("--repeat-penalty", dest="repeat_penalty", type=number(1e-6, 1e6), default=1.0, metavar="X",
                   help="positive logits of tokens that were there are divided by it, others multiplied; 1: off")
    p.add_argument("--repeat-last-n", dest="repeat_last_n", type=at_least(-1), default=64, metavar="N",
                   help="the tokens that penalties look at; -1: all, 0: none")
    p.add_argument("--presence-penalty", dest="presence_penalty", type=number(-1e6, 1e6), default=0.0, metavar="X",
                   help="taken from logits of tokens that were there; 0: off")
    p.add_argument("--frequency-penalty", dest="frequency_penalty", type=number(-1e6, 1e6), default=0.0, metavar="X",
                   help="likewise, as often as they were there; 0: off")
    p.add_argument("-l", "--logit-bias", dest="logit_bias", type=logit_biases, action="append", default=[], metavar="ID(+/-)BIAS",
                   help="added to a token's logit: 15043+1, or 15043-inf, which forbids it; may be given again")
    p.add_argument("--ignore-eos", dest="ignore_eos", action="store_true", help="the model never ends its text")


def prompts(p: Parser) -> None:
    """Where the text comes from, and what is around it."""
    p.add_argument("-p", "--prompt", metavar="TEXT",
                   help="the text to continue, or the first message of a chat; without -p and -f "
                                                          "that of stdin, and on a terminal a chat")
    p.add_argument("-f", "--file", dest="text", type=Path, metavar="FILE", help="a UTF-8 text in the place of -p; -: stdin")
    p.add_argument("-e", "--escape", dest="escape", action="store_true",
                   help="\\n, \\t, \\x41 and the like in -p and -sys are read")
    p.add_argument("--no-escape", dest="escape", action="store_false", help="they are not, as by default")
    p.add_argument("--display-prompt", dest="echo", action="store_true", help="print the prompt before what continues it")
    p.add_argument("-r", "--reverse-prompt", dest="stop", action="append", default=[], metavar="TEXT",
                   help="a text that ends the answer, without it; may be given again")
    p.add_argument("--show-timings", dest="timings", action="store_true", default=True,
                   help="stderr tells the speed, as by default")
    p.add_argument("--no-show-timings", dest="timings", action="store_false", help="it does not")


@section("what the text may be")
def grammars(p: Parser) -> None:
    """What the text may be, as (a kind of `engine.grammar.Grammar`, its source or the file of it)."""
    def kind(name: str, read: type) -> dict:
        return dict(dest="grammar", type=lambda text: (name, read(text)))
    p.add_argument("-jf", "--json-schema-file", metavar="FILE", help="a file of it", **kind("json_schema", Path))
    p.add_argument("-j", "--json-schema", metavar="JSON", help="the text is JSON that fits the schema", **kind("json_schema",
                                                                                                               str))
    p.add_argument("--grammar-file", metavar="FILE", help="a file of it", **kind("of", Path))
    p.add_argument("--grammar", metavar="GBNF",
                   help="the text is one of the grammar's, whose first rule is root; or Lark's, where it "
                                                     "begins with %%llguidance", **kind("of", str))


@section("chats")
def chats(p: Parser) -> None:
    """A model's chat template, and conversations."""
    p.add_argument("-cnv", "--conversation", "-i", "--interactive", "-if", "--interactive-first", dest="conversation",
                   default=None,
                   action="store_true", help="a chat: each line of stdin is a message, and /help lists what else it may be")
    p.add_argument("-no-cnv", "--no-conversation", dest="conversation", action="store_false", help="no chat")
    p.add_argument("-sys", "--system-prompt", dest="system", metavar="TEXT", help="of a chat, before the first message")
    p.add_argument("-sysf", "--system-prompt-file", dest="system_file", type=Path, metavar="FILE", help="a UTF-8 text for -sys")
    p.add_argument("--chat-template", dest="template", metavar="SOURCE",
                   help="in Jinja, in the place of the model's; or the name of one of the model's named templates")
    p.add_argument("--chat-template-file", dest="template_file", type=Path, metavar="FILE", help="a file of it")
    p.add_argument("--chat-template-kwargs", dest="template_arguments", type=json_object, default={}, metavar="JSON",
                   help='what else the template knows, such as {"enable_thinking": false}')
    p.add_argument("-rea", "--reasoning", dest="reasoning", type=switch, metavar="on|off|auto",
                   help="the template's enable_thinking, true or false; auto: as it has it")
    p.add_argument("--reasoning-effort", dest="effort", metavar="LEVEL", help="the template's reasoning_effort, such as low")


@section(f"drafts {NO_BIT}")
def drafts(p: Parser) -> None:
    p.add_argument("--draft-source", "--spec-type", dest="draft_source", type=draft_kind, default=None,
                   metavar="ngram|model|mtp",
                   help="guess tokens and check several in a step: what followed the last tokens before, what the model of -md "
                        "holds for likeliest, or what the model's own block for it (NextN, MTP) does")
    p.add_argument("-md", "--model-draft", "--spec-draft-model", dest="model_draft", default=None, metavar="MODEL",
                   help="a GGUF file of the same vocabulary; --draft-source model by default")
    p.add_argument("--draft-max", "--draft", "--draft-n", "--spec-draft-n-max", dest="draft_max", type=at_least(1),
                   default=DRAFT_MAX, metavar="N",
                   help="guesses of a step at most")
    p.add_argument("--draft-p-min", "--spec-draft-p-min", dest="draft_p_min", type=number(0, 1), default=0.0, metavar="P",
                   help="a draft of a model or its block ends before a token of a probability below P")


def report(p: Parser) -> None:
    p.add_argument("--report", type=output(check_file), metavar="FILE.html",
                   help="the results with plots as a page for a browser, which needs nothing else")


def random_tokens(p: Parser) -> None:
    """Of commands that measure speed."""
    seed(p, "of the random tokens")
    p.add_argument("--no-warmup", dest="warm_up", action="store_false",
                   help="count the first runs as well, which compile and load kernels and capture graphs")
