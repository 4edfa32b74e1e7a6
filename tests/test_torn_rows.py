"""Rows of nccl-tests between lines of NCCL; hosts and figures are invented."""

import pytest

from perfkit.readers.nccl import parse_nccl_tests
from perfkit.readers.torn_rows import mend_rows

SIZES = ((2**20, 30.0), (2**24, 187.0))
HEADER = "# size count type redop root time algbw busbw #wrong time algbw busbw #wrong"
FOOTER = ("# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 50.0")


def tear(host: str, label: str, *, again: bool) -> list[str]:
    """An all_reduce of two ranks whose rows NCCL tears apart, with the label of a launcher before
    each line, and `again` before each piece."""
    between = label if again else ""
    lines = ["# nThread 1 nGpus 1 minBytes 8 maxBytes 64 step: 2(factor) iters: 20"]
    lines += [
        f"#  Rank  {rank} Group  0 Pid 9{rank} on {host} device {rank} [0x1b] X100"
        for rank in range(2)
    ]
    lines.append(HEADER)
    for nbytes, time in SIZES:
        rate = nbytes / time / 1e3
        half = f"  {time:7.2f}  {rate:6.2f}  {rate:6.2f}      0"
        said = f"{host}:90:95 [0] NCCL INFO AllReduce: {nbytes} Bytes -> Algo 1 proto 2 time 9.5"
        lines += [f"{nbytes:12}  {nbytes // 4:12}     float     sum      -1{between}{said}", said]
        lines += [f"{half}{between}{said}", said, half]
    return [label + line for line in (*lines, *FOOTER)]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("label", ["", "[0] ", "[1,0]<stdout>:", " 0: ", "pod-1 | ", "elm-1: "])
@pytest.mark.parametrize("host", ["elm-1", "10-0-0-7", "6e09aa"])
def test_rows_are_whole_again(host: str, label: str, again: bool) -> None:
    lines = tear(host, label, again=again and label not in ("pod-1 | ", "elm-1: "))
    frame = parse_nccl_tests("\n".join(lines))
    assert frame["nbytes"].to_list() == [nbytes for nbytes, _ in SIZES for _ in range(2)]
    assert frame["seconds"].to_list() == pytest.approx([30e-6, 30e-6, 187e-6, 187e-6])
    # the line in which the row ends
    assert lines[frame["line"][0] - 1].endswith("0") and "NCCL" not in lines[frame["line"][0] - 1]


def test_a_row_whose_results_were_not_checked_is_whole_again() -> None:
    lines = [
        (1, "8 2 float sum -1 3.5 0.00 0.00 N/Aelm:1:2 [0] NCCL INFO Trees"),
        (2, "3.6 0.00 0.00 N/A"),
    ]
    assert mend_rows(lines)[1] == (2, "8 2 float sum -1 3.5 0.00 0.00 N/A 3.6 0.00 0.00 N/A")


def test_a_row_without_its_end_is_put_back() -> None:
    lines = [
        (1, "8 2 float sum -1elm:1:2 [0] NCCL INFO Trees"),
        (2, "elm: the run was killed"),
        (3, "16 4 float sum -1 2.0 0.01 0.01 0"),
    ]
    assert mend_rows(lines) == lines


@pytest.mark.parametrize(
    "line",
    [
        "elm:1:2 [0] NCCL INFO Channel 00/02 :    0   1",
        "[1,3]<stdout>:elm:1:2 [0] NCCL INFO Trees",
        "worker-0 elm:1:2 [0] NCCL INFO Trees",
        "16 4 float sum -1 2.0 0.01 0.01 0",
        "12 nodes were free",
    ],
)
def test_other_lines_stay_as_they_are(line: str) -> None:
    assert mend_rows([(7, line)]) == [(7, line)]
