"""Measures the candidates for the arithmetic (docs/numerics.md, "Why"): python3 measure.py OUT.json on a GPU host. Random data,
graph replays, medians."""
import json
import subprocess
import sys
import time
from pathlib import Path

import numba_cuda
import numpy as np
from cuda.bindings import driver as drv
from numba import cuda, types

import attention
import products

assert "numba_cuda" in cuda.__file__, cuda.__file__
stream = cuda.stream(); handle = drv.CUstream(int(getattr(stream.handle, "value", stream.handle)))
L, I, F = types.int64, types.int32, types.float32
rng = np.random.default_rng(0)
rows = []


def ok(r):
    assert r[0] == drv.CUresult.CUDA_SUCCESS, r
    return r[1] if len(r) == 2 else r[1:]


def build(made, sig):
    f, n_shared, n_threads = made[:3]
    k = cuda.jit(sig)(f)
    fn = next(iter(k.overloads.values()))._codelibrary.get_cufunc().kernel
    ok(drv.cuKernelSetAttribute(drv.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, n_shared,
                                drv.CUkernel(int(fn._handle)), drv.CUdevice(0)))
    return lambda grid, *a: k[grid, n_threads, stream, n_shared](*a)


def us(launch, n=6, reps=7):
    launch(); stream.synchronize()
    ok(drv.cuStreamBeginCapture(handle, drv.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    for _ in range(n):
        launch()
    g, ts = ok(drv.cuGraphInstantiate(ok(drv.cuStreamEndCapture(handle)), 0)), []
    for _ in range(reps):
        a, b = cuda.event(), cuda.event()
        a.record(stream); drv.cuGraphLaunch(g, handle); b.record(stream); b.synchronize()
        ts.append(cuda.event_elapsed_time(a, b))
    return float(np.median(ts)) * 1e3 / n


def dev(a):
    d = cuda.to_device(np.ascontiguousarray(a)); keep.append(d)
    return d.device_ctypes_pointer.value


def i8(*shape, lim=127): return rng.integers(-lim, lim + 1, shape, dtype=np.int8)
def f32(*shape): return rng.random(shape, dtype=np.float32) * np.float32(0.01)


def report(**r):
    rows.append(r); print(r, flush=True)


which = sys.argv[2:] or ["mmq", "attention"]
if "mmq" in which:
    M, K, N = 4096, 14336, 512
    keep = []; nc = K // 256
    w, w2 = dev(i8(M * K)), dev(i8(M * K, lim=64)); hi, lo = dev(i8(N * K)), dev(i8(N * K, lim=64))
    ws = dev((rng.random(M * nc * 16) * 0.01).astype(np.float16).view(np.int16))
    wc = dev(f32(nc * M))
    xs, xm = dev(f32(N * K // 32)), dev(f32(N * K // 32))
    xmi = dev(rng.integers(-400000, 400000, N * K // 32, dtype=np.int32))
    out = dev(np.zeros(N * M, np.float32))
    s7, s8 = (L,) * 7 + (I, I), (L,) * 8 + (I, I)
    for name, args in (("Q8_0 blocks 32, chunk 256", (32, 32, 0, 256)), ("Q8_0 blocks 32, chunk 128", (32, 32, 0, 128)),
                       ("Q8_0 blocks 32, chunk 64", (32, 32, 0, 64)), ("Q8_0 blocks 256", (256, 32, 0, 256)),
                       ("Q4_K blocks 32", (32, 32, 1, 256)), ("Q4_K blocks 256, float sub-scales", (256, 32, 1, 256)),
                       ("Q6_K blocks 32", (32, 16, 0, 256)), ("Q6_K blocks 256, float sub-scales", (256, 16, 0, 256))):
        made = products.scaled(*args); k = build(made, s7)
        t = us(lambda: k((M // 128, N // 128), w, ws, hi, lo, xs, xm, out, nc, M))
        report(kernel="product", name=name, us=round(t, 1), tops=round(2 * M * K * N / t / 1e6, 1))
    for name, m in (("Q4_K blocks 256, integer sub-scales", True), ("Q6_K blocks 256, integer sub-scales", False)):
        k = build(products.integer(m), s8)
        t = us(lambda: k((M // 128, N // 64), w, w2, wc, hi, lo, xs, xmi, out, nc, M))
        report(kernel="product", name=name, us=round(t, 1), tops=round(2 * M * K * N / t / 1e6, 1))


def split(x):
    """float [..., n] -> limbs and scale of one block over the last axis."""
    am = np.abs(x).max(-1, keepdims=True); q = np.rint(x * (16256 / am)).astype(np.int32); h = (q + 64) >> 7
    return h.astype(np.int8), (q - (h << 7)).astype(np.int8), (am / 16256).astype(np.float32)[..., 0]


if "attention" in which:
    H, KV, scale = 32, 8, np.float32(128 ** -0.5)
    pf, pl = build(attention.prompt_fixed(), (L,) * 10 + (I, I, F)), build(attention.prompt_float(), (L,) * 4 + (I, I, F))
    gf, gl = build(attention.generation(True), (L,) * 6 + (I, F)), build(attention.generation(False), (L,) * 6 + (I, F))
    perm = np.array([16 * j + 8 * h + 2 * t + i for j in range(8) for t in range(4) for h in range(2) for i in range(2)])
    for n in (512, 4096, 32768):
        keep = []; nq = 512
        q = rng.standard_normal((H, nq, 128), dtype=np.float32)
        k = rng.standard_normal((n, KV, 128), dtype=np.float32).astype(np.float16)
        v = rng.standard_normal((n, KV, 128), dtype=np.float32).astype(np.float16)
        kf, vf = k.astype(np.float32).transpose(1, 0, 2), v.astype(np.float32).transpose(1, 0, 2)
        qh, ql, qd = split(q.reshape(H, nq, 2, 64)); kh, kl, kd = split(kf.reshape(KV, n, 2, 64)); vh, vl, vd = split(vf)
        tr = lambda a: a.reshape(KV, n // 128, 128, 128)[:, :, perm].transpose(0, 1, 3, 2)
        dq, dk, dv = dev(q), dev(k), dev(v)
        out, o2 = dev(np.zeros(H * nq * 128, np.float32)), dev(np.zeros(H * nq * 128, np.float32))
        A = [dev(a) for a in (qh, ql, qd, kh, kl, kd, tr(vh), tr(vl), vd)]
        t1 = us(lambda: pf((nq // 64, H), *A, out, nq, n, scale))
        t2 = us(lambda: pl((nq // 64, H), dq, dk, dv, o2, nq, n, scale))
        a, b = keep[3].copy_to_host().reshape(H, nq, 128), keep[4].copy_to_host().reshape(H, nq, 128)
        s = np.einsum("qc,kc->qk", q[5], kf[1], dtype=np.float64) * scale
        s[np.arange(n)[None] > np.arange(nq)[:, None] + n - nq] = -np.inf
        p = np.exp(s - s.max(-1, keepdims=True)); r = (p @ vf[1]) / p.sum(-1, keepdims=True)
        report(kernel="attention, prompt of 512", keys=n, us_fixed=round(t1, 1), us_float=round(t2, 1),
               rel_fixed=float(np.linalg.norm(a[5] - r) / np.linalg.norm(r)),
               rel_float=float(np.linalg.norm(b[5] - r) / np.linalg.norm(r)))
        part = dev(np.zeros(n // 128 * KV * 4 * 128, np.float32))
        q1 = dev(q[:, 0]); h1, l1, _ = split(q[:, 0].reshape(H, 2, 64)); h1, l1 = dev(h1), dev(l1)
        more = [(dk, dv)] + [(dev(k), dev(v)) for _ in range(min(7, int(2e8 // k.nbytes)))]
        it = [0]
        def go(f):
            it[0] += 1; x, y = more[it[0] % len(more)]
            f((n // 128, KV), q1, h1, l1, x, y, part, n, scale)
        report(kernel="attention, generation", keys=n, us_fixed=round(us(lambda: go(gf), 24), 2),
               us_float=round(us(lambda: go(gl), 24), 2), mb=round(k.nbytes * 2 / 1e6, 1))
smi = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True,
                     text=True, check=False).stdout.strip()
record = dict(device=smi, numba_cuda=numba_cuda.__version__, date=time.strftime("%Y-%m-%d"),
              command="bench/arithmetic/measure.py", rows=rows)
Path(sys.argv[1]).write_text(json.dumps(record, indent=1))
