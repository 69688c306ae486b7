"""The programs as a whole: recorded runs can be repeated, and new ones are shown and saved."""

import json
import re
import shlex
from importlib.util import find_spec
from itertools import product

import pandas as pd
import pytest
import torch
from typer.main import get_command

from benchmarks import agreement, choose, generation, predictor, trace
from benchmarks.__main__ import PROGRAMS, main, parser_of
from benchmarks.training import last_that_runs
from labsupport.analysis import nsight
from labsupport.cli import app
from labsupport.profiling import runs
from labsupport.profiling.grids import Case
from labsupport.profiling.hardware import measured_ceilings
from labsupport.training import Decoder, DecoderConfig

CPU = torch.device("cpu")
SHAPE = DecoderConfig(vocab_size=64, width=32, layers=2, heads=2)


# Programs, and runs with options, that only the commit of the recorded run still has.
GONE = {"attention", "baseline_noise", "tasks", "ring-two-h200", "ring-four-h200"}


def test_the_commands_of_recorded_runs_parse():
    for name in runs.list_runs():
        about = json.loads((runs.runs_dir() / name / "provenance.json").read_text(encoding="utf-8"))
        words = shlex.split(about["command"])
        module, *arguments = words[words.index("-m") + 1 :]
        if {name, arguments[0]} & GONE:
            assert re.match(r"[0-9a-f]{40}", about["commit"]), name
        elif module == "labsupport.cli":
            command = get_command(app)
            while hasattr(command, "commands"):
                command = command.commands[arguments.pop(0)]
            command.make_context(command.name, arguments)
        else:
            assert module == "benchmarks"
            assert parser_of(arguments[0]).parse_args(arguments[1:]).save, name


def test_a_timeline_has_each_call_from_zero_on_and_ncus_reasons_are_rows(saved, capsys):
    assert main(["trace", "--seqlen", "32", "--device", "cpu", "--save", "small"]) == 0
    assert "bmm" in capsys.readouterr().out
    calls = saved("small").groupby("call")
    assert set(calls.groups) == {"textbook", "textbook, CUDA graph", "FlashAttention"}
    assert (calls.start_us.min() == 0).all()
    assert (calls.duration_us.min() >= 0).all()

    stall = "{}".join(nsight.STALL)
    launch = {"kernel": "void pytorch_flash::fwd<4>(int)", stall.format("wait"): 2.5, "ID": 0.0}
    assert trace.reasons([launch]) == [
        {"launch": 0, "kernel": "fwd", "reason": "wait", "cycles": 2.5}
    ]
    names = {
        "void at::native::(anonymous namespace)::f<1>(int)": "f",
        "void at::native::<unnamed>::g<float, (int)4>(const T1 *, int)": "g",
        "Memcpy HtoD (Pinned -> Device)": "Memcpy HtoD",
    }
    assert {name: trace.short_name(name) for name in names} == names


def test_every_program_is_listed_with_what_it_measures(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "tune               The fastest tilings" in capsys.readouterr().out
    assert all(parser_of(name).description for name in PROGRAMS)


@pytest.mark.parametrize(
    ("command", "rows", "shown"),
    [
        ("agreement --data records --length 64 --steps 2", 6, "the worst gradient"),
        ("training --lengths 64 --strategies 4", 1, "+ checkpointing"),
        ("architectures --bfloat16 llama mistral", 10, "left padding"),
        ("planner --preset tiny --lengths 64", 1, "predicted_bytes"),
        pytest.param(
            "long_positions --model stories15m --modules heapq --length 320 --bucket 160",
            8,
            "NTK-aware",
            marks=pytest.mark.slow,
        ),
        (
            "peers --tokens 128 --hidden 32 --seqlen 64 --head-dim 16 --dtype float32 "
            "--ours flash_torch --peers sdpa_flash,fa4 --seconds 0.01",
            8,
            "Geometric means",
        ),
    ],
)
def test_a_program_shows_its_table_and_saves_it(command, rows, shown, capsys, saved):
    assert main([*command.split(), "--device", "cpu", "--save", "small"]) == 0
    assert shown in capsys.readouterr().out
    table = saved("small")
    assert len(table) == rows
    assert "status" not in table or (table.status == "ok").all()
    if "planner" in command:  # a name that is taken loses nothing
        for more in ([], ["--overwrite"]):
            main([*command.split(), "--device", "cpu", "--save", "small", *more])
        assert runs.list_runs() == ["small", "small-2"]
        assert capsys.readouterr().out.count("--overwrite would have replaced it") == 1


def test_what_does_not_exist_is_refused_before_anything_starts(capsys):
    for wrong, said in (
        ("sequence_parallel --layouts zigzg", "there is no zigzg, only zigzag, contiguous"),
        ("sequence_parallel --savings 99", "invalid choice: 99"),
        ("training --strategies=9", "only 0, 1, 2, 3, 4, 5, 6"),
        ("data_parallel --presets large", "no preset"),
        ("peers --peers nothing", "unknown backend 'nothing'"),
        ("training --longest --limit 1GiB --device cpu", "needs a GPU"),
        ("resources --capability 80 --hopper", "90" if find_spec("triton") else "not installed"),
    ):
        with pytest.raises((SystemExit, ValueError, RuntimeError)) as ended:
            main(wrong.split())
        assert said in f"{ended.value} {capsys.readouterr().err}"


def test_a_recorded_grid_holds_times_memory_and_ceilings(monkeypatch):
    monkeypatch.setattr(predictor, "measure_ceilings", measured_ceilings)  # not new in each pass
    cases = [Case("sdpa_flash", 64, direction=d) for d in ("forward", "forward+backward")]
    table = predictor.record([*cases, Case("fa4", 64)], CPU, passes=2, max_seconds=0.001)
    assert list(table.status) == ["ok", "ok", "unsupported"]
    assert (table.repeats[:2] >= 4).all()
    assert (table.between_passes[:2] >= 1).all()
    about = table.attrs["provenance"]
    assert about["units"] == torch.get_num_threads()
    assert about["copy_gb_s"] > 0
    assert set(about["matmul_tflops"]) == {"float32", "bfloat16", "float16"}
    assert predictor.show(table, None).startswith("2 of 3 cases measured")


def test_the_search_finds_the_longest_that_runs_whatever_the_guess():
    for longest, guess, widen in product((1, 5, 16, 17, 100), (1, 4, 17, 60), (1, 16)):
        tried = []

        def attempt(units, longest=longest, tried=tried):
            tried.append(units)
            return {"status": "ok" if units <= longest else "out of memory", "seqlen": units}

        assert last_that_runs(attempt, guess, widen)["seqlen"] == longest
        assert len(tried) == len(set(tried))
    assert last_that_runs(lambda units: {"status": "out of memory"}, 8, 16) is None
    answers = iter([{"status": "unsupported"}])  # it is not tried again and again
    assert last_that_runs(lambda units: next(answers), 300, 16)["status"] == "unsupported"


@pytest.mark.slow
def test_speeds_stand_beside_their_ceilings(capsys, saved, monkeypatch):
    monkeypatch.setattr(generation, "LOOPS", ("transformers, static cache", "loop, dynamic cache"))
    monkeypatch.setattr(generation, "TRAINING", ("eager", "fa4"))
    monkeypatch.setattr(generation, "REPEATS", 1)
    monkeypatch.setitem(generation.MAX_SECONDS, "cpu", 0.01)
    assert main(["generation", "--device", "cpu", "--save", "small"]) == 0
    table = saved("small")
    assert table.attrs["provenance"]["copy_gb_s"] > 0
    by_part = dict(list(table.groupby("what")))
    decode, prefill, encoder, training = (by_part[what] for what in generation.PARTS)
    assert (encoder.status == "ok").all(), encoder.reason.tolist()
    assert (decode.status == "ok").all(), decode.reason.tolist()
    assert decode.tokens_per_s.tolist() == pytest.approx(
        (decode.batch * 1000 / decode.median_ms).tolist()
    )
    kernels = prefill.set_index("name").kernel
    assert kernels["sdpa_flash"] == "aten::_scaled_dot_product_flash_attention_for_cpu"
    for part, rate in ((decode, "tokens_per_s"), (prefill, "tflops")):
        assert part.of_ceiling.tolist() == pytest.approx((part[rate] / part.ceiling).tolist())
    statuses = training.groupby("name").status.unique().map(list).to_dict()
    assert statuses == {"eager": ["ok"], "fa4": ["unsupported"]}
    printed = capsys.readouterr().out
    assert "random weights" in printed
    assert "unsupported: " in printed


def test_the_first_gradients_obey_the_rule_and_a_wrong_one_is_found(monkeypatch):
    def wrong(config, savings):
        """Right in the oracle and the yardstick, a thousandth off in what is judged."""
        model = Decoder(config, savings)
        if savings.attention == "sdpa_flash":
            model.blocks[0].attention.query.weight.register_hook(lambda g: g * 1.001)
        return model

    text = torch.randint(64, (1, 100), generator=torch.Generator().manual_seed(0))
    given = SHAPE, lambda step: [{"tokens": text, "labels": text.roll(-1, 1)}]
    errors = agreement.gradient_errors(*given, "flash_torch", CPU)
    assert errors.keys() == dict(Decoder(SHAPE).named_parameters()).keys()
    assert all(report.ok for report in errors.values()), errors
    monkeypatch.setattr(agreement, "Decoder", wrong)
    errors = agreement.gradient_errors(*given, "sdpa_flash", CPU)
    faults = [name for name, report in errors.items() if not report.ok]
    assert faults == ["blocks.0.attention.query.weight"]


@pytest.mark.slow
def test_orders_name_the_fastest_backend_first(capsys):
    sizes = ["--seqlen", "64,32", "--tokens", "64", "--hidden", "64", "--head-dim", "64"]
    assert main(["choose", "--device", "cpu", "--seconds", "0.001", *sizes]) == 0
    assert '(True, False, True): "S S S",' in capsys.readouterr().out

    row = {"status": "ok", "direction": "forward", "head_dim": 128, "causal": True}
    times = {(1024, 1): (3, 1, 2), (512, 32): (1, 2, 3), (1024, 16): (2, 1, 3)}
    table = pd.DataFrame(
        row | {"seqlen": seqlen, "batch": batch, "backend": name, "median_ms": ms}
        for (seqlen, batch), each in times.items()
        for name, ms in zip(("fa4", "flash_gluon", "sdpa_cudnn"), each, strict=True)
    )
    (line,) = choose.orders(table)
    assert line.strip() == '(False, True, True): "GCF FGC GFC",'
