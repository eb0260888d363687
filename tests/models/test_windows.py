"""Layers that see only the last positions: which they are, by a number or a list, and what may differ in them."""
import numpy as np
import pytest

from ggml_py.base.errors import UserError
from ggml_py.base.rope_table import RopeSettings, rope_table
from ggml_py.engine.model import Model
from tiny_moe_models import write_moe_model
from tiny_models import run

PATTERN = "attention.sliding_window_pattern"
TOKENS = np.arange(60) * 7 % 70


def model(path, **keys):
    """gpt-oss of three layers with a window of 20: 0 and 2 have it, unless keys say otherwise."""
    return Model.load(write_moe_model(path / "m.gguf", "gpt-oss", keys=keys), device="cpu")


@pytest.mark.parametrize("pattern, windows", [
    (None, [20, 0, 20]), (("uint32", 3), [20, 20, 0]), (("uint32", 0), [20, 20, 20]), (("uint32", 1), [0, 0, 0]),
    (("array", [True, False, True]), [20, 0, 20]), (("array", [0, 0, 7]), [0, 0, 20])])
def test_which_layers_have_one(pattern, windows, tmp_path):
    with model(tmp_path, **{PATTERN: pattern} if pattern else {}) as loaded:
        assert loaded.architecture.hp.windows == windows


def test_a_list_says_what_a_number_does(tmp_path):
    found = []
    for pattern in ("uint32", 2), ("array", [True, False, True]), ("array", [False, False, False]):
        with model(tmp_path, **{PATTERN: pattern}) as loaded:
            found.append(run(loaded, TOKENS).tobytes())
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("keys, message", [
    ({PATTERN: ("array", [True, False])}, "key 'gpt-oss.attention.sliding_window_pattern' has 2 values, must have 3"),
    ({PATTERN: ("string", "2")}, "key 'gpt-oss.attention.sliding_window_pattern' is of type str, must be of type u32"),
    ({"attention.sliding_window": ("uint32", 0)}, "gpt-oss.attention.sliding_window is 0, must be 1 to 2147483647"),
    ({"rope.dimension_count_swa": ("uint32", 33)}, "gpt-oss.rope.dimension_count_swa is 33, must be even and 2 to 32"),
    ({"rope.freq_base_swa": ("float32", 0.5)}, "gpt-oss.rope.freq_base_swa is 0.5, must be 2 to"),
    ({"attention.key_length_swa": ("uint32", 0)}, "gpt-oss.attention.key_length_swa is 0, must be 1 to"),
    ({"attention.key_length_swa": ("uint32", 16), "rope.dimension_count_swa": ("uint32", 16)},
     r"tensor blk.0.attn_q.weight has shape \[128, 64\], expected \[64, 64\]: gpt-oss.attention.head_count is 4, "
     "gpt-oss.attention.key_length_swa is 16")])
def test_windows_that_cannot_be(keys, message, tmp_path):
    with pytest.raises(UserError, match=message) as caught:
        model(tmp_path, **keys)
    assert "\n" not in str(caught.value)


def test_rotary_angles_of_their_own(tmp_path):
    """Layers with a window have another base and fewer rotated channels; a base that is that of the others needs no table."""
    with model(tmp_path, **{"rope.freq_base_swa": ("float32", 10000.0)}) as loaded:
        assert loaded.architecture.rope_tensors(5).keys() == {("full", "cpu")}
        plain = run(loaded, TOKENS)
    with model(tmp_path, **{"rope.freq_base_swa": ("float32", 500.0), "rope.dimension_count_swa": ("uint32", 8)}) as loaded:
        architecture = loaded.architecture
        tables = architecture.new_rope_tables(5)
        assert np.array_equal(loaded.backend.data(tables["full", "cpu"]), rope_table(RopeSettings(32), 5))
        assert np.array_equal(loaded.backend.data(tables["windowed", "cpu"]), rope_table(RopeSettings(8, 500.0), 5))
        assert [architecture.rope_kind(il) for il in range(3)] == ["windowed", "full", "windowed"]
        bytes_of = architecture.context_bytes(100, 1, "f16", "f16").total()
        assert bytes_of == 100 * (3 * 2 * 64 * 2 + 1 + 4 * (32 + 8))
        assert not np.array_equal(plain, run(loaded, TOKENS))
