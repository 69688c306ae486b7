"""What `labsupport profile` does with a shape of attention, step by step.

Each step fills one section of the summary. It keeps what it has found as soon as it has it, for a
later part of it may fail.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from labsupport.analysis.profile import wording as say
from labsupport.analysis.profile.report import Report, Section
from labsupport.profiling.bench.compare import FAIR, GOOD, judge_table
from labsupport.profiling.benchmark import run_grid
from labsupport.profiling.cases import Case
from labsupport.profiling.tables import speedup
from labsupport.profiling.timing import format_ms
from labsupport.profiling.trace.export import whole_file, write_text
from labsupport.profiling.trace.recorder import Trace
from labsupport.profiling.units import format_bytes

if TYPE_CHECKING:
    from labsupport.profiling.hardware import Ceilings

SECTIONS = {
    "machine": "The machine",
    "comparison": "Baseline and comparison",
    "kernels": "Where the time goes",
    "memory": "Memory over time",
    "bandwidth": "Bandwidth and occupancy",
    "timelines": "Timelines, and how to open them",
    "nsys": "Nsight Systems",
    "ncu": "Nsight Compute: the counters that matter",
}
TOO_MUCH = 1.05  # above so much of a ceiling, the ceiling is wrong: it was measured while disturbed


@dataclass
class Work:
    """What the steps share: what was asked for, and what was found so far."""

    report: Report
    case: Case  # its backend is the baseline
    backends: list[str]
    device: torch.device
    max_seconds: float = 2.0
    nsight: bool = True
    provenance: dict[str, Any] = field(default_factory=dict)
    ceilings: Ceilings | None = None
    table: pd.DataFrame | None = None
    traces: dict[str, Trace] = field(default_factory=dict)
    disturbed: float = 0.0  # the largest share of the ceiling that a backend reached

    @property
    def folder(self) -> Path:
        """Where everything goes."""
        return self.report.folder

    @property
    def ran(self) -> pd.DataFrame:
        """The rows that were measured, the fastest first; empty before the comparison."""
        if self.table is None or self.table.empty:
            return pd.DataFrame(columns=["backend", "median_ms"])
        return self.table[self.table["status"] == "ok"].sort_values("median_ms")

    @property
    def believable(self) -> bool:
        """Whether the measured ceilings can be one: nothing may go above them by much."""
        return self.disturbed <= TOO_MUCH

    def keep_table(self, table: pd.DataFrame, name: str, about: str) -> None:
        """Write a CSV file, whole or not at all; `name` may begin with a folder."""
        (self.folder / name).parent.mkdir(exist_ok=True)
        with whole_file(self.folder / name) as part:
            table.to_csv(part, index=False)
        self.report.files[name] = about

    def keep_figure(self, figure: Any, name: str, about: str) -> str:
        """Write a chart; returns the line of Markdown that shows it."""
        from labsupport.plotting import alt_text

        with whole_file(self.folder / name) as part:
            figure.savefig(part, format="png")
        self.report.files[name] = about
        return f"![{alt_text(figure).replace('[', '(').replace(']', ')')}]({name})"

    def small_print(self) -> str:
        """Shape, device and date, for charts."""
        date = str(self.provenance.get("date", ""))[:10]
        return f"{say.shape_words(self.case)}; {self.provenance.get('device', '')}; {date}"


def describe_machine(work: Work, section: Section) -> None:
    """Provenance, the doctor's findings, and the measured ceilings."""
    from labsupport.profiling.environment import diagnose
    from labsupport.profiling.hardware import measured_ceilings
    from labsupport.profiling.provenance import provenance

    work.provenance = provenance(work.device)
    record: dict[str, Any] = {"provenance": work.provenance}
    section.add(provenance_table(work.provenance))
    checks = diagnose()
    record["doctor"] = [asdict(check) for check in checks]
    section.add(doctor_lines(checks))
    try:
        work.ceilings = measured_ceilings(str(work.device))
        record["ceilings"] = asdict(work.ceilings)
        section.add(ceilings_text(work.ceilings))
    finally:
        keep_environment(work.report, record)


def keep_environment(report: Report, record: dict[str, Any]) -> None:
    """Write environment.json."""
    text = json.dumps(record, indent=2, ensure_ascii=False)
    write_text(report.folder / "environment.json", text + "\n")
    report.files["environment.json"] = "all of section 1, for programs"


def provenance_table(record: dict[str, Any]) -> str:
    """The facts that one must know to judge a number."""
    rows = [["Device", f"{record['device']} ({record['device_memory_gib']} GiB)"]]
    if state := record.get("gpu"):
        facts = ", ".join(f"{name} {value}" for name, value in state.items())
        rows.append(["GPU at the start", facts])
    else:
        load = record.get("load_average")
        rows.append(
            [
                "Threads, load",
                f"{record.get('threads')} threads of PyTorch; load average {load} when it began "
                "(above the number of cores other programs were at work, and times are too long)",
            ]
        )
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    rows += [
        ["Versions", f"Python {record['python']}, {versions}"],
        ["System", record["system"]],
        ["Commit, date", f"{record['commit'] or 'unknown'}, {record['date']}"],
    ]
    return say.markdown_table(["What", "Found"], rows)


def doctor_lines(checks: list[Any]) -> str:
    """What is not well, each with its remedy; one line if all is."""
    wrong = [check for check in checks if check.status != "ok"]
    rest = len(checks) - len(wrong)
    if not wrong:
        return f"`labsupport doctor`: all {rest} checks are well."
    lines = [f"`labsupport doctor`: {rest} checks are well, and"]
    lines += [
        f"- **{check.name}** ({check.status}): {check.detail}"
        + (f". To mend it: `{check.remedy}`" if check.remedy else "")
        for check in wrong
    ]
    return "\n".join(lines)


def ceilings_text(ceilings: Ceilings) -> str:
    """What the device reaches with the two simplest programs."""
    rates = ", ".join(f"{name} {say.number(rate)}" for name, rate in ceilings.matmul_tflops.items())
    return (
        f"**Ceilings, measured here**: copying moves {say.number(ceilings.copy_gb_s)} GB/s (read "
        f"and written bytes); matrix products do, in TFLOP/s: {rates}. Everything below is judged "
        "by these, not by a data sheet."
    )


def compare(work: Work, section: Section) -> None:
    """All backends on this shape: time, memory, error, and how far from the ceiling."""
    from labsupport.profiling.monitoring.sampler import monitor

    cases = [replace(work.case, backend=name) for name in work.backends]
    with monitor(interval=0.05) as watch:
        table = run_grid(cases, device=work.device, max_seconds=work.max_seconds)
    interrupted = table.attrs["provenance"].get("interrupted", False)
    work.table = judged(work, table)
    if work.ceilings is not None and work.believable:
        section.add(say.needed_sentence(work.case, work.ceilings))
    section.add(comparison_table(work))
    if not work.believable:
        section.add(
            "**No verdicts here**: a backend went above what the ceilings allow, so the ceilings "
            "were measured while other programs took this machine's time. Run it again when they "
            "are done."
        )
    for row in table[table["status"] != "ok"].to_dict("records"):
        work.report.lost(f"backend {row['backend']}", f"{row['status']}: {row['reason']}")
    if interrupted:
        raise KeyboardInterrupt
    with work.report.keeping(section, "comparison.csv"):
        work.keep_table(work.table, "comparison.csv", "times, memory, errors, by backend")
    if work.ran.empty:
        raise RuntimeError("no backend ran: there is nothing to profile")
    work.report.short += comparison_findings(work)
    if work.ceilings is not None and work.believable:
        section.add("The marks of the verdicts:", say.marks_table(GOOD, FAIR))
    section.add("While all of them were measured:", "\n".join(f"- {x}" for x in lines_of(watch)))
    with work.report.keeping(section, "samples.csv, monitor.png"):
        work.keep_table(watch.samples(), "samples.csv", "memory, sampled while comparing")
        section.add(work.keep_figure(watch.chart(), "monitor.png", "the same as a chart"))


def judged(work: Work, table: pd.DataFrame) -> pd.DataFrame:
    """The table with speed-ups and verdicts; ceilings that it refutes are measured once more."""
    from labsupport.profiling.hardware import measured_ceilings

    if work.ceilings is None:
        return speedup(table) if len(table) else table
    sms = None
    if work.device.type == "cuda":
        sms = torch.cuda.get_device_properties(work.device).multi_processor_count
    found = judge_table(table, work.case, work.ceilings, sms)
    if found["of_ceiling"].max() > TOO_MUCH:
        measured_ceilings.cache_clear()
        again = measured_ceilings(str(work.device))
        work.ceilings = replace(
            again,
            copy_gb_s=max(again.copy_gb_s, work.ceilings.copy_gb_s),
            matmul_tflops={
                name: max(rate, work.ceilings.matmul_tflops.get(name, 0.0))
                for name, rate in again.matmul_tflops.items()
            },
        )
        found = judge_table(table, work.case, work.ceilings, sms)
        machine = work.report.sections["machine"]
        machine.add(f"They were too low, so once more: {ceilings_text(work.ceilings)}")
    work.disturbed = float(found["of_ceiling"].max())
    return found


def lines_of(watch: Any) -> list[str]:
    """A monitor's findings, one line each, without its small print."""
    return [line for line in str(watch).splitlines() if not line.startswith(("Samples can", "pss"))]


def comparison_table(work: Work) -> str:
    """The table of backends, the fastest first."""
    headers = ["Backend", "Time, ms", "Middle half", "Speed-up", "Extra memory", "TFLOP/s"]
    headers += ["Of the ceiling", "Verdict", "Max error", "What next"]
    rows = []
    assert work.table is not None
    for row in work.table.sort_values("median_ms").to_dict("records"):
        name = f"**{row['backend']}**" if row["backend"] == work.case.backend else row["backend"]
        if row["status"] != "ok":
            rows.append([name, *[say.NOTHING] * 8, f"*{row['status']}*"])
            continue
        known = work.believable
        rows.append(
            [
                name,
                format_ms(row["median_ms"]),
                f"{format_ms(row['q1_ms'])} to {format_ms(row['q3_ms'])}",
                say.number(row.get("speedup", math.nan)),
                format_bytes(row["peak_memory_bytes"]),
                say.number(row["tflops"]),
                say.percent(row.get("of_ceiling")) if known else say.NOTHING,
                row.get("verdict", say.NOTHING) if known else say.NOTHING,
                say.NOTHING if math.isnan(row["max_error"]) else f"{row['max_error']:.1e}",
                row.get("next", "") if known else say.NOTHING,
            ]
        )
    return (
        say.markdown_table(headers, rows)
        + f"\n\nThe baseline is **{work.case.backend}**. *Middle half*: from the first to the "
        "third quartile. *Speed-up*: how many times as fast as the baseline. *Extra memory*: at "
        "the peak, beyond q, k and v. *Of the ceiling*: the best possible time (see above) over "
        "the measured one. *Max error*: against float64."
    )


def comparison_findings(work: Work) -> list[str]:
    """The fastest and the leanest, in a sentence each."""
    fastest = work.ran.iloc[0]
    leanest = work.ran.sort_values("peak_memory_bytes").iloc[0]
    baseline = work.ran[work.ran["backend"] == work.case.backend]
    text = f"Fastest: **{fastest['backend']}**, {format_ms(fastest['median_ms'])} ms"
    if len(baseline) and fastest["backend"] != work.case.backend:
        text += f", {fastest['speedup']:.2f} times as fast as {work.case.backend}"
    share = fastest.get("of_ceiling", math.nan)
    if work.believable and not math.isnan(share):
        text += f"; {say.percent(share)} of this device's measured ceiling: {fastest['verdict']}"
    less = f"Leanest: **{leanest['backend']}**, {format_bytes(leanest['peak_memory_bytes'])} extra"
    if len(baseline) and leanest["backend"] != work.case.backend:
        less += f" against {format_bytes(baseline['peak_memory_bytes'].iloc[0])}"
    return [f"{text}.", f"{less}."]
