"""From a trace to the graph of its step: operations run again on what they were given."""

import ast
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from perfkit.calibration.activity import list_work
from perfkit.calibration.meetings import list_collectives
from perfkit.ground.results import Table
from perfkit.ground.units import Array
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.platform import Platform
from perfkit.prediction.cost import find_traffic, size_operations
from perfkit.readers.trace import DEVICE, TraceFile, find_iterations
from perfkit.recording.recorder import Recorder
from perfkit.workloads.graph import FEATURES, PHASES, Graph

#: Types of tensors by their names in traces.
_TYPES = {
    "float": torch.float32, "double": torch.float64, "c10::Half": torch.float16, "c10::BFloat16": torch.bfloat16,
    "int": torch.int32, "long": torch.int64, "long int": torch.int64, "unsigned char": torch.uint8, "bool": torch.bool,
}  # fmt: skip
#: Arguments that say how results are stored and of which type, by numbers that change with versions.
_ABOUT = {"device", "layout", "pin_memory", "memory_format", "generator", "dtype"}
_MISFIT = object()
#: What PyTorch raises for arguments that an operation does not take.
_REFUSED = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)


def record_step(file: TraceFile) -> tuple[Graph, Array]:
    """Make the graph of one step of a rank from its trace.

    Parameters
    ----------
    file : TraceFile
        Recorded with ``record_shapes``, or with an execution trace beside it.

    Returns
    -------
    graph : Graph
        Operations of the step in the middle of those that it holds.
    seconds : array
        Device time of each; not a number where several share what was measured [s].

    Raises
    ------
    ValueError
        For a trace without sizes of operands or without a device.

    Notes
    -----
    An operation is run again on tensors without values, so its sizes are those that `perfkit.capture` would find.
    Kernels, calls of the framework and calls without a kernel are counted, not assumed; those that load data are left
    out, as there. What cannot be run again is of the kind ``other``, with the bytes that it was given. Every tensor
    counts as one of its own, a collective is waited for at once, and copies between host and device as copies.
    """
    steps = find_iterations(file.events).filter(pl.col("kernels") > 0)
    if not file.events["cat"].is_in(DEVICE).any():
        raise ValueError(f"{file.source} holds no work of a device; record it with ProfilerActivity.CUDA")
    number = [*steps["iteration"], -1][len(steps) // 2]
    work = list_work(file).filter(pl.col("iteration") == number)
    if not any("Input Dims" in file.args.get(index, {}) for index in work["operation"]):
        raise ValueError(f"{file.source} holds no sizes of operands; record it with record_shapes=True")
    step = _Step(file, work, number)
    with step.recorder.values.fake, step.recorder, torch.no_grad():
        for key in sorted(step.calls, key=lambda key: (step.ts[step.find_host(key)], key)):
            step.record(key, step.calls[key])
    graph = step.recorder.graph(file.source, "", step.ranks)
    rows, features = np.array(step.rows, dtype=float).reshape(-1, 4), graph.features.copy()
    for column, name in enumerate(("launches", "calls", "bare")):
        features[:, FEATURES.index(name)] = rows[:, column]
    groups = () if step.groups in ([], [tuple(range(step.ranks))]) else tuple(step.groups)
    return replace(graph, features=features, groups=groups), rows[:, 3]


def place_operations(file: TraceFile, platform: Platform) -> Table:
    """Operations of a step and what they reached of a platform's peaks and bandwidth, see `Trace.roofline`."""
    graph, seconds = record_step(file)
    with keep_quiet():
        sizes = size_operations(graph, platform)
    sizes |= find_traffic(sizes, platform)
    limits = {"peak_share": sizes["flops"] / sizes["peak"], "bandwidth_share": sizes["nbytes"] / sizes["bandwidth"]}
    work = {"time_s": seconds, "flops": sizes["flops"], "nbytes": sizes["nbytes"], **limits}
    frame = graph.table().select("name", "kind", "phase", "module").with_columns(**work)
    frame = frame.filter(pl.col("time_s") > 0, ~pl.col("kind").is_in(("other", "collective", "transfer")))
    return frame.with_columns(pl.col(*limits) / pl.col("time_s"))


class _Step:
    """A step as it is gone through in the order of its host."""

    def __init__(self, file: TraceFile, work: pl.DataFrame, number: int) -> None:
        self.recorder = Recorder(FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False), True)
        self.recorder.leading, self.args, self.ranks = True, file.args, file.ranks or 1
        columns = ("cat", "name", "ts", "parent", "index_correlation", "iteration")
        cats, self.names, self.ts, parents, self.launches, own = (file.events[name].to_list() for name in columns)
        self.outer: list[int] = []  # the outermost operation around each event; what loads data is none
        for index, (cat, name, above) in enumerate(zip(cats, self.names, parents, strict=True)):
            inside = -2 if "DataLoader" in name else self.outer[above] if above >= 0 else -1
            self.outer.append(index if inside == -1 and cat == "cpu_op" else inside)
        found = {row["index"]: row for row in list_collectives([file], [work], {}).to_dicts()}
        self.calls: dict[int, list[dict[str, Any]]] = {}
        for row in work.to_dicts():
            above = self.launches[row["index"]] if row["operation"] < 0 else row["operation"]
            while above >= 0 and (cats[above] != "cpu_op" or "evaluate_function" in self.names[above]):
                above = parents[above]
            inner = self.launches[row["index"]]
            while inner not in (-1, above) and (cats[inner], self.names[inner]) != ("cpu_op", self.names[above]):
                inner = parents[inner]
            above = max(above, inner)  # autocast calls an operation again, on what it has cast
            key = row["index"] if above < 0 or row["index"] in found else above
            self.calls.setdefault(key, []).append({**row, **found.get(key, {})})
        busy = {self.outer[self.find_host(key)] for key in self.calls}
        bare = (i for i, outer in enumerate(self.outer) if outer == i and own[i] == number and i not in busy)
        self.bare, self.opened, self.passed = [self.ts[i] for i in bare], set[int](), 0
        self.groups: list[tuple[int, ...]] = []
        self.rows: list[tuple[float, ...]] = []  # launches, calls, calls without a kernel and time of every operation

    def find_host(self, key: int) -> int:
        """The event of the host that stands for an operation, or for work of a device that belongs to none."""
        return self.launches[key] if self.launches[key] >= 0 else key

    def record(self, key: int, rows: list[dict[str, Any]]) -> None:
        """Record what belongs to an operation, and what it took of the host and of the device [s]."""
        recorder, name, first, given = self.recorder, self.names[key], rows[0], self.args.get(key, {})
        before, spent = len(recorder.labels), np.array([1e-9 * (row["end"] - row["start"]) for row in rows])
        recorder.phase = phase = first["phase"] if first["phase"] in PHASES else "forward"
        recorder.modules = [first["module"]] * (phase != "update")
        if "nbytes" in first:
            known, uneven = str(first["group"])[:1].isdigit(), [*(first["sent"] or ()), *(first["received"] or ())]
            ranks = tuple(map(int, first["group"].split(", ")) if known else range(first["ranks"] or self.ranks))
            self.groups += [ranks] if ranks not in self.groups else []
            sizes = {"nbytes": first["nbytes"] or 0.0, "group": self.groups.index(ranks)}
            if uneven:  # the fullest rank's whole buffer bounds an uneven exchange
                sizes["nbytes"] *= len(ranks) * max(uneven) / max(sum(first["sent"] or ()), 1)
            recorder.emit((first["operation"], "collective", first["operation"]), first["module"], sizes, [], [])
            spent = np.full(1, np.nan)
        elif name.startswith("aten::"):
            _run(recorder, name.removeprefix("aten::").replace("contiguous", "clone"), given)
        if len(recorder.labels) == before:
            pairs = zip(given.get("Input Dims") or (), given.get("Input type") or (), strict=False)
            tables = {"float", "c10::Half"} if "embedding" in name else ()  # looked up in, and not read
            read = [_make(dims, kind) for dims, kind in pairs if kind in _TYPES and kind not in tables]
            recorder.emit((name, "other", name), first["module"], {}, read, [])
        outer, added = self.outer[self.find_host(key)], len(recorder.labels) - before
        calls = np.arange(added) < (outer not in self.opened)
        self.opened.add(outer)
        passed, each = self.passed, np.minimum(np.arange(len(spent)), added - 1)
        self.passed = max(passed, bisect_left(self.bare, self.ts[outer]) if outer >= 0 else 0)
        times = np.bincount(each, spent, added) if added in (1, len(spent)) else np.full(added, np.nan)
        self.rows += zip(np.bincount(each, minlength=added), calls, calls * (self.passed - passed), times, strict=True)


def _run(recorder: Recorder, name: str, given: Mapping[str, Any]) -> None:
    """Run an operation on what it was given; nothing is recorded where the trace does not know enough of it."""
    columns = [given.get(key) or () for key in ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")]
    packet = getattr(torch.ops.aten, name, None)
    for func in (getattr(packet, overload) for overload in packet.overloads()) if packet else ():
        takes = func._schema.arguments
        values = [_adapt(name, a, *(part[i] if i < len(part) else "" for part in columns)) for i, a in enumerate(takes)]
        if any(value is _MISFIT for value in values):
            continue
        named = {a.name: v for a, v in zip(takes, values, strict=True) if a.kwarg_only and v is not None}
        try:
            recorder.on = True
            func(*(v for a, v in zip(takes, values, strict=True) if not a.kwarg_only), **named)
            return
        except _REFUSED:  # an overload that takes something else, or that needs values
            continue
        finally:
            recorder.on = False


def _adapt(name: str, argument: Any, dims: Any, kind: str, stride: Any, text: Any) -> Any:
    """An argument of an overload, if it takes what the trace has."""
    takes, several, value = str(argument.type), kind[:10] == "TensorList", argument.default_value
    if kind in _TYPES or several:
        if "Tensor" not in takes or (several and not (dims and "List" in takes)):
            return _MISFIT
        made = [_make(each, kind[11:-1]) if each else None for each in dims] if several else _make(dims, kind, stride)
        return [made] if "List" in takes and not several else made
    if takes == "Tensor":  # one that backward passes are given where there is none
        return torch.empty(0) if "backward" in name else _MISFIT
    if "Tensor" in takes or argument.name in _ABOUT:
        return None
    with suppress(ValueError, SyntaxError):
        value = ast.literal_eval(str(text)) if text else value
    return value


def _make(dims: Any, kind: str, stride: Any = ()) -> Tensor:
    """A tensor without values."""
    dtype = _TYPES.get(kind, torch.float32)
    return torch.empty_strided(dims, stride, dtype=dtype) if stride else torch.empty(dims, dtype=dtype)
