"""Why one operation takes its time: from its sizes through its fit to the iteration, step by step."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from perfkit.fitting import Additive, Iteration, KernelModel
from perfkit.ground.results import Table, Tabular
from perfkit.ground.units import Array, format_bytes, format_rate, format_time, show
from perfkit.platform.kernel_times import (
    DISTANT_TERMS,
    ClassifiedKernels,
    KernelSizes,
    LoneModel,
    count_gradients,
    find_aligned_products,
    size_for_fit,
    size_one_product,
    time_alone,
)
from perfkit.platform.kernels import find_kernel
from perfkit.platform.platform import Platform
from perfkit.prediction.classes import ClassModel, classify, knows_family
from perfkit.prediction.cost import size_operations
from perfkit.prediction.host_tables import add_host_tables
from perfkit.prediction.simulation import RankTimeline
from perfkit.workloads.columns import list_sizes
from perfkit.workloads.graph import Label

#: Two times are equal if they differ by less than this share of the period [-].
_ROUNDING = 1e-9
#: Units of sizes that are rates or counts of work.
_RATES = {"flops": "FLOP", "peak": "FLOP/s", "bandwidth": "B/s"}


class Step(NamedTuple):
    """A step from the sizes of an operation to its time.

    Parameters
    ----------
    cause : str
        What it is.
    added : float
        How much longer it makes the operation [s].
    factor : float or None
        What it multiplies, where it is a factor on a part of the time so far [-].
    """

    cause: str
    added: float
    factor: float | None = None


@dataclass(frozen=True, eq=False)
class OperationAccount(Tabular):
    """Why an operation takes its time in an iteration.

    Parameters
    ----------
    operation : int
        Its number in program order [-].
    rank : int
        Of which rank [-].
    label : Label
        Its name, class, phase and module.
    dtype : str
        Number format whose peak applies.
    sizes : mapping of str to float
        What it computes on: ``m``, ``n``, ``k`` of products [-], ``flops`` [FLOP], ``nbytes`` of its
        operands [B] and others; under a roofline also its ``traffic`` [B], and the ``peak`` [FLOP/s]
        and ``bandwidth`` [B/s] of the device.
    fit : KernelModel or None
        Fit of its class alone on the device; None where nothing like it was measured.
    fit_name : str
        Name of this fit in ``Platform.kernels``, or why there is none.
    steps : tuple of Step
        What makes the time; all that they add sums to it.
    time : float
        Time of the operation in the iteration, from its start to its end [s].
    """

    report_title = "Why an operation takes its time in an iteration"

    operation: int
    rank: int
    label: Label
    dtype: str
    sizes: Mapping[str, float]
    fit: KernelModel | None
    fit_name: str
    steps: tuple[Step, ...]
    time: float

    def table(self) -> Table:
        """Steps in order.

        Returns
        -------
        frame : polars.DataFrame
            step; factor on a part of the time so far [-], empty where a step adds; added_s and, with
            all steps before, time_s [s].
        """
        import polars

        rows = []
        time = 0.0
        for step in self.steps:
            time += step.added
            rows.append((step.cause, step.factor, step.added, time))
        schema = {
            "step": polars.String,
            "factor": polars.Float64,
            "added_s": polars.Float64,
            "time_s": polars.Float64,
        }
        return polars.DataFrame(rows, schema, orient="row")

    def explain(self) -> str:
        """The account in words: sizes, fit, and a line for each step."""
        sizes = [f"{name} {_write_size(name, value)}" for name, value in self.sizes.items()]
        lines = [repr(self), f"  {', '.join(sizes)}"]
        if self.fit is None:
            lines.append(f"  {self.fit_name}")
        else:
            lines.append(f"  {self.fit_name}: {self.fit.equation}")
            lines.append(f"  with {self.fit!r}")
        for step in self.steps:
            factor = "" if step.factor is None else f"x {step.factor:.4g}"
            lines.append(f"  {format_time(step.added):>10}  {factor:>8}  {step.cause}")
        lines.append(f"  {format_time(self.time):>10}  {'':>8}  together")
        return "\n".join(lines)

    def headline(self) -> str:
        """The result in one line, see `perfkit.ground.results.Reported.headline`."""
        where = f"{self.label.phase} {self.label.module}".strip()
        return (
            f"operation {self.operation} of rank {self.rank}, {self.label.name} in {self.dtype}, "
            f"{where}: {format_time(self.time)}"
        )

    def __repr__(self) -> str:
        return self.headline()


def _write_size(name: str, value: float) -> str:
    """Write a size in its unit."""
    if name in _RATES:
        return format_rate(value, _RATES[name])
    if name in ("nbytes", "traffic"):
        return format_bytes(value)
    return f"{value:g}"


def explain_operation(
    timeline: RankTimeline,
    platform: Platform,
    operation: int,
    rank: int,
    *,
    dtype: str,
    family: str,
    ranks: int,
    level: Iteration | None,
    stack: str,
) -> OperationAccount:
    """Account for the time of one operation.

    Parameters
    ----------
    timeline : RankTimeline
        Iteration of its rank.
    platform : Platform
        Where it runs.
    operation : int
        Its number in program order [-].
    rank : int
        Number of the rank [-].
    dtype : str
        Number format of operations without their own.
    family : str
        Family of the workload.
    ranks : int
        Ranks that take part [-].
    level : Iteration or None
        Level of the software that runs the iteration.
    stack : str
        Its name.

    Returns
    -------
    account : OperationAccount
        Steps that sum to the time in the timeline.

    Raises
    ------
    ValueError
        For an operation that does not exist or is no kernel.
    """
    graph = timeline.graph
    if operation not in range(len(graph)):
        raise ValueError(
            f"operation is {show(operation)}; rank {rank} has the operations 0 to {len(graph) - 1}; "
            "`timeline` lists them"
        )
    label = graph.labels[operation]
    operations = classify([graph], platform, dtype)
    model = operations.models[operations.of_operation[operation]]
    if not model.is_kernel:
        raise ValueError(
            f"operation is {operation}, the {label.kind} {label.name!r}; take a kernel; "
            f"{_advise(timeline, operation)}"
        )
    sizes_of_all = size_operations([graph], operations, platform, dtype, ranks)
    own = slice(operation, operation + 1)
    sizes = {name: values[own] for name, values in sizes_of_all.items()}
    found = find_kernel(platform.kernels, model.kind, variant=model.variant, dtype=model.dtype)
    steps = _list_steps_alone(model, sizes, platform)
    near = sum(step.added for step in steps)
    steps += _list_steps_in_iteration(model, sizes, near, platform, family)
    of_host_tables = add_host_tables([graph], np.zeros(len(graph)), platform, ranks=ranks)
    if of_host_tables[operation] > 0:
        steps.append(Step("rows in host memory: link and cache", float(of_host_tables[operation])))
    iteration_fit = platform.context.find_iteration(family, ranks)
    factors = [("this rank is slower, by `slowdown`", timeline.times.group.slowdown)]
    if iteration_fit is not None:
        factors.insert(0, ("whole iterations of such workloads", iteration_fit["scale"]))
    if level is not None:
        factors.append((f"level of {stack}", level["scale"]))
    for cause, factor in factors:
        if factor != 1.0:
            time = sum(step.added for step in steps)
            steps.append(Step(cause, (factor - 1.0) * time, factor))
    # how much longer it is in the timeline, but for rounding
    seconds = float(timeline.times.seconds[operation])
    duration = float(timeline.ends[operation] - timeline.starts[operation])
    if duration - seconds > _ROUNDING * timeline.period:
        steps.append(Step("collectives in flight take a share of the cores", duration - seconds))
        seconds = duration
    shown = list_sizes({name: float(values[0]) for name, values in sizes.items()})
    if not isinstance(model.fit, Additive):
        for name in ("traffic", "peak", "bandwidth"):
            shown[name] = float(sizes[name][0])
    return OperationAccount(
        operation=operation,
        rank=rank,
        label=label,
        dtype=model.dtype,
        sizes=shown,
        fit=model.fit,
        fit_name=f"kernels.{found[0]}" if found else _name_stand_in(model),
        steps=tuple(steps),
        time=seconds,
    )


def _advise(timeline: RankTimeline, operation: int) -> str:
    """Say what explains an operation that is no kernel."""
    graph = timeline.graph
    if graph.labels[operation].kind != "collective":
        return "time of the host is in `breakdown`"
    group = int(graph.column("group")[operation])
    ranks = len(timeline.times.group.communicator_ranks[group])
    nbytes = float(graph.column("nbytes")[operation])
    name = graph.labels[operation].name
    return f"platform.collective({name!r}, {nbytes:g}, ranks={ranks}).explain() is its account"


def _name_stand_in(model: LoneModel) -> str:
    """Say what times a class that was not measured."""
    if model.fit is None:
        return f"no {model.kind} was measured, nor anything like it"
    return "".join(model.fit.notes[:1]) or f"another class in place of {model.kind}"


def _list_steps_alone(model: LoneModel, sizes: KernelSizes, platform: Platform) -> list[Step]:
    """Steps to the time of a lone kernel with near operands: those of `time_alone`, one more at a
    time."""
    one_launch = {**sizes, "launches": np.ones(1)}
    plain = replace(model, layout_passes=0.0, tensor_core_itemsize=0.0, head_itemsize=0.0)
    in_layout = replace(model, tensor_core_itemsize=0.0, head_itemsize=0.0)
    with_copies = replace(model, tensor_core_itemsize=0.0)
    steps = _list_terms(plain, sizes, platform)
    time = _time_near(plain, one_launch, platform)
    longer = _time_near(in_layout, one_launch, platform)
    if longer != time:
        steps.append(
            Step("operands are moved into the layout of tensor cores and back", longer - time)
        )
    time = longer
    longer = _time_near(with_copies, one_launch, platform)
    if longer != time:
        steps.append(Step("heads that are not aligned are copied into wider ones", longer - time))
    time = longer
    longer = _time_near(model, one_launch, platform)
    if longer != time:
        slowdown = (longer - model.launch) / (time - model.launch)
        steps.append(
            Step("rows in memory are not aligned, beyond the launch", longer - time, slowdown)
        )
    time = longer
    longer = _time_near(model, sizes, platform)
    if longer != time:
        steps.append(Step(f"{sizes['launches'][0]:g} kernels instead of one", longer - time))
    return steps


def _time_near(model: LoneModel, sizes: KernelSizes, platform: Platform) -> float:
    """Time of a lone kernel with near operands [s]."""
    kernels = ClassifiedKernels((model,), np.zeros(1, dtype=np.intp), dimensions=1)
    products = find_aligned_products(kernels, sizes, platform)
    return float(time_alone(kernels, sizes, products, platform).near[0])


def _list_terms(model: LoneModel, sizes: KernelSizes, platform: Platform) -> list[Step]:
    """What the fit of a class says, by term, without distant operands."""
    fit = model.fit
    if fit is None:
        time = _time_near(model, {**sizes, "launches": np.ones(1)}, platform)
        return [Step("bytes or arithmetic at the rate of the datasheet", time)]
    products = _count_products(model, sizes)
    steps = []
    for name, seconds in _split_one_product(fit, sizes, products).items():
        time = float(np.sum(seconds))
        if name not in DISTANT_TERMS and time:
            steps.append(Step(_name_term(fit, name, time), time))
    if products != 1.0:
        time = sum(step.added for step in steps)
        steps.append(Step("a product for each gradient", (products - 1.0) * time, products))
    return steps


def _name_term(fit: KernelModel, name: str, seconds: float) -> str:
    """Name a part of the time of a fit, with the number of the fit that makes it."""
    words = name.replace("_", " ")
    if isinstance(fit, Additive):
        return f"{words}: {seconds / fit[name]:.6g} times {fit[name]:.4g} s"
    if name == "arithmetic":
        return f"arithmetic at {fit['compute_efficiency']:.1%} of the peak"
    if name == "memory traffic":
        return f"memory traffic at {fit['memory_efficiency']:.1%} of the bandwidth"
    return words


def _list_steps_in_iteration(
    model: ClassModel, sizes: KernelSizes, near: float, platform: Platform, family: str
) -> list[Step]:
    """What an iteration adds to the lone kernel: see `perfkit.models.kernels.in_context`."""
    added = model.in_iteration
    context = _name_context(model, platform, family)
    steps = [Step(context, (added.scale - 1.0) * near, added.scale)]
    distant = _time_distant(model, sizes)
    steps += [Step(f"distant operands, {name}", time) for name, time in distant.items()]
    if added.cold_scale != 1.0 and distant:
        time = sum(distant.values())
        cause = "distant operands in iterations"
        steps.append(Step(cause, (added.cold_scale - 1.0) * time, added.cold_scale))
    if added.launch:
        steps.append(Step("a call in iterations", added.launch))
    page_walks = added.page_walks * float(sizes["page_walks"][0])
    if page_walks:
        steps.append(Step("page walks in iterations", page_walks))
    return steps


def _time_distant(model: LoneModel, sizes: KernelSizes) -> dict[str, float]:
    """What operands add that no near cache holds, by where they come from [s]."""
    fit = model.fit
    if not isinstance(fit, Additive):
        return {}
    products = _count_products(model, sizes)
    parts = _split_one_product(fit, sizes, products)
    times = {}
    for name in DISTANT_TERMS:
        time = float(products * parts[name][0]) if name in parts else 0.0
        if time:
            times[_name_term(fit, name, time)] = time
    return times


def _count_products(model: LoneModel, sizes: KernelSizes) -> float:
    """Matrix products as which a kernel is timed: one for each gradient of a convolution [-]."""
    if not model.counts_products:
        return 1.0
    return float(count_gradients(sizes)[0])


def _split_one_product(fit: KernelModel, sizes: KernelSizes, products: float) -> dict[str, Array]:
    """What a fit says of one of the products that a kernel is, by term [s]."""
    of_kernel = size_for_fit(fit, sizes, np.arange(1))
    return fit.split(size_one_product(of_kernel, np.array([products])))


def _name_context(model: ClassModel, platform: Platform, family: str) -> str:
    """Name what iterations make of kernels of a class, or say why nothing is known."""
    if model.context is not None:
        for name, fit in platform.context.kernels.items():
            if fit is model.context:
                return f"kernels in iterations, context.kernels.{name}"
    if not knows_family(platform, family):
        return f"no factor of iterations: none was fitted to {family} on this platform"
    return f"no factor of iterations: none was fitted to {model.kind} on this platform"
