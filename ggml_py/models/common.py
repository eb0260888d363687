"""What architectures share: hyperparameters from GGUF keys, weights checked by name and shape, attention and feed-forward blocks."""
from dataclasses import dataclass
from math import prod

import numpy as np

from ..errors import UserError
from ..exact_math import log
from ..gguf_file import GGUFFile
from ..graph import Graph, Tensor
from ..memory import KVCache
from ..rope_table import RopeSettings, rope_table
from ..storage import n_bytes

SCALING = ("none", "linear", "yarn", "longrope")


@dataclass(frozen=True)
class Hparams:
    """Numbers of a transformer with plain attention. Heads may differ from layer to layer; lists have one for each block, also of those behind the layers."""
    n_layer: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    n_head: list[int]
    n_head_kv: list[int]
    n_embd_head_k: int
    n_embd_head_v: int
    n_ff: list[int]
    eps: float
    rope: RopeSettings
    scaling: str
    n_block: int  # layers, and NextN blocks behind them

    @classmethod
    def read(cls, file: GGUFFile) -> "Hparams":
        a = file.get("general.architecture", "str")
        u32 = lambda key, *default: file.get(f"{a}.{key}", "u32", *default)
        f32 = lambda key, *default: file.get(f"{a}.{key}", "f32", *default)
        n_block, n_nextn = u32("block_count"), u32("nextn_predict_layers", 0)
        n_layer = n_block - n_nextn
        if n_layer < 1:
            raise UserError(f"{file.path}: {a}.nextn_predict_layers is {n_nextn} of {a}.block_count {n_block}: must leave one layer at least")
        n_embd, n_ctx = u32("embedding_length"), u32("context_length")
        per_layer = lambda key, default: file.get_key_or_arr(f"{a}.{key}", n_block, default=default)
        n_head = per_layer("attention.head_count", 0)
        n_head_kv = file.get_key_or_arr(f"{a}.attention.head_count_kv", n_block, default=None) or n_head
        heads = list(zip(n_head, n_head_kv))[:n_layer]
        if not n_embd or not all(map(all, heads)) or any(h % kv for h, kv in heads):
            raise UserError(f"{file.path}: {a}: {n_layer} layers of {n_embd} with heads {n_head[:1]} and KV heads {n_head_kv[:1]}: must be positive, heads whole groups of KV heads")
        k = u32("attention.key_length", n_embd // n_head[0])
        n_rot = u32("rope.dimension_count", k)
        if n_rot % 2 or not 0 < n_rot <= k:
            raise UserError(f"{file.path}: {a}.rope.dimension_count is {n_rot}, must be even and at most the head size {k}")
        scaling = file.get(f"{a}.rope.scaling.type", "str", "linear")
        if scaling not in SCALING:
            raise UserError(f"{file.path}: {a}.rope.scaling.type is {scaling!r}, known: {', '.join(SCALING)}")
        factor = f32("rope.scaling.factor", f32("rope.scale_linear", 0.0)) or 1.0
        if scaling == "none":
            factor = 1.0
        yarn = scaling == "yarn"
        attn_factor = f32("rope.scaling.attn_factor", 1.0)
        if yarn:  # the rope op multiplies by 1 + 0.1 ln s; for s > 1 llama.cpp's own factor leaves just that, for s <= 1 it cancels it
            ln = float(log(np.float64(factor)))
            attn_factor *= (0.1 * ln + 1 if factor > 1 else 1.0) / (1 + 0.1 * ln)
        vocabulary = file.metadata.get("tokenizer.ggml.tokens")
        n_ctx_orig = u32("rope.scaling.original_context_length", n_ctx)
        return cls(n_layer, n_embd, len(vocabulary) if vocabulary is not None else u32("vocab_size", 0), n_ctx, n_head, n_head_kv, k,
                   u32("attention.value_length", n_embd // n_head[0]), per_layer("feed_forward_length", 0), f32("attention.layer_norm_rms_epsilon"),
                   RopeSettings(n_rot, f32("rope.freq_base", 10000.0), 1.0 / factor, yarn, attn_factor, n_ctx_orig), scaling, n_block)


class Weights:
    """The tensors of a file by name, put on a device when first asked for: matrices as tiles, vectors as float32."""

    def __init__(self, file: GGUFFile, backend):
        self.file, self.backend, self.loaded = file, backend, {}

    def __contains__(self, name: str) -> bool:
        return name in self.file.tensors

    def __call__(self, name: str, *shape: int, rows: tuple[int, int] | None = None) -> Tensor:
        """The tensor `name`, which must have this shape (numpy order): a vector, a matrix or a stack of them. rows: only those [first, last) of matrices."""
        key = name, rows
        if key not in self.loaded:
            self.loaded[key] = self._load(name, shape, rows)
        return self.loaded[key]

    def table(self, name: str, n_rows: int, n_cols: int, columns: tuple[int, int] | None = None) -> Tensor:
        """The matrix `name` as float32 rows, not as tiles. columns: only those [first, last)."""
        key = name, "table", columns
        if key not in self.loaded:
            values = self._values(name, (n_rows, n_cols))[:, slice(*columns or (None,))]
            self.loaded[key] = Tensor(name, "f32", values.shape, device=self.backend.device, storage=(self.backend.upload(np.ascontiguousarray(values)), 0))
        return self.loaded[key]

    def vector(self, name: str, n: int) -> np.ndarray:
        """float32 [n] on the host."""
        return self._values(name, (n,))

    def _info(self, name: str, shape):
        info = self.file.tensors.get(name)
        if info is None:
            raise UserError(f"{self.file.path}: tensor {name} is missing")
        found = tuple(reversed(info.shape))
        if tuple(n for n in found if n != 1) != tuple(n for n in shape if n != 1):
            raise UserError(f"{self.file.path}: tensor {name} has shape {list(found)}, expected {list(shape)}")
        return info

    def _values(self, name: str, shape) -> np.ndarray:
        from ..quant.dequantize import dequantize
        info = self._info(name, shape)
        return dequantize(self.file.data(name), info.type.name, shape, name)

    def _load(self, name: str, shape, rows) -> Tensor:
        from ..quant import tile
        info = self._info(name, shape)
        device = self.backend.device
        if len(shape) == 1:
            values = self._values(name, shape)[slice(*rows or (None,))]
            return Tensor(name, "f32", values.shape, device=device, storage=(self.backend.upload(np.ascontiguousarray(values)), 0))
        *stack, n_rows, n_cols = shape
        n_matrices = prod(stack)
        data = self.file.data(name).reshape(n_matrices, n_rows, -1)
        if rows:
            data, n_rows = data[:, rows[0]:rows[1]], rows[1] - rows[0]
        tiles = tile.pack(data, info.type.name, n_rows, n_cols, n_matrices, name=name)
        return Tensor(name, info.type.name, (*stack, n_rows, n_cols), device=device, storage=(self.backend.upload(tiles), 0))

    @property
    def n_bytes(self) -> int:
        return sum(n_bytes(t) for t in self.loaded.values())

    def close(self) -> None:
        for tensor in self.loaded.values():
            self.backend.free(tensor.storage[0])
        self.loaded = {}


@dataclass
class Batch:
    """A graph being built for one micro-batch, and what every layer of it reads."""
    g: Graph
    memory: KVCache
    rope_table: Tensor
    n_tokens: int
    n_outputs: int
    pos: Tensor
    out_ids: Tensor


class Transformer:
    """Base of the architectures: token embedding, `layer` by layer, norm and output head.

    An architecture says its name, its rotary pairing and where its layers differ; it builds the same ops whatever the batch.
    """
    name = ""
    neox = True  # rotary pairs (i, i + R/2); else (2i, 2i + 1)
    ffn_norm = "ffn_norm"  # what files call the norm before the feed-forward block

    def __init__(self, file: GGUFFile, backend):
        self.file, self.hp, self.w = file, self.read_hparams(file), Weights(file, backend)
        if "token_embd.weight" not in self.w:
            raise UserError(f"{file.path}: tensor token_embd.weight is missing")
        self.n_vocab = file.tensors["token_embd.weight"].shape[-1]
        self.check()

    def read_hparams(self, file: GGUFFile) -> Hparams:
        return Hparams.read(file)

    def check(self) -> None:
        """Refuses files whose layers this architecture's code does not compute."""
        n_expert = self.file.get(f"{self.name}.expert_count", "u32", 0)
        if n_expert:
            raise UserError(f"{self.file.path}: {self.name} with {n_expert} experts is not supported, only dense layers are")

    def new_memory(self, n_ctx: int, n_seq_max: int, type_k: str, type_v: str, kv_write: str = "set_rows", n_block: int | None = None) -> KVCache:
        """n_block: of so many blocks; None: of the layers."""
        return KVCache(self.w.backend, self.cache_sizes()[:n_block or self.hp.n_layer], n_ctx, n_seq_max, type_k, type_v, kv_write)

    def cache_sizes(self) -> list[tuple[int, int]]:
        """Columns of K and of V of each block."""
        return [(n * self.hp.n_embd_head_k, n * self.hp.n_embd_head_v) for n in self.hp.n_head_kv]

    def new_rope_table(self, n_ctx: int) -> Tensor:
        table = rope_table(self.hp.rope, n_ctx, self.rope_factors(n_ctx))
        backend = self.w.backend
        return Tensor("rope_table", "f32", table.shape, device=backend.device, storage=(backend.upload(table), 0))

    def rope_factors(self, n_ctx: int) -> np.ndarray | None:
        """Frequency divisors [R/2] in contexts of n_ctx positions."""
        return None

    def load(self, nextn: bool = False) -> None:
        """Puts every weight on the device, by building the graphs that read them. nextn: also those of the NextN blocks."""
        hp = self.hp
        if nextn and hp.n_block == hp.n_layer:
            raise UserError(f"{self.file.path}: nextn: {self.name}.nextn_predict_layers is 0 or missing, must be positive for blocks to load")
        memory, table = self.new_memory(1, 1, "f32", "f32", n_block=hp.n_block), self.new_rope_table(1)
        graphs = self.build(memory, table, 1, 1), *(self.build_nextn(memory, table, 1, il) for il in range(hp.n_layer, hp.n_block) if nextn)
        for node in (node for graph in graphs for node in graph.live()):
            self.w.backend.check(node)
        self.w.backend.free(table.storage[0])
        memory.close()

    def build(self, memory: KVCache, table: Tensor, n_tokens: int, n_outputs: int, greedy: bool = False) -> Graph:
        """Inputs: tokens, pos, out_ids (the rows whose logits are wanted) and memory's. Output: logits [n_outputs, n_vocab], if any; greedy: only the ids of
        the largest, i32 [n_outputs]."""
        hp, g = self.hp, Graph(self.w.backend.device)
        x = g.get_rows(self.w("token_embd.weight", self.n_vocab, hp.n_embd), g.input("tokens", "i32", (n_tokens,)), name="inp_embd")
        b = Batch(g, memory, table, n_tokens, n_outputs, g.input("pos", "i32", (n_tokens,)), g.input("out_ids", "i32", (n_outputs,)))
        memory.inputs(g, n_tokens)
        for il in range(hp.n_layer):
            x = self.layer(b, il, x)
        x = g.rms_norm(x, self.w("output_norm.weight", hp.n_embd), eps=hp.eps, name="result_norm")
        head = "output" if "output.weight" in self.w else "token_embd"
        logits = self.linear(b, x, head, self.n_vocab, name="result_output")
        g.outputs = [] if not n_outputs else [g.argmax(logits, name="result_argmax")] if greedy else [logits]
        return g

    def build_nextn(self, memory: KVCache, table: Tensor, n_tokens: int, il: int) -> Graph:
        """The NextN block il behind the layers, in architectures that have one."""
        raise UserError(f"{self.file.path}: nextn: {self.name} is not supported, allowed: glm4moe")

    def layer(self, b: Batch, il: int, x: Tensor) -> Tensor:
        """x + Attn(norm x), then x + FFN(norm x). On the last layer only the wanted rows go on after attention; this changes no bits."""
        hp, g, p = self.hp, b.g, f"blk.{il}."
        h = g.rms_norm(x, self.w(p + "attn_norm.weight", hp.n_embd), eps=hp.eps, name=f"attn_norm-{il}")
        h = self.attention(b, il, h)
        if il == hp.n_layer - 1 and b.n_outputs < b.n_tokens:
            h, x = g.take_rows(h, b.out_ids, name=f"attn_out_rows-{il}"), g.take_rows(x, b.out_ids, name=f"inp_rows-{il}")
        h = self.linear(b, h, p + "attn_output", hp.n_embd, name=f"attn_out-{il}")
        x = g.add(x, h, name=f"ffn_inp-{il}")
        h = g.rms_norm(x, self.w(f"{p}{self.ffn_norm}.weight", hp.n_embd), eps=hp.eps, name=f"ffn_norm-{il}")
        return g.add(x, self.ffn(b, il, h), name=f"l_out-{il}")

    def ffn(self, b: Batch, il: int, h: Tensor) -> Tensor:
        return self.gated_ffn(b, il, h, self.hp.n_ff[il])

    def gated_ffn(self, b: Batch, il: int, h: Tensor, n_ff: int, kind: str = "") -> Tensor:
        """down(silu(gate h) * up h). kind: at the end of the names of its tensors."""
        p = f"blk.{il}.ffn_"
        gate = self.linear(b, h, f"{p}gate{kind}", n_ff, name=f"ffn_gate{kind}-{il}")
        up = self.linear(b, h, f"{p}up{kind}", n_ff, name=f"ffn_up{kind}-{il}")
        h = b.g.swiglu(gate, up, name=f"ffn_swiglu{kind}-{il}")
        return self.linear(b, h, f"{p}down{kind}", self.hp.n_embd, name=f"ffn_out{kind}-{il}")

    def attention(self, b: Batch, il: int, h: Tensor) -> Tensor:
        hp, g, n_head, n_head_kv = self.hp, b.g, self.hp.n_head[il], self.hp.n_head_kv[il]
        q, k, v = self.qkv(b, il, h)
        q = self.norm_head(b, q, f"blk.{il}.attn_q_norm.weight", f"Qcur_normed-{il}")
        k = self.norm_head(b, k, f"blk.{il}.attn_k_norm.weight", f"Kcur_normed-{il}")
        q = g.rope(q, b.pos, b.rope_table, n_head=n_head, neox=self.neox, name=f"Qcur-{il}")
        k = g.rope(k, b.pos, b.rope_table, n_head=n_head_kv, neox=self.neox, name=f"Kcur-{il}")
        k = b.memory.write(g, b.memory.k[il], k, name=f"k_cache-{il}")
        v = b.memory.write(g, b.memory.v[il], v, name=f"v_cache-{il}")
        return g.flash_attn_ext(q, k, v, g.inputs["seq"], b.pos, g.inputs["present"], *self.sinks(il), n_head=n_head, n_head_kv=n_head_kv,
                                scale=hp.n_embd_head_k**-0.5, window=self.window(il), name=f"kqv_out-{il}")

    def sinks(self, il: int) -> tuple[Tensor, ...]:
        """(a logit for each head that takes part in the softmax without a value,), in architectures that have them."""
        return ()

    def window(self, il: int) -> int:
        """How many positions a query sees, its own and those before it; 0 for all."""
        return 0

    def norm_head(self, b: Batch, x: Tensor, weight: str, name: str) -> Tensor:
        """The norm of each head before its rotation; architectures without one return x."""
        return x

    def qkv(self, b: Batch, il: int, h: Tensor) -> list[Tensor]:
        """Q, K and V from three matrices, or from the rows of one. The products come first: one op can make them all."""
        hp, p = self.hp, f"blk.{il}.attn_"
        sizes = dict(q=hp.n_head[il] * hp.n_embd_head_k, k=hp.n_head_kv[il] * hp.n_embd_head_k, v=hp.n_head_kv[il] * hp.n_embd_head_v)
        total, first, parts = sum(sizes.values()), 0, []
        for part, n in sizes.items():
            if p + "qkv.weight" in self.w:
                bias = next((name for name in (f"{p}qkv.bias", f"{p}{part}.bias") if name in self.w), None)
                parts.append((f"{p}qkv", total, f"{part.upper()}lin-{il}", (first, first + n), bias))
            else:
                parts.append((p + part, n, f"{part.upper()}lin-{il}", None, None))
            first += n
        products = [self.product(b, h, *part[:4]) for part in parts]
        return [self.scaled_and_biased(b, y, *part) for y, part in zip(products, parts)]

    def linear(self, b: Batch, x: Tensor, base: str, n_out: int, name: str, rows: tuple[int, int] | None = None, bias: str | None = None) -> Tensor:
        """W x, times `base.scale` and plus `base.bias` where the file has them. rows: only those of W (and of a bias as long as W)."""
        return self.scaled_and_biased(b, self.product(b, x, base, n_out, name, rows), base, n_out, name, rows, bias)

    def product(self, b: Batch, x: Tensor, base: str, n_out: int, name: str, rows: tuple[int, int] | None) -> Tensor:
        return b.g.mul_mat(self.w(f"{base}.weight", n_out, x.shape[1], rows=rows), x, name=name)

    def scaled_and_biased(self, b: Batch, y: Tensor, base: str, n_out: int, name: str, rows: tuple[int, int] | None, bias: str | None) -> Tensor:
        if f"{base}.scale" in self.w:
            y = b.g.scale(y, factor=float(self.w.vector(f"{base}.scale", 1)[0]), name=f"{name}_scaled")
        bias = bias or f"{base}.bias"
        if bias in self.w:
            part = rows if rows and bias == f"{base}.bias" else None
            y = b.g.add(y, self.w(bias, n_out if part or not rows else rows[1] - rows[0], rows=part), name=f"{name}_b")
        return y
