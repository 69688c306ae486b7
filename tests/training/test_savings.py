"""The loss and the MLP in chunks, judged against whole computations; and the limit on memory."""

import os
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from labsupport.attention.accuracy import GRADIENT_FACTOR, OUTPUT_FACTOR, max_error
from labsupport.profiling.memory import measure_peak_memory
from labsupport.training.chunked_loss import chunked_cross_entropy, default_chunk
from labsupport.training.memory_limit import memory_limit
from labsupport.training.savings import in_chunks

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
TOKENS, WIDTH, VOCABULARY = 24, 8, 50


# --- the MLP in chunks ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "shape", "seen"),
    [(None, (2, 13, 16), [13]), (1, (3, 16), [1] * 3), (5, (2, 13, 16), [5, 5, 3]),
     (12, (13, 16), [12, 1]), (13, (2, 13, 16), [13])],
)  # fmt: skip
def test_chunks_of_any_size_give_the_functions_result_and_gradients(size, shape, seen):
    fn = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).to(F64)
    x, lengths = torch.randn(shape, dtype=F64, requires_grad=True), []
    inputs, weights = [x, *fn.parameters()], torch.randn(shape, dtype=F64)
    right, got = fn(x), in_chunks(fn, x, size)
    torch.testing.assert_close(got, right)
    torch.testing.assert_close(
        torch.autograd.grad((got * weights).sum(), inputs),
        torch.autograd.grad((right * weights).sum(), inputs),
    )
    with torch.no_grad():
        in_chunks(lambda part: lengths.append(part.shape[-2]) or part, x, size)
    assert lengths == seen


# --- the loss in chunks ---------------------------------------------------------------------------


def batch(dtype=F32, weight_dtype=F32, tokens=TOKENS, width=WIDTH, vocabulary=VOCABULARY, scale=1):
    """Hidden states, a classifier's weight, and labels, every seventh of them ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, tokens // 2, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator) * scale
    labels = torch.randint(vocabulary, (2, tokens // 2), generator=generator)
    labels.view(-1)[1::7] = -100
    return [hidden.to(dtype).requires_grad_(), weight.to(weight_dtype).requires_grad_()], labels


def unchunked(hidden, weight, labels):
    return F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten())


def chunked(hidden, weight, labels, chunk=5):
    return chunked_cross_entropy(hidden, weight, labels, chunk=chunk)


def loss_and_gradients(loss_of, inputs, labels, loss_scale=1.0):
    loss = loss_of(*inputs, labels)
    gradients = torch.autograd.grad(loss * loss_scale, inputs)
    if loss_scale != 1:  # taken out as an optimizer does it, not in float16
        gradients = [gradient.double() / loss_scale for gradient in gradients]
    return [loss.detach(), *gradients]


def oracle(inputs, labels):
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    return loss_and_gradients(unchunked, exact, labels)


def test_chunks_of_any_size_give_the_loss_and_gradients_of_cross_entropy():
    for chunk, scale in ((None, 1), (1, 1), (5, 1e4), (24, 1), (100, 1e4)):  # must not overflow
        inputs, labels = batch(F64, F64, scale=scale)
        got = loss_and_gradients(lambda *given, n=chunk: chunked(*given, n), inputs, labels)
        right = loss_and_gradients(unchunked, inputs, labels)
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)
        inputs[1].requires_grad_(False)  # what needs no gradient gets none
        chunked(*inputs, labels, chunk).backward()
        torch.testing.assert_close(inputs[0].grad, right[1])
        assert inputs[1].grad is None


@pytest.mark.parametrize(
    ("hidden", "weight", "autocast"),
    [
        *((F32, F32, None), (BF16, BF16, None)),
        *((BF16, F32, BF16), (F32, F32, F16), (F16, F32, F16)),
    ],
)
def test_errors_stay_within_the_rule_in_each_mixture_of_dtypes(hidden, weight, autocast):
    """At most twice (gradients: three times) the unchunked computation's error, plus 1e-5."""
    inputs, labels = batch(hidden, weight, tokens=256, width=32, vocabulary=300, scale=0.3)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        got = loss_and_gradients(lambda *given: chunked(*given, chunk=64), inputs, labels)
        plain = loss_and_gradients(unchunked, inputs, labels)
    assert [result.dtype for result in got] == [F32, hidden, weight]
    factors = (OUTPUT_FACTOR, GRADIENT_FACTOR, GRADIENT_FACTOR)
    for *results, truth, factor in zip(got, plain, oracle(inputs, labels), factors, strict=True):
        error, allowed = (max_error(result, truth) for result in results)
        assert error <= factor * allowed + 1e-5 * truth.abs().max().item()


@pytest.mark.parametrize(("dtype", "value", "chunk"), [(BF16, 1.0, 8), (F16, 40.0, None)])
def test_the_weights_gradient_is_added_up_in_float32(dtype, value, chunk):
    """4,096 equal tokens: a 16-bit sum of ones stops at 256, or 2,048; 81,920 is inf in float16."""
    hidden, weight = torch.full((4096, 1), value), torch.zeros(2, 1, requires_grad=True)
    with torch.autocast("cpu", dtype):
        chunked_cross_entropy(hidden, weight, torch.zeros(4096).long(), chunk=chunk).backward()
    assert weight.grad.tolist() == [[-value / 2], [value / 2]]


def test_float16_gradients_do_not_underflow_before_the_loss_scale_arrives():
    """4,096 tokens, hidden states in float16: without a scale most of the gradient would be lost.

    The scale is 2^17, which float16 cannot hold itself.
    """
    inputs, labels = batch(F16, F32, tokens=4096, width=16, vocabulary=64, scale=1e-3)
    with torch.autocast("cpu", F16):
        scaled, unscaled = (
            loss_and_gradients(lambda *g: chunked(*g, chunk=512), inputs, labels, scale)
            for scale in (2.0**17, 1.0)
        )
    exact = oracle(inputs, labels)
    assert max_error(unscaled[1], exact[1]) > 0.01 * exact[1].abs().max()
    for number in (1, 2):
        assert max_error(scaled[number], exact[number]) <= 2e-3 * exact[number].abs().max()


def test_a_second_backward_pass_needs_a_retained_graph_and_a_second_derivative_is_refused():
    inputs, labels = batch()
    loss = chunked(*inputs, labels)
    first = torch.autograd.grad(3 * loss, inputs, retain_graph=True)
    for gradient in first:
        gradient.mul_(7)  # what was handed out belongs to the caller
    second = torch.autograd.grad(loss, inputs)
    torch.testing.assert_close(list(second), loss_and_gradients(unchunked, inputs, labels)[1:])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, inputs)
    with pytest.raises(RuntimeError, match=r"cannot be differentiated twice.*compute_loss"):
        torch.autograd.grad(chunked(*inputs, labels), inputs, create_graph=True)


def test_without_gradients_nothing_is_kept_and_no_gradient_is_computed():
    inputs, labels = batch(tokens=64, vocabulary=2000, width=64)
    with torch.no_grad():
        loss = chunked(*inputs, labels, chunk=4)
        use = measure_peak_memory(lambda: chunked(*inputs, labels, chunk=1), device="cpu")
    torch.testing.assert_close(loss, unchunked(*inputs, labels).detach())
    assert not loss.requires_grad
    assert use.kept_bytes <= 8
    assert use.peak_bytes < inputs[1].nbytes / 4


def test_without_tokens_or_labels_all_is_zero_and_a_default_chunk_is_a_quarter_of_a_gibibyte():
    assert (default_chunk(50_257), default_chunk(128_256), default_chunk(10**9)) == (1280, 512, 64)
    inputs, labels = batch()
    nothing = [inputs[0][:, :0], inputs[1]], torch.zeros(2, 0, dtype=torch.long)
    for given in ((inputs, torch.full_like(labels, -100)), nothing):
        assert not any(result.any() for result in loss_and_gradients(chunked, *given))


def test_it_works_on_slices_tied_in_a_checkpointed_block_and_in_a_compiled_function():
    inputs, labels = batch()
    small = labels.clamp(min=0).to(torch.int8)  # integers of any size are labels

    def tied(loss_of):
        return lambda h, w, y: loss_of(w[y.clamp(min=0)].tanh() + h, w, y)

    ways = [
        (lambda h, w, y: chunked(h[:, :-1], w, y[:, 1:]),
         lambda h, w, y: unchunked(h[:, :-1], w, y[:, 1:])),
        (lambda h, w, y: chunked(h, w, small), lambda h, w, y: unchunked(h, w, small.long())),
        (tied(chunked), tied(unchunked)),
        (lambda *given: checkpoint(chunked, *given, use_reentrant=False), unchunked),
        (torch.compile(lambda *given: 2 * chunked(*given), backend="aot_eager"),
         lambda *given: 2 * unchunked(*given)),
    ]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own compiler
        for way, right in ways:
            got = loss_and_gradients(way, inputs, labels)
            torch.testing.assert_close(got, loss_and_gradients(right, inputs, labels))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(2, 11, dtype=torch.long)}, r"labels \(2, 11\)"),
        ({"labels": torch.full((2, 12), VOCABULARY)}, "label 50 is out of range"),
        ({"labels": torch.full((2, 12), -1)}, "label -1 is out of range.*-100"),
        ({"hidden": torch.zeros(2, 12, 9)}, r"hidden \(2, 12, 9\)"),
        ({"chunk": 0}, "1 or more tokens"),
    ],
)
def test_bad_input_gets_a_clear_error(change, message):
    (hidden, weight), labels = batch()
    given = {"hidden": hidden, "weight": weight, "labels": labels} | change
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(**given)


# --- the limit ------------------------------------------------------------------------------------

# Prints what is left of the limit; the state of nested limits and of one that was left by another
# error; the message; and a line for each thing that asks for too much: small tensors (C++ itself
# has nothing left), NumPy, oneDNN, attention with its gradient.
LIMITED = """
import numpy as np, resource, torch, torch.nn.functional as F
from labsupport.training.memory_limit import memory_limit, private_bytes
MIB = 2**20
torch.set_num_threads(2)
def soft(): return resource.getrlimit(resource.RLIMIT_DATA)[0]
before, tensors = soft(), []
limit = private_bytes() + 300 * MIB
try:
    with memory_limit(limit, "cpu"):
        while True:
            tensors.append(torch.zeros(2 * MIB))
            used = private_bytes()
except torch.OutOfMemoryError:
    print(limit - used)
tensors.clear()
try:
    with memory_limit("4GiB", "cpu"):
        with memory_limit("6GiB", "cpu"):
            print(soft() == 2**32)
        raise KeyError("something else")
except KeyError:
    print(soft() == before)
q = torch.randn(1, 4, 1024, 64, requires_grad=True)
a, b = torch.randn(5000, 64).bfloat16(), torch.randn(64, 2000).bfloat16()
for work in (
    lambda: torch.zeros(100),
    lambda: np.zeros(MIB),
    lambda: a @ b,
    lambda: (torch.zeros(5 * MIB), F.scaled_dot_product_attention(q, q, q).sum().backward()),
):
    kept = []
    try:
        with memory_limit(private_bytes() + 60 * MIB, "cpu"):
            while True:
                kept.append(work())
    except torch.OutOfMemoryError:
        kept.clear()
        print(float(torch.ones(10 * MIB).sum()) == 10 * MIB)
try:
    with memory_limit("4GiB", "cpu"), memory_limit("3GiB", "cpu"):
        print(soft() == 3 * 2**30)
        torch.zeros(2**30)
except torch.OutOfMemoryError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits on Linux only")
def test_a_limit_is_exact_nested_and_lifted_and_whatever_asks_for_more_gets_an_exception():
    """In a fresh process, since all that it has taken counts; killed or hanging is a failure."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr
    left, *flags, message = done.stdout.splitlines()
    assert 0 <= int(left) <= 10 * 2**20
    assert flags == ["True"] * 7
    assert "does not fit into the limit of 3.0 GiB for the whole process" in message
    assert message.count("loss_chunk") == 1


def test_a_limit_that_cannot_be_is_refused(monkeypatch):
    if sys.platform.startswith("linux"):
        with (
            pytest.raises(ValueError, match=r"takes .* already.*limit of 1.0 MiB"),
            memory_limit("1MiB", "cpu"),
        ):
            pass
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(RuntimeError, match="on Linux only"), memory_limit("1GiB", "cpu"):
        pass


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_allocator_keeps_the_limit():
    with (
        pytest.raises(torch.OutOfMemoryError, match=r"limit of 1\.0 GiB for PyTorch's allocator"),
        memory_limit("1GiB", "cuda"),
    ):
        torch.zeros(2**29, device="cuda")
    torch.zeros(2**29, device="cuda")
