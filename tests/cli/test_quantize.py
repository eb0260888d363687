"""ggml-py quantize: what it prints, and its mistakes, each in one line."""
import re

import gguf
import numpy as np
import pytest
from fake_model import FakeTokenizer
from tiny_models import write_model

from ggml_py.__main__ import main
from ggml_py.backends.cpu import CPUBackend
from ggml_py.conversion.imatrix import ImportanceMatrix, Sums
from ggml_py.engine.model import Model
from ggml_py.files.gguf import GGUFFile


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "f32.gguf", n_layer=1)
    write_model(tmp_path / "q8.gguf", n_layer=1, types=("Q8_0",))
    imatrix("good.imatrix", "blk.0.attn_q.weight", 64)
    return tmp_path


def imatrix(path, name, n):
    ImportanceMatrix(path, {name: Sums(np.ones(n, np.float32), np.array([3]))}, ["text"], 1, 512).write(path)


def call(capsys, *argv):
    code = main(["quantize", *map(str, argv)])
    return code, *capsys.readouterr()


def words(text):
    """Lines without what draws a table."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip(" ─")]


def test_a_dry_run_prints_the_plan(capsys, folder):
    code, out, err = call(capsys, "f32.gguf", "Q4_K_M", "--dry-run", "--tensor-type", "attn_k=q8_0", "--imatrix", "good.imatrix")
    lines = words(out)
    assert (code, err) == (0, "") and lines[0] == "tensor shape before after bits"
    assert "blk.0.attn_k.weight 64 x 64 F32 Q8_0 8.5 not in the importance matrix" in lines
    assert "blk.0.attn_q.weight 64 x 128 F32 Q5_0 5.5 not Q4_K: rows are no multiple of 256" in lines
    assert "blk.0.attn_norm.weight 64 F32 32" in lines
    assert "tensors have another type than the mix says" in out
    assert not (folder / "new.gguf").exists()


def test_the_table_at_the_end(capsys, folder):
    code, out, _err = call(capsys, "f32.gguf", "new.gguf", "Q8_0", 1, "--leave-output-tensor")  # one thread
    lines, size = words(out), (folder / "new.gguf").stat().st_size
    assert code == 0 and lines[0] == "tensor shape before after bits rms error"
    found = next(line for line in lines if line.startswith("blk.0.attn_q.weight")).split()
    assert found[1:7] == ["64", "x", "128", "F32", "Q8_0", "8.5"] and 0.003 < float(found[7]) < 0.01
    assert "output.weight 64 x 70 F32 32" in lines
    assert lines[-1] == f"new.gguf: {size:,} ({size / 1e6:,.1f} MB)"
    names = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader("new.gguf").tensors}
    assert names["token_embd.weight"] == "Q8_0" and names["output.weight"] == names["blk.0.attn_norm.weight"] == "F32"


def test_numbers_and_names_of_types(capsys, folder):
    outs = [call(capsys, "f32.gguf", type_, "--dry-run")[1] for type_ in ("Q4_K_M", "15", "q4_k", "Q4_k_m")]
    assert len(set(outs)) == 1


def test_asked_types(capsys, folder):
    _, out, _ = call(capsys, "f32.gguf", "Q8_0", "--dry-run", "--output-tensor-type", "q5_1", "--token-embedding-type", "Q4_1",
                     "--tensor-type", "ffn_(up|gate)=BF16", "--tensor-type", "ffn=F16")
    found = {line.split()[0]: line for line in words(out)}
    assert " Q5_1 " in found["output.weight"] and " Q4_1 " in found["token_embd.weight"]
    assert " BF16 " in found["blk.0.ffn_up.weight"] and " F16 " in found["blk.0.ffn_down.weight"]


@pytest.mark.parametrize("argv, said", [
    (["f32.gguf", "new.gguf"], "TYPE: it is missing, expected IN OUT TYPE"),
    (["f32.gguf", "new.gguf", "Q9"], "TYPE: 'Q9' is not known; allowed: F32 (0), F16 (1), BF16 (32), Q4_0 (2), "),
    (["f32.gguf", "new.gguf", "4"], "TYPE: '4' is not known; allowed: "),
    (["none.gguf", "new.gguf", "Q8_0"], "none.gguf: "),
    (["f32.gguf", "f32.gguf", "Q8_0"], "OUT: f32.gguf is IN, which is read while OUT is written; allowed: another file"),
    (["f32.gguf", "link.gguf", "Q8_0"], "OUT: link.gguf is IN, which is read while OUT is written; allowed: another file"),
    (["f32.gguf", "no/new.gguf", "Q8_0"], "no/new.gguf: no is not a folder"),
    (["f32.gguf", "/dev/full", "Q8_0"], "/dev/full: cannot be written: No space left on device"),
    (["q8.gguf", "new.gguf", "Q4_0"], "--allow-requantize: q8.gguf: tensor token_embd.weight is Q8_0 already and would be Q4_0; "
                                      "a second quantization loses more than one, and must be asked for"),
    (["f32.gguf", "new.gguf", "Q8_0", "--tensor-type", "attn_x=Q8_0"],
     "--tensor-type: 'attn_x' is found in no name of the 9 tensors of f32.gguf that can change"),
    (["f32.gguf", "new.gguf", "Q8_0", "--tensor-type", "attn_norm=Q8_0"],
     "--tensor-type: 'attn_norm' is found in no name of the 9 tensors of f32.gguf that can change"),
    (["f32.gguf", "new.gguf", "Q8_0", "--tensor-type", "attn_q"], "argument --tensor-type: must be REGEX=TYPE, got 'attn_q'"),
    (["f32.gguf", "new.gguf", "Q8_0", "--tensor-type", "(=Q8_0"],
     "argument --tensor-type: must be a regular expression before =, got '('"),
    (["f32.gguf", "new.gguf", "Q8_0", "--output-tensor-type", "Q4_K_M"], "argument --output-tensor-type: must be F32, F16, "),
    (["f32.gguf", "new.gguf", "Q1_0"],
     "TYPE: f32.gguf: tensor token_embd.weight cannot be Q1_0: its rows have 64 values, must have a multiple of 128, and no type "
     "of smaller blocks stands for it; allowed: another by --tensor-type"),
    (["wide.gguf", "new.gguf", "IQ2_XXS"], "--imatrix: wide.gguf: tensor blk.0.ffn_down.weight needs one to be IQ2_XXS, without "
                                           "the result is worth nothing, and none is given"),
    (["wide.gguf", "new.gguf", "IQ2_XXS", "--imatrix", "good.imatrix"],
     "--imatrix: wide.gguf: tensor blk.0.ffn_down.weight needs one to be IQ2_XXS, without the result is worth nothing, and "
     "good.imatrix has no entry for it"),
    (["f32.gguf", "new.gguf", "Q8_0", "--imatrix", "other.imatrix"],
     "other.imatrix: it is of another model: f32.gguf has no tensor 'blk.9.attn_q.weight'"),
    (["f32.gguf", "new.gguf", "Q8_0", "--imatrix", "wide.imatrix"],
     "wide.imatrix: it is of another model: 128 values for 'blk.0.attn_q.weight', which has 64 columns in f32.gguf"),
    (["f32.gguf", "new.gguf", "Q8_0", "--imatrix", "f32.gguf"], "f32.gguf: not an importance matrix: it has the tensor "),
    (["f32.gguf", "new.gguf", "Q8_0", "--imatrix", "none"], "none: no such file"),
    (["f32.gguf", "new.gguf", "Q8_0", "-c", "64"], "-c: is of --kl, which is not given"),
    (["f32.gguf", "new.gguf", "Q8_0", "--dry-run", "--kl", "text"],
     "--kl: compares with the new file, and --dry-run writes none"),
])
def test_mistakes(capsys, folder, argv, said):
    (folder / "link.gguf").symlink_to("f32.gguf")
    write_model(folder / "wide.gguf", n_layer=1, n_ff=256)
    imatrix("other.imatrix", "blk.9.attn_q.weight", 64)
    imatrix("wide.imatrix", "blk.0.attn_q.weight", 128)
    code, out, err = call(capsys, *argv)
    told = [line for line in err.splitlines() if "compil" not in line]  # with an empty cache of kernels
    assert (code, out) == (2, "") and len(told) == 1 and told[0].startswith(f"ggml-py: error: {said}")
    assert not (folder / "new.gguf").exists()


def test_kl_divergence(capsys, folder):
    """Of what is the same to the bit it is 0; BF16 loses something."""
    def load(path, device):
        model = Model(GGUFFile.open(path), CPUBackend())
        model._tokenizer = FakeTokenizer(add_bos=False)
        return model
    (folder / "text").write_bytes(bytes(np.random.default_rng(3).integers(0, 64, 200, np.uint8)))
    for type_ in "COPY", "BF16":
        argv = ["quantize", "f32.gguf", "new.gguf", type_, "--pure", "--kl", "text", "-c", "64", "--chunks", "2"]
        assert main(argv, load) == 0
        found = re.search(r"^KL divergence: +(\S+) ± \S+\nPPL: +(\S+) ± \S+, of IN +(\S+) ± \S+; same top p: +(\S+) ± \S+ %$",
                          capsys.readouterr().out, re.MULTILINE)
        kld, ppl, ppl_base, same = map(float, found.groups())
        assert (kld < 1e-6 and same == 100) if type_ == "COPY" else (1e-6 < kld < 0.01 and same > 80)
        assert ppl == pytest.approx(ppl_base, rel=0.05)
