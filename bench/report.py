"""Writes docs/performance.md and its plots from the records of bench/gpu.py,
bench/speed.py and bench/cold_start.py in bench/results: python bench/report.py"""
import json
import sys
from pathlib import Path
from statistics import median

import checkout
from figures import INT8_TOP_S, K, M, Row, limits, llama_cpp, verdict

RESULTS, DOCS = checkout.ROOT / "bench" / "results", checkout.ROOT / "docs"
SECTIONS = {"Matrix times vector (MMVQ)": ("mmvq",), "Matrix times matrix (MMQ)": ("mmq", "quantize + mmq"),
            "Gate and up in one kernel": ("mul_mat_glu",),
            "Q, K and V in one kernel": ("mul_mat_qkv",),
            "Mixture of experts": ("mul_mat_id", "topk_moe", "topk_moe of groups", "weighted_sum"),
            "Weights, dequantized": ("get_rows", "dequantize f32", "dequantize f16"), "Attention": ("flash_attn_ext",),
            "Recurrent layers": ("gated_delta_net", "ssm_scan", "ssm_conv"),
            "Other kernels": ("mul_mat_argmax", "draw", "quantize", "rms_norm", "layer_norm", "rms_norm_act", "swiglu",
                              "swiglu_act")}
INTRODUCTION = """\
# Performance

Written by `python bench/report.py` from the records in `bench/results/`, which `bench/gpu.py` makes on a GPU, `bench/speed.py` of whole models
(prompts and generation: [benchmarks.md](benchmarks.md)), and `bench/cold_start.py` on any device.

A time is the median of 11 replays of a captured graph between two CUDA events, after a warm-up, for one launch; the range is that of the replays.
Cold: each launch reads another copy of the weights (of the KV cache, in attention), more than three times L2 together. Hot: all read one copy.
Bytes are weights, activations and outputs, each once; 1 GB is 1e9 bytes. The copy is a device-to-device copy of 1 GiB in the same run, read plus write.
An operation is a multiplication or an addition of the product; the two int8 limbs of an activation are not counted twice.
Weights are random blocks. Compilation is not in any time. Bits do not depend on any of this: [numerics.md](numerics.md).
A record is of the kernels of its date; what has been written since, timed or not yet, is told in [kernels-log.md](kernels-log.md).

The limits, and the times of llama.cpp 0c1e57098 beside them, are those of `bench/figures.py`; llama.cpp was measured on an H200 by its own
`test-backend-ops`, its weights hot where they fit into L2. Float weights are multiplied in float32 in a defined order: there a library that uses
tensor cores in bfloat16 is faster by far (cuBLAS: 680 to 800 TFLOP/s on an H200).
"""  # noqa: E501  lines of the page

COLD_START = """\
## Cold start

Kernels are compiled only for what a model uses, and kept on disk. Each line is about fresh processes (`bench/first_token.py`) with the model's file
in the page cache: one that finds no compiled kernel, then five that find what it left (their median, the range behind it). Times run from the start of
the process to the first token of a short answer; kernels and their seconds are all that the model needs, those for long prompts included. Sources are those of
Python without byte code on disk, which a warm process had to compile: none after an installation by pip; older records do not say.
Goals: {compile} s of compilation, and {beyond} s to the first token beyond the loading of the model (its file read, its weights put on the device).
"""  # noqa: E501  lines of the page
COLD_GOALS = {"compile": 30.0, "beyond": 2.0}  # seconds


KV_WRITE = """\
## Writing the KV cache, and graphs

Generation of 128 tokens, t/s: cells of the KV cache by number (`set_rows`, the default) or by address (`--kv-write cpy`, copies into a moving destination through
a table of pointers in device memory), both replayed from CUDA graphs ([graphs.md](graphs.md)); and every kernel launched by itself (`--no-graphs`).
"""  # noqa: E501  lines of the page


def records(program: str) -> dict[str, dict]:
    """File name without .json -> record, of one program, such as "bench/gpu.py"."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    return {stem: record for stem, record in found.items() if record.get("command", "").startswith(program)}


def rows_of(record: dict) -> list[Row]:
    return [Row(**row) for row in record["rows"]]


# The page

def table(header: str, lines: list[list[str]]) -> str:
    columns = [column.strip() for column in header.split("|")]
    return "\n".join("| " + " | ".join(line) + " |" for line in (columns, ["---"] * len(columns), *lines))


def section(title: str, kernels: tuple, rows: list[Row], copy_GB_s: float) -> list[str]:
    lines = []
    for row in (row for row in rows if row.kernel in kernels):
        limit = limits(row, rows, copy_GB_s)
        lines.append([row.kernel, row.type, " ".join(f"{key}={value}" for key, value in row.sizes.items()), row.cache,
                      f"{row.us:.1f}", f"{row.us_least:.1f} to {row.us_most:.1f}", f"{row.n_bytes / 1e6:.1f}", f"{row.GB_s:.0f}",
                      f"{100 * row.GB_s / copy_GB_s:.0f} %", f"{row.TOP_s:.1f}" if row.n_ops else "", llama_cpp(row),
                      f"{limit.must:.1f}" if limit else "", f"{limit.goal:.1f}" if limit and limit.goal else "",
                      verdict(row, limit) if limit else "", limit.rule if limit else ""])
    header = ("kernel | type | sizes | cache | us | range | MB | GB/s | of copy | TOP/s | llama.cpp | must us | goal us | "
              "result | limit")
    return [f"### {title}", table(header, lines)] if lines else []


def summary(rows: list[Row], copy_GB_s: float) -> str:
    judged = [(row, limit) for row in rows if (limit := limits(row, rows, copy_GB_s))]
    missed = [row.name for row, limit in judged if verdict(row, limit) == "missed"]
    goals = [(row, limit) for row, limit in judged if limit.goal]
    reached = sum(verdict(row, limit) == "goal" for row, limit in goals)
    line = f"{len(judged) - len(missed)} of {len(judged)} limits met, {reached} of {len(goals)} goals reached."
    return line + (f" Missed: {'; '.join(missed)}." if missed else "")


def conditions(record: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return (f"{record['date']}, driver {record['driver']} (CUDA {record['cuda']}), {versions}. "
            f"L2 {record['l2_bytes'] / 1e6:.0f} MB, copy {record['copy_GB_s']:.0f} GB/s; "
            f"kernels compiled, or read from disk, in {record['compile_seconds']:.0f} s before. `{record['command']}`")


def cold_start(found: dict[str, dict]) -> list[str]:
    """The section about records of bench/cold_start.py."""
    lines = []
    for stem, record in found.items():
        empty, warm = ([run for run in record["runs"] if run["cache"] == state] for state in ("empty", "warm"))
        first, beyond = ([run["first_token_seconds"] - loading * run["load_seconds"] for run in warm] for loading in (0, 1))
        seconds, kernels = empty[0]["compile_seconds"], empty[0]["n_kernels"]
        device = (f"{record['device']}, {record['cores']} cores" if "driver" not in record
                  else f"{record['device']}, driver {record['driver']}")
        lines.append([f"{device} (`{stem}.json`, {record['date']})", record["model"], str(kernels), f"{seconds:.1f}",
                      "goal" if seconds <= COLD_GOALS["compile"] else "missed", f"{empty[0]['first_token_seconds']:.1f}",
                      f"{median(first):.2f} ({min(first):.2f} to {max(first):.2f})", str(max(run["n_kernels"] for run in warm)),
                      "not recorded" if "n_sources" not in warm[0] else str(max(run["n_sources"] for run in warm)),
                      f"{median(run['load_seconds'] for run in warm):.2f}", f"{median(beyond):.2f}",
                      "goal" if median(beyond) <= COLD_GOALS["beyond"] else "missed"])
    header = ("device | model | kernels | compiled in, s | result | first token, empty cache, s | first token, warm cache, s | "
              "kernels compiled, warm | sources compiled, warm | loading of it, s | beyond loading, s | result")
    missing = [f"On {where}: not measured yet." for where, on_gpu in (("a CPU", False), ("a GPU", True))
               if not any(("driver" in record) == on_gpu for record in found.values())]
    return [COLD_START.format(**{goal: f"{seconds:g}" for goal, seconds in COLD_GOALS.items()}).rstrip(),
            *([table(header, lines)] if lines else []), *missing]


def kv_write(found: dict[str, dict]) -> list[str]:
    """The section about records of bench/speed.py that have the same generation in several ways."""
    lines = []
    for stem, record in found.items():
        by_test = {}
        for row in record["rows"]:
            if not row["n_prompt"] and not row["n_depth"]:
                by_test.setdefault((row["model"], row["test"]), {})[row["kv_write"], row["graphs"]] = f"{row['avg_ts']:.1f}"
        lines += [[f"{record['device']} (`{stem}.json`, {record['date']})", *names,
                   *(ts.get(way, "") for way in (("set_rows", 1), ("cpy", 1), ("set_rows", 0)))]
                  for names, ts in by_test.items() if len(ts) > 1]
    return [KV_WRITE.rstrip(), table("device | model | test | set_rows | cpy | without graphs", lines)] if lines else []


def page(found: dict[str, dict], cold_starts: dict[str, dict], speeds: dict[str, dict]) -> str:
    """found, cold_starts, speeds: the records of bench/gpu.py, of bench/cold_start.py and of bench/speed.py."""
    parts = [INTRODUCTION.rstrip(), *cold_start(cold_starts), *kv_write(speeds)]
    for stem, record in found.items():
        rows, copy_GB_s = rows_of(record), record["copy_GB_s"]
        parts += [f"## {record['device']} (`{stem}.json`)", conditions(record), summary(rows, copy_GB_s)]
        parts += [f"![{plot.__doc__}](performance/{stem}-{name}.svg)" for name, plot in PLOTS.items() if plot_rows(name, rows)]
        for title, kernels in SECTIONS.items():
            parts += section(title, kernels, rows, copy_GB_s)
    if not found:
        parts.append("There is no record of kernels yet.")
    return "\n\n".join(parts) + "\n"


# The plots

def plot_rows(name: str, rows: list[Row]) -> list[Row]:
    """The rows that a plot shows."""
    def of(row, n, *kernels):
        return row.kernel in kernels and row.sizes == {"m": M, "k": K, "n": n}
    return {"mmvq": [row for row in rows if of(row, 1, "mmvq")],
            "mmq": [row for row in rows if of(row, 512, "mmq", "quantize + mmq")],
            "roofline": [row for row in rows if row.kernel in ("mmvq", "mmq") and row.cache == "cold"]}[name]


def bars(axes, rows, value, groups, limit_value) -> None:
    """Horizontal bars by type, one of each group; limit_value: (row, us) -> where a limit stands."""
    types = list(dict.fromkeys(row.type for row in rows))
    height = 0.8 / len(groups)
    for g, (label, member) in enumerate(groups.items()):
        chosen = [row for row in rows if member(row)]
        at = [types.index(row.type) + (g - (len(groups) - 1) / 2) * height for row in chosen]
        axes.barh(at, [value(row) for row in chosen], height, label=label, color=f"C{g}", clip_on=False)
    for which, color in ("must", "black"), ("goal", "tab:green"):
        limited = [(row, getattr(limit, which)) for row in rows
                   if next(iter(groups.values()))(row) and (limit := limits(row, rows, float("inf")))]
        marked = [(limit_value(row, us), types.index(row.type)) for row, us in limited if us]
        axes.vlines([x for x, _ in marked], [y - 0.4 for _, y in marked], [y + 0.4 for _, y in marked], color=color, label=which,
                    clip_on=False)
    axes.set_yticks(range(len(types)), types)
    axes.margins(y=0.01)
    axes.invert_yaxis()


def plot_mmvq(axes, rows, record) -> None:
    """Matrix times vector, 4096 x 14336, GB/s by type"""
    groups = {"cold": lambda row: row.cache == "cold", "hot": lambda row: row.cache == "hot"}
    bars(axes, rows, lambda row: row.GB_s, groups, lambda row, us: row.n_bytes / us / 1e3)
    axes.axvline(record["copy_GB_s"], color="tab:red", label="copy")
    axes.set_xlabel("GB/s")


def plot_mmq(axes, rows, record) -> None:
    """Matrix times matrix, 4096 x 14336 x 512, TOP/s by type"""
    groups = {"activations quantized before": lambda row: row.kernel == "mmq",
              "quantization included": lambda row: row.kernel != "mmq"}
    bars(axes, rows, lambda row: row.TOP_s, groups, lambda row, us: row.n_ops / us / 1e6)
    if "H200" in record["device"]:
        axes.axvline(INT8_TOP_S / 2, color="tab:red", label="int8 peak / 2 limbs")
    axes.set_xlabel("TOP/s")


def plot_roofline(axes, rows, record) -> None:
    """Matrix products of every size against the roof: the measured copy, the peak of int8 products"""
    for i, type_ in enumerate(dict.fromkeys(row.type for row in rows)):
        chosen = [row for row in rows if row.type == type_]
        axes.plot([row.n_ops / row.n_bytes for row in chosen], [row.TOP_s for row in chosen], linestyle="",
                  marker="osD^v<>"[i % 7], markersize=4,
                  color=f"C{i % 10}", label=type_, clip_on=False)
    intensity = [row.n_ops / row.n_bytes for row in rows]
    peak = INT8_TOP_S / 2 if "H200" in record["device"] else float("inf")
    corner = peak / record["copy_GB_s"] * 1e3
    ends = [x for x in (min(intensity), corner, max(intensity)) if min(intensity) <= x <= max(intensity)]
    axes.plot(ends, [min(peak, x * record["copy_GB_s"] / 1e3) for x in ends], color="black", label="roof", clip_on=False)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations a byte")
    axes.set_ylabel("TOP/s")


PLOTS = {"mmvq": plot_mmvq, "mmq": plot_mmq, "roofline": plot_roofline}


def draw(stem: str, record: dict, folder: Path) -> list[Path]:
    """The plots of a record, as SVG that is the same text every time."""
    import matplotlib
    matplotlib.use("svg")
    from matplotlib import pyplot
    paths = []
    with matplotlib.rc_context({"svg.hashsalt": "", "svg.fonttype": "none", "font.size": 8}):
        for name, plot in PLOTS.items():
            rows = plot_rows(name, rows_of(record))
            if rows:
                figure, axes = pyplot.subplots(figsize=(7, 6), layout="constrained")
                plot(axes, rows, record)
                axes.set_title(f"{plot.__doc__}\n{record['device']}, {record['date']}")
                axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
                paths.append(folder / f"{stem}-{name}.svg")
                figure.savefig(paths[-1], metadata={"Date": None, "Creator": None})
                pyplot.close(figure)
    return paths


def main() -> int:
    found = records("bench/gpu.py")
    (DOCS / "performance.md").write_text(page(found, records("bench/cold_start.py"), records("bench/speed.py")))
    folder = DOCS / "performance"
    for path in folder.glob("*.svg"):
        path.unlink()
    for stem, record in found.items():
        folder.mkdir(exist_ok=True)
        draw(stem, record, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
