"""Copies of experts on the device of their layer: which come, when, and what is refused. That no bit depends on them:
test_placement.py, and tests/check/test_placement_faults.py."""
import numpy as np
import pytest

from ggml_py.base.errors import ParameterError
from ggml_py.base.placement import ExpertsOnHost, Override, PlacementOptions
from ggml_py.engine.model import Model
from ggml_py.models import hot_experts
from tiny_moe_models import write_moe_model

MOE = PlacementOptions(("cpu:1",), overrides=(ExpertsOnHost(),))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_moe_model(tmp_path_factory.mktemp("models") / "moe.gguf", "qwen3moe", ("Q8_0",))


def loaded(path, n, **options) -> Model:
    return Model.load(path, placement=PlacementOptions(("cpu:1",), overrides=(ExpertsOnHost(),), hot_experts=n, **options))


def test_experts_come_that_are_asked_for(path, monkeypatch):
    """Two of six of each layer. What a step counts is brought when a period has passed, and used a period later."""
    monkeypatch.setattr(hot_experts, "PERIOD", 4)
    with loaded(path, 0.4) as model, model.new_context(n_ctx=64) as context:
        hot = model.architecture.hot
        assert hot.n_slots == 2 and (hot.slots == -1).all()
        context.decode([5] * 4, logits="all")
        context.decode([5] * 4, logits="all")
        assert hot.n_brought == 4 and (hot.slots == -1).all() and hot.seen.sum(1).tolist() == [8, 8]
        context.decode([5] * 4, logits="all")
        assert [sorted(row[row >= 0]) for row in hot.slots] == [[0, 1], [0, 1]]
        most = [set(np.argsort(-rates, kind="stable")[:2]) for rates in hot.rates]
        assert [set(np.flatnonzero(row >= 0)) for row in hot.slots] == most
        assert model.report().startswith("hot experts: 4 of 4 slots in use, ")


def test_a_slot_goes_to_another_expert_only_if_that_is_asked_for_clearly_more(path):
    with loaded(path, 0.2) as model:
        hot = model.architecture.hot
        hot.rates[0] = [10, 9, 0, 0, 0, 0]
        hot._fill()
        assert hot.experts[0].tolist() == [0]
        hot.rates[0] = [10, 14, 0, 0, 0, 0]
        hot._fill()
        assert hot.experts[0].tolist() == [0] and hot.n_brought == 1
        hot.slots[0, 0] = 0
        hot.rates[0] = [10, 15, 0, 0, 0, 0]
        hot._fill()
        assert hot.experts[0].tolist() == [1] and hot.slots[0].tolist() == [-1] * 6 and hot.n_brought == 2


def test_no_more_is_brought_in_a_period_than_it_has_time_for(path, monkeypatch):
    with loaded(path, 0.9) as model:
        hot = model.architecture.hot
        one = sum(map(hot_experts.size_of, hot.of_layer[0]))
        monkeypatch.setattr(hot_experts, "MOST_BYTES", 3 * one)
        monkeypatch.setattr(hot_experts, "SWAP_BYTES", 2 * one)
        hot.rates[:, :3] = 1
        hot._fill()
        assert hot.n_brought == 3 and hot.experts[0].tolist() == [0, 1, 2, -1, -1]
        hot._fill()
        assert hot.n_brought == 6
        hot.rates[:, 3:] = [3, 4, 5]
        hot._fill()  # to the empty slots of both layers, three of four
        hot._fill()
        hot._fill()
        assert hot.n_brought == 6 + 4 + 2


def test_a_long_prompt_counts_no_more_than_a_few_tokens(path, monkeypatch):
    monkeypatch.setattr(hot_experts, "PERIOD", 4)
    with loaded(path, 0.4) as model, model.new_context(n_ctx=256) as context:
        hot = model.architecture.hot
        context.decode(list(range(64)), logits="all")
        for _ in range(3):
            context.decode([5] * 4, logits="all")
        assert 2.8 < hot.rates[0].sum() < 2.9 and hot.rates[0].max() > 0.95  # three looks, each a share of 1


def test_slots_and_their_bytes(path):
    with loaded(path, 0.5) as model:
        hot, one = model.architecture.hot, sum(map(hot_experts.size_of, model.architecture.hot.of_layer[0]))
        assert hot.n_slots == 3 and hot.n_bytes == 2 * 4 * one
        without = PlacementOptions(MOE.devices, overrides=MOE.overrides)
        with Model.load(path, placement=without) as plain:
            assert model.weight_bytes()["cpu:1"] - plain.weight_bytes()["cpu:1"] == hot.n_bytes
    for n_bytes, n_slots in (2 * 2 * one, 1), (2 * 3 * one - 1, 1), (2 * 3 * one, 2), (1 << 40, 6):
        with loaded(path, n_bytes) as model:
            assert model.architecture.hot.n_slots == n_slots
    with pytest.raises(ParameterError, match=f"^hot_experts: {4 * one - 1:,} bytes have no room for one expert of each layer and "
                                             f"zeros behind it; cpu:1 needs at least {4 * one:,}$"):
        loaded(path, 4 * one - 1)


@pytest.mark.parametrize("options, message", [
    (dict(devices=("cpu:1",)), "hot_experts: no layer of a GPU has all its experts on the CPU; allowed: 0"),
    (dict(devices=("cpu:1",), overrides=(Override("ffn_up_exps", "cpu"),)), "hot_experts: no layer of a GPU has all its experts"),
    (dict(devices=("cpu:1", "cpu:2"), split_mode="column"), "hot_experts: devices that share products have parts of experts"),
    (dict(devices=("cpu:1",), hot_experts=-1), "hot_experts: must be at least 0 bytes, got -1")])
def test_what_cannot_be(path, options, message):
    with pytest.raises(ParameterError) as caught:
        Model.load(path, placement=PlacementOptions(**{"hot_experts": 0.5, **options}))
    assert str(caught.value).startswith(message)


def test_nodes_of_hot_experts_have_no_other_device(path):
    with loaded(path, 0.5) as model, pytest.raises(ParameterError, match="^device_of: hot experts are computed where their"):
        model.new_context(n_ctx=8, device_of=lambda node: "cpu")


def test_where_no_logits_are_wanted_nothing_of_no_rows_runs(path):
    """The last layer's experts have no tokens then, and a GPU has no kernels for none."""
    with loaded(path, 0.4) as model, model.new_context(n_ctx=64) as context:
        context.decode([5, 6], logits="none")
        nodes = [node for run in context.program(2, 0).runs for node in run.nodes]
        assert nodes and all(result.shape[0] for node in nodes for result in node.results)
