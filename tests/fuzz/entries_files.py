"""One fuzzer for each kind of file that perfkit reads; valid files come from the repository or are written here."""

import copy
import gzip
import io
import json
import tomllib
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import tomli_w

from perfkit.calibration import fit_platform
from perfkit.platform import Platform
from perfkit.prediction.comparison import Comparison
from perfkit.prediction.result import predict
from perfkit.readers.index_arrays import read_indices
from perfkit.readers.kernel_database import read_attention, read_casts, read_collectives, read_gemms, read_table
from perfkit.readers.nccl_tests import list_devices, read_nccl_tests
from perfkit.readers.table_configs import read_tables
from perfkit.resources import find_reference
from perfkit.trials.outcome import Trials
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import Placement, Plan
from perfkit.workloads.tables import EmbeddingTable
from perfkit.workloads.transformer import Transformer
from tests.fuzz.harness import (
    TEXTS,
    Entry,
    Nonsense,
    Rng,
    check_prediction,
    check_time,
    choose,
    damage_bytes,
    damage_text,
    damage_tree,
    junk,
    share,
)

MEASURED = Path(__file__).resolve().parents[2] / "reference_data" / "measured"
NAMES = ("a", "set", "über", "a b", "[1]", "*", "-", "x" * 200, "a\nb", "a\x1b[31m")


def write(rng: Rng, folder: Path, suffix: str, data: bytes | str) -> Path:
    """Write a file under a name that is odd now and then."""
    path = folder / ((choose(rng, NAMES) if rng.random() < 0.1 else "set") + suffix)
    path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass"))
    return path


def spoil(rng: Rng, text: str, alphabet: str) -> bytes | str:
    """Damage text as text mostly, else as bytes."""
    if rng.random() < 0.7:
        return damage_text(rng, text)
    return damage_bytes(rng, text.encode(), alphabet=alphabet.encode() if rng.random() < 0.7 else b"")


def spoil_json(rng: Rng, tree: Any) -> bytes | str:
    """Damage the tree mostly, else its text."""
    if rng.random() < 0.8:
        return json.dumps(damage_tree(rng, tree))
    return spoil(rng, json.dumps(tree), '{}[]",:0123456789eE+-.\n')


# Platforms.


@lru_cache
def platform_text(name: str) -> str:
    """A platform of the gallery."""
    return find_reference("platforms", f"{name}.toml").read_text(encoding="utf-8")


@lru_cache
def platform_tree(name: str) -> dict[str, Any]:
    """A platform of the gallery as nested dicts."""
    return tomllib.loads(platform_text(name))


PLATFORMS = ("h100-sxm-8", "a100-sxm-8x8", "p100-1", "v100-sxm-8", "zen5-2")
WORKLOADS = (
    DLRM(batch=64, rows=[1000] * 3, dim=16, pooling=2, bottom=[16], top=[16]),
    Transformer.gpt2(layers=1, hidden=64, heads=2, sequence=16, batch=4, vocabulary=500),
)


@share(0.25)
def read_platform(rng: Rng, folder: Path) -> None:
    """Text of a platform file."""
    data = spoil(rng, platform_text(choose(rng, PLATFORMS)), '[]{}="#.,0123456789e-\n')
    Platform.load(write(rng, folder, ".toml", data))


@share(0.2)
def predict_on_platform(rng: Rng, folder: Path) -> None:
    """Values of a platform file, on which a small workload is then predicted."""
    tree = damage_tree(rng, platform_tree(choose(rng, PLATFORMS)))
    try:
        data = tomli_w.dumps(tree)
    except (TypeError, ValueError, AttributeError):  # what TOML cannot hold
        data = platform_text("p100-1").replace("value = ", f"value = {choose(rng, ('-', 'nan', '1e400', '0'))}", 1)
    platform = Platform.load(write(rng, folder, ".toml", data))
    repr(platform), platform.to_toml()
    ranks = choose(rng, (1, 1, 2, platform.network.ranks))
    if ranks <= 8:
        check_prediction(predict(choose(rng, WORKLOADS), platform, ranks=ranks))


# Logs of collectives.


def log(rng: Rng) -> str:
    """What nccl-tests would print."""
    operation, bus = choose(rng, (("all_reduce", 2.0), ("all_gather", 1.0), ("alltoall", 1.0), ("broadcast", None)))
    ranks, stamp = int(choose(rng, (2, 4, 8, 16))), " timestamp" if rng.random() < 0.3 else ""
    lines = [f"# Collective test starting: {operation}_perf"] if rng.random() < 0.5 else []
    lines += ["# nThread 1 nGpus 1 minBytes 1024 maxBytes 1048576 step: 2(factor) iters: 20 validation: 1"]
    if rng.random() < 0.7:
        lines += [
            f"#  Rank {r:2} Group  0 Pid {100 + r} on  node{r // 8} device {r} [0x0{r}] X100" for r in range(ranks)
        ]
    lines += [f"# size count type redop root time algbw busbw #wrong time algbw busbw #wrong{stamp}"]
    redop = "sum" if operation == "all_reduce" else "none"
    for power in range(10, 10 + int(rng.integers(1, 12))):
        half = ""
        for _ in range(2):
            micros = 10 + 2**power / 1e5
            algbw = 2**power / micros / 1e3
            factor = 1.0 if bus is None else bus * (ranks - 1) / ranks
            half += f" {micros:9.2f} {algbw:6.2f} {factor * algbw:6.2f} 0"
        root = 0 if operation == "broadcast" else -1
        lines += [f"{2**power:12} {2**power // 4:12} float {redop} {root}{half}{' 2025-08-01 12:00:00' * bool(stamp)}"]
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 1.0", ""])


@share(2)
def nccl_log(rng: Rng, folder: Path) -> None:
    """A log in which words, lines or bytes are damaged; now and then a long one, of what searches might choke on."""
    text = log(rng)
    if rng.random() < 0.02:
        word = choose(rng, (" ", "a", "1 ", "size count type ", "nGpus 1 ", "device 0 [x] ", "a|", "[", "9", "("))
        text = text.replace("\n", "\n" + word * (50_000 // len(word)) + choose(rng, ("", "x", "\n")), 4)
    path = write(
        rng, folder, choose(rng, (".log", ".txt", ".all_reduce.out")), spoil(rng, text, "0123456789 .eE+-#\nNA")
    )
    source = folder if rng.random() < 0.2 else path
    list_devices(source)
    frame = read_nccl_tests(source, partial=bool(rng.random() < 0.5), ranks=choose(rng, (None, None, 2)))
    if not (frame["seconds"].is_not_nan() & (frame["seconds"] >= 0) & (frame["nbytes"] >= 0)).all():
        raise Nonsense(f"{frame}")


# Tables.

CONFIG: dict[str, Any] = {
    "T": 3, "E": 3334.0, "D": 64, "mixed_dim": True, "weighted": False, "use_cpu": False, "max_indices": 9999,
    "Es": [1000, 8, 8992], "Ds": [32, 64, 96], "embedding_specs": None, "feature_table_map": [0, 1, 2],
    "batch_params": {"B": 512, "sigma_B": None, "vbe_distribution": None, "vbe_num_ranks": None, "Bs": [512] * 3},
    "indices_params": {"heavy_hitters": [0.1, 0.05], "zipf_q": 2.5, "zipf_s": 1.15, "index_dtype": "torch.int64"},
    "pooling_params": {"L": 13, "sigma_L": 6, "length_distribution": "normal", "Ls": [20.25, 1.0, 15.5]},
}  # fmt: skip
ROWS: list[dict[str, Any]] = [
    {"rows": 1000, "dim": 64, "pooling": 3.5, "exponent": 1.05, "itemsize": 4, "name": "a"},
    {"rows": 40_000_000, "dim": 128, "pooling": 1, "exponent": 0.0, "itemsize": 4, "name": "b"},
    {"rows": 12, "dim": 8, "pooling": 12, "exponent": 0.5, "itemsize": 4, "name": "ü"},
]


def look_at(path: Path) -> None:
    """Read tables and what is told of them."""
    tables = read_tables(path)
    repr(tables), tables.table()


def csv_tables(rng: Rng, folder: Path) -> None:
    """Tables as CSV."""
    text = pl.DataFrame(ROWS).write_csv().replace(",", choose(rng, (",", " , ")))
    look_at(write(rng, folder, ".csv", spoil(rng, text, ',"\n01e-.')))


def json_tables(rng: Rng, folder: Path) -> None:
    """Tables as JSON."""
    look_at(write(rng, folder, ".json", spoil_json(rng, ROWS if rng.random() < 0.5 else {"tables": ROWS})))


def tbe_tables(rng: Rng, folder: Path) -> None:
    """What FBGEMM writes down."""
    tree: Any = CONFIG if rng.random() < 0.7 else [CONFIG, CONFIG]
    look_at(write(rng, folder, ".json", spoil_json(rng, tree)))


@share(0.5)
def parquet_tables(rng: Rng, folder: Path) -> None:
    """Tables as Parquet, with other columns or damaged bytes, now and then with very many rows."""
    if rng.random() < 0.005:
        frame = pl.DataFrame({"rows": [10], "dim": [4]}).select(pl.all().repeat_by(3_000_000).explode())
        frame.write_parquet(path := folder / "many.parquet")
        return look_at(path)
    rows = damage_tree(rng, ROWS) if rng.random() < 0.4 else ROWS
    file = io.BytesIO()
    try:
        pl.DataFrame(rows, strict=False).write_parquet(file)
    except Exception:  # what polars cannot hold or write
        pl.DataFrame({"rows": [[1], None], "dim": ["a", "\n"]}).write_parquet(file := io.BytesIO())
    data = file.getvalue()
    look_at(write(rng, folder, ".parquet", damage_bytes(rng, data) if rows is ROWS else data))


# Recorded indices.


def arrays(rng: Rng) -> dict[str, Any]:
    """Indices, offsets and lengths, whole or odd."""
    bags, kind = int(rng.integers(1, 9)), choose(rng, ("int64", "int32", "int8", "uint64", "float32", "bool"))
    lengths = rng.integers(0, 5, bags)
    found: dict[str, Any] = {
        "indices": rng.integers(0, 100, int(lengths.sum())).astype(kind if rng.random() < 0.3 else "int64"),
        "offsets": np.concatenate(([0], np.cumsum(lengths))),
        "lengths": lengths,
    }
    for name in list(found)[1:]:
        if rng.random() < 0.4:
            del found[name]
    for array in found.values():
        if rng.random() < 0.1 and array.size:
            array.flat[int(rng.integers(array.size))] = choose(rng, (0, 1, 100, 127))
    if rng.random() < 0.1:
        found["indices"] = found["indices"].reshape(choose(rng, ((1, -1), (-1, 1), (1, 1, -1))))
    return found


def look_up(path: Path) -> None:
    """Count recorded indices."""
    for part in read_indices(path):
        repr(part.to_table(16))
        if not 0 <= part.unique_rows <= part.histogram.lookups or not part.pooling > 0:
            raise Nonsense(f"{part}")


def npy_indices(rng: Rng, folder: Path) -> None:
    """An array of NumPy, whose head is text."""
    file = io.BytesIO()
    np.save(file, arrays(rng)["indices"])
    data = file.getvalue()
    if rng.random() < 0.7:
        head = damage_text(rng, data[10:128].decode().strip())[:3000]
        length = len(head.encode("utf-8", "replace")) if rng.random() < 0.9 else int(rng.integers(65536))
        data = data[:8] + length.to_bytes(2, "little") + head.encode("utf-8", "replace") + data[128:]
    look_up(write(rng, folder, ".npy", damage_bytes(rng, data) if rng.random() < 0.4 else data))


def npz_indices(rng: Rng, folder: Path) -> None:
    """An archive of NumPy; now and then one that unpacks to much more than it is."""
    file = io.BytesIO()
    if rng.random() < 0.002:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            head = b"{'descr': '<i8', 'fortran_order': False, 'shape': (25000000,), }"
            archive.writestr("indices.npy", b"\x93NUMPY\x01\x00" + bytes([len(head), 0]) + head + bytes(2 * 10**8))
        return look_up(write(rng, folder, ".npz", file.getvalue()))
    (np.savez if rng.random() < 0.5 else np.savez_compressed)(file, **arrays(rng))
    data = file.getvalue()
    look_up(write(rng, folder, ".npz", damage_bytes(rng, data) if rng.random() < 0.9 else data))


def saved(rng: Rng) -> bytes:
    """What PyTorch saves, zipped or as it was before."""
    import torch

    file, found = io.BytesIO(), {name: torch.from_numpy(np.array(array)) for name, array in arrays(rng).items()}
    one = found["indices"]
    kept: Any = choose(rng, (found, list(found.values()), one, {"x": found}, [1], {(1, "a\n"): one}))
    if rng.random() < 0.05:
        kept = torch.zeros(1, dtype=torch.int64).expand(10**9)  # a small file of a large array
    torch.save(kept, file, _use_new_zipfile_serialization=bool(rng.random() < 0.6))
    return file.getvalue()


@share(0.5)
def pt_indices(rng: Rng, folder: Path) -> None:
    """Tensors of PyTorch."""
    data = saved(rng)
    look_up(write(rng, folder, choose(rng, (".pt", ".pth")), damage_bytes(rng, data) if rng.random() < 0.9 else data))


@share(0.5)
def gz_indices(rng: Rng, folder: Path) -> None:
    """Tensors of PyTorch, packed; damaged before or after; now and then something that unpacks to much more."""
    if rng.random() < 0.005:
        return look_up(write(rng, folder, ".pt.gz", gzip.compress(bytes(3 * 10**8), 1)))
    data = damage_bytes(rng, saved(rng)) if rng.random() < 0.5 else saved(rng)
    data = gzip.compress(data, 1)
    look_up(write(rng, folder, ".pt.gz", damage_bytes(rng, data) if rng.random() < 0.5 else data))


# Plans.

TABLES = [EmbeddingTable(rows, dim, name=name) for rows, dim, name in ((1000, 16, "a"), (10, 64, "b"), (50, 32, "c"))]
PLANS = (
    Plan.round_robin(3, ranks=2),
    Plan(2, (0, Placement("column_wise", (0, 1)), Placement("row_wise", (0, 1)))),
    Plan(4, (Placement("data_parallel", (0, 1, 2, 3)), Placement("column_wise", (2, 3), (16, 48)), 3)),
)


def plan_file(rng: Rng, folder: Path) -> None:
    """A plan, which is then applied."""
    plan = Plan.load(write(rng, folder, ".json", spoil_json(rng, json.loads(choose(rng, PLANS).to_json()))))
    if Plan.from_json(plan.to_json()) != plan:
        raise Nonsense("another plan is read back")
    repr(plan), plan.cut(TABLES)


def torchrec_plan(rng: Rng, folder: Path) -> None:
    """A dictionary such as TorchRec's."""
    plan = damage_tree(rng, choose(rng, PLANS).to_torchrec(TABLES))
    Plan.from_torchrec(plan, TABLES, ranks=choose(rng, (2, 4))).cut(TABLES)


# What perfkit has measured.


@lru_cache
def measured(name: str) -> Any:
    """A file of measurements, thinned."""
    data = json.loads((MEASURED / name).read_text(encoding="utf-8"))
    if "kernels" in data:
        rows = data["kernels"]
        groups = {(row["kind"], row["variant"]): [] for row in rows}
        for row in rows:
            groups[row["kind"], row["variant"]].append(row)
        data["kernels"] = [row for group in groups.values() for row in group[:3]]
        data["collectives"], data["iterations"] = data["collectives"][::3], data["iterations"][::8]
    if "runs" in data:
        data["runs"] = data["runs"][::6]
    if "models" in data:
        data["models"] = data["models"][:3]
    return data


@share(0.004)
def raw_measurements(rng: Rng, folder: Path) -> None:
    """Raw measurements, fitted."""
    tree = measured(choose(rng, ("zen5-2.measurements.json", "zen3-2.measurements.json")))
    platform = fit_platform(damage_tree(rng, tree))
    Platform.load(platform.save(folder / "fit.toml"))
    check_prediction(predict(WORKLOADS[0], platform))


@share(0.4)
def comparison_file(rng: Rng, folder: Path) -> None:
    """Predicted and measured times, and all views of them."""
    tree = measured(choose(rng, ("zen5-2.check-1.json", "zen3-2.check-7.json")))
    found = Comparison.load(write(rng, folder, ".json", spoil_json(rng, tree)))
    found.as_text(), found.summary(), found.table(), repr(found), found._repr_html_()
    for run in found.runs:
        check_time(min(run["low_s"], run["predicted_s"]), run["predicted_s"], max(run["high_s"], run["predicted_s"]))


@share(0.2)
def trials_file(rng: Rng, folder: Path) -> None:
    """Measured placements, and all views of them."""
    tree = measured(choose(rng, ("zen5-2.sharding-0.json", "zen3-2.sharding-1.json")))
    found = Trials.load(write(rng, folder, ".json", spoil_json(rng, tree)))
    found.as_text(), found.summary(), found.table(), found.parts(), found.totals(), repr(found), found._repr_html_()


# The kernel database.

ABOUT = {"framework": "SGLang", "version": "0.5.14", "device": "X", "kernel_source": "torch"}
RECORDS: dict[str, list[dict[str, Any]]] = {
    "gemm": [ABOUT | {"gemm_dtype": "bfloat16", "m": m, "n": 128, "k": 256, "latency": 0.1 * m} for m in (1, 64, 128)],
    "context_attention": [
        ABOUT | {"op_name": "context_attention", "batch_size": 2, "isl": 512 * i, "num_heads": 16, "step": 0,
                 "num_key_value_heads": 4, "head_dim": 128, "attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16",
                 "latency": 0.05 * i} for i in (1, 2)
    ],
    "scale_matrix": [ABOUT | {"quant_dtype": "fp8", "m": m, "k": 64, "latency": 0.01} for m in (64, 128)],
    "nccl": [
        ABOUT | {"nccl_dtype": "half", "num_gpus": 8, "message_size": size, "op_name": "all_reduce", "latency": 0.01}
        for size in (1024, 2048)
    ],
}  # fmt: skip
READERS = {
    "gemm": read_gemms,
    "context_attention": read_attention,
    "scale_matrix": read_casts,
    "nccl": read_collectives,
}


@share(0.3)
def kernel_database(rng: Rng, folder: Path) -> None:
    """A table of the kernel database as text or Parquet, with other values or damaged bytes."""
    table = choose(rng, list(RECORDS))
    rows = damage_tree(rng, RECORDS[table]) if rng.random() < 0.6 else RECORDS[table]
    try:
        frame = pl.DataFrame(rows, strict=False)
        text = frame.write_csv()
    except Exception:  # what polars cannot hold or CSV cannot write
        frame = pl.DataFrame(RECORDS[table]).with_columns(pl.lit(choose(rng, TEXTS[:10])).alias("latency"))
        text = frame.write_csv()
    home = folder / "systems" / "data" / "h" / "gemm" / choose(rng, ("sglang", "a\nb")) / "1.0"
    home.mkdir(parents=True)
    if rng.random() < 0.5:
        data: bytes | str = text if rows is not RECORDS[table] else spoil(rng, text, ',"\n0123456789.eE-')
    else:
        file = io.BytesIO()
        frame.write_parquet(file)
        data = file.getvalue() if rows is not RECORDS[table] else damage_bytes(rng, file.getvalue())
    path = home / f"{table}_perf.parquet"
    path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass"))
    more = {} if table == "nccl" or rng.random() < 0.5 else {"version": choose(rng, ("all", "1.0", junk(rng)))}
    if rng.random() < 0.2:
        read_table("h", table, root=folder)
    READERS[table]("h", root=folder, **copy.deepcopy(more))


ENTRIES: dict[str, Entry] = {
    "platform-text": read_platform,
    "platform-values": predict_on_platform,
    "nccl-tests-log": nccl_log,
    "tables-csv": csv_tables,
    "tables-json": json_tables,
    "tables-tbe": tbe_tables,
    "tables-parquet": parquet_tables,
    "indices-npy": npy_indices,
    "indices-npz": npz_indices,
    "indices-pt": pt_indices,
    "indices-pt.gz": gz_indices,
    "plan-json": plan_file,
    "plan-torchrec": torchrec_plan,
    "raw-measurements": raw_measurements,
    "comparison": comparison_file,
    "trials": trials_file,
    "kernel-database": kernel_database,
}
