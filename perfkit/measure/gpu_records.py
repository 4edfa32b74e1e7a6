"""What a calibration of GPUs measures, as records; and how its files hold them, as plain JSON.

What was asked are the probes of `perfkit.measure.probes`; here are their answers, and all of both.
In a file, a probe and its answer are one object. Its ``stage`` says what the probe is; ``samples``,
``seconds`` or ``failed`` say what the answer is. Numbers of the CPU's calibration are in
`perfkit.measure.records`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from perfkit.ground.files import reading
from perfkit.measure.probes import (
    CollectiveProbe,
    IterationProbe,
    KernelProbe,
    Probe,
    read_probe,
    write_probe,
)
from perfkit.measure.records import WHICH_FILE, read_record, write_record

# -- answers
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TimedCalls:
    """Times of a kernel or a collective.

    Parameters
    ----------
    samples : list of float
        Time of one call, in several samples [s].
    sizes : mapping of str to float
        What was timed; of a collective its ``nbytes`` [B].
    """

    samples: list[float]
    sizes: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class TimedIteration:
    """Times of an iteration.

    Parameters
    ----------
    seconds : float
        Without the profiler [s].
    profiled : float
        With the profiler [s].
    trace : str
        File of what the profiler saw.
    """

    seconds: float
    profiled: float
    trace: str


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A probe without a time.

    Parameters
    ----------
    failed : str
        The reason.
    """

    failed: str


#: What a device says of a probe.
Answer: TypeAlias = TimedCalls | TimedIteration | Failure


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What the driver says of a device.

    Parameters
    ----------
    name : str
        Name of the device.
    memory, cache : float
        Sizes of its main memory and of its last cache [B].
    clock : float, optional
        Highest clock [Hz].
    """

    name: str
    memory: float
    cache: float
    clock: float | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceAnswers:
    """What a device says of all probes of a plan.

    Parameters
    ----------
    answers : sequence of Answer or None
        In the order of the probes; None for those that this rank took no part in, and those that
        were not recorded.
    facts : DeviceFacts, optional
        What the driver says.
    id : str
        What the measurements are called where they are a source.
    """

    answers: Sequence[Answer | None]
    facts: DeviceFacts | None = None
    id: str = "perfkit calibrate"


def read_answer(row: Mapping[str, Any]) -> Answer:
    """Read the answer to a probe from plain JSON.

    Parameters
    ----------
    row : mapping
        Written by `perfkit.measure.records.write_record`.

    Returns
    -------
    answer : Answer
        Times, or why there are none.
    """
    if "failed" in row:
        return read_record(Failure, row, "a probe")
    if "samples" in row:
        return read_record(TimedCalls, row, "a probe")
    return read_record(TimedIteration, row, "a probe")


def read_answers(data: Mapping[str, Any]) -> DeviceAnswers:
    """Read what a device says of a plan from plain JSON.

    Parameters
    ----------
    data : mapping
        Written by `perfkit.measure.records.write_record`.

    Returns
    -------
    answers : DeviceAnswers
        In the order of the probes.
    """
    return DeviceAnswers(
        answers=[None if row is None else read_answer(row) for row in data["answers"]],
        facts=read_record(DeviceFacts, data["facts"], "facts"),
        id=data["id"],
    )


# -- all measurements
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MeasuredProbe:
    """A probe with its answer.

    Parameters
    ----------
    probe : Probe
        What was timed, with the sizes that it had.
    answer : Answer
        Its times, or why there are none.
    """

    probe: Probe
    answer: Answer

    @classmethod
    def join(cls, probe: Probe, answer: Answer | None) -> "MeasuredProbe":
        """Join what was to be timed with its answer.

        Parameters
        ----------
        probe : Probe
            With the sizes that were asked for.
        answer : Answer or None
            None if there is none.

        Returns
        -------
        measured : MeasuredProbe
            With the sizes that were timed.
        """
        if answer is None:
            answer = Failure(failed="not recorded")
        if isinstance(answer, TimedCalls):
            if isinstance(probe, KernelProbe):
                probe = replace(probe, sizes=answer.sizes)
            elif isinstance(probe, CollectiveProbe):
                probe = replace(probe, nbytes=answer.sizes["nbytes"])
        return cls(probe=probe, answer=answer)


@dataclass(frozen=True, kw_only=True)
class HostOverhead:
    """One of the times that a host adds to each call, see `perfkit.calibration.activity.time_host`.

    Parameters
    ----------
    name : str
        Which one.
    mean : float
        Mean time [s].
    error : float or None
        Standard error of the mean; None from a single iteration [s].
    """

    name: str
    mean: float
    error: float | None


@dataclass(frozen=True, kw_only=True)
class ClusterMeasurements:
    """All that a platform of GPUs is fitted to.

    Parameters
    ----------
    id : str
        What the measurements are called where they are a source.
    date : str
        Day of the oldest measurement.
    base : str
        Name of the similar platform that the plan was made for.
    ranks_per_node, nodes : int
        Size of the cluster [-].
    facts : DeviceFacts or None
        What the driver says of the device, if it was asked.
    probes : sequence of MeasuredProbe
        In the order of the plan.
    host : sequence of HostOverhead
        Overheads of the host; empty where no iteration was traced.
    """

    id: str
    date: str
    base: str
    ranks_per_node: int
    nodes: int
    facts: DeviceFacts | None
    probes: Sequence[MeasuredProbe]
    host: Sequence[HostOverhead]

    def list_failures(self) -> list[tuple[Probe, Failure]]:
        """Probes without a time, and the reasons."""
        return [
            (measured.probe, measured.answer)
            for measured in self.probes
            if isinstance(measured.answer, Failure)
        ]

    def list_kernels(self) -> list[tuple[KernelProbe, TimedCalls]]:
        """Kernels with their times."""
        kernels = []
        for measured in self.probes:
            probe, answer = measured.probe, measured.answer
            if isinstance(probe, KernelProbe) and isinstance(answer, TimedCalls):
                kernels.append((probe, answer))
        return kernels

    def list_collectives(self) -> list[tuple[CollectiveProbe, TimedCalls]]:
        """Collectives with their times."""
        collectives = []
        for measured in self.probes:
            probe, answer = measured.probe, measured.answer
            if isinstance(probe, CollectiveProbe) and isinstance(answer, TimedCalls):
                collectives.append((probe, answer))
        return collectives

    def list_iterations(self) -> list[tuple[IterationProbe, TimedIteration]]:
        """Iterations with their times."""
        iterations = []
        for measured in self.probes:
            probe, answer = measured.probe, measured.answer
            if isinstance(probe, IterationProbe) and isinstance(answer, TimedIteration):
                iterations.append((probe, answer))
        return iterations


# -- a file of measurements
# ----------------------------------------------------------------------------------------------------


def write_cluster(measurements: ClusterMeasurements) -> dict[str, Any]:
    """Write the measurements of a cluster as plain JSON.

    Parameters
    ----------
    measurements : ClusterMeasurements
        All measurements.

    Returns
    -------
    data : dict
        Input of `read_cluster`.
    """
    facts = measurements.facts
    return {
        "id": measurements.id,
        "date": measurements.date,
        "base": measurements.base,
        "ranks_per_node": measurements.ranks_per_node,
        "nodes": measurements.nodes,
        "facts": {} if facts is None else write_record(facts),
        "probes": [
            write_probe(measured.probe) | write_record(measured.answer)
            for measured in measurements.probes
        ],
        "host": [[entry.name, entry.mean, entry.error] for entry in measurements.host],
    }


@reading("measurements cannot be fitted", WHICH_FILE, told=True)
def read_cluster(data: Mapping[str, Any]) -> ClusterMeasurements:
    """Read the measurements of a cluster from plain JSON.

    Parameters
    ----------
    data : mapping
        What `write_cluster` wrote.

    Returns
    -------
    measurements : ClusterMeasurements
        All measurements.

    Raises
    ------
    ValueError
        For measurements with missing or unknown parts.
    """
    return ClusterMeasurements(
        id=data["id"],
        date=data["date"],
        base=data["base"],
        ranks_per_node=data["ranks_per_node"],
        nodes=data["nodes"],
        facts=read_record(DeviceFacts, data["facts"], "facts") if data["facts"] else None,
        probes=[
            MeasuredProbe(probe=read_probe(row), answer=read_answer(row)) for row in data["probes"]
        ],
        host=[
            HostOverhead(name=name, mean=mean, error=error) for name, mean, error in data["host"]
        ],
    )
