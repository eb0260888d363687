"""--report: a page that needs nothing else, of what was printed, without secrets; its plots within their frame."""
import re
from html.parser import HTMLParser
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from fake_model import FakeTokenizer
from planted_faults import FaultyBackend, after
from tiny_models import write_model

from ggml_py.__main__ import main
from ggml_py.backends.cpu import CPUBackend
from ggml_py.cli.report import Chart, Mark, Table, command_of, ticks, write_report
from ggml_py.engine.model import Model
from ggml_py.files.gguf import GGUFFile

VOID = {"meta", "line", "br"}
ENVIRONMENT = {"device": "cpu", "device_name": "a CPU", "driver": "none", "versions": {"numpy": "2"}}


class Page(HTMLParser):
    """Checks that tags close in order; `text` is what is shown, `tables` their cells."""

    def __init__(self, path):
        super().__init__()
        self.source = path.read_text("utf-8")
        self.open, self.shown, self.tables, self.titles = [], [], [], []
        self.feed(self.source)
        self.close()
        assert not self.open
        self.text = " ".join("".join(self.shown).split())

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        self.titles += [value for name, value in attrs if name == "title"]

    def handle_startendtag(self, tag, attrs):
        assert self.open  # drawn in SVG

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.shown.append(data)
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data


def needs_nothing_else(page: Page) -> bool:
    return not re.search(r"https?:|//|@import|url\(|<script|<link|<img|src=|href=", page.source)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "a <b> & c.gguf", "llama", ("Q8_0",), n_vocab=259)


def loader(path, backend):
    def load(_, device, **more):
        model = Model(GGUFFile.open(path), backend())
        model._tokenizer = FakeTokenizer(add_bos=True)
        return model
    return load


def nudge(call):
    """A product that is off by one ULP for fewer than 32 rows."""
    if call.out.n_rows < 32:
        call.out.data[:, 3] = np.nextafter(call.out.data[:, 3], np.float32(np.inf))


@pytest.mark.parametrize("faulty", [False, True])
def test_of_verify(capsys, tmp_path, path, faulty):
    backend = (lambda: FaultyBackend({"mul_mat": after(nudge)})) if faulty else CPUBackend
    (tmp_path / "text").write_bytes(bytes(np.random.default_rng(4).integers(97, 123, 200, np.uint8)))
    code = main([str(each) for each in ("verify", "-m", path, "-f", tmp_path / "text", "-c", 40, "--devices", "cpu", "--axes",
                                        "rerun,ubatch,noise", "--report", tmp_path / "r.html")], loader(path, backend))
    out, page = capsys.readouterr().out, Page(tmp_path / "r.html")
    assert code == int(faulty) and needs_nothing_else(page)
    verdict = next(line for line in out.splitlines() if line.startswith(("one digest", "different bits")))
    assert verdict in page.text and "The same bits: a <b> & c.gguf" in page.text
    assert f"--report {tmp_path / 'r.html'}" in page.text
    axes, settings, facts = page.tables
    digests = re.findall(r"\b[0-9a-f]{16}\b", out)
    by_axis = {row[0]: row for row in axes[1:]}
    assert by_axis["default"][3].split() == digests[:1] and by_axis["rerun"][2] == "✓✓" and by_axis["noise"][2] == ""
    assert "GPU" in by_axis["noise"][3] or "driver" in by_axis["noise"][3]
    assert by_axis["ubatch"][2] == ("✗✗✗✓" if faulty else "✓✓✓✓") and len(by_axis["ubatch"][3].split()) == (4 if faulty else 1)
    assert [row[-1].partition(":")[0] for row in settings[1:]] == ["pass"] * 3 + (
        ["FAIL" if faulty else "pass"] * 3) + ["pass", "not run"]
    assert ("first node that differs: " in page.text) == faulty and dict(facts)["windows"] == "4 of 40 tokens"
    assert {"1 at a time", "again, 2"} <= {title.partition(":")[0] for title in page.titles}


def test_of_sweep_bench(capsys, tmp_path, path):
    """Rows as printed, and as many points in both plots."""
    argv = ["sweep-bench", "-m", path, "--device", "cpu", "-c", 70, "-ub", 16, "-n", 5, "--report", tmp_path / "r.html"]
    assert main([str(each) for each in argv]) == 0
    printed = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()[2:]]
    page = Page(tmp_path / "r.html")
    rows, facts = page.tables
    found = [[row[i].replace(",", "") for i in (0, 1, 2, 4, 5)] for row in rows[1:]]
    assert found == [row[2:] for row in printed] and len(found) == 4
    assert page.source.count("<circle") == 8 and page.source.count("<svg") == 2 and needs_nothing_else(page)
    assert dict(facts)["n_ubatch"] == "16" and dict(facts)["device"] == "cpu" and "numpy" in dict(facts)["versions"]


def test_where_it_cannot_be_written(capsys, tmp_path, path):
    assert main(["sweep-bench", "-m", str(path), "--report", str(tmp_path / "no" / "r.html")]) == 2
    assert "argument --report: " in capsys.readouterr().err


@pytest.mark.parametrize("most", [1e-3, 0.7, 1, 4.9, 5, 5.1, 16, 99, 100, 101, 1344, 106137, 3e7])
def test_ticks(most):
    found = ticks(most)
    assert found[0] == 0 and found[-1] >= most > found[-2] and 3 <= len(found) <= 7
    assert len({round(b - a, 12) for a, b in pairwise(found)}) == 1


@pytest.mark.parametrize("values", [[(0, 5)], [(0, 0)], [(0, 0.002), (512, 3e5)], [(i * 512, 100 / (1 + i)) for i in range(300)]])
def test_a_chart_stays_in_its_frame(values):
    chart = Chart("t", values, "x", "tokens/s")
    assert all(chart.left <= x <= chart.right and chart.top <= y <= chart.bottom for x, y, _ in chart.points)
    assert all(chart.left <= x <= chart.right for x, _ in chart.x_ticks)
    assert all(chart.top <= y <= chart.bottom for y, _ in chart.y_ticks) and chart.y_ticks[0][0] == chart.bottom
    assert chart.points[0][0] == chart.left and len(chart.points) == len(values)


def test_what_others_wrote_is_text(tmp_path):
    options = SimpleNamespace(command="verify", args=["-m", "<i>x</i>"], given={"-m": "-m"})
    table = Table("<u>", ("a",), [("<s>",), ([Mark("\ud800", "", '"><b>')],)])
    write_report(tmp_path / "r.html", options, "</title>", "<script>", None, [table], ENVIRONMENT, model="&amp;")
    page = Page(tmp_path / "r.html")
    assert "<script>" in page.text and "<s>" in page.text and "&amp;" in page.text and "<script" not in page.source


@pytest.mark.parametrize("typed, shown", [
    (["-hf", "a/b", "--token", "hf_x", "-c", "7"], "ggml-py run -hf a/b --token ... -c 7"),
    (["-hft=hf_x"], "ggml-py run -hft=..."), (["--hf-token=hf_x", "-p", "a b"], "ggml-py run --hf-token=... -p 'a b'")])
def test_the_command_has_no_secrets(typed, shown):
    from ggml_py.cli.main import parse
    options = parse(["run", *typed, *(["-p", "x"] if "-p" not in typed else [])])
    assert command_of(options).removesuffix(" -p x") == shown
