# ruff: noqa
# fmt: off
"""Attention cases distilled from public bug reports.

Every case is a function -> (q, k, v, kwargs, expected_out, expected_lse), NumPy float64.
  dense : q (B,Sq,H,D)  k (B,Sk,Hk,D)  v (B,Sk,Hk,Dv)   out (B,Sq,H,Dv)  lse (B,H,Sq)
  packed: q (Tq,H,D)    k (Tk,Hk,D)    v (Tk,Hk,Dv)      out (Tq,H,Dv)    lse (H,Tq)   (cu_seqlens_* in kwargs)
kwargs: causal, window_size, softmax_scale, softcap, seqlens_k, cu_seqlens_q, cu_seqlens_k,
        alibi_slopes, bias, sink.
Semantics
  s = scale*q.k ; s = cap*tanh(s/cap) if cap>0 ; s += bias ; s -= slope*|i+off-j| ; mask ; softmax
  off = (valid Sk of THIS sequence) - (Sq of THIS sequence)                 [bottom-right]
  causal: j <= i+off ; window: i+off-left <= j <= i+off+right, -1 = infinite
  head map: kv head = h // (H//Hk) ; LSE natural log ; sink = extra logit (in LSE, no value)
  no visible key -> out 0, lse -inf (lse = sink if a sink is given)
  masked / padded K,V may hold NaN/inf and must not leak.
Nearly all inputs are exactly representable in fp16 and bf16 (exceptions in DTYPES).
Inputs may be non-contiguous views: use to_device() to keep strides on the GPU.
"""
import math, os, sys
import numpy as np

INF = math.inf

# ------------------------------------------------------------------ reference
def _mask(sq, sk, causal, window):
    i = np.arange(sq)[:, None] + (sk - sq)
    j = np.arange(sk)[None, :]
    m = np.ones((sq, sk), bool)
    l, r = window
    if causal:
        m &= j <= i
    if l >= 0:
        m &= j >= i - l
    if r >= 0:
        m &= j <= i + r
    return m

def _block(q, k, v, scale, cap, mask, add, sink):
    """one (sequence, head). returns out, lse, P (Sq,Sk), capped score, p_sink"""
    sq, sk = q.shape[0], k.shape[0]
    s = scale * (q @ k.T) if sk else np.zeros((sq, 0))
    if cap:
        s = cap * np.tanh(s / cap)
    sc = s
    with np.errstate(invalid="ignore"):
        s = np.where(mask, s + add, -INF)
    m = s.max(1, initial=-INF)
    if sink is not None:
        m = np.maximum(m, sink)
    ms = np.where(np.isneginf(m), 0.0, m)
    e = np.exp(s - ms[:, None])
    ps = np.exp(sink - ms) if sink is not None else np.zeros(sq)
    d = e.sum(1) + ps
    ok = d > 0
    dd = np.where(ok, d, 1.0)
    p = e / dd[:, None]
    lse = np.where(ok, ms + np.log(dd), -INF)
    return p @ v, lse, p, sc, ps / dd

def _seqs(q, k, v, kw):
    """yield (index into q rows, index into kv rows, batch id)."""
    if kw.get("cu_seqlens_q") is not None:
        cq, ck = kw["cu_seqlens_q"], kw["cu_seqlens_k"]
        for b in range(len(cq) - 1):
            yield (slice(cq[b], cq[b + 1]),), (slice(ck[b], ck[b + 1]),), b
    else:
        sl = kw.get("seqlens_k")
        for b in range(q.shape[0]):
            n = k.shape[1] if sl is None else int(sl[b])
            yield (b, slice(None)), (b, slice(0, n)), b

def _parts(q, k, v, kw):
    H, Hk = q.shape[-2], k.shape[-2]
    assert H % Hk == 0
    scale = kw.get("softmax_scale")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    cap = float(kw.get("softcap") or 0.0)
    al = kw.get("alibi_slopes")
    bias = kw.get("bias")
    sink = kw.get("sink")
    for qi, ki, b in _seqs(q, k, v, kw):
        for h in range(H):
            g = h // (H // Hk)
            qq, kk, vv = q[qi + (h,)], k[ki + (g,)], v[ki + (g,)]
            sq, sk = qq.shape[0], kk.shape[0]
            add = np.zeros((sq, sk))
            if bias is not None:
                bb = np.broadcast_to(bias, (q.shape[0], H, sq, k.shape[1]))
                add = add + bb[b, h, :, :sk]
            if al is not None:
                sl = np.asarray(al)[b, h] if np.ndim(al) == 2 else al[h]
                add = add - sl * np.abs(np.arange(sq)[:, None] + sk - sq - np.arange(sk)[None, :])
            mask = _mask(sq, sk, kw.get("causal", False), kw.get("window_size", (-1, -1)))
            yield qi, ki, b, h, g, qq, kk, vv, scale, cap, mask, add, (None if sink is None else float(sink[h]))

def ref(q, k, v, **kw):
    packed = kw.get("cu_seqlens_q") is not None
    out = np.zeros(q.shape[:-1] + (v.shape[-1],))
    lse = np.full((q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1]), -INF)
    for qi, ki, b, h, g, qq, kk, vv, scale, cap, mask, add, sink in _parts(q, k, v, kw):
        o, l, *_ = _block(qq, kk, vv, scale, cap, mask, add, sink)
        out[qi + (h,)] = o
        lse[(h,) + qi if packed else (b, h)] = l
    return out, lse

def ref_grads(q, k, v, dout, **kw):
    """dq, dk, dv (and dsink if a sink is given) in float64."""
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    dsink = np.zeros(q.shape[-2])
    for qi, ki, b, h, g, qq, kk, vv, scale, cap, mask, add, sink in _parts(q, k, v, kw):
        o, l, p, sc, ps = _block(qq, kk, vv, scale, cap, mask, add, sink)
        do = dout[qi + (h,)]
        delta = (do * o).sum(1)
        ds = p * (do @ vv.T - delta[:, None])
        dsink[h] += -(ps * delta).sum()
        if cap:
            ds = ds * (1 - (sc / cap) ** 2)
        dq[qi + (h,)] += scale * ds @ kk
        dk[ki + (g,)] += scale * ds.T @ qq
        dv[ki + (g,)] += p.T @ do
    return (dq, dk, dv) if kw.get("sink") is None else (dq, dk, dv, dsink)

def naive(q, k, v, **kw):
    """independent slow check: one row at a time, explicit list of visible keys."""
    packed = kw.get("cu_seqlens_q") is not None
    H, Hk, D = q.shape[-2], k.shape[-2], q.shape[-1]
    scale = kw.get("softmax_scale"); scale = D ** -0.5 if scale is None else float(scale)
    cap = float(kw.get("softcap") or 0); l, r = kw.get("window_size", (-1, -1))
    out = np.zeros(q.shape[:-1] + (v.shape[-1],))
    lse = np.full((H, q.shape[0]) if packed else (q.shape[0], H, q.shape[1]), -INF)
    nb = len(kw["cu_seqlens_q"]) - 1 if packed else q.shape[0]
    for b in range(nb):
        if packed:
            q0, q1 = kw["cu_seqlens_q"][b:b + 2]; k0, k1 = kw["cu_seqlens_k"][b:b + 2]
        else:
            q0, q1, k0, k1 = 0, q.shape[1], 0, (k.shape[1] if kw.get("seqlens_k") is None else kw["seqlens_k"][b])
        for h in range(H):
            g = (h * Hk) // H
            for i in range(q1 - q0):
                pos = i + (k1 - k0) - (q1 - q0)
                qv = q[q0 + i, h] if packed else q[b, i, h]
                sc, js = [], []
                for j in range(k1 - k0):
                    if kw.get("causal") and j > pos: continue
                    if l >= 0 and j < pos - l: continue
                    if r >= 0 and j > pos + r: continue
                    a = 0.0
                    if kw.get("bias") is not None:
                        a += float(np.broadcast_to(kw["bias"], (nb, H, q1, k.shape[1]))[b, h, i, j])
                    if kw.get("alibi_slopes") is not None:
                        s_ = np.asarray(kw["alibi_slopes"]); a -= float(s_[b, h] if s_.ndim == 2 else s_[h]) * abs(pos - j)
                    if a == -INF: continue
                    x = scale * float(np.dot(qv, k[k0 + j, g] if packed else k[b, j, g]))
                    if cap: x = cap * math.tanh(x / cap)
                    sc.append(x + a); js.append(j)
                sk_ = kw.get("sink"); al_ = sc + ([float(sk_[h])] if sk_ is not None else [])
                if not al_: continue
                m = max(al_); den = math.fsum(math.exp(t - m) for t in al_)
                L = m + math.log(den); o = np.zeros(v.shape[-1])
                for x, j in zip(sc, js):
                    o += math.exp(x - m) / den * (v[k0 + j, g] if packed else v[b, j, g])
                if packed: out[q0 + i, h] = o; lse[h, q0 + i] = L
                else: out[b, i, h] = o; lse[b, h, i] = L
    return out, lse

# ------------------------------------------------------------------ helpers
def grid(seed, shape, lim=2.0, step=0.125):
    """random multiples of 1/8 in [-2,2]: exact in fp16, bf16 and fp32."""
    n = int(lim / step)
    return np.random.default_rng(seed).integers(-n, n + 1, shape) * step

def qkv(seed, B, Sq, Sk, H, Hk, D, Dv=None):
    return grid(seed, (B, Sq, H, D)), grid(seed + 1, (B, Sk, Hk, D)), grid(seed + 2, (B, Sk, Hk, Dv or D))

def pqkv(seed, Tq, Tk, H, Hk, D):
    return grid(seed, (Tq, H, D)), grid(seed + 1, (Tk, Hk, D)), grid(seed + 2, (Tk, Hk, D))

def done(q, k, v, **kw):
    o, l = ref(q, k, v, **kw)
    return q, k, v, kw, o, l

def to_device(x, xp, dtype):
    """copy x to the GPU keeping offset and strides (in elements) of a NumPy view."""
    if x.flags.c_contiguous and x.base is None:
        return xp.asarray(x).astype(dtype)
    base = x
    while base.base is not None and isinstance(base.base, np.ndarray):
        base = base.base
    off = (x.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // x.itemsize
    buf = xp.asarray(np.ascontiguousarray(base)).astype(dtype).ravel()
    size = buf.dtype.itemsize
    return xp.lib.stride_tricks.as_strided(buf[off:], x.shape, tuple(s // x.itemsize * size for s in x.strides))

CASES, DTYPES, GRADS = {}, {}, {}
def case(fn=None, *, dtypes=None, grads=False):
    def deco(f):
        CASES[f.__name__] = f
        if dtypes: DTYPES[f.__name__] = dtypes
        if grads: GRADS[f.__name__] = f
        return f
    return deco(fn) if fn else deco

TOL = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-5}
def compare(out, lse, eout, else_, dtype):
    """assert one result against a case; out, lse as NumPy arrays of any float type."""
    out, lse, t = np.asarray(out, float), np.asarray(lse, float), TOL[str(dtype)]
    assert out.shape == eout.shape and lse.shape == else_.shape, (out.shape, lse.shape)
    assert np.isfinite(out).all() and not np.isnan(lse).any()
    assert np.array_equal(lse == -INF, else_ == -INF), "empty rows"
    e = else_ == -INF
    assert (lse[~e] != INF).all() and np.allclose(lse[~e], else_[~e], rtol=1e-5, atol=2e-3)
    assert np.allclose(out, eout, rtol=t, atol=t * max(1.0, np.abs(eout).max(initial=0)))

# ------------------------------------------------------------------ group A
@case(grads=True)
def A01_packed_causal_sq_gt_sk_masked_rows():
    cq, ck = [0, 76, 110, 256], [0, 1, 2, 3]
    q, k, v = pqkv(1, 256, 3, 1, 1, 32)
    r = done(q * 3, k * 3, v, causal=True, cu_seqlens_q=cq, cu_seqlens_k=ck)
    assert np.count_nonzero(np.isfinite(r[5])) == 3 and (r[4][0:75] == 0).all()
    assert (r[4][75] == v[0]).all()          # last query of each sequence sees its only key
    return r

@case(grads=True)
def A02_bias_neg_inf_rows():
    q, k, v = qkv(2, 1, 8, 8, 1, 1, 16)
    bias = np.zeros((1, 1, 8, 8)); bias[..., 4:, :] = -INF; bias[..., :, 4:] = -INF
    r = done(q, k, v, bias=bias)
    assert (r[4][0, 4:] == 0).all() and np.isneginf(r[5][0, 0, 4:]).all() and np.isfinite(r[5][0, 0, :4]).all()
    return r

@case(grads=True)
def A03_empty_key_sequence_lse_minus_inf():
    q, k, v = pqkv(3, 5, 4, 2, 1, 16)
    r = done(q, k, v, cu_seqlens_q=[0, 2, 5], cu_seqlens_k=[0, 0, 4])
    assert np.isneginf(r[5][:, :2]).all() and (r[4][:2] == 0).all()
    return r

@case(grads=True)
def A04_causal_5q_2k_bottom_right():
    q, k, v = qkv(4, 1, 5, 2, 1, 1, 16)
    r = done(q, k, v, causal=True)
    assert (r[4][0, :3] == 0).all() and (r[4][0, 3, 0] == v[0, 0, 0]).all()
    return r

@case
def A04b_causal_2q_5k_bottom_right():
    q, k, v = qkv(5, 1, 2, 5, 1, 1, 16)
    q = q * 0
    r = done(q, k, v, causal=True)
    assert np.allclose(r[4][0, 0, 0], v[0, :4, 0].mean(0)) and np.allclose(r[5][0, 0], np.log([4, 5]))
    return r

@case
def A05_decode_one_query_causal_sees_all():
    q, k, v = qkv(6, 2, 1, 130, 4, 2, 64)
    r = done(q, k, v, causal=True)
    o, l = ref(q, k, v)
    assert (o == r[4]).all() and (l == r[5]).all()
    return r

def _neg(seed, B, Sq, Sk, H, Hk, D, q0, k0):
    q, k, v = qkv(seed, B, Sq, Sk, H, Hk, D)
    q, k = q / 2, k / 2
    q[..., 0], k[..., 0] = q0, k0
    return q, k, v

@case
def A08_decode_tail_all_scores_negative():
    q, k, v = _neg(11, 2, 1, 65, 8, 2, 64, 8.0, -448.0)
    r = done(q, k, v)
    assert r[5].max() < -400 and np.abs(r[4]).sum(-1).min() > 0
    return r

@case
def A09_finite_sentinel_single_key():
    q = np.full((2, 1, 2, 128), 256.0); k = np.full((2, 3, 1, 128), -256.0); k[:, 1] = -255.0
    v = grid(12, (2, 3, 1, 128))
    r = done(q, k, v, seqlens_k=[1, 3])
    assert (r[4][0, 0, 0] == v[0, 0, 0]).all() and np.allclose(r[4][1, 0, 0], v[1, 1, 0]) and r[5].max() < -7e5
    return r

@case
def A10_masked_key_must_not_win():
    q = np.zeros((1, 1, 1, 8)); q[..., 0] = -20480.0
    k = np.zeros((1, 2, 1, 8)); k[0, 0, 0, 0] = 1.0
    v = np.ones((1, 2, 1, 8)); v[0, 1] = 100.0
    r = done(q, k, v, softmax_scale=1.0, seqlens_k=[1])
    assert (r[4] == 1.0).all() and (r[5] == -20480).all()
    return r

@case
def A11_nan_in_kv_padding():
    q = np.full((2, 3, 1, 64), 0.5); k = np.full((2, 80, 1, 64), np.nan); v = np.full((2, 80, 1, 64), np.nan)
    k[0, :1], k[1, :3] = 0.25, grid(13, (3, 1, 64)); v[0, :1], v[1, :3] = 1.5, grid(14, (3, 1, 64))
    v[1, 3:] = INF
    r = done(q, k, v, seqlens_k=[1, 3])
    assert (r[4][0] == 1.5).all() and np.isfinite(r[4]).all()
    return r

@case
def A15_window_s_minus_1_equals_causal():
    q, k, v = qkv(18, 1, 200, 200, 1, 1, 32)
    r = done(q, k, v, window_size=(199, 0))
    assert (ref(q, k, v, causal=True)[0] == r[4]).all()
    return r

@case
def A16_window_is_inclusive():
    q, k, v = qkv(19, 1, 16, 16, 1, 1, 16)
    q = q * 0
    r = done(q, k, v, causal=True, window_size=(4, 0))
    for i in range(16):
        assert np.allclose(r[4][0, i, 0], v[0, max(0, i - 4):i + 1, 0].mean(0)) and np.isclose(r[5][0, 0, i], math.log(min(i + 1, 5)))
    return r

@case(grads=True)
def A17_window_sq_gt_sk_leading_zero_rows():
    q, k, v = qkv(20, 1, 129, 16, 2, 1, 32)
    r = done(q, k, v, window_size=(32, 64))
    vis = [bool(set(range(max(0, i - 113 - 32), i - 113 + 64 + 1)) & set(range(16))) for i in range(129)]
    assert ((np.isfinite(r[5][0, 0])) == vis).all() and not vis[48] and vis[49]
    return r

@case(grads=True)
def A19_softcap_formula():
    q, k, v = qkv(21, 1, 9, 11, 2, 1, 32)
    r = done(q * 2, k, v, softcap=15.0)
    assert np.abs(r[5]).max() <= 15 + math.log(11)
    return r

@case
def A20_softcap_before_mask():
    q = np.full((1, 2, 1, 16), 4.0); k = np.full((1, 2, 1, 16), -4.0)
    v = np.ones((1, 2, 1, 16)); v[0, 1] = 64.0
    r = done(q, k, v, causal=True, softcap=1.0)
    assert (r[4][0, 0] == 1.0).all() and np.isclose(r[5][0, 0, 0], -1.0)
    return r

@case(grads=True)
def A22_softcap_causal_packed_gqa_backward():
    q, k, v = pqkv(23, 47, 61, 6, 2, 32)
    return done(q * 2, k * 2, v, causal=True, softcap=15.0, cu_seqlens_q=[0, 13, 14, 47], cu_seqlens_k=[0, 20, 21, 61])

@case(grads=True)
def A23_gqa_6_2_backward():
    q, k, v = qkv(24, 2, 37, 41, 6, 2, 32)
    return done(q, k, v, causal=True)

@case
def A24_gqa_head_mapping():
    q, k, v = qkv(25, 1, 4, 6, 6, 3, 32)
    v = np.zeros_like(v) + np.arange(3.0)[None, None, :, None]
    r = done(q, k, v)
    assert np.allclose(r[4][0, :, :, 0], np.arange(6) // 2)
    return r

@case
def A26_packed_mostly_empty_gqa_21_7():
    q, k, v = pqkv(28, 1, 1, 21, 7, 120)
    r = done(q, k, v, cu_seqlens_q=[0, 0, 0, 0, 1], cu_seqlens_k=[0, 0, 0, 0, 1])
    assert np.allclose(r[4][0], np.repeat(v[0], 3, 0))
    return r

@case
def A26b_packed_max_seqlen_q_1_with_empty():
    q, k, v = pqkv(29, 2, 8, 9, 3, 64)
    return done(q / 4, k, v, causal=True, softmax_scale=1.0, cu_seqlens_q=[0, 1, 1, 2], cu_seqlens_k=[0, 3, 3, 8])

@case
def A27_gqa_causal_row_index():
    q, k, v = qkv(30, 1, 40, 40, 8, 2, 32)
    return done(q, k, v, causal=True)

@case(grads=True)
def A28_packed_zero_len_q_and_k():
    q, k, v = pqkv(31, 9, 12, 4, 1, 64)
    r = done(q, k, v, cu_seqlens_q=[0, 0, 5, 9, 9], cu_seqlens_k=[0, 3, 3, 8, 12])
    assert (r[4][:5] == 0).all()
    return r

@case
def A31_lse_slots_with_empty_middle_sequence():
    q, k, v = pqkv(32, 12, 11, 3, 3, 32)
    r = done(q * 0, k, v, cu_seqlens_q=[0, 4, 7, 12], cu_seqlens_k=[0, 6, 6, 11])
    want = np.r_[np.full(4, math.log(6)), np.full(3, -INF), np.full(5, math.log(5))]
    assert np.array_equal(np.isfinite(want), np.isfinite(r[5][0])) and np.allclose(r[5], want)
    return r

@case
def A32_many_splits_few_keys():
    # run with every split-KV count 1..16: most splits own no key
    q, k, v = qkv(33, 2, 2, 5, 4, 2, 64)
    return done(q, k, v, causal=True, seqlens_k=[1, 5])

@case(grads=True)
def A38_k_strided_v_contiguous():
    q, k, v = qkv(34, 2, 33, 70, 2, 2, 32)
    k = k[:, ::2]; v = v[:, :35].copy()
    assert not k.flags.c_contiguous
    return done(q, k, v, causal=True)

@case
def A41_unaligned_rows():
    buf = [grid(35 + i, (1, 40, 2, 67)) for i in range(3)]       # row stride 67, base offset 1 element
    q, k, v = (b[..., 1:65] for b in buf)
    return done(q, k, v, causal=True)

@case
def A41b_qkv_packed_projection_views():
    buf = grid(38, (2, 50, 3, 4, 64))                            # q,k,v interleaved in one buffer
    q, k, v = buf[:, :, 0], buf[:, :, 1], buf[:, :, 2]
    return done(q, k, v)

@case(grads=True)
def A42_head_dim_72():
    q, k, v = qkv(39, 1, 65, 65, 2, 2, 72)
    q[..., :64] = 0                                              # only the tail carries signal
    return done(q, k, v, causal=True)

@case
def A43_head_dim_40_scale_uses_true_dim():
    q, k, v = qkv(40, 1, 17, 19, 2, 1, 40)
    r = done(q, k, v)
    assert not np.allclose(r[4], ref(q, k, v, softmax_scale=1 / 8.0)[0])
    return r

@case(grads=True)
def A44_odd_lengths():
    q, k, v = qkv(41, 1, 67, 193, 2, 1, 64)
    return done(q, k, v)

@case
def A45_lse_natural_log():
    q, k, v = qkv(42, 2, 3, 7, 2, 1, 32)
    r = done(q * 0, k, v)
    assert np.allclose(r[5], math.log(7))
    return r

@case(dtypes=("bfloat16", "float32"))
def A46_huge_equal_logits():
    q = np.full((1, 1, 1, 64), 133120.0); k = np.full((1, 3, 1, 64), 133120.0); v = np.full((1, 3, 1, 64), 133120.0)
    r = done(q, k, v)
    assert np.allclose(r[4], 133120.0) and np.isclose(r[5][0, 0, 0], 8 * 133120.0**2)
    return r

@case
def A55_batch_zero():
    q, k, v = qkv(45, 0, 3, 4, 2, 1, 32)
    return done(q, k, v)

@case(grads=True)
def A55b_dense_zero_keys():
    q, k, v = qkv(46, 2, 3, 0, 2, 1, 32)
    r = done(q, k, v)
    assert (r[4] == 0).all() and np.isneginf(r[5]).all()
    return r

@case
def A56_alibi_sq_ne_sk():
    q, k, v = qkv(47, 2, 3, 7, 4, 2, 32)
    al = np.array([[0.5, 0.25, 0.125, 0.0625], [1.0, 0.5, 0.25, 0.125]])
    return done(q, k, v, alibi_slopes=al)

@case
def A60_two_hundred_tiny_sequences():
    n = np.tile([1, 2, 3, 0], 50); cu = [0] + np.cumsum(n).tolist()
    q, k, v = pqkv(48, cu[-1], cu[-1], 2, 1, 64)
    return done(q, k, v, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu)

@case
def A61_per_sequence_bottom_right():
    q, k, v = qkv(49, 3, 4, 100, 2, 1, 32)
    k[0, 5:], v[0, 5:], v[2, 2:], k[2, 2:] = np.nan, np.nan, INF, np.nan
    r = done(q, k, v, causal=True, seqlens_k=[5, 100, 2])
    assert (r[4][2, :2] == 0).all() and np.isfinite(r[4]).all()
    return r

@case
def A62_bias_row_stride_43():
    q, k, v = qkv(50, 1, 21, 43, 2, 2, 32)
    return done(q, k, v, bias=grid(53, (1, 2, 21, 43)))

@case
def A62b_bias_broadcast_over_heads():
    q, k, v = qkv(54, 2, 9, 17, 4, 2, 32)
    return done(q, k, v, causal=True, bias=grid(57, (1, 1, 9, 17)))

@case
def A63_bias_finfo_min_first_128_keys():
    q, k, v = qkv(58, 1, 20, 200, 1, 1, 64)
    bias = np.zeros((1, 1, 20, 200)); bias[..., :128] = -65504.0
    r = done(q, k, v, bias=bias)
    o, l = ref(q, k[:, 128:], v[:, 128:])
    assert np.allclose(o, r[4]) and np.allclose(l, r[5])
    return r

# ------------------------------------------------------------------ self test
def _fd(f, x, g, n=6, eps=1e-6, seed=0):
    r = np.random.default_rng(seed); w = 0.0
    for _ in range(n if x.size else 0):
        i = tuple(r.integers(0, s) for s in x.shape)
        if not np.isfinite(x[i]): continue
        a = x[i]; h = eps * max(1.0, abs(a))
        x[i] = a + h; fp = f(); x[i] = a - h; fm = f(); x[i] = a
        w = max(w, abs((fp - fm) / (2 * h) - g[i]) / max(1.0, abs(g[i])))
    return w

def main():
    bad = 0
    for n, f in CASES.items():
        q, k, v, kw, o, l = f()
        o2, l2 = naive(q, k, v, **kw)
        ok = o.shape == q.shape[:-1] + (v.shape[-1],) and np.isfinite(o).all() and not np.isnan(l).any()
        ok = ok and np.allclose(o, o2, rtol=1e-9, atol=1e-9) and np.array_equal(np.isneginf(l), np.isneginf(l2))
        fin = np.isfinite(l)
        ok = ok and np.allclose(l[fin], l2[fin], rtol=1e-12, atol=1e-9)
        for x in (q, k, v):
            y = to_device(x, np, np.float32)
            ok = ok and y.shape == x.shape and np.allclose(y, x.astype(np.float32), equal_nan=True)
            if not x.flags.c_contiguous: ok = ok and [s // 4 for s in y.strides] == [s // 8 for s in x.strides]
            if n not in DTYPES:                                  # exact in fp16 and (approximately) bf16
                z = x[np.isfinite(x)]; ok = ok and np.array_equal(z.astype(np.float16).astype(float), z)
            z = x[np.isfinite(x)].astype(np.float32); ok = ok and not (z.view(np.uint32) & 0xFFFF).any()   # exact in bf16
        compare(o2, l2, o, l, "float32")
        gtxt = ""
        if n in GRADS:
            do = grid(99, o.shape)
            q, k, v = (np.array(x) for x in (q, k, v))
            gr = ref_grads(q, k, v, do, **kw)
            loss = lambda: float((ref(q, k, v, **kw)[0] * do).sum())
            w = max([_fd(loss, x, g) for x, g in zip((q, k, v), gr)])
            ok = ok and all(np.isfinite(g).all() for g in gr) and w < 2e-4
            if len(gr) == 4:
                s = kw["sink"]; ok = ok and _fd(loss, s, gr[3]) < 2e-4
            gtxt = f" grads fd-err {w:.1e}"
        bad += not ok
        print(f"{'ok ' if ok else 'BAD'} {n:45s} q{q.shape} k{k.shape}{gtxt}")
    print(len(CASES), "cases,", len(GRADS), "with gradients;", bad, "bad")
    return bad

if __name__ == "__main__":
    sys.exit(bool(main()))
