"""The pages: what they say, that they harm nobody, and that everybody can read them."""

import itertools
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from grader.grade.results import Flag
from grader.grade.submissions import Cell, ClassList, Submission
from grader.reports import pages
from grader.reports.grades import write_reports
from grader.reports.pages import (
    MISTAKES_SHOWN,
    Course,
    equal_solutions,
    overview_page,
    page_names,
    student_page,
    texts_of,
)
from tests.grader.reports.conftest import ROOT, SQUARE, check, flag, perfect, result

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&{{ 7 * 7 }}\x1b[31m\x00\u202e"
# Elements and attributes that could run something, or fetch something from elsewhere.
RUNS = {"script", "iframe", "object", "embed", "form", "base", "link", "img", "audio", "video"}
FETCHES = {"src", "srcset", "background", "poster", "action", "formaction", "style", "ping"}


def tree(page):
    """The page's elements. Our templates are also well-formed XML, so that a strict parser fails
    on whatever is not closed, not quoted or not escaped."""
    return ET.fromstring(page.removeprefix("<!doctype html>\n"))


def text(element):
    return " ".join(" ".join(element.itertext()).split())


def hostile(notebooks):
    checks = (
        check("values", "failed", HOSTILE, points=2.0),
        check(HOSTILE, "timeout", HOSTILE, exercise=HOSTILE),
    )
    results = [
        result(HOSTILE, *checks, path=HOSTILE, flags=(flag(HOSTILE, HOSTILE),)),
        result(HOSTILE, notebook=HOSTILE, reason=HOSTILE),
        perfect("ada"),
    ]
    return Course.of(results, notebooks)


def overview(course, *submissions):
    return overview_page(course, page_names(course.students), texts_of(submissions))


def pages_of(course):
    return [overview(course), *(student_page(course, student) for student in course.students)]


@pytest.fixture
def page_of(notebooks):
    """The page of a student with these checks."""

    def made(*checks, **more):
        return student_page(Course.of([result("ada", *checks, **more)], notebooks), "ada")

    return made


def test_whatever_students_write_is_shown_as_text_and_never_becomes_an_element(notebooks):
    pages = pages_of(hostile(notebooks))
    for page in pages:
        assert not re.search(r"[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", page)
        for element in tree(page).iter():
            assert element.tag not in RUNS
            assert not FETCHES & set(element.attrib)
            assert not [name for name in element.attrib if name.startswith("on")]
        (policy,) = (m.get("content") for m in tree(page).iter("meta") if m.get("http-equiv"))
        only_the_style = r"default-src 'none'; style-src 'sha256-[\w+/]{43}='; base-uri 'none'; "
        assert re.fullmatch(f"{only_the_style}form-action 'none'", policy)
        assert "url(" not in page
        assert "@import" not in page
    for page in pages[:2]:
        assert "<script>alert(1)</script>" in text(tree(page))
        assert "{{ 7 * 7 }}" in text(tree(page))


def test_all_links_lead_to_a_place_on_the_page_or_to_another_report(notebooks, tmp_path):
    _, written = write_reports(hostile(notebooks).results, tmp_path / "out", notebooks=notebooks)
    for path in written:
        if path.suffix != ".html":
            continue
        page = tree(path.read_text(encoding="utf-8"))
        places = {f"#{element.get('id')}" for element in page.iter() if element.get("id")}
        for link in page.iter("a"):
            target = link.get("href")
            there = target in places or target.startswith("http://localhost:8888/lab/tree/")
            assert there or (path.parent / re.sub("%2B", "+", target)).is_file(), target


def test_a_students_page_says_what_was_asked_what_came_out_and_which_mistake(notebooks):
    own = result(
        "ada",
        check("values", points=2.0),
        check("signs", "failed", "square(-1) is negative."),
        check("values", "not written", exercise=ROOT),
        seconds=61,
        flags=(flag("library call", "It calls math.pow."),),
    )
    said = text(tree(student_page(Course.of([own, perfect("bob")], notebooks), "ada")))
    for expected in (
        "ada 2 of 4 points",
        "Exercise 1-1 · Squares & <more> ●○○ · 5 minutes · 3 points",
        "Next step: Exercise 1-1 · Squares & <more>. Change your solution in 01-Squares and run",
        "The idea is explained in chapter 1 .",
        "output and weights without a mask, with leading dimensions. passed 2 / 2",
        "failed 0 / 1 square(-1) is negative.",
        "Together 2 / 3",
        "Exercise 1-2 · Roots",
        "not written 0 / 1",
    ):
        assert expected in said
    for others in ("bob", "library call", "math.pow", "MiB", "1 min"):
        assert others not in said


@pytest.mark.parametrize(
    ("values", "signs", "root", "said"),
    [
        ("not written", "passed", "failed", "Next step: Exercise 1-1"),
        ("passed", "failed", "not written", "Next step: Exercise 1-1"),
        ("passed", "not written", "failed", "Next step: Exercise 1-2"),
        ("passed", "passed", "passed", "Everything is solved."),
    ],
)
def test_the_next_step_is_where_most_points_are_missing(page_of, values, signs, root, said):
    checks = check("values", values, points=2.0), check("signs", signs)
    page = text(tree(page_of(*checks, check("values", root, exercise=ROOT))))
    assert said in page
    assert ("Next step" in page) == ("Next step" in said)


def test_an_instructors_points_and_remark_take_the_place_of_a_checks(notebooks, tmp_path):
    own = result("ada", check("values", "failed", "Wrong sign.", points=2.0), check("signs"))
    overrides = tmp_path / "out" / "overrides.csv"
    overrides.parent.mkdir()
    overrides.write_text(f"student,check,points,remark\nada,{SQUARE}-values,1.5,Right idea.\n")

    write_reports([own], tmp_path / "out", notebooks=notebooks)

    page = text(tree((tmp_path / "out/students/ada.html").read_text()))
    assert "by your instructor 1.5 / 2 Right idea." in page
    assert "2.5 of 4 points" in page
    assert "ada,2.5" in (tmp_path / "out/points.csv").read_text()
    assert ",2.5,4," in (tmp_path / "out/grades.csv").read_text()
    for wrong in (f"eve,{SQUARE}-values,1,", "ada,ex-9-9,1,", f"ada,{SQUARE}-values,all,"):
        overrides.write_text(f"student,check,points,remark\n{wrong}\n")
        with pytest.raises(ValueError, match=r"overrides\.csv"):
            write_reports([own], tmp_path / "out", notebooks=notebooks)


def test_a_students_page_holds_all_of_their_notebooks_and_why_one_was_refused(notebooks):
    other = check("a", points=0.5, exercise="ex-2-1-b")
    results = [perfect("ada"), result("ada", other, notebook="02-B")]
    results += [result("eve", reason="It is no JSON.")]
    course = Course.of(results, notebooks)
    page = tree(student_page(course, "ada"))
    assert [text(h) for h in page.iter("h2")] == ["01-Squares", "02-B"]
    assert text(page).count("4.5 of 4.5 points") == 1
    page = tree(student_page(course, "eve"))
    assert "Not graded. It is no JSON." in text(page)
    assert not list(page.iter("table"))


@pytest.mark.parametrize(("status", "again"), [("not written", 0), ("failed", 1)])
def test_what_several_checks_say_is_said_once(page_of, status, again):
    page = page_of(*(check(name, status, "The same.") for name in ("values", "signs")))
    assert (page.count("The same."), page.count("As above.")) == (1, again)


def test_a_giant_message_is_cut_and_the_help_after_an_exception_is_not(page_of):
    giant = page_of(check("values", "failed", "x" * 1_000_000))
    assert " …" in giant
    assert len(giant) < 50_000
    helped = f"f raised ValueError: {'x' * 290}\nIn a loop, the last block may be shorter."
    assert "the last block may be shorter." in page_of(check("values", "failed", helped))


def test_the_overview_shows_points_by_exercise_and_mistakes(notebooks):
    wrong = "square(-1) is negative."
    half = check("values", points=2.0), check("signs", "failed", wrong)
    half += (check("values", "not written", exercise=ROOT),)
    results = [
        perfect("ada"),
        *(result(name, *half) for name in ("bob", "cy")),
        result(
            "eve",
            reason="It is no JSON.",
            flags=(flag("refused", "eve/01-Squares.ipynb: It is no JSON."),),
        ),
    ]
    course = Course.of(results, notebooks)
    page = tree(overview(course))
    said = text(page)
    for expected in (
        "4 students, 3 submissions graded, 1 refused, 1 student with something to look at",
        "3 submissions: on average 2.67 of 4 points, median 2.",
        "Exercise 1-1 · Squares & <more> 2.33 / 3 1 0",
        "Exercise 1-2 · Roots 0.33 / 1 1 2",
        f"2 Exercise 1-1 · Squares & <more> {wrong}",
        f"{SQUARE}-signs 1 1 2 0",
        "eve 0 refused refused",
        "eve eve/01-Squares.ipynb: It is no JSON.",
    ):
        assert expected in said, expected
    fills = [float(r.get("width")) for r in page.iter("rect") if r.get("class") == "fill"]
    assert fills == [77.8, 33.3]


def test_the_overview_groups_flags_and_shows_the_cells(notebooks):
    def flagged(student, *flags):
        return perfect(student, flags=flags)

    seen = [Flag(name, "odd name", "It is odd.") for name in (SQUARE, ROOT, "")]
    results = [flagged("Ada", *seen), flagged("bob", flag("late", "By a day."), seen[0])]
    cells = (
        Cell("code", "eval('1')", SQUARE),
        Cell("code", "eval('<b>')", ROOT),
        Cell("code", "evaluate()"),
    )
    own = Submission("Ada", "01-Squares", results[0].path, "d" * 64, cells=cells)
    course = Course.of(results, notebooks)
    names = page_names(course.students)
    page = tree(overview(course, own))
    kinds = [text(h) for h in page.iter("h3")][:2]
    assert kinds == ["late (1)", "odd name (2)"]
    (row,) = (row for row in page.iter("tr") if "It is odd." in text(row) and "Ada" in text(row))
    assert f"{SQUARE}, {ROOT}, 01-Squares" in text(row)
    assert [pre.text for pre in row.iter("pre")] == ["eval('1')", "eval('<b>')"]
    assert row.find(".//a").get("href") == names["Ada"].replace("+", "%2B")


def test_equal_solutions_are_shown_but_for_layout_names_and_stubs(notebooks):
    longer = "def square(x):\n    y = [x * i + (x - i) * x for i in range(x)]\n    return sum(y) + "
    longer += "sum(z for z in y if z > x) - max(y[0], y[1], y[2]) + min(y[3], y[4], y[5]) * x"
    texts = {
        "ada": longer,
        "bob": longer.replace("[x * i", "[ x*i") + "  # mine",
        "cy": longer.replace("y", "w"),
        "dan": longer,
        "eve": "def square(x): return 1",
        "fay": "def square(x): return 1",
        "gus": "if a: pass\n" + "elif b: pass\n" * 3000,  # deeper than Python's stack
    }
    status = {"dan": "not written"}
    results = [
        result(name, check("values", status.get(name, "passed"), points=2.0)) for name in texts
    ]
    submissions = [
        Submission(r.student, r.notebook, r.path, r.digest, cells=(Cell("code", source, SQUARE),))
        for r, source in zip(results, texts.values(), strict=True)
    ]
    (equal,) = equal_solutions(results, texts_of(submissions))
    assert equal == (["ada", "bob"], [(SQUARE, longer)])
    page = text(tree(overview(Course.of(results, notebooks), *submissions)))
    assert "1 group of students Students The same in ada, bob 1 solution" in page


def test_who_is_missing_has_a_row_and_who_is_unknown_a_flag(notebooks, tmp_path):
    out = tmp_path / "out"
    write_reports(
        [perfect("ada"), perfect("eve")],
        out,
        notebooks=notebooks,
        class_list=ClassList("", {"ada": {}, "zoe": {}}),
    )
    page = text(tree((out / "overview.html").read_text()))
    assert "zoe 0 – nothing handed in" in page
    assert "unknown student (1)" in page
    assert "\neve,01-Squares,4,4,unknown student," in (out / "grades.csv").read_text()
    assert "\nzoe,,0,4,,\n" in (out / "points.csv").read_text()
    assert not (out / "return").exists()


def test_only_the_commonest_mistakes_are_listed_and_the_rest_is_counted(notebooks):
    checks = [
        check(f"c{i}", "failed", f"Mistake {chr(97 + i)}.") for i in range(MISTAKES_SHOWN + 3)
    ]
    page = overview(Course.of([result("ada", *checks)], notebooks))
    assert page.count("Mistake ") == MISTAKES_SHOWN
    assert "3 rarer ones are on the students" in page


def test_pages_are_made_for_all_readers(notebooks):
    for page in map(tree, pages_of(hostile(notebooks))):
        assert page.get("lang") == "en"
        assert text(page.find("head/title"))
        levels = [int(e.tag[1]) for e in page.iter() if re.fullmatch(r"h[1-6]", e.tag)]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(b <= a + 1 for a, b in itertools.pairwise(levels))
        for table in page.iter("table"):
            assert all(th.get("scope") for th in table.iter("th"))
            assert table.findall("thead//th")
        for region in page.iter("div"):
            if region.get("role") == "region":
                assert region.get("aria-label")
                assert region.get("tabindex") == "0"


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_text_stands_out_by_day_by_night_and_on_paper():
    """WCAG 2.2, level AA: 4.5 for text (criterion 1.4.3), 3 for parts of a chart (1.4.11)."""
    style = (Path(pages.__file__).parent / "templates" / "style.css").read_text()
    palettes = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    assert len(palettes) == 3
    for palette in palettes:
        colour = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", palette))
        for ink in ("ink", "quiet", "good", "bad", "link"):
            for ground in ("paper", "shade"):
                assert contrast(colour[ink], colour[ground]) >= 4.5, (ink, ground)
        assert contrast(colour["ink"], colour["notice"]) >= 4.5
        assert contrast(colour["fill"], colour["track"]) >= 3
        assert contrast(colour["notice-line"], colour["paper"]) >= 3


def test_every_student_has_a_page_of_their_own_inside_of_the_folder(tmp_path):
    students = [
        *("ada", "Ada", "ADA", "../ada", "..", ".", "", "con", "aux.txt", "a/b", "a\\b", "a b"),
        *("x" * 300, "x" * 301, "Jörg", "Jorg", "caf\udce9", "a\0b", "ada.html", "-", "a-b", "a+b"),
    ]
    names = page_names(students)
    assert len({name.lower() for name in names.values()}) == len(students)
    for name in names.values():
        assert re.fullmatch(r"students/[a-z0-9+._-]{1,70}\.html", name)
        assert ".." not in name
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert names["ada"] == "students/ada.html"
    assert page_names(["Ada"])["Ada"] == names["Ada"]  # it stays when others join


def test_reports_are_replaced_and_nothing_else_in_the_folder_is_touched(notebooks, tmp_path):
    (tmp_path / "results.jsonl").write_text("kept")
    _, first = write_reports([result("ada")], tmp_path, notebooks=notebooks)
    _, again = write_reports([perfect("ada")], tmp_path, notebooks=notebooks)
    assert first == again
    names = ["overview.html", "grades.csv", "points.csv", "students/ada.html"]
    assert [path.relative_to(tmp_path).as_posix() for path in again] == names
    assert "4 of 4 points" in text(tree((tmp_path / "students/ada.html").read_text()))
    assert (tmp_path / "results.jsonl").read_text() == "kept"


def test_what_the_machine_does_not_confine_is_said_once_and_to_the_instructor_only(notebooks):
    said = flag("not confined", "Submissions may use the network.")
    results = [perfect("ada", flags=(said,)), perfect("bob", flags=(said, flag()))]
    course = Course.of(results, notebooks)
    page = overview(course)
    assert page.count("Submissions may use the network.") == 1
    assert "1 student with something to look at" in page
    assert "network" not in student_page(course, "ada")
