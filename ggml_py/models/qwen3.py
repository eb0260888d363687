"""qwen3 (dense): each head of Q and K is normed, with weights shared by all heads, before its rotation."""
from .common import Transformer


class Qwen3(Transformer):
    name = "qwen3"
    norms_heads = True
