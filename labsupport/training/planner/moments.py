"""What exists at the same time, at each moment of a training step that may be its peak.

forward      weights, AdamW's states, and a growing heap of what blocks keep
loss         all of that heap, and the logits                                      <- a peak?
backward     the heap shrinks block by block, gradients of weights grow: the most  <- a peak?
             is there at its beginning or at its end, in a block's MLP or attention
optimizer    weights, states, gradients, and what the update needs                 <- a peak?
"""

from __future__ import annotations

from collections.abc import Iterator

from labsupport.training.planner.devices import (
    attention_backward,
    chunk_product,
    kept_by_norm,
    libraries,
    optimizer_step,
)
from labsupport.training.planner.kept import STREAM, hidden_tensors, kept_by_blocks
from labsupport.training.planner.shape import Part, Shape

WEIGHTS, STATES = "weights", "AdamW's states"
GRADIENTS = "gradients of weights"
COPIES = "weights in autocast's dtype"
LOGITS = "logits and their loss"
TEMPORARY = "temporaries"
FIXED = "tokens, angles, workspaces"

Moments = dict[str, list[Part]]


def moments(shape: Shape) -> Moments:
    """Each moment's parts, by the moment's name, in the order of time."""
    always = list(_always(shape))
    last, first = shape.at(shape.config.layers), shape.at(1)
    found = {
        "loss, forward": _loss_forward(last),
        "loss, backward": _loss_backward(last),
        "last block's backward, MLP": _mlp_backward(last),
        "last block's backward, attention": _attention_backward(last),
        "first block's backward, MLP": _mlp_backward(first),
        "first block's backward, attention": _attention_backward(first),
        "embedding's backward": _embedding_backward(shape),
    }
    if shape.optimizer is not None:
        found["optimizer"] = [
            shape.part(GRADIENTS, "W·4"),
            shape.part(TEMPORARY, *optimizer_step(shape)),
        ]
    return {name: [*always, *(p for p in parts if p.bytes)] for name, parts in found.items()}


def _always(shape: Shape) -> Iterator[Part]:
    yield shape.part(WEIGHTS, "W·4")
    if shape.optimizer is not None:
        yield shape.part(STATES, "2·W·4")
    angles = ["N·d·4"] if shape.config.positions == "rotary" else []
    yield shape.part(FIXED, "2·T·8", *angles, *([] if shape.device == "cpu" else libraries()))


def _kept_until_loss(shape: Shape) -> list[Part]:
    """What blocks keep, and the stream behind the last of them with its norm."""
    beside_norm = " + ".join(kept_by_norm(shape))
    last = shape.part("last norm", f"T·(w·r + w·c + {beside_norm})")
    if shape.savings.checkpoint:
        return [shape.part(STREAM, "L·T·w·r"), last]
    return [*kept_by_blocks(shape), last]


def _loss_forward(shape: Shape) -> list[Part]:
    # Autocast makes a copy of a weight once, and keeps it as long as the forward pass lasts.
    parts = [*_kept_until_loss(shape), *_gradients(shape)]
    copies = ["L·Wb·c", "V·w·c"] if shape.low else []
    if shape.savings.loss_chunk is None:
        # Logits, in float32 if they are not, and their log-softmax.
        logits = ["T·V·c", "T·V·4", "T·V·4"] if shape.low else ["T·V·4", "T·V·4"]
        return [*parts, shape.part(COPIES, *copies), shape.part(LOGITS, *logits)]
    one_chunk = ["C·V·c", "C·V·4"] if shape.low else ["C·V·4"]
    return [
        *parts,
        shape.part(COPIES, *copies),
        # The gradients of the hidden states and of the classifier are made at once.
        shape.part(LOGITS, *one_chunk, "T·w·c", "V·w·4", *chunk_product(shape)),
    ]


def _loss_backward(shape: Shape) -> list[Part]:
    # Those that the graph has saved: none of blocks that will be computed again.
    copies = ["L·Wb·c"] if shape.low and not shape.savings.checkpoint else []
    if shape.savings.loss_chunk is not None:
        logits = ["T·w·c", "V·w·4"]
    else:
        logits = ["3·T·V·4"]  # log-softmax, the gradient of it, and the gradient of the logits
        copies += ["V·w·c"] if shape.low else []
    return [
        *_kept_until_loss(shape),
        *_gradients(shape),
        shape.part(COPIES, *copies),
        shape.part(LOGITS, *logits),
    ]


def _mlp_backward(shape: Shape) -> list[Part]:
    cast = ["T·w·c"] if shape.symbols["r"] != shape.symbols["c"] else []
    if shape.chunked_mlp:
        # The chunks' gradients; besides, the tensors of one chunk, or, when all chunks are done,
        # their gradients put together.
        beside_norm = " + ".join(kept_by_norm(shape))
        inner = hidden_tensors(shape) + _gradient_tensors(shape)
        one_chunk = " + ".join([f"M·(w·c + {beside_norm} + {inner}·I·c)", *cast])
        temporary = ["T·w·r", f"max({one_chunk}, T·w·r)"]
    else:
        temporary = [f"{_gradient_tensors(shape)}·T·I·c", *cast]
    return [
        *kept_by_blocks(shape),
        *_gradients(shape, "(L-K)·Wb", "V·w", "w·I"),  # the MLP's last matrix already
        *_block_copies(shape),
        shape.part(TEMPORARY, "T·w·r", *temporary),
    ]


def _attention_backward(shape: Shape) -> list[Part]:
    # The gradient of the stream, and of attention's output.
    temporary = ["T·w·r", "T·w·c", *attention_backward(shape)]
    return [
        *kept_by_blocks(shape, with_mlp=False),
        *_gradients(shape, "(L-K)·Wb", "V·w", "Wm"),
        *_block_copies(shape),
        shape.part(TEMPORARY, *temporary),
    ]


def _gradient_tensors(shape: Shape) -> int:
    # GELU: that of its output (its own takes the place of its output's). SwiGLU: of both factors.
    return 2 if shape.config.mlp == "swiglu" else 1


def _block_copies(shape: Shape) -> list[Part]:
    if not shape.low:
        return []
    return [shape.part(COPIES, "Wb·c" if shape.savings.checkpoint else "K·Wb·c")]


def _embedding_backward(shape: Shape) -> list[Part]:
    temporary = ["T·w·4"]
    if shape.config.tied or shape.accumulation > 1:
        temporary.append("V·w·4")  # until it is added to the classifier's, or to the last batch's
    if shape.config.tied and not shape.low and shape.savings.loss_chunk is None:
        temporary.append("V·w·4")  # the sum is a third tensor
    return [shape.part(GRADIENTS, "W·4"), shape.part(TEMPORARY, *temporary)]


def _gradients(shape: Shape, *so_far: str) -> list[Part]:
    if shape.accumulation == 1:
        return [shape.part(GRADIENTS, *(f"{weights}·4" for weights in so_far))]
    # All of them, from the micro-batch before; a tied classifier's waits for the embedding's.
    waiting = ["V·w·4"] if so_far and shape.config.tied else []
    return [shape.part(GRADIENTS, "W·4", *waiting)]
