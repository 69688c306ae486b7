import pytest
import torch
import torch.nn.functional as F

from labsupport import checks
from labsupport.checks.chunked_loss import GRADIENT_MISTAKES, LOSS_MISTAKES, ChunkedLoss
from labsupport.checks.verdict import Mistake, mutant
from labsupport.training.memory import chunked_cross_entropy
from tests.checks.solutions import diagnosis, each, function, solution_source


def source():
    return solution_source("03", "ex-3-2-chunked-loss")


ALL = [checks.check_loss_values, checks.check_loss_gradients, checks.check_loss_memory]


def solved():
    return function(source(), "ChunkedLoss")


@pytest.mark.parametrize("check", ALL)
def test_the_solution_passes(check, capsys):
    check(solved())
    assert capsys.readouterr().out.startswith("[ok]")


@pytest.mark.parametrize("seed", [5, 8, 13])
def test_other_seeds_pass_too(seed):
    for check in ALL[:2]:
        check(solved(), seed=seed)


class Recomputes(torch.autograd.Function):
    """The other right way, without calculus: each chunk again in the backward, by autograd."""

    @staticmethod
    def losses(hidden, weight, labels):
        return F.cross_entropy(hidden @ weight.T, labels, reduction="sum", ignore_index=-100)

    @staticmethod
    def forward(ctx, hidden, weight, labels, chunk):
        ctx.save_for_backward(hidden, weight, labels)
        ctx.chunk, ctx.count = chunk, max(int((labels >= 0).sum()), 1)
        pairs = zip(hidden.split(chunk), labels.split(chunk), strict=True)
        return sum(Recomputes.losses(x, weight, y) for x, y in pairs) / ctx.count

    @staticmethod
    def backward(ctx, grad_loss):
        hidden, weight, labels = ctx.saved_tensors
        parts, total = [], 0
        for x, y in zip(hidden.split(ctx.chunk), labels.split(ctx.chunk), strict=True):
            leaves = [t.detach().requires_grad_() for t in (x, weight)]
            with torch.enable_grad():
                loss = Recomputes.losses(*leaves, y) * (grad_loss / ctx.count)
            of_x, of_weight = torch.autograd.grad(loss, leaves)
            parts.append(of_x)
            total = total + of_weight
        return torch.cat(parts), total, None, None


@pytest.mark.parametrize("check", ALL)
def test_computing_the_logits_again_in_the_backward_is_right_too(check):
    check(Recomputes)


@pytest.mark.parametrize("check", ALL)
def test_the_labs_own_loss_passes(check):
    class Labs(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, labels, chunk):
            leaves = [t.detach().requires_grad_() for t in (hidden, weight)]
            with torch.enable_grad():
                loss = chunked_cross_entropy(*leaves, labels, chunk=chunk)
            ctx.save_for_backward(*torch.autograd.grad(loss, leaves))
            return loss.detach()

        @staticmethod
        def backward(ctx, grad_loss):
            return *(grad * grad_loss for grad in ctx.saved_tensors), None, None

    check(Labs)


COUNT = "return total / count"
SCORES = "torch.log_softmax(hidden[part] @ weight.T, dim=-1)"
OTHER_LOSSES = (
    Mistake((".clamp(min=1)", ""), "every token is ignored"),
    Mistake(
        (
            SCORES,
            "(hidden[part] @ weight.T).exp()\n            log_p = (log_p / log_p.sum(-1, keepdim=True)).log()",
        ),
        "overflows float32",
    ),
    Mistake(("total / count", "(total / count)[None]"), "of shape ()"),
    Mistake((COUNT, "return total / count + 1"), "entries are wrong"),
    Mistake((COUNT, "total / count"), "`return`"),
    Mistake(("targets = labels.masked_fill(", "targets = labels.masked_fill_("), "in place"),
)
RETURN = "return grad_hidden * grad_loss, grad_weight * grad_loss, None, None"
OTHER_GRADIENTS = (
    Mistake(
        ("grad_weight * grad_loss", "grad_weight"), "gradient of weight is wrong. The incoming"
    ),
    Mistake(("grad_hidden[part] = d @ weight", "pass"), "all zeros"),
    Mistake((", None, None", ""), "returns four values"),
    Mistake((", None, None", ", None, None, None, 0"), "returns four values"),
    Mistake(
        (RETURN, "return grad_weight * grad_loss, grad_hidden * grad_loss, None, None"),
        "order of forward's arguments",
    ),
    Mistake(
        ("grad_weight * grad_loss", "grad_weight.T * grad_loss"), "order of forward's arguments"
    ),
    Mistake(("grad_weight * grad_loss", "None"), "returns None for weight"),
    Mistake(("ctx.saved_tensors", "ctx.saved"), "backward raised AttributeError"),
    Mistake((".clamp(min=1)", "", COUNT, "return total / count.clamp(min=1)"), "must be 0"),
    Mistake(("-torch.ones", "-2 * torch.ones"), "entries are wrong"),
)


@each(
    (checks.check_loss_values, ChunkedLoss, LOSS_MISTAKES + OTHER_LOSSES),
    (checks.check_loss_gradients, ChunkedLoss, GRADIENT_MISTAKES + OTHER_GRADIENTS),
)
def test_each_mistake_gets_its_own_diagnosis(check, student, said):
    assert said in diagnosis(check, student)


class AllAtOnce(torch.autograd.Function):
    """Right values, and all the logits."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, chunk):
        ctx.save_for_backward(hidden, weight, labels)
        count = (labels != -100).sum().clamp(min=1)
        return F.cross_entropy(hidden @ weight.T, labels, reduction="sum") / count

    @staticmethod
    def backward(ctx, grad_loss):
        hidden, weight, labels = ctx.saved_tensors
        kept = labels != -100
        d = (hidden @ weight.T).softmax(-1) - F.one_hot(labels * kept, len(weight))
        d = d * kept[:, None] / kept.sum().clamp(min=1) * grad_loss
        return d @ weight, d.T @ hidden, None, None


def test_all_the_logits_at_once_are_refused_though_the_values_are_right():
    for check in ALL[:2]:
        check(AllAtOnce)
    assert "forward created a tensor of shape (1024, 512)" in diagnosis(
        checks.check_loss_memory, AllAtOnce
    )


def test_all_the_logits_in_the_backward_alone_are_refused_too():
    class InBackward(AllAtOnce):
        @staticmethod
        def forward(ctx, hidden, weight, labels, chunk):
            ctx.save_for_backward(hidden, weight, labels)
            return Recomputes.forward(ctx, hidden, weight, labels, chunk)

    for check in ALL[:2]:
        check(InBackward)
    assert "backward created" in diagnosis(checks.check_loss_memory, InBackward)


def test_chunks_of_logits_that_are_all_kept_are_refused_too():
    edit = (
        "d = log_p.exp()",
        "d = log_p.exp(); ctx.kept.append(log_p)",
        "total =",
        "ctx.kept = []; total =",
    )
    keeps = mutant(ChunkedLoss, edit)
    for check in ALL[:2]:
        check(keeps)
    assert "kept for the backward pass" in diagnosis(checks.check_loss_memory, keeps)


def test_a_stub_is_called_one():
    class Stub(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, labels, chunk):
            raise NotImplementedError

    class HalfStub(Recomputes):
        @staticmethod
        def backward(ctx, grad_loss):
            raise NotImplementedError

    assert "Stub is not written yet" in diagnosis(ALL, Stub)
    assert "backward is not written yet" in diagnosis(ALL, HalfStub)


def test_what_is_no_autograd_function_is_refused():
    assert "the class itself" in diagnosis(ALL, lambda hidden, weight, labels, chunk: hidden.sum())


def test_a_loss_without_gradients_does_not_pass_for_its_little_memory():
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, labels, chunk):
            ctx.save_for_backward(hidden, weight)
            return hidden.new_tensor(3.0)

        @staticmethod
        def backward(ctx, given):
            return *(torch.zeros_like(x) for x in ctx.saved_tensors), None, None

    assert "gradient of hidden is zero" in diagnosis(checks.check_loss_memory, Nothing)
