"""docs/python.md: its examples run, one after the other, and it names what is public."""
import re
from pathlib import Path

import ggml_py
import smollm2

PAGE = (Path(__file__).parent.parent / "docs" / "python.md").read_text()


def test_examples_run():
    smollm2.require()
    names: dict = {}
    try:
        for example in re.finditer(r"```python\n(.*?)```", PAGE, re.DOTALL):
            line = PAGE[:example.start(1)].count("\n")
            exec(compile("\n" * line + example[1], "docs/python.md", "exec"), names)
    finally:
        names["model"].close()


def test_public_names_are_named():
    assert not [name for name in ggml_py.__all__ if not re.search(rf"\b{name}\b", PAGE) and name != "__version__"]
