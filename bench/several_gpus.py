"""Two GPUs against one: python bench/several_gpus.py --models /dev/shm --out bench/results/NAME.json

Prompts of 4096 and of 16384 tokens, each at the micro-batch that is fastest of those tried, and generation of 128 tokens, for
one GPU, two by layers and two by columns. A row is a model on a placement; rows that the record has are not measured again, so
a run that was cut off goes on. The logits of each row must be those of the row of one GPU. `--letters` times what GPUs hand to
each other from within their kernels and by copies.
"""
import argparse
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import checkout  # noqa: F401
import numpy as np

from ggml_py.base.placement import PlacementOptions
from ggml_py.engine.context import Context
from ggml_py.engine.model import Model
from ggml_py.testing import digest
from records import dump
from whole_models import begun_record, median_seconds, written

DEVICES = "cuda:0", "cuda:1"
PROMPTS, N_GENERATED = (4096, 16384), 128


class Row(NamedTuple):
    """options: of `PlacementOptions`. n_ubatch: micro-batches that are tried. must, goal: how many times one GPU's speed, of the
    prompts and of generation; 0: not asked for."""
    name: str
    devices: tuple[str, ...]
    options: dict
    n_ubatch: tuple[int, ...]
    must: tuple[float, ...] = (0, 0, 0)
    goal: tuple[float, ...] = (0, 0, 0)
    letters: bool = True


BY_LAYERS, BY_COLUMNS = dict(split_mode="layer"), dict(split_mode="column")
TABLE = {
    "llama-3-8b": [
        Row("one", DEVICES[:1], {}, (512, 1024, 2048)),
        Row("layer", DEVICES, BY_LAYERS, (256, 512, 1024), (1.5, 1.75, 0.95), (1.7, 1.9, 0.98)),
        Row("column", DEVICES, BY_COLUMNS, (1024, 2048, 4096), (1.5, 0, 1.15), (1.8, 0, 1.5)),
        Row("layer, copies", DEVICES, BY_LAYERS, (256, 512), letters=False),
        Row("column, copies", DEVICES, BY_COLUMNS, (2048,), letters=False)],
    "qwen3-30b-a3b": [
        Row("one", DEVICES[:1], {}, (1024, 2048, 4096)),
        Row("column", DEVICES, BY_COLUMNS, (1024, 2048, 4096), (1.3, 0, 1.0), (1.6, 0, 1.3)),
        Row("layer", DEVICES, BY_LAYERS, (512, 1024)),
        Row("column, copies", DEVICES, BY_COLUMNS, (2048,), letters=False)],
}


def prompt_speed(context: Context, tokens: np.ndarray, n_repetitions: int) -> float:
    def prompt():
        context.clear()
        context.decode(tokens, logits="argmax")
    return len(tokens) / median_seconds(prompt, n_repetitions, 1)


def logits_digest(context: Context, tokens: np.ndarray) -> str:
    """Of a prompt of 300 and 512 tokens behind it, and of ten more, one by one."""
    context.clear()
    rows = [context.decode(tokens[:300]), context.decode(tokens[300:812])]
    rows += [context.decode([token]) for token in (1, 2, 3, 4, 5, 6)]
    ids = [*context.greedy(7, 4)]
    return digest(np.concatenate([*rows, context.decode(ids)]))


def measured(path: Path, row: Row, n_repetitions: int, prompts: tuple[int, ...]) -> dict:
    tokens = np.random.default_rng(0).integers(0, 300, max(prompts)).astype(np.int32)
    found: dict = {"seconds to load": round(-time.perf_counter(), 1)}
    with Model.load(str(path), placement=PlacementOptions(row.devices, **row.options)) as model:
        found["seconds to load"] = round(found["seconds to load"] + time.perf_counter(), 1)
        with model.new_context(4096, letters=row.letters) as context:
            context.decode(tokens[:16])
            speed = N_GENERATED / median_seconds(lambda: [*context.greedy(1, N_GENERATED)], 3, 1)
            found |= {"tg": round(speed, 1), "digest": logits_digest(context, tokens)}
            print(f"{row.name}: generation {speed:.1f}, loaded in {found['seconds to load']} s, {found['digest'][:12]}",
                  flush=True)
        for n in prompts:
            for n_ubatch in row.n_ubatch:
                with model.new_context(n, n_ubatch=n_ubatch, n_batch=n, letters=row.letters) as context:
                    speed = prompt_speed(context, tokens[:n], n_repetitions if n < PROMPTS[1] else 2)
                found[f"pp{n} -ub {n_ubatch}"] = round(speed)
                print(f"{row.name}: prompt of {n} -ub {n_ubatch}: {speed:.0f}", flush=True)
            found[f"pp{n}"] = max(found[f"pp{n} -ub {n_ubatch}"] for n_ubatch in row.n_ubatch)
    return found


def hand_overs(n: int = 64) -> list[dict]:
    """us of a letter of each size within a graph, both ways at a time (`exchange`), and there and back (`round trip`); GB/s of a
    copy."""
    from ggml_py.backends import open_backend
    from ggml_py.kernels.cuda.letters import ENDED, FAULT, ROW, SEALED, SEQ, letter, turn
    backends = [open_backend(device) for device in DEVICES]
    assert all(a.reaches(b) for a in backends for b in backends if a is not b), "these GPUs do not reach each other's memory"
    rows = []
    for size in (4 << 10, 16 << 10, 64 << 10, 512 << 10, 4 << 20):
        row: dict = {"bytes": size}
        for kind in "exchange", "round trip":
            boxes, sources = [[b.empty(size) for b in backends] for _ in range(2)]
            mailboxes = [b.empty(SEALED + 4 * size) for b in backends]  # letters lie in two places by turns
            graphs, kept = [], []
            for i, backend in enumerate(backends):
                backend.write(mailboxes[i], 4 * SEQ, np.int32([1]))
                table = np.zeros((n, ROW), np.int64)
                table[:, 0] = int(mailboxes[1 - i].handle) + SEALED + 2 * size * (np.arange(n) % 2)
                table[:, 1], table[:, 2] = size // 4, 1 + np.arange(n)
                table[0, 3] = ENDED + 1 - i
                to = backend.upload(table)
                others = backend.upload(np.int64([int(mailboxes[1 - i].handle) + 4 * (ENDED + i)]))
                kept += [to, others]
                steps = []
                for k in range(n):
                    post = int(sources[i].handle), int(to.handle) + 8 * ROW * k, 1, 1, size // 4
                    box = int(mailboxes[i].handle)
                    take = int(boxes[i].handle), box + SEALED + 2 * size * (k % 2), size // 4, k + 1
                    if kind == "exchange":
                        steps.append(letter(backend.target, box, post, take, k + 1))
                    else:  # the first posts, then takes; the second takes, then posts
                        both = [letter(backend.target, box, post, None, k + 1), letter(backend.target, box, None, take, k + 1)]
                        steps += both[::1 if i == 0 else -1]
                steps.append(turn(backend.target, box, int(others.handle), 1))
                backend.load()
                backend.run([letter(backend.target, box)])
                cache = backend.new_graphs()
                graphs.append((cache, cache.ready(("hand-overs",), steps), steps))
            for backend in backends:
                backend.stream.sync()

            def replay(graphs=graphs, n_times=10):
                for _ in range(n_times):
                    for cache, graph, _ in graphs:
                        cache.replay(graph)
                for backend in backends:
                    backend.stream.sync()
            row[kind] = round(1e6 * median_seconds(replay, 5, 1) / n / 10, 2)
            for i, backend in enumerate(backends):
                fault = backend.read(mailboxes[i], 4 * FAULT, 12).result().view(np.int32)
                assert not fault.any(), fault
        rows.append(row)
        print(f"letters of {size >> 10} KiB: {row['exchange']} us, there and back {row['round trip']}", flush=True)
    for size in (64 << 10, 1 << 20, 16 << 20, 64 << 20):
        to, source = backends[1].empty(size), backends[0].empty(size)

        def copy(to=to, source=source, size=size):
            for _ in range(20):
                backends[1].copy(to, 0, backends[0], source, 0, size)
            backends[1].stream.sync()
        us = 1e6 * median_seconds(copy, 3, 1) / 20
        rows.append({"bytes": size, "copy": round(us, 1), "GB/s": round(size / us / 1e3, 1)})
        print(f"copies of {size >> 10} KiB: {us:.1f} us, {size / us / 1e3:.1f} GB/s", flush=True)
    for backend in backends:
        backend.close()
    return rows


def ratios(rows: list[dict]) -> list[str]:
    """A line for each row: speeds, and how many times one GPU's they are."""
    lines = []
    for row in rows:
        if "placement" not in row:
            continue
        one = next((each for each in rows if each.get("model") == row["model"] and each.get("placement") == "one"), {})
        figures = [f"{name} {row[name]:g}" + f" ({row[name] / one[name]:.2f}x)" * (row is not one and name in one) if name in one
                   else f"{name} {row[name]:g}"
                   for name in ("pp4096", "pp16384", "tg") if name in row]
        same = "" if not one else "same logits" if one["digest"] == row["digest"] else "OTHER LOGITS"
        lines.append(f"{row['model'][:10]} {row['placement']}: {', '.join(figures)}; {same}")
    return lines


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", type=Path, required=True, help="a folder with room for 23 GB; /dev/shm keeps them in memory")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--rows", help="MODEL:PLACEMENT;..., such as llama-3-8b:one;llama-3-8b:layer; all by default")
    p.add_argument("--prompts", default=",".join(map(str, PROMPTS)), help="tokens of the prompts")
    p.add_argument("--letters", action="store_true", help="what GPUs hand to each other, alone")
    p.add_argument("--table", action="store_true", help="print the record, alone")
    p.add_argument("-r", type=int, default=3, help="repetitions")
    options = p.parse_args()
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    if not options.table:
        record, _ = begun_record(p, "several_gpus.py", DEVICES[0])
        prompts = tuple(map(int, options.prompts.split(",")))
        if options.letters:
            rows += hand_overs()
            options.out.write_text(dump(record, "rows", rows))
        for model, placements in TABLE.items() if not options.letters else ():
            for row in placements:
                if options.rows and f"{model}:{row.name}" not in options.rows.split(";"):
                    continue
                if any((each.get("model"), each.get("placement")) == (model, row.name) for each in rows):
                    continue
                found = measured(written(options.models, model, "Q4_K"), row, options.r, prompts)
                rows.append({"model": model, "placement": row.name, **found, "must": row.must, "goal": row.goal})
                options.out.write_text(dump(record, "rows", rows))  # what was measured stays, should a later one fail
    print("\n".join(ratios(rows)))
    ones = {row["model"]: row["digest"] for row in rows if row.get("placement") == "one"}
    return int(any(row["digest"] != ones.get(row["model"], row["digest"]) for row in rows if "digest" in row))


if __name__ == "__main__":
    sys.exit(main())
