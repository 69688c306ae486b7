"""Checks of exercise 3-3: how many bytes a training step holds at its highest moment."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from labsupport.checks.verdict import CheckFailed, call, passed

TINY = {"width": 128, "layers": 4, "heads": 4, "mlp_width": 512, "vocab": 257}
GPT2_SMALL = {"width": 768, "layers": 12, "heads": 12, "mlp_width": 3072, "vocab": 50_257}

Case = dict[str, Any]

MISTAKES = {
    "elements": "That counts numbers; a number takes itemsize bytes.",
    "always 4 bytes": "`itemsize` is ignored: you always count 4 bytes a number.",
    "scores once a layer": "Every head has scores of its own: heads * seqlen**2 in each layer.",
    "scores in one layer": (
        "Every layer keeps its probabilities until its own backward pass: count them in each layer."
    ),
    "scores halved": (
        "You halved the matrix because half of it is hidden. The mask hides entries, but what is "
        "stored is the whole seqlen x seqlen matrix."
    ),
    "scores always": (
        "Scores are counted although stores_scores is False: FlashAttention keeps none of them."
    ),
    "scores never": "stores_scores is ignored: the probabilities are missing.",
    "scores twice": (
        "The block keeps one matrix a head, the probabilities. The scores before the softmax are "
        "not needed again."
    ),
    "no gradients of scores": (
        "In attention's backward pass two more matrices a head are there: the gradients of the "
        "probabilities and of the scores."
    ),
    "MLP still there": (
        "When attention's turn comes in the backward pass, the MLP's two tensors of that block are "
        "gone: - 2 * seqlen * mlp_width."
    ),
    "no gradient in the MLP": (
        "In the MLP's backward pass one gradient of seqlen * mlp_width is on its way."
    ),
    "moments added": "You added up the moments. They come one after the other: take the largest.",
    "whole moments added": (
        "You added up the moments, and what is kept in each of them. They come one after the "
        "other: take the largest."
    ),
    "MLP once": (
        "The MLP keeps two tensors of seqlen * mlp_width: GELU's derivative needs what goes in, "
        "the second matrix what comes out."
    ),
    "no MLP": "What the MLP keeps is missing: 2 * seqlen * mlp_width in each block.",
    "mlp_width is width": ("The MLP's inside is mlp_width wide, not width."),
    "no q, k, v": "q, k and v are missing: 3 * seqlen * width in each block.",
    "no norms' outputs": (
        "The outputs of the two norms are missing: the matrices behind them need their inputs."
    ),
    "one layer": "Every layer keeps its tensors: multiply by layers.",
    "checkpoint ignored": "`checkpoint` is ignored: only each block's input is kept with it.",
    "checkpoint always": "Without checkpoint, every block keeps all of its tensors.",
    "checkpoint keeps nothing": (
        "With checkpoint a block still keeps its input, seqlen * width in each layer: the backward "
        "pass starts again from there."
    ),
    "block forgotten": (
        "The block being recomputed is missing: while it goes backward, all its tensors are there "
        "again, those of one block."
    ),
    "all blocks recomputed": (
        "One block is recomputed at a time: add one block, not one for each layer."
    ),
    "block at the loss": (
        "At the moment of the loss no block is being recomputed yet: add the block in the backward "
        "pass only."
    ),
    "no logits": "The logits are missing: at the moment of the loss they are there.",
    "logits once": (
        "Without loss_chunk three tensors of seqlen * vocab meet: the log-softmax, and two "
        "gradients on their way back."
    ),
    "logits twice": (
        "Without loss_chunk three tensors of seqlen * vocab meet, not two: the log-softmax, its "
        "gradient, and the gradient of the logits."
    ),
    "chunk thrice": (
        "The chunked loss holds one tensor of its chunk's logits, which it changes in place; three "
        "are for loss_chunk=None."
    ),
    "chunk ignored": "`loss_chunk` is ignored: with it, only that many tokens have logits at once.",
    "chunk not cut": (
        "loss_chunk may be larger than seqlen; there are only seqlen tokens: "
        "min(loss_chunk, seqlen)."
    ),
    "no classifier gradient": (
        "The gradient of the classifier, vocab * width, is missing: it is there from the loss on."
    ),
    "logits in every layer": "There is one classifier, not one in every layer.",
}


def held_bytes(
    seqlen: int,
    width: int,
    layers: int,
    heads: int,
    mlp_width: int,
    vocab: int,
    *,
    stores_scores: bool,
    checkpoint: bool,
    loss_chunk: int | None,
    itemsize: int = 4,
) -> int:
    """Bytes that a training step of a GPT-2-like decoder holds at its highest moment.

    Counted: what blocks keep, the logits, and the gradients on their way back. Not counted: weights
    and their gradients (but for the classifier's, the first that is there), tables of single rows.
    Within 10% of `labsupport.profiling.measure_peak_memory` for float32 on a CPU, with gradients
    that exist already; `labsupport.training.planner` counts more exactly, and on GPUs.

    Args:
        seqlen: tokens (of all sequences, if there is a batch of them and no scores are stored).
        width, layers, heads, mlp_width, vocab: the decoder's shape.
        stores_scores: textbook attention, which keeps a matrix for each head.
        checkpoint: only each block's input is kept.
        loss_chunk: tokens at a time in the loss; None for all.
        itemsize: bytes of a number.
    """
    shape = {
        "seqlen": seqlen,
        "width": width,
        "layers": layers,
        "heads": heads,
        "mlp_width": mlp_width,
        "vocab": vocab,
    }
    options = {"stores_scores": stores_scores, "checkpoint": checkpoint, "loss_chunk": loss_chunk}
    return _held({**shape, **options, "itemsize": itemsize})


def check_kept_blocks(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 3-3: what the blocks keep, with and without stored scores.

    Raises:
        CheckFailed: naming the likely mistake.
    """
    shapes = [{"seqlen": 8192, **TINY}, {"seqlen": 512, **GPT2_SMALL, "vocab": 100}]
    shapes += _random_shapes(seed)
    cases = [
        {**shape, "stores_scores": stores, "checkpoint": False, "loss_chunk": 64}
        for shape in shapes
        for stores in (False, True)
    ]
    cases.append({**cases[0], "itemsize": 2})
    _judge(student, cases)
    passed("what the blocks keep is counted right, scores included where they are stored", seed)


def check_kept_checkpoint(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 3-3: the block inputs, and the one block that is computed again.

    Raises:
        CheckFailed: naming the likely mistake.
    """
    shapes = [{"seqlen": 16_384, **TINY}, {"seqlen": 1024, **GPT2_SMALL}, *_random_shapes(seed)]
    cases = [
        {**shape, "stores_scores": stores, "checkpoint": True, "loss_chunk": 64}
        for shape in shapes
        for stores in (False, True)
    ]
    _judge(student, cases)
    passed("with checkpoint: each block's input, and one block at a time", seed)


def check_kept_loss(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 3-3: the moment of the loss, with all logits or one chunk of them.

    Raises:
        CheckFailed: naming the likely mistake.
    """
    shapes = [{"seqlen": 4096, **GPT2_SMALL}, {"seqlen": 2048, **TINY, "vocab": 128_256}]
    shapes += [{**shape, "vocab": 150_000} for shape in _random_shapes(seed)]
    cases = [
        {**shape, "stores_scores": False, "checkpoint": checkpoint, "loss_chunk": chunk}
        for shape in shapes
        for checkpoint in (False, True)
        for chunk in (None, 512, shape["seqlen"] - 1, 1_000_000)
    ]
    _judge(student, cases)
    passed("the moment of the loss is counted right, for all logits and for chunks", seed)


def _judge(student: Callable[..., Any], cases: Sequence[Case]) -> None:
    """A mistake is named if it explains what was returned in every case."""
    given = [call(student, **case) for case in cases]
    for value in given:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckFailed(f"return a number of bytes, not {type(value).__name__}.")
    right = [_held(case) for case in cases]
    off = [i for i, value in enumerate(given) if not math.isclose(value, right[i])]
    if not off:
        return
    said = ""
    for mistake, diagnosis in MISTAKES.items():
        wrong = [_held(case, mistake) for case in cases]
        if all(math.isclose(a, b) for a, b in zip(given, wrong, strict=True)):
            said = diagnosis
            break
    case = cases[off[0]]
    sizes = ", ".join(
        f"{name} {value:,}" if type(value) is int else f"{name}={value}"
        for name, value in case.items()
    )
    raise CheckFailed(
        f"for {sizes} you return {given[off[0]]:,.0f} bytes. "
        f"{said or f'{right[off[0]]:,} is right: {_largest(case)}.'}"
    )


def _held(case: Case, mistake: str = "") -> int:
    moments = _moments(case, mistake)
    kept = moments.pop("kept")
    numbers = kept + max(moments.values())
    if mistake == "moments added":
        numbers = kept + sum(moments.values())
    if mistake == "whole moments added":
        numbers = kept * len(moments) + sum(moments.values())
    itemsize = case.get("itemsize", 4)
    return numbers * {"elements": 1, "always 4 bytes": 4}.get(mistake, itemsize)


def _largest(case: Case) -> str:
    moments = _moments(case)
    del moments["kept"]
    return f"the largest moment is {max(moments, key=lambda name: moments[name])}"


def _moments(case: Case, mistake: str = "") -> dict[str, int]:
    """Numbers that are kept, and what each moment adds to them, with one mistake."""
    n, w, layers = case["seqlen"], case["width"], case["layers"]
    m = w if mistake == "mlp_width is width" else case["mlp_width"]
    vocab, chunk, checkpoint = case["vocab"], case["loss_chunk"], case["checkpoint"]
    checkpoint = {"checkpoint ignored": False, "checkpoint always": True}.get(mistake, checkpoint)
    stored = {"scores always": True, "scores never": False}.get(mistake, case["stores_scores"])

    scores = n * n * (1 if mistake == "scores once a layer" else case["heads"]) * stored
    scores = scores // 2 if mistake == "scores halved" else scores
    matrices = 2 if mistake == "scores twice" else 1
    wide = {"MLP once": 1, "no MLP": 0}.get(mistake, 2)
    narrow = {"no q, k, v": 5, "no norms' outputs": 6}.get(mistake, 8)
    tokens = n * (narrow * w + wide * m)
    block = tokens + matrices * scores
    kept = layers * block
    if mistake == "scores in one layer":
        kept = layers * tokens + scores
    if mistake == "one layer":
        kept = block
    if checkpoint:
        kept = 0 if mistake == "checkpoint keeps nothing" else layers * n * w
    again = block if checkpoint else 0
    again *= {"block forgotten": 0, "all blocks recomputed": layers}.get(mistake, 1)

    classifier = 0 if mistake == "no classifier gradient" else vocab * w
    all_logits = {"no logits": 0, "logits once": 1, "logits twice": 2}.get(mistake, 3) * n * vocab
    if chunk is None or mistake == "chunk ignored":
        logits = all_logits
    else:
        rows = chunk if mistake == "chunk not cut" else min(chunk, n)
        logits = {"no logits": 0, "chunk thrice": 3}.get(mistake, 1) * rows * vocab + classifier
    logits *= layers if mistake == "logits in every layer" else 1
    at_loss = logits + (again if mistake == "block at the loss" else 0)

    back = classifier + again
    in_mlp = 0 if mistake == "no gradient in the MLP" else n * m
    moments = {"kept": kept, "the loss": at_loss, "the MLP's backward pass": back + in_mlp}
    if stored:
        gone = 0 if mistake == "MLP still there" else 2 * n * m
        gradients = 0 if mistake == "no gradients of scores" else 2 * scores
        moments["attention's backward pass"] = back + gradients - gone
    return moments


def _random_shapes(seed: int) -> list[Case]:
    """Shapes in which every term can be seen."""
    draw = random.Random(seed)
    shapes = []
    for seqlen in (2048, 6000):
        heads = draw.randint(3, 12)
        width = heads * draw.choice([32, 48, 64])
        shapes.append(
            {
                "seqlen": seqlen + draw.randint(0, 500),
                "width": width,
                "layers": draw.randint(3, 20),
                "heads": heads,
                "mlp_width": width * 3 + draw.randint(1, 100),
                "vocab": draw.randint(300, 3000),
            }
        )
    return shapes
