"""Perplexity by several workers: the bits of one machine, whoever is lost on the way; the log that a run goes on from."""
import fcntl
import io
import json
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from fake_model import FakeTokenizer
from tiny_models import write_model

from ggml_py.backends.cpu import CPUBackend
from ggml_py.base.errors import UserError
from ggml_py.check.attestation import made_by, made_by_all, perplexity_document
from ggml_py.engine.model import Model
from ggml_py.engine.settings import Settings
from ggml_py.files.gguf import GGUFFile
from ggml_py.kernels.threads import set_num_threads
from ggml_py.measure import corpus
from ggml_py.measure.corpus import Cluster, Log, corpus_perplexity
from ggml_py.measure.perplexity import WindowScore, attest_perplexity

SETTINGS = Settings(n_ctx=16, n_batch=32)
TOKENS = np.random.default_rng(3).integers(0, 70, 16 * 15 + 5).astype(np.int32)
OF = {"model": ["a"], "tokens": "b", "n_ctx": 16}
FIRST = json.dumps({corpus.OF: OF}).encode() + b"\n"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("corpus") / "tiny.gguf", types=("Q8_0", "F32"))


def opened(path):
    model = Model(GGUFFile.open(path), CPUBackend())
    model._tokenizer = FakeTokenizer(add_bos=False)
    return model


def without_environment(document: dict) -> dict:
    return {name: value for name, value in document.items() if name not in ("environment", "sha256")}


@pytest.fixture(scope="module")
def alone(path):
    """(the attestation, what is printed) of one process."""
    out = io.StringIO()
    with opened(path) as model:
        return attest_perplexity(model, 64 * "0", TOKENS, SETTINGS, out, io.StringIO()), out.getvalue()


@pytest.fixture
def ray(monkeypatch):
    """Workers find the helpers of the tests, and take functions of this module by value."""
    ray = pytest.importorskip("ray")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    helpers = str(Path(__file__).parents[1] / "helpers")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([helpers, os.environ.get("PYTHONPATH", "")]))
    return ray


def opener(path, folder):
    """A function that workers call, each of which leaves its process's number."""
    @contextmanager
    def open_model():
        set_num_threads(1)
        (folder / f"pid-{os.getpid()}").touch()
        with Model(GGUFFile.open(path), CPUBackend()) as model:
            model._tokenizer = FakeTokenizer(add_bos=False)
            yield model
    return open_model


def test_workers_that_are_killed_change_nothing(ray, path, alone, tmp_path, monkeypatch):
    """One of two workers is killed; then the driver breaks off; then it goes on from the log, and computes nothing twice."""
    log, pids, add = tmp_path / "log", lambda: [int(p.name[4:]) for p in tmp_path.glob("pid-*")], Log.add
    added: list[int] = []

    def add_and_kill(self, i, score):
        add(self, i, score)
        added.append(i)
        if len(added) == 3:
            os.kill(pids()[0], signal.SIGKILL)
        if len(added) == 9:
            raise KeyboardInterrupt
    monkeypatch.setattr(Log, "add", add_and_kill)

    def run(out):
        with GGUFFile.open(path) as file:
            return corpus_perplexity(opener(path, tmp_path), file, TOKENS, SETTINGS, Cluster("local", 2), log, out, io.StringIO())
    with pytest.raises(KeyboardInterrupt):
        run(io.StringIO())
    assert len(added) == 9 and len(pids()) >= 2 and not ray.is_initialized()
    out = io.StringIO()
    ppl, digests, makers = run(out)
    assert sorted(added) == list(range(15))
    document, printed = alone
    found = perplexity_document(made_by_all(makers), False, 64 * "0", TOKENS, SETTINGS, ppl, digests)
    assert without_environment(found) == without_environment(document)
    *lines, root = out.getvalue().splitlines()
    assert lines == printed.splitlines()[:-1] and root == f"root: {document['merkle_root']}"
    monkeypatch.setattr(corpus, "workers", None)  # nothing is left to compute
    assert run(io.StringIO()) == (ppl, digests, makers)


@pytest.mark.slow
def test_what_workers_refuse_is_one_line(ray, path, tmp_path):
    other = write_model(tmp_path / "other.gguf", types=("Q8_0",), seed=1)

    def run(worker_path, **cluster):
        with GGUFFile.open(path) as file:
            corpus_perplexity(lambda: opened(worker_path), file, TOKENS, SETTINGS, Cluster("local", **cluster), tmp_path / "log",
                              io.StringIO(), io.StringIO())
    for options, message in (({"worker_path": other}, "ray: a worker on .* has another model: sha256 is "),
                             ({"worker_path": tmp_path / "none"}, "ray: a worker: .*none"),
                             ({"worker_path": path, "n_gpus": 99}, "n_workers: 1 workers of 1 CPUs and 99 GPUs")):
        with pytest.raises(UserError, match=message) as caught:
            run(**{"n_workers": 1, **options})
        assert "\n" not in str(caught.value)


def score(i: int) -> WindowScore:
    return WindowScore(64 * "a", 0.1 * i, 0.3 * i, 7)


def test_a_log_goes_on_where_it_ends(tmp_path):
    path = tmp_path / "log"
    with Log(path, OF, 5) as log:
        log.add_maker({"a": 1})
        for i in 3, 0:
            log.add(i, score(i))
        with pytest.raises(UserError, match=f"{path}: another process writes to it"), Log(path, OF, 5):
            pass
    whole = path.read_bytes()
    for cut in range(len(whole) - 1, whole.rindex(b"\n", 0, -1), -1):  # the last line is broken off
        path.write_bytes(whole[:cut])
        with Log(path, OF, 5) as log:
            assert log.found == {3: score(3)} and log.makers == [{"a": 1}]
            log.add(1, score(1))
        with Log(path, OF, 5) as log:
            assert log.found == {3: score(3), 1: score(1)}


@pytest.mark.parametrize("content, message", [
    (b"no\n", "is not a log of windows"), (b'{"a": 1}\n', "is not a log of windows"), (b"[]\n", "is not a log of windows"),
    (json.dumps({corpus.OF: {**OF, "n_ctx": 17}}).encode() + b"\n", "is of another n_ctx"),
    (json.dumps({corpus.OF: 1}).encode() + b"\n", "is of another model"),
    (FIRST + b'{"window": 5, "digest": "", "total": "0x0p+0", "squares": "0x0p+0", "n": 1}\n', "is not a log of windows"),
    (FIRST + b'{"window": 1}\n', "is not a log of windows")])
def test_another_log_is_refused(tmp_path, content, message):
    path = tmp_path / "log"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"{path}: {message}"), Log(path, OF, 5):
        pass
    assert path.read_bytes() == content
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is closed


def test_makers_are_named_together(path):
    with opened(path) as model:
        made = made_by(model)
    other = {**made, "environment": {**made["environment"], "device": "cuda:0", "device_name": "B"}}
    found = made_by_all([made, other, made])["environment"]
    assert found["device"] == "cpu/cuda:0" and found["device_name"] == f"{made['environment']['device_name']}/B"
