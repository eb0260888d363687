"""Faults of a model on several devices: the axis `placement` catches them, and bisection names a node on the device that has
them."""
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from ggml_py.backends.cpu import CPUBackend
from ggml_py.graph import columns, program, split
from ggml_py.graph.program import Fetch
from ggml_py.models.hot_experts import HotExperts, size_of
from ggml_py.models.weights import Weights
from ggml_py.state.kv_cache import KVCache
from planted_faults import (FaultyBackend, after, caught_by, instead, norms, other_order, rough_swiglu, verify,
                            without_the_last_expert, write)

WINDOWS = np.random.default_rng(0).integers(0, 70, (2, 40)).astype(np.int32)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {kind: write(folder / f"{kind}.gguf", kind) for kind in ("llama", "qwen3moe", "qwen35", "gpt-oss")}


def verified(path, make=None, axis="placement"):
    """On one device all is right. make: device -> its backend where there are several."""
    return verify(path, WINDOWS, [axis], {"cpu": CPUBackend()}, make)


@pytest.mark.parametrize("kind", ["llama", "qwen3moe", "qwen35", "gpt-oss"])
@pytest.mark.parametrize("axis, n", [("placement", 6), ("letters", 5)])
def test_without_a_fault(paths, kind, axis, n):
    verification = verified(paths[kind], axis=axis)
    assert verification.confirmed and [r.status for r in verification.results] == ["same"] * n, verification.verdict()


@pytest.mark.parametrize("kind, op, twins", [
    ("llama", "swiglu", {"swiglu": instead(rough_swiglu)}), ("llama", "rms_norm", norms(other_order)),
    ("qwen3moe", "mul_mat_id", {"mul_mat_id": after(without_the_last_expert)})])
def test_a_kernel_that_is_wrong_on_one_device(paths, kind, op, twins):
    """An approximation; an order of sums; an expert that is missing from those in use."""
    make = lambda device: FaultyBackend(twins, device) if device == "cpu:1" else CPUBackend(device=device)
    verification = verified(paths[kind], make)
    assert caught_by(verification) == {"placement"}
    found = verification.bisect(verification.first_mismatch())
    assert op in (found.op, *found.parts), str(found)
    assert found.captures[1][-1].device == "cpu:1" and found.captures[0][-1].device == "cpu"


class Late(CPUBackend):
    """Copies from other devices come when the steps that read them have run."""
    late = ()

    def copy(self, buffer, offset, source, source_buffer, source_offset, n_bytes):
        if source is self:
            super().copy(buffer, offset, source, source_buffer, source_offset, n_bytes)
        else:
            self.late = *self.late, (buffer, offset, source, source_buffer, source_offset, n_bytes)

    def run(self, steps):
        super().run(steps)
        for copy in self.late:
            super().copy(*copy)
        self.late = ()


def test_a_copy_that_is_not_awaited(paths):
    """The first node behind the boundary is named: when it is looked at, what it should have read is there."""
    verification = verified(paths["llama"], lambda device: Late(device=device))
    assert caught_by(verification) == {"placement"}
    found = verification.bisect(verification.first_mismatch())
    assert found.name == "attn_norm-1-act" and found.captures[1][-1].device == "cpu", str(found)


def test_a_stale_copy(paths, monkeypatch):
    """What another device had of a hidden state stays from the first micro-batch."""
    copied, brought = CPUBackend.copy_together, set()

    def once(copies):
        for copy in copies:
            if (place := (id(copy[1]), copy[2])) not in brought:
                brought.add(place)
                copied([copy])
    monkeypatch.setattr(CPUBackend, "copy_together", staticmethod(once))
    verification = verified(paths["llama"], axis="letters")
    assert caught_by(verification) == {"letters"}
    found = verification.bisect(verification.first_mismatch())
    assert found.culprits == ["the copy of l_out-0 from cpu:1 to cpu, in: letters, half of the layers on cpu:1, by copies, "
                              "8 at a time"], str(found)


@pytest.mark.parametrize("kind, weight, part", [
    ("llama", "blk.1.attn_q.weight", "rows 0 to 63"), ("llama", "blk.0.attn_k.weight", "rows 0 to 31"),
    ("qwen3moe", "blk.1.ffn_down_exps.weight", "rows 0 to 31"), ("gpt-oss", "blk.0.ffn_up_exps.bias", "columns 0 to 31")])
def test_parts_of_a_weight_that_are_swapped(paths, monkeypatch, kind, weight, part):
    load = Weights._leaf

    def swapped(weights, key, *args):
        tensor = load(weights, key, *args)
        if key[0] == weight and tensor.is_cut:
            a, b = tensor.shards.values()
            a.buffer, b.buffer = b.buffer, a.buffer
        return tensor
    monkeypatch.setattr(Weights, "_leaf", swapped)
    verification = verified(paths[kind])
    assert caught_by(verification) == {"placement"}
    found = verification.bisect(verification.first_mismatch())
    assert any(f"{weight}@cpu is not {part} of {weight}, in: placement, columns" in each for each in found.culprits), str(found)


def test_parts_of_a_result_that_change_places(paths, monkeypatch):
    """The gather puts them side by side in another order."""
    monkeypatch.setattr(columns._Sharing, "_gathered", lambda self, tensor, device: self._make(
        tensor.name, device, "concat_heads", self.parts[tensor][::-1], dict(n_head=1, n_head_y=1), tensor.maker).results[0])
    verification = verified(paths["llama"])
    assert caught_by(verification) == {"placement"}
    assert verification.bisect(verification.first_mismatch()).name == "kqv_out-0"


def test_a_cache_on_the_wrong_device(paths, monkeypatch):
    """Of layer 1 each device writes K of its heads where the other's V is."""
    write = KVCache.write

    def written(cache, graph, layer, part, x, name):
        tensors = {"k": cache.k, "v": cache.v}[part][layer]
        if layer == 1 and part == "k" and tensors.is_cut and not hasattr(cache, "is_swapped"):
            a, b = tensors.shards.values()
            a.buffer, b.buffer, cache.is_swapped = cache.v[layer].shards[a.device].buffer, b.buffer, True
        return write(cache, graph, layer, part, x, name)
    monkeypatch.setattr(KVCache, "write", written)
    verification = verified(paths["llama"])
    assert caught_by(verification) == {"placement"}
    found = verification.bisect(verification.first_mismatch())
    assert found.name == "kqv_out-1", str(found)


class LateFetch(CPUBackend):
    """Weights come when a run has ended that should have awaited them."""
    late = ()

    def fetch(self, *args):
        self.late = *self.late, args
        return lambda: None

    def run(self, steps):
        super().run(steps)
        for args in self.late:
            self.copy(*args)
        self.late = ()


def test_a_weight_that_is_not_awaited(paths):
    verification = verified(paths["llama"], lambda device: LateFetch(device=device))
    assert caught_by(verification) == {"placement"}
    found = verification.bisect(verification.first_mismatch())
    assert "ffn" in found.name and found.captures[1][-1].device == "cpu:1", str(found)


def test_a_slot_that_is_written_while_it_is_read(paths, monkeypatch):
    """Of two weights that are on their way at a time one lies over the other."""
    monkeypatch.setattr(split, "WINDOW", 0)
    monkeypatch.setattr(split, "LEAST_AHEAD", 2)
    plan_memory = program.plan_memory

    def planned(*args):
        made = plan_memory(*args)
        slots = [tensor for tensor in made.extents if ".weight@" in tensor.name]
        for tensor in slots[1:]:
            made.extents[tensor] = replace(made.extents[tensor], offset=made.extents[slots[0]].offset)
        return made
    monkeypatch.setattr(program, "plan_memory", planned)
    verification = verified(paths["llama"])
    assert caught_by(verification) == {"placement"}
    found = verification.bisect(verification.first_mismatch())
    assert "the copy of blk." in found.culprits[0], str(found)


def test_a_weight_of_another_layer(paths, monkeypatch):
    """A slot keeps what was brought for the first layer."""
    begin = Fetch.begin

    def stale(fetch):
        if "blk.1.ffn_up" not in fetch.source.name:
            begin(fetch)
        else:
            fetch.await_it = lambda: None
    monkeypatch.setattr(Fetch, "begin", stale)
    verification = verified(paths["llama"])
    assert caught_by(verification) == {"placement"}
    found = verification.bisect(verification.first_mismatch())
    assert found.culprits == ["the copy of blk.1.ffn_up.weight from cpu to cpu:1, "
                              "in: placement, feed-forward blocks streamed to cpu:1"], str(found)


# Copies of hot experts

@pytest.mark.parametrize("kind, status", [("qwen3moe", "same"), ("gpt-oss", "same"), ("llama", "not run")])
def test_copies_without_a_fault(paths, kind, status):
    verification = verified(paths[kind], axis="experts")
    assert verification.confirmed and [r.status for r in verification.results] == ["same", status], verification.verdict()


def hot_fault(verification) -> str:
    """What is to blame."""
    assert caught_by(verification) == {"experts"}
    found = verification.bisect(verification.first_mismatch())
    return "; ".join(found.culprits) or str(found)


def test_a_slot_of_another_expert(paths, monkeypatch):
    bring = HotExperts._bring
    monkeypatch.setattr(HotExperts, "_bring", lambda hot, il, expert, slot, old: (
        bring(hot, il, expert, slot, old) if il != 1 else bring(hot, il, (expert + 1) % hot.n_expert, slot, old) or setattr(
            hot.arrivals[-1], "expert", expert)))
    blamed = hot_fault(verified(paths["qwen3moe"], axis="experts"))
    assert re.search(r"slot \d of blk\.1\.ffn_(gate|up)_exps\.weight@cpu:1 is not expert \d, in: experts", blamed), blamed


def test_a_copy_of_an_expert_that_is_not_awaited(paths, monkeypatch):
    """It is in the table at once, and comes later."""
    bring = HotExperts._bring

    def at_once(hot, il, expert, slot, old):
        places = [hot.stacks[tensor].buffer[slot * size_of(tensor):(slot + 1) * size_of(tensor)] for tensor in hot.of_layer[il]]
        before = [place.copy() for place in places]
        bring(hot, il, expert, slot, old)
        for place, bytes_ in zip(places, before):
            hot.arrivals[-1].arrive.append(partial(np.copyto, place, place.copy()))
            place[:] = bytes_
        hot.slots[hot.layers[il].row, expert] = slot
    monkeypatch.setattr(HotExperts, "_bring", at_once)
    blamed = hot_fault(verified(paths["qwen3moe"], axis="experts"))
    assert "_exps.weight@cpu:1 is not expert" in blamed, blamed


def test_an_expert_that_is_in_use_and_neither_here_nor_there(paths):
    """The pair of a token and its first expert is told to be with the copies."""
    def lost(call):
        call.cold.data[call.ids.data == call.ids.data.min()] = -1
    make = lambda device: FaultyBackend({"split_ids": after(lost)}, device)
    blamed = hot_fault(verified(paths["qwen3moe"], make, "experts"))
    assert "ffn_moe_hot-0, kernels/cpu/hot_experts.py: split_ids" in blamed, blamed
