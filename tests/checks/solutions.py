"""The notebooks' own solutions, as source text that tests can run, and break in one place."""

import math
from functools import cache

import jupytext
import numpy as np
import pytest
import torch

from labsupport import checks
from labsupport.attention import attention, flash_attention
from labsupport.checks.verdict import mutant
from labsupport.distributed import by_hand
from labsupport.paths import notebooks_dir, notebooks_in
from labsupport.precision import FlashAttentionConfig

KNOWN = {
    "torch": torch,
    "math": math,
    "np": np,
    "F": torch.nn.functional,
    "attention": attention,
    "flash_attention": flash_attention,
    "FlashAttentionConfig": FlashAttentionConfig,
    "gradients_on_rank": by_hand.gradients_on_rank,
    "layer_on_rank": by_hand.layer_on_rank,
    "rehearse": by_hand.rehearse,
}


def solution_source(grade_id: str) -> str:
    """Return the source of the solved cell with this grade_id, in whichever notebook it is."""
    return _solutions()[grade_id]


@cache
def _solutions() -> dict[str, str]:
    return {
        cell.metadata["nbgrader"]["grade_id"]: cell.source
        for path in notebooks_in(notebooks_dir())
        for cell in jupytext.read(path).cells
        if cell.metadata.get("nbgrader")
    }


def function(source: str, name: str, *edit: str):
    """Return the function `name` of this source, edited: old text, new text, and so on."""
    for old, new in zip(edit[::2], edit[1::2], strict=True):
        assert old in source, f"the solution no longer contains {old!r}"
        source = source.replace(old, new)
    namespace = dict(KNOWN)
    exec(source, namespace)
    return namespace[name]


def diagnosis(check, *student, **options):
    """Return what a check that must fail, or the first of several, says."""
    with pytest.raises(checks.CheckFailed) as caught:
        for one in check if isinstance(check, tuple | list) else (check,):
            one(*student, **options)
    return str(caught.value)


def each(*tables):
    """Parametrize a test by (check, student, said) for each mistake of (check, solution, table)."""
    return pytest.mark.parametrize(
        ("check", "student", "said"),
        [
            pytest.param(
                check, mutant(solution, m.edit), m.say, id=f"{solution.__name__}: {m.say[:60]}"
            )
            for check, solution, table in tables
            for m in table
        ],
    )
