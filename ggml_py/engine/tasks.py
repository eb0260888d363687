"""Tasks: a context, several endings of it, and which of them are right. From a file to token ids, from likelihoods to choices.

Three formats are llama.cpp's (its tools/perplexity/perplexity.cpp), with its draws, its boundary between context and ending, and
its choices:

    hellaswag         six lines a task: context, number of the right ending from 0, four endings
    winogrande        CSV lines: number, sentence with a blank _, two choices, 1 or 2
    multiple-choice   binary, little-endian: uint32 n, uint32 places[n], and n times: question, answers, answers that are not
                      used; a text is uint32 size and its bytes, answers are uint32 n, n texts and int32 labels[n], 1: right

`tasks` is JSON lines: {"context": text or ids, "continuations": [text or ids, ...], "answer": number from 0, "id": anything}.
"""
import json
import logging
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isnan

import numpy as np

from ..base.errors import UserError, printable
from ..base.progress import teller
from ..testing import digest
from ..tokenizer import Tokenizer
from .likelihood import Likelihood, Pair, Text, encode_pair, score_many, shared
from .settings import Settings
from .windows import as_text

logger = logging.getLogger(__name__)

MOST_ANSWERS = 100  # of a task of multiple-choice, as llama.cpp has it
LEAST_BEHIND = 4  # tokens behind the blank's context; with fewer, the choice is scored too (winogrande)


@dataclass(frozen=True)
class Task:
    """number: in its file, from 0.   where: for messages.   right: numbers of right endings, from 0.   behind: a text that
    follows each ending.   id: of JSON lines, what the file has."""
    number: int
    where: str
    context: Text
    endings: tuple[Text, ...]
    right: tuple[int, ...]
    behind: str = ""
    id: object = None


@dataclass(frozen=True)
class Item:
    """A task in token ids.   parts: of each ending, the pairs whose continuations are its scored tokens.   lengths: what the
    log-likelihood of each ending is divided by to normalise it."""
    task: Task
    parts: tuple[tuple[Pair, ...], ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """What a model says to an item.   endings: the likelihood of each.   values: their logarithms, normalised.   choice,
    choice_norm: the ending of the largest logarithm, and of the largest normalised one."""
    item: Item
    endings: tuple[Likelihood, ...]
    values: tuple[float, ...]
    choice: int
    choice_norm: int

    @property
    def is_right(self) -> bool:
        return self.choice in self.item.task.right

    @property
    def is_right_norm(self) -> bool:
        return self.choice_norm in self.item.task.right

    @property
    def logprobs(self) -> np.ndarray:
        """float32 [n], of the scored tokens of all endings, one after the other: what digests are of."""
        return np.concatenate([np.array(each.logprobs, np.float32) for each in self.endings])

    @property
    def digest(self) -> str:
        return digest(self.logprobs)


@dataclass(frozen=True)
class Format:
    """read: (bytes of a file, most tasks or 0 for all) -> tasks, in the order of llama.cpp, and what was left out, a line each;
    UserError without the file's name.   parts: (tokenizer, task) -> `parts` and `lengths` of its item.   first_of_equals: whether
    of equal values the first is chosen, or the last.   least_tasks, n_tasks: of the option that says how many: the least, and the
    default."""
    read: Callable[[bytes, int], tuple[list[Task], list[str]]]
    parts: Callable[[Tokenizer, Task], tuple[list[tuple[Pair, ...]], list[int]]]
    first_of_equals: bool = True
    least_tasks: int = 0
    n_tasks: int = 0


# From files to tasks

def draws() -> Iterator[int]:
    """std::mt19937(1)."""
    state = np.random.RandomState(1)
    while True:
        yield int(state.randint(0, 2**32, dtype=np.uint32))


def drawn_one_by_one(n: int, most: int) -> list[int]:
    """Numbers of `most` of n tasks by std::uniform_int_distribution of GCC's library (since its version 11), which is the
    standard library of llama.cpp's usual builds: others draw others."""
    left, found, numbers = [*range(n)], [], draws()
    for _ in range(min(n, most)):
        product = next(numbers) * len(left)
        while product % 2**32 < 2**32 % len(left):
            product = next(numbers) * len(left)
        found.append(left.pop(product >> 32))
    return found


def drawn_from_shrinking(n: int, most: int) -> list[int]:
    """Numbers of `most` of n tasks by float32 arithmetic, the last left one in the place of one that was drawn; 0: all, in
    order."""
    if not 0 < most < n:
        return [*range(n)]
    left, found = [*range(n)], []
    for number, _ in zip(draws(), range(most)):
        i = min(int(np.float32(2**-32) * np.float32(number) * np.float32(len(left))), len(left) - 1)
        found.append(left[i])
        left[i] = left[-1]
        left.pop()
    return found


def whole_number(text: str) -> int | None:
    """What C++ reads at the beginning of a text."""
    found = re.match(r"[ \t\n\v\f\r]*([+-]?[0-9]+)", text)
    return int(found[1][:20]) if found else None


def read_hellaswag(data: bytes, most: int) -> tuple[list[Task], list[str]]:
    lines = as_text(data).split("\n")
    if not lines[-1]:
        lines.pop()
    if not lines or len(lines) % 6:
        raise UserError(f"it has {len(lines)} lines, must be six for each task: context, number of the right ending, four "
                        "endings")
    tasks = []
    for number, first in enumerate(range(0, len(lines), 6)):
        context, right, *endings = lines[first:first + 6]
        if (answer := whole_number(right)) is None or not 0 <= answer <= 3:
            raise UserError(f"line {first + 2}: the right ending is {right!r:.60}, must be 0 to 3")
        tasks.append(Task(number, f"line {first + 1}", context, tuple(endings), (answer,)))
    return [tasks[i] for i in drawn_one_by_one(len(tasks), most)], []


def read_winogrande(data: bytes, most: int) -> tuple[list[Task], list[str]]:
    """llama.cpp leaves out lines that it cannot read, such as the names of the columns, and the last line, unless an empty one
    follows."""
    *lines, last = as_text(data).split("\n")
    tasks: list[Task] = []
    left_out: list[str] = []
    for n, line in enumerate(lines, 1):
        try:
            tasks.append(winogrande_task(line, len(tasks), f"line {n}"))
        except ValueError as error:
            left_out.append(f"line {n}: {error}")
    if last:
        left_out.append(f"line {len(lines) + 1}: no empty line behind the last one")
    return [tasks[i] for i in drawn_from_shrinking(len(tasks), most)], left_out


def winogrande_task(line: str, number: int, where: str) -> Task:
    """ValueError for what is not one. Commas between quotation marks do not count; around a sentence these go, else they stay."""
    commas = [found.start() for found in re.finditer(r',|"[^"]*(?:"|$)', line) if found[0] == ","][:4]
    if len(commas) < 4:
        raise ValueError(f"{line!r:.60} has {len(commas)} commas between columns, must have 4")
    sentence, *choices = (line[a + 1:b] for a, b in pairwise(commas))
    if sentence.startswith('"'):
        sentence = sentence[1:-1]
    first, blank, second = sentence.partition("_")
    if not blank:
        raise ValueError(f"no _ in the sentence {sentence!r:.60}")
    answer = whole_number(line[commas[3] + 1:])
    if answer not in (1, 2):
        raise ValueError(f"the answer is {line[commas[3] + 1:]!r:.60}, must be 1 or 2")
    return Task(number, where, first, tuple(choices), (answer - 1,), second)


class Cut(Exception):
    """A binary file ends before what it announces."""


@dataclass
class Bytes:
    """data: of a file.   at: where the next read begins."""
    data: bytes
    at: int = 0

    def take(self, n: int) -> bytes:
        if n > len(self.data) - self.at:
            raise Cut
        self.at += n
        return self.data[self.at - n:self.at]

    def numbers(self, n: int, kind: str = "I") -> tuple[int, ...]:
        return struct.unpack(f"<{n}{kind}", self.take(4 * n))

    def text(self) -> str:
        size, = self.numbers(1)
        return self.take(size).decode("utf-8", "surrogateescape")

    def answers(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        n, = self.numbers(1)
        if n > MOST_ANSWERS:
            raise UserError(f"it has {n} answers, must be {MOST_ANSWERS} at most")
        return tuple(self.text() for _ in range(n)), self.numbers(n, "i")


def read_multiple_choice(data: bytes, most: int) -> tuple[list[Task], list[str]]:
    """All tasks are read one after the other, drawn ones where the table says."""
    source = Bytes(data)
    try:
        n, = source.numbers(1)
        places = source.numbers(n)
    except Cut:
        raise UserError(f"it has {len(data)} bytes, which hold no table of tasks: not a file of multiple-choice") from None
    tasks = []
    for number in drawn_from_shrinking(n, most):
        if 0 < most < n:
            source.at = places[number]
        try:
            question, (answers, labels), _ = source.text(), source.answers(), source.answers()
        except Cut:
            raise UserError(f"task {number + 1} of {n} goes on behind the end of the file, at byte {len(data)}") from None
        except UserError as error:
            raise UserError(f"task {number + 1} of {n}: {error}") from None
        for what, text in ("question", question), *((f"answer {i}", answer) for i, answer in enumerate(answers, 1)):
            if not text:
                raise UserError(f"task {number + 1} of {n}: {what} is empty")
        tasks.append(Task(number, f"task {number + 1}", question, answers,
                          tuple(i for i, label in enumerate(labels) if label == 1)))
    return tasks, []


def read_json_lines(data: bytes, most: int) -> tuple[list[Task], list[str]]:
    """The first `most` tasks; 0: all."""
    tasks: list[Task] = []
    for n, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            try:
                tasks.append(json_task(json.loads(line.decode("utf-8")), len(tasks), f"line {n}"))
            except RecursionError:
                raise UserError(f"line {n}: is nested too deeply") from None
            except json.JSONDecodeError as error:
                raise UserError(f"line {n}: not JSON: {error}") from None
            except ValueError as error:
                raise UserError(f"line {n}: {error}") from None
    return tasks[:most or None], []


def json_task(value, number: int, where: str) -> Task:
    """ValueError for what is not one."""
    needed = "context", "continuations", "answer"
    if not isinstance(value, dict) or not {*needed} <= {*value} <= {*needed, "id"}:
        found = f"an object with {', '.join(value) or 'nothing'}" if isinstance(value, dict) else f"a {type(value).__name__}"
        raise ValueError(f"is {found:.120}, must be an object with {', '.join(needed)}, and id at will")
    context, continuations, answer = (value[name] for name in needed)
    if not isinstance(continuations, list) or len(continuations) < 2:
        raise ValueError("continuations must be a list of at least 2")
    for what, text in ("context", context), *((f"continuation {i}", each) for i, each in enumerate(continuations)):
        if not isinstance(text, str) and not (isinstance(text, list) and all(type(id) is int for id in text)):
            raise ValueError(f"{what} must be a text or a list of token ids")
    if type(answer) is not int or not 0 <= answer < len(continuations):
        raise ValueError(f"answer is {answer!r:.60}, must be the number of a continuation, 0 to {len(continuations) - 1}")
    return Task(number, where, context if isinstance(context, str) else tuple(context),
                tuple(each if isinstance(each, str) else tuple(each) for each in continuations), (answer,), id=value.get("id"))


# From tasks to token ids

def parts_behind_a_context(tokenizer: Tokenizer, task: Task) -> tuple[list[tuple[Pair, ...]], list[int]]:
    """hellaswag, multiple-choice: of the tokens of each "context ending", those behind what all begin with; normalised by their
    number."""
    texts = [tuple(tokenizer.encode(f"{task.context} {ending}")) for ending in task.endings]
    n = min((shared(texts[0], text) for text in texts), default=0)
    return [((text[:n], text[n:]),) for text in texts], [len(text) - n for text in texts]


def parts_around_a_blank(tokenizer: Tokenizer, task: Task) -> tuple[list[tuple[Pair, ...]], list[int]]:
    """winogrande: of the tokens of each sentence, those behind its choice, or, where a sentence has 3 or fewer behind what both
    begin with, all behind that; without the last one, unless it is the only one; normalised by their number.

    Where the second sentence's first scored token is the one that differs, llama.cpp takes its likelihood behind the whole first
    sentence, not behind the common beginning. So it is here, for the same choices.
    """
    first, second = (tuple(tokenizer.encode(f"{task.context}{choice}{task.behind}")) for choice in task.endings)
    n = shared(first, second)
    begins = [n, n]
    if min(len(first), len(second)) - n >= LEAST_BEHIND:
        begins = [len(tokenizer.encode(f"{task.context}{choice}")) for choice in task.endings]
    ends = [len(text) - (len(text) - begin > 1) for text, begin in zip((first, second), begins)]
    parts: list[tuple[Pair, ...]] = [((text[:begin], text[begin:end]),)
                                     for text, begin, end in zip((first, second), begins, ends)]
    if 0 < n == begins[1] < ends[1]:
        parts[1] = (first, second[n:n + 1]), (second[:n + 1], second[n + 1:ends[1]])
    return parts, [end - begin for begin, end in zip(begins, ends)]


def parts_of_pairs(tokenizer: Tokenizer, task: Task) -> tuple[list[tuple[Pair, ...]], list[int]]:
    """tasks: the pairs are those of `Model.score`; normalised by the characters of each continuation, without white space at its
    beginning, as lm-evaluation-harness has it."""
    pairs = [encode_pair(tokenizer, task.context, ending) for ending in task.endings]
    texts = [ending if isinstance(ending, str) else tokenizer.decode(ending) for ending in task.endings]
    return [(pair,) for pair in pairs], [max(1, len(text.lstrip())) for text in texts]


FORMATS = {
    "hellaswag": Format(read_hellaswag, parts_behind_a_context, least_tasks=1, n_tasks=400),
    "winogrande": Format(read_winogrande, parts_around_a_blank, first_of_equals=False),
    "multiple-choice": Format(read_multiple_choice, parts_behind_a_context),
    "tasks": Format(read_json_lines, parts_of_pairs),
}


def read_tasks(name: str, data: bytes, n_tasks: int, who: str, log=None) -> list[Task]:
    """name: of `FORMATS`.   data: of the file.   n_tasks: at most so many, 0: all.   who: the file, for messages. log: is told
    what was left out; None: `logging`."""
    try:
        tasks, left_out = FORMATS[name].read(data, n_tasks)
        if not tasks:
            raise UserError("; ".join(["no tasks", *left_out[:1]]))
    except UserError as error:
        raise UserError(printable(f"{who}: {error}")) from None
    if left_out:
        more = f" and {len(left_out) - 3} more" * (len(left_out) > 3)
        teller(log, logger.info)(printable(f"{name}: left out, as llama.cpp leaves them out: {'; '.join(left_out[:3])}{more}"))
    return tasks


def to_items(name: str, tasks: Sequence[Task], tokenizer: Tokenizer, n_ctx: int, who: str) -> list[Item]:
    """n_ctx: positions that an ending and what is before it may take."""
    found = []
    for task in tasks:
        def fail(problem: str, task: Task = task) -> UserError:
            return UserError(printable(f"{who}: {task.where}: {problem}"))
        given = [ids for ids in (task.context, *task.endings) if not isinstance(ids, str)]
        if any(not 0 <= id < tokenizer.n_vocab for ids in given for id in ids):
            raise fail(f"token ids must be 0 to {tokenizer.n_vocab - 1}")
        parts, lengths = FORMATS[name].parts(tokenizer, task)
        if not parts:
            raise fail("it has no endings")
        for i, each in enumerate(parts, 1):
            if not any(ids for _, ids in each) or lengths[i - 1] < 1:
                raise fail(f"ending {i} has no tokens of its own to score")
            if (n := max(len(context) + len(ids) - 1 for context, ids in each)) > n_ctx:
                raise fail(f"ending {i} takes {n} positions, allowed: up to {n_ctx}")
        found.append(Item(task, tuple(parts), tuple(lengths)))
    return found


# From likelihoods to choices

def answers(name: str, model, items: Sequence[Item], settings: Settings, progress: Callable[[int, int], None] | None = None,
            log=None) -> list[Answer]:
    """Of each item, all scored together, what they begin with alike once (`likelihood.score_many`)."""
    pairs = [pair for item in items for each in item.parts for pair in each]
    found = iter(score_many(model, pairs, settings, progress=progress, log=log))
    return [answer(name, item, [joined([next(found) for _ in each]) for each in item.parts]) for item in items]


def joined(parts: Sequence[Likelihood]) -> Likelihood:
    return parts[0] if len(parts) == 1 else Likelihood(tuple(id for each in parts for id in each.ids), tuple(
        logprob for each in parts for logprob in each.logprobs), all(each.is_greedy for each in parts))


def answer(name: str, item: Item, endings: Sequence[Likelihood]) -> Answer:
    values = [each.logprob / n for each, n in zip(endings, item.lengths)]
    first = FORMATS[name].first_of_equals
    return Answer(item, tuple(endings), tuple(values), largest([each.logprob for each in endings], first), largest(values, first))


def largest(values: Sequence[float], first: bool) -> int:
    """The number of the largest value, which NaN never is while there is another; of equal ones the first, or the last."""
    numbers = range(len(values)) if first else reversed(range(len(values)))
    return max(numbers, key=lambda i: -np.inf if isnan(values[i]) else values[i])
