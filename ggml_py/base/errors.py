"""UserError: what the user asked for cannot be done. The command line prints its message as one line and exits with 2; a bug
keeps its traceback."""


def printable(text: str) -> str:
    """One line that no terminal obeys: characters that cannot be seen as Python writes them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def quoted(text: str | bytes, most: int = 80) -> str:
    """A text of a file for a message: quoted, on one line, cut after `most` characters."""
    return repr(text[:most]) + "..." * (len(text) > most)


class UserError(ValueError):
    """Its message is one line that says who, found, allowed."""


class ParameterError(UserError):
    """An argument that cannot be used.

    parameter: its name in Python, with which the message begins. Other parameters are named in `message` in the same way
    (n_batch): the command line, which has options for them, puts the options there (cli/main.py). names: the end of the message,
    which holds names of other things, and stays."""

    def __init__(self, parameter: str, message: str, names: str = ""):
        super().__init__(parameter, message, names)
        self.parameter, self.message, self.names = parameter, message, names

    def __str__(self) -> str:
        return f"{self.parameter}: {self.message}{self.names}"
