"""qwen35 (Qwen 3.5, dense): gated delta nets and gated attention; value heads of the file are in the order of their key heads."""
import numpy as np

from .delta_net import DeltaNetModel


class Qwen35(DeltaNetModel):
    name = "qwen35"
    tiled = True

    def rope_factors(self, n_ctx: int) -> np.ndarray | None:
        """Pairs are dealt to three sections in turn, as far as each has some; of text their positions are the token's. Those that
        are left over have position 0: they do not turn."""
        sections = self.keys.per_block("rope.dimension_sections", 4, kind="i32")
        if not any(sections):
            return None
        pairs = np.arange(self.hp.rope.n_rot // 2) % sum(sections)
        return np.where(pairs < 3 * np.array(sections)[pairs % 3], 1, np.inf).astype(np.float32)
