"""What the value of an option may be: functions from its text to the value, or to a ValueError, before which the parser puts
the option's name."""
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..base.placement import device_name
from .ranges import parse_numbers

T = TypeVar("T")


def _read(kind: Callable[[str], T], in_words: str, text: str) -> T:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"must be {in_words}, got {text!r}") from None


def at_least(least: int, most: int = 2**63 - 1) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = _read(int, "an integer", text)
        if value < least:
            raise ValueError(f"must be at least {least}, got {value}")
        if value > most:
            raise ValueError(f"must be at most {most}, got {value}")
        return value
    return parse


def all_or_at_least_one(text: str) -> int:
    """-1 stands for all."""
    return -1 if text == "-1" else at_least(1)(text)


def switch(text: str) -> bool | None:
    """None stands for auto."""
    return {"on": True, "off": False, "auto": None}[one_of("on", "off", "auto")(text)]


def logit_biases(text: str) -> dict[int, float]:
    """ID+BIAS or ID-BIAS, with commas between; -inf forbids a token."""
    found = {}
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)([+-](?:inf|\d*\.?\d+(?:e[+-]?\d+)?))", part)
        if match is None or match[2] == "+inf":
            raise ValueError(f"must be ID+BIAS or ID-BIAS, such as 15043+1 or 15043-inf, got {part!r}")
        found[int(match[1])] = float(match[2])
    return found


def json_object(text: str) -> dict:
    import json
    value = _read(json.loads, "JSON", text)
    if not isinstance(value, dict):
        raise ValueError(f"must be an object of JSON, got {text!r:.80}")
    return value


DRAFTS = {"draft-simple": "model", "draft-mtp": "mtp", "none": None, **dict.fromkeys((
    "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"), "ngram")}


def draft_kind(text: str) -> str | None:
    """Its name here; DRAFTS are llama.cpp's."""
    if text in DRAFTS:
        return DRAFTS[text]
    return one_of("ngram", "model", "mtp")(text)


def number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = _read(float, "a number", text)
        if not low <= value <= high:
            raise ValueError(f"must be {low:g} to {high:g}, got {text}")
        return value
    return parse


def numbers(least: int) -> Callable[[str], list[int]]:
    """Lists and ranges (ranges.py)."""
    return partial(parse_numbers, least=least)


def listed(parse_one: Callable[[str], T]) -> Callable[[str], list[T]]:
    """One or several with commas between."""
    return lambda text: [parse_one(part) for part in text.split(",")]


def one_of(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"must be {', '.join(allowed)}, got {text!r}")
        return text
    return parse


def output(check: Callable[[Path], None]) -> Callable[[str], Path]:
    """A path of what will be written, checked before anything is computed. check: of files/writing.py."""
    def parse(text: str) -> Path:
        check(Path(text))
        return Path(text)
    return parse


def sha256(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", text.lower()):
        raise ValueError(f"must be 64 hexadecimal digits, got {text!r}")
    return text.lower()


def device(text: str) -> str:
    """Its name here; CPU and CUDA0 are llama.cpp's."""
    if not (found := re.fullmatch(r"(auto|cpu|cuda):?([0-9]*)", text.lower())) or (found[1] == "auto" and text != "auto"):
        raise ValueError(f"must be auto, cpu, cpu:N, cuda or cuda:N, got {text!r}")
    return device_name(found[1], int(found[2] or 0))


def devices(text: str) -> str:
    """Of several that share a model, with / between."""
    return "/".join(device(part) for part in text.split("/"))


def overrides(text: str) -> list[tuple[str, str]]:
    """REGEX=DEVICE[,REGEX=DEVICE]; a comma ends a pattern only behind a device."""
    found = re.findall(r"(.+?)=((?:auto|cpu|cuda):?[0-9]*)(?:,|$)", text, re.IGNORECASE)
    if not found or ",".join(f"{pattern}={name}" for pattern, name in found) != text:
        raise ValueError(f"must be REGEX=DEVICE[,REGEX=DEVICE], with devices cpu, cpu:N, cuda or cuda:N, got {text!r}")
    return [(pattern, device(name)) for pattern, name in found]


def weight_type(text: str) -> str:
    """The name of a type that weights can be quantized to, in any case."""
    from ..quant.encode import ENCODERS
    return one_of(*ENCODERS)(text.upper())


def tensor_type(text: str) -> tuple[str, str]:
    """REGEX=TYPE; what is before the last = is the pattern."""
    pattern, sign, name = text.rpartition("=")
    if not (sign and pattern):
        raise ValueError(f"must be REGEX=TYPE, got {text!r}")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"must be a regular expression before =, got {pattern!r}: {error}") from None
    return pattern, weight_type(name)


def proportions(text: str) -> list[float]:
    return [number(0, 1e9)(part) for part in re.split("[,/]", text)]


def split_mode(text: str) -> str:
    """llama.cpp's "tensor" is "column" here."""
    return "column" if text == "tensor" else text


def layers(text: str) -> int | None:
    """None stands for all."""
    if "," in text:
        raise ValueError(f"must be one number, since all tests of a command have one placement, got {text!r}")
    return None if text in ("all", "auto", "-1", "-2") else at_least(0)(text)


def offload(text: str) -> list[tuple[str, int | None]]:
    """NAME=N[,NAME=never]; a number counts tokens."""
    found = []
    for part in text.split(","):
        name, sign, least = part.partition("=")
        if not sign:
            raise ValueError(f"must be NAME=N[,NAME=never], got {text!r}")
        found.append((name, None if least == "never" else at_least(1)(least)))
    return found


def flash_attention(text: str) -> int:
    if {*text.split(",")} & {"0", "off"}:
        raise ValueError(f"{text} is not possible: attention is one fused op on every device, whose arithmetic is part of the "
                         "promise of equal bits")
    one_of("1", "on", "auto")(text)
    return 1


def pass_names(text: str) -> tuple[str, ...]:
    from ..graph.fuse import switched_off
    names = tuple(text.split(","))
    switched_off(names)
    return names


def prompt_and_generation(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2:
        raise ValueError(f"must be PROMPT,GENERATED, got {text!r}")
    return at_least(1)(parts[0]), at_least(1)(parts[1])


def day(text: str) -> str:
    """YYYY-MM-DD; today stands for the clock's."""
    from datetime import date, datetime
    if text == "today":
        return date.today().isoformat()
    return _read(lambda text: datetime.strptime(text, "%Y-%m-%d").date().isoformat(), "YYYY-MM-DD or today", text)
