"""Groups of options that commands share: a name, a meaning and a default, wherever it appears. What is parsed has the names of
the Python parameters.

several: lists, for commands that measure all combinations; such an option may be given again, and is None where it is not given.
"""
from pathlib import Path

from ..base.defaults import CHAT_DATE, DRAFT_MAX, MARGIN, MODEL, N_BATCH, N_UBATCH, TEXT
from ..base.placement import ExpertsOnHost, Override
from ..files.writing import check_file
from .parser import Parser
from .values import (all_or_at_least_one, at_least, day, device, devices, flash_attention, layers, listed, number, numbers,
                     offload, one_of, output, overrides, pass_names, proportions, sha256, split_mode)

CACHE_TYPES = "f32", "f16", "q8_0"
WHATEVER = "changes the speed, never a bit"


def add(p: Parser, *names: str, type, default=None, several: bool = False, help: str, metavar: str | None = None,
        dest: str) -> None:
    """An option of one value or, if several, of a list."""
    if several:
        p.add_argument(*names, dest=dest, type=type, action="extend", metavar=metavar or "LIST",
                       help=help if default is None else f"{help}; {default} by default")
    else:
        p.add_argument(*names, dest=dest, type=type, default=default, metavar=metavar, help=help)


def model(p: Parser, several: bool = False) -> None:
    help = "a GGUF file, or a name that pull knows: smollm2"
    add(p, "-m", "--model", dest="model", type=listed(str) if several else str, default=MODEL, several=several,
        metavar="MODEL[,MODEL]" if several else "MODEL", help=help)
    add(p, "-hf", "-hfr", "--hf-repo", dest="hf", type=listed(str) if several else str, several=several,
        metavar="REPO[:QUANT][,REPO]" if several else "REPO[:QUANT]",
        help="a model of the hub in the place of -m, fetched where it is missing (docs/hub.md)")
    hub(p)


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


def cache_types(p: Parser, several: bool = False) -> None:
    parse = one_of(*CACHE_TYPES)
    for name in "k", "v":
        add(p, f"-ct{name}", f"--cache-type-{name}", dest=f"type_{name}", type=listed(parse) if several else parse,
            default="f16", several=several, metavar="LIST" if several else "TYPE",
            help=f"type of {name.upper()} in the KV cache: {', '.join(CACHE_TYPES)}")


def batches(p: Parser, several: bool = False, n_ubatch: int = N_UBATCH) -> None:
    parse, metavar = (numbers(1), "LIST") if several else (at_least(1), "N")
    add(p, "-b", "--batch-size", dest="n_batch", type=parse, default=N_BATCH, several=several, metavar=metavar,
        help="tokens of a logical batch")
    add(p, "-ub", "--ubatch-size", dest="n_ubatch", type=parse, default=n_ubatch, several=several, metavar=metavar,
        help="tokens computed at a time, at most -b; changes speed and memory, never a bit")


def threads(p: Parser, several: bool = False) -> None:
    parse, metavar = (numbers(1), "LIST") if several else (at_least(1), "N")
    add(p, "-t", "--threads", dest="n_threads", type=parse, several=several, metavar=metavar,
        help=f"CPU threads, all by default; {WHATEVER}")


def attention(p: Parser) -> None:
    p.add_argument("-fa", "--flash-attn", dest="flash_attn", type=flash_attention, default=1, metavar="1|on|auto",
                   help="attention is always the fused op")


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
                   help=f"graph passes left out, none by default (docs/graphs.md; an unknown name lists them); {WHATEVER}")
    p.add_argument("--no-graphs", dest="graphs", action="store_false",
                   help=f"launch every kernel by itself, never from a CUDA graph; {WHATEVER}")
    p.add_argument("--kv-write", dest="kv_write", type=one_of("set_rows", "cpy"), default="set_rows", metavar="set_rows|cpy",
                   help=f"cells of the KV cache by number or by address; {WHATEVER}")
    p.add_argument("--verbose", action="store_true",
                   help="describe model, memory plan, CUDA graphs, copies and compiled kernels on stderr")


def placement(p: Parser) -> None:
    """What lies on which device. The names are those of `base.placement.PlacementOptions`, and llama.cpp's options."""
    p.add_argument("-ngl", "--gpu-layers", "--n-gpu-layers", dest="n_gpu_layers", type=layers, metavar="N|all",
                   help=f"the last N layers lie on the devices of -dev, the others on the CPU; the output is one; {WHATEVER}")
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
    p.add_argument("--hot-experts", dest="hot_experts", type=lambda text: at_least(0)(text) << 20, default=0, metavar="MiB",
                   help="memory of each GPU for copies of the experts on the CPU that are asked for most; none by default; "
                        f"{WHATEVER}")
    p.add_argument("-ot", "--override-tensor", dest="overrides", action="extend", metavar="REGEX=DEVICE[,REGEX=DEVICE]",
                   type=lambda text: [Override(*pair) for pair in overrides(text)],
                   help="weights in whose names the pattern is found lie on the device; the first pattern that is found decides, "
                        f"before -ngl; {WHATEVER}")
    p.add_argument("--offload", dest="offload", action="extend", type=offload, metavar="NAME=N[,NAME=never]",
                   help="from N tokens on, a micro-batch brings the weights of an op that lie on the CPU to a GPU; by "
                        "default, all ops do where each matrix has rows enough (docs/placement.md; an unknown name lists "
                        f"them); {WHATEVER}")
    p.add_argument("-nopo", "--no-op-offload", dest="offload", action="append_const", const=("all", None),
                   help="--offload all=never")


def context_size(p: Parser, help: str, default: int | None = None, least: int = 1) -> None:
    p.add_argument("-c", "--ctx-size", dest="n_ctx", type=at_least(least), default=default, metavar="N", help=help)


def one_model(p: Parser, context: str, n_ubatch: int = N_UBATCH) -> None:
    """What a command needs that runs one model. context: help of -c."""
    model(p)
    context_size(p, context)
    batches(p, n_ubatch=n_ubatch)
    cache_types(p)
    execution(p)
    p.add_argument("--no-mmap", dest="mapped", action="store_false",
                   help="weights are read from the file, each at a time, not taken from a memory map")
    p.add_argument("--numa", dest="numa", type=one_of("distribute", "isolate", "numactl"), metavar="distribute|isolate|numactl",
                   help="hosts whose memory is in several nodes: spread over all, threads pinned to CPUs of all; or threads "
                        f"are pinned to one node; or all is as numactl has it; {WHATEVER}")
    p.add_argument("-tb", "--threads-batch", dest="n_threads_batch", type=at_least(1), metavar="N",
                   help=f"CPU threads for micro-batches of more than one token, as -t says by default; {WHATEVER}")
    p.add_argument("--fit", dest="fit", type=one_of("on", "off"), default="on", metavar="on|off",
                   help="where the model does not fit into the free memory of its devices, and no option says what lies where, "
                        f"experts and then layers lie on the CPU, and stderr tells which; on by default; {WHATEVER}")
    p.add_argument("-fitt", "--fit-target", dest="fit_target", type=at_least(0), default=MARGIN >> 20, metavar="MiB",
                   help="that --fit leaves free on each device; 1024 by default")


def text(p: Parser) -> None:
    p.add_argument("-f", "--file", dest="text", type=Path, default=TEXT, metavar="FILE", help="a UTF-8 text")


def chunks(p: Parser, default: int = -1) -> None:
    p.add_argument("--chunks", dest="n_chunks", type=all_or_at_least_one, default=default, metavar="N",
                   help="windows at most; -1: all")


def sampling(p: Parser) -> None:
    p.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    p.add_argument("--date", type=day, default=CHAT_DATE, metavar="YYYY-MM-DD|today",
                   help="what a chat template is told that asks for the date")
    p.add_argument("--temp", dest="temperature", type=number(0, 1e6), default=0.0, metavar="T",
                   help="0: always the likeliest token")
    p.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="of the draws; the same seed is the same text")
    p.add_argument("--top-k", type=at_least(0), default=40, metavar="N", help="0: off")
    p.add_argument("--top-p", type=number(0, 1), default=0.95, metavar="P", help="1: off")
    p.add_argument("--min-p", type=number(0, 1), default=0.05, metavar="P", help="0: off")


def drafts(p: Parser) -> None:
    p.add_argument("--draft-source", dest="draft_source", type=one_of("ngram", "model", "mtp"), default=None,
                   metavar="ngram|model|mtp",
                   help="guess tokens and check several in a step: what followed the last tokens before, what the model of -md "
                        f"holds for likeliest, or what the model's own block for it (NextN, MTP) does; {WHATEVER}")
    p.add_argument("-md", "--model-draft", dest="model_draft", default=None, metavar="MODEL",
                   help="a GGUF file of the same vocabulary; --draft-source model by default")
    p.add_argument("--draft-max", dest="draft_max", type=at_least(1), default=DRAFT_MAX, metavar="N",
                   help="guesses of a step at most")
    p.add_argument("--draft-p-min", dest="draft_p_min", type=number(0, 1), default=0.0, metavar="P",
                   help="a draft of a model or its block ends before a token of a probability below P")


def report(p: Parser) -> None:
    p.add_argument("--report", type=output(check_file), metavar="FILE.html",
                   help="the results with plots as a page for a browser, which needs nothing else")


def random_tokens(p: Parser) -> None:
    """Of commands that measure speed."""
    p.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="of the random tokens")
    p.add_argument("--no-warmup", dest="warm_up", action="store_false",
                   help="count the first runs as well, which compile and load kernels and capture graphs")
