"""What the op `draw` is told of each row (docs/numerics.md, section 5)."""
SETTINGS = "top_k", "temperature", "top_p", "min_p", "u"  # float64
MOST_DRAWN = 64  # top_k at most
