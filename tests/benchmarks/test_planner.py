"""The command: a plan beside a measurement."""

from benchmarks.__main__ import main


def test_the_command_compares_each_length(capsys):
    options = "--preset tiny --lengths 64,128 --device cpu --loss-chunk 32"
    assert main(["planner", *options.split()]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["seqlen", "predicted", "measured", "error", "peak", "status"]
    assert [row.split()[0] for row in rows] == ["64", "128"]
    assert all(row.endswith("ok") for row in rows)
