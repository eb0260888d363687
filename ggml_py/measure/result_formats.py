"""The results of `ggml-py bench` as Markdown, CSV, JSON, JSON lines and SQL. A writer is a context; `write` takes one result,
printed at once."""
import csv
import json
from dataclasses import asdict, fields
from typing import Any, Self

from .benchmark import Result, in_short

LISTS = [field.name for field in fields(Result) if field.type is list]          # in JSON alone
SQL_TYPES: dict[Any, str] = {str: "TEXT", int: "INTEGER", float: "REAL", float | None: "REAL"}  # of the other fields
COLUMNS = {field.name: SQL_TYPES[field.type] for field in fields(Result) if field.name not in LISTS}
TABLE = "ggml_py_bench"


class Writer:
    """columns: names of further fields that Markdown shows. A run that fails before its first result prints nothing."""

    def __init__(self, out, columns: list[str]):
        self.out, self.columns, self.n_results = out, columns, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        if self.n_results:
            self.end()

    def write(self, result: Result) -> None:
        if not self.n_results:
            self.begin()
        self.n_results += 1
        self.row(result)

    def begin(self) -> None:
        pass

    def row(self, result: Result) -> None:
        raise NotImplementedError

    def end(self) -> None:
        pass

    def print(self, text: str, end: str = "\n") -> None:
        print(text, end=end, file=self.out, flush=True)


class Both:
    """Two writers, of two streams."""

    def __init__(self, *writers: Writer):
        self.writers, self.out = writers, writers[0].out

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        for writer in self.writers:
            writer.__exit__(*exception)

    def write(self, result: Result) -> None:
        for writer in self.writers:
            writer.write(result)


def scalars(result: Result) -> dict:
    return {name: getattr(result, name) for name in COLUMNS}


class Markdown(Writer):
    """Model, size, parameters and device, what differs from the defaults, the test,
    t/s and their share of the floor that memory sets."""

    def begin(self) -> None:
        # negative: to the left
        self.widths = {"model": -28, "size": 10, "params": 8, "device": -8, **{name: len(name) for name in self.columns},
                       "test": 16, "t/s": 20, "of floor": 8}
        self.memory: dict[str, str] = {}
        self.cells(list(self.widths))
        self.cells([(abs(width) - 1) * "-" + ("-" if width < 0 else ":") for width in self.widths.values()])

    def cells(self, texts: list[str]) -> None:
        aligned = (text.ljust(-width) if width < 0 else text.rjust(width) for text, width in zip(texts, self.widths.values()))
        self.print(f"| {' | '.join(aligned)} |")

    def row(self, result: Result) -> None:
        self.memory[result.device] = f"{result.device} ({result.device_name}) copies {result.copy_GB_s:.1f} GB/s"
        self.version, share = result.version, result.memory_share
        self.cells([result.model_type, f"{result.model_size / 1e9:.2f} GB", in_short(result.model_n_params), result.device,
                    *(str(getattr(result, name)) for name in self.columns), result.test,
                    f"{result.avg_ts:.2f} ± {result.stddev_ts:.2f}", "" if share is None else f"{100 * share:.1f} %"])

    def end(self) -> None:
        self.print(f"\nggml-py {self.version}; memory: {', '.join(self.memory.values())}")


class CSV(Writer):
    """Every value quoted; a missing one is empty."""

    def begin(self) -> None:
        self.rows = csv.writer(self.out, quoting=csv.QUOTE_ALL, lineterminator="\n")
        self.rows.writerow(COLUMNS)

    def row(self, result: Result) -> None:
        self.rows.writerow(scalars(result).values())
        self.out.flush()


class JSON(Writer):
    """An array of objects, closed also where a run breaks off."""

    def begin(self) -> None:
        self.print("[", end="")
        self.before = "\n"

    def row(self, result: Result) -> None:
        text = json.dumps(asdict(result), indent=1, ensure_ascii=False).replace("\n", "\n ")
        self.print(f"{self.before} {text}", end="")
        self.before = ",\n"

    def end(self) -> None:
        self.print("\n]")


class JSONLines(Writer):
    def row(self, result: Result) -> None:
        self.print(json.dumps(asdict(result), ensure_ascii=False))


class SQL(Writer):
    """The table, unless it is there, and a row for each result."""

    def begin(self) -> None:
        columns = ",\n".join(f"  {name} {type_}" for name, type_ in COLUMNS.items())
        self.print(f"CREATE TABLE IF NOT EXISTS {TABLE} (\n{columns}\n);\n")

    def row(self, result: Result) -> None:
        self.print(f"INSERT INTO {TABLE} ({', '.join(COLUMNS)}) VALUES ({', '.join(map(literal, scalars(result).values()))});")


def literal(value) -> str:
    """Of SQL."""
    if value is None:
        return "NULL"
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)


WRITERS = {"md": Markdown, "csv": CSV, "json": JSON, "jsonl": JSONLines, "sql": SQL}
