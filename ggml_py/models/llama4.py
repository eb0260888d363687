"""llama4 (Llama 4): every fourth layer does not rotate heads, and multiplies queries by a temperature; in the others each head of
Q and K is normed after its rotation, without weights. Most layers see the positions of a chunk alone. Some layers have experts:
the sigmoid of its logit multiplies what an expert reads; a shared one sees all tokens."""
from functools import partial, reduce

from ..base.rope_table import Temperature
from ..graph.graph import Tensor
from ..state.chunked_cache import ChunkedKVCache, seen_in_chunk
from .common import Batch
from .counted import LLAMA4_NO_NORMS
from .experts import SIGMOID, MixtureOfExperts

CHUNK, INTERVAL = 8192, 4


class Llama4(MixtureOfExperts):
    name = "llama4"
    neox = False
    routing = SIGMOID, False
    temperature = Temperature(0.1, 1, CHUNK)
    cache_class = partial(ChunkedKVCache, CHUNK)

    def check(self) -> None:
        self.norms = self.keys.integer("expert_count", 0) != LLAMA4_NO_NORMS
        self.step = self.keys.integer("interleave_moe_layer_step")
        self.pattern = self.keys.integer("attention.sliding_window_pattern", 4)
        self.may_be_dense = not self.step
        if self.step:
            self.n_ff_shared = self.keys.per_block("expert_feed_forward_length", self.hp.n_block, least=1)
        super().check()

    def has_experts(self, il: int) -> bool:
        return self.step > 0 and (il + 1) % self.step == 0

    def rope_kind(self, il: int) -> str | None:
        return super().rope_kind(il) if (il + 1) % INTERVAL else None

    def placed(self, b: Batch, il: int, x: Tensor, part: str, n_head: int) -> Tensor:
        if self.rope_kind(il) is None:
            return self.tempered(b, il, x) if part == "q" else x
        x = self.rotate(b, il, x, n_head, f"{part.upper()}cur_rotated-{il}")
        if not self.norms:
            return x
        ones = self.w.ones(f"blk.{il}.attn_{part}_norm.ones", self.hp.n_embd_head_k[il])
        return b.g.rms_norm(x, ones, eps=self.hp.eps, name=f"{part.upper()}cur_normed-{il}")

    def seen(self, b: Batch, il: int) -> tuple[Tensor, Tensor, Tensor]:
        is_chunked = not self.pattern or il % self.pattern < self.pattern - 1
        return seen_in_chunk(b.g, b.pos, CHUNK) if is_chunked else super().seen(b, il)

    def route(self, b: Batch, il: int, h: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen by the logits."""
        g, logits = b.g, self.router_logits(b, il, h)
        ids = g.top_k(logits, k=self.experts.n_used[il], name=f"ffn_moe_topk-{il}")
        return ids, g.sigmoid(g.take_columns(logits, ids, name=f"ffn_moe_chosen-{il}"), name=f"ffn_moe_weights-{il}")

    def routed(self, b: Batch, il: int, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The sum, in the order of rank, of the chosen experts' outputs of the token times their weight."""
        g, (n, used), size = b.g, ids.shape, h.shape[1]
        part = lambda x, j, size, name: x if used == 1 else g.slice_heads(x, n_head=1, first=j * size, n=size, name=name)
        rows = [g.weighted_sum(h, part(weights, j, 1, f"ffn_moe_weight_{j}-{il}"), name=f"ffn_moe_inp_{j}-{il}")
                for j in range(used)]
        x = reduce(lambda x, y: g.concat_heads(x, y, n_head=1, n_head_y=1), rows)
        y = self.outputs(b, il, x if used == 1 else x.view((n * used, size)), ids)
        y = y if used == 1 else y.view((n, used * size))
        return reduce(g.add, [part(y, j, size, f"ffn_moe_out_{j}-{il}") for j in range(used)])
