"""GPU session for lifetime-sorted attention: python gpu_tune.py parts tune transposed ; run in the repo root.

parts       where the time goes: rank, walk (bits 1..4), order, gathers, kernel, scatter of gradients
tune        chunk, kv_tile, kernel options, forward and forward + backward
transposed  options of the transposed pass
Each line is one JSON row.
"""
import functools
import itertools
import json
import sys

import torch

sys.path.insert(0, ".")
import flex_masks as fm
from flex_masks import CacheSpec, lifetime_attention, lifetime_order, padded_dies, plan
from targets import transposed_lse

torch.manual_seed(0)
H, H_kv, D, W = 32, 8, 128, 256


def ms(fn, n=15):
    fn(); fn()
    times = []
    for _ in range(n):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record(); fn(); b.record(); b.synchronize()
        times.append(a.elapsed_time(b))
    return round(sorted(times)[n // 2], 3)


def say(**row):
    print(json.dumps(row), flush=True)


def tensors(T):
    return [torch.randn(1, h, T, D, device="cuda", dtype=torch.bfloat16) for h in (H, H_kv, H_kv)]


def guarded(row, fn):
    try:
        say(**row, ms=ms(fn))
    except Exception as error:  # an option that this card or this torch refuses
        say(**row, error=str(error).strip().splitlines()[-1][:160])
        torch._dynamo.reset()


def parts():
    for T, budget in ((16384, 2048), (16384, 4096), (32768, 2048), (131072, 4096)):
        spec, (q, k, v) = CacheSpec(4, W, budget), tensors(T)
        p = torch.randn(1, H_kv, T, device="cuda")
        rank = fm.rank_candidates(p, spec)
        n = torch.full((), spec.n_select, dtype=torch.int64, device="cuda")
        base = dict(T=T, budget=budget)
        guarded(dict(base, part="rank_candidates"), lambda: fm.rank_candidates(p, spec))
        for bits in (1, 2, 3, 4):
            walk = torch.compile(functools.partial(fm.wavelet_walk, bits=bits), dynamic=False, fullgraph=True)
            guarded(dict(base, part=f"walk, {bits} bits"), lambda: walk(rank[0], n))
        cutoff = fm.parallel_cutoffs(rank, spec.n_select, True)
        guarded(dict(base, part="evict_at"), lambda: fm.evict_at_from_cutoffs(rank, cutoff, spec, T))
        evict_at = plan(p, spec, True)
        dies = padded_dies(evict_at)
        C = -(-spec.n_slots // 128) * 128
        guarded(dict(base, part="order, eager"), lambda: lifetime_order(dies, spec.n_slots, W, C))
        guarded(dict(base, part="order, compiled"), lambda: fm.compiled_lifetime_order(dies, spec.n_slots, W, C))
        order = lifetime_order(dies, spec.n_slots, W, C)[0]
        x = k.view(H_kv, 1, T, D)
        guarded(dict(base, part="gather k"), lambda: fm.GatherRows.apply(x, order))
        xg = x.clone().requires_grad_()
        y = fm.GatherRows.apply(xg, order)
        g = torch.randn_like(y)
        guarded(dict(base, part="scatter dk"), lambda: torch.autograd.grad(y, xg, g, retain_graph=True))
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # launches cost nothing under a graph
        with torch.cuda.stream(stream):
            for _ in range(2):
                fm.compiled_lifetime_order(padded_dies(plan(p, spec, True)), spec.n_slots, W, C)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            fm.compiled_lifetime_order(padded_dies(plan(p, spec, True)), spec.n_slots, W, C)
        guarded(dict(base, part="scores to tables, CUDA graph"), graph.replay)


def tune():
    for T, budget in ((16384, 2048), (16384, 4096)):
        spec, (q, k, v) = CacheSpec(4, W, budget), tensors(T)
        evict_at = plan(torch.randn(1, H_kv, T, device="cuda"), spec)
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]

        def forward(**kw):
            with torch.no_grad():
                lifetime_attention(q, k, v, evict_at, spec, compiled=True, **kw)

        def both(**kw):
            torch.autograd.grad(lifetime_attention(*inputs, evict_at, spec, compiled=True, **kw)[0], inputs, q)
        N = budget
        for chunk, kv_tile in itertools.product((N // 4, N // 2, N, 2 * N), (128, 64)):
            row = dict(T=T, budget=budget, chunk=chunk, kv_tile=kv_tile)
            guarded(dict(row, what="fwd"), lambda: forward(chunk=chunk, kv_tile=kv_tile))
            if kv_tile == 128:
                guarded(dict(row, what="fwd_bwd"), lambda: both(chunk=chunk))
        for option in ({}, dict(PRESCALE_QK=True), dict(USE_TMA=True), dict(PRESCALE_QK=True, USE_TMA=True),
                       dict(fwd_BLOCK_N=128), dict(fwd_BLOCK_M=64), dict(fwd_num_warps=4), dict(fwd_num_stages=2),
                       dict(fwd_num_stages=4), dict(fwd_BLOCK_N=128, fwd_num_stages=2)):
            guarded(dict(T=T, budget=budget, options=option, what="fwd"), lambda: forward(kernel_options=option or None))
        for option in ({}, dict(PRESCALE_QK=True), dict(USE_TMA=True), dict(bwd_num_stages=2), dict(bwd_num_warps=4),
                       dict(bwd_BLOCK_M1=32), dict(bwd_BLOCK_N1=64, bwd_BLOCK_M2=64), dict(bwd_BLOCK_N2=32),
                       dict(bwd_BLOCK_M1=64, bwd_BLOCK_N1=64, bwd_BLOCK_M2=64, bwd_BLOCK_N2=64, bwd_num_warps=4)):
            guarded(dict(T=T, budget=budget, options=option, what="fwd_bwd"), lambda: both(kernel_options=option or None))


def transposed():
    for T in (16384, 32768):
        spec, (q, k, v) = CacheSpec(4, W, 2048), tensors(T)
        evict_at = plan(torch.randn(1, H_kv, T, device="cuda"), spec)
        with torch.no_grad():
            lse = lifetime_attention(q, k, v, evict_at, spec)[1]
        n = torch.full((1,), T, device="cuda")
        causal = fm.keep_everything(1, 1, T, "cuda")
        mask = fm.evict_at_block_mask(causal)
        guarded(dict(T=T, what="causal flex forward"), lambda: fm.attention(q, k, v, causal, block_mask=mask))
        for bounded, option in itertools.product((None, evict_at), (
                {}, dict(PRESCALE_QK=True), dict(USE_TMA=True), dict(BLOCK_N=128), dict(BLOCK_N=128, num_warps=4),
                dict(num_warps=4), dict(num_stages=2), dict(num_stages=4), dict(BLOCK_M=64, num_warps=4))):
            guarded(dict(T=T, what="transposed", bounded=bounded is not None, options=option),
                    lambda: transposed_lse(q, k, lse, W, n, bounded, 2.0, option or None))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        {"parts": parts, "tune": tune, "transposed": transposed}[name]()
