"""Writes docs/formats.md, the table of the types: python bench/formats.py [--errors FOLDER]

Numbers are those of the format table and of the records in bench/results/. --errors: a folder with mainline.npz and ik.npz, rows
as llama.cpp's and ik_llama.cpp's quantizers made them, and what of; their errors are written to a record first.
"""
import argparse
import json
from pathlib import Path

import checkout  # noqa: F401
import numpy as np

from ggml_py.quant.dequantize import dequantize
from ggml_py.quant.formats import CHUNK, FORMATS, Format
from ggml_py.quant.interleaved import INTERLEAVED

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "bench" / "results", ROOT / "docs" / "formats.md"
# The last with a case counts
PARTS = ("", "-trellis", "-terms", "-rows", "-512", "-column", "-halves", "-exchange", "-wide", "-scaled", "-fifths", "-bytes",
         "-bytes-2", "-split", "-split-2", "-hidden", "-copiers")
RECORDS = "nvidia-h200.json", *(f"formats/h200{part}.json" for part in PARTS)
ERRORS, KL = RESULTS / "formats" / "errors.json", RESULTS / "formats" / "kl.json"
M, K = 4096, 14336

HEAD = """# Types of weights

Written by `python bench/formats.py` from the format table (`quant/formats.py`) and the records in `bench/results/`; a test
compares it.

Every type of this page runs on the CPU and on CUDA, from one column to prompts, as a matrix, as experts and as the head, by
the same kernels: a row of the table and a function that unpacks 256 columns are all that a type is. `info` names the types of
a file.

- **id**: in GGUF files. Those that the package `gguf` does not know are ik_llama.cpp's; sizes and formulas are in
  `quant/ik_quants.py`.
- **bits**: for each weight, in the file and in memory. A row's header, one float scale, lies in each chunk of a tile: up to 7
  % more memory, and no kernel knows of headers.
- **sub, levels, scales**: columns with one integer scale, the largest magnitude of a level, and of an integer scale. `d ·
  scale · level` is the weight, minus `m · minimum` where there is one (docs/numerics.md, section 3).
- **error**: root mean square of what the quantizers of llama.cpp and ik_llama.cpp made of rows without an importance matrix,
  over that of the rows; in parentheses with one, unweighted. The rows of ik_llama.cpp's types are others, one of them with
  outliers, so compare within each family.
- **KL**: KL divergence of SmolLM2-135M from its F32 (dequantized from Q4_1), where every matrix whose columns are whole blocks
  has the type, without an importance matrix, and all else is F32; over 510 tokens, standard errors of 2 to 9 % are in the record
  (`bench/type_kl.py`). Its rows have 576 values, but 1536 in `ffn_down`: of types in blocks of 128 and 256 these are the 30
  `ffn_down` alone, of the others all 211 matrices. Compare within either group, and note that weights which were Q4_1 once suit
  types with minima. Types without a value have no encoder here.
- **1 column, 512**: us of a product with 4096 x 14336 weights that are not in the cache, on an NVIDIA H200; TOP/s of 512
  columns.

| type | id | bits in the file | in memory | sub | levels | scales | minimum | error | KL | 1 column, us | 512, TOP/s |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |
"""
TAIL = """
Refused by their names: BitNet's types, Q8_KV, and the formats of activations and repacked weights that ik_llama.cpp makes in
memory.

IQ2_KT and IQ3_KT are multiplied by 1.05 and 1.01, and the levels of IQ6_K are integers, as all of ik_llama.cpp's products
have it; its `to_float` differs there.

## Interleaved types

ik_llama.cpp's types with R4 or R8 in their names mix the bits of as many rows. Their bits are put back while tiles are packed
(`quant/interleaved.py`), so everything after that knows their plain type alone: same values, same speed. `info` shows both
names. IQ1_M_R4 has no plain type in files: its rows are IQ1_M_R1 here.

| type | id | rows | read as |
| --- | ---: | ---: | --- |
"""


def errors(folder: Path) -> dict[str, float]:
    """Relative rms error by name, "NAME imatrix" with an importance matrix."""
    found = {}
    with np.load(folder / "mainline.npz") as vectors:
        source = vectors["source"]
        for key in vectors.files:
            name, _, with_imatrix = key.partition(".")
            if name in FORMATS:
                values = dequantize(vectors[key], name, source.shape)
                found[f"{name} imatrix" if with_imatrix else name] = relative(values, source)
    with np.load(folder / "ik.npz") as vectors:
        for name, fmt in FORMATS.items():
            if fmt.own_id is not None and f"{name}.source" in vectors:
                source = vectors[f"{name}.source"]
                found[name] = relative(dequantize(vectors[f"{name}.bytes"][-len(source):], name, source.shape), source)
    return found


def relative(values: np.ndarray, source: np.ndarray) -> float:
    difference = values.astype(np.float64) - source
    return round(float(np.sqrt(np.square(difference).mean() / np.square(source.astype(np.float64)).mean())), 5)


def times() -> dict[tuple[str, int], float]:
    """(type, columns) -> us of a product, cold."""
    found = {}
    for record in RECORDS:
        for row in json.loads((RESULTS / record).read_text())["rows"]:
            sizes = row["sizes"]
            if row["kernel"] in ("mmvq", "mmq") and row["cache"] == "cold" and (sizes["m"], sizes["k"]) == (M, K):
                found[row["type"], sizes["n"]] = row["us"]
    return found


def line(fmt: Format, error: dict[str, float], us: dict[tuple[str, int], float], kl: dict[str, dict]) -> str:
    in_file = 8 * (fmt.row_bytes(4096) / 4096)
    one, many = us.get((fmt.name, 1)), us.get((fmt.name, 512))
    both = [f"{error[fmt.name]:.4f}"] if fmt.name in error else []
    both += [f"({error[f'{fmt.name} imatrix']:.4f})"] if f"{fmt.name} imatrix" in error else []
    scales = [f"{fmt.sub}", f"{fmt.max_level}", f"{fmt.max_isc}", "yes" if fmt.has_min else ""]
    cells = [f"`{fmt.name}`", f"{int(fmt.type_id)}", f"{in_file:.4g}", f"{8 * fmt.chunk_bytes / CHUNK:.4g}",
             *(scales if fmt.is_quantized else [""] * 4),
             " ".join(both), f"{kl[fmt.name]['kl']:.4f}" if fmt.name in kl else "",
             f"{one:.1f}" if one else "", f"{2e-6 * M * K * 512 / many:.0f}" if many else ""]
    return f"| {' | '.join(cells)} |\n"


def page() -> str:
    error, us, kl = json.loads(ERRORS.read_text())["errors"], times(), json.loads(KL.read_text())["types"]
    return HEAD + "".join(line(fmt, error, us, kl) for fmt in FORMATS.values() if fmt.planes) + TAIL + "".join(
        f"| `{t.name}` | {t.type_id} | {t.n_rows} | `{t.plain.name}` |\n" for t in INTERLEAVED.values())


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--errors", type=Path, metavar="FOLDER")
    options = p.parse_args()
    if options.errors:
        record = {"command": "bench/formats.py --errors FOLDER", "errors": errors(options.errors)}
        ERRORS.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
