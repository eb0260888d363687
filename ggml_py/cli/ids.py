"""Token ids from files, and results as JSON: what --tokens and --json mean wherever they are.

Ids are JSON, a list or an object with a list named tokens, such as --json of run and of logits writes, or a file of numpy's with
a one-dimensional array of integers.
"""
import io
import json
import math
from pathlib import Path

from ..base.errors import UserError, printable
from ..files.writing import check_file, write
from .loading import existing
from .parser import Parser, refuse
from .values import output

OF_A_PROMPT = "-p", "-f", "-e", "--chat", "-cnv", "-sys", "-sysf", "--display-prompt"
IDS = "token ids: a JSON list, or an object with a list named tokens, or a one-dimensional array of numpy's"


def tokens_option(p: Parser, help: str = "") -> None:
    p.add_argument("--tokens", type=Path, metavar="FILE", help=f"{help}{IDS}")


def prompt_tokens_option(p: Parser) -> None:
    p.add_argument("--prompt-tokens", type=Path, metavar="FILE", help=f"the prompt in the place of -p, as {IDS}")


def json_option(p: Parser, help: str) -> None:
    p.add_argument("--json", type=output(check_file), metavar="FILE", help=help)


def read_tokens(path: Path) -> list[int]:
    """At least one."""
    data = existing(path).read_bytes()
    return _of_numpy(path, data) if data.startswith((b"\x93NUMPY", b"PK")) else _of_json(path, data)


def _of_numpy(path: Path, data: bytes) -> list[int]:
    import numpy as np
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"{path}: not an array file of numpy: {error}") from None
    if not isinstance(array, np.ndarray) or array.ndim != 1 or not len(array) or array.dtype.kind not in "iu":
        found = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else "an archive"
        raise UserError(f"{path}: token ids must be a one-dimensional array of integers, at least one, got {found}")
    return array.tolist()


def _of_json(path: Path, data: bytes) -> list[int]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(printable(f"{path}: neither JSON nor an array file of numpy: {error}")) from None
    ids = value.get("tokens") if isinstance(value, dict) else value
    if not isinstance(ids, list) or not ids or not all(type(id) is int for id in ids):
        raise UserError(f"{path}: token ids must be a list of integers, at least one, or an object with one named tokens")
    return ids


def checked_tokens(ids: list[int], path: Path, n_vocab: int) -> list[int]:
    bad = next((i for i, id in enumerate(ids) if not 0 <= id < n_vocab), None)
    if bad is not None:
        raise UserError(f"{path}: token {bad} is {ids[bad]}, must be 0 to {n_vocab - 1}")
    return ids


def text_or_tokens(options) -> str | list[int]:
    """What -f or --tokens holds."""
    if options.tokens is None:
        from ..engine.windows import read_text
        return read_text(existing(options.text))
    refuse(options, ("-f",), "--tokens is given too, one is enough")
    return read_tokens(options.tokens)


def encoded(content: str | list[int], options, tokenizer, n_vocab: int) -> list[int]:
    """The ids of what `text_or_tokens` gave."""
    return tokenizer.encode(content) if isinstance(content, str) else checked_tokens(content, options.tokens, n_vocab)


def given_prompt(options) -> list[int] | None:
    """The ids of --prompt-tokens; None without it."""
    if options.prompt_tokens is None:
        return None
    refuse(options, OF_A_PROMPT, "--prompt-tokens is given too, whose ids are the prompt as it is")
    return read_tokens(options.prompt_tokens)


def finite(value: float) -> float | None:
    """JSON has no other numbers."""
    return value if math.isfinite(value) else None


def write_json(path: Path, model, **results) -> None:
    """What came out, behind what it is of."""
    from .. import NUMERICS_VERSION, __version__
    about = {"version": __version__, "numerics": NUMERICS_VERSION, "model": str(model.file.path), "device": model.device}
    write(path, json.dumps({**about, **results}).encode() + b"\n")
