"""Mixture of experts: a router sends each token to a few of many feed-forward blocks, whose outputs are added by weight;
a shared one may see all tokens."""
from collections.abc import Callable
from dataclasses import dataclass

from ..base.errors import UserError
from ..graph.graph import Tensor
from .common import Batch, Transformer
from .hparams import Hparams, Keys

# GGUF's numbers of gating functions; the last is applied to the logits of the chosen experts alone
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3
GATINGS = {SOFTMAX: "softmax", SIGMOID: "sigmoid", SOFTMAX_OF_CHOSEN: "softmax of the chosen"}


@dataclass(frozen=True)
class Experts:
    """Numbers of the experts; lists have one for each layer, or more."""
    n: int
    n_used: list[int]
    n_ff: list[int]
    n_ff_shared: list[int]  # 0: no shared expert
    n_dense: int            # leading layers without experts
    gating: int
    norm: bool              # the weights of a token are divided by their sum
    scale: float            # and multiplied by this; 0: they are not
    n_group: int            # of neighbouring experts; 1 or less: no groups
    n_group_used: int

    @classmethod
    def read(cls, keys: Keys, hp: Hparams, model: "MixtureOfExperts") -> "Experts":
        """model: what its architecture declares is read."""
        n = keys.integer("expert_count", 0, least=1)
        n_used = keys.per_block("expert_used_count", hp.n_block, 0, least=1, most=n)
        widths = hp.n_ff if model.as_wide_as_dense else keys.per_block("expert_feed_forward_length", hp.n_block, 0)
        n_ff = [width or ff // used for width, ff, used in zip(widths, hp.n_ff, n_used)]
        n_group, n_group_used = keys.integer("expert_group_count", 0), keys.integer("expert_group_used_count", 0)
        n_dense, n_ff_shared, default = 0, model.n_ff_shared, model.default_gating
        if not model.routing or model.leading_dense:
            n_dense = keys.integer("leading_dense_block_count", 0, most=hp.n_block)
        if model.routing:
            (gating, norm), scale, n_ff_shared = model.routing, 0.0, n_ff_shared or [0] * hp.n_block
        else:
            gating = keys.integer("expert_gating_func", *([default] * (default > 0))) or default
            norm, scale = keys.flag("expert_weights_norm", False), keys.real("expert_weights_scale", 0.0, zero=True)
            n_ff_shared = n_ff_shared or [width * keys.integer("expert_shared_count") for width in n_ff]
        for il in range(n_dense, hp.n_layer):
            if not n_ff[il] and model.as_wide_as_dense:
                raise keys.error("feed_forward_length", n_ff[il], f"positive, the width of the experts of layer {il}")
            if not n_ff[il]:
                raise UserError(f"{keys.file.path}: layer {il} has experts of width 0: {keys.name('expert_feed_forward_length')} "
                                f"must be positive, or {keys.name('feed_forward_length')}, {hp.n_ff[il]}, at least the "
                                f"{n_used[il]} experts used")
        if gating not in GATINGS:
            known = ", ".join(f"{i} ({name})" for i, name in GATINGS.items())
            raise keys.error("expert_gating_func", gating, f"one of {known}")
        if n_group > 1:
            if n % n_group or n_group >= n:
                raise keys.error("expert_group_count", n_group, f"a number of equal groups of two or more of the {n} experts")
            if not 0 < n_group_used < n_group:
                raise keys.error("expert_group_used_count", n_group_used,
                                 f"1 to {n_group - 1}, fewer than the {n_group} groups")
        return cls(n, n_used, n_ff, n_ff_shared, n_dense, gating, norm, scale, n_group, n_group_used)


@dataclass(frozen=True)
class Chosen:
    """The experts of each token. ids: i32 [n, used]. stack: what the file has of all experts -> what `ids` are numbers of.
    may_skip: as of `mul_mat_id`. suffix: of the names of nodes."""
    ids: Tensor
    stack: Callable[[Tensor], Tensor] = lambda of_experts: of_experts
    may_skip: bool = False
    suffix: str = ""


class MixtureOfExperts(Transformer):
    """Base of the architectures whose feed-forward blocks are experts, but for leading dense ones."""
    default_gating = 0  # where the file says none; 0: it must say
    routing: tuple[int, bool] | None = None  # gating and norm where they have no keys, nor scale, dense layers and shared experts
    leading_dense = False  # there is a key for leading dense layers, beside that routing
    as_wide_as_dense = False  # an expert has the width of the key for dense layers
    n_ff_shared: list[int] | None = None  # None: from the number of shared experts
    may_be_dense = False  # there are files without experts
    gates_shared = False  # the shared expert's output is multiplied by sigmoid of a product with the token

    def check(self) -> None:
        self.mixes = not self.may_be_dense or self.keys.integer("expert_count", 0) > 0
        if self.mixes:
            self.experts = Experts.read(self.keys, self.hp, self)
        elif routers := [name for name in self.file.tensors if name.endswith("ffn_gate_inp.weight")]:
            raise self.keys.error("expert_count", 0, f"positive, since there is {routers[0]}")

    def has_experts(self, il: int) -> bool:
        return self.mixes and il >= self.experts.n_dense

    def ffn(self, b: Batch, il: int, h: Tensor) -> Tensor:
        if not self.has_experts(il):
            return super().ffn(b, il, h)
        ids, weights = self.route(b, il, h)
        n_ff = self.experts.n_ff_shared[il]
        shared = self.shared(b, il, h, n_ff) if n_ff else None  # before the routed ones, which may run on another device
        routed = self.routed(b, il, h, ids, weights)
        return routed if shared is None else b.g.add(routed, shared, name=f"ffn_out-{il}")

    def shared(self, b: Batch, il: int, h: Tensor, n_ff: int) -> Tensor:
        y = self.gated_ffn(b, il, h, n_ff, "_shexp")
        if not self.gates_shared:
            return y
        gate = self.linear(b, h, f"blk.{il}.ffn_gate_inp_shexp", 1, name=f"ffn_shexp_logit-{il}")
        return b.g.weighted_sum(y, b.g.sigmoid(gate, name=f"ffn_shexp_gate-{il}"), name=f"ffn_shexp_gated-{il}")

    def routed(self, b: Batch, il: int, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The sum of the chosen experts' outputs by weight, in the order of their rank."""
        return b.g.weighted_sum(self.outputs(b, il, h, ids), weights, name=f"ffn_moe_out-{il}")

    def outputs(self, b: Batch, il: int, h: Tensor, ids: Tensor) -> Tensor:
        """Of the chosen experts, f32 [n used, n_embd]; those that have copies on the layer's device are computed there. h: a row
        for each token, or for each of its experts."""
        hot = self.hot
        if hot is None or il not in hot.layers or not ids.shape[0]:  # nobody reads the last layer where no logits are wanted
            return self.blocks(b, il, h, Chosen(ids))
        here, there = hot.split(b.g, il, ids)
        if not hot.takes(*ids.shape):
            return self.blocks(b, il, h, Chosen(ids))
        y = self.blocks(b, il, h, Chosen(here, lambda of_experts: hot.stack(il, of_experts), suffix="-hot"))
        x = self.blocks(b, il, h, Chosen(there, may_skip=True, suffix="-cold"))
        return b.g.pick_rows(x, y, there, name=f"ffn_moe_down-{il}")

    def blocks(self, b: Batch, il: int, h: Tensor, chosen: Chosen) -> Tensor:
        """The feed-forward blocks of experts."""
        e, p, end = self.experts, f"blk.{il}.ffn_", f"-{il}{chosen.suffix}"
        if f"{p}gate_up_exps.weight" in self.w:
            gate, up = (self.expert_linear(b, h, chosen, f"{p}gate_up_exps", 2 * e.n_ff[il], f"ffn_moe_{part}{end}",
                                           (i * e.n_ff[il], (i + 1) * e.n_ff[il]))
                        for i, part in enumerate(("gate", "up")))
        else:
            gate, up = (self.expert_linear(b, h, chosen, f"{p}{part}_exps", e.n_ff[il], f"ffn_moe_{part}{end}")
                        for part in ("gate", "up"))
        y = self.activate(b, gate, up, f"ffn_moe_act{end}")
        return self.expert_linear(b, y, chosen, f"{p}down_exps", self.hp.n_embd, f"ffn_moe_down{end}")

    def route(self, b: Batch, il: int, h: Tensor) -> tuple[Tensor, Tensor]:
        """(ids i32 [n, used], the largest first; their weights f32 [n, used]).
        A bias of `exp_probs_b` counts for the choice alone."""
        e, g, bias, logits = self.experts, b.g, f"blk.{il}.exp_probs_b.bias", self.router_logits(b, il, h)
        gates = {SOFTMAX: g.soft_max, SIGMOID: g.sigmoid}
        probs = gates[e.gating](logits, name=f"ffn_moe_probs-{il}") if e.gating in gates else logits
        chosen_by = g.add(probs, self.w(bias, e.n), name=f"ffn_moe_probs_biased-{il}") if bias in self.w else probs
        if e.n_group > 1:
            chosen_by = g.mask_groups(chosen_by, n_group=e.n_group, n_group_used=e.n_group_used,
                                      name=f"ffn_moe_probs_masked-{il}")
        ids = g.top_k(chosen_by, k=e.n_used[il], name=f"ffn_moe_topk-{il}")
        weights = g.take_columns(probs, ids, name=f"ffn_moe_weights-{il}")
        if e.gating == SOFTMAX_OF_CHOSEN:
            weights = g.soft_max(weights, name=f"ffn_moe_weights_softmax-{il}")
        if e.norm:
            weights = g.normalize(weights, name=f"ffn_moe_weights_norm-{il}")
        if e.scale not in (0, 1):
            weights = g.scale(weights, factor=e.scale, name=f"ffn_moe_weights_scaled-{il}")
        return ids, weights

    def router_logits(self, b: Batch, il: int, h: Tensor) -> Tensor:
        return self.linear(b, h, f"blk.{il}.ffn_gate_inp", self.experts.n, name=f"ffn_moe_logits-{il}")

    def expert_linear(self, b: Batch, x: Tensor, chosen: Chosen, base: str, n_out: int, name: str,
                      rows: tuple[int, int] | None = None) -> Tensor:
        """W x with the matrices of the chosen experts, times their `base.scale` and plus their `base.bias` where the file has
        them. rows: only those of W, and of a bias."""
        n, ids, stack, skip = self.experts.n, chosen.ids, chosen.stack, {"may_skip": chosen.may_skip}
        y = b.g.mul_mat_id(stack(self.w(f"{base}.weight", n, n_out, x.shape[1], rows=rows)), x, ids, name=name, **skip)
        if f"{base}.scale" in self.w:
            y = b.g.scale_id(y, stack(self.w(f"{base}.scale", n)), ids, name=f"{name}_scaled", **skip)
        if f"{base}.bias" in self.w:
            y = b.g.add_id(y, stack(self.w.table(f"{base}.bias", n, n_out, rows)), ids, name=f"{name}_b", **skip)
        return y
