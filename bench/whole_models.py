"""What the benchmarks of whole models share: the synthetic models of a table, and the beginning of a record."""
import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import checkout  # noqa: F401

import synth
from ggml_py.backends import open_backend
from ggml_py.base.errors import UserError
from ggml_py.engine.model import Model
from records import conditions, dump


def written(folder: Path, shape: str, type_: str, n_nextn: int = 0) -> Path:
    """The model's file, which is written where it is missing."""
    path = folder / f"{shape}-{type_.lower()}{'-nextn' * (n_nextn > 0)}.gguf"
    if not path.exists():
        partial = path.with_suffix(".partial")
        synth.write(partial, replace(synth.SHAPES[shape], n_nextn=n_nextn), type_).rename(path)
    return path


def median_seconds(action: Callable, n_repetitions: int, n_before: int) -> float:
    """Of the repetitions, behind n_before times that do not count: those that compile, and capture graphs."""
    seconds = []
    for _ in range(n_before + n_repetitions):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[n_before:])


def verdict(found: float, figure) -> str:
    """figure: what must and should be reached, `must` and `goal`."""
    return "goal" if found >= figure.goal else "met" if found >= figure.must else "missed"


def chosen(p: argparse.ArgumentParser, only: str | None, known: Iterable[str]) -> list[str]:
    """The names of --only, all that are known without it."""
    names = only.split(",") if only else list(known)
    if unknown := [name for name in names if name not in known]:
        p.error(f"--only: unknown {', '.join(unknown)}; known: {', '.join(known)}")
    return names


def record_rows(p: argparse.ArgumentParser, program: str, options: argparse.Namespace, keys: Mapping[str, tuple[str, str]],
                numbers: str, row: Callable[[Model, str, int], dict]) -> int:
    """Prints a row for each model that --only names and each of the numbers, which commas separate, and writes the record.
    keys: name -> shape and type of a model."""
    names = chosen(p, options.only, keys)
    record, device = begun_record(p, program, options.device)
    rows: list[dict] = []
    for name in names:
        with Model.load(str(written(options.models, *keys[name])), device) as model:
            for n in map(int, numbers.split(",")):
                rows.append(row(model, name, n))
                print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
        options.out.write_text(dump(record, "rows", rows))  # what was measured stays, should a later model fail
    return 0


def begun_record(p: argparse.ArgumentParser, program: str, device: str) -> tuple[dict, str]:
    """(a record that has no rows yet, the name of the device)."""
    try:
        backend = open_backend(device)
    except UserError as error:
        p.error(str(error))
    record = {"command": " ".join([f"bench/{program}", *sys.argv[1:]]), **conditions(backend)}
    backend.close()
    return record, backend.device
