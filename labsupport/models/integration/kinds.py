"""Which mask a model means, and what is refused.

Transformers describes a mask by a function of (batch, head, query, key), put together from a few
parts. The parts are closures; they are recognised by where they were defined, and their options are
read from the closure. An unknown part is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from transformers import masking_utils

NO_WINDOW = (-1, -1)
NO_WEIGHTS = (
    "output_attentions=True asks for the attention weights, a tensor of N_q x N_k that "
    "labsupport's attention does not return. Use model.set_attn_implementation('eager')."
)


class AttentionRefusedError(RuntimeError):
    """The model asks for something that labsupport's attention does not compute."""


def kind_of(mask_function: Callable[..., Any]) -> tuple[bool, tuple[int, int]]:
    """Return (causal, window) of one of Transformers' mask functions.

    Raises:
        AttentionRefusedError: a part of it is not known.
    """
    causal, window = False, NO_WINDOW
    for part, options in _parts(mask_function):
        if part == "causal_mask_function":
            causal = True
        elif part == "sliding_window_overlay":  # key > query - size
            window = (options["sliding_window"] - 1, window[1])
        elif part == "sliding_window_bidirectional_overlay":  # |query - key| <= size
            window = (options["sliding_window"], options["sliding_window"])
        elif part == "packed_sequence_mask_function":
            # Under torch.compile Transformers cannot look, and always sends it.
            if bool((options["packed_sequence_mask"][:, -1] != 0).any()):
                raise AttentionRefusedError(_unknown(part))
        elif part != "bidirectional_mask_function":
            raise AttentionRefusedError(_unknown(part))
    return causal, window


def _unknown(part: str) -> str:
    packed = " (several sequences packed in one row)" if part.startswith("packed") else ""
    return (
        f"this model's mask has a part {part}{packed}, which labsupport's attention does not "
        "compute: it knows causal and bidirectional masks, sliding windows and padding. Use "
        "model.set_attn_implementation('sdpa') for this model or these inputs."
    )


def _parts(mask_function: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the masks whose intersection a function is: the name of each, and its options."""
    name = getattr(mask_function, "__qualname__", repr(mask_function)).split(".")[0]
    if getattr(mask_function, "__module__", None) != masking_utils.__name__:
        name = f"{getattr(mask_function, '__module__', '?')}.{name}"
    code, cells = getattr(mask_function, "__code__", None), mask_function.__closure__ or ()
    names = code.co_freevars if code is not None else ()
    options = {key: cell.cell_contents for key, cell in zip(names, cells, strict=True)}
    if name == "and_masks":
        for part in options["mask_functions"]:
            yield from _parts(part)
    elif name == "remap_positions_for_packed_sequence":
        yield from _parts(options["mask_function"])
    else:
        yield name, options


def refuse_recorded_weights() -> None:
    """Refuse `output_attentions=True`: not every model tells its layers about it."""
    try:
        from transformers.utils.output_capturing import _active_collector

        wanted = _active_collector.get() or {}
    except (ImportError, AttributeError, LookupError):
        return
    if any("attentions" in name for name in wanted):
        raise AttentionRefusedError(NO_WEIGHTS)
