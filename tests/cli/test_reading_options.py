"""How weights come into memory, what stderr tells, devices and -c 0: options that every command has which runs a model."""
import ctypes
import json
import logging
import re

import numpy as np
import pytest
from fake_model import N_VOCAB, FakeModel
from notices import without_notice
from tiny_models import write_model

from ggml_py.__main__ import main
from ggml_py.backends.cpu import CPUBackend
from ggml_py.base import memory
from ggml_py.base.errors import UserError
from ggml_py.engine.model import Model
from ggml_py.models.fit import Fit
from made_tokenizers import LETTERS, bpe

SHORT = ["-p", "4", "-n", "2", "-r", "1", "-o", "jsonl"]


@pytest.fixture
def path(tmp_path):
    return write_model(tmp_path / "m.gguf", "llama", n_vocab=256)


def call(capsys, *argv, model=None):
    code = main([str(each) for each in argv], (lambda path, device: model) if model else None)
    out, err = capsys.readouterr()
    return code, out, without_notice(err)


@pytest.fixture
def opened(monkeypatch):
    """(whether it is mapped, fit) of each model that is loaded."""
    found, load = [], Model.load.__func__

    def loading(cls, path, device="auto", **more):
        found.append((more["mapped"], more["fit"]))
        return load(cls, path, device, **more)
    monkeypatch.setattr(Model, "load", classmethod(loading))
    monkeypatch.setattr(Model, "tokenizer", property(lambda self: bpe(LETTERS)))
    return found


@pytest.mark.parametrize("argv, mapped", [([], True), (["--no-mmap"], False), (["-lm", "none"], False), (["-lm", "mmap"], True),
                                          (["--no-mmap", "--mmap"], True), (["-lm", "mlock"], False), (["-lm", "mmap+mlock"],
                                                                                                       True)])
def test_weights_are_mapped_or_read(capsys, path, opened, monkeypatch, argv, mapped):
    locked = []
    monkeypatch.setattr(memory, "lock", lambda: locked.append(1))
    code, out, _ = call(capsys, "bench", "-m", path, "--device", "cpu", *SHORT, *argv)
    assert code == 0 and len(out.splitlines()) == 2 and opened == [(mapped, Fit(4))]
    assert bool(locked) == any("mlock" in word for word in argv)


@pytest.mark.parametrize("command", [["run", "-p", "ab", "-n", "2"], ["verify", "-f", "{}/text", "-c", "16", "--chunks", "1",
                                                                      "--axes", "kv_write"]])
def test_memory_is_locked_or_a_line_says_why_not(capsys, path, opened, monkeypatch, tmp_path, command):
    (tmp_path / "text").write_text("abcdefgh" * 4)
    monkeypatch.setattr(memory, "lock", lambda: "no")
    argv = [each.replace("{}", str(tmp_path)) for each in command]
    code, _, err = call(capsys, *argv, "-m", path, "--device", "cpu", "--mlock")
    assert code == 0 and "--mlock: no\n" in err


def test_the_lock_itself(monkeypatch):
    """By the system's own call, whatever it allows here; and what is said where it refuses."""
    said = memory.lock()
    ctypes.CDLL(None).munlockall()
    assert said is None or said.startswith("memory is not locked, and ")

    class System:
        def mlockall(self, flags):
            assert flags == 5
            ctypes.set_errno(12)
            return -1
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: System())
    assert memory.lock() == "memory is not locked, and weights may be moved to disk: Cannot allocate memory (RLIMIT_MEMLOCK)"
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    assert "has no mlockall" in memory.lock()


def test_fit_of_bench_and_verify(capsys, path, opened, monkeypatch, tmp_path):
    """A device that is too small has a part of the layers; results tell the placement, and verify leaves out other placements."""
    (tmp_path / "text").write_text("abcdefgh" * 16)
    monkeypatch.setattr(CPUBackend, "free_bytes", lambda self: 1 << 20 if self.device == "cpu" else 250_000)
    code, out, err = call(capsys, "bench", "-m", path, "--device", "cpu:1", "-fitt", "0", "-ub", "8", *SHORT)
    placements = {json.loads(line)["placement"] for line in out.splitlines()}
    assert code == 0 and len(placements) == 1 and re.fullmatch(r"-ngl \d", placements.pop())
    assert re.search(r"--fit: not all fits into cpu:1; -ngl \d\n", err)
    code, out, err = call(capsys, "bench", "-m", path, "--device", "cpu:1", "--fit", "off", *SHORT)
    assert code == 0 and {json.loads(line)["placement"] for line in out.splitlines()} == {""} and "--fit" not in err
    monkeypatch.setattr("ggml_py.models.fit.WIDE_ROWS", 0)
    code, out, err = call(capsys, "verify", "-m", path, "-f", tmp_path / "text", "-c", 16, "--chunks", 2, "--device", "cpu:1",
                          "-fitt", "0",
                          "--axes", "rerun,placement")
    assert code == 0 and "--fit: not all fits into cpu:1; -ngl" in err
    assert "the model does not fit into cpu:1 as a whole" in out and "one digest: 3 settings" in out


def test_devices_are_listed(capsys):
    for command in "run", "bench", "perplexity", "verify":
        with pytest.raises(SystemExit) as end:
            main([command, "--list-devices"])
        out = capsys.readouterr().out
        assert not end.value.code and re.search(r"^Available devices:\n(  cuda:.*\n)*  cpu: \S+ \(\d+ MiB, \d+ MiB free\)\n$",
                                                out)


@pytest.mark.parametrize("level, notes, warnings", [(0, False, False), (1, False, False), (2, False, True), (3, True, True)])
def test_what_stderr_tells(capsys, path, level, notes, warnings):
    def logits(tokens):
        logging.getLogger("ggml_py.tokenizer").warning("a warning")
        return FakeModel().logits(tokens)
    code, out, err = call(capsys, "run", "-m", path, "-p", "once", "-n", 1, "-lv", level, model=FakeModel(logits=logits))
    assert code == 0 and out and ("run: prompt of 4 tokens" in err) == notes
    assert level == 3 or ("a warning" in err) == warnings  # at 3 pytest has it
    code, _, err = call(capsys, "run", "-m", path, "-p", "once", "-c", 2, "-lv", level, model=FakeModel())
    assert code == 2 and err.startswith("ggml-py: error: -c: a prompt of 4 tokens")


def test_errors_are_never_silenced(capsys, path, tmp_path):
    """Neither those behind a mismatch, which verify tells while it runs."""
    from ggml_py.cli.main import behind
    from ggml_py.cli.streams import quieted
    with quieted(0), behind(1):
        raise UserError("the disk is full")
    assert capsys.readouterr().err == "ggml-py: error: the disk is full\n"


def test_much_is_verbose(capsys, path):
    assert "a fake model" in call(capsys, "run", "-m", path, "-p", "x", "-n", 1, "-lv", 4, model=FakeModel())[2]


@pytest.mark.parametrize("command, said", [
    (["run", "-p", "once", "-n", "-1"], "the context of 256 tokens is full"), (["perplexity", "-f", "{}/text"], "n_ctx=256"),
    (["info"], "KV cache, 256 positions")])
def test_c_0_is_what_the_model_was_trained_for(capsys, path, tmp_path, command, said):
    """By its file: the fake model has room for more."""
    (tmp_path / "text").write_bytes(b"abcdefgh" * 70)
    model = FakeModel(logits=lambda tokens: np.eye(N_VOCAB, dtype=np.float32)[[65] * len(tokens)])
    code, out, err = call(capsys, *(each.replace("{}", str(tmp_path)) for each in command), "-m", path, "-c", 0,
                          model=None if command == ["info"] else model)
    assert code == 0 and said in out + err, err


@pytest.mark.parametrize("argv, driver, told", [
    ([], False, False), ([], True, True), (["-ngl", "99"], False, True), (["-ngl", "0"], False, False),
    (["--device", "cpu"], True, False)])
def test_the_cpu_is_not_taken_in_silence_where_a_gpu_is_meant(capsys, path, monkeypatch, tmp_path, argv, driver, told):
    monkeypatch.setattr("ggml_py.backends.cuda.unavailable", lambda ordinal: "numba-cuda is not installed")
    monkeypatch.setattr("ggml_py.cli.loading.NVIDIA", tmp_path if driver else tmp_path / "none")
    code, _, err = call(capsys, "bench", "-m", path, *SHORT, *argv)
    assert code == 0 and ("--device: the CPU is taken: numba-cuda is not installed\n" in err) is told
