"""Digests that must not change: of every op and format, and of SmolLM2 on several axes. The CPU computes them in the tests,
a GPU in record_golden.py."""
import json
from hashlib import sha256

import numpy as np

from ggml_py import NUMERICS_VERSION  # noqa: F401
from ggml_py.base.defaults import TEXT
from ggml_py.graph.graph import Graph, Tensor
from ggml_py.graph.program import Arenas, Program
from ggml_py.quant import tile
from ggml_py.quant.formats import FORMATS
from ggml_py.testing import digest
from places import TESTS
from random_weights import random_weight

GOLDEN = TESTS / "golden"
WEIGHTS = [fmt for fmt in FORMATS.values() if fmt.planes]


def run_graph(backend, graph: Graph, values: dict) -> np.ndarray:
    arenas = Arenas({backend.device: backend})
    try:
        return Program(graph, arenas).run(values)[0]
    finally:
        arenas.close()


def matrix(backend, fmt, n_rows: int, n_cols: int) -> Tensor:
    data = random_weight(fmt, n_rows, n_cols, np.random.default_rng([n_rows, n_cols, int(fmt.type_id)]))
    return Tensor("w", fmt.name, (n_rows, n_cols), backend.device, buffer=backend.upload(tile.pack(data, fmt, n_rows, n_cols)))


def mul_mat_digest(backend, fmt, n_rows: int = 70, n_chunks: int = 3, n_tokens: int = 11) -> str:
    """Activations of a few sizes, some of them zero, the last chunk partial where the format allows."""
    n_cols = 256 * n_chunks - (256 - fmt.block_size if fmt.block_size < 256 else 0)
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((n_tokens, n_cols)) * np.exp2(rng.integers(-20, 20, (n_tokens, 1)))).astype(np.float32)
    x[1] = 0
    graph = Graph(backend.device)
    graph.outputs = [graph.mul_mat(matrix(backend, fmt, n_rows, n_cols), graph.input("x", "f32", x.shape))]
    return digest(run_graph(backend, graph, {"x": x}))


def get_rows_digest(backend, fmt) -> str:
    ids = np.array([0, 69, 33, 33, 5], np.int32)
    graph = Graph(backend.device)
    graph.outputs = [graph.get_rows(matrix(backend, fmt, 70, 512), graph.input("ids", "i32", ids.shape))]
    return digest(run_graph(backend, graph, {"ids": ids}))


def op_digests(backend) -> dict[str, str]:
    return {**{f"mul_mat {fmt.name}": mul_mat_digest(backend, fmt) for fmt in WEIGHTS},
            **{f"get_rows {fmt.name}": get_rows_digest(backend, fmt) for fmt in WEIGHTS}}


def demo_tokens(model, n: int) -> np.ndarray:
    return np.array(model.tokenizer.encode(TEXT.read_text())[:n], np.int32)


def logits_digest(model, tokens, type_k="f16", type_v="f16", n_ubatch=512, **settings) -> str:
    with model.new_context(n_ctx=len(tokens), type_k=type_k, type_v=type_v, n_ubatch=n_ubatch, **settings) as context:
        return digest(context.decode(tokens, logits="all"))


def smollm2_digests(model) -> dict[str, str]:
    tokens = demo_tokens(model, 512)
    return {
        "smollm2, 512 tokens of the demo text": logits_digest(model, tokens),
        **{f"smollm2, 200 tokens of the demo text, {k} and {v} cache": logits_digest(model, tokens[:200], k, v)
           for k, v in (("f32", "f32"), ("q8_0", "q8_0"), ("q8_0", "f16"))},
    }


def records() -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(GOLDEN.glob("*.json"))]


def all_digests(record: dict) -> dict[str, str]:
    """Every digest that a record holds, by name."""
    return {**record["digests"], "axes smollm2": record["axes"]["digest"],
            **{f"perplexity {name}": each["digest"] for name, each in record["perplexity"].items()}}


def fingerprints(found: dict[str, str], groups) -> dict[str, tuple[int, str]]:
    """(how many digests, 16 digits of the sha256 of their lines "name digest", sorted) of each group: the names that begin with
    its words and with no longer group's. Names of no group are one named "". """
    lines = {group: [] for group in (*groups, "")}
    for name, value in sorted(found.items()):
        group = max((group for group in groups if f"{name} ".startswith(f"{group} ")), key=len, default="")
        lines[group].append(f"{name} {value}\n")
    return {group: (len(each), sha256("".join(each).encode()).hexdigest()[:16]) for group, each in lines.items() if each or group}
