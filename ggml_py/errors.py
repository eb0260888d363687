"""UserError: what the user asked for cannot be done. The command line prints its message as one line and exits with 2; a bug keeps its traceback."""


def printable(text: str) -> str:
    """One line that no terminal obeys: characters that cannot be seen as Python writes them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class UserError(ValueError):
    """Its message is one line that says who, found, allowed."""
