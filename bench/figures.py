"""A measured row, and the figures to reach: what a row must and should take on one H200 (sources: the type tables of llama.cpp's
test-backend-ops, measured there at 0c1e57098, whose weights stay in L2 where they fit)."""
from dataclasses import dataclass
from typing import NamedTuple

import checkout  # noqa: F401
from ggml_py.quant.formats import format_of

M, K = 4096, 14336                # rows and columns of the matrix that the figures are about
MEMORY_GB_S = 4300.0              # of the floor under the types without a figure of their own
COPY_SHARE = 0.95                 # of the measured copy, on the largest matrix
EIGHT_COLUMNS = 1.5               # times one column
INT8_TOP_S = 1979.0               # dense int8 peak of an H200; two limbs take two products

#                          llama.cpp us, hot; must and goal us, cold
MATRIX_VECTOR = {
    "Q4_0":    (14.2, 11.5, 9.0),
    "Q8_0":    (22.8, 18.0, 16.0),
    "Q4_K":    (15.7, 11.5, 9.0),
    "Q6_K":    (24.0, 15.5, 12.5),
    "IQ4_XS":  (14.2, 11.5, 9.0),
    "IQ2_XXS": (17.1, 12.0, 7.0),
    "MXFP4":   (19.4, 11.5, 9.0),
    "F16":     (29.5, 30.0, 28.5),
}
#                          llama.cpp TFLOP/s; must and goal TOP/s, 512 columns
MATRIX_MATRIX = {
    "Q4_0":    (196, 250, 400),
    "Q8_0":    (191, 250, 400),
    "MXFP4":   (190, 250, 400),
    "IQ4_XS":  (210, 250, 400),
    "Q4_K":    (172, 230, 380),
    "IQ2_XXS": (189, 230, 380),
    "Q6_K":    (141, 190, 320),
}
EXPERTS = dict(experts=128, used=8, m=768, k=2048)  # matrices and how many a token uses; rows and columns of one
#                llama.cpp us, hot and without routing; must and goal us, cold and with the dispatch
MUL_MAT_ID = {
    ("Q4_K", 1): (8.0, 8.0, 5.0),
    ("Q4_K", 4): (12.5, 12.0, 9.0),
    ("Q4_K", 8): (23.2, 20.0, 15.0),
    ("Q4_K", 32): (137, 60.0, 40.0),
    ("Q4_K", 128): (304, 90.0, 50.0),
    ("Q4_K", 512): (348, 130.0, 80.0),
    ("Q8_0", 1): (9.2, 9.0, 6.0),
    ("Q8_0", 4): (17.0, 16.0, 12.0),
    ("Q8_0", 8): (33.5, 28.0, 22.0),
    ("Q8_0", 32): (137, 80.0, 60.0),
    ("Q8_0", 128): (279, 110.0, 70.0),
    ("Q8_0", 512): (324, 140.0, 90.0),
}


@dataclass(frozen=True)
class Row:
    """One measurement. us: median of a launch. n_bytes: weights, activations and outputs, each once.
    n_ops: multiplications and additions."""
    kernel: str
    type: str
    sizes: dict[str, int]
    cache: str            # "cold" or "hot"
    us: float
    us_least: float
    us_most: float
    n_bytes: int
    n_ops: int

    @property
    def GB_s(self) -> float:
        return self.n_bytes / self.us / 1e3

    @property
    def TOP_s(self) -> float:
        return self.n_ops / self.us / 1e6

    @property
    def name(self) -> str:
        sizes = ", ".join(f"{key}={value}" for key, value in self.sizes.items())
        return f"{self.kernel} {self.type.lower()} [{sizes}, {self.cache}]"

    def line(self, copy_GB_s: float) -> str:
        parts = [self.name, f"median {self.us:.1f} us", f"{self.n_bytes / 1e6:.1f} MB", f"{self.GB_s:.0f} GB/s",
                 f"{100 * self.GB_s / copy_GB_s:.0f} % of copy"]
        return "   ".join(parts + ([f"{self.TOP_s:.1f} TOP/s"] if self.n_ops else []))


class Limits(NamedTuple):
    """us that a row must not exceed, and those it should stay below; None where nothing is asked. rule: where they come from."""
    must: float
    goal: float | None
    rule: str


def find(rows: list[Row], like: Row, **sizes) -> Row | None:
    """The row that differs from `like` in these sizes only."""
    wanted = {**like.sizes, **sizes}
    return next((r for r in rows if (r.kernel, r.type, r.cache, r.sizes) == (like.kernel, like.type, like.cache, wanted)), None)


def limits(row: Row, rows: list[Row], copy_GB_s: float) -> Limits | None:
    """What is asked of a row of a run that measured `rows` and this copy bandwidth."""
    m, k, n = (row.sizes.get(key) for key in "mkn")
    if row.kernel == "mmvq" and row.cache == "cold":
        if (m, k, n) == (M, K, 1):
            return _one_column(row.type)
        if (m, k, n) == (M, K, 8) and (one := find(rows, row, n=1)):
            return Limits(EIGHT_COLUMNS * one.us, None, f"{EIGHT_COLUMNS} x one column")
        if (m, k, n) == (128256, 4096, 1):
            return Limits(row.n_bytes / (COPY_SHARE * copy_GB_s) / 1e3, None, f"{COPY_SHARE:.0%} of copy")
    if row.kernel in ("mmq", "quantize + mmq") and (m, k) == (M, K):
        if n == 512 and row.type in MATRIX_MATRIX:
            _, must, goal = MATRIX_MATRIX[row.type]
            return Limits(row.n_ops / must / 1e6, row.n_ops / goal / 1e6, f"{must} and {goal} TOP/s")
        if n > 512 and (first := find(rows, row, n=512)):
            return Limits(first.us * n / 512, None, "TOP/s of 512 columns")
    if found := _of_experts(row):
        return Limits(*found[1:], "of the type and tokens")
    return None


def _of_experts(row: Row) -> tuple[float, float, float] | None:
    """The line of MUL_MAT_ID."""
    sizes = dict(row.sizes)
    n = sizes.pop("n", None)
    return MUL_MAT_ID.get((row.type, n)) if (row.kernel, row.cache, sizes) == ("mul_mat_id", "cold", EXPERTS) else None


def _one_column(type_: str) -> Limits | None:
    if type_ in MATRIX_VECTOR:
        _, must, goal = MATRIX_VECTOR[type_]
        return Limits(must, goal, "of the type")
    fmt = format_of(type_)
    if not fmt.is_quantized:
        return None
    return Limits(1.5 * M * fmt.row_bytes(K) / MEMORY_GB_S / 1e3 + 4, None, f"1.5 x floor at {MEMORY_GB_S / 1e3} TB/s + 4 us")


def llama_cpp(row: Row) -> str:
    """llama.cpp's figure for a row, or nothing."""
    if found := _of_experts(row):
        return f"{found[0]} us"
    if row.sizes.get("m") == M and row.sizes.get("k") == K:
        if row.kernel == "mmvq" and row.sizes["n"] == 1 and row.type in MATRIX_VECTOR:
            return f"{MATRIX_VECTOR[row.type][0]} us"
        if row.kernel == "mmq" and row.sizes["n"] == 512 and row.type in MATRIX_MATRIX:
            return f"{MATRIX_MATRIX[row.type][0]} TFLOP/s"
    return ""


def verdict(row: Row, limit: Limits) -> str:
    return "missed" if row.us > limit.must else "goal" if limit.goal and row.us <= limit.goal else "met"
