"""What architectures share: attention and feed-forward blocks, whose weights and sizes follow from the hyperparameters."""
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from ..base.defaults import N_UBATCH
from ..base.errors import ParameterError, UserError
from ..base.placement import PlacementOptions
from ..base.rope_table import RopeSettings, Temperature, rope_table
from ..base.storage import n_bytes
from ..files.gguf import GGUFFile
from ..graph.columns import decide, share
from ..graph.graph import Graph, Tensor
from ..graph.place import check_offload, place
from ..kernels.draws import SETTINGS
from ..quant import tile
from ..state.base import Memory
from ..state.hybrid import HybridMemory
from ..state.kv_cache import KVCache, cache_tensors, ring_of
from ..state.recurrent import LEAST_ROLLBACK, RecurrentMemory, StateSizes, state_tensors
from .hot_experts import HotExperts, expert_tensors, slots_and_bytes
from .hparams import Hparams, Keys, Windows, because
from .offload_rates import with_measured_rows
from .weights import Paper, Weights

RopeTables = Mapping[tuple[str, str], Tensor]  # by kind and device
TEMPERATURE = "temperature"  # a table of what queries are multiplied by, beside those of angles
FULL, WINDOWED = "full", "windowed"  # the kinds of tables: of layers that see all positions, and of those with a window


@dataclass
class Batch:
    """A graph being built for one micro-batch, and what every layer of it reads."""
    g: Graph
    memory: Memory
    rope_tables: RopeTables
    n_tokens: int
    n_outputs: int
    pos: Tensor
    out_ids: Tensor
    all_rows: bool = False  # all tokens go on behind the last layer
    apart: bool = False     # they are few of each of several sequences
    temperatures: dict[str, Tensor] = field(default_factory=dict)  # of the tokens, by device
    caches: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # of the layers so far: K and V, written
    per_layer: Tensor | None = None  # embeddings for each layer, of models that have them

    def rope_table(self, kind: str = FULL) -> Tensor:
        """On the device where the layer is that is being built."""
        return self.rope_tables[kind, self.g.device]


class Transformer:
    """Base of the architectures: token embedding, `layer` by layer, norm and output head.

    An architecture says its name, its rotary pairing and where its layers differ; it builds the same ops whatever the batch.
    It reads numbers by `keys` and weights by `w`, and by nothing else: then building it on paper compares all of them.
    """
    name = ""
    neox = True  # rotary pairs (i, i + R/2); else (2i, 2i + 1)
    eps_key = "attention.layer_norm_rms_epsilon"  # of what norms add to the variance
    cache_class: Callable[..., KVCache] = KVCache
    temperature: Temperature | None = None  # of architectures that multiply queries by a number of their position
    has_nextn = False  # its files may have a block behind the layers that predicts a token further on
    attn_norm, ffn_norm = "attn_norm", "ffn_norm"  # what files call the norms before both blocks; "": there is none
    attn_post_norm = ffn_post_norm = ""  # and those of their results
    gate_in_up = False  # the feed-forward block's matrices gate and up are rows of one, ffn_up
    windows: Windows | None = None  # of architectures with layers that see only the last positions
    tied = False  # whatever its files have, the embedding is the output head
    embedding_scale = 1.0  # what the embeddings of tokens are multiplied by
    logit_scale = 1.0  # and their logits
    attention_cap = 0.0  # beyond which no score of a key goes; 0: there is none
    logit_cap = 0.0  # beyond which no logit goes; 0: there is none
    without_kv = False  # its layers may have no KV heads, which says that they are recurrent
    final_norm = "output_norm"  # what files call the norm before the output head
    norms_heads = False  # each head of Q and K is normed, with weights that all heads share, before its rotation
    norms_projections = False  # Q and K are normed as a whole, all heads together

    def __init__(self, file: GGUFFile, options: PlacementOptions, backends: Mapping | None = None):
        """backends: of the devices that the options need; None: what is built is checked on `Paper`."""
        is_paper = backends is None
        # The one on paper comes first: its errors name the keys that a bound follows from.
        self.on_paper = self if is_paper else type(self)(file, options)
        self.keys = Keys(file, is_paper)
        self.file, self.hp = file, self.read_hparams()
        self.require("token_embd.weight")
        check_offload(options.offload)
        self.placement = options.place(self.hp.n_layer, self.hp.n_block, "output.weight" not in file.tensors, file.tensors)
        self.backends: Mapping[str, Any] = backends or {device: Paper(device) for device in self.placement.devices}
        self.w: Weights = Weights(file, self.backends, self.placement, None if is_paper else self.on_paper.w)
        self.cache_shards: dict[str, dict[str, int]] = {}  # on paper, of caches that devices share: device -> columns
        self.hot: HotExperts | None = None
        self.n_vocab = file.tensors["token_embd.weight"].shape[-1]
        self.check()

    def read_hparams(self) -> Hparams:
        return Hparams.read(self.keys, self.windows, self.without_kv, self.eps_key)

    def require(self, *names: str) -> None:
        """Refuses files without these tensors, which blocks read only where they are."""
        for name in names:
            if name not in self.file.tensors:
                raise UserError(f"{self.file.path}: tensor {name} is missing")

    def check(self) -> None:
        """Refuses files whose layers this architecture's code does not compute."""
        n_expert = self.keys.integer("expert_count", 0)
        if n_expert:
            raise UserError(f"{self.file.path}: {self.name} with {n_expert} experts is not supported, only dense layers are")

    def new_memory(self, n_ctx: int, n_seq_max: int, type_k: str, type_v: str, kv_write: str = "set_rows",
                   n_block: int | None = None, n_rollback: int = LEAST_ROLLBACK, n_ubatch: int = N_UBATCH) -> Memory:
        """n_block: of so many blocks; None: of the layers. n_ubatch: the most tokens of a micro-batch."""
        n_block = n_block or self.hp.n_layer
        cache = self.cache_class(self.backends, self.cache_sizes()[:n_block], self.memory_devices, n_ctx, n_seq_max, type_k,
                                 type_v, kv_write, self.on_paper.cache_shards, self.hp.windows[:n_block], n_ubatch, n_rollback)
        sizes = self.state_sizes()
        if not sizes:
            return cache
        return HybridMemory(cache, RecurrentMemory(self.backends, sizes, self.memory_devices, n_ctx, n_seq_max, n_rollback))

    @property
    def memory_devices(self) -> list[str]:
        """Where caches and states of each block lie."""
        return [self.placement.memory(il) for il in range(self.hp.n_block)]

    def cache_sizes(self) -> list[tuple[int, int]]:
        """Columns of K and of V of each block."""
        return [(n * k, n * v) for n, k, v in zip(self.hp.n_head_kv, self.hp.n_embd_head_k, self.hp.n_embd_head_v)]

    def state_sizes(self) -> StateSizes:
        """Of the layers that are recurrent."""
        return {}

    def cache_bytes(self, n_ctx: int, type_k: str, type_v: str, n_ubatch: int = N_UBATCH,
                    n_rollback: int = LEAST_ROLLBACK) -> int:
        """Bytes of K and V of all layers for n_ctx positions of a sequence, as `new_memory` would take them; asks for none."""
        return sum(map(n_bytes, self._caches(n_ctx, 1, type_k, type_v, n_ubatch + n_rollback)))

    def state_bytes(self, n_rollback: int = LEAST_ROLLBACK) -> int:
        """Bytes of the states of a sequence's recurrent layers."""
        return sum(map(n_bytes, self._states(n_rollback)))

    def _caches(self, n_ctx: int, n_seq_max: int, type_k: str, type_v: str, n_others: int) -> list[Tensor]:
        n_cells = [n_seq_max * ring_of(window, n_ctx, n_others) for window in self.hp.windows]
        k, v = cache_tensors(self.cache_sizes()[:self.hp.n_layer], n_cells, type_k, type_v, self.memory_devices,
                             self.on_paper.cache_shards)
        return [held for cache in k + v for held in cache.held]

    def _states(self, n_rollback: int) -> list[Tensor]:
        return [*state_tensors(self.state_sizes(), n_rollback + 1, self.memory_devices).values()]

    def context_bytes(self, n_ctx: int, n_seq_max: int, type_k: str, type_v: str, n_rollback: int = LEAST_ROLLBACK,
                      n_ubatch: int = N_UBATCH) -> Counter[str]:
        """Bytes on each device of n_seq_max sequences of n_ctx positions: caches, a mark for each cell, states, and tables of
        rotary angles."""
        found = Counter({self.placement.output: n_ctx * n_seq_max})
        for tensor in self._caches(n_ctx, n_seq_max, type_k, type_v, n_ubatch + n_rollback):
            found[tensor.device] += n_bytes(tensor)
        for tensor in self._states(n_rollback):
            found[tensor.device] += n_seq_max * n_bytes(tensor)
        for table in self.rope_tensors(n_ctx).values():
            found[table.device] += n_bytes(table)
        return found

    def new_nextn_memory(self, n_ctx: int, type_k: str, type_v: str) -> Memory:
        """Of a sequence's NextN blocks, whose attention is plain."""
        sizes = [(0, 0)] * self.hp.n_layer + self.cache_sizes()[self.hp.n_layer:]
        return KVCache(self.backends, sizes, self.memory_devices, n_ctx, 1, type_k, type_v, shards=self.on_paper.cache_shards)

    def new_rope_tables(self, n_ctx: int) -> RopeTables:
        """One of each kind on each device that has layers."""
        return self.upload_rope_tables(n_ctx, self.rope_factors(n_ctx))

    def new_nextn_rope_tables(self, n_ctx: int) -> RopeTables:
        return self.new_rope_tables(n_ctx)

    def upload_rope_tables(self, n_ctx: int, factors: np.ndarray | None) -> RopeTables:
        """factors: of the layers that see all positions."""
        tables = self.rope_tensors(n_ctx)
        for kind, settings in self.ropes.items():
            table = rope_table(settings, n_ctx, factors if kind == FULL else None)
            for device in self.table_devices:
                tables[kind, device].buffer = self.backends[device].upload(table)
        if self.temperature is not None:
            for device in self.table_devices:
                tables[TEMPERATURE, device].buffer = self.backends[device].upload(self.temperature.table(n_ctx))
        return tables

    @property
    def ropes(self) -> dict[str, RopeSettings]:
        """What the angles depend on, of each kind of tables that a block needs."""
        of_kinds = {FULL: self.hp.rope, WINDOWED: self.hp.rope_windowed or self.hp.rope}
        return {kind: of_kinds[kind] for kind in of_kinds if kind in map(self.rope_kind, range(self.hp.n_block))}

    def rope_kind(self, il: int) -> str | None:
        """The kind of table that a block rotates heads by; None: it rotates none."""
        return WINDOWED if self.hp.windows[il] and self.hp.rope_windowed is not None else FULL

    @property
    def table_devices(self) -> list[str]:
        """Where layers rotate heads."""
        return list(dict.fromkeys([*self.placement.layers, *self.placement.columns]))

    def rope_tensors(self, n_ctx: int) -> RopeTables:
        """Of each kind one on each device that rotates, for n_ctx positions, without memory. Those that share columns know each
        other's."""
        columns, tables = list(self.placement.columns), {}
        shapes: dict[str, tuple[int, ...]] = {kind: (n_ctx, rope.n_rot // 2, 2) for kind, rope in self.ropes.items()}
        for kind, shape in (shapes | ({TEMPERATURE: (n_ctx, 1)} if self.temperature is not None else {})).items():
            name = "rope_table" + f"_{kind}" * (kind != FULL)
            tables.update({(kind, device): Tensor(name, "f32", shape, device) for device in self.table_devices})
            for home in columns[:1]:
                tables[kind, home].shards.update({device: tables[kind, device] for device in columns[1:]})
        return tables

    def free_rope_tables(self, tables: RopeTables) -> None:
        for table in tables.values():
            self.backends[table.device].free(table.buffer)

    def rope_factors(self, n_ctx: int) -> np.ndarray | None:
        """Frequency divisors [R/2] in contexts of n_ctx positions, of layers that see all positions: a tensor for all contexts,
        or one of two, by their length; None in files without."""
        by_length = [f"rope_factors_{length}.weight" for length in ("long", "short")]
        name = "rope_freqs.weight"
        if name not in self.w:
            if not any(each in self.w for each in by_length):
                return None
            self.require(*by_length)
            name = by_length[n_ctx <= self.hp.rope.n_ctx_orig]
        factors = self.w.vector(name, self.hp.rope.n_rot // 2)
        if not (factors > 0).all():
            raise UserError(f"{self.file.path}: tensor {name} has the value {factors[~(factors > 0)][0]}, all must be positive")
        return factors

    def angles_agree(self, n_ctx: int, other: int) -> bool:
        """Whether contexts of both lengths have the same rotary angles: files may have divisors for short and for long ones."""
        return "rope_factors_long.weight" not in self.w or len({n <= self.hp.rope.n_ctx_orig for n in (n_ctx, other)}) == 1

    def expert_tensors(self) -> dict[int, list[Tensor]]:
        """Of the layers whose experts may have copies on the layer's device, what belongs to these experts."""
        return expert_tensors(self.w.loaded, self.placement, self.hp.n_layer)

    def weight_bytes(self) -> Counter[str]:
        """On each device: of weights, and of slots for hot experts."""
        slots = slots_and_bytes(self.expert_tensors(), self.placement)[1] if self.placement.hot_experts else Counter[str]()
        return self.w.bytes_by_device() + slots

    def close(self) -> None:
        """Frees what `load` put on the devices."""
        if self.hot is not None:
            self.hot.close()
        self.w.close()

    def load(self, nextn: bool = False) -> None:
        """Puts every weight on its device, by building the graphs that read them: on paper first, where each tensor must have the
        shape that follows from the hyperparameters. nextn: also those of the NextN blocks."""
        if nextn and self.hp.n_block == self.hp.n_layer:
            raise UserError(f"{self.file.path}: nextn: the model has no block that predicts tokens further on (mtp): "
                            f"{self.name}.nextn_predict_layers is 0 or missing")
        self.on_paper.check_tensors(nextn)
        for device, needed in self.on_paper.weight_bytes().items():
            if needed > (held := self.backends[device].memory_bytes()):
                raise UserError(f"{self.file.path}: the weights take {needed:,} bytes, more than {device} has, {held:,}")
        self.placement = with_measured_rows(self.placement, self.backends, self.on_paper.w.held)
        if self.placement.hot_experts:
            self.hot = HotExperts(self.backends, self.on_paper.expert_tensors(), self.placement)
        memory, tables = self.new_memory(1, 1, "f32", "f32", n_block=self.hp.n_block), self.new_rope_tables(1)
        for graph in self.graphs_of_one_token(memory, tables, nextn):
            place(graph, self.backends)
            if self.placement.columns:
                share(graph, self.backends, [*self.placement.columns])
            for node in graph.live():
                self.backends[node.device].prepare(node)
        self.free_rope_tables(tables)
        memory.close()

    def graphs_of_one_token(self, memory: Memory, tables: RopeTables, nextn: bool) -> list[Graph]:
        """They read every weight."""
        behind = range(self.hp.n_layer, self.hp.n_block) if nextn else ()
        return [self.build(memory, tables, 1, 1), *(self.build_nextn(memory, tables, 1, il) for il in behind)]

    def check_tensors(self, nextn: bool) -> None:
        """On paper: the hyperparameters and the tensors, against each other."""
        if self.hp.n_vocab not in (0, self.n_vocab):
            raise UserError(f"{self.file.path}: token_embd.weight has {self.n_vocab} rows, must have one for each of "
                            f"{self.hp.n_vocab} tokens{because(self.hp.n_vocab)}")
        memory = self.new_memory(1, 1, "f32", "f32", n_block=self.hp.n_block)
        graphs = self.graphs_of_one_token(memory, self.rope_tensors(1), nextn)
        if self.placement.columns:
            self.share_columns(graphs)
        self.rope_factors(1)
        self.w.check_bytes()

    def share_columns(self, graphs: list[Graph]) -> None:
        """On paper: decides what of which weights and caches the devices of the placement's columns have."""
        cut, weights = decide(graphs, self.placement.columns), {*self.w.loaded.values()}
        if weights.isdisjoint(cut):
            raise ParameterError("split_mode", f"{self.file.path}: no product can be shared by {len(self.placement.columns)} "
                                               f"devices; allowed: matrices of as many times {tile.ROWS} rows, attention of as "
                                               "many KV heads")
        self.cache_shards = {leaf.name: {device: part.shape[-1] for device, part in leaf.shards.items()}
                             for leaf in cut if leaf not in weights}

    def build(self, memory: Memory, tables: RopeTables, n_tokens: int, n_outputs: int, wanted: str = "logits",
              hidden: bool = False, apart: bool = False) -> Graph:
        """Inputs: tokens, pos, out_ids (the rows whose logits are wanted) and memory's. Output: logits [n_outputs, n_vocab], if
        any. wanted: "logits"; "argmax": only the ids of the largest, i32 [n_outputs]; "both": these and the logits; "draws": only
        ids drawn by a further input, draws, f64 [n_outputs, 5], as of `draw`;
        "likelihoods": the logarithm of the softmax at the ids of a further input, targets, f32 [n_outputs, 1], and the ids of the
        largest. hidden: behind them the results of the last norm of all tokens, f32 [n_tokens, n_embd], from which a NextN block
        goes on. apart: as of `flash_attn_ext`."""
        hp, g = self.hp, Graph(self.placement.output)
        tokens = g.input("tokens", "i32", (n_tokens,))
        b = Batch(g, memory, tables, n_tokens, n_outputs, g.input("pos", "i32", (n_tokens,)),
                  g.input("out_ids", "i32", (n_outputs,)), hidden, apart)
        x = self.embed(b, tokens)
        memory.inputs(g, n_tokens)
        if self.hot is not None:
            self.hot.inputs(g)
        for il in range(hp.n_layer):
            g.device = self.placement.layers[il]
            x = self.layer(b, il, x)
        g.device = self.placement.output
        x = self.norm(b, x, self.final_norm, "result_norm")
        rows = g.take_rows(x, b.out_ids, name="result_rows") if hidden and n_outputs < n_tokens else x
        logits = self.logits(b, rows)
        g.outputs = [logits] if n_outputs else []
        if n_outputs and wanted == "draws":
            settings = g.input("draws", "f64", (n_outputs, len(SETTINGS)))
            g.outputs = [g.draw(logits, settings, name="result_draws")]
        elif n_outputs and wanted != "logits":
            g.outputs = [g.argmax(logits, name="result_argmax"), *[logits] * (wanted == "both")]
        if n_outputs and wanted == "likelihoods":
            targets = g.input("targets", "i32", (n_outputs, 1))
            g.outputs.insert(0, g.log_soft_max(logits, targets, name="result_likelihoods"))
        g.outputs += [x] * hidden
        return g

    def embed(self, b: Batch, tokens: Tensor) -> Tensor:
        x = b.g.get_rows(self.w("token_embd.weight", self.n_vocab, self.hp.n_embd), tokens, name="inp_embd")
        return x if self.embedding_scale == 1 else b.g.scale(x, factor=self.embedding_scale, name="inp_scaled")

    @property
    def head(self) -> str:
        """The output head, or the embedding, to which it is tied."""
        return "output" if "output.weight" in self.w and not self.tied else "token_embd"

    def logits(self, b: Batch, x: Tensor) -> Tensor:
        y = self.linear(b, x, self.head, self.n_vocab, name="result_output")
        if self.logit_scale != 1:
            y = b.g.scale(y, factor=self.logit_scale, name="result_scaled")
        return b.g.softcap(y, cap=self.logit_cap, name="result_capped") if self.logit_cap else y

    def build_nextn(self, memory: Memory, tables: RopeTables, n_tokens: int, il: int, logits: str = "all") -> Graph:
        """The NextN block il behind the layers. Inputs: tokens, pos, memory's, and hidden f32 [n, n_embd]: of each token the
        result of the last norm at the position before, of the model or of this graph. Outputs: the logits of the tokens behind
        (logits "argmax": the ids of the largest), and the results of the block's last norm; "none": nothing, only its memory is
        written."""
        if not self.has_nextn:
            from . import ARCHITECTURES
            known = ", ".join(name for name, model in ARCHITECTURES.items() if model.has_nextn)
            raise UserError(f"{self.file.path}: nextn: {self.name} is not supported, allowed: {known}")
        hp, g, p = self.hp, Graph(self.placement.output), f"blk.{il}.nextn."
        own = lambda name, otherwise: p + name if f"{p}{name}.weight" in self.w else otherwise
        tokens, hidden = g.input("tokens", "i32", (n_tokens,)), g.input("hidden", "f32", (n_tokens, hp.n_embd))
        b = Batch(g, memory, tables, n_tokens, n_tokens, g.input("pos", "i32", (n_tokens,)),
                  g.input("out_ids", "i32", (n_tokens,)))
        norm = lambda x, base, name: self.norm(b, x, base, f"{name}-{il}")
        memory.inputs(g, n_tokens)
        x = g.get_rows(self.w(own("embed_tokens", "token_embd") + ".weight", self.n_vocab, hp.n_embd), tokens,
                       name=f"nextn_embd-{il}")
        x = g.concat_heads(norm(x, p + "enorm", "nextn_enorm"), norm(hidden, p + "hnorm", "nextn_hnorm"), n_head=1, n_head_y=1,
                           name=f"nextn_inp-{il}")
        x = self.layer(b, il, self.linear(b, x, p + "eh_proj", hp.n_embd, name=f"nextn_eh_proj-{il}"))
        x = norm(x, own("shared_head_norm", "output_norm"), "nextn_norm")
        y = self.linear(b, x, own("shared_head_head", self.head), self.n_vocab, name=f"nextn_output-{il}")
        if logits != "none":
            g.outputs = [g.argmax(y, name=f"nextn_argmax-{il}") if logits == "argmax" else y, x]
        return g

    def layer(self, b: Batch, il: int, x: Tensor) -> Tensor:
        """x + Attn(norm x), then x + FFN(norm x); norms of these results come before they are added. On the last layer only the
        wanted rows go on after attention; this changes no bits."""
        p = f"blk.{il}."
        h = self.norm(b, x, p + self.attn_norm, f"attn_norm-{il}") if self.attn_norm else x
        h, out = self.mixed(b, il, h)
        h, x = self.wanted_rows(b, il, attn_out=h, inp=x)
        h = self.linear(b, h, p + out, self.hp.n_embd, name=f"attn_out-{il}")
        return self.fed(b, il, self.joined(b, il, x, h, self.attn_post_norm, "ffn_inp"))

    def fed(self, b: Batch, il: int, x: Tensor) -> Tensor:
        """x + FFN(norm x)."""
        return self.joined(b, il, x, self.feed_forward(b, il, x), self.ffn_post_norm, "l_out")

    def feed_forward(self, b: Batch, il: int, x: Tensor) -> Tensor:
        return self.ffn(b, il, self.norm(b, x, f"blk.{il}.{self.ffn_norm}", f"ffn_norm-{il}") if self.ffn_norm else x)

    def norm(self, b: Batch, x: Tensor, base: str, name: str) -> Tensor:
        """Of whole rows."""
        return b.g.rms_norm(x, self.w(f"{base}.weight", x.shape[1]), eps=self.hp.eps, name=name)

    def wanted_rows(self, b: Batch, il: int, **tensors: Tensor) -> list[Tensor]:
        """Those that go on behind the attention of a block: on the last layer only those whose logits are wanted."""
        if il != self.hp.n_layer - 1 or b.n_outputs == b.n_tokens or b.all_rows:
            return [*tensors.values()]
        return [b.g.take_rows(x, b.out_ids, name=f"{name}_rows-{il}") for name, x in tensors.items()]

    def joined(self, b: Batch, il: int, x: Tensor, y: Tensor, post_norm: str, name: str) -> Tensor:
        """x + y, y normed before where the architecture has a norm for it."""
        if post_norm:
            y = self.norm(b, y, f"blk.{il}.{post_norm}", f"{name}_normed-{il}")
        return b.g.add(x, y, name=f"{name}-{il}")

    def ffn(self, b: Batch, il: int, h: Tensor) -> Tensor:
        return self.gated_ffn(b, il, h, self.hp.n_ff[il])

    def gated_ffn(self, b: Batch, il: int, h: Tensor, n_ff: int, kind: str = "") -> Tensor:
        """down(activate(gate h, up h)). kind: at the end of the names of its tensors."""
        p = f"blk.{il}.ffn_"
        if self.gate_in_up:
            gate, up = (self.linear(b, h, f"{p}up{kind}", 2 * n_ff, f"ffn_{part}{kind}-{il}", (i * n_ff, (i + 1) * n_ff))
                        for i, part in enumerate(("gate", "up")))
        else:
            gate, up = (self.linear(b, h, f"{p}{part}{kind}", n_ff, f"ffn_{part}{kind}-{il}") for part in ("gate", "up"))
        h = self.activate(b, gate, up, f"ffn_glu{kind}-{il}")
        return self.linear(b, h, f"{p}down{kind}", self.hp.n_embd, name=f"ffn_out{kind}-{il}")

    def plain_ffn(self, b: Batch, il: int, h: Tensor, n_ff: int, activation: str, kind: str = "") -> Tensor:
        """down(activation(up h)), without a gate. activation: an op of one operand."""
        p = f"blk.{il}.ffn_"
        h = self.linear(b, h, f"{p}up{kind}", n_ff, name=f"ffn_up{kind}-{il}")
        h = b.g.apply(activation, h, name=f"ffn_{activation}{kind}-{il}")
        return self.linear(b, h, f"{p}down{kind}", self.hp.n_embd, name=f"ffn_out{kind}-{il}")

    def activate(self, b: Batch, gate: Tensor, up: Tensor, name: str) -> Tensor:
        """The gated unit of feed-forward blocks and experts."""
        return b.g.swiglu(gate, up, name=name)

    def mixed(self, b: Batch, il: int, h: Tensor) -> tuple[Tensor, str]:
        """What a token takes from those before it, and the name of the matrix that it is multiplied with."""
        return self.attention(b, il, h), "attn_output"

    def attention(self, b: Batch, il: int, h: Tensor) -> Tensor:
        return self.attend(b, il, *self.qkv(b, il, h))

    def attend(self, b: Batch, il: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n_head, n_head_kv = self.hp.n_head[il], self.hp.n_head_kv[il]
        q, k = self.placed(b, il, q, "q", n_head), self.placed(b, il, k, "k", n_head_kv)
        k = b.memory.write(b.g, il, "k", k, name=f"k_cache-{il}")
        v = b.memory.write(b.g, il, "v", v, name=f"v_cache-{il}")
        return self.over_caches(b, il, q, k, v)

    def over_caches(self, b: Batch, il: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of q over caches to which the micro-batch's keys and values have been written."""
        g, hp = b.g, self.hp
        return g.flash_attn_ext(q, k, v, *self.seen(b, il), *self.sinks(il),
                                n_head=hp.n_head[il], n_head_kv=hp.n_head_kv[il], scale=self.attention_scale(il),
                                window=hp.windows[il], softcap=self.attention_cap, apart=b.apart, name=f"kqv_out-{il}")

    def seen(self, b: Batch, il: int) -> tuple[Tensor, Tensor, Tensor]:
        """(sequence and position of each token, which positions of each sequence are there)."""
        return b.g.inputs["seq"], b.pos, b.g.inputs["present"]

    def placed(self, b: Batch, il: int, x: Tensor, part: str, n_head: int) -> Tensor:
        """Q or K (part: "q", "k") as attention takes it: normed, then rotated."""
        return self.rotate(b, il, self.norm_head(b, il, x, part), n_head, f"{part.upper()}cur-{il}")

    def rotate(self, b: Batch, il: int, x: Tensor, n_head: int, name: str) -> Tensor:
        """The heads of x turned by the angles of their positions; x itself in blocks that rotate none."""
        kind = self.rope_kind(il)
        return x if kind is None else b.g.rope(x, b.pos, b.rope_table(kind), n_head=n_head, neox=self.neox, name=name)

    def tempered(self, b: Batch, il: int, q: Tensor) -> Tensor:
        """Queries times the number of their position."""
        device = b.g.device
        if device not in b.temperatures:
            b.temperatures[device] = b.g.take_rows(b.rope_table(TEMPERATURE), b.pos, name=f"temperatures-{il}")
        return b.g.weighted_sum(q, b.temperatures[device], name=f"Qcur_tempered-{il}")

    def attention_scale(self, il: int) -> float:
        """What products of queries and keys are multiplied by."""
        return self.hp.n_embd_head_k[il]**-0.5

    def sinks(self, il: int) -> tuple[Tensor, ...]:
        """(a logit for each head that takes part in the softmax without a value,), in architectures that have them."""
        return ()

    def norm_head(self, b: Batch, il: int, x: Tensor, part: str) -> Tensor:
        """The norm of Q or K (part: "q", "k"); x itself in architectures without one."""
        if not (self.norms_heads or self.norms_projections):
            return x
        w = self.w(f"blk.{il}.attn_{part}_norm.weight", self.hp.n_embd_head_k[il] if self.norms_heads else x.shape[1])
        return b.g.rms_norm(x, w, eps=self.hp.eps, name=f"{part.upper()}cur_normed-{il}")

    def qkv(self, b: Batch, il: int, h: Tensor, wanted: str = "qkv") -> list[Tensor]:
        """Q, K and V, those first ones that are wanted, from three matrices or from the rows of one. The products come first: one
        op can make them all."""
        hp, p = self.hp, f"blk.{il}.attn_"
        head_k, head_v = hp.n_embd_head_k[il], hp.n_embd_head_v[il]
        sizes = [hp.n_head[il] * head_k, hp.n_head_kv[il] * head_k, hp.n_head_kv[il] * head_v]
        parts = []
        for part, n, end in zip(wanted, sizes, accumulate(sizes)):
            base, n_out, rows = (p + "qkv", sum(sizes), (end - n, end)) if p + "qkv.weight" in self.w else (p + part, n, None)
            y = self.product(b, h, base, n_out, f"{part.upper()}lin-{il}", rows)
            parts.append((y, base, n_out, rows, f"{p}{part}.bias"))
        return [self.scaled_and_biased(b, *part) for part in parts]

    def linear(self, b: Batch, x: Tensor, base: str, n_out: int, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """W x, times `base.scale` and plus `base.bias` where the file has them. rows: only those of W, and of a bias."""
        return self.scaled_and_biased(b, self.product(b, x, base, n_out, name, rows), base, n_out, rows)

    def product(self, b: Batch, x: Tensor, base: str, n_out: int, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """W x. rows: only those of W."""
        return b.g.mul_mat(self.w(f"{base}.weight", n_out, x.shape[1], rows=rows), x, name=name)

    def scaled_and_biased(self, b: Batch, y: Tensor, base: str, n_out: int, rows: tuple[int, int] | None = None,
                          bias: str = "") -> Tensor:
        """y times `base.scale` and plus `base.bias`, or those rows of it, where the file has them.
        bias: another name of it, where it has these rows alone."""
        name = y.name
        if f"{base}.scale" in self.w:
            y = b.g.scale(y, factor=float(self.w.vector(f"{base}.scale", 1)[0]), name=f"{name}_scaled")
        if f"{base}.bias" in self.w:
            y = b.g.add(y, self.w(f"{base}.bias", n_out, rows=rows), name=f"{name}_b")
        elif bias in self.w:
            y = b.g.add(y, self.w(bias, y.shape[1]), name=f"{name}_b")
        return y
