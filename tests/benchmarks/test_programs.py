"""The programs as a whole: recorded runs can be repeated, and new ones saved."""

import json
import shlex

import pytest
from typer.main import get_command

from benchmarks.__main__ import PROGRAMS, main, parser_of
from labsupport.cli import app
from labsupport.profiling import runs


@pytest.mark.parametrize("name", runs.list_runs())
def test_the_command_of_a_recorded_run_parses(name):
    record = json.loads((runs.runs_dir() / name / "provenance.json").read_text(encoding="utf-8"))
    words = shlex.split(record["command"])
    module, *arguments = words[words.index("-m") + 1 :]
    if module == "labsupport.cli":
        command = get_command(app)
        while hasattr(command, "commands"):
            command = command.commands[arguments.pop(0)]
        command.make_context(command.name, arguments)
    else:
        assert module == "benchmarks"
        assert parser_of(arguments[0]).parse_args(arguments[1:]).save


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_explains_its_options(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"python -m benchmarks {name}" in capsys.readouterr().out


def test_a_program_shows_its_table_and_saves_it(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(runs, "data_dir", lambda: tmp_path)
    small = "--backends standard,sdpa_flash --seqlen 32,64 --device cpu --max-seconds 0.1"
    assert main(["attention", *small.split(), "--save", "small"]) == 0
    assert "sdpa_flash" in capsys.readouterr().out
    assert len(runs.load_run("small")) == 4
