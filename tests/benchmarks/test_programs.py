"""The programs as a whole: recorded runs can be repeated, and new ones are shown and saved."""

import json
import shlex
from argparse import Namespace

import pytest
import torch
from typer.main import get_command

from benchmarks.__main__ import PROGRAMS, main, parser_of
from benchmarks.predictor import record, show
from labsupport.cli import app
from labsupport.profiling import runs
from labsupport.profiling.cases import Case


def test_the_commands_of_recorded_runs_parse():
    for name in runs.list_runs():
        about = json.loads((runs.runs_dir() / name / "provenance.json").read_text(encoding="utf-8"))
        words = shlex.split(about["command"])
        module, *arguments = words[words.index("-m") + 1 :]
        if module == "labsupport.cli":
            command = get_command(app)
            while hasattr(command, "commands"):
                command = command.commands[arguments.pop(0)]
            command.make_context(command.name, arguments)
        else:
            assert module == "benchmarks"
            assert parser_of(arguments[0]).parse_args(arguments[1:]).save, name


def test_every_program_explains_its_options(capsys):
    for name in PROGRAMS:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        assert f"python -m benchmarks {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "rows", "shown"),
    [
        (
            "attention --backends standard,sdpa_flash --seqlen 32,64 --max-seconds 0.1",
            4,
            ["sdpa_flash"],
        ),
        (
            "agreement --data records --length 64 --steps 2",
            6,
            ["the worst gradient", "first 20 losses: at most"],
        ),
        (
            "training --lengths 64 --rungs 4 --attention sdpa_flash",
            1,
            ["+ checkpointing"],
        ),
        ("planner --preset tiny --lengths 64 --loss-chunk 32", 1, ["predicted", "64 "]),
        (
            "overhead --backends standard --calls 3 --rounds 1",
            4,
            ["above_sdpa", "F.scaled_dot_product_attention", "standard"],
        ),
    ],
)
def test_a_program_shows_its_table_and_saves_it(
    command, rows, shown, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(runs, "data_dir", lambda: tmp_path)
    assert main([*command.split(), "--device", "cpu", "--save", "small"]) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in shown)
    table = runs.load_run("small")
    assert len(table) == rows
    assert "status" not in table or (table.status == "ok").all()


def test_a_recorded_grid_holds_times_memory_and_ceilings():
    cases = [Case("sdpa_flash", 64, direction=d) for d in ("forward", "forward+backward")]
    table = record(
        [*cases, Case("fa4", 64)], device="cpu", passes=2, max_seconds=0.001, progress=False
    )
    assert list(table.status) == ["ok", "ok", "unsupported"]
    assert (table.repeats[:2] >= 4).all()
    assert (table.between_passes[:2] >= 1).all()
    about = table.attrs["provenance"]
    assert about["units"] == torch.get_num_threads()
    assert about["copy_gb_s"] > 0
    assert set(about["matmul_tflops"]) == {"float32", "bfloat16", "float16"}
    assert show(table, Namespace()).startswith("2 of 3 cases measured")
