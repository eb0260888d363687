"""What a wheel will hold, read from pyproject.toml, against the folders; `make wheel-test` builds and runs a real one."""
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_model import FakeModel

import ggml_py

ROOT = Path(ggml_py.__file__).resolve().parent.parent
PYPROJECT = ROOT / "pyproject.toml"
pytestmark = pytest.mark.skipif(not PYPROJECT.is_file(), reason="needs the checkout")
ROOMS = {"ggml_py": "ggml_py", "ggml_py.kernels": "kernels", "ggml_py.quant": "quant"}


@pytest.fixture(scope="module")
def config():
    return tomllib.loads(PYPROJECT.read_text())


def test_every_folder_with_modules_is_a_package(config):
    found = {".".join([package, *path.parent.relative_to(ROOT / folder).parts]) for package, folder in ROOMS.items() for path in (ROOT / folder).rglob("*.py")}
    assert found == set(config["tool"]["setuptools"]["packages"])
    assert config["tool"]["setuptools"]["package-dir"] == ROOMS


def test_every_data_file_is_in_the_wheel(config):
    data = {path.relative_to(ROOT / "ggml_py").as_posix() for path in (ROOT / "ggml_py").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert data == set(config["tool"]["setuptools"]["package-data"]["ggml_py"])


def test_readme_gives_a_reason_for_every_dependency(config):
    project, readme = config["project"], (ROOT / "README.md").read_text()
    requirements = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    named = {re.match(r"[\w-]+", r)[0] for r in requirements}
    rows = {row.split("|")[1].strip().strip("`"): row.split("|")[3].strip() for row in readme.splitlines() if row.startswith("| `")}
    assert named == {name for name in rows if name in named} and all(rows[name] for name in named)


def test_readme_example_runs(monkeypatch):
    code, = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    monkeypatch.setattr(ggml_py, "Model", SimpleNamespace(load=lambda path, device: FakeModel()), raising=False)
    exec(compile(code, "README.md", "exec"), {})


def test_imports_run_one_way():
    """quant <- kernels <- ggml_py: an import upwards would make a cycle."""
    for room, above in ("quant", r"kernels|ggml_py(?!\.quant)"), ("kernels", r"ggml_py(?!\.(quant|kernels))"):
        for path in (ROOT / room).rglob("*.py"):
            bad = re.search(rf"^\s*(from|import)\s+({above})\b.*", path.read_text(), re.MULTILINE)
            assert not bad, f"{path}: {bad[0]}"


def test_import_is_cheap_and_public_names_are_lazy():
    program = "import sys, ggml_py; print(sorted({'numpy', 'numba', 'gguf', 'tokenizers'} & set(sys.modules)), set(ggml_py.__all__) <= set(dir(ggml_py)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True).stdout == "[] True\n"


def test_public_names():
    assert set(ggml_py.__all__) == {"Model", "Context", "Tokenizer", "GGUFError", "__version__"}
    assert issubclass(ggml_py.GGUFError, ValueError) and ggml_py.Tokenizer.from_gguf
    with pytest.raises(AttributeError, match="module 'ggml_py' has no attribute 'Modell'"):
        ggml_py.Modell
