"""Attestations: what they hold, what confirms them, what refuses them; the schema in docs/ says what the code checks."""
import copy
import hashlib
import io
import json
import random
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from fake_model import FakeTokenizer

from ggml_py.__main__ import main
from ggml_py.check.attestation import (COMMON, FORMAT, KINDS, SCHEMAS, NotConfirmed, Number, attest_generation, confirm,
                                       own_sha256, read_attestation, sampled, source_of, versions)
from ggml_py.backends.cpu import CPUBackend
from ggml_py.backends.cuda import driver_release
from ggml_py.base.errors import UserError
from ggml_py.files.gguf import GGUFFile
from ggml_py.files.hub import Pulled, record_of
from ggml_py.files.pull import file_sha256
from ggml_py.check.merkle import merkle_root
from ggml_py.engine.model import Model
from ggml_py.check.digest import LogitsDigest
from ggml_py.engine import windows as windows_module
from ggml_py.engine.sampling import Sampling
from ggml_py.engine.settings import Settings
from notices import without_notice
from places import ROOT, environment
from planted_faults import FaultyBackend, after, instead
from tiny_models import write_model

TEXT = bytes(np.random.default_rng(4).integers(97, 123, 300, np.uint8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, another one, a text, and attestations of a perplexity, of two generations and of an answer."""
    folder = tmp_path_factory.mktemp("attest")
    write_model(folder / "m.gguf", "llama", ("Q8_0",), n_vocab=259)
    write_model(folder / "other.gguf", "llama", ("Q8_0",), n_vocab=259, seed=1)
    (folder / "text").write_bytes(TEXT)
    (folder / "other").write_bytes(TEXT[:-1])
    assert attest(folder, "ppl.json", "-f", folder / "text", "-c", 64) == 0
    assert attest(folder, "greedy.json", "-p", "abc", "-n", 70) == 0
    assert attest(folder, "drawn.json", "-p", "abc", "-n", 40, "--temp", 2, "--seed", 5, "--top-k", 0, "-ctk", "q8_0", "-ub",
                  3) == 0
    drawn = "--temp", 2, "--seed", 5, "--top-k", 0
    assert attest(folder, "chat.json", "-p", "hi", "-n", 33, "--chat", "--date", "2031-12-24", *drawn) == 0
    (folder / "pulled.gguf").write_bytes((folder / "m.gguf").read_bytes())
    record = Pulled("me/m", "c" * 40, "m-Q8_0.gguf", "x", (folder / "m.gguf").stat().st_size, file_sha256(folder / "m.gguf"))
    record_of(folder / "pulled.gguf").write_text(json.dumps(asdict(record)))
    for name, of in OF_A_HUB.items():
        argv = [{"text": folder / "text"}.get(each, each) for each in of]
        assert attest(folder, f"{name}.json", *argv, model="pulled.gguf") == 0
    return folder


OF_A_HUB = {"pulled-ppl": ("-f", "text", "-c", 64), "pulled-greedy": ("-p", "abc", "-n", 3),
            "pulled-chat": ("-p", "hi", "-n", 3, "--chat")}


CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %} on {{ strftime_now('%d %b %Y') }}:"


def load(path, device, backend=CPUBackend):
    model = Model(GGUFFile.open(path), backend())
    model._tokenizer = FakeTokenizer(add_bos=True)
    model._tokenizer.chat_template, model._tokenizer.token_text = CHAT, lambda id: f"<{id}>"
    return model


def attest(folder, name, *argv, model="m.gguf") -> int:
    return main(["attest", "-m", str(folder / model), "-o", str(folder / name), *map(str, argv)], load)


def verify(capsys, folder, name, *argv, model="m.gguf", load=load):
    capsys.readouterr()
    path = folder / name
    text = [] if path.is_file() and b'"generation"' in path.read_bytes() else ["-f", folder / "text"]
    code = main(["verify", *map(str, ("-m", folder / model, *text, "--attestation", path, *argv))], load)
    out, err = capsys.readouterr()
    return code, out, without_notice(err)


def test_suppressed_tokens_are_not_attested(folder, capsys, monkeypatch):
    said = json.loads((folder / "greedy.json").read_bytes())["result"]["tokens"]
    monkeypatch.setattr(FakeTokenizer, "suppressed", frozenset(said[1:3]))
    assert attest(folder, "suppressed.json", "-p", "abc", "-n", 5) == 0
    others = json.loads((folder / "suppressed.json").read_bytes())["result"]["tokens"]
    assert others[0] == said[0] and not {*said[1:3]} & {*others}
    assert verify(capsys, folder, "suppressed.json")[0] == 0
    monkeypatch.undo()
    assert verify(capsys, folder, "suppressed.json")[0] == 1


def nudge(call):
    call.out.data[0, 3] = np.nextafter(call.out.data[0, 3], np.float32(np.inf))


# What they hold

def test_of_a_perplexity(folder):
    found = read_attestation(folder / "ppl.json")
    with load(folder / "m.gguf", "cpu") as model, model.new_context(n_ctx=64) as context:
        tokens = np.array(model.tokenizer.encode(TEXT.decode()), np.int32)
        expected = []
        for window in tokens[:len(tokens) // 64 * 64].reshape(-1, 64):
            digest = LogitsDigest()
            digest.update((context.clear(), context.decode([256, *window[1:]], logits="all"))[1][32:63])
            expected.append(digest.hexdigest())
    assert found["windows"] == expected and len(expected) == 4 and found["merkle_root"] == merkle_root(expected)
    assert found["text"] == hashlib.sha256(
        TEXT).hexdigest() and found["tokens"] == {"sha256": hashlib.sha256(tokens.tobytes()).hexdigest(), "n": 301}
    assert found["model"]["sha256"] == [hashlib.sha256((folder / "m.gguf").read_bytes()).hexdigest()]
    assert found["settings"] == {"n_ctx": 64, "n_chunks": 4, "type_k": "f16", "type_v": "f16", "add_bos": True}
    assert float.fromhex(found["result"]["ppl_hex"]) == pytest.approx(float(found["result"]["ppl"]), abs=1e-4)
    assert found["environment"]["device"] == "cpu"
    assert {"numpy", "numba", "python", "ggml-py", "gguf"} <= set(found["environment"]["versions"])


def test_versions_of_a_device(folder, capsys):
    """What a backend names beside the packages is in the file, and any names are read."""
    class Other(CPUBackend):
        driver_version = lambda self: "13.0"
        versions = lambda self: {"nvidia-driver": "580.159.04", "nvvm": "13.0.88"}
    argv = "attest", "-m", folder / "m.gguf", "-o", folder / "gpu.json", "-p", "abc", "-n", 2
    assert main([*map(str, argv)], lambda path, device: load(path, device, Other)) == 0
    environment = read_attestation(folder / "gpu.json")["environment"]
    assert environment["driver"] == "13.0"
    assert environment["versions"] == {**versions(), "nvidia-driver": "580.159.04", "nvvm": "13.0.88"}
    assert verify(capsys, folder, "gpu.json")[0] == 0


def test_devices_of_a_split_model(folder, capsys):
    """All that have a part are named, that of the output first; it is confirmed where all is on one device."""
    def split(path, device, placement):
        model = Model(GGUFFile.open(path), CPUBackend(), CPUBackend(device="cpu:1"), placement=placement)
        model._tokenizer = FakeTokenizer(add_bos=True)
        return model
    argv = "attest", "-m", folder / "m.gguf", "-o", folder / "split.json", "-p", "abc", "-n", 2, "--device", "cpu:1", "-ngl", 1
    assert main([*map(str, argv)], split) == 0
    environment = read_attestation(folder / "split.json")["environment"]
    assert environment["device"] == "cpu:1/cpu" and environment["device_name"] == CPUBackend().name
    assert verify(capsys, folder, "split.json")[0] == 0


@pytest.mark.parametrize("says, release",
                         [("echo 580.159.04; echo 580.159.04", "580.159.04"), ("true", "none"), ("echo no; exit 9", "none"),
                          (None, "none")])
def test_the_release_of_the_driver(tmp_path, monkeypatch, says, release):
    if says:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_release() == release


def test_of_a_generation(folder):
    greedy, drawn = (read_attestation(folder / f"{name}.json") for name in ("greedy", "drawn"))
    assert len(greedy["result"]["tokens"]) == 70 and len(greedy["windows"]) == 3 and len(drawn["windows"]) == 2
    assert greedy["settings"]["prompt"] == drawn["settings"]["prompt"] == [256, *b"abc"]
    assert greedy["result"]["tokens"][:40] != drawn["result"]["tokens"] and drawn["settings"]["seed"] == 5


def test_of_an_answer(folder):
    """With the messages and the date that the template made the prompt of. The others' schema has the number that it had."""
    chat = read_attestation(folder / "chat.json")
    assert chat["schema"] == 2
    assert chat["settings"]["chat"] == {"messages": [{"role": "user", "content": "hi"}], "date": "2031-12-24"}
    assert chat["settings"]["prompt"] == [256, *b"<user>hi on 24 Dec 2031:"]
    assert [read_attestation(folder / f"{name}.json")["schema"] for name in ("ppl", "greedy", "drawn")] == [1, 1, 1]


def test_of_a_model_out_of_a_hub(folder, capsys):
    """With what its record says. The same file elsewhere confirms it; a record of other bytes is none."""
    found = {name: read_attestation(folder / f"{name}.json") for name in OF_A_HUB}
    assert [each["schema"] for each in found.values()] == [3, 3, 4]
    for each in found.values():
        assert each["model"]["source"] == {"repo": "me/m", "revision": "c" * 40, "files": ["m-Q8_0.gguf"]}
    assert found["pulled-ppl"]["windows"] == read_attestation(folder / "ppl.json")["windows"]
    code, out, _ = verify(capsys, folder, "pulled-greedy.json")
    assert code == 0 and out.startswith("confirmed: ")
    _, _, err = verify(capsys, folder, "pulled-greedy.json", model="other.gguf")
    assert f"('pulled.gguf' of 'me/m' at '{'c' * 40}')" in err
    with load(folder / "pulled.gguf", "cpu") as model:
        for sha256, n in (["0" * 64], 1), (found["pulled-ppl"]["model"]["sha256"], 2):
            assert source_of(model.file.paths * n, sha256) is None


LATER = """
import datetime, sys, time
from pathlib import Path
real, localtime, shift = time.time, time.localtime, %d
time.time = lambda: real() + shift
time.localtime = lambda *at: localtime(*at or [time.time()])
class Later(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time())
datetime.datetime = Later
from test_attest import attest
sys.exit(attest(Path(sys.argv[1]), sys.argv[2], "-p", "hi", "-n", 2, "--chat"))
"""


def test_the_clock_changes_nothing(folder, monkeypatch, capsys):
    """Two attestations of an answer, days apart by every clock that Python has, are one."""
    made = []
    for shift in 0, 10**6:
        result = subprocess.run([sys.executable, "-c", LATER % shift, str(folder), "clock.json"],
                                env=environment(Path(__file__).parent), capture_output=True, text=True)
        assert result.returncode == 0, result
        assert "attest: the chat template asks for the date and is told 2026-01-01 (--date)\n" in result.stderr
        made.append(read_attestation(folder / "clock.json"))
    assert made[0] == made[1] and bytes(made[0]["settings"]["prompt"][1:]) == b"<user>hi on 01 Jan 2026:"


# Confirmed

@pytest.mark.parametrize("name, said", [
    ("ppl", "all 4 windows; PPL "), ("greedy", "all 3 windows; 70 tokens behind a prompt of 4"),
    ("drawn", "all 2 windows; 40 tokens"),
    ("chat", "all 2 windows; 33 tokens behind a prompt of 25")])
def test_confirmed(folder, capsys, name, said):
    code, out, _ = verify(capsys, folder, f"{name}.json")
    assert code == 0 and out.startswith(
        f"confirmed: {said}") and out.count("\n") == 1 and "made on" in out and "computed on" in out


def test_confirmed_beside_a_device(folder, capsys, monkeypatch):
    """Windows are hashed while others are decoded: the same line, and a window of other bits is named."""
    expected = verify(capsys, folder, "ppl.json")[:2]
    monkeypatch.setattr(windows_module, "is_elsewhere", lambda model: True)
    assert verify(capsys, folder, "ppl.json")[:2] == expected
    faulty = lambda path, device: load(path, device, lambda: FaultyBackend({"mul_mat": after(nudge)}))
    code, out, _ = verify(capsys, folder, "ppl.json", load=faulty)
    assert code == 1 and out.startswith("not confirmed: window 1 of 4 gave ")


@pytest.mark.parametrize("name", ["ppl", "greedy"])
def test_confirmed_by_sample(folder, capsys, name):
    seen = set()
    for _ in range(12):
        code, out, _ = verify(capsys, folder, f"{name}.json", "--sample", 1)
        assert code == 0 and out.startswith("confirmed: by sample: window ")
        seen.add(re.search(r"window (\d) of", out)[1])
    assert len(seen) > 1
    assert verify(capsys, folder, f"{name}.json", "--sample", 99)[1].startswith("confirmed: all")


@pytest.mark.parametrize("name, sample, said", [
    ("ppl", [1, 3], "4; 64 tokens each, no PPL; root"), ("greedy", [0, 2], "3; 38 of 70 tokens behind a prompt of 4; root")])
def test_a_sample_claims_no_more_than_it_computed(folder, name, sample, said):
    with load(folder / "m.gguf", "cpu") as model:
        out = confirm(read_attestation(folder / f"{name}.json"), model, TEXT.decode(), sample, io.StringIO())
    assert said in out and "said to be made on" in out


def test_a_generation_that_ends(folder):
    """The model's third token ends it. Behind it, nothing was chosen: an attestation that goes on, or that stops before it,
    is none."""
    with load(folder / "m.gguf", "cpu") as model:
        make = lambda n: attest_generation(model, [1, 2, 3], n, Sampling(), Settings(), None)
        again = lambda document: confirm(document, model, None, sampled(document, None), None)
        longer = make(10)
        ends = longer["result"]["tokens"][2]
        model.tokenizer.is_end_of_generation = ends.__eq__
        document = make(10)
        n = longer["result"]["tokens"].index(ends) + 1
        assert len(document["result"]["tokens"]) == n and again(document).startswith("confirmed: the only window")
        with pytest.raises(NotConfirmed, match=f"10 new tokens attested, must be {n}: "):
            again(longer)
        with pytest.raises(NotConfirmed, match=f"{n - 1} new tokens attested, must be 10: "):
            again({**make(n - 1), "settings": {**document["settings"], "n_predict": 10}})


def test_a_sample_is_computed_alone(folder):
    """Two windows of four: a model that counts is asked for no others."""
    document, text = read_attestation(folder / "ppl.json"), TEXT.decode()
    with load(folder / "m.gguf", "cpu") as model:
        rows = []
        new_context, model.new_context = model.new_context, lambda **settings: rows.append(
            settings["n_seq_max"]) or new_context(**settings)
        assert "windows 2, 4 of 4" in confirm(document, model, text, [1, 3], io.StringIO())
    assert rows == [2]


# Not confirmed: exit code 1

@pytest.mark.parametrize("name", ["ppl", "greedy", "drawn"])
def test_other_bits(folder, capsys, name):
    faulty = lambda path, device: load(path, device, lambda: FaultyBackend({"mul_mat": after(nudge)}))
    code, out, _ = verify(capsys, folder, f"{name}.json", load=faulty)
    assert code == 1 and re.fullmatch(r"not confirmed: window 1 of \d gave [0-9a-f]{64}, attested [0-9a-f]{64}\n", out)


def resealed(folder, name, change):
    """The attestation with a change, its sha256 and root made anew: what a forger would do."""
    document = json.loads((folder / name).read_text())
    change(document)
    document["merkle_root"] = merkle_root(document["windows"])
    document["sha256"] = own_sha256(document)
    (folder / "changed.json").write_text(json.dumps(document))
    return "changed.json"


@pytest.mark.parametrize("name, change, said", [
    ("ppl.json", lambda d: d["windows"].__setitem__(2, "0" * 64), "window 3 of 4 gave"),
    ("ppl.json", lambda d: d["result"].update(ppl_hex=(1.5).hex()), "the windows are those attested and give ppl_hex 0x"),
    ("ppl.json", lambda d: d["result"].update(ppl_hex="0x\x1b[31m\nconfirmed: all"), ", attested '0x\\x1b[31m\\nconfirmed: all'"),
    ("drawn.json", lambda d: d["settings"].update(seed=6), "the logits of window 1 are those attested and choose ["),
    ("drawn.json", lambda d: d["result"].update(text="the moon\n"), "attested 'the moon\\n'"),
    ("drawn.json", lambda d: d["result"].update(text=d["result"]["text"] + "!"), "with '', attested '!'"),
    ("drawn.json", lambda d: d["settings"].update(n_predict=41),
     "40 new tokens attested, must be 41: to the first that ends the text, 41 at most"),
    ("drawn.json", lambda d: d["settings"].update(n_predict=7),
     "40 new tokens attested, must be 7: to the first that ends the text, 7 at most"),
])
def test_forged(folder, capsys, name, change, said):
    code, out, _ = verify(capsys, folder, resealed(folder, name, change))
    assert code == 1 and out.startswith("not confirmed: ") and said in out and out[:-1].isprintable()


def test_a_name_says_nothing_of_its_own(folder, capsys):
    """Neither a line nor what a terminal obeys: names of the maker are quoted."""
    name = "x\nconfirmed: y\x1b[31m"
    code, out, _ = verify(capsys, folder, resealed(folder, "ppl.json", lambda d: d["environment"].update(device_name=name)))
    assert code == 0 and out[:-1].isprintable() and f"said to be made on {name!r} ('cpu'), computed on" in out
    code, out, err = verify(capsys, folder,
                            resealed(folder, "ppl.json", lambda d: d["environment"]["versions"].update({name: 1})))
    assert code == 2 and out == "" and err[:-1].isprintable(
        ) and "environment.versions.x\\nconfirmed: y\\x1b[31m is 1, must be str" in err


def test_a_false_field_is_named(folder, capsys):
    _, out, _ = verify(capsys, folder, resealed(folder, "ppl.json", lambda d: d["result"].update(ppl="1.0000")))
    assert re.fullmatch(r"not confirmed: the windows are those attested and give ppl \d+\.\d{4}, attested '1.0000'\n", out)


# Refused: exit code 2 and one line

@pytest.mark.parametrize("change, said", [
    (lambda d: d.update(schema=9), "schema is 9, this version reads 1, 2, 3, 4, 5, 6, 7, 8"),
    (lambda d: d.update(schema=True), "schema is True, this version reads 1, 2, 3, 4, 5, 6, 7, 8"),
    (lambda d: d.update(schema=2), "kind is 'perplexity', allowed: generation"),
    (lambda d: d.update(schema=3), "model has name, architecture, sha256, must have name, architecture, sha256, source"),
    (lambda d: d.update(numerics=2), "numerics version is 2, this is 1: other bits by definition"),
    (lambda d: d.update(kind="training"), "kind is 'training', allowed: perplexity, generation"),
    (lambda d: d.update(format="x"), "is not an attestation"),
    (lambda d: (d.pop("windows"), d.update(windows=["1" * 64]), d["settings"].pop("n_ctx")), "damaged: settings has n_chunks"),
    (lambda d: d.update(kind=["perplexity"]), "kind is a list, allowed: perplexity, generation"),
    (lambda d: d["settings"].update(n_ctx=0), "damaged: settings.n_ctx is 0, must be int, 3 to 9223372036854775807"),
    (lambda d: d["settings"].update(n_chunks=-1), "damaged: settings.n_chunks is -1, must be int, 1 to"),
    (lambda d: d["tokens"].update(n=True), "damaged: tokens.n is True, must be int"),
    (lambda d: d["model"].update(sha256=[]), "damaged: model.sha256 is a list, must be a list of at least one"),
    (lambda d: d["environment"]["versions"].update(numpy=[2]), "damaged: environment.versions.numpy is a list, must be str"),
    (lambda d: d["model"].update(sha256=["xyz"]), "damaged: model.sha256[0] is 'xyz', must be a sha256 in hex"),
    (lambda d: d["cannot_matter"].update(graphs=1), "damaged: cannot_matter.graphs is 1, must be bool"),
    (lambda d: d.update(extra=1), "damaged: it has format"),
    (lambda d: d["tokens"].update(sha256="0" * 64), "tokens: the text gives 301 other tokens than attested, 301"),
    (lambda d: d["model"].update(sha256=["0" * 64]), "another model than attested"),
    (lambda d: d.update(tokenizer="0" * 64), "another tokenizer than attested"),
    (lambda d: d.update(text="0" * 64), "another text than attested"),
    (lambda d: d["windows"].pop(), "windows: 3 attested, found 4"),
    (lambda d: d["settings"].update(n_chunks=99), "settings.n_chunks: 99 attested, found 4"),
    (lambda d: d["settings"].update(add_bos=False), "settings.add_bos: False attested, found True"),
    (lambda d: d["tokens"].update(n=7), "tokens.n: 7 attested, found 301"),
    (lambda d: d["model"].update(architecture="zzz"), "model.architecture: 'zzz' attested, found 'llama'"),
])
def test_refused(folder, capsys, change, said):
    code, out, err = verify(capsys, folder, resealed(folder, "ppl.json", change))
    assert code == 2 and out == "" and said in err and err.count("\n") == 1


@pytest.mark.parametrize("change, said", [
    (dict(seed=-1), "seed is -1, must be int, 0 to"), (dict(seed=10**40), "seed is 1000"),
    (dict(min_p=5), "min_p is 5, must be float, 0 to 1"),
    (dict(top_p=-0.5), "top_p is -0.5, must be float, 0 to 1"), (dict(temperature=10**400), "temperature is 1000"),
    (dict(min_p=10**400), "min_p is 1000"),
    (dict(temperature=float("nan")), "temperature is nan, must be float, 0 to 1000000.0"),
    (dict(top_k=-3), "top_k is -3, must be int, 0 to"),
    (dict(n_predict=0), "n_predict is 0, must be int, 1 to"),
    (dict(prompt=[]), "prompt is a list, must be a list of at least one"),
    (dict(prompt=[1, 10**30]), "prompt[1] is 1000"), (dict(prompt=[-1]), "prompt[0] is -1, must be int, 0 to 2147483647")])
def test_refused_settings_of_a_generation(folder, capsys, change, said):
    code, out, err = verify(capsys, folder, resealed(folder, "drawn.json", lambda d: d["settings"].update(change)))
    assert code == 2 and out == "" and f"damaged: settings.{said}" in err and err.count("\n") == 1


def test_settings_that_are_not_attested(folder):
    """What could not be read again is refused before anything is computed."""
    with load(folder / "m.gguf", "cpu") as model:
        for prompt, n, choice, said in (([1, 2, 3], 0, Sampling(), "n_predict is 0, must be int, 1 to"),
                                        ([], 1, Sampling(), "prompt is a list, must be a list of"),
                                        ([1, 2, 3], 1, Sampling(seed=np.int64(7)), "seed is np.int64(7), must be int")):
            with pytest.raises(UserError, match=f"^attest: settings.{re.escape(said)}"):
                attest_generation(model, prompt, n, choice, Settings(), None)


# what only the maker knows, and the text, which the command looks at
UNCHECKED = {"environment", "cannot_matter", ("model", "name"), ("text",)}
VALUES = [None, True, 0, 3, -1, 2.5, "x", "", [], {},
          [None], {"a": 1}, "0" * 64, ["0" * 64], 10**40, 10**400, float("nan"), float("inf"), [10**30], "\ud800\n\x1b[31m",
          {"a\nb\x1b": 1}]


def places(value, at=()):
    """Of all that is in a document: the first two of lists."""
    for key in value if isinstance(value, dict) else range(min(2, len(value))) if isinstance(value, list) else ():
        yield (*at, key)
        yield from places(value[key], (*at, key))


@pytest.mark.parametrize("change, said", [
    (lambda chat: chat.update(date="2031-12-25"),
     "settings.chat: its messages give 25 other tokens on 2031-12-25 than attested as prompt, 25"),
    (lambda chat: chat["messages"][0].update(content="ho"), "settings.chat: its messages give 25 other tokens on 2031-12-24"),
    (lambda chat: chat["messages"].append({"role": "user", "content": ""}), "settings.chat: its messages give 31 other tokens"),
    (lambda chat: chat.update(date="2031-02-30"), "damaged: settings.chat.date is '2031-02-30', must be a date, YYYY-MM-DD"),
    (lambda chat: chat.update(date="2031-2-3"), "damaged: settings.chat.date is '2031-2-3', must be a date"),
    (lambda chat: chat.update(date=20310203), "damaged: settings.chat.date is 20310203, must be a date"),
    (lambda chat: chat.update(messages=[]), "damaged: settings.chat.messages is a list, must be a list of at least one"),
    (lambda chat: chat["messages"][0].pop("role"), "damaged: settings.chat.messages[0] has content, must have role, content"),
])
def test_refused_chats(folder, capsys, change, said):
    code, out, err = verify(capsys, folder, resealed(folder, "chat.json", lambda d: change(d["settings"]["chat"])))
    assert code == 2 and out == "" and said in err and err.count("\n") == 1


@pytest.mark.parametrize("name", ["ppl.json", "drawn.json", "chat.json"])
def test_every_value_by_every_type(folder, name):
    """Sealed again, each is refused in one line or computed: no traceback."""
    document, path, n = json.loads((folder / name).read_text()), folder / "changed.json", 0
    with load(folder / "m.gguf", "cpu") as model:
        for place in places(document):
            for value in VALUES:
                changed = copy.deepcopy(document)
                inner = changed
                for key in place[:-1]:
                    inner = inner[key]
                inner[place[-1]] = value
                with suppress(TypeError, ValueError):
                    changed["merkle_root"] = value if place == ("merkle_root",) else merkle_root(changed["windows"])
                changed["sha256"] = value if place == ("sha256",) else own_sha256(changed)
                path.write_text(json.dumps(changed))
                refused = False
                try:
                    found = read_attestation(path)
                    said = confirm(found, model, TEXT.decode(), sampled(found, None), io.StringIO())
                except (UserError, NotConfirmed) as error:
                    said, refused = str(error), True
                assert said.isprintable(), (place, value)
                assert refused or place[0] in UNCHECKED or place in UNCHECKED or changed == document, (place, value)
                n += 1
    assert n > 500


@pytest.mark.parametrize("data", ['{"format": %s}', '{"format": "ggml-py attestation", "schema": %s}',
                                  '{"format": "ggml-py attestation", "schema": 1, "kind": %s}'], ids=["format", "schema", "kind"])
def test_deep_nesting(folder, capsys, data):
    for depth in 100, 300, 900, 1000, 3000, 100000:
        (folder / "changed.json").write_text(data % ("[" * depth + "]" * depth))
        code, out, err = verify(capsys, folder, "changed.json")
        assert code == 2 and out == "" and err.count("\n") == 1


def test_damage(folder, capsys):
    """Any change of a byte that changes the meaning is refused or not confirmed; nothing passes, nothing crashes."""
    data, rng = (folder / "ppl.json").read_bytes(), random.Random(3)
    meaning = json.loads(data)
    for _ in range(150):
        i = rng.randrange(len(data))
        changed = data[:i] + bytes([rng.randrange(256)]) + data[i + rng.randrange(2):]
        (folder / "changed.json").write_bytes(changed)
        try:
            assert json.loads(changed) == meaning
        except ValueError:
            pass
        except AssertionError:
            pass
        else:
            continue
        with pytest.raises(UserError) as error:
            read_attestation(folder / "changed.json")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("data, said", [
    (b"", "damaged: not JSON"), (b"[]", "is not an attestation"), (b"[" * 100000, "damaged: not JSON"),
    (b"\xff", "damaged: not JSON")])
def test_no_attestation(folder, capsys, data, said):
    (folder / "changed.json").write_bytes(data)
    code, out, err = verify(capsys, folder, "changed.json")
    assert code == 2 and out == "" and said in err and err.count("\n") == 1


def test_another_model_or_text(folder, capsys):
    code, _out, err = verify(capsys, folder, "ppl.json", model="other.gguf")
    assert code == 2 and "other.gguf: another model than attested" in err
    code, _out, err = verify(capsys, folder, "ppl.json", "-f", folder / "other")
    assert code == 2 and "other: another text than attested" in err
    code, _out, err = verify(capsys, folder, "missing.json")
    assert code == 2 and "missing.json: no such file" in err
    assert main(["verify", "--sample", "3"]) == 2


def test_the_file_of_an_attestation_is_checked_first(folder, capsys):
    for name, said in ("none/x.json", f"{folder / 'none'} is not a folder"), (".", f"{folder}: is a folder, expected a file"):
        code = main(["attest", "-m", str(folder / "m.gguf"), "-o", str(folder / name)], None)
        out, err = capsys.readouterr()
        assert code == 2 and out == "" and said in err and err.count("\n") == 1


def test_an_empty_prompt_is_a_prompt(folder, capsys):
    """As in `run`: one without tokens is refused, one of a BOS alone is continued."""
    def without_bos(path, device):
        model = load(path, device)
        model.tokenizer.add_bos = False
        return model
    code = main(["attest", "-m", str(folder / "m.gguf"), "-o", str(folder / "empty.json"), "-p", ""], without_bos)
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and err == "ggml-py: error: -p: the prompt has no tokens\n" and not (
        folder / "empty.json").exists()
    assert attest(folder, "empty.json", "-p", "", "-n",
                  2) == 0 and read_attestation(folder / "empty.json")["settings"]["prompt"] == [256]


@pytest.mark.parametrize("name, argv, said", [
    *(("ppl.json", argv, f"{argv[0]}: does not apply to an --attestation, which says what to compute; allowed: -m, -hf, -hff, "
       "--revision, --sha256, --token, --offline, -f, --tokens, --devices, -t, -fa, -lm, --no-mmap, --mmap, --mlock, "
       "--numa, --fit, -fitt, -v, -lv, --attestation, --sample, --json")
      for argv in (["--axes", "rerun"], ["--reruns", "2"], ["--dump", "{}/dump"], ["-c", "512"], ["--ctx-size", "7"],
                   ["--chunks", "4"], ["-ctk", "f16"],
                   ["--cache-type-v", "f32"], ["--no-bisect"])),
    ("ppl.json", ["--devices", "cpu,cuda:0"], "--devices: an attestation is computed on one device, got cpu, cuda:0"),
    ("drawn.json", ["-f", "{}/text"], "-f: {}/drawn.json is of a generation, whose prompt is in it"),
])
def test_options_that_do_not_apply_to_an_attestation(folder, capsys, name, argv, said):
    code, out, err = verify(capsys, folder, name, *(each.replace("{}", str(folder)) for each in argv))
    assert code == 2 and out == "" and err == f"ggml-py: error: {said.replace('{}', str(folder))}\n"


@pytest.mark.parametrize("argv, said", [
    *((["-p", "abc", *argv], f"{argv[0]}: is of a perplexity or of tasks, and -p asks for a generation")
      for argv in (["-c", "64"], ["--chunks", "-1"], ["--file", "x"], ["--hellaswag", "x"], ["--winogrande-tasks", "3"])),
    *((argv, f"{argv[0]}: is of a generation, which -p asks for; without it a perplexity is attested")
      for argv in (["--date", "today"],
                   ["--temp", "0"], ["--seed", "1"], ["--top-k", "1"], ["--top-p", "1"], ["--min-p", "0"], ["--chat"],
                   ["-n", "128"], ["--n-predict", "1"])),
])
def test_options_that_do_not_apply_to_what_is_attested(folder, capsys, argv, said):
    code, (out, err) = attest(folder, "none.json", *argv), capsys.readouterr()
    assert code == 2 and out == "" and err == f"ggml-py: error: {said}\n" and not (folder / "none.json").exists()


def test_json_of_a_confirmation(folder, capsys):
    code, out, _ = verify(capsys, folder, "ppl.json", "--sample", 2, "--json", folder / "r.json")
    found, document = (json.loads((folder / name).read_text()) for name in ("r.json", "ppl.json"))
    assert code == 0 and found.pop("message") + "\n" == out and f"windows {', '.join(map(str, found['windows']))} of 4" in out
    assert len(found.pop("windows")) == 2 and found.pop("device_name")
    assert found == {"numerics": 1, "model": str(folder / "m.gguf"), "device": "cpu", "attestation": str(folder / "ppl.json"),
                     "kind": "perplexity",
                     "sha256": document["sha256"], "n_windows": 4, "confirmed": True}
    faulty = lambda path, device: load(path, device, lambda: FaultyBackend({"mul_mat": after(nudge)}))
    code, out, _ = verify(capsys, folder, "drawn.json", "--json", folder / "r.json", load=faulty)
    found = json.loads((folder / "r.json").read_text())
    assert code == 1 and not found["confirmed"] and found["windows"] == [1, 2] and found["message"] + "\n" == out
    late = lambda path, device: (folder / "late.json").mkdir() or faulty(path, device)
    code, out, err = verify(capsys, folder, "drawn.json", "--json", folder / "late.json", load=late)
    assert code == 1 and out.startswith("not confirmed: window 1 of 2")
    assert err == f"ggml-py: error: {folder / 'late.json'}: cannot be written: Is a directory\n"


def test_own_check_of_a_generation(folder):
    """Logits that depend on how the text was cut are not attested."""
    def few(call):
        if call.out.n_rows == 1:
            call.out.data[0] *= -1
    with load(folder / "m.gguf", "cpu", lambda: FaultyBackend({"mul_mat": after(few)})) as model, \
            pytest.raises(RuntimeError, match="chosen from other logits"):
        attest_generation(model, [1, 2, 3], 10, Sampling(), Settings(), io.StringIO())


def test_ties_that_are_broken_by_another_rule(folder):
    """Logits that are equal in pairs, and an argmax that takes the last of them: the choice of the finished text is another
    one."""
    def tied(call):
        out = call.out.data
        if out.shape[1] == 259:  # logits: K and V are products of their own only where no query is computed
            out[:, 1::2] = out[:, :-1:2]

    def last(call):
        call.out.data[:] = call.x.n_cols - 1 - call.x.data[:, ::-1].argmax(1)
    prompt, log = [1, 2, 3], io.StringIO()

    def backend(**twins):
        return FaultyBackend({"mul_mat": after(tied), **twins})
    with load(folder / "m.gguf", "cpu", backend) as model:
        assert len(attest_generation(model, prompt, 5, Sampling(), Settings(), log)["result"]["tokens"]) == 5
    with load(folder / "m.gguf", "cpu", lambda: backend(argmax=instead(last))) as model, \
            pytest.raises(RuntimeError, match="chosen from other logits"):
        attest_generation(model, prompt, 5, Sampling(), Settings(), log)


# The schema

def conforms(value, schema) -> bool:
    """The part of JSON Schema that docs/attestation.schema.json uses."""
    if "oneOf" in schema:
        return sum(conforms(value, each) for each in schema["oneOf"]) == 1
    if "const" in schema and (value != schema["const"] or type(value) is not type(schema["const"])):
        return False
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "number": (int, float)}
    if "type" in schema and (not isinstance(value, kinds[schema["type"]])
                             or isinstance(value, bool) != (schema["type"] == "boolean")):
        return False
    if "pattern" in schema and not re.search(schema["pattern"], value):
        return False
    if "minimum" in schema and not schema["minimum"] <= value <= schema["maximum"]:
        return False
    if isinstance(value, list):
        return len(value) >= schema.get("minItems", 0) and all(conforms(each, schema["items"]) for each in value)
    if isinstance(value, dict):
        properties, more = schema.get("properties", {}), schema.get("additionalProperties", {})
        return set(schema.get("required", ())) <= set(value) and all(
            conforms(each, properties[key]) if key in properties else more is not False and conforms(each, more)
            for key, each in value.items())
    return True


def test_the_schema(folder):
    schema = json.loads((ROOT / "docs" / "attestation.schema.json").read_text())
    assert schema["$schema"].endswith("2020-12/schema") and schema["version"] == SCHEMAS[-1]
    names = "ppl", "greedy", "drawn", "chat", *OF_A_HUB
    documents = {name: json.loads((folder / f"{name}.json").read_text()) for name in names}
    for document in documents.values():
        assert conforms(document, schema)
        for key in document:
            less = {k: v for k, v in document.items() if k != key}
            assert not conforms(less, schema), key
        for path in ("model",), ("settings",), ("result",), ("cannot_matter",), ("environment",), ("tokens",):
            changed = copy.deepcopy(document)
            changed[path[0]]["more"] = 1
            assert not conforms(changed, schema), path
    of = lambda each: tuple(each["properties"][key]["const"] for key in ("kind", "schema"))
    assert sorted(map(of, schema["oneOf"])) == sorted(KINDS)
    for (kind, number), shape in KINDS.items():
        one, = [each for each in schema["oneOf"] if of(each) == (kind, number)]
        constants = {"format": {"const": FORMAT}, "schema": {"const": number}, "kind": {"const": kind}}
        assert undescribed(one) == schema_of({**COMMON, **shape}, constants)


def schema_of(shape, constants=None) -> dict:
    """What the schema must say of a shape of `attestation.COMMON`, descriptions apart."""
    if shape == "sha256":
        return {"type": "string", "pattern": "^[0-9a-f]{64}$"}
    if shape == "date":
        return {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"}
    if isinstance(shape, Number):
        return {**schema_of(shape.type), "minimum": shape.least, "maximum": shape.most}
    if isinstance(shape, list):
        return {"type": "array", "items": schema_of(shape[0]), **({} if ... in shape else {"minItems": 1})}
    if isinstance(shape, dict) and ... in shape:
        return {"type": "object", "additionalProperties": schema_of(shape[...])}
    if isinstance(shape, dict):
        properties = {key: (constants or {}).get(key) or schema_of(each) for key, each in shape.items()}
        return {"type": "object", "properties": properties, "required": sorted(shape), "additionalProperties": False}
    return {"type": {str: "string", int: "integer", bool: "boolean", float: "number"}[shape]}


def undescribed(schema):
    """Without descriptions, what is required in alphabetic order."""
    if not isinstance(schema, dict):
        return schema
    return {key: sorted(value) if key == "required" else undescribed(value) for key, value in schema.items()
            if key != "description"}
