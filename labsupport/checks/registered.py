"""Exercise 2-2: an attention function of your own inside Transformers' models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from labsupport.attention import compare_with_oracle, oracle_attention, standard_attention
from labsupport.checks.small_models import decode, small_models, use_attention
from labsupport.checks.verdict import CheckFailed, Mistake, call, judge, passed, results
from labsupport.profiling.memory import LargestTensor


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float | None
) -> Tensor:
    """Compute what the lab's function of this name does, by the textbook: in float64 too."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    exact = oracle_attention if q.dtype == torch.float64 else standard_attention
    return exact(q, k, v, causal=causal, softmax_scale=softmax_scale)[0].transpose(1, 2)


def lab_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return what Transformers expects of an attention function: (output, None)."""
    causal: Any = kwargs.get("is_causal")
    if causal is None:
        causal = module.is_causal
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return flash_attention(q, k, v, causal=causal, softmax_scale=scaling), None


_INPUTS = "(x.transpose(1, 2) for x in (query, key, value))"
_CALL = "flash_attention(q, k, v, causal=causal, softmax_scale=scaling)"
MISTAKES = (
    Mistake(
        ('kwargs.get("is_causal")', "None"),
        "The argument is_causal overrules module.is_causal unless it is None.",
    ),
    Mistake(
        ("softmax_scale=scaling", "softmax_scale=None"),
        "`scaling` is ignored: pass it on as softmax_scale.",
    ),
    Mistake(
        ("causal=causal", "causal=True"),
        "It is causal where the model is not, such as in BERT: ask module.is_causal.",
    ),
    Mistake(
        ("causal=causal", "causal=False"),
        "The future is visible: module.is_causal is True here, so pass causal=True.",
    ),
    Mistake(
        (
            _CALL,
            "torch.nn.functional.scaled_dot_product_attention(query, key, value, "
            "is_causal=causal, scale=scaling, enable_gqa=True).transpose(1, 2)",
        ),
        "The causal mask is aligned top-left. With a cache there are more keys than queries, and "
        "the queries are the last tokens: bottom-right, as flash_attention(causal=True) does it.",
    ),
    Mistake(
        (_INPUTS, "(query, key, value)", _CALL, _CALL + ".transpose(1, 2)"),
        "Each token attends across heads: Transformers gives (batch, heads, seqlen, head_dim), "
        "flash_attention takes (batch, seqlen, heads, head_dim). Transpose q, k and v.",
    ),
    Mistake(
        (_INPUTS, "(x.reshape(len(x), x.shape[2], x.shape[1], -1) for x in (query, key, value))"),
        "q, k and v were brought to the right shape by view or reshape, which mixes heads and "
        "positions: swap the dimensions with transpose(1, 2).",
    ),
    Mistake(("(q, k, v,", "(q, v, k,"), "key and value are swapped."),
    Mistake(
        (
            "    return flash",
            "    group = q.shape[2] // k.shape[2]\n"
            "    k, v = k.repeat(1, 1, group, 1), v.repeat(1, 1, group, 1)\n"
            "    return flash",
        ),
        "Key heads are shared in the wrong order: consecutive query heads share one. "
        "flash_attention takes grouped heads as they are; repeat nothing.",
    ),
)


def check_registered_values(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 2-2: called directly: layout, scaling, causality, grouped heads."""
    for n_q, n_k, kv_heads, of_module, options in (
        (6, 6, 4, False, {}),
        (6, 6, 4, True, {}),
        (6, 6, 4, True, {"is_causal": None}),
        (5, 9, 4, False, {"scaling": 0.7}),
        (6, 6, 2, True, {"scaling": 0.1}),
        (3, 8, 2, True, {}),
        (1, 8, 1, True, {}),
        (6, 6, 4, True, {"is_causal": False}),
        (6, 6, 4, False, {"is_causal": True}),
    ):
        inputs = _inputs(n_q, n_k, kv_heads, seed)
        module = _module(of_module)
        given = (module, *inputs, None)
        out = _output(call(student, *given, **options), given, options)
        q, k, v = (x.double() for x in inputs)
        exact = lab_attention(module, q, k, v, None, **options)[0]
        textbook = lab_attention(*given, **options)[0]
        said = ", ".join(f"{k}={v}" for k, v in options.items())
        judge(
            f"(seqlen_q {n_q}, seqlen_k {n_k}, heads 4, kv_heads {kv_heads}, "
            f"module.is_causal {of_module}{', ' * bool(said)}{said}) out",
            out,
            exact,
            allowed=compare_with_oracle(textbook, textbook, exact).allowed,
            mistakes=results(
                lab_attention,
                MISTAKES,
                lambda f, given=given, options=options: f(*given, **options)[0],
            ),
            dtype=inputs[0].dtype,
        )
    passed("layout, scaling, causality and grouped heads are right", seed)


def check_registered_models(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 2-2: registered with Transformers, in a GPT-2, a Llama and a BERT of random weights.

    Raises:
        CheckFailed: a model's logits are not those of its eager attention; names the mistake.
    """

    def checked(*given: Any, **options: Any) -> Any:
        return _output(call(student, *given, **options), given, options), None

    for name, model in small_models(seed).items():
        for use, run in (("one pass", _logits), ("in pieces, with a cache", decode)):
            if name == "BERT" and run is decode:
                continue
            expected = run(model, "eager")
            judge(
                f"({name}, {use}) what the model returns",
                run(model, checked),
                expected,
                allowed=1e-5,
                mistakes=results(
                    lab_attention, MISTAKES, lambda f, run=run, model=model: run(model, f)
                ),
            )
    passed("GPT-2, Llama and BERT return the same as with eager attention, cache included", seed)


def check_registered_memory(student: Callable[..., Any]) -> None:
    """Exercise 2-2: FlashAttention runs, not the textbook, and shared keys are not repeated.

    Raises:
        CheckFailed: naming the shape of the largest tensor and the operator that made it; or the
            output where nothing is masked is wrong: a stub that computes nothing cannot pass.
    """
    for n_q, kv_heads, is_causal in ((512, 4, True), (512, 4, False), (4, 1, False)):
        q, k, v = _inputs(n_q, 512, kv_heads, seed=0)
        given = (_module(is_causal), q, k, v, None)
        with LargestTensor() as largest:
            result = call(student, *given)
        if largest.numel <= max(q.numel(), k.numel()):
            out = _output(result, given, {})
            if n_q == 512 and not is_causal:
                judge(
                    "(no mask; memory counts where the result is right) out",
                    out,
                    lab_attention(*given)[0],
                    allowed=1e-3,
                )
            continue
        what = (
            f"a tensor of shape {largest.shape} was created (by {largest.op}) for q "
            f"{tuple(q.shape)} and k {tuple(k.shape)}: "
        )
        if kv_heads < q.shape[1] and largest.numel == k.numel() * q.shape[1]:
            raise CheckFailed(
                f"{what}k or v was repeated to {q.shape[1]} heads. flash_attention takes grouped "
                "heads as they are."
            )
        raise CheckFailed(
            f"{what}that is a matrix of scores, or a mask. This is textbook attention; call "
            "flash_attention."
        )
    passed("no matrix of scores, and no repeated keys")


def check_registered_refusals(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 2-2: what it cannot do, a mask or dropout, is refused and not left out.

    Raises:
        CheckFailed: it returned a result, or stumbled instead of refusing.
    """
    q, k, v = _inputs(6, 6, 2, seed)
    module = _module(is_causal=True)
    given = (module, q, k, v, None)
    plain = _output(call(student, *given, dropout=0.0), given, {})
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    mask[1, :, :, :2] = False  # the second text begins with two tokens of padding
    refused, out = _try_refusal(student, "a mask", module, q, k, v, mask)
    if not refused:
        ignored = isinstance(out, Tensor) and torch.equal(out, plain)
        effect = (
            "Your function ignores it: every token would look at the padding, and the model's "
            "answer would be wrong without a word."
            if ignored
            else "flash_attention has no such argument: did another function compute this?"
        )
        raise CheckFailed(
            f"attention_mask holds padding, and a result came back. {effect} "
            "Raise a ValueError when attention_mask is not None."
        )
    refused, _ = _try_refusal(student, "dropout", *given, dropout=0.1)
    if not refused:
        raise CheckFailed(
            "dropout is 0.1, and a result came back without it: flash_attention here has no "
            "dropout. Raise a ValueError when dropout is not 0."
        )
    passed("a mask and dropout are refused, not ignored", seed)


def _try_refusal(
    student: Callable[..., Any], what: str, *args: Any, **options: Any
) -> tuple[bool, Any]:
    """Return whether a call was refused, and if not, its result."""
    try:
        result = student(*args, **options)
    except (ValueError, NotImplementedError):
        return True, None
    except Exception as error:
        raise CheckFailed(
            f"with {what} your function fails by accident ({type(error).__name__}: {error}): raise "
            "a ValueError that says what it cannot do."
        ) from error
    return False, result[0] if isinstance(result, tuple) and result else result


def _output(result: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """Return the output out of (out, None); name anything that has another form."""
    if isinstance(result, Tensor):
        raise CheckFailed(
            "you return one tensor; Transformers expects two values: return out, None. (The second "
            "would be the weights, which FlashAttention never stores.)"
        )
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Tensor):
        raise CheckFailed("return two values: out, None.")
    if result[1] is not None:
        raise CheckFailed(
            "the second value is for the attention weights, and FlashAttention stores none: return "
            "out, None."
        )
    query, out = given[1], result[0]
    batch, heads, n_q, d = query.shape
    if out.shape == (batch, n_q, heads, d):
        return out
    if out.shape == query.shape:
        numbers = lab_attention(*given, **options)[0].transpose(1, 2)
        raise CheckFailed(
            f"out has shape {tuple(out.shape)}, Transformers' layout. "
            + (
                "Its numbers are right: do not transpose it back, the model goes on with "
                "(batch, seqlen_q, heads, head_dim)."
                if torch.allclose(out, numbers, atol=1e-4)
                else "flash_attention takes and returns (batch, seqlen, heads, head_dim): "
                "transpose q, k and v before."
            )
        )
    raise CheckFailed(
        f"out has shape {tuple(out.shape)}, but (batch, seqlen_q, heads, head_dim) = "
        f"{(batch, n_q, heads, d)} was expected."
    )


def _logits(model: Any, attention: Callable[..., Any] | str) -> Tensor:
    """Return the logits of a model for one batch without padding, in one pass."""
    ids = torch.arange(14).view(2, 7) * 5 % 31
    with use_attention(model, attention), torch.no_grad():
        return model(ids)[0]


def _inputs(n_q: int, n_k: int, kv_heads: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query (2, 4, n_q, 16), key and value (2, kv_heads, n_k, 16), as a model gives them."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(2, n, h * 16, generator=generator).view(2, n, h, 16).transpose(1, 2)
        for n, h in ((n_q, 4), (n_k, kv_heads), (n_k, kv_heads))
    )
    return q, k, v


def _module(is_causal: bool) -> nn.Module:
    """Return a stand-in for the model's attention layer."""
    module: Any = nn.Module()
    module.is_causal, module.layer_idx = is_causal, 0
    return module.eval()
