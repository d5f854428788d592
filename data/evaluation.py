"""What a model is worth in training: teacher-forced on held-out rows of text, or on problems with one right trace.

- `evaluate_text`, `evaluate`: next-token figures under a policy, dense without one;
- `judging`, `judged`: beside them the scorer's own, retention loss and recall, layer by layer;
- `autocast`: the precision in which training and its evaluations compute.
"""
import contextlib
import math

import torch
import torch.nn.functional as F

from data.batches import problem_batches, response_mask
from data.traces import FAMILIES
from model import causal_attend
from targets import LISTWISE_SHARE, POWER, Retention, judge, policy_attend


def autocast(device):
    """bf16 matrix products on a GPU; scores, gates and lse stay fp32 inside."""
    return torch.autocast("cuda", torch.bfloat16) if device == "cuda" else contextlib.nullcontext()


def judging(scorers, spec, lengths, found, *, bounded=True, tau=1.0, power=POWER, listwise_share=LISTWISE_SHARE):
    """An on_layer for policy_attend that adds (retention loss, recall) of each layer, floats, to the list found; None
    for scorers that do not learn."""
    def watch(layer, q, k, lse, scores, evict_at):
        noise = torch.rand(*scores.shape[:2], 64, generator=torch.Generator().manual_seed(layer)).to(q.device)
        retention = Retention(spec, lengths, n_samples=64, bounded=bounded, power=power, tau=tau, want_recall=True,
                              listwise_share=listwise_share, noise={layer: noise})
        found.append([x.item() for x in judge(retention, layer, scores, scorers[layer].log_gamma(), q, k, lse,
                                              evict_at)])
    return None if scorers is None or scorers[0].window is None else watch


def judged(found):
    """Mean loss and recall, None for no number; recall is NaN where nothing was evicted."""
    losses, recalls = [loss for loss, _ in found], [recall for _, recall in found if recall == recall]
    return {"loss": sum(losses) / len(losses) if losses else None,
            "recall": sum(recalls) / len(recalls) if recalls else None}


@torch.no_grad()
def evaluate_text(model, device, rows, spec=None, scorers=None, **how):
    """Teacher-forced on rows, a list of (idx, targets), (T,) int64 each, one at a time: every position counts.

    -> dict: perplexity (exp of the mean next-token loss), token_accuracy, n_rows, n_tokens, loss and recall (None
    unless learned; `how` as in judging).
    """
    loss, correct, total, found = 0.0, 0, 0, []
    for idx, targets in rows:
        idx, targets = idx[None].to(device), targets.to(device)
        lengths = torch.tensor([idx.shape[1]], device=device)
        attend = causal_attend if scorers is None else policy_attend(
            scorers, spec, lengths, judging(scorers, spec, lengths, found, **how))
        with autocast(device):
            hidden = model(idx, attend)[0]
            for h, y in zip(*(x.split(max(1, 2**25 // model.config.vocab_size)) for x in (hidden, targets))):
                logits = model.unembed(h).float()  # at most 128 MiB
                loss += F.cross_entropy(logits, y, reduction="sum").item()
                correct += (logits.argmax(-1) == y).sum().item()
        total += len(targets)
    return {"perplexity": math.exp(min(loss / total, 700.0)), "token_accuracy": correct / total, "n_rows": len(rows),
            "n_tokens": total, **judged(found)}


@torch.no_grad()
def evaluate(model, device, n, spec=None, scorers=None, split="validation", families=FAMILIES, **how):
    """Teacher-forced on n problems a family: share of trace tokens and of whole traces right; for a learned scorer also
    the retention loss and recall. A whole trace is right exactly when greedy decoding under the policy writes it.

    -> dict: token_accuracy, wrong (trace tokens), n_problems, traces_right (mean over families), by_family, right
    (family -> list of bool by problem), loss and recall (None unless learned; `how` as in judging).
    """
    batch_size = 16 if device == "cuda" else 1  # 16: the shape that training compiled
    right, correct, total, found = {f: {} for f in families}, 0, 0, []
    for idx, lengths, starts, problems in problem_batches(n, device, batch_size, split, families):
        attend = causal_attend if scorers is None else policy_attend(
            scorers, spec, lengths, judging(scorers, spec, lengths, found, **how), starts + 1)
        with autocast(device):
            guess = torch.cat([model.unembed(h).argmax(-1) for h in model(idx, attend).split(1)])
        mask = response_mask(idx.shape[1], lengths, starts)[:, :-1]
        hit = (guess[:, :-1] == idx[:, 1:]) | ~mask
        correct += (hit & mask).sum().item()
        total += mask.sum().item()
        for problem, ok in zip(problems, hit.all(1).tolist()):
            right[problem.family][problem.index] = ok
    by_family = {f: sum(v.values()) / len(v) for f, v in right.items()}
    return {"token_accuracy": correct / total, "wrong": total - correct,
            "n_problems": sum(len(v) for v in right.values()),
            "traces_right": sum(by_family.values()) / len(by_family), "by_family": by_family,
            "right": {f: [v[i] for i in sorted(v)] for f, v in right.items()},
            **judged(found)}
