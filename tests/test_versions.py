"""The table of tested versions in docs/, and the bounds in pyproject.toml."""

import re
import tomllib

from packaging.requirements import Requirement
from packaging.version import Version

ROW = re.compile(r"^\| (3\.\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| `", re.MULTILINE)


def test_both_ends_of_all_supported_versions_are_in_the_table(project):
    pythons, *columns = zip(*ROW.findall((project / "docs/versions.md").read_text()), strict=True)
    content = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*content["dependencies"], *content["optional-dependencies"]["triton"]]
    specifiers = {r.name: r.specifier for r in map(Requirement, wanted)}
    lines = (project / "constraints.txt").read_text(encoding="utf-8").splitlines()
    for package, column in zip(("torch", "triton", "transformers"), columns, strict=True):
        (bound,) = [p.version for p in specifiers[package] if p.operator == ">="]
        assert min(map(Version, column)).release[:2] == Version(bound).release[:2]
        pins = [Requirement(line) for line in lines if line.startswith(f"{package}==")]
        pinned = {str(pin.specifier).removeprefix("==") for pin in pins}
        assert pinned & set(column), "see CONTRIBUTING.md, Upkeep"
    script = (project / "scripts" / "setup.sh").read_text(encoding="utf-8")
    supported = script.split('tested_minors="')[1].split('"')[0].split()
    assert {supported[0], supported[-1]} <= set(pythons)
