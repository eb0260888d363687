"""Mamba 2 mixers: models of which the blocks without KV heads are recurrent, of this kind."""
from dataclasses import dataclass
from itertools import accumulate

from ..graph.graph import Tensor
from ..state.recurrent import StateSizes
from .common import Batch, Transformer
from .hparams import Hparams, Keys


@dataclass(frozen=True)
class Mamba2:
    """Numbers of the recurrent blocks."""
    taps: int     # of the convolution over time
    n_state: int  # values of each channel
    n_head: int   # each with a state of n_state x n_inner / n_head
    n_group: int  # of heads that share B and C
    n_inner: int  # channels of all heads

    @property
    def n_channels(self) -> int:
        """Of x, B and C together."""
        return self.n_inner + 2 * self.n_group * self.n_state

    @classmethod
    def read(cls, keys: Keys) -> "Mamba2":
        taps, n_state = keys.integer("ssm.conv_kernel", least=2), keys.integer("ssm.state_size", least=1, most=1024)
        if n_state % 8:
            raise keys.error("ssm.state_size", n_state, "a multiple of 8", n_state)
        n_head, n_group = keys.integer("ssm.time_step_rank", least=1), keys.integer("ssm.group_count", least=1)
        if n_head % n_group:
            raise keys.error("ssm.time_step_rank", n_head, f"a multiple of the {n_group} groups", n_group)
        n_inner = keys.integer("ssm.inner_size", least=1)
        if n_inner % n_head:
            raise keys.error("ssm.inner_size", n_inner, f"a multiple of the {n_head} heads", n_head)
        return cls(taps, n_state, n_head, n_group, n_inner)


class Mamba2Model(Transformer):
    """Base of the architectures."""
    without_kv = True

    def read_hparams(self) -> Hparams:
        self.ssm = Mamba2.read(self.keys)
        return super().read_hparams()

    def is_recurrent(self, il: int) -> bool:
        return not self.hp.n_head_kv[il]

    def state_sizes(self) -> StateSizes:
        s = self.ssm
        sizes = {"conv": (s.taps - 1) * s.n_channels, "ssm": s.n_inner * s.n_state}
        return {il: sizes for il in range(self.hp.n_layer) if self.is_recurrent(il)}

    def mixed(self, b: Batch, il: int, h: Tensor) -> tuple[Tensor, str]:
        return (self.mamba2(b, il, h), "ssm_out") if self.is_recurrent(il) else super().mixed(b, il, h)

    def mamba2(self, b: Batch, il: int, h: Tensor) -> Tensor:
        """The rows of `ssm_in` are z, which gates the output, x, B and C, and the steps dt of the heads."""
        s, g, p, runs = self.ssm, b.g, f"blk.{il}.ssm_", b.g.inputs["runs"]
        sizes = {"z": s.n_inner, "xBC": s.n_channels, "dt": s.n_head}
        z, x, dt = (self.linear(b, h, p + "in", sum(sizes.values()), f"ssm_{part}-{il}", (end - n, end))
                    for (part, n), end in zip(sizes.items(), accumulate(sizes.values())))
        bias = [self.w(p + "conv1d.bias", s.n_channels)] if p + "conv1d.bias" in self.w else []
        x, _ = g.ssm_conv(b.memory.state(il, "conv"), x, self.w.table(p + "conv1d.weight", s.n_channels, s.taps), runs, *bias,
                          name=f"ssm_conv-{il}")
        y, _ = g.ssm_scan(b.memory.state(il, "ssm"), x, dt, self.w(p + "dt.bias", s.n_head),
                          *(self.w.table(p + part, s.n_head, 1) for part in "ad"), runs, n_head=s.n_head, n_group=s.n_group,
                          n_state=s.n_state, name=f"ssm_scan-{il}")
        return self.norm_groups(b, g.swiglu(z, y, name=f"ssm_gated-{il}"), p + "norm", f"ssm_normed-{il}")

    def norm_groups(self, b: Batch, x: Tensor, base: str, name: str) -> Tensor:
        """Each group of heads normed with weights of its own."""
        s, eps = self.ssm, self.hp.eps
        if s.n_group == 1:
            return b.g.rms_norm(x, self.w(f"{base}.weight", s.n_inner), eps=eps, name=name)
        n = s.n_inner // s.n_group
        y = b.g.rms_norm(x, self.w.ones(f"{base}.ones", n), eps=eps, name=f"{name}_unweighted")
        return b.g.mul(y, self.w.table(f"{base}.weight", s.n_group, n).view((s.n_inner,)), name=name)
