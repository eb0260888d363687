"""Matrix products of the arithmetic experiment: two-limb activations, weights as int8 levels in tiles [row tile][chunk][16
pieces][32 rows][16 bytes].

`scaled(...)`: a float32 scale per sub-block (activation blocks of 32 or 256 columns, sub-blocks of 32 or 16, minima, chunks of
64, 128 or 256). `integer(...)`: K-quants with blocks of 256: the integer sub-scale is multiplied into the level (two weight
limbs), one exact sum per chunk.
Operands: w: levels (w2: second limb), ws: f16 scales [tile][chunk][32][8 or 16] resp. one f32 per chunk and row; hi, lo:
activation limbs tiled like w; xs: f32 scales.
"""
from numba import cuda, float32, int32, int64

from ptx_intrinsics import (
    cp16, cp_commit, cp_wait0, cp_wait1, fadd, ffma, fmul, i2f, l2f, ldg4, ldgf, ldmatrix4, lds_h, ldsf, mad, mma16, mma32,
    shl7, smem, stgf)


def scaled(act, sub, minima, chunk):
    """128 x 128 tile, 8 warps of 64 x 32; stages of 128 columns, double buffered."""
    per_chunk = chunk // 32

    def kernel(w, ws, hi, lo, xs, xm, out, nc, n_rows):
        sm = cuda.shared.array(0, int32)
        sb = smem(sm)
        tid = cuda.threadIdx.x; lane = tid & 31; wp = tid >> 5
        wm = wp & 1; wn = wp >> 1
        bm = cuda.blockIdx.x; bn = cuda.blockIdx.y
        g = lane >> 2; t4 = lane & 3
        tot = cuda.local.array(64, float32); acc = cuda.local.array(64, float32)
        for i in range(64):
            tot[i] = float32(0); acc[i] = float32(0)
        STG = int32(16384 * 3 + 4096 + 2048 + 2048)
        nst = nc * 2
        for st in range(-1, nst):
            ld = st + 1
            if ld < nst:
                c = ld >> 1; h = ld & 1; so = sb + (ld & 1) * STG
                for j in range(4):
                    p = j * 256 + tid; tile = p >> 8; r = p & 255
                    a = ((int64(bm * 4 + tile) * nc + c) * 512 + h * 256 + r) * 16
                    b = ((int64(bn * 4 + tile) * nc + c) * 512 + h * 256 + r) * 16
                    cp16(so + p * 16, w + a); cp16(so + 16384 + p * 16, hi + b); cp16(so + 32768 + p * 16, lo + b)
                tile = (tid & 127) >> 5; r = tid & 31
                if tid < 128:
                    cp16(so + 49152 + (tid & 127) * 16, ws + ((int64(bm * 4 + tile) * nc + c) * 32 + r) * 16)
                    if sub == 16:
                        cp16(so + 51200 + (tid & 127) * 16, ws + ((int64(bm * 4 + tile) * nc + c) * 32 + r) * 16)
                else:
                    cp16(so + 53248 + (tid & 127) * 16, xs + (((int64(bn * 4 + tile) * nc + c) * 2 + h) * 32 + r) * 16)
                    if minima:
                        cp16(so + 55296 + (tid & 127) * 16, xm + (((int64(bn * 4 + tile) * nc + c) * 2 + h) * 32 + r) * 16)
                cp_commit()
            if st < 0:
                continue
            if ld < nst:
                cp_wait1()
            else:
                cp_wait0()
            cuda.syncthreads()
            so = sb + (st & 1) * STG; h = st & 1
            for b in range(4):
                am = cuda.local.array(16, int32)
                for mi in range(4):
                    f = ldmatrix4(so + (((wm * 2 + (mi >> 1)) * 8 + 2 * b + (lane >> 4)) * 32 + (mi & 1) * 16 + (lane & 15)) * 16)
                    am[mi * 4] = f[0]; am[mi * 4 + 1] = f[1]; am[mi * 4 + 2] = f[2]; am[mi * 4 + 3] = f[3]
                dw = cuda.local.array(16, float32)
                for mi in range(4):
                    ra = so + 49152 + ((wm * 2 + (mi >> 1)) * 32 + (mi & 1) * 16 + g) * 16 + (h * 4 + b) * 2
                    dw[mi * 2] = lds_h(ra); dw[mi * 2 + 1] = lds_h(ra + 128)
                    if sub == 16 or minima:
                        dw[8 + mi * 2] = lds_h(ra + 2048); dw[8 + mi * 2 + 1] = lds_h(ra + 2048 + 128)
                for n2 in range(2):
                    ba = so + 16384 + ((wn * 8 + 2 * b + ((lane >> 3) & 1)) * 32 + n2 * 16 + (lane & 7) + ((lane >> 4) << 3)) * 16
                    f = ldmatrix4(ba); e = ldmatrix4(ba + 16384)
                    for nn in range(2):
                        ni = n2 * 2 + nn
                        ca = so + 53248 + (wn * 32 + ni * 8 + t4 * 2) * 16 + b * 4
                        if act == 32:
                            da0 = ldsf(ca); da1 = ldsf(ca + 16)
                        else:
                            da0 = float32(1); da1 = float32(1)
                        if minima:
                            s0 = ldsf(ca + 2048); s1 = ldsf(ca + 2048 + 16)
                        for mi in range(4):
                            o = (mi * 4 + ni) * 4
                            for part in range(32 // sub):
                                if sub == 32:
                                    r = mma32(am[mi * 4], am[mi * 4 + 1], am[mi * 4 + 2], am[mi * 4 + 3],
                                              f[nn * 2], f[nn * 2 + 1], int32(0), int32(0), int32(0), int32(0))
                                    r = mma32(am[mi * 4], am[mi * 4 + 1], am[mi * 4 + 2], am[mi * 4 + 3],
                                              e[nn * 2], e[nn * 2 + 1], shl7(r[0]), shl7(r[1]), shl7(r[2]), shl7(r[3]))
                                else:
                                    r = mma16(am[mi * 4 + 2 * part], am[mi * 4 + 2 * part + 1], f[nn * 2 + part],
                                              int32(0), int32(0), int32(0), int32(0))
                                    r = mma16(am[mi * 4 + 2 * part], am[mi * 4 + 2 * part + 1], e[nn * 2 + part],
                                              shl7(r[0]), shl7(r[1]), shl7(r[2]), shl7(r[3]))
                                d0 = dw[8 * part + mi * 2]; d1 = dw[8 * part + mi * 2 + 1]
                                if act == 32:
                                    acc[o] = ffma(fmul(i2f(r[0]), d0), da0, acc[o])
                                    acc[o + 1] = ffma(fmul(i2f(r[1]), d0), da1, acc[o + 1])
                                    acc[o + 2] = ffma(fmul(i2f(r[2]), d1), da0, acc[o + 2])
                                    acc[o + 3] = ffma(fmul(i2f(r[3]), d1), da1, acc[o + 3])
                                else:
                                    acc[o] = ffma(i2f(r[0]), d0, acc[o]); acc[o + 1] = ffma(i2f(r[1]), d0, acc[o + 1])
                                    acc[o + 2] = ffma(i2f(r[2]), d1, acc[o + 2]); acc[o + 3] = ffma(i2f(r[3]), d1, acc[o + 3])
                            if minima:
                                m0 = dw[8 + mi * 2]; m1 = dw[8 + mi * 2 + 1]
                                acc[o] = ffma(m0, s0, acc[o]); acc[o + 1] = ffma(m0, s1, acc[o + 1])
                                acc[o + 2] = ffma(m1, s0, acc[o + 2]); acc[o + 3] = ffma(m1, s1, acc[o + 3])
                if (b + 1) % per_chunk == 0 and act == 32 and per_chunk <= 4:
                    for i in range(64):
                        tot[i] = fadd(tot[i], acc[i]); acc[i] = float32(0)
            if h == 1 and (act == 256 or per_chunk == 8):
                if act == 32:
                    for i in range(64):
                        tot[i] = fadd(tot[i], acc[i]); acc[i] = float32(0)
                else:
                    for ni in range(4):
                        ca = so + 53248 + (wn * 32 + ni * 8 + t4 * 2) * 16
                        da0 = ldsf(ca); da1 = ldsf(ca + 16)
                        for mi in range(4):
                            o = (mi * 4 + ni) * 4
                            tot[o] = ffma(acc[o], da0, tot[o]); tot[o + 1] = ffma(acc[o + 1], da1, tot[o + 1])
                            tot[o + 2] = ffma(acc[o + 2], da0, tot[o + 2]); tot[o + 3] = ffma(acc[o + 3], da1, tot[o + 3])
                            acc[o] = float32(0); acc[o + 1] = float32(0); acc[o + 2] = float32(0); acc[o + 3] = float32(0)
            cuda.syncthreads()
        for mi in range(4):
            for ni in range(4):
                o = (mi * 4 + ni) * 4
                row = bm * 128 + wm * 64 + mi * 16 + g; col = bn * 128 + wn * 32 + ni * 8 + t4 * 2
                p = out + (int64(col) * n_rows + row) * 4; q = p + int64(n_rows) * 4
                stgf(p, tot[o]); stgf(q, tot[o + 1]); stgf(p + 32, tot[o + 2]); stgf(q + 32, tot[o + 3])
    return kernel, 2 * (16384 * 3 + 4096 + 2048 + 2048), 256, (128, 128)


def integer(minima):
    """128 x 64 tile, 8 warps of 32 x 32; w and w2 are the limbs of level * sub-scale; S = 2^14 hh + 2^7 (hl + lh) + ll, exact;
    one rounding a chunk."""
    def kernel(w, w2, ws, hi, lo, xs, xm, out, nc, n_rows):
        sm = cuda.shared.array(0, int32)
        sb = smem(sm)
        tid = cuda.threadIdx.x; lane = tid & 31; wp = tid >> 5
        wm = wp & 3; wn = wp >> 2
        bm = cuda.blockIdx.x; bn = cuda.blockIdx.y
        g = lane >> 2; t4 = lane & 3
        tot = cuda.local.array(32, float32)
        hh = cuda.local.array(32, int32); mid = cuda.local.array(32, int32); ll = cuda.local.array(32, int32)
        for i in range(32):
            tot[i] = float32(0); hh[i] = int32(0); mid[i] = int32(0); ll[i] = int32(0)
        STG = int32(16384 * 2 + 8192 * 2)
        nst = nc * 2
        for st in range(-1, nst):
            ld = st + 1
            if ld < nst:
                c = ld >> 1; h = ld & 1; so = sb + (ld & 1) * STG
                for j in range(4):
                    p = j * 256 + tid; tile = p >> 8; r = p & 255
                    a = ((int64(bm * 4 + tile) * nc + c) * 512 + h * 256 + r) * 16
                    cp16(so + p * 16, w + a); cp16(so + 16384 + p * 16, w2 + a)
                for j in range(2):
                    p = j * 256 + tid; tile = p >> 8; r = p & 255
                    b = ((int64(bn * 2 + tile) * nc + c) * 512 + h * 256 + r) * 16
                    cp16(so + 32768 + p * 16, hi + b); cp16(so + 40960 + p * 16, lo + b)
                cp_commit()
            if st < 0:
                continue
            if ld < nst:
                cp_wait1()
            else:
                cp_wait0()
            cuda.syncthreads()
            so = sb + (st & 1) * STG; h = st & 1; c = st >> 1
            for b in range(4):
                am = cuda.local.array(16, int32)
                for mi in range(2):
                    aa = so + ((wm * 8 + 2 * b + (lane >> 4)) * 32 + mi * 16 + (lane & 15)) * 16
                    f = ldmatrix4(aa); e = ldmatrix4(aa + 16384)
                    for i in range(4):
                        am[mi * 4 + i] = f[i]; am[8 + mi * 4 + i] = e[i]
                for n2 in range(2):
                    ba = so + 32768 + ((wn * 8 + 2 * b + ((lane >> 3) & 1)) * 32 + n2 * 16 + (lane & 7) + ((lane >> 4) << 3)) * 16
                    f = ldmatrix4(ba); e = ldmatrix4(ba + 8192)
                    for nn in range(2):
                        for mi in range(2):
                            o = (mi * 4 + n2 * 2 + nn) * 4
                            r = mma32(am[mi * 4], am[mi * 4 + 1], am[mi * 4 + 2], am[mi * 4 + 3], f[nn * 2], f[nn * 2 + 1], hh[o],
                                      hh[o + 1], hh[o + 2], hh[o + 3])
                            for i in range(4):
                                hh[o + i] = r[i]
                            r = mma32(am[mi * 4], am[mi * 4 + 1], am[mi * 4 + 2], am[mi * 4 + 3], e[nn * 2], e[nn * 2 + 1],
                                      mid[o], mid[o + 1], mid[o + 2], mid[o + 3])
                            r = mma32(am[8 + mi * 4], am[9 + mi * 4], am[10 + mi * 4], am[11 + mi * 4], f[nn * 2], f[nn * 2 + 1],
                                      r[0], r[1], r[2], r[3])
                            for i in range(4):
                                mid[o + i] = r[i]
                            r = mma32(am[8 + mi * 4], am[9 + mi * 4], am[10 + mi * 4], am[11 + mi * 4], e[nn * 2], e[nn * 2 + 1],
                                      ll[o], ll[o + 1], ll[o + 2], ll[o + 3])
                            for i in range(4):
                                ll[o + i] = r[i]
            if h == 1:
                for mi in range(2):
                    row = bm * 128 + wm * 32 + mi * 16 + g
                    d0 = ldgf(ws + (int64(c) * n_rows + row) * 4); d1 = ldgf(ws + (int64(c) * n_rows + row + 8) * 4)
                    for ni in range(4):
                        col = bn * 64 + wn * 32 + ni * 8 + t4 * 2
                        x0 = ldgf(xs + (int64(col) * nc + c) * 4); x1 = ldgf(xs + (int64(col + 1) * nc + c) * 4)
                        o = (mi * 4 + ni) * 4
                        for i in range(4):
                            s = l2f((int64(hh[o + i]) << 14) + (int64(mid[o + i]) << 7) + int64(ll[o + i]))
                            v = fmul(s, d0 if i < 2 else d1)
                            if minima:  # the exact integer sum of 8 products imin * sum
                                mm = int32(0)
                                pr = xm + (int64(col + (i & 1)) * nc + c) * 32
                                pm = ws + (int64(c) * n_rows + row + (i >> 1) * 8) * 4
                                u = ldg4(pr); v4 = ldg4(pr + 16)
                                for k in range(4):
                                    mm = mad(u[k], int32(3 + k), mm); mm = mad(v4[k], int32(7 + k), mm)
                                v = ffma(ldgf(pm), i2f(mm), v)
                            tot[o + i] = ffma(v, x0 if (i & 1) == 0 else x1, tot[o + i])
                            hh[o + i] = int32(0); mid[o + i] = int32(0); ll[o + i] = int32(0)
            cuda.syncthreads()
        for mi in range(2):
            for ni in range(4):
                o = (mi * 4 + ni) * 4
                row = bm * 128 + wm * 32 + mi * 16 + g; col = bn * 64 + wn * 32 + ni * 8 + t4 * 2
                p = out + (int64(col) * n_rows + row) * 4; q = p + int64(n_rows) * 4
                stgf(p, tot[o]); stgf(q, tot[o + 1]); stgf(p + 32, tot[o + 2]); stgf(q + 32, tot[o + 3])
    return kernel, 2 * (16384 * 2 + 8192 * 2), 256, (128, 64)
