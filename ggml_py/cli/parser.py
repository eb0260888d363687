"""The parser of a command's options: every option as it is written in --help, nothing guessed."""
import argparse
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from .. import __version__
from ..base.errors import UserError


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that say something: not None, nor an empty list of names, nor that a switch is off or on."""

    def _get_help_string(self, action):
        silent = action.default in (None, (), [], {}) or action.nargs == 0
        return action.help if silent else super()._get_help_string(action)

    def _format_usage(self, usage, actions, groups, prefix):
        """With what must be given; what may be is listed below."""
        if prefix == "":  # the names of subcommands are made so
            return super()._format_usage(usage, actions, groups, prefix)
        needed = [action for action in actions if action.required or not action.option_strings]
        return super()._format_usage(usage, needed, [], prefix).replace(self._prog, f"{self._prog} [OPTION ...]", 1)


class ListDevices(argparse.Action):
    """Shows the devices of this machine, by the names that -dev takes, and ends the program."""

    def __init__(self, option_strings, dest, help):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help, default=argparse.SUPPRESS)

    def __call__(self, parser, namespace, values, option_string=None):
        from ..backends import described_devices
        print("Available devices:", *described_devices(), sep="\n  ")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An option is a word of its own, in full: neither abbreviated nor glued to its value (-t4) or to another (-hv). Mistakes are
    a UserError.

    option_of: for each name in the parsed options, which is that of the parameter in Python, the option as the user knows it,
    such as type_k: -ctk; of several the one that was typed. The parsed options hold it as `option_of`, and as `given` each option
    that was typed: its first name."""

    def __init__(self, **settings):
        self.option_of: dict[str, str] = {}
        self.sections: dict[str, argparse._ArgumentGroup] = {}
        self.of_section: argparse._ArgumentGroup | None = None
        self.known: dict[str, argparse.Action] = {}
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **settings)
        self.add_argument("--version", action="version", version=f"ggml-py {__version__}", help="show it and exit")

    def add_argument(self, *names, **settings):
        action = (self.of_section.add_argument if self.of_section else super().add_argument)(*names, **settings)
        self.known.update(dict.fromkeys(action.option_strings, action))
        self.option_of[action.dest] = action.option_strings[0] if action.option_strings else str(action.metavar or action.dest)
        return action

    @contextmanager
    def section(self, title: str) -> Iterator[None]:
        """Options that are added in the block stand under this title in --help."""
        before = self.of_section
        self.of_section = self.sections.get(title) or self.sections.setdefault(title, self.add_argument_group(title))
        try:
            yield
        finally:
            self.of_section = before

    @property
    def command(self) -> str:
        return self.prog.rpartition(" ")[2]

    def parse(self, args: list[str]) -> argparse.Namespace:
        args, given = self.check(args)
        typed: dict[str, set[str]] = {}
        for name in given.values():
            typed.setdefault(self.known[name].dest, set()).add(name)
        option_of = self.option_of | {dest: name for dest, (name, *others) in typed.items() if not others}
        return self.parse_args(args, argparse.Namespace(given=given, option_of=option_of))

    def _get_value(self, action, text: str):
        """What a value must be is said by whatever reads it (values.py), of which argparse itself drops the message."""
        try:
            return action.type(text) if action.type else text
        except ValueError as error:
            raise argparse.ArgumentError(action, str(error).removeprefix(f"{action.dest}: ")) from None

    def check(self, args: list[str]) -> tuple[list[str], dict[str, str]]:
        """The arguments without llama.cpp's switches for what is so anyway, and the options among them, as typed: their first
        names. UserError for one that is unknown."""
        kept: list[str] = []
        given: dict[str, str] = {}
        waiting = None  # for its value: the option before
        switch = ""  # before the word
        takes_words = any(not action.option_strings for action in self._actions)
        for i, word in enumerate(args):
            if word == "--":
                return kept + args[i:], given
            if switch and not takes_words and not is_option(word):
                self.error(f"{switch}: is a switch, without a value, got {word!r}")
            switch = ""
            name = word if word in self.known else word.partition("=")[0]
            if name in self.known:
                given[name] = self.known[name].option_strings[0]
            elif is_option(word):
                from .llama_cpp import ABSENT, ALWAYS, why
                if reason := why(ABSENT, self.command, name):
                    self.error(f"{name}: {reason}")
                if word == name and why(ALWAYS, self.command, name):
                    waiting, switch = None, word
                    continue
                hint = f"; a value that begins with - is written {waiting.option_strings[-1]}={word}" if waiting else ""
                self.error(f"{word}: unknown option{hint}")
            kept.append(word)
            waiting = self.known.get(word)
            if waiting and waiting.nargs == 0:
                waiting, switch = None, word
        return kept, given

    def _get_option_tuples(self, option_string):
        return []  # argparse asks here what a word could be short for, or glued of

    def exit(self, status=0, message=None):
        sys.stdout.flush()  # the help
        super().exit(status, message)

    def error(self, message):
        raise UserError(f"{message} (see {self.prog} --help)")


def is_option(word: str) -> bool:
    """Whether a word must be an option: it begins with - and is no number; nor a text, which has spaces."""
    return word.startswith("-") and word != "-" and " " not in word and not re.fullmatch(r"-\d+|-\d*\.\d+", word)


def refuse(options, names, why: str) -> None:
    """What does not apply is not dropped in silence. names: first names of options."""
    for typed, name in options.given.items():
        if name in names:
            raise UserError(f"{typed}: {why}")
