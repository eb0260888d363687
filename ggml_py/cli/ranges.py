"""Lists of numbers as llama-bench takes them: comma lists of n, first-last, first-last+step and first-last*factor."""
import re
from itertools import chain, islice

RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?:([+*])(\d{1,9}))?)?", re.ASCII)
MOST_VALUES = 1000


def parse_numbers(text: str, least: int = 0) -> list[int]:
    """The numbers of a list such as "512", "1-4" (1, 2, 3, 4), "0-100+50,7" (0, 50, 100, 7) or "1-10*3" (1, 3, 9).
    ValueError for anything else."""
    values = list(islice(chain.from_iterable(map(parse_range, text.split(","))), MOST_VALUES + 1))
    if len(values) > MOST_VALUES:
        raise ValueError(f"{text!r} has more than {MOST_VALUES} values")
    if min(values) < least:
        raise ValueError(f"must be at least {least}, got {min(values)}")
    return values


def parse_range(text: str) -> range | list[int]:
    match = RANGE.fullmatch(text)
    if match is None:
        raise ValueError(f"must be a number of at most 9 digits, first-last, first-last+step or first-last*factor, got {text!r}")
    operator, first, last, by = match[3], int(match[1]), int(match[2] or match[1]), int(match[4] or 1)
    if last < first:
        raise ValueError(f"{text!r}: the last is less than the first")
    if by < (2 if operator == "*" else 1) or (operator == "*" and not first):
        raise ValueError(f"{text!r} never ends: a step must be at least 1, a factor at least 2 and what it multiplies at least 1")
    if operator != "*":
        return range(first, last + 1, by)
    values = [first]
    while values[-1] * by <= last:
        values.append(values[-1] * by)
    return values
