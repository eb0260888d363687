"""Tokens of a batch, where nobody says how many."""

N_BATCH = 2048   # of a logical batch
N_UBATCH = 2048  # computed at a time. Other engines take 512; here that changes no bit, and 2048 make prompts faster (docs/benchmarks.md) for more memory
