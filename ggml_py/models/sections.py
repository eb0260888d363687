"""Rotary pairs of models that see images too: they are dealt to sections of a file's key, each with a coordinate of its own.

Of text the coordinates of three sections are a token's position; that of a fourth, and of pairs left over, is 0: they do not
turn."""
import numpy as np

from .hparams import Keys


def divisors(keys: Keys, n_rot: int, is_required: bool = True, in_turn: bool = False) -> np.ndarray | None:
    """The frequency divisors [n_rot / 2] of the pairs, infinity of those that do not turn; None without sections. is_required:
    the key; where it is not, there are sections only if the first two have some pairs. in_turn: a section takes every third
    pair, as far as it has some."""
    key = "rope.dimension_sections"
    sections = np.array(keys.per_block(key, 4, kind="i32") if is_required else keys.per_block(key, 4, 0, kind="i32"))
    if not (sections.any() if is_required else sections[:2].all()):
        return None
    pairs = np.arange(n_rot // 2) % sections.sum()
    turns = pairs < 3 * sections[pairs % 3] if in_turn else pairs < sections[:3].sum()
    return np.where(turns, 1, np.inf).astype(np.float32)
