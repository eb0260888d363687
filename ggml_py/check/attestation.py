"""Attestations: JSON that says what a model gave, so that another machine can compute it again and compare
(docs/attestation.schema.json).

Of a perplexity, a window's digest is that of its scored logits. Of a generation, a window is 32 new tokens, and its digest that
of the logits that they were chosen from, computed over the finished text, as by the promise it may be. Of tasks, a window is a
task, and its digest that of the likelihoods of all its endings' scored tokens. The Merkle root stands for
all windows; a sample of them can be confirmed alone. An attestation is not a signature: it says what to compute and what comes
out, and anybody can try. Its own sha256 tells of damage only.
"""
import hashlib
import json
import platform
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import NUMERICS_VERSION, __version__
from ..base.errors import UserError, printable
from ..base.exact_math import exp, tree_sum
from ..base.likelihoods import negative_log_likelihood
from ..base.overlap import overlapped
from ..engine.generate import generate
from ..engine.sampling import LIMITS, Sampling, choose
from ..engine.settings import Settings, new_context
from ..engine.tasks import FORMATS, Answer, Item, answers, read_tasks, to_items
from ..engine.windows import decode_windows, n_ahead, split_windows
from ..kernels.threads import get_num_threads
from ..files.hub import pulled
from ..files.pull import file_sha256
from ..testing import digest
from .merkle import merkle_root

FORMAT = "ggml-py attestation"
GENERATED = 32  # tokens of a window of a generation
SHA256, DATE = r"[0-9a-f]{64}", r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
PACKAGES = "numpy", "numba", "llvmlite", "numba-cuda", "cuda-core", "cuda-bindings", "gguf", "tokenizers"


class Number(NamedTuple):
    """Of a type, from least to most."""
    type: type
    least: float
    most: float


COUNT, TOKEN, NUMBER = Number(int, 1, 2**63 - 1), Number(int, 0, 2**31 - 1), Number(int, 0, 2**63 - 1)

# The shape of what an attestation holds is a type, a Number, "sha256" or "date"; [shape] is a list of at least one, [shape, ...]
# of any number; an object has the names that are given, or any: {...: shape}. `kind` and `schema` pick settings and result.
# docs/attestation.schema.json says the same.
MODEL = {"name": str, "architecture": str, "sha256": ["sha256"]}
COMMON = {"format": str, "schema": int, "kind": str, "numerics": COUNT,
          "model": MODEL,
          "tokenizer": "sha256", "tokens": {"sha256": "sha256", "n": COUNT},
          "cannot_matter": {"n_batch": COUNT, "n_ubatch": COUNT, "no_fuse": [str, ...], "graphs": bool, "kv_write": str,
                            "threads": COUNT},
          "environment": {"device": str, "device_name": str, "driver": str, "versions": {...: str}},
          "windows": ["sha256"], "merkle_root": "sha256", "sha256": "sha256"}
PERPLEXITY = {"n_ctx": Number(int, 3, 2**63 - 1), "n_chunks": COUNT, "type_k": str, "type_v": str, "add_bos": bool}
PPL = {"ppl": str, "ppl_hex": str}
GENERATION = {"n_predict": COUNT, "type_k": str, "type_v": str,
              **{name: Number(*limits) for name, limits in LIMITS.items()}, "prompt": [TOKEN]}
CHAT = {"messages": [{"role": str, "content": str}], "date": "date"}  # what the prompt was made of, by the model's chat template
RESULT = {"tokens": [TOKEN], "text": str}
TASKS = {"format": str, "n_tasks": NUMBER, "type_k": str, "type_v": str, "add_bos": bool}
CHOICES = {"n_right": NUMBER, "n_right_norm": NUMBER, "choices": [NUMBER], "choices_norm": [NUMBER]}
PULLED = {"model": {**MODEL, "source": {"repo": str, "revision": str, "files": [str]}}}  # out of a hub (files/hub.py)
KINDS: dict[tuple[str, int], dict[str, Any]] = {
    ("perplexity", 1): {"text": "sha256", "settings": PERPLEXITY, "result": PPL},
    ("perplexity", 6): {"settings": PERPLEXITY, "result": PPL},  # of token ids
    ("generation", 1): {"settings": GENERATION, "result": RESULT},
    ("generation", 2): {"settings": {**GENERATION, "chat": CHAT}, "result": RESULT},
    ("tasks", 5): {"text": "sha256", "settings": TASKS, "result": CHOICES},
}
SOURCED = 2  # so much higher is the schema of what has a source, too
KINDS |= {(kind, number + SOURCED): shape | PULLED for (kind, number), shape in KINDS.items()}
SCHEMAS = sorted({schema for _, schema in KINDS})


# Digests of what goes in

def files_sha256(file) -> list[str]:
    """Of a model's file, by part."""
    return [file_sha256(path) for path in file.paths]


def source_of(paths: list[Path], sha256: list[str]) -> dict | None:
    """Where a model's files were pulled from, as the records beside them say; None where there are none, or of other bytes."""
    found = [pulled(path) for path in paths]
    records = [record for record in found if record is not None]
    if [record.sha256 for record in records] != sha256 or len({(record.repo, record.revision) for record in records}) != 1:
        return None
    return {"repo": records[0].repo, "revision": records[0].revision, "files": [record.file for record in records]}


def tokenizer_sha256(metadata) -> str:
    """Of all keys of a tokenizer and their values, in the order of the keys."""
    listed = lambda array: array.tolist() if isinstance(array, np.ndarray) else list(array)
    h = hashlib.sha256()
    for key in sorted(key for key in metadata if key.startswith("tokenizer.")):
        h.update(json.dumps([key, metadata[key]], default=listed).encode() + b"\n")
    return h.hexdigest()


def tokens_sha256(tokens) -> str:
    """Of ids as little-endian int32."""
    return hashlib.sha256(np.asarray(tokens, "<i4").tobytes()).hexdigest()


def own_sha256(document: dict) -> str:
    """Of a document without the entry of this name."""
    return hashlib.sha256(json.dumps({k: v for k, v in document.items() if k != "sha256"}, sort_keys=True,
                                     separators=(",", ":")).encode()).hexdigest()


def versions() -> dict[str, str]:
    found = {"ggml-py": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def environment_of(backends) -> dict[str, Any]:
    """Devices, driver and versions, as COMMON has them."""
    return {"device": "/".join(backend.device for backend in backends),
            "device_name": "/".join(dict.fromkeys(backend.name for backend in backends)),
            "driver": next((b.driver_version() for b in backends if hasattr(b, "driver_version")), "none"),
            "versions": {**versions(), **{name: said for b in backends for name, said in b.versions().items()}}}


# Attesting

def made_by(model) -> dict:
    """Which model on which devices makes what is attested."""
    backends = [model.backends[device] for device in model.architecture.placement.devices]
    files = files_sha256(model.file)
    about = {"name": model.file.path.name, "architecture": model.architecture.name, "sha256": files}
    if source := source_of(model.file.paths, files):
        about["source"] = source
    return {"model": about, "tokenizer": tokenizer_sha256(model.file.metadata),
            "environment": environment_of(backends)}


def made_by_all(makers: Sequence[dict]) -> dict:
    """As `made_by`, of several that computed parts: names of devices with / between, of the rest what the first one says."""
    environments = [made["environment"] for made in makers]
    joined = {name: "/".join(dict.fromkeys(each[name] for each in environments)) for name in ("device", "device_name")}
    return {**makers[0], "environment": {**environments[0], **joined}}


def perplexity_document(made: dict, add_bos: bool, text_sha256: str | None, tokens, settings: Settings, ppl: float,
                        digests: list[str]) -> dict:
    """The attestation of a perplexity. made: as of `made_by`; add_bos: whether windows begin with a BOS; text_sha256: of the file
    of the text, None where token ids were given; digests: of each window's scored logits."""
    about = {"n_ctx": settings.n_ctx, "n_chunks": len(digests), "type_k": settings.type_k, "type_v": settings.type_v,
             "add_bos": add_bos}
    schema, text = (6, {}) if text_sha256 is None else (1, {"text": text_sha256})
    return _document("perplexity", schema, made, tokens, settings, digests, **text, settings=about, result=_ppl(ppl))


def tasks_document(model, text_sha256: str, name: str, n_tasks: int, found: list[Answer], settings: Settings) -> dict:
    """The attestation of tasks. text_sha256: of their file; name: of its format; n_tasks: as asked of `read_tasks`."""
    about = {"format": name, "n_tasks": n_tasks, "type_k": settings.type_k, "type_v": settings.type_v,
             "add_bos": bool(model.tokenizer.add_bos)}
    result = {"n_right": sum(each.is_right for each in found), "n_right_norm": sum(each.is_right_norm for each in found),
              "choices": [each.choice for each in found], "choices_norm": [each.choice_norm for each in found]}
    return _document("tasks", 5, made_by(model), _scored_tokens([each.item for each in found]), settings,
                     [each.digest for each in found], text=text_sha256, settings=about, result=result)


def _scored_tokens(items: list[Item]) -> list[int]:
    """Of all contexts and what is scored behind each, in order."""
    return [id for item in items for each in item.parts for context, ids in each for id in context + ids]


def attest_generation(model, prompt, n_predict: int, sampling: Sampling, settings: Settings, log,
                      chat: dict | None = None) -> dict:
    """prompt: ids. The text ends with n_predict new tokens or with one that ends it, which is counted. chat: what the prompt was
    made of by the model's chat template, {"messages": [{"role": ..., "content": ...}, ...], "date": "YYYY-MM-DD"}; None where it
    was not."""
    tokenizer, tokens = model.tokenizer, []
    sampling = sampling.forbidding(tokenizer.suppressed)
    prompt, schema = [int(token) for token in prompt], 1 if chat is None else 2
    about = {"n_predict": n_predict, "type_k": settings.type_k, "type_v": settings.type_v,
             **{name: getattr(sampling, name) for name in LIMITS}, "prompt": prompt, **({} if chat is None else {"chat": chat})}
    _check_shape(about, KINDS["generation", schema]["settings"], "attest", "settings")
    with new_context(model, settings, len(prompt) + n_predict, 1, log) as context:
        for token in generate(context, prompt, n_predict, sampling, lambda token: False):
            tokens.append(token)
            if tokenizer.is_end_of_generation(token):
                break
        digests = []
        for first, rows in _generation_windows(context, prompt, tokens):
            digests.append(digest(rows))
            if _chosen(rows, len(prompt) + first, sampling) != tokens[first:first + len(rows)]:
                raise RuntimeError(f"attest: tokens {first} to {first + len(rows) - 1} were chosen from other logits than those "
                                   "of the finished text; see ggml-py verify")
    result = {"tokens": tokens, "text": _text(tokenizer, tokens)}
    return _document("generation", schema, made_by(model), prompt + tokens, settings, digests, settings=about, result=result)


def _document(kind: str, schema: int, made: dict, tokens, others: Settings, digests: list[str], **more) -> dict:
    schema += SOURCED * ("source" in made["model"])
    document: dict[str, Any] = {
        "format": FORMAT, "schema": schema, "kind": kind, "numerics": NUMERICS_VERSION, "model": made["model"],
        "tokenizer": made["tokenizer"], "tokens": {"sha256": tokens_sha256(tokens), "n": len(tokens)}, **more,
        "cannot_matter": {"n_batch": others.n_batch, "n_ubatch": others.n_ubatch, "no_fuse": list(others.no_fuse),
                          "graphs": others.graphs, "kv_write": others.kv_write, "threads": get_num_threads()},
        "environment": made["environment"],
        "windows": digests, "merkle_root": merkle_root(digests)}
    return {**document, "sha256": own_sha256(document)}


def _text(tokenizer, tokens: list[int]) -> str:
    return b"".join(tokenizer.token_bytes(token) for token in tokens).decode("utf-8", "replace")


def _ppl(ppl: float) -> dict[str, str]:
    return {"ppl": f"{ppl:.4f}", "ppl_hex": float(ppl).hex()}


def _generation_windows(context, prompt: list[int], tokens: list[int],
                        n_windows: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
    """(index of the first token, logits [n, V] that its tokens are chosen from) of each window, or of the first n_windows."""
    context.clear()
    fed = prompt + tokens[:-1]
    if len(prompt) > 1:
        context.decode(fed[:len(prompt) - 1], logits="none")
    for first in range(0, len(tokens), GENERATED)[:n_windows]:
        start = len(prompt) - 1 + first
        yield first, context.decode(fed[start:start + GENERATED], logits="all")


def _chosen(rows: np.ndarray, position: int, sampling: Sampling) -> list[int]:
    return [choose(row, position + i, sampling) for i, row in enumerate(rows)]


# Reading

def read_attestation(path: Path) -> dict:
    """UserError in one line for what is damaged, newer or of another numerics version."""
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged: not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UserError(f"{path}: is not an attestation, whose format is {FORMAT!r}")
    schema, kind = document.get("schema"), document.get("kind")
    if type(schema) is not int or schema not in SCHEMAS:
        raise UserError(f"{path}: schema is {_shown(schema)}, this version reads {', '.join(map(str, SCHEMAS))}")
    kinds = [each for each, number in KINDS if number == schema]
    if not isinstance(kind, str) or kind not in kinds:
        raise UserError(f"{path}: kind is {_shown(kind)}, allowed: {', '.join(kinds)}")
    _check_shape(document, {**COMMON, **KINDS[kind, schema]}, f"{path}: damaged", "")
    if own_sha256(document) != document["sha256"]:
        raise UserError(f"{path}: damaged: its sha256 is {own_sha256(document)}, it says {document['sha256']}")
    if merkle_root(document["windows"]) != document["merkle_root"]:
        raise UserError(f"{path}: damaged: the Merkle root of its {len(document['windows'])} windows is not "
                        f"{document['merkle_root']}")
    if document["numerics"] != NUMERICS_VERSION:
        raise UserError(f"{path}: numerics version is {document['numerics']}, this is {NUMERICS_VERSION}: other bits by "
                        "definition")
    return document


def _check_shape(value, shape, who: str, where: str) -> None:
    def check(good: object, must: str) -> None:
        if not good:
            raise UserError(printable(f"{who}: {where or 'it'} is {_shown(value)}, must be {must}"))
    if shape == "sha256":
        check(isinstance(value, str) and re.fullmatch(SHA256, value), "a sha256 in hex")
    elif shape == "date":
        check(isinstance(value, str) and _is_date(value), "a date, YYYY-MM-DD")
    elif isinstance(shape, Number):
        check(_is(value, shape.type) and shape.least <= value <= shape.most,
              f"{shape.type.__name__}, {shape.least} to {shape.most}")
    elif isinstance(shape, list):
        check(isinstance(value, list), "a list")
        check(value or ... in shape, "a list of at least one")
        for i, each in enumerate(value):
            _check_shape(each, shape[0], who, f"{where}[{i}]")
    elif isinstance(shape, dict):
        check(isinstance(value, dict), "an object")
        if ... not in shape and set(value) != set(shape):
            raise UserError(printable(f"{who}: {where or 'it'} has {', '.join(value) or 'nothing'}, must have "
                                      f"{', '.join(shape)}"))
        for key, each in value.items():
            _check_shape(each, shape[... if ... in shape else key], who, f"{where}.{key}" if where else key)
    else:
        check(_is(value, shape), shape.__name__)


def _is(value, kind: type) -> bool:
    """A whole number is a float too, and a bool is not a number."""
    return type(value) is kind or (kind is float and type(value) is int)


def _is_date(text: str) -> bool:
    try:
        return bool(re.fullmatch(DATE, text) and date.fromisoformat(text))
    except ValueError:
        return False


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


def confirm(document: dict, model, text: str | list[int] | bytes | None, sample: list[int], log=None) -> str:
    """Computes windows of an attestation again. text: that of a perplexity, or its token ids, or the file of tasks, whose digest
    is checked.   sample: numbers of windows, as from `sampled`. log: a stream; None: `logging`.

    Returns what was confirmed, in one line; NotConfirmed for other bits or another result; UserError for another model, tokenizer
    or tokens, and for what is said of them and is not so."""
    for what, found, attested in (("model", files_sha256(model.file), document["model"]["sha256"]),
                                  ("tokenizer", tokenizer_sha256(model.file.metadata), document["tokenizer"])):
        if found != attested:
            of = "{repo!r:.90} at {revision!r:.60}".format(**source) if (source := document["model"].get("source")) else ""
            raise UserError(f"{model.file.path}: another {what} than attested: sha256 is {found}, must be {attested} "
                            f"({document['model']['name']!r:.60}{f' of {of}' * bool(of)})")
    _check_claim("model.architecture", document["model"]["architecture"], model.architecture.name)
    n = len(document["windows"])
    result = CONFIRM[document["kind"]](document, model, text, sample, log)
    numbers = f"window{'s' * (len(sample) > 1)} {', '.join(str(i + 1) for i in sample)} of {n}"
    which = f"by sample: {numbers}" if len(sample) < n else f"all {n} windows" if n > 1 else "the only window"
    made, here = document["environment"], model.backend
    where = f"said to be made on {made['device_name']!r:.60} ({made['device']!r:.60}), computed on {here.name} ({model.device})"
    return f"confirmed: {which}; {result}; root {document['merkle_root'][:16]}; {where}"


def _check_claim(what: str, attested, found) -> None:
    if attested != found:
        raise UserError(f"{what}: {attested!r:.60} attested, found {found!r:.60}")


def _check_window(document: dict, i: int, found: str) -> None:
    """found: the digest of window i."""
    if found != document["windows"][i]:
        raise NotConfirmed(f"not confirmed: window {i + 1} of {len(document['windows'])} gave {found}, attested "
                           f"{document['windows'][i]}")


def _confirm_perplexity(document, model, text, sample, log) -> str:
    about = document["settings"]
    tokens = model.tokenizer.encode(text) if isinstance(text, str) else text
    if tokens_sha256(tokens) != document["tokens"]["sha256"]:
        given = "the text gives" if isinstance(text, str) else "there are"
        raise UserError(f"tokens: {given} {len(tokens)} other tokens than attested, {document['tokens']['n']}")
    settings = Settings(n_ctx=about["n_ctx"], n_chunks=about["n_chunks"], type_k=about["type_k"], type_v=about["type_v"])
    windows, total, count = split_windows(tokens, settings), 0.0, 0
    for what, attested, found in (("tokens.n", document["tokens"]["n"], len(tokens)),
                                  ("windows", len(document["windows"]), len(windows)),
                                  ("settings.n_chunks", about["n_chunks"], len(windows)),
                                  ("settings.add_bos", about["add_bos"], bool(model.tokenizer.add_bos))):
        _check_claim(what, attested, found)

    def scored(window: tuple[int, np.ndarray]) -> tuple[int, str, np.ndarray]:
        i, logits = window
        return i, digest(logits), negative_log_likelihood(logits, windows[i, about["n_ctx"] // 2 + 1:])
    most, decoded = n_ahead(model, settings), zip(sample, decode_windows(model, windows[sample], settings, log))
    for i, window, nll in overlapped(decoded, scored, most, True):
        _check_window(document, i, window)
        total += float(tree_sum(nll))
        count += len(nll)
    if len(sample) < len(windows):
        return f"{about['n_ctx']} tokens each, no PPL"
    result = _ppl(float(exp(total / count)))
    for name, attested in document["result"].items():
        if result[name] != attested:
            raise NotConfirmed(f"not confirmed: the windows are those attested and give {name} {result[name]}, attested "
                               f"{attested!r:.60}")
    return f"PPL {result['ppl']}"


def _confirm_generation(document, model, text, sample, log) -> str:
    about, tokens = document["settings"], document["result"]["tokens"]
    prompt = about["prompt"]
    if "chat" in about:
        from ..tokenizer.chat import encode_chat
        encoded = encode_chat(model.tokenizer, about["chat"]["messages"], date=about["chat"]["date"])
        if encoded != prompt:
            raise UserError(f"settings.chat: its messages give {len(encoded)} other tokens on {about['chat']['date']} than "
                            f"attested as prompt, {len(prompt)}")
    if tokens_sha256(prompt + tokens) != document["tokens"]["sha256"] or len(document["windows"]) != -(-len(tokens) // GENERATED):
        raise UserError(f"tokens: {len(prompt)} of the prompt and {len(tokens)} new ones are not those attested, "
                        f"{document['tokens']['n']} in {len(document['windows'])} windows")
    _check_claim("tokens.n", document["tokens"]["n"], len(prompt) + len(tokens))
    _check_ending(tokens, about["n_predict"], model.tokenizer)
    found, attested = _text(model.tokenizer, tokens), document["result"]["text"]
    if found != attested:
        i = len(commonprefix([found, attested]))  # noqa: RUF071  of characters, as is meant
        raise NotConfirmed(f"not confirmed: the text of the tokens goes on at character {i} with {found[i:]!r:.40}, attested "
                           f"{attested[i:]!r:.40}")
    sampling = Sampling(about["temperature"], about["top_k"], about["top_p"], about["min_p"],
                        about["seed"]).forbidding(model.tokenizer.suppressed)
    settings = Settings(type_k=about["type_k"], type_v=about["type_v"])
    with new_context(model, settings, len(prompt) + len(tokens), 1, log) as context:
        for first, rows in _generation_windows(context, prompt, tokens, sample[-1] + 1):
            if first // GENERATED in sample:
                _check_window(document, first // GENERATED, digest(rows))
                chosen = _chosen(rows, len(prompt) + first, sampling)
                if chosen != tokens[first:first + len(rows)]:
                    raise NotConfirmed(f"not confirmed: the logits of window {first // GENERATED + 1} are those attested and "
                                       f"choose {chosen}")
    n = sum(len(tokens[i * GENERATED:(i + 1) * GENERATED]) for i in sample)
    return f"{n}{f' of {len(tokens)}' * (n < len(tokens))} tokens behind a prompt of {len(prompt)}"


def _check_ending(tokens: list[int], n_predict: int, tokenizer) -> None:
    """A generation has n_predict tokens, or less and ends with one that ends it; there is none before."""
    n = next((i + 1 for i, token in enumerate(tokens[:n_predict]) if tokenizer.is_end_of_generation(token)), n_predict)
    if len(tokens) != n:
        raise NotConfirmed(f"not confirmed: {len(tokens)} new tokens attested, must be {n}: to the first that ends the text, "
                           f"{n_predict} at most")


def _confirm_tasks(document, model, data, sample, log) -> str:
    about, attested, tokenizer = document["settings"], document["result"], model.tokenizer
    if (name := about["format"]) not in FORMATS:
        raise UserError(f"settings.format: is {name!r:.60}, this version has {', '.join(FORMATS)}")
    items = to_items(name, read_tasks(name, data, about["n_tasks"], "tasks", log), tokenizer, model.n_ctx_train, "tasks")
    tokens = _scored_tokens(items)
    if tokens_sha256(tokens) != document["tokens"]["sha256"]:
        raise UserError(f"tokens: the tasks give {len(tokens)} other tokens than attested, {document['tokens']['n']}")
    for what, said, found in (("tokens.n", document["tokens"]["n"], len(tokens)),
                              ("windows", len(document["windows"]), len(items)),
                              ("settings.add_bos", about["add_bos"], bool(tokenizer.add_bos)),
                              *((f"result.{what}", len(attested[what]), len(items)) for what in ("choices", "choices_norm"))):
        _check_claim(what, said, found)
    settings = Settings(type_k=about["type_k"], type_v=about["type_v"])
    for i, each in zip(sample, answers(name, model, [items[i] for i in sample], settings, log=log)):
        _check_window(document, i, each.digest)
        for what, choice in ("choices", each.choice), ("choices_norm", each.choice_norm):
            if attested[what][i] != choice:
                raise NotConfirmed(f"not confirmed: the likelihoods of task {i + 1} are those attested and choose {choice} "
                                   f"({what}), attested {attested[what][i]}")
    for what, chosen in ("n_right", attested["choices"]), ("n_right_norm", attested["choices_norm"]):
        if (n := sum(choice in item.task.right for choice, item in zip(chosen, items))) != attested[what]:
            raise NotConfirmed(f"not confirmed: of the choices {n} are right ({what}), attested {attested[what]}")
    return f"{name}: {attested['n_right_norm']} of {len(items)} right, normalised, {attested['n_right']} not"


CONFIRM = {"perplexity": _confirm_perplexity, "generation": _confirm_generation, "tasks": _confirm_tasks}
