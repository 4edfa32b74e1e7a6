"""Invented logs of nccl-tests for tests of diagnoses: hosts, devices, lines of NCCL, and times by a
curve."""

from collections.abc import Callable, Sequence
from pathlib import Path

from perfkit.models.collectives import bus_factor

H100 = "NVIDIA H100 80GB HBM3"
A100 = "NVIDIA A100-SXM4-80GB"
#: Sizes of a run from 8 B to 8 GiB [B].
SIZES = tuple(2**power for power in range(3, 34))


def follow(startup: float, busbw: float, operation: str, ranks: int) -> Callable[[int], float]:
    """A curve of a start-up [s] and a bus bandwidth [B/s]: the time of each size [s]."""
    factor = float(bus_factor(operation, ranks))
    return lambda nbytes: startup + factor * nbytes / busbw


def write_run(
    path: Path,
    time: Callable[[int], float],
    *,
    device: str = H100,
    hosts: Sequence[str] = ("node-0",),
    local: int = 8,
    program: str = "all_reduce_perf",
    sizes: Sequence[int] = SIZES,
    lines: Sequence[str] = (),
    dtype: str = "float",
) -> Path:
    """Write a log whose rows take the times of a curve [s], as nccl-tests 2.17 does."""
    ranks = local * len(hosts)
    name = {"alltoall": "all_to_all", "sendrecv": "send_recv"}.get(
        program.removesuffix("_perf"), program.removesuffix("_perf")
    )
    factor = float(bus_factor(name, ranks))
    text = [f"# Collective test starting: {program}", "# Using devices"]
    for rank in range(ranks):
        host, place = hosts[rank // local], rank % local
        bus = f"0000:{16 + 8 * place:02x}:00"
        text.append(
            f"#  Rank {rank:2} Group  0 Pid {100 + rank} on {host} device {place} [{bus}] {device}"
        )
    text += lines
    reduces = name in ("all_reduce", "reduce_scatter")
    for size in sizes:
        seconds = time(size)
        algbw = size / seconds / 1e9
        half = f"{seconds * 1e6:.2f} {algbw:.2f} {algbw * factor:.2f} 0"
        redop = "sum" if reduces else "none"
        text.append(f"{size:>12} {size // 4:>12} {dtype} {redop} -1 {half} {half}")
    text += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 1", ""]
    path.write_text("\n".join(text), encoding="utf-8")
    return path
