"""The graph of a traced step: each operation runs again on tensors of the recorded sizes."""

import ast
import logging
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from perfkit.calibration.activity import list_work
from perfkit.calibration.collectives import checked, list_collectives
from perfkit.ground.units import Array
from perfkit.readers.trace import DEVICE, TraceFile, find_iterations
from perfkit.recording.recorder import Recorder
from perfkit.workloads.graph import FEATURES, PHASES, Graph

#: Types of tensors by their name in traces.
_TYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "c10::Half": torch.float16,
    "c10::BFloat16": torch.bfloat16,
    "int": torch.int32,
    "long": torch.int64,
    "long int": torch.int64,
    "unsigned char": torch.uint8,
    "bool": torch.bool,
}
#: Arguments for the storage and type of results, recorded as numbers that change with versions of
#: PyTorch.
_ABOUT = {"device", "layout", "pin_memory", "memory_format", "generator", "dtype"}
_MISFIT = object()
#: Errors of PyTorch for arguments that an operation does not take.
_REFUSED = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)


@checked
def record_step(file: TraceFile) -> tuple[Graph, Array]:
    """Make the graph of one step of a rank from its trace.

    Parameters
    ----------
    file : TraceFile
        Recorded with ``record_shapes``, or with an execution trace beside it.

    Returns
    -------
    graph : Graph
        Operations of the middle step of the trace.
    seconds : array
        Device time of each operation; not a number where several operations share one measured time
        [s].

    Raises
    ------
    ValueError
        For a trace without sizes of operands or without a device.

    Notes
    -----
    Each operation runs again on tensors without values, so its sizes are those that
    `perfkit.capture` would find. Kernels, calls of the framework and calls without a kernel are
    counted from the trace. Calls that load data are left out, as in `perfkit.capture`. An operation
    that cannot run again has the kind ``other`` and the bytes of its arguments. Every argument
    counts as a separate tensor, and each collective is waited for at once.
    """
    steps = find_iterations(file.events).filter(pl.col("kernels") > 0)
    if not file.events["cat"].is_in(DEVICE).any():
        raise ValueError(
            f"{file.source} holds no work of a device; record it with ProfilerActivity.CUDA"
        )
    number = [*steps["iteration"], -1][len(steps) // 2]
    work = list_work(file).filter(pl.col("iteration") == number)
    if not any("Input Dims" in file.args.get(index, {}) for index in work["operation"]):
        raise ValueError(
            f"{file.source} holds no sizes of operands; record it with record_shapes=True"
        )
    step = _Step(file, work, number)
    # it reports each overload that refuses arguments
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        with step.recorder.values.fake, step.recorder, torch.no_grad():
            for key in sorted(step.calls, key=lambda key: (step.ts[step.find_host(key)], key)):
                step.record(key, step.calls[key])
    finally:
        log.disabled = before
    graph = step.recorder.graph(file.source, "", step.ranks)
    rows, features = np.array(step.rows, dtype=float).reshape(-1, 4), graph.features.copy()
    features[:, [FEATURES.index(name) for name in ("launches", "calls", "bare")]] = rows[:, :3]
    groups = () if step.groups in ([], [tuple(range(step.ranks))]) else tuple(step.groups)
    return replace(graph, features=features, groups=groups), rows[:, 3]


class _Step:
    """Recording of one step, operation by operation in the order of the host."""

    def __init__(self, file: TraceFile, work: pl.DataFrame, number: int) -> None:
        self.recorder = Recorder(accelerator=True)
        self.recorder.leading, self.args, self.ranks = True, file.args, file.ranks or 1
        columns = ("cat", "name", "ts", "parent", "index_correlation", "iteration")
        cats, self.names, self.ts, parents, self.launches, own = (
            file.events[name].to_list() for name in columns
        )
        self.outer: list[int] = []  # outermost operation around each event, -2 for loading of data
        for index, (cat, name, above) in enumerate(zip(cats, self.names, parents, strict=True)):
            inside = -2 if "DataLoader" in name else self.outer[above] if above >= 0 else -1
            self.outer.append(index if inside == -1 and cat == "cpu_op" else inside)
        found = {row["index"]: row for row in list_collectives([file], [work], {}).to_dicts()}
        self.calls: dict[int, list[dict[str, Any]]] = {}
        for row in work.to_dicts():
            above = self.launches[row["index"]] if row["operation"] < 0 else row["operation"]
            while above >= 0 and (
                cats[above] != "cpu_op" or "evaluate_function" in self.names[above]
            ):
                above = parents[above]
            key = row["index"] if above < 0 or row["index"] in found else above
            self.calls.setdefault(key, []).append({**row, **found.get(key, {})})
        busy = {self.outer[self.find_host(key)] for key in self.calls}
        bare = (
            i
            for i, outer in enumerate(self.outer)
            if outer == i and own[i] == number and i not in busy
        )
        self.bare, self.opened, self.passed = [self.ts[i] for i in bare], set[int](), 0
        self.groups: list[tuple[int, ...]] = []
        # of each operation: launches, calls, calls without a kernel, time
        self.rows: list[tuple[float, ...]] = []

    def find_host(self, key: int) -> int:
        """The host event of an operation, or of device work without an operation."""
        return self.launches[key] if self.launches[key] >= 0 else key

    def record(self, key: int, rows: list[dict[str, Any]]) -> None:
        """Record one operation with its kernels, and its time on the device [s]."""
        recorder, name, first, given = (
            self.recorder,
            self.names[key],
            rows[0],
            self.args.get(key, {}),
        )
        before, spent = (
            len(recorder.labels),
            np.array([1e-9 * (row["end"] - row["start"]) for row in rows]),
        )
        recorder.phase = phase = first["phase"] if first["phase"] in PHASES else "forward"
        recorder.modules = [first["module"]] * (phase != "update")
        if "nbytes" in first:
            ranks = tuple(first["members"] or range(first["ranks"] or self.ranks))
            self.groups += [ranks] if ranks not in self.groups else []
            sizes = {"nbytes": first["even"] or 0.0, "group": self.groups.index(ranks)}
            recorder.emit(
                (first["operation"], "collective", first["operation"]),
                first["module"],
                sizes,
                [],
                [],
            )
            spent = np.full(1, np.nan)
        elif name.startswith("aten::"):
            _run(recorder, name.removeprefix("aten::").replace("contiguous", "clone"), given)
        if len(recorder.labels) == before:
            pairs = zip(given.get("Input Dims") or (), given.get("Input type") or (), strict=False)
            # only some rows of a table are read
            tables = {"float", "c10::Half"} if "embedding" in name else ()
            read = [
                _make(dims, kind) for dims, kind in pairs if kind in _TYPES and kind not in tables
            ]
            recorder.emit((name, "other", name), first["module"], {}, read, [])
        outer, added = self.outer[self.find_host(key)], len(recorder.labels) - before
        calls = np.arange(added) < (outer not in self.opened)
        self.opened.add(outer)
        passed, each = self.passed, np.minimum(np.arange(len(spent)), added - 1)
        self.passed = max(passed, bisect_left(self.bare, self.ts[outer]) if outer >= 0 else 0)
        times = (
            np.bincount(each, spent, added) if added in (1, len(spent)) else np.full(added, np.nan)
        )
        self.rows += zip(
            np.bincount(each, minlength=added),
            calls,
            calls * (self.passed - passed),
            times,
            strict=True,
        )


def _run(recorder: Recorder, name: str, given: Mapping[str, Any]) -> None:
    """Run an operation on its recorded arguments; without enough facts nothing is recorded."""
    columns = [
        given.get(key) or ()
        for key in ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")
    ]
    packet = getattr(torch.ops.aten, name, None)
    for func in (getattr(packet, overload) for overload in packet.overloads()) if packet else ():
        takes = func._schema.arguments
        values = [
            _adapt(name, a, *(part[i] if i < len(part) else "" for part in columns))
            for i, a in enumerate(takes)
        ]
        if any(value is _MISFIT for value in values):
            continue
        named = {
            a.name: v for a, v in zip(takes, values, strict=True) if a.kwarg_only and v is not None
        }
        try:
            recorder.on = True
            func(*(v for a, v in zip(takes, values, strict=True) if not a.kwarg_only), **named)
            return
        except _REFUSED:  # the overload takes other arguments, or needs values
            continue
        finally:
            recorder.on = False


def _adapt(name: str, argument: Any, dims: Any, kind: str, stride: Any, text: Any) -> Any:
    """Value of one argument of an overload, or `_MISFIT` if it does not take the recorded type."""
    takes, several, value = str(argument.type), kind[:10] == "TensorList", argument.default_value
    if kind in _TYPES or several:
        if "Tensor" not in takes or (several and not (dims and "List" in takes)):
            return _MISFIT
        made = (
            [_make(each, kind[11:-1]) if each else None for each in dims]
            if several
            else _make(dims, kind, stride)
        )
        return [made] if "List" in takes and not several else made
    if takes == "Tensor":  # backward operations take an empty tensor where none is needed
        return torch.empty(0) if "backward" in name else _MISFIT
    if "Tensor" in takes or argument.name in _ABOUT:
        return None
    with suppress(ValueError, SyntaxError):
        value = ast.literal_eval(str(text)) if text else value
    return value


def _make(dims: Any, kind: str, stride: Any = ()) -> Tensor:
    """A tensor without values."""
    dtype = _TYPES.get(kind, torch.float32)
    return (
        torch.empty_strided(dims, stride, dtype=dtype) if stride else torch.empty(dims, dtype=dtype)
    )
