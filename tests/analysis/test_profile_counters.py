"""What is read from the tables of Nsight Systems and Nsight Compute, and what it is said to mean.

The texts have the documented formats; their figures are made up.
"""

import pytest

from labsupport.analysis.nsight_csv import read_csv
from labsupport.analysis.profile.counters import (
    OCCUPANCY,
    TENSOR,
    Counters,
    ncu_counters,
    nsys_table,
)
from labsupport.analysis.profile.nsight import counters_text

NSYS = """Generating SQLite file report.sqlite from report.nsys-rep
Processing [report.sqlite] with [cuda_gpu_kern_sum.py]...

Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
25.0,500000,2,250000.0,250000.0,200000,300000,50000.0,"reduce<float, 4>(int)"
75.0,1500000,1,1500000.0,1500000.0,1500000,1500000,0.0,flash_fwd_kernel

Processing [report.sqlite] with [something_else.py]...
"""
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
COLUMNS = ["gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum"]
COLUMNS += ["sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"]
COLUMNS += ["sm__inst_executed_pipe_tensor_op_imma.avg.pct_of_peak_sustained_active"]
COLUMNS += ["sm__warps_active.avg.pct_of_peak_sustained_active", "lts__t_bytes.sum"]
COLUMNS += ["l1tex__m_xbar2l1tex_read_bytes.sum", "l1tex__m_l1tex2xbar_write_bytes.sum"]
COLUMNS += [STALL.format(name) for name in ("gmma", "long_scoreboard", "selected", "wait")]
COLUMNS += ["launch__registers_per_thread"]
UNITS = ["ns", "byte", "Mbyte", *["%"] * 3, *["byte"] * 3, *["inst"] * 4, "register/thread"]
FLASH = ["2,000,000", "40,000,000", "10", "72.5", "0", "18.2", "400,000,000", "300,000,000"]
FLASH += ["10,000,000", "2.5", "0.5", "1.0", "1.0", "168"]
SMALL = ["1,000", "8", "0", "0", "0", "50", "16", "n/a", "n/a", "0", "3", "1", "0", "32"]


def quoted(cells):
    return ",".join(f'"{cell}"' for cell in cells)


def raw_page():
    first = ["ID", "Process ID", "Kernel Name", "Block Size"]
    return "\n".join(
        [
            "==PROF== Connected to process 7 (/usr/bin/python3)",
            '==PROF== Profiling "flash" - 0: 0%....50%....100% - 9 passes',
            quoted(first + COLUMNS),
            quoted(["", "", "", "", *UNITS]),
            quoted(["0", "7", "small(int)", "(32, 1, 1)", *SMALL]),
            quoted(["1", "7", "flash", "(128, 1, 1)", *FLASH]),
            "==PROF== Disconnected from process 7",
        ]
    )


def details_page():
    rows = [["ID", "Kernel Name", "Section Name", "Metric Name", "Metric Unit", "Metric Value"]]
    for number, name, values in (("0", "small(int)", SMALL), ("1", "flash", FLASH)):
        rows += [
            [number, name, "Command line profiler metrics", metric, unit, value]
            for metric, unit, value in zip(COLUMNS, UNITS, values, strict=True)
        ]
    return "\n".join(["==PROF== Connected to process 7", *map(quoted, rows)])


def test_nsys_kernels_are_read_from_among_its_talk_the_longest_first():
    table = nsys_table(NSYS)
    assert table["name"].tolist() == ["flash_fwd_kernel", "reduce<float, 4>(int)"]
    assert table["calls"].tolist() == [1, 2]
    assert table["total_ms"].tolist() == [1.5, 0.5]
    assert table["median_ms"].tolist() == [1.5, 0.25]
    assert table["share"].tolist() == [0.75, 0.25]


def test_nsys_calls_have_another_column_of_counts():
    text = "Time (%),Total Time (ns),Num Calls,Avg (ns),Name\n100.0,2000,4,500.0,cudaLaunchKernel\n"
    row = nsys_table(text).iloc[0]
    assert (row["name"], row["calls"], row["median_ms"]) == ("cudaLaunchKernel", 4, 0.0005)


@pytest.mark.parametrize("text", ["", "SKIPPED: report.sqlite does not contain CUDA kernel data."])
def test_no_table_is_an_empty_one(text):
    assert nsys_table(text).empty
    assert ncu_counters(text) == []


@pytest.mark.parametrize("page", [raw_page, details_page])
def test_both_layouts_of_ncu_say_the_same(page):
    flash, small = ncu_counters(page())
    assert flash == Counters(
        kernel="flash",
        ms=2.0,
        tensor_percent=72.5,  # the products that it does not use read 0
        occupancy_percent=18.2,
        dram_bytes=50e6,  # 40,000,000 bytes read and 10 Mbyte written
        l2_bytes=400e6,
        l2_to_sm_bytes=310e6,
        registers=168,
        stalls={"gmma": 2.5, "wait": 1.0, "long_scoreboard": 0.5},
    )
    assert list(flash.stalls) == ["gmma", "wait", "long_scoreboard"]
    assert flash.dram_gb_s == pytest.approx(25)
    assert small.l2_to_sm_bytes is None  # n/a
    assert small.stalls == {"long_scoreboard": 3}


def test_every_reading_gets_a_sentence_that_says_what_it_means():
    flash, small = ncu_counters(raw_page())
    words = " ".join(flash.meaning(copy_gb_s=4000))
    assert "72% of the cycles: bound by arithmetic" in words
    assert "50.0 MB at 25 GB/s, 1% of the measured copy: the main memory is not what" in words
    assert "310.0 MB, 6.2 times the main memory's" in words
    assert "62% gmma (for the tensor cores" in words
    assert f"Occupancy 18%: {OCCUPANCY.if_between}" in words
    assert "0% of the cycles: the tensor cores mostly wait" in " ".join(small.meaning())
    assert Counters("nothing was read").meaning() == []


def test_verdicts_change_at_the_thresholds_that_are_shown():
    assert TENSOR.verdict(60) == TENSOR.if_good
    assert TENSOR.verdict(59.9) == TENSOR.verdict(30) == TENSOR.if_between
    assert TENSOR.verdict(29.9) == TENSOR.if_poor


def test_the_summary_shows_the_longest_kernels_first_stall_and_bytes():
    text = counters_text(ncu_counters(raw_page()), copy_gb_s=4000)
    row = next(line for line in text.splitlines() if line.startswith("| `flash`"))
    assert row == "| `flash` | 2.00 | 72% | 310 | 400 | 50.0 | gmma | 18% |"
    assert counters_text([], None) == "No kernel was seen."


def test_what_a_program_prints_among_quoted_cells_is_left_out():
    text = '==PROF== talk\n"ID","Kernel Name"\n"0","a"\nstep 1 of 2\n"1","b"\n'
    assert [row["Kernel Name"] for row in read_csv(text, "ID")] == ["a", "b"]
