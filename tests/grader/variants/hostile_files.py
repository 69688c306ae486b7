"""Hostile or broken files and folders; the notebook in them, where there is one, is solved.

Where the file is not a notebook at all, there is nothing to earn; where only its name is strange,
or something lies beside it, the student has the points of their work.
"""

import itertools
import json
import os
import socket
import struct
from pathlib import Path

import nbformat

from tests.grader.variants.course import Copy, Variants

NOTHING = {"attention": 0, "memory": 0, "softmax": 0}
hostile = Variants(attention=4, memory=3, softmax=4)


@hostile(**NOTHING)
def invalid_json(work: Copy) -> bytes:
    """A download that stopped half way."""
    return work.solve().text().encode()[:3000]


@hostile(**NOTHING)
def empty_file(work: Copy) -> bytes:
    """No bytes at all."""
    return b""


@hostile(**NOTHING)
def not_a_notebook(work: Copy) -> bytes:
    """Valid JSON, something else."""
    return b'[1, 2, {"cells": null}]'


@hostile(**NOTHING)
def cells_of_the_wrong_kind(work: Copy) -> bytes:
    """The shape of a notebook with numbers where cells and texts belong."""
    content = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {},
        "cells": [1, None, {"source": 3}],
    }
    return json.dumps(content).encode()


@hostile(**NOTHING)
def a_program(work: Copy) -> bytes:
    """An ELF file with the name of a notebook."""
    return Path("/bin/true").read_bytes()[:20_000]


@hostile(**NOTHING)
def utf_16(work: Copy) -> bytes:
    """Another encoding."""
    return work.solve().text().encode("utf-16")


@hostile(**NOTHING)
def latin_1(work: Copy) -> bytes:
    """Bytes that are no UTF-8."""
    work.solve().add("# déjà vu", at=1)
    return json.dumps(json.loads(work.text()), ensure_ascii=False).encode("latin-1")


@hostile(**NOTHING)
def nul_bytes(work: Copy) -> bytes:
    """NUL bytes between the characters."""
    return b"\0" * 1000 + work.solve().text().encode()


@hostile()
def format_3(work: Copy) -> bytes:
    """An old format, which nbformat can still bring up to date."""
    old = nbformat.convert(work.solve().notebook, 3)
    return nbformat.writes(old, version=nbformat.NO_CONVERT).encode()


@hostile(**NOTHING)
def format_99(work: Copy) -> bytes:
    """A format of the future."""
    content = json.loads(work.solve().text())
    content["nbformat"] = 99
    return json.dumps(content).encode()


@hostile(**NOTHING)
def deep_nesting(work: Copy) -> bytes:
    """JSON so deep that a recursive reader falls over."""
    return b'{"cells": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"


@hostile(**NOTHING)
def deep_metadata(work: Copy) -> bytes:
    """A readable notebook with metadata 5,000 levels deep."""
    text = json.dumps({**json.loads(work.solve().text()), "x": "HERE"})
    return text.replace('"HERE"', '{"x":' * 5000 + "1" + "}" * 5000).encode()


@hostile(**NOTHING)
def two_hundred_megabytes(work: Copy) -> bytes:
    """Far too large, by one output."""
    return work.solve().text().encode() + b" " * (200 * 2**20)


@hostile(**NOTHING)
def numbers_without_end(work: Copy) -> bytes:
    """A number of a million digits, and constants that JSON does not know."""
    text = json.dumps({**json.loads(work.text()), "x": "HERE"})
    return text.replace('"HERE"', "[NaN, Infinity, 1e999999, " + "9" * 1_000_000 + "]").encode()


@hostile(**NOTHING)
def six_million_characters(work: Copy) -> None:
    """A right solution below a long table of answers: no notebook needs that."""
    work.solve().add("x = [" + "1, " * 2_000_000 + "]", at=2)


@hostile(**NOTHING)
def ten_thousand_cells(work: Copy) -> None:
    """A right solution among more cells than anybody writes."""
    work.solve()
    work.notebook.cells += [nbformat.v4.new_code_cell("pass") for _ in range(10_000)]


@hostile()
def four_thousand_cells(work: Copy) -> None:
    """A right solution among many cells, which define the same helpers again and again."""
    work.solve()
    for number in range(4000):
        cell = nbformat.v4.new_code_cell(f"def helper_{number % 7}(x):\n    return x + {number}")
        work.notebook.cells.append(cell)


@hostile()
def a_chain_of_three_thousand_helpers(work: Copy) -> None:
    """Every own cell needs the next one."""
    work.solve().change("memory", ("return 2 * batch", "h0\n    return 2 * batch"))
    for number in range(3000):
        work.notebook.cells.append(nbformat.v4.new_code_cell(f"h{number} = lambda: h{number + 1}"))


@hostile()
def a_chain_of_tiny_statements(work: Copy) -> None:
    """A hundred thousand assignments, each from the one before; a solution needs the last."""
    names = [f"v{number}" for number in range(100_000)]
    lines = [f"{new} = {old}" for old, new in itertools.pairwise(names)]
    work.solve().change("memory", ("return 2 * batch", f"{names[-1]}\n    return 2 * batch"))
    work.add("v0 = 0", at=2)
    for start in range(0, len(lines), 10_000):
        work.add("\n".join(lines[start : start + 10_000]), at=3 + start // 10_000)


@hostile(**NOTHING)
def repeated_keys(work: Copy) -> bytes:
    """JSON objects that hold the same key twice; readers differ in which they believe."""
    empty = work.text().strip()
    return (empty[:-1] + ', "cells": [], "nbformat": 4}').encode()


def _named(name: str, file: str, why: str, *, refused: bool = False) -> None:
    def build(work: Copy) -> None:
        work.solve()

    build.__name__, build.__doc__ = name, why
    hostile(file=file, **NOTHING if refused else {})(build)


_named("name_with_path", "..%2F..%2Fx.ipynb", "A path in disguise.", refused=True)
_named("name_with_backslashes", "..\\..\\x.ipynb", "A path on Windows.", refused=True)
_named("name_like_an_option", "-rf.ipynb", "Looks like an option to a program.")
_named("name_with_a_command", "a;touch $(b) `c` && d.ipynb", "Means something to a shell.")
_named("name_with_markup", '<script>alert("1")<!--.ipynb', "Means something to a browser.")
_named("name_with_a_formula", "=HYPERLINK(1)+cmd|' '!A1.ipynb", "Means something to a table.")
_named("name_from_right_to_left", "notes\u202exslx.ipynb", "Displayed backwards.", refused=True)
_named("name_in_two_lines", "a\nb\tc.ipynb", "Line ends and tabs.", refused=True)
_named("name_very_long", "x" * 249 + ".ipynb", "As long as a file system allows.", refused=True)
_named("name_of_dots", "...ipynb", "Hardly a name.", refused=True)
_named("name_of_another_student", "bystander-a_01-Small.ipynb", "Signs with somebody else's name.")
_named("name_of_a_pytest_option", "01-Small.ipynb::Cell 0.ipynb", "Looks like a test's address.")


@hostile(by_hand=True, **NOTHING)
def name_that_is_no_text(student: Path, course: Path) -> None:
    """Bytes that are no UTF-8 in the file's name."""
    (student / os.fsdecode(b"caf\xe9-\xff.ipynb")).write_text(Copy(course).solve().text())


@hostile(by_hand=True, **NOTHING)
def symlink_to_the_instructor(student: Path, course: Path) -> None:
    """A link to the solved notebook."""
    (student / "01-Small.ipynb").symlink_to(course.resolve() / "01-Small.ipynb")


@hostile(by_hand=True, **NOTHING)
def symlink_to_a_neighbour(student: Path, course: Path) -> None:
    """A link to another student's perfect work."""
    (student / "01-Small.ipynb").symlink_to("../bystander-a/01-Small.ipynb")


@hostile(by_hand=True, **NOTHING)
def symlinks_in_a_circle(student: Path, course: Path) -> None:
    """Links to themselves, to the folder above, and to nothing."""
    (student / "01-Small.ipynb").symlink_to("01-Small.ipynb")
    (student / "more").symlink_to("..", target_is_directory=True)
    (student / "gone.ipynb").symlink_to("/nowhere/at/all.ipynb")


@hostile(by_hand=True, **NOTHING)
def linked_folder(student: Path, course: Path) -> None:
    """The student's folder is a link to a neighbour's."""
    student.rmdir()
    student.symlink_to("bystander-a", target_is_directory=True)


@hostile(by_hand=True)
def hard_link_to_the_instructor(student: Path, course: Path) -> None:
    """A second name of the solved notebook's own file: right, and flagged by its markers."""
    os.link(course / "01-Small.ipynb", student / "01-Small.ipynb")


@hostile(by_hand=True, **NOTHING)
def a_pipe(student: Path, course: Path) -> None:
    """A FIFO: opening it waits for a writer who never comes."""
    os.mkfifo(student / "01-Small.ipynb")


@hostile(by_hand=True, **NOTHING)
def a_socket(student: Path, course: Path) -> None:
    """A socket in the place of a file."""
    server = socket.socket(socket.AF_UNIX)
    here = os.open(student, os.O_PATH)
    server.bind(f"/proc/self/fd/{here}/01-Small.ipynb")
    server.close()
    os.close(here)


@hostile(by_hand=True, **NOTHING)
def a_folder(student: Path, course: Path) -> None:
    """A folder with the name of a notebook, and one like the results' file."""
    (student / "01-Small.ipynb").mkdir()
    (student / "results.jsonl").mkdir()


@hostile(by_hand=True)
def surrounded_by_traps(student: Path, course: Path) -> None:
    """Everything that pytest, Python, IPython and Jupyter would pick up from a folder."""
    (student / "01-Small.ipynb").write_text(Copy(course).solve("memory", "softmax").text())
    trap = "import os\nos.system('touch \"$LABSUPPORT_TEST_CANARY\"')\n"
    packages = ("labsupport/__init__.py", "grader/__init__.py")
    for name in (*packages, "conftest.py", "sitecustomize.py", "torch.py", "x.pth"):
        (student / name).parent.mkdir(exist_ok=True)
        (student / name).write_text(trap)
    (student / "labsupport" / "checks.py").write_text(trap)
    (student / "pytest.ini").write_text("[pytest]\naddopts = --collect-only\n")
    (student / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '-k nothing'\n")
    (student / ".ipython/profile_default/startup").mkdir(parents=True)
    (student / ".ipython/profile_default/startup/00.py").write_text(trap)
    (student / ".env").write_text("PYTHONPATH=.\n")
    (student / "results.jsonl").write_text("{}\n")


hostile["surrounded-by-traps"].points.update(attention=0)


@hostile(by_hand=True)
def unreadable_neighbour(student: Path, course: Path) -> None:
    """A folder with mode 000 beside the notebook."""
    (student / "01-Small.ipynb").write_text(Copy(course).solve().text())
    (student / "locked").mkdir(mode=0)


@hostile(by_hand=True, **NOTHING)
def unreadable_file(student: Path, course: Path) -> None:
    """Mode 000 (the administrator reads it all the same, so there is nothing in it)."""
    path = student / "01-Small.ipynb"
    path.write_text(Copy(course).text())
    path.chmod(0)


@hostile(by_hand=True, **NOTHING)
def archive_with_a_bomb(student: Path, course: Path) -> None:
    """A gzip file that claims 4 GB, with the name of a notebook."""
    head = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\x03"
    (student / "01-Small.ipynb").write_bytes(
        head + b"\xed\xc1" * 5000 + struct.pack("<I", 2**32 - 1)
    )


@hostile(by_hand=True)
def same_file_as_a_neighbour(student: Path, course: Path) -> None:
    """Byte for byte what the bystanders handed in: graded, and flagged or not, but not confused."""
    (student / "01-Small.ipynb").write_text(Copy(course).solve().text())
