"""The search for the longest sequence that trains."""

from itertools import product

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.training import last_that_runs


def test_the_search_finds_the_longest_that_runs_whatever_the_guess():
    for longest, guess, widen in product((1, 5, 16, 17, 100), (1, 4, 17, 60), (1, 16)):
        tried = []

        def attempt(units, longest=longest, tried=tried):
            tried.append(units)
            return {"status": "ok" if units <= longest else "out of memory", "seqlen": units}

        assert last_that_runs(attempt, guess, widen)["seqlen"] == longest
        assert len(tried) == len(set(tried))


def test_the_search_says_so_when_nothing_runs():
    assert last_that_runs(lambda units: {"status": "out of memory"}, 8) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_search_needs_a_gpu():
    with pytest.raises(RuntimeError, match="needs a GPU"):
        main(["training", "--longest", "--limit", "1GiB"])


def test_a_remedy_that_cannot_run_is_not_searched_again_and_again():
    tried = []

    def attempt(units):
        tried.append(units)
        return {"status": "unsupported", "reason": "because"}

    assert last_that_runs(attempt, 300)["reason"] == "because"
    assert len(tried) == 1
