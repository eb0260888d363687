"""seed_oss (Seed-OSS): as llama with halves as rotary pairs and biases of Q, K and V; the feed-forward's norm has
another name."""
from .common import Transformer


class SeedOss(Transformer):
    name = "seed_oss"
    ffn_norm = "post_attention_norm"
