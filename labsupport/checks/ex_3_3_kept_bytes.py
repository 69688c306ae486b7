"""Exercise 3-3: how many bytes a training step holds at its highest moment."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any

from labsupport.checks.verdict import Student, judge_numbers, mistakes, passed

SHAPE = ("seqlen", "width", "layers", "heads", "mlp_width", "vocab")
TINY = {"width": 128, "layers": 4, "heads": 4, "mlp_width": 512, "vocab": 257}
GPT2_SMALL = {"width": 768, "layers": 12, "heads": 12, "mlp_width": 3072, "vocab": 50_257}


### BEGIN SOLUTION
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

    Counted: stored activations, the logits, and gradients of activations and of the classifier.
    Within 10% of `labsupport.profiling.measure_peak_memory` for float32 on a CPU, with gradients
    that exist already; `labsupport.training.planner` counts more exactly, and on GPUs.

    Args:
        seqlen: tokens (of all sequences, if there is a batch of them and no scores are stored).
        width, layers, heads, mlp_width, vocab: the decoder's shape.
        stores_scores: textbook attention, which keeps a matrix for each head.
        checkpoint: only each block's input is stored.
        loss_chunk: tokens at a time in the loss; None for all.
        itemsize: bytes of a number.

    >>> shape = {"width": 128, "layers": 4, "heads": 4, "mlp_width": 512, "vocab": 257}
    >>> plain = held_bytes(1024, **shape, stores_scores=True, checkpoint=False, loss_chunk=None)
    >>> lean = held_bytes(1024, **shape, stores_scores=False, checkpoint=True, loss_chunk=256)
    >>> plain > 10 * lean
    True
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


MISTAKES = mistakes("""
That counts numbers; a number takes itemsize bytes.
    itemsize * ( -> (
Every head has its own scores: heads * seqlen**2 in each layer.
    heads * seqlen**2 -> seqlen**2
Every head has its own scores: in each block too, heads * seqlen**2.
    mlp + scores -> mlp + scores / heads
Every head has its own scores: in attention's backward too, 2 * heads * seqlen**2.
    2 * scores -> 2 * scores / heads
The mask hides half of a stored matrix, but does not make it smaller: heads * seqlen**2.
    heads * seqlen**2 -> heads * seqlen**2 // 2
stores_scores is ignored: without it there are no matrices of seqlen**2.
    if stores_scores else 0 ->
stores_scores is ignored: the probabilities are missing.
    if stores_scores -> if False
In attention's backward, the gradients of the probabilities and the scores are missing.
    + 2 * scores ->
In attention's backward there are *two* more matrices for every head, the gradients of the
probabilities and of the scores.
    2 * scores -> scores
In attention's backward you count a matrix too many for every head: two, and the stored one.
    2 * scores -> 3 * scores
In attention's backward both of the block's MLP tensors are gone: - 2 * seqlen * mlp_width.
    scores - mlp -> scores - mlp / 2
In attention's backward, the block's two MLP tensors are gone: - 2 * seqlen * mlp_width.
    scores - mlp -> scores
You added up the moments, each with what is kept. They follow one another: take the largest.
    (kept + max(moments.values())) -> sum(kept + one for one in moments.values())
You added up the moments. They follow one another: take the largest.
    max( -> sum(
The MLP's stored tensors are missing: 2 * seqlen * mlp_width in each block.
    width + mlp + scores -> width + scores
A block keeps the MLP before *and* after GELU: 2 * seqlen * mlp_width.
    width + mlp + scores -> width + mlp / 2 + scores
A block keeps 8 * seqlen * width: four for the norms, four for q, k, v and attention's output.
    8 * seqlen -> 4 * seqlen
q, k and v are missing: 3 * seqlen * width in each block.
    8 * seqlen -> 5 * seqlen
Every layer keeps its tensors: multiply by layers.
    else block) -> else block / layers)
`checkpoint` is ignored: only each block's input is stored with it.
    if checkpoint -> if False
With checkpoint a block still stores its input, seqlen * width in each layer.
    (seqlen * width if -> (0 if
The block being recomputed is missing: in its backward all its tensors are there again.
    again = block -> again = 0
The input of one block, seqlen * width, is missing: that of *each* block is kept, and the block that
is computed again has its own copy of everything.
    again = block -> again = block - seqlen * width
Only with checkpoint is a block computed again.
    if checkpoint else 0 ->
The block that is computed again is counted twice: it is there in the backward moments only.
    (seqlen * width if -> (seqlen * width + block / layers if
One block is recomputed at a time: add one block, not one for each layer.
    again = block -> again = layers * block
The logits are missing: at the moment of the loss they are there.
    3 * seqlen * vocab -> 0
    min(loss_chunk, seqlen) * vocab + ->
Without loss_chunk the log-softmax meets two gradients: three tensors, not one.
    3 * seqlen * vocab -> seqlen * vocab
With loss_chunk there is one tensor of logits, not three.
    min(loss_chunk, seqlen) * -> 3 * min(loss_chunk, seqlen) *
Without loss_chunk, the moment of the loss is 3 * seqlen * vocab alone, without vocab * width.
    3 * seqlen * vocab -> 3 * seqlen * vocab + classifier
You count the moment of the loss alone: compare it with those of the MLP and of attention.
    max(moments.values()) -> moments["the loss"]
At the moment of the loss in chunks the gradient of the classifier, vocab * width, is missing.
    vocab + classifier -> vocab
`loss_chunk` is ignored: with it, only that many tokens have logits together.
    loss_chunk is None -> True
loss_chunk may be larger than seqlen: take min(loss_chunk, seqlen).
    min(loss_chunk, seqlen) -> loss_chunk
The gradient of the classifier, vocab * width, is missing: it is there from the loss on.
    classifier = vocab * width -> classifier = 0
In the MLP's backward the gradient of the classifier, vocab * width, is missing: it stays.
    classifier + again + seqlen -> again + seqlen
In attention's backward the gradient of the classifier, vocab * width, is missing: it stays.
    classifier + again + 2 -> again + 2
""")
### END SOLUTION


def check_kept_blocks(student: Student, seed: int = 0) -> None:
    """Exercise 3-3: stored activations of the blocks, with and without stored scores."""
    shapes = [{"seqlen": 8192, **TINY}, {"seqlen": 512, **GPT2_SMALL, "vocab": 100}]
    cases = _cases([*shapes, *_drawn(seed)], (False, True), (False,), (64,))
    _judge(student, [*cases, {**cases[0], "itemsize": 2}])
    passed("stored activations are counted right, scores included where they are stored", seed)


def check_kept_checkpoint(student: Student, seed: int = 0) -> None:
    """Exercise 3-3: the block inputs, and the one block that is computed again."""
    shapes = [{"seqlen": 16_384, **TINY}, {"seqlen": 1024, **GPT2_SMALL}, *_drawn(seed)]
    _judge(student, _cases(shapes, (False, True), (True,), (64,)))
    passed("with checkpoint: each block's input, and one block at a time", seed)


def check_kept_loss(student: Student, seed: int = 0) -> None:
    """Exercise 3-3: the moment of the loss, with all logits or one chunk of them."""
    shapes = [{"seqlen": 4096, **GPT2_SMALL}, {"seqlen": 2048, **TINY, "vocab": 128_256}]
    shapes.append({"seqlen": 8192, **TINY})  # where the MLP's moment is the largest
    shapes += [{**shape, "vocab": 150_000} for shape in _drawn(seed)]
    _judge(student, _cases(shapes, (False,), (False, True), (None, 512, 2047, 1_000_000)))
    passed("the moment of the loss is counted right, for all logits and for chunks", seed)


def _judge(student: Student, cases: list[dict[str, Any]]) -> None:
    judge_numbers(student, cases, held_bytes, MISTAKES, ("bytes",))


def _cases(
    shapes: Iterable[dict[str, int]],
    scores: Iterable[bool],
    checkpoints: Iterable[bool],
    chunks: Iterable[int | None],
) -> list[dict[str, Any]]:
    names = ("stores_scores", "checkpoint", "loss_chunk")
    choices = itertools.product(shapes, scores, checkpoints, chunks)
    return [shape | dict(zip(names, chosen, strict=True)) for shape, *chosen in choices]


def _drawn(seed: int) -> list[dict[str, int]]:
    """Return shapes in which every term can be seen."""
    rng = random.Random(seed)
    shapes = []
    for seqlen in (2048, 6000):
        heads = rng.randint(3, 12)
        width = heads * rng.choice([32, 48, 64])
        sizes = (seqlen + rng.randint(0, 500), width, rng.randint(3, 20), heads)
        others = (width * 3 + rng.randint(1, 100), rng.randint(300, 3000))
        shapes.append(dict(zip(SHAPE, sizes + others, strict=True)))
    return shapes
