"""Architectures: one readable file each, which builds its graph from `common`'s parts, and from `experts`'.
`ARCHITECTURES` maps GGUF's name to its class."""
from ..base.errors import UserError, quoted
from .bailingmoe2 import BailingMoE2
from .cohere2 import Cohere2
from .command_r import CommandR
from .deepseek2 import Deepseek2
from .ernie4_5 import Ernie45
from .ernie4_5_moe import Ernie45MoE
from .exaone4 import Exaone4
from .gemma import Gemma
from .gemma2 import Gemma2
from .gemma3 import Gemma3
from .gemma4 import Gemma4
from .glm4 import Glm4
from .glm4moe import Glm4MoE
from .gpt_oss import GptOss
from .granite import Granite, GraniteMoE
from .granitehybrid import GraniteHybrid
from .hunyuan import Hunyuan, HunyuanMoE
from .lfm2 import Lfm2
from .lfm2moe import Lfm2MoE
from .llama import Llama
from .nemotron_h import NemotronH
from .nemotron_h_moe import NemotronHMoE
from .llama4 import Llama4
from .mistral3 import Mistral3
from .minimax_m2 import MiniMaxM2
from .olmo2 import Olmo2
from .olmoe import OlmoE
from .phi3 import Phi3
from .qwen2 import Qwen2
from .qwen2moe import Qwen2MoE
from .qwen2vl import Qwen2VL
from .qwen3 import Qwen3
from .qwen35 import Qwen35
from .qwen35moe import Qwen35MoE
from .qwen3moe import Qwen3MoE
from .qwen3next import Qwen3Next
from .qwen3vl import Qwen3VL, Qwen3VLMoE
from .seed_oss import SeedOss
from .smollm3 import SmolLM3
from .starcoder2 import Starcoder2

ARCHITECTURES = {model.name: model for model in (Llama, Qwen2, Qwen3, Qwen3MoE, Qwen3Next, Qwen35, Qwen35MoE, GptOss, Deepseek2,
                                                Glm4MoE, BailingMoE2, Gemma, Gemma2, Gemma3, Gemma4,
                                                Phi3, Glm4, Olmo2, OlmoE, SmolLM3, MiniMaxM2, SeedOss, Ernie45, Ernie45MoE,
                                                Hunyuan, HunyuanMoE, Exaone4, Qwen2MoE, Qwen2VL, Qwen3VL, Qwen3VLMoE,
                                                Granite, GraniteMoE, Cohere2, CommandR, Starcoder2,
                                                Mistral3, Llama4,
                                                GraniteHybrid, Lfm2, Lfm2MoE, NemotronH, NemotronHMoE)}


def model_class(file):
    """The class of a GGUF file's architecture; UserError for one that is not known."""
    name = file.get("general.architecture", "str")
    if name not in ARCHITECTURES:
        raise UserError(f"{file.path}: architecture {quoted(name)} is unknown; known: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]
