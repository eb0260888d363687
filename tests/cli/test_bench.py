"""ggml-py bench and sweep-bench: lists and ranges, what is timed, statistics, every output format read back,
mistakes in one line."""
import csv
import io
import json
import re
import sqlite3
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ggml_py.kernels import threads
from ggml_py import __version__

from ggml_py.measure import benchmark

from ggml_py.measure import result_formats

from ggml_py.measure import sweep
from ggml_py.measure.statistics import mean_and_deviation
from ggml_py.__main__ import main
from ggml_py.backends.cpu import CPUBackend
from ggml_py.base.errors import UserError
from ggml_py.engine.settings import Settings
from ggml_py.cli.ranges import MOST_VALUES, parse_numbers
from notices import without_notice
from tiny_models import write_model

N_VOCAB, COPY_GB_S = 70, 0.5
MODEL_SETTINGS = dict(n_layer=1, n_ctx=256)


# Lists and ranges

small = st.integers(0, 2000)


@settings(deadline=None)
@given(st.lists(small, min_size=1, max_size=20))
def test_lists(values):
    assert parse_numbers(",".join(map(str, values))) == values


@settings(deadline=None)
@given(small, st.integers(0, 900), st.integers(1, 50))
def test_ranges_with_steps(first, length, step):
    last = first + length
    assert parse_numbers(f"{first}-{last}+{step}") == list(range(first, last + 1, step))
    assert parse_numbers(f"{first}-{last}") == list(range(first, last + 1))


@settings(deadline=None)
@given(st.integers(1, 100), st.integers(0, 10**6), st.integers(2, 9))
def test_ranges_with_factors(first, length, factor):
    values = parse_numbers(f"{first}-{first + length}*{factor}")
    assert values[0] == first and all(b == a * factor
                                      for a, b in pairwise(values)) and values[-1] <= first + length < values[-1] * factor


@settings(deadline=None)
@given(st.lists(st.sampled_from(["7", "1-4", "0-10+5", "2-20*3"]), min_size=1, max_size=6))
def test_lists_of_ranges(parts):
    assert parse_numbers(",".join(parts)) == [value for part in parts for value in parse_numbers(part)]


@settings(deadline=None)
@given(st.text("0123456789-+*, x", max_size=12))
def test_a_list_is_numbers_or_an_error(text):
    try:
        values = parse_numbers(text)
    except ValueError:
        return
    assert 1 <= len(values) <= MOST_VALUES and min(values) >= 0


@pytest.mark.parametrize("text, message", [
    ("", "must be a number of at most 9 digits, first-last, first-last+step or first-last*factor, got ''"), ("1,,2", "got ''"),
    ("-1", "got '-1'"),
    ("1.5", "got '1.5'"), ("4-1", "'4-1': the last is less than the first"), ("0-8*2", "'0-8*2' never ends"),
    ("1-8*1", "never ends"), ("1-8+0", "never ends"),
    ("1-8*0", "never ends"), ("0-999999999", "'0-999999999' has more than 1000 values"), ("0-600,0-600", "more than 1000"),
    ("1234567890", "at most 9 digits"),
    ("1-", "got '1-'"), ("1+2", "got '1+2'"), ("٣", "got '٣'")])
def test_lists_that_are_none(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_numbers(text)


def test_least():
    assert parse_numbers("1,5", 1) == [1, 5]
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        parse_numbers("5,0-3", 1)


# Tests and configurations

def test_tests_in_order():
    tests = benchmark.tests_of([512, 0, 7], [128, 0], [(16, 4)], [0, 4096])
    assert [test.name for test in tests] == ["pp512", "pp7", "tg128", "pp16+tg4", "pp512 @ d4096", "pp7 @ d4096", "tg128 @ d4096",
                                             "pp16+tg4 @ d4096"]
    assert [test.n_ctx for test in tests[3:5]] == [20, 4608]
    assert len(benchmark.tests_of([5, 5], [0], [], [0, 0])) == 1
    with pytest.raises(UserError, match="no test is left"):
        benchmark.tests_of([0], [0], [], [0, 5])


def test_configs_by_default():
    assert benchmark.configs_of(["a"], ["cpu"],
                                [2]) == [benchmark.Config("a", "cpu", 2, 2048, 2048, "f16", "f16", "", 1, "set_rows", "")]


def test_configs_are_all_combinations_model_by_model():
    configs = benchmark.configs_of(["a", "b"], ["cpu"], [1, 2], [64, 2048], [128, 512], ["f16"], ["f16", "q8_0"], "")
    assert [config.model for config in configs] == ["a"] * 12 + ["b"] * 12
    # at most a batch, and once
    assert {(config.n_batch, config.n_ubatch) for config in configs} == {(64, 64), (2048, 128), (2048, 512)}
    assert len({(config.n_threads, config.type_v) for config in configs}) == 4


def test_columns_of_what_is_unusual():
    of = lambda devices=(
        "cuda:0",), n_threads=(2,), **lists: benchmark.unusual(benchmark.configs_of(["a"], devices, n_threads, **lists))
    assert of() == [] and of(devices=["cpu"]) == ["n_threads"] and of(n_threads=[1, 2]) == ["n_threads"]
    assert of(n_ubatch=[256]) == ["n_ubatch"] and of(type_k=["f16", "q8_0"], no_fuse="all") == ["type_k", "no_fuse"]


def model(add_bos=False):
    return SimpleNamespace(n_vocab=N_VOCAB, tokenizer=SimpleNamespace(add_bos=add_bos, bos_id=69))


def test_tokens():
    tokens = benchmark.random_tokens(model(), 1000, 3)
    assert tokens.dtype == np.int32 and set(tokens) == set(range(N_VOCAB))
    assert np.array_equal(tokens, benchmark.random_tokens(model(), 1000, 3))
    assert (tokens != benchmark.random_tokens(model(), 1000, 4)).any()
    with_bos = benchmark.random_tokens(model(add_bos=True), 1000, 3)
    assert with_bos[0] == 69 and np.array_equal(with_bos[1:], tokens[1:])
    assert len(benchmark.random_tokens(model(add_bos=True), 0, 0)) == 0


# What is timed

class Clock:
    """A context in which a decode takes 1000 ns, and 10 ns more a token; forgetting takes 1 ns. calls: (tokens, logits),
    or the new length."""

    def __init__(self, n_ctx=10**6):
        self.now, self.tokens, self.calls, self.n_ctx = 0, [], [], n_ctx

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def decode(self, tokens, logits="last"):
        assert len(self.tokens) + len(tokens) <= self.n_ctx
        self.tokens.extend(tokens)
        self.calls.append((list(tokens), logits))
        self.now += 1000 + 10 * len(tokens)

    def greedy(self, token, n):
        """The next token is one more."""
        for each in range(token, token + n):
            self.decode([each], "greedy")
            yield each + 1

    def checkpoint(self):
        pass

    def drop_checkpoints(self):
        pass

    def clear(self):
        self.tokens.clear()

    def seq_rm(self, seq_id, p0):
        assert seq_id == 0 and p0 <= len(self.tokens)
        del self.tokens[p0:]
        self.calls.append(p0)
        self.now += 1


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(benchmark.time, "perf_counter_ns", lambda: clock.now)
    monkeypatch.setattr(sweep.time, "perf_counter", lambda: clock.now)
    return clock


@pytest.mark.parametrize("n_prompt, n_gen, depth, warm_up",
                         [(10, 0, 0, True), (0, 3, 0, True), (10, 2, 7, True), (0, 1, 4, False), (8, 0, 3, False)])
def test_a_repetition(clock, n_prompt, n_gen, depth, warm_up):
    """Neither the depth nor cutting back is timed; each repetition decodes the same tokens from the same place; only the last of
    a prompt has logits. Of tokens to be generated only the first is given."""
    test, tokens = benchmark.Test(n_prompt, n_gen, depth), list(range(depth + n_prompt + n_gen))
    samples = benchmark.run_test(clock, test, np.array(tokens), n_batch=4, n_repetitions=3, warm_up=warm_up)
    pieces = lambda first, n: [(tokens[first:first + n][i:i + 4], "last" if i + 4 >= n else "none") for i in range(0, n, 4)]
    repetition = [depth, *pieces(depth, n_prompt), *(([token], "greedy") for token in tokens[depth + n_prompt:])]
    assert clock.calls == pieces(0, depth) + (3 + warm_up * benchmark.WARM_UPS) * repetition
    assert samples == 3 * [1000 * (len(repetition) - 1) + 10 * (n_prompt + n_gen)]
    assert clock.tokens == tokens


def test_sweep_rows(clock, monkeypatch):
    """Generation first, then the prompt, whose tokens stay; cutting back counts; rows end where a part no longer fits."""
    monkeypatch.setattr(sweep, "new_context", lambda model, settings, n_ctx, n_seq, log: setattr(clock, "n_ctx", n_ctx) or clock)
    rows = list(sweep.sweep(model(), Settings(n_ctx=35, n_batch=64, n_ubatch=10), 3, 0, True, None))
    tokens = benchmark.random_tokens(model(), 35, 0).tolist()
    ones = lambda first, n: [([tokens[first] + i], "greedy") for i in range(n)]
    expected = benchmark.WARM_UPS * [0, (tokens[:10], "last"), 0, *ones(0, 1)]
    for n_kv in 0, 10, 20:
        expected += [n_kv, *ones(n_kv, 3), n_kv, (tokens[n_kv:n_kv + 10], "last")]
    assert clock.calls == expected
    assert [(row.pp, row.tg, row.n_kv, row.t_pp, row.t_tg) for row in rows] == [(10, 3, n_kv, 1101, 3031) for n_kv in (0, 10, 20)]
    assert {(row.speed_pp, row.speed_tg) for row in rows} == {(10 / 1101, 3 / 3031)}


@pytest.mark.parametrize("of_sweep, n_gen, message", [
    (Settings(n_ctx=100, n_batch=8, n_ubatch=16), 1,
     "n_ubatch: prompts of 16 tokens are decoded as one batch, must be at most n_batch, 8"),
    (Settings(n_ctx=10, n_ubatch=16), 1,
     "n_ctx: 10 positions do not hold a prompt part (n_ubatch) of 16 tokens or a generation part (n_gen) of 1"),
    (Settings(n_ctx=20, n_ubatch=16), 21,
     "do not hold a prompt part (n_ubatch) of 16 tokens or a generation part (n_gen) of 21")])
def test_a_sweep_without_a_row_is_refused(of_sweep, n_gen, message):
    with pytest.raises(UserError, match=re.escape(message)):
        next(sweep.sweep(model(), of_sweep, n_gen, 0, True, None))


# Statistics

@settings(deadline=None)
@given(st.lists(st.integers(1, 10**12), min_size=2, max_size=30))
def test_mean_and_sample_deviation(samples):
    mean, deviation = mean_and_deviation(samples)
    assert mean == pytest.approx(np.mean(samples),
                                 rel=1e-12) and deviation == pytest.approx(np.std(samples, ddof=1), rel=1e-9, abs=1e-3)


def test_deviation_of_one_sample():
    assert mean_and_deviation([7]) == (7, 0)


@pytest.mark.parametrize("n, text", [(8_030_261_248, "8.03B"), (999_999_999, "1000.00M"), (134_515_008, "134.52M")])
def test_in_short(n, text):
    assert benchmark.in_short(n) == text


# The commands, with a tiny model on the CPU

@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "it's tiny.gguf", "llama", ("Q8_0",), **MODEL_SETTINGS)


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """A memory that copies half a GB a second; and as many threads as before."""
    n_threads = threads.get_num_threads()
    monkeypatch.setattr(benchmark, "copy_GB_s_of", lambda device: COPY_GB_S)
    yield
    threads.set_num_threads(n_threads)


def call(capsys, *argv):
    code = main([str(argument) for argument in argv])
    out, err = capsys.readouterr()
    return code, out, without_notice(err)


@pytest.fixture
def bench(capsys, path):
    def run(*argv):
        code, out, err = call(capsys, "bench", "-m", path, "--device", "cpu", "-r", 2, *argv)
        assert (code, err) == (0, "")
        return out
    return run


FIELDS = list(benchmark.Result.__dataclass_fields__)
SHORT = ["-p", 8, "-n", "2,3", "-d", "0,5"]
SHORT_TESTS = [(8, 0, 0), (0, 2, 0), (0, 3, 0), (8, 0, 5), (0, 2, 5), (0, 3, 5)]


def check_results(results, path, with_samples=True):
    """Results as dicts of the SHORT tests: consistent with one another and with the file."""
    # embedding and head; norms; Q, K, V; output; gate and up; down
    size = 70 * 68 * 2 + 4 * 64 * 3 + (128 + 64 + 64) * 68 + 64 * 136 + 2 * 96 * 68 + 64 * 102
    assert [(r["n_prompt"], r["n_gen"], r["n_depth"]) for r in results] == SHORT_TESTS
    for r in results:
        assert r["model_filename"] == str(
            path) and r["model_type"] == "llama 0.05M Q8_0" and r["device"] == "cpu" and r["flash_attn"] == 1
        assert (r["n_batch"], r["n_ubatch"], r["type_k"], r["type_v"], r["no_fuse"],
                r["seed"]) == (2048, 2048, "f16", "f16", "", 0)
        assert r["model_size"] == size and r["copy_GB_s"] == COPY_GB_S and re.fullmatch(
            r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", r["test_time"])
        assert r["avg_ns"] > 0 and r["avg_ts"] > 0 and r["stddev_ts"] >= 0
        if r["n_prompt"]:
            assert r["bytes_per_token"] is None and r["memory_share"] is None
        else:  # the head, the layer and a row of the embedding; K and V of 64 float16 each of the keys that are seen on average
            keys = r["n_depth"] + (r["n_gen"] + 1) / 2
            assert r["bytes_per_token"] == size - 69 * 68 + keys * 256
            assert r["memory_share"] == pytest.approx(r["bytes_per_token"] * r["avg_ts"] / (COPY_GB_S * 1e9))
        if with_samples:
            n = r["n_prompt"] + r["n_gen"]
            assert len(r["samples_ns"]) == 2 and r["samples_ts"] == [1e9 * n / ns for ns in r["samples_ns"]]
            assert r["avg_ns"] == pytest.approx(
                statistics.mean(r["samples_ns"])) and r["stddev_ts"] == pytest.approx(statistics.stdev(r["samples_ts"]))


def test_json(bench, path):
    results = json.loads(bench(*SHORT, "-o", "json"))
    assert all(list(r) == FIELDS for r in results)
    check_results(results, path)


def test_json_lines(bench, path):
    results = [json.loads(line) for line in bench(*SHORT, "-o", "jsonl").splitlines()]
    assert all(list(r) == FIELDS for r in results)
    check_results(results, path)


def test_csv(bench, path):
    out = bench(*SHORT, "-o", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert list(rows[0]) == [name for name in FIELDS if not name.startswith("samples")]
    assert all(re.fullmatch(r'("[^"]*",)+"[^"]*"', line) for line in out.splitlines())
    number = {"TEXT": str, "INTEGER": int, "REAL": lambda text: float(text) if text else None}
    check_results([{name: number[result_formats.COLUMNS[name]](text) for name, text in row.items()} for row in rows], path,
                  with_samples=False)


def test_sql(bench, path):
    database = sqlite3.connect(":memory:")
    database.row_factory = sqlite3.Row
    out = bench(*SHORT, "-o", "sql")
    database.executescript(out)
    check_results([dict(row) for row in database.execute("SELECT * FROM ggml_py_bench")], path, with_samples=False)
    database.executescript(out)  # into a table that is there
    assert database.execute("SELECT count(*), max(typeof(avg_ts)), max(typeof(n_gen)), max(typeof(model_type)) FROM "
                            "ggml_py_bench").fetchone()[:] == (
        12, "real", "integer", "text")


def cells(out: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")]


def test_markdown(bench, path):
    out = bench(*SHORT)
    header, rule, *rows = cells(out)
    assert header == ["model", "size", "params", "device", "n_threads", "test", "t/s", "of floor"]
    assert all(re.fullmatch("-+:?", cell)
               for cell in rule) and len({len(line) for line in out.splitlines() if line.startswith("|")}) == 1
    assert [row[5] for row in rows] == ["pp8", "tg2", "tg3", "pp8 @ d5", "tg2 @ d5", "tg3 @ d5"]
    for row in rows:
        assert row[:4] == ["llama 0.05M Q8_0", "0.00 GB", "0.05M", "cpu"] and re.fullmatch(r"\d+\.\d\d ± \d+\.\d\d", row[6])
        assert re.fullmatch(r"\d+\.\d %" if row[5].startswith("tg") else "", row[7])
    assert re.search(r"\n\nggml-py [\d.]+; memory: cpu \([\w-]+\) copies 0\.5 GB/s\n$", out)


def test_markdown_shows_what_differs(bench):
    out = bench("-p", 8, "-n", 0, "-pg", "4,2", "-pg", "3,1", "-ub", "2,4", "-ub", 8, "-ctk", "f16,f32", "--no-fuse",
                "swiglu_act,rms_norm_act", "-t", 1)
    header, _, *rows = cells(out)
    assert header[4:9] == ["n_threads", "n_ubatch", "type_k", "no_fuse", "test"]
    assert [row[4:9] for row in rows] == [["1", ub, type_k, "swiglu_act,rms_norm_act", test] for ub in "248"
                                          for type_k in ("f16", "f32")
                                          for test in ("pp8", "pp4+tg2", "pp3+tg1")]


def test_results_on_both_streams(capsys, path):
    """-oe: another format on stderr; --delay rests before each test."""
    code, out, err = call(capsys, "bench", "-m", path, "--device", "cpu", "-p", 2, "-n", 0, "-r", 1, "-o", "jsonl", "-oe", "csv",
                          "--progress", "--delay", 0)
    row, = csv.DictReader(io.StringIO(err))
    assert code == 0 and row["n_prompt"] == "2" and row["test_time"] == json.loads(out)["test_time"]


def test_defaults(capsys, path, monkeypatch):
    """pp512 and tg128, five repetitions, after those that do not count."""
    seen = []
    monkeypatch.setattr(benchmark, "bench", lambda *args, **kwargs: seen.append(args))
    assert call(capsys, "bench", "-m", path, "--device", "cpu") == (0, "", "")
    configs, tests, _, writer, _, manner, _ = seen[0]
    assert [test.name for test in tests] == ["pp512", "tg128"] and manner == benchmark.Manner(5)
    assert configs == [benchmark.Config(str(path), "cpu", threads.get_num_threads(), 2048, 2048, "f16", "f16", "", 1,
                                        "set_rows", "")] and isinstance(writer, result_formats.Markdown)


def test_models_are_loaded_once_each(capsys, path, tmp_path, monkeypatch):
    other, loads = write_model(tmp_path / "other.gguf", **MODEL_SETTINGS), []
    from ggml_py.engine.model import Model

    def load(model_path, device):
        loads.append(Path(model_path).name)
        return Model.load(model_path, device=device)
    code = main(["bench", "-m", f"{path},{other}", "-m", str(path), "-p", "1-4*2", "-n", "0", "-ub", "2,4", "-r", "1", "-o",
                 "csv", "--device", "cpu"], load)
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert code == 0 and loads == [path.name, other.name] and len(rows) == 2 * 2 * 3
    assert [row["model_type"] for row in rows] == ["llama 0.05M Q8_0"] * 6 + ["llama 0.05M F32"] * 6


@pytest.mark.parametrize("format, complete", [("json", True), ("md", False)])
def test_what_was_measured_stays_when_a_later_test_fails(capsys, path, monkeypatch, format, complete):
    run_test = benchmark.run_test

    def fails(context, test, *args):
        if test.n_gen:
            raise UserError("a model that cannot generate")
        return run_test(context, test, *args)
    monkeypatch.setattr(benchmark, "run_test", fails)
    code, out, err = call(capsys, "bench", "-m", path, "--device", "cpu", "-p", 4, "-n", 1, "-r", 1, "-o", format)
    assert code == 2 and err == "ggml-py: error: a model that cannot generate\n"
    assert json.loads(out)[0]["n_prompt"] == 4 if complete else len(cells(out)) == 3


def test_verbose(capsys, path):
    code, _out, err = call(capsys, "bench", "-m", path, "--device", "cpu", "-p", 4, "-n", 0, "-r", 1, "--verbose")
    assert code == 0 and "micro-batches of 4 tokens" in err and re.search(r"\d+ kernels compiled in", err)


@pytest.mark.parametrize("format", ["md", "jsonl"])
def test_sweep(capsys, path, format):
    code, out, err = call(capsys, "sweep-bench", "-m", path, "--device", "cpu", "-c", 70, "-ub", 16, "-n", 5, "-ctv", "q8_0",
                          "-o", format,
                          "--no-fuse", "swiglu_act,rms_norm_act", "--no-graphs", "--kv-write", "cpy")
    name = CPUBackend().name
    assert code == 0
    assert err.startswith(f"sweep-bench: version = {__version__}, model = {path}, device = cpu, device_name = {name}, n_kv_max = "
                          "70, n_batch = 2048, ")
    if format == "jsonl":
        rows = [json.loads(line) for line in out.splitlines()]
        measured = ["pp", "tg", "n_kv", "t_pp", "speed_pp", "t_tg", "speed_tg"]
        assert list(rows[0])[-len(measured):] == measured
        about = dict(version=__version__, model=str(path), device="cpu", device_name=name, n_kv_max=70, n_batch=2048, n_ubatch=16,
                     type_k="f16", type_v="q8_0",
                     flash_attn=1, no_fuse="swiglu_act,rms_norm_act", graphs=0, kv_write="cpy", placement="",
                     n_threads=threads.get_num_threads(), seed=0)
        assert [{key: row[key] for key in row if key not in measured} for row in rows] == 4 * [about]
        assert set(about) - {"model", "n_kv_max"} <= set(FIELDS)
        assert [(row["pp"], row["tg"], row["n_kv"]) for row in rows] == [(16, 5, n_kv) for n_kv in (0, 16, 32, 48)]
        assert all(row["speed_pp"] == 16 / row["t_pp"] and row["speed_tg"] == 5 / row["t_tg"] for row in rows)
    else:
        assert out.startswith("|    PP |     TG |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |\n"
                              "|-------|--------|--------|----------|----------|----------|----------|\n")
        rows = cells(out)[2:]
        assert [row[:3] for row in rows] == [["16", "5", n_kv] for n_kv in ("0", "16", "32", "48")]
        assert all(re.fullmatch(r"\|\s+16 \|\s+5 \|\s+\d+ \|( +\d+\.\d{3} \| +\d+\.\d\d \|){2}", line)
                   for line in out.splitlines()[2:])


def test_sweep_defaults(capsys, path):
    """The context that the model was trained for, at most 8192; a quarter of -ub generated."""
    code, out, _err = call(capsys, "sweep-bench", "-m", path, "--device", "cpu", "-ub", 128, "-o", "jsonl")
    names = "pp", "tg", "n_kv", "n_kv_max", "no_fuse", "graphs", "kv_write"
    rows = [tuple(row[name] for name in names) for row in map(json.loads, out.splitlines())]
    assert code == 0 and rows == [(128, 32, n_kv, 256, "", 1, "set_rows") for n_kv in (0, 128)]


BENCH, SWEEP = ["bench", "-m", "{}"], ["sweep-bench", "-m", "{}", "--device", "cpu"]
MISTAKES = [
    (["bench", "-m", "/none.gguf"], "/none.gguf: no such file"),
    (["bench", "-m", "{},/none.gguf"], "/none.gguf: no such file"),
    ([*BENCH, "-fa", "0"], "-fa/--flash-attn: 0 is not possible: attention is one fused op on every device"),
    ([*BENCH, "-fa", "yes"], "must be 1, on, auto, got 'yes'"),
    ([*BENCH, "-p", "5-1"], "argument -p/--n-prompt: '5-1': the last is less than the first"),
    ([*BENCH, "-n", "x"], "argument -n/--n-gen: must be a number of at most 9 digits, first-last"),
    ([*BENCH, "-p", "0", "-n", "0"], "-p: no test is left, as -n and -pg are 0 too"),
    ([*BENCH, "-pg", "512"], "argument -pg: must be PROMPT,GENERATED, got '512'"),
    ([*BENCH, "-pg", "0,5"], "argument -pg: must be at least 1, got 0"),
    ([*BENCH, "-b", "0"], "argument -b/--batch-size: must be at least 1, got 0"),
    ([*BENCH, "-r", "0"], "argument -r/--repetitions: must be at least 1, got 0"),
    ([*BENCH, "-ctk", "f16,q4_0"], "argument -ctk/--cache-type-k: must be f32, f16, q8_0, got 'q4_0'"),
    ([*BENCH, "-t", "1,100000"], "-t: this machine has"),
    ([*BENCH, "--device", "cpu,gpu"], "must be auto, cpu, cpu:N, cuda or cuda:N, got 'gpu'"),
    ([*BENCH, "--device", "cuda:99"], "--device: cuda:99: "),
    ([*BENCH, "-o", "xml"], "argument -o/--output: must be md, csv, json, jsonl, sql, got 'xml'"),
    ([*BENCH, "--n-gpu-layer", "99"], "--n-gpu-layer: unknown option (see ggml-py bench --help)"),
    ([*BENCH, "--no-fuse", "speed"], "'speed' is not a graph pass"),
    ([*BENCH, "--device", "cpu", "-p", "200", "-d", "57"],
     "bench: pp200 @ d57 takes a context of 257 tokens, {} was trained on at most 256"),
    ([*SWEEP, "-c", "300", "-ub", "64"], "-c: a context of 300 tokens is too long, this model was trained on at most 256"),
    ([*SWEEP], "-c: 256 positions do not hold a prompt part (-ub) of 512 tokens or a generation part (-n) of 128"),
    ([*SWEEP, "-ub", "64", "-b", "32"], "-ub: prompts of 64 tokens are decoded as one batch, must be at most -b, 32"),
    ([*SWEEP, "-fa", "off"], "off is not possible"),
    ([*SWEEP, "-o", "csv"], "must be md, jsonl, got 'csv'"),
]


@pytest.mark.parametrize("argv, message", MISTAKES, ids=[" ".join(argv) for argv, _ in MISTAKES])
def test_a_mistake_is_one_line_and_prints_no_result(capsys, path, argv, message):
    code, out, err = call(capsys, *(argument.replace("{}", str(path)) for argument in argv))
    *about, line = err.splitlines()
    assert code == 2 and line.startswith("ggml-py: error: ") and message.replace("{}", str(path)) in line
    assert all(text.startswith("sweep-bench: version = ") for text in about) and cells(out)[2:] == []


@pytest.mark.parametrize("value", ["1", "on", "auto"])
def test_fused_attention_is_taken_for_granted(capsys, path, value):
    code, out, _ = call(capsys, "bench", "-m", path, "--device", "cpu", "-p", 2, "-n", 0, "-r", 1, "-fa", value, "-o", "json")
    assert code == 0 and json.loads(out)[0]["flash_attn"] == 1


def test_literals():
    assert [result_formats.literal(value) for value in ("it's", 3, 0.1, None, 1e300)] == ["'it''s'", "3", "0.1", "NULL", "1e+300"]


# bench/speed.py

def test_speed(tmp_path, monkeypatch, capsys):
    """The table on tiny models: written once, measured, and compared with the figures;
    prompts and generation also in other ways."""
    speed = pytest.importorskip("speed", reason="needs the checkout")
    figures = [speed.Figure(benchmark.Test(*test), 1, must, goal)
               for test, must, goal in (((0, 2), 1, 2), ((8, 0, 3), 1, 1e12), ((4, 0), 1e12, 1e13))]
    monkeypatch.setattr(speed, "TABLE", {("tiny-llama", "Q8_0"): figures})
    monkeypatch.setattr(speed, "OTHERS_UBATCH", 4)
    monkeypatch.setattr(speed, "GENERATION", benchmark.Test(0, 2))
    out = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["speed.py", "--models", str(tmp_path), "--out", str(out), "--device", "cpu", "-r", "1"])
    for _ in range(2):
        assert speed.main() == 0
    record = json.loads(out.read_text())
    assert all((row["model"], row["model_filename"]) == ("tiny-llama:Q8_0", "tiny-llama-q8_0.gguf") for row in record["rows"])
    assert [(row["test"], row.get("verdict"), row["n_ubatch"], row["kv_write"], row["graphs"]) for row in record["rows"]] == [
        ("tg2", "goal", 2048, "set_rows", 1), ("pp8 @ d3", "met", 2048, "set_rows", 1), ("pp4", "missed", 2048, "set_rows", 1),
        ("pp8 @ d3", None, 4, "set_rows", 1), ("tg2", None, 2048, "cpy", 1), ("tg2", None, 2048, "set_rows", 0)]
    monkeypatch.setattr(sys, "argv", [*sys.argv, "-ub", "4"])
    assert speed.main() == 0 and len(json.loads(out.read_text())["rows"]) == 5  # prompts as others already
    assert record["command"].startswith("bench/speed.py ") and "must 1, goal 2: goal" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["record.json", "tiny-llama-q8_0.gguf"]


def test_speed_has_every_row_of_the_table():
    speed, synth = (pytest.importorskip(name, reason="needs the checkout") for name in ("speed", "synth"))
    assert sum(map(len, speed.TABLE.values())) == 25
    figures = [(each.llama_cpp, each.must, each.goal) for figures in speed.TABLE.values() for each in figures]
    assert all(llama_cpp < must < goal for llama_cpp, must, goal in figures if (llama_cpp, must, goal) != (None, None, None))
    for (shape, _), figures in speed.TABLE.items():
        assert all(figure.test.n_ctx <= synth.SHAPES[shape].n_ctx for figure in figures)


def test_speed_refuses_an_unknown_model(tmp_path, monkeypatch, capsys):
    speed = pytest.importorskip("speed", reason="needs the checkout")
    monkeypatch.setattr(sys, "argv",
                        ["speed.py", "--models", str(tmp_path), "--out", str(tmp_path / "r.json"), "--only",
                         "llama-3-8b:Q4_K,gpt-5"])
    with pytest.raises(SystemExit):
        speed.main()
    assert "--only: unknown gpt-5; known: llama-3-8b:Q4_K, " in capsys.readouterr().err and not list(tmp_path.iterdir())
