"""The parser of a command's options: every option as it is written in --help, nothing guessed."""
import argparse
import re
import sys

from ..base.errors import UserError


# Options of llama.cpp and ik_llama.cpp that have no meaning here, and why
REPACK = "weights are packed into tiles whenever they are loaded"
FUSED = "fused wherever a device has a kernel for it; --no-fuse leaves it out"
LATENT, SCORES = "latent attention is one definition, that of the file", "attention keeps no scores in memory"
OFFLOAD = "ops have names here, not numbers, which would mean others in the next version: --offload NAME=N"
NOT_HERE = {"-rtr": REPACK, "--run-time-repack": REPACK, "-fmoe": FUSED, "--fused-moe": FUSED, "-mla": LATENT,
            "--mla-use": LATENT, "-amb": SCORES, "--attention-max-batch": SCORES, "-op": OFFLOAD, "--offload-policy": OFFLOAD,
            "-gp": "generation behind a prompt is -n with -d"}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that say something: not None, nor an empty list of names, nor that a switch is off or on."""

    def _get_help_string(self, action):
        silent = action.default in (None, ()) or action.nargs == 0
        return action.help if silent else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """An option is a word of its own, in full: neither abbreviated nor glued to its value (-t4) or to another (-hv). Mistakes are
    a UserError.

    option_of: for each name in the parsed options, which is that of the parameter in Python, the option as the user knows it,
    such as type_k: -ctk. The parsed options hold it as `option_of`, and as `given` each option that was typed: its first name."""

    def __init__(self, **settings):
        self.option_of: dict[str, str] = {}
        self.known: dict[str, argparse.Action] = {}
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **settings)

    def add_argument(self, *names, **settings):
        action = super().add_argument(*names, **settings)
        self.known.update(dict.fromkeys(action.option_strings, action))
        self.option_of[action.dest] = action.option_strings[0] if action.option_strings else str(action.metavar or action.dest)
        return action

    def parse(self, args: list[str]) -> argparse.Namespace:
        given = self.check(args)
        return self.parse_args(args, argparse.Namespace(given=given, option_of=self.option_of))

    def _get_value(self, action, text: str):
        """What a value must be is said by whatever reads it (values.py), of which argparse itself drops the message."""
        try:
            return action.type(text) if action.type else text
        except ValueError as error:
            raise argparse.ArgumentError(action, str(error).removeprefix(f"{action.dest}: ")) from None

    def check(self, args: list[str]) -> dict[str, str]:
        """The options among the arguments, as typed: their first names. UserError for one that is unknown."""
        given, waiting = {}, None  # for its value: the option before
        for word in args:
            if word == "--":
                break
            name = word if word in self.known else word.partition("=")[0]
            if name in self.known:
                given[name] = self.known[name].option_strings[0]
            elif name in NOT_HERE:
                self.error(f"{name}: {NOT_HERE[name]}")
            elif is_option(word):
                hint = f"; a value that begins with - is written {waiting.option_strings[-1]}={word}" if waiting else ""
                self.error(f"{word}: unknown option{hint}")
            waiting = self.known.get(word)
            if waiting and waiting.nargs == 0:
                waiting = None
        return given

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
