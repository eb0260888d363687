"""The options of tasks, which perplexity and attest share: from a file of tasks to what is scored."""
from pathlib import Path
from typing import NamedTuple

from ..base.errors import UserError
from . import corpus
from .loading import existing
from .options import section
from .parser import Parser, refuse
from .values import at_least

FORMATS = {  # of engine.tasks: where the file comes from, and how many tasks are taken by default
    "hellaswag": ("six lines each: context, number of the right ending, four endings", 1, 400),
    "winogrande": ("lines number,sentence with _,choice,choice,1 or 2", 0, 0),
    "multiple-choice": ("llama.cpp's binary file", 0, 0),
    "tasks": ("JSON lines {context, continuations, answer}", 0, 0),
}
NAMES = *(f"--{name}" for name in FORMATS), *(f"--{name}-tasks" for name in FORMATS)
OF_A_TEXT = ("--tokens", "--chunks", "--ppl-stride", "--ppl-output-type", "--kl-divergence", "--kl-divergence-base",
             "--root", *corpus.NAMES)


class Asked(NamedTuple):
    """name: of `engine.tasks.FORMATS`.   n_tasks: at most, 0: all."""
    name: str
    path: Path
    n_tasks: int

    def read(self, log):
        from ..engine.tasks import read_tasks
        return read_tasks(self.name, self.path.read_bytes(), self.n_tasks, str(self.path), log)


@section("tasks")
def options(p: Parser) -> None:
    for name, (help, least, default) in FORMATS.items():
        if name == "tasks":
            p.add_argument("--tasks", type=Path, metavar="FILE", help=f"score tasks, {help}")
            continue
        which = f"{default} of them, drawn as llama.cpp draws" if default else "all by default; else drawn as llama.cpp draws"
        p.add_argument(f"--{name}", nargs="?", type=Path, const=True, metavar="FILE",
                       help=f"score tasks of FILE, or of -f, in the place of a text: {help}")
        p.add_argument(f"--{name}-tasks", type=at_least(least), default=default, metavar="N", help=f"at most so many; {which}")


def asked(options) -> Asked | None:
    """UserError for options that do not go together."""
    names = [name for name in FORMATS if f"--{name}" in options.given.values()]
    for name in FORMATS:
        if name not in names:
            refuse(options, (f"--{name}-tasks",), f"is of --{name}, which is not given")
    if not names:
        return None
    name = names[0]
    if len(names) > 1:
        raise UserError(f"--{names[1]}: one kind of tasks at a time, --{name} is given too")
    refuse(options, OF_A_TEXT, f"is of a text, and --{name} asks for tasks")
    path, with_text = getattr(options, name.replace("-", "_")), "-f" in options.given.values()
    if path is True:
        if not with_text:
            raise UserError(f"--{name}: needs a file of tasks, behind it or by -f")
        path = options.text
    elif with_text:
        raise UserError(f"-f: the tasks are those of --{name} {path}")
    return Asked(name, existing(path), getattr(options, f"{name.replace('-', '_')}_tasks", 0))
