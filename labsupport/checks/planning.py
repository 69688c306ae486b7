"""Exercise 3-3: how many bytes a training step holds at its highest moment."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from labsupport.checks.counting_numbers import compare
from labsupport.checks.verdict import CheckFailed, Mistake, call, mutant, passed

TINY = {"width": 128, "layers": 4, "heads": 4, "mlp_width": 512, "vocab": 257}
GPT2_SMALL = {"width": 768, "layers": 12, "heads": 12, "mlp_width": 3072, "vocab": 50_257}

Case = dict[str, Any]


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
    """Return the bytes that a training step of a GPT-2-like decoder holds at its peak.

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
    scores = heads * seqlen**2 if stores_scores else 0
    mlp = 2 * seqlen * mlp_width
    block = 8 * seqlen * width + mlp + scores
    kept = layers * (seqlen * width if checkpoint else block)
    again = block if checkpoint else 0
    classifier = vocab * width
    if loss_chunk is None:
        logits = 3 * seqlen * vocab
    else:
        logits = min(loss_chunk, seqlen) * vocab + classifier
    moments = {"the loss": logits}
    moments["the MLP's backward pass"] = classifier + again + seqlen * mlp_width
    if stores_scores:
        moments["attention's backward pass"] = classifier + again + 2 * scores - mlp
    return itemsize * (kept + max(moments.values()))


_KEPT = "layers * (seqlen * width if checkpoint else block)"
_BLOCK = "8 * seqlen * width + mlp + scores"
_PEAK = "(kept + max(moments.values()))"
MISTAKES = (
    Mistake(("itemsize * (", "("), "That counts numbers; a number takes itemsize bytes."),
    Mistake(("itemsize * (", "4 * ("), "`itemsize` is ignored: you always count 4 bytes a number."),
    Mistake(
        ("heads * seqlen**2", "seqlen**2"),
        "Every head has scores of its own: heads * seqlen**2 in each layer.",
    ),
    Mistake(
        (_KEPT, "seqlen * width * layers if checkpoint else layers * (block - scores) + scores"),
        "Every layer keeps its probabilities until its own backward pass: count them in all.",
    ),
    Mistake(
        ("heads * seqlen**2", "heads * seqlen**2 // 2"),
        "You halved the matrix because half of it is hidden. The mask hides entries, but what is "
        "stored is the whole seqlen x seqlen matrix.",
    ),
    Mistake(
        ("if stores_scores", "if True"),
        "Scores are counted although stores_scores is False: FlashAttention keeps none of them.",
    ),
    Mistake(
        ("if stores_scores", "if False"), "stores_scores is ignored: the probabilities are missing."
    ),
    Mistake(
        ("mlp + scores", "mlp + 2 * scores"),
        "The block keeps one matrix a head, the probabilities; not the scores before the softmax.",
    ),
    Mistake(
        ("+ 2 * scores", ""),
        "In attention's backward, the gradients of the probabilities and the scores are missing.",
    ),
    Mistake(
        ("scores - mlp", "scores"),
        "In attention's backward, the block's two MLP tensors are gone: - 2 * seqlen * mlp_width.",
    ),
    Mistake(
        ("again + seqlen * mlp_width", "again"),
        "In the MLP's backward pass one gradient of seqlen * mlp_width is on its way.",
    ),
    Mistake(
        ("max(", "sum("), "You added up the moments. They follow one another: take the largest."
    ),
    Mistake(
        (_PEAK, "(len(moments) * kept + sum(moments.values()))"),
        "You added up the moments, each with all that is stored. Take the largest moment.",
    ),
    Mistake(
        (_BLOCK, "8 * seqlen * width + mlp // 2 + scores"),
        "The MLP stores two tensors of seqlen * mlp_width, before and after GELU.",
    ),
    Mistake(
        (_BLOCK, "8 * seqlen * width + scores"),
        "What the MLP keeps is missing: 2 * seqlen * mlp_width in each block.",
    ),
    Mistake(
        ("seqlen * mlp_width", "seqlen * width"), "The MLP's inside is mlp_width wide, not width."
    ),
    Mistake(
        ("8 * seqlen", "5 * seqlen"), "q, k and v are missing: 3 * seqlen * width in each block."
    ),
    Mistake(
        ("8 * seqlen", "6 * seqlen"),
        "The outputs of the two norms are missing: the matrices behind them need their inputs.",
    ),
    Mistake(
        (_KEPT, "(seqlen * width * layers if checkpoint else block)"),
        "Every layer keeps its tensors: multiply by layers.",
    ),
    Mistake(
        ("if checkpoint", "if False"),
        "`checkpoint` is ignored: only each block's input is kept with it.",
    ),
    Mistake(
        ("if checkpoint", "if True"), "Without checkpoint, every block keeps all of its tensors."
    ),
    Mistake(
        ("(seqlen * width if", "(0 if"),
        "With checkpoint a block still stores its input, seqlen * width in each layer.",
    ),
    Mistake(
        ("again = block", "again = 0"),
        "The block being recomputed is missing: in its backward all its tensors are there again.",
    ),
    Mistake(
        ("again = block", "again = layers * block"),
        "One block is recomputed at a time: add one block, not one for each layer.",
    ),
    Mistake(
        ('loss": logits', 'loss": logits + again'),
        "At the loss no block is recomputed yet: add the block in the backward only.",
    ),
    Mistake(
        ("3 * seqlen * vocab", "0", "min(loss_chunk, seqlen) * vocab +", ""),
        "The logits are missing: at the moment of the loss they are there.",
    ),
    Mistake(
        ("3 * seqlen * vocab", "seqlen * vocab"),
        "Without loss_chunk the log-softmax meets two gradients: three tensors, not one.",
    ),
    Mistake(
        ("3 * seqlen * vocab", "2 * seqlen * vocab"),
        "Without loss_chunk the log-softmax meets two gradients: three tensors, not two.",
    ),
    Mistake(
        ("= min(loss_chunk", "= 3 * min(loss_chunk"),
        "The chunked loss has one tensor of logits, changed in place; three without loss_chunk.",
    ),
    Mistake(
        ("loss_chunk is None", "True"),
        "`loss_chunk` is ignored: with it, only that many tokens have logits together.",
    ),
    Mistake(
        ("min(loss_chunk, seqlen)", "loss_chunk"),
        "loss_chunk may be larger than seqlen: take min(loss_chunk, seqlen).",
    ),
    Mistake(
        ("classifier = vocab * width", "classifier = 0"),
        "The gradient of the classifier, vocab * width, is missing: it is there from the loss on.",
    ),
    Mistake(
        ('loss": logits', 'loss": logits * layers'),
        "There is one classifier, not one in every layer.",
    ),
)


def check_kept_blocks(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 3-3: what the blocks keep, with and without stored scores."""
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
    """Exercise 3-3: the block inputs, and the one block that is computed again."""
    shapes = [{"seqlen": 16_384, **TINY}, {"seqlen": 1024, **GPT2_SMALL}, *_random_shapes(seed)]
    cases = [
        {**shape, "stores_scores": stores, "checkpoint": True, "loss_chunk": 64}
        for shape in shapes
        for stores in (False, True)
    ]
    _judge(student, cases)
    passed("with checkpoint: each block's input, and one block at a time", seed)


def check_kept_loss(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 3-3: the moment of the loss, with all logits or one chunk of them."""
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
    """Judge all cases; a mistake is named if it explains what was returned in every one."""
    given = [call(student, **case) for case in cases]
    for value in given:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckFailed(f"return a number of bytes, not {type(value).__name__}.")
    wrong = compare(
        [(value,) for value in given],
        held_bytes,
        MISTAKES,
        lambda f: [(f(**case),) for case in cases],
    )
    if wrong is None:
        return
    i, said = wrong
    sizes = ", ".join(
        f"{name} {value:,}" if type(value) is int else f"{name}={value}"
        for name, value in cases[i].items()
    )
    right = held_bytes(**cases[i])
    largest = mutant(held_bytes, (f"itemsize * {_PEAK}", "max(moments, key=moments.get)"))
    ours = f"{right:,} is right: the largest moment is {largest(**cases[i])}."
    raise CheckFailed(f"for {sizes} you return {given[i]:,.0f} bytes. {said or ours}")


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
