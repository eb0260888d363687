"""glm4moe (GLM-4.5): Q, K and V have biases, in some models Q and K a norm a head; leading dense layers, then experts chosen with
a bias, and a shared one.

A file's NextN blocks are behind the layers that are computed. They are loaded on request; nothing runs them yet."""
import numpy as np

from ..graph.graph import Graph, Tensor
from ..state.base import Memory
from .common import Batch
from .experts import SIGMOID, MixtureOfExperts


class Glm4MoE(MixtureOfExperts):
    name = "glm4moe"
    ffn_norm = "post_attention_norm"
    default_gating = SIGMOID

    def norm_head(self, b: Batch, x: Tensor, weight: str, name: str) -> Tensor:
        return b.g.rms_norm(x, self.w(weight, self.hp.n_embd_head_k), eps=self.hp.eps, name=name) if weight in self.w else x

    def route(self, b: Batch, il: int, h: Tensor) -> tuple[Tensor, Tensor]:
        self.w(f"blk.{il}.exp_probs_b.bias", self.experts.n)  # must be there
        return super().route(b, il, h)

    def build_nextn(self, memory: Memory, table: Tensor, n_tokens: int, il: int) -> Graph:
        """Inputs: tokens, pos, memory's, and hidden f32 [n, n_embd], the results of the model's last norm at the positions
        before. Output: logits of the tokens behind. table: without sections, whatever the file says."""
        hp, g, p = self.hp, Graph(self.w.backend.device), f"blk.{il}.nextn."
        own = lambda name, otherwise: p + name if f"{p}{name}.weight" in self.w else otherwise
        norm = lambda x, base, name: g.rms_norm(x, self.w(f"{base}.weight", hp.n_embd), eps=hp.eps, name=f"{name}-{il}")
        tokens, hidden = g.input("tokens", "i32", (n_tokens,)), g.input("hidden", "f32", (n_tokens, hp.n_embd))
        b = Batch(g, memory, table, n_tokens, n_tokens, g.input("pos", "i32", (n_tokens,)),
                  g.input("out_ids", "i32", (n_tokens,)))
        memory.inputs(g, n_tokens)
        x = g.get_rows(self.w(own("embed_tokens", "token_embd") + ".weight", self.n_vocab, hp.n_embd), tokens,
                       name=f"nextn_embd-{il}")
        x = g.concat_heads(norm(x, p + "enorm", "nextn_enorm"), norm(hidden, p + "hnorm", "nextn_hnorm"), n_head=1, n_head_y=1,
                           name=f"nextn_inp-{il}")
        x = self.layer(b, il, self.linear(b, x, p + "eh_proj", hp.n_embd, name=f"nextn_eh_proj-{il}"))
        x = norm(x, own("shared_head_norm", "output_norm"), "nextn_norm")
        head = own("shared_head_head", "output" if "output.weight" in self.w else "token_embd")
        g.outputs = [self.linear(b, x, head, self.n_vocab, name=f"nextn_output-{il}")]
        return g

    def rope_factors(self, n_ctx: int) -> np.ndarray | None:
        """Of text the positions of the first three sections are the token's, that of a fourth is 0: its pairs do not turn."""
        sections = self.keys.per_block("rope.dimension_sections", 4, 0, kind="i32")
        if not (sections[0] > 0 and sections[1] > 0) or sections[3] <= 0:
            return None
        pairs = np.arange(self.hp.rope.n_rot // 2) % sum(sections)
        return np.where(pairs < sum(sections[:3]), 1, np.inf).astype(np.float32)
