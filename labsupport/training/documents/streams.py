"""What a training run sees at each step: a function of the step alone, so that it can resume.

`batches` goes through given documents again and again, in another order each time. `generated`
makes new ones for each step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from labsupport.training.documents.packing import Packed, pack
from labsupport.training.documents.planting import Dice
from labsupport.training.documents.tokens import Encoded

# Far above the seeds that a reader types: what is asked after training was not in it.
FIRST_SEED = 1_000_000


def batches(
    documents: Sequence[Sequence[int] | Encoded],
    length: int,
    *,
    end_token: int,
    seed: int = 0,
    accumulation: int = 1,
    shuffle: bool = True,
    cut: bool = True,
) -> Callable[[int], list[Packed]]:
    """A stream over documents: step → its sequences.

    In each epoch every document comes once, in an order that follows from the seed and the epoch.
    A step may take its sequences from two epochs.

    Args:
        documents: their tokens, or `Encoded`, as for `pack`.
        length: of each sequence, in tokens.
        end_token, cut: as for `pack`.
        seed: of the order, 0 or more.
        accumulation: sequences in each step.
        shuffle: False: the same order in each epoch.

    Returns:
        stream(step), for any step from 0 on, in any order of calls.

    Raises:
        ValueError: no documents; accumulation below 1. Later: what `pack` raises; a step below 0.

    >>> stream = batches([[1, 2, 3], [4, 5]], 4, end_token=0, shuffle=False)
    >>> [packed.tokens.tolist() for packed in stream(1)]
    [[[4, 5, 0, 0]]]
    """
    if not documents:
        raise ValueError("a stream needs at least one document")
    _check_accumulation(accumulation)
    total = sum(len(d.tokens if isinstance(d, Encoded) else d) + 1 for d in documents)
    firsts = [0]  # the number of each epoch's first sequence, as far as is known
    kept: dict[int, list[Packed]] = {}  # the epochs last asked for

    def epoch_of(epoch: int) -> list[Packed]:
        if epoch not in kept:
            order = list(documents)
            if shuffle:
                # random() alone is the same on every Python; see Dice.
                order = Dice(_mixed(seed, epoch)).some(order, len(order))
            while len(kept) > 1:
                del kept[min(kept)]
            kept[epoch] = list(pack(order, length, end_token=end_token, cut=cut))
        return kept[epoch]

    def sequence(number: int) -> Packed:
        while firsts[-1] <= number:
            # Without cuts, how many sequences an epoch has depends on its order.
            here = -(-total // length) if cut else len(epoch_of(len(firsts) - 1))
            firsts.append(firsts[-1] + here)
        epoch = bisect_right(firsts, number) - 1
        return epoch_of(epoch)[number - firsts[epoch]]

    def stream(step: int) -> list[Packed]:
        _check_step(step)
        return [sequence(step * accumulation + i) for i in range(accumulation)]

    return stream


def generated(
    make: Callable[[int], Sequence[int] | Encoded],
    length: int,
    *,
    end_token: int,
    documents: int = 1,
    accumulation: int = 1,
    first_seed: int = FIRST_SEED,
) -> Callable[[int], list[Packed]]:
    """A stream of documents that no step sees twice: step → its sequences.

    Args:
        make: seed → a document's tokens, or `Encoded`.
        length: of each sequence, in tokens.
        end_token: as for `pack`.
        documents: in each sequence. They must fit: none is cut.
        accumulation: sequences in each step.
        first_seed: of the first document; the following ones count up. Test with seeds below it.

    Raises:
        ValueError: documents or accumulation below 1; later, documents that do not fit.
    """
    _check_accumulation(accumulation)
    if documents < 1:
        raise ValueError(f"documents is 1 or more in each sequence, not {documents}")

    def sequence(number: int) -> Packed:
        seeds = range(first_seed + number * documents, first_seed + (number + 1) * documents)
        packed = list(pack(map(make, seeds), length, end_token=end_token, cut=False))
        if len(packed) > 1:
            raise ValueError(
                f"{documents} documents take more than {length} tokens: make shorter ones (each "
                "has an end token too), or fewer in a sequence"
            )
        return packed[0]

    def stream(step: int) -> list[Packed]:
        _check_step(step)
        return [sequence(step * accumulation + i) for i in range(accumulation)]

    return stream


def _check_accumulation(accumulation: int) -> None:
    if accumulation < 1:
        raise ValueError(f"accumulation is 1 or more sequences a step, not {accumulation}")


def _check_step(step: int) -> None:
    if step < 0:
        raise ValueError(f"steps count from 0, not {step}")


def _mixed(seed: int, epoch: int) -> int:
    """One seed from two: neighbouring seeds share no epoch's order."""
    return Dice(seed).below(2**53) + epoch
