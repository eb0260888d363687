"""smollm3: as llama, but every fourth layer does not rotate heads."""
from .common import Transformer

INTERVAL = 4


class SmolLM3(Transformer):
    name = "smollm3"
    neox = False

    def rope_kind(self, il: int) -> str | None:
        return super().rope_kind(il) if (il + 1) % INTERVAL else None
