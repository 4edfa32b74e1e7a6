"""Configurations of one structure, priced together on a GPU: sums over arrays in place of the event
loop."""

from dataclasses import replace
from typing import Any

import numpy as np

from perfkit.fitting import Additive
from perfkit.ground.units import Array
from perfkit.platform.platform import Platform
from perfkit.prediction.breakdown import MEMORY, RESOURCES, name_bottleneck
from perfkit.prediction.cost import Costs, join_host, price
from perfkit.prediction.levels import find_level
from perfkit.prediction.memory import WORKSPACE, list_peaks, sum_untouched
from perfkit.prediction.ranks import Workload, group_identical_ranks, time_collectives, time_ranks
from perfkit.prediction.uncertainty import (
    CONTEXT,
    find_host_error,
    find_least_spread,
    join_errors,
)
from perfkit.workloads.execution import execute
from perfkit.workloads.graph import Graph
from perfkit.workloads.sizes import alter, count_configurations
from perfkit.workloads.stack import Stack, StackedWork, apply_stack
from perfkit.workloads.structure import Structure

# configurations in one pass: few calls of numpy, and arrays that fit into the cache
_TOGETHER = 2000
#: Bytes of a block whose release makes the memory manager of Linux keep memory that is freed later
#: [B]. Without it half of the time goes into getting the same pages again in each pass.
_KEPT = 2**25 - 2**16
#: Sizes that the times on a GPU depend on.
_TIMED = ("flops", "batch", "m", "n", "k", "rows", "lookups", "dim", "nbytes", "table", "launches")
#: Sizes that decide, on several ranks, which gradients are sent together.
_WEIGHTS = ("hidden", "heads", "vocabulary", "positions")


def price_configurations(
    workload: Workload,
    platform: Platform,
    ranks: int = 1,
    execution: str | None = None,
    stack: str | Stack | None = None,
) -> dict[str, np.ndarray]:
    """Price an iteration on GPUs for every configuration of a workload whose sizes are arrays.

    Parameters
    ----------
    workload : Workload
        A DLRM or a Transformer of one structure; sizes are numbers, or arrays with one for each
        configuration.
    platform : Platform
        Where it runs.
    ranks : int
        Ranks that take part; all of them do the same [-].
    execution : str, optional
        See `predict`; not ``compiled``.
    stack : str or Stack, optional
        The software, see `predict`.

    Returns
    -------
    columns : dict of str to array
        ``time`` from one iteration to the next [s], ``spread`` of its logarithm [-],
        ``bottleneck``, and ``needs``, the memory [B]: as `predict` finds them for each
        configuration.

    Raises
    ------
    ValueError
        On a CPU, where times depend on the order of operations, and for ranks that differ: there
        configurations are priced one after the other.

    Notes
    -----
    The time follows from host and device as in `join_host`. A device waits for collectives as in
    `simulate`; it is assumed to wait as long if the host is slower.
    """
    if platform.device.kind == "cpu":
        raise ValueError("sizes are arrays; on a CPU configurations are priced one after the other")
    if not hasattr(workload, "structure"):
        raise ValueError(f"{workload.description} has no open sizes; price it with predict")
    np.empty(_KEPT, dtype=np.uint8)  # is freed at once
    work = apply_stack(workload, None, execution, stack)
    workload = work.workload
    found: dict[str, np.ndarray] = {}
    count = max(count_configurations(workload), 1)
    for members in _split_by_settings(workload, ranks, count):
        # what decides on messages is a number for all of them
        alike = {
            name: int(sizes[members[0]]) for name, sizes in _list_alike(workload, ranks, count)
        }
        part = alter(workload, alike)
        structure = part.structure(ranks, accelerator=True)
        sizes = {
            name: np.broadcast_to(values, count)
            for name, values in structure.read_sizes(part).items()
        }
        times: _StructureTimes | None = None
        for chosen in np.split(members, range(_TOGETHER, len(members), _TOGETHER)):
            chosen_sizes = {name: values[chosen] for name, values in sizes.items()}
            values = structure.expressions.evaluate(chosen_sizes)
            if times is None:
                times = _StructureTimes(structure, values, platform, ranks, work)
            for name, column in times.price(values).items():
                found.setdefault(name, np.empty(count, column.dtype))[chosen] = column
    return found


def _list_alike(workload: Workload, ranks: int, count: int) -> list[tuple[str, np.ndarray]]:
    """Sizes that all configurations of a pass must share, each for all configurations."""
    if ranks == 1:
        return []
    return [
        (name, np.broadcast_to(getattr(workload, name), count))
        for name in _WEIGHTS
        if hasattr(workload, name)
    ]


def _split_by_settings(workload: Any, ranks: int, count: int) -> list[np.ndarray]:
    """Numbers of the configurations that run the same kernels and, on several ranks, send the same
    messages."""
    hidden = np.broadcast_to(getattr(workload, "hidden", 1), count)
    heads = np.broadcast_to(getattr(workload, "heads", 1), count)
    settings = [hidden / heads]  # decides on the kernel of attention
    if getattr(workload, "kv_heads", 0) > 0:
        settings.append(heads)
    settings += [sizes for _, sizes in _list_alike(workload, ranks, count)]
    order = np.lexsort(settings)
    differs = np.any([np.diff(column[order]) for column in settings], axis=0)
    return np.split(order, np.flatnonzero(differs) + 1)


class _StructureTimes:
    """What configurations of one structure have in common, on the ranks of a platform.

    Of operations that are equal only the `first` is priced, with how `often` it comes; `work` is how
    many there are in each piece. `features` are the rows of these in the table of sizes of the
    graph. `sums` is how often each row is in a sum: the traffic of each operation, the bytes of all
    buffers, and the bytes held at each moment that may need the most memory.
    """

    def __init__(
        self,
        structure: Structure,
        values: Array,
        platform: Platform,
        ranks: int,
        stacked: StackedWork,
    ) -> None:
        from scipy.sparse import csr_array

        graph = structure.graphs[0]
        if any(other is not graph for other in structure.graphs):
            raise ValueError(
                "sizes are arrays and ranks differ; configurations are priced one after the other"
            )
        self.graph, self.platform, self.workload = graph, platform, stacked.workload
        #: Level of the software, whose scale is part of all times; None without one.
        self.level = find_level(platform, stacked.stacks[0], self.workload, ranks)
        filled = graph.fill(values[:, 0])
        pads_products = stacked.stacks[0].pads_products
        [one] = execute([filled], stacked.execution, pads_products=pads_products)
        self.one = one
        operations, buffers = graph.accesses.operation, graph.accesses.buffer
        touched: np.ndarray = graph.accesses.nbytes
        traffic = np.zeros((len(one), len(graph.sizes)))
        np.add.at(traffic, (operations, touched), 1.0)
        has = (one.column(name) > 0 for name in ("flops", "lookups"))
        formats = np.unique(one.dtypes or [""] * len(one), return_inverse=True)[1]
        timed = (vars(graph.features)[name] for name in _TIMED)
        keys = np.column_stack([*has, one.classes.of_operation, formats, *timed, traffic])
        _, first, number, often = np.unique(
            keys, axis=0, return_index=True, return_inverse=True, return_counts=True
        )
        self.first, self.often = first, often.astype(float)
        self.features = {name: rows[first] for name, rows in vars(graph.features).items()}
        kinds = np.zeros(1 + max(buffers.max(), one.weights.buffer.max(initial=0)), int)
        example = graph.sizes.fill(values[:, 0])
        order = np.lexsort([example[touched], buffers])
        kinds[buffers[order]] = touched[order]  # the last one, the bytes of the whole buffer
        whole = np.bincount(kinds[np.unique(buffers)], minlength=len(example))
        peaks = list_peaks(one, kinds, example, accelerator=platform.device.kind != "cpu")
        self.peaks = [len(own) for own in peaks]  # of each stream
        self.sums = csr_array(np.concatenate([traffic[first], [whole], *peaks]))
        self.time_host(ranks, self.features["nbytes"])
        segments = self.one.segments
        begins, ends = segments.begins, segments.ends
        work = np.zeros((len(begins), len(first)))
        np.add.at(work, (np.repeat(np.arange(len(begins)), ends - begins), number), 1.0)
        self.work = csr_array(work)

    def time_host(self, ranks: int, messages: np.ndarray) -> None:
        """Time the host and the collectives, which are the same for all configurations.

        `messages` are the rows of the message sizes.
        """
        one, platform = self.one, self.platform
        [kind, *others] = group_identical_ranks([one], ranks, {})
        if (
            others
            or len({*kind.communicators}) > 1
            or len(one.transfers)
            or self.graph.sizes.is_symbolic[messages].any()
        ):
            fault = (
                "sizes are arrays, and ranks differ or wait for more than collectives of fixed size"
            )
            raise ValueError(f"{fault}; configurations are priced one after the other")
        self.whole, overlap = (
            platform.context.find_iteration(self.workload.family, ranks),
            platform.context.overlap,
        )
        [durations], _ = time_collectives([kind], platform, self.whole)
        [self.rank] = time_ranks([kind], [np.zeros(len(one))], [durations], platform, self.whole)
        if self.level is not None:
            self.rank = self.rank.scale(self.level["scale"])
        self.host = float(np.sum(self.rank.host + self.rank.launch_interval))
        self.contention = overlap["contention"] if overlap and self.whole else 0.0

    def reduce(self, values: Array) -> tuple[Graph, Array]:
        """One operation of each kind, with the sizes of all configurations, and the memory that
        they need [B]."""
        sizes, one, count = self.graph.sizes.fill(values), self.one, len(self.first)
        is_symbolic = self.graph.sizes.is_symbolic
        sums = self.sums @ sizes
        rows_of_feature = ((name, self.features[name]) for name in _TIMED)
        columns = {
            name: sizes[rows]
            for name, rows in rows_of_feature
            if name == "lookups" or is_symbolic[rows].any()
        }
        tables = self.graph.fill_tables(values)
        found = replace(
            one,
            labels=tuple(one.labels[n] for n in self.first),
            features=one.features.select(self.first),
            columns=columns,
            dtypes=tuple(one.dtypes[n] for n in self.first) if one.dtypes else (),
            tables=tables,
            repeats=self.often,
        )
        vars(found).update(traffic=sums[:count], footprint=sums[count])
        untouched = sum_untouched(one, tables) if tables else ()
        streams = np.split(sums[count + 1 :], np.cumsum(self.peaks)[:-1])
        needs = sum(moments.max(axis=0) for moments in streams)
        return found, needs + sum(untouched) + one.untouched + WORKSPACE

    def wait(self, seconds: Array) -> Array:
        """Time that collectives add to an iteration with these operation times [s], see
        `simulate`."""
        work = self.work @ seconds
        segments = self.one.segments
        durations, share = self.rank.durations, self.contention
        front = begin = network = np.zeros(work.shape[1])
        ended = ended_before = [front] * len(durations)
        looks_back = any(wait is not None and wait.of_previous_iteration for wait in segments.waits)
        iterations = 3 if looks_back else 1  # a collective may end in the next iteration
        for _ in range(iterations):
            ended, ended_before, begin = [front] * len(durations), ended, front
            for own, wait, launched in zip(work, segments.waits, segments.launches, strict=True):
                if wait is not None:
                    ends = ended_before if wait.of_previous_iteration else ended
                    front = np.maximum(front, ends[wait.collective])
                if share:
                    left = np.maximum(network - front, 0.0)
                    own = own + share * np.minimum(own / max(1.0 - share, 1e-12), left)
                front = front + own
                if launched is not None:
                    network = np.maximum(network, front) + durations[launched]
                    ended[launched] = network
        return front - begin - work.sum(axis=0)

    def price(self, values: Array) -> dict[str, np.ndarray]:
        """Price configurations that fit into one pass, from the values of all symbolic sizes."""
        graph, needs = self.reduce(values)
        [cost] = price([graph], self.platform, dtype=self.workload.dtype)
        if any(isinstance(model.fit, Additive) for model in cost.models):
            raise ValueError(
                "sizes are arrays and kernels are sums of terms; configurations are priced one by one"
            )
        whole, host = self.whole, self.host
        scale = whole["scale"] if whole else 1.0
        if self.level is not None:
            scale *= self.level["scale"]
        times, waits = scale * cost.totals, np.zeros(len(needs))
        if len(self.rank.durations):
            waits = self.wait(scale * cost.seconds)
        device = times.sum(axis=0) + waits
        time = join_host(device, host, whole)
        spread = self.find_spread(cost, times, waits, time)
        by_resource = {"communication": waits, "host": time - device}
        for model, seconds in zip(cost.models, times, strict=True):
            resource = RESOURCES.get(model.kind, MEMORY)
            by_resource[resource] = by_resource.get(resource, 0.0) + seconds
        bottleneck = name_bottleneck(by_resource, host, device)
        return {"time": time, "spread": spread, "bottleneck": bottleneck, "needs": needs}

    def find_spread(self, cost: Costs, times: Array, waits: Array, time: Array) -> Array:
        """Standard deviation of the logarithm of each iteration [-], as `estimate_spread` finds it,
        from the times of its classes, of its waits for collectives, and of all of it [s]."""
        whole, level = self.whole, self.level
        around_kernels = whole.spread if whole else CONTEXT
        if whole and "per_operation" in whole:
            return np.full(len(time), around_kernels)
        busy = times.sum(axis=0)
        around = around_kernels * np.minimum(busy / time, 1.0)
        of_device = join_errors(cost.spread * times / time, cost.assumed, waits / time, around)
        if level is not None:  # it holds all errors but those of hosts
            of_device = np.full(len(time), level.spread)
        error, device = find_host_error(self.platform), busy + waits
        slow = join_host(device, self.host * error, whole)
        fast = join_host(device, self.host / error, whole)
        of_host = np.log(slow / fast) / 2
        fit_or_level = whole if level is None else level
        least = find_least_spread(self.platform, fit_or_level)
        return np.maximum(np.hypot(of_device, of_host), least)
