"""KL-divergence base files byte for byte from their description, and the statistics against float64 numpy written straight from
the definitions."""
import io
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from fake_model import BOS, N_VOCAB, FakeModel, prefix_logits

from ggml_py.base.exact_math import exp, log, tree_sum
from ggml_py.check.merkle import merkle_root
from ggml_py.kernels.threads import using
from ggml_py.measure import kl_divergence as kl
from ggml_py.base.errors import UserError
from ggml_py.engine.settings import Settings
from ggml_py.measure.perplexity import perplexity
from ggml_py.testing import digest

TOKENS = np.random.default_rng(2).integers(97, 123, 640).tolist()


def other_logits(tokens):
    """A second model: the first with a perturbation."""
    return prefix_logits(tokens) + np.float32(0.3) * prefix_logits([7, *tokens])[1:]


def write_base(path, c, n_chunks=-1, add_bos=False, n_batch=2048, logits=prefix_logits):
    model, out = FakeModel(add_bos, logits=logits), io.StringIO()
    settings = Settings(n_ctx=c, n_chunks=n_chunks, n_batch=n_batch)
    perplexity(model, TOKENS, settings, out, io.StringIO(), lambda windows: kl.base_writer(path, model.n_vocab, windows))
    return out.getvalue()


def compare(path, model, n_chunks=-1):
    out, base = io.StringIO(), kl.BaseFile(path)
    statistics = kl.compare(model, base, Settings(n_ctx=base.n_ctx, n_chunks=n_chunks), out, io.StringIO())
    assert model.open_contexts == 0
    return statistics, out.getvalue()


# The format

def test_a_file_made_by_hand(tmp_path):
    """Windows of 4 tokens over 5 token ids; each scores position 2. Logits 3, 1, -15, 3 - 8, 2: the third lies 18 below the best
    and is clipped to -13.

    scale = 16 / 65535; codes of 3, 1, (clipped), -5, 2 are 65535 * (l + 13) / 16 = 65535, 57343.125, 0, 32767.5 (a tie, to even),
    61439.06.
    """
    logits = np.array([[3, 1, -15, -5, 2]], np.float32)
    windows = np.array([[4, 0, 3, 1], [0, 1, 2, 3]], np.int32)
    with kl.base_writer(tmp_path / "base", 5, windows) as writer:
        writer.write(writer.encode(logits))
        writer.write(writer.encode(np.full((1, 5), 0.25, np.float32)))

    f32 = np.float32
    log_sum = f32(np.log(np.exp(np.float64([0, -2, -18, -8, -1])).sum()))
    record = struct.pack("<ff", f32(16) / f32(65535), f32(-16) - log_sum)
    inv = f32(1) / (f32(16) / f32(65535))
    # one more code: the count is padded to even
    record += struct.pack("<6H", *(round(float(inv * f32(v))) for v in (16, 14, 0, 8, 15)), 0)
    flat = struct.pack("<ff", 0, -f32(np.log(5.0))) + bytes(12)  # equal logits: scale 0 and codes 0
    header = b"_logits_" + struct.pack("<3i", 4, 5, 2) + struct.pack("<8i", 4, 0, 3, 1, 0, 1, 2, 3)
    assert (tmp_path / "base").read_bytes() == header + record + flat
    assert list(tmp_path.iterdir()) == [tmp_path / "base"]

    base = kl.BaseFile(tmp_path / "base")
    assert (base.n_ctx, base.n_vocab, base.n_chunk) == (4, 5, 2) and base.tokens.tolist() == windows.tolist()
    log_p = kl.decode(base.records(0), 5)
    assert log_p.shape == (1, 5) and np.allclose(log_p,
                                                 [[3 - 3 - log_sum, -2 - log_sum, -16 - log_sum, -8 - log_sum, -1 - log_sum]],
                                                 atol=16 / 65535)
    np.testing.assert_allclose(kl.decode(base.records(1), 5), np.full((1, 5), -np.log(5)), rtol=1e-7)


@pytest.mark.parametrize("c, n_chunks, add_bos, n_batch", [(64, -1, False, 2048), (33, 4, True, 66), (64, 3, True, 20)])
def test_a_run_writes_its_tokens_and_logits(tmp_path, c, n_chunks, add_bos, n_batch):
    text = write_base(tmp_path / "base", c, n_chunks, add_bos, n_batch)
    assert "Final estimate: PPL" in text
    base = kl.BaseFile(tmp_path / "base")
    n_chunks = len(TOKENS) // c if n_chunks < 0 else n_chunks
    assert base.tokens.tolist() == np.reshape(TOKENS[:n_chunks * c], (n_chunks, c)).tolist()  # BOS not substituted
    for i, window in enumerate(base.tokens.tolist()):
        logits = prefix_logits([BOS, *window[1:]] if add_bos else window)[c // 2:c - 1].astype(np.float64)
        log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        decoded = kl.decode(base.records(i), N_VOCAB)
        seen = logits > logits.max(1, keepdims=True) - 16
        # half a code, and float32 rounding
        assert decoded.shape == log_p.shape and np.abs(decoded - log_p)[seen].max() < 0.6 * 16 / 65535


def test_logits_that_the_format_cannot_hold(tmp_path):
    with pytest.raises(UserError, match="NaN or infinity"):
        write_base(tmp_path / "base", 64, logits=lambda tokens: np.full((len(tokens), N_VOCAB), np.inf, np.float32))
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_leaves_the_old_file(tmp_path):
    (tmp_path / "base").write_bytes(b"old")
    with pytest.raises(UserError, match="NaN"):
        write_base(tmp_path / "base", 64, logits=lambda tokens: np.full((len(tokens), N_VOCAB), np.nan, np.float32))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_a_device_stays_a_device():
    write_base("/dev/null", 64)
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize("damage, message", [
    (lambda b: b"", "not a KL-divergence base file, it starts with b''"),
    (lambda b: b"_lojits_" + b[8:], "starts with b'_lojits_' instead of b'_logits_'"),
    (lambda b: b[:15], "the header has 20 bytes, the file 15"),
    (lambda b: b[:-1], r"\d+ bytes, but n_ctx=64, n_vocab=259, n_chunk=2 make \d+"),
    (lambda b: b + b"\0", r"\d+ bytes, but"),
    (lambda b: b[:8] + struct.pack("<i", 2) + b[12:], "n_ctx is 2, must be at least 3"),
    (lambda b: b[:8] + struct.pack("<i", 2**31 - 1) + b[12:], "n_ctx=2147483647, .* make"),
    (lambda b: b[:12] + struct.pack("<i", 2**31 - 1) + b[16:], "n_vocab=2147483647, .* make"),
    (lambda b: b[:12] + struct.pack("<i", -1) + b[16:], "n_vocab is -1"),
    (lambda b: b[:16] + struct.pack("<i", 0) + b[20:], "n_chunk is 0"),
    (lambda b: b[:24] + struct.pack("<i", 259) + b[28:], "token 1 of chunk 0 is 259, must be below n_vocab = 259"),
    (lambda b: b[:20 + 4 * 64] + struct.pack("<i", -5) + b[24 + 4 * 64:], "token 0 of chunk 1 is -5"),
    (lambda b: b[:20 + 8 * 64] + struct.pack("<f", np.nan) + b[24 + 8 * 64:], "chunk 0 has a scale"),
    (lambda b: b[:20 + 8 * 64] + struct.pack("<f", -1) + b[24 + 8 * 64:], "negative scale"),
])
def test_malformed_files_end_in_one_line(tmp_path, damage, message):
    path = tmp_path / "base"
    write_base(path, 64, 2)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=message) as error:
        compare(path, FakeModel())
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_another_vocabulary_is_refused(tmp_path):
    write_base(tmp_path / "base", 64, 2)
    model = FakeModel()
    model.n_vocab = 300
    with pytest.raises(UserError, match="vocabulary of 259 tokens, this model has 300"):
        compare(tmp_path / "base", model)


# The statistics

def plain_statistics(path, c, n_chunks, logits, add_bos):
    """nll, nll_base, kld, p_diff, same_top, each [count], from the file's codes."""
    data, columns = path.read_bytes(), []
    width = 4 + 2 * ((N_VOCAB + 1) // 2)
    start = 20 + 4 * kl.BaseFile(path).n_chunk * c
    for chunk in range(n_chunks):
        window = np.frombuffer(data, "<i4", c, 20 + 4 * chunk * c).tolist()
        rows = logits([BOS, *window[1:]] if add_bos else window).astype(np.float64)
        for k, j in enumerate(range(c // 2, c - 1)):
            at = start + 2 * width * (chunk * (c - 1 - c // 2) + k)
            scale, least = struct.unpack_from("<ff", data, at)
            base = scale * np.frombuffer(data, "<u2", N_VOCAB, at + 8).astype(np.float64) + least
            log_p, t = rows[j] - np.log(np.exp(rows[j]).sum()), window[j + 1]
            kld = np.sum((np.exp(base) * (base - log_p))[base > -16])
            columns.append((-log_p[t], -base[t], kld, np.exp(log_p[t]) - np.exp(base[t]), np.argmax(rows[j]) == np.argmax(base)))
    return [np.array(column, float) for column in zip(*columns)]


def standard_error(x):
    return np.std(x) / np.sqrt(len(x) - 1)


@pytest.mark.parametrize("add_bos", [False, True])
def test_statistics_against_numpy(tmp_path, add_bos):
    path, c, n_chunks = tmp_path / "base", 64, 9
    write_base(path, c, add_bos=add_bos)
    s, text = compare(path, FakeModel(add_bos, logits=other_logits), n_chunks)
    nll, nll_base, kld, p_diff, same = plain_statistics(path, c, n_chunks, other_logits, add_bos)
    count = len(nll)
    assert s.count == count == 9 * 31

    def check(estimate, value, error):
        np.testing.assert_allclose([estimate.value, estimate.error], [value, error], rtol=1e-9)

    ppl, base = np.exp(nll.mean()), np.exp(nll_base.mean())
    log_ratio = np.mean(nll - nll_base)
    log_ratio_error = standard_error(nll - nll_base)  # var(a - b) = var a + var b - 2 cov
    check(s.ppl, ppl, ppl * standard_error(nll))
    check(s.ppl_base, base, base * standard_error(nll_base))
    check(s.log_ratio, log_ratio, log_ratio_error)
    check(s.ratio, np.exp(log_ratio), np.exp(log_ratio) * log_ratio_error)
    check(s.ppl_difference, ppl - base, standard_error(ppl * nll - base * nll_base))
    np.testing.assert_allclose(s.correlation, np.corrcoef(nll, nll_base)[0, 1], rtol=1e-9)
    check(s.kld, kld.mean(), standard_error(kld))
    check(s.p_diff, p_diff.mean(), standard_error(p_diff))
    rms = np.sqrt(np.mean(p_diff ** 2))
    check(s.p_diff_rms, rms, 0.5 / rms * standard_error(p_diff ** 2))
    check(s.same_top, same.mean(), np.sqrt(same.mean() * (1 - same.mean()) / (count - 1)))
    assert 0 < same.mean() < 1 and kld.min() > 0

    lines = text.splitlines()
    assert re.sub(" {2,}", "|", lines[0]) == "chunk|PPL|ln(PPL(Q)/PPL(base))|KL Divergence|Δp RMS|Same top p"
    assert lines[9] == (f"   9    {ppl:9.4f} ± {s.ppl.error:9.4f}    {log_ratio:10.5f} ± {log_ratio_error:10.5f}    "
                        f"{kld.mean():10.5f} ± {s.kld.error:10.5f}    {100 * rms:6.3f} ± {100 * s.p_diff_rms.error:6.3f} %    "
                        f"{100 * same.mean():6.3f} ± {100 * s.same_top.error:6.3f} %")
    quantiles = {"Maximum": 1, "99.9%  ": .999, "99.0%  ": .99, "95.0%  ": .95, "90.0%  ": .9, "Median ": .5, "10.0%  ": .1,
                 " 5.0%  ": .05, " 1.0%  ": .01,
                 " 0.1%  ": .001, "Minimum": 0}
    block = lines.index("====== KL divergence statistics ======")
    assert lines[block - 9:block] == [
        "", "====== Perplexity statistics ======",
        f"Mean PPL(Q)                   : {ppl:10.6f} ± {s.ppl.error:10.6f}",
        f"Mean PPL(base)                : {base:10.6f} ± {s.ppl_base.error:10.6f}",
        f"Cor(ln(PPL(Q)), ln(PPL(base))): {100 * s.correlation:6.2f}%",
        f"Mean ln(PPL(Q)/PPL(base))     : {log_ratio:10.6f} ± {log_ratio_error:10.6f}",
        f"Mean PPL(Q)/PPL(base)         : {np.exp(log_ratio):10.6f} ± {s.ratio.error:10.6f}",
        f"Mean PPL(Q)-PPL(base)         : {ppl - base:10.6f} ± {s.ppl_difference.error:10.6f}", ""]
    assert lines[block + 1] == f"Mean    KLD: {kld.mean():10.6f} ± {s.kld.error:10.6f}"
    assert lines[block + 2:block + 13] == [f"{label} KLD: {np.quantile(kld, q):10.6f}" for label, q in quantiles.items()]
    quantiles = {**dict(list(quantiles.items())[:5]), "75.0%  ": .75, "Median ": .5, "25.0%  ": .25,
                 **dict(list(quantiles.items())[6:])}
    block = lines.index("====== Token probability statistics ======")
    assert lines[block + 1] == f"Mean    Δp: {100 * p_diff.mean():6.3f} ± {100 * s.p_diff.error:5.3f} %"
    assert lines[block + 2:block + 15] == [f"{label} Δp: {100 * np.quantile(p_diff, q):6.3f}%" for label, q in quantiles.items()]
    assert lines[block + 15:block + 17] == [f"RMS Δp    : {100 * rms:6.3f} ± {100 * s.p_diff_rms.error:5.3f} %",
                                            f"Same top p: {100 * same.mean():6.3f} ± {100 * s.same_top.error:5.3f} %"]
    assert len(lines) == block + 18 and lines[-1].startswith("digest: ")


def test_a_model_against_itself(tmp_path):
    """What is left is the rounding of codes (16/65535 apart) and the clipping;
    the digest is that of the run that wrote the file."""
    written = write_base(tmp_path / "base", 64)
    s, text = compare(tmp_path / "base", FakeModel())
    assert written.splitlines()[-1] == text.splitlines()[-1]
    assert s.same_top.value == 1 and abs(s.kld.value) < 1e-5


def test_roots(tmp_path):
    """Of a run that writes a base file, which is the same to the byte, and of one that compares with it: that of the windows'
    digests."""
    write_base(tmp_path / "base", 64, n_batch=128)
    out, settings = io.StringIO(), Settings(n_ctx=64, n_batch=128)
    perplexity(FakeModel(), TOKENS, settings, out, io.StringIO(),
               lambda windows: kl.base_writer(tmp_path / "again", N_VOCAB, windows), root=True)
    assert (tmp_path / "base").read_bytes() == (tmp_path / "again").read_bytes()
    windows = np.reshape(TOKENS[:len(TOKENS) // 64 * 64], (-1, 64)).tolist()
    root = f"root: {merkle_root([digest(prefix_logits(window)[32:63]) for window in windows])}"
    assert out.getvalue().splitlines()[-1] == root
    out = io.StringIO()
    kl.compare(FakeModel(), kl.BaseFile(tmp_path / "base"), settings, out, io.StringIO(), root=True)
    assert out.getvalue().splitlines()[-1] == root


# Rows, one at a time by exact_math

def encode_row(row):
    top = row.max()
    low = max(row.min(), top - np.float32(16))
    log_sum = np.float32(log(tree_sum(exp((row - top).astype(np.float64)))))
    scale = (top - low) / np.float32(65535)
    codes = np.rint(np.float32(1) / scale * (row - low)) if scale else np.zeros_like(row)
    return np.float32([scale, low - top - log_sum]), np.where(row > low, codes, 0)


def compare_row(row, record, target):
    """nll, nll_base, kld, whether both have the largest in one place."""
    row = row.astype(np.float64)
    log_p = row - (row.max() + log(tree_sum(exp(row - row.max()))))
    log_base = kl.decode(record[None], len(row))[0]
    seen = log_base > -16
    terms = exp(log_base[seen]) * (log_base[seen] - log_p[seen])
    return -log_p[target], -log_base[target], tree_sum(terms) if len(terms) else 0.0, row.argmax() == log_base.argmax()


@pytest.mark.parametrize("scale", [0, 0.1, 3, 30])
@pytest.mark.parametrize("n, n_vocab", [(3, 1), (3, 2), (7, 5), (40, 259), (3, 40000)])
def test_bits_are_those_of_the_definitions(n, n_vocab, scale):
    rng = np.random.default_rng(n_vocab)
    base = (scale * rng.standard_normal((n, n_vocab))).astype(np.float32)
    logits, targets = base + (scale / 9 * rng.standard_normal(base.shape)).astype(np.float32), rng.integers(0, n_vocab, n)
    logits[0, -1] = -np.inf if n_vocab > 1 else 0
    found = []
    for n_threads in 1, 2:
        with using(n_threads):
            records = kl.encode(base)
            found.append((records, kl.compare_window(logits, records, targets)))
    for records, comparison in found:
        for i, (row, record) in enumerate(zip(base, records)):
            head, codes = encode_row(row)
            assert record[:4].tobytes() == head.tobytes() and (record[4:4 + n_vocab] == codes).all()
            assert not record[4 + n_vocab:].any()
            with np.errstate(invalid="ignore"):
                expected = compare_row(logits[i], record, targets[i])
            assert expected == (comparison.nll[i], comparison.nll_base[i], comparison.kld[i], comparison.same_top[i])


def test_a_head_that_is_no_number():
    """Files with one are refused; rows of a caller's own end, too."""
    records = kl.encode(np.zeros((2, 5), np.float32))
    records[:, :4] = np.float32([np.nan, np.nan]).view(np.uint16)
    assert np.isnan(kl.compare_window(np.zeros((2, 5), np.float32), records, [0, 4]).nll_base).all()


def test_the_file_is_only_read(tmp_path):
    """A mapping that can be written would count as memory, which large files have more of than there is."""
    write_base(tmp_path / "base", 64, 2)
    base = kl.BaseFile(tmp_path / "base")
    assert base._records.mode == "r" and base.records(0).flags.writeable


def test_rows_with_nan_are_like_no_other():
    logits, base = np.zeros((3, 5), np.float32), np.zeros((3, 5), np.float32)
    logits[0, 0], logits[1, 3], base[:, 0] = np.nan, np.inf, 1
    found = kl.compare_window(logits, kl.encode(base), np.arange(3))
    assert np.isnan(found.kld[:2]).all() and np.isnan(found.nll[:2]).all() and not found.same_top[:2].any()
    assert found.kld[2] > 0 and found.same_top[2] and np.isfinite(found.p_diff[2])


def test_two_models_and_a_file_say_the_same(tmp_path):
    write_base(tmp_path / "base", 64)
    expected, _ = compare(tmp_path / "base", FakeModel(logits=other_logits))
    log, source = io.StringIO(), FakeModel()
    found = kl.compare_models(FakeModel(logits=other_logits), source, TOKENS, Settings(n_ctx=64), log)
    assert all(np.array_equal(a, b) for a, b in zip(vars(found.comparison).values(), vars(expected.comparison).values()))
    assert "tokens/s" not in log.getvalue()


def test_few_tokens_have_neither_errors_nor_blocks(tmp_path):
    write_base(tmp_path / "base", 16, 1)
    s, text = compare(tmp_path / "base", FakeModel(logits=other_logits))
    assert s.count == 7 and s.kld.error == s.ppl.error == 0
    assert len(text.splitlines()) == 3 and "======" not in text
