"""Models of a hub, which here is one of this machine (`hub_server`): what is chosen, fetched, continued, kept and refused; in
another process where the environment or its end matters."""
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from types import SimpleNamespace

import pytest
from hub_server import Hub, serving
from places import ROOT, environment
from tiny_models import write_model

from ggml_py.__main__ import main
from ggml_py.base.errors import ParameterError, UserError
from ggml_py.engine.model import Model
from ggml_py.files import hub as module
from ggml_py.files.hub import HubModel, Pulled, chosen_names, inside, pull_from_hub, pulled, record_of

CONTENT = {name: b"GGUF" + name.encode() + bytes(range(256)) * 1500 for name in (
    "tiny-Q8_0.gguf", "tiny-Q4_K_M.gguf", "big-F16-00001-of-00003.gguf", "big-F16-00002-of-00003.gguf",
    "big-F16-00003-of-00003.gguf", "sub/other-IQ2_S.gguf", "mmproj-tiny-Q4_K_M.gguf", "README.md")}
DIGEST = {name: sha256(content).hexdigest() for name, content in CONTENT.items()}


@pytest.fixture
def hub(monkeypatch):
    from huggingface_hub import constants
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serving(Hub({})) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)  # what is kept of an interrupted file is whole chunks
        monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
        hub.commit = hub.put("me/tiny", CONTENT)
        yield hub


def pull(name, folder, log=None, offline=False, thorough=False, **asked):
    return pull_from_hub(HubModel.of(name, **asked), log, folder, offline, thorough)


def files_in(folder):
    """Those that a user sees."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))


# What is chosen

@pytest.mark.parametrize("names, quant, expected", [
    (["a-Q8_0.gguf", "a-Q4_K_M.gguf"], "", "a-Q4_K_M.gguf"),
    (["a-F16.gguf", "a-q8_0.gguf"], "", "a-q8_0.gguf"),
    (["a-F16.gguf", "a-F32.gguf"], "", "a-F16.gguf"),
    (["a-F16.gguf", "a-Q5_K_M.gguf"], "q5_k_m", "a-Q5_K_M.gguf"),
    (["a-Q5_K_M.gguf"], "Q5_K", None),  # a whole word
    (["a.Q5_K.gguf"], "Q5_K", "a.Q5_K.gguf"),
    (["Q5_K-a/b.gguf"], "Q5_K", "Q5_K-a/b.gguf"),  # of the path, as llama.cpp looks for it
    (["a-Q5xK.gguf"], "Q5.K", None),  # a text, not a pattern
    (["mmproj-Q4_K_M.gguf", "mtp-Q4_K_M.gguf", "a-Q4_K_M.gguf"], "", "a-Q4_K_M.gguf"),
    (["mmproj-F16.gguf", "imatrix.gguf", "README.md"], "", None),
    (["a-F16-00002-of-00002.gguf", "a-F16-00001-of-00002.gguf"], "", "a-F16-00001-of-00002.gguf"),
    ([], "", None)])
def test_the_choice_is_that_of_llama_cpp(names, quant, expected):
    assert chosen_names(names, HubModel("a/b", quant)) == [expected] * (expected is not None)


@pytest.mark.parametrize("name", ["tiny", "a/b/c", "a/b:", "/b", "a/", "../b", "a/..", "a b/c", "a/b\n", "ä/b", ""])
def test_what_is_no_repository(name):
    with pytest.raises(UserError, match="is not a model of a hub, expected OWNER/NAME or OWNER/NAME:QUANT"):
        HubModel.of(name)


# Fetched

def test_pulled_once_then_found(hub, tmp_path):
    log = io.StringIO()
    path = pull("me/tiny", tmp_path, log)
    assert path.name == "tiny-Q4_K_M.gguf" and path.read_bytes() == CONTENT[path.name] and not path.is_symlink()
    assert log.getvalue() == f"pulling tiny-Q4_K_M.gguf (0.4 MB) of me/tiny, revision {hub.commit}\n"
    assert pulled(path) == Pulled("me/tiny", hub.commit, path.name, DIGEST[path.name], len(CONTENT[path.name]), DIGEST[path.name])
    assert files_in(tmp_path) == [path.name, f"{path.name}.pulled.json"] and len(hub.fetched()) == 1
    log = io.StringIO()
    assert pull("me/tiny:q4_k_m", tmp_path, log) == path and len(hub.fetched()) == 1 and log.getvalue() == ""
    assert path.stat().st_mode & 0o777 == record_of(path).stat().st_mode & 0o777


def test_all_parts_come(hub, tmp_path):
    path = pull("me/tiny:F16", tmp_path, sha256=tuple(DIGEST[f"big-F16-0000{i}-of-00003.gguf"] for i in (1, 2, 3)))
    assert path.name == "big-F16-00001-of-00003.gguf"
    assert files_in(tmp_path)[::2] == [f"big-F16-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    hub.put("me/parts", {name: data for name, data in CONTENT.items() if "00002" not in name})
    with pytest.raises(UserError, match="me/parts:F16: 1 of 3 parts are missing, such as 'big-F16-00002-of-00003.gguf'"):
        pull("me/parts:F16", tmp_path)


def test_a_file_by_its_name(hub, tmp_path):
    path = pull("me/tiny:Q8_0", tmp_path, file="sub/other-IQ2_S.gguf")
    assert path.parent.name == "sub" and path.read_bytes() == CONTENT["sub/other-IQ2_S.gguf"]
    for file, message in (("no.gguf", "has no file 'no.gguf'; its GGUF files: 'tiny-Q8_0.gguf', "),
                          ("README.md", "'README.md' is not a GGUF file")):
        with pytest.raises(UserError, match=message):
            pull("me/tiny", tmp_path, file=file)


def test_revisions(hub, tmp_path):
    """Each that is asked for has its folder; one that has moved on is fetched again; the same bytes never are."""
    first = pull("me/tiny", tmp_path)
    assert pull("me/tiny", tmp_path, revision=hub.commit).samefile(first) and len(hub.fetched()) == 1
    later = hub.put("me/tiny", {**CONTENT, "README.md": b"more"})
    assert pull("me/tiny", tmp_path) == first and pulled(first).revision == later and len(hub.fetched()) == 1
    hub.put("me/tiny", {**CONTENT, "tiny-Q4_K_M.gguf": b"GGUF other"})
    log = io.StringIO()
    assert pull("me/tiny", tmp_path, log).read_bytes() == b"GGUF other" and len(hub.fetched()) == 2
    assert f"{first} is another and will be fetched again" in log.getvalue()
    pinned = pull("me/tiny", tmp_path, revision=hub.commit)
    assert pinned.read_bytes() == CONTENT["tiny-Q4_K_M.gguf"] and pulled(pinned).revision == hub.commit
    with pytest.raises(UserError, match="pull: me/tiny@v9: has no revision 'v9'"):
        pull("me/tiny", tmp_path, revision="v9")
    hub.put("me/tiny", CONTENT, "feature/x..")
    assert pull("me/tiny", tmp_path, revision="feature/x..").parent.name == "me--tiny@feature%2Fx.."


@pytest.mark.parametrize("damage", [b"", b"GGUF", CONTENT["tiny-Q4_K_M.gguf"][:-1] + b"x"])
def test_a_damaged_file_is_fetched_again(hub, tmp_path, damage):
    path = pull("me/tiny", tmp_path)
    os.utime(record_of(path), ns=(1, 1))  # written before the file was
    path.write_bytes(damage)
    log = io.StringIO()
    assert pull("me/tiny", tmp_path, log).read_bytes() == CONTENT[path.name]
    assert "is damaged and will be fetched again" in log.getvalue()


def test_pull_looks_into_the_file(hub, tmp_path):
    """Loading does not, where nothing wrote into it since it came: that would take seconds of a large one."""
    path = pull("me/tiny", tmp_path)
    path.write_bytes(b"x" * path.stat().st_size)
    os.utime(path, ns=(1, 1))
    assert pull("me/tiny", tmp_path).read_bytes()[:1] == b"x"
    assert pull("me/tiny", tmp_path, thorough=True).read_bytes() == CONTENT[path.name]


def test_a_lost_record_is_written_again(hub, tmp_path):
    path = pull("me/tiny", tmp_path)
    for text in None, "{}", "[1]", "no JSON", json.dumps({**json.loads(record_of(path).read_text()), "n_bytes": "7"}):
        record_of(path).unlink()
        if text is not None:
            record_of(path).write_text(text)
            assert pulled(path) is None
        assert pull("me/tiny", tmp_path) == path and pulled(path).sha256 == DIGEST[path.name] and len(hub.fetched()) == 1


def test_small_files_that_a_hub_marks_otherwise(hub, tmp_path):
    hub.marks = False
    path = pull("me/tiny", tmp_path, sha256=(DIGEST["tiny-Q4_K_M.gguf"],))
    assert pulled(path).sha256 == DIGEST[path.name] and len(pulled(path).etag) == 40


def test_the_token_goes_to_the_hub_alone(hub, tmp_path, monkeypatch):
    hub.put("me/secret", CONTENT)
    hub.token = "hf_x"
    with pytest.raises(UserError, match="HF_TOKEN or `hf auth login` gives a token that may read it"):
        pull("me/secret", tmp_path)
    assert pull("me/secret", tmp_path, token="hf_x").is_file() and hub.secrets == [""]
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    assert pull("me/secret:Q8_0", tmp_path).is_file() and hub.secrets == ["", ""]


# Interrupted

def test_a_connection_that_is_cut_is_made_again(hub, tmp_path):
    hub.cut_after, hub.n_cuts = 150_000, 2
    assert pull("me/tiny", tmp_path).read_bytes() == CONTENT["tiny-Q4_K_M.gguf"]
    assert [each.partition(" bytes=")[2] for each in hub.fetched()] == ["", "131072-", "262144-"]


def test_what_was_interrupted_is_continued(hub, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.file_download.http_get", cut_short)
        with pytest.raises(KeyboardInterrupt):
            pull("me/tiny", tmp_path)
    assert files_in(tmp_path) == []
    log = io.StringIO()
    assert pull("me/tiny", tmp_path, log).read_bytes() == CONTENT["tiny-Q4_K_M.gguf"]
    assert "going on at 0.1 MB" in log.getvalue() and hub.fetched()[-1].endswith("bytes=100000-")
    assert not list(tmp_path.rglob(".*.partial"))


def cut_short(url, file, **settings):
    """`http_get`, which Ctrl-C ends."""
    file.write(CONTENT["tiny-Q4_K_M.gguf"][:100_000])
    raise KeyboardInterrupt


def test_a_connection_that_is_always_cut(hub, tmp_path, monkeypatch):
    hub.cut_after, hub.n_cuts = 0, 99
    with pytest.raises(UserError, match=f"'tiny-Q4_K_M.gguf': {hub.url} cannot be reached: ") as error:
        pull("me/tiny", tmp_path)
    assert "\n" not in str(error.value) and files_in(tmp_path) == []


def test_left_pieces_of_another_content_go(hub, tmp_path):
    path = pull("me/tiny", tmp_path)
    left = path.with_name(f".{path.name}.0123456789abcdef.partial")
    too_long = path.with_name(f".{path.name}.{DIGEST[path.name][:16]}.partial")
    left.write_bytes(b"x"), too_long.write_bytes(bytes(10**6))
    path.unlink()
    assert pull("me/tiny", tmp_path).read_bytes() == CONTENT[path.name] and not left.exists() and not too_long.exists()


def test_a_process_that_is_killed(tmp_path):
    """As a user's is: what it had is continued by the next, and nothing is there under the file's name meanwhile."""
    content = bytes(range(256)) * 100_000  # 25 MB: what is kept is chunks of 10
    with serving(Hub({}, pace=0.003)) as hub:
        hub.put("me/big", {"big.gguf": content})
        command = [sys.executable, "-m", "ggml_py", "pull", "me/big"]
        where = dict(env=environment(HF_ENDPOINT=hub.url, XDG_CACHE_HOME=str(tmp_path), HF_HUB_OFFLINE="0"), cwd=ROOT)
        with subprocess.Popen(command, **where, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            end = time.monotonic() + 30
            while not any(path.stat().st_size for path in tmp_path.rglob(".big.gguf.*.partial")):
                assert time.monotonic() < end and process.poll() is None
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
        assert not list(tmp_path.rglob("big.gguf"))
        hub.pace = 0
        done = subprocess.run(command, **where, capture_output=True, text=True)
        path, = tmp_path.rglob("big.gguf")
        assert done.returncode == 0 and done.stdout == f"{path}\n" and path.read_bytes() == content
        assert re.search(r", going on at [\d.]+ MB\)", done.stderr) and " bytes=" in hub.fetched()[-1]
        assert f"revision {pulled(path).revision}, sha256 {sha256(content).hexdigest()}" in done.stderr
        hub.asked.clear()
        where["env"]["HF_HUB_OFFLINE"] = "1"
        offline = subprocess.run(command, **where, capture_output=True, text=True)
        assert offline.returncode == 0 and offline.stdout == done.stdout and hub.asked == []
        assert "is not asked for, as HF_HUB_OFFLINE says; taking what is here\n" in offline.stderr


def test_two_at_once(hub, tmp_path):
    hub.pace = 0.05
    log = io.StringIO()
    with ThreadPoolExecutor(3) as threads:
        paths = set(threads.map(lambda _: pull("me/tiny", tmp_path, log), range(3)))
    assert len(paths) == 1 and len(hub.fetched()) == 1 and paths.pop().read_bytes() == CONTENT["tiny-Q4_K_M.gguf"]


# Refused

def test_a_wrong_sha256(hub, tmp_path):
    with pytest.raises(UserError, match=f"me/tiny: tiny-Q4_K_M.gguf: sha256 is {DIGEST['tiny-Q4_K_M.gguf']}, must be {'0' * 64}"):
        pull("me/tiny", tmp_path, sha256=("0" * 64,))
    assert hub.fetched() == [] and files_in(tmp_path) == []
    path = pull("me/tiny", tmp_path)
    for offline in False, True:
        with pytest.raises(UserError, match=f"sha256 is {DIGEST[path.name]}, must be {'0' * 64}"):
            pull("me/tiny", tmp_path, sha256=("0" * 64,), offline=offline)
    with pytest.raises(ParameterError, match="sha256: me/tiny:F16 has 3 files, got 1"):
        pull("me/tiny:F16", tmp_path, sha256=("0" * 64,))


@pytest.mark.parametrize("marks", [True, False])
def test_what_came_wrong_is_thrown_away(hub, tmp_path, marks):
    hub.wrong, hub.marks = True, marks
    with pytest.raises(UserError, match=f"must have {DIGEST['tiny-Q4_K_M.gguf']}; it is thrown away"):
        pull("me/tiny", tmp_path, sha256=(DIGEST["tiny-Q4_K_M.gguf"],))
    assert files_in(tmp_path) == [] and not list(tmp_path.rglob(".*.partial"))


@pytest.mark.parametrize("name, message", [
    ("none", "has no such repository, or it is private; HF_TOKEN or"),
    ("private", "no permission: .* answers 401; HF_TOKEN or"),
    ("forbidden", "no permission: .* answers 403: this token may not; HF_TOKEN or"),
    ("gated", "its owner gives it to those who accept the terms at .*/me/gated; HF_TOKEN or"),
    ("broken", "answers 500$"), ("tiny:Q3_K", "has no model 'Q3_K'; its GGUF files: 'tiny-Q8_0.gguf', "),
    ("empty", "has no model; its GGUF files: none")])
def test_what_a_hub_refuses(hub, tmp_path, name, message):
    hub.put("me/empty", {"README.md": b""})
    with pytest.raises(UserError, match=f"^pull: me/{name}: .*{message}") as error:
        pull(f"me/{name}", tmp_path)
    assert "\n" not in str(error.value) and files_in(tmp_path) == []


@pytest.mark.parametrize("name", ["../x.gguf", "/x.gguf", "a/../../x.gguf", "a//x.gguf", "./x.gguf", "..\\x.gguf", "c:x.gguf",
                                  "a\nb.gguf", "a\0.gguf"])
def test_a_name_that_leaves_the_folder(hub, tmp_path, name):
    hub.put("me/evil", {name: b"GGUF"})
    for asked in {}, {"file": name}:
        with pytest.raises(UserError, match="me/evil: the file name .* leaves the folder of its model") as error:
            pull("me/evil", tmp_path / "in", **asked)
        assert "\n" not in str(error.value)
    assert hub.fetched() == [] and files_in(tmp_path) == []
    assert inside(tmp_path, "a/b.gguf", HubModel("a/b")) == tmp_path / "a" / "b.gguf"


def test_a_file_over_50_gb(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.MAX_HTTP_DOWNLOAD_SIZE", 1000)
    with pytest.raises(UserError, match="of more than 1,000 the hub gives by Xet alone: `hf download me/tiny`"):
        pull("me/tiny", tmp_path)


def test_what_is_no_hub(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "hub", lambda: "it")
    hub.repos["me/odd"] = {"main": ("v1", {"a.gguf": b""})}
    with pytest.raises(UserError, match="pull: me/odd: it names no commit of it, but 'v1'"):
        pull("me/odd", tmp_path)


def test_offline(hub, tmp_path):
    with pytest.raises(UserError, match="pull: me/tiny: is not here, and no hub is asked"):
        pull("me/tiny", tmp_path, offline=True)
    path, parts = pull("me/tiny", tmp_path), pull("me/tiny:F16", tmp_path)
    asked = len(hub.asked)
    assert pull("me/tiny", tmp_path, offline=True) == path and pull("me/tiny:f16", tmp_path, offline=True) == parts
    with pytest.raises(UserError, match="me/tiny:Q8_0: is not here"):
        pull("me/tiny:Q8_0", tmp_path, offline=True)
    last = parts.with_name(parts.name.replace("00001-of", "00003-of"))
    record = record_of(last).read_text()
    record_of(last).write_text(record.replace(hub.commit, "0" * 40))
    with pytest.raises(UserError, match="pull: me/tiny:F16: its parts are of 2 revisions, and no hub is asked"):
        pull("me/tiny:F16", tmp_path, offline=True)
    last.write_bytes(b"GGUF")
    with pytest.raises(UserError, match="00003-of-00003.gguf: is damaged, and no hub is asked"):
        pull("me/tiny:F16", tmp_path, offline=True)
    last.unlink()
    with pytest.raises(UserError, match="pull: me/tiny:F16: 1 of 3 parts are missing, such as 'big-F16-00003-of-00003.gguf'"):
        pull("me/tiny:F16", tmp_path, offline=True)
    assert len(hub.asked) == asked


def test_a_hub_that_is_not_there(tmp_path, monkeypatch):
    from huggingface_hub import constants
    with serving(Hub({})) as hub:
        pass
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    with pytest.raises(UserError, match=f"pull: me/tiny: {hub.url} cannot be reached: .*refused"):
        pull("me/tiny", tmp_path)


def test_a_folder_that_cannot_be_written_to(hub, tmp_path):
    (tmp_path / "hub").write_bytes(b"")
    with pytest.raises(UserError, match="cannot be written: "):
        pull("me/tiny", tmp_path)


def test_a_disk_without_room(hub, tmp_path, monkeypatch):
    """Known before, or met on the way, as by a quota: then what was written is continued."""
    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(UserError, match="'tiny-Q4_K_M.gguf' takes 384,020 bytes more, 1,000 are free in .*me--tiny@main$"):
            pull("me/tiny", tmp_path)
    assert hub.fetched() == []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # Python ignores the signal, and gets an error
    try:
        with pytest.raises(UserError, match="pull: me/tiny: 'tiny-Q4_K_M.gguf': File too large$"):
            pull("me/tiny", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert files_in(tmp_path) == [] and pull("me/tiny", tmp_path).read_bytes() == CONTENT["tiny-Q4_K_M.gguf"]
    assert hub.fetched()[-1].endswith(" bytes=100000-")


# In commands and in Python

def test_commands_and_attestations(hub, tmp_path, monkeypatch, capsys):
    write_model(tmp_path / "m.gguf", "llama", ("Q8_0",), n_vocab=259)
    commit = hub.put("me/real", {"m-Q8_0.gguf": (tmp_path / "m.gguf").read_bytes()})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    call = lambda *argv: (main([str(each) for each in argv]), *capsys.readouterr())
    code, out, err = call("pull", "me/real:q8_0")
    path = tmp_path / "cache" / "ggml-py" / "models" / "hub" / "me--real@main" / "m-Q8_0.gguf"
    assert code == 0 and out == f"{path}\n" and err.endswith(f"revision {commit}, sha256 {pulled(path).sha256}\n")
    code, out, _ = call("info", "-hf", "me/real", "--offline")
    assert code == 0 and "general.architecture" in out
    with Model.load(hf="me/real:Q8_0", device="cpu") as model, Model.load(hf=HubModel("me/real", revision=commit)) as pinned:
        assert model.file.path == path and pinned.file.path.parent.name == f"me--real@{commit}"
    for argv, message in ((["run", "-hf", "me/real", "-m", "x", "-p", "a"], "-m: -hf names the model"),
                          (["run", "--revision", "x", "-p", "a"], "--revision: is of -hf, which is not given"),
                          (["pull", "smollm2", "-hff", "x"], "-hff: is of a hub's OWNER/NAME, not of smollm2"),
                          (["pull", "me/real", "--sha256", "12"], "argument --sha256: must be 64 hexadecimal digits, got '12'"),
                          (["pull", "me/real", "--sha256", f"{'0' * 64},{'1' * 64}"], "--sha256: me/real has 1 file, got 2"),
                          (["info", "x", "-hf", "me/real"], "MODEL: got x and -hf me/real, one is enough"),
                          (["bench", "-hf", "me/real,me/tiny", "-hff", "x"], "-hff: is of one model, and -hf names several"),
                          (["pull", "me/none"], "pull: me/none: ")):
        code, out, err = call(*argv)
        assert code == 2 and out == "" and message in err and err.count("\n") == 1, argv
    for wrong in dict(hf=None), dict(path="x", hf="me/real"):
        with pytest.raises(ParameterError, match="path: "):
            Model.load(**wrong)
