"""Small files of every kind that a reader reads, in `tests/data`: what is invented, and how.

    python -m tests.samples            # writes the invented files again
    python -m tests.samples --record   # and records a training step of this machine with PyTorch

Times and sizes are invented: kernels take whole microseconds, and collectives a latency of 20 µs
plus their bytes over the rate of an invented link, so that what a reader says can be worked out.
"""

import argparse
import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from perfkit.models.collectives import bus_factor
from tests import planner_logs

FOLDER = Path(__file__).resolve().parent / "data"
Event = dict[str, Any]

# -- a training step of two ranks, by PyTorch's profiler and its observer of execution
# --------------------------------------------------------------------------------------------------

#: Start of the invented recording [us], and of each of its two steps after it.
START = 4_000_000_000
STEPS = (0, 1000)
#: Ranks reach their collective at this time of a step [us]; it ends for both at 700.
READY = (500, 600)
HOST = 100
BACKWARD = 101


class Recording:
    """Events of Kineto and nodes of an execution trace of one rank, in the order of their start."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.events: list[Event] = []
        self.nodes: list[dict[str, Any]] = []
        self.begin = 0
        self.correlation = 10
        self.record = 0

    def add(self, cat: str, name: str, start: float, dur: float, tid: Any, **args: Any) -> None:
        """An event at a time of this step [us]."""
        pid = self.rank if tid in (7, 20) else 1
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": pid,
                "tid": tid,
                "ts": START + self.begin + start,
                "dur": dur,
                "args": args,
            }
        )

    def call(
        self,
        name: str,
        start: float,
        dur: float,
        *,
        tid: int = HOST,
        cat: str = "cpu_op",
        shapes: Any = (),
        **args: Any,
    ) -> None:
        """An operation of the host, which both recordings have; its operands are fp32 tensors."""
        self.record += 1
        facts = {"External id": 1000 + self.record, "Record function id": self.record}
        facts["Ev Idx"] = self.record + 1
        if shapes:
            facts |= {"Input Dims": list(shapes), "Input type": ["float"] * len(shapes)}
        self.add(cat, name, start, dur, tid, **facts, **args)
        tensors = []
        for number, shape in enumerate(shapes):
            count = int(np.prod(shape))
            tensors.append([number, number, 0, count, 4, f"cuda:{self.rank}"])
        operands = {"values": tensors, "shapes": list(shapes)}
        operands["types"] = ["Tensor(float)" for _ in shapes]
        node = {
            "id": self.record + 1,
            "name": name,
            "ctrl_deps": 1,
            "inputs": operands,
            "outputs": {"values": [], "shapes": [], "types": []},
            "attrs": [
                {"name": "rf_id", "type": "uint64", "value": self.record},
                {"name": "tid", "type": "uint64", "value": 1 if tid == HOST else 2},
            ],
        }
        self.nodes.append(node)

    def launch(
        self,
        kernel: str,
        launched: float,
        start: float,
        dur: float,
        *,
        tid: int = HOST,
        stream: int = 7,
        cat: str = "kernel",
        by: tuple[str, str] = ("cuda_runtime", "cudaLaunchKernel"),
        **args: Any,
    ) -> None:
        """Work of the device, and the call that launches it."""
        self.correlation += 1
        self.add(*by, launched, 4, tid, correlation=self.correlation)
        facts = {"device": self.rank, "stream": stream, "correlation": self.correlation}
        self.add(cat, kernel, start, dur, stream, **facts, **args)

    def step(self, number: int, begin: int) -> None:
        """One step: a layer forward, its gradients, their sum over the ranks, and the update."""
        self.begin = begin
        ready = READY[self.rank]
        self.call(f"ProfilerStep#{number}", 0, 990, cat="user_annotation")
        self.call("aten::linear", 10, 60, shapes=([64, 32], [16, 32], [16]))
        shapes = ([16], [64, 32], [32, 16])
        self.call("aten::addmm", 20, 40, shapes=shapes, **{"Sequence number": 5 * number})
        self.launch("sgemm_32x32_nn", 30, 80, 100)
        self.call("aten::relu", 75, 20, shapes=([64, 16],))
        self.launch("elementwise_kernel<relu>", 80, 180, 20)
        node = "autograd::engine::evaluate_function: AddmmBackward0"
        self.call(node, 110, 80, tid=BACKWARD)
        forward = {"Sequence number": 5 * number, "Fwd thread id": 1}
        self.call("AddmmBackward0", 115, 70, tid=BACKWARD, **forward)
        self.call("aten::mm", 120, 60, tid=BACKWARD, shapes=([32, 64], [64, 16]))
        by = ("cuda_driver", "cuLaunchKernel")
        self.launch("sgemm_32x32_nt", 130, 200, ready - 200, tid=BACKWARD, by=by)
        collective = {
            "Collective name": "allreduce",
            "dtype": "Float",
            "In msg nelems": 528,
            "Out msg nelems": 528,
            "Group size": 2,
            "Process Group Name": "0",
            "Process Group Ranks": "[0, 1]",
        }
        self.call("record_param_comms", 200, 30, tid=BACKWARD, **collective)
        nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)"
        self.launch(nccl, 210, ready, 700 - ready, tid=BACKWARD, stream=20, **collective)
        self.call("Optimizer.step#SGD.step", 300, 90, cat="user_annotation")
        self.call("aten::add_", 310, 30, shapes=([16, 32], [16, 32]))
        self.launch("elementwise_kernel<add>", 320, 720, 30)
        self.call("aten::copy_", 400, 40, shapes=([1], [1]))
        by = ("cuda_runtime", "cudaMemcpyAsync")
        copied = "Memcpy DtoH (Device -> Pageable)"
        self.launch(copied, 410, 760, 5, cat="gpu_memcpy", by=by, bytes=4)
        self.launch("Memset (Device)", 430, 770, 2, cat="gpu_memset")

    def kineto(self) -> str:
        """The file of the profiler, one event in a line."""
        facts = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": self.rank, "name": "Invented GPU"}],
            "distributedInfo": {
                "backend": "nccl",
                "rank": self.rank,
                "world_size": 2,
                "pg_config": [{"pg_name": "0", "pg_size": 2, "ranks": [0, 1]}],
            },
            "record_shapes": 1,
            "baseTimeNanoseconds": 1_700_000_000_000_000_000,
        }
        lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in self.events)
        return json.dumps(facts)[:-1] + f', "traceEvents": [\n{lines}\n]}}\n'

    def execution(self) -> str:
        """The file of the observer, one node in a line."""
        lines = ",\n".join(json.dumps(node, separators=(",", ":")) for node in self.nodes)
        return f'{{"schema": "1.1.1-chakra.0.0.4", "nodes": [\n{lines}\n]}}\n'


def record_rank(rank: int) -> Recording:
    """Two steps of a rank; a kernel was still running when the recording began."""
    recording = Recording(rank)
    facts = {"device": rank, "stream": 7, "correlation": 3}
    recording.add("kernel", "elementwise_kernel<add>", -30, 20, 7, **facts)
    for number, begin in enumerate(STEPS, start=1):
        recording.step(number, begin)
    spare = {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans"}
    recording.events.append({**spare, "tid": 0, "ts": START - 30, "dur": 2000})
    mark = {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": START}
    recording.events.append({**mark, "args": {"name": "python"}})
    return recording


#: Categories and arguments as profilers of 2021 wrote them.
OLD_CATEGORIES = {
    "cpu_op": "Operator",
    "user_annotation": "Operator",
    "cuda_runtime": "Runtime",
    "cuda_driver": "Runtime",
    "kernel": "Kernel",
    "gpu_memcpy": "Memcpy",
    "gpu_memset": "Memset",
}
OLD_FIELDS = {"External id": "external id", "Input Dims": "Input dims"}
NEW_ONLY = ("Record function id", "Ev Idx")


def write_old(recording: Recording) -> str:
    """The first step of a recording in the layout of 2021, as far as it had the same events."""
    events = []
    for event in recording.events:
        if event["ph"] != "X" or event["ts"] >= START + STEPS[1] or event["cat"] == "Trace":
            continue
        args = {}
        for name, value in event["args"].items():
            if name not in NEW_ONLY:
                args[OLD_FIELDS.get(name, name)] = value
        tid = f"stream {event['tid']}" if event["tid"] in (7, 20) else str(event["tid"])
        cat = OLD_CATEGORIES[event["cat"]]
        events.append({**event, "cat": cat, "tid": tid, "args": args})
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"schemaVersion": 1, "traceEvents": [\n{lines}\n]}}\n'


def write_flat(recording: Recording) -> str:
    """The nodes of an execution trace in the layout of schema 1.0, and the groups of processes."""
    groups = json.dumps([{"pg_name": "0", "ranks": [0, 1]}])
    nodes: list[dict[str, Any]] = [
        {
            "id": 1,
            "name": "## process_group:init ##",
            "rf_id": 0,
            "tid": 1,
            "inputs": [groups],
            "input_shapes": [[]],
            "input_types": ["String"],
            "outputs": [],
            "output_shapes": [],
            "output_types": [],
        }
    ]
    for node in recording.nodes:
        attributes = {each["name"]: each["value"] for each in node["attrs"]}
        flat = {"id": node["id"], "name": node["name"], **attributes}
        for side in ("inputs", "outputs"):
            flat[side] = node[side]["values"]
            flat[f"{side[:-1]}_shapes"] = node[side]["shapes"]
            flat[f"{side[:-1]}_types"] = node[side]["types"]
        nodes.append(flat)
    lines = ",\n".join(json.dumps(node, separators=(",", ":")) for node in nodes)
    return f'{{"schema": "1.0.1", "nodes": [\n{lines}\n]}}\n'


# -- logs of nccl-tests
# --------------------------------------------------------------------------------------------------

#: Latency [s], and rate of a rank [B/s], of the invented links.
LATENCY = 20e-6
RATE = 100e9


def format_figure(value: float, width: int) -> str:
    """A figure as nccl-tests prints it: fewer digits where it is large."""
    for digits in (2, 1, 0):
        text = f"{value:.{digits}f}"
        if len(text) <= width:
            return text
    return f"{value:.0e}"


def make_row(operation: str, ranks: int, nbytes: int, before: str, wrong: str) -> str:
    """A row: what stands before the figures, and the figures of both halves."""
    row = f"{nbytes:12d}  {nbytes // 4:12d}  {before}"
    for half in (1.0, 1.1):
        seconds = half * LATENCY + nbytes / RATE
        algbw = nbytes / seconds / 1e9
        busbw = algbw * float(bus_factor(operation, ranks))
        row += f"  {format_figure(1e6 * seconds, 7):>7}  {format_figure(algbw, 6):>6}"
        row += f"  {format_figure(busbw, 6):>6}  {wrong:>6}"
    return row


def list_devices(ranks: int, of_node: int, place: str, device: str) -> list[str]:
    """The list of devices of a run."""
    lines = ["#", "# Using devices"]
    for rank in range(ranks):
        node = rank // of_node
        local = rank % of_node
        where = f"node-{node} device {local:2d} [0x{local:02x}]"
        lines.append(f"#  Rank {rank:2d} {place} Pid {4000 + rank:6d} on {where} {device}")
    return lines


def write_new_log() -> str:
    """An all_reduce of 8 GPUs in one node, as nccl-tests 2.13 and later print it."""
    lines = [
        "# Collective test starting: all_reduce_perf",
        "# nThread 1 nGpus 1 minBytes 1024 maxBytes 1073741824 step: 32(factor) warmup iters: 5",
        *list_devices(8, 8, "Group  0", "Invented GPU 80GB"),
        "#",
        "#       size         count      type   redop    root     time   algbw   busbw  #wrong"
        "     time   algbw   busbw  #wrong",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)",
    ]
    for power in (10, 15, 20, 25, 30):
        lines.append(make_row("all_reduce", 8, 2**power, "   float     sum      -1", "0"))
    lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 70.1", "#"]
    return "\n".join(lines) + "\n"


def write_rccl_log() -> str:
    """Two programs after each other on two nodes, as rccl-tests print them under mpirun."""
    lines = []
    for operation in ("all_gather", "reduce_scatter"):
        reduction = "     sum" if operation == "reduce_scatter" else "    none"
        lines += [
            f"# Collective test starting: {operation}_perf",
            "rccl-tests: Version develop:0000000",
            "# nThread 1 nGpus 1 minBytes 4096 maxBytes 268435456 step: 256(factor)",
            *list_devices(16, 8, "Group  0", "Invented accelerator"),
            "#       size         count      type   redop    root     time   algbw   busbw  #wrong"
            "     time   algbw   busbw  #wrong",
        ]
        for power in (12, 20, 28):
            before = f"   float{reduction}      -1"
            lines.append(make_row(operation, 16, 2**power, before, "0"))
        lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 40.2"]
    return "\n".join(f"[1,0]<stdout>:{line}" for line in lines) + "\n"


def write_old_log() -> str:
    """An all_to_all of 4 GPUs as nccl-tests of 2021 print it, which names neither program nor
    root."""
    lines = [
        "# nThread 1 nGpus 4 minBytes 65536 maxBytes 67108864 step: 32(factor) validation: 1",
        *list_devices(4, 4, "", "Invented GPU 16GB"),
        "#       size         count    type   redop     time   algbw   busbw  error"
        "     time   algbw   busbw  error",
    ]
    for power in (16, 21, 26):
        lines.append(make_row("all_to_all", 4, 2**power, "   float        ", "N/A"))
    lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 30.3"]
    return "\n".join(lines) + "\n"


def write_report() -> str:
    """A reduce_scatter of 4 GPUs in one node as nccl-tests 2.17 and later report it with -J."""
    factor = float(bus_factor("reduce_scatter", 4))
    results = []
    for power in (10, 15, 20, 25, 30):
        result = {"size": 2**power, "count": 2**power // 4, "type": "float", "redop": "sum"}
        result["root"] = "    -1"
        for half, slower in (("out_of_place", 1.0), ("in_place", 1.1)):
            seconds = slower * LATENCY + 2**power / RATE
            algbw = 2**power / seconds / 1e9
            figures = {"time": 1e6 * seconds, "alg_bw": algbw, "bus_bw": factor * algbw}
            result[half] = {name: round(value, 6) for name, value in figures.items()}
            result[half]["nwrong"] = 0.0
        results.append(result)
    devices = []
    for rank in range(4):
        place = {"rank": rank, "group": 0, "pid": 4000 + rank, "hostname": "node-0"}
        device = {"device": rank, "device_hex": f"0000:{16 + rank:02x}:00"}
        devices.append({**place, **device, "device_info": "Invented GPU 80GB"})
    report = {
        "version": 2,
        "start_time": "2031-05-06 07:08:09",
        "args": ["./build/reduce_scatter_perf", "-b", "1K", "-e", "1G", "-f", "32", "-J", "r.json"],
        "env": ["NCCL_DEBUG=WARN"],
        "nccl_version": 22603,
        "config": {"nthreads": 1, "ngpus": 1, "iterations": 20, "devices": devices},
        "results": results,
        "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": 33.3, "okay": "unchecked"},
        "errors": [],
        "end_time": "2031-05-06 07:08:19",
    }
    return json.dumps(report, indent=1) + "\n"


# -- tables, recorded indices and the kernel database
# --------------------------------------------------------------------------------------------------

TABLES = """name,rows,dim,pooling,exponent,itemsize
user,40000000,64,1,1.05,4
country,250,16,1,0.6,4
clicks,1000000,128,25.5,1.15,4
"""
TORCHREC = """name,num_embeddings,embedding_dim
user,40000000,64
country,250,16
"""
TBE: dict[str, Any] = {
    "T": 2,
    "E": 50500,
    "D": 96,
    "mixed_dim": True,
    "weighted": False,
    "use_cpu": False,
    "Es": [1000, 100000],
    "Ds": [64, 128],
    "batch_params": {"B": 256, "Bs": [256, 256]},
    "indices_params": {"heavy_hitters": [0.2, 0.1], "zipf_q": 3.0, "zipf_s": 1.1},
    "pooling_params": {
        "L": 12,
        "sigma_L": 4,
        "length_distribution": "normal",
        "Ls": [20.0, 4.5],
    },
}
#: Rows of the kernel database by the place of their file, with the names that it records.
DATABASE: dict[str, list[dict[str, Any]]] = {
    "x60/gemm/sglang/0.5.14/gemm": [
        {"gemm_dtype": name, "m": 64, "n": 128, "k": 256, "latency": latency}
        for name, latency in (("bfloat16", 0.01), ("fp8", 0.006))
    ],
    "x60/comm/nccl/2.29.2/nccl": [
        {
            "nccl_dtype": "half",
            "num_gpus": ranks,
            "message_size": 2**power,
            "op_name": name,
            "latency": 0.02 + 2e-8 * 2**power,
        }
        for name in ("all_reduce", "alltoall")
        for ranks in (2, 8)
        for power in (10, 20)
    ],
    "x60/attention/sglang/0.5.14/context_attention": [
        {
            "op_name": "context_attention",
            "attn_dtype": "bfloat16",
            "kv_cache_dtype": "fp8",
            "batch_size": 2,
            "isl": 512,
            "num_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "step": 0,
            "latency": 0.05,
        }
    ],
    "x60/quantize/vllm/0.24.0/scale_matrix": [
        {"quant_dtype": "fp8", "m": 1000, "k": 4096, "latency": 0.004}
    ],
}


def write_database(folder: Path) -> None:
    """The files of the kernel database."""
    for place, rows in DATABASE.items():
        _, _, collector, version, _ = place.split("/")
        about = {"framework": collector.upper(), "version": version, "kernel_source": "invented"}
        path = folder / f"{place}_perf.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pl.DataFrame([{**about, **row} for row in rows]).write_parquet(path)


def write_indices(path: Path) -> None:
    """Recorded indices of two tables and three samples: a table of row 0 alone, and one of
    rows 0 to 5."""
    lengths = np.array([[1, 1, 1], [1, 2, 3]])
    np.savez(path, indices=np.array([0, 0, 0, 0, 1, 2, 3, 4, 5]), lengths=lengths)


def write_all(folder: Path) -> None:
    """Write every invented file."""
    folder.mkdir(exist_ok=True)
    ranks = [record_rank(rank) for rank in range(2)]
    texts = {
        "all_reduce_8_gpus.log": write_new_log(),
        "rccl_two_nodes.log": write_rccl_log(),
        "old_4_gpus.alltoall.log": write_old_log(),
        "reduce_scatter_4_gpus.json": write_report(),
        "step_of_2021.kineto.json": write_old(ranks[0]),
        "step_rank0.schema_1_0.et.json": write_flat(ranks[0]),
        "tables.csv": TABLES,
        "tables_torchrec.csv": TORCHREC,
        "planner.2023.err": planner_logs.write_statistics(layout="2023"),
        "planner.2026.err": planner_logs.write_statistics(planner_logs.TABLES[2:5]),
        "tables.tbe.json": json.dumps(TBE, indent=1) + "\n",
    }
    for rank, recording in enumerate(ranks):
        texts[f"step_rank{rank}.kineto.json"] = recording.kineto()
        texts[f"step_rank{rank}.et.json"] = recording.execution()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    write_indices(folder / "indices.npz")
    write_database(folder / "kernel_database")


# -- a training step of this machine
# --------------------------------------------------------------------------------------------------


def record_step(folder: Path) -> None:
    """Record a training step of a small perceptron on this CPU, by the profiler and the observer
    together."""
    import torch
    from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(8, 32)
    execution = folder / "cpu_step.et.json"
    kineto = folder / "cpu_step.kineto.json"
    observer = ExecutionTraceObserver()
    observer.register_callback(str(execution))
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        schedule=schedule(wait=0, warmup=1, active=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(kineto)),
        execution_trace_observer=observer,
    ) as profiler:
        for _ in range(2):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            profiler.step()
    observer.unregister_callback()
    for path in (kineto, execution):
        text = path.read_text(encoding="utf-8").replace(os.uname().nodename, "host")
        lines = [line.strip() for line in text.splitlines()]
        with gzip.GzipFile(f"{path}.gz", "wb", mtime=0) as file:
            file.write("\n".join(lines).encode())
        path.unlink()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="record the step of this machine too")
    write_all(FOLDER)
    if parser.parse_args().record:
        record_step(FOLDER)
