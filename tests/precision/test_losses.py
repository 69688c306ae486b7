import pytest
import torch
import torch.nn.functional as F
from torch import nn

from labsupport.precision import compute_loss
from labsupport.precision.dtypes import unit_roundoff
from labsupport.precision.layers import MixedPrecisionLinear
from labsupport.profiling.memory import measure_peak_memory

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
TOKENS, WIDTH, VOCABULARY = 24, 8, 50


def peak(work):
    return measure_peak_memory(work, device="cpu").peak_bytes


def batch(dtype=F32, ignored=3, seed=0):
    """Hidden states (2, 12, 8), a head to 50 tokens, and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(2, TOKENS // 2, WIDTH, generator=generator).to(dtype).requires_grad_()
    head = nn.Linear(WIDTH, VOCABULARY, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(VOCABULARY, WIDTH, generator=generator))
        head.bias.copy_(torch.randn(VOCABULARY, generator=generator))
    labels = torch.randint(VOCABULARY, (2, TOKENS // 2), generator=generator)
    labels.view(-1)[1 : 1 + ignored] = -100
    return hidden, head, labels


def gradients(loss, hidden, head):
    return loss.detach(), *torch.autograd.grad(loss, [hidden, head.weight, head.bias])


@pytest.mark.parametrize("chunk_size", [None, 1, 5, 24])
def test_chunks_of_any_size_give_the_loss_and_gradients_of_cross_entropy(chunk_size):
    hidden, head, labels = batch(F64)
    right = gradients(F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten()), hidden, head)
    whole = compute_loss(head(hidden), labels, dtype=F64, chunk_size=chunk_size)
    parts = compute_loss(hidden, labels, head=head, dtype=F64, chunk_size=chunk_size)
    for loss in (whole, parts):
        torch.testing.assert_close(gradients(loss, hidden, head), right, rtol=1e-12, atol=1e-14)


def test_the_loss_is_float32_and_so_exact_for_low_precision_logits():
    hidden, head, labels = batch(BF16)
    logits = head(hidden).detach()
    loss = compute_loss(logits, labels)
    right = F.cross_entropy(logits.double().flatten(0, 1), labels.flatten())
    low = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert loss.dtype == F32
    assert abs(loss - right) <= 16 * unit_roundoff(F32) * right
    assert abs(low - right) > 100 * abs(loss - right)


def head_gradient_error(weight, chunk_size):
    """Relative error of the gradient of a head that multiplies in bfloat16."""
    tokens, width, vocabulary = 256, 16, 64
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(BF16)
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    exact = nn.Linear(width, vocabulary, bias=False, dtype=F64)
    exact.weight.data.copy_(torch.randn(vocabulary, width, generator=generator).to(BF16))
    head = MixedPrecisionLinear(width, vocabulary, bias=False, compute_dtype=BF16, dtype=weight)
    head.load_state_dict(exact.state_dict())
    loss = compute_loss(hidden, labels, head=head, chunk_size=chunk_size)
    right = compute_loss(hidden.double(), labels, head=exact, dtype=F64)
    (got,) = torch.autograd.grad(loss, head.weight)
    (wanted,) = torch.autograd.grad(right, exact.weight)
    return float((got.double() - wanted).norm() / wanted.norm())


def test_chunks_round_the_gradient_of_a_bfloat16_head_and_not_of_a_float32_one():
    whole, parts = (head_gradient_error(BF16, size) for size in (None, 8))
    # The logits, their gradient and the result are rounded; and so are the sums of 32 chunks.
    assert whole <= 3 * unit_roundoff(BF16)
    assert whole < parts <= (3 + 32) * unit_roundoff(BF16)
    assert head_gradient_error(F32, 8) < whole


def test_all_logits_never_exist_when_they_are_made_in_chunks():
    hidden, labels = torch.randn(1024, 16), torch.randint(2048, (1024,))
    head = nn.Linear(16, 2048, bias=False)

    def train(chunk_size):
        loss = compute_loss(hidden, labels, head=head, chunk_size=chunk_size)
        torch.autograd.grad(loss, list(head.parameters()))

    whole, parts = (peak(lambda s=s: train(s)) for s in (None, 64))
    logits = 1024 * 2048 * 4
    assert whole >= 2 * logits
    # 16 chunks: three tensors of a chunk's logits, and a few of the weight's size, which is 1/64.
    assert parts <= logits * (4 / 16 + 4 / 64)


@pytest.mark.parametrize("chunk_size", [None, 5])
def test_if_all_is_ignored_the_loss_and_its_gradients_are_zero(chunk_size):
    hidden, head, labels = batch(ignored=0)
    loss = compute_loss(hidden, torch.full_like(labels, -100), head=head, chunk_size=chunk_size)
    assert loss == 0
    for gradient in gradients(loss, hidden, head):
        assert (gradient == 0).all()


def test_another_ignore_index_may_be_a_token():
    hidden, head, labels = batch(ignored=0)
    right = F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), ignore_index=7)
    loss = compute_loss(head(hidden), labels, ignore_index=7)
    # The same terms; how a processor adds them up may differ in the last bits.
    assert abs(loss - right) <= 2 * torch.finfo(loss.dtype).eps * right


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"labels": torch.zeros(2, 11, dtype=torch.long)}, ValueError, "one label for each token"),
        ({"labels": torch.full((2, 12), VOCABULARY)}, ValueError, "label 50 is out of range"),
        ({"labels": torch.full((2, 12), -1)}, ValueError, "label -1 is negative"),
        ({"labels": torch.zeros(2, 12)}, TypeError, "integers"),
        ({"labels": torch.zeros(2, 12, dtype=torch.bool)}, TypeError, "integers"),
        ({"logits": torch.zeros(2, 12, 8, dtype=torch.long)}, TypeError, "floating"),
        ({"dtype": torch.int64}, TypeError, "int64"),
        ({"chunk_size": 0}, ValueError, "chunk_size"),
        ({"chunk_size": 2.5}, TypeError, "chunk_size counts tokens.*2.5"),
        ({"logits": torch.zeros(2, 12, 0), "head": None}, ValueError, "V of at least 1"),
        ({"logits": torch.tensor(0.0), "head": None}, ValueError, "V of at least 1"),
        ({"head": lambda rows: rows[:, :0]}, ValueError, "vocabulary has 0 tokens"),
        ({"head": lambda rows: rows.sum(-1)}, ValueError, "the head must make logits"),
    ],
)
def test_bad_input_gets_a_clear_error(change, error, message):
    hidden, head, labels = batch()
    given = {"logits": hidden, "labels": labels, "head": head, "chunk_size": 5} | change
    with pytest.raises(error, match=message):
        compute_loss(given.pop("logits"), given.pop("labels"), **given)
