"""Progress on the three-day path: exercises and ticks, day by day, and the next step."""

import pytest
from typer.testing import CliRunner

from labsupport import paths
from labsupport.cli import app
from labsupport.course import checklist
from labsupport.course.progress import FAILED, NOT_RUN, PASSED, CheckState
from labsupport.course.start import start_work
from labsupport.course.three_days import lines_of_path, progress_on_path, read_days

PAGE = """# Three days

| core | not of a day: **9-9** | | 99 | |

## Day 1 · Square

| | what | beside it | minutes | in a hurry |
| --- | --- | --- | --- | --- |
| core | 1.1 · exercises **1-1**, **1-2** | [chapter](01.md) | 20 | skip |
| break | after an hour | | 15 | |
| extra | 1.3 · exercise **1-3** | | 7 | |

## Day 2 · Cube

| core | 2.1 · exercise **2-1** | | 12 | |

## The capstone

| core | not of a day either: **8-8** | | 99 | |
"""


@pytest.fixture
def days(tmp_path):
    (tmp_path / "three-days.md").write_text(PAGE)
    return read_days(tmp_path / "three-days.md")


def checks(**status):
    """Two checks of each exercise, the first passed, the second as said."""
    names = {name: f"ex-{name.removeprefix('e').replace('_', '-')}-square-it" for name in status}
    return [
        CheckState(names[name], 1, state)
        for name, last in status.items()
        for state in (PASSED, last)
    ]


def test_each_day_says_what_is_done_and_what_comes_next(days):
    assert (days[0].number, days[0].title) == (1, "Square")
    assert [step.minutes for step in days[0].steps] == [20, 7]
    own = {
        "01": checks(e1_1=PASSED, e1_2=FAILED, e1_3=NOT_RUN),
        "02": checks(e2_1=PASSED),
    }
    boxes = checklist.items("- [x] **T1-1** a\n- [ ] **P1-1** b\n- [x] **A2-1** c")
    assert lines_of_path(days, own, boxes)[1:] == [
        "  Day 1: 1 of 2 exercises, 0 of 1 extra, 1 of 2 ticks; next: 1-2 square it",
        "  Day 2: 1 of 1 exercises, 1 of 1 ticks; all exercises done",
        "  ticks in Checklist.md: theory 1 of 1, practice 0 of 1, application 1 of 1",
    ]


def test_an_exercise_in_parts_is_done_with_its_last_part_and_further_steps_are_extra(days):
    part = [CheckState("ex-1-1-other", 1, NOT_RUN)]
    core = {"01": checks(e1_1=PASSED, e1_2=PASSED, e1_3=PASSED)}
    assert "2 of 2 exercises, 1 of 1 extra; all" in lines_of_path(days, core, [])[1]
    assert (
        "1 of 2 exercises, 1 of 1 extra; next: 1-1 other"
        in lines_of_path(days, {"01": core["01"] + part}, [])[1]
    )
    both = core | {"further/more": [CheckState("ex-1-3-other", 1, NOT_RUN)]}
    assert "2 of 2 exercises, 0 of 1 extra; next: 1-3 other" in lines_of_path(days, both, [])[1]


def test_without_the_project_there_is_no_path_and_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "labsupport")
    monkeypatch.delenv("LABSUPPORT_ROOT", raising=False)
    assert progress_on_path(tmp_path, {"01": checks(e1_1=PASSED)}) == []


def test_the_command_shows_points_days_and_ticks_together(folder, tmp_path):
    work = tmp_path / "work"
    start_work(work, folder)
    (work / "Checklist.md").write_text("- [x] **P1-1** done\n- [ ] **P1-2** not yet\n")
    said = CliRunner().invoke(app, ["progress", str(work)]).output
    assert "1-1 square    0 of 2 points" in said
    assert "Day 1: 0 of 1 exercises, 1 of 2 ticks; next: 1-1 square" in said
    assert "practice 1 of 2" in said
