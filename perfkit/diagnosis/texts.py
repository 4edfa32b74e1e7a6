"""What a diagnosis says in words: the line of a run, its ranges of sizes, causes, and rows of a report."""

from collections.abc import Mapping, Sequence

from perfkit.diagnosis.findings import Finding
from perfkit.diagnosis.records import Case, Cause, Certainty, Evidence, Range, Verdict, Word
from perfkit.diagnosis.verdicts import find_first_slow
from perfkit.diagnosis.words import (
    write_microseconds,
    write_rate,
    write_rates,
    write_size,
    write_times,
)
from perfkit.ground.results import Table
from perfkit.ground.units import escape, format_table

#: Most logs that are named one by one [-].
_MOST_LOGS = 3
#: What is neither as expected nor slow.
_LOW = (
    f"{Word.LOW.value}: below the interval of 80 % of healthy runs, not beyond the limit of slow ones, which "
    "1 of 130 passes; run it again, with NCCL_DEBUG=INFO, which says more"
)
#: A smaller share of a link says nothing: start-ups take the time [-].
_LEAST_SHARE = 0.01
_HEADS = ("sizes", "at", "measured", "expected (80 %)", "slow beyond", "of the link", "verdict")
_CERTAINTIES = {
    Certainty.SEEN: "the log says so",
    Certainty.LIKELY: "likely",
    Certainty.POSSIBLE: "possible",
}


def say_counts(counts: Mapping[str, int], runs: int) -> str:
    """Say how many runs have each verdict.

    Parameters
    ----------
    counts : mapping of str to int
        Runs by verdict [-].
    runs : int
        All runs [-].

    Returns
    -------
    text : str
        In one clause.

    Examples
    --------
    >>> say_counts({"slow": 3, "too good": 1}, 5)
    '3 of 5 runs slow, 1 too good'
    """
    parts = [f"{count} {word}" for word, count in counts.items()]
    word, count = next(iter(counts.items()))
    return ", ".join([f"{count} of {runs} runs {word}", *parts[1:]])


def say_finding(finding: Finding) -> str:
    """Say what is right or wrong with a run.

    Parameters
    ----------
    finding : Finding
        The run.

    Returns
    -------
    text : str
        Its verdict, what was measured and what is expected, in one line without causes.
    """
    if finding.word is Word.WRONG:
        return _say_wrong(finding)
    if finding.word in (Word.SLOW, Word.TOO_GOOD):
        return _say_sick(finding)
    return f"{finding.word.value}: {_say_run(finding)}"


def _say_run(finding: Finding) -> str:
    """What was measured of a run, in one clause."""
    case = finding.case
    parts: list[str] = []
    for sizes in (Range.BANDWIDTH, Range.MIDDLE, Range.LATENCY):
        verdict = case.find(sizes)
        if verdict is not None and (sizes is not Range.MIDDLE or not parts):
            parts.append(_say_measured(verdict))
    text = f"{case.operation} {', '.join(parts)}"
    if finding.word is Word.EXPECTED:
        bandwidth = case.find(Range.BANDWIDTH)
        if bandwidth is None:
            return f"{text}; the log has no sizes that show the bandwidth"
        if case.expectation.algorithm is not None:
            return f"{text}, for the algorithm that was asked for ({case.expectation.algorithm})"
        return text
    if finding.word is Word.LOW:
        largest = case.verdicts[-1]
        text = f"{case.operation} {_say_measured(largest)}"
        return f"{text} where {_say_expected(largest)} are expected; some healthy runs are as low"
    return f"{text}; {finding.reason}" if finding.reason else text


def _say_wrong(finding: Finding) -> str:
    """What is wrong with the results of a run, in one clause."""
    count = finding.count_wrong()
    facts = finding.case.facts
    first = "" if facts is None else f", the first in line {facts.wrong_lines[0]}"
    results = "1 result of" if count == 1 else f"{count} results of"
    verb = "holds" if count == 1 else "hold"
    return (
        f"{Word.WRONG.value}: {results} {finding.case.operation} {verb} wrong values{first}; "
        "no time of it means anything"
    )


def _say_measured(verdict: Verdict) -> str:
    """The figure of a range of sizes: a time where start-ups take it, and where one rank has no bus
    bandwidth."""
    if verdict.sizes is Range.LATENCY or verdict.busbw == 0.0:
        return f"{write_microseconds(verdict.seconds)} at {write_size(verdict.nbytes)}"
    return f"{write_rate(verdict.busbw)} at {write_size(verdict.nbytes)}"


def _say_expected(verdict: Verdict) -> str:
    """The interval of a range of sizes; empty where nothing is expected."""
    if verdict.low_s is None or verdict.high_s is None:
        return ""
    if verdict.sizes is Range.LATENCY:
        return write_times(verdict.low_s, verdict.high_s)
    moved = verdict.busbw * verdict.seconds
    return write_rates(moved / verdict.high_s, moved / verdict.low_s)


def _say_sick(finding: Finding) -> str:
    """What is wrong with a run, in one clause, and what is right of it."""
    sick = [verdict for verdict in finding.case.verdicts if verdict.word is finding.word]
    sizes = {verdict.sizes for verdict in sick}
    named = sick[-1] if Range.BANDWIDTH in sizes else sick[0]
    text = f"{finding.case.operation} {_say_measured(named)}"
    expected = _say_expected(named)
    limit = finding.case.expectation.limit
    if finding.word is Word.TOO_GOOD and limit is not None:
        text += f", more than the {write_rate(limit)} that its links can carry"
    elif expected:
        text += f" where {expected} are expected"
    span = ""
    if finding.word is Word.SLOW:
        first = _find_first_slow(finding)
        right = finding.case.find(Range.BANDWIDTH)
        if first is not None:
            span = f" from {write_size(first)} on"
        elif right is not None and right.word is Word.EXPECTED:
            span = f" up to {write_size(sick[-1].largest)}"
            text += f", as expected from {write_size(right.smallest)} on ({_say_measured(right)})"
    return f"{finding.word.value}{span}: {text}"


def _find_first_slow(finding: Finding) -> int | None:
    """The size from which on all are slow [B]; None where none is, or where no smaller one is right."""
    words = {verdict.sizes: verdict.word for verdict in finding.case.verdicts}
    if words.get(Range.LATENCY) is not Word.EXPECTED:
        return None
    return find_first_slow(finding.case.rows)


def _list_ranges(case: Case) -> list[Sequence[str]]:
    """Ranges of sizes of a run as rows of text, under `_HEADS`."""
    rows: list[Sequence[str]] = []
    for verdict in case.verdicts:
        span = write_size(verdict.smallest)
        if verdict.largest != verdict.smallest:
            span += f" to {write_size(verdict.largest)}"
        measured = _say_measured(verdict).rpartition(" at ")[0]
        share = "–"
        has_share = verdict.line_share is not None and verdict.line_share >= _LEAST_SHARE
        if has_share and verdict.sizes is not Range.LATENCY:
            share = f"{verdict.line_share:.0%}"
        expected = _say_expected(verdict) or "–"
        size = write_size(verdict.nbytes)
        limit = _say_limit(verdict) or "–"
        rows.append((span, size, measured, expected, limit, share, _say_word(verdict)))
    return rows


def _say_limit(verdict: Verdict) -> str:
    """Where slow begins; empty where that is not known, or where a run is slow for another reason."""
    if verdict.slow_s is None or verdict.low_s is None:
        return ""
    if verdict.word is Word.SLOW and verdict.seconds < verdict.slow_s:
        return ""
    if verdict.sizes is Range.LATENCY:
        return write_microseconds(verdict.slow_s)
    return write_rate(verdict.busbw * verdict.seconds / verdict.slow_s)


def _say_word(verdict: Verdict) -> str:
    """What is said of a range; that a time is right and yet longer than its interval is said, too."""
    is_long = verdict.high_s is not None and verdict.seconds > verdict.high_s
    if verdict.word is Word.EXPECTED and is_long:
        return f"{verdict.word.value}, barely"
    return verdict.word.value


def describe_finding(finding: Finding, *, with_file: bool) -> list[str]:
    """Write a run in lines.

    Parameters
    ----------
    finding : Finding
        The run.
    with_file : bool
        Whether to name its log.

    Returns
    -------
    lines : list of str
        What it is, and a table of its ranges of sizes.
    """
    case = finding.case
    where = f"{finding.name}: " if with_file else ""
    head = f"{where}{case.operation}, {finding.system}"
    lines = [head, format_table([_HEADS, *_list_ranges(case)])]
    if any(verdict.word is Word.LOW for verdict in case.verdicts):
        lines.append(_LOW)
    return [*lines, ""]


def say_logs(files: Sequence[str]) -> str:
    """Name logs.

    Parameters
    ----------
    files : sequence of str
        Names of logs.

    Returns
    -------
    text : str
        Each once, after a comma; of many their number.

    Examples
    --------
    >>> say_logs(["a.log", "b.log", "a.log"]), say_logs(["a", "b", "c", "d"])
    (', a.log, b.log', ', 4 logs')
    """
    names = list(dict.fromkeys(files))
    if len(names) > _MOST_LOGS:
        return f", {len(names)} logs"
    return "".join(f", {escape(name, 80)}" for name in names)


def describe_cause(cause: Cause, logs: str = "") -> list[str]:
    """Write a cause in lines.

    Parameters
    ----------
    cause : Cause
        The cause.
    logs : str, optional
        Names of its logs, each after a comma.

    Returns
    -------
    lines : list of str
        Its sentence, evidence, advice and citations.
    """
    lines = [f"{name_kind(cause)}{logs}: {cause.sentence}"]
    lines += [f"  seen: {_say_evidence(evidence)}" for evidence in cause.evidence]
    lines += [f"  try: {advice}" for advice in cause.advice]
    if cause.citations:
        lines.append(f"  see: {', '.join(cause.citations)}")
    return lines


def name_kind(cause: Cause) -> str:
    """Name what a cause is.

    Parameters
    ----------
    cause : Cause
        The cause.

    Returns
    -------
    text : str
        ``note`` for a remark, else ``why`` with how sure it is.
    """
    return f"why ({_CERTAINTIES[cause.certainty]})" if cause.explains else "note"


def _say_evidence(evidence: Evidence) -> str:
    """Evidence with its place."""
    if evidence.line is None:
        return evidence.text
    return f"{evidence.text} ({escape(evidence.file, 80)} line {evidence.line})"


def list_notes(finding: Finding) -> list[str]:
    """List what the expectation of a run rests on.

    Parameters
    ----------
    finding : Finding
        The run.

    Returns
    -------
    lines : list of str
        What is uncertain about it, then its source; none where nothing is expected.
    """
    expectation = finding.case.expectation
    if expectation.system is None or not expectation.source:
        return []
    lines = [f"note: {note}" for note in expectation.notes]
    return [*lines, f"expected with {expectation.system}: {expectation.source}"]


def tabulate_findings(findings: Sequence[Finding]) -> list[Sequence[str]]:
    """Write runs as rows of text for a report.

    Parameters
    ----------
    findings : sequence of Finding
        The runs.

    Returns
    -------
    rows : list of sequence of str
        Heads, then one row for each range of sizes; the verdict stands beside the sizes, where a narrow
        page shows it.
    """
    sizes_head, *figures, verdict = _HEADS
    rows: list[Sequence[str]] = [(sizes_head, verdict, *figures, "run", "system")]
    for finding in findings:
        name = f"{finding.name}: {finding.case.operation}"
        for sizes, *of_sizes, word in _list_ranges(finding.case):
            rows.append((sizes, word, *of_sizes, name, finding.system))
    return rows


def tabulate_cause(cause: Cause) -> list[Sequence[str]]:
    """Write evidence and advice of a cause as rows of text for a report.

    Parameters
    ----------
    cause : Cause
        The cause.

    Returns
    -------
    rows : list of sequence of str
        Heads, evidence, advice and citations.
    """
    rows: list[Sequence[str]] = [("what", "")]
    rows += [("seen", _say_evidence(evidence)) for evidence in cause.evidence]
    rows += [("try", advice) for advice in cause.advice]
    if cause.citations:
        rows.append(("see", ", ".join(cause.citations)))
    return rows


def tabulate_spread(frame: Table) -> list[Sequence[str]]:
    """Write how runs of the same operation differ, as rows of text for a report.

    Parameters
    ----------
    frame : polars.DataFrame
        `Diagnosis.spread`.

    Returns
    -------
    rows : list of sequence of str
        Heads, then one row for each size.
    """
    rows: list[Sequence[str]] = [
        ("operation", "ranks", "size", "runs", "fastest", "median", "slowest")
    ]
    for row in frame.iter_rows(named=True):
        times = [write_microseconds(row[f"{name}_s"]) for name in ("fastest", "median", "slowest")]
        size = write_size(row["size_bytes"])
        rows.append((row["operation"], f"{row['ranks']}", size, f"{row['runs']}", *times))
    return rows


def tabulate_thresholds(frame: Table) -> list[Sequence[str]]:
    """Write floors of a health check as rows of text for a report.

    Parameters
    ----------
    frame : polars.DataFrame
        `Diagnosis.thresholds`.

    Returns
    -------
    rows : list of sequence of str
        Heads, then one row for each size.
    """
    rows: list[Sequence[str]] = [("operation", "ranks", "size", "longest", "least bus bandwidth")]
    for row in frame.iter_rows(named=True):
        longest = write_microseconds(row["longest_s"])
        least = write_rate(row["least_busbw_bytes_per_s"])
        size = write_size(row["size_bytes"])
        rows.append((row["operation"], f"{row['ranks']}", size, longest, least))
    return rows
