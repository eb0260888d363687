"""ernie4_5 (ERNIE 4.5, dense): as llama."""
from .common import Transformer


class Ernie45(Transformer):
    name = "ernie4_5"
    neox = False
