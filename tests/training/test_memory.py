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
from labsupport.precision import compute_loss
from labsupport.profiling.memory import largest_tensor, measure_peak_memory
from labsupport.training.memory import (
    chunked_cross_entropy,
    default_chunk,
    in_chunks,
    memory_limit,
)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
TOKENS, WIDTH, VOCABULARY = 24, 8, 50


# --- the MLP in chunks ----------------------------------------------------------------------------


def mlp(width=16, wide=64, dtype=F64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width)).to(dtype)


@pytest.mark.parametrize(
    ("size", "shape", "dim"),
    [(None, (2, 13, 16), -2), (1, (13, 16), 0), (5, (2, 13, 16), -2), (12, (13, 3, 16), 0),
     (13, (2, 13, 16), 1)],
)  # fmt: skip
def test_chunks_of_any_size_give_the_functions_result_and_gradients(size, shape, dim):
    fn, x = mlp(), torch.randn(shape, dtype=F64, requires_grad=True)
    inputs, weights = [x, *fn.parameters()], torch.randn(shape, dtype=F64)
    right, got = fn(x), in_chunks(fn, x, size, dim=dim)
    torch.testing.assert_close(got, right)
    torch.testing.assert_close(
        torch.autograd.grad((got * weights).sum(), inputs),
        torch.autograd.grad((right * weights).sum(), inputs),
    )


def test_the_function_sees_each_token_once_and_dropout_is_drawn_once():
    seen = []
    with torch.no_grad():
        in_chunks(lambda part: seen.append(part.shape[1]) or part, torch.zeros(2, 13, 4), 5)
    assert seen == [5, 5, 3]
    x = torch.randn(1, 40, 16, requires_grad=True)
    out = in_chunks(nn.Sequential(nn.Linear(16, 3), nn.Dropout(0.5)), x, 8)
    (gradient,) = torch.autograd.grad(out[..., 0].sum(), x)
    kept = out[..., 0] != 0
    assert 0 < kept.sum() < 40
    assert torch.equal((gradient != 0).any(-1), kept)


def test_wide_tensors_exist_for_one_chunk_at_a_time_in_the_backward_pass_too():
    tokens, width, wide = 2048, 8, 512
    fn, x = mlp(width, wide, F32), torch.randn(1, tokens, width, requires_grad=True)

    def train(size):
        in_chunks(fn, x, size).sum().backward()
        x.grad = None
        fn.zero_grad()

    whole, parts = (
        measure_peak_memory(lambda s=s: train(s), device="cpu").peak_bytes for s in (None, 64)
    )
    wide_bytes = 4 * tokens * wide
    assert whole >= 2 * wide_bytes
    # 32 chunks: some wide tensors of one of them, and some of x's size, which is 1/64.
    assert parts <= wide_bytes * (4 / 32 + 8 / 64)


# --- the loss in chunks ---------------------------------------------------------------------------


def batch(dtype=F32, weight_dtype=F32, tokens=TOKENS, width=WIDTH, vocabulary=VOCABULARY, scale=1):
    """Hidden states, a classifier's weight and bias, and labels, every seventh of them ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, tokens // 2, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator) * scale
    bias = torch.randn(vocabulary, generator=generator)
    labels = torch.randint(vocabulary, (2, tokens // 2), generator=generator)
    labels.view(-1)[1::7] = -100
    parameters = [hidden.to(dtype), weight.to(weight_dtype), bias.to(weight_dtype)]
    return [tensor.requires_grad_() for tensor in parameters], labels


def unchunked(hidden, weight, bias, labels):
    return F.cross_entropy(F.linear(hidden, weight, bias).flatten(0, 1), labels.flatten())


def chunked(hidden, weight, bias, labels, chunk=5):
    return chunked_cross_entropy(hidden, weight, labels, bias=bias, chunk=chunk)


def loss_and_gradients(loss_of, inputs, labels, loss_scale=1.0):
    loss = loss_of(*inputs, labels)
    gradients = torch.autograd.grad(loss * loss_scale, inputs)
    if loss_scale != 1:  # taken out as an optimizer does it, not in float16
        gradients = [gradient.double() / loss_scale for gradient in gradients]
    return [loss.detach(), *gradients]


def oracle(inputs, labels):
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    return loss_and_gradients(unchunked, exact, labels)


def assert_within_the_rule(results, same_dtype, exact):
    """At most twice (gradients: three times) the unchunked computation's error, plus 1e-5."""
    for number, (result, plain, truth) in enumerate(zip(results, same_dtype, exact, strict=True)):
        factor = GRADIENT_FACTOR if number else OUTPUT_FACTOR
        allowed = factor * max_error(plain, truth) + 1e-5 * truth.abs().max().item()
        assert max_error(result, truth) <= allowed


@pytest.mark.parametrize("chunk", [None, 1, 5, 24, 100])
def test_chunks_of_any_size_give_the_loss_and_gradients_of_cross_entropy(chunk):
    inputs, labels = batch(F64, F64)
    got = loss_and_gradients(lambda *given: chunked(*given, chunk), inputs, labels)
    right = loss_and_gradients(unchunked, inputs, labels)
    torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-14)
    large, labels = batch(F64, F64, scale=1e4)  # must not overflow
    got = loss_and_gradients(lambda *given: chunked(*given, chunk), large, labels)
    torch.testing.assert_close(got, loss_and_gradients(unchunked, large, labels))


@pytest.mark.parametrize(
    ("hidden", "weight", "autocast"),
    [
        *((F32, F32, None), (BF16, BF16, None)),
        *((F32, F32, BF16), (BF16, F32, BF16), (F32, F32, F16), (F16, F32, F16)),
    ],
)
def test_errors_stay_within_the_rule_in_each_mixture_of_dtypes(hidden, weight, autocast):
    inputs, labels = batch(hidden, weight, tokens=512, width=32, vocabulary=300, scale=0.3)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        got, plain = (
            loss_and_gradients(loss, inputs, labels)
            for loss in (lambda *given: chunked(*given, chunk=64), unchunked)
        )
    assert [result.dtype for result in got] == [F32, hidden, weight, weight]
    assert_within_the_rule(got, plain, oracle(inputs, labels))


def test_bfloat16_hidden_states_meet_a_float32_weight_in_float32_without_autocast():
    inputs, labels = batch(BF16, F32)
    wide = [tensor.detach().float().requires_grad_() for tensor in inputs]
    got, right = (loss_and_gradients(chunked, given, labels) for given in (inputs, wide))
    assert torch.equal(got[0], right[0])
    assert torch.equal(got[2], right[2])
    # The kept gradient is in hidden's dtype: it is rounded once, and again when it is scaled.
    torch.testing.assert_close(got[1].float(), right[1], rtol=2**-7, atol=1e-8)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_the_weights_gradient_is_added_up_in_float32(dtype):
    """Of 4,096 equal tokens, one at a time: a 16-bit sum stops growing at 256, or 2,048."""
    hidden = torch.ones(4096, 1)
    weight = torch.zeros(2, 1, requires_grad=True)
    with torch.autocast("cpu", dtype):
        chunked_cross_entropy(hidden, weight, torch.zeros(4096).long(), chunk=1).backward()
    assert weight.grad.tolist() == [[-0.5], [0.5]]


def test_float16_gradients_do_not_underflow_before_the_loss_scale_arrives_nor_sums_overflow():
    """4,096 tokens, hidden states in float16: without a scale most of the gradient would be lost.

    The scale is 2^17, which float16 cannot hold itself.
    """
    inputs, labels = batch(F16, F32, tokens=4096, width=16, vocabulary=64, scale=1e-3)
    with torch.autocast("cpu", F16):
        scaled = loss_and_gradients(lambda *g: chunked(*g, chunk=512), inputs, labels, 2.0**17)
        unscaled = loss_and_gradients(lambda *given: chunked(*given, chunk=512), inputs, labels)
    exact = oracle(inputs, labels)
    assert max_error(unscaled[1], exact[1]) > 0.01 * exact[1].abs().max()
    for number in (1, 2, 3):
        assert max_error(scaled[number], exact[number]) <= 2e-3 * exact[number].abs().max()
    # Each of 4,096 tokens adds 0.5 * 40 to the same weight: 81,920 is more than float16 holds.
    hidden, weight = torch.full((4096, 1), 40.0), torch.zeros(2, 1, requires_grad=True)
    with torch.autocast("cpu", F16):
        chunked_cross_entropy(hidden, weight, torch.zeros(4096).long()).backward()
    assert weight.grad.tolist() == [[-20.0], [20.0]]


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
    with pytest.raises(RuntimeError, match=r"cannot be differentiated twice.*compute_loss can"):
        torch.autograd.grad(chunked(*inputs, labels), inputs, create_graph=True)


def test_the_backward_pass_allocates_nothing_unless_the_graph_is_retained():
    inputs, labels = batch()

    def extra(retain):
        loss = chunked(*inputs, labels)

        def backward():
            return torch.autograd.grad(loss, inputs, retain_graph=retain)

        return measure_peak_memory(backward, device="cpu").peak_bytes

    assert extra(False) <= 64  # a few scalars
    assert extra(True) >= sum(tensor.nbytes for tensor in inputs)


def test_a_tied_weight_gets_both_gradients():
    def gradient(loss_of):
        torch.manual_seed(0)
        embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=F64)
        tokens = torch.randint(VOCABULARY, (2, 13))
        hidden = embedding(tokens[:, :-1]).tanh()
        loss_of(hidden, embedding.weight, None, tokens[:, 1:]).backward()
        return embedding.weight.grad

    torch.testing.assert_close(gradient(chunked), gradient(unchunked), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_needs_no_gradient_gets_none(frozen):
    inputs, labels = batch()
    inputs[frozen].requires_grad_(False)
    chunked(*inputs, labels).backward()
    right, _ = batch()
    unchunked(*right, labels).backward()
    assert inputs[frozen].grad is None
    for number in {0, 1, 2} - {frozen}:
        torch.testing.assert_close(inputs[number].grad, right[number].grad)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_kept_and_no_gradient_is_computed(mode):
    inputs, labels = batch(tokens=64, vocabulary=2000, width=64)
    with mode():
        loss = chunked(*inputs, labels, chunk=4)
        use = measure_peak_memory(lambda: chunked(*inputs, labels, chunk=1), device="cpu")
    torch.testing.assert_close(loss, unchunked(*inputs, labels).detach())
    assert not loss.requires_grad
    assert use.kept_bytes <= 8
    assert use.peak_bytes < inputs[1].nbytes / 4


def test_without_tokens_or_labels_the_loss_and_its_gradients_are_zero():
    inputs, labels = batch()
    nothing = [inputs[0][:, :0], *inputs[1:]], torch.zeros(2, 0, dtype=torch.long)
    for given in ((inputs, torch.full_like(labels, -100)), nothing):
        for result in loss_and_gradients(chunked, *given):
            assert (result == 0).all()


def test_another_ignore_index_may_be_a_token_and_small_integers_are_labels():
    (hidden, weight, _), labels = batch()
    labels = labels.clamp(min=0).to(torch.int8)
    loss = chunked_cross_entropy(hidden, weight, labels, chunk=5, ignore_index=7)
    logits = F.linear(hidden, weight).flatten(0, 1)
    right = F.cross_entropy(logits, labels.flatten().long(), ignore_index=7)
    torch.testing.assert_close(loss, right)


def test_it_works_on_slices_in_a_checkpointed_block_and_in_a_compiled_function():
    inputs, labels = batch()
    ways = {
        "sliced": lambda h, w, b, y: chunked(h[:, :-1], w, b, y[:, 1:]),
        "checkpointed": lambda *given: checkpoint(chunked, *given, use_reentrant=False),
        "compiled": torch.compile(lambda *given: 2 * chunked(*given), backend="aot_eager"),
    }
    right = {
        "sliced": lambda h, w, b, y: unchunked(h[:, :-1], w, b, y[:, 1:]),
        "checkpointed": unchunked,
        "compiled": lambda *given: 2 * unchunked(*given),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own compiler
        for name, way in ways.items():
            got = loss_and_gradients(way, inputs, labels)
            torch.testing.assert_close(got, loss_and_gradients(right[name], inputs, labels))


@pytest.mark.parametrize(("autocast", "factor"), [(None, 1.0), (BF16, 1.5)])
def test_one_chunk_of_logits_exists_at_a_time(autocast, factor):
    chunk, vocabulary = 128, 8192
    (hidden, weight, _), labels = batch(tokens=2048, width=32, vocabulary=vocabulary)

    def peak(loss_of):
        def step():
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                loss = loss_of()
            loss.backward()
            hidden.grad = weight.grad = None

        return measure_peak_memory(step, device="cpu").peak_bytes

    def head(rows):
        return F.linear(rows, weight)

    whole = peak(lambda: unchunked(hidden, weight, None, labels))
    recomputed = peak(lambda: compute_loss(hidden, labels, head=head, chunk_size=chunk))
    ours = peak(lambda: chunked_cross_entropy(hidden, weight, labels, chunk=chunk))
    assert ours < whole / 8
    assert ours < recomputed
    # The gradients, one chunk (under autocast once more in 16 bits), and what counts tokens.
    chunk_bytes = 4 * chunk * vocabulary
    assert ours <= factor * (hidden.nbytes + weight.nbytes) + (factor + 0.1) * chunk_bytes


def test_the_default_chunk_is_a_quarter_of_a_gibibyte_whatever_the_length():
    assert (default_chunk(50_257), default_chunk(128_256), default_chunk(10**9)) == (1280, 512, 64)
    inputs, labels = batch(tokens=2 * default_chunk(300_000), width=1, vocabulary=300_000)
    largest = largest_tensor(lambda: chunked(*inputs, labels, chunk=None))
    assert largest.shape == (default_chunk(300_000), 300_000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(2, 11, dtype=torch.long)}, "one label for each token"),
        ({"labels": torch.full((2, 12), VOCABULARY)}, "label 50 is out of range"),
        ({"labels": torch.full((2, 12), -1)}, "label -1 is out of range.*-100"),
        ({"hidden": torch.zeros(2, 12, 9)}, r"hidden \(2, 12, 9\)"),
        ({"weight": torch.zeros(8)}, r"weight \(8,\)"),
        ({"bias": torch.zeros(49)}, r"bias \(49,\)"),
        ({"chunk": 0}, "1 or more tokens"),
    ],
)
def test_bad_input_gets_a_clear_error(change, message):
    (hidden, weight, bias), labels = batch()
    given = {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias} | change
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(**given)


# --- the limit ------------------------------------------------------------------------------------

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits on Linux only")
BEGIN = """
import resource, torch
from labsupport.training.memory import private_bytes, memory_limit
MIB = 2**20
torch.set_num_threads(2)
"""


def run(code: str) -> str:
    """Return what a fresh process prints. A process that is killed or hangs is a failure."""
    result = subprocess.run(
        [sys.executable, "-c", BEGIN + code],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@on_linux
def test_the_limit_is_exact_explained_once_nested_and_lifted_afterwards():
    out = run("""
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
    with memory_limit("4GiB", "cpu"), memory_limit("3GiB", "cpu"):
        print(soft() == 3 * 2**30)
        torch.zeros(2**30)
except torch.OutOfMemoryError as error:
    print(error)
try:
    with memory_limit("4GiB", "cpu"):
        with memory_limit("6GiB", "cpu"):
            print(soft() == 2**32)
        raise KeyError("something else")
except KeyError:
    print(soft() == before)
""")
    left, *held, nested, after = out.splitlines()
    assert 0 <= int(left) <= 10 * 2**20
    assert [held[0], nested, after] == ["True"] * 3
    (message,) = held[1:]
    assert "another 4.0 GiB does not fit into the limit of 3.0 GiB for the whole process" in message
    places = [message.index(w) for w in ("loss_chunk", "checkpoint)", "mlp_chunk", "shorter")]
    assert places == sorted(places)
    assert message.count("loss_chunk") == 1


@on_linux
def test_whatever_asks_for_too_much_it_is_an_exception_and_the_process_lives_on():
    """Small tensors (C++ itself has nothing left), NumPy, oneDNN, attention with its gradient."""
    out = run("""
import numpy as np, torch.nn.functional as F
q = torch.randn(1, 4, 1024, 64, requires_grad=True)
a, b = torch.randn(5000, 64).bfloat16(), torch.randn(64, 2000).bfloat16()
works = [
    lambda: torch.zeros(100),
    lambda: np.zeros(MIB),
    lambda: a @ b,
    lambda: (torch.zeros(5 * MIB), F.scaled_dot_product_attention(q, q, q).sum().backward()),
]
for work in works:
    kept = []
    try:
        with memory_limit(private_bytes() + 150 * MIB, "cpu"):
            while True:
                kept.append(work())
    except torch.OutOfMemoryError:
        kept.clear()
        print(float(torch.ones(100 * MIB).sum()) == 100 * MIB)
""")
    assert out.split() == ["True"] * 4


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
