"""Tasks: llama.cpp's files read as it reads them, its draws and its choices; accuracy; the same digest by every micro-batch; bad
files; attested and confirmed."""
import io
import json
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import smollm2
from fake_model import FakeTokenizer
from notices import without_notice
from tiny_models import write_model

from ggml_py.__main__ import main
from ggml_py.backends.cpu import CPUBackend
from ggml_py.base.errors import UserError
from ggml_py.check.attestation import own_sha256, read_attestation
from ggml_py.engine.likelihood import Likelihood
from ggml_py.engine.model import Model
from ggml_py.engine.settings import Settings
from ggml_py.engine.tasks import FORMATS, Item, Task, answer, draws, largest, read_tasks, to_items
from ggml_py.files.gguf import GGUFFile
from ggml_py.measure.statistics import proportion_error, wilson_interval
from ggml_py.measure.tasks import score_tasks
from ggml_py.testing import digest

FOLDER = Path(__file__).parent / "tasks"
# Of llama.cpp, what it chose on these files: `made_by` says how
RECORDED = json.loads((FOLDER / "llama_cpp.json").read_text())["results"]


def string(text: str) -> bytes:
    return struct.pack("<I", len(text.encode())) + text.encode()


def choices(answers, labels) -> bytes:
    return struct.pack("<I", len(answers)) + b"".join(map(string, answers)) + struct.pack(f"<{len(labels)}i", *labels)


def binary(tasks, shift: int = 0) -> bytes:
    """tasks: (question, answers, labels).   shift: of the places in the table."""
    bodies = [string(question) + choices(answers, labels) + choices((), ()) for question, answers, labels in tasks]
    places = 4 + 4 * len(bodies) + shift + np.cumsum([0, *map(len, bodies[:-1])])
    return struct.pack(f"<{len(bodies) + 1}I", len(bodies), *places) + b"".join(bodies)


def data_of(name: str) -> bytes:
    if name == "multiple-choice":
        lines = map(json.loads, (FOLDER / "multiple_choice.jsonl").read_text().splitlines())
        return binary([(each["question"], each["answers"], each["labels"]) for each in lines])
    return (FOLDER / {"hellaswag": "hellaswag.txt", "winogrande": "winogrande.csv"}[name]).read_bytes()


def read(name: str, data: bytes, n_tasks: int | None = None, log=None) -> list[Task]:
    return read_tasks(name, data, FORMATS[name].n_tasks if n_tasks is None else n_tasks, "FILE", log or io.StringIO())


class Tokens(FakeTokenizer):
    def decode(self, ids):
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "m.gguf", "llama", ("Q8_0",), n_vocab=259)


def load(path, device):
    model = Model(GGUFFile.open(path), CPUBackend())
    model._tokenizer = Tokens(add_bos=True)
    return model


def kind(value) -> str:
    """Names cases by their format, not by their bytes."""
    return value if value in [*FORMATS] else ""


# Reading

def test_draws():
    """The standard says what the ten thousandth number is, of the seed 5489."""
    assert int(np.random.RandomState(5489).randint(0, 2**32, 10000, np.uint32)[-1]) == 4123659995
    assert next(draws()) == 1791095845


@pytest.mark.parametrize("recorded", RECORDED)
def test_the_tasks_that_llama_cpp_draws(recorded):
    name, _, n = recorded.partition(" ")
    log = io.StringIO()
    assert [each.number for each in read(name, data_of(name), int(n) if n else None, log)] == [
        each[0] for each in RECORDED[recorded]["items"]]
    if name == "winogrande":
        assert log.getvalue() == (
            "winogrande: left out, as llama.cpp leaves them out: line 1: no _ in the sentence 'sentence'; line 36: 'a line "
            "without commas' has 0 commas between columns, must have 4; line 37: no _ in the sentence 'This sentence has no "
            "blank at all.' and 2 more\n")


def test_winogrande_lines():
    lines = '0,"He said ""no"", _ did",A,B, 2x\n1,a "b, c" _.,"A, C",B,+1\r\n2,_,x,y,1\n\n'
    assert [(each.context, each.endings, each.behind, each.right) for each in read("winogrande", lines.encode())] == [
        ('He said ""no"", ', ("A", "B"), " did", (1,)), ('a "b, c" ', ('"A, C"', "B"), ".", (0,)), ("", ("x", "y"), "", (0,))]
    assert len(read("winogrande", lines[:-1].encode())) == 2


def test_multiple_choice_places():
    """All tasks are read one after the other, whatever the table says; drawn ones are where it says."""
    tasks = [(f"q{i}", ("a", "b"), (0, 1)) for i in range(5)]
    assert [each.context for each in read("multiple-choice", binary(tasks, shift=9))] == [f"q{i}" for i in range(5)]
    drawn = read("multiple-choice", binary(tasks), 2)
    assert [each.context for each in drawn] == [f"q{each.number}" for each in drawn] and drawn[0].right == (1,)


def test_json_lines():
    lines = b'{"context": "a", "continuations": ["b", [5, 6]], "answer": 1, "id": "x"}\n\n' \
            b'{"context": [1], "continuations": ["b", "c"], "answer": 0}'
    first, second = read("tasks", lines)
    assert first == Task(0, "line 1", "a", ("b", (5, 6)), (1,), id="x") and second == Task(1, "line 3", (1,), ("b", "c"), (0,))
    assert read("tasks", lines, 1) == [first]


HELLASWAG = b"c\n%s\na\nb\nc\nd\n"
JSON = '{"context": "a", "continuations": ["b", "c"], "answer": 0}'
TWO = [("q", ("a", "b"), (0, 1)), ("r", ("a", "b"), (1, 0))]


@pytest.mark.parametrize("name, data, n_tasks, message", [
    ("hellaswag", b"", 400, "it has 0 lines, must be six for each task"),
    ("hellaswag", b"\n", 400, "it has 0 lines, must be six for each task"),
    ("hellaswag", b"a\nb\n0\n", 400, "it has 3 lines, must be six for each task"),
    ("hellaswag", HELLASWAG % b"0" + b"\n\n", 400, "it has 7 lines, must be six for each task"),
    *(("hellaswag", HELLASWAG % bad, 400, f"line 2: the right ending is {bad.decode()!r:.60}, must be 0 to 3")
      for bad in (b"4", b"-1", b"one", b"", b"9" * 99, b"0x1"[1:])),
    ("hellaswag", HELLASWAG % b"\xff", 400, "line 2: the right ending is '"),
    ("winogrande", b"", 0, "no tasks"),
    ("winogrande", b"1,a _ b,c,d,1", 0, "no tasks; line 1: no empty line behind the last one"),
    ("winogrande", b"1,a _ b,c,d\n\n", 0, "no tasks; line 1: '1,a _ b,c,d' has 3 commas between columns, must have 4"),
    ("winogrande", b'1,"a _ b,c,d,1\n\n', 0, "no tasks; line 1: '1,\"a _ b,c,d,1' has 1 commas between columns"),
    ("winogrande", b"1,a b,c,d,1\n\n", 0, "no tasks; line 1: no _ in the sentence 'a b'"),
    ("winogrande", b"1,a _ b,c,d,\n\n", 0, "no tasks; line 1: the answer is '', must be 1 or 2"),
    ("winogrande", b"1,a _ b,c,d,3\n\n", 0, "no tasks; line 1: the answer is '3', must be 1 or 2"),
    ("multiple-choice", b"", 0, "it has 0 bytes, which hold no table of tasks"),
    ("multiple-choice", b"\0\0\0\0", 0, "no tasks"),
    ("multiple-choice", b"a text and not a binary file", 0, "it has 28 bytes, which hold no table of tasks"),
    ("multiple-choice", b"\xff" * 40, 0, "it has 40 bytes, which hold no table of tasks"),
    *(("multiple-choice", binary(TWO)[:n], 0, f"task {task} of 2 goes on behind the end of the file, at byte {n}")
      for n, task in ((13, 1), (25, 1), (45, 2), (len(binary(TWO)) - 1, 2))),
    ("multiple-choice", binary(TWO, shift=1000), 1, "goes on behind the end of the file"),
    ("multiple-choice", binary([("q", ["a"] * 101, [0] * 101)]), 0, "task 1 of 1: it has 101 answers, must be 100 at most"),
    ("multiple-choice", binary([("", ("a", "b"), (0, 1))]), 0, "task 1 of 1: question is empty"),
    ("multiple-choice", binary([("q", ("a", ""), (0, 1))]), 0, "task 1 of 1: answer 2 is empty"),
    ("tasks", b"", 0, "no tasks"),
    ("tasks", b" \n\n", 0, "no tasks"),
    ("tasks", b"[1, 2]\n", 0, "line 1: is a list, must be an object with context, continuations, answer, and id at will"),
    ("tasks", b'{"context": "a"}', 0, "line 1: is an object with context, must be an object with context, continuations"),
    ("tasks", JSON.replace("}", ', "x": 1}').encode(), 0, "line 1: is an object with context, continuations, answer, x, must be"),
    ("tasks", f"{JSON}\n{JSON[:-1]}".encode(), 0, "line 2: not JSON: Expecting ',' delimiter"),
    ("tasks", f"{JSON}\n{JSON} {JSON}".encode(), 0, "line 2: not JSON: Extra data"),
    ("tasks", b"\xff\xfe", 0, "line 1: 'utf-8' codec can't decode byte 0xff"),
    ("tasks", b"[" * 100_000, 0, "line 1: is nested too deeply"),
    ("tasks", JSON.replace('["b", "c"]', '["b"]').encode(), 0, "line 1: continuations must be a list of at least 2"),
    ("tasks", JSON.replace('["b", "c"]', '"bc"').encode(), 0, "line 1: continuations must be a list of at least 2"),
    ("tasks", JSON.replace('"c"', "3").encode(), 0, "line 1: continuation 1 must be a text or a list of token ids"),
    ("tasks", JSON.replace('"c"', "[1, true]").encode(), 0, "line 1: continuation 1 must be a text or a list of token ids"),
    ("tasks", JSON.replace('"a"', "[1.0]").encode(), 0, "line 1: context must be a text or a list of token ids"),
    *(("tasks", JSON.replace("0}", f"{bad}}}").encode(), 0, "line 1: answer is ")
      for bad in ("2", "-1", "true", '"0"', "null", "[0]")),
], ids=kind)
def test_bad_files(name, data, n_tasks, message):
    with pytest.raises(UserError) as caught:
        read(name, data, n_tasks)
    assert str(caught.value).startswith("FILE: ") and message in str(caught.value) and "\n" not in str(caught.value)
    str(caught.value).encode()


@pytest.mark.parametrize("name, data, message", [
    ("hellaswag", b"c\n0\na\nab\nac\nad\n", "line 1: ending 1 has no tokens of its own to score"),
    ("hellaswag", b"c\n0\na\na\na\na\n", "line 1: ending 1 has no tokens of its own to score"),
    ("hellaswag", HELLASWAG.replace(b"\nd", b"\n" + b"d" * 99) % b"0", "line 1: ending 4 takes 101 positions, allowed: up to 64"),
    ("winogrande", b"0,a long _,aaaa,bbbb,1\n\n", "line 1: ending 1 has no tokens of its own to score"),
    ("winogrande", b"0,a _ b,same,same,1\n\n", "line 1: ending 1 has no tokens of its own to score"),
    ("multiple-choice", binary([("q", ("a",), (1,))]), "task 1: ending 1 has no tokens of its own to score"),
    ("multiple-choice", binary([("q", (), ())]), "task 1: it has no endings"),
    ("tasks", JSON.replace('"c"', '""').encode(), "line 1: ending 2 has no tokens of its own to score"),
    ("tasks", JSON.replace('"c"', "[]").encode(), "line 1: ending 2 has no tokens of its own to score"),
    ("tasks", JSON.replace('"c"', "[259]").encode(), "line 1: token ids must be 0 to 258"),
    ("tasks", JSON.replace('"a"', "[-1]").encode(), "line 1: token ids must be 0 to 258"),
], ids=kind)
def test_tasks_that_cannot_be_scored(name, data, message):
    with pytest.raises(UserError) as caught:
        to_items(name, read(name, data), Tokens(add_bos=True), 64, "FILE")
    assert str(caught.value) == f"FILE: {message}"


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files(name):
    """Whatever became of their bytes, they are read and scored, or refused in one line."""
    rng, said = random.Random(name), []
    put = b"", b"\0", b"\n", b'"', b",", b"_", b"\xff", b"1", b"{"
    whole = f"{JSON}\n{JSON}".encode() if name == "tasks" else data_of(name)
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            i = rng.randrange(len(data) + 1)
            data[i:i + rng.choice((0, 0, 1, 1, 9, len(data)))] = rng.choice(put)
        try:
            to_items(name, read(name, bytes(data), rng.choice((1, 3, 400))), Tokens(add_bos=rng.random() < 0.5), 300, "FILE")
        except UserError as error:
            said.append(str(error))
    assert 0 < len(said) < 150 and all(each.startswith("FILE: ") and each.isprintable() for each in said)


# What is scored, and how it is judged

def parts_of(name, data, add_bos=False):
    """With characters in the place of ids."""
    text = lambda ids: "".join("^" if id == 256 else chr(id) for id in ids)
    item, = to_items(name, read(name, data.encode() if isinstance(data, str) else data), Tokens(add_bos), 99, "FILE")
    return [[(text(context), text(ids)) for context, ids in each] for each in item.parts], list(item.lengths)


@pytest.mark.parametrize("name, data, parts, lengths", [
    ("hellaswag", "c\n0\nab\nac\naddd\nae\n", [[("c a", "b")], [("c a", "c")], [("c a", "ddd")], [("c a", "e")]], [1, 1, 3, 1]),
    ("multiple-choice", binary([("q", ("12", "13", "4"), (0, 0, 1))]),
     [[("q ", "12")], [("q ", "13")], [("q ", "4")]], [2, 2, 1]),
    ("winogrande", "0,so _ went on,ab,acd,1\n\n", [[("so ab", " went o")], [("so acd", " went o")]], [7, 7]),
    ("winogrande", "0,so _.,ab,acd,1\n\n", [[("so a", "b")], [("so ab.", "c"), ("so ac", "d")]], [1, 2]),
    ("winogrande", "0,so _,b,c,1\n\n", [[("so ", "b")], [("so b", "c"), ("so c", "")]], [1, 1]),
    ("tasks", '{"context": "a ", "continuations": ["bc", [100, 101]], "answer": 0}', [[("a", " bc")], [("a ", "de")]], [2, 2]),
], ids=kind)
def test_scored_tokens(name, data, parts, lengths):
    assert parts_of(name, data) == (parts, lengths)


def test_texts_that_begin_with_the_ending():
    assert parts_of("winogrande", "0,_ ran away,Al,Bo,1\n\n")[0] == [[("Al", " ran awa")], [("Bo", " ran awa")]]
    assert parts_of("winogrande", "0,_ ran away,Al,Bo,1\n\n", add_bos=True)[0][0] == [("^Al", " ran awa")]
    assert parts_of("winogrande", "0,_!,Al,Bo,1\n\n")[0] == [[("", "Al")], [("", "Bo")]]


@pytest.mark.parametrize("values, first, choice", [([1, 2, 2], True, 1), ([1, 2, 2], False, 2), ([np.nan, -5, np.nan], True, 1),
                                                   ([np.nan] * 2, True, 0), ([-np.inf, np.nan], True, 0)])
def test_the_largest_value(values, first, choice):
    assert largest(values, first) == choice


def test_answers():
    item = Item(Task(0, "line 1", "", ("a", "bb"), (1,)), (), (1, 4))
    found = answer("tasks", item, [Likelihood((1,), (-1.0,), True), Likelihood((2, 3), (-0.5, -1.5), False)])
    assert (found.choice, found.choice_norm, found.values) == (0, 1, (-1.0, -0.5)) and found.is_right_norm > found.is_right
    assert found.digest == digest(np.array([-1, -0.5, -1.5], np.float32))


def test_errors_of_shares():
    assert proportion_error(0.75, 5) == pytest.approx(np.std([1, 1, 1, 0], ddof=0) / 2) and np.isnan(proportion_error(1, 1))
    assert wilson_interval(0.7, 20) == pytest.approx((0.481027, 0.854523), abs=1e-6)


# By the command line, with a small model

def run(capsys, *argv) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main([*map(str, argv)], load)
    out, err = capsys.readouterr()
    return code, out, without_notice(err)


@pytest.fixture(scope="module")
def files(tmp_path_factory, path):
    folder = tmp_path_factory.mktemp("tasks")
    rng = random.Random(3)
    word = lambda: "".join(rng.choices("abcdefg", k=rng.randint(1, 5)))
    (folder / "hellaswag").write_text("".join(f"{word()} {word()}\n{rng.randrange(4)}\n" + "".join(
        f"{i}{word()}\n" for i in range(4)) for _ in range(6)))
    (folder / "winogrande").write_text("".join(f"{i},{word()} _ {word()},x{word()},y{word()},{i % 2 + 1}\n"
                                               for i in range(110)) + "\n")
    (folder / "multiple-choice").write_bytes(binary([
        (word(), [f"{i}{word()}" for i in range(n)], [i == 1 for i in range(n)]) for n in (2, 3, 4, 5, 2)]))
    (folder / "tasks").write_text("".join(json.dumps(
        {"context": word(), "continuations": [f"{i}{word()}" for i in range(3)], "answer": i % 3, "id": f"t{i}"}) + "\n"
        for i in range(7)))
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_by_every_micro_batch(capsys, path, files, tmp_path, name):
    """What is printed, and every line of --out; the digest is that of all likelihoods in it."""
    found = set()
    for n_ubatch in 1, 3, 32, 512:
        code, out, err = run(capsys, "perplexity", "-m", path, f"--{name}", files / name, "-ub", n_ubatch, "--out",
                             tmp_path / "out")
        assert code == 0, err
        found.add((out, (tmp_path / "out").read_text()))
    (out, lines), = found
    tasks = [json.loads(line) for line in lines.splitlines()]
    every = [logprob for task in tasks for each in task["continuations"] for logprob in each["logprobs"]]
    assert out.splitlines()[-1] == f"digest: {digest(np.array(every, np.float32))}"
    n = len(tasks)
    assert n == {"hellaswag": 6, "winogrande": 110, "multiple-choice": 5, "tasks": 7}[name]
    k = sum(task["choice_norm"] in task["answers"] for task in tasks)
    error = proportion_error(k / n, n)
    share = f"{100 * k / n:.4f} +/- {100 * error:.4f}"
    last = {"hellaswag": f"\n{n}\t{100 * k / n:.8f}%\t[", "winogrande": f"\nFinal Winogrande score({n} tasks): {share}\n",
            "multiple-choice": f"\nFinal result: {share}\nRandom chance: ",
            "tasks": f"\nFinal result ({n} tasks): acc_norm = {share}, 95% ["}[name]
    assert last in out and (name != "tasks" or [task["id"] for task in tasks] == [f"t{i}" for i in range(n)])


def test_likelihoods_are_those_of_score(path, files):
    with load(path, "cpu") as model:
        tasks = read("tasks", (files / "tasks").read_bytes())
        found = score_tasks(model, "tasks", tasks, "FILE", Settings(n_ctx=256), io.StringIO(), io.StringIO())
        for task, each in zip(tasks, found):
            assert list(each.endings) == [model.score(task.context, ending) for ending in task.endings]
        # the second sentence's first token behind the whole first one, as llama.cpp has it
        task, = read("winogrande", b"0,so _.,ab,acd,1\n\n")
        judged, = score_tasks(model, "winogrande", [task], "FILE", Settings(n_ctx=256), io.StringIO(), io.StringIO())
        ids = model.tokenizer.encode
        assert judged.endings[1].logprobs == (*model.score(ids("so ab."), [ord("c")]).logprobs,
                                              *model.score(ids("so ac"), [ord("d")]).logprobs)


@pytest.mark.parametrize("argv, message", [
    (["--hellaswag"], "--hellaswag: needs a file of tasks, behind it or by -f"),
    (["--hellaswag", "no"], "no: no such file"),
    (["--winogrande", "-f", "no"], "no: no such file"),
    (["--tasks"], "--tasks: expected one argument"),
    (["--tasks", "{tasks}", "-f", "{tasks}"], "-f: the tasks are those of --tasks"),
    (["--tasks", "{tasks}", "--hellaswag"], "--tasks: one kind of tasks at a time, --hellaswag is given too"),
    (["--hellaswag-tasks", "3"], "--hellaswag-tasks: is of --hellaswag, which is not given"),
    (["--hellaswag", "{hellaswag}", "--hellaswag-tasks", "0"], "--hellaswag-tasks: must be at least 1, got 0"),
    (["--tasks", "{tasks}", "--winogrande-tasks", "1"], "--winogrande-tasks: is of --winogrande, which is not given"),
    (["--tasks", "{tasks}", "--chunks", "1"], "--chunks: is of a text, and --tasks asks for tasks"),
    (["--tasks", "{tasks}", "--kl-divergence"], "--kl-divergence: is of a text, and --tasks asks for tasks"),
    (["--tasks", "{tasks}", "-c", "4"], "line 1: ending 1 takes "),
    (["--out", "x.jsonl"], "--out: is of tasks, such as --tasks; none are given"),
    (["--tasks", "{tasks}", "--out", "/no/folder/x"], "--out: /no/folder/x: /no/folder is not a folder"),
    (["--tasks", "{hellaswag}"], "line 1: not JSON: Expecting value"),
    (["--multiple-choice", "{tasks}"], "which hold no table of tasks"),
])
def test_refused(capsys, path, files, argv, message):
    places = {name: files / name for name in FORMATS}
    code, _, err = run(capsys, "perplexity", "-m", path, *(word.format(**places) for word in argv))
    assert code == 2 and message in err.splitlines()[-1] and len(err.splitlines()) == 1, err


@pytest.mark.parametrize("name, argv", [("hellaswag", ["--hellaswag-tasks", 4]), ("winogrande", ["--winogrande-tasks", 5]),
                                        ("multiple-choice", []), ("tasks", [])])
def test_attested(capsys, path, files, tmp_path, name, argv):
    attested, asked = tmp_path / "a.json", ["-m", path, f"--{name}", files / name, *argv]
    code, out, err = run(capsys, "attest", *asked, "-o", attested, "-ub", 7)
    assert code == 0, err
    assert out.splitlines()[:-1] == run(capsys, "perplexity", *asked)[1].splitlines()
    document = read_attestation(attested)
    n = len(document["windows"])
    confirmed = lambda *argv: run(capsys, "verify", "-m", path, "-f", files / name, "--attestation", attested, *argv)
    code, out, err = confirmed()
    result = document["result"]
    said = f"all {n} windows; {name}: {result['n_right_norm']} of {n} right, normalised, {result['n_right']} not"
    assert code == 0 and said in out
    assert confirmed("--sample", 2)[0] == 0

    def told(**changes) -> tuple[int, str]:
        """What is said of an attestation with another result."""
        changed = {**document, "result": {**result, **changes}}
        attested.write_text(json.dumps({**changed, "sha256": own_sha256(changed)}))
        code, out, err = confirmed()
        return code, out + err
    code, said = told(n_right=result["n_right"] + 1)
    assert code == 1 and f"of the choices {result['n_right']} are right (n_right), attested {result['n_right'] + 1}" in said
    other = [result["choices_norm"][0] ^ 1, *result["choices_norm"][1:]]
    code, said = told(choices_norm=other)
    assert code == 1 and f"of task 1 are those attested and choose {other[0] ^ 1} (choices_norm), attested {other[0]}" in said
    assert told(choices=result["choices"][1:])[0] == 2
    attested.write_text(json.dumps(document))
    (tmp_path / "other").write_bytes((files / name).read_bytes() + b"\n")
    code, out, err = run(capsys, "verify", "-m", path, "-f", tmp_path / "other", "--attestation", attested)
    assert code == 2 and "another text than attested" in err


# With SmolLM2

@pytest.fixture(scope="module")
def smol32(tmp_path_factory):
    """SmolLM2 in F32."""
    path = tmp_path_factory.mktemp("models") / "f32.gguf"
    assert main(["quantize", "--allow-requantize", "--pure", str(smollm2.require()), str(path), "F32"]) == 0
    with Model.load(path, device="cpu") as model:
        yield model
    path.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hellaswag", "winogrande", "multiple-choice"])
def test_llama_cpp_chooses_the_same(smol32, name):
    """Except where its likelihoods of two endings are closer than 0.005."""
    recorded, out = RECORDED[name], io.StringIO()
    found = score_tasks(smol32, name, read(name, data_of(name)), "FILE", Settings(n_ctx=512, type_k="f32", type_v="f32"), out,
                        io.StringIO())
    n_other = 0
    for each, (number, choice, values) in zip(found, recorded["items"], strict=True):
        assert each.item.task.number == number
        np.testing.assert_allclose(each.values, values, rtol=0, atol=0.01)
        near = sorted(values)[-1] - sorted(values)[-2] < 0.005
        n_other += each.choice_norm != choice
        assert each.choice_norm == choice or near, number
    if not n_other and name != "winogrande":  # whose lines show the likelihoods
        assert [line for line in out.getvalue().splitlines() if line and not line.startswith("digest")] == recorded["printed"]
