"""Tables of stdout."""
import re
import sys


def new_table(*columns: str, title=None, right: tuple[str, ...] = ()):
    """Columns from the left, those of `right` aligned to the right."""
    from rich import box
    from rich.table import Table
    table = Table(*columns, title=title, box=box.SIMPLE, title_justify="left")
    for column in right:
        table.add_column(column, justify="right")
    return table


def size(n_bytes: int) -> str:
    return f"{n_bytes:,} ({n_bytes / 1e6:,.1f} MB)"


def print_tables(*tables) -> None:
    """As wide as a terminal, elsewhere of 200 characters; no line ends in spaces."""
    from rich.console import Console
    out = sys.stdout
    console = Console(file=out, width=None if out.isatty() else 200, highlight=False, markup=False)
    with console.capture() as capture:
        for table in tables:
            console.print(table)
    out.write(re.sub(r" +$", "", capture.get(), flags=re.MULTILINE))
