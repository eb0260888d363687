"""Faults of letters between devices: the axis `letters` catches them, and bisection names the letter."""
import numpy as np
import pytest

from ggml_py.backends.cpu import CPUBackend
from ggml_py.backends.letters import HostOffice
from ggml_py.graph import columns
from ggml_py.graph.letters import letters
from ggml_py.graph import program
from planted_faults import caught_by, verify, write

WINDOWS = np.random.default_rng(0).integers(0, 70, (2, 40)).astype(np.int32)


@pytest.fixture(autouse=True)
def all_is_cut(monkeypatch):
    """Small matrices, too."""
    monkeypatch.setattr(columns, "WORTH_A_GATHER", 0)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("models") / "llama.gguf", "llama")


def found_in(path):
    verification = verify(path, WINDOWS, ["letters"], {"cpu": CPUBackend()})
    assert caught_by(verification) == {"letters"}, verification.verdict()
    wrong = [result.setting.name for result in verification.results if result.status == "different"]
    assert wrong and all("by letters" in name for name in wrong), wrong
    return verification.bisect(verification.first_mismatch())


def test_a_letter_that_is_taken_too_early(path, monkeypatch):
    """Nobody waits for it."""
    take = HostOffice.take
    monkeypatch.setattr(HostOffice, "take", lambda office, item: item.box.tensor.name.startswith("l_out") or take(office, item))
    found = found_in(path)
    assert found.culprits == ["the letter of l_out-0 from cpu:1 to cpu, in: letters, half of the layers on cpu:1, by letters, "
                              "8 at a time"], str(found)


def test_a_letter_of_the_step_before(path, monkeypatch):
    """Its flag says that it is of this step."""
    post, kept = HostOffice.post, {}

    def stale(office, item):
        buffer, offset = item.source.memory
        n, row = item.rows
        if not item.source.name.startswith("ffn_out-1@cpu:1"):
            return post(office, item)
        now = buffer[offset:offset + n * row].copy()
        buffer[offset:offset + n * row] = kept.get(item, now)
        done = post(office, item)
        buffer[offset:offset + n * row], kept[item] = now, now
        return done
    monkeypatch.setattr(HostOffice, "post", stale)
    found = found_in(path)
    expected = "the letter of ffn_out-1@cpu:1 from cpu:1 to cpu, in: letters, columns"
    assert any(expected in each for each in found.culprits), str(found)


def test_a_letter_to_the_wrong_box(path, monkeypatch):
    """Two parts of a result change places in the box of their receiver."""
    write_ = HostOffice.write

    def elsewhere(box, first, stride, payload):
        other = stride - payload.shape[1] - first
        write_(box, other if box.tensor.name.startswith("kqv_out-0") and box.device == "cpu" else first, stride, payload)
    monkeypatch.setattr(HostOffice, "write", staticmethod(elsewhere))
    found = found_in(path)
    assert any("the letter of kqv_out-0@cpu" in each for each in found.culprits), str(found)


def test_a_payload_cut_short(path, monkeypatch):
    """The last row does not come."""
    write_ = HostOffice.write

    def short(box, first, stride, payload):
        if box.tensor.name.startswith("l_out-0"):
            payload = payload.copy()
            payload[:, -64:] = 0
        write_(box, first, stride, payload)
    monkeypatch.setattr(HostOffice, "write", staticmethod(short))
    found = found_in(path)
    assert found.culprits[0].startswith("the letter of l_out-0 from cpu:1 to cpu"), str(found)


def test_boxes_that_share_memory_too_early(path, monkeypatch):
    """All boxes of a device lie in one place."""
    def placed(*args):
        mail = letters(*args)
        for box in mail.boxes.values() if mail else ():
            box.offset = 0
        return mail
    monkeypatch.setattr(program, "letters", placed)
    found = found_in(path)
    assert found is not None and found.culprits, str(found)


def test_a_letter_that_never_comes(path, monkeypatch):
    """All that wait are named, and for what."""
    post = HostOffice.post
    monkeypatch.setattr(HostOffice, "post", lambda office, item: not item.source.name.startswith("l_out") and post(office, item))
    with pytest.raises(RuntimeError, match="letters: devices wait for ever: cpu for l_out-0@cpu, cpu:1 for l_out-0"):
        verify(path, WINDOWS, ["letters"], {"cpu": CPUBackend()})
