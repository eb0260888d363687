"""bench/speculation.py: forced drafts are right as far as they should be, and a small model's text is the one without."""
from dataclasses import replace

import pytest

speculation = pytest.importorskip("speculation", reason="needs the checkout")

import synth
from ggml_py.engine.model import Model


@pytest.mark.parametrize("shape, n_nextn", [("tiny-llama", 0), ("tiny-qwen35moe", 1), ("tiny-qwen3next", 1)])
def test_rows(shape, n_nextn, tmp_path):
    path = speculation.written(tmp_path, shape, "Q4_K", n_nextn)
    assert path.name == f"{shape}-q4_k{'-nextn' * n_nextn}.gguf" and speculation.written(tmp_path, shape, "Q4_K", n_nextn) == path
    source = "mtp" if n_nextn else "known"
    figures = [speculation.Figure(source, n_right, 0, 100) for n_right in (0, 2, 3)]
    with Model.load(str(path), "cpu", nextn=n_nextn > 0) as model:
        plain, *rows = speculation.measure(model, figures, 24, 1)
    assert plain["source"] == "none" and plain["avg_ts"] > 0
    assert [(row["n_right"], row["lengths"]) for row in rows] == [(n, kind) for n in (0, 2, 3) for kind in ("fixed", "learned")]
    none, rests, two, _, three, learned = rows
    assert none["accepted"] == rests["accepted"] == 0 and none["drafted"] > 60 and rests["drafted"] < 30
    assert (two["accepted"], two["drafted"], two["steps"]) == (16, 23, 8)  # a step is three tokens; the last draft is of two
    assert three["accepted"] == three["drafted"] == learned["accepted"] == 18 and three["steps"] == 6


def test_another_text_is_an_error(tmp_path, monkeypatch):
    path = speculation.written(tmp_path, "tiny-llama", "Q4_K", 0)
    calls = []

    def timed(context, prompt, n, drafts):
        calls.append(drafts)
        return [len(calls) // 3], 1.0  # from the third call on
    monkeypatch.setattr(speculation, "timed", timed)
    with Model.load(str(path), "cpu") as model, pytest.raises(RuntimeError, match="known, 3 right: another text than without"):
        speculation.measure(model, [speculation.Figure("known", 3, 1, 2)], 8, 1)


def test_nextn_blocks_are_written(tmp_path):
    shape = replace(synth.SHAPES["tiny-qwen35moe"], n_nextn=1)
    names = {t.name for t in synth.tensors(shape)} - {t.name for t in synth.tensors(synth.SHAPES["tiny-qwen35moe"])}
    assert {"blk.4.nextn.eh_proj.weight", "blk.4.attn_q_norm.weight", "blk.4.ffn_gate_exps.weight"} < names
    assert all(name.startswith("blk.4.") for name in names) and not [name for name in names if "ssm" in name]
