"""Models in ik_llama.cpp's types: files with headers in their rows, from the loader to logits."""
import numpy as np
import pytest

from ggml_py.base.placement import PlacementOptions
from ggml_py.engine.model import Model
from ggml_py.testing import assert_bitwise_equal

synth = pytest.importorskip("synth", reason="needs the checkout")

TOKENS = np.random.default_rng(0).integers(0, 90, 40)


def logits(model, n_ubatch: int) -> np.ndarray:
    with model.new_context(n_ctx=64, n_ubatch=n_ubatch) as context:
        return context.decode(TOKENS, logits="all")


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen3moe"])
@pytest.mark.parametrize("type_", ["IQ4_KS", "IQ2_KS", "IQ6_K", "IQ3_KT"])
def test_one_digest_whatever_the_micro_batch_and_the_devices(shape, type_, tmp_path):
    path = synth.write(tmp_path / "m.gguf", synth.SHAPES[shape], type_)
    with Model.load(path, device="cpu") as model:
        types = [tensor.type.name for tensor in model.file.tensors.values() if len(tensor.shape) > 1]
        assert types.count(type_) > len(types) // 2, types
        expected = logits(model, 512)
        assert np.isfinite(expected).all() and 0.3 < expected.std() < 3
        for n_ubatch in 1, 7:
            assert_bitwise_equal(logits(model, n_ubatch), expected, f"{type_}, {n_ubatch} at a time")
    with Model.load(path, placement=PlacementOptions(("cpu", "cpu:1"), split_mode="column")) as model:
        assert_bitwise_equal(logits(model, 512), expected, f"{type_}, columns shared")
