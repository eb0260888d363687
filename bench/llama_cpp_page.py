"""Writes docs/llama-cpp-users.md: what became of each option of llama.cpp's tools, from the parser of each command and the tables
of ggml_py/cli/llama_cpp.py: python bench/llama_cpp_page.py"""
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import checkout  # noqa: F401

from ggml_py.cli.llama_cpp import ABSENT, ALWAYS, DIFFERENT, TOOLS, why
from ggml_py.cli.parser import Parser

HERE = Path(__file__).resolve().parent
PAGE, OPTIONS = HERE.parent / "docs" / "llama-cpp-users.md", HERE / "llama_cpp_options.txt"
BEGIN, END = "<!-- written by bench/llama_cpp_page.py -->\n", "<!-- end -->\n"
LETTERS = dict(zip("copibsq", ("llama-cli", "llama-completion", "llama-perplexity", "llama-imatrix", "llama-bench",
                               "llama-sweep-bench", "llama-quantize")))


class Option(NamedTuple):
    """names: spellings of the tool that have one fate here.   fate: same, different, always or absent; unknown is a gap in the
    tables.   how: in which way, why."""
    names: tuple[str, ...]
    has_value: bool
    fate: str
    how: str


def parser_of(command: str) -> Parser:
    parser = Parser(prog=f"ggml-py {command}")
    import_module(f"ggml_py.cli.{command.replace('-', '_')}").options(parser)
    return parser


def fate(parser: Parser, name: str, has_value: bool) -> tuple[str, str]:
    action = parser.known.get(name)
    if action is not None:
        how = why(DIFFERENT, parser.command, name)
        fits = action.nargs == "?" or (action.nargs != 0) == has_value
        return ("different", how) if how else ("same" if fits else "unknown", "")
    for kind, table in ("absent", ABSENT), ("always", ALWAYS):
        if (how := why(table, parser.command, name)) and not (kind == "always" and has_value):
            return kind, how
    return "unknown", ""


def options_of(tool: str) -> list[Option]:
    """In llama.cpp's order; spellings with other fates apart."""
    parser, found = parser_of(TOOLS[tool]), []
    for line in OPTIONS.read_text().splitlines():
        tools, _, rest = line.partition(" ")
        if line.startswith("#") or tool not in map(LETTERS.get, tools):
            continue
        names, has_value = rest.removesuffix("=").split(), rest.endswith("=")
        fates = {name: fate(parser, name, has_value) for name in names}
        found += [Option(tuple(name for name in names if fates[name] == each), has_value,
                         *each) for each in dict.fromkeys(fates.values())]
    return found


def spelled(options) -> str:
    return ", ".join(f"`{' '.join(option.names)}`" for option in options)


def grouped(options: list[Option], fate: str) -> str:
    """A row for each reason."""
    by_reason: dict[str, list[Option]] = {}
    for option in options:
        if option.fate == fate:
            by_reason.setdefault(option.how, []).append(option)
    return "".join(f"| {spelled(group)} | {how} |\n" for how, group in by_reason.items())


def tables() -> str:
    text = ""
    for tool, command in TOOLS.items():
        options = options_of(tool)
        count = {fate: sum(option.fate == fate for option in options) for fate in ("same", "different", "always", "absent")}
        text += (f"\n## {tool}: `ggml-py {command}`\n\n{len(options)} options: {count['same']} same, "
                 f"{count['different']} different, {count['always']} taken without effect, {count['absent']} absent.\n\n"
                 f"Same: {spelled(option for option in options if option.fate == 'same')}\n")
        for fate, head in (("different", "| different | how |"), ("always", "| taken, and nothing changes | since |"),
                           ("absent", "| absent | why |")):
            if rows := grouped(options, fate):
                text += f"\n{head}\n| --- | --- |\n{rows}"
    return text


def page() -> str:
    """The page with the tables that belong there."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + tables() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
