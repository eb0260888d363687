"""Where things lie, and the environment of a process that imports them: the checkout, what tests share, scripts."""
import os
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
REFERENCE = ROOT.parent / "shared" / "reference"  # records of llama.cpp; tests that need them skip without


def environment(*folders: Path, **variables: str) -> dict[str, str]:
    """This process's, with the checkout and these folders on Python's path, and these variables."""
    path = [*map(str, (*folders, ROOT, TESTS / "helpers", TESTS / "scripts")), os.environ.get("PYTHONPATH")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))} | variables
