"""Options: whole words, named as typed where they are unknown; one meaning and one default in every command; errors in the words
of who reads them."""
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from fake_model import FakeModel

import ggml_py
from ggml_py.__main__ import main
from ggml_py.base.errors import ParameterError, UserError
from ggml_py.cli.main import COMMANDS, worded
from ggml_py.cli.parser import Parser

FOLDER = Path(ggml_py.__file__).resolve().parent
REQUIRED = {"quantize": ["x", "y", "Q8_0"], "logits": ["--tokens", "x", "-o", "x.npy"],
            "run": ["-p", "x"], "attest": ["-o", "x.json"], "imatrix": ["-o", "x"], "pull": ["smollm2"]}
OF_A_MODEL = sorted(set(COMMANDS) - {"pull", "info", "quantize"})


def parsers() -> dict[str, Parser]:
    found = {name: Parser(prog=name) for name in COMMANDS}
    for name, parser in found.items():
        import_module(f"ggml_py.cli.{name.replace('-', '_')}").options(parser)
    return found


def call(capsys, *argv, load_model=None):
    code = main([str(each) for each in argv], load_model)
    return code, *capsys.readouterr()


# Unknown options

WORDS = ["-hfx", "-pmode", "-otx", "-ngl9", "-t4", "-c512", "-fa1", "-mx", "-ctkf16", "-x", "--chunkx", "--Model", "--mode",
         "--model-path", "--no-such=3", "-hm"]


@pytest.mark.parametrize("command", COMMANDS)
def test_unknown_and_glued_options_are_named_as_typed(capsys, tmp_path, monkeypatch, command):
    """Whatever comes before and behind, also where another option is missing or its value is wrong."""
    monkeypatch.chdir(tmp_path)
    for word in WORDS:
        for more in REQUIRED.get(command, []), [], [] if command in ("pull", "bench") else ["-c", "many"]:
            for argv in [*more, word], [word, "99", *more]:
                code, out, err = call(capsys, command, *argv)
                assert (code, out) == (2, ""), argv
                assert err == f"ggml-py: error: {word}: unknown option (see ggml-py {command} --help)\n", argv
    assert not list(tmp_path.iterdir())


def test_options_before_the_command(capsys):
    for argv in ["-v"], ["--verbose", "run"], ["-hv"]:
        code, out, err = call(capsys, *argv)
        assert code == 2 and out == "" and err == f"ggml-py: error: {argv[0]}: unknown option (see ggml-py --help)\n"


def test_a_word_with_spaces_is_no_glued_option(capsys):
    code, _out, err = call(capsys, "run", "-p", "Hello", "-p mode")
    assert code == 2 and "unrecognized arguments: -p mode" in err


@pytest.mark.parametrize("argv, prompt", [
    (["-p", "- one"], "- one"), (["--prompt=-x"], "-x"), (["-p=-pmode"], "-pmode"), (["-p", "-"], "-"), (["-p", "-7"], "-7"),
    (["-p", "a=b", "-p", "last"], "last")])
def test_values_that_begin_with_a_dash(argv, prompt):
    parser = parsers()["run"]
    assert parser.parse(argv).prompt == prompt


def test_how_to_give_a_value_that_looks_like_an_option(capsys):
    _, _, err = call(capsys, "run", "-p", "-hello")
    hint = "a value that begins with - is written --prompt=-hello"
    assert err == f"ggml-py: error: -hello: unknown option; {hint} (see ggml-py run --help)\n"
    _, _, err = call(capsys, "run", "-p", "x", "--chat", "-hello")  # which takes no value
    assert err == "ggml-py: error: -hello: unknown option (see ggml-py run --help)\n"


@pytest.mark.parametrize("argv",
                         [["-c", "32"], ["-c=32"], ["--ctx-size", "32"], ["--ctx-size=32"], ["-c", "16", "--ctx-size=32"]])
def test_two_ways_to_give_a_value(argv):
    options = parsers()["perplexity"].parse(argv)
    assert options.n_ctx == 32 and set(options.given.values()) == {"-c"}


# One meaning

SHARED = {"model": "-m", "n_ctx": "-c", "device": "--device", "n_threads": "-t", "flash_attn": "-fa", "type_k": "-ctk",
          "type_v": "-ctv", "n_batch": "-b", "n_ubatch": "-ub",
          "no_fuse": "--no-fuse", "graphs": "--no-graphs", "kv_write": "--kv-write", "verbose": "--verbose", "text": "-f",
          "n_chunks": "--chunks",
          "temperature": "--temp", "chat": "--chat", "date": "--date"}


def test_an_option_is_the_same_everywhere():
    """Each name has one parameter and each parameter one name, in all commands; and one default, but for what --help says."""
    names, defaults = {}, {}
    for parser in parsers().values():
        for option, action in parser.known.items():
            names.setdefault(option, set()).add(action.dest)
            if option in SHARED.values() and action.default is not None:
                defaults.setdefault(option, set()).add(action.default)
    new_tokens = {"n_predict", "n_gen"}
    unlike = {"-o": {"output", "output_format"}, "-n": new_tokens, "--predict": new_tokens, "--n-predict": new_tokens,
              "-p": {"prompt", "n_prompt"}, "-r": {"stop", "repetitions"}}  # as the tools that these commands follow have them
    assert {option: dests for option, dests in names.items() if len(dests) > 1} == unlike
    assert all(names[option] == {dest} for dest, option in SHARED.items())
    several = {option: found for option, found in defaults.items() if len(found) > 1}
    assert several == {"-c": {512, 4096}, "-ub": {2048, 512}, "--chunks": {-1, 4}}
    assert defaults["-m"] == {"smollm2"} and defaults["-fa"] == {1} and "--device" not in defaults
    assert defaults["-ctk"] == defaults["-ctv"] == {"f16"}


@pytest.mark.parametrize("command", OF_A_MODEL)
def test_what_every_command_takes_that_runs_a_model(command):
    parser = parsers()[command]
    assert {"-m", "--device", "-t", "-fa", "-ctk", "-ctv"} <= set(parser.known) and not parser.known["-m"].required
    options = parser.parse([*REQUIRED.get(command, [])])
    assert options.model in ("smollm2", None) and options.device is None
    assert options.flash_attn == 1 and options.n_threads is None


@pytest.mark.parametrize("command", OF_A_MODEL)
def test_the_default_model(capsys, tmp_path, monkeypatch, command):
    class Asked(Exception):
        pass
    import ggml_py.engine.model  # noqa: F401  before `resolve` is another

    def resolve(name, log):
        assert name == "smollm2"
        raise Asked
    monkeypatch.setattr("ggml_py.files.pull.resolve", resolve)
    monkeypatch.chdir(tmp_path)
    import numpy as np
    np.save("x", np.arange(3))
    with pytest.raises(Asked):
        main([command, *[{"x": "x.npy"}.get(each, each) for each in REQUIRED.get(command, [])]])


def test_a_model_of_info_is_given_once(capsys):
    code, out, err = call(capsys, "info", "a.gguf", "-m", "b.gguf")
    assert code == 2 and out == "" and err == "ggml-py: error: MODEL: got a.gguf and -m b.gguf, one is enough\n"
    assert call(capsys, "info", "-m", "b.gguf")[2] == "ggml-py: error: b.gguf: no such file\n"


# Errors

def test_parameters_become_options():
    option_of = parsers()["sweep-bench"].option_of
    error = ParameterError("n_ubatch", "9 tokens, must be at most n_batch, 8; type_k and other_name stay, and device, seed")
    assert worded(error, option_of) == "-ub: 9 tokens, must be at most -b, 8; -ctk and other_name stay, and device, seed"
    assert worded(ParameterError("n_seq_max", "must be at least 1"), option_of) == "n_seq_max: must be at least 1"
    assert worded(UserError("/tmp/n_ctx/file: no such file"), option_of) == "/tmp/n_ctx/file: no such file"


@pytest.mark.parametrize("argv, said", [
    (["run", "-p", "x", "--device", "cuda:99"], "--device: cuda:99: "),
    (["verify", "--device", "cuda:99"], "--devices: cuda:99: "),
    (["bench", "--device", "cuda:99"], "--device: cuda:99: ")])
def test_a_device_that_is_not_there(capsys, tmp_path, argv, said):
    from tiny_models import write_model
    code, out, err = call(capsys, *argv, "-m", write_model(tmp_path / "m.gguf"))
    assert code == 2 and out == "" and err.startswith(f"ggml-py: error: {said}") and err.count("\n") == 1


def test_no_option_is_named_below_the_command_line():
    """Errors there are read by users of the Python interface too."""
    others = [path for path in FOLDER.rglob("*.py") if path.parent.name != "cli" and path.name != "recording.py"]
    found = [f"{path.relative_to(FOLDER)}:{i}" for path in others for i, line in enumerate(path.read_text().splitlines(), 1)
             if re.search(r"Error\(|raise |f\"|\.append\(", line)
             and re.search(r"[\"' (]--?[a-z][a-z-]*(?=[\"' ,:;)])", line) and "{sys.executable} -m" not in line]
    assert found == []


# Start-up

@pytest.mark.parametrize("argv",
                         [["--help"], ["--version"], ["perplexity", "-x"], *([command, "--help"] for command in COMMANDS)],
                         ids=" ".join)
def test_nothing_heavy_is_imported_to_answer(argv):
    """Neither libraries nor the commands that were not asked for."""
    program = ("import sys\nfrom ggml_py.__main__ import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
               "heavy = {'numpy', 'numba', 'gguf', 'rich', 'tokenizers', 'jinja2', 'typing'} & set(sys.modules)\n"
               "commands = [name for name in sys.modules if name.rpartition('.')[2] in map(lambda c: c.replace('-', '_'), %r)]\n"
               "commands = [name for name in commands if name.startswith('ggml_py.cli.')]\n"
               "print(sorted(heavy - before), commands, file=sys.stderr)" % [*COMMANDS])
    command = [sys.executable, "-c", "import sys; before = set(sys.modules)\n" + program, *argv]
    result = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parent, check=True)
    asked = [f"ggml_py.cli.{argv[0].replace('-', '_')}"] if argv[0] in COMMANDS else []
    assert result.stderr.splitlines()[-1] == f"[] {asked}"


def test_the_guard_against_ctrl_c_comes_first():
    """Before `main` can catch an interrupt, this package's first two modules are imported, os and signal, and nothing else."""
    program = (f"import os, signal, sys; sys.path.insert(0, {str(FOLDER.parent)!r}); before = set(sys.modules)\n"
               "import ggml_py.__main__; print(sorted(set(sys.modules) - before))")
    out = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True).stdout
    assert out == "['ggml_py', 'ggml_py.__main__']\n"


def test_a_fake_model_takes_every_setting(capsys, tmp_path):
    (tmp_path / "m.gguf").touch()
    settings = ["-fa", "on", "-t", 1, "-ctk", "q8_0", "-ctv", "f32", "--device", "cpu"]
    code, out, _ = call(capsys, "run", "-m", tmp_path / "m.gguf", "-p", "x", "-n", 1, *settings,
                        load_model=lambda path, device: FakeModel())
    assert code == 0 and out
