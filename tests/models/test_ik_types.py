"""Models in ik_llama.cpp's types: files with headers in their rows, and with interleaved rows, from the loader to logits."""
from io import BytesIO

import gguf
import numpy as np
import pytest

from ggml_py.base.placement import PlacementOptions
from ggml_py.engine.model import Model
from ggml_py.__main__ import main
from ggml_py.quant.interleaved import INTERLEAVED
from ggml_py.testing import assert_bitwise_equal
from interleaving import interleaved

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


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen3moe"])
@pytest.mark.parametrize("name", ["Q4_K_R4", "IQ4_XS_R8", "Q8_0_R8", "IQ4_KS_R4", "IQ2_XXS_R4"])
def test_interleaved_rows_are_read_as_the_plain_ones(shape, name, tmp_path, monkeypatch, capsys):
    """The same model, its matrices interleaved: the same logits, on shared devices too. The embedding is never interleaved."""
    t = INTERLEAVED[name]
    path = synth.write(tmp_path / "m.gguf", synth.SHAPES[shape], t.plain.name)

    def add_tensor(writer, tensor, data, fmt, shape):
        if fmt is not t.plain or tensor == "token_embd.weight" or shape[-2] % t.n_rows:
            plain_tensor(writer, tensor, data, fmt, shape)
            return
        file = BytesIO()
        data.tofile(file)
        rows = np.frombuffer(file.getvalue(), np.uint8).reshape(-1, fmt.row_bytes(shape[-1]))
        rows = interleaved(rows, t, shape[-1])
        writer.tensors[-1][tensor] = gguf.gguf_writer.TensorInfo(shape, t.type_id, rows.nbytes, rows)
    plain_tensor = synth.add_tensor
    monkeypatch.setattr(synth, "add_tensor", add_tensor)
    mixed = synth.write(tmp_path / "mixed.gguf", synth.SHAPES[shape], t.plain.name)
    with Model.load(path, device="cpu") as model:
        expected = logits(model, 512)
    with Model.load(mixed, device="cpu") as model:
        types = [tensor.type.name for tensor in model.file.tensors.values() if len(tensor.shape) > 1]
        assert types.count(name) > len(types) // 2, types
        assert_bitwise_equal(logits(model, 512), expected, name)
    with Model.load(mixed, placement=PlacementOptions(("cpu", "cpu:1"), split_mode="column")) as model:
        assert_bitwise_equal(logits(model, 512), expected, f"{name}, columns shared")
    assert main(["info", str(mixed)]) == 0
    assert f"{name}, read as {t.plain.name}" in capsys.readouterr().out
