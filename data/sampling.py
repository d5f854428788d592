"""The next token from logits: temperature, top-k, top-p, and a random number that the caller has drawn.

What this file holds: most_likely (top-k), sampling_probs (all filters), sample, and Fetched, tokens on their way to the
host. Nothing here draws: the noise comes from outside, so that a row gets the same text in any batch, on any device,
and inside a CUDA graph.
"""
import torch


def most_likely(logits, k):
    """Token ids (B, k), ascending: the k most likely, lower ids first among equals, which torch.topk leaves open."""
    lowest = logits.topk(k).values[:, -1:]
    above, equal = logits > lowest, logits == lowest
    keep = above | (equal & (equal.cumsum(-1) <= k - above.sum(-1, keepdim=True)))
    ids = torch.arange(logits.shape[1], device=logits.device)
    return ids.where(keep, logits.shape[1]).topk(k, largest=False).values.sort().values


def sampling_probs(logits, temperature, top_p=1.0, top_k=0):
    """logits (B, V) -> fp64 probabilities in descending order (B, V, or top_k where that is less), zero where filtered
    out, and their token ids. Temperature, then top_k (0 = off; exactly k stay, lower ids first among equals), then
    top_p: the fewest tokens whose share of what top_k left reaches top_p, at least one."""
    kept = None
    if 0 < top_k < logits.shape[1]:  # a sort of the whole vocabulary takes longer than a layer
        kept = most_likely(logits, top_k)
        logits = logits.gather(1, kept)
    logits = logits.double() - logits.amax(-1, keepdim=True)  # first, so that a tiny temperature gives no inf - inf
    probs, ids = (logits / temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = probs.cumsum(-1) - probs  # what stands ahead of each
    probs = probs.masked_fill(before >= top_p * probs.sum(-1, keepdim=True), 0.0) if top_p < 1 else probs
    return probs / probs.sum(-1, keepdim=True), ids if kept is None else kept.gather(1, ids)


def sample(logits, noise, temperature, top_p=1.0, top_k=0):
    """logits (B, V), noise (B,) fp64 uniform in [0, 1) -> token ids (B,). temperature 0 is greedy."""
    if temperature == 0:
        return logits.argmax(-1)
    probs, ids = sampling_probs(logits, temperature, top_p, top_k)
    place = (probs.cumsum(-1) <= noise[:, None]).sum(-1, keepdim=True)  # the inverse of the cumulative distribution
    place = torch.minimum(place, (probs > 0).sum(-1, keepdim=True) - 1)  # a sum rounded below 1 must not leave the set
    return ids.gather(-1, place).squeeze(-1)


class Fetched:
    """A copy to the host that is under way: the device goes on meanwhile, `tolist` waits for the copy alone."""

    def __init__(self, ids):
        self.ids, self.done = ids, torch.cuda.Event() if ids.is_cuda else None
        if self.done:
            self.ids = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
            self.ids.copy_(ids, non_blocking=True)
            self.done.record()

    def tolist(self):
        if self.done:
            self.done.synchronize()
        return self.ids.tolist()
