"""Inline-assembly intrinsics of the arithmetic experiment: a small generator, one line an instruction."""
from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic

_LL = {"r": ir.IntType(32), "f": ir.FloatType(), "l": ir.IntType(64)}
_NB = {"r": types.int32, "f": types.float32, "l": types.int64}


def asm(text, out, ins, side_effect=False):
    """Intrinsic for one PTX text: `out` and `ins` are strings of r (int32), f (float32), l (int64)."""
    result = _NB[out[0]] if len(out) == 1 else types.UniTuple(_NB[out[0]], len(out)) if out else types.void
    ll_out = [_LL[c] for c in out]
    ll_ret = ir.VoidType() if not out else ll_out[0] if len(out) == 1 else ir.LiteralStructType(ll_out)
    constraints = ",".join(["=" + c for c in out] + list(ins) + (["~{memory}"] if side_effect else []))

    def codegen(context, builder, sig, args):
        r = builder.call(ir.InlineAsm(ir.FunctionType(ll_ret, [_LL[c] for c in ins]), text, constraints, side_effect=side_effect),
                         args)
        if not out:
            return context.get_dummy_value()
        return (r if len(out) == 1
                else context.make_tuple(builder, sig.return_type, [builder.extract_value(r, i) for i in range(len(out))]))

    names = ", ".join(f"a{i}" for i in range(len(ins)))
    space = {"codegen": codegen, "sig": result(*[_NB[c] for c in ins])}
    exec(f"def f(typingctx{', ' + names if names else ''}):\n    return sig, codegen\n", space)
    return intrinsic(space["f"])


fadd = asm("add.rn.f32 $0, $1, $2;", "f", "ff")
fmul = asm("mul.rn.f32 $0, $1, $2;", "f", "ff")
ffma = asm("fma.rn.f32 $0, $1, $2, $3;", "f", "fff")
fmax = asm("max.f32 $0, $1, $2;", "f", "ff")
fdiv = asm("div.rn.f32 $0, $1, $2;", "f", "ff")
i2f = asm("cvt.rn.f32.s32 $0, $1;", "f", "r")
l2f = asm("cvt.rn.f32.s64 $0, $1;", "f", "l")
f2i = asm("cvt.rni.s32.f32 $0, $1;", "r", "f")
as_f = asm("mov.b32 $0, $1;", "f", "r")
as_i = asm("mov.b32 $0, $1;", "r", "f")
h2f = asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, $1; cvt.f32.f16 $0, lo;}", "f", "r")
h2f_hi = asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, $1; cvt.f32.f16 $0, hi;}", "f", "r")
shl7 = asm("shl.b32 $0, $1, 7;", "r", "r")
mad = asm("mad.lo.s32 $0, $1, $2, $3;", "r", "rrr")
dp4a = asm("dp4a.s32.s32 $0, $1, $2, $3;", "r", "rrr")
prmt = asm("prmt.b32 $0, $1, $2, $3;", "r", "rrr")
mma32 = asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};", "rrrr",
            "r" * 10)
mma16 = asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {$0,$1,$2,$3}, {$4,$5}, {$6}, {$7,$8,$9,$10};", "rrrr", "r" * 7)
ldmatrix4 = asm("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];", "rrrr", "r", True)
lds = asm("ld.shared.b32 $0, [$1];", "r", "r", True)
ldsf = asm("ld.shared.f32 $0, [$1];", "f", "r", True)
lds4 = asm("ld.shared.v4.b32 {$0,$1,$2,$3}, [$4];", "rrrr", "r", True)
lds4f = asm("ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];", "ffff", "r", True)
lds_h = asm("{.reg .b16 t; ld.shared.b16 t, [$1]; cvt.f32.f16 $0, t;}", "f", "r", True)
sts = asm("st.shared.b32 [$0], $1;", "", "rr", True)
stsf = asm("st.shared.f32 [$0], $1;", "", "rf", True)
sts_b = asm("{.reg .b16 t; cvt.u16.u32 t, $1; st.shared.b8 [$0], t;}", "", "rr", True)
ldg4 = asm("ld.global.nc.v4.u32 {$0,$1,$2,$3}, [$4];", "rrrr", "l")
ldg = asm("ld.global.nc.u32 $0, [$1];", "r", "l")
ldgf = asm("ld.global.nc.f32 $0, [$1];", "f", "l")
stgf = asm("st.global.f32 [$0], $1;", "", "lf", True)
cp16 = asm("cp.async.cg.shared.global [$0], [$1], 16;", "", "rl", True)
cp_commit = asm("cp.async.commit_group;", "", "", True)
cp_wait0 = asm("cp.async.wait_group 0;", "", "", True)
cp_wait1 = asm("cp.async.wait_group 1;", "", "", True)
shfl = asm("shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", "f", "fr", True)


@intrinsic
def smem(typingctx, arr):
    """Shared-window address (int32, bytes) of a shared array."""
    def codegen(context, builder, sig, args):
        a = context.make_array(sig.args[0])(context, builder, args[0])
        p = builder.ptrtoint(a.data, ir.IntType(64))
        return builder.call(ir.InlineAsm(ir.FunctionType(ir.IntType(32), [ir.IntType(64)]),
                                         "{.reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t;}", "=r,l"), [p])
    return types.int32(arr), codegen
