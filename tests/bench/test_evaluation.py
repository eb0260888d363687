"""bench/evaluation.py: perplexity, base files and KL divergence of a tiny model."""
import pytest

evaluation = pytest.importorskip("evaluation", reason="needs the checkout")

import synth
from ggml_py.engine.model import Model


def test_a_row(tmp_path):
    """Has all six speeds, and no base file stays."""
    with Model.load(synth.write(tmp_path / "m.gguf", synth.SHAPES["tiny-llama"], "Q4_K"), "cpu") as model:
        row = evaluation.row(model, "tiny", 64, 300, tmp_path)
    assert (row.pop("model"), row.pop("n_ctx"), row.pop("tokens")) == ("tiny", 64, 256)
    assert [*row] == [f"{key}{root}_ts" for key in ("perplexity", "base", "compared") for root in ("", "_root")]
    assert all(speed > 0 for speed in row.values()) and not [*tmp_path.glob("*.kld")]


def test_every_model_can_be_made():
    assert {shape for shape, _ in evaluation.MODELS} <= set(synth.SHAPES)
