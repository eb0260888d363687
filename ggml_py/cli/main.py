"""The command line: a file for each command, which declares its options and runs; what goes wrong is one line.

Exit codes: 0; 1 when `verify` finds different bits, whatever happens after that; 2 with one line on stderr for what the user can
mend; 130 after Ctrl-C (__main__.py); 141 when the reader of stdout is gone. Anything else is a bug and shows its traceback, with
exit code 3 (__main__.py).

Imports of weight happen inside the commands, so that mistakes and --help are answered at once.
"""
import re
import sys
from contextlib import contextmanager
from importlib import import_module

from ..base.errors import ParameterError, UserError, printable
from ..base.progress import compilation_notice
from .parser import Parser
from .streams import VERBOSE, Unwritten, check_stdout, guarded_streams, quieted

COMMANDS = {  # each a module, with - for _, that has options(parser) and run(options, load_model)
    "run": "continue a prompt, answer it, or chat (llama-cli)",
    "perplexity": "perplexity of a text, KL divergence to a base file, scores of tasks (llama-perplexity)",
    "bench": "speed of prompts and of generation (llama-bench)",
    "sweep-bench": "speed behind a growing context (llama-sweep-bench)",
    "quantize": "a model with other types of weights (llama-quantize)",
    "imatrix": "how much each column of a model's matrices counts on a text, for quantize (llama-imatrix)",
    "info": "metadata, tensors by type, memory needed",
    "pull": "fetch a model of a hub, or by a name of its own, and print its path",
    "logits": "logits of token ids, float32 [n, n_vocab]",
    "verify": "the same logits by every setting that must not matter, or a second time what an attestation says",
    "attest": "an attestation of a perplexity, of tasks, or with -p of a generation, which verify --attestation confirms",
}


def parse(args: list[str]):
    """The options of the command that is named first, and as `module` the command's. Only its module is imported."""
    parser = Parser(prog="ggml-py", description="GGUF models with the same bits on every run, batch size and device.",
                    epilog="In brackets: the tools of llama.cpp whose options a command takes, or refuses with the reason "
                           "(docs/llama-cpp-users.md).")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    parsers = {name: commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")
               for name, help in COMMANDS.items()}
    if args and args[0] not in COMMANDS and not args[0].startswith("-"):
        parser.error(f"{args[0]!r} is not a command, allowed: {', '.join(COMMANDS)}")
    if not args or args[0] not in COMMANDS:
        parser.parse(args)  # ends in help or in an error: a command comes first
    module = import_module(f".{args[0].replace('-', '_')}", __package__)
    module.options(parsers[args[0]])
    options = parsers[args[0]].parse(args[1:])
    options.command, options.module, options.args = args[0], module, args[1:]
    options.verbose = getattr(options, "verbose", False) or getattr(options, "verbosity", 0) >= VERBOSE
    return options


def worded(error: UserError, option_of: dict[str, str]) -> str:
    """An error's message with options in the place of the parameters that it names."""
    if not isinstance(error, ParameterError):
        return str(error)
    message = re.sub(r"\b[a-z]+_[a-z_]+\b", lambda word: option_of.get(word[0], word[0]), error.message)
    return f"{option_of.get(error.parameter, error.parameter)}: {message}{error.names}"


def fail(message: str) -> int:
    print("ggml-py: error:", printable(" ".join(message.split())), file=getattr(sys.stderr, "loud", sys.stderr))
    return 2


@contextmanager
def behind(code: int):
    """What goes wrong behind a mismatch, code 1, is said, and does not hide it behind exit code 2, or 141."""
    try:
        yield
    except (UserError, Unwritten) as error:
        if not code:
            raise
        fail(str(error))


def execute(argv=None, load_model=None) -> int:
    """Run one command; see __main__.main."""
    option_of: dict[str, str] = {}
    with guarded_streams():
        try:
            check_stdout()
            options = parse(sys.argv[1:] if argv is None else list(argv))
            option_of = options.option_of
            with quieted(getattr(options, "verbosity", None)):
                if getattr(options, "n_ctx", None) == 0:
                    from .loading import trained_context
                    options.n_ctx = trained_context(options)
                with compilation_notice(sys.stderr):
                    code = options.module.run(options, load_model) or 0
            if options.verbose:
                from ..kernels.disk_cache import compiled
                print(compiled.report(), file=sys.stderr)
            with behind(code):
                sys.stdout.flush()
            return code
        except Unwritten as error:
            return 141 if error.reader_is_gone else fail(str(error))
        except UserError as error:
            return fail(worded(error, option_of))
        except MemoryError as error:
            return fail(f"not enough memory{f': {error}' * bool(str(error))}")
        except OSError as error:
            if error.filename is None:
                raise
            return fail(f"{error.filename}: {error.strerror}")
