"""The README's promises about time, by the plan that says how long exercises take."""

import re


def test_the_first_hour_holds_an_hour(project):
    readme = (project / "README.md").read_text(encoding="utf-8")
    plan = (project / "theory" / "three-days.md").read_text(encoding="utf-8")
    hour = readme.split("**Your first hour.**")[1].split("FlashAttention's forward pass")[0]
    last = re.findall(r"\(?exercise (\d-\d)|\((\d-\d)\)", hour)[-1]
    minutes = 0
    for row in plan.split("## Day 1")[1].split("\n"):
        cells = [cell.strip() for cell in row.split("|")]
        if len(cells) > 4 and cells[4].isdigit():
            minutes += int(cells[4])
            if f"**{''.join(last)}**" in row:
                break
    assert 40 <= minutes <= 60, minutes
