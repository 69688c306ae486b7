"""The README's promises about time, and symptoms in one place only."""

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


def messages(page, heading):
    """Messages of three words or more that a section quotes."""
    section = page.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    prose = " ".join(re.sub(r"^```.*?^```$", "", section, flags=re.M | re.S).split())
    quoted = re.findall(r'`([^`]+)`|"([^"]+)"', prose)
    return {one or two for one, two in quoted if len((one or two).split()) >= 3}


def test_a_symptom_stands_in_one_place_the_installation_guide_or_the_field_guide(project):
    of_install = messages(project / "docs" / "install.md", "When something is wrong")
    of_use = messages(project / "theory" / "10-field-guide.md", "Troubleshoot")
    assert of_install
    assert of_use
    assert of_install & of_use == set()
