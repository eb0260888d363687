"""Weights, caches and nodes on several devices: which has what, and the bits of one device wherever they are."""
import json
import re
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ggml_py.backends import cpu
from ggml_py.base.storage import n_bytes
from ggml_py.kernels import threads
from ggml_py.backends.cpu import CPUBackend
from ggml_py.base.errors import ParameterError, UserError
from ggml_py.engine.model import Model
from ggml_py.files.gguf import GGUFFile
from ggml_py.graph import columns, split
from ggml_py.models import command_r, exaone4, hot_experts
from ggml_py.base.placement import ExpertsOnHost, Override, PlacementOptions
from ggml_py.testing import assert_bitwise_equal, digest
from cuda_simulator import no_gpu
from guarded_cpu import guarded_devices
from tiny_delta_net_models import KINDS, write_delta_net_model
from tiny_hybrid_models import KINDS as HYBRID, write_hybrid_model
from tiny_layer_models import QUICK as LAYERED, write_layer_model
from tiny_models import write_model
from tiny_moe_models import ARCHITECTURES, write_moe_model

WRITERS = {**{arch: lambda path, arch=arch: write_model(path, arch, ("Q8_0", "Q4_1")) for arch in ("llama", "qwen2", "qwen3")},
           "tied": lambda path: write_model(path, "llama", ("Q8_0",), tied=True),
           # four devices can share all of them: heads, feed-forward, vocabulary
           **{f"wide{'-tied' * tied}": lambda path, tied=tied: write_model(
                  path, "qwen2", ("Q8_0", "Q4_1", "F32"), n_embd=128, n_head=8, n_head_kv=4, n_ff=288, n_vocab=160, tied=tied,
                  qkv_bias=True) for tied in (False, True)},
           **{kind: lambda path, kind=kind: write_moe_model(path, kind, ("Q8_0", "F32")) for kind in ARCHITECTURES},
           **{kind: lambda path, kind=kind: write_layer_model(path, kind, ("Q8_0", "Q4_1", "F32"))
              for kind in LAYERED},
           **{kind: lambda path, kind=kind: write_hybrid_model(path, kind, ("Q8_0", "F32")) for kind in HYBRID},
           **{kind: lambda path, kind=kind: write_delta_net_model(path, kind, ("Q8_0",)) for kind in KINDS}}
BY_LAYERS = "exaone4-swa", "command-r-plus"  # known by their 64 layers
MORE_WRITERS = {f"{kind}{end}": lambda path, kind=kind, sizes=sizes: write_layer_model(path, kind, ("Q8_0", "F32"), **sizes)
                for kind in BY_LAYERS for end, sizes in (("", {}), ("-4", dict(n_layer=4)))}
TOKENS = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5]]
DEVICES = "cpu", "cpu:1", "cpu:2", "cpu:3"


def decoded(model, **context_settings) -> np.ndarray:
    """Logits of two sequences, some of them together, one taken back and gone on; and ids."""
    with model.new_context(n_ctx=64, n_seq_max=2, **context_settings) as context:
        rows = [context.decode(tokens, logits="all") for tokens in TOKENS]
        rows += context.decode_batch([(1, [7, 8]), (0, [2])], "all")
        context.seq_rm(0, 11)
        rows.append(context.decode([9], logits="all"))
        ids = np.array([[float(i)] * model.n_vocab for i in context.greedy(7, 3, seq_id=1)], np.float32)
        return np.concatenate([*rows, ids])


@cache
def file_of(kind: str) -> Path:
    return (WRITERS | MORE_WRITERS)[kind](Path(mkdtemp()) / f"{kind}.gguf")


@cache
def expected(kind: str) -> np.ndarray:
    with Model.load(file_of(kind), device="cpu") as model:
        return decoded(model)


RECORDED = json.loads(Path(__file__).with_name("small_models.json").read_text())["digests"]


@pytest.mark.parametrize("kind", WRITERS)
def test_one_device_gives_the_bits_that_a_gpu_gave(kind):
    """Recorded when they were computed on both."""
    assert digest(expected(kind))[:24] == RECORDED[kind]


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"graphs": False}, {"no_fuse": "all"}], ids=["graphs", "eager", "unfused"])
@pytest.mark.parametrize("kind", WRITERS)
def test_a_gpu_gives_the_bits_that_were_recorded(kind, settings):
    if reason := no_gpu():
        pytest.skip(reason)
    with Model.load(file_of(kind), device="cuda:0") as model:
        assert digest(decoded(model, **settings))[:24] == RECORDED[kind]


def on_several(kind: str, options: PlacementOptions, **context_settings) -> np.ndarray:
    """What it decodes. Weights and products are where they were asked for."""
    backends = [backend for backend in guarded_devices(len(DEVICES)) if backend.device in options.needed]
    with Model(GGUFFile.open(file_of(kind)), *backends, placement=options) as model:
        placement = model.architecture.placement
        for (name, *_), tensor in model.architecture.w.loaded.items():
            assert tensor.device == placement.weight(name), tensor
            assert set(tensor.shards) <= {*placement.columns} and {held.device for held in tensor.held} >= {*tensor.shards}
        with model.new_context(n_ctx=8) as context:
            nodes = context.program(2, 1).nodes
        if not options.offload and not placement.columns:
            assert all(node.device == node.operands["w"].root.device for node in nodes if node.op in ("mul_mat", "mul_mat_id"))
        return decoded(model, **context_settings)


PATTERNS = [r"blk\.0\.", r"blk\.[12]\.", "attn_q", "attn_(k|v)", "attn_", "attn_norm", "ffn_(up|down)", "ffn_down", "ffn_gate",
            "exps", "ffn_down_exps", "ffn_(up|gate)_exps", "shexp", "ffn_gate_inp", "norm", "bias", "ssm_", "ssm_out",
            "shortconv", "token_embd", "^output", "sinks"]
OFFLOADS = (), (("all", 1),), (("all", 3),), (("mul_mat_id", 1), ("all", None)), (("mul_mat", None), ("all", 1))


@st.composite
def placements(draw, names: list[str]) -> PlacementOptions:
    devices = tuple(draw(st.lists(st.sampled_from(DEVICES), min_size=1, max_size=4, unique=True)))
    found = [pattern for pattern in PATTERNS if any(re.search(pattern, name) for name in names)]
    overrides = draw(st.lists(st.builds(Override, st.sampled_from(found), st.sampled_from(DEVICES)), max_size=4))
    return PlacementOptions(devices, draw(st.none() | st.integers(0, 5)), tuple(overrides),
                            draw(st.sampled_from(["layer", "none", "column"])),
                            draw(st.just(()) | st.tuples(*[st.sampled_from([1.0, 2.5])] * len(devices))),
                            draw(st.integers(0, len(devices) - 1)), draw(st.booleans()), draw(st.sampled_from(OFFLOADS)))


@st.composite
def hot_placements(draw) -> PlacementOptions:
    """Layers on other devices, their experts on the CPU but for copies."""
    devices = tuple(draw(st.lists(st.sampled_from(DEVICES[1:]), min_size=1, max_size=2, unique=True)))
    experts = ExpertsOnHost(draw(st.none() | st.just(2)))
    return PlacementOptions(devices, draw(st.none() | st.integers(2, 5)), (experts,), kv_offload=draw(st.booleans()),
                            offload=draw(st.sampled_from([(), (), (("all", 3),)])),
                            hot_experts=draw(st.sampled_from([0.2, 0.5, 0.9, 1 << 30])))


def check_any_placement(kind: str, data) -> None:
    """Weights of the host streamed or not, products shared or not."""
    options = data.draw(placements([*GGUFFile.open(file_of(kind)).tensors]))
    no_fuse, kv_write = data.draw(st.sampled_from([(), ("all",), ("elide",)])), data.draw(st.sampled_from(["set_rows", "cpy"]))
    with (mock.patch.multiple(split, WINDOW=0, LEAST_AHEAD=data.draw(st.sampled_from([1, 2, 5])),
                              WORTH=data.draw(st.sampled_from([1, 1 << 20]))),
          mock.patch.multiple(columns, EVERYWHERE=data.draw(st.sampled_from([0, 1 << 30])),
                              WORTH_A_GATHER=data.draw(st.sampled_from([0, 1 << 30])))):
        try:
            found = on_several(kind, options, no_fuse=no_fuse, kv_write=kv_write)
        except ParameterError as error:
            if error.parameter == "split_mode":
                return
            raise
    assert_bitwise_equal(found, expected(kind), f"{kind}: {options}")


@pytest.mark.parametrize("kind", WRITERS)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_placement_gives_the_bits_of_one_device(kind, data):
    """400 placements of models of every architecture."""
    check_any_placement(kind, data)


@pytest.mark.slow
@pytest.mark.parametrize("kind", BY_LAYERS)
@settings(max_examples=4, deadline=None)
@given(st.data())
def test_any_placement_of_64_layers(kind, data):
    check_any_placement(kind, data)


@pytest.mark.parametrize("kind, module, name", [("exaone4-swa-4", exaone4, "EXAONE4_WINDOWS"),
                                                ("command-r-plus-4", command_r, "COMMAND_R_NORMS")])
@settings(max_examples=4, deadline=None)
@given(st.data())
def test_any_placement_of_what_64_layers_have(kind, module, name, data):
    """In models of four."""
    with mock.patch.object(module, name, 4):
        check_any_placement(kind, data)


@pytest.mark.parametrize("kind", [*ARCHITECTURES, "qwen35moe"])
@settings(max_examples=6, deadline=None)
@given(st.data())
def test_any_copies_of_experts_give_the_bits_of_one_device(kind, data):
    """Copies come and go with every token."""
    options, no_fuse = data.draw(hot_placements()), data.draw(st.sampled_from([(), ("all",)]))
    with (mock.patch.multiple(hot_experts, PERIOD=data.draw(st.sampled_from([1, 3])),
                              BETTER=data.draw(st.sampled_from([0.1, 1.25]))),
          mock.patch.object(split, "WORTH", data.draw(st.sampled_from([1, 1 << 20])))):
        try:
            found = on_several(kind, options, no_fuse=no_fuse)
        except ParameterError as error:
            if error.parameter == "hot_experts":  # no layer is left that lies elsewhere than its experts
                return
            raise
    assert_bitwise_equal(found, expected(kind), f"{kind}: {options}")


# What the options mean

def layers_of(*devices, n_layer=4, **options) -> tuple[str, ...]:
    placement = PlacementOptions(devices, **options).place(n_layer, n_layer, is_tied=False)
    return *placement.layers, placement.output


@pytest.mark.parametrize("n, expected", [(None, "aaaaa"), (99, "aaaaa"), (5, "aaaaa"), (4, "haaaa"), (1, "hhhha"), (0, "hhhhh")])
def test_layers_are_counted_from_the_end_and_the_output_is_one(n, expected):
    names = {"a": "cuda:0", "h": "cpu"}
    assert layers_of("cuda:0", n_gpu_layers=n) == tuple(names[letter] for letter in expected)


@pytest.mark.parametrize("options, expected", [
    ({}, "00111"), (dict(tensor_split=(3, 1)), "00011"), (dict(tensor_split=(0, 1)), "11111"),
    (dict(tensor_split=(1, 0)), "00000"), (dict(tensor_split=(1, 4)), "01111"), (dict(n_gpu_layers=1), "hhhh1"),
    (dict(n_gpu_layers=3), "hh011"), (dict(split_mode="none", main_gpu=1), "11111"),
    (dict(split_mode="none", main_gpu=1, n_gpu_layers=2), "hhh11")])
def test_several_devices_share_the_layers(options, expected):
    """The output is on the last one."""
    names = {"0": "cuda:0", "1": "cuda:1", "h": "cpu"}
    assert layers_of("cuda:0", "cuda:1", **options) == tuple(names[letter] for letter in expected)


def test_the_first_pattern_decides_and_the_embedding_goes_with_the_output_where_it_is_tied():
    options = PlacementOptions(("cuda:0",), 2, (Override("ffn_up", "cuda:1"), Override("ffn", "cpu"), Override("up", "cuda:2")))
    placement = options.place(3, 4, is_tied=False)
    assert [placement.weight(name) for name in ("blk.2.ffn_up.weight", "blk.2.ffn_down.weight", "blk.0.attn_q.weight",
                                                "token_embd.weight", "output.weight", "output_norm.weight", "blk.3.attn_q.weight")
            ] == ["cuda:1", "cpu", "cpu", "cpu", "cuda:0", "cuda:0", "cuda:0"]
    assert options.place(3, 4, is_tied=True).weight("token_embd.weight") == "cuda:0"
    assert placement.memory(2) == "cuda:0" and options.needed == ["cuda:0", "cpu", "cuda:1", "cuda:2"]
    without = PlacementOptions(("cuda:0",), kv_offload=False)
    assert without.place(2, 2, False).memory(1) == "cpu" and without.needed == ["cuda:0", "cpu"]


@pytest.mark.parametrize("asked, layers", [(ExpertsOnHost(), [0, 1, 2, 3]), (ExpertsOnHost(2), [0, 1]),
                                           (ExpertsOnHost(1, last=True), [3]), (ExpertsOnHost(9), [0, 1, 2, 3])])
def test_experts_on_the_host(asked, layers):
    placement = PlacementOptions(("cuda:0",), overrides=(asked,)).place(4, 4, is_tied=False)
    on_host = lambda name: [i for i in range(4) if placement.weight(f"blk.{i}.{name}.weight") == "cpu"]
    for name in "ffn_up_exps", "ffn_gate_exps", "ffn_down_exps", "ffn_gate_up_exps", "ffn_down_chexps":
        assert on_host(name) == layers
    for name in "ffn_up_shexp", "ffn_gate_inp", "ffn_up", "attn_q":
        assert on_host(name) == []


@pytest.mark.parametrize("options, message", [
    (dict(split_mode="row"), "split_mode: 'row' is not possible: rows of a product would be summed across devices"),
    (dict(split_mode="graph"), "split_mode: 'graph' is not allowed; allowed: none, layer, column"),
    (dict(main_gpu=2), "main_gpu: must be 0 to 1, the number of one of cpu, cpu:1, got 2"),
    (dict(n_gpu_layers=-2), "n_gpu_layers: must be at least 0, got -2"),
    (dict(tensor_split=(1.0,)), "tensor_split: must be 2 numbers, for cpu, cpu:1, at least 0 and not all 0, got 1"),
    (dict(tensor_split=(0.0, 0.0)), "tensor_split: must be 2 numbers, for cpu, cpu:1, at least 0 and not all 0, got 0, 0"),
    (dict(overrides=(Override("a(", "cpu"),)), "overrides: 'a(' is not a pattern: missing ), unterminated subpattern")])
def test_what_cannot_be(options, message):
    with pytest.raises(ParameterError) as caught:
        PlacementOptions(("cpu", "cpu:1"), **options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("asked, message", [
    (Override("blk.9", "cpu:1"), r"^overrides: 'blk\.9' is in the name of none of the 21 tensors, such as token_embd\.weight, "),
    (ExpertsOnHost(1), "^overrides: experts are in the name of none of the 21 tensors, ")])
def test_a_pattern_of_no_tensor(asked, message):
    options = PlacementOptions(("cpu",), overrides=(asked,))
    with pytest.raises(ParameterError, match=message):
        Model.load(file_of("llama"), placement=options)


def test_auto_is_the_device_that_is_here():
    with Model.load(file_of("llama"), placement=PlacementOptions(("auto",), 1)) as model:
        assert model.device in ("cpu", "cuda:0") and set(model.backends) == {model.device, "cpu"}


def test_a_model_closes_the_devices_that_it_was_given_and_no_others():
    class Counting(CPUBackend):
        n_closed = 0

        def close(self):
            self.n_closed += 1
    given, lent = Counting(), Counting(device="cpu:1")
    with Model(GGUFFile.open(file_of("llama")), given) as model:
        model.backends["cpu:1"] = lent
    assert (given.n_closed, lent.n_closed) == (1, 0)


# Products that devices share

def shared(kind: str, *devices: str, worth_a_gather: int = 0, **options) -> dict[str, list[tuple[int, ...]]]:
    """Of each weight and cache that is cut, the shapes of its parts. worth_a_gather: bytes; 0: small matrices are cut, too."""
    placement = PlacementOptions(devices, split_mode="column", **options)
    with (mock.patch.object(columns, "WORTH_A_GATHER", worth_a_gather), Model.load(file_of(kind), placement=placement) as model,
          model.new_context(n_ctx=8) as context):
        cache = getattr(context.memory, "cache", context.memory)
        leaves = [*model.architecture.w.loaded.values(), *cache.k, *cache.v]
        return {leaf.name: [part.shape for part in leaf.shards.values()] for leaf in leaves if leaf.is_cut}


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("kind", ["wide", "wide-tied"])
def test_devices_share_heads_feed_forward_blocks_and_the_vocabulary(kind, n):
    """Whole tiles and whole heads, in equal shares as far as they go."""
    found = shared(kind, *DEVICES[:n])
    heads = {2: [2, 2], 3: [1, 2, 1], 4: [1, 1, 1, 1]}[n]
    tiles = {2: ([4, 5], [2, 3], [2, 2]), 3: ([3, 3, 3], [2, 1, 2], [1, 2, 1]), 4: ([2, 2, 3, 2], [1, 1, 2, 1], [1, 1, 1, 1])}[n]
    of_tiles = lambda i, k: [(32 * each, k) for each in tiles[i]]
    assert found["blk.0.attn_q.weight"] == [(64 * each, 128) for each in heads]
    assert found["blk.1.attn_v.weight"] == [(32 * each, 128) for each in heads]
    assert found["cache_k-1"] == found["cache_v-0"] == [(8, 32 * each) for each in heads]
    assert found["blk.0.ffn_up.weight"] == found["blk.0.ffn_gate.weight"] == of_tiles(0, 128)
    assert found["blk.0.ffn_down.weight"] == of_tiles(2, 288) and found["blk.1.attn_output.weight"] == of_tiles(2, 256)
    assert found["token_embd.weight" if kind == "wide-tied" else "output.weight"] == of_tiles(1, 128)
    assert not any("norm" in name or "bias" in name for name in found) and ("token_embd.weight" in found) == (kind == "wide-tied")


@pytest.mark.parametrize("n", [6, 8])
def test_many_devices_share_eight_heads(monkeypatch, tmp_path, n):
    """A head each, or for some two, and tiles of all matrices: the bits of one device."""
    monkeypatch.setattr(columns, "WORTH_A_GATHER", 0)
    path = write_model(tmp_path / "m.gguf", "qwen2", ("Q8_0", "Q4_1", "F32"), n_embd=256, n_head=16, n_head_kv=8, n_ff=576,
                       n_vocab=320, qkv_bias=True)
    with Model.load(path, device="cpu") as model:
        alone = decoded(model)
    devices = tuple(f"cpu:{i}" for i in range(n))
    with Model.load(path, placement=PlacementOptions(devices, split_mode="column")) as model:
        cut = [leaf for leaf in model.architecture.w.loaded.values() if leaf.is_cut]
        assert len(cut) == 15 and all(len(leaf.shards) == n for leaf in cut)
        assert_bitwise_equal(decoded(model), alone, f"{n} devices")


def test_shares_are_in_proportion_and_none_is_empty():
    assert shared("wide", "cpu", "cpu:1", tensor_split=(1, 8))["blk.0.ffn_up.weight"] == [(32, 128), (256, 128)]
    assert shared("wide", "cpu", "cpu:1", tensor_split=(1, 100))["cache_k-0"] == [(8, 32), (8, 96)]
    assert shared("wide", "cpu", "cpu:1", "cpu:2", tensor_split=(1, 0, 1)) == shared("wide", "cpu", "cpu:2")


def test_heads_that_are_too_few_are_one_devices_own():
    assert not [name for name in shared("llama", "cpu", "cpu:1", "cpu:2") if "attn" in name or "cache" in name]
    with pytest.raises(ParameterError, match="^split_mode: .* no product can be shared by 3 devices; allowed: matrices of as "
                                             "many times 32 rows, attention of as many KV heads$"):
        shared("qwen3moe", "cpu", "cpu:1", "cpu:2")


def test_small_products_that_are_gathered_are_every_devices_own():
    """Those behind attention and of feed-forward blocks, and the vocabulary's where it is small. What leads to heads or a gated
    unit is cut however small it is."""
    cut, devices = {*shared("wide", "cpu", "cpu:1")}, ("cpu", "cpu:1")
    with Model.load(file_of("wide"), device="cpu") as model:
        sizes = {name: n_bytes(tensor) for (name, *_), tensor in model.architecture.w.loaded.items()}
    gathered = {name for name in sizes if re.match(r"blk\.\d\.(attn_output|ffn_down)\.weight|output\.weight", name)}
    assert len(gathered) == 5 and gathered <= cut
    for limit in (*(sizes[name] for name in gathered), max(sizes.values()) + 1):
        whole = {name for name in gathered if sizes[name] < limit}
        assert {*shared("wide", *devices, worth_a_gather=limit)} == cut - whole


def test_weights_of_other_places_are_not_shared():
    overrides = Override(r"blk\.0\.ffn_up", "cpu:2"), Override("attn_v", "cpu")
    found = shared("wide", "cpu", "cpu:1", overrides=overrides)
    assert "blk.0.ffn_up.weight" not in found and "blk.0.ffn_gate.weight" not in found and "blk.1.ffn_up.weight" in found
    assert "blk.0.attn_v.weight" in found
    found = shared("wide", "cpu:1", "cpu:2", n_gpu_layers=2)
    assert "blk.0.attn_q.weight" not in found and {"blk.1.attn_q.weight", "output.weight"} <= {*found}


@pytest.mark.parametrize("kind, out", [("lfm2", "shortconv.out_proj"), ("nemotron_h", "ssm_out"), ("granitehybrid", "ssm_out")])
def test_recurrent_mixers_are_one_devices_own(kind, out):
    """But for the product behind them, as of gated delta nets; feed-forward blocks are shared."""
    found = shared(kind, "cpu", "cpu:1")
    assert {name.partition(".weight")[0].split(".", 2)[2] for name in found if "ssm" in name or "conv" in name} == {out}
    assert any("ffn_up" in name for name in found)


@pytest.mark.parametrize("worth_a_gather, n", [(0, 9), (columns.WORTH_A_GATHER, 4)])
def test_between_gathers_devices_work_side_by_side(monkeypatch, worth_a_gather, n):
    """Four exchanges a layer, and of the logits; two where small products are every device's own. All copies of an exchange come
    before what either device does next."""
    monkeypatch.setattr(columns, "WORTH_A_GATHER", worth_a_gather)
    options = PlacementOptions(("cpu:1", "cpu:2"), split_mode="column")
    with Model.load(file_of("wide"), placement=options) as model, model.new_context(n_ctx=16) as context:
        runs = context.program(5, 5).runs
    assert [run.device for run in runs] == ["cpu:1", "cpu:2"] * n + ["cpu:1"]
    gathered = [[copy.results[0].device for copy in run.copies] for run in runs[2:]]
    assert gathered == [["cpu:1", "cpu:2"], []] * (n - 1) + [["cpu:1"]]


def test_nodes_of_columns_have_no_other_device():
    with (Model.load(file_of("wide"), placement=PlacementOptions(DEVICES[:2], split_mode="column")) as model,
          pytest.raises(ParameterError, match="^device_of: devices that share columns have parts of weights; allowed: None$")):
        model.new_context(n_ctx=8, device_of=lambda node: "cpu")


# What crosses

def crossings(kind: str, options: PlacementOptions, n: int = 5) -> list[tuple[str, str, tuple[int, ...]]]:
    """(device, dtype, shape) of what a micro-batch of n tokens brings from other devices, but for inputs."""
    with Model.load(file_of(kind), placement=options) as model, model.new_context(n_ctx=16) as context:
        program = context.program(n, n)
        return [(run.device, copy.results[0].dtype, copy.results[0].shape) for run in program.runs for copy in run.copies
                if copy.src[0] not in program.inputs]


def test_hidden_states_and_the_choice_of_experts_cross_and_nothing_else():
    """Two layers with their experts on another device: the norm's result, ids and weights there, the sum back."""
    found = crossings("qwen3moe", PlacementOptions(("cpu:1",), overrides=(ExpertsOnHost(),)))
    there, back = [("cpu", "f32", (5, 64)), ("cpu", "i32", (5, 2)), ("cpu", "f32", (5, 2))], [("cpu:1", "f32", (5, 64))]
    assert found == [*there, *back] * 2


def test_a_boundary_of_layers_is_one_copy():
    assert crossings("llama", PlacementOptions(("cpu", "cpu:1"), tensor_split=(1, 2))) == [("cpu:1", "f32", (5, 64))]


# Weights that do not fit

def test_a_device_that_cannot_hold_its_part_is_named(monkeypatch):
    monkeypatch.setattr(CPUBackend, "memory_bytes", lambda self: 10**9 if self.device == "cpu" else 1000)
    with pytest.raises(UserError, match=r"the weights take [0-9,]+ bytes, more than cpu:1 has, 1,000$"):
        Model.load(file_of("llama"), placement=PlacementOptions(("cpu", "cpu:1")))
    weights_elsewhere = PlacementOptions(("cpu:1",), overrides=(Override("", "cpu"),))
    with Model.load(file_of("llama"), placement=weights_elsewhere) as model:
        assert [*model.weight_bytes()] == ["cpu"] and model.device == "cpu:1"
        with pytest.raises(UserError, match=r"^n_ctx: 1 sequences of 8 positions take [0-9,]+ bytes, more than cpu:1 has, 1,000$"
                           ):
            model.new_context(n_ctx=8)


def test_memory_that_one_device_does_not_have(monkeypatch):
    """It is named, what the others gave is given back, and all of them work on."""
    aligned, asked = cpu._aligned, []

    def scarce(n_bytes):
        asked.append(n_bytes)
        if n_bytes > 1 << 20:
            raise MemoryError
        return aligned(n_bytes)
    monkeypatch.setattr(cpu, "_aligned", scarce)
    options = PlacementOptions(("cpu:1",), n_gpu_layers=2)
    with Model.load(file_of("llama"), placement=options) as model:
        with pytest.raises(UserError, match=r"^n_ctx: 1 sequences of 40000 positions take [0-9,]+ bytes, more than cpu:1 and cpu "
                                            r"has: cpu(:1)?: [0-9]+ bytes are not to be had$"):
            model.new_context(n_ctx=40000)
        assert max(asked) > 1 << 20
        assert_bitwise_equal(decoded(model), expected("llama"), "logits")


def test_a_product_on_a_cpu_names_the_matrix_behind_it(tmp_path, monkeypatch):
    """The last one the first, which the next token reads."""
    named: list[tuple[int, int]] = []
    monkeypatch.setattr(threads, "ahead", lambda *region: named.append(region))
    with Model.load(write_model(tmp_path / "m.gguf", "llama", ("Q8_0",)), "cpu") as model, model.new_context(16) as context:
        context.decode([1])
        program, = context.programs.values()
        weights = [node.src[0] for node in program.nodes if node.op.startswith("mul_mat")]
        regions = [(model.backend.address(weight), n_bytes(weight)) for weight in weights]
    assert len(regions) > 6 and len(set(regions)) == len(regions) and named == regions[1:] + regions[:1]
