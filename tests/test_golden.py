"""Digests recorded on a GPU equal what the CPU computes now, also with its features turned down;
SmolLM2 gives the same bits on every axis."""
import io
import json
import re
import subprocess
import sys

import pytest

import goldens
import smollm2
from ggml_py.kernels import threads
from ggml_py.backends.cpu import CPUBackend
from ggml_py.base.defaults import TEXT
from ggml_py.engine.model import Model
from ggml_py.engine.settings import Settings
from ggml_py.engine.windows import read_text
from ggml_py.measure.perplexity import perplexity
from places import ROOT
from turned_down import turned_down

RECORDS = goldens.records()


@pytest.fixture(scope="module")
def model():
    with Model.load(smollm2.require(), device="cpu") as model:
        yield model


def test_there_is_a_record_of_a_gpu():
    assert any(r["driver"] != "none" and r["numba.cuda"] == "numba_cuda"
               and r["off the device, nodes"] == r["off the device, copies"] == 0 for r in RECORDS)


def history() -> tuple[list[int], dict[int, dict[str, tuple[int, str]]]]:
    """The versions of docs/numerics.md, and version -> group -> (number, fingerprint) of its digests."""
    text = re.split(r"## \d+\. History", (ROOT / "docs" / "numerics.md").read_text())[1]
    versions = [int(version) for version in re.findall(r"^\| (\d+) \| [^|`]+ \|$", text, re.M)]
    groups = {}
    for version, group, n, fingerprint in re.findall(r"^\| (\d+) \| `([^`]+)` \| (\d+) \| `([0-9a-f]{16})` \|$", text, re.M):
        assert group not in groups.setdefault(int(version), {})
        groups[int(version)][group] = int(n), fingerprint
    return versions, groups


def test_version_is_the_documented_one():
    text, (versions, groups) = (ROOT / "docs" / "numerics.md").read_text(), history()
    assert re.search(r"\*\*Numerics version: (\d+)\.\*\*", text).group(1) == str(goldens.NUMERICS_VERSION)
    assert versions == list(range(1, goldens.NUMERICS_VERSION + 1)) == sorted(groups)
    assert [r["numerics"] for r in RECORDS] == [goldens.NUMERICS_VERSION] * len(RECORDS)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["device"])
def test_digests_are_those_of_the_history(record):
    """A digest cannot change alone: its fingerprint in the history would have to, and a version's rows stay as they are."""
    documented = history()[1][record["numerics"]]
    assert goldens.fingerprints(goldens.all_digests(record), documented) == documented


def test_a_changed_digest_is_seen():
    found = goldens.all_digests(RECORDS[0])
    documented = history()[1][RECORDS[0]["numerics"]]
    for name, digest in found.items():
        changed = {**found, name: digest[:-1] + "0123456789abcdef"[int(digest[-1], 16) - 1]}
        assert sum(a != b for a, b in zip(goldens.fingerprints(changed, documented).values(), documented.values())) == 1, name
    assert goldens.fingerprints({**found, "argmax f32": "0" * 64}, documented)[""][0] == 1
    longer = goldens.fingerprints({**found, "mul_mat NEW": "0" * 64}, [*documented, "mul_mat NEW"])
    assert longer.pop("mul_mat NEW")[0] == 1 and longer == documented


def expected(name: str) -> set[str]:
    return {r["digests"][name] for r in RECORDS}


@pytest.mark.parametrize("fmt", goldens.WEIGHTS, ids=lambda fmt: fmt.name)
def test_ops(fmt):
    backend = CPUBackend()
    assert {goldens.mul_mat_digest(backend, fmt)} == expected(f"mul_mat {fmt.name}")
    assert {goldens.get_rows_digest(backend, fmt)} == expected(f"get_rows {fmt.name}")


def test_smollm2(model):
    for name, digest in goldens.smollm2_digests(model).items():
        assert {digest} == expected(name), name


def test_demo_perplexity(model):
    """The README's first command: its digest is the recorded GPU's."""
    out, tokens = io.StringIO(), model.tokenizer.encode(read_text(TEXT))
    perplexity(model, tokens, Settings(), out, io.StringIO())
    recorded = [r["perplexity"]["demo text"] for r in RECORDS]
    assert {f"Final estimate: PPL = {r['PPL']}\ndigest: {r['digest']}\n"
            for r in recorded} == {out.getvalue()[out.getvalue().index("Final"):]}


@pytest.mark.slow
def test_smollm2_axes(model):
    """The recorded settings, computed anew: one digest, the GPU's."""
    from record_golden import axes
    tokens = goldens.demo_tokens(model, 300)
    found = axes(model, tokens)
    before = threads.get_num_threads()
    try:
        for n in {1, before}:
            threads.set_num_threads(n)
            found[f"{n} threads"] = goldens.logits_digest(model, tokens)
    finally:
        threads.set_num_threads(before)
    assert set(found.values()) == {r["axes"]["digest"] for r in RECORDS}, found


TURNED_DOWN = """
import json
import goldens
from ggml_py.backends.cpu import CPUBackend
from ggml_py.engine.model import Model
from ggml_py.quant.formats import format_of
backend = CPUBackend()
found = {{f"mul_mat {{name}}": goldens.mul_mat_digest(backend, format_of(name)) for name in ("Q4_1", "Q6_K", "NVFP4", "BF16")}}
with Model.load({model!r}, device="cpu") as model:
    found["tokens"] = goldens.logits_digest(model, goldens.demo_tokens(model, 200), "q8_0", "f16")
print(json.dumps(found))
"""


@pytest.mark.slow
def test_cpu_features_turned_down():
    script = TURNED_DOWN.format(model=str(smollm2.require()))
    found = json.loads(subprocess.run([sys.executable, "-c", script], env=turned_down(), capture_output=True, text=True,
                                      check=True).stdout)
    assert {found.pop("tokens")} == expected("smollm2, 200 tokens of the demo text, q8_0 and f16 cache")
    for name, digest in found.items():
        assert {digest} == expected(name), name


def test_nothing_is_ambient():
    """Behaviour comes from arguments: no environment variable is read by the package (those of numba and CUDA are theirs)."""
    for path in (*ROOT.glob("ggml_py/**/*.py"), *ROOT.glob("quant/*.py"), *ROOT.glob("kernels/*.py"),
                 *ROOT.glob("kernels/cpu/*.py")):
        if path.name != "progress.py":  # which asks what kind of terminal there is
            text = path.read_text().replace('os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")', "")  # Ray reads it
            assert not re.search(r"os\.environ|getenv", text), path
