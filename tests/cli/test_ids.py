"""Token ids in the place of texts, and results as JSON."""
import json
import math

import numpy as np
import pytest
from fake_model import FakeTokenizer
from notices import without_notice
from tiny_models import write_model

from ggml_py.__main__ import main
from ggml_py.backends.cpu import CPUBackend
from ggml_py.base.likelihoods import negative_log_likelihood
from ggml_py.check.attestation import read_attestation, tokens_sha256
from ggml_py.engine.model import Model
from ggml_py.files.gguf import GGUFFile
from ggml_py.testing import digest

TEXT = bytes(np.random.default_rng(4).integers(97, 123, 140, np.uint8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, a text, and its ids in each form."""
    folder = tmp_path_factory.mktemp("ids")
    write_model(folder / "m.gguf", "llama", ("Q8_0",), n_vocab=259)
    (folder / "text").write_bytes(TEXT)
    (folder / "list.json").write_text(json.dumps([*TEXT]))
    (folder / "object.json").write_text(json.dumps({"text": "x", "tokens": [*TEXT]}))
    np.save(folder / "array.npy", np.array([*TEXT], np.uint16))
    return folder


def load(path, device):
    model = Model(GGUFFile.open(path), CPUBackend())
    model._tokenizer = FakeTokenizer(add_bos=False)
    return model


def run(capsys, folder, command, *argv) -> tuple[int, str, str]:
    capsys.readouterr()
    words = [word.format(folder) for word in map(str, argv)]
    code = main([command, "-m", str(folder / "m.gguf"), *words], load)
    out, err = capsys.readouterr()
    return code, out, without_notice(err)


@pytest.mark.parametrize("name", ["list.json", "object.json", "array.npy"])
def test_ids_are_as_good_as_their_text(capsys, folder, name):
    expected = run(capsys, folder, "perplexity", "-f", "{}/text", "-c", 32)
    found = run(capsys, folder, "perplexity", "--tokens", f"{{}}/{name}", "-c", 32)
    assert found[:2] == expected[:2] and found[0] == 0 and "tokeniz" not in found[2]


@pytest.mark.parametrize("stride", [0, 16])
def test_json_of_a_perplexity(capsys, folder, stride):
    code, out, _ = run(capsys, folder, "perplexity", "-f", "{}/text", "-c", 32, "--ppl-stride", stride, "--json", "{}/ppl.json")
    found = json.loads((folder / "ppl.json").read_text())
    total, n = (math.fsum(each[what] for each in found["windows"]) for what in ("nll", "n"))
    assert code == 0 and f"]{found['ppl']:.4f},\n" in out and f"digest: {found['digest']}\n" in out
    assert math.exp(total / n) == pytest.approx(found["ppl"]) and found["tokens_sha256"] == tokens_sha256([*TEXT])
    assert stride or f"PPL = {found['ppl']:.4f} +/- {found['error']:.5f}" in out
    assert (found["n_ctx"], found["stride"], found["device"], found["n_tokens"]) == (32, stride, "cpu", 140)


def test_roots_are_those_of_attestations(capsys, folder):
    """Of a perplexity, in what is printed and in JSON, and of its attestation, which prints it once."""
    code, out, _ = run(capsys, folder, "perplexity", "-f", "{}/text", "-c", 32, "--root", "--json", "{}/root.json")
    found = json.loads((folder / "root.json").read_text())
    assert code == 0 and out.endswith(f"\nroot: {found['root']}\n") and "digest" not in found
    attested = run(capsys, folder, "attest", "-f", "{}/text", "-c", 32, "-o", "{}/rooted.json")[1]
    assert attested == out and read_attestation(folder / "rooted.json")["merkle_root"] == found["root"]


def test_json_of_logits(capsys, folder):
    """Ids in, logits and the likeliest tokens out; what is written is ids again."""
    code, out, _ = run(capsys, folder, "logits", "--tokens", "{}/list.json", "--json", "{}/top.json", "-o", "{}/l.npy", "--top",
                       3)
    rows, found = np.load(folder / "l.npy"), json.loads((folder / "top.json").read_text())
    assert code == 0 and out == f"digest: {digest(rows)}\n" == f"digest: {found['digest']}\n"
    assert found["tokens"] == [*TEXT] and found["n_vocab"] == 259 and len(found["top"]) == 140
    ids = np.array([[id for id, _ in row] for row in found["top"]])
    assert (ids == np.argsort(-rows, 1, kind="stable")[:, :3]).all()
    expected = [[-negative_log_likelihood(row[None], [id])[0] for id in best] for row, best in zip(rows, ids)]
    np.testing.assert_allclose([[value for _, value in row] for row in found["top"]], expected)
    assert run(capsys, folder, "logits", "--tokens", "{}/top.json", "--json", "{}/again.json")[1] == out


def test_attestations_of_ids(capsys, folder):
    code, _, err = run(capsys, folder, "attest", "--tokens", "{}/list.json", "-c", 32, "-o", "{}/ids.json")
    document = read_attestation(folder / "ids.json")
    assert code == 0 and document["schema"] == 6 and "text" not in document, err
    confirmed = lambda *argv: run(capsys, folder, "verify", "--attestation", "{}/ids.json", *argv)
    assert confirmed("--tokens", "{}/array.npy")[:2] == (0, confirmed("--tokens", "{}/list.json", "--devices", "cpu")[1])
    assert confirmed() == (2, "", f"ggml-py: error: --tokens: is missing; {folder}/ids.json is of token ids\n")
    assert f"-f: {folder}/ids.json is of token ids, which --tokens gives" in confirmed("-f", "{}/text")[2]
    (folder / "fewer.json").write_text(json.dumps([*TEXT][:-1]))
    assert "tokens: there are 139 other tokens than attested, 140" in confirmed("--tokens", "{}/fewer.json")[2]
    assert run(capsys, folder, "attest", "-f", "{}/text", "-c", 32, "-o", "{}/text.json")[0] == 0
    of_text = read_attestation(folder / "text.json")
    assert of_text["merkle_root"] == document["merkle_root"] and of_text["schema"] == 1
    code, _, err = run(capsys, folder, "verify", "--attestation", "{}/text.json", "--tokens", "{}/list.json")
    assert code == 2 and "--tokens: " in err and "is of a file, which -f gives" in err


def test_a_generation_of_ids(capsys, folder):
    (folder / "abc.json").write_text(json.dumps([*b"abc"]))
    found = []
    for name, argv in ("text", ["-p", "abc"]), ("ids", ["--prompt-tokens", "{}/abc.json"]):
        code, out, err = run(capsys, folder, "attest", *argv, "-n", 5, "-o", f"{{}}/{name}.json")
        assert code == 0, err
        found.append((out, read_attestation(folder / f"{name}.json")["merkle_root"]))
    assert found[0] == found[1] and run(capsys, folder, "verify", "--attestation", "{}/ids.json")[0] == 0


def test_run_takes_ids_and_writes_them(capsys, folder):
    """A prompt in ids, of its own JSON too; the digest is that of `generate`."""
    (folder / "abc.json").write_text(json.dumps([*b"abc"]))
    code, out, err = run(capsys, folder, "run", "-p", "abc", "-n", 5, "--json", "{}/run.json")
    found = json.loads((folder / "run.json").read_text())
    assert code == 0 and out == found["text"] + "\n" and found["finish_reason"] in ("length", "end"), err
    assert found["tokens"][:3] == [*b"abc"] and found["n_prompt"] == 3 and len(found["tokens"]) <= 8
    with load(folder / "m.gguf", "cpu") as model:
        expected = model.generate([*b"abc"], max_tokens=5, digest=True)
    assert (found["digest"], found["tokens"][3:]) == (expected.digest, [*expected.ids])
    assert run(capsys, folder, "run", "--prompt-tokens", "{}/abc.json", "-n", 5, "--json", "{}/again.json")[1] == out
    assert json.loads((folder / "again.json").read_text()) == found
    assert run(capsys, folder, "run", "--prompt-tokens", "{}/run.json", "-n", 2)[0] == 0


def test_verify_takes_ids(capsys, folder):
    few = "-c", 16, "--chunks", 1, "--axes", "rerun", "--devices", "cpu"
    said = [run(capsys, folder, "verify", *argv, *few)[1].splitlines()[-1]
            for argv in (["-f", "{}/text"], ["--tokens", "{}/list.json"])]
    assert said[0] == said[1] and "digest" in said[0]


BAD = {"text": "not JSON", "floats": "[1, 2.0]", "bools": "[true]", "none": "[]", "object": '{"ids": [1]}', "text list": '["a"]',
       "deep": "[" * 100_000, "large": "[1, 259]", "negative": "[1, -1]", "huge": f"[{10**30}]", "null": "null", "empty": ""}


@pytest.mark.parametrize("name", BAD)
def test_files_that_hold_no_ids(capsys, folder, name):
    path = folder / f"bad {name}"
    path.write_text(BAD[name])
    code, out, err = run(capsys, folder, "logits", "--tokens", path, "-o", "{}/none.npy")
    said = {"text": "neither JSON nor an array file of numpy: ", "deep": "neither JSON nor", "empty": "neither JSON nor",
            "large": "token 1 is 259, must be 0 to 258", "negative": "token 1 is -1, must be 0 to 258",
            "huge": f"token 0 is {10**30}, must be"}.get(name, "token ids must be a list of integers, at least one, or an object")
    assert code == 2 and out == "" and err.startswith(f"ggml-py: error: {path}: {said}") and err.count("\n") == 1
    assert not (folder / "none.npy").exists()


@pytest.mark.parametrize("argv, said", [
    (["perplexity", "--tokens", "{}/list.json", "-f", "{}/text"], "-f: --tokens is given too, one is enough"),
    (["perplexity", "--tokens", "{}/no"], "{}/no: no such file"),
    (["perplexity", "--json", "{}/no/x.json"], "argument --json: {}/no/x.json: {}/no is not a folder"),
    (["perplexity", "--tasks", "{}/text", "--tokens", "{}/list.json"], "--tokens: is of a text, and --tasks asks for tasks"),
    (["attest", "-p", "x", "--tokens", "{}/list.json", "-o", "{}/a"], "--tokens: is of a perplexity or of tasks, and -p asks"),
    (["attest", "-p", "x", "--prompt-tokens", "{}/list.json", "-o", "{}/a"], "-p: --prompt-tokens is given too"),
    (["attest", "--chat", "--prompt-tokens", "{}/list.json", "-o", "{}/a"], "--chat: --prompt-tokens is given too"),
    (["run", "-p", "x", "--prompt-tokens", "{}/list.json"], "-p: --prompt-tokens is given too"),
    (["run", "-f", "{}/text", "--prompt-tokens", "{}/list.json"], "-f: --prompt-tokens is given too"),
    (["run", "-cnv", "--json", "{}/x.json"], "--json: is of a prompt that is continued, not of a chat"),
    (["run", "--prompt-tokens", "{}/text"], "{}/text: neither JSON nor an array file of numpy"),
    (["logits", "--tokens", "{}/list.json"], "-o: is missing, and so is --json"),
    (["logits", "--tokens", "{}/list.json", "-o", "{}/x.npy", "--top", "2"], "--top: is of --json, which is not given")])
def test_refused(capsys, folder, argv, said):
    code, out, err = run(capsys, folder, *argv)
    said = f"ggml-py: error: {said.replace('{}', str(folder))}"
    assert code == 2 and out == "" and err.startswith(said) and err.count("\n") == 1
