"""Files of measurements are read as records, those of earlier versions too, and written as they
were."""

import json
from typing import Any

import pytest

from perfkit.calibration.fit import fit_platform
from perfkit.ground.files import find_reference
from perfkit.measure.machine import Fact
from perfkit.measure.records import (
    LEAST_CORE_SHARE,
    MeasuredKernel,
    MeasuredRank,
    Timing,
    read_measurements,
    write_measurements,
)

#: Machines whose measurements are committed. Those of zen3-2 have no facts, ladder and references;
#: those of xeon-2 have gathers in the ladder, which are no longer measured.
MACHINES = ("zen5-2", "zen3-2", "xeon-2")


def load(machine: str) -> dict[str, Any]:
    path = find_reference("measured", f"{machine}.measurements.json")
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


@pytest.mark.parametrize("machine", MACHINES)
def test_a_file_of_measurements_is_read_and_written_again(machine: str) -> None:
    data = load(machine)
    written = json.loads(json.dumps(write_measurements(read_measurements(data))))
    for step in data.get("ladder", ()):
        step.pop("gather", None)
    known = {key: value for key, value in data.items() if key not in ("caches", "memory_bytes")}
    assert {key: written[key] for key in known} == known
    assert set(written) - set(known) <= {"facts", "ladder"}


def test_sizes_that_perfkit_0_1_wrote_are_facts() -> None:
    data = load("zen3-2")
    assert "facts" not in data and "ladder" not in data
    measurements = read_measurements(data)
    assert measurements.ladder == []
    for level, size in data["caches"].items():
        assert measurements.facts[level] == Fact(size, "the operating system")
    assert measurements.facts["memory"].value == data["memory_bytes"]
    assert all(kernel.reference is None for kernel in measurements.kernels)
    assert all(rank.references is None for row in measurements.iterations for rank in row.runs)


def test_quiet_machines_get_the_least_share_of_a_core() -> None:
    """The limit lies below what undisturbed measurements show."""
    shares = []
    for machine in MACHINES:
        for kernel in read_measurements(load(machine)).kernels:
            shares.append(kernel.share_of_core)
    disturbed = [share for share in shares if share < LEAST_CORE_SHARE]
    assert len(shares) == 3918
    assert 0 < len(disturbed) / len(shares) < 0.0055


def test_what_nobody_measured_is_none_and_not_written() -> None:
    times = {"median": 2.0, "q1": 1.0, "q3": 3.0}
    rank, timing = MeasuredRank(**times), Timing(**times, cpu_share=0.5)
    assert (rank.share_of_core, timing.share_of_core) == (1.0, 0.5)
    assert (rank.idle, rank.flagged, rank.references_around) == (None, None, ())
    kernel = MeasuredKernel("gemm", "nt", {}, nbytes=8.0, **times, reference=[1.0, 2.0, 3.0])
    assert (kernel.name, kernel.references_around) == ("gemm.nt", ([1.0, 2.0, 3.0],))


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("kernels", {"q1": None}, r"kernels\[0\] has no q1"),
        ("kernels", {"median": -1.0}, r"kernels\[0\] \(\w+ \w+\).median is -1.0"),
        ("collectives", {"mean": None}, r"collectives\[0\] has no mean"),
        ("collectives", {"q1": 0.0}, r"collectives\[0\] \(\w+\).q1 is 0.0"),
        ("collectives", {"median": -1.0}, r"collectives\[0\] \(\w+\).median is -1.0"),
        ("ladder", {"stream": None}, r"ladder\[0\] has no stream"),
        ("iterations", {"workload": None}, r"iterations\[0\] has no workload"),
    ],
)
def test_an_error_names_the_row_and_what_it_lacks(
    part: str, change: dict[str, Any], message: str
) -> None:
    data = load("xeon-2")
    row = {**data[part][0], **change}
    row = {name: value for name, value in row.items() if value is not None}
    with pytest.raises(ValueError, match=message) as refused:
        fit_platform({**data, part: [row, *data[part][1:]]})
    assert "\n" not in str(refused.value)
