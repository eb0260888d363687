"""Prompts and generation of whole models against the figures to reach: python bench/speed.py --models /tmp --out
bench/results/NAME.json

Writes the synthetic models (`synth.py`) that are missing in the folder of --models, runs the tests of the table as `ggml-py
bench` does, each model loaded once, and writes a record: what `ggml-py bench -o json` prints of each test, with llama.cpp's t/s
on an H200, and the t/s that must and should be reached. Without figures, for comparison, some run once more: prompts of more than
512 tokens in micro-batches of 512, the default of other engines; generation with cells of the KV cache by address (--kv-write
cpy), and without CUDA graphs.
"""
import argparse
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import checkout  # noqa: F401

from ggml_py.kernels import threads
from ggml_py.measure.benchmark import DEFAULTS, Manner, Test, bench, configs_of, copy_GB_s_of, unusual
from ggml_py.engine.model import Model
from ggml_py.measure.result_formats import Markdown
from records import dump
from whole_models import begun_record, chosen, verdict, written


class Figure(NamedTuple):
    """t/s of a test on one H200: what llama.cpp reaches, what must be and what should be,
    and what ik_llama.cpp reaches where it was measured. None where nobody has measured others."""
    test: Test
    llama_cpp: float | None = None
    must: float | None = None
    goal: float | None = None
    ik_llama_cpp: float | None = None


OTHERS_UBATCH = 512  # the default of llama.cpp and ik_llama.cpp
GENERATION = Test(0, 128)
TABLE = {
    ("llama-3-8b", "Q4_K"): [Figure(GENERATION, 294, 480, 700), Figure(Test(512, 0), 9873, 12000, 20000),
                             Figure(Test(4096, 0), 10099, 11500, 20000),
                             Figure(Test(0, 128, 4096), 270, 440, 620), Figure(Test(0, 128, 16384), 231, 380, 540),
                             Figure(Test(0, 128, 32768), 192, 310, 450)],
    ("llama-3-8b", "Q8_0"): [Figure(GENERATION, 254, 370, 440), Figure(Test(4096, 0), 11323, 13000, 22000)],
    ("smollm2-135m", "Q4_1"): [Figure(GENERATION, 959, 2000, 4000), Figure(Test(512, 0), 54800, 60000, 120000),
                               Figure(Test(4096, 0), 58600, 70000, 120000)],
    ("qwen3-30b-a3b", "Q4_K"): [Figure(GENERATION, 312, 450, 800, 237), Figure(Test(512, 0), 12282, 14000, 20000, 6417),
                                Figure(Test(4096, 0), 11675, 13500, 25000, 6890)],
    ("qwen3.6-35b-a3b", "Q4_K"): [Figure(GENERATION, 244, 400, 700), Figure(Test(512, 0), 8474, 11000, 16000),
                                  Figure(Test(4096, 0), 11260, 13500, 20000)],
    ("gemma-3-27b", "Q4_K"): [Figure(test) for test in (GENERATION, Test(512, 0), Test(4096, 0), Test(0, 128, 4096))],
    ("gpt-oss-20b", "MXFP4_MOE"): [Figure(test) for test in (GENERATION, Test(512, 0), Test(4096, 0), Test(0, 128, 4096))],
}


class Record(Markdown):
    """Prints the table and keeps the results."""

    def __init__(self, out, columns):
        super().__init__(out, columns)
        self.results = []

    def row(self, result):
        super().row(result)
        self.results.append(result)


def results_of(model: Model, path: Path, tests: list[Test], n_ubatch: int, n_repetitions: int, **settings) -> list:
    """What `ggml-py bench` measures of a loaded model; prints its table. settings: graphs and kv_write, as of `configs_of`."""
    if not tests:
        return []
    n_batch = max(DEFAULTS["n_batch"], n_ubatch)
    configs = configs_of([str(path)], [model.device], [threads.get_num_threads()], [n_batch], [n_ubatch], **settings)
    writer = Record(sys.stdout, unusual(configs))
    bench(configs, tests, lambda *_: nullcontext(model), writer, sys.stderr, Manner(n_repetitions), lambda model: "")
    return writer.results


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", type=Path, required=True, help="a folder with room for 51 GB; /dev/shm keeps them in memory")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--only", help="models, such as llama-3-8b:Q4_K,smollm2-135m:Q4_1")
    p.add_argument("--device", default="cuda:0")
    p.add_argument("-ub", type=int, default=DEFAULTS["n_ubatch"])
    p.add_argument("-r", type=int, default=5, help="repetitions")
    options = p.parse_args()
    keys = {f"{shape}:{type_}": (shape, type_) for shape, type_ in TABLE}
    names = chosen(p, options.only, keys)
    record, device = begun_record(p, "speed.py", options.device)

    rows = []
    copy_GB_s_of(device)  # before a model takes the memory
    for name in names:
        path, figures = written(options.models, *keys[name]), TABLE[keys[name]]
        tests = [figure.test for figure in figures]
        longer = [test for test in tests if min(test.n_prompt, options.ub) > OTHERS_UBATCH]
        with Model.load(str(path), device) as model:
            results = results_of(model, path, tests, options.ub, options.r)
            others = results_of(model, path, longer, OTHERS_UBATCH, options.r)
            for settings in {"kv_write": "cpy"}, {"graphs": 0}:
                others += results_of(model, path, [test for test in tests if test == GENERATION], options.ub, options.r,
                                     **settings)
        for result, figure in zip(results, figures):
            compared = figure.must is not None
            known = figure._asdict() | {"test": figure.test.name, "verdict": verdict(result.avg_ts, figure) if compared else None}
            rows.append({"model": name, **known, **asdict(result), "model_filename": path.name})
            elsewhere = f"llama.cpp {figure.llama_cpp}" + (f", ik_llama.cpp {figure.ik_llama_cpp}" if figure.ik_llama_cpp else "")
            others_say = f", {elsewhere}, must {figure.must}, goal {figure.goal}: {known['verdict']}" if compared else ""
            print(f"{name} {known['test']}: {result.avg_ts:.1f} t/s{others_say}")
        for result in others:
            rows.append({"model": name, "test": result.test, **asdict(result), "model_filename": path.name})
            print(f"{name} {result.test}, -ub {result.n_ubatch}, {result.kv_write}, graphs {result.graphs}: "
                  f"{result.avg_ts:.1f} t/s")
        options.out.write_text(dump(record, "rows", rows))  # what was measured stays, should a later model fail
    return 0


if __name__ == "__main__":
    sys.exit(main())
