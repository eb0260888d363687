"""Writes the tables of docs/quantize.md, of the types of files: python bench/mixes.py"""
from pathlib import Path

import checkout  # noqa: F401

from ggml_py.conversion.mixes import (ALIASES, CONDITIONS, FALLBACKS, IK, KEPT_NAMES, KEPT_PARTS, LOW, MIXES, NEEDS_IMATRIX,
                                      RULES, SEVENTY, USUAL)

PAGE = Path(__file__).resolve().parents[1] / "docs" / "quantize.md"
BEGIN, END = "<!-- written by bench/mixes.py -->\n", "<!-- end -->\n"


def names(mixes) -> str:
    return ", ".join(f"`{name}`" for name in mixes)


def lines(*columns: str):
    """The head of a table."""
    return [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]


def tables() -> str:
    found = [f"*usual*: {names(mix.name for mix in USUAL)}; *low*: {names(mix.name for mix in LOW)}; of ik_llama.cpp: "
             f"{names(mix.name for mix in MIXES.values() if mix in IK)}.", "", *lines("TYPE", "number", "type of its tensors")]
    found += [f"| `{mix.name}` | {mix.number} | `{mix.type}` |" for mix in MIXES.values()]
    found += ["", f"{', '.join(f'`{name}` is `{of}`' for name, of in ALIASES.items())}, as for llama-quantize.", "",
              "For a tensor all lines of its kind and TYPE count, from the top; the first choice that holds is taken:", "",
              *lines("tensor", "TYPE", "choices")]
    found += ["| " + " | ".join(part.strip() for part in line.split("|")) + " |" for line in RULES.strip().splitlines()]
    found += ["", *lines("condition", "holds where")]
    found += [f"| `{name}` | {text} |" for name, (_, text) in CONDITIONS.items()]
    found += ["", "`!` before a condition turns it around; `&` is between conditions that hold together. Of 70B models "
              f"({', '.join(f'{arch} of {n} layers' for arch, n in SEVENTY)}) attn_v of the usual TYPEs has Q5_K in the place of "
              "Q3_K and Q4_K.", "", "Where rows are no whole blocks:", "", *lines("type", "becomes")]
    found += [f"| {names(type for type, other in FALLBACKS.items() if other == smaller)} | `{smaller}` |"
              for smaller in dict.fromkeys(FALLBACKS.values())]
    found += ["", f"and F16 where that does not fit either. Without an importance matrix {names(sorted(NEEDS_IMATRIX))} are "
              "refused, and `Q2_K` in files of `Q2_K_S`, but for embedding and output head.", "",
              f"Kept as they are: vectors, what does not end in `weight`, {names(KEPT_NAMES)}, and names with one of "
              f"{names(KEPT_PARTS)} in them; a few more of glm5-next."]
    return "\n".join(found) + "\n"


def page() -> str:
    """The page with the tables that belong there."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + tables() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
