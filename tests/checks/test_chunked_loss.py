import pytest
import torch
import torch.nn.functional as F

from labsupport import checks
from labsupport.training.saving.cross_entropy import chunked_cross_entropy
from tests.checks.solutions import broken, function, solution_source


def source():
    return solution_source("03", "ex-3-2-chunked-loss")


ALL = [checks.check_loss_values, checks.check_loss_gradients, checks.check_loss_memory]


def solved(*changes):
    return broken(source(), "ChunkedLoss", *changes)


def diagnosis(student, *some):
    with pytest.raises(checks.CheckFailed) as caught:
        for check in some or ALL:
            check(student)
    return str(caught.value)


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


RANGE, COUNT = "range(0, len(labels), chunk)", "return total / count"
LOSS = "total -= (log_p.gather(1, target)[:, 0] * kept).sum()"
VALUES = {
    "mean of means": (
        [(LOSS, LOSS.replace(".sum()", ".sum() / kept.sum()")), (COUNT, "return total / -(-len(labels) // chunk)")],
        "mean of the chunks' means",
    ),
    "all tokens": ([(COUNT, "return total / len(labels)")], "divided by all tokens"),
    "sum": ([(COUNT, "return total")], "It is the sum"),
    "last chunk dropped": ([(RANGE, "range(0, len(labels) // chunk * chunk, chunk)")], "shorter chunk is left out"),
    "last chunk only": ([("total -=", "total = -")], "last chunk alone"),
    "first chunk only": ([("        ctx.save", "            break\n        ctx.save")], "first chunk alone"),
    "ignored counted": ([("[:, 0] * kept)", "[:, 0])")], "as if their label were 0"),
    "last class": (
        [("[:, 0] * kept)", "[:, 0])"), ("labels.masked_fill(~counted, 0)", "labels.where(counted, len(weight) - 100)")],
        "counts from the end",
    ),
    "sign": ([("total -=", "total +=")], "sign is wrong"),
    "no logsumexp": ([("torch.log_softmax(hidden[part] @ weight.T, dim=-1)", "hidden[part] @ weight.T")], "logsumexp over the vocabulary"),
    "probability": ([("log_p.gather(1, target)", "log_p.exp().gather(1, target)")], "take its logarithm"),
    "all ignored": ([(".clamp(min=1)", "")], "every token is ignored"),
    "overflow": (
        [("torch.log_softmax(hidden[part] @ weight.T, dim=-1)", "(hidden[part] @ weight.T).exp()\n            log_p = (log_p / log_p.sum(-1, keepdim=True)).log()")],
        "overflows float32",
    ),
    "a number in a list": ([("total / count", "(total / count)[None]")], "of shape ()"),
    "something else": ([(COUNT, "return total / count + 1")], "entries are wrong"),
    "nothing": ([(COUNT, "total / count")], "`return`"),
    "labels changed": ([("targets = labels.masked_fill(", "targets = labels.masked_fill_(")], "in place"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), VALUES.values(), ids=VALUES)
def test_each_mistake_in_the_loss_gets_its_own_diagnosis(changes, said):
    assert said in diagnosis(solved(*changes), checks.check_loss_values)


D, MINUS = "d *= kept[:, None] / count", "d.scatter_add_(1, target, -torch.ones_like(d[:, :1]))"
RETURN = "return grad_hidden * grad_loss, grad_weight * grad_loss, None, None"
GRADIENTS = {
    "incoming ignored": ([(RETURN, "return grad_hidden, grad_weight, None, None")], "incoming gradient is ignored"),
    "incoming ignored for one": ([(RETURN, "return grad_hidden * grad_loss, grad_weight, None, None")], "gradient of weight is wrong. The incoming"),
    "incoming twice": ([(RETURN, RETURN.replace("* grad_loss", "* grad_loss**2"))], "multiplied in twice"),
    "no minus one": ([(MINUS, "pass")], "minus one at the label is missing"),
    "sign": ([(D, "d *= -1.0 * kept[:, None] / count")], "sign is wrong"),
    "no softmax": ([("d = log_p.exp()", "d = torch.zeros_like(log_p)")], "softmax is missing"),
    "ignored get all": ([(D, "d /= count")], "as if their label were 0"),
    "ignored get softmax": ([(MINUS, MINUS.replace("d[:, :1])", "d[:, :1]) * kept[:, None]")), (D, "d /= count")], "their softmax"),
    "sum": ([(D, "d *= kept[:, None]")], "not divided by the number"),
    "all tokens": ([(D, "d *= kept[:, None] / len(labels)")], "divided by all tokens"),
    "mean of means": (
        [(D, "d *= kept[:, None] / (kept.sum().clamp(min=1) * -(-len(labels) // chunk))")],
        "its own number of tokens",
    ),
    "last chunk dropped": ([(RANGE, "range(0, len(labels) // chunk * chunk, chunk)")], "shorter chunk is left out"),
    "weight overwritten": ([("grad_weight +=", "grad_weight =")], "gradient of weight is wrong. Each chunk overwrites"),
    "hidden never written": ([("grad_hidden[part] = d @ weight", "pass")], "all zeros"),
    "two gradients": ([(", None, None", "")], "returns four values"),
    "five gradients": ([(", None, None", ", None, None, None, 0")], "returns four values"),
    "wrong order": ([(RETURN, "return grad_weight * grad_loss, grad_hidden * grad_loss, None, None")], "order of forward's arguments"),
    "transposed": ([("grad_weight * grad_loss", "grad_weight.T * grad_loss")], "order of forward's arguments"),
    "none for weight": ([("grad_weight * grad_loss", "None")], "returns None for weight"),
    "an error": ([("ctx.saved_tensors", "ctx.saved")], "backward raised AttributeError"),
    "all ignored": (
        [(".clamp(min=1)", ""), (COUNT, "return total / count.clamp(min=1)")],
        "must be 0",
    ),
    "something else": ([(MINUS, MINUS.replace("-torch", "-2 * torch"))], "entries are wrong"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), GRADIENTS.values(), ids=GRADIENTS)
def test_each_mistake_in_the_gradients_gets_its_own_diagnosis(changes, said):
    assert said in diagnosis(solved(*changes), checks.check_loss_gradients)


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
        AllAtOnce, checks.check_loss_memory
    )


def test_all_the_logits_in_the_backward_alone_are_refused_too():
    class InBackward(AllAtOnce):
        @staticmethod
        def forward(ctx, hidden, weight, labels, chunk):
            ctx.save_for_backward(hidden, weight, labels)
            return Recomputes.forward(ctx, hidden, weight, labels, chunk)

    for check in ALL[:2]:
        check(InBackward)
    assert "backward created" in diagnosis(InBackward, checks.check_loss_memory)


def test_chunks_of_logits_that_are_all_kept_are_refused_too():
    keeps = solved(
        ("            d = log_p.exp()", "            ctx.kept.append(log_p)\n            d = log_p.exp()"),
        ("        total =", "        ctx.kept = []\n        total ="),
    )  # fmt: skip
    for check in ALL[:2]:
        check(keeps)
    assert "kept for the backward pass" in diagnosis(keeps, checks.check_loss_memory)


def test_a_stub_is_called_one():
    class Stub(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, labels, chunk):
            raise NotImplementedError

    class HalfStub(Recomputes):
        @staticmethod
        def backward(ctx, grad_loss):
            raise NotImplementedError

    assert "Stub is not written yet" in diagnosis(Stub)
    assert "backward is not written yet" in diagnosis(HalfStub)


def test_what_is_no_autograd_function_is_refused():
    assert "the class itself" in diagnosis(lambda hidden, weight, labels, chunk: hidden.sum())
    assert function(source(), "ChunkedLoss")  # and the solution is one


def test_a_loss_without_gradients_does_not_pass_for_its_little_memory():
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, labels, chunk):
            ctx.save_for_backward(hidden, weight)
            return hidden.new_tensor(3.0)

        @staticmethod
        def backward(ctx, given):
            return *(torch.zeros_like(x) for x in ctx.saved_tensors), None, None

    assert "gradient of hidden is zero" in diagnosis(Nothing, checks.check_loss_memory)
