"""The three-day path and the checklists are true: minutes, exercises, sections, links."""

import json
import re
from pathlib import Path

from labsupport.course import checklist
from labsupport.course.three_days import read_days
from labsupport.paths import notebooks_dir, notebooks_in

PROJECT = Path(__file__).resolve().parents[2]
THEORY = PROJECT / "theory"
PAGE = (THEORY / "three-days.md").read_text(encoding="utf-8")
NOTEBOOKS = {path.stem: path for path in notebooks_in(notebooks_dir())}
NUMBERED = {int(name[:2]): name for name in NOTEBOOKS if name[0] == "0"}
CARD = re.compile(r"## Exercise (\d-\d) · .*\n●.* · (\d+) minutes · (\d+) (?:bonus )?points?")


def markdown(number):
    path = NOTEBOOKS[NUMBERED.get(number, number)]
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def card_minutes():
    """Minutes of each card, by its further notebook ("" for the ordered ones) and its number."""
    return {
        ("" if name in NUMBERED.values() else name, number): int(minutes)
        for name in NOTEBOOKS
        for number, minutes, _ in CARD.findall(markdown(name))
    }


def exercises_of(what, step):
    further = re.search(r"further/([\w-]+)", what)
    return [(further[1] if further else "", number) for number in step.exercises]


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
    named = [one for _, what, step in rows() for one in exercises_of(what, step)]
    assert sorted(named) == sorted(card_minutes())


def test_every_section_of_the_notebooks_is_on_the_path_once():
    named = [section for _, what, _ in rows() for section in sections_of(what)]
    there = [s for n in NOTEBOOKS for s in re.findall(r"^## (\d\.\d+) · ", markdown(n), re.M)]
    assert sorted(named) == sorted(there)


def test_a_row_has_at_least_the_minutes_of_its_cards():
    minutes = card_minutes()
    for _, what, step in rows():
        own = sum(minutes[one] for one in exercises_of(what, step))
        # The rest is reading: short, because long reading is the chapters'.
        assert 0 <= step.minutes - own <= 12, what


def test_the_first_cell_of_a_notebook_has_the_sums_of_its_rows_and_of_its_exercises():
    minutes = card_minutes()
    for notebook in NUMBERED:
        said = r"\*\*Time\*\*: about (\d+) minutes.*, of which the exercises take (\d+)\."
        ((total, exercises),) = re.findall(said, markdown(notebook))
        own = [
            step.minutes
            for _, what, step in rows()
            if "further/" not in what and sections_of(what)[0].startswith(f"{notebook}.")
        ]
        assert sum(own) == int(total)
        numbers = [n for further, n in minutes if not further and n.startswith(f"{notebook}-")]
        assert sum(minutes["", n] for n in numbers) == int(exercises)


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
    assert core <= 4 * 150, "minutes"


CHECKLISTS = (THEORY / "checklists.md").read_text(encoding="utf-8")


def test_every_box_of_the_checklists_is_understood_and_named_once():
    boxes = re.findall(r"^- \[ \] \*\*(\w+-\d+)\*\* ", CHECKLISTS, re.MULTILINE)
    assert boxes == [item.name for item in checklist.items(CHECKLISTS)]
    assert CHECKLISTS.count("- [") == len(boxes)


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
