"""bench/sequences.py: steps of several sequences together."""
import pytest

sequences = pytest.importorskip("sequences", reason="needs the checkout")

import synth
from ggml_py.engine.model import Model


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen35moe"])
def test_steps_together(shape, tmp_path):
    path = synth.write(tmp_path / "m.gguf", synth.SHAPES[shape], "Q4_K")
    with Model.load(path, "cpu") as model:
        seconds = sequences.steps_together(model, 3, 20, 4)
    assert len(seconds) == 4 and min(seconds) > 0


def test_every_model_has_figures():
    assert {shape for shape, _ in sequences.LLAMA_CPP} <= set(synth.SHAPES)
