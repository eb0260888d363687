"""Tasks, scored: which endings a model chooses, in llama.cpp's lines or, of JSON lines, with accuracy and its error.

Of n tasks k are right, p = k / n:

    error      sqrt(p (1 - p) / (n - 1)), the standard error of the mean of n zeros and ones
    interval   (p + z/2 -+ z / (2 a) sqrt(n (4 p (1 - p) + z))) / (1 + z), z = a^2 / n, a = 1.95996398454: Wilson's, of 95 %

acc counts the endings of the largest log-likelihood, acc_norm those of the largest normalised one (engine/tasks.py: Format).
"""
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence

from ..base.progress import Progress, teller
from ..check.attestation import tasks_document
from ..check.digest import LogitsDigest
from ..engine.settings import Settings
from ..engine.tasks import Answer, Task, answers, to_items
from .statistics import proportion_error, wilson_interval


logger = logging.getLogger(__name__)


def hellaswag_lines(found: Sequence[Answer]) -> Iterator[str]:
    yield "\ntask\tacc_norm\t95% confidence interval"
    for n, k in enumerate(running([each.is_right_norm for each in found]), 1):
        low, high = wilson_interval(k / n, n)
        yield f"{n}\t{100 * k / n:.8f}%\t[{100 * low:.4f}%, {100 * high:.4f}%]"
    yield "\n"


def winogrande_lines(found: Sequence[Answer]) -> Iterator[str]:
    n_right = running([each.is_right_norm for each in found])
    for n, (k, each) in enumerate(zip(n_right, found), 1):
        (first, second), (right,) = each.values, each.item.task.right
        yield f"{n}\t{100 * k / n:.4f}\t{first:10.6f}  {second:10.6f}  {each.choice_norm + 1}  {right + 1}"
    yield ""
    if (n := len(found)) >= 100:
        p = n_right[-1] / n
        yield f"Final Winogrande score({n} tasks): {100 * p:.4f} +/- {100 * proportion_error(p, n):.4f}"


def multiple_choice_lines(found: Sequence[Answer]) -> Iterator[str]:
    yield "\ntask\tacc_norm"
    n_right, n = running([each.is_right_norm for each in found]), len(found)
    for i, k in enumerate(n_right, 1):
        yield f"{i}\t{100 * k / i:.8f}"
    yield ""
    for what, p in ("Final result", n_right[-1] / n), ("Random chance", n / sum(len(each.endings) for each in found)):
        yield f"{what}: {100 * p:.4f} +/- {100 * proportion_error(p, n):.4f}"
    yield ""


def tasks_lines(found: Sequence[Answer]) -> Iterator[str]:
    columns = {"acc": running([each.is_right for each in found]), "acc_norm": running([each.is_right_norm for each in found])}
    yield "\ntask\tacc\tacc_norm"
    for n, row in enumerate(zip(*columns.values()), 1):
        yield "\t".join([f"{n}", *(f"{100 * k / n:.4f}" for k in row)])
    yield ""
    for name, counts in columns.items():
        p, n = counts[-1] / len(found), len(found)
        low, high = wilson_interval(p, n)
        yield (f"Final result ({n} tasks): {name} = {100 * p:.4f} +/- {100 * proportion_error(p, n):.4f}, 95% [{100 * low:.4f}, "
               f"{100 * high:.4f}]")


def running(is_right: Sequence[bool]) -> list[int]:
    """How many are right so far."""
    return [sum(is_right[:n]) for n in range(1, len(is_right) + 1)]


LINES: dict[str, Callable[[Sequence[Answer]], Iterator[str]]] = {
    "hellaswag": hellaswag_lines, "winogrande": winogrande_lines, "multiple-choice": multiple_choice_lines, "tasks": tasks_lines}


def score_tasks(model, name: str, tasks: Sequence[Task], who: str, settings: Settings, out=None,
                log=None) -> list[Answer]:
    """name: of `engine.tasks.FORMATS`.   who: the file, for messages.   settings: n_ctx bounds what an ending may take. The lines
    and the digest of all likelihoods go to `out`, the rest to `log`: streams. None: nowhere, and to `logging`."""
    items = to_items(name, tasks, model.tokenizer, settings.n_ctx, who)
    pairs = {pair for item in items for each in item.parts for pair in each}
    say, tell = teller(out, lambda line: None), teller(log, logger.info)
    tell(f"{name}: scoring {len(items)} tasks, {len(pairs)} endings ..")
    start = time.perf_counter()
    with Progress(log, name, len(pairs)) as bar:
        found = answers(name, model, items, settings, lambda done, n: bar.reach(done), log)
    tell(f"{name}: {len(items)} tasks in {time.perf_counter() - start:.2f} s")
    for line in (*LINES[name](found), f"digest: {digest_of(found)}"):
        say(line)
    return found


def digest_of(found: Sequence[Answer]) -> str:
    digest = LogitsDigest()
    for each in found:
        digest.update(each.logprobs)
    return digest.hexdigest()


def summary(found: Sequence[Answer]) -> dict:
    """Of all tasks together, as JSON has it; shares are of 1."""
    def share(is_right: list[bool]) -> dict:
        p, n = sum(is_right) / len(is_right), len(is_right)
        error, (low, high) = proportion_error(p, n), wilson_interval(p, n)
        return {"share": p, "error": error if n > 1 else None, "low": low, "high": high}
    return {"n_tasks": len(found), "acc": share([each.is_right for each in found]),
            "acc_norm": share([each.is_right_norm for each in found]), "digest": digest_of(found)}


def attest_tasks(model, name: str, tasks: Sequence[Task], who: str, n_tasks: int, text_sha256: str, settings: Settings, out=None,
                 log=None) -> dict:
    """The attestation of `score_tasks`.   n_tasks: as asked of `read_tasks`.   text_sha256: of the file."""
    return tasks_document(model, text_sha256, name, n_tasks, score_tasks(model, name, tasks, who, settings, out, log), settings)


def as_json_lines(found: Sequence[Answer]) -> bytes:
    """A line for each task. Numbers that are not finite are null."""
    return b"".join(json.dumps(as_json(each)).encode() + b"\n" for each in found)


def as_json(found: Answer) -> dict:
    task = found.item.task
    finite = lambda value: value if math.isfinite(value) else None
    return {"task": task.number, **({} if task.id is None else {"id": task.id}), "answers": list(task.right),
            "choice": found.choice, "choice_norm": found.choice_norm, "digest": found.digest,
            "continuations": [{"logprob": finite(each.logprob), "logprob_norm": finite(value), "is_greedy": each.is_greedy,
                               "ids": list(each.ids), "logprobs": [finite(logprob) for logprob in each.logprobs]}
                              for each, value in zip(found.endings, found.values)]}
