"""The recorded runs: what they count is right, and a case that does not run is a row."""

import pandas as pd
import pytest
import torch

from benchmarks import generation
from benchmarks.__main__ import main
from benchmarks.generation import decode_bytes, llama
from labsupport.profiling.runs import load_run

CPU = torch.device("cpu")
LOOPS = ("transformers, static cache", "graphed")


def test_a_decode_step_reads_the_weights_and_the_cache_of_each_row():
    model = llama("tiny", CPU, torch.bfloat16)
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert decode_bytes(model, 1, 0) == 2 * weights
    cache = 2 * 2 * 2 * 16  # keys and values, layers, key heads, head_dim
    assert decode_bytes(model, 5, 10) == 2 * (weights + 5 * 10 * cache)


def test_the_command_measures_prints_and_saves(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("labsupport.profiling.runs.runs_dir", lambda: tmp_path)
    monkeypatch.setattr(generation, "LOOPS", LOOPS)
    monkeypatch.setattr(generation, "TRAINING", ("eager", "sdpa_flash", "fa4"))
    monkeypatch.setattr(generation, "REPEATS", 1)
    monkeypatch.setitem(generation.MAX_SECONDS, "cpu", 0.01)
    options = ["--what", "decode,prefill,training", "--device", "cpu", "--save", "small"]
    assert main(["generation", *options]) == 0
    printed = capsys.readouterr().out
    table = load_run("small", folder=tmp_path)
    assert "random weights" in printed
    assert table.attrs["provenance"]["copy_gb_s"] > 0
    by_part = dict(list(table.groupby("what")))
    decode = by_part["decode"]
    assert (decode.status == "ok").all(), decode.reason.tolist()
    assert set(decode.name) == set(LOOPS)
    rates = decode.batch * 1000 / decode.median_ms
    pd.testing.assert_series_equal(decode.tokens_per_s, rates, check_names=False)
    assert decode.of_ceiling.tolist() == pytest.approx(
        (decode.tokens_per_s / decode.ceiling).tolist()
    )
    prefill = by_part["prefill"].set_index("name")
    assert {"sdpa", "sdpa_flash"} <= set(prefill.index)
    assert prefill.kernel["sdpa_flash"] == "aten::_scaled_dot_product_flash_attention_for_cpu"
    measured = prefill[prefill.status == "ok"]
    assert len(measured)
    assert measured.of_ceiling.tolist() == pytest.approx(
        (measured.tflops / measured.ceiling).tolist()
    )
    training = by_part["training"].set_index(["name", "seqlen"])
    assert (training.status[["eager", "sdpa_flash"]] == "ok").all()
    if not torch.cuda.is_available():
        assert (training.status[["fa4"]] == "unsupported").all()
        assert "unsupported: " in printed
