"""The algorithm of perplexity against float64 numpy written straight from its definition."""
import io
import math
import re
import sys
from hashlib import sha256

import numpy as np
import pytest
from fake_model import BOS, N_VOCAB, FakeModel, prefix_logits

import ggml_py
from ggml_py.backends.cpu import CPUBackend
from ggml_py.base.defaults import TEXT as DEMO_TEXT
from ggml_py.base.errors import UserError
from ggml_py.base.likelihoods import negative_log_likelihood
from ggml_py.check.digest import LogitsDigest
from ggml_py.check.merkle import merkle_root
from ggml_py.engine.settings import Settings
from ggml_py.engine.windows import n_ahead, read_text
from ggml_py.files.pull import pull
from ggml_py.measure.perplexity import perplexity, strided_perplexity

RNG = np.random.default_rng(1)
TEXT = bytes(RNG.integers(97, 123, 420, np.uint8))


def softmax_nll(logits, target) -> float:
    l = logits.astype(np.float64)
    return float(np.log(np.exp(l - l.max()).sum()) - (l[target] - l.max()))


def test_negative_log_likelihood_is_that_of_the_softmax():
    logits = prefix_logits(range(20))
    targets = RNG.integers(0, N_VOCAB, 20)
    np.testing.assert_allclose(negative_log_likelihood(logits, targets), [softmax_nll(l, t) for l, t in zip(logits, targets)],
                               rtol=1e-14)


def test_digest_is_of_little_endian_bytes_with_one_nan():
    digest = LogitsDigest()
    rows = np.array([[1.0, -0.0], [0, 0]], np.float32)
    rows.view(np.uint32)[1] = 0xffc00001, 0x7f800001  # two NaNs, quiet and signalling
    digest.update(rows[:1])
    digest.update(rows[1:])
    assert digest.hexdigest() == sha256(bytes.fromhex("0000803f 00000080 0000c07f 0000c07f")).hexdigest()


def test_one_trailing_newline_is_dropped_and_broken_characters_kept(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"a\r\n\n\n")
    assert read_text(path) == "a\r\n\n"
    path.write_bytes("é".encode()[:1])
    assert read_text(path).encode("utf-8", "surrogateescape") == "é".encode()[:1]


def expected(tokens, c, n_chunks, add_bos):
    """(perplexity after each window, standard error * PPL, digest, root) as behaviour.md defines them."""
    nll, running, digest, digests = [], [], sha256(), []
    for w in range(n_chunks):
        window = list(tokens[w * c:(w + 1) * c])
        logits = prefix_logits([BOS, *window[1:]] if add_bos else window)
        for j in range(c // 2, c - 1):
            nll.append(softmax_nll(logits[j], window[j + 1]))
            digest.update(logits[j].astype("<f4").tobytes())
        digests.append(sha256(logits[c // 2:c - 1].astype("<f4").tobytes()).hexdigest())
        running.append(math.exp(np.mean(nll)))
    nll = np.array(nll)
    error = math.sqrt((np.mean(nll ** 2) - np.mean(nll) ** 2) / (len(nll) - 1)) * running[-1]
    return running, error, digest.hexdigest(), merkle_root(digests)


def run(function, model, tokens, settings, **more):
    out, log_ = io.StringIO(), io.StringIO()
    value = function(model, tokens, settings, out, log_, **more)
    assert model.open_contexts == 0
    return value.ppl, out.getvalue().splitlines(), log_.getvalue()


# -b below -c, equal to it, twice, and a group larger than the text; c odd and even; c = 3 scores one token a window
@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("c, n_batch, n_chunks", [
    (64, 2048, -1), (64, 128, -1), (64, 64, 4), (64, 24, 3), (64, 150, -1), (64, 1, 1), (33, 66, -1), (33, 10, 5), (3, 9, -1)])
def test_perplexity(c, n_batch, n_chunks, add_bos):
    model, tokens = FakeModel(add_bos), list(TEXT)
    ppl, lines, err = run(perplexity, model, tokens, Settings(n_ctx=c, n_batch=n_batch, n_chunks=n_chunks))
    n_chunks = len(tokens) // c if n_chunks < 0 else n_chunks
    running, error, digest, root = expected(tokens, c, n_chunks, add_bos)
    assert lines == ["".join(f"[{i + 1}]{p:.4f}," for i, p in enumerate(running)),
                     f"Final estimate: PPL = {running[-1]:.4f} +/- {error:.5f}", f"digest: {digest}"]
    with_root = run(perplexity, FakeModel(add_bos), tokens, Settings(n_ctx=c, n_batch=n_batch, n_chunks=n_chunks), root=True)
    assert with_root[:2] == (ppl, [*lines[:2], f"root: {root}"])
    assert f"{ppl:.10g}" == f"{running[-1]:.10g}"
    n_seq = max(1, n_batch // c)
    assert (f"perplexity: calculating perplexity over {n_chunks} chunks, n_ctx={c}, batch_size={min(n_batch, n_seq * c)}, "
            f"n_seq={n_seq}\n") in err
    assert " seconds per pass - ETA 0.00 minutes\n" in err
    # groups of n_seq windows, each window a sequence; the last token of a window is never decoded
    per_group = [min(n_seq, n_chunks - g) for g in range(0, n_chunks, n_seq)]
    assert sum(sum(lengths.values()) for _, lengths in model.calls) == sum(n * (c - 1) for n in per_group)
    assert max(len(lengths) for _, lengths in model.calls) == per_group[0]
    assert sum(sum(lengths.values()) for kind, lengths in model.calls if kind == "all") == n_chunks * (c - 1 - c // 2)


@pytest.mark.parametrize("n_vocab, settings, expected", [
    (128256, Settings(n_ctx=512), 4), (128256, Settings(n_ctx=2048), 4), (128256, Settings(n_ctx=4096), 2),
    (262144, Settings(n_ctx=8192), 1), (259, Settings(n_ctx=64), 32), (128256, Settings(n_ctx=4096, stride=512), 4),
    (128256, Settings(n_ctx=512, n_batch=65536), 16)])
def test_windows_that_wait(n_vocab, settings, expected):
    """While others are decoded on a device; none where this CPU decodes."""
    model = FakeModel()
    model.n_vocab = n_vocab
    assert n_ahead(model, settings) == expected
    model.backends = {"cpu": CPUBackend()}
    assert n_ahead(model, settings) == 0


def test_the_batch_changes_no_bit():
    results = {tuple(run(perplexity, FakeModel(True), list(TEXT), Settings(n_ctx=30, n_batch=b))[1])
               for b in (1, 7, 30, 60, 90, 300)}
    assert len(results) == 1


@pytest.mark.parametrize("c, stride, n_batch, n_chunks", [(64, 32, 2048, -1), (64, 20, 16, 3), (10, 13, 5, -1), (40, 1, 64, 4)])
def test_strided_perplexity(c, stride, n_batch, n_chunks):
    model, tokens, w = FakeModel(add_bos=True), list(TEXT), c + stride // 2
    _ppl, lines, _ = run(strided_perplexity, model, tokens, Settings(n_ctx=c, n_batch=n_batch, n_chunks=n_chunks, stride=stride))
    nll, running = [], []
    for i in range(math.ceil((len(tokens) - w) / stride) if n_chunks < 0 else n_chunks):
        window = tokens[i * stride:i * stride + w]
        logits = prefix_logits(window)  # no BOS
        nll += [softmax_nll(logits[j], window[j + 1]) for j in range(w - 1 - stride, w - 1)]
        running.append(math.exp(np.mean(nll)))
    assert lines[0] == "".join(f"[{i + 1}]{p:.4f}," for i, p in enumerate(running))
    assert len(lines) == 2 and lines[1].startswith("digest: ")  # no final estimate
    with_root = run(strided_perplexity, FakeModel(add_bos=True), tokens,
                    Settings(n_ctx=c, n_batch=n_batch, n_chunks=n_chunks, stride=stride), root=True)[1]
    assert with_root[:1] == lines[:1] and re.fullmatch("root: [0-9a-f]{64}", with_root[1])


def test_a_single_scored_token_has_no_error_bar():
    model = FakeModel(logits=lambda tokens: np.zeros((len(tokens), N_VOCAB), np.float32))
    ppl, lines, err = run(perplexity, model, list(TEXT), Settings(n_ctx=3, n_chunks=1))
    assert "Unexpected negative standard deviation of log(prob)" in err and not any("Final" in line for line in lines)
    assert f"{ppl:.10f}" == f"{N_VOCAB:.10f}"


def test_nan_logits_give_a_nan_estimate_and_a_digest():
    model = FakeModel(logits=lambda tokens: np.full((len(tokens), N_VOCAB), np.nan, np.float32))
    _, lines, _ = run(perplexity, model, list(TEXT), Settings(n_ctx=64, n_chunks=2))
    assert lines[:2] == ["[1]nan,[2]nan,", "Final estimate: PPL = nan +/- nan"] and lines[2].startswith("digest: ")


@pytest.mark.parametrize("function, settings, message", [
    (perplexity, Settings(n_ctx=211), r"^n_ctx: windows of 211 need at least 422 tokens, the text has 420$"),
    (perplexity, Settings(n_ctx=2), r"^n_ctx: must be at least 3"),
    (perplexity, Settings(n_ctx=128), r"^n_ctx: a context of 128 tokens is too long, this model was trained on at most 100"),
    (strided_perplexity, Settings(n_ctx=90, stride=24), r"a context of 102 tokens is too long"),
    (strided_perplexity, Settings(n_ctx=400, stride=40), r"windows of 420 tokens"),
    (strided_perplexity, Settings(n_ctx=10, stride=20), r"^stride: must be below"),
])
def test_what_cannot_be_scored_is_refused(function, settings, message):
    with pytest.raises(UserError, match=message):
        run(function, FakeModel(n_ctx_train=100), list(TEXT), settings)


# The demo

def test_demo_text_is_never_edited():
    """Figures are quoted for it: a new text gets a new name."""
    text = DEMO_TEXT.read_bytes()
    assert sha256(text).hexdigest() == "98b21d54dd355460eeae1d557b2cf13898a91c52fc88b3de616915d59badbab5" and text.isascii()


def test_demo_text_has_eight_windows_for_the_demo_model():
    tokens = ggml_py.Tokenizer.from_gguf(pull("smollm2", sys.stderr)).encode(read_text(DEMO_TEXT))
    assert len(tokens) >= 8 * 512


def test_without_streams_nothing_is_printed(capsys, caplog):
    """What is worth telling goes to logging, progress to a callback."""
    caplog.set_level("INFO", "ggml_py")
    told, tokens = [], FakeModel().tokenizer.encode(TEXT.decode())
    ppl = perplexity(FakeModel(), tokens, Settings(n_ctx=64), progress=lambda *numbers: told.append(numbers)).ppl
    out = io.StringIO()
    assert perplexity(FakeModel(), tokens, Settings(n_ctx=64), out, io.StringIO()).ppl == ppl
    assert f"PPL = {ppl:.4f}" in out.getvalue()
    assert capsys.readouterr() == ("", "") and told == [(i, 6) for i in range(1, 7)]
    assert next(record.message.split(",")[0] for record in caplog.records) == "perplexity: calculating perplexity over 6 chunks"
