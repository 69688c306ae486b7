"""Exercise 2-2: an attention function of your own inside Transformers' models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from labsupport.attention import oracle_attention, standard_attention
from labsupport.checks.errors import CheckFailed, kind
from labsupport.checks.verdict import (
    Student,
    call,
    draw,
    judge,
    judge_call,
    mistakes,
    passed,
    results,
)
from labsupport.profiling.memory import LargestTensor

NAME = "labsupport_check"


### BEGIN SOLUTION
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


MISTAKES = mistakes(r"""
The argument is_causal overrules module.is_causal unless it is None.
    kwargs.get("is_causal") -> None
scaling=None means 1 / sqrt(head_dim), not 1: flash_attention understands softmax_scale=None.
    softmax_scale=scaling -> softmax_scale=scaling or 1.0
`scaling` is ignored: pass it on as softmax_scale.
    softmax_scale=scaling -> softmax_scale=None
The scores are multiplied by sqrt(head_dim): pass `scaling` on, or None.
    softmax_scale=scaling -> softmax_scale=query.shape[-1] ** 0.5
The scores are scaled twice: flash_attention does it, by softmax_scale.
    (query, key, value)) -> (query, key, value))\n    q = q * (scaling or 1.0)
It is causal where the model is not, such as in BERT: ask module.is_causal.
    causal=causal -> causal=True
The future is visible: module.is_causal is True here, so pass causal=True.
    causal=causal -> causal=False
The causal mask is aligned top-left. With a cache there are more keys than queries, and the queries
are the last tokens: bottom-right, as flash_attention(causal=True) does it.
    flash_attention(q, k, v, causal=causal -> torch.nn.functional.scaled_dot_product_attention(query
    query, softmax_scale=scaling) -> query, key, value, is_causal=causal, scale=scaling)
    scale=scaling) -> scale=scaling, enable_gqa=True).transpose(1, 2)
Each token attends across heads: Transformers gives (batch, heads, seqlen, head_dim), but
flash_attention takes (batch, seqlen, heads, head_dim). Transpose q, k and v.
    (x.transpose(1, 2) for x in (query, key, value)) -> (query, key, value)
    softmax_scale=scaling) -> softmax_scale=scaling).transpose(1, 2)
view or reshape mixes heads and positions: swap the dimensions of q, k and v with transpose(1, 2).
    = (x.transpose(1, 2) -> = (x.reshape(len(x), x.shape[2], x.shape[1], -1)
key and value are swapped.
    (q, k, v, -> (q, v, k,
Key heads are shared in the wrong order: consecutive query heads share one. flash_attention takes
grouped heads as they are; repeat nothing.
    q, k, v = -> n = query.shape[1] // key.shape[1]\n    q, k, v =
    (query, key, value)) -> (query, key.repeat(1, n, 1, 1), value.repeat(1, n, 1, 1)))
""")
### END SOLUTION


def check_registered_values(student: Student, seed: int = 0) -> None:
    """Exercise 2-2: called directly: layout, scaling, causality, grouped heads."""
    cases: Any = (
        (6, 6, 4, False, {}),
        (6, 6, 4, True, {}),
        (6, 6, 4, True, {"is_causal": None}),
        (5, 9, 4, False, {"scaling": 0.7}),
        (6, 6, 2, True, {"scaling": 0.1}),
        (3, 8, 2, True, {}),
        (1, 8, 1, True, {}),
        (6, 6, 4, True, {"is_causal": False}),
        (6, 6, 4, False, {"is_causal": True}),
    )
    for n_q, n_k, kv_heads, of_module, options in cases:
        arguments = (_module(of_module), *_inputs(n_q, n_k, kv_heads, seed), None)
        shown = "".join(f", {key}={value}" for key, value in options.items())
        where = f"(seqlen_q {n_q}, seqlen_k {n_k}, heads 4, kv_heads {kv_heads}, "
        where += f"module.is_causal {of_module}{shown}) "
        judge_call(
            student,
            lab_attention,
            MISTAKES,
            arguments,
            ("out",),
            where=where,
            dtype=torch.float32,
            adapt=lambda function: partial(_output, function),
            **options,
        )
    passed("layout, scaling, causality and grouped heads are right", seed)


def check_registered_models(student: Student, seed: int = 0) -> None:
    """Exercise 2-2: registered with Transformers, in a GPT-2, a Llama and a BERT of random weights.

    Raises:
        CheckFailed: a model's logits are not those of its eager attention; names the mistake.
    """

    def checked(*given: Any, **options: Any) -> Any:
        return _output(student, *given, **options), None

    for name, model in small_models(seed).items():
        for pieces in ((10,), (5, 4, 1)) if name != "BERT" else ((10,),):
            judge(
                f"({name}, {'tokens in pieces, with a cache' if len(pieces) > 1 else 'one pass'}) "
                "the model's result",
                decode(model, checked, pieces),
                decode(model, "eager", pieces),
                allowed=1e-5,
                mistakes=results(
                    lab_attention, MISTAKES, lambda f, m=model, p=pieces: decode(m, f, p)
                ),
            )
    passed("GPT-2, Llama and BERT return the same as with eager attention, cache included", seed)


def check_registered_memory(student: Student) -> None:
    """Exercise 2-2: FlashAttention runs, not the textbook, and shared keys are not repeated.

    Raises:
        CheckFailed: names the shape of the largest tensor and the operator that made it; or the
            output where nothing is masked is wrong: a stub that computes nothing cannot pass.
    """
    if str(getattr(student, "__module__", "")).startswith("labsupport.models"):
        raise CheckFailed("that is a ready function of the lab: write yours.")
    for n_q, kv_heads, is_causal in ((512, 4, True), (512, 4, False), (4, 1, False)):
        q, k, v = _inputs(n_q, 512, kv_heads, seed=0)
        given = (_module(is_causal), q, k, v, None)
        with LargestTensor() as largest:
            out = _output(student, *given)
        if largest.numel > max(q.numel(), k.numel()):
            repeated = kv_heads < 4 and largest.numel == k.numel() * 4
            why = "that is a matrix of scores, or a mask. This is textbook attention; call "
            why += "flash_attention."
            if repeated:
                why = "k or v was repeated to 4 heads. flash_attention takes grouped heads."
            raise CheckFailed(
                f"a tensor of shape {largest.shape} was created (by {largest.op}) for q "
                f"{tuple(q.shape)} and k {tuple(k.shape)}: {why}"
            )
        if not is_causal:
            where = "(no mask; memory is judged only where the result is right) out"
            right = lab_attention(*given)[0]
            judge(where, out, right, allowed=1e-3)
    passed("no matrix of scores, and no repeated keys")


def check_registered_refusals(student: Student, seed: int = 0) -> None:
    """Exercise 2-2: a mask or dropout, which it cannot do, is refused and not left out.

    Raises:
        CheckFailed: it returned a result, or failed instead of refusing.
    """
    given = (_module(is_causal=True), *_inputs(6, 6, 2, seed))
    _output(student, *given, None, dropout=0.0)
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    mask[1, :, :, :2] = False  # the second text begins with two tokens of padding
    for what, attention_mask, options, effect in (
        ("attention_mask holds padding", mask, {}, "every token would look at the padding"),
        ("dropout is 0.1", None, {"dropout": 0.1}, "flash_attention here has no dropout"),
    ):
        name = what.split()[0]
        try:
            student(*given, attention_mask, **options)
        except (ValueError, NotImplementedError):
            continue
        except Exception as error:
            raise CheckFailed(
                f"{what}, and your function fails by accident ({type(error).__name__}: {error}): "
                "raise a ValueError that says what it cannot do."
            ) from error
        raise CheckFailed(
            f"{what}, and a result came back, although {effect}. Raise a ValueError if {name} is "
            "given, instead of ignoring it."
        )
    passed("a mask and dropout are refused, not ignored", seed)


def _output(function: Callable[..., Any], *given: Any, **options: Any) -> Tensor:
    """Return out of (out, None); refuse anything that has another form."""
    result = call(function, *given, **options)
    pair = isinstance(result, tuple | list) and len(result) == 2 and isinstance(result[0], Tensor)
    if not pair or result[1] is not None:
        raise CheckFailed(
            f"return out, None: two values, not {kind(result)}. The second one is for the weights, "
            "which FlashAttention never stores."
        )
    batch, heads, n_q, d = given[1].shape
    if result[0].shape != (batch, n_q, heads, d):
        raise CheckFailed(
            f"out has shape {tuple(result[0].shape)}, but (batch, seqlen_q, heads, head_dim) = "
            f"{(batch, n_q, heads, d)} was expected: transpose q, k and v before flash_attention, "
            "and do not transpose its result back."
        )
    return result[0]


def _inputs(n_q: int, n_k: int, kv_heads: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return query (2, 4, n_q, 16), key and value (2, kv_heads, n_k, 16), as a model gives them."""
    shapes = ((n_q, 4), (n_k, kv_heads), (n_k, kv_heads))
    q, k, v = (
        draw(2, n, heads, 16, seed=seed + i).transpose(1, 2) for i, (n, heads) in enumerate(shapes)
    )
    return q, k, v


def _module(is_causal: bool) -> nn.Module:
    """Return a stand-in for the model's attention layer."""
    module: Any = nn.Module()
    module.is_causal, module.layer_idx = is_causal, 0
    return module.eval()


# --- small models ---------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def small_models(seed: int = 0) -> dict[str, Any]:
    """Return a GPT-2, a Llama with grouped heads and a BERT; in float64, with 31 tokens.

    GPT-2 scales the scores of its second layer by half as much as usual, so that a function that
    ignores `scaling` shows.
    """
    import transformers as hf

    shared: dict[str, Any] = {
        "vocab_size": 31,
        "initializer_range": 0.3,  # large enough that attention matters
        "attn_implementation": "eager",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    gpt2 = hf.GPT2Config(**shared, **ends, scale_attn_by_inverse_layer_idx=True)
    llama = hf.LlamaConfig(**shared, intermediate_size=48, num_key_value_heads=2)
    bert = hf.BertConfig(**shared, intermediate_size=48)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        models: dict[str, Any] = {
            "GPT-2": hf.GPT2LMHeadModel(gpt2),
            "Llama": hf.LlamaForCausalLM(llama),
            "BERT": hf.BertModel(bert),
        }
    return {name: model.double().eval() for name, model in models.items()}


def decode(
    model: Any, attention: Callable[..., Any] | str, pieces: tuple[int, ...] = (5, 4, 1)
) -> Tensor:
    """Return the results for ten tokens, (2, 10, width): in pieces, with a key/value cache."""
    ids = torch.arange(20).view(2, 10) * 7 % 31
    options: dict[str, Any] = {"use_cache": True} if len(pieces) > 1 else {}
    found = []
    with use_attention(model, attention), torch.no_grad():
        for piece in ids.split(pieces, dim=1):
            output = model(piece, **options)
            found.append(output[0])
            if options:
                options["past_key_values"] = output.past_key_values
    return torch.cat(found, dim=1)


@contextmanager
def use_attention(model: Any, attention: Callable[..., Any] | str) -> Iterator[None]:
    """Let a model compute with an attention function, or one that Transformers knows by name.

    The function gets a mask only where there is padding. Without padding it gets None, and
    causality is its own business.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    name = attention if isinstance(attention, str) else NAME
    if not isinstance(attention, str):
        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, _padding_only)
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _padding_only(**arguments: Any) -> Tensor | None:
    """Return the mask of a layer, or None where it is only bottom-right causal, or all True."""
    from transformers.masking_utils import sdpa_mask

    skips: dict[str, Any] = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Tensor | None = sdpa_mask(**{**arguments, **skips})
    if mask is None:
        return None
    n_q, n_k = mask.shape[-2:]
    causal = torch.ones(n_q, n_k, dtype=torch.bool, device=mask.device).tril(n_k - n_q)
    return None if mask.all() or torch.equal(mask, causal.expand_as(mask)) else mask
