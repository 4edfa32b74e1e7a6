"""Small traces of PyTorch's profiler, invented event by event."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Event = dict[str, Any]
H100 = "NVIDIA H100 80GB HBM3"
#: Start of the invented recordings [us].
START = 1_700_000_000_000_000


def event(cat: str, name: str, begin: float, dur: float, **facts: Any) -> Event:
    """An event of the host, or of stream 7 of a device."""
    device = cat == "kernel" or cat.startswith("gpu_mem")
    place = {"pid": 0, "tid": 7} if device else {"pid": 1, "tid": 1}
    place |= {key: facts.pop(key) for key in ("pid", "tid") if key in facts}
    args = {key.replace("_", " "): value for key, value in facts.items()}
    if device:
        args = {"stream": place["tid"], "device": place["pid"]} | args
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        **place,
        "ts": START + begin,
        "dur": dur,
        "args": args,
    }


def step(begin: float = 0.0, dur: float = 1000.0, number: int = 1) -> Event:
    """The mark of a step."""
    return event("user_annotation", f"ProfilerStep#{number}", begin, dur)


def operation(
    name: str, begin: float, link: int, *, took: float = 100.0, size: int = 512, sized: bool = True
) -> list[Event]:
    """An operator of two square matrices that launches one kernel."""
    shapes: dict[str, Any] = {}
    if sized:
        square = [size, size]
        shapes = {"Input_Dims": [square, square], "Input_type": ["float", "float"]}
    return [
        event("cpu_op", name, begin, 30, External_id=link, **shapes),
        event("cuda_runtime", "cudaLaunchKernel", begin + 10, 5, correlation=link),
        event("kernel", f"kernel of {name}", begin + 40, took, correlation=link),
    ]


def exchange(
    begin: float,
    link: int,
    took: Iterable[tuple[float, float]],
    *,
    kernels: Iterable[str] = ("batch_mem_op.kd", "copy_buffer_batch.kd", "batch_mem_op.kd"),
    annotated: bool = True,
) -> list[Event]:
    """One all_gather of two ranks, of 16.8 MB, that runs kernels at given times."""
    facts = {
        "Collective_name": "_allgather_base",
        "dtype": "BFloat16",
        "In_msg_nelems": 2**22,
        "Out_msg_nelems": 2**23,
        "Group_size": 2,
        "Process_Group_Name": "0",
        "Process_Group_Ranks": "[0, 1]",
    }
    events = [event("cpu_op", "record_param_comms", begin, 30, External_id=link, **facts)]
    for place, ((start, dur), name) in enumerate(zip(took, kernels, strict=False)):
        number = 1000 * link + place
        launch = event("cuda_runtime", "hipLaunchKernel", begin + 5 + place, 1, correlation=number)
        said = facts if annotated else {}
        kernel = event(
            "kernel", name, start, dur, tid=2, correlation=number, External_id=link, **said
        )
        events += [launch, kernel]
    return events


def write(path: Path, events: list[Event], *, device: str | None = H100, **head: Any) -> Path:
    """A trace of these events."""
    properties = {"deviceProperties": [{"id": 0, "name": device}]} if device is not None else {}
    path.write_text(json.dumps({**properties, **head, "traceEvents": events}))
    return path


def write_ranks(folder: Path, ranks: Iterable[list[Event]], device: str = H100) -> list[Path]:
    """A trace for each rank."""
    every = list(ranks)
    return [
        write(
            folder / f"rank{rank}.json",
            events,
            device=device,
            distributedInfo={"rank": rank, "world_size": len(every)},
        )
        for rank, events in enumerate(every)
    ]


def healthy() -> list[Event]:
    """A step whose two operations are recorded whole."""
    return [step(), *operation("aten::mm", 20, 101), *operation("aten::add", 300, 102)]
