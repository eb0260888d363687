"""`ggml-py verify`: one digest over the axes, mismatches found, what cannot be run never passed; exit codes and reports."""
import json
import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_model import FakeTokenizer

from ggml_py.__main__ import main
from ggml_py.check.axes import AXES, Setting, play, settings_of, shortened
from ggml_py.backends.cpu import CPUBackend
from ggml_py.base.errors import UserError
from ggml_py.files.writing import check_file, write
from ggml_py.files.gguf import GGUFFile
from ggml_py.check.merkle import merkle_root
from ggml_py.engine.model import Model
from ggml_py.graph.fuse import PASSES
from ggml_py.check.digest import LogitsDigest
from ggml_py.check import verify as verify_module
from ggml_py.check.verify import WindowDigests
from ggml_py.engine.windows import first_windows
from notices import without_notice
from planted_faults import FaultyBackend, after
from planted_faults import verify as verify_on
from tiny_models import write_model

WINDOWS = np.random.default_rng(0).integers(0, 70, (3, 90)).astype(np.int32)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "m.gguf", "llama", ("Q8_0", "F16", "Q4_1"), n_vocab=259)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(bytes(np.random.default_rng(4).integers(97, 123, 200, np.uint8)))
    return file


def nudge(call):
    """A product that is off by one ULP for fewer than 32 rows."""
    if call.out.n_rows < 32:
        call.out.data[:, 3] = np.nextafter(call.out.data[:, 3], np.float32(np.inf))


def loader(path, backend):
    def load(_, device):
        model = Model(GGUFFile.open(path), backend(device))
        model._tokenizer = FakeTokenizer(add_bos=True)
        return model
    return load


def call(capsys, load, *argv):
    code = main(["verify", *map(str, argv)], load)
    out, err = capsys.readouterr()
    return code, out, without_notice(err)


# Settings

def test_every_axis_has_settings_or_a_reason():
    for devices in ["cpu"], ["cpu", "cpu:1"], ["cuda:0"], ["cuda:0", "cpu"], ["cuda:0", "cuda:1", "cpu"]:
        settings = settings_of(list(AXES), devices, (4, 512))
        assert {s.axis for s in settings} == {"default", *AXES}
        assert settings[0].axis == "default" and [s.axis for s in settings].count("default") == 1
        for s in settings:
            on_gpu = not s.device.startswith("cpu")
            assert bool(s.reason) == (not s.device)
            assert not s.reason or s.axis in ({"threads"} if "cpu" not in devices else {"launch", "noise", "products"}
                                              if devices[0] == "cpu" else set()) | (
                {"device"} if len(devices) == 1 else set()) | ({"letters"} if devices == ["cuda:0"] else set())
            assert s.reason or ((s.axis in ("launch", "noise", "products")) <= on_gpu and (s.axis == "threads") <= (not on_gpu))


def test_settings_are_those_of_the_promise():
    by_axis = {axis: [s for s in settings_of([axis], ["cuda:0"], (4, 512), reruns=3)[1:] if not s.reason] for axis in AXES}
    assert [s.n_ubatch for s in by_axis["ubatch"]] == [1, 7, 32, 512] and len(by_axis["rerun"]) == 3
    assert {s.no_fuse for s in by_axis["fusion"]} == {("all",), *((name,) for name in PASSES)}
    assert all(sorted(s.order) == [0, 1, 2, 3]
               for s in by_axis["sequences"]) and len({s.order for s in by_axis["sequences"]}) == 2
    assert by_axis["products"] and not any(s.halves for s in by_axis["products"])
    assert all(s.noise for s in by_axis["noise"]) and by_axis["noise"] and {s.graphs for s in by_axis["launch"]} == {True, False}
    assert [s.kv_write for s in by_axis["kv_write"]] == ["cpy"] and [s.piece for s in by_axis["pieces"]] == [17, 100, 0]
    growing = by_axis["pieces"][-1]
    assert growing.pieces(10) == [(0, 1), (1, 2), (2, 4), (4, 6),
                                  (6, 10)] and growing.pieces(7) == [(0, 1), (1, 2), (2, 4), (4, 6), (6, 7)]
    assert by_axis["pieces"][0].pieces(40) == [(0, 17), (17, 34), (34, 40)] and Setting("", "", "cpu").pieces(40) == [(0, 40)]


def test_one_window_is_not_several_sequences():
    assert [(s.axis, s.reason)
            for s in settings_of(["sequences"], ["cpu"], (1, 64))] == [("default", ""), ("sequences", "the text is one window")]


def test_unknown_axis():
    with pytest.raises(UserError, match="^axes: 'speed' is not an axis; allowed: rerun, ubatch"):
        settings_of(["rerun", "speed"], ["cpu"], (1, 8))


def test_only_cpus_get_shorter_texts():
    slow = Setting("ubatch", "1", "cpu", n_ubatch=1)
    assert shortened(slow, (4, 512)).n_tokens == 64 and shortened(slow, (4, 40)).n_tokens == 40
    assert not shortened(slow, (1, 64)).n_tokens
    assert not shortened(Setting("ubatch", "1", "cuda:0", n_ubatch=1), (4, 512)).n_tokens


def test_play_gives_every_row_once():
    class Counting:
        def clear(self):
            self.n = {}

        def decode_batch(self, batch, logits):
            assert logits == "all"
            return [tokens[:, None] for _, tokens in batch]
    windows = np.arange(12).reshape(3, 4)
    for settings in {}, dict(piece=3), dict(order=(2, 0, 1), piece=3), dict(growing=True):
        setting = Setting("", "", "cpu", **settings)
        found = np.full_like(windows, -1)
        for window, first, rows in play(Counting(), windows, setting):
            assert (found[window, first:first + len(rows)] == -1).all()
            found[window, first:first + len(rows)] = rows[:, 0]
        assert (found == windows).all()


def test_first_windows():
    assert first_windows(range(10), 4, 3).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert first_windows(range(3), 4, 3).tolist() == [[0, 1, 2]]
    assert first_windows(range(10), 4, -1).tolist() == first_windows(range(10), 4, 3).tolist()
    with pytest.raises(UserError, match="^text: it has 1 tokens, at least 2"):
        first_windows([1], 4, 1)


def test_heads_are_digests_of_first_rows():
    rows, digests, expected = (np.random.default_rng(0).standard_normal((9, 5)).astype(np.float32), WindowDigests(2, [4, 7]),
                               LogitsDigest())
    for first in 0, 3, 6:
        digests.update(1, first, rows[first:first + 3] + 1)
        digests.update(0, first, rows[first:first + 3])
    for n in 4, 7:
        expected = LogitsDigest()
        expected.update(rows[:n])
        assert digests.heads[n].hexdigest() == expected.hexdigest()
    expected = LogitsDigest()
    expected.update(rows)
    assert digests.hexdigests()[0] == expected.hexdigest() != digests.hexdigests()[1]


def test_merkle_root():
    from hashlib import sha256
    a, b, c = (sha256(bytes([i])).hexdigest() for i in range(3))
    leaf = lambda d: sha256(b"\0" + bytes.fromhex(d)).digest()
    node = lambda x, y: sha256(b"\1" + x + y).digest()
    assert merkle_root([a]) == leaf(a).hex()
    assert merkle_root([a, b, c]) == node(node(leaf(a), leaf(b)), leaf(c)).hex() != merkle_root([a, c, b])
    with pytest.raises(ValueError, match="at least one"):
        merkle_root([])


# Runs

def test_one_digest(path):
    verification = verify_on(path, WINDOWS, list(AXES), {"cpu": CPUBackend()})
    statuses = {result.setting.axis: result.status for result in verification.results}
    assert statuses == {**dict.fromkeys(["default", *AXES], "same"),
                        **dict.fromkeys(["launch", "noise", "products", "experts", "device"], "not run")}
    assert verification.confirmed and verification.first_mismatch() is None
    assert len({r.digest for r in verification.results if r.digest and not r.setting.n_tokens}) == 1
    short = [r for r in verification.results if r.setting.n_tokens]
    assert [(r.setting.n_ubatch, r.setting.n_draft) for r in short if r.setting.axis == "ubatch"] == [(1, 0)]
    assert all(r.digest != verification.results[0].digest for r in short)


def test_hashing_beside_a_device_gives_the_same_digests(path, monkeypatch):
    """And a mismatch stays one."""
    axes, backends = ["ubatch", "pieces", "sequences"], lambda: {"cpu": CPUBackend()}
    expected = [result.digest for result in verify_on(path, WINDOWS, axes, backends()).results]
    monkeypatch.setattr(verify_module, "is_elsewhere", lambda model: True)
    found = verify_on(path, WINDOWS, axes, backends())
    assert found.confirmed and [result.digest for result in found.results] == expected and len(expected) > 3


def test_devices(path):
    verification = verify_on(path, WINDOWS, ["device", "rerun"], {"cuda:0": CPUBackend(device="cuda:0"), "cpu": CPUBackend()})
    assert [(r.setting.axis, r.setting.device, r.status) for r in verification.results] == [
        ("default", "cuda:0", "same"), *[("rerun", "cuda:0", "same")] * 2, ("device", "cpu", "same"),
        *[("rerun", "cpu", "same")] * 2]


def test_brackets_are_shown_as_they_are(path, text, capsys, monkeypatch):
    monkeypatch.setattr("ggml_py.backends.cuda.unavailable", lambda ordinal: "install ggml-bitwise[cu13]")
    _, out, _ = call(capsys, loader(path, lambda device: CPUBackend()), "-m", path, "-f", text, "-c", 60, "--devices", "cpu",
                     "--axes", "rerun,launch")
    assert "not run: install ggml-bitwise[cu13]\n" in re.sub(" +\n", "\n", out)


def test_command(path, text, capsys, tmp_path):
    load = loader(path, lambda device: CPUBackend())
    code, out, err = call(capsys, load, "-m", path, "-f", text, "-c", 60, "--devices", "cpu", "--axes", "rerun,launch,sequences",
                          "--json", tmp_path / "r.json")
    report = json.loads((tmp_path / "r.json").read_text())
    assert code == 0 and out.splitlines()[-1].startswith("one digest: 6 settings gave ") and "not run: 1" in out and err == ""
    assert (report["confirmed"], report["n_windows"], report["n_ctx"], report["first_difference"]) == (True, 3, 60, None)
    assert [s["status"] for s in report["settings"]] == ["same"] * 6 + ["not run"] and report["settings"][-1]["reason"]
    assert out.count(report["settings"][0]["digest"][:16]) == 6 + 1


def test_a_terminal_hears_of_settings_where_the_table_goes_elsewhere(path, text, capsys, monkeypatch):
    terminal = StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("ggml_py.check.verify.sys", SimpleNamespace(stderr=terminal))
    code, out, _ = call(capsys, loader(path, lambda device: CPUBackend()), "-m", path, "-f", text, "-c", 60, "--devices", "cpu",
                        "--axes", "launch,rerun,sequences")
    lines = terminal.getvalue().splitlines()
    assert code == 0 and "one digest: 6 settings" in out
    assert [line.split(":")[1] for line in lines] == [f" {i} of 6" for i in range(1, 7)]
    assert lines[0].endswith("cpu ..") and "sequences" in lines[-1]


def test_a_mismatch(path, text, capsys, tmp_path):
    """Exit code 1, the node, and a dump whose script shows it."""
    load = loader(path, lambda device: FaultyBackend({"mul_mat": after(nudge)}))
    code, out, _ = call(capsys, load, "-m", path, "-f", text, "-c", 60, "--devices", "cpu", "--axes", "rerun,ubatch", "--json",
                        tmp_path / "r.json",
                        "--dump", tmp_path / "dump")
    found = json.loads((tmp_path / "r.json").read_text())["first_difference"]
    assert code == 1 and "different bits: 3 of 7 settings differ from the default one" in out
    assert (found["name"], found["op"], found["inputs_equal"], found["shape"],
            found["max_ulps"]) == ("Qlin-0", "mul_mat", True, [1, 128], 1)
    assert (found["first"], found["n_different"], found["n"]) == ([0, 3], 1, 128) and len(set(found["patterns"])) == 2
    assert found["culprits"] == ["Qlin-0, kernels/cpu/mul_mat.py: mul_mat[Q4_1] on cpu, in: ubatch, 1 at a time"]
    assert f"first at (0, 3): {found['patterns'][0]} != {found['patterns'][1]}" in out
    lines = subprocess.run([sys.executable, tmp_path / "dump" / "run.py"], capture_output=True, text=True,
                           check=True).stdout.splitlines()
    assert len(lines) == 2 and lines[0].startswith("default.npz") and lines[0].endswith("Qlin-0: the same bits")
    (a, b), (x, y) = found["patterns"], map(np.float32, found["values"])
    assert lines[1].startswith("other.npz") and lines[1].endswith(f"1 of 128 differ, first at (0, 3): {a} != {b} ({x}, {y})")


@pytest.mark.parametrize("option, late, said", [("--dump", Path.touch, "File exists"), ("--json", Path.mkdir, "Is a directory")])
def test_a_mismatch_stays_one_when_a_file_cannot_be_written(path, text, capsys, tmp_path, option, late, said):
    """What came into the way of a file meanwhile: verdict and node on stdout, the file on stderr, exit code 1;
    2 where the bits are right."""
    out_path = tmp_path / "out"
    argv = ["-m", path, "-f", text, "-c", 60, "--devices", "cpu", "--axes", "ubatch", option, out_path]
    faulty = FaultyBackend({"mul_mat": after(nudge)})
    code, out, err = call(capsys, loader(path, lambda device: late(out_path) or faulty), *argv)
    assert code == 1 and "different bits: 3 of 5" in out and "first node that differs: Qlin-0" in out
    assert err.splitlines()[1:] == [f"ggml-py: error: {out_path}: cannot be written: {said}"]
    (out_path.unlink if out_path.is_file() else out_path.rmdir)()
    code, out, err = call(capsys, loader(path, lambda device: late(out_path) or CPUBackend()), *argv)
    assert "one digest" in out and (code == 2 and said in err if option == "--json" else code == 0 and not err)


@pytest.mark.parametrize("argv, message", [
    (["--json", "{}/none/r.json"], "argument --json: {}/none/r.json: {}/none is not a folder"),
    (["--json", "{}"], "argument --json: {}: is a folder, expected a file"),
    (["--dump", "{}/text"], "argument --dump: {}/text: is a file, expected a folder"),
    (["--dump", "{}/text/below/it"], "argument --dump: {}/text/below/it: {}/text is a file, expected a folder"),
])
def test_outputs_are_checked_before_anything_is_computed(path, text, capsys, argv, message):
    folder = str(text.parent)
    code, out, err = call(capsys, None, "-m", path, "-f", text, *(each.replace("{}", folder) for each in argv))
    assert code == 2 and out == "" and err == f"ggml-py: error: {message.replace('{}', folder)} (see ggml-py verify --help)\n"


def test_outputs_in_folders_that_cannot_be_written_to(path, text, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr("ggml_py.files.writing.os.access", lambda path, mode: asked.append((path, mode)))
    for option, name in ("--json", "r.json"), ("--dump", "a/b"):
        code, out, err = call(capsys, None, "-m", path, option, text.parent / name)
        assert code == 2 and out == "" and f"argument {option}: {text.parent / name}: {text.parent} cannot be written to" in err
    assert asked == [(text.parent, os.W_OK | os.X_OK)] * 2
    monkeypatch.undo()
    check_file(Path(os.devnull))  # no file, and to be written all the same


def test_links_stay_links(tmp_path):
    """/dev/stdout is one: it is written through, not replaced."""
    for name in "there", "not-yet":
        target, link = tmp_path / name, tmp_path / f"link-{name}"
        link.symlink_to(target)
        if name == "there":
            target.write_text("longer than what comes")
        check_file(link)
        write(link, b"new")
        assert link.is_symlink() and target.read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 4


def test_a_silent_fall_back_is_no_pass(path, text, capsys):
    """The backend of a GPU that is a CPU's: its bits are right and its devices are not."""
    load = loader(path, lambda device: CPUBackend())
    from ggml_py.check.verify import Verification
    with Verification(lambda device: load(None, device), WINDOWS,
                      settings_of(["rerun"], ["cuda:0"], WINDOWS.shape)) as verification:
        verification.run()
    assert [r.status for r in verification.results] == ["elsewhere"] * 3 and not verification.confirmed
    assert verification.results[0].elsewhere.startswith(
        "inp_embd and ") and verification.results[0].elsewhere.endswith("more nodes ran on cpu")
    assert verification.verdict() == "not confirmed: 3 of 3 settings ran on another device than theirs"


@pytest.mark.parametrize("argv, message", [
    (["--axes", "noise,device,launch"], "--axes: none of these can be run here: noise ("),
    (["--axes", "device"], "device (no device but cpu)"),
    (["--axes", "sequences", "--chunks", "1"], "--axes: none of these can be run here: sequences (the text is one window)"),
    (["--axes", "speed"], "--axes: 'speed' is not an axis; allowed: rerun"), (["-f", "missing"], "missing: no such file"),
    (["--devices", "tpu"], "argument --devices/--device: must be auto, cpu, cpu:N, cuda or cuda:N, got 'tpu'"),
    (["-c", "100000"], "-c: a context of 100000 tokens is too long"),
    (["--dump", "x", "--no-bisect"], "--dump: saves the first node that differs, which --no-bisect does not look for"),
    (["--axes", "ubatch,pieces", "--reruns", "2"], "--reruns: is of the axis rerun, which is not among --axes"),
    (["--sample", "2"], "--sample: is of windows of an --attestation, none is given"),
    (["--reruns", "0"], "argument --reruns: must be at least 1, got 0"), (["-m", "no.gguf"], "no.gguf"),
])
def test_bad_input(path, text, capsys, argv, message):
    code, out, err = call(capsys, loader(path, lambda device: CPUBackend()), "-m", path, "-f", text, "--devices", "cpu", "-c",
                          "60", *argv)
    assert code == 2 and out == "" and message in err and err.count("\n") == 1


def test_recording_is_in_nobodys_way():
    """Contexts that are not recorded know nothing of recording: what runs a step is as it was."""
    from pathlib import Path
    import ggml_py
    folder = Path(ggml_py.__file__).parent
    users = {path.name for path in folder.rglob("*.py") if "recording" in path.read_text() or "bisection" in path.read_text()}
    assert users <= {"recording.py", "bisection.py", "verify.py", "cli.py", "collect.py"}
