"""What is taken where nobody says otherwise."""
from pathlib import Path

N_BATCH = 2048   # tokens of a logical batch
N_UBATCH = 2048  # computed at a time. Other engines take 512; here that changes no bit, and prompts are faster, for more memory
MODEL = "smollm2"  # a name of files/pull.py
TEXT = Path(__file__).parent.parent / "demo" / "prose.txt"
MARGIN = 1 << 30  # bytes of each device that a placement which is chosen leaves to others, as llama.cpp has it
DRAFT_MAX = 8    # tokens that are guessed at a time
CHAT_DATE = "2026-01-01"  # what a chat template is told that asks for the date: a clock would change the prompt every day
# Bytes of a context that is as long as the model was trained for; a larger one must be asked for by its n_ctx.
MOST_DEFAULT_CONTEXT = 1 << 30
