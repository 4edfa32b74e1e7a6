"""Statistics as TorchRec's planner prints them, of invented tables: the layouts of 2022, 2023 and 2026."""

from collections.abc import Sequence
from dataclasses import dataclass

#: Columns of the table of parameters, oldest first.
OLDEST = ("FQN", "Sharding", "Compute Kernel", "Perf (ms)", "Ranks")
OLD = (
    *("FQN", "Sharding", "Compute Kernel", "Perf (ms)", "Storage (HBM, DDR)", "Cache Load Factor"),
    *("Pooling Factor", "Num Poolings", "Output", "Weighing", "Sharder", "Features"),
    *("Emb Dim (CW Dim)", "Hash Size", "Ranks"),
)
NEW = (
    *("FQN", "Sharding", "Compute Kernel", "Perf (ms)", "Storage (HBM, DDR, SSD)"),
    *("Cache Load Factor", "Sum Pooling Factor", "Sum Num Poolings", "Num Indices", "Output"),
    *("Weighted", "Sharder", "Features", "Emb Dim (CW Dim)", "Hash Size", "Ranks"),
)
LAYOUTS = {"2022": OLDEST, "2023": OLD, "2026": NEW}
RANK_COLUMNS = ("Rank", "HBM (GB)", "DDR (GB)", "Perf (ms)", "Input (MB)", "Output (MB)", "Shards")


@dataclass(frozen=True)
class PrintedTable:
    """A table of the statistics; `width` are the columns of a shard where columns are split, and
    `lookups` those of a sample, over all features."""

    path: str
    sharding: str
    ranks: str
    rows: int
    dim: int
    width: int | None = None
    kernel: str = "fused"
    load_factor: float | None = None
    lookups: float = 1.0
    features: int = 1
    is_pooled: bool = True
    is_weighted: bool = False
    itemsize: int = 4

    def cells(self, columns: Sequence[str]) -> list[str]:
        """What stands in the columns."""
        storage = self._say_storage()
        poolings = str(float(self.features))
        weighted = "weighted" if self.is_weighted else "unweighted"
        width = "" if self.width is None else f" ({self.width})"
        values = {
            "FQN": self.path,
            "Sharding": self.sharding,
            "Compute Kernel": self.kernel,
            "Perf (ms)": "0.5 (0.1,0.1,0.2,0.1,0)",
            "Cache Load Factor": str(self.load_factor),
            "Num Indices": str(self.lookups),
            "Output": "pooled" if self.is_pooled else "sequence",
            "Sharder": "EmbeddingBagCollectionSharder",
            "Features": str(self.features),
            "Emb Dim (CW Dim)": f"{self.dim}{width}",
            "Hash Size": str(self.rows),
            "Ranks": self.ranks,
        }
        of_2023 = {
            "Storage (HBM, DDR)": f"({storage})",
            "Pooling Factor": str(self.lookups),
            "Num Poolings": poolings,
            "Weighing": weighted,
        }
        of_2026 = {
            "Storage (HBM, DDR, SSD)": f"({storage}, 0.0 GB)",
            "Sum Pooling Factor": str(self.lookups),
            "Sum Num Poolings": poolings,
            "Weighted": weighted,
        }
        return [(values | of_2023 | of_2026)[column] for column in columns]

    def _say_storage(self) -> str:
        """Memory of the table in HBM and in DDR."""
        stored = f"{self.rows * self.dim * self.itemsize / 2**30:.3f} GB"
        if "uvm" in self.kernel:
            return f"0.0 GB, {stored}"
        return f"{stored}, 0.0 GB"


#: Invented tables on four ranks of two nodes, each kind of placement once.
TABLES = (
    PrintedTable("sparse.history.user", "RW", "0-3", 800_000, 64, lookups=40.5, is_pooled=False),
    PrintedTable("sparse.bags.user", "RW", "0-3", 3_000_000, 128, lookups=7.0, features=2),
    PrintedTable("sparse.bags.item", "CW", "0,1,3", 1_000_000, 192, width=64, lookups=20.0),
    PrintedTable("sparse.bags.country", "DP", "0-3", 250, 16, kernel="dense"),
    PrintedTable(
        *("sparse.bags.ad", "TW", "2", 5_000_000, 32),
        kernel="fused_uvm_caching",
        load_factor=0.3,
        lookups=3.0,
    ),
    PrintedTable("sparse.bags.page", "TWRW", "2-3", 900_000, 64, is_weighted=True),
    PrintedTable("sparse.bags.query", "TWCW", "0,0,1,1", 500_000, 160, width=40),
)


def write_statistics(
    tables: Sequence[PrintedTable] = TABLES,
    *,
    ranks: int = 4,
    batch: int = 512,
    layout: str = "2026",
    has_parameters: bool = True,
) -> str:
    """Statistics in a frame, with the table of ranks and what stands below."""
    rank_rows = [
        [str(rank), "0.5 (1%)", "0.25 (0%)", "2.5 (1,0.5,0.5,0.5,0)", "0.1", "1.02", "TW: 1 RW: 2"]
        for rank in range(ranks)
    ]
    columns = LAYOUTS[layout]
    parameters = _lay_out(columns, [table.cells(columns) for table in tables])
    kernels = sorted({table.kernel for table in tables})
    lines = [
        *_lay_out(RANK_COLUMNS, rank_rows),
        "",
        "Perf: Total perf (Forward compute, Forward comms, Backward compute, Backward comms)",
        "Input: MB/iteration, Output: MB/iteration, Shards: number of tables",
        "",
    ]
    if has_parameters:
        lines += ["Parameter Info:", *parameters, ""]
    lines += [f"Batch Size: {batch}", "", "Compute Kernels Count:"]
    for kernel in kernels:
        lines.append(f"   {kernel}: {sum(table.kernel == kernel for table in tables)}")
    if layout == "2026":
        lines += ["", "Compute Kernels Embedding Weights:"]
        for kernel in kernels:
            nbytes = sum(t.rows * t.dim * t.itemsize for t in tables if t.kernel == kernel)
            lines.append(f"   {kernel}: {round(nbytes / 2**30, 3)} GB")
        lines += [
            *("", "Reserved Memory:", "   HBM: 12.0 GB", "   Percent of Total HBM: 15%"),
            *("Planning Memory:", "   HBM: 68.0 GB, DDR: 128.0 GB", "   Percent of Total HBM: 85%"),
            *("", "Dense Storage (per rank): ", "   HBM: 0.5 GB, DDR: 0.0 GB"),
            *("", "KJT Storage (per rank): ", "   HBM: 0.25 GB, DDR: 0.0 GB"),
        ]
    width = max(90, max(map(len, lines)) + 6)
    head = [
        "--- Planner Statistics ---",
        "--- Evaluated 7 proposal(s), found 7 possible plan(s) ---",
    ]
    framed = ["#" * width]
    framed += [f"#{line:^{width - 2}}#" for line in [*head, "-" * (width - 4)]]
    framed += [f"# {line:<{width - 3}}#" for line in lines]
    framed.append("#" * width)
    return "\n".join(framed) + "\n"


def _lay_out(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table whose cells end below each other, three spaces apart."""
    rules = ["-" * (len(column) + 2) for column in columns]
    table = [list(columns), rules, *rows]
    widths = [max(len(row[i]) for row in table) + 3 for i in range(len(columns))]
    return ["".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)) for row in table]
