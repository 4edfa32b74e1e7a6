"""Reports that nccl-tests writes with -J; their figures are invented."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from perfkit.readers.nccl import LogWarning, list_devices, parse_nccl_tests, read_logs

KEPT = ("operation", "ranks", "nodes", "dtype", "redop", "nbytes", "seconds", "in_place")


def write_half(
    seconds: float, nbytes: int, factor: float, wrong: float | None = 0.0
) -> dict[str, Any]:
    """One half of a result, with the digits of a report."""
    algbw = nbytes / seconds / 1e9
    return {
        "time": round(1e6 * seconds, 6),
        "alg_bw": round(algbw, 6),
        "bus_bw": round(factor * algbw, 6),
        "nwrong": wrong,
    }


def write_report(
    *, processes: int = 4, gpus: int = 1, wrong: float | None = 0.0, **changes: Any
) -> dict[str, Any]:
    """A report of an all_reduce of four ranks, one host for two processes."""
    factor = 2 * 3 / 4
    results = []
    for power in (3, 20, 30):
        half = write_half(20e-6 + 2**power / 1e11, 2**power, factor, wrong)
        results.append(
            {
                "size": 2**power,
                "count": 2**power // 4,
                "type": "float",
                "redop": "sum",
                "root": "    -1",
                "out_of_place": half,
                "in_place": half,
                "actual_iterations": 20,
                "experiment_name": None,
            }
        )
    devices = [
        {
            "rank": process * gpus,
            "group": 0,
            "pid": 900 + process,
            "hostname": f"oak-{process // 2}",
            "device": process % 2,
            "device_hex": f"0000:{0x1B + 16 * (process % 2):02x}:00",
            "device_info": "NVIDIA H100 80GB HBM3",
        }
        for process in range(processes)
    ]
    report = {
        "version": 2,
        "start_time": "2031-05-06 07:08:09",
        "args": ["./build/all_reduce_perf", "-b", "8", "-J", "run.json"],
        "env": ["NCCL_ALGO=Ring", "LANG=C", "NCCL_IB_HCA==mlx5_0"],
        "nccl_version": 22603,
        "config": {
            "nthreads": 1,
            "ngpus": gpus,
            "minimum_bytes": 8,
            "maximum_bytes": 2**30,
            "step_factor": 2,
            "warmup_iters": 1,
            "iterations": 20,
            "aggregated_iterations": 1,
            "validation": 1,
            "graph": 0,
            "blocking_collectives": "false",
            "parallel_init": "false",
            "devices": devices,
        },
        "results": results,
        "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": 50.0, "okay": "unchecked"},
        "errors": [],
        "end_time": "2031-05-06 07:08:19",
    }
    return report | changes


def parse(text: str, *, partial: bool = False) -> pl.DataFrame:
    """Rows of a report, whatever it warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LogWarning)
        return parse_nccl_tests(text, partial=partial)


def test_report_is_read_as_a_table(tmp_path: Path) -> None:
    frame = parse(json.dumps(write_report()))
    assert frame.select(KEPT).rows()[:3] == [
        ("all_reduce", 4, 2, "fp32", "sum", 8, pytest.approx(20e-6, rel=1e-5), False),
        ("all_reduce", 4, 2, "fp32", "sum", 8, pytest.approx(20e-6, rel=1e-5), True),
        ("all_reduce", 4, 2, "fp32", "sum", 2**20, pytest.approx(20e-6 + 2**20 / 1e11), False),
    ]
    assert frame["line"].to_list() == [1, 1, 2, 2, 3, 3]
    path = tmp_path / "run.json"
    path.write_text(json.dumps(write_report()))
    assert list_devices(path) == ("NVIDIA H100 80GB HBM3",)


def test_facts_of_a_report(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(write_report(), indent=1))
    with pytest.warns(LogWarning, match="NCCL_ALGO=Ring"):
        (facts,) = read_logs(path).facts
    assert facts.version == "2.26.3"
    assert facts.buses == {name: ("0000:1b:00", "0000:2b:00") for name in ("oak-0", "oak-1")}
    assert [(one.name, one.value, one.source) for one in facts.settings] == [
        ("NCCL_ALGO", "Ring", "environment"),
        ("NCCL_IB_HCA", "=mlx5_0", "environment"),
    ]
    assert facts.command is not None
    assert facts.command.text == "./build/all_reduce_perf -b 8 -J run.json"
    assert facts.options is not None
    assert facts.options[:5] == (1, 20, 1, True, 0)
    assert (facts.first_line, facts.last_line) == (1, 3)


def test_report_names_the_first_rank_of_each_process_only(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(write_report(processes=1, gpus=4, env=[])))
    logs = read_logs(path)
    assert logs.rows.select("ranks", "nodes").row(0) == (4, 1)
    assert logs.facts[0].buses == {"oak-0": ("0000:1b:00",)}


def test_unchecked_results_and_one_half(tmp_path: Path) -> None:
    report = write_report(wrong=None)
    for result in report["results"]:
        result["out_of_place"] = None
    assert parse(json.dumps(report))["in_place"].to_list() == [True] * 3


def test_wrong_values_are_warned_of() -> None:
    with pytest.warns(LogWarning, match="hold wrong values .the first in result 1"):
        parse_nccl_tests(json.dumps(write_report(wrong=3.0, env=[])))


def test_several_reports_in_one_file() -> None:
    text = json.dumps(write_report()) + "\n" + json.dumps(write_report())
    assert parse(text)["line"].to_list() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]


def test_report_of_a_run_that_died() -> None:
    text = json.dumps(write_report())
    cut = text[: text.rindex('"in_place"')]
    with pytest.raises(
        ValueError, match=r"result 3 does not fit.*ends inside of its results.*keeps the 4"
    ):
        parse(cut)
    assert parse(cut, partial=True)["nbytes"].to_list() == [8, 8, 2**20, 2**20]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cpu_time": 3.0, "alg_bw": 1.0, "bus_bw": 1.5, "nwrong": 0}, "run the test without -C"),
        ({"time": "nan", "alg_bw": 1.0, "bus_bw": 1.5, "nwrong": 0}, "time of in_place is 'nan'"),
        ({"time": 3.0, "alg_bw": -1, "bus_bw": 1.5, "nwrong": 0}, "alg_bw of in_place is -1"),
    ],
)
def test_results_that_do_not_fit_are_named(change: dict[str, Any], said: str) -> None:
    report = write_report()
    report["results"][1]["in_place"] = change
    with pytest.raises(ValueError, match=f"result 2 does not fit.*{said}"):
        parse(json.dumps(report))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (json.dumps(write_report(results=[])), "has no result: the run printed no row; run it"),
        (
            json.dumps(write_report(results=[], errors=["unhandled system error"])),
            "its errors say 'unhandled system error'",
        ),
        (json.dumps(write_report(results=None)), "no row|no report"),
        ('{"a": 1}', "looks like JSON"),
        (
            json.dumps(write_report())[:600],
            "the report ends before its results: the run died before its first row",
        ),
    ],
)
def test_json_without_results_says_so(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(text)


def test_a_run_is_not_counted_twice(tmp_path: Path) -> None:
    row = "1000000000 250000000 float sum -1 10000 100.00 187.50 0 10000 100.00 187.50 0"
    (tmp_path / "a.log").write_text(f"# Writing JSON output to /results/run.json\n{row}\n")
    (tmp_path / "run.json").write_text(json.dumps(write_report(env=[])))
    with pytest.warns(LogWarning, match="run.json holds the run of a.log once more"):
        logs = read_logs(tmp_path)
    assert logs.rows["file"].unique().to_list() == ["a.log"]
    (tmp_path / "a.log").write_text(f"{row}\n")
    assert len(read_logs(tmp_path).rows) == 8


def test_bandwidths_of_reports_have_more_digits_than_printed_ones() -> None:
    frame = parse(json.dumps(write_report()))
    algbw = frame["algbw"].to_list()[-1]
    assert math.isclose(algbw, 2**30 / (20e-6 + 2**30 / 1e11), rel_tol=1e-8)
