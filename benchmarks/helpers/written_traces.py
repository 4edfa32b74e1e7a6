"""Traces as PyTorch's profiler writes them, of steps that the event loop runs."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import perfkit as pk
from perfkit.prediction.ranks import RankTimes
from perfkit.prediction.simulation import RankTimeline, Timeline
from perfkit.workloads.graph import Graph

Event = dict[str, Any]
#: Start of every trace [us].
_START = 1_700_000_000_000_000.0
#: Host threads of the forward and of the backward pass, and the first stream of collectives [-].
_MAIN, _AUTOGRAD, _COMMUNICATION = 100, 101, 20
#: Time of a call that launches a kernel [s]; table 6.1 of docs/formulas.md has 3 to 6 µs.
_LAUNCH = 3e-6
#: Works that a queue of a device holds [-]: launches of CUDA block once about a thousand are outstanding.
_QUEUE = 1000
#: Mark of an optimizer around its calls.
_UPDATE = "Optimizer.step#AdamW.step"
#: Names of PyTorch's calls and of NCCL's kernels.
_CALLS = {
    "all_reduce": ("allreduce", "ncclDevKernel_AllReduce_Sum_RING_LL"),
    "all_gather": ("_allgather_base", "ncclDevKernel_AllGather_RING_LL"),
    "reduce_scatter": ("_reduce_scatter_base", "ncclDevKernel_ReduceScatter_Sum_RING_LL"),
    "all_to_all": ("all_to_allv", "ncclDevKernel_SendRecv"),
    "send_recv": ("send", "ncclDevKernel_SendRecv"),
    "broadcast": ("broadcast", "ncclDevKernel_Broadcast_RING_LL"),
}
_KERNELS = {
    "gemm": "sm80_xmma_gemm_f32f32",
    "bmm": "sm80_xmma_gemm_batched",
    "attention": "flash_fwd_kernel",
    "elementwise": "vectorized_elementwise_kernel",
    "rowwise": "layer_norm_kernel",
    "copy": "direct_copy_kernel",
    "embedding_forward": "split_embedding_forward_kernel",
    "embedding_backward": "split_embedding_backward_kernel",
}


@dataclass(frozen=True)
class Loop:
    """A training loop around the iteration.

    Parameters
    ----------
    steps : int
        Steps that are run [-].
    noise : float
        Standard deviation of the logarithm of each time of a device; half as much for collectives,
        twice for hosts [-].
    loading : float
        Time of the host at the begin of each step in which it loads data [s].
    waits : bool
        Whether the host waits for its device at the end of each step, as with ``loss.item()``.
    seed : int
        Of the noise [-].
    """

    steps: int = 4
    noise: float = 0.0
    loading: float = 0.0
    waits: bool = False
    seed: int = 0


class Step(NamedTuple):
    """A step of all ranks as it ran, and when their hosts began and had launched all of it [s]."""

    timelines: list[RankTimeline]
    host_begins: np.ndarray
    host_ends: np.ndarray


def _disturb(times: RankTimes, noise: float, common: np.random.Generator, rng: Any) -> RankTimes:
    """Times of a rank in one step; those of collectives are the same on all ranks."""
    durations = times.durations * np.exp(0.5 * noise * common.normal(size=len(times.durations)))
    return replace(
        times,
        seconds=times.seconds * np.exp(noise * rng.normal(size=len(times.seconds))),
        host=times.host * np.exp(2 * noise * rng.normal(size=len(times.host))),
        durations=durations,
    )


def run_loop(prediction: pk.Prediction, loop: Loop) -> Iterator[Step]:
    """Steps of an iteration, one after another from a common start."""
    known = prediction._timeline
    timeline = Timeline(known.ranks, known.device, known.contention)
    timeline.period, timeline.simulated_period = known.period, known.simulated_period
    rng = np.random.default_rng(loop.seed)
    for number in range(loop.steps):
        disturbed = []
        for times in known.ranks:
            common = np.random.default_rng((loop.seed, number))
            disturbed.append(_disturb(times, loop.noise, common, rng))
        timeline.ranks = disturbed
        timeline.sums = [times.add_up(timeline.device) for times in disturbed]
        for collective in timeline.collectives:
            collective.duration = 0.0
        for times, collectives in zip(disturbed, timeline.collectives_of_rank, strict=True):
            for collective, duration in zip(collectives, times.durations.tolist(), strict=True):
                collective.duration = max(collective.duration, duration)
        timeline.segments = [timeline._list_segments(index) for index in range(len(disturbed))]
        begins = timeline.host_free.copy()
        timeline.host_free = timeline.host_free + loop.loading
        timeline.run()
        measured = [timeline.measure(index) for index in range(len(disturbed))]
        if loop.waits:
            timeline.host_free = np.maximum(timeline.host_free, timeline.stream_free)
        yield Step(measured, begins, timeline.host_free.copy())


def time_loop(prediction: pk.Prediction, loop: Loop) -> float:
    """Time of an iteration in a loop without noise [s]."""
    hosts = prediction._timeline.hosts.max() + loop.loading
    if not loop.waits:
        return float(max(prediction._timeline.simulated_period, hosts))
    ends = []
    for step in run_loop(prediction, replace(loop, steps=6, noise=0.0)):
        ends.append(max(float(timeline.ends.max()) for timeline in step.timelines))
    return (ends[-1] - ends[2]) / (len(ends) - 3)


class _Writer:
    """Events of one rank."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.events: list[Event] = []
        self.correlation = 0
        self.begun: list[float] = []  # works, in the order of their launch
        self.host = -math.inf  # when the host may go on
        self.computed = -math.inf  # when the last kernel ended that computes

    def add(self, cat: str, name: str, begin: float, end: float, tid: int, **facts: Any) -> None:
        """An event, with names of arguments as Kineto writes them."""
        args = {key.replace("_", " "): value for key, value in facts.items()}
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": 0 if "stream" in args else 1,
                "tid": tid,
                "ts": f"{_START + 1e6 * begin:.3f}",
                "dur": f"{1e6 * max(end - begin, 0.0):.3f}",
                "args": args,
            }
        )

    def launch(
        self,
        call: str,
        wanted: float,
        kernel: str,
        cat: str,
        begin: float,
        end: float,
        **facts: Any,
    ) -> tuple[float, float]:
        """Work of the device, and the call that launches it; a full queue holds the call up. Begin
        and end of the call [s]."""
        self.correlation += 1
        ts = wanted - _LAUNCH
        tid, stream = facts.pop("thread"), facts.pop("stream")
        done = wanted
        if len(self.begun) >= _QUEUE:
            done = max(done, min(self.begun[-_QUEUE], begin))
        # what an earlier call had to wait for holds up later ones
        ts = max(ts, self.host)
        done = max(done, ts + 0.5e-6)
        self.add("cuda_runtime", call, ts, done, tid, correlation=self.correlation)
        place = {"device": 0, "stream": stream, "correlation": self.correlation}
        self.add(cat, kernel, begin, end, stream, **place, **facts)
        self.begun.append(begin)
        self.host = done
        return ts, done

    def call(self, name: str, begin: float, end: float, phase: str, **facts: Any) -> None:
        """An operator of the host; those of the backward pass run in a node of autograd."""
        thread = _find_thread(phase)
        if phase == "backward":
            node = f"autograd::engine::evaluate_function: {name.split('::')[-1]}Backward0"
            self.add("cpu_op", node, begin - 0.1e-6, end + 0.1e-6, thread)
        self.add("cpu_op", name, begin, end, thread, **facts)
        self.host = max(self.host, end + 0.6e-6)  # the next call begins behind this one

    def write(self, path: Path) -> Path:
        """The file."""
        head = {
            "deviceProperties": [{"id": 0, "name": "Invented GPU"}],
            "distributedInfo": {"rank": self.rank, "world_size": self.ranks},
        }
        path.write_text(json.dumps({**head, "traceEvents": self.events}))
        return path


def _list_sizes(graph: Graph, position: int) -> list[int]:
    """Dimensions of the first operand of an operation."""
    sizes = []
    for name in ("batch", "m", "n", "k", "elements", "rows", "lookups"):
        size = int(graph.column(name)[position])
        if size:
            sizes.append(size)
    return sizes


def _write_collective(writer: _Writer, line: RankTimeline, position: int) -> float:
    """A collective, whose kernel runs from the moment when its rank is ready; when its call ended
    [s]."""
    graph, group = line.graph, line.times.group
    name = graph.labels[position].name
    call, kernel = _CALLS.get(name, (name, f"ncclDevKernel_{name}"))
    number = int(graph.column("group")[position])
    peers = list(group.communicator_ranks[number])
    elements = int(graph.column("nbytes")[position] // 4)
    sent = elements // len(peers) if name == "all_gather" else elements
    received = elements // len(peers) if name == "reduce_scatter" else elements
    facts = {
        "Collective_name": call,
        "dtype": "Float",
        "In_msg_nelems": sent,
        "Out_msg_nelems": received,
        "Group_size": len(peers),
        "Process_Group_Name": str(number),
        "Process_Group_Ranks": str(peers),
    }
    issued = float(line.issued[position])
    begin = float(line.starts[position] - line.arrival_wait_time[position])
    begin = max(begin, issued)
    phase = graph.labels[position].phase
    called, done = writer.launch(
        "cudaLaunchKernelExC",
        issued,
        kernel,
        "kernel",
        begin,
        float(line.ends[position]),
        thread=_find_thread(phase),
        stream=_COMMUNICATION + number,
        **facts,
    )
    writer.call("record_param_comms", called - 0.3e-6, done + 0.2e-6, phase, **facts)
    return writer.host


def _write_operation(writer: _Writer, line: RankTimeline, position: int, floor: float) -> float:
    """An operation with its kernels; when its host call ended [s]."""
    graph, label = line.graph, line.graph.labels[position]
    launches = int(graph.column("launches")[position])
    issued = float(line.issued[position])
    begin, end = float(line.starts[position]), float(line.ends[position])
    interval = float(line.times.launch_interval[position])
    prefix = "fbgemm::" if label.kind.startswith("embedding") else "aten::"
    sizes = {"Input_Dims": [_list_sizes(graph, position)], "Input_type": ["float"]}
    if launches == 0 and end <= begin:
        return floor
    count = min(max(launches, 1), 64)
    if count > 1:  # the first of several kernels does not wait for the launch of the last one
        begin = min(max(issued, writer.computed), begin)
    kernel = _KERNELS.get(label.kind, label.kind) + f"<{label.name}>"
    ended, part = begin, float(line.ends[position] - line.starts[position]) / count
    call_begin, call_end = math.inf, -math.inf
    for place in range(count):
        launched = issued + interval * place / count
        starts = max(ended, launched)
        ended = starts + part if place < count - 1 else max(starts + 0.5 * part, end)
        writer.computed = ended
        called, done = writer.launch(
            "cudaLaunchKernel",
            launched,
            kernel,
            "kernel",
            starts,
            ended,
            thread=_find_thread(label.phase),
            stream=7,
        )
        call_begin, call_end = min(call_begin, called), max(call_end, done)
    writer.call(prefix + label.name, call_begin - 0.3e-6, call_end + 0.2e-6, label.phase, **sizes)
    return writer.host


def _find_thread(phase: str) -> int:
    """Thread of the host that runs a phase."""
    return _AUTOGRAD if phase == "backward" else _MAIN


def write_traces(folder: Path, prediction: pk.Prediction, loop: Loop) -> list[Path]:
    """Write the steps of a loop as Kineto traces, one for each group of identical ranks.

    Parameters
    ----------
    folder : Path
        Where the files go.
    prediction : Prediction
        The iteration.
    loop : Loop
        What is around it.

    Returns
    -------
    paths : list of Path
        The files.
    """
    groups = [times.group for times in prediction._timeline.ranks]
    writers = [_Writer(group.ranks[0], prediction.ranks) for group in groups]
    for number, step in enumerate(run_loop(prediction, loop)):
        for index, line in enumerate(step.timelines):
            _write_step(writers[index], line, number, loop, step, index)
    paths = []
    for writer in writers:
        paths.append(writer.write(folder / f"rank{writer.rank}.json"))
    return paths


def _write_step(
    writer: _Writer, line: RankTimeline, number: int, loop: Loop, step: Step, index: int
) -> None:
    """One step of a rank."""
    begin, end = float(step.host_begins[index]), float(step.host_ends[index])
    begin = max(begin, writer.host)
    if loop.loading:
        name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        writer.add("user_annotation", name, begin, begin + loop.loading, _MAIN)
    floor = begin + loop.loading
    update_begin: float | None = None
    for position, label in enumerate(line.graph.labels):
        if label.kind == "host":
            continue  # a pause of the stream, in which the host of a strategy works
        if label.phase == "update" and update_begin is None:
            update_begin = max(floor, writer.host) - 0.4e-6
        if label.phase != "update" and update_begin is not None:
            writer.add("user_annotation", _UPDATE, update_begin, writer.host - 0.5e-6, _MAIN)
            update_begin = None
        if label.kind == "collective":
            floor = _write_collective(writer, line, position)
        else:
            floor = _write_operation(writer, line, position, floor)
    last = max(writer.host, floor)
    if not loop.waits:
        last = max(last, end)
    if update_begin is not None:
        writer.add("user_annotation", _UPDATE, update_begin, writer.host - 0.5e-6, _MAIN)
    if loop.waits:
        last = _write_wait(writer, line, last)
    writer.add("user_annotation", f"ProfilerStep#{number}", begin - 2e-6, last + 1e-6, _MAIN)


def _write_wait(writer: _Writer, line: RankTimeline, host: float) -> float:
    """A number that the host reads from its device; when it goes on [s]."""
    done = max(float(line.ends[line.compute].max()), host)
    call = host + 6e-6
    writer.launch(
        "cudaMemcpyAsync",
        call + _LAUNCH,
        "Memcpy DtoH (Device -> Pageable)",
        "gpu_memcpy",
        max(done, call + _LAUNCH),
        max(done, call + _LAUNCH) + 1e-6,
        thread=_MAIN,
        stream=7,
    )
    done = max(done, call + _LAUNCH) + 1e-6
    writer.add("cuda_runtime", "cudaStreamSynchronize", writer.host + 0.5e-6, done + 2e-6, _MAIN)
    writer.add("cpu_op", "aten::item", call - 3e-6, done + 3e-6, _MAIN)
    writer.host = done + 2e-6
    return done + 3e-6
