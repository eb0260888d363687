"""examples/: the scripts and the notebook run, and an editor's checker accepts them; so do the examples in docstrings."""
import doctest
import io
import json
import re
import subprocess
import sys
from importlib import import_module, util
from pathlib import Path

import pytest
import smollm2
from tiny_text_models import write_text_model

EXAMPLES = Path(__file__).parent.parent / "examples"
CPU = "--device", "cpu"


def run(name: str, *argv):
    """The script's `main`."""
    spec = util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main([str(each) for each in (*argv, *CPU)])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two models of the same weights, and one of others, as lossy quantizations are; a text."""
    folder = tmp_path_factory.mktemp("examples")
    for name, types, seed in ("f32", ("F32",), 0), ("q8", ("Q8_0",), 0), ("q4", ("Q4_0",), 0), ("other", ("Q4_0",), 1):
        write_text_model(folder / f"{name}.gguf", types=types, seed=seed)
    (folder / "text").write_text(" ".join(f"the {i * i}th inn" for i in range(40)))
    return folder


def test_generate(capsys):
    smollm2.require()
    run("generate", "One, two, three,", "--max-tokens", 6, "-n", 2)
    first, second, last = capsys.readouterr().out.splitlines()
    assert first == second and first.startswith("One, two, three, four") and first.endswith("[length]")
    assert re.fullmatch("6 tokens, digest [0-9a-f]{64}", last)


def test_chat(capsys, monkeypatch):
    smollm2.require()
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is the capital of France?\nAnd a number?\n"))
    run("chat", "--schema", '{"enum": ["Paris", "Rome", 7]}', "--system", "Answer in JSON.")
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert answers[0] == "Paris" and answers[1] in ("Paris", "Rome", 7)


def test_score(capsys):
    smollm2.require()
    run("score", "The capital of France is", " a fish", " Paris")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].endswith("greedy  ' Paris'") and lines[1].endswith("        ' a fish'")


def test_compare(capsys, files):
    run("compare", files / "f32.gguf", files / "q8.gguf", files / "q4.gguf", "--text", files / "text", "-c", 32, "--chunks", 3,
        "--plot", files / "kl.svg")
    lines = capsys.readouterr().out.splitlines()
    q8, q4 = (float(re.search(r"mean KL divergence ([0-9.]+)", line)[1]) for line in lines)
    assert 0 <= q8 < q4 and "q8.gguf" in lines[0]
    assert "<svg" in (files / "kl.svg").read_text()


def test_verify(capsys, files):
    argv = files / "ppl.json", "--text", files / "text", "-c", 32, "-m"
    assert run("verify", *argv, files / "q4.gguf") == 0
    made = capsys.readouterr().out
    assert re.match(r"perplexity [0-9.]+, root [0-9a-f]{64}", made)
    assert run("verify", *argv, files / "q4.gguf", "--confirm", "--sample", 1) == 0
    assert capsys.readouterr().out.startswith("confirmed: by sample: window ")
    document = json.loads((files / "ppl.json").read_text())
    document["windows"][0] = document["windows"][1]
    from ggml_py.check.attestation import own_sha256
    from ggml_py.check.merkle import merkle_root
    document["merkle_root"] = merkle_root(document["windows"])
    document["sha256"] = own_sha256(document)
    (files / "ppl.json").write_text(json.dumps(document))
    assert run("verify", *argv, files / "q4.gguf", "--confirm") == 1
    assert capsys.readouterr().out.startswith("not confirmed: window 1 of 2 gave ")


def test_the_notebook():
    smollm2.require()
    import nbformat
    from nbclient import NotebookClient
    notebook = nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # they are made where it is run
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": EXAMPLES.parent}}).execute()
    printed = ["".join(output.get("text", "") for output in cell.outputs if output.output_type == "stream")
               for cell in notebook.cells if cell.cell_type == "code"]
    assert [*json.loads(printed[4])] == ["name", "age"]


def test_an_editors_checker_accepts_them():
    """pyright, which brings its own Node.js; nothing is fetched."""
    pyright = Path(sys.executable).with_name("pyright")
    try:
        found = subprocess.run([pyright, "--outputjson", "--pythonpath", sys.executable, *EXAMPLES.glob("*.py")], text=True,
                               capture_output=True, timeout=240, cwd=EXAMPLES.parent)
        report = json.loads(found.stdout)
    except (OSError, ValueError) as error:
        pytest.skip(f"pyright does not start: {error}")
    assert report["summary"]["filesAnalyzed"] == len([*EXAMPLES.glob("*.py")])
    assert not [(each["file"], each["range"]["start"], each["message"]) for each in report["generalDiagnostics"]]


@pytest.mark.parametrize("name", ["completion", "grammar", "sampling"])
def test_examples_in_docstrings(name):
    found = doctest.testmod(import_module(f"ggml_py.engine.{name}"))
    assert found.attempted and not found.failed
