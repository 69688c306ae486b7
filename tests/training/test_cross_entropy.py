import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from labsupport.attention.accuracy import GRADIENT_FACTOR, OUTPUT_FACTOR, max_error
from labsupport.precision import compute_loss
from labsupport.profiling.memory import largest_tensor, measure_peak_memory
from labsupport.training.saving.cross_entropy import chunked_cross_entropy, default_chunk

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
TOKENS, WIDTH, VOCABULARY = 24, 8, 50


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


@pytest.mark.parametrize("chunk", [None, 1, 5, 8, 24, 100])
@pytest.mark.parametrize("has_bias", [True, False])
def test_chunks_of_any_size_give_the_loss_and_gradients_of_cross_entropy(chunk, has_bias):
    (hidden, weight, bias), labels = batch(F64, F64)
    inputs = [hidden, weight, bias] if has_bias else [hidden, weight]

    def plain(hidden, weight, *bias_and_labels):
        return unchunked(hidden, weight, bias if has_bias else None, labels)

    def parts(hidden, weight, *bias_and_labels):
        return chunked(hidden, weight, bias if has_bias else None, labels, chunk)

    got, right = (loss_and_gradients(loss, inputs, labels) for loss in (parts, plain))
    torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-14)


def test_the_gradients_are_those_of_finite_differences():
    inputs, labels = batch(F64, F64, tokens=6, vocabulary=7)
    assert torch.autograd.gradcheck(lambda *given: chunked(*given, labels, 2) ** 2, inputs)


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
    tokens = 4096
    hidden = torch.ones(tokens, 1)
    weight = torch.zeros(2, 1, requires_grad=True)
    labels = torch.zeros(tokens, dtype=torch.long)
    with torch.autocast("cpu", dtype):
        loss = chunked_cross_entropy(hidden, weight, labels, chunk=1)
    loss.backward()
    assert weight.grad.tolist() == [[-0.5], [0.5]]


def test_float16_gradients_do_not_underflow_before_the_loss_scale_arrives():
    """4,096 tokens, hidden states in float16: without a scale most of the gradient would be lost.

    The scale is 2^17, which float16 cannot hold itself.
    """
    inputs, labels = batch(F16, F32, tokens=4096, width=16, vocabulary=64, scale=1e-3)
    with torch.autocast("cpu", F16):
        scaled, plain = (
            loss_and_gradients(loss, inputs, labels, 2.0**17)
            for loss in (lambda *given: chunked(*given, chunk=512), unchunked)
        )
        unscaled = loss_and_gradients(lambda *given: chunked(*given, chunk=512), inputs, labels)
    exact = oracle(inputs, labels)
    assert max_error(unscaled[1], exact[1]) > 0.01 * exact[1].abs().max()
    for number in (1, 2, 3):
        assert max_error(scaled[number], exact[number]) <= 2e-3 * exact[number].abs().max()
    assert_within_the_rule(scaled[2:], plain[2:], exact[2:])


def test_float16_sums_of_many_tokens_do_not_overflow():
    """Each of 4,096 tokens adds 0.5 * 40 to the same weight: 81,920 is more than float16 holds."""
    hidden = torch.full((4096, 1), 40.0)
    weight = torch.zeros(2, 1, requires_grad=True)
    with torch.autocast("cpu", F16):
        loss = chunked_cross_entropy(hidden, weight, torch.zeros(4096, dtype=torch.long))
    loss.backward()
    assert weight.grad.tolist() == [[-20.0], [20.0]]


def test_a_second_backward_pass_over_a_retained_graph_gives_the_same():
    inputs, labels = batch()
    loss = chunked(*inputs, labels)
    first = torch.autograd.grad(3 * loss, inputs, retain_graph=True)
    for gradient in first:
        gradient.mul_(7)  # what was handed out belongs to the caller
    second = torch.autograd.grad(loss, inputs)
    torch.testing.assert_close(list(second), loss_and_gradients(unchunked, inputs, labels)[1:])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, inputs)


def test_the_backward_pass_allocates_nothing_unless_the_graph_is_retained():
    inputs, labels = batch()

    def extra(retain):
        loss = chunked(*inputs, labels)

        def backward():
            return torch.autograd.grad(loss, inputs, retain_graph=retain)

        return measure_peak_memory(backward, device="cpu").peak_bytes

    assert extra(False) <= 64  # a few scalars
    assert extra(True) >= sum(tensor.nbytes for tensor in inputs)


def test_a_second_derivative_is_refused():
    inputs, labels = batch()
    with pytest.raises(RuntimeError, match=r"cannot be differentiated twice.*compute_loss can"):
        torch.autograd.grad(chunked(*inputs, labels), inputs, create_graph=True)


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
def test_what_needs_no_gradient_gets_none_and_costs_none(frozen):
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


def test_if_all_is_ignored_the_loss_and_its_gradients_are_zero():
    inputs, labels = batch()
    for result in loss_and_gradients(chunked, inputs, torch.full_like(labels, -100)):
        assert (result == 0).all()


def test_no_tokens_at_all_make_a_loss_of_zero():
    inputs, _ = batch()
    none = [inputs[0][:, :0], *inputs[1:]]
    for result in loss_and_gradients(chunked, none, torch.zeros(2, 0, dtype=torch.long)):
        assert (result == 0).all()


def test_another_ignore_index_may_be_a_token_and_small_integers_are_labels():
    (hidden, weight, _), labels = batch()
    labels = labels.clamp(min=0).to(torch.int8)
    loss = chunked_cross_entropy(hidden, weight, labels, chunk=5, ignore_index=7)
    logits = F.linear(hidden, weight).flatten(0, 1)
    torch.testing.assert_close(
        loss, F.cross_entropy(logits, labels.flatten().long(), ignore_index=7)
    )


def test_large_logits_do_not_overflow():
    inputs, labels = batch(F64, F64, scale=1e4)
    got, right = (loss_and_gradients(loss, inputs, labels) for loss in (chunked, unchunked))
    torch.testing.assert_close(got, right)


def test_sliced_hidden_states_do_as_well():
    (hidden, weight, bias), labels = batch()
    got, right = (
        loss_and_gradients(
            lambda h, w, b, y, loss=loss: loss(h[:, :-1], w, b, y[:, 1:]),
            [hidden, weight, bias],
            labels,
        )
        for loss in (chunked, unchunked)
    )
    torch.testing.assert_close(got, right)


def test_it_works_inside_a_checkpointed_block():
    inputs, labels = batch()
    got = loss_and_gradients(
        lambda *given: checkpoint(chunked, *given, use_reentrant=False), inputs, labels
    )
    torch.testing.assert_close(got, loss_and_gradients(chunked, inputs, labels))


def test_it_works_in_a_compiled_function():
    inputs, labels = batch()

    @torch.compile(backend="aot_eager")
    def loss_of(hidden, weight, bias, labels):
        return 2 * chunked_cross_entropy(hidden.tanh(), weight, labels, bias=bias, chunk=5)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own compiler
        got = loss_and_gradients(loss_of, inputs, labels)
    right = loss_and_gradients(lambda h, *rest: 2 * unchunked(h.tanh(), *rest), inputs, labels)
    torch.testing.assert_close(got, right)


def peaks(autocast=None, tokens=2048, vocabulary=8192, width=32, chunk=128):
    """Extra bytes of a training step's loss: unchunked, recomputed chunks, and these."""
    (hidden, weight, _), labels = batch(tokens=tokens, width=width, vocabulary=vocabulary)

    def step(loss_of):
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            loss = loss_of()
        loss.backward()
        hidden.grad = weight.grad = None

    ways = (
        lambda: unchunked(hidden, weight, None, labels),
        lambda: compute_loss(
            hidden, labels, head=lambda rows: F.linear(rows, weight), chunk_size=chunk
        ),
        lambda: chunked_cross_entropy(hidden, weight, labels, chunk=chunk),
    )
    kept = hidden.nbytes + weight.nbytes
    chunk_bytes = 4 * chunk * vocabulary
    return (
        [measure_peak_memory(lambda w=w: step(w), device="cpu").peak_bytes for w in ways],
        chunk_bytes,
        kept,
    )


def test_one_chunk_of_logits_exists_at_a_time():
    (whole, recomputed, ours), chunk_bytes, kept = peaks()
    assert ours < whole / 8
    assert ours < recomputed
    # The gradients, one chunk in float32, and what counts tokens, not tokens times something.
    assert ours <= kept + 1.1 * chunk_bytes


def test_under_autocast_a_chunk_exists_in_float32_and_once_more_in_16_bits():
    (whole, recomputed, ours), chunk_bytes, kept = peaks(BF16)
    assert ours < whole / 8
    assert ours < recomputed
    assert ours <= 1.5 * kept + 1.6 * chunk_bytes


def test_the_default_chunk_is_a_quarter_of_a_gibibyte_whatever_the_length():
    assert (default_chunk(50_257), default_chunk(128_256), default_chunk(10**9)) == (1280, 512, 64)
    tokens = 2 * default_chunk(300_000)
    inputs, labels = batch(tokens=tokens, width=1, vocabulary=300_000)
    largest = largest_tensor(lambda: chunked(*inputs, labels, chunk=None))
    assert largest.shape == (default_chunk(300_000), 300_000)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"labels": torch.zeros(2, 11, dtype=torch.long)}, ValueError, "one label for each token"),
        ({"labels": torch.full((2, 12), VOCABULARY)}, ValueError, "label 50 is out of range"),
        ({"labels": torch.full((2, 12), -1)}, ValueError, "label -1 is out of range.*-100"),
        ({"labels": torch.zeros(2, 12)}, TypeError, "integers"),
        ({"labels": torch.zeros(2, 12, dtype=torch.bool)}, TypeError, "integers"),
        ({"hidden": torch.zeros(2, 12, 8, dtype=torch.long)}, TypeError, "hidden must be float"),
        ({"hidden": torch.zeros(2, 12, 9)}, ValueError, "width of the weight, 8"),
        ({"hidden": torch.tensor(0.0)}, ValueError, "width of the weight, 8"),
        ({"weight": torch.zeros(0, 8)}, ValueError, "V of at least 1"),
        ({"weight": torch.zeros(8)}, ValueError, r"\(V, width\)"),
        ({"bias": torch.zeros(49)}, ValueError, r"bias \(49,\) must be \(50,\)"),
        ({"chunk": 0}, ValueError, "at least 1"),
        ({"chunk": 2.5}, TypeError, "chunk counts tokens.*2.5"),
    ],
)
def test_bad_input_gets_a_clear_error(change, error, message):
    (hidden, weight, bias), labels = batch()
    given = {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias} | change
    with pytest.raises(error, match=message):
        chunked_cross_entropy(
            given.pop("hidden"), given.pop("weight"), given.pop("labels"), **given
        )
