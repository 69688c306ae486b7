"""What each rank works on in a step, and how much its loss counts.

The step's loss is the mean over ALL labels of all ranks' micro-batches. Micro-batch i of rank r has
a mean of its own, over its n_ri labels, and DDP as FSDP *averages* gradients over the W ranks. So
with N the sum of all n_ri

    backward of   W · (n_ri / N) · loss_ri        gives, averaged over ranks:

    (1/W) Σ_r Σ_i  W · (n_ri / N) · grad loss_ri  =  grad of the mean over all N labels

Averaging the ranks' means is right only if all have the same number of labels. Documents that are
packed, padded or masked do not.

UNEVEN INPUTS. A collective needs every rank. If one has fewer micro-batches than the others, they
would wait for it, or their collectives would no longer match. Here the ranks first tell one another
what they have (three integers each); then a rank that has too few computes empty micro-batches, of
one token and with the weight 0. DDP needs one per step, since it only communicates in the last
backward pass; FSDP as many as the busiest rank has, since it fetches parameters for each. (DDP's
own remedy is `torch.distributed.algorithms.join.Join`, for epochs that end sooner on some ranks: it
lets a rank that is done answer the others' all-reduces. It does not know of labels' numbers, nor of
FSDP2.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labsupport.distributed.data_parallel.process_group import Place
from labsupport.training.train import IGNORED, tensors

Batch = dict[str, Tensor]
Batches = Callable[[int], Iterable[Any]]


def share_of(batches: Batches, place: Place) -> Batches:
    """This rank's part of a stream: micro-batch `rank`, `rank + world`, ... of each step.

    All ranks together then take the same steps as one process with the whole stream, whatever
    their number. It is for streams what `torch.utils.data.DistributedSampler` is for datasets.

    >>> stream = batches(documents, 512, end_token=256, accumulation=8)
    >>> own = share_of(stream, place)  # of 2 ranks, 4 micro-batches each
    """
    return lambda step: list(batches(step))[place.rank :: place.world]


class Share:
    """One rank's micro-batches of a step, with weights.

    Attributes:
        micro_batches: with `tokens` and `labels`, on this rank's device; those without any label
            are left out, empty ones filled in.
        weights: n_ri / N of each; 0 for an empty one. The sum over all ranks is 1.
        tokens: of all ranks together, without the empty micro-batches, and without `fillers`: how
            many tokens of a micro-batch only fill a sequence up, if it says so.
        counts: (world, 3) int64: each rank's micro-batches with labels, its labels, its tokens.

    Raises:
        ValueError, on all ranks: no rank has a label; a rank has more micro-batches than the
            settings' accumulation. TypeError, on the rank itself: what is no micro-batch.
    """

    def __init__(
        self, step: int, batches: Batches, place: Place, *, accumulation: int, same_number: bool
    ) -> None:
        given = [tensors(batch) for batch in batches(step)]
        labels = [int((batch["labels"] != IGNORED).sum()) for batch in given]
        tokens = sum(batch["tokens"].numel() - int(batch.get("fillers", 0)) for batch in given)
        own = [len(given), sum(map(bool, labels)), sum(labels), tokens]
        table = told(own, place)
        self.counts = table[:, 1:]
        if int(table[:, 0].max()) > accumulation:
            raise ValueError(
                f"batches({step}) gave the ranks {table[:, 0].tolist()} micro-batches, and the "
                f"settings say accumulation={accumulation}: that is the most that a rank may have"
            )
        total = int(table[:, 2].sum())
        if not total:
            raise ValueError(f"batches({step}) has no label to learn from, on any rank")
        self.tokens = int(table[:, 3].sum())
        pairs = [
            ({name: tensor.to(place.device) for name, tensor in batch.items()}, count / total)
            for batch, count in zip(given, labels, strict=True)
            if count
        ]
        wanted = int(table[:, 1].max()) if same_number else 1
        pairs += [(_empty(place), 0.0)] * (wanted - len(pairs))
        self.micro_batches = [batch for batch, _ in pairs]
        self.weights = [weight for _, weight in pairs]


def told(own: Sequence[int], place: Place) -> Tensor:
    """What every rank says: (world, len(own)) int64, on the CPU, the same on all ranks."""
    table = torch.zeros(place.world, len(own), dtype=torch.int64, device=place.device)
    table[place.rank] = torch.tensor(own)
    dist.all_reduce(table)  # each row is 0 on all ranks but one
    return table.cpu()


def _empty(place: Place) -> Batch:
    # With a label, although it does not count: the mean over no labels may be NaN, and 0 · NaN too.
    one = torch.zeros(1, 1, dtype=torch.int64, device=place.device)
    return {"tokens": one, "labels": one}
