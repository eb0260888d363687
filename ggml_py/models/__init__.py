"""Architectures: one readable file each, which builds its graph from `common`'s parts. `ARCHITECTURES` maps GGUF's name to its class."""
from .llama import Llama
from .qwen2 import Qwen2
from .qwen3 import Qwen3

ARCHITECTURES = {model.name: model for model in (Llama, Qwen2, Qwen3)}
