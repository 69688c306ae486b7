"""The search for the longest sequence, and the command."""

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.training import last_that_runs


@pytest.mark.parametrize("longest", [1, 5, 16, 17, 100])
@pytest.mark.parametrize("guess", [1, 4, 17, 60])
@pytest.mark.parametrize("widen", [1, 16])
def test_the_search_finds_the_longest_that_runs_whatever_the_guess(longest, guess, widen):
    tried = []

    def attempt(units):
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


def test_the_command_prints_and_saves(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("labsupport.profiling.runs.runs_dir", lambda: tmp_path)
    options = "--lengths 64 --rungs 2,4 --attention sdpa_flash --device cpu --save steps"
    assert main(["training", *options.split()]) == 0
    said = capsys.readouterr().out
    assert "+ FlashAttention" in said
    assert "+ checkpointing" in said
    assert (tmp_path / "steps" / "provenance.json").exists()


@pytest.mark.parametrize("strategies", ["7", "1,x", "-1"])
def test_a_remedy_that_does_not_exist_is_refused(strategies, capsys):
    with pytest.raises(SystemExit):
        main(["training", f"--rungs={strategies}"])
    assert "only 0, 1, 2, 3, 4, 5, 6" in capsys.readouterr().err
