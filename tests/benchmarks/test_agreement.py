"""The command: three short trainings, and how far they are apart."""

import pandas as pd

from benchmarks.__main__ import main


def test_the_command_prints_and_saves(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("labsupport.profiling.runs.runs_dir", lambda: tmp_path)
    options = "--data records --length 300 --steps 2 --device cpu --save courses"
    assert main(["agreement", *options.split()]) == 0
    said = capsys.readouterr().out
    assert "the worst gradient" in said
    assert "first 20 losses: at most" in said
    assert len(pd.read_csv(tmp_path / "courses" / "results.csv")) == 6
