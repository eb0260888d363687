"""Architectures: one readable file each, which builds its graph from `common`'s parts, and from `experts`'.
`ARCHITECTURES` maps GGUF's name to its class."""
from ..base.errors import UserError, quoted
from .bailingmoe2 import BailingMoE2
from .deepseek2 import Deepseek2
from .glm4moe import Glm4MoE
from .gemma import Gemma
from .gpt_oss import GptOss
from .llama import Llama
from .qwen2 import Qwen2
from .qwen3 import Qwen3
from .qwen3moe import Qwen3MoE
from .qwen3next import Qwen3Next
from .qwen35 import Qwen35
from .qwen35moe import Qwen35MoE

ARCHITECTURES = {model.name: model for model in (Llama, Qwen2, Qwen3, Qwen3MoE, Qwen3Next, Qwen35, Qwen35MoE, GptOss, Deepseek2,
                                                Glm4MoE, BailingMoE2, Gemma)}


def model_class(file):
    """The class of a GGUF file's architecture; UserError for one that is not known."""
    name = file.get("general.architecture", "str")
    if name not in ARCHITECTURES:
        raise UserError(f"{file.path}: architecture {quoted(name)} is unknown; known: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]
