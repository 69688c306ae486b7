"""A student's checklist: boxes are counted, ticks survive everything, links lead on."""

from labsupport.course import checklist

LABS = """# Checklists

## Theory

- [ ] **T1-1** Derive the factor.
  [Chapter 1](01-squares.md#the-factor)
- [ ] **T2-1** Explain a mask. [Notebook 1](../notebooks/01-Squares.ipynb)

## Application

- [ ] **A3-1** Use it. [README](../README.md), [paper](https://example.org/x), [below](#theory)
"""


def test_a_box_of_the_labs_with_anything_in_it_is_ticked():
    for text, ticked in (
        *((LABS.replace("[ ] **T1-1**", f"[{box}] **T1-1**"), ["T1-1"]) for box in "xX✓"),
        (LABS.replace("[ ] **T1-1**", "[ x] **T1-1**"), ["T1-1"]),
        ("* [x] **T1-1** With a star.", ["T1-1"]),
        ("  - [x] T1-1 indented, not bold", ["T1-1"]),
        ("+ [x] **T1-1**: plus", ["T1-1"]),
        (LABS, []),
        ("- [x] call Anna\n- [x] **T1-x**\n**T1-1** no box\n- T1-1", []),
    ):
        boxes = checklist.items(text)
        assert [box.name for box in boxes if box.ticked] == ticked
        assert [box.name for box in boxes] == ["T1-1", "T2-1", "A3-1"] or "T2-1" not in text
    # One that is there twice counts once.
    for text in ("- [x] **P1-1** a\n- [ ] **P1-1** b", "- [ ] **P1-1** a\n- [x] **P1-1** b"):
        assert checklist.items(text) == [checklist.Item("P1-1", "P", 1, True)]


def test_links_of_the_copy_lead_where_those_of_the_labs_list_lead():
    copy = checklist.students_copy(LABS)
    assert "](theory/01-squares.md#the-factor)" in copy
    assert "](01-Squares.ipynb)" in copy
    assert "](../README.md), [paper](https://example.org/x), [below](#theory)" in copy


def test_new_boxes_come_in_behind_their_neighbours_and_no_line_of_the_students_changes():
    mine = LABS.replace("[ ] **T1-1** Derive the factor.", "[x] **T1-1** I derived it (page 3)")
    mine = mine.replace("## Application", "my note\n\n## Application")
    newer = LABS.replace(
        "- [ ] **T2-1**", "- [ ] **T1-2** Draw it.\n  [Chapter 1](01-squares.md)\n- [ ] **T2-1**"
    )
    newer = newer + "- [ ] **A3-2** Sell it.\n"
    merged, added = checklist.with_new_items(mine, newer)
    assert added == ["T1-2", "A3-2"]
    lines = merged.splitlines()
    at = lines.index("- [ ] **T1-2** Draw it.")
    assert lines[at - 2].startswith("- [x] **T1-1** I derived it")
    assert lines[at + 1 : at + 3] == [
        "  [Chapter 1](01-squares.md)",
        next(line for line in LABS.splitlines() if "T2-1" in line),
    ]
    new = {"- [ ] **T1-2** Draw it.", "  [Chapter 1](01-squares.md)", "- [ ] **A3-2** Sell it."}
    assert [line for line in lines if line not in new] == mine.splitlines()
