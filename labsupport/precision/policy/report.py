"""What a precision policy changed in a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class PolicyChange:
    """One change.

    Attributes:
        component: attention, mlp, norm, embedding, head, loss or other.
        module: the module's qualified name.
        what: a parameter's name, or "inputs", "output", "kernel", "statistics", ...
        before, after: dtypes, or in words.
    """

    component: str
    module: str
    what: str
    before: str
    after: str


@dataclass(frozen=True)
class PolicyReport:
    """What `apply_precision_policy` did: `len(report)` changes, and notes for the reader.

    Notes say what was found, whether or not anything changed: tied weights, what was left alone,
    what no policy can reach, what training needs.
    """

    changes: tuple[PolicyChange, ...]
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.changes)

    def __iter__(self) -> Iterator[PolicyChange]:
        return iter(self.changes)

    def __str__(self) -> str:
        kinds: dict[tuple[str, str, str, str], list[PolicyChange]] = {}
        for change in self.changes:
            kind = (change.component, change.what, change.before, change.after)
            kinds.setdefault(kind, []).append(change)
        lines = [
            f"{component:<10} {what:<14} {before} → {after}"
            + f"   {len(same)} module{'s' * (len(same) > 1)}, e.g. {same[0].module or 'the model'}"
            for (component, what, before, after), same in kinds.items()
        ]
        return "\n".join([*(lines or ["nothing changed"]), *(f"note: {n}" for n in self.notes)])

    def to_dataframe(self) -> pd.DataFrame:
        """A row for each change: component, module, what, from, to."""
        import pandas as pd

        rows = [(c.component, c.module, c.what, c.before, c.after) for c in self.changes]
        return pd.DataFrame(rows, columns=["component", "module", "what", "from", "to"])
