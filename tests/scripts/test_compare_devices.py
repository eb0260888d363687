"""What compare_devices.py tells of devices that differ."""
import compare_devices
import pytest


@pytest.mark.parametrize("n", [0, 8])
def test_a_difference_is_told(n, tmp_path, monkeypatch):
    texts = compare_devices.LENGTHS
    monkeypatch.setattr(compare_devices, "digests", lambda path, device: (f"{device if i == n else 0}" for i in texts))
    task = "tiny-llama", "Q4_K", str(tmp_path), ["cuda:0", "cpu"]
    assert compare_devices.compare(task) == ("tiny-llama Q4_K", [n] if n else [])
    assert not [*tmp_path.iterdir()]
