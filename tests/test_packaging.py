"""What a wheel will hold, read from pyproject.toml, against the folders; `make wheel-test` builds and runs a real one."""
import ast
import json
import re
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import pytest
from fake_model import FakeModel

import ggml_py
from places import ROOT

PYPROJECT = ROOT / "pyproject.toml"
pytestmark = pytest.mark.skipif(not PYPROJECT.is_file(), reason="needs the checkout")
ROOMS = {"ggml_py": "ggml_py", "ggml_py.kernels": "kernels", "ggml_py.quant": "quant"}


@pytest.fixture(scope="module")
def config():
    return tomllib.loads(PYPROJECT.read_text())


def test_every_folder_with_modules_is_a_package(config):
    found = {".".join([package, *path.parent.relative_to(ROOT / folder).parts]) for package, folder in ROOMS.items()
             for path in (ROOT / folder).rglob("*.py")}
    assert found == set(config["tool"]["setuptools"]["packages"])
    assert config["tool"]["setuptools"]["package-dir"] == ROOMS


def test_every_data_file_is_in_the_wheel(config):
    data = {path.relative_to(ROOT / "ggml_py").as_posix() for path in (ROOT / "ggml_py").rglob("*")
            if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert data == set(config["tool"]["setuptools"]["package-data"]["ggml_py"])


def test_readme_gives_a_reason_for_every_dependency(config):
    project, readme = config["project"], (ROOT / "README.md").read_text()
    requirements = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    named = {re.match(r"[\w-]+", r)[0] for r in requirements}
    rows = {row.split("|")[1].strip().strip("`"): row.split("|")[3].strip() for row in readme.splitlines()
            if row.startswith("| `")}
    assert named == {name for name in rows if name in named} and all(rows[name] for name in named)


def test_the_name_of_the_distribution(config):
    """`ggml-py` is another project's: nobody is told to install that."""
    assert config["project"]["name"] == "ggml-bitwise" and config["project"]["scripts"] == {"ggml-py": "ggml_py.__main__:program"}
    code = (path for folder in ("ggml_py", "kernels", "quant", "bench") for path in (ROOT / folder).rglob("*.py"))
    for path in *ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "Makefile", *code:
        assert not re.search(r"install[^\n]{0,20}ggml-py\b|ggml-py\[", path.read_text()), path


def test_readme_names_what_works():
    """Architectures, formats, cache types and the digest that `make perplexity` prints."""
    from ggml_py.base.storage import CACHE_TYPES
    from ggml_py.models import ARCHITECTURES
    from ggml_py.quant.formats import FORMATS
    readme = (ROOT / "README.md").read_text()
    row = lambda name: re.search(rf"^\| {name} \| (.*?) \|", readme, re.MULTILINE)[1].replace("`", "").split(", ")
    assert row("architectures") == [*ARCHITECTURES] and row("KV cache") == [*CACHE_TYPES]
    assert row("weights") == [name for name, fmt in FORMATS.items() if fmt.planes and fmt.is_in_files]
    recorded, = [json.loads(path.read_text())["perplexity"]["demo text"] for path in (ROOT / "tests" / "golden").glob("*.json")]
    assert f"Final estimate: PPL = {recorded['PPL']}\ndigest: {recorded['digest']}\n" in readme


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


ORDER = ("base", "files", "tokenizer", "ops", "backends.base", "graph", "backends", "state", "models", "engine", "check",
         "measure", "adapters", "cli")


def test_imports_inside_run_one_way():
    """A folder of ggml_py imports those before it in this list."""
    for path in (ROOT / "ggml_py").rglob("*.py"):
        place = path.relative_to(ROOT / "ggml_py")
        folder = place.parts[0]
        for node in ast.walk(ast.parse(path.read_text())) if folder in ORDER else ():
            if isinstance(node, ast.ImportFrom) and node.level == 2 and (node.module or "").split(".")[0] in ORDER:
                other = node.module if node.module in ORDER else node.module.split(".")[0]
                assert ORDER.index(other) <= ORDER.index(folder), f"{path}:{node.lineno}: {node.module}"


def test_nothing_is_printed_below_the_command_line():
    """But on a stream that the caller gives: the rest is told by logging."""
    for path in (ROOT / "ggml_py").rglob("*.py"):
        if path.parent.name != "cli" and path.name != "__main__.py":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                    assert any(each.arg == "file" for each in node.keywords), f"{path}:{node.lineno}"


def test_public_names_have_types():
    """What a type checker sees is what comes when it is asked for."""
    block = re.search(r"if TYPE_CHECKING:\n((?:    .*\n)+)", (ROOT / "ggml_py" / "__init__.py").read_text())[1]
    imports = ast.parse(re.sub("^    ", "", block, flags=re.MULTILINE)).body
    assert {alias.asname: f".{node.module}" for node in imports for alias in node.names} == ggml_py._HOME
    assert all(alias.asname == alias.name for node in imports for alias in node.names)  # "as" says that it is exported
    assert (ROOT / "ggml_py" / "py.typed").read_bytes() == b"" and {*ggml_py._HOME, "__version__"} == set(ggml_py.__all__)


def test_import_is_cheap_and_public_names_are_lazy():
    program = ("import sys, ggml_py; print(sorted({'numpy', 'numba', 'gguf', 'tokenizers'} & set(sys.modules)), "
               "set(ggml_py.__all__) <= set(dir(ggml_py)))")
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT,
                          check=True).stdout == "[] True\n"


def test_public_names():
    assert set(ggml_py.__all__) == {"Model", "Context", "Tokenizer", "GGUFError", "PlacementOptions", "Override", "ExpertsOnHost",
                                    "Fit", "Likelihood", "ParameterError", "UserError", "Completion", "Generation", "Piece",
                                    "TokenLogprob", "Sampling", "Grammar", "HubModel", "__version__"}
    assert issubclass(ggml_py.GGUFError, ValueError) and ggml_py.Tokenizer.from_gguf
    with pytest.raises(AttributeError, match="module 'ggml_py' has no attribute 'Modell'"):
        ggml_py.Modell
