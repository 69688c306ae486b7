"""Microseconds of a call, beside PyTorch's own."""

from benchmarks.__main__ import main


def test_each_backend_is_timed_beside_sdpa_with_and_without_gradients(capsys):
    options = "--backends standard --calls 3 --rounds 1 --device cpu"
    assert main(["overhead", *options.split()]) == 0
    printed = capsys.readouterr().out
    assert "above_sdpa" in printed
    assert printed.count("standard") == printed.count("F.scaled_dot_product_attention") == 2
