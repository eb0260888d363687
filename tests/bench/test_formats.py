"""docs/formats.md is what bench/formats.py writes."""
import pytest

formats = pytest.importorskip("formats", reason="needs the checkout")

from ggml_py.quant.formats import FORMATS


def test_the_page_is_what_the_script_writes():
    assert formats.PAGE.read_text() == formats.page(), "run python bench/formats.py"


def test_every_type_that_runs_has_a_line_and_its_error():
    text = formats.page()
    assert all(f"\n| `{fmt.name}` | {int(fmt.type_id)} | " in text for fmt in FORMATS.values() if fmt.planes)
    assert formats.line(FORMATS["IQ4_KS"], {"IQ4_KS": 0.05}, {("IQ4_KS", 1): 10.0, ("IQ4_KS", 512): 300.0},
                        {"IQ4_KS": {"kl": 0.012345}}) == (
        "| `IQ4_KS` | 144 | 4.258 | 4.375 | 32 | 127 | 127 |  | 0.0500 | 0.0123 | 10.0 | 200 |\n")
