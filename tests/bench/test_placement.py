"""bench/placement.py: every placement of a table is measured, and gives the logits of one device."""
import json

import pytest

placement = pytest.importorskip("placement", reason="needs the checkout")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(placement, "N_PROMPTS", (24, 40))
    monkeypatch.setattr(placement, "N_CTX", 128)
    monkeypatch.setattr(placement, "read_GB_s", lambda: 1.0)
    monkeypatch.setattr(placement, "TABLE", {
        ("tiny-llama", "Q4_K"): [placement.Row("all", {}),
                                 placement.Row("-ngl 1", {"n_gpu_layers": 1}, (1e9, 1, 1), (1e9, 1e9, 1))],
        ("tiny-qwen35moe", "Q4_K"): [placement.Row("all", {}),
                                     placement.Row("-cmoe", {"overrides": (placement.ExpertsOnHost(),)})]})


def run(monkeypatch, tmp_path, *more):
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["placement.py", "--models", str(tmp_path), "--out", str(out), "--device", "cpu:1",
                                     "-n", "3", "-r", "1", *more])
    assert placement.main() == 0
    return json.loads(out.read_text())


def test_rows(small, monkeypatch, tmp_path):
    record = run(monkeypatch, tmp_path)
    assert [(row["model"], row["placement"]) for row in record["rows"]] == [
        ("tiny-llama:Q4_K", "all"), ("tiny-llama:Q4_K", "-ngl 1"),
        ("tiny-qwen35moe:Q4_K", "all"), ("tiny-qwen35moe:Q4_K", "-cmoe")]
    assert record["rows"][1]["verdicts"] == ["missed", "met", "goal"] and set(record["rows"][3]["weights"]) == {"cpu", "cpu:1"}
    assert all(min(row["pp512"], row["pp2048"], row["tg"]) > 0 for row in record["rows"])


def test_other_logits_are_an_error(small, monkeypatch, tmp_path):
    decode, calls = placement.Context.decode, []

    def other(context, *args, **kwargs):
        calls.append(context)
        return decode(context, *args, **kwargs) * (len({id(each) for each in calls}))
    monkeypatch.setattr(placement.Context, "decode", other)
    with pytest.raises(RuntimeError, match="tiny-llama, -ngl 1: other logits than all on cpu:1"):
        run(monkeypatch, tmp_path, "--only", "tiny-llama")


def test_what_memory_gives():
    assert placement.read_GB_s(1 << 20) > 0.1
