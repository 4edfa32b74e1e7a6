"""What measuring gives, as records; and how files of measurements hold them, as plain JSON.

A file of measurements holds each record as a JSON object: its fields in their order, without those
that were not measured. `read_record` reads such an object, `write_record` writes it. Measuring
processes and the files of unfinished campaigns hold records in the same form.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, Self, TypeVar

from perfkit.ground.files import reading
from perfkit.ground.units import check_positive, show
from perfkit.measure.kernels import Case
from perfkit.measure.machine import Fact

#: Format of the files that `write_measurements` writes.
FORMAT = 1

#: A measurement that got less of a core was disturbed by other programs [-]. On three quiet machines
#: 99.5 % of 3,918 kernels got more; see docs/formulas.md, table 7.1.
LEAST_CORE_SHARE = 0.97

#: What every error advises that cannot read or fit measurements.
WHICH_FILE = "take the file that calibrate wrote"

_Record = TypeVar("_Record")


# -- times
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Repeated times of one thing.

    Parameters
    ----------
    median, q1, q3 : float
        Median and quartiles of the samples [s].
    halves : sequence of float, optional
        Medians of the even and of the odd samples [s].
    n : int, optional
        Samples [-].
    cpu_share : float, optional
        CPU time over wall time; below `LEAST_CORE_SHARE` the process was pre-empted [-].
    """

    median: float
    q1: float
    q3: float
    halves: Sequence[float] | None = None
    n: int | None = None
    cpu_share: float | None = None

    @property
    def summary(self) -> dict[str, Any]:
        """What this has of a `Timing`, by name, for a record that says more."""
        return {item.name: getattr(self, item.name) for item in fields(Timing)}

    @property
    def share_of_core(self) -> float:
        """Share of a core that the measurement got; 1 where nobody looked [-]."""
        return 1.0 if self.cpu_share is None else self.cpu_share

    @property
    def references_around(self) -> Sequence[Sequence[float]]:
        """Times of the three references around the measurement, see
        `perfkit.measure.timing.Reference`; empty where none were timed [s]."""
        return ()


@dataclass(frozen=True, kw_only=True)
class KernelTiming(Timing):
    """What a measuring process says of one kernel.

    Parameters
    ----------
    nbytes : float
        Bytes of all operands that are read or written, each once [B].
    reference : sequence of float, optional
        Times of the three references around the kernel [s].
    """

    nbytes: float
    reference: Sequence[float] | None = None


@dataclass(frozen=True, kw_only=True)
class SizedKernel(Case):
    """A kernel with its sizes and the bytes of its operands.

    Parameters
    ----------
    nbytes : float
        Bytes of all operands that are read or written, each once [B].
    """

    nbytes: float


@dataclass(frozen=True, kw_only=True)
class MeasuredKernel(Timing, SizedKernel):
    """A kernel that was timed alone.

    Parameters
    ----------
    reference : sequence of float, optional
        Times of the three references around the kernel [s].
    """

    reference: Sequence[float] | None = None

    @classmethod
    def join(cls, case: Case, timing: KernelTiming) -> Self:
        """Join what was to be timed with its time.

        Parameters
        ----------
        case : Case
            The kernel.
        timing : KernelTiming
            Its time.

        Returns
        -------
        kernel : MeasuredKernel
            Both.
        """
        times = {field.name: getattr(timing, field.name) for field in fields(timing)}
        return cls(case.kind, case.variant, case.sizes, **times)

    @property
    def name(self) -> str:
        """Name of the class of the kernel: its kind and its variant."""
        return f"{self.kind}.{self.variant}"

    @property
    def references_around(self) -> Sequence[Sequence[float]]:
        """Times of the references around the kernel; empty where none were timed [s]."""
        return () if self.reference is None else (self.reference,)


@dataclass(frozen=True, kw_only=True)
class CollectiveSamples:
    """What one rank saw of a collective.

    Parameters
    ----------
    operation : str
        Name of the collective.
    nbytes : int
        Message size in the nccl-tests convention [B].
    samples : list of float
        Time from a barrier to the end of each call on this rank [s].
    core_share : float
        Share of a core that this rank got [-].
    """

    operation: str
    nbytes: int
    samples: list[float]
    core_share: float


@dataclass(frozen=True, kw_only=True)
class MeasuredCollective(Timing):
    """A collective of one message size; a sample is the time of the slowest rank.

    Parameters
    ----------
    operation : str
        Name of the collective.
    nbytes : float
        Message size in the nccl-tests convention [B].
    core_share : float, optional
        Smallest share of a core that a rank got [-].
    mean : float
        Mean over calls [s].
    """

    operation: str
    nbytes: float
    core_share: float | None = None
    mean: float

    @property
    def share_of_core(self) -> float:
        """Share of a core that the slowest rank got; 1 where nobody looked [-]."""
        return super().share_of_core if self.core_share is None else self.core_share


@dataclass(frozen=True, kw_only=True)
class LadderStep:
    """Passes over one working set.

    Parameters
    ----------
    nbytes : int
        Size of the working set [B].
    stream : list of float
        For every sweep over all sizes the time to read and write all of it [s].
    """

    nbytes: int
    stream: list[float]


@dataclass(frozen=True, kw_only=True)
class ReferenceTimes:
    """The references alone, see `perfkit.measure.timing.Reference`.

    Parameters
    ----------
    references : list of list of float
        Times of the three references in every call [s].
    core_share : float
        Share of a core during the calls [-].
    """

    references: list[list[float]]
    core_share: float


@dataclass(frozen=True, kw_only=True)
class MeasuredRank(Timing):
    """Iterations as one rank saw them.

    Parameters
    ----------
    blocks : list of float, optional
        Median time of each block of iterations [s].
    idle : float, optional
        Median time of an iteration in which the thread did not compute, because it waited for a
        collective, or because a collective used its core; of several ranks on a CPU [s].
    names : list of str, optional
        Names of the operations in program order.
    references : list of list of float, optional
        Times of the three references before, between and after the blocks [s].
    operation_seconds : list of float, optional
        Median times of the operations in program order [s].
    operation_references : list of list of float, optional
        Times of the references around the iterations whose operations were timed [s].
    core_share : float, optional
        Share of a core during the references [-].
    flagged : bool, optional
        Whether the measurement was disturbed.
    """

    blocks: list[float] | None = None
    idle: float | None = None
    names: list[str] | None = None
    references: list[list[float]] | None = None
    operation_seconds: list[float] | None = None
    operation_references: list[list[float]] | None = None
    core_share: float | None = None
    flagged: bool | None = None

    @property
    def share_of_core(self) -> float:
        """Share of a core that the rank got; 1 where nobody looked [-]."""
        return super().share_of_core if self.core_share is None else self.core_share

    @property
    def references_around(self) -> Sequence[Sequence[float]]:
        """Times of the references between the blocks; empty where none were timed [s]."""
        return () if self.references is None else self.references


@dataclass(frozen=True, kw_only=True)
class MeasuredIteration:
    """One configuration whose iterations were timed.

    Parameters
    ----------
    name : str
        Short name.
    family : str
        Family of the configuration, see `perfkit.measure.samples.Sample`.
    workload : mapping
        The iteration as plain JSON, see `perfkit.measure.samples.load`.
    owners : list of int or None
        Rank of every table; None without a plan.
    runs : sequence of MeasuredRank
        What each rank saw.
    """

    name: str
    family: str
    workload: Mapping[str, Any]
    owners: Sequence[int] | None
    runs: Sequence[MeasuredRank]


@dataclass(frozen=True, kw_only=True)
class MachineMeasurements:
    """All that a CPU platform is fitted to.

    Parameters
    ----------
    id : str
        What the measurements are called where they are a source.
    device : str
        ``cpu``.
    ranks : int
        Ranks of collectives and parallel iterations; 0 and 1 are alone [-].
    date : str
        Day of the oldest measurement.
    ranks_per_node : int, optional
        By default all ranks [-].
    machine, versions : mapping of str to str
        Machine and software.
    facts : mapping of str to Fact
        What the operating system says, see `perfkit.measure.machine.gather_facts`.
    ladder : sequence of LadderStep
        Passes over working sets; empty if not measured.
    kernels : sequence of MeasuredKernel
        Kernels alone.
    collectives : sequence of MeasuredCollective
        Collectives; empty for one rank.
    iterations : sequence of MeasuredIteration
        Small iterations.
    """

    id: str
    device: str
    ranks: int
    date: str
    ranks_per_node: int | None = None
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    facts: Mapping[str, Fact]
    ladder: Sequence[LadderStep]
    kernels: Sequence[MeasuredKernel]
    collectives: Sequence[MeasuredCollective]
    iterations: Sequence[MeasuredIteration]


# -- one record as plain JSON
# ----------------------------------------------------------------------------------------------------


def _may_lack(field: Field[Any]) -> bool:
    """Whether a field is left out of a file where it was not measured."""
    return field.default is None


def write_record(record: Any) -> dict[str, Any]:
    """Write a record as plain JSON.

    Parameters
    ----------
    record : dataclass
        One of the records of this module.

    Returns
    -------
    written : dict
        Its fields in their order, without those that were not measured.

    Examples
    --------
    >>> write_record(LadderStep(nbytes=64, stream=[1e-9]))
    {'nbytes': 64, 'stream': [1e-09]}
    """
    written = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if value is None and _may_lack(field):
            continue
        written[field.name] = write_result(value)
    return written


def write_result(result: Any) -> Any:
    """Write what a measuring task returns as plain JSON: records, lists of them, or plain JSON.

    Parameters
    ----------
    result : object
        A record, a list or tuple, a mapping, or a plain value.

    Returns
    -------
    written : object
        The same with every record as a dict, see `write_record`.
    """
    if is_dataclass(result):
        return write_record(result)
    if isinstance(result, list | tuple):
        return [write_result(part) for part in result]
    if isinstance(result, Mapping):
        return {name: write_result(part) for name, part in result.items()}
    return result


def read_record(kind: type[_Record], row: Any, place: str) -> _Record:
    """Read a record from plain JSON.

    Parameters
    ----------
    kind : type
        One of the records of this module.
    row : mapping
        Written by `write_record`; names that the record does not have are ignored.
    place : str
        What the row is called in errors, such as ``kernels[3]``.

    Returns
    -------
    record : dataclass
        The record.

    Raises
    ------
    ValueError
        For something else than a mapping, and for a missing field.

    Examples
    --------
    >>> read_record(LadderStep, {"nbytes": 64, "stream": [1e-9]}, "ladder[0]")
    LadderStep(nbytes=64, stream=[1e-09])
    """
    if not isinstance(row, Mapping):
        raise ValueError(
            f"measurements cannot be fitted: {place} is {show(row)}; it must map names to values; "
            f"{WHICH_FILE}"
        )
    values = {}
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name in row:
            values[field.name] = row[field.name]
        elif field.default is MISSING:
            raise ValueError(
                f"measurements cannot be fitted: {place} has no {field.name}; {WHICH_FILE}"
            )
    return kind(**values)


# -- a file of measurements
# ----------------------------------------------------------------------------------------------------


def write_measurements(measurements: MachineMeasurements) -> dict[str, Any]:
    """Write the measurements of a machine as plain JSON.

    Parameters
    ----------
    measurements : MachineMeasurements
        All measurements.

    Returns
    -------
    data : dict
        With ``format`` 1; input of `read_measurements`.
    """
    return {"format": FORMAT, **write_record(measurements)}


@reading("measurements cannot be fitted", WHICH_FILE, told=True)
def read_measurements(data: Mapping[str, Any]) -> MachineMeasurements:
    """Read the measurements of a machine from plain JSON.

    Parameters
    ----------
    data : mapping
        What `write_measurements` wrote. Files of perfkit 0.1 have no facts, but the sizes of caches
        and memory.

    Returns
    -------
    measurements : MachineMeasurements
        All measurements.

    Raises
    ------
    ValueError
        For measurements of another format, or with missing parts or impossible times.
    """
    version = data["format"]
    if type(version) is not int or version != FORMAT:
        raise ValueError(
            f"format is {show(version)}; this perfkit reads measurements of format 1; measure again"
        )
    check_positive("ranks", data["ranks"], integer=True, zero=True)
    if "ranks_per_node" in data:
        check_positive("ranks_per_node", data["ranks_per_node"], integer=True)
    ladder = [
        read_record(LadderStep, row, f"ladder[{i}]")
        for i, row in enumerate(data.get("ladder") or ())
    ]
    kernels = [_read_kernel(row, f"kernels[{i}]") for i, row in enumerate(data["kernels"])]
    collectives = [
        _read_collective(row, f"collectives[{i}]") for i, row in enumerate(data["collectives"])
    ]
    iterations = [
        read_iteration(row, f"iterations[{i}]") for i, row in enumerate(data["iterations"])
    ]
    whole = {
        **data,
        "facts": _read_facts(data),
        "ladder": ladder,
        "kernels": kernels,
        "collectives": collectives,
        "iterations": iterations,
    }
    return read_record(MachineMeasurements, whole, "the content")


def _read_facts(data: Mapping[str, Any]) -> dict[str, Fact]:
    """What the operating system says of itself; perfkit 0.1 wrote the sizes of caches and memory
    alone."""
    sizes = {**data.get("caches", {}), "memory": data.get("memory_bytes")}
    facts = {name: Fact(size or None, "the operating system") for name, size in sizes.items()}
    for name, fact in data.get("facts", {}).items():
        facts[name] = read_record(Fact, fact, f"facts.{name}")
    return facts


def _read_kernel(row: Any, place: str) -> MeasuredKernel:
    """One kernel; its times are above 0."""
    kernel = read_record(MeasuredKernel, row, place)
    label = f"{place} ({kernel.kind} {kernel.variant})"
    check_positive(f"{label}.median", kernel.median)
    check_positive(f"{label}.q1", kernel.q1)
    check_positive(f"{label}.nbytes", kernel.nbytes, zero=True)
    return kernel


def _read_collective(row: Any, place: str) -> MeasuredCollective:
    """One collective; its times are above 0."""
    collective = read_record(MeasuredCollective, row, place)
    label = f"{place} ({collective.operation})"
    check_positive(f"{label}.median", collective.median)
    check_positive(f"{label}.q1", collective.q1)
    check_positive(f"{label}.mean", collective.mean)
    check_positive(f"{label}.nbytes", collective.nbytes, zero=True)
    return collective


def read_measured_ranks(rows: Any, place: str) -> list[MeasuredRank]:
    """Read what each rank saw of an iteration.

    Parameters
    ----------
    rows : sequence of mapping
        Plain JSON, one for each rank.
    place : str
        What they are called in errors.

    Returns
    -------
    ranks : list of MeasuredRank
        One for each rank.

    Raises
    ------
    ValueError
        For missing names and times that are not above 0.
    """
    ranks = [read_record(MeasuredRank, row, f"{place}[{rank}]") for rank, row in enumerate(rows)]
    for number, rank in enumerate(ranks):
        check_positive(f"{place}[{number}].median", rank.median)
    return ranks


def read_iteration(row: Mapping[str, Any], place: str) -> MeasuredIteration:
    """Read one configuration whose iterations were timed.

    Parameters
    ----------
    row : mapping
        Plain JSON.
    place : str
        What it is called in errors.

    Returns
    -------
    iteration : MeasuredIteration
        With the records of its ranks.
    """
    return read_record(
        MeasuredIteration, {**row, "runs": read_measured_ranks(row["runs"], f"{place}.runs")}, place
    )
