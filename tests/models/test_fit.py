"""`--fit`: what does not fit as a whole gets the first placement that does."""
from dataclasses import replace

import numpy as np
import pytest
from tiny_delta_net_models import write_delta_net_model
from tiny_models import write_model
from tiny_moe_models import write_moe_model

from ggml_py import ExpertsOnHost, Fit, Model, PlacementOptions
from ggml_py.backends.cpu import CPUBackend
from ggml_py.base.errors import UserError
from ggml_py.cli.main import execute
from ggml_py.files.gguf import GGUFFile
from ggml_py.models import fit
from ggml_py.models.fit import candidates, fitted
from ggml_py.testing import assert_bitwise_equal

FIT = Fit(64, n_ubatch=8, margin=1000)
ONE, TWO = PlacementOptions(("cpu:1",)), PlacementOptions(("cpu:1", "cpu:2"))


WRITERS = {"llama": write_model, "qwen3moe": write_moe_model, "deepseek2-mla": write_moe_model,
           "qwen35moe": write_delta_net_model}


def written(tmp_path, kind):
    return WRITERS[kind](tmp_path / "tiny.gguf", kind)


@pytest.fixture(params=WRITERS)
def file(request, tmp_path):
    with GGUFFile.open(written(tmp_path, request.param)) as file:
        yield file


@pytest.mark.parametrize("options", [ONE, TWO], ids=["one device", "two"])
def test_the_first_candidate_that_fits(file, options):
    """For every amount of memory at which another one may be the first. On one device each needs less than the one before."""
    model = fit.model_class(file)(file, options)
    shared = options if options == ONE else replace(options, tensor_split=(1.0, 1.0))
    tried = candidates(shared, model.hp.n_layer, file.tensors)
    most = [max(FIT.taken(file, each, False).get(device, 0) for device in options.devices) for each in tried]
    assert tried[-1].n_gpu_layers == 0 and len(tried) > model.hp.n_layer
    for n_bytes in {max(min(most), each - less) for each in most for less in (0, 1)}:
        found = fitted(file, options, dict.fromkeys(options.devices, n_bytes), FIT)
        i = tried.index(found if options == ONE or found == options else replace(found, tensor_split=(1.0, 1.0)))
        assert most[i] <= n_bytes
        if options == ONE:
            assert i == next(i for i, needed in enumerate(most) if needed <= n_bytes)
    assert options == TWO or most == sorted(most, reverse=True)


def test_nothing_fits(file):
    with pytest.raises(UserError, match=r"tiny.gguf: no placement fits; with all weights on the CPU, cpu:1 needs [0-9,]+ bytes "
                                        r"and has 999 free$"):
        fitted(file, replace(ONE, offload=(("all", 1),)), {"cpu:1": 999}, FIT)


def test_devices_share_by_what_is_free(file):
    found = fitted(file, TWO, {"cpu:1": 3 << 40, "cpu:2": 1 << 40}, FIT)
    assert found.tensor_split == (3 << 40, 1 << 40) and found.n_gpu_layers is None and not found.overrides


def test_layers_without_experts_are_left_out(tmp_path):
    with GGUFFile.open(written(tmp_path, "deepseek2-mla")) as file:
        dense = min(int(name.split(".")[1]) for name in file.tensors if "_exps" in name)
        first = candidates(ONE, 5, file.tensors)[1]
        assert dense == 1 and first.overrides == (ExpertsOnHost(2),)


@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
def test_a_model_is_loaded_so(arch, tmp_path, monkeypatch):
    """Half of what it needs is there: the bits are those of one device."""
    path = written(tmp_path, arch)
    with GGUFFile.open(path) as file:
        needed = FIT.taken(file, ONE, False)["cpu:1"]
    monkeypatch.setattr(CPUBackend, "free_bytes", lambda backend: needed - 1)
    with Model.load(path, "cpu") as model, model.new_context(n_ctx=64) as context:
        expected = context.decode([3, 1, 4])
        assert model.fitted is None
    with Model.load(path, "cpu:1", fit=FIT) as model, model.new_context(n_ctx=64) as context:
        assert model.fitted is not None and len(model.weight_bytes()) == 2
        assert_bitwise_equal(context.decode([3, 1, 4]), expected, "logits")
    monkeypatch.setattr(CPUBackend, "free_bytes", lambda backend: needed)
    with Model.load(path, "cpu:1", fit=FIT) as model:
        assert model.fitted is None and model.weight_bytes().keys() == {"cpu:1"}
    with Model.load(path, placement=PlacementOptions(("cpu:1",), n_gpu_layers=0), fit=FIT) as model:
        assert model.fitted is None
    with Model.load(path, placement=TWO, fit=FIT) as model:  # layers are shared by what is free, but all fits
        assert model.fitted is None and model.weight_bytes().keys() == {"cpu:1", "cpu:2"}


def test_the_command_tells(tmp_path, monkeypatch, capsys):
    path = written(tmp_path, "qwen3moe")
    np.save(tmp_path / "tokens.npy", np.arange(20))
    run = ["logits", "-m", str(path), "--device", "cpu:1", "-c", "64", "--tokens", str(tmp_path / "tokens.npy"),
           "-o", str(tmp_path / "logits.npy")]
    with GGUFFile.open(path) as file:
        needed = Fit(64, margin=5 << 20).taken(file, ONE, False)["cpu:1"]
    monkeypatch.setattr(CPUBackend, "free_bytes", lambda backend: needed - 1)
    digests = []
    for more, told in (("-fitt", "5"), "--fit: not all fits into cpu:1; -ncmoe 1\n"), (("--fit", "off"), ""):
        assert execute([*run, *more]) == 0
        out, err = capsys.readouterr()
        digests.append(out)
        assert err.partition("compil")[0] == told
    assert digests[0] == digests[1]
