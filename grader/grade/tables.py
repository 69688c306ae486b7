"""Tables that instructors write: the class, repositories, overrides."""

import csv
import io
import re
from dataclasses import dataclass
from pathlib import Path


def read_table(path: Path, *columns: str) -> list[dict[str, str]]:
    """Read a CSV file with a header; commas or semicolons, as spreadsheet programs write it.

    Raises:
        ValueError: a column is missing, or it is no such file.
        OSError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8: save it as CSV UTF-8") from None
    header = text.split("\n", 1)[0]
    separator = ";" if header.count(";") > header.count(",") else ","
    rows = list(csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, restval=""))
    if missing := [name for name in columns if rows and name not in rows[0]]:
        raise ValueError(f"{path} has no column {missing[0]!r}; its first line is {header.strip()}")
    return [{str(k): v.strip() for k, v in row.items() if isinstance(v, str)} for row in rows]


@dataclass(frozen=True)
class ClassList:
    """Rows of a file by student, as the lab calls them; the system is "Moodle", "Canvas" or ""."""

    system: str
    rows: dict[str, dict[str, str]]

    def find(self, student: str) -> str | None:
        """Return the name in the list of a student who handed in; None if there is none."""
        if not self.system:
            return student if student in self.rows else None
        number = number_of(student)
        return next((one for one in self.rows if number and number_of(one) == number), None)


def number_of(student: str) -> str:
    """Return the number by which Moodle or Canvas knows a student: 4711 of "Ada_4711"."""
    found = re.search(r"_(\d+)$", student)
    return found[1] if found else ""


def read_class(path: Path) -> ClassList:
    """Read a list of the class: Moodle's grading worksheet, Canvas's gradebook, or any table.

    Raises:
        ValueError: it has none of the columns "Identifier", "ID" and "student".
        OSError: it cannot be read.
    """
    rows = read_table(path)
    columns, students = rows[0] if rows else {}, {}
    if "Identifier" in columns:
        for row in rows:
            if number := re.search(r"\d+$", row["Identifier"]):
                name = row.get("Full name", "").replace("_", " ") or "Participant"
                students[f"{name}_{number[0]}"] = row
        return ClassList("Moodle", students)
    if {"Student", "ID"} <= columns.keys():
        for row in rows:
            if row["ID"].isdigit():  # not the lines "Points Possible" and the like
                name = re.sub(r"\W", "", row["Student"].lower())
                students[f"{name}_{row['ID']}"] = row
        return ClassList("Canvas", students)
    if "student" in columns:
        return ClassList("", {row["student"]: row for row in rows if row["student"]})
    raise ValueError(f"{path}: no column 'student' (nor Moodle's 'Identifier', nor Canvas's 'ID')")
