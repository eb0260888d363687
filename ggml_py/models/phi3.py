"""phi3 (Phi-3, 3.5 and 4): Q, K and V are rows of one matrix, gate and up of another; frequency divisors by the length of the
context. A window that files state is not used by these models."""
from .common import Transformer


class Phi3(Transformer):
    name = "phi3"
    gate_in_up = True

    def check(self) -> None:
        super().check()
        self.require(*(f"blk.{il}.attn_qkv.weight" for il in range(self.hp.n_layer)))
