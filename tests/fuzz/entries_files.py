"""Fuzzers of the files that perfkit reads; valid ones come from the repository or are written
here."""

import gzip
import io
import json
import os
import tomllib
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import polars as pl
import tomli_w

import perfkit as pk
from perfkit.calibration.fit import fit_platform
from perfkit.calibration.study import Trials
from perfkit.ground.files import find_reference
from perfkit.readers.execution_trace import read_execution
from perfkit.readers.index_arrays import read_indices
from perfkit.readers.kernel_database import read_attention, read_casts, read_collectives, read_gemms
from perfkit.readers.nccl import list_devices, read_nccl_tests
from perfkit.readers.nvbandwidth import read_nvbandwidth
from tests.benchmark_logs import EACH, NVBANDWIDTH
from tests.fuzz.damage import Rng, choose, damage_bytes, damage_file, damage_text, damage_tree
from tests.fuzz.harness import Entry, Nonsense

Make = Callable[[Rng], Any]
Read = Callable[[Rng, Path], Any]
Write = Callable[[Any], str | bytes]
NAMES = ("a", "über", "a b", "[1]", "*", "-", "x" * 200, "a\nb", "a\x1b[31m")
PLATFORMS = ("h100-sxm-8", "a100-sxm-efa-8x8", "p100-1", "v100-sxm-8", "zen5-2")
WORKLOADS = (
    pk.DLRM(batch=64, rows=[1000, 1000, 1000], dim=16, pooling=2, bottom=[16], top=[16]),
    pk.Transformer.gpt2(layers=1, hidden=64, heads=2, sequence=16, batch=4, vocabulary=500),
)
TABLES = [
    pk.EmbeddingTable(1000, 16, name="a"),
    pk.EmbeddingTable(10, 64, name="b"),
    pk.EmbeddingTable(50, 32, name="c"),
]
PLANS = (
    pk.Plan.round_robin(3, ranks=2),
    pk.Plan(2, (0, pk.Placement("column_wise", (0, 1)), pk.Placement("row_wise", (0, 1)))),
    pk.Plan(
        4,
        (
            pk.Placement("data_parallel", (0, 1, 2, 3)),
            pk.Placement("column_wise", (2, 3), (16, 48)),
            3,
        ),
    ),
)
CONFIG: dict[str, Any] = {
    "T": 3,
    "E": 3334.0,
    "D": 64,
    "mixed_dim": True,
    "weighted": False,
    "use_cpu": False,
    "max_indices": 9999,
    "Es": [1000, 8, 8992],
    "Ds": [32, 64, 96],
    "embedding_specs": None,
    "feature_table_map": [0, 1, 2],
    "batch_params": {
        "B": 512,
        "sigma_B": None,
        "vbe_distribution": None,
        "vbe_num_ranks": None,
        "Bs": [512, 512, 512],
    },
    "indices_params": {
        "heavy_hitters": [0.1, 0.05],
        "zipf_q": 2.5,
        "zipf_s": 1.15,
        "index_dtype": "torch.int64",
    },
    "pooling_params": {
        "L": 13,
        "sigma_L": 6,
        "length_distribution": "normal",
        "Ls": [20.25, 1.0, 15.5],
    },
}
HUB_CONFIGS: tuple[dict[str, Any], ...] = (
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "vocab_size": 500,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
        "quantization_config": None,
        "tie_word_embeddings": False,
    },
    {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [],
        "head_dim": 64,
        "layer_types": ["full_attention", "full_attention"],
    },
    {"model_type": "gpt2", "n_layer": 2, "n_inner": None, "resid_pdrop": 0.1, "attn_pdrop": 0.0},
    {"model_type": "bert", "num_hidden_layers": 1, "architectures": ["BertForMaskedLM"]},
    {
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 8,
        "attn_logit_softcapping": None,
    },
    {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": None,
        "n_routed_experts": 8,
    },
    {"model_type": "gpt_neox", "num_hidden_layers": 2, "rotary_pct": 0.25},
    {"model_type": "falcon", "num_hidden_layers": 2, "num_kv_heads": 1, "alibi": False},
    {"model_type": "roberta", "num_hidden_layers": 1, "max_position_embeddings": 514},
)
ROWS: list[dict[str, Any]] = [
    {"rows": 1000, "dim": 64, "pooling": 3.5, "exponent": 1.05, "itemsize": 4, "name": "a"},
    {"rows": 40_000_000, "dim": 128, "pooling": 1, "exponent": 0.0, "itemsize": 4, "name": "b"},
    {"rows": 12, "dim": 8, "pooling": 12, "exponent": 0.5, "itemsize": 4, "name": "ü"},
]

# How valid files are made.


def csv(rows: Any) -> str:
    """Rows as CSV."""
    return pl.DataFrame(rows, strict=False).write_csv()


def parquet(rows: Any) -> bytes:
    """Rows as Parquet."""
    file = io.BytesIO()
    pl.DataFrame(rows, strict=False).write_parquet(file)
    return file.getvalue()


@cache
def bomb(ending: str) -> bytes:
    """A small file that unpacks to a large one."""
    if ending == "parquet":
        return parquet({"rows": np.full(3_000_000, 10), "dim": np.full(3_000_000, 4)})
    if ending == "json.gz":
        return gzip.compress(b'{"traceEvents": [') + gzip.compress(b" " * 10**7, 1) * 60
    if ending == "gz":
        return gzip.compress(bytes(3 * 10**8), 1)
    file, head = io.BytesIO(), b"{'descr': '<i8', 'fortran_order': False, 'shape': (25000000,), }"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr(
            "indices.npy", b"\x93NUMPY\x01\x00" + bytes([len(head), 0]) + head + bytes(2 * 10**8)
        )
    return file.getvalue()


def many_rows(rng: Rng) -> Any:
    """Tables, now and then very many of them in a small file."""
    return bomb("parquet") if rng.random() < 0.002 else ROWS


@cache
def measured(name: str) -> Any:
    """A file of measurements, thinned."""
    data = json.loads(find_reference("measured", f"{name}.json").read_text(encoding="utf-8"))
    if "kernels" in data:
        kinds = [(row["kind"], row["variant"]) for row in data["kernels"]]
        data["kernels"] = [
            row for i, row in enumerate(data["kernels"]) if kinds[:i].count(kinds[i]) < 3
        ]
    steps = {
        "collectives": 3,
        "iterations": 8,
        "runs": 6,
        "models": max(1, len(data.get("models", ())) // 3),
    }
    return data | {key: data[key][::step] for key, step in steps.items() if key in data}


def brief(name: str) -> pk.Platform:
    """A platform without most parts of its long tables, which take long to read and are all
    alike."""
    data = tomllib.loads(find_reference("platforms", f"{name}.toml").read_text(encoding="utf-8"))
    for table in (
        data.get("host", {}),
        data.get("context", {}).get("kernels", {}),
        data.get("collectives", {}),
    ):
        for key in list(table)[8:]:
            del table[key]
    for key in [key for number, key in enumerate(data["kernels"]) if number > 11 and number % 4]:
        del data["kernels"][key]
    return pk.Platform.from_toml(tomli_w.dumps(data))


def log(rng: Rng) -> str:
    """What nccl-tests prints; now and then with long lines, of what searches might choke on."""
    operation, bus = choose(
        rng, (("all_reduce", 2.0), ("all_gather", 1.0), ("alltoall", 1.0), ("broadcast", None))
    )
    ranks = int(choose(rng, (2, 4, 8, 16)))
    is_stamped = rng.random() < 0.3
    lines = [f"# Collective test starting: {operation}_perf"] if rng.random() < 0.5 else []
    lines.append(
        "# nThread 1 nGpus 1 minBytes 1024 maxBytes 1048576 step: 2(factor) iters: 20 validation: 1"
    )
    if rng.random() < 0.7:
        lines += [
            f"#  Rank {r:2} Group  0 Pid {r} on  node{r // 8} device {r} [0x0{r}] X100"
            for r in range(ranks)
        ]
    head = "# size count type redop root time algbw busbw #wrong time algbw busbw #wrong"
    lines.append(f"{head} timestamp" if is_stamped else head)
    about = "float none -1"
    if operation == "all_reduce":
        about = "float sum -1"
    elif bus is None:
        about = "float none 0"
    factor = bus * (ranks - 1) / ranks if bus else 1
    for power in range(10, 10 + int(rng.integers(1, 12))):
        size = 2**power
        time = 10 + size / 1e5
        rate = size / time / 1e3
        half = f" {time:9.2f} {rate:6.2f} {rate * factor:6.2f} 0"
        row = f"{size:12} {size // 4:12} {about}{half}{half}"
        lines.append(f"{row} 2025-08-01 12:00:00" if is_stamped else row)
    found = "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 1.0", ""])
    if rng.random() < 0.02:
        word = choose(
            rng,
            (" ", "a", "1 ", "size count type ", "nGpus 1 ", "device 0 [x] ", "a|", "[", "9", "("),
        )
        found = found.replace(
            "\n", "\n" + word * (50_000 // len(word)) + choose(rng, ("", "x", "\n")), 4
        )
    return found


def arrays(rng: Rng) -> dict[str, Any]:
    """Recorded indices, offsets and lengths, whole or odd."""
    lengths = rng.integers(0, 5, int(rng.integers(1, 9)))
    usual = ["int64" for _ in range(12)]
    kind = choose(rng, (*usual, "int32", "int8", "uint64", "float32", "bool"))
    found = {"indices": rng.integers(0, 100, int(lengths.sum())).astype(kind), "lengths": lengths}
    found["offsets"] = np.concatenate(([0], np.cumsum(lengths)))
    found = {
        name: array for name, array in found.items() if name == "indices" or rng.random() < 0.6
    }
    for array in found.values():
        if rng.random() < 0.1 and array.size:
            array.flat[int(rng.integers(array.size))] = choose(rng, (0, 1, 100, 127))
    flat = [(-1,) for _ in range(20)]
    shape = choose(rng, (*flat, (1, -1), (-1, 1), (1, 1, -1)))
    return found | {"indices": found["indices"].reshape(shape)}


def npy(rng: Rng) -> bytes:
    """An array of NumPy, whose head is text and often damaged as such."""
    file = io.BytesIO()
    np.save(file, arrays(rng)["indices"])
    data = file.getvalue()
    if rng.random() < 0.7:
        head = damage_text(rng, data[10:128].decode().strip())[:3000].encode("utf-8", "replace")
        length = len(head) if rng.random() < 0.9 else int(rng.integers(65536))
        data = data[:8] + length.to_bytes(2, "little") + head + data[128:]
    return data


def npz(rng: Rng) -> bytes:
    """An archive of NumPy; now and then one that unpacks to much more than it is."""
    if rng.random() < 0.002:
        return bomb("npz")
    file = io.BytesIO()
    (np.savez if rng.random() < 0.5 else np.savez_compressed)(file, **arrays(rng))
    return file.getvalue()


def pt(rng: Rng) -> bytes:
    """What PyTorch saves, zipped or as it was before; now and then a small file of a large
    array."""
    import torch

    file = io.BytesIO()
    found = {name: torch.from_numpy(np.array(array)) for name, array in arrays(rng).items()}
    one = found["indices"]
    if rng.random() >= 0.95:
        one = torch.zeros(1, dtype=torch.int64).expand(10**9)
    saved = (found, list(found.values()), one, {"x": found}, [1], {(1, "a\n"): one})
    kept: Any = choose(rng, saved)
    torch.save(kept, file, _use_new_zipfile_serialization=bool(rng.random() < 0.6))
    return file.getvalue()


def gz(rng: Rng) -> bytes:
    """The same packed, also when damaged; now and then something that unpacks to much more."""
    if rng.random() < 0.002:
        return bomb("gz")
    return gzip.compress(damage_bytes(rng, pt(rng)) if rng.random() < 0.5 else pt(rng), 1)


def trace(rng: Rng) -> Any:
    """A trace of two steps, with a collective, in today's words or those of 2021; now and then one
    without end."""
    if rng.random() < 0.003:
        return bomb("json.gz")
    is_old = rng.random() < 0.3
    operator = "Operator" if is_old else "cpu_op"
    runtime = "Runtime" if is_old else "cuda_runtime"
    kernel = "Kernel" if is_old else "kernel"
    events: list[dict[str, Any]] = []
    dims = {
        "Input Dims": [[4, 8], [8, 2]],
        "Input type": ["float", "c10::Half"],
        "Sequence number": 3,
        "Fwd thread id": 0,
        "Input Strides": [[8, 1], [2, 1]],
        "Concrete Inputs": ["", ""],
    }
    comm = {
        "Collective name": "allreduce",
        "In msg nelems": 99,
        "dtype": "Float",
        "Process Group Ranks": "[0, 1]",
    }
    comm |= {
        "Out msg nelems": 99,
        "Group size": 2,
        "In split size": [50, 49],
        "Process Group Name": "0",
    }
    for step in (0, 1):
        rows: list[tuple[Any, ...]] = [
            (operator, f"ProfilerStep#{step}", 0, 90, {}),
            ("python_function", "nn.Module: Linear_0", 1, 40, {}),
            (operator, "aten::mm", 2, 20, dims),
            (operator, "nccl:all_reduce", 30, 9, comm),
            (runtime, "cudaStreamSynchronize", 50, 9, {}),
        ]
        for number, (name, at) in enumerate(
            (("k", 5), ("ncclKernel_AllReduce", 33), ("Memcpy HtoD (x)", 45)), 3 * step
        ):
            rows += [
                (runtime, "cudaLaunchKernel", at, 3, {"correlation": number}),
                (kernel, name, at + 9, 5, {"correlation": number, "stream": 7, **comm}),
            ]
        events += [
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": 1,
                "tid": 7 if cat == kernel else "1",
                "ts": 1e3 * step + ts,
                "dur": dur,
                "args": args,
            }
            for cat, name, ts, dur, args in rows
        ]
    head = {
        "distributedInfo": {
            "rank": 0,
            "world_size": 2,
            "pg_config": [{"pg_name": "0", "ranks": [0, 1]}],
        }
    }
    head |= {"deviceProperties": [{"id": 0, "name": "X100"}], "baseTimeNanoseconds": 10**18}
    return choose(
        rng,
        (
            head | {"traceEvents": events},
            events,
            gzip.compress(json.dumps({"traceEvents": events}).encode()),
        ),
    )


def execution(rng: Rng) -> Any:
    """An execution trace of either schema."""
    plain = {
        "values": [[5, 6, 0, 32, 4, "cuda:0"], 3],
        "shapes": [[4, 8], []],
        "types": ["Tensor(float)", "Int"],
    }
    flat = {
        "rf_id": 1,
        "parent": 1,
        "tid": 1,
        "seq_id": -1,
        "op_schema": "",
        "inputs": plain["values"],
        "outputs": [],
    }
    flat |= {
        "input_shapes": plain["shapes"],
        "input_types": plain["types"],
        "output_shapes": [],
        "output_types": [],
    }
    nested = {
        "ctrl_deps": 1,
        "inputs": plain,
        "outputs": plain,
        "attrs": [{"name": "rf_id", "value": 1}],
    }
    groups = {
        **nested,
        "inputs": {
            "values": ['[{"pg_name": "0", "ranks": [0, 1]}]'],
            "shapes": [[]],
            "types": ["String"],
        },
    }
    nodes = choose(rng, ([flat, flat], [nested, groups]))
    names = ("aten::mm", "## process_group:init ##")
    return {
        "schema": "1.0.1",
        "nodes": [{"id": i, "name": names[i], **node} for i, node in enumerate(nodes)],
    }


# What reads them.


def file(
    endings: str, make: Make, read: Read, share: float = 1.0, write: Write = json.dumps
) -> Entry:
    """An entry that reads a damaged file of an odd name now and then."""

    def run(rng: Rng, folder: Path) -> Any:
        path = folder / (
            (choose(rng, NAMES) if rng.random() < 0.1 else "set") + choose(rng, endings.split())
        )
        path.write_bytes(damage_file(rng, make(rng), write))
        return read(rng, path)

    return Entry(run, share)


def one_of(*items: Any) -> Make:
    """Make one of some values."""
    return lambda rng: choose(rng, items)


def simply(read: Callable[[Path], Any]) -> Read:
    """Read what leaves no choice."""
    return lambda rng, path: read(path)


def predict_on(rng: Rng, path: Path) -> list[Any]:
    """A platform and what is predicted on it."""
    platform = pk.Platform.load(path)
    ranks = choose(rng, (1, 1, 2, platform.network.ranks))
    return [
        platform,
        pk.predict(choose(rng, WORKLOADS), platform, ranks=ranks if ranks <= 8 else 1),
    ]


def read_log(rng: Rng, path: Path) -> None:
    """Read a log, alone or with its folder."""
    source = path.parent if rng.random() < 0.2 else path
    list_devices(source)
    frame = read_nccl_tests(source, partial=bool(rng.random() < 0.5))
    if not (frame["seconds"].is_not_nan() & (frame["seconds"] >= 0) & (frame["nbytes"] >= 0)).all():
        raise Nonsense(f"{frame}")


def read_links(path: Path) -> None:
    """Read rates of links."""
    rates = read_nvbandwidth(path)
    if not (rates.rows["bandwidth"].fill_null(0) >= 0).all():
        raise Nonsense(f"{rates}")


def count(path: Path) -> None:
    """Count recorded indices."""
    for part in read_indices(path):
        repr(part.to_table(16))
        if not 0 <= part.unique_rows <= part.histogram.lookups or not part.pooling > 0:
            raise Nonsense(f"{part}")


def apply(plan: pk.Plan) -> pk.Plan:
    """Cut tables as a plan says."""
    plan.cut(TABLES)
    return plan


def read_steps(rng: Rng, path: Path) -> None:
    """Read a trace and look at it from three sides of ten."""
    found, sides = (
        pk.read_trace(path),
        "steps breakdown,timeline modules,idle collectives,host stragglers,graph",
    )
    for view in choose(rng, sides.split(",")).split():
        repr(getattr(found, view)())
    if not 0 <= found.time < np.inf or not found.explain().startswith("trace of"):
        raise Nonsense(f"{found!r}")


def read_torchrec(rng: Rng, folder: Path) -> pk.Plan:
    """Read a plan such as TorchRec's."""
    damaged = damage_tree(rng, choose(rng, PLANS).to_torchrec(TABLES, module="m"))
    return apply(pk.Plan.from_torchrec(damaged, TABLES, ranks=choose(rng, (2, 4))))


def fit(rng: Rng, folder: Path) -> list[Any]:
    """Fit raw measurements, write and read the platform, predict."""
    fitted = fit_platform(
        damage_tree(rng, measured(choose(rng, ("zen5-2.measurements", "zen3-2.measurements"))))
    )
    return predict_on(rng, fitted.save(folder / "fit.toml"))


def read_hub_config(rng: Rng, folder: Path) -> pk.Transformer:
    """Read a configuration of the Hub as a file, its folder, or a damaged dict; record the model."""
    config = choose(rng, HUB_CONFIGS)
    sizes = {"batch": 2, "sequence": choose(rng, (16, None))}
    if rng.random() < 0.5:
        model = pk.Transformer.from_config(damage_tree(rng, config), **sizes)
    else:
        path = folder / "config.json"
        path.write_bytes(damage_file(rng, config))
        model = pk.Transformer.from_config(choose(rng, (path, str(folder))), **sizes)
    if model.layers > 64:  # unlike layers are all recorded, which takes long
        return model
    [graph] = model.graphs()
    if not graph.parameters > 0:
        raise Nonsense(f"{graph.parameters} parameters")
    return model


def read_check(path: Path) -> pk.Comparison:
    """Read predicted and measured times."""
    found = pk.Comparison.load(path)
    if not all(0 < run["predicted_s"] < np.inf for run in found.runs):
        raise Nonsense(f"{found.runs}")
    return found


ABOUT = {
    "framework": "SGLang",
    "version": "0.5.14",
    "device": "X",
    "kernel_source": "torch",
    "latency": 0.1,
}
GEMM = ABOUT | {"gemm_dtype": "bfloat16", "n": 128, "k": 256}
NCCL = ABOUT | {"nccl_dtype": "half", "num_gpus": 8, "op_name": "all_reduce"}
ATTENTION = ABOUT | {
    "op_name": "context_attention",
    "batch_size": 2,
    "num_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "step": 0,
    "attn_dtype": "bfloat16",
    "kv_cache_dtype": "bfloat16",
}
#: Tables of the kernel database: what reads them, and rows.
DATABASE: dict[str, tuple[Callable[..., Any], list[dict[str, Any]]]] = {
    "gemm": (read_gemms, [GEMM | {"m": m, "latency": 0.1 * m} for m in (1, 64, 128)]),
    "context_attention": (read_attention, [ATTENTION | {"isl": isl} for isl in (512, 1024)]),
    "scale_matrix": (
        read_casts,
        [ABOUT | {"quant_dtype": "fp8", "m": m, "k": 64} for m in (64, 128)],
    ),
    "nccl": (read_collectives, [NCCL | {"message_size": size} for size in (1024, 2048)]),
}


def read_database(rng: Rng, folder: Path) -> None:
    """Read a table of the kernel database as text or Parquet."""
    name = choose(rng, list(DATABASE))
    home = folder / "systems" / "data" / "h" / "gemm" / choose(rng, ("sglang", "a\nb")) / "1.0"
    home.mkdir(parents=True)
    read, rows = DATABASE[name]
    (home / f"{name}_perf.parquet").write_bytes(damage_file(rng, rows, choose(rng, (csv, parquet))))
    with mock.patch.dict(os.environ, {"PERFKIT_KERNEL_DATABASE": str(folder)}):
        read("h")


CHECKS, TRIALS = ("zen5-2.check-1", "zen3-2.check-7"), ("zen5-2.sharding-0", "zen3-2.sharding-1")
TEXTS = [brief(name).to_toml() for name in PLATFORMS]
tables = simply(pk.read_tables)
indices = simply(count)
plans = simply(lambda path: apply(pk.Plan.load(path)))
LINK_RATES = {
    "nvbandwidth": {
        "testcases": [
            {
                "name": "device_to_device_memcpy_read_ce",
                "bandwidth_description": "memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)",
                "bandwidth_matrix": [["N/A", "100.0"], ["90.5", "N/A"]],
            }
        ]
    }
}
#: By name: endings, how a valid file is made, what reads it, share of the inputs, how nested values
#: are written.
ENTRIES: dict[str, Entry] = {
    "platform-text": file(".toml", one_of(*TEXTS), simply(pk.Platform.load), 0.25),
    "platform-values": file(
        ".toml", one_of(*map(tomllib.loads, TEXTS)), predict_on, 0.2, tomli_w.dumps
    ),
    "nccl-tests-log": file(".log .txt .all_reduce.out", log, read_log, 1.2),
    "benchmark-log": file(".log .csv .all_reduce.out", one_of(*EACH.values()), read_log, 1.2),
    "link-rates": file(".log .json", one_of(NVBANDWIDTH, LINK_RATES), simply(read_links), 0.5),
    "tables-csv": file(".csv", one_of(ROWS, csv(ROWS).replace(",", " , ")), tables, 1, csv),
    "tables-json": file(".json", one_of(ROWS, {"tables": ROWS}), tables),
    "tables-tbe": file(".json", one_of(CONFIG, [CONFIG, CONFIG]), tables),
    "tables-parquet": file(".parquet", many_rows, tables, 0.5, parquet),
    "indices-npy": file(".npy", npy, indices),
    "indices-npz": file(".npz", npz, indices, 0.7),
    "indices-pt": file(".pt .pth", pt, indices, 0.5),
    "indices-pt.gz": file(".pt.gz", gz, indices, 0.5),
    "plan-json": file(".json", one_of(*(json.loads(plan.to_json()) for plan in PLANS)), plans),
    "plan-torchrec": Entry(read_torchrec),
    "raw-measurements": Entry(fit, 0.004),
    "comparison": file(".json", lambda rng: measured(choose(rng, CHECKS)), simply(read_check), 0.4),
    "trials": file(".json", lambda rng: measured(choose(rng, TRIALS)), simply(Trials.load), 0.2),
    "kernel-database": Entry(read_database, 0.3),
    "trace-kineto": file(".json .json.gz", trace, read_steps, 0.25),
    "hub-config": Entry(read_hub_config, 0.5, new=True),
    "trace-execution": file(".json", execution, simply(read_execution), 0.5),
}
