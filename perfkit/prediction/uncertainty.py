"""How certain a prediction is, what a reader should know before trusting it, and which resources it
depends on."""

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from perfkit.fitting import Iteration
from perfkit.ground.results import Picture, Table, Tabular
from perfkit.ground.units import check_positive, format_bytes, format_time
from perfkit.models.optimizers import OPTIMIZERS, find_optimizer
from perfkit.platform.kernel_times import say_unaligned
from perfkit.platform.kernels import find_kernel
from perfkit.platform.platform import Platform
from perfkit.platform.whatif import list_resources
from perfkit.prediction.cost import Costs, join_host
from perfkit.prediction.simulation import RankTimeline, Timeline, simulate
from perfkit.prediction.single_causes import predict_time
from perfkit.workloads.graph import Graph
from perfkit.workloads.measured_functions import MEASURED_FUNCTIONS
from perfkit.workloads.vocabulary import is_unpriced

#: What a model of the library takes to use tensor cores.
OTHER_FORMATS = "take dtype='bf16' (mixed=True for autocast) or dtype='tf32'"
#: Spread of an iteration around the sum of its isolated kernels, without calibrated iterations [-];
#: docs/formulas.md, table 9.1.
CONTEXT = 0.08
#: Least spread of an iteration on a GPU whose platform has fits of whole iterations, but none of
#: this family [-]; docs/formulas.md, table 9.1.
UNSEEN_FAMILY = 0.12
#: Relative uncertainty of a host overhead without a standard error, by its kind [-];
#: docs/formulas.md, table 6.1. For overheads fitted to other machines it is the least: hosts of one
#: generation differ by this much.
_UNCERTAIN = {"assumed": 0.3, "datasheet": 0.3, "fitted": 0.15, "measured": 0.1}
#: The least of it for hosts of compiled code, which no calibration measures [-]; docs/formulas.md,
#: table 6.1.
_COMPILED = 1.0
#: How many times as much of a resource an elasticity is taken over [-].
STEP = 1.01
#: Standard deviations from the middle of an interval of 80 % to its ends [-].
_OF_80_PERCENT = 1.2816
#: Kind and variant of the kernels that look up and update tables, by the `embedding` of a DLRM; hash
#: tables are refused where theirs are not known.
_EMBEDDING_KERNELS = {
    "separate": (("embedding_forward", "_embedding_bag"), ("embedding_backward", "sparse")),
    "fused": (("embedding_forward", "fused"), ("embedding_backward", "fused")),
    "exact": (("embedding_forward", "fused"), ("embedding_backward", "exact")),
}
#: Weights of tables from which on it is said that they are updated as a whole [-].
_LARGE = 1e7
#: The module whose product has a row for each word.
_HEAD = "head"


#: What is said of a platform that a rehearsal has written.
REHEARSED = (
    "{0} comes from a rehearsal (perfkit calibrate --rehearse): nothing was timed, and its numbers are those of {1}; "
    "calibrate without --rehearse"
)


def _list_not_timed() -> dict[str, str]:
    """Element-wise functions of built models that no calibration times, each with the reason why
    the median of others will do."""
    reasons = {"_to_copy": "a cast reads and writes each number once"}
    for optimizer in OPTIMIZERS.values():
        if "fused" in optimizer.forms:
            for operation in optimizer.operations("fused"):
                reasons[operation.name] = "the one kernel of an optimizer, which moves many bytes"
    return reasons


#: What it lists.
NOT_TIMED = _list_not_timed()


def find_host_error(platform: Platform, execution: str = "") -> float:
    """How many times longer all host overheads together may be [-]: they have a common error."""
    errors, total = 0.0, sum(q.value for q in platform.host.values())
    for q in platform.host.values():
        least = _UNCERTAIN[q.kind] * q.value if q.kind == "fitted" or q.stderr is None else 0.0
        errors += max(q.stderr or 0.0, least)
    return 1 + max(
        errors / total if total else _UNCERTAIN["assumed"], _COMPILED * (execution == "compiled")
    )


def find_least_spread(platform: Platform, whole: Iteration | None) -> float:
    """Find the least spread of the time of an iteration: what nobody measured is no surer than
    families of models that were left out.

    Parameters
    ----------
    platform : Platform
        Where it runs.
    whole : Iteration or None
        Fit of whole iterations of its family, or the level of its software.

    Returns
    -------
    least : float
        Standard deviation of the logarithm of the time [-].
    """
    on_device = platform.device.kind != "cpu"
    if on_device and whole is None and platform.context.is_calibrated:
        return UNSEEN_FAMILY
    return 0.0


def join_errors(errors: Any, assumed: np.ndarray, waits: Any, whole: Any) -> Any:
    """Join relative errors: of classes, which are independent where they were fitted, and of the
    rest [-].

    Classes that are only assumed have a common error. Each number may be an array over
    configurations.
    """
    sums = (
        errors[assumed].sum(axis=0) ** 2,
        (errors[~assumed] ** 2).sum(axis=0),
        (0.3 * waits) ** 2,
        whole**2,
    )
    return np.sqrt(sum(sums))


def grow_over_nodes(rank_timeline: RankTimeline, platform: Platform) -> float:
    """Extra spread of the collectives of a rank, as they span more nodes than were measured.

    Parameters
    ----------
    rank_timeline : RankTimeline
        The iteration of the rank.
    platform : Platform
        Where it runs.

    Returns
    -------
    growth : float
        Mean over its collectives by their times, which have a common error: see
        `perfkit.platform.collective_fits.grow_beyond` [-].
    """
    if platform.network.nodes == 1:
        return 0.0
    from perfkit.platform.collective_fits import grow_beyond  # only several nodes need it

    graph = rank_timeline.graph
    times = (rank_timeline.ends - rank_timeline.starts)[graph.collectives]
    communicators = graph.features.group[graph.collectives].astype(int)
    local = platform.network.ranks_per_node
    total = weighted = 0.0
    for communicator in np.unique(communicators).tolist():
        ranks = rank_timeline.times.group.communicator_ranks[communicator]
        nodes = len({rank // local for rank in ranks})
        time = float(times[communicators == communicator].sum())
        total += time
        weighted += time * grow_beyond(platform, nodes)
    return weighted / total if total else 0.0


def spread_host(
    timeline: Timeline,
    error: float,
    loading: float,
    hosts_run_ahead: bool,
    iteration_fit: Iteration | None,
) -> float:
    """Spread of the time of an iteration because all host times may be too short or too long
    together.

    Parameters
    ----------
    timeline : Timeline
        The iteration.
    error : float
        How many times longer or shorter all host times may be [-].
    loading : float
        Time of a data loader for one iteration [s].
    hosts_run_ahead : bool
        Whether hosts launch kernels on devices and wait for none of them.
    iteration_fit : Iteration or None
        Fit of whole iterations, which says how host and device join.

    Returns
    -------
    spread : float
        Half of what lies between the logarithms of both times [-].
    """
    times = []
    for factor in (error, 1 / error):
        if hosts_run_ahead:
            host_time = factor * float(max(timeline.hosts))
            time = float(join_host(timeline.device_time, host_time, iteration_fit))
        else:
            ranks = [
                replace(
                    rank, host=factor * rank.host, launch_interval=factor * rank.launch_interval
                )
                for rank in timeline.ranks
            ]
            time = simulate(ranks, device=timeline.device, contention=timeline.contention).period
        times.append(max(time, loading))
    return math.log(times[0] / times[1]) / 2


class Unmeasured(NamedTuple):
    """What of a graph was not measured.

    Parameters
    ----------
    unmodelled : dict of str to float
        Most that operations without a model may take, by their names, see `bound_unmodelled` [s].
    stand_ins : dict of str to float
        Time of operations that are priced by a stand-in, by the note that says so [s].
    of_unknown : tuple of str
        Those of these notes that are about functions which no platform could know.
    """

    unmodelled: dict[str, float]
    stand_ins: dict[str, float]
    of_unknown: tuple[str, ...]


def is_timed_function(kind: str, function: str) -> bool:
    """Whether calibrations time a function of a built model, or leave it out by choice.

    Other functions are those of a new layer, or mistyped ones. A compiler joins functions in kernels
    that no calibration times.

    Parameters
    ----------
    kind : str
        Operation class.
    function : str
        Its variant.

    Returns
    -------
    is_timed : bool
        True also for classes whose variants are not functions, such as products.
    """
    is_left_out = kind == "elementwise" and function in NOT_TIMED
    is_of_compiler = function.partition(".")[0] == "fused"
    if kind not in MEASURED_FUNCTIONS or is_left_out or is_of_compiler:
        return True
    # a norm by the root mean square is a finer class of the layer norms that are timed
    return function.removesuffix(".rms") in MEASURED_FUNCTIONS[kind]


#: Most arithmetic of an operation of unknown work, over the numbers of its largest operand times the
#: narrower side of its matrices, and the share of the peak at which it runs [-]; docs/formulas.md,
#: table 9.1.
UNKNOWN_CUBES, UNKNOWN_RATE = 25.0, 0.05


def has_unknown_work(name: str, kind: str) -> bool:
    """Whether the work of an operation without a fit is not proportional to its bytes.

    Parameters
    ----------
    name, kind : str
        Its name and its class.

    Returns
    -------
    has_unknown_work : bool
        True for linear algebra, Fourier transforms and the like.
    """
    return kind in ("factorization", "fourier") or is_unpriced(name)


def bound_unmodelled(graph: Graph, place: int, by_bytes: float, platform: Platform) -> float:
    """The most that an operation without a model may take [s].

    Parameters
    ----------
    graph : Graph
        What a rank executes.
    place : int
        Position of the operation [-].
    by_bytes : float
        What its bytes and its known arithmetic take [s].
    platform : Platform
        Where it runs.

    Returns
    -------
    bound : float
        `by_bytes` for operations whose work is proportional to their bytes. Others take their FLOP at a
        twentieth of the peak in fp32; where these are not known they may be like the longest
        factorization, 25 n FLOP for each number of a matrix of n columns. Operations whose steps wait
        for one another take longer: docs/formulas.md, table 9.1.
    """
    label = graph.labels[place]
    if "fp32" not in platform.device.peaks or not has_unknown_work(label.name, label.kind):
        return by_bytes
    rate = UNKNOWN_RATE * platform.device.peaks["fp32"].value
    flops = float(graph.column("flops")[place].flat[0])
    if not flops:
        numbers = float(graph.column("elements")[place].flat[0])
        side = float(graph.column("n")[place].flat[0])
        flops = UNKNOWN_CUBES * numbers * side
    return max(by_bytes, flops / rate)


def spread_unmodelled(graph: Graph, costs: Costs, platform: Platform, time: float) -> float:
    """Extra spread of an iteration, so that its interval of 80 % reaches what operations of unknown work
    may take.

    Parameters
    ----------
    graph : Graph
        What a rank executes.
    costs : Costs
        Its times.
    platform : Platform
        Where it runs.
    time : float
        Predicted time of the iteration [s].

    Returns
    -------
    spread : float
        Standard deviation of the logarithm of the time [-].
    """
    beyond = 0.0
    for index, model in enumerate(costs.models):
        if not model.is_kernel or model.fit is not None:
            continue
        for place in np.flatnonzero(costs.classes == index):
            by_bytes = float(costs.hot[place].flat[0])
            beyond += bound_unmodelled(graph, int(place), by_bytes, platform) - by_bytes
    if beyond <= 0.0 or time <= 0.0:
        return 0.0
    return math.log1p(beyond / time) / _OF_80_PERCENT


def find_unmeasured(
    graph: Graph, costs: Costs, platform: Platform, padding: str = ""
) -> Unmeasured:
    """Find the operations of a graph that have no model, or are priced by a stand-in.

    Parameters
    ----------
    graph : Graph
        What a rank executes.
    costs : Costs
        Its times.
    platform : Platform
        Where it runs.
    padding : str, optional
        What pads the vocabulary of this workload, see `perfkit.workloads.stack.name_padding` [-].

    Returns
    -------
    unmeasured : Unmeasured
        Their times.
    """
    unmodelled, stand_ins = defaultdict[str, float](float), defaultdict[str, float](float)
    of_unknown = []
    was_captured = graph.device != ""
    unaligned_times = costs.seconds * costs.is_unaligned
    has_unaligned = bool(unaligned_times.any())
    for index, model in enumerate(costs.models):
        kind, fit, context = model.kind, model.fit, model.context
        if not model.is_kernel:
            continue
        total = float(costs.totals[index])
        if fit is None:
            for place in np.flatnonzero(costs.classes == index):
                unmodelled[graph.labels[place].name] += bound_unmodelled(
                    graph, int(place), float(costs.hot[place]), platform
                )
        if has_unaligned and kind in ("gemm", "bmm"):
            slow = unaligned_times * (costs.classes == index)
            if slow.any():
                module = graph.labels[int(slow.argmax())].module
                remedy = padding if module == _HEAD else ""
                note = say_unaligned(platform, kind, model.dtype, module, remedy)
                stand_ins[note] += float(slow.sum())
        if fit is not None and fit.stands_for:
            note = fit.notes[0] if fit.notes else f"{kind} was not measured"
            stand_ins[note] += total
            # programs that were captured have functions of all kinds
            if not was_captured and not is_timed_function(kind, model.variant):
                of_unknown.append(note)
        if context is not None and context.kind == "assumed":
            note = context.notes[0] if context.notes else f"{kind} was not measured in iterations"
            stand_ins[note] += total
    return Unmeasured(dict(unmodelled), dict(stand_ins), tuple(of_unknown))


def list_notes(
    graph: Graph, costs: Costs, platform: Platform, family: str, ranks: int, padding: str = ""
) -> tuple[tuple[str, ...], dict[str, float]]:
    """What a reader should know before trusting the time of a graph, with what pads its vocabulary;
    the time of operations without a model [s]."""
    unmodelled, stand_ins, of_unknown = find_unmeasured(graph, costs, platform, padding)
    notes, kind, context, total = [], family or "such", platform.context, float(costs.seconds.sum())
    if context.is_calibrated and family not in context.iterations:
        notes.append(
            f"{platform.name} was never calibrated with {kind} iterations; the interval is wider"
        )
    elif context.is_calibrated and ranks > 1 and family not in context.parallel:
        notes.append(
            f"{platform.name} was never calibrated with {kind} iterations on several ranks"
        )
    if graph.device and (graph.device == "cpu") != (platform.device.kind == "cpu"):
        need = f"on {platform.name} other kernels run; capture with device={platform.device.kind!r}"
        notes.append(f"captured with device={graph.device!r}; {need}")
    most = sum(unmodelled.values())
    kinds = {label.name: label.kind for label in graph.labels}
    of_unknown_work = [name for name in unmodelled if has_unknown_work(name, kinds[name])]
    if most > 0.02 * total:
        note = f"{', '.join(unmodelled)} have no model and are timed as memory traffic"
        if of_unknown_work:
            bound = sum(unmodelled[name] for name in of_unknown_work)
            note += (
                f"; {', '.join(of_unknown_work)} may take up to {format_time(bound)} at a twentieth of the "
                f"peak, which the interval includes ({bound / (bound + total):.0%} of all kernels), and longer "
                "if their steps wait for one another: measure them and add their time"
            )
        if any(
            model.is_kernel and model.fit is None and model.kind.startswith("embedding")
            for model in costs.models
        ):
            note += f"; {_say_modelled_embeddings(platform)}"
        notes.append(note)
    for note, seconds in stand_ins.items():
        if seconds > 0.05 * total or note in of_unknown:
            notes.append(note)
    if platform.is_rehearsed:
        base = platform.provenance.get("base", "its base")
        notes.append(REHEARSED.format(platform.name, base))
    notes += platform.transferred_kernels
    if platform.device.never_left_cache:
        size = graph.footprint + sum(table.nbytes for table in graph.tables)
        timed = platform.largest_timed
        if size > timed:
            notes.append(
                f"a rank works on {format_bytes(size)}; the largest working set timed on "
                f"{platform.name} was {format_bytes(timed)} and never left the caches, so that main "
                "memory may be slower than predicted"
            )
    return tuple(notes), unmodelled


def _say_modelled_embeddings(platform: Platform) -> str:
    """Which kinds of embedding a platform has models for, or that another platform is needed."""
    modelled = [
        f"embedding={embedding!r}"
        for embedding, kernels in _EMBEDDING_KERNELS.items()
        if all(find_kernel(platform.kernels, kind, variant=variant) for kind, variant in kernels)
    ]
    if not modelled:
        return f"{platform.name} has models for no kind of embedding; take another platform"
    return f"of embeddings, {platform.name} has models for {' and '.join(modelled)}"


def list_idle_tensor_cores(rank_timeline: RankTimeline, platform: Platform) -> tuple[str, ...]:
    """A note where products take much of the time and do not use the tensor cores of the device,
    which nobody may have chosen."""
    graph = rank_timeline.graph
    if "fp32" not in (graph.dtypes or (graph.dtype,)) or not has_idle_tensor_cores(platform):
        return ()
    dtypes = graph.dtypes or (graph.dtype,) * len(graph)
    products = [
        place
        for place, label in enumerate(graph.labels)
        if label.kind in ("gemm", "bmm", "convolution") and dtypes[place] == "fp32"
    ]
    if not products:
        return ()
    share = float(rank_timeline.times.seconds[products].sum()) / rank_timeline.period
    if share <= 0.1:
        return ()
    way = OTHER_FORMATS
    if graph.device:
        way = "capture it with amp='bf16', or allow TF32 in the step"
    return (say_idle_tensor_cores(platform, f" and take {share:.0%} of the time", way),)


def _find_gain(platform: Platform) -> float:
    """How many times as high the peak with tensor cores is as that of fp32 [-]."""
    peaks = {name: peak.value for name, peak in platform.device.peaks.items()}
    return max(peaks.get("bf16", 0.0), peaks.get("tf32", 0.0)) / peaks.get("fp32", np.inf)


def has_idle_tensor_cores(platform: Platform) -> bool:
    """Whether products in fp32 leave tensor cores of the device idle."""
    return platform.device.kind != "cpu" and _find_gain(platform) >= 2.0


def say_idle_tensor_cores(platform: Platform, share: str = "", way: str = OTHER_FORMATS) -> str:
    """Say that products in fp32 leave tensor cores idle, what it costs, and what to do."""
    return (
        f"products run in fp32 without tensor cores{share}; "
        f"the peak of {platform.name} in bf16 or TF32 is {_find_gain(platform):.0f} times as "
        f"high; {way}"
    )


def list_dense_tables(graph: Graph, copies: int = 0) -> tuple[str, ...]:
    """Notes where large tables of a graph are updated as a whole, which nobody may have chosen. The
    last of its tables are `copies` of what all ranks hold."""
    first_copy = len(graph.tables) - copies
    placed_weights = copied_weights = 0.0
    for position in _find_dense_tables(graph):
        table = graph.tables[position]
        if position < first_copy:
            placed_weights += table.rows * table.dim
        else:
            copied_weights += table.rows * table.dim
    notes = []
    optimizer = graph.updated_by or graph.optimizer
    if placed_weights >= _LARGE:
        way = "embedding='exact'"
        if find_optimizer(optimizer).sparse_rows:
            way = "sparse=True or embedding='exact'"
        notes.append(
            f"tables of {placed_weights / 1e6:,.0f} million weights have dense gradients and are updated "
            f"whole by {optimizer}; with {way} only the rows that were looked up are"
        )
    if copied_weights >= _LARGE:
        notes.append(
            f"tables of {copied_weights / 1e6:,.0f} million weights are copied to all ranks: their dense "
            f"gradients are reduced, and they are updated whole by {optimizer}; where a plan "
            "stores them once, as that of pk.shard may, only pooled rows are exchanged"
        )
    return tuple(notes)


def _find_dense_tables(graph: Graph) -> list[int]:
    """Positions of the tables of a built graph whose weights an update changes as a whole."""
    if not graph.optimizer:  # it was captured
        return []
    numbers = graph.weights.table_buffers.tolist()
    if not numbers:
        return []
    is_update = np.array([label.phase == "update" for label in graph.labels])
    writes_in_update = is_update[graph.accesses.operation] & graph.accesses.is_write
    updated = set(graph.accesses.buffer[writes_in_update].tolist())
    return [position for position, number in enumerate(numbers) if number in updated]


@dataclass(frozen=True)
class Sensitivity(Tabular):
    """How much faster an iteration gets with more of each resource.

    Parameters
    ----------
    frame : polars.DataFrame
        See `table`.
    time : float
        Time of an iteration on the platform as it is [s].
    summary : str
        What was predicted, in one line.
    factor : float
        How many times more and less of a resource the table and the chart show [-].
    """

    report_title = "How much faster an iteration gets with more of each resource"

    frame: Table
    time: float
    summary: str
    factor: float

    def table(self) -> Table:
        """A row for every resource, the most important one first.

        Returns
        -------
        table : polars.DataFrame
            resource, see `Platform.with_scale`; elasticity: by how many per cent the time changes
            with 1 % more of it [-]; gain_s: time that 1 % more saves [s]; less_s and more_s: the
            time with less and with more of it [s].
        """
        return self.frame

    def chart(self) -> Picture:
        """Draw the time with less and with more of every resource, as a tornado.

        Returns
        -------
        chart : altair.LayerChart
            Ready to be shown or saved.
        """
        from perfkit import plots

        return plots.tornado_bars(
            self.frame, time=self.time, factor=self.factor, about=self.summary
        )

    def headline(self) -> str:
        """The result in one line, see `perfkit.ground.results.Reported.headline`."""
        name, share = self.frame.row(0)[:2]
        return f"{self.summary}, {format_time(self.time)}; 1 % more {name} changes it by {share:+.2f} %"

    def __repr__(self) -> str:
        return f"Sensitivity({self.headline()})"


def find_sensitivity(prediction: Any, swing: float = 0.2) -> Sensitivity:
    """Predict the iteration again with less and with more of each resource, one at a time.

    Parameters
    ----------
    prediction : Prediction
        Of one iteration.
    swing : float, optional
        How much less and more of a resource the chart shows: 0.2 is 1 / 1.2 and 1.2 times as much
        [-].

    Returns
    -------
    sensitivity : Sensitivity
        Table and tornado chart of the resources that the platform knows.
    """
    import polars as pl

    factor = 1 + check_positive("swing", swing)
    rows = []
    platform, time = prediction.platform, prediction.time
    for name in list_resources(platform):
        slightly, less, more = (
            predict_time(prediction, name, scale) for scale in (STEP, 1 / factor, factor)
        )
        elasticity = math.log(slightly / time) / math.log(STEP)
        rows.append((name, elasticity, time - slightly, less, more))
    rows.sort(key=lambda row: round(row[1], 9))  # by elasticity
    columns = ("resource", "elasticity", "gain_s", "less_s", "more_s")
    frame = pl.DataFrame(rows, columns, orient="row")
    return Sensitivity(frame, prediction.time, prediction.about, factor)
