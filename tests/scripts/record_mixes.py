"""Records which types llama-quantize chooses: python tests/scripts/record_mixes.py /path/to/llama-quantize

What it prints with --dry-run for the files of tests/helpers/mix_cases.py; `tests/conversion/test_mixes.py` compares.
"""
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import with_helpers  # noqa: F401  (for what is next)
from mix_cases import CASES, line, write_case, write_imatrix
from ggml_py.conversion.mixes import FP4, IK, MIXES

RECORD = Path(__file__).resolve().parents[1] / "conversion" / "llama_quantize.json"
WITH_IMATRIX = "Q4_0", "Q5_0", "IQ3_XXS", "IQ4_NL", "IQ4_XS", "Q2_K_S"


def chosen(program: str, model: Path, type_: str, *options: str) -> str | None:
    """A letter for each tensor, in the order in which they are printed; None where the program refuses."""
    done = subprocess.run([program, "--dry-run", *options, model, type_], capture_output=True, text=True, check=False)
    found = re.findall(r"^\[ *\d+/ *\d+\] \S+ .*?type = *(\w+), (?:.*?size =[^\n(]*(?:\((\w+)\))?)", done.stdout + done.stderr,
                       re.MULTILINE)
    return None if done.returncode else line([(after or before).upper() for before, after in found])


def main(program: str) -> int:
    record = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            model = write_case(Path(folder) / f"{case}.gguf", case)
            imatrix = write_imatrix(Path(folder) / "imatrix.gguf", case)
            mixes = [name for name, mix in MIXES.items() if mix not in IK and name != FP4[1].name]
            of_case = {name: chosen(program, model, name) for name in mixes}
            of_case |= {f"{name} imatrix": chosen(program, model, name, "--imatrix", str(imatrix)) for name in WITH_IMATRIX}
            record[case] = of_case
            print(case, {text and len(text) for text in of_case.values()})
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
