"""Logs for the lesson on clusters, in the shape in which nccl-tests prints them.

python -m tests.lesson_logs    # writes the files of notebooks/logs again

The figures of ``cluster/`` are those of a published run (reference_data/published/nccl_h100_cluster.csv): ten
nodes of eight H100. The other two are invented: ``one_adapter_less.log`` is the published run with all times
8 / 7 as long, and ``sockets.log`` follows a curve; both have the lines that NCCL would print.
"""

from pathlib import Path

import polars as pl

from perfkit.models.collectives import bus_factor

HERE = Path(__file__).resolve().parent.parent
FOLDER = HERE / "notebooks" / "logs"
PUBLISHED = HERE / "reference_data" / "published" / "nccl_h100_cluster.csv"
DEVICE = "NVIDIA H100 80GB HBM3"
TITLES = "# size count type redop root time algbw busbw #wrong time algbw busbw #wrong"
#: Columns of a row before the number of wrong results, and after it.
OUT_OF_PLACE = ["time_us", "algbw_GBps", "busbw_GBps"]
IN_PLACE = [f"in_place_{name}" for name in OUT_OF_PLACE]
BEFORE = ["size_B", "count", "type", "redop", "root"]


def list_devices(nodes: int, local: int) -> list[str]:
    """The list of devices of a run."""
    lines = ["# Using devices"]
    for rank in range(nodes * local):
        where = f"node-{rank // local} device {rank % local} [0x{16 + rank % local:02x}]"
        lines.append(f"#  Rank {rank} Group 0 Pid {4000 + rank} on {where} {DEVICE}")
    return lines


def list_adapters(nodes: int, names: list[str]) -> list[str]:
    """What NCCL says of the adapters of each node with NCCL_DEBUG=INFO."""
    listed = " ".join(f"[{place}]{name}:1/IB" for place, name in enumerate(names))
    return [f"node-{node}:1:1 [0] NCCL INFO NET/IB : Using {listed}" for node in range(nodes)]


def write_published(
    nodes: int, ranks: int, *, slower: float = 1.0, lines: tuple[str, ...] = ()
) -> str:
    """The published runs of so many ranks, each time longer by a factor [-]."""
    published = pl.read_csv(PUBLISHED).filter(nodes=nodes, ranks=ranks)
    if slower != 1:
        published = published.filter(test="all_reduce").with_columns(
            (pl.col("^.*time_us$") * slower).round(2), (pl.col("^.*GBps$") / slower).round(2)
        )
    text = list(lines)
    for test in published["test"].unique(maintain_order=True):
        text += [f"# Collective test starting: {test}_perf", *list_devices(nodes, ranks // nodes)]
        text.append(TITLES)
        rows = published.filter(test=test)
        for before, first, second in zip(
            rows.select(BEFORE).rows(),
            rows.select(OUT_OF_PLACE).rows(),
            rows.select(IN_PLACE).rows(),
            strict=True,
        ):
            text.append(" ".join(map(str, (*before, *first, 0, *second, 0))))
        text.append("# Out of bounds values : 0 OK")
    return "\n".join(text) + "\n"


def write_sockets() -> str:
    """An all_reduce of two nodes over one Ethernet port of 100 Gb/s: 100 µs, and 8 GB/s of the bus."""
    text = []
    for node in range(2):
        said = f"node-{node}:1:1 [0] NCCL INFO"
        text += [
            f"{said} NET/IB : No device found.",
            f"{said} NET/Socket : Using [0]eth0:10.0.0.{node}<0>",
        ]
        text.append(f"{said} Using network Socket")
    text += ["# Collective test starting: all_reduce_perf", *list_devices(2, 8), TITLES]
    factor = float(bus_factor("all_reduce", 16))
    for power in range(10, 31, 2):
        nbytes = 2**power
        seconds = 100e-6 + factor * nbytes / 8e9
        algbw = nbytes / seconds / 1e9
        half = f"{1e6 * seconds:.2f} {algbw:.2f} {algbw * factor:.2f} 0"
        text.append(f"{nbytes} {nbytes // 4} float sum -1 {half} {half}")
    text.append("# Out of bounds values : 0 OK")
    return "\n".join(text) + "\n"


def write_logs() -> dict[str, str]:
    """The text of each log by its path in the folder."""
    adapters = [f"mlx5_{number}" for number in range(8) if number != 4]
    return {
        "cluster/node.log": write_published(1, 8),
        "cluster/rail.log": write_published(10, 10),
        "cluster/all.log": write_published(10, 80),
        "one_adapter_less.log": write_published(
            10, 80, slower=8 / 7, lines=tuple(list_adapters(10, adapters))
        ),
        "sockets.log": write_sockets(),
    }


def main() -> None:
    """Write them."""
    for name, text in write_logs().items():
        path = FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
