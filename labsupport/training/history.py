"""The steps of a training run: rows, a table, a chart."""

from __future__ import annotations

import math
import resource
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import pandas as pd

    from labsupport.plotting import Chart


@dataclass(frozen=True)
class StepRow:
    """One optimizer step.

    Attributes:
        step: counted from 0.
        loss: the mean over all labels of the step's micro-batches, before the step.
        grad_norm: the total norm of the gradients, before clipping.
        learning_rate: this step's.
        seconds: from asking for the batch to the end of the step, without evaluation and
            checkpoints.
        tokens: that went through the model, padding included.
        peak_bytes: on a GPU the most that PyTorch's tensors took during the step; on a CPU the peak
            of the whole program's resident memory, from its start to now.
        skipped: float16 gradients overflowed, the weights stayed as they were.
        validation_loss: the mean over all labels of the validation batches, after the step.
        sample: text that the model wrote after the step.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    seconds: float
    tokens: int
    peak_bytes: int
    skipped: bool = False
    validation_loss: float | None = None
    sample: str | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens through forward and backward in a second."""
        return self.tokens / self.seconds if self.seconds > 0 else math.nan


@dataclass
class History:
    """The rows of a run, the oldest first; of a resumed run, all of them from its beginning."""

    rows: list[StepRow] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[StepRow]:
        return iter(self.rows)

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [row.loss for row in self.rows]

    @property
    def tokens_per_s(self) -> float:
        """The median over the steps: the first one is slower. NaN without a step."""
        return statistics.median([row.tokens_per_s for row in self.rows] or [math.nan])

    @property
    def peak_bytes(self) -> int:
        """The largest of all steps; 0 without a step."""
        return max((row.peak_bytes for row in self.rows), default=0)

    def frame(self) -> pd.DataFrame:
        """Return a row for each step: the fields of `StepRow` but the sample, and tokens_per_s."""
        import pandas as pd

        columns = [*(name for name in StepRow.__dataclass_fields__ if name != "sample")]
        rows = [asdict(row) | {"tokens_per_s": row.tokens_per_s} for row in self.rows]
        return pd.DataFrame(rows, columns=[*columns, "tokens_per_s"])

    def chart(self, title: str | None = None) -> Chart:
        """Draw the loss above and the gradient norm below, over the steps.

        Args:
            title: the finding, as a sentence; by default the first and the last loss.

        Raises:
            ValueError: there is no step to draw.
        """
        from labsupport.plotting import plot_training

        about = f"{len(self)} steps; {self.tokens_per_s:,.0f} tokens/s (median)"
        return plot_training(self.frame(), title=title, small_print=about)

    def state(self) -> list[dict[str, Any]]:
        """Return the rows as plain data, for a checkpoint."""
        return [asdict(row) for row in self.rows]

    @classmethod
    def from_state(cls, rows: list[dict[str, Any]]) -> History:
        """Return the history whose `state()` was saved."""
        return cls([StepRow(**row) for row in rows])


def reset_peak(device: torch.device) -> None:
    """Let the next `read_peak` count from now; on a CPU it counts from the program's start."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def read_peak(device: torch.device) -> int:
    """Return the `peak_bytes` of a step."""
    if device.type != "cuda":
        return _own_peak()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def _own_peak() -> int:
    """Return the operating system's peak of this process's resident set, in bytes."""
    if sys.platform == "linux":
        # There, getrusage also counts what the process was before exec.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # macOS counts bytes, Linux KiB: getrusage(2).
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)
