"""A progress bar with the remaining time on a terminal, nothing elsewhere."""


class Progress:
    """Context manager over `total` steps of `label`; `advance()` after each step.

    Drawn on `stream` when that is a terminal, unless rows are written meanwhile to `beside` and that is a terminal too: bar and rows would mix.
    """

    def __init__(self, stream, label: str, total: int, beside=None):
        self.bar = None
        if stream.isatty() and not (beside and beside.isatty()):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
                       TimeRemainingColumn()]
            self.bar = Bar(*columns, console=Console(file=stream), transient=True, redirect_stdout=False, redirect_stderr=False)
            self.task = self.bar.add_task(label, total=total)

    def __enter__(self):
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *exc):
        if self.bar:
            self.bar.stop()

    def advance(self, note: str = ""):
        """One step is done; note: what to show before the bar from now on, unchanged if empty."""
        if self.bar:
            self.bar.update(self.task, advance=1, **({"description": note} if note else {}))
