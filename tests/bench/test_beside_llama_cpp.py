"""bench/beside_llama_cpp.py with a program in the place of llama-bench."""
import json
import sys

import pytest

from tiny_models import write_model

import beside_llama_cpp

PROGRAM = f"""#!{sys.executable}
import json, sys
given = sys.argv[1:]
if "-n" not in given or given[-2:] != ["-o", "json"]:
    sys.exit("not as asked")
tests = ("-p", "n_prompt", "n_gen"), ("-n", "n_gen", "n_prompt")
print(json.dumps([{{mine: int(given[given.index(option) + 1]), other: 0, "avg_ts": 0.5, "cpu_info": "a CPU",
                    "build_commit": "0123abc"}} for option, mine, other in tests]))
"""


@pytest.fixture
def llama_bench(tmp_path):
    path = tmp_path / "llama-bench"
    path.write_text(PROGRAM)
    path.chmod(0o755)
    return path


def test_record(tmp_path, llama_bench):
    model = write_model(tmp_path / "m.gguf", "llama", n_vocab=259, n_layer=1)
    assert beside_llama_cpp.main(["--llama-bench", str(llama_bench), "-m", str(model), "-t", "1", "-p", "4", "-n", "2", "-r", "1",
                                  "--turns", "1", "--out", str(tmp_path / "found.json")]) == 0
    record = json.loads((tmp_path / "found.json").read_text())
    assert (record["cpu"], record["llama.cpp"], record["model"]) == ("a CPU", "0123abc", "m.gguf")
    prompt, generation = record["tests"]
    assert (prompt["n_prompt"], prompt["n_gen"], generation["n_prompt"], generation["n_gen"]) == (4, 0, 0, 2)
    for test in prompt, generation:
        assert test["llama_cpp_ts"] == 0.5 and test["times"] == pytest.approx(2 * test["ggml_py_ts"], abs=0.2)


def test_medians():
    turns = [([{"n_prompt": 8, "n_gen": 0, "avg_ts": theirs}], [{"n_prompt": 8, "n_gen": 0, "avg_ts": ours}])
             for theirs, ours in ((10, 20), (10, 40), (20, 20))]
    assert beside_llama_cpp.rows(turns) == [{"n_prompt": 8, "n_gen": 0, "llama_cpp_ts": 10, "ggml_py_ts": 20, "times": 2.0,
                                             "least": 1.0, "most": 4.0}]


def test_a_program_that_fails(tmp_path, llama_bench):
    with pytest.raises(RuntimeError, match="exit code 1\nnot as asked"):
        beside_llama_cpp.run([str(llama_bench)])
