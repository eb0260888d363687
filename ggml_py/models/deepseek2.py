"""deepseek2 (DeepSeek V2, V3 and R1, Kimi K2): multi-head latent attention, leading dense layers, then experts and shared ones.

A token's keys and values are made of a latent row c of r channels, which all heads share, and of R rotated channels kr of all
heads. Files with `attn_kv_b` give each head keys and values of its own; those with `attn_k_b` and `attn_v_b` absorb these
matrices into the query and the output: then the cache holds only c and kr, a query head is k_b q (r channels) and its rotated
channels, and the values are c.
"""
from dataclasses import replace

from ..base.exact_math import log
from ..graph.graph import Tensor
from .common import Batch
from .experts import SIGMOID, SOFTMAX, MixtureOfExperts
from .hparams import Hparams


class Deepseek2(MixtureOfExperts):
    name = "deepseek2"
    has_nextn = True
    neox = False

    def read_hparams(self) -> Hparams:
        """With YaRN's log multiplier the attention's scale stands in for the magnitude of rotated channels, which becomes 1."""
        hp = Hparams.read(self.keys)
        self.log_mul = self.keys.real("rope.scaling.yarn_log_multiplier", 0.0, zero=True) / 0.1
        if hp.rope.yarn and self.log_mul:
            factor = self.keys.real("rope.scaling.attn_factor", 1.0)
            hp = replace(hp, rope=replace(hp.rope, attn_factor=factor / (1 + 0.1 * float(log(1 / hp.rope.freq_scale)))))
        return hp

    def check(self) -> None:
        glm = self.n_vocab == 154880 and self.hp.n_layer in (47, 48)  # GLM-4.7-Flash, whose files do not say
        self.default_gating = SIGMOID if glm else SOFTMAX
        super().check()
        hp, keys = self.hp, self.keys
        self.lite = "blk.0.attn_q.weight" in self.w
        self.q_lora = 0 if self.lite else keys.integer("attention.q_lora_rank", least=1)
        self.kv_lora = keys.integer("attention.kv_lora_rank", least=1)
        head_k, head_v = keys.integer("attention.key_length_mla", 0), keys.integer("attention.value_length_mla", 0)
        self.absorbed = head_k > 0 and head_v > 0
        self.head_k, self.head_v = (head_k, head_v) if self.absorbed else (hp.n_embd_head_k[0], hp.n_embd_head_v[0])
        self.n_rot, self.n_nope = hp.rope.n_rot, self.head_k - hp.rope.n_rot
        if self.n_nope <= 0:
            raise keys.error("rope.dimension_count", self.n_rot, f"less than the {self.head_k} channels of a head", self.head_k)
        self.check_cached_heads()
        ln = float(log(1 / hp.rope.freq_scale))
        a = hp.rope.attn_factor * (1 + 0.1 * ln)
        self.scale = (a * (1 + 0.1 * self.log_mul * ln))**2 / self.head_k**0.5

    def check_cached_heads(self) -> None:
        """The keys say what a cache holds: where it is latent, one head for all; else as many heads as queries have."""
        hp, heads = self.hp, list(zip(self.hp.n_head, self.hp.n_head_kv))[:self.hp.n_layer]
        expected = [("head_count_kv", heads_kv, 1 if self.absorbed else n_head) for n_head, heads_kv in heads]
        if self.absorbed:
            expected += [("key_length", hp.n_embd_head_k[0], self.kv_lora + self.n_rot),
                         ("value_length", hp.n_embd_head_v[0], self.kv_lora)]
        for key, found, allowed in expected:
            if found != allowed:
                raise self.keys.error(f"attention.{key}", found, f"{allowed}", allowed)

    def cache_sizes(self) -> list[tuple[int, int]]:
        return [(self.kv_lora + self.n_rot, 0) if self.absorbed else (n * self.head_k, n * self.head_v) for n in self.hp.n_head]

    def attention(self, b: Batch, il: int, h: Tensor) -> Tensor:
        g, n_head = b.g, self.hp.n_head[il]
        q = self.query(b, il, h)
        q_nope = g.slice_heads(q, n_head=n_head, first=0, n=self.n_nope, name=f"q_nope-{il}")
        q_rot = g.slice_heads(q, n_head=n_head, first=self.n_nope, n=self.n_rot, name=f"q_rot_lin-{il}")
        q_rot = self.rotate(b, il, q_rot, n_head, f"q_rot-{il}")
        kv = self.linear(b, h, f"blk.{il}.attn_kv_a_mqa", self.kv_lora + self.n_rot, name=f"kv_a-{il}")
        k_rot = g.slice_heads(kv, n_head=1, first=self.kv_lora, n=self.n_rot, name=f"k_rot_lin-{il}")
        k_rot = self.rotate(b, il, k_rot, 1, f"k_rot-{il}")
        c = g.slice_heads(kv, n_head=1, first=0, n=self.kv_lora, name=f"kv_lin-{il}")
        c = g.rms_norm(c, self.w(f"blk.{il}.attn_kv_a_norm.weight", self.kv_lora), eps=self.hp.eps, name=f"kv_normed-{il}")
        attend = self.attend_latent if self.absorbed else self.attend_heads
        return attend(b, il, q_nope, q_rot, c, k_rot)

    def query(self, b: Batch, il: int, h: Tensor) -> Tensor:
        p, n = f"blk.{il}.attn_q", self.hp.n_head[il] * self.head_k
        if self.lite:
            return self.linear(b, h, p, n, name=f"q-{il}")
        q = self.linear(b, h, p + "_a", self.q_lora, name=f"q_a-{il}")
        q = b.g.rms_norm(q, self.w(p + "_a_norm.weight", self.q_lora), eps=self.hp.eps, name=f"q_a_normed-{il}")
        return self.linear(b, q, p + "_b", n, name=f"q-{il}")

    def attend_latent(self, b: Batch, il: int, q_nope: Tensor, q_rot: Tensor, c: Tensor, k_rot: Tensor) -> Tensor:
        """Heads of queries over one head of keys, c and kr, whose first channels are the values."""
        g, n_head = b.g, self.hp.n_head[il]
        q = self.each_head(b, q_nope, f"blk.{il}.attn_k_b", n_head, self.kv_lora, f"q_nope_absorbed-{il}")
        q = g.concat_heads(q, q_rot, n_head=n_head, n_head_y=n_head, name=f"Qcur-{il}")
        k = g.concat_heads(c, k_rot, n_head=1, n_head_y=1, name=f"Kcur-{il}")
        k = b.memory.write(g, il, "k", k, name=f"k_cache-{il}")
        o = g.flash_attn_ext(q, k, k, g.inputs["seq"], b.pos, g.inputs["present"], n_head=n_head, n_head_kv=1, scale=self.scale,
                             n_embd_head_v=self.kv_lora, apart=b.apart, name=f"kqv_latent-{il}")
        return self.each_head(b, o, f"blk.{il}.attn_v_b", n_head, self.head_v, f"kqv_out-{il}")

    def each_head(self, b: Batch, x: Tensor, base: str, n_head: int, n_out: int, name: str) -> Tensor:
        """Each head of x with a matrix of its own: [n, n_head * k] -> [n, n_head * n_out]."""
        n, k = x.shape[0], x.shape[1] // n_head
        x = x.view((n * n_head, k))
        y = b.g.mul_mat_heads(self.w(f"{base}.weight", n_head, n_out, k), x, name=f"{name}_products")
        y = self.scaled_and_biased(b, y, base, n_out)
        return y.view((n, n_head * n_out), name=name)

    def attend_heads(self, b: Batch, il: int, q_nope: Tensor, q_rot: Tensor, c: Tensor, k_rot: Tensor) -> Tensor:
        """Each head with keys, its own channels and kr, and values of its own."""
        g, n_head = b.g, self.hp.n_head[il]
        kv = self.linear(b, c, f"blk.{il}.attn_kv_b", n_head * (self.n_nope + self.head_v), name=f"kv-{il}")
        k = g.slice_heads(kv, n_head=n_head, first=0, n=self.n_nope, name=f"k_nope-{il}")
        v = g.slice_heads(kv, n_head=n_head, first=self.n_nope, n=self.head_v, name=f"Vcur-{il}")
        q = g.concat_heads(q_nope, q_rot, n_head=n_head, n_head_y=n_head, name=f"Qcur-{il}")
        k = g.concat_heads(k, k_rot, n_head=n_head, n_head_y=1, name=f"Kcur-{il}")
        k = b.memory.write(g, il, "k", k, name=f"k_cache-{il}")
        v = b.memory.write(g, il, "v", v, name=f"v_cache-{il}")
        return g.flash_attn_ext(q, k, v, g.inputs["seq"], b.pos, g.inputs["present"], n_head=n_head, n_head_kv=n_head,
                                scale=self.scale, apart=b.apart, name=f"kqv_out-{il}")
