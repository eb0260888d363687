"""Compiled code on disk: what is damaged, of another kernel or cannot be kept costs a compilation and no result; and it is
said."""
import os
import resource
import subprocess
import sys
from errno import ENOSPC, EROFS
from pathlib import Path

import numpy as np
import pytest

from damages import DAMAGES, flipped
from ggml_py.kernels import compile, disk_cache
from ggml_py.kernels.compile import jit
from ggml_py.kernels.disk_cache import HEAD, Compiled, read_entry, write_entry
from places import environment

KEY, CODE = "('scale', 'this CPU')", bytes(range(256))


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """An empty cache folder, and what is compiled from here on."""
    found = Compiled()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(disk_cache, "compiled", found)
    monkeypatch.setattr(compile, "compiled", found)
    return found


@pytest.fixture
def entry(counted, tmp_path):
    path = tmp_path / "entry"
    write_entry(path, KEY, CODE)
    return path


def test_an_entry_comes_back(entry, counted, tmp_path):
    assert read_entry(entry, KEY) == CODE and not counted.rejected and not counted.unkept
    write_entry(entry, KEY, b"")
    assert read_entry(entry, KEY) == b"" and [path.name for path in tmp_path.iterdir()] == ["entry"]
    assert read_entry(tmp_path / "none", KEY) is None and read_entry(tmp_path, KEY) is None and not counted.rejected
    assert read_entry(entry, KEY + "x") is None and counted.rejected == {entry: "it is another kernel's"}


def test_every_byte_is_guarded(entry, counted):
    """One flipped bit in any byte, the line ends among them, and every shorter file."""
    whole = entry.read_bytes()
    assert len(whole) == HEAD + len(KEY) + 1 + len(CODE)
    for damaged in [*(flipped(whole, at) for at in range(len(whole))), *(whole[:n] for n in range(len(whole)))]:
        entry.write_bytes(damaged)
        assert read_entry(entry, KEY) is None and counted.rejected.pop(entry) in ("its checksum is wrong", "it is empty")
    entry.write_bytes(whole)
    assert read_entry(entry, KEY) == CODE


def multiplier(k):
    """A new dispatcher, as a new process has one."""
    @jit(key=(k,))
    def times(x):
        return x * np.float32(k)
    return times


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_entry_of_a_cpu_kernel_is_replaced(damage, counted):
    change, said = DAMAGES[damage]
    assert multiplier(3)(np.float32(2)) == 6 and counted.n_kernels == 1
    path, = compile.cache_folder().iterdir()
    path.write_bytes(change(path.read_bytes()))
    assert multiplier(3)(np.float32(2)) == 6 and counted.n_kernels == 2 and counted.rejected == {path: said}
    assert multiplier(3)(np.float32(2)) == 6 and counted.n_kernels == 2 and len(counted.rejected) == 1  # found
    assert f"kernel cache: {path}: {said}; compiled anew\n2 kernels compiled in " in counted.report()


def test_the_entry_of_one_kernel_in_the_place_of_another(counted):
    """As a whole, with its checksum: a wrong result if the key were not looked at."""
    multiplier(3)(np.float32(2))
    three, = compile.cache_folder().iterdir()
    multiplier(5)(np.float32(2))
    five, = {*compile.cache_folder().iterdir()} - {three}
    five.write_bytes(three.read_bytes())
    assert multiplier(5)(np.float32(2)) == 10 and counted.rejected == {five: "it is another kernel's"}


SCRIPT = """
import numpy as np
from ggml_py.kernels.compile import cache_folder, compiled
from ggml_py.kernels.cpu.elementwise import swiglu
out = np.empty((1, 4), np.float32)
swiglu.keywords["kernel"](np.full((1, 4), 2, np.float32), np.ones((1, 4), np.float32), out)
files = sorted(path.name for path in cache_folder().glob("*")) if cache_folder().exists() else []
print(out.tobytes().hex(), compiled.n_kernels, len(compiled.rejected), files)
"""


def run(cache, **options):
    """(standard output, standard error) of SCRIPT in a process of its own with the cache folder below `cache`."""
    env = environment(XDG_CACHE_HOME=str(cache), **options.pop("env", {}))
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(maxsplit=3), done.stderr


def test_processes_mend_what_they_find(tmp_path):
    """The kernels that one kernel calls, each with damage of its own kind: numba loads some of them while it compiles others. It
    is silent, as a library must be."""
    (value, n_compiled, n_bad, files), said = run(tmp_path)
    assert int(n_compiled) > 0 and n_bad == "0" and not said
    folder, = (tmp_path / "ggml-py" / "kernels").iterdir()
    whole = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    changes = [change for change, _ in DAMAGES.values()]
    for i, (path, entry) in enumerate(whole.items()):
        path.write_bytes(changes[5 * i % len(changes)](entry))
    (again, n_compiled, n_bad, names), said = run(tmp_path)
    assert (again, names) == (value, files) and int(n_compiled) > 0 and int(n_bad) > 1 and not said
    assert run(tmp_path) == ([value, "0", "0", files], "")


# A cache folder that cannot be used

def unusable(tmp_path) -> list[Path]:
    (tmp_path / "file").write_text("")
    return [tmp_path / "file", tmp_path / "file" / "below", Path("/dev/full"), Path("/proc/none-such")]


@pytest.mark.parametrize("place", range(4))
def test_a_folder_that_cannot_be_made(place, counted, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(unusable(tmp_path)[place]))
    for k in 3, 5:
        assert multiplier(k)(np.float32(2)) == 2 * k
    assert counted.n_kernels == 2
    warning, = caplog.messages
    assert warning == counted.unkept and str(compile.cache_folder()) in warning and warning in counted.report()
    assert "every process compiles its kernels anew" in warning


@pytest.mark.parametrize("function", ["replace", "fsync"])
@pytest.mark.parametrize("errno", [ENOSPC, EROFS])
def test_a_disk_that_refuses(function, errno, counted, monkeypatch, caplog):
    def fails(*args):
        raise OSError(errno, os.strerror(errno))
    monkeypatch.setattr(disk_cache.os, function, fails)
    for k in 3, 5:
        assert multiplier(k)(np.float32(2)) == 2 * k
    assert len(caplog.messages) == 1 and os.strerror(errno) in caplog.messages[0] and not [*compile.cache_folder().iterdir()]


def test_processes_without_a_cache(tmp_path):
    """Also one whose writes stop in the middle, and one where numba is told of other folders: a line of warning, no part of a
    file."""
    (value, n_compiled, _, _), _ = run(tmp_path)
    cut = dict(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)))
    nowhere = {"NUMBA_CACHE_DIR": str(tmp_path / "file"), "NUMBA_CACHE_LOCATOR_CLASSES": "InTreeCacheLocator"}
    for cache, options in (unusable(tmp_path)[1], {}), (tmp_path / "cut", cut), (unusable(tmp_path)[0], {"env": nowhere}):
        (found, n, n_bad, files), said = run(cache, **options)
        assert (found, n, n_bad, files) == (value, n_compiled, "0", "[]\n")
        assert len(said.splitlines()) == 1 and "cannot be written to" in said, said


# What is counted

def test_compilations_that_overlap_count_once():
    told, counted = [], Compiled()
    counted.watch = told.append
    with counted.running("this GPU", 4):
        counted.begin("this CPU")
        counted.add(1)
        assert counted.progress().startswith("compiling kernels for this GPU, once: 1 of 4, 0.0 s")
        counted.end()
        assert told == [True]
    assert told == [True, False] and counted.n_kernels == 1 and counted.seconds == counted.elapsed() > 0
    with counted.running("this CPU"):
        assert counted.progress().startswith("compiling kernels for this CPU, once: 1 so far, ")
    with pytest.raises(ZeroDivisionError), counted.running("this CPU"):
        1 / 0
    assert told == [True, False] * 3


def test_watching_loads_no_numba():
    code = "import sys; from ggml_py.kernels import disk_cache; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == 0
