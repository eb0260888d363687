"""quantize(flash_attn_ext(...)) (numerics, sections 3 and 8)."""
from .flash_attn_ext import flash_attn_ext
from .quantize import quantize


def flash_attn_ext_act(type_k, type_v, flash_attn_ext=flash_attn_ext, quantize=quantize):
    """kernel(q, ..., scale, x f32 [n, H, Dv], act, window, sinks): as `flash_attn_ext`; act: q, d, sums as of `quantize`; x is left with anything in it."""
    attend = flash_attn_ext(type_k, type_v)

    def flash_attn_ext_act(q, k, v, n_head_kv, seq, pos, present, scale, x, act, **given):
        attend(q, k, v, n_head_kv, seq, pos, present, scale, x, **given)
        quantize(x.reshape(len(x), -1), *act)
    return flash_attn_ext_act
