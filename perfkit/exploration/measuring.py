"""What each measurement that was not made would narrow: intervals now, and as if it were made."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from perfkit.fitting import Fit, Iteration, Pipelined
from perfkit.fitting.parameters import Key
from perfkit.ground.forks import check_threads
from perfkit.ground.results import Table, Tabular
from perfkit.ground.units import check_positive, check_type, format_count
from perfkit.models.collectives import COLLECTIVES
from perfkit.platform.collective_costs import ALL_TRANSFER
from perfkit.platform.collective_fits import PAIR
from perfkit.platform.collectives import find_cost
from perfkit.platform.estimates import find_interval, keep_quiet
from perfkit.platform.gallery import Named, load_platform, spell_platform
from perfkit.platform.platform import Platform
from perfkit.platform.sources import INSIDE_SPREAD
from perfkit.prediction.predictor import predict
from perfkit.prediction.result import Prediction
from perfkit.workloads.stack import Stack
from perfkit.workloads.strategy import Strategy

#: Spread of collectives between nodes that were measured on as many: of the rails of the gallery, 0.054
#: to 0.07 [-].
RAIL_SPREAD = 0.07
#: Spread of kernels that were measured on a few sizes [-]; docs/formulas.md, table 2.2.
KERNEL_SPREAD = 0.11
#: Spread of a step whose family was measured on this machine: that of Transformers [-];
#: docs/formulas.md, table 9.1 (`expect_spread`).
STEP_SPREAD = 0.08
#: Messages whose intervals are shown: nearly all transfer, and nearly all start-up [B].
LARGE, SMALL = 2.0**30, 2.0**13
#: What columns of the table are about, in words.
_WORDS = {
    "step": "the iteration",
    "large": "an all_gather of 1 GiB",
    "small": "an all_reduce of 8 KiB",
}
#: Least change of an interval that is told in words [-].
_LEAST_SHOWN = 0.005
#: Collectives that show how fast links are: each rank has a part of the message.
_SHOWN = tuple(own.name for own in COLLECTIVES.values() if own.in_workloads and own.in_shares)
_ALL_TO_ALL = "all_to_all"


@dataclass(frozen=True)
class MissingMeasurements(Tabular):
    """What each measurement that was not made would narrow.

    Parameters
    ----------
    frame : polars.DataFrame
        See `table`.
    about : str
        What is asked for, in one line.
    """

    report_title = "What each missing measurement would narrow"

    frame: Table
    about: str

    def table(self) -> Table:
        """A row for each measurement, the one that narrows most first.

        Returns
        -------
        table : polars.DataFrame
            measurement, in words; large, small and step: the upper end of an 80 % interval over the
            prediction, now and after the measurement, of an all_gather of 1 GiB and an all_reduce of
            8 KiB on all ranks, and of the iteration of the workload, null without one [-]; commands
            that make it.
        """
        return self.frame

    def headline(self) -> str:
        """The result in one line, see `perfkit.ground.results.Reported.headline`."""
        if self.frame.is_empty():
            return f"{self.about}: nothing is missing"
        first = self.frame.row(0, named=True)
        name = "step" if first["step_now"] is not None else "large"
        change = f"x {first[f'{name}_now']:.2f} to x {first[f'{name}_after']:.2f}"
        return f"{self.about}: {first['measurement']} narrows most, from {change}"

    def explain(self) -> str:
        """Say what each measurement would narrow, and the lines that make it.

        Returns
        -------
        text : str
            A paragraph for each measurement, the one that narrows most first.
        """
        lines = [self.headline()]
        for row in self.frame.to_dicts():
            changes = []
            for name, words in _WORDS.items():
                now, after = row[f"{name}_now"], row[f"{name}_after"]
                if now is not None and after is not None and now - after >= _LEAST_SHOWN:
                    changes.append(f"{words} from x {now:.2f} to x {after:.2f}")
            narrowed = ", ".join(changes) or "nothing"
            lines.append(f"  {row['measurement']}: narrows {narrowed}")
            lines += [f"    {line}" for line in row["commands"].split("\n")]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"MissingMeasurements({self.headline()})"


class _Measurement(NamedTuple):
    """A measurement, the platform as if it were made, and the commands that make it."""

    name: str
    platform: Platform
    commands: str


class _Widths(NamedTuple):
    """Upper end of 80 % intervals over the prediction [-]."""

    large: float | None
    small: float | None
    step: float | None


def what_to_measure(
    platform: Named,
    workload: Any = None,
    *,
    nodes: int | None = None,
    network: str | None = None,
    strategy: Strategy | None = None,
    stack: str | Stack | None = None,
) -> MissingMeasurements:
    """List the measurements of a platform that were not made, what each would narrow, and the commands
    that make it.

    Parameters
    ----------
    platform : Platform, str or Path
        What was measured, such as one node.
    workload : Workload, optional
        What will run there; without one collectives are looked at alone.
    nodes : int, optional
        Nodes that the question is about; those of the platform if not given [-].
    network : str, optional
        Network of a provider that joins them, see `perfkit.fabrics`.
    strategy : Strategy, optional
        How ranks share the workload.
    stack : str or Stack, optional
        The software, see `predict`.

    Returns
    -------
    missing : MissingMeasurements
        Its table has the interval now, and as if one measurement more were made: with the fit that
        such measurements usually give, and what is predicted now as its result.

    Raises
    ------
    ValueError
        As `Platform.with_nodes` and `predict` do.

    Notes
    -----
    After a measurement collectives inside a node have a spread of 0.06 and between as many nodes of
    0.07, as fits of logs in the gallery; kernels 0.11; hosts an error of 10 %; steps of the family 0.08.
    Over more nodes than were measured the spread grows, see
    `perfkit.platform.collective_costs.grow_with_nodes`. The interval of a step takes its exposed messages
    to be 30 % unsure whatever was measured between the nodes; only their growth narrows.

    Examples
    --------
    >>> import perfkit as pk
    >>> missing = pk.what_to_measure("h100-sxm-8", nodes=64, network="p5")
    >>> missing.table()["measurement"].to_list()
    ['all_gather and others on 64 nodes', 'all_gather and others on 4 nodes', 'all_gather and others on 2 nodes']
    """
    check_threads()
    where = load_platform(platform)
    if nodes is not None or network is not None:
        count = where.network.nodes if nodes is None else nodes
        where = where.with_nodes(check_positive("nodes", count, integer=True), network=network)
    if strategy is not None:
        check_type("strategy", strategy, Strategy)

    def predict_on(machine: Platform) -> Prediction | None:
        """An iteration on a platform; None without a workload."""
        if workload is None:
            return None
        with keep_quiet():
            return predict(
                workload, machine, ranks=where.network.ranks, strategy=strategy, stack=stack
            )

    iteration = predict_on(where)
    now = _find_widths(where, iteration)
    base = spell_platform(platform) if isinstance(platform, Platform) else str(platform)
    if network is not None:
        base = f"{_leave_out_network(base)}@{network}"
    rows = []
    for measurement in _list_measurements(where, workload, base, _choose_operations(iteration)):
        after = _find_widths(measurement.platform, predict_on(measurement.platform))
        row: dict[str, Any] = {"measurement": measurement.name}
        for name, width_now, width_after in zip(_Widths._fields, now, after, strict=True):
            # a measurement makes nothing less sure
            row[f"{name}_now"] = width_now
            row[f"{name}_after"] = _find_smaller(width_now, width_after)
        rows.append({**row, "commands": measurement.commands})
    return MissingMeasurements(_sort_rows(rows), _describe(where, workload))


def _find_widths(platform: Platform, iteration: Prediction | None) -> _Widths:
    """Intervals of messages and of an iteration on a platform."""
    step = None
    if iteration is not None:
        step = iteration.interval(0.8)[1] / iteration.time
    with keep_quiet():
        large = _widen(platform, "all_gather", LARGE)
        small = _widen(platform, "all_reduce", SMALL)
    return _Widths(large, small, step)


def _choose_operations(iteration: Prediction | None) -> tuple[str, ...]:
    """Collectives to measure: an all_to_all only where the iteration has one. The others show the link,
    and over nodes an all_reduce is made of them."""
    if iteration is None or _ALL_TO_ALL in iteration.timeline()["name"]:
        return _SHOWN
    return tuple(name for name in _SHOWN if name != _ALL_TO_ALL)


def _leave_out_network(base: str) -> str:
    """A name without the network after its @; folders of a file may have an @, too."""
    if Path(base).is_file():
        return base
    node, at, _ = base.rpartition("@")
    return node if at else base


def _widen(platform: Platform, operation: str, nbytes: float) -> float | None:
    """Upper end of the interval of a collective on all ranks over its time [-]; None without one."""
    ranks = platform.network.ranks
    if ranks == 1:
        return None
    try:
        priced = platform.price_collective(operation, np.array([nbytes]), ranks)
    except ValueError:  # nobody measured the operation
        return None
    spread = float(np.broadcast_to(priced.spread, (1,))[0])
    return float(find_interval(1.0, spread, 0.8)[1])


def _find_smaller(now: float | None, after: float | None) -> float | None:
    if now is None or after is None:
        return after
    return min(now, after)


def _sort_rows(rows: list[dict[str, Any]]) -> Table:
    """Rows with that which narrows the step, then large and small messages, most first."""
    import polars as pl

    columns = [f"{name}_{when}" for name in _Widths._fields for when in ("now", "after")]
    schema = {"measurement": pl.String, **dict.fromkeys(columns, pl.Float64), "commands": pl.String}
    frame = pl.DataFrame(rows, schema)
    gains = [
        (pl.col(f"{name}_now") / pl.col(f"{name}_after")).fill_null(1.0).round(6)
        for name in ("step", "large", "small")
    ]
    return frame.sort(gains, descending=True, maintain_order=True)


def _describe(platform: Platform, workload: Any) -> str:
    """What is asked for."""
    ranks = format_count(platform.network.ranks, "rank")
    what = f"{ranks} of {platform.name!r}"
    return what if workload is None else f"{workload.description} on {what}"


# Measurements that were not made.


def _list_measurements(
    platform: Platform, workload: Any, base: str, operations: Sequence[str]
) -> Iterator[_Measurement]:
    """Measurements that were not made, and the platform with each of them; `base` is what logs are fitted
    into, and `operations` are the collectives that are measured."""
    network = platform.network
    local = network.ranks_per_node
    base_option = f"--base {shlex.quote(base)}"
    fit = f"perfkit calibrate --from-nccl-logs logs/ {base_option} --out mine.toml"
    inside = {}
    for name, curve in platform.collectives.items():
        if _is_inside(name, local) and Key.parse(name).operation in operations:
            inside[name] = curve
    if local > 1 and any(_is_of_others(curve) for curve in inside.values()):
        fits = {key: _trust(curve, INSIDE_SPREAD) for key, curve in inside.items()}
        measured = replace(platform, collectives={**platform.collectives, **fits})
        yield _Measurement(
            "collectives of one node", measured, _write_commands(operations, 1, local, fit)
        )
    for nodes in sorted({2, 4, network.nodes}):
        if nodes == 1 or nodes > network.nodes or _shows_link(platform, nodes):
            continue
        name = f"all_gather and others on {nodes} nodes"
        measured = _measure_between(platform, nodes, operations)
        yield _Measurement(name, measured, _write_commands(operations, nodes, local, fit))
    if workload is None:
        return
    kernels = {key: _trust(curve, KERNEL_SPREAD) for key, curve in platform.kernels.items()}
    host = {key: replace(cost, kind="measured", stderr=None) for key, cost in platform.host.items()}
    has_other_kernels = any(_is_of_others(curve) for curve in platform.kernels.values())
    if has_other_kernels or host != dict(platform.host):
        measured = replace(platform, kernels=kernels, host=host)
        device = "" if platform.device.kind == "cpu" else f" --device cuda {base_option}"
        command = f"perfkit calibrate{device} --out mine.toml"
        yield _Measurement("kernels and hosts of a node", measured, command)
    steps = _measure_steps(platform, workload.family)
    if steps.context != platform.context:
        command = "five runs with unlike strategies, then pk.tune(model, platform, runs)"
        yield _Measurement("steps of this family on one node", steps, command)


def _write_commands(operations: Sequence[str], nodes: int, local: int, fit: str) -> str:
    """Lines of nccl-tests on some nodes, and the line that fits them."""
    hosts = "" if nodes == 1 else f" -N {local}"
    lines = []
    for operation in operations:
        # nccl-tests writes alltoall in one word
        program = f"{operation.replace(_ALL_TO_ALL, 'alltoall')}_perf"
        log = f"logs/{operation}_{nodes}.log"
        lines.append(f"mpirun -np {nodes * local}{hosts} {program} -b 8 -e 8G -f 2 -g 1 > {log}")
    return "\n".join([*lines, fit])


def _is_inside(text: str, local: int) -> bool:
    """Whether a collective is one inside a node."""
    key = Key.parse(text)
    return key.algorithm != "rail" and (key.ranks is None or key.ranks <= local)


def _is_of_others(fit: Fit) -> bool:
    """Whether a fit is assumed, or carried over from another machine."""
    return fit.kind == "assumed" or bool(fit.transferred)


def _trust(fit: Any, spread: float) -> Any:
    """A fit as if it were measured on the machine."""
    if not _is_of_others(fit):
        return fit
    return replace(fit, kind="fitted", transferred=(), spread=min(fit.spread, spread))


def _shows_link(platform: Platform, nodes: int) -> bool:
    """Whether a collective around rings was measured between at least so many nodes. An all_reduce and an
    all_to_all show what crosses, but not what all_gather and reduce_scatter reach."""
    local = platform.network.ranks_per_node
    for key in map(Key.parse, platform.collectives):
        if key.ranks is None or key.operation not in ("all_gather", "reduce_scatter"):
            continue
        if key.algorithm == "rail" and key.ranks >= nodes:
            return True
        if key.algorithm == "" and key.ranks > local and key.ranks >= nodes * local:
            return True
    return False


def _measure_between(platform: Platform, nodes: int, operations: Sequence[str]) -> Platform:
    """The platform as if some collectives of all ranks of some nodes were measured; of an all_reduce on two
    nodes, the rail that it shows."""
    fits = dict(platform.collectives)
    for operation in operations:
        key = Key(operation, nodes * platform.network.ranks_per_node)
        if operation == "all_reduce" and nodes == PAIR:
            key = Key(operation, nodes, "rail")
        try:
            cost = find_cost(platform, operation, key.ranks or 0, key.algorithm or None)
        except ValueError:  # nobody measured the operation
            continue
        start_up, largest = cost.time(np.array([0.0, ALL_TRANSFER])).tolist()
        fits[str(key)] = Pipelined.build(
            {"alpha": max(start_up, 1e-9), "beta": largest / ALL_TRANSFER},
            spread=RAIL_SPREAD,
            ranges={"nbytes": (8.0, 2.0**33)},
            kind="assumed",
            source="as if it were measured",
        )
    return replace(platform, collectives=fits)


def _measure_steps(platform: Platform, family: str) -> Platform:
    """The platform as if steps of a family were measured on it."""
    context = platform.context

    def trust(fits: Mapping[str, Iteration]) -> dict[str, Iteration]:
        return {key: replace(fit, spread=min(fit.spread, STEP_SPREAD)) for key, fit in fits.items()}

    def trust_family(fits: Mapping[str, Iteration]) -> dict[str, Iteration]:
        of_family = {key: fit for key, fit in fits.items() if key == family}
        return {**fits, **trust(of_family)}

    measured = replace(
        context,
        iterations=trust_family(context.iterations),
        parallel=trust_family(context.parallel),
        stacks=trust(context.stacks),
    )
    return replace(platform, context=measured)
