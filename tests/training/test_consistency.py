"""Losses of two attentions, side by side."""

import pandas as pd
import pytest

from labsupport.training.consistency import together


def test_the_first_losses_of_equal_seeds_are_compared():
    rows = [("a", 0, 0, 1.0), ("b", 0, 0, 1.5), ("a", 0, 30, 1.0), ("b", 0, 30, 9.0)]
    table = pd.DataFrame([*rows, ("a", 1, 0, 7.0)], columns=["backend", "seed", "step", "loss"])
    assert together(table, steps=20) == 0.5
    assert together(table, steps=40) == 8.0
    for part in (table.backend == "a", (table.backend == "b") | (table.seed == 1)):
        with pytest.raises(ValueError, match="two attentions"):
            together(table[part])
