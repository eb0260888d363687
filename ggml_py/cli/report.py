"""A result as one page of HTML that needs nothing else, neither network nor script: verdict, plots, tables, what ran where, and
by which command. report.html is its form, for light and dark screens and for paper."""
import platform
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import floor, log10
from pathlib import Path
from typing import ClassVar

from ..files.writing import write

SECRET = "--token"  # an option whose value no page shows


@dataclass(frozen=True)
class Mark:
    """A word of a cell. style: classes of report.html; hint: what is shown where the mouse points."""
    text: str
    style: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Table:
    """right: numbers of the columns that are aligned to the right."""
    kind: ClassVar[str] = "table"
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Sequence[Mark]]]
    right: frozenset[int] = frozenset()
    text: str = ""
    note: str = ""


@dataclass(frozen=True)
class Text:
    kind: ClassVar[str] = "text"
    title: str
    body: str
    text: str = ""


@dataclass(frozen=True)
class Chart:
    """A line through points (x, y), both from 0 up; what SVG draws are the properties, in its units."""
    kind: ClassVar[str] = "chart"
    title: str
    values: Sequence[tuple[float, float]]
    x_label: str
    y_unit: str
    text: str = ""
    width: ClassVar[int] = 780
    height: ClassVar[int] = 270
    left: ClassVar[int] = 64
    right: ClassVar[int] = 762
    top: ClassVar[int] = 12
    bottom: ClassVar[int] = 226

    def _at(self, x: float, y: float) -> tuple[float, float]:
        return (round(self.left + (self.right - self.left) * x / self._most_x, 1),
                round(self.bottom - (self.bottom - self.top) * y / ticks(self._most_y)[-1], 1))

    @property
    def _most_x(self) -> float:
        return max(x for x, _ in self.values) or 1

    @property
    def _most_y(self) -> float:
        return max(y for _, y in self.values) or 1

    @property
    def x_ticks(self) -> list[tuple[float, str]]:
        return [(self._at(x, 0)[0], f"{x:,.6g}") for x in ticks(self._most_x) if x <= self._most_x]

    @property
    def y_ticks(self) -> list[tuple[float, str]]:
        return [(self._at(0, y)[1], f"{y:,.6g}") for y in ticks(self._most_y)]

    @property
    def points(self) -> list[tuple[float, float, str]]:
        return [(*self._at(x, y), f"{y:,.2f} {self.y_unit} at {x:,.6g}") for x, y in self.values]

    @property
    def radius(self) -> float:
        return 3.5 if len(self.values) <= 40 else 2


def ticks(most: float) -> list[float]:
    """0 and up by steps of 1, 2 or 5 times a power of ten, at most six, the last not below `most`."""
    power = 10.0 ** floor(log10(most / 5))
    step = next(n * power for n in (1, 2, 5, 10) if n * power * 5 >= most)
    return [i * step for i in range(next(n for n in range(1, 7) if n * step >= most) + 1)]


def command_of(options) -> str:
    """What was typed, without secrets."""
    words, hidden = [], False
    for word in options.args:
        name, equals, _ = word.partition("=")
        is_secret = options.given.get(name) == SECRET
        words.append("..." if hidden else f"{name}=..." if is_secret and equals else word)
        hidden = is_secret and not equals
    return shlex.join(["ggml-py", options.command, *words])


def write_report(path: Path, options, title: str, verdict: str, is_good: bool | None, parts: Sequence[Table | Chart | Text],
                 environment: dict, **facts: str) -> None:
    """environment: as `check.attestation.environment_of` gives it; facts: what else there is to say of the run."""
    from jinja2 import Environment, StrictUndefined
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    facts = {**facts, "device": environment["device"], "name": environment["device_name"],
             **({"driver": environment["driver"]} if environment["driver"] != "none" else {}), "system": platform.platform(),
             "versions": versions, "written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"}
    form = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(
        Path(__file__).with_name("report.html").read_text("utf-8"))
    mark = {None: "", True: "good", False: "bad"}[is_good]
    page = form.render(title=title, verdict=verdict, mark=mark, parts=parts, facts=facts, command=command_of(options))
    write(path, (page + "\n").encode("utf-8", "backslashreplace"))
