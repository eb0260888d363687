"""docs/quantize.md has the tables that bench/mixes.py writes."""
import pytest

mixes = pytest.importorskip("mixes", reason="needs the checkout")


def test_the_page_has_the_tables_of_the_code():
    assert mixes.PAGE.read_text() == mixes.page(), "run python bench/mixes.py"
