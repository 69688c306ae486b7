import pytest
import torch
import torch.nn.functional as F
from torch import nn

from labsupport.precision import compute_loss
from labsupport.precision.dtypes import unit_roundoff
from labsupport.profiling.memory import measure_peak_memory

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
VOCABULARY = 50


def batch(dtype=F32):
    """Hidden states (2, 12, 8), a head to 50 tokens, and labels of which three are ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 12, 8, generator=generator).to(dtype).requires_grad_()
    head = nn.Linear(8, VOCABULARY, dtype=dtype)
    for parameter in head.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    labels = torch.randint(VOCABULARY, (2, 12), generator=generator)
    labels.view(-1)[1:4] = -100
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
    nothing = torch.full_like(labels, -100)
    loss = compute_loss(hidden, nothing, head=head, chunk_size=chunk_size)
    assert not any(each.any() for each in gradients(loss, hidden, head))


def test_the_loss_is_float32_and_so_exact_for_low_precision_logits():
    hidden, head, labels = batch(BF16)
    logits = head(hidden).detach()
    loss = compute_loss(logits, labels)
    right = F.cross_entropy(logits.double().flatten(0, 1), labels.flatten())
    low = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert loss.dtype == F32
    assert abs(loss - right) <= 16 * unit_roundoff(F32) * right
    assert abs(low - right) > 100 * abs(loss - right)


def test_all_logits_never_exist_when_they_are_made_in_chunks():
    hidden, labels = torch.randn(512, 16), torch.randint(1024, (512,))
    head = nn.Linear(16, 1024, bias=False)

    def peak(chunk_size):
        def train():
            loss = compute_loss(hidden, labels, head=head, chunk_size=chunk_size)
            torch.autograd.grad(loss, list(head.parameters()))

        return measure_peak_memory(train, device="cpu").peak_bytes

    logits = 512 * 1024 * 4
    assert peak(None) >= 2 * logits
    # 16 chunks: three tensors of a chunk's logits, and a few of the weight's size, which is 1/32.
    assert peak(32) <= logits * (4 / 16 + 4 / 32)


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        (torch.zeros(2, 11, dtype=torch.long), ValueError, "one label for each token"),
        (torch.full((2, 12), VOCABULARY), ValueError, "label 50 is out of range"),
        (torch.full((2, 12), -1), ValueError, "label -1 is negative"),
        (torch.zeros(2, 12), TypeError, "integers"),
    ],
)
def test_bad_labels_get_a_clear_error(labels, error, message):
    hidden, head, _ = batch()
    with pytest.raises(error, match=message):
        compute_loss(hidden, labels, head=head, chunk_size=5)
