"""The commands: their output with a fake model, in this process; exit codes and signals also in processes of their own."""
import io
import re
import signal
import subprocess
import sys
from datetime import date

import gguf
import numpy as np
import pytest
from fake_model import EOS, N_VOCAB, FakeModel, prefix_logits

import ggml_py
from ggml_py.__main__ import main
from ggml_py.check.digest import LogitsDigest
from ggml_py.cli.options import CACHE_TYPES
from ggml_py.measure import kl_divergence
from places import environment

TEXT = bytes(np.random.default_rng(3).integers(97, 123, 300, np.uint8))


def call(capsys, *argv, model=None):
    """(exit code, stdout, stderr) of a command in this process."""
    code = main([str(a) for a in argv], (lambda path, device: model) if model else None)
    captured = capsys.readouterr()
    assert model is None or model.open_contexts == 0
    return code, captured.out, captured.err


def child(*argv, code=None, **options):
    """A process of its own: `python -m ggml_py`, or the program `code`, in which SIGINT is not ignored."""
    command = [sys.executable, *(["-m", "ggml_py"] if code is None else ["-c", code]), *map(str, argv)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **options)


@pytest.fixture
def files(tmp_path):
    """A folder with a text, token ids, a small GGUF file (2 layers of 4 heads of 32, 2 for K and V) and files that are broken."""
    (tmp_path / "text").write_bytes(TEXT)
    (tmp_path / "empty").write_bytes(b"")
    np.save(tmp_path / "tokens.npy", np.arange(10, dtype=np.int64))
    np.save(tmp_path / "floats.npy", np.ones(3))
    np.save(tmp_path / "large.npy", np.array([1, 2, N_VOCAB]))
    np.savez(tmp_path / "archive.npz", a=np.arange(3))
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_block_count(2), writer.add_embedding_length(128), writer.add_context_length(256)
    writer.add_head_count(4), writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_string("general.description", "x" * 500 + "[red]")
    writer.add_array("tokenizer.ggml.tokens", ["[b]", "<a>", "\n", *map(str, range(97))])
    writer.add_tensor("token_embd.weight", np.zeros((100, 128), np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((8, 136), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.1.attn_q.weight", np.zeros((8, 136), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "tiny.gguf").read_bytes()[:300])
    return tmp_path


# What the commands print

def test_perplexity(capsys, files):
    code, out, err = call(capsys, "perplexity", "-m", files / "tiny.gguf", "-f", files / "text", "-c", 32, "-b", 64,
                          model=FakeModel())
    lines = out.splitlines()
    assert code == 0 and len(lines) == 3
    assert re.fullmatch(r"(\[\d\]\d+\.\d{4},){9}", lines[0])
    assert re.fullmatch(r"Final estimate: PPL = \d+\.\d{4} \+/- \d+\.\d{5}",
                        lines[1]) and re.fullmatch("digest: [0-9a-f]{64}", lines[2])
    assert re.fullmatch(r"""perplexity: tokenizing the input \.\.
perplexity: tokenization took [\d.e-]+ ms
perplexity: calculating perplexity over 9 chunks, n_ctx=32, batch_size=64, n_seq=2
perplexity: \d+\.\d\d seconds per pass - ETA \d+\.\d\d minutes
perplexity: 279 tokens in \d+\.\d\d s, \d+\.\d tokens/s
""", err)


def test_perplexity_in_rows(capsys, files):
    """As llama-perplexity has them for --ppl-output-type 1; the digest is the same."""
    argv = ["perplexity", "-m", files / "tiny.gguf", "-f", files / "text", "-c", 32, "--chunks", 3]
    plain, rows = (call(capsys, *argv, "--ppl-output-type", kind, model=FakeModel())[1].splitlines() for kind in (0, 1))
    found = [row.split() for row in rows[:3]]
    assert [row[0] for row in found] == ["0", "32", "64"] and rows[0].startswith("       0  ") and rows[3:] == plain[1:]
    assert plain[0] == "".join(f"[{i}]{row[1]}," for i, row in enumerate(found, 1))
    assert all(abs(np.exp(float(row[2])) - float(row[1])) < 1e-3 * float(row[1]) for row in found)
    strided = call(capsys, *argv, "--ppl-stride", 16, "--ppl-output-type", 1, model=FakeModel())[1].splitlines()
    assert [row.split()[0] for row in strided[:-1]] == ["0", "16", "32"] and all(len(row.split()) == 2 for row in strided)


def test_perplexity_with_a_root(capsys, files):
    """In the place of the digest; not of tasks."""
    argv = ["perplexity", "-m", files / "tiny.gguf", "-f", files / "text", "-c", 32, "--chunks", 3]
    plain, rooted = (call(capsys, *argv, *more, model=FakeModel())[1].splitlines() for more in ((), ("--root",)))
    assert rooted[:2] == plain[:2] and re.fullmatch("root: [0-9a-f]{64}", rooted[2]) and len(rooted) == 3
    refused = call(capsys, "perplexity", "-m", files / "tiny.gguf", "--tasks", files / "text", "--root", model=FakeModel())
    assert refused[0] == 2 and "--root: is of a text, and --tasks asks for tasks" in refused[2]


def test_perplexity_with_strides(capsys, files):
    code, out, _ = call(capsys, "perplexity", "-m", files / "tiny.gguf", "-f", files / "text", "-c", 32, "--ppl-stride", 16,
                        "--chunks", 2, model=FakeModel())
    assert code == 0 and re.fullmatch(r"\[1\][\d.]+,\[2\][\d.]+,\ndigest: \w{64}\n", out)


def test_perplexity_takes_the_demo_by_default(capsys, monkeypatch, files):
    asked = []
    monkeypatch.setattr("ggml_py.files.pull.resolve", lambda name, log: asked.append(name) or files / "tiny.gguf")
    code, out, _ = call(capsys, "perplexity", "--chunks", 1, model=FakeModel())
    assert code == 0 and asked == ["smollm2"] and out.startswith("[1]")


def test_kl_divergence_written_and_compared(capsys, files):
    model = ["-m", files / "tiny.gguf"]
    code, written, err = call(capsys, "perplexity", *model, "-f", files / "text", "-c", 64, "--kl-divergence-base",
                              files / "base", model=FakeModel())
    assert code == 0 and f"perplexity: saving all logits to {files / 'base'}" in err
    code, out, _ = call(capsys, "perplexity", *model, "--kl-divergence", "--kl-divergence-base", files / "base",
                        model=FakeModel())
    assert code == 0 and "====== KL divergence statistics ======" in out and out.splitlines()[-1] == written.splitlines()[-1]
    assert kl_divergence.BaseFile(files / "base").n_chunk == 4


@pytest.mark.parametrize("n_batch", [2048, 3, 1])
def test_logits(capsys, files, n_batch):
    code, out, _ = call(capsys, "logits", "-m", files / "tiny.gguf", "--tokens", files / "tokens.npy", "-o", files / "out.npy",
                        "-b", n_batch,
                        model=FakeModel())
    found, expected, digest = np.load(files / "out.npy"), prefix_logits(range(10)), LogitsDigest()
    digest.update(expected)
    assert code == 0 and found.dtype == np.float32 and found.tobytes() == expected.tobytes() and found.shape == (10, N_VOCAB)
    assert out == f"digest: {digest.hexdigest()}\n" and not list(files.glob("*.partial"))


def test_info(capsys, files):
    code, out, _ = call(capsys, "info", files / "tiny.gguf", "-c", 100, "-ctk", "q8_0")
    assert code == 0 and max(map(len, out.splitlines())) <= 200
    row = lambda *words: re.search(r" +".join(map(re.escape, words)), out)
    assert row("llama.block_count", "uint32", "2")
    assert row("tokenizer.ggml.tokens", "array of string",
               "100 values: '[b]', '<a>', '\\n', '0', '1', '2', ...") and "x'... 505 characters" in out
    assert row("Q8_0", "2", "2,048", "2,176 (0.0 MB)", "8.5") and row("F32", "1", "12,800", "51,200 (0.1 MB)", "32")
    # 2 layers, 2 heads of 32: q8_0 K of 64 values in 68 bytes, f16 V of 64 values in 128
    assert row("KV cache, 100 positions, q8_0 and f16",
               f"{2 * 100 * (68 + 128):,} ") and row("together", f"{51200 + 2176 + 39200:,} ")


def test_info_of_a_vocabulary(capsys, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "vocabulary.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a"])
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    code, out, _ = call(capsys, "info", tmp_path / "vocabulary.gguf")
    assert code == 0 and "0 tensors" in out and "none: the file has no tensors" in out


def write_gguf(path, arch: str, *more):
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(2), writer.add_embedding_length(64), writer.add_head_count(2), writer.add_head_count_kv(2)
    for add in more:
        add(writer)
    writer.add_tensor("token_embd.weight", np.zeros((4, 64), np.float32))
    for i in range(2):
        writer.add_tensor(f"blk.{i}.attn_norm.weight", np.zeros(64, np.float32))
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    return path


@pytest.mark.parametrize("arch, more, message", [
    ("gptj", [], "architecture 'gptj' is unknown; known: llama, qwen2"), ("llama", [], "key 'llama.context_length' is missing"),
    ("llama", [lambda w: w.add_context_length(8), lambda w: w.add_layer_norm_rms_eps(1e-5), lambda w: w.add_expert_count(8)],
     "llama with 8 experts is not supported"),
])
def test_info_of_a_model_that_cannot_be_run(capsys, tmp_path, arch, more, message):
    """All that can be known is printed, then why it cannot be run; no figure is made up."""
    path = write_gguf(tmp_path / "m.gguf", arch, *more)
    code, out, err = call(capsys, "info", path)
    assert code == 2 and err.startswith(f"ggml-py: error: {path}: {message}") and err.count("\n") == 1
    assert f"{arch}.block_count" in out and "3 tensors" in out and "unknown: this version cannot run the model" in out
    assert re.search(r"weights, as in the file +1,536 ", out) and "together" not in out


def greedy(prompt: str, n: int) -> str:
    tokens = list(prompt.encode())
    for _ in range(n):
        tokens.append(int(prefix_logits(tokens)[-1].argmax()))
    return b"".join(bytes([t]) if t < 256 else b"" for t in tokens[len(prompt):]).decode("utf-8", "replace")


def test_run_is_greedy_by_default(capsys, files):
    code, out, _ = call(capsys, "run", "-m", files / "tiny.gguf", "-p", "once", "-n", 5, model=FakeModel())
    assert code == 0 and out == greedy("once", 5) + "\n"


def test_run_with_a_seed(capsys, files):
    texts = [call(capsys, "run", "-m", files / "tiny.gguf", "-p", "once", "-n", 20, "--temp", 2, "--seed", seed,
                  model=FakeModel())[1] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def always(token):
    """Logits of a model that always says so."""
    return lambda tokens: np.eye(N_VOCAB, dtype=np.float32)[[token] * len(tokens)]


def test_run_until_the_context_is_full(capsys, files):
    model = FakeModel(logits=always(65))
    code, out, err = call(capsys, "run", "-m", files / "tiny.gguf", "-p", "once", "-n", -1, "-c", 16, model=model)
    assert code == 0 and out == "A" * 12 + "\n" and err.endswith("; the context of 16 tokens is full\n")


def ends_after_two(tokens):
    """Of a prompt of four tokens."""
    return always(EOS if len(tokens) > 5 else 65)(tokens)


IN_S = r" in \d+\.\d\d s \(\d+\.\d tokens/s\)"


@pytest.mark.parametrize("n, logits, said", [
    (5, always(65), f"5 new ones{IN_S}; -n 5 is reached"), (1, always(65), "1 new ones; -n 1 is reached"),
    (5, always(EOS), "0 new ones; the model ended its text"), (-1, always(EOS), "0 new ones; the model ended its text"),
    (5, ends_after_two, f"2 new ones{IN_S}; the model ended its text"), (2, ends_after_two, f"2 new ones{IN_S}; -n 2 is reached"),
])
def test_run_ends_with_its_speed_and_why_it_stopped(capsys, files, n, logits, said):
    code, _out, err = call(capsys, "run", "-m", files / "tiny.gguf", "-p", "once", "-n", n, model=FakeModel(logits=logits))
    assert code == 0 and re.fullmatch(f"run: prompt of 4 tokens{IN_S}, {said}\n", err)


@pytest.mark.parametrize("drawn", [[], ["--temp", 0.9, "--seed", 5]], ids=["greedy", "drawn"])
def test_run_with_drafts(capsys, files, drawn):
    """The text of a run without; the end says what came of the drafts."""
    argv = ["run", "-m", files / "tiny.gguf", "-p", "ababab", "-n", 30, *drawn]
    code, out, _ = call(capsys, *argv, model=FakeModel(logits=periodic))
    assert (code, *call(capsys, *argv, "--draft-source", "ngram", model=FakeModel(logits=periodic))[:2]) == (0, 0, out)
    _, _, err = call(capsys, *argv, "--draft-source", "ngram", "--draft-max", 3, model=FakeModel(logits=periodic))
    assert re.search(r"\nrun: drafts of ngram: (\d+) drafted, \d+ accepted \(\d+ %\), \d+\.\d\d tokens a step\n$", err)


def periodic(tokens):
    """The token before the last one is likely."""
    rows = prefix_logits(tokens)
    rows[np.arange(1, len(rows)), np.asarray(tokens)[:-1]] += 12
    return rows


@pytest.mark.parametrize("argv, said", [
    (["--draft-max", 4], "--draft-max: needs --draft-source"), (["--draft-source", "model"], "--draft-source model: needs -md"),
    (["--draft-source", "ngram", "-md", "x"], "-md: is of --draft-source model"),
    (["--draft-p-min", 0.5], "--draft-p-min: is of --draft-source model and mtp"),
    (["--draft-source", "tea"],
     "argument --draft-source/--spec-type: must be ngram, model, mtp, got 'tea' (see ggml-py run --help)"),
    (["-md", "x", "--draft-max", 0],
     "argument --draft-max/--draft/--draft-n/--spec-draft-n-max: must be at least 1, got 0 (see ggml-py run --help)"),
    (["-md", "nowhere.gguf"], "nowhere.gguf: no such file")])
def test_drafts_that_cannot_be(capsys, files, argv, said):
    assert call(capsys, "run", "-m", files / "tiny.gguf", "-p", "a", *argv,
                model=FakeModel())[::2] == (2, f"ggml-py: error: {said}\n")


def test_speed_of_a_run():
    from ggml_py.cli.run import speed_of_run
    expected = "prompt of 8 tokens in 2.00 s (4.0 tokens/s), 3 new ones in 1.00 s (2.0 tokens/s)"
    assert speed_of_run(8, [1.0, 3.0, 3.5, 4.0], 9.0) == expected
    assert speed_of_run(8, [1.0, 3.0], 9.0) == "prompt of 8 tokens in 2.00 s (4.0 tokens/s), 1 new ones"
    assert speed_of_run(8, [1.0], 9.0) == "prompt of 8 tokens in 8.00 s (1.0 tokens/s), 0 new ones"


def test_run_with_the_chat_template(capsys, files):
    model = FakeModel(add_bos=True)
    model.tokenizer.chat_template = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
                                     "{% if add_generation_prompt %}<assistant>{% endif %}")
    model.tokenizer.token_text = lambda id: f"<{id}>"
    code, _, err = call(capsys, "run", "-m", files / "tiny.gguf", "-p", "hi", "-n", 1, "--chat", model=model)
    assert code == 0 and model.calls[0] == ("argmax", {0: 1 + len("<user>hi<assistant>")}) and "date" not in err


def with_template() -> FakeModel:
    model = FakeModel()
    model.tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    model.tokenizer.token_text = str
    return model


@pytest.mark.parametrize("argv, prompt", [
    ([], "a\nb\\n"), (["-f", "-"], "a\nb\\n"), (["-st"], "<user>a\nb\\n"), (["-sys", "x"], "<system>x<user>a\nb\\n"),
    (["-f", "{}/text"], TEXT.decode()), (["-p", "a\\nb"], "a\\nb"), (["-p", "a\\nb\\x41\\\\n\\q", "-e"], "a\nbA\\n\\q"),
    (["-p", "p", "-sysf", "{}/text"], f"<system>{TEXT.decode()}<user>p"), (["-p", "p", "-sys", "\\t", "-e"], "<system>\t<user>p"),
    (["-p", "p", "--chat", "--chat-template", "{{ messages | length }}!"], "1!"), (["-p", "p", "-e", "--no-escape"], "p")])
def test_where_the_prompt_comes_from(capsys, files, monkeypatch, argv, prompt):
    """stdin where neither -p nor -f is given; a newline at the end of a file is not a part of it."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\\n\n")))
    model = with_template()
    decoded = []
    model.logits = lambda tokens: decoded.append(bytes(tokens)) or prefix_logits(tokens)
    argv = [each.replace("{}", str(files)) for each in argv]
    assert call(capsys, "run", "-m", files / "tiny.gguf", "-n", 1, *argv, model=model)[0] == 0
    assert decoded[0].decode() == prompt


def test_what_a_template_is_told(capsys, files):
    model = with_template()
    model.tokenizer.chat_template = "{{ enable_thinking }} {{ reasoning_effort }} {{ x }}"
    (files / "template").write_text("<<{{ messages[0].content }}>>")
    decoded = []
    model.logits = lambda tokens: decoded.append(bytes(tokens).decode()) or prefix_logits(tokens)
    for more in (["-rea", "off", "--reasoning-effort", "low", "--chat-template-kwargs", '{"x": [1]}'], ["-rea", "auto"],
                 ["--chat-template-file", files / "template"]):
        assert call(capsys, "run", "-m", files / "tiny.gguf", "-n", 1, "-p", "p", "--chat", *more, model=model)[0] == 0
    assert decoded == ["False low [1]", "  ", "<<p>>"]


def test_what_changes_logits(capsys, files):
    """Penalties, biases, and a model that may not end; each as `Sampling` has it."""
    def text(*more, logits=prefix_logits):
        code, out, err = call(capsys, "run", "-m", files / "tiny.gguf", "-p", "once", "-n", 6, *more,
                              model=FakeModel(logits=logits))
        return out if code == 0 else err
    plain = text()
    assert text("-l", "65+100") == "AAAAAA\n" and text("--repeat-penalty", 1) == plain
    assert text("-l", "65+100,66+100", "--presence-penalty", "1") != text("-l", "65+100") != plain
    assert len(text("-l", "65+90", "-l", "66+89", "--frequency-penalty", "0.4").replace("A", "")) < 6
    assert text(logits=always(EOS)) == "\n" and len(text("--ignore-eos", logits=always(EOS))) == 7
    assert text("-l", "700+1") == "ggml-py: error: -l: must be of ids 0 to 258, got 700\n"
    assert text("-r", plain[2:4]) == plain[:2] + "\n" and text("--display-prompt") == "once" + plain


def test_a_grammar(capsys, files):
    pytest.importorskip("llguidance")
    (files / "g").write_text('root ::= ("yes" | "no") "!"')
    (files / "s").write_text('{"type": "boolean"}')
    for more, allowed in ((["--grammar-file", files / "g"], ("yes!", "no!")), (["--grammar", 'root ::= "a"+ "."'], None),
                          (["-j", '{"enum": [12, 3]}'], ("12", "3")), (["-jf", files / "s"], ("true", "false"))):
        code, out, err = call(capsys, "run", "-m", files / "tiny.gguf", "-p", "x", "-n", 20, *more, model=FakeModel())
        assert code == 0 and (out.strip() in allowed if allowed else re.fullmatch(r"a+\.?\n", out)), (more, out, err)
        assert not allowed or err.endswith("; the grammar is at its end\n")
    code, out, err = call(capsys, "run", "-m", files / "tiny.gguf", "-p", "x", "--grammar", "root ::= (", model=FakeModel())
    assert code == 2 and err.startswith("ggml-py: error: --grammar: is no usable GBNF grammar")
    code, out, err = call(capsys, "run", "-m", files / "tiny.gguf", "-p", "x", "-j", "{", model=FakeModel())
    assert code == 2 and err.startswith("ggml-py: error: -j: is no usable JSON schema")


class Clock(date):
    @classmethod
    def today(cls):
        return cls(2027, 2, 28)


@pytest.mark.parametrize("argv, told", [
    ([], "2026-01-01"), (["--date", "2031-12-24"], "2031-12-24"), (["--date", "today"], "2027-02-28")])
def test_a_template_that_asks_for_the_date(capsys, monkeypatch, files, argv, told):
    """It is told what is fixed, or asked for, and that is said."""
    monkeypatch.setattr("datetime.date", Clock)
    model = FakeModel()
    model.tokenizer.chat_template, model.tokenizer.token_text = "{{ strftime_now('%d.%m.%Y') }}", str
    said, encode = [], model.tokenizer.encode
    model.tokenizer.encode = lambda text, **more: said.append(text) or encode(text, **more)
    code, _, err = call(capsys, "run", "-m", files / "tiny.gguf", "-p", "hi", "-n", 1, "--chat", *argv, model=model)
    assert code == 0 and said == [".".join(reversed(told.split("-")))]
    assert err.startswith(f"run: the chat template asks for the date and is told {told} (--date)\n")


def test_verbose_describes_the_model(capsys, files):
    _, _, err = call(capsys, "run", "-m", files / "tiny.gguf", "-p", "x", "-n", 1, "--verbose", model=FakeModel())
    *described, spoken, compiled = err.splitlines()
    assert described == ["a fake model", "an arena for 2 tokens", "CUDA graphs: none", "no copies"]
    assert spoken.startswith("run: prompt of 1 tokens in ")
    assert re.fullmatch(r"\d+ kernels compiled in \d+\.\d s", compiled)


def test_help_and_version(capsys):
    for argv, start in [(["--version"], f"ggml-py {ggml_py.__version__}\n"), (["--help"], "usage: ggml-py"),
                        (["run", "--help"], "usage: ggml-py run")]:
        with pytest.raises(SystemExit) as exit:
            main(argv)
        assert not exit.value.code and capsys.readouterr().out.startswith(start)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""
    def isatty(self):
        return True


@pytest.mark.parametrize("shared", [True, False])
def test_a_bar_on_a_terminal_leaves_stdout_clean(monkeypatch, files, shared):
    out, err = Terminal() if shared else io.StringIO(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["perplexity", "-m", str(files / "tiny.gguf"), "-f", str(files / "text"), "-c", "32"], lambda path,
                device: FakeModel()) == 0
    assert re.fullmatch(r"(\[\d\]\d+\.\d{4},){9}\nFinal [^\n]*\ndigest: \w{64}\n", out.getvalue())
    assert "9/9" in err.getvalue()


# Mistakes: one line, exit code 2

NO_MODEL = ["-m", "{}/tiny.gguf"]
TEXT_FILE = ["-f", "{}/text"]
MISTAKES = [
    ([], "the following arguments are required: COMMAND"),
    (["sing", "-p", "x"], "'sing' is not a command, allowed: run, perplexity, bench, "),
    (["perplexity", "--speed"], "--speed: unknown option (see ggml-py perplexity --help)"),
    (["perplexity", "--chunk", "3"], "--chunk: unknown option"),  # no abbreviations
    (["perplexity", "-c", "many"], "argument -c/--ctx-size: must be an integer, got 'many'"),
    (["perplexity", "-c", "-1"], "must be at least 1, got -1"),
    (["perplexity", "--chunks", "0"], "must be at least 1, got 0"),
    (["perplexity", "-ctk", "q4_0"], "argument -ctk/--cache-type-k: must be f32, f16, q8_0, got 'q4_0'"),
    (["perplexity", "--device", "gpu"], "must be auto, cpu, cpu:N, cuda or cuda:N, got 'gpu'"),
    (["run", *NO_MODEL, "-p", "x", "--temp", "-1"], "must be 0 to 1e+06, got -1"),
    (["run", *NO_MODEL, "-p", "x", "--temp", "nan"], "must be 0 to 1e+06, got nan"),
    (["run", *NO_MODEL, "-p", "x", "--top-p", "x"], "must be a number, got 'x'"),
    (["run", *NO_MODEL, "-p", ""], "-p: the prompt has no tokens"),
    (["run", *NO_MODEL, "-f", "{}/empty"], "-f: the prompt has no tokens"),
    (["perplexity", *NO_MODEL, "-f", "{}/empty"], "-f: it has no tokens"),
    (["run", *NO_MODEL, "-p", "x", "--chat", "--date", "2026-13-01"],
     "argument --date: must be YYYY-MM-DD or today, got '2026-13-01'"),
    (["run", *NO_MODEL, "-p", "x", "--date", "today"], "--date: is of --chat or -cnv, which are not given"),
    (["run", *NO_MODEL, "-p", "12345", "-n", "4", "-c", "8"],
     "a prompt of 5 tokens and 4 new ones do not fit into a context of 8"),
    (["run", *NO_MODEL, "-p", "x", "-n", "5000"], "a context of 5001 tokens is too long, this model was trained on at most 4096"),
    (["run", *NO_MODEL, "-p", "x", "--chat"], "the model has no chat template"),
    (["run", *NO_MODEL, "-p", "x", "-t", "100000"], "-t: this machine has"),
    (["perplexity", "-m", "{}/none.gguf", *TEXT_FILE], "{}/none.gguf: no such file"),
    (["perplexity", *NO_MODEL, "-f", "{}/none"], "{}/none: no such file"),
    (["perplexity", *NO_MODEL, "-f", "{}"], "{}: is a folder, expected a file"),
    (["perplexity", *NO_MODEL, *TEXT_FILE, "-c", "151"], "-c: windows of 151 need at least 302 tokens, the text has 300"),
    (["perplexity", *NO_MODEL, *TEXT_FILE, "-c", "5000"], "-c: windows of 5000 need at least 10000 tokens"),
    (["perplexity", *NO_MODEL, *TEXT_FILE, "--kl-divergence"], "--kl-divergence: needs --kl-divergence-base FILE"),
    (["perplexity", *NO_MODEL, "--kl-divergence", "--kl-divergence-base", "{}/text"], "{}/text: not a KL-divergence base file"),
    (["perplexity", *NO_MODEL, "--kl-divergence", "--kl-divergence-base", "{}/none"], "{}/none: no such file"),
    (["perplexity", *NO_MODEL, *TEXT_FILE, "-c", "64", "--kl-divergence-base", "{}/no/base"],
     "{}/no/base: {}/no is not a folder"),
    (["perplexity", *NO_MODEL, "--ppl-stride", "4", "--kl-divergence-base", "{}/x"],
     "--ppl-stride: base files hold windows side by side"),
    (["logits", *NO_MODEL, "--tokens", "{}/text", "-o", "{}/o.npy"], "{}/text: neither JSON nor an array file of numpy: "),
    (["logits", *NO_MODEL, "--tokens", "{}/archive.npz", "-o", "{}/o.npy"], "got an archive"),
    (["logits", *NO_MODEL, "--tokens", "{}/floats.npy", "-o", "{}/o.npy"],
     "must be a one-dimensional array of integers, at least one, got float64 [3]"),
    (["logits", *NO_MODEL, "--tokens", "{}/large.npy", "-o", "{}/o.npy"], "token 2 is 259, must be 0 to 258"),
    (["logits", *NO_MODEL, "--tokens", "{}/tokens.npy", "-o", "{}/o.npy", "-c", "9"], "10 tokens do not fit into a context of 9"),
    (["logits", *NO_MODEL, "--tokens", "{}/tokens.npy", "-o", "{}/no/o.npy"],
     "argument -o/--output: {}/no/o.npy: {}/no is not a folder"),
    (["info", "{}/text"], "{}/text: this is not a GGUF file"),
    (["info", "{}/cut.gguf"], "{}/cut.gguf: "),
    (["info", "{}/none.gguf"], "{}/none.gguf: no such file"),
    (["run", *NO_MODEL, "-p", "x", "--seed", str(2**63)], "argument --seed/-s: must be at most 9223372036854775807"),
    (["pull", "gpt-5"], "pull: unknown model 'gpt-5', known: smollm2"),
]


@pytest.mark.parametrize("argv, message", MISTAKES, ids=[" ".join(argv) or "nothing" for argv, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(capsys, files, argv, message):
    before = sorted(files.iterdir())
    code, out, err = call(capsys, *(a.replace("{}", str(files)) for a in argv), model=FakeModel())
    *progress, line = err.splitlines()
    assert code == 2 and out == "" and line.startswith("ggml-py: error: ") and message.replace("{}", str(files)) in line
    assert all(text.startswith("perplexity: ") for text in progress)
    assert sorted(files.iterdir()) == before  # nothing half written


def test_a_mistake_in_a_process_of_its_own(files):
    process = child("info", files / "cut.gguf")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and out == "" and err.startswith("ggml-py: error: ") and err.count("\n") == 1


def test_an_unknown_architecture_lists_the_known_ones(capsys, files):
    writer = gguf.GGUFWriter(files / "gptj.gguf", "gptj")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    code, out, err = call(capsys, "run", "-m", files / "gptj.gguf", "-p", "x", "--device", "cpu")
    assert code == 2 and out == "" and err.count("\n") == 1 and re.search("'gptj' is unknown; known: .*llama.*qwen2.*qwen3", err)


def test_asking_for_a_gpu_that_is_not_there(capsys, files):
    code, out, err = call(capsys, "run", "-m", files / "tiny.gguf", "-p", "x", "--device", "cuda:99")
    assert code == 2 and out == "" and err.count("\n") == 1 and err.startswith("ggml-py: error: --device: cuda:99: ")


def test_cache_types_are_those_of_the_cache():
    from ggml_py.base import storage
    assert list(CACHE_TYPES) == list(storage.CACHE_TYPES)


def test_a_bug_keeps_its_traceback(files):
    def broken(path, device):
        raise ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError, match="a bug"):
        main(["run", "-m", str(files / "tiny.gguf"), "-p", "x"], broken)


# Signals and pipes

LONG = """
import sys, time
from fake_model import FakeModel, prefix_logits
from ggml_py.__main__ import main
def slow(tokens):
    try:
        print("computing", file=sys.stderr, flush=True)
        time.sleep(0.2)
    except KeyboardInterrupt:
        raise
    return prefix_logits(tokens)
model = FakeModel(logits=slow)
code = main(sys.argv[1:], lambda path, device: model)
assert model.open_contexts == 0
sys.exit(code)
"""
IMPORTING = """
import sys, time
from ggml_py.__main__ import main
class Slow:
    def find_spec(self, name, path, target=None):
        if name == "ggml_py.measure.perplexity":
            print("computing", file=sys.stderr, flush=True)
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                raise ImportError("as C extensions do")
sys.meta_path.insert(0, Slow())
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("code", [LONG, IMPORTING], ids=["computing", "importing"])
def test_ctrl_c_ends_cleanly_with_130(files, code):
    process = child("perplexity", "-m", files / "tiny.gguf", "-f", files / "text", "-c", 64, "-b", 64, "--kl-divergence-base",
                    files / "base", code=code)
    lines = iter(process.stderr.readline, "")
    assert any("computing" in line for line in lines)
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "Traceback" not in rest and "error" not in rest
    assert not list(files.glob("base*"))


def test_a_second_ctrl_c_ends_what_swallows_the_first(files):
    code = LONG.replace("        raise\n",
                        "        print('swallowed', file=sys.stderr, flush=True); time.sleep(60)\n").replace("0.2", "60")
    process = child("perplexity", "-m", files / "tiny.gguf", "-f", files / "text", "-c", 64, code=code)
    for word in "computing", "swallowed":
        assert any(word in line for line in iter(process.stderr.readline, ""))
        process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130


def test_a_reader_that_leaves_is_no_error(files):
    process = child("run", "-m", files / "tiny.gguf", "-p", "x", "-n", 400, code=LONG.replace("time.sleep(0.2)", "pass"))
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 141 and "Traceback" not in err and "BrokenPipe" not in err


# Start-up

def test_mistakes_are_answered_without_heavy_imports():
    process = child(code="import sys; from ggml_py.__main__ import main; main(['perplexity', '-x']); "
                         "print(sorted({'numpy', 'numba', 'gguf', 'rich', 'tokenizers'} & set(sys.modules)))")
    assert process.communicate(timeout=60)[0] == "[]\n"
