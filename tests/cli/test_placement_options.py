"""The options that say what lies on which device."""
import json

import pytest

from ggml_py.__main__ import main
from ggml_py.base.placement import ExpertsOnHost, Override, PlacementOptions
from ggml_py.cli.loading import placement_of, typed
from ggml_py.cli.main import parse
from ggml_py.engine.model import Model
from tiny_models import write_model
from notices import without_notice

COMMANDS = {"run": ["-p", "x"], "perplexity": [], "logits": ["--tokens", "x", "-o", "x.npy"], "attest": ["-o", "x.json"],
            "sweep-bench": [], "bench": []}


def asked(*argv: str, command: str = "run") -> PlacementOptions | None:
    options = parse([command, *COMMANDS[command], *argv])
    return placement_of(options, tuple(options.device or ["auto"]))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_runs_a_model_takes_them(command):
    assert asked("--device", "cpu", command=command) is None
    found = asked("--device", "cpu", "-ngl", "3", "-ot", "attn=cpu:1", command=command)
    assert found == PlacementOptions(("cpu",), 3, (Override("attn", "cpu:1"),))


def test_patterns_stand_in_the_order_of_the_line():
    found = asked("--device", "cpu", "-ot", "up=CPU,down=cpu:1", "-ncmoe", "2", "--ncmoe-last", "1", "-cmoe", "-ot", "gate=cpu:2")
    assert found.overrides == (Override("up", "cpu"), Override("down", "cpu:1"), ExpertsOnHost(2), ExpertsOnHost(1, last=True),
                               ExpertsOnHost(), Override("gate", "cpu:2"))
    assert typed(found) == "-ot up=cpu -ot down=cpu:1 -ncmoe 2 --ncmoe-last 1 -cmoe -ot gate=cpu:2"


@pytest.mark.parametrize("text, expected", [
    ("exps=CPU", [("exps", "cpu")]), (r"blk\.(1|2)\.=CUDA1", [(r"blk\.(1|2)\.", "cuda:1")]),
    ("a{1,2}=cpu,b=cuda", [("a{1,2}", "cpu"), ("b", "cuda:0")]), ("a=b=cpu:3", [("a=b", "cpu:3")])])
def test_override_tensor(text, expected):
    options = parse(["run", "-p", "x", "-ot", text])
    assert [tuple(override) for override in options.overrides] == expected


def test_several_devices_share_the_layers():
    found = asked("--device", "cpu,cpu:1", "-ts", "3/1", "-nkvo", "-ngl", "all")
    assert found == PlacementOptions(("cpu", "cpu:1"), tensor_split=(3.0, 1.0), kv_offload=False)
    assert typed(found) == "-ts 3,1 -nkvo" and typed(None) == ""
    assert asked("--device", "cpu,cpu:1", "-sm", "none", "-mg", "1") == PlacementOptions(("cpu", "cpu:1"), split_mode="none",
                                                                                     main_gpu=1)
    assert typed(PlacementOptions(("cpu", "cpu:1"), 2, split_mode="none", main_gpu=1)) == "-ngl 2 -sm none -mg 1"
    for name in "column", "tensor":
        assert asked("--device", "cpu,cpu:1", "-sm", name) == PlacementOptions(("cpu", "cpu:1"), split_mode="column")


@pytest.mark.parametrize("argv, message", [
    (["-ot", "exps"], "must be REGEX=DEVICE[,REGEX=DEVICE], with devices cpu, cpu:N, cuda or cuda:N, got 'exps'"),
    (["-ot", "exps=TPU0"], "got 'exps=TPU0'"),
    (["-ot", "(=cpu"], "-ot: '(' is not a pattern: missing ), unterminated subpattern"),
    (["-ot", "no_such=cpu"], "-ot: 'no_such' is in the name of none of the 21 tensors, such as token_embd.weight"),
    (["-cmoe"], "-cmoe: experts are in the name of none of the 21 tensors"), (["-ncmoe", "0"], "must be at least 1, got 0"),
    (["-ngl", "-5"], "must be at least 0, got -5"),
    (["-ngl", "0,99"], "must be one number, since all tests of a command have one placement, got '0,99'"),
    (["-sm", "row"], "-sm: 'row' is not possible: rows of a product would be summed"),
    (["-mg", "1"], "-mg: must be 0 to 0, the number of one of cpu, got 1"),
    (["-ts", "1,2"], "-ts: must be 1 numbers, for cpu, at least 0 and not all 0, got 1, 2"),
    (["-ts", "x"], "must be a number, got 'x'"), (["-no-fmoe"], "-no-fmoe: --no-fuse leaves out fusions"),
    (["-nr"], "-nr: weights are packed into tiles whenever they are loaded (see"),
    (["-rtr"], "-rtr: weights are packed into tiles whenever they are loaded (see"),
    (["-fmoe"], "-fmoe: ops are fused wherever a device has a kernel"),
    (["-ot", "ffn=CUDA99"], "-ot: cuda:99: "), (["-dev", "CUDA99"], "--device: cuda:99: "),
    (["--offload", "mul_mta=3"], "--offload: 'mul_mta' is not an op; allowed: all, get_rows, "),
    (["--offload", "mul_mta=3"], ", log_soft_max, top_k, mask_groups, "),  # names of ops, though one is that of an option too
    (["-mla", "3"], "-mla: latent attention is one definition"), (["-amb", "512"], "-amb: attention keeps no scores"),
    (["-op", "27,0"], "-op: ops have names here, not numbers"),
    (["-gp", "1,2"], "-gp: generation behind a prompt is -n with -d")])
def test_a_mistake_is_one_line(tmp_path, capsys, argv, message):
    path = write_model(tmp_path / "m.gguf", "llama")
    code = main(["sweep-bench", "-m", str(path), "--device", "cpu", "-c", "32", *argv])
    out, err = capsys.readouterr()
    err = without_notice(err)
    assert code == 2 and not out and err.count("\n") == 1 and message in err, err


def test_bench_tells_the_placement(tmp_path, capsys):
    path = write_model(tmp_path / "m.gguf", "llama")
    code = main(["bench", "-m", str(path), "--device", "cpu/cpu:1", "-ot", "ffn=cpu:2", "-p", "4", "-n", "2", "-r", "1", "-o",
                 "jsonl"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 0 and [(row["device"], row["placement"]) for row in rows] == 2 * [("cpu/cpu:1", "-ot ffn=cpu:2")]


def test_info_says_what_each_device_holds(tmp_path, capsys):
    """Without the devices; of a model whose caches lie with its layers."""
    path = write_model(tmp_path / "m.gguf", "llama", ("Q8_0",))
    assert main(["info", str(path), "-c", "100", "--device", "cuda:7", "-ngl", "2", "-ot", "ffn=CUDA3"]) == 0
    out = capsys.readouterr().out
    table = [line.split() for line in out[out.index("-ngl 2 -ot ffn=cuda:3"):].splitlines() if "cuda" in line or "cpu" in line]
    held = {name: [int(word.replace(",", "")) for word in words] for name, *words in table[1:]}
    with Model.load(path, placement=PlacementOptions(("cpu:7",), 2, (Override("ffn", "cpu:3"),))) as model:
        weights = model.weight_bytes()
        context = model.architecture.context_bytes(100, 1, "f16", "f16")
    assert held == {name.replace("cpu:", "cuda:"): [n, context[name], n + context[name]] for name, n in weights.items()}
    assert set(held) == {"cuda:7", "cuda:3", "cpu"} and held["cuda:3"][1] == 0


def test_offload():
    found = asked("--device", "cpu", "--offload", "mul_mat_id=64,mul_mat=never", "-nopo")
    assert found.offload == (("mul_mat_id", 64), ("mul_mat", None), ("all", None))
    assert typed(found) == "--offload mul_mat_id=64 --offload mul_mat=never --offload all=never"
