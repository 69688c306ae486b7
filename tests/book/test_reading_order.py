"""The table of theory/README.md, as the book reads it."""

import re

from book.reading_order import Reading, readings
from labsupport.paths import notebooks_dir, project_root

TABLE = """
## Reading order

| before or beside | read |
| --- | --- |
| [notebook 1](x.ipynb), sections 1.1 to 1.3 | chapter 1 |
| notebook 1, sections 1.7, 1.8 and 1.11 | chapter 5, as far as waves; chapter 1 again |
| [notebook 3](y.ipynb) | chapter 7 |
| an error that you do not understand | chapter 10 |

## Notation
"""


def test_sections_ranges_remarks_and_whole_notebooks_are_understood():
    assert readings(TABLE) == [
        Reading(1, (1, 2, 3), 1, ""),
        Reading(1, (7, 8, 11), 5, "as far as waves"),
        Reading(1, (7, 8, 11), 1, "again"),
        Reading(3, (), 7, ""),
    ]


def test_the_lab_s_own_table_names_sections_and_chapters_that_exist():
    root = project_root()
    table = (root / "theory" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[?notebook \d", table, re.MULTILINE)
    assert len({reading[:2] for reading in readings(table)}) == len(rows) > 10
    for reading in readings(table):
        assert list((root / "theory").glob(f"{reading.chapter:02}-*.md"))
        (twin,) = notebooks_dir().glob(f"{reading.notebook:02}-*.py")
        text = twin.read_text(encoding="utf-8")
        numbers = {int(n) for n in re.findall(rf"^# ## {reading.notebook}\.(\d+) · ", text, re.M)}
        assert set(reading.sections) <= numbers
