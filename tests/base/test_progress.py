"""What a user sees while kernels are compiled: on a terminal a line below the cursor, which goes; elsewhere two plain lines at
most; nothing from the library."""
import io
import re
import time

import pytest
from fake_model import FakeModel
from notices import without_notice

from ggml_py.__main__ import main
from ggml_py.base.progress import CompilationNotice, compilation_notice, working_time
from ggml_py.kernels import disk_cache
from ggml_py.kernels.disk_cache import Compiled


class Terminal(io.StringIO):
    def isatty(self):
        return True


def screen(written: str, n_lines: int = 4) -> tuple[list[str], int, int]:
    """What a terminal of n_lines lines shows, and its cursor (line, column): of VT100 as much as is written here."""
    lines, row, column, saved = [""] * n_lines, 0, 0, (0, 0)

    def down():
        nonlocal row
        if row == n_lines - 1:
            lines.append(lines.pop(0) and "")
        else:
            row += 1
    for part in re.findall(r"\x1b(?:\[[0-9]*[A-Z]|.)|.", written, re.DOTALL):
        if part == "\x1bD":
            down()
        elif part == "\n":  # as terminals are set: to the beginning of the line
            down()
            column = 0
        elif part == "\r":
            column = 0
        elif part == "\x1b[A":
            row = max(row - 1, 0)
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part == "\x1b7":
            saved = row, column
        elif part == "\x1b8":
            row, column = saved
        else:
            assert part.isprintable(), part
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + 1:]
            column += 1
    return lines, row, column


def wait_for(stream, text: str) -> None:
    end = time.monotonic() + 30
    while text not in stream.getvalue():
        assert time.monotonic() < end, stream.getvalue()
        time.sleep(0.005)


@pytest.fixture
def compiled():
    return Compiled()


@pytest.mark.parametrize("lines_above", [0, 2, 3, 7])
def test_a_terminal_shows_a_line_that_is_rewritten_and_goes(compiled, lines_above):
    """Below a text that goes on in its line, wherever on the screen that is."""
    stream = Terminal()
    text = "".join(f"{i}\n" for i in range(lines_above)) + "The sky"
    stream.write(text)
    before = screen(text)
    compiled.watch = CompilationNotice(stream, compiled, interval=0.01)
    compiled.begin("this CPU")
    wait_for(stream, "compiling kernels for this CPU, once: 0 so far, 0.")
    compiled.add(12)
    wait_for(stream, "12 so far, ")
    lines, row, column = screen(stream.getvalue())
    assert lines[row] == "The sky" and column == 7
    assert re.fullmatch(r"compiling kernels for this CPU, once: 12 so far, \d+\.\d s", lines[row + 1])
    assert sum("compiling" in line for line in lines) == 1
    compiled.end()
    after = screen(stream.getvalue())
    assert after[0][after[1]] == "The sky" and after[2] == 7 and not any("compiling" in line for line in after[0])
    assert "\n".join(before[0]).strip().endswith("\n".join(after[0]).strip())  # what was there; on a full screen a line less
    compiled.watch.finish()
    assert screen(stream.getvalue()) == after
    stream.write(" is blue")
    lines, row, _ = screen(stream.getvalue())
    assert lines[row] == "The sky is blue"


def test_a_line_is_as_wide_as_the_terminal(compiled, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    compiled.watch = CompilationNotice(stream, compiled, interval=0.01)
    with compiled.running("this GPU", 57):
        wait_for(stream, "compiling kernels f\x1b")


def test_elsewhere_two_plain_lines(compiled):
    stream = io.StringIO()
    notice = compiled.watch = CompilationNotice(stream, compiled, patience=0.05, interval=0.01)
    for _ in range(2):
        with compiled.running("this GPU", 57):
            compiled.add(3)
            time.sleep(0.06)
            wait_for(stream, "\n")
    notice.finish()
    first, last = stream.getvalue().splitlines()
    assert re.fullmatch(r"compiling kernels for this GPU, once: 3 of 57, \d+\.\d s \.\.\.", first)
    assert re.fullmatch(r"compiled: 6 kernels in \d+\.\d s", last)


def test_what_takes_no_time_is_not_shown(compiled):
    for stream in Terminal(), io.StringIO():
        notice = compiled.watch = CompilationNotice(stream, compiled, patience=10, interval=10)
        with compiled.running("this CPU"):
            compiled.add(1)
        notice.finish()
        assert stream.getvalue() == ""


def test_a_dumb_terminal_gets_plain_lines(compiled, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    compiled.watch = CompilationNotice(stream, compiled, patience=0, interval=0.01)
    with compiled.running("this CPU"):
        wait_for(stream, "...\n")
    assert "\x1b" not in stream.getvalue()


def test_nobody_reads(compiled):
    """A closed stream is nobody's trouble."""
    stream = io.StringIO()
    notice = compiled.watch = CompilationNotice(stream, compiled, patience=0, interval=0.001)
    stream.close()
    with compiled.running("this CPU"):
        time.sleep(0.02)
    notice.finish()
    assert notice.announced


def test_the_command_line_tells_and_the_library_does_not(compiled, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(disk_cache, "compiled", compiled)
    (tmp_path / "m.gguf").write_bytes(b"")

    def load(path, device):
        with compiled.running("this CPU"):
            compiled.add(2)
            time.sleep(1.5)  # more than a second: worth telling
        return FakeModel()
    assert main(["run", "-m", str(tmp_path / "m.gguf"), "-p", "x", "-n", "1"], load) == 0 and compiled.watch is None
    err = capsys.readouterr().err
    first, speed, last = err.splitlines()
    assert without_notice(err) == speed + "\n" and speed.startswith("run: ")
    assert first.startswith("compiling kernels for this CPU, once: 2 so far, 1.") and last.startswith("compiled: 2 kernels in 1.")
    load(None, None)
    assert capsys.readouterr() == ("", "")


def test_the_notice_ends_with_what_failed(compiled, monkeypatch):
    monkeypatch.setattr(disk_cache, "compiled", compiled)
    stream = Terminal()
    with pytest.raises(KeyboardInterrupt), compilation_notice(stream):
        compiled.begin("this CPU")  # and never ends
        wait_for(stream, "compiling")
        raise KeyboardInterrupt
    assert compiled.watch is None and not any("compiling" in line for line in screen(stream.getvalue())[0])


def test_verbose_tells_of_the_cache(compiled, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(disk_cache, "compiled", compiled)
    (tmp_path / "m.gguf").write_bytes(b"")
    compiled.rejected[tmp_path / "kernel.nbc"] = "its checksum is wrong"
    compiled.unkept = "kernel cache: / cannot be written to"
    assert main(["run", "-m", str(tmp_path / "m.gguf"), "-p", "x", "-n", "1", "--verbose"], lambda path, device: FakeModel()) == 0
    assert capsys.readouterr().err.splitlines()[-3:] == [
        f"kernel cache: {tmp_path / 'kernel.nbc'}: its checksum is wrong; compiled anew", "kernel cache: / cannot be written to",
        "0 kernels compiled in 0.0 s"]


def test_speeds_leave_compilation_out(monkeypatch):
    """As long as it runs, and when it has ended."""
    compiled, now = Compiled(), [0.0]
    monkeypatch.setattr(disk_cache, "compiled", compiled)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    assert working_time() == 0
    now[0] = 1
    with compiled.running("this CPU"):
        now[0] = 50
        assert working_time() == 1
        now[0] = 61
    assert working_time() == 1
    now[0] = 63
    assert working_time() == 3
