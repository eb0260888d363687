"""qwen2 (Qwen 2 and 2.5): as llama with halves as rotary pairs; Q, K and V have biases, and the output head may have one."""
from .common import Transformer


class Qwen2(Transformer):
    name = "qwen2"
