"""Which type each tensor gets: what llama-quantize chose (tests/scripts/record_mixes.py), and the rules themselves."""
import json
from pathlib import Path

import pytest
from mix_cases import CASES, line, write_case, write_imatrix

from ggml_py.base.errors import UserError
from ggml_py.conversion.imatrix import ImportanceMatrix
from ggml_py.conversion.plan import Asked, plan
from ggml_py.files.gguf import GGUFFile

RECORD = json.loads(Path(__file__).with_name("llama_quantize.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_choices_are_those_of_llama_quantize(tmp_path, case):
    imatrix = ImportanceMatrix.read(write_imatrix(tmp_path / "imatrix.gguf", case))
    with GGUFFile.open(write_case(tmp_path / "model.gguf", case)) as file:
        for name, expected in RECORD[case].items():
            type_, with_imatrix = name.removesuffix(" imatrix"), name.endswith("imatrix")
            if expected is None:
                with pytest.raises(UserError, match="and no type of smaller blocks stands for it"):
                    plan(file, Asked(type_))
                continue
            found = line([change.type for change in plan(file, Asked(type_), imatrix if with_imatrix else None)])
            assert found == expected, f"{case} {name}"
