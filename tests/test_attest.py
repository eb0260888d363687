"""Attestations: what they hold, what confirms them, what refuses them; the schema in docs/ says what the code checks."""
import copy
import hashlib
import json
import random
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from fake_model import FakeTokenizer

from ggml_py.__main__ import main
from ggml_py.attestation import COMMON, KINDS, SCHEMA, attest_generation, confirm, own_sha256, read_attestation
from ggml_py.backends.cpu import CPUBackend
from ggml_py.errors import UserError
from ggml_py.gguf_file import GGUFFile
from ggml_py.kernels.cpu.mul_mat import mul_mat
from ggml_py.merkle import merkle_root
from ggml_py.model import Model
from ggml_py.perplexity import LogitsDigest, Settings
from ggml_py.sampling import Sampling
from planted_faults import FaultyBackend, after, made
from tiny_models import write_model

ROOT = Path(__file__).parent.parent
TEXT = bytes(np.random.default_rng(4).integers(97, 123, 300, np.uint8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, another one, a text, and attestations of a perplexity and of two generations."""
    folder = tmp_path_factory.mktemp("attest")
    write_model(folder / "m.gguf", "llama", ("Q8_0",), n_vocab=259)
    write_model(folder / "other.gguf", "llama", ("Q8_0",), n_vocab=259, seed=1)
    (folder / "text").write_bytes(TEXT)
    (folder / "other").write_bytes(TEXT[:-1])
    assert attest(folder, "ppl.json", "-f", folder / "text", "-c", 64) == 0
    assert attest(folder, "greedy.json", "-p", "abc", "-n", 70) == 0
    assert attest(folder, "drawn.json", "-p", "abc", "-n", 40, "--temp", 2, "--seed", 5, "--top-k", 0, "-ctk", "q8_0", "-ub", 3) == 0
    return folder


def load(path, device, backend=CPUBackend):
    model = Model(GGUFFile.open(path), backend())
    model._tokenizer = FakeTokenizer(add_bos=True)
    return model


def attest(folder, name, *argv) -> int:
    return main(["attest", "-m", str(folder / "m.gguf"), "-o", str(folder / name), *map(str, argv)], load)


def verify(capsys, folder, name, *argv, model="m.gguf", load=load):
    capsys.readouterr()
    code = main(["verify", "-m", str(folder / model), "-f", str(folder / "text"), "--attestation", str(folder / name), *map(str, argv)], load)
    return code, *capsys.readouterr()


def nudge(*operands):
    operands[-1][0, 3] = np.nextafter(operands[-1][0, 3], np.float32(np.inf))


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
    assert found["text"] == hashlib.sha256(TEXT).hexdigest() and found["tokens"] == {"sha256": hashlib.sha256(tokens.tobytes()).hexdigest(), "n": 301}
    assert found["model"]["sha256"] == [hashlib.sha256((folder / "m.gguf").read_bytes()).hexdigest()]
    assert found["settings"] == {"n_ctx": 64, "n_chunks": 4, "type_k": "f16", "type_v": "f16", "add_bos": True}
    assert float.fromhex(found["result"]["ppl_hex"]) == pytest.approx(float(found["result"]["ppl"]), abs=1e-4)
    assert found["environment"]["device"] == "cpu" and {"numpy", "numba", "python", "ggml-py"} <= set(found["environment"]["versions"])


def test_of_a_generation(folder):
    greedy, drawn = (read_attestation(folder / f"{name}.json") for name in ("greedy", "drawn"))
    assert len(greedy["result"]["tokens"]) == 70 and len(greedy["windows"]) == 3 and len(drawn["windows"]) == 2
    assert greedy["settings"]["prompt"] == drawn["settings"]["prompt"] == [256, *b"abc"]
    assert greedy["result"]["tokens"][:40] != drawn["result"]["tokens"] and drawn["settings"]["seed"] == 5


# Confirmed

@pytest.mark.parametrize("name, said", [
    ("ppl", "all 4 windows; PPL "), ("greedy", "all 3 windows; 70 tokens behind a prompt of 4"), ("drawn", "all 2 windows; 40 tokens")])
def test_confirmed(folder, capsys, name, said):
    code, out, _ = verify(capsys, folder, f"{name}.json")
    assert code == 0 and out.startswith(f"confirmed: {said}") and out.count("\n") == 1 and "made on" in out and "computed on" in out


@pytest.mark.parametrize("name", ["ppl", "greedy"])
def test_confirmed_by_sample(folder, capsys, name):
    seen = set()
    for _ in range(12):
        code, out, _ = verify(capsys, folder, f"{name}.json", "--sample", 1)
        assert code == 0 and out.startswith("confirmed: by sample: window ")
        seen.add(re.search(r"window (\d) of", out)[1])
    assert len(seen) > 1
    assert verify(capsys, folder, f"{name}.json", "--sample", 99)[1].startswith("confirmed: all")


def test_a_sample_is_computed_alone(folder):
    """Two windows of four: a model that counts is asked for no others."""
    document, text = read_attestation(folder / "ppl.json"), TEXT.decode()
    with load(folder / "m.gguf", "cpu") as model:
        rows = []
        new_context, model.new_context = model.new_context, lambda **settings: rows.append(settings["n_seq_max"]) or new_context(**settings)
        assert "windows 2, 4 of 4" in confirm(document, model, text, 2, open("/dev/null", "w"), type("R", (), {"sample": lambda self, of, n: [3, 1]})())
    assert rows == [2]


# Not confirmed: exit code 1

@pytest.mark.parametrize("name", ["ppl", "greedy", "drawn"])
def test_other_bits(folder, capsys, name):
    faulty = lambda path, device: load(path, device, lambda: FaultyBackend({"mul_mat": made(after(nudge))}))
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
    ("ppl.json", lambda d: d["result"].update(ppl_hex=(1.5).hex()), "the windows are those attested and give PPL 0x"),
    ("drawn.json", lambda d: d["settings"].update(seed=6), "the logits of window 1 are those attested and choose ["),
])
def test_forged(folder, capsys, name, change, said):
    code, out, _ = verify(capsys, folder, resealed(folder, name, change))
    assert code == 1 and out.startswith("not confirmed: ") and said in out


# Refused: exit code 2 and one line

@pytest.mark.parametrize("change, said", [
    (lambda d: d.update(schema=SCHEMA + 1), f"schema is {SCHEMA + 1}, this version reads {SCHEMA}"),
    (lambda d: d.update(numerics=2), "numerics version is 2, this is 1: other bits by definition"),
    (lambda d: d.update(kind="training"), "kind is 'training', allowed: perplexity, generation"),
    (lambda d: d.update(format="x"), "is no attestation"),
    (lambda d: d.pop("windows") and d.update(windows=["1" * 64]) or d["settings"].pop("n_ctx"), "damaged: settings has n_chunks"),
    (lambda d: d["model"].update(sha256=["xyz"]), "damaged: model.sha256[0] is 'xyz', must be a sha256 in hex"),
    (lambda d: d["cannot_matter"].update(graphs=1), "damaged: cannot_matter.graphs is 1, must be bool"),
    (lambda d: d.update(extra=1), "damaged: it has format"),
    (lambda d: d["tokens"].update(sha256="0" * 64), "tokens: the text gives 301 other tokens than attested, 301"),
    (lambda d: d["model"].update(sha256=["0" * 64]), "another model than attested"),
    (lambda d: d.update(tokenizer="0" * 64), "another tokenizer than attested"),
    (lambda d: d.update(text="0" * 64), "another text than attested"),
    (lambda d: d["windows"].pop(), "windows: 4 in the text, 3 attested"),
])
def test_refused(folder, capsys, change, said):
    code, out, err = verify(capsys, folder, resealed(folder, "ppl.json", change))
    assert code == 2 and out == "" and said in err and err.count("\n") == 1


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
    (b"", "damaged: no JSON"), (b"[]", "is no attestation"), (b"[" * 100000, "damaged: no JSON"), (b"\xff", "damaged: no JSON")])
def test_no_attestation(folder, capsys, data, said):
    (folder / "changed.json").write_bytes(data)
    code, out, err = verify(capsys, folder, "changed.json")
    assert code == 2 and out == "" and said in err and err.count("\n") == 1


def test_another_model_or_text(folder, capsys):
    code, out, err = verify(capsys, folder, "ppl.json", model="other.gguf")
    assert code == 2 and "other.gguf: another model than attested" in err
    code, out, err = verify(capsys, folder, "ppl.json", "-f", folder / "other")
    assert code == 2 and "other: another text than attested" in err
    code, out, err = verify(capsys, folder, "missing.json")
    assert code == 2 and "missing.json: no such file" in err
    assert main(["verify", "--sample", "3"]) == 2


def test_own_check_of_a_generation(folder):
    """Logits that depend on how the text was cut are not attested."""
    def few(*operands):
        if len(operands[-1]) == 1:
            operands[-1][0] = -operands[-1][0]
    with load(folder / "m.gguf", "cpu", lambda: FaultyBackend({"mul_mat": made(after(few))})) as model, \
            pytest.raises(RuntimeError, match="chosen from other logits"):
        attest_generation(model, [1, 2, 3], 10, Sampling(), Settings(), open("/dev/null", "w"))


def test_ties_that_are_broken_by_another_rule(folder):
    """Logits that are equal in pairs, and an argmax that takes the last of them: the choice of the finished text is another one."""
    def tied(*operands):
        out = operands[-1]
        if out.shape[1] == 259:  # logits: K and V are products of their own only where no query is computed
            out[:, 1::2] = out[:, :-1:2]

    def last(x, out):
        out[:] = x.shape[1] - 1 - x[:, ::-1].argmax(1)
    prompt, log = [1, 2, 3], open("/dev/null", "w")

    def backend(**given):
        product = made(after(tied))
        return FaultyBackend({"mul_mat": product, "mul_mat_argmax": lambda make: partial(make, mul_mat=product(mul_mat), **given)})
    with load(folder / "m.gguf", "cpu", backend) as model:
        assert len(attest_generation(model, prompt, 5, Sampling(), Settings(), log)["result"]["tokens"]) == 5
    with load(folder / "m.gguf", "cpu", lambda: backend(argmax=last)) as model:
        with pytest.raises(RuntimeError, match="chosen from other logits"):
            attest_generation(model, prompt, 5, Sampling(), Settings(), log)


# The schema

def conforms(value, schema) -> bool:
    """The part of JSON Schema that docs/attestation.schema.json uses."""
    if "oneOf" in schema:
        return sum(conforms(value, each) for each in schema["oneOf"]) == 1
    if "const" in schema and (value != schema["const"] or type(value) is not type(schema["const"])):
        return False
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "number": (int, float)}
    if "type" in schema and (not isinstance(value, kinds[schema["type"]]) or isinstance(value, bool) != (schema["type"] == "boolean")):
        return False
    if "pattern" in schema and not re.search(schema["pattern"], value):
        return False
    if isinstance(value, list):
        return len(value) >= schema.get("minItems", 0) and all(conforms(each, schema["items"]) for each in value)
    if isinstance(value, dict):
        properties, more = schema.get("properties", {}), schema.get("additionalProperties", {})
        return set(schema.get("required", ())) <= set(value) and all(
            conforms(each, properties[key]) if key in properties else more is not False and conforms(each, more) for key, each in value.items())
    return True


def test_the_schema(folder):
    schema = json.loads((ROOT / "docs" / "attestation.schema.json").read_text())
    assert schema["$schema"].endswith("2020-12/schema") and schema["version"] == SCHEMA
    documents = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("ppl", "greedy", "drawn")}
    for document in documents.values():
        assert conforms(document, schema)
        for key in document:
            less = {k: v for k, v in document.items() if k != key}
            assert not conforms(less, schema), key
        for path in ("model",), ("settings",), ("result",), ("cannot_matter",), ("environment",), ("tokens",):
            changed = copy.deepcopy(document)
            changed[path[0]]["more"] = 1
            assert not conforms(changed, schema), path
    for kind, shape in KINDS.items():
        one, = [each for each in schema["oneOf"] if each["properties"]["kind"]["const"] == kind]
        assert set(one["required"]) == set(one["properties"]) == {*COMMON, *shape}
