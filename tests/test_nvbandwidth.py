"""Matrices of nvbandwidth, printed and in JSON: directions, units, what is left out. All figures are
invented."""

import json
from pathlib import Path

import pytest

from perfkit.readers.nvbandwidth import parse_nvbandwidth, read_nvbandwidth
from tests.benchmark_logs import NVBANDWIDTH

TESTS = (
    ("device_to_device_memcpy_read_ce", "memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)"),
    ("device_to_device_memcpy_write_ce", "memcpy CE GPU(row) <- GPU(column) bandwidth (GB/s)"),
)


def test_read_tests_copy_from_the_peer_and_write_tests_to_it() -> None:
    """Row and column are device and peer, whatever the arrow of the title says."""
    for (test, title), source, target in zip(TESTS, (1, 0), (0, 1), strict=True):
        text = f"Running {test}.\n{title}\n 0 1\n0 N/A 300.00\n1 200.00 N/A\n"
        rows = parse_nvbandwidth(text).rows.select("source", "target", "bandwidth").rows()
        assert rows == [(source, target, 300e9), (target, source, 200e9)]
        assert parse_nvbandwidth(text.split("\n", 1)[1]).rows["source"].to_list() == [
            source,
            target,
        ]


def test_printed_output() -> None:
    """Devices, host links, latencies, and copies that do not run alone."""
    rates = parse_nvbandwidth(NVBANDWIDTH)
    assert rates.devices == ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3")
    assert rates.hosts == ()
    rows = rates.rows.rows()
    assert rows == [
        ("host_to_device_memcpy_ce", "host to device", "ce", True, None, 0, 55e9, None),
        ("host_to_device_memcpy_ce", "host to device", "ce", True, None, 1, 26e9, None),
        (
            "device_to_host_bidirectional_memcpy_ce",
            "device to host",
            "ce",
            False,
            0,
            None,
            40e9,
            None,
        ),
        (
            "device_to_host_bidirectional_memcpy_ce",
            "device to host",
            "ce",
            False,
            1,
            None,
            41e9,
            None,
        ),
        ("device_to_device_memcpy_read_sm", "devices", "sm", True, 1, 0, 390e9, None),
        ("device_to_device_memcpy_read_sm", "devices", "sm", True, 0, 1, 380e9, None),
        ("device_to_device_latency_sm", "devices", "sm", True, 1, 0, None, pytest.approx(8e-7)),
        ("device_to_device_latency_sm", "devices", "sm", True, 0, 1, None, pytest.approx(8.1e-7)),
    ]
    assert rates.find_slowest("host to device") == 26e9
    assert rates.find_slowest("devices") == 380e9
    assert rates.find_slowest("device to host") is None  # measured in both directions alone
    with pytest.raises(ValueError, match="between is 'host'; known are devices, host to device"):
        rates.find_slowest("host")


def test_json_and_several_nodes(tmp_path: Path) -> None:
    """Numbers are texts in JSON, a bidirectional test has three matrices; processes name their hosts."""
    matrix = [["N/A", "100.0"], ["90.5", "N/A"]]
    report = {
        "nvbandwidth": {
            "Driver Version": "1",
            "testcases": [
                {
                    "name": "multinode_device_to_device_memcpy_read_ce",
                    "status": "Passed",
                    "bandwidth_description": TESTS[0][1],
                    "bandwidth_matrix": matrix,
                },
                {
                    "name": "device_to_device_bidirectional_memcpy_write_ce",
                    "status": "Passed",
                    "bandwidth_description": "memcpy CE GPU(row) <-> GPU(column) Total bandwidth (GB/s)",
                    "bandwidth_matrix": matrix * 3,
                },
                {"name": "host_device_latency_sm", "status": "Waived"},
            ],
        }
    }
    path = tmp_path / "links.json"
    path.write_text(json.dumps(report))
    rates = read_nvbandwidth(path)
    assert rates.find_slowest("devices") == 90.5e9
    assert len(rates.rows) == 2 + 6
    both = rates.rows.filter(~rates.rows["is_alone"])
    assert set(both.select("source", "target").rows()) == {(0, 1), (1, 0)}
    text = (
        "Process 0 (node-a): device 0: HGX GB200 (00000008:01:00)\n"
        "Process 1 (node-b): device 0: HGX GB200 (00000009:01:00)\n"
        f"Running multinode_device_to_device_memcpy_read_ce.\n{TESTS[0][1]}\n 0 1\n0 N/A 790\n1 780 N/A\n"
    )
    rates = parse_nvbandwidth(text)
    assert rates.hosts == ("node-a", "node-b")
    assert rates.devices == ("HGX GB200", "HGX GB200")


def test_what_is_no_output_or_is_cut_off_is_refused(tmp_path: Path) -> None:
    """A cut matrix is not taken for a smaller one."""
    for text, reason in (
        (NVBANDWIDTH[: NVBANDWIDTH.index("1    380")], "ends after 1 of 2 rows"),
        (NVBANDWIDTH.replace("1    380.00", "1"), "ends after 1 of 2 rows"),
        ("no log", "holds no matrix"),
        ('{"nvbandwidth": {}}', "testcases"),
        ('{"nvbandwidth": ', "pass what nvbandwidth printed"),
        (NVBANDWIDTH.replace("390.00", "9" * 9 + "0.00"), "ends after 0 of 2 rows"),
    ):
        with pytest.raises(ValueError, match=reason):
            parse_nvbandwidth(text)
    with pytest.raises(ValueError, match="text is 3; it must be what nvbandwidth printed"):
        parse_nvbandwidth(3)  # type: ignore[arg-type]
    path = tmp_path / "a.log"
    path.write_bytes(b"%PDF-1.7\n" + bytes(40))
    with pytest.raises(ValueError, match="PDF"):
        read_nvbandwidth(path)
