"""bench/peers.py on a stand-in for llama_cpp.Llama: what it counts, and what it says without one."""
import sys

import numpy as np
import pytest

from fake_model import FakeTokenizer, prefix_logits
from ggml_py.engine.model import Model
from tiny_models import write_model

import peers


class Llama:
    """Its logits change with the micro-batch, and from run to run where `flaky`."""
    flaky, made = False, []

    def __init__(self, *, model_path, n_ctx, n_batch, n_ubatch, n_threads, n_threads_batch, n_gpu_layers, logits_all, flash_attn,
                 verbose):
        assert logits_all and n_batch == n_ctx and n_gpu_layers == 0
        self.n_ubatch, self.n_threads, self.scores, self.n_tokens, self.tokens = n_ubatch, n_threads, np.zeros(
            (n_ctx, 259), np.float32), 0, []
        self.made.append(self)

    def reset(self):
        self.n_tokens, self.tokens = 0, []

    def eval(self, tokens):
        self.tokens += tokens
        self.n_tokens += len(tokens)
        error = (self.n_ubatch if self.n_ubatch < 32 else 0) + (len(self.made) if self.flaky else 0)
        self.scores[:self.n_tokens] = prefix_logits(self.tokens) + error

    def close(self):
        pass


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    (tmp_path / "text").write_bytes(b"some words that are tokens " * 9)
    path = write_model(tmp_path / "m.gguf", "llama", n_vocab=259, n_layer=1)
    monkeypatch.setattr(Model, "tokenizer", FakeTokenizer(False))
    Llama.made.clear()
    return ["-m", str(path), "-f", str(tmp_path / "text"), "-c", "100", "--devices", "cpu"]


def test_counts(arguments, capsys):
    assert peers.main(arguments, Llama) == 0
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()
            if line.startswith("|")]
    assert rows[0][0::3] == ["axis", "llama-cpp-python"] and rows[0][2].startswith("ggml-py ")
    found = {row[0]: row[1:] for row in rows[2:]}
    assert found["rerun"] == ["3", "1", "1"] and found["ubatch"] == ["5", "1", "3"]  # of micro-batches of 1, 7 and all others
    assert found["pieces"][1:] == found["threads"][1:] == ["1", "1"] and found["all"][1:] == ["1", "3"] and "device" not in found
    assert {llama.n_threads for llama in Llama.made} >= {1}


def test_an_engine_that_never_repeats_itself(arguments, capsys, monkeypatch):
    monkeypatch.setattr(Llama, "flaky", True)
    assert peers.main(arguments, Llama) == 0
    assert "| rerun | 3 | 1 | 3 |" in capsys.readouterr().out


def test_without_it(arguments, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert peers.main(arguments) == 2
    assert capsys.readouterr().err == "peers: llama-cpp-python is not installed; install ggml-bitwise[peers]\n"
