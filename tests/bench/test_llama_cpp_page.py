"""docs/llama-cpp-users.md is what bench/llama_cpp_page.py writes, and each option that is typed does what the page says."""
import pytest

page = pytest.importorskip("llama_cpp_page", reason="needs the checkout")

from ggml_py.__main__ import main
from ggml_py.base.errors import UserError
from ggml_py.cli.llama_cpp import ABSENT, ALWAYS, DIFFERENT, TOOLS, rows_of

REQUIRED = {"quantize": ["x", "y", "Q8_0"], "imatrix": ["-o", "x"]}
VALUES = {  # of options whose value is no number
    "prompt": "x", "model": "m.gguf", "text": "file", "flash_attn": "on", "numa": "numactl", "device": "CPU,CUDA0",
    "load_mode": "mmap",
    "-ot": "exps=CPU", "split_mode": "tensor", "tensor_split": "3,1", "fit": "on", "type_k": "q8_0", "type_v": "f32",
    "logit_bias": "15043+1", "grammar": "x", "system": "x", "system_file": "x", "template": "x", "template_file": "x",
    "template_arguments": "{}", "reasoning": "off", "effort": "low", "stop": "x", "draft_source": "draft-simple",
    "model_draft": "x",
    "output": "md", "output_err": "csv", "n_pg": "1,2", "output_format": "jsonl", "kl_divergence_base": "x", "output_type": "1",
    "imatrix": "x", "output_tensor_type": "q8_0", "token_embedding_type": "Q8_0", "tensor_types": "attn_q=q8_0"}
OLDER = "-gp -fmoe --fused-moe -mmp -ins --instruct -cml --chatml".split()  # which the tools had once, or have under other names
OF_IMATRIX = {"output_format": "gguf", "output": "x"}
EACH = [(tool, option) for tool in TOOLS for option in page.options_of(tool)]


@pytest.fixture(scope="module")
def parsers():
    return {command: page.parser_of(command) for command in TOOLS.values()}


def test_the_page_is_what_the_script_writes():
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run python bench/llama_cpp_page.py"


def test_every_option_has_its_place():
    """Those of llama.cpp that neither the parser nor the tables know, or that take a value in one of both alone."""
    assert [(tool, *option.names) for tool, option in EACH if option.fate == "unknown"] == []
    assert len(EACH) > 900 and {option.fate for _, option in EACH} == {"same", "different", "always", "absent"}


@pytest.mark.parametrize("tool", TOOLS)
def test_options_that_are_taken(parsers, tool):
    parser = parsers[TOOLS[tool]]
    required = REQUIRED.get(parser.command, [])
    for option in page.options_of(tool):
        if option.fate not in ("same", "different"):
            continue
        for name in option.names:
            action = parser.known[name]
            if action.dest in ("help", "version") or name == "--list-devices":
                continue
            values = VALUES | (OF_IMATRIX if tool == "llama-imatrix" else {})
            value = [] if action.nargs in (0, "?") else [values.get(action.option_strings[0], values.get(action.dest, "1"))]
            options = parser.parse([*required, name, *value])
            assert action.option_strings[0] in options.given.values(), name
            assert not value or getattr(options, action.dest) not in (None, [], ()), name


@pytest.mark.parametrize("tool", TOOLS)
def test_options_that_are_refused_and_why(parsers, tool):
    parser = parsers[TOOLS[tool]]
    for option in page.options_of(tool):
        if option.fate == "absent":
            for name in option.names:
                for argv in [name], [f"{name}=3"]:
                    with pytest.raises(UserError) as error:
                        parser.parse([*REQUIRED.get(parser.command, []), *argv])
                    assert str(error.value) == f"{name}: {option.how} (see ggml-py {parser.command} --help)"


@pytest.mark.parametrize("tool", TOOLS)
def test_options_that_change_nothing(parsers, tool):
    parser = parsers[TOOLS[tool]]
    required = REQUIRED.get(parser.command, [])
    for option in page.options_of(tool):
        if option.fate == "always":
            for name in option.names:
                assert parser.parse([name, *required]) == parser.parse([*required, name]) == parser.parse(required)
                with pytest.raises(UserError, match=f"{name}=1: unknown option"):
                    parser.parse([f"{name}=1", *required])


def test_nothing_in_the_tables_is_of_no_tool():
    used = {(option.fate, name) for _, option in EACH for name in option.names}
    for fate, table in ("absent", ABSENT), ("always", ALWAYS), ("different", DIFFERENT):
        for command in TOOLS.values():
            assert [name for name, _ in rows_of(table, command) if (fate, name) not in used and name not in OLDER] == []


@pytest.mark.parametrize("argv, said", [
    (["run", "-fa", "off"], "off is not possible: attention is one fused op"), (["bench", "-fa", "0,1"], "0,1 is not possible"),
    (["run", "-lm", "dio"], "must be auto, none, mmap"), (["run", "--spec-type", "draft-eagle3"], "must be ngram, model, mtp"),
    (["run", "-l", "7"], "must be ID+BIAS or ID-BIAS, such as 15043+1 or 15043-inf, got '7'"), (["run", "-l", "7+inf"],
                                                                                                "got '7+inf'"),
    (["run", "-rea", "maybe"], "must be on, off, auto"), (["run", "--chat-template-kwargs", "[]"], "must be an object of JSON"),
    (["run", "--chat-template-kwargs", "{"], "must be JSON"), (["run", "-s", "-1"], "must be at least 0, got -1"),
    (["perplexity", "--temp", "0.8"], "--temp: nothing is drawn here"), (["run", "--temperature", "hot"], "must be a number"),
    (["bench", "-nkvo", "0"], "-nkvo: is a switch, without a value, got '0'"), (["run", "--jinja", "1"], "--jinja: is a switch"),
    (["imatrix", "-o", "x", "--output-format", "dat"], "must be gguf, got 'dat'"),
    (["quantize", "--prune-layers", "1"], "--prune-layers: a model without layers is another model")])
def test_what_differs_is_said_in_one_line(capsys, argv, said):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert not out and said in err and err.count("\n") == 1
