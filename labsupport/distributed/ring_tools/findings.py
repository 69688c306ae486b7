"""What `ring check` finds: one tensor of a ring beside one device's, or a ring that did not run."""

from __future__ import annotations

from dataclasses import dataclass

from labsupport.distributed.ring_tools.trouble import LARGE_ERRORS, advice

Failure = tuple[str, str | None]  # what is wrong, and what helps


@dataclass(frozen=True)
class Finding:
    """One tensor of one ring against one device.

    maximum, rmse, relative: errors. faults: why it does not pass; empty if it does.
    """

    ring: str
    kernel: str
    tensor: str
    maximum: float
    rmse: float
    relative: float
    faults: tuple[str, ...]

    def failures(self) -> list[Failure]:
        """What is wrong, and what helps."""
        of = f"{self.tensor} of {self.ring} by {self.kernel}"
        return [(f"{of}: {fault}", LARGE_ERRORS) for fault in self.faults]

    def __str__(self) -> str:
        return (
            f"{self.ring:11} {self.kernel:12} {self.tensor:4} {self.maximum:9.1e} "
            f"{self.rmse:9.1e} {self.relative:9.1e}  {'; '.join(self.faults) or 'ok'}"
        )


@dataclass(frozen=True)
class NotRun:
    """A kernel that cannot run here (ring is ""), or whose ring failed; a problem if asked for."""

    ring: str
    kernel: str
    reason: str
    problem: bool

    def failures(self) -> list[Failure]:
        """What is wrong, and what helps. The reason alone says it: a name is no symptom."""
        if not self.problem:
            return []
        if not self.ring:
            return [(f"{self.kernel} cannot run here: {self.reason}", None)]
        return [(f"{self.ring} by {self.kernel}: {self.reason}", advice(self.reason))]

    def __str__(self) -> str:
        return f"{self.ring:11} {self.kernel:12} {'FAILED' if self.problem else '-'}: {self.reason}"
