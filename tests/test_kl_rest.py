"""train.py --kl-rest: the KL with all tokens beyond the teacher's top_k as one more, against its plain form in fp64, as
the lower bound of the whole KL that it is, and with the teacher on disk."""
import pytest
import torch

import train
from data.teacher import TaughtRows
from data.text import TextRows
from test_train import Head, agree, head_inputs, refused, same, state_of, strict_json
from test_train_text import root, run  # noqa: F401


@pytest.mark.parametrize("top_k", [1, 5, 19])
def test_the_rest_is_one_token_more(top_k):
    hidden, weight, _, _ = head_inputs()
    mask = torch.arange(15) < torch.tensor([[14], [9]])
    student, teacher, teacher_hidden = Head(weight), Head(torch.randn(20, 6)), torch.randn(2, 15, 6)
    known = train.top_logits(teacher, teacher_hidden, top_k, True)
    assert known[0].shape[-1] == known[1].shape[-1] + 1 == top_k + 1 and known[0].dtype == torch.float32
    loss, total, whole = train.distillation_kl(student, hidden, *known, mask), 0.0, 0.0
    for b, t in mask.nonzero().tolist():
        logits = (teacher_hidden[b, t] @ teacher.weight.T).double()
        top = logits.argsort(descending=True)[:top_k]
        p, q = logits.softmax(0), (hidden[b, t].double() @ weight.double().T).softmax(0)
        whole = whole + (p * (p / q).log()).sum()
        p, q = (torch.cat([z[top], 1 - z[top].sum(0, keepdim=True)]) for z in (p, q))
        total = total + (p * (p / q).log()).sum()
    assert agree(loss, total / 23, (hidden, weight)) and student.most == 7
    # taking tokens together loses information and adds none; with one token beside the top 19 it loses nothing
    gap = (whole - total).item() / 23
    assert gap > 0.01 if top_k < 19 else abs(gap) < 1e-12
    plain = train.distillation_kl(student, hidden, *train.top_logits(teacher, teacher_hidden, top_k), mask)
    assert plain.item() < loss.item()  # renormalised, what the rest has is not seen


def test_a_model_has_no_distance_to_itself_and_a_rest_of_nothing_is_finite():
    head, hidden = Head(torch.randn(20, 6)), torch.randn(2, 15, 6)
    mask = torch.ones(2, 15, dtype=torch.bool)
    assert abs(train.distillation_kl(head, hidden, *train.top_logits(head, hidden, 5, True), mask).item()) < 1e-6
    sharp = Head(100 * torch.randn(20, 6))  # all but the first tokens round to nothing
    sharp.weight.requires_grad_()
    loss = train.distillation_kl(sharp, hidden, *train.top_logits(head, hidden, 19, True), mask)
    slope, = torch.autograd.grad(loss, sharp.weight)
    assert loss.isfinite() and slope.isfinite().all()


def test_it_reaches_the_run_and_a_teacher_on_disk(root, tmp_path, capsys, monkeypatch):  # noqa: F811
    more = ("--steps", 2, "--train-base", "--tokens", tmp_path / "tokens")
    kept = ("--teacher", tmp_path / "logits")
    for name, options in (("plain", ()), ("online", ("--kl-rest",)), ("offline", ("--kl-rest", *kept))):
        assert run(root, tmp_path / name, *more, *options) == 0
    plain, one, two = ([h["kl"] for h in strict_json(tmp_path / name / "log.json")["history"]]
                       for name in ("plain", "online", "offline"))
    assert one == two and one[0] > plain[0]
    assert same(*(state_of(tmp_path / name)["parameters"] for name in ("online", "offline")))
    row = TaughtRows(tmp_path / "logits", TextRows(tmp_path / "tokens", 96), {})[0]
    assert row[2].shape[-1] == row[3].shape[-1] + 1
    capsys.readouterr()
    monkeypatch.setattr(train, "top_logits", None)  # no work is done
    refused(capsys, run(root, tmp_path / "other", *more, *kept), "another rest", "delete it")
