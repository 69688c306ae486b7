"""Agreement of a release's version, citation and changelog."""

import re

import yaml

import labsupport


def test_the_citation_names_the_version_of_the_package(project):
    citation = yaml.safe_load((project / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == labsupport.__version__
    assert citation["license"] == "Apache-2.0"


def test_a_released_version_has_a_date_in_changelog_and_citation(project):
    changelog = (project / "CHANGELOG.md").read_text(encoding="utf-8")
    entries = re.findall(r"^## (\S+) — (unreleased|\d{4}-\d{2}-\d{2})$", changelog, re.MULTILINE)
    assert len(entries) == changelog.count("\n## "), "an entry reads: ## 1.2.0 — 2027-02-01"
    assert all(date != "unreleased" for _, date in entries[1:]), "only the newest is to come"
    version, date = entries[0]
    assert version == labsupport.__version__
    citation = yaml.safe_load((project / "CITATION.cff").read_text(encoding="utf-8"))
    released = str(citation.get("date-released", "unreleased"))
    assert released == date
