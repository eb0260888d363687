"""Attestations: JSON that says what a model gave, so that another machine can compute it again and compare (docs/attestation.schema.json).

Of a perplexity, a window's digest is that of its scored logits. Of a generation, a window is 32 new tokens, and its digest that of the logits that they were
chosen from, computed over the finished text, as by the promise it may be. The Merkle root stands for all windows; a sample of them can be confirmed alone.
An attestation is no signature: it says what to compute and what comes out, and anybody can try. Its own sha256 only tells of damage.
"""
import hashlib
import json
import platform
import random
import re
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from os.path import commonprefix
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np

from . import NUMERICS_VERSION, __version__
from .errors import UserError, printable
from .exact_math import exp, tree_sum
from .merkle import merkle_root
from .perplexity import LogitsDigest, Settings, decode_windows, negative_log_likelihood, new_context, perplexity, split_windows
from .sampling import Sampling, choose, generate

FORMAT, SCHEMA = "ggml-py attestation", 1
GENERATED = 32  # tokens of a window of a generation
SHA256 = r"[0-9a-f]{64}"
PACKAGES = "numpy", "numba", "llvmlite", "numba-cuda", "cuda-core", "cuda-bindings", "gguf", "tokenizers"


class Number(NamedTuple):
    """Of a type, from least to most."""
    type: type
    least: float
    most: float


COUNT, TOKEN, SHARE = Number(int, 1, 2**63 - 1), Number(int, 0, 2**31 - 1), Number(float, 0, 1)

# What an attestation holds: a type, a Number, "sha256"; [shape] is a list of at least one, [shape, ...] of any number; an object has the names that are given,
# or any: {...: shape}. `kind` picks settings and result. docs/attestation.schema.json says the same.
COMMON = {"format": str, "schema": int, "kind": str, "numerics": COUNT, "model": {"name": str, "architecture": str, "sha256": ["sha256"]},
          "tokenizer": "sha256", "tokens": {"sha256": "sha256", "n": COUNT},
          "cannot_matter": {"n_batch": COUNT, "n_ubatch": COUNT, "no_fuse": [str, ...], "graphs": bool, "kv_write": str, "threads": COUNT},
          "environment": {"device": str, "device_name": str, "driver": str, "versions": {...: str}}, "windows": ["sha256"],
          "merkle_root": "sha256", "sha256": "sha256"}
KINDS = {
    "perplexity": {"text": "sha256", "settings": {"n_ctx": Number(int, 3, 2**63 - 1), "n_chunks": COUNT, "type_k": str, "type_v": str, "add_bos": bool},
                   "result": {"ppl": str, "ppl_hex": str}},
    "generation": {"settings": {"n_predict": COUNT, "type_k": str, "type_v": str, "temperature": Number(float, 0, 1e6), "top_k": Number(int, 0, 2**63 - 1),
                                "top_p": SHARE, "min_p": SHARE, "seed": Number(int, 0, 2**63 - 1), "prompt": [TOKEN]},
                   "result": {"tokens": [TOKEN], "text": str}},
}


# Digests of what goes in

def files_sha256(paths) -> list[str]:
    """Of the files of a model, by part."""
    found = []
    for path in paths:
        with open(path, "rb") as file:
            found.append(hashlib.file_digest(file, "sha256").hexdigest())
    return found


def tokenizer_sha256(metadata) -> str:
    """Of all keys of a tokenizer and their values, in the order of the keys."""
    h = hashlib.sha256()
    for key in sorted(key for key in metadata if key.startswith("tokenizer.")):
        value = metadata[key]
        value = value.tolist() if isinstance(value, np.ndarray) else value if isinstance(value, (bool, int, float, str)) else list(value)
        h.update(json.dumps([key, value]).encode() + b"\n")
    return h.hexdigest()


def tokens_sha256(tokens) -> str:
    """Of ids as little-endian int32."""
    return hashlib.sha256(np.asarray(tokens, "<i4").tobytes()).hexdigest()


def own_sha256(document: dict) -> str:
    """Of a document without the entry of this name."""
    return hashlib.sha256(json.dumps({k: v for k, v in document.items() if k != "sha256"}, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def versions() -> dict[str, str]:
    found = {"ggml-py": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            pass
    return found


# Attesting

def attest_perplexity(model, text_sha256: str, tokens, settings: Settings, out, log) -> dict:
    """The attestation of `perplexity.perplexity`, which prints to out and log as ever."""
    digests = []

    @contextmanager
    def collect(windows):
        yield lambda logits: digests.append(window_digest(logits))
    ppl = perplexity(model, tokens, settings, out, log, collect)
    about = {"n_ctx": settings.n_ctx, "n_chunks": len(digests), "type_k": settings.type_k, "type_v": settings.type_v, "add_bos": bool(model.tokenizer.add_bos)}
    return _document("perplexity", model, tokens, settings, digests, text=text_sha256, settings=about, result=_ppl(ppl))


def attest_generation(model, prompt, n_predict: int, sampling: Sampling, settings: Settings, log) -> dict:
    """prompt: ids. The text ends with n_predict new tokens or with one that ends it, which is counted."""
    tokenizer, tokens = model.tokenizer, []
    prompt = [int(token) for token in prompt]
    about = {"n_predict": n_predict, "type_k": settings.type_k, "type_v": settings.type_v, "temperature": sampling.temperature, "top_k": sampling.top_k,
             "top_p": sampling.top_p, "min_p": sampling.min_p, "seed": sampling.seed, "prompt": prompt}
    _check_shape(about, KINDS["generation"]["settings"], "attest", "settings")
    with new_context(model, settings, len(prompt) + n_predict, 1, log) as context:
        for token in generate(context, prompt, n_predict, sampling, lambda token: False):
            tokens.append(token)
            if tokenizer.is_end_of_generation(token):
                break
        digests = []
        for first, rows in _generation_windows(context, prompt, tokens):
            digests.append(window_digest(rows))
            if _chosen(rows, len(prompt) + first, sampling) != tokens[first:first + len(rows)]:
                raise RuntimeError(f"attest: tokens {first} to {first + len(rows) - 1} were chosen from other logits than those of the finished text; "
                                   "see ggml-py verify")
    return _document("generation", model, prompt + tokens, settings, digests, settings=about, result={"tokens": tokens, "text": _text(tokenizer, tokens)})


def window_digest(logits: np.ndarray) -> str:
    digest = LogitsDigest()
    digest.update(logits)
    return digest.hexdigest()


def _document(kind: str, model, tokens, others: Settings, digests: list[str], **more) -> dict:
    backend = model.backend
    document = {
        "format": FORMAT, "schema": SCHEMA, "kind": kind, "numerics": NUMERICS_VERSION,
        "model": {"name": model.file.path.name, "architecture": model.architecture, "sha256": files_sha256(model.file.paths)},
        "tokenizer": tokenizer_sha256(model.file.metadata), "tokens": {"sha256": tokens_sha256(tokens), "n": len(tokens)}, **more,
        "cannot_matter": {"n_batch": others.n_batch, "n_ubatch": others.n_ubatch, "no_fuse": list(others.no_fuse), "graphs": others.graphs,
                          "kv_write": others.kv_write, "threads": numba.get_num_threads()},
        "environment": {"device": model.device, "device_name": backend.name,
                        "driver": backend.driver_version() if hasattr(backend, "driver_version") else "none",
                        "versions": {**versions(), **backend.versions()}},
        "windows": digests, "merkle_root": merkle_root(digests)}
    return {**document, "sha256": own_sha256(document)}


def _text(tokenizer, tokens: list[int]) -> str:
    return b"".join(tokenizer.token_bytes(token) for token in tokens).decode("utf-8", "replace")


def _ppl(ppl: float) -> dict[str, str]:
    return {"ppl": f"{ppl:.4f}", "ppl_hex": float(ppl).hex()}


def _generation_windows(context, prompt: list[int], tokens: list[int], last: int | None = None):
    """(index of the first token, logits [n, V] that its tokens are chosen from), window after window, to the one with number `last`."""
    context.clear()
    fed = prompt + tokens[:-1]
    if len(prompt) > 1:
        context.decode(fed[:len(prompt) - 1], logits="none")
    for i, first in enumerate(range(0, len(tokens), GENERATED)):
        if last is not None and i > last:
            return
        yield first, context.decode(fed[len(prompt) - 1 + first:len(prompt) - 1 + min(first + GENERATED, len(tokens))], logits="all")


def _chosen(rows: np.ndarray, position: int, sampling: Sampling) -> list[int]:
    return [choose(row, position + i, sampling) for i, row in enumerate(rows)]


# Reading

def read_attestation(path: Path) -> dict:
    """UserError in one line for what is damaged, newer or of another numerics version."""
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged: no JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UserError(f"{path}: is no attestation, whose format is {FORMAT!r}")
    schema, kind = document.get("schema"), document.get("kind")
    if type(schema) is not int or schema != SCHEMA:
        raise UserError(f"{path}: schema is {_shown(schema)}, this version reads {SCHEMA}")
    if not isinstance(kind, str) or kind not in KINDS:
        raise UserError(f"{path}: kind is {_shown(kind)}, allowed: {', '.join(KINDS)}")
    _check_shape(document, {**COMMON, **KINDS[kind]}, f"{path}: damaged", "")
    if own_sha256(document) != document["sha256"]:
        raise UserError(f"{path}: damaged: its sha256 is {own_sha256(document)}, it says {document['sha256']}")
    if merkle_root(document["windows"]) != document["merkle_root"]:
        raise UserError(f"{path}: damaged: the Merkle root of its {len(document['windows'])} windows is not {document['merkle_root']}")
    if document["numerics"] != NUMERICS_VERSION:
        raise UserError(f"{path}: numerics version is {document['numerics']}, this is {NUMERICS_VERSION}: other bits by definition")
    return document


def _check_shape(value, shape, who: str, where: str) -> None:
    def check(good: bool, must: str) -> None:
        if not good:
            raise UserError(printable(f"{who}: {where or 'it'} is {_shown(value)}, must be {must}"))
    if shape == "sha256":
        check(isinstance(value, str) and re.fullmatch(SHA256, value), "a sha256 in hex")
    elif isinstance(shape, Number):
        check(_is(value, shape.type) and shape.least <= value <= shape.most, f"{shape.type.__name__}, {shape.least} to {shape.most}")
    elif isinstance(shape, list):
        check(isinstance(value, list), "a list")
        check(value or ... in shape, "a list of at least one")
        for i, each in enumerate(value):
            _check_shape(each, shape[0], who, f"{where}[{i}]")
    elif isinstance(shape, dict):
        check(isinstance(value, dict), "an object")
        if ... not in shape and set(value) != set(shape):
            raise UserError(printable(f"{who}: {where or 'it'} has {', '.join(value) or 'nothing'}, must have {', '.join(shape)}"))
        for key, each in value.items():
            _check_shape(each, shape[... if ... in shape else key], who, f"{where}.{key}" if where else key)
    else:
        check(_is(value, shape), shape.__name__)


def _is(value, kind: type) -> bool:
    """A whole number is a float too, and a bool is no number."""
    return type(value) is kind or kind is float and type(value) is int


def _shown(value) -> str:
    """Never what is in a list or an object: they may be nested deeper than can be printed."""
    return f"a {type(value).__name__}" if isinstance(value, (list, dict)) else f"{value!r:.60}"


# Confirming

class NotConfirmed(Exception):
    """What was computed is not what was attested; its message is one line."""


def sampled(document: dict, n: int | None) -> list[int]:
    """Numbers of n windows, drawn at random by nobody's seed, in order; of all windows for None or more than there are."""
    windows = range(len(document["windows"]))
    return sorted(random.SystemRandom().sample(windows, n)) if n and n < len(windows) else list(windows)


def confirm(document: dict, model, text: str | None, sample: list[int], log) -> str:
    """Computes windows of an attestation again. text: that of a perplexity, its digest checked.   sample: numbers of windows, as from `sampled`.

    Returns what was confirmed, in one line; NotConfirmed for other bits or another result; UserError for another model, tokenizer or tokens, and for what is
    said of them and is not so."""
    for what, found, attested in (("model", files_sha256(model.file.paths), document["model"]["sha256"]),
                                  ("tokenizer", tokenizer_sha256(model.file.metadata), document["tokenizer"])):
        if found != attested:
            raise UserError(f"{model.file.path}: another {what} than attested: sha256 is {found}, must be {attested} ({document['model']['name']!r:.60})")
    _check_claim("model.architecture", document["model"]["architecture"], model.architecture)
    n = len(document["windows"])
    result = (_confirm_perplexity if document["kind"] == "perplexity" else _confirm_generation)(document, model, text, sample, log)
    which = f"all {n} windows" if len(sample) == n else f"by sample: window{'s' * (len(sample) > 1)} {', '.join(str(i + 1) for i in sample)} of {n}"
    made, here = document["environment"], model.backend
    where = f"said to be made on {made['device_name']!r:.60} ({made['device']!r:.60}), computed on {here.name} ({model.device})"
    return f"confirmed: {which}; {result}; root {document['merkle_root'][:16]}; {where}"


def _check_claim(what: str, attested, found) -> None:
    if attested != found:
        raise UserError(f"{what}: {attested!r:.60} attested, found {found!r:.60}")


def _check_window(document: dict, i: int, logits: np.ndarray) -> None:
    found = window_digest(logits)
    if found != document["windows"][i]:
        raise NotConfirmed(f"not confirmed: window {i + 1} of {len(document['windows'])} gave {found}, attested {document['windows'][i]}")


def _confirm_perplexity(document, model, text, sample, log) -> str:
    about = document["settings"]
    tokens = model.tokenizer.encode(text)
    if tokens_sha256(tokens) != document["tokens"]["sha256"]:
        raise UserError(f"tokens: the text gives {len(tokens)} other tokens than attested, {document['tokens']['n']}")
    settings = Settings(n_ctx=about["n_ctx"], n_chunks=about["n_chunks"], type_k=about["type_k"], type_v=about["type_v"])
    windows, total, count = split_windows(tokens, settings), 0.0, 0
    for what, attested, found in (("tokens.n", document["tokens"]["n"], len(tokens)), ("windows", len(document["windows"]), len(windows)),
                                  ("settings.n_chunks", about["n_chunks"], len(windows)),
                                  ("settings.add_bos", about["add_bos"], bool(model.tokenizer.add_bos))):
        _check_claim(what, attested, found)
    for i, logits in zip(sample, decode_windows(model, windows[sample], settings, log)):
        _check_window(document, i, logits)
        nll = negative_log_likelihood(logits, windows[i, about["n_ctx"] // 2 + 1:])
        total += float(tree_sum(nll))
        count += len(nll)
    if len(sample) < len(windows):
        return f"{about['n_ctx']} tokens each, no PPL"
    found = _ppl(float(exp(total / count)))
    for name, attested in document["result"].items():
        if found[name] != attested:
            raise NotConfirmed(f"not confirmed: the windows are those attested and give {name} {found[name]}, attested {attested!r:.60}")
    return f"PPL {found['ppl']}"


def _confirm_generation(document, model, text, sample, log) -> str:
    about, tokens = document["settings"], document["result"]["tokens"]
    prompt = about["prompt"]
    if tokens_sha256(prompt + tokens) != document["tokens"]["sha256"] or len(document["windows"]) != -(-len(tokens) // GENERATED):
        raise UserError(f"tokens: {len(prompt)} of the prompt and {len(tokens)} new ones are not those attested, {document['tokens']['n']} "
                        f"in {len(document['windows'])} windows")
    _check_claim("tokens.n", document["tokens"]["n"], len(prompt) + len(tokens))
    _check_ending(tokens, about["n_predict"], model.tokenizer)
    found, attested = _text(model.tokenizer, tokens), document["result"]["text"]
    if found != attested:
        i = len(commonprefix([found, attested]))
        raise NotConfirmed(f"not confirmed: the text of the tokens goes on at character {i} with {found[i:]!r:.40}, attested {attested[i:]!r:.40}")
    sampling = Sampling(about["temperature"], about["top_k"], about["top_p"], about["min_p"], about["seed"])
    settings = Settings(type_k=about["type_k"], type_v=about["type_v"])
    with new_context(model, settings, len(prompt) + len(tokens), 1, log) as context:
        for first, rows in _generation_windows(context, prompt, tokens, sample[-1]):
            if first // GENERATED in sample:
                _check_window(document, first // GENERATED, rows)
                found = _chosen(rows, len(prompt) + first, sampling)
                if found != tokens[first:first + len(rows)]:
                    raise NotConfirmed(f"not confirmed: the logits of window {first // GENERATED + 1} are those attested and choose {found}")
    n = sum(len(tokens[i * GENERATED:(i + 1) * GENERATED]) for i in sample)
    return f"{n}{f' of {len(tokens)}' * (n < len(tokens))} tokens behind a prompt of {len(prompt)}"


def _check_ending(tokens: list[int], n_predict: int, tokenizer) -> None:
    """A generation has n_predict tokens, or less and ends with one that ends it; there is none before."""
    n = next((i + 1 for i, token in enumerate(tokens[:n_predict]) if tokenizer.is_end_of_generation(token)), n_predict)
    if len(tokens) != n:
        raise NotConfirmed(f"not confirmed: {len(tokens)} new tokens attested, must be {n}: to the first that ends the text, {n_predict} at most")
