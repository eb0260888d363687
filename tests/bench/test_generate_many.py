"""bench/generate_many.py: texts one by one and side by side."""
import pytest

generate_many = pytest.importorskip("generate_many", reason="needs the checkout")

import synth
from ggml_py.engine.model import Model


def test_a_row(tmp_path, monkeypatch):
    path = synth.write(tmp_path / "m.gguf", synth.SHAPES["tiny-llama"], "Q4_K")
    monkeypatch.setattr(generate_many, "N_POSITIONS", 40)
    monkeypatch.setattr(generate_many, "N_PROMPT", (4, 30))
    with Model.load(path, "cpu") as model:
        row = generate_many.row(model, "tiny", 7, 3, 3)
        assert row["avg_ts"] > 0 < row["one_by_one_ts"] and (row["texts"], row["side_by_side"]) == (7, 3)
        monkeypatch.setattr(Model, "generate", lambda model, prompt, **_: model.generate_many([[1]], max_tokens=1)[0])
        with pytest.raises(SystemExit, match="^tiny: 3 side by side have other ids than one by one$"):
            generate_many.row(model, "tiny", 7, 3, 3)


def test_every_model_can_be_made():
    assert {shape for shape, _ in generate_many.MODELS} <= set(synth.SHAPES)
