"""The benchmarks without a GPU: every CUDA case makes its launches, replays are timed by a scripted clock, as pytest cases too,
limits follow the figures, and docs/performance.md is what the records give. The CPU benchmarks and a cold start run once."""
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("figures", reason="needs the checkout")
import records
import report
from figures import EXPERTS, K, M, Row, limits, llama_cpp, verdict
from tiny_models import write_model
from places import ROOT

COPY = 4000.0
RECORD = {"command": "bench/gpu.py --out h200.json", "device": "NVIDIA H200", "driver": "580.1", "cuda": "13.0",
          "numba.cuda": "numba_cuda",
          "versions": {"numba": "0.68.1"}, "date": "2026-01-01", "l2_bytes": 60 << 20, "compile_seconds": 31.4, "copy_GB_s": COPY}


def row(kernel="mmvq", type_="Q8_0", m=M, k=K, n=1, cache="cold", us=16.0):
    return Row(kernel, type_, dict(m=m, k=k, n=n), cache, us, us - 0.5, us + 1, m * k * 34 // 32, 2 * m * k * n)


ROWS = [row(), row(cache="hot", us=15), row(n=8, us=25), row(m=128256, k=4096, us=140), row(type_="Q4_1", us=9.0),
        row(type_="F16", us=31),
        row("mmq", n=512, us=300), row("quantize + mmq", n=512, us=140), row("mmq", n=2048, us=1100),
        Row("rms_norm", "f32", dict(n=1, k=4096), "hot", 3.0, 2.9, 3.2, 49152, 0),
        Row("mul_mat_id", "Q4_K", dict(EXPERTS, n=4), "cold", 10.0, 9.0, 11.0, 1 << 24, 1 << 27),
        Row("mul_mat_id", "Q4_K", dict(EXPERTS, n=5), "cold", 10.0, 9.0, 11.0, 1 << 24, 1 << 27)]


@pytest.mark.parametrize("i, must, goal, result", [
    (0, 18.0, 16.0, "goal"), (1, None, None, None), (2, 24.0, None, "missed"), (3, 558170112 * 1e-3 / (0.95 * COPY), None, "met"),
    (4, 1.5 * M * K * 20 / 32 / 4300e3 + 4, None, "met"), (5, 30.0, 28.5, "missed"),
    (6, 2 * M * K * 512 / 250e6, 2 * M * K * 512 / 400e6, "missed"),
    (7, 2 * M * K * 512 / 250e6, 2 * M * K * 512 / 400e6, "goal"), (8, 1200.0, None, "met"),
    (9, None, None, None), (10, 12.0, 9.0, "met"), (11, None, None, None)])
def test_limits(i, must, goal, result):
    limit = limits(ROWS[i], ROWS, COPY)
    assert (limit is None) == (must is None)
    if limit:
        assert (limit.must, limit.goal) == (pytest.approx(must), goal and pytest.approx(goal))
        assert verdict(ROWS[i], limit) == result


def test_figures_of_llama_cpp():
    assert [llama_cpp(row) for row in ROWS] == ["22.8 us", "22.8 us", "", "", "", "29.5 us", "191 TFLOP/s", "", "", "", "12.5 us",
                                                ""]


def test_line():
    assert row(
        us=17.8).line(
            4100.0) == "mmvq q8_0 [m=4096, k=14336, n=1, cold]   median 17.8 us   62.4 MB   3505 GB/s   85 % of copy   6.6 TOP/s"


# bench/cuda_cases.py

@pytest.fixture(scope="module")
def cuda_cases():
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    import cuda_cases
    return cuda_cases


@pytest.fixture
def scripted(cuda_cases, monkeypatch):
    """The class of a GPU that a test can script."""
    from cuda import bindings
    from scripted_gpu import Driver, ScriptedGPU
    monkeypatch.setattr(bindings, "driver", Driver, raising=False)
    return ScriptedGPU


@pytest.mark.parametrize("suite",
                         ["mmvq", "mmq", "mul_mat_glu", "mul_mat_qkv", "dense_layer", "mul_mat_argmax", "draw", "mul_mat_id",
                          "topk_moe", "weighted_sum", "get_rows", "dequantize", "quantize", "rms_norm", "layer_norm",
                          "rms_norm_act", "swiglu", "swiglu_act", "flash_attn_ext", "ssm_conv", "gated_delta_net", "ssm_scan"])
def test_cases_launch(cuda_cases, scripted, suite):
    cases, gpu = cuda_cases.selected(suite, None), scripted()
    assert cases and len({case.id for case in cases}) == len(cases)
    for case in cases:
        assert re.fullmatch(r"[\w+-]+", case.id), case.id  # what -k and a shell take as it is
        launches, n_bytes, n_ops = cuda_cases.work(gpu, case)
        assert launches and n_bytes > 0 and n_ops >= 0, case
        if case.cache == "cold":  # a round reads more than 3 x L2
            assert len(launches) * n_bytes > 3 << 24, case


def test_every_format_is_timed(cuda_cases):
    from ggml_py.quant.formats import FORMATS
    weights = [f for f in FORMATS.values() if f.planes]
    quantized = [f for f in weights if f.is_quantized]
    for suite, formats in ("mmvq", weights), ("mmq", quantized), ("get_rows", weights), ("dequantize", weights):
        assert {case.type for case in cuda_cases.selected(suite, None)} == {f.name for f in formats}


def test_selection(cuda_cases):
    cases = cuda_cases.selected("mmvq,flash_attn_ext", "q4_K,f16")
    assert {(case.kernel, case.type) for case in cases} == {("mmvq", "Q4_K"), ("mmvq", "F16"), ("flash_attn_ext", "f16")}
    for arguments, message in ((("mmv", None), "unknown suite mmv; known: dense_layer, dequantize, draw, flash_attn_ext"),
                               ((None, "Q4_9"), "unknown type q4_9; known: bf16")):
        with pytest.raises(ValueError, match=message):
            cuda_cases.selected(*arguments)


def test_record_is_json_with_a_line_a_row():
    text = records.dump(RECORD, "rows", [vars(row) for row in ROWS])
    record = json.loads(text)
    assert report.rows_of(record) == ROWS and {**RECORD, "rows": record["rows"]} == record
    assert len(text.splitlines()) < len(ROWS) + 30


# bench/gpu_timing.py

@pytest.mark.parametrize("us, n_rounds", [(7.0, 77), (1000.0, 1)])  # a round of three launches and its start: 26 us, 3005 us
def test_time(scripted, us, n_rounds):
    """A round is captured until it takes 2 ms; then the start of a replay hardly counts."""
    gpu, loaded = scripted(), []

    def launch(stream):
        (loaded if gpu.driver.capture is None else gpu.driver.capture).append(us)
    timing = gpu.time([launch] * 3)
    assert loaded == [us] * 3 and [len(graph) for graph in gpu.driver.graphs] == [3, 3 * n_rounds]
    assert timing.least <= timing.median <= timing.most and timing.median == pytest.approx(us + 5 / (3 * n_rounds))


def test_clock(scripted, monkeypatch):
    """pytest-benchmark's timer and `time` see the same: eleven replays of three rounds, which make 2 ms, of two launches; the
    replays before are none of them."""
    from gpu_timing import REPETITIONS, LaunchClock
    gpu, clock, launches, times = scripted(), LaunchClock(), [lambda stream: None] * 2, []
    of_replays = [60.0, 6.0, 600.0, 54.0, 12.0, 48.0, 18.0, 42.0, 24.0, 6000.0, 30.0]

    def replayed():
        left = iter([900.0, 700.0, 1e6, *of_replays])
        monkeypatch.setattr(gpu, "_replay_us", lambda graph: next(left))
    replayed()
    with gpu.replays(launches) as replay:
        for _ in range(REPETITIONS):
            before = clock()
            clock.advance(replay)
            times.append(1e6 * (clock() - before))
    replayed()
    assert gpu.time(launches) == pytest.approx((7.0, 1.0, 1000.0)) and times == pytest.approx([us / 6 for us in of_replays])


# The benchmarks of a GPU

def bench(*arguments, folder, **environment):
    """(exit status, output) of pytest on the benchmarks; what it saves lies in `folder`."""
    pytest.importorskip("pytest_benchmark", reason="pytest-benchmark is not installed")
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT),
               "-p", "no:cacheprovider", *map(str, arguments)]
    path = os.pathsep.join(str(ROOT / part) for part in ("tests/helpers", "bench", "."))
    beside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}  # it is no worker
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
                          env={**beside, "PYTHONPATH": path, **environment})
    return done.returncode, done.stdout


def test_without_a_gpu(cuda_cases, tmp_path):
    """The folder has the CPU cases; those of CUDA, named, say why they do not run."""
    hidden = dict(folder=tmp_path, CUDA_VISIBLE_DEVICES="")
    status, out = bench(ROOT / "bench", "--collect-only", "-q", **hidden)
    assert status == 0 and "test_bench_cpu_ops.py::" in out and "cuda" not in out, out
    status, out = bench(ROOT / "bench" / "test_bench_cuda_kernels.py", "--benchmark-only", "-k", "rms_norm-", **hidden)
    assert status == 0 and re.search(r"SKIPPED \[2\] .*: no NVIDIA (GPU|driver) found", out), out


def test_other_records_are_refused(tmp_path):
    (tmp_path / "speed.json").write_text(json.dumps({"command": "bench/speed.py --out x", "rows": []}))
    status, out = bench(ROOT / "bench", "--benchmark-compare", "speed.json", folder=tmp_path)
    assert status == pytest.ExitCode.USAGE_ERROR and "speed.json is a record of bench/speed.py, expected a saved run" in out, out


def test_cuda_benchmarks(cuda_cases, tmp_path):
    """On a scripted GPU, whose kernels take 7 us and replays 5: figures, and comparisons with a record and a saved run."""
    record, saved, name = tmp_path / "h200.json", tmp_path / "saved.json", "mmvq-Q4_K-m4096-k14336-n8-cold"
    scripted = ("-p", "scripted_gpu", ROOT / "bench", "--benchmark-only", "-k", f"test_bench[rms_norm- or {name}",
                "--benchmark-compare")
    rows = [Row("rms_norm", "f32", dict(n=1, k=4096), "hot", 7.0, 6.5, 8.0, 49152, 0),
            Row("mmvq", "Q4_K", dict(m=M, k=K, n=8), "cold", 7.0, 6.5, 8.0, 1, 0)]
    record.write_text(records.dump(RECORD, "rows", [vars(row) for row in rows]))
    status, out = bench(*scripted, record, "--benchmark-compare-fail", "median:3%", "--benchmark-json", saved, folder=tmp_path)
    assert status == 0 and f"collected {len(cuda_cases.selected(None, None))} items" in out and " 3 passed" in out, out
    assert {f"test_bench[{each}] ({which})" in out for each in ("rms_norm-f32-n1-k4096-hot", name)
            for which in ("h200", "NOW")} == {True}, out
    assert re.search(r"rms_norm-f32-n1-k4096-hot\] \(h200\) +6\.5000 [^\n]* 8\.0000 [^\n]* 7\.0000 ", out), out
    found = json.loads(saved.read_text())
    assert found["machine_info"]["gpu"] == {"name": "scripted", "driver": "580.1"}
    vector, one, many = found["benchmarks"]
    assert [each["param"] for each in (vector, one, many)] == [name, "rms_norm-f32-n1-k4096-hot", "rms_norm-f32-n512-k4096-hot"]
    assert vector["params"] == vars(cuda_cases.Case("mmvq", "Q4_K", dict(m=M, k=K, n=8))) and vector["group"] == "mmvq"
    # three copies of the weights are more than 3 x L2, so a round is 26 us; of one launch, 12 us
    for each, us, n_bytes in (vector, 7 + 5 / (3 * 77), None), (one, 7 + 5 / 167, 49152), (many, 7 + 5 / 167, 16384 * 1025):
        stats, info = each["stats"], each["extra_info"]
        assert (stats["rounds"], stats["iterations"], stats["median"]) == (11, 1, pytest.approx(us / 1e6))
        if n_bytes:
            assert info == pytest.approx({"GB_s": n_bytes / us / 1e3, "of_copy": n_bytes / (2 << 30)}, rel=1e-4)
    assert vector["extra_info"]["TOP_s"] == pytest.approx(2 * M * K * 8 / (7 + 5 / (3 * 77)) / 1e6, rel=1e-4)
    status, out = bench(*scripted, saved, "--benchmark-compare-fail", "median:5%", "--scripted-us", "8", folder=tmp_path)
    assert status and "Performance has regressed" in out and "14." in out, out


# bench/report.py

def test_page():
    page = report.page({"h200": {**RECORD, "rows": [vars(row) for row in ROWS]}}, {}, {})
    assert "6 of 9 limits met, 2 of 5 goals reached. Missed: mmvq q8_0 [m=4096, k=14336, n=8, cold]; mmvq f16" in page
    assert ("| mmvq | Q8_0 | m=4096 k=14336 n=1 | cold | 16.0 | 15.5 to 17.0 | 62.4 | 3899 | 97 % | 7.3 | 22.8 us | 18.0 | 16.0 "
            "| goal | of the type |") in page
    assert page.count("\n## ") == 2 and page.count("\n### ") == 4 and page.count("\n![") == 3
    assert "On a CPU: not measured yet.\n\nOn a GPU: not measured yet.\n" in page


def cold_start_runs(compile_seconds, *warm, **said):
    """warm: seconds to the first token; all load in a quarter of a second. said: what newer records say of a run."""
    def run(cache, first_token, n_kernels, seconds):
        return {"cache": cache, "first_token_seconds": first_token, "load_seconds": 0.25, "n_kernels": n_kernels,
                "compile_seconds": seconds, **said}
    return [run("empty", compile_seconds + 1, 12, compile_seconds), *(run("warm", first_token, 0, 0.0) for first_token in warm)]


def test_page_of_cold_starts():
    on_cpu = {"device": "znver4", "cores": 2, "date": "2026-01-01", "model": "m.gguf",
              "runs": cold_start_runs(29.94, 2.0, 1.5, 4.0)}
    on_gpu = {**on_cpu, "device": "NVIDIA H200", "driver": "580.1", "runs": cold_start_runs(30.06, 2.5, n_sources=7)}
    page = report.page({}, {"cpu": on_cpu, "gpu": on_gpu}, {})
    assert ("| znver4, 2 cores (`cpu.json`, 2026-01-01) | m.gguf | 12 | 29.9 | goal | 30.9 | 2.00 (1.50 to 4.00) | 0 "
            "| not recorded | 0.25 | 1.75 | goal |") in page
    assert ("| NVIDIA H200, driver 580.1 (`gpu.json`, 2026-01-01) | m.gguf | 12 | 30.1 | missed | 31.1 | 2.50 (2.50 to 2.50) | 0 "
            "| 7 | 0.25 | 2.25 | missed |") in page
    assert "not measured yet" not in page and "On a GPU: not measured yet." in report.page({}, {"cpu": on_cpu}, {})


def test_page_of_kv_writes():
    def row(ts, test="tg128", **more):
        return {"model": "m:Q4_K", "test": test, "n_prompt": 0, "n_depth": 0, "kv_write": "set_rows", "graphs": 1, "avg_ts": ts,
                **more}
    rows = [row(100.04), row(99.0, kv_write="cpy"), row(50.0, graphs=0), row(7.0, n_depth=9), row(8.0, n_prompt=9),
            row(9.0, test="tg9")]
    page = report.page({}, {}, {"speed": {"device": "H200", "date": "2026-01-01", "rows": rows}})
    assert page.count(
        "| H200 (`speed.json`") == 1 and "| H200 (`speed.json`, 2026-01-01) | m:Q4_K | tg128 | 100.0 | 99.0 | 50.0 |" in page
    assert "KV cache, and graphs" not in report.page({}, {},
                                                     {"speed": {"device": "H200", "date": "2026-01-01", "rows": rows[:1]}})


def test_committed_page():
    """After a change of the records or of the generator: python bench/report.py"""
    found = map(report.records, ("bench/gpu.py", "bench/cold_start.py", "bench/speed.py"))
    assert (report.DOCS / "performance.md").read_text() == report.page(*found)


def same_drawing(a: str, b: str) -> bool:
    """Equal text, and coordinates equal to a hundredth of a point: their last digits may differ between processors."""
    number = re.compile(r"-?\d+\.\d+")
    x, y = (np.array(number.findall(text), float) for text in (a, b))
    return number.sub("", a) == number.sub("", b) and bool(np.allclose(x, y, rtol=0, atol=0.01))


def test_plots(tmp_path):
    """Drawn twice they are the same, and the committed ones are what the records give."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    (tmp_path / "again").mkdir()
    record = {**RECORD, "rows": [vars(row) for row in ROWS]}
    first, again = report.draw("h200", record, tmp_path), report.draw("h200", record, tmp_path / "again")
    assert [path.name for path in first] == ["h200-mmvq.svg", "h200-mmq.svg", "h200-roofline.svg"]
    assert [path.read_text() for path in first] == [path.read_text() for path in again]
    assert "GB/s" in first[0].read_text() and not same_drawing(first[0].read_text(), first[1].read_text())
    drawn = {path.name: path.read_text() for stem, record in report.records("bench/gpu.py").items()
             for path in report.draw(stem, record, tmp_path)}
    committed = {path.name: path.read_text() for path in (report.DOCS / "performance").glob("*.svg")}
    assert drawn.keys() == committed.keys()
    assert [name for name in drawn if not same_drawing(drawn[name], committed[name])] == []


# bench/cold_start.py

@pytest.mark.slow
def test_cold_start(tmp_path, monkeypatch):
    """The first process compiles what a tiny model needs, the second one nothing."""
    import cold_start
    path, out = write_model(tmp_path / "tiny.gguf", n_layer=1), tmp_path / "record.json"
    monkeypatch.setattr(cold_start, "WARM_RUNS", 1)
    monkeypatch.setattr(sys, "argv", ["cold_start.py", "--device", "cpu", "-m", str(path), "--out", str(out)])
    assert cold_start.main() == 0
    record = json.loads(out.read_text())
    empty, warm = record["runs"]
    assert (empty["cache"], warm["cache"], record["model"], record["cores"] > 0) == ("empty", "warm", "tiny.gguf", True)
    # all kernels come before the first token here
    assert empty["n_kernels"] > 5 and empty["first_token_seconds"] > empty["compile_seconds"] > 1
    assert (warm["n_kernels"], warm["compile_seconds"]) == (0, 0)
    assert warm["n_sources"] == warm["source_seconds"] == 0 or sys.dont_write_bytecode
    assert 0 < warm["import_seconds"] < warm["first_token_seconds"] - warm["load_seconds"] - warm["device_seconds"]
    assert 0 < warm["load_seconds"] < warm["first_token_seconds"] < empty["first_token_seconds"]
    assert "| tiny.gguf |" in report.page({}, {"record": record}, {})


@pytest.mark.parametrize("device, model, message",
                         [("tpu", "", "error: device: 'tpu' is not a device"), ("cpu", "missing.gguf", "No such file")])
def test_cold_start_refuses(device, model, message, tmp_path, monkeypatch, capsys):
    import cold_start
    monkeypatch.setattr(sys, "argv",
                        ["cold_start.py", "--device", device, "-m", str(tmp_path / model), "--out",
                         str(tmp_path / "record.json")])
    with pytest.raises(SystemExit):
        cold_start.main()
    assert message in capsys.readouterr().err and not (tmp_path / "record.json").exists()


# The benchmarks of the CPU

@pytest.mark.slow
def test_cpu_benchmarks_run():
    """Each once, the prompts of the largest products left out."""
    pytest.importorskip("pytest_benchmark", reason="pytest-benchmark is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--benchmark-disable", "-k", "not 512",
               *map(str, sorted((ROOT / "bench").glob("test_bench_cpu_*.py")))]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:]
