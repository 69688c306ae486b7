"""The three-day path and the checklists are true: minutes, exercises, sections, links."""

import json
import re
from pathlib import Path

import pytest

from labsupport.course import checklist
from labsupport.course.three_days import read_days
from labsupport.paths import notebooks_dir

PROJECT = Path(__file__).resolve().parents[2]
THEORY = PROJECT / "theory"
PAGE = (THEORY / "three-days.md").read_text(encoding="utf-8")
NOTEBOOKS = {int(path.name[:2]): path for path in sorted(notebooks_dir().glob("*.ipynb"))}
CARD = re.compile(r"### Exercise (\d-\d) · .*\n●.* · (\d+) minutes · (\d+) points")


def markdown(number):
    cells = json.loads(NOTEBOOKS[number].read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def card_minutes():
    return {
        name: int(minutes)
        for number in NOTEBOOKS
        for name, minutes, _ in CARD.findall(markdown(number))
    }


def rows():
    """Each row of the days: its day, the sections it names, and the step it is."""
    for day in read_days():
        own = PAGE.split(f"## Day {day.number} · ", 1)[1].split("\n## ", 1)[0]
        whats = re.findall(r"^\| (?:core|extra) \| ([^|]*) \|", own, re.MULTILINE)
        assert len(whats) == len(day.steps), "a row that the program does not understand"
        yield from zip([day] * len(whats), whats, day.steps, strict=True)


def sections_of(what):
    """ "3.7 to 3.9 and the end: ..." as 3.7, 3.8, 3.9."""
    head = re.split(r": | · ", what, maxsplit=1)[0]
    if span := re.match(r"(\d)\.(\d+) to \1\.(\d+)", head):
        return [f"{span[1]}.{n}" for n in range(int(span[2]), int(span[3]) + 1)]
    return re.findall(r"\d\.\d+", head)


def test_every_exercise_of_the_notebooks_is_on_the_path_once():
    named = [name for _, _, step in rows() for name in step.exercises]
    assert sorted(named) == sorted(card_minutes())


def test_every_section_of_the_notebooks_is_on_the_path_once():
    named = [section for _, what, _ in rows() for section in sections_of(what)]
    there = [s for n in NOTEBOOKS for s in re.findall(r"^## (\d\.\d+) · ", markdown(n), re.M)]
    assert sorted(named) == sorted(there)


def test_an_exercise_stands_in_the_row_of_its_section():
    for number in NOTEBOOKS:
        section = None
        for line in markdown(number).splitlines():
            if heading := re.match(r"## (\d\.\d+) · ", line):
                section = heading[1]
            elif exercise := re.match(r"### Exercise (\d-\d) · ", line):
                (row,) = (what for _, what, step in rows() if exercise[1] in step.exercises)
                assert section in sections_of(row), row


def test_a_row_has_at_least_the_minutes_of_its_cards():
    minutes = card_minutes()
    for _, what, step in rows():
        assert step.minutes >= sum(minutes[name] for name in step.exercises), what
        # The rest is reading: short, because long reading is the chapters'.
        assert step.minutes - sum(minutes[name] for name in step.exercises) <= 12, what


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (r"1\.", r"about (\d+) minutes; the exercises"),
        (r"2\.", r"about (\d+) minutes; the exercises"),
        (r"3\.[1-9]$", r"part one about (\d+) minutes"),
        (r"3\.\d\d", r"part two about (\d+)"),
        (r"4\.", r"about (\d+) minutes, of which"),
    ],
)
def test_the_rows_of_a_notebook_add_up_to_what_its_first_cell_says(sections, said):
    (total,) = re.findall(said, markdown(int(sections[0])))
    own = [
        step.minutes
        for _, what, step in rows()
        if re.match(sections, (sections_of(what) or ["4.8"])[0])  # "the end of notebook 4"
    ]
    assert sum(own) == int(total)


def test_the_sums_that_the_page_begins_with_are_those_of_its_rows():
    core = sum(step.minutes for _, _, step in rows() if step.kind == "core")
    extra = sum(step.minutes for _, _, step in rows() if step.kind == "extra")
    for words, minutes in (
        ("the core", core),
        ("the extra rows", extra),
        ("everything", core + extra),
    ):
        (line,) = (line for line in PAGE.splitlines() if re.match(rf"\| (\*\*)?{words}", line))
        cells = [cell.strip(" *") for cell in line.split("|")]
        assert cells[2:4] == [str(minutes), f"{minutes // 60} h {minutes % 60:02}"]
    assert 240 <= core <= 360, "four to six hours"


def test_the_shapes_for_a_day_and_for_a_term_have_the_minutes_of_their_rows():
    minutes = {what: step.minutes for _, what, step in rows()}

    def of(sections):
        inside = {what for what in minutes if set(sections_of(what)) & set(sections)}
        assert {s for what in inside for s in sections_of(what)} == set(sections), sections
        return sum(minutes[what] for what in inside)

    def sections_said(said):
        return [section for part in said.split(", ") for section in sections_of(part)]

    weeks = re.findall(r"^\| \d \| ([^|]*) \| (\d+) \|", PAGE, re.MULTILINE)
    assert len(weeks) == 8
    for said, total in weeks:
        ends = minutes["the end of notebook 4: three questions"] if "4.8" in said else 0
        assert of(sections_said(said)) + ends == int(total), said
    seen = [section for said, _ in weeks for section in sections_said(said)]
    assert sorted(seen) == sorted(s for what in minutes for s in sections_of(what))

    one_day = PAGE.split("**In one day**", 1)[1].split("**A term", 1)[0]
    parts = re.findall(r"^\|[^|]*\| (\d[^|]*) \| (\d+) \|", one_day, re.MULTILINE)
    assert len(parts) == 3
    for said, total in parts:
        assert of(sections_said(said)) == int(total), said
    done = {section for said, _ in parts for section in sections_said(said)}
    exercises = [
        n for _, what, step in rows() for n in step.exercises if done & {*sections_of(what)}
    ]
    assert len(exercises) == 11
    assert "three hours" in one_day
    assert "eleven exercises" in one_day
    assert abs(sum(int(total) for _, total in parts) - 180) <= 10


def test_the_chapters_take_what_the_page_says_at_its_rate():
    words = sum(len(path.read_text("utf-8").split()) for path in THEORY.glob("[0-9]*.md"))
    (said,) = re.findall(r"^\| the ten chapters.*\| (\d+) \|", PAGE, re.MULTILINE)
    assert abs(words / 150 - int(said)) <= 15


def test_the_machines_times_are_those_of_the_field_guide():
    guide = (THEORY / "10-field-guide.md").read_text(encoding="utf-8")
    in_guide = dict(re.findall(r"^\| notebook (\d)[^|]*\| (\d+) s", guide, re.MULTILINE))
    on_page = dict(re.findall(r"^\| (\d) \| (\d+) s", PAGE, re.MULTILINE))
    assert on_page == in_guide
    assert len(on_page) == 4


CHECKLISTS = (THEORY / "checklists.md").read_text(encoding="utf-8")


def test_every_box_of_the_checklists_is_understood_and_named_once():
    boxes = re.findall(r"^- \[ \] \*\*(\w+-\d+)\*\* ", CHECKLISTS, re.MULTILINE)
    assert boxes == [item.name for item in checklist.items(CHECKLISTS)]
    assert CHECKLISTS.count("- [") == len(boxes)


def test_boxes_stand_under_their_kind_and_day_and_are_numbered():
    kinds = {"Theory": "T", "Practice": "P", "Application": "A"}
    for kind, under in re.findall(r"^## (\w+):.*\n(.*?)(?=^## |\Z)", CHECKLISTS, re.M | re.S):
        for day, text in re.findall(r"^### Day (\d)\n(.*?)(?=^### |\Z)", under, re.M | re.S):
            names = [item.name for item in checklist.items(text)]
            assert names == [f"{kinds[kind]}{day}-{n}" for n in range(1, len(names) + 1)]
            assert names


def test_every_box_says_where_it_is_taught():
    for box in re.split(r"\n(?=- \[ \])", CHECKLISTS)[1:]:
        box = re.split(r"\n\n", box)[0]
        assert re.search(r"\]\([^)]+\)|Notebooks? \d", box), box


def test_practice_asks_for_every_exercise_of_its_day():
    for day in read_days():
        for name in (n for step in day.steps for n in step.exercises):
            boxes = re.split(r"\n(?=- \[ \])", CHECKLISTS.split("## Practice", 1)[1])
            assert any(
                re.search(rf"\b{name}\b", box) for box in boxes if f"**P{day.number}-" in box
            ), name
