"""Models whose layers are gated delta nets, recurrent, but for every few of them, which have attention with a gate."""
from dataclasses import dataclass

from ..base.errors import UserError
from ..graph.graph import Tensor
from ..state.recurrent import StateSizes
from .common import Batch, Transformer
from .hparams import Hparams, Keys


@dataclass(frozen=True)
class DeltaNet:
    """Numbers of the recurrent layers."""
    taps: int                # of the convolution over time
    dim: int                 # channels of a head
    n_head_k: int            # of q and of k
    n_head_v: int            # of v, each with a state of dim x dim
    is_recurrent: list[bool]  # of each block

    @property
    def n_values(self) -> int:
        return self.n_head_v * self.dim

    @property
    def n_channels(self) -> int:
        """Of q, k and v together."""
        return 2 * self.n_head_k * self.dim + self.n_values

    @classmethod
    def read(cls, keys: Keys, hp: Hparams) -> "DeltaNet":
        taps, dim = keys.integer("ssm.conv_kernel", least=2), keys.integer("ssm.state_size", least=1)
        if dim % 8:
            raise keys.error("ssm.state_size", dim, "a multiple of 8", dim)
        n_k, n_v = keys.integer("ssm.group_count", least=1), keys.integer("ssm.time_step_rank", least=1)
        if n_v % n_k:
            raise keys.error("ssm.time_step_rank", n_v, f"a multiple of the {n_k} key heads", n_k)
        if (inner := keys.integer("ssm.inner_size")) != n_v * dim:
            raise keys.error("ssm.inner_size", inner, f"{n_v * dim}, {n_v} heads of {dim}", n_v, dim)
        interval = keys.integer("full_attention_interval", 4, least=1)
        default = [int(il < hp.n_layer and (il + 1) % interval != 0) for il in range(hp.n_block)]
        recurrent = keys.per_block("attention.recurrent_layers", hp.n_block, default, most=1)
        return cls(taps, dim, n_k, n_v, [bool(each) and il < hp.n_layer for il, each in enumerate(recurrent)])


class DeltaNetModel(Transformer):
    """Base of the architectures."""
    ffn_norm = "post_attention_norm"
    has_nextn = True
    norms_heads = True
    tiled = False  # value head j has the key head j % n_head_k; else j / (n_head_v / n_head_k)

    def read_hparams(self) -> Hparams:
        hp = super().read_hparams()
        self.delta = DeltaNet.read(self.keys, hp)
        if not any(self.delta.is_recurrent):
            raise UserError(f"{self.keys.file.path}: {self.name}: no layer is recurrent, at least one must be")
        return hp

    def cache_sizes(self) -> list[tuple[int, int]]:
        return [(0, 0) if recurrent else sizes for recurrent, sizes in zip(self.delta.is_recurrent, super().cache_sizes())]

    def state_sizes(self) -> StateSizes:
        d = self.delta
        sizes = {"conv": (d.taps - 1) * d.n_channels, "delta": d.n_values * d.dim}
        return {il: sizes for il, recurrent in enumerate(d.is_recurrent) if recurrent}

    def mixed(self, b: Batch, il: int, h: Tensor) -> tuple[Tensor, str]:
        return (self.delta_net(b, il, h), "ssm_out") if self.delta.is_recurrent[il] else super().mixed(b, il, h)

    def attention(self, b: Batch, il: int, h: Tensor) -> Tensor:
        """Each head of Q has its gate behind it."""
        hp, g, p, n_head, dim = self.hp, b.g, f"blk.{il}.attn_", self.hp.n_head[il], self.hp.n_embd_head_k[il]
        qg = self.linear(b, h, p + "q", 2 * n_head * dim, name=f"Qgate-{il}")
        k = self.linear(b, h, p + "k", hp.n_head_kv[il] * dim, name=f"Klin-{il}")
        v = self.linear(b, h, p + "v", hp.n_head_kv[il] * hp.n_embd_head_v[il], name=f"Vlin-{il}")
        q, gate = (g.slice_heads(qg, n_head=n_head, first=i * dim, n=dim, name=f"{name}-{il}")
                   for i, name in enumerate(("Qlin", "attn_gate")))
        y = self.attend(b, il, q, k, v)
        return g.mul(y, g.sigmoid(gate, name=f"attn_gate_sigmoid-{il}"), name=f"attn_gated-{il}")

    def delta_net(self, b: Batch, il: int, h: Tensor) -> Tensor:
        d, g, p, runs = self.delta, b.g, f"blk.{il}.", b.g.inputs["runs"]
        qkv, z = self.qkv_and_z(b, il, h)
        beta, alpha = self.beta_and_alpha(b, il, h)
        w = self.w.table(p + "ssm_conv1d.weight", d.n_channels, d.taps)
        x, _ = g.ssm_conv(b.memory.state(il, "conv"), qkv, w, runs, name=f"ssm_conv-{il}")
        x = g.l2_norm(x, n_head=2 * d.n_head_k, dim=d.dim, eps=self.hp.eps, name=f"qk_normed-{il}")
        alpha = g.add(alpha, self.w(p + "ssm_dt.bias", d.n_head_v), name=f"ssm_dt-{il}")
        decay = g.mul(g.softplus(alpha, name=f"ssm_softplus-{il}"), self.w(p + "ssm_a", d.n_head_v), name=f"ssm_decay-{il}")
        y, _ = g.gated_delta_net(b.memory.state(il, "delta"), x, decay, g.sigmoid(beta, name=f"ssm_beta-{il}"), runs,
                                 n_head_k=d.n_head_k, n_head_v=d.n_head_v, tiled=self.tiled, name=f"delta_net-{il}")
        y = g.rms_norm(y, self.w(p + "ssm_norm.weight", d.dim), eps=self.hp.eps, name=f"ssm_normed-{il}")
        return g.swiglu(z, y, name=f"ssm_gated-{il}")

    def qkv_and_z(self, b: Batch, il: int, h: Tensor) -> tuple[Tensor, Tensor]:
        """Heads of q, then of k, then of v; and what gates the output."""
        d, p = self.delta, f"blk.{il}.attn_"
        return (self.linear(b, h, p + "qkv", d.n_channels, name=f"ssm_qkv-{il}"),
                self.linear(b, h, p + "gate", d.n_values, name=f"ssm_z-{il}"))

    def beta_and_alpha(self, b: Batch, il: int, h: Tensor) -> tuple[Tensor, Tensor]:
        d, p = self.delta, f"blk.{il}.ssm_"
        return (self.linear(b, h, p + "beta", d.n_head_v, name=f"ssm_beta_lin-{il}"),
                self.linear(b, h, p + "alpha", d.n_head_v, name=f"ssm_alpha_lin-{il}"))
