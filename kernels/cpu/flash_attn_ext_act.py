"""quantize(flash_attn_ext(...)): one after the other."""
from functools import partial

from ..reference import flash_attn_ext_act as reference
from .flash_attn_ext import flash_attn_ext
from .quantize import quantize

flash_attn_ext_act = partial(reference.flash_attn_ext_act, flash_attn_ext=flash_attn_ext, quantize=quantize)  # as in kernels/reference
