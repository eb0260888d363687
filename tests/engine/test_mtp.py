"""Drafts of a model's own NextN block: its logits are llama.cpp's, and text and logits those without drafts."""
import subprocess
import sys

import numpy as np
import pytest

from cuda_simulator import no_gpu
from fake_model import FakeTokenizer
from fixed_drafts import Fixed
from ggml_py.__main__ import main
from ggml_py.backends.cpu import CPUBackend
from ggml_py.backends.cuda import CUDABackend
from ggml_py.base.errors import ParameterError
from ggml_py.base.placement import Override, PlacementOptions
from ggml_py.engine.generate import generate
from ggml_py.engine.model import Model
from ggml_py.engine.mtp import MTP
from ggml_py.engine.sampling import Sampling
from ggml_py.engine.speculation import Speculation
from ggml_py.files.gguf import GGUFFile
from ggml_py.testing import assert_bitwise_equal
from guarded_cpu import guarded_devices
from places import REFERENCE
from queueing_backend import QueueingBackend
from tiny_delta_net_models import write_delta_net_model
from tiny_models import write_model

ARCHITECTURES = ["qwen3next", "qwen35", "qwen35moe", "glm4moe", "deepseek2"]
PROMPT, N = [3, 1, 4, 1, 5, 9, 2, 6], 40


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    if not REFERENCE.exists():
        pytest.skip(f"{REFERENCE} is not there")
    folder, found = tmp_path_factory.mktemp("models"), {}
    for arch in ARCHITECTURES:
        found[arch] = folder / f"{arch}.gguf"
        subprocess.run([sys.executable, REFERENCE / "tiny_gguf.py", arch, found[arch], "--seed", "1", "--set", "nextn=1"],
                       check=True)
    return found


def load(path, backend=CPUBackend):
    return Model(GGUFFile.open(path), backend(), nextn=True)


def near(found, expected):
    assert np.abs(found - expected).max() < 3e-4 * expected.std()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logits_are_those_of_llama_cpp(arch, paths):
    """Of the layers, of the block over the same tokens, and of four steps that go on from their own results."""
    expected = np.load(REFERENCE / f"logits/{arch}-mtp.npz")
    with load(paths[arch]) as model, model.new_context(64, type_k="f32", type_v="f32") as context:
        source = MTP(model, 64, type_k="f32", type_v="f32")
        source.begin(context)
        near(context.decode(expected["tokens"], logits="all"), expected["logits"])
        near(source.hidden, expected["hidden"])
        n = len(expected["tokens"])
        before = np.concatenate([np.zeros((1, source.hidden.shape[1]), np.float32), source.hidden[:-1]])
        logits, hidden = source._queue("all", expected["tokens"], before, np.arange(n, dtype=np.int32)).result()
        near(logits, expected["mtp_logits"])
        near(hidden, expected["mtp_hidden"])
        token, state = expected["draft_ids"][:1].astype(np.int32), source.hidden[-1:]
        for i in range(4):
            logits, state = source._queue("all", token, state, np.int32([n + i])).result()
            near(logits[0], expected["draft_logits"][i])
            near(state[0], expected["draft_hidden"][i])
            token = np.int32([logits[0].argmax()])
            assert token[0] == expected["draft_ids"][i + 1]
        found = source.draft([*expected["tokens"].tolist(), int(expected["draft_ids"][0])], 4)
        assert found == expected["draft_ids"][1:].tolist()
        source.close()


def test_a_hidden_row_changes_no_logit(paths):
    """Those of few rows, computed for all tokens or for these rows alone."""
    with load(paths["qwen35moe"]) as model, model.new_context(64) as context:
        expected = context.decode(PROMPT)
        context.clear()
        seen = []
        context.observer = lambda *what: seen.append(what)
        assert_bitwise_equal(context.decode(PROMPT), expected, "last row")
        (tokens, seq, pos, hidden), = seen
        assert tokens.tolist() == PROMPT and not seq.any() and pos.tolist() == list(range(8)) and hidden.shape == (8, 256)
        context.clear()
        assert context.decode(PROMPT, logits="argmax") == expected.argmax()
        assert_bitwise_equal(seen[1][3], hidden, "hidden")


def run(model, sampling, speculation=None, **settings):
    seen: list[np.ndarray] = []
    with model.new_context(n_ctx=len(PROMPT) + N + 4, **settings) as context:
        tokens = list(generate(context, PROMPT, N, sampling, lambda token: False, speculation,
                               lambda row: seen.append(row.copy())))
        return tokens, np.array(seen), context.memory.length(0), context.decode([7])


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("backend", [CPUBackend, QueueingBackend])
def test_text_and_logits_are_those_without(arch, backend, paths):
    check_texts(paths[arch], backend)


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_on_a_gpu(arch, paths):
    """The same text and logits there, which are the CPU's."""
    if reason := no_gpu():
        pytest.skip(reason)
    check_texts(paths[arch], CUDABackend)
    with load(paths[arch]) as on_cpu, load(paths[arch], CUDABackend) as on_gpu:
        expected, found = (run(model, Sampling(), Fixed(MTP(model, 64), 3), n_rollback=5) for model in (on_cpu, on_gpu))
    assert found[0] == expected[0]
    assert_bitwise_equal(found[1], expected[1], "logits")


@pytest.mark.parametrize("kind", ["qwen3next", "qwen35", "qwen35moe"])
def test_on_several_devices(kind, tmp_path):
    """Layers on two devices, a part of the weights on a third, and the block where the output is: the text of one device."""
    path = write_delta_net_model(tmp_path / "m.gguf", kind, ("Q8_0",), nextn=1)
    options = PlacementOptions(("cpu:1", "cpu:2"), 3, (Override("ffn", "cpu"),))
    with load(path) as one, Model(GGUFFile.open(path), *guarded_devices(3), nextn=True, placement=options) as several:
        expected, found = (run(model, Sampling(), Fixed(MTP(model, 64), 3), n_rollback=5) for model in (one, several))
        alone = run(one, Sampling(), n_rollback=5)
    assert found[0] == expected[0] == alone[0] and several.device == "cpu:2"
    assert_bitwise_equal(found[1], expected[1], "logits")
    assert_bitwise_equal(found[3], expected[3], "behind them")


@pytest.mark.parametrize("kind", ["qwen3next", "qwen35", "qwen35moe"])
def test_quantized(kind, tmp_path):
    check_texts(write_delta_net_model(tmp_path / "m.gguf", kind, ("Q8_0", "Q4_1"), nextn=1), CPUBackend, type_k="q8_0")


def check_texts(path, backend, **settings):
    accepted = rejected = 0
    with load(path, backend) as model:
        for sampling in Sampling(), Sampling(temperature=0.8, seed=1), Sampling(temperature=1.5, top_k=0, seed=2):
            expected = run(model, sampling, **settings)
            for kind, most in (Fixed, 1), (Fixed, 3), (Speculation, 4):
                speculation = kind(MTP(model, 64, **settings), most)
                found = run(model, sampling, speculation, n_rollback=5, n_ubatch=3 if most == 1 else 512, **settings)
                assert found[0] == expected[0] and found[2] == expected[2]
                assert_bitwise_equal(found[1], expected[1], "logits")
                assert_bitwise_equal(found[3], expected[3], "behind them")
                accepted, rejected = (accepted + speculation.n_accepted,
                                      rejected + speculation.n_drafted - speculation.n_accepted)
                speculation.source.close()
    assert rejected > 100, (accepted, rejected)


def test_a_block_that_is_right(paths, monkeypatch):
    """Told what is likeliest, every guess is taken, at every length; and what was drafted is not in the block's memory."""
    with load(paths["qwen35moe"]) as model:
        expected, *_ = run(model, Sampling())
        text, lengths = PROMPT + expected, []

        def right(source, token, hidden, position, n):
            found = likeliest(source, token, hidden, position, n)
            assert len(found) == n and source.memory.length(0) == position + n
            lengths.append(position)
            return text[position + 1:position + 1 + n]
        likeliest = MTP._likeliest
        monkeypatch.setattr(MTP, "_likeliest", right)
        speculation = Fixed(MTP(model, 64), 3)
        assert run(model, Sampling(), speculation, n_rollback=4)[0] == expected
        assert speculation.n_accepted == speculation.n_drafted > 20 and lengths == sorted(lengths)
        assert speculation.source.context is None
        speculation.source.close()


def test_a_text_at_a_time(paths):
    """One source drafts for one text after the other, also where one was left in the middle."""
    with load(paths["qwen35"]) as model, model.new_context(64, n_rollback=5) as context:
        expected = [*generate(context, PROMPT, 20, Sampling(), lambda token: False)]
        speculation = Speculation(MTP(model, 64), 4)
        for n in 3, 20, 20:
            context.clear()
            tokens = generate(context, PROMPT, 20, Sampling(), lambda token: False, speculation)
            assert [token for _, token in zip(range(n), tokens)] == expected[:n]
            tokens.close()
            assert context.observer is None and context.memory.length(0) == len(PROMPT) + n - 1
        speculation.source.close()


@pytest.mark.parametrize("p_min, drafts", [(0.0, True), (1e-6, True), (1.0, False)])
def test_unlikely_tokens_end_a_draft(paths, p_min, drafts):
    with load(paths["glm4moe"]) as model:
        expected, *_ = run(model, Sampling())
        speculation = Fixed(MTP(model, 64, p_min), 3)
        assert run(model, Sampling(), speculation)[0] == expected
        assert (speculation.n_drafted > 0) == drafts
        speculation.source.close()


def test_the_command_line(paths, capsys):
    """The same text, and what came of the drafts."""
    def load_model(path, device, nextn=False):
        model = Model(GGUFFile.open(path), CPUBackend(), nextn=nextn)
        model._tokenizer = FakeTokenizer(False)
        return model
    argv, out = ["run", "-m", str(paths["qwen35moe"]), "-p", "abc", "-n", "30"], []
    for more in [], ["--draft-source", "mtp"], ["--draft-source", "mtp", "--draft-max", "2", "--draft-p-min", "0.001"]:
        assert main([*argv, *more], load_model) == 0
        captured = capsys.readouterr()
        out.append(captured.out)
        assert ("run: drafts of mtp: " in captured.err) == bool(more)
    assert out[0] == out[1] == out[2]


def test_refused(paths, tmp_path):
    with Model.load(write_model(tmp_path / "m.gguf"), device="cpu") as model, pytest.raises(
            ParameterError, match="has no NextN block, or was loaded without it; allowed: Model.load"):
        MTP(model, 64)
    with load(paths["qwen35"]) as model, load(paths["qwen35"]) as other, other.new_context(64) as context:
        source = MTP(model, 64)
        with pytest.raises(ParameterError, match="mtp: the context is of another model"):
            source.begin(context)
        with pytest.raises(ParameterError, match=r"draft_p_min: must be 0 to 1, got 2"):
            MTP(model, 64, 2)
        source.close()
