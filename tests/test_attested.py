"""Attestations that a GPU made (tests/attestations) are confirmed on the CPU: short ones wholly, longer ones by a sample of their
windows.

Made by: ggml-py attest --device cuda:0 -m smollm2 -o tests/attestations/NAME.json, on the text that comes with the package, or
with -p of a generation."""
import pytest

import smollm2
from ggml_py.__main__ import main
from ggml_py.check.attestation import read_attestation
from places import TESTS

MADE = sorted((TESTS / "attestations").glob("*.json"))
MOST = 4  # windows that are confirmed wholly


@pytest.mark.parametrize("path", MADE, ids=lambda path: path.stem)
def test_confirmed_on_the_cpu(path, capsys):
    document = read_attestation(path)
    assert document["environment"]["device"].startswith("cuda:") and document["environment"]["driver"] != "none"
    sample = ["--sample", "2"] if len(document["windows"]) > MOST else []
    code = main(["verify", "-m", str(smollm2.require()), "--attestation", str(path), "--devices", "cpu", *sample])
    out = capsys.readouterr().out
    assert code == 0 and out.startswith("confirmed: by sample: windows " if sample else "confirmed: all "), out
