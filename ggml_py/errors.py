"""UserError: what the user asked for cannot be done. The command line prints its message as one line and exits with 2; a bug keeps its traceback."""


class UserError(ValueError):
    """Its message is one line that says who, found, allowed."""
