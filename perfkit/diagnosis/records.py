"""What the files of a diagnosis pass to each other: links of a system, rows with their verdicts, and
causes with their evidence."""

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import polars

from perfkit.ground.units import Array
from perfkit.readers.log_facts import LogFacts


class Word(StrEnum):
    """What a diagnosis says of a row, of a range of sizes, or of a whole log."""

    EXPECTED = "as expected"
    LOW = "low, not slow"  # below the 80 % interval, as some healthy runs are
    SLOW = "slow"
    TOO_GOOD = "too good"
    UNKNOWN = "not enough to say"
    WRONG = "wrong results"  # of a whole log: times of wrong results mean nothing


class Range(StrEnum):
    """Ranges of message sizes that have a verdict each; `perfkit.diagnosis.verdicts` has their ends."""

    LATENCY = "latency"
    MIDDLE = "middle"
    BANDWIDTH = "bandwidth"


class Certainty(StrEnum):
    """How sure a cause is."""

    SEEN = "seen"  # a line of the log says it
    LIKELY = (
        "likely"  # figures of the log have the known shape of it, and nothing speaks against it
    )
    POSSIBLE = "possible"  # one of several that fit


@dataclass(frozen=True)
class Rate:
    """What a link gives, and where that is from.

    Parameters
    ----------
    value : float
        Rate, one way [B/s].
    source : str
        Document, or the line of the log.
    """

    value: float
    source: str


@dataclass(frozen=True)
class Adapters:
    """Network adapters of a node.

    Parameters
    ----------
    count : int or None
        Adapters that carry data, on the node with the fewest; None where the log does not name them [-].
    usual : int or None
        Adapters that such a node usually has; None where that is unknown [-].
    rate : Rate or None
        Rate of one adapter, one way; None where that is unknown.
    network : str or None
        What NCCL calls the network, such as ``IB``, ``Socket`` or the name of a plugin.
    is_named : bool
        Whether the log names the adapters; otherwise they are those of the datasheet.
    """

    count: int | None = None
    usual: int | None = None
    rate: Rate | None = None
    network: str | None = None
    is_named: bool = False


@dataclass(frozen=True)
class Links:
    """Links of the system that a run is of.

    Parameters
    ----------
    nvlink : Rate or None
        Link between the GPUs of a node, one way for each GPU: NVLink or what other vendors have; None
        where the GPUs have none, or the device is unknown.
    pcie : Rate or None
        PCIe of each GPU, one way; None where it is unknown.
    adapters : Adapters or None
        Network adapters of a node; None for runs on one node.
    multicast : bool or None
        Whether switches between the GPUs can reduce and copy (NVLink SHARP): what the device can do, and
        what the log says where it does; None where it is unknown.
    """

    nvlink: Rate | None = None
    pcie: Rate | None = None
    adapters: Adapters | None = None
    multicast: bool | None = None


@dataclass(frozen=True)
class Expectation:
    """Which system a run is of, and what its links should give.

    Parameters
    ----------
    device : str or None
        Name of the device as the log prints it; None where it does not.
    system : str or None
        The system in words, as ``8 adapters of 400 Gb/s``, or the platform that was named; None where
        nothing is expected.
    ranks_per_node : int or None
        Ranks of each node, the most where nodes differ; None where it is unknown [-].
    links : Links
        Its links.
    algorithm : str or None
        Algorithm that the user asked for, such as ``ring``; None where NCCL chose.
    startup : float or None
        Expected time of the smallest messages; None where it is unknown [s].
    startup_low, startup_high : float or None
        Ends of its 80 % interval [s].
    busbw : float or None
        Expected bus bandwidth of the largest messages; None where it is unknown [B/s].
    busbw_low, busbw_high : float or None
        Ends of its 80 % interval [B/s].
    limit : float or None
        Bus bandwidth that no run on these links can exceed; None where it is unknown [B/s].
    limit_links : str
        The links that bound it, in words with their rates; empty where it is unknown.
    limited_by : str
        The link that bounds the bandwidth, in words.
    source : str
        Where the rates of its links are from.
    notes : tuple of str
        What is uncertain about the system.
    """

    device: str | None = None
    system: str | None = None
    ranks_per_node: int | None = None
    links: Links = Links()
    algorithm: str | None = None
    startup: float | None = None
    startup_low: float | None = None
    startup_high: float | None = None
    busbw: float | None = None
    busbw_low: float | None = None
    busbw_high: float | None = None
    limit: float | None = None
    limit_links: str = ""
    limited_by: str = ""
    source: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What is said of a range of sizes of one run.

    Parameters
    ----------
    operation : str
        Such as ``all_reduce``.
    sizes : Range
        Which sizes.
    word : Word
        What is said.
    smallest, largest : int
        First and last size that it is said of [B].
    nbytes : int
        The size whose figures are named: the one that misses most, or the last [B].
    seconds : float
        Time measured there, the median over repeats [s].
    busbw : float
        Bus bandwidth measured there [B/s].
    expected_s, low_s, high_s : float or None
        Expected time there, and its 80 % interval; None where nothing is expected [s].
    line_share : float or None
        Share of the rate of the link that bounds the operation, see `Case.rows` [-].
    slow_s : float or None
        Time there from which on a run is slow; None where it is not known what to expect, or where networks
        that it may have gone over differ in it [s].
    """

    operation: str
    sizes: Range
    word: Word
    smallest: int
    largest: int
    nbytes: int
    seconds: float
    busbw: float
    expected_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    line_share: float | None = None
    slow_s: float | None = None


@dataclass(frozen=True)
class Evidence:
    """A line of a log, or what its figures show.

    Parameters
    ----------
    text : str
        What is seen, in words, with figures.
    file : str
        Name of the log.
    line : int or None
        Number of the line, from 1; None for what no single line shows [-].
    """

    text: str
    file: str
    line: int | None = None


@dataclass(frozen=True)
class Cause:
    """Why a run is slow, or too good, or what of it is normal though it looks odd.

    Parameters
    ----------
    name : str
        A short name for programs, such as ``missing adapter``.
    sentence : str
        What is the matter, as the first line of a diagnosis says it.
    evidence : tuple of Evidence
        What in the log says so.
    advice : tuple of str
        What to try, the first one first.
    citations : tuple of str
        Public cases that had it, such as ``NVIDIA/nccl#892``, and documents.
    certainty : Certainty
        How sure it is.
    explains : frozenset of Word
        Verdicts that it explains; a cause of slow runs is left out where nothing is slow. Empty for a
        remark, which holds for any verdict.
    sizes : frozenset of Range
        Ranges of sizes that it explains.
    """

    name: str
    sentence: str
    evidence: tuple[Evidence, ...]
    advice: tuple[str, ...] = ()
    citations: tuple[str, ...] = ()
    certainty: Certainty = Certainty.POSSIBLE
    explains: frozenset[Word] = frozenset((Word.SLOW,))
    sizes: frozenset[Range] = frozenset(Range)


@dataclass(frozen=True)
class Curve:
    """Medians of a run over repeats and both halves, by size.

    Parameters
    ----------
    nbytes, seconds, busbw, algbw : array, shape (sizes,)
        Sizes, ascending [B], times [s], bus and algorithm bandwidth [B/s].
    expected : array, shape (sizes,)
        Expected times, NaN where nothing is expected [s].
    lines : array, shape (sizes,)
        First line of each size [-].
    slow : array, shape (sizes,)
        1 where any row of this size is slow, else 0 [-].
    """

    nbytes: Array
    seconds: Array
    busbw: Array
    algbw: Array
    expected: Array
    lines: Array
    slow: Array


@dataclass(frozen=True)
class Case:
    """One run, a table of a log: what signatures of causes look at.

    Parameters
    ----------
    file : str
        Name of the log.
    operation : str
        Such as ``all_reduce``.
    ranks : int
        Ranks [-].
    nodes : int or None
        Nodes; None where the log does not say [-].
    rows : polars.DataFrame
        Rows by size: ``operation``, ``ranks``, ``nodes`` [-], ``dtype``, ``redop``, ``nbytes`` [B],
        ``in_place``, ``seconds`` [s], ``algbw`` and ``busbw`` [B/s], ``file`` and ``line``, as
        `perfkit.readers.nccl.parse_nccl_tests` gives them; then ``sizes`` (a `Range`), ``expected_s``,
        ``low_s`` and ``high_s`` (the 80 % interval) [s], null where nothing is expected; ``slow_s``, from
        which on a time is slow [s], null also where networks that the run may have gone over differ in it;
        ``line_share``, the share of the link that bounds the operation [-], null where it is unknown; and
        ``verdict`` (a `Word`).
    facts : LogFacts or None
        What the log says besides its tables, of this run, see `perfkit.readers.log_facts`; None where it
        says nothing.
    expectation : Expectation
        What its links should give.
    verdicts : tuple of Verdict
        One for each range of sizes that the run has.
    """

    file: str
    operation: str
    ranks: int
    nodes: int | None
    rows: polars.DataFrame
    facts: LogFacts | None
    expectation: Expectation
    verdicts: tuple[Verdict, ...] = ()

    def find(self, sizes: Range) -> Verdict | None:
        """The verdict on a range of sizes; None where the run has none of them. Of a range in two parts, of
        which one is slow, that on the larger messages."""
        found = None
        for verdict in self.verdicts:
            if verdict.sizes is sizes:
                found = verdict
        return found

    @cached_property
    def curve(self) -> Curve:
        """Medians by size, which most signatures look at; bandwidths are those of the median time."""
        at_median = polars.col("seconds") / polars.col("seconds").median()
        rows = (
            self.rows.filter((polars.col("nbytes") > 0) & (polars.col("seconds") > 0))
            .group_by("nbytes")
            .agg(
                polars.col("seconds").median(),
                (polars.col("busbw") * at_median).median(),
                (polars.col("algbw") * at_median).median(),
                polars.col("expected_s").median(),
                polars.col("line").min(),
                (polars.col("verdict") == Word.SLOW.value).any().alias("slow"),
            )
            .sort("nbytes")
            .cast(polars.Float64)
        )
        rows = rows.fill_null(math.nan)
        return Curve(
            nbytes=rows["nbytes"].to_numpy(),
            seconds=rows["seconds"].to_numpy(),
            busbw=rows["busbw"].to_numpy(),
            algbw=rows["algbw"].to_numpy(),
            expected=rows["expected_s"].to_numpy(),
            lines=rows["line"].to_numpy(),
            slow=rows["slow"].to_numpy(),
        )
