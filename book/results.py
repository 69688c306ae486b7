"""The HTML that notebooks store as results, with tables whose headers say what they head."""

from __future__ import annotations

import re

from bs4 import BeautifulSoup, Tag

_NUMBER = re.compile(r"[-+−]?[\d.,]*\d[\d.,]*(e[-+]?\d+)?( ?%)?|NaN|nan|inf|—|–|-|")


def clean_table(html: str) -> str:
    """A notebook's HTML with proper headers: of pandas, and of the lab's own tables.

    The name of pandas' index moves from its own row into the row of the columns' names; empty
    header cells become ordinary ones; the style sheet that pandas brings along goes.
    """
    soup = BeautifulSoup(html, "html.parser")
    for style in soup.find_all("style"):
        style.decompose()
    for table in soup.find_all("table"):
        del table["border"]
        table["class"] = ["dataframe", "result"]  # the theme knows "dataframe"
        _join_index_name(table)
        _mark_headers(table)
        _mark_words(table)
    return str(soup).strip()


def _join_index_name(table: Tag) -> None:
    rows = table.select("thead > tr")
    if len(rows) != 2:
        return
    columns, names = (row.find_all("th") for row in rows)
    named = [cell for cell in names if cell.get_text(strip=True)]
    if len(columns) == len(names) and all(not columns[names.index(c)].get_text() for c in named):
        for cell in named:
            columns[names.index(cell)].string = cell.get_text(strip=True)
        rows[1].decompose()


def _mark_headers(table: Tag) -> None:
    for row in table.find_all("tr"):
        cells = row.find_all(["th", "td"])
        in_head = row.find_parent("thead") is not None or all(c.name == "th" for c in cells)
        for cell in cells:
            if cell.name != "th":
                continue
            if not cell.get_text(strip=True):
                cell.name = "td"
            else:
                cell["scope"] = "col" if in_head else "row"


def _mark_words(table: Tag) -> None:
    """Columns with words are set from the left, numbers end under one another."""
    rows = [row.find_all(["th", "td"]) for row in table.find_all("tr")]
    body = [row for row in rows if row and row[0].find_parent("thead") is None]
    for column in range(max(map(len, rows), default=0)):
        cells = [row[column] for row in body if column < len(row)]
        if any(not _NUMBER.fullmatch(cell.get_text(strip=True)) for cell in cells):
            for row in rows:
                if column < len(row):
                    row[column]["class"] = ["words"]
