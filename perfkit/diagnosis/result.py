"""What a diagnosis gives: the answer in one line, a table, causes, a chart and thresholds."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import polars as pl

from perfkit.diagnosis.causes import ALARM_NAMES
from perfkit.diagnosis.causes_between import compare_runs
from perfkit.diagnosis.findings import Finding, find_worst, rank_finding
from perfkit.diagnosis.records import Case, Cause, Certainty, Verdict, Word
from perfkit.diagnosis.texts import (
    describe_cause,
    describe_finding,
    list_notes,
    name_kind,
    say_counts,
    say_finding,
    say_logs,
    tabulate_cause,
    tabulate_findings,
    tabulate_spread,
    tabulate_thresholds,
)
from perfkit.diagnosis.words import write_microseconds, write_size
from perfkit.ground.results import Picture, Sections, Table, Tabular
from perfkit.ground.units import escape, format_count
from perfkit.models.collectives import OPERATIONS, bus_factor

#: Most runs that a text shows one by one, and panels of a chart [-].
_MOST_RUNS = 12
_MOST_PANELS = 2
#: Name of the cause that says that none is known.
_UNEXPLAINED = "not enough to say"
#: Runs differ if the slowest of the same size takes so much longer than the fastest [-].
_DIFFER = 1.1
#: Verdicts that a health check fails for.
_SICK = frozenset((Word.WRONG.value, Word.TOO_GOOD.value, Word.SLOW.value))


@dataclass(frozen=True, eq=False)
class Diagnosis(Tabular):
    """A verdict on logs of nccl-tests, with causes and what to try.

    ``str()`` leads with the answer; ``rows`` has every measured row with what was expected, ``causes``
    what is the matter, ``chart`` draws the runs, and ``thresholds`` gives the floors of a health check.

    Parameters
    ----------
    findings : tuple of Finding
        One for each run, in the order of the logs.
    warnings : tuple of str
        What reading the logs warned of, and a platform whose nodes cannot be.
    """

    report_title = "Is this bandwidth normal?"

    findings: tuple[Finding, ...]
    warnings: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """``wrong results``, ``too good``, ``slow``, ``as expected``, ``low, not slow`` or ``not enough to
        say``, of all runs together."""
        return self._word.value

    @property
    def _word(self) -> Word:
        words = {finding.word for finding in self.findings}
        return find_worst(words)

    @property
    def ok(self) -> bool | None:
        """Whether all that can be judged is as expected; None where nothing can. Results with wrong values
        are not, whatever their times."""
        if self._word in (Word.UNKNOWN, Word.LOW):
            return None
        return self._word is Word.EXPECTED

    @cached_property
    def _between(self) -> tuple[Cause, ...]:
        """What runs show beside each other."""
        return compare_runs([finding.case for finding in self.findings])

    @cached_property
    def causes(self) -> tuple[Cause, ...]:
        """Causes of all runs, the surest first: of equally sure ones what runs show beside each other, then
        those of the run that is named first; each once, with the evidence of the first run that has it.
        Alarms stand before them, remarks behind. That no cause is known is left out beside one that is."""
        causes = list(self._between)
        for finding in sorted(self.findings, key=rank_finding):
            causes += self._explain(finding)
        merged: dict[tuple[str, str], Cause] = {}
        for cause in causes:
            merged.setdefault((cause.name, cause.sentence), cause)
        return tuple(_arrange(list(merged.values())))

    @cached_property
    def rows(self) -> Table:
        """Every measured row with what was expected.

        ``file``, ``line``, ``operation``, ``ranks``, ``nodes``, ``dtype``, ``in_place``; ``size_bytes``,
        ``measured_s``, ``expected_s``, the 80 % interval ``low_s`` and ``high_s``, ``slow_s`` from which
        on a time is slow; ``busbw_bytes_per_s``, measured, and ``expected_bytes_per_s``; ``link_share``,
        the share of the link that bounds the operation; ``sizes`` and ``verdict``. Null where nothing is
        expected; ``slow_s`` also where networks that a run may have gone over differ in it.
        """
        return pl.concat([_show_rows(finding.case) for finding in self.findings])

    def table(self) -> Table:
        """One row for each range of sizes of each run.

        Returns
        -------
        frame : polars.DataFrame
            file, operation, ranks, nodes, sizes, from_bytes, to_bytes, at_bytes, measured_s, expected_s,
            low_s, high_s, slow_s (from which on a run is slow), busbw_bytes_per_s, and the bandwidths of
            these times, expected_bytes_per_s, low_bytes_per_s, high_bytes_per_s and slow_bytes_per_s;
            link_share and verdict.
        """
        rows = []
        for finding in self.findings:
            rows += [_list_verdict(finding.case, verdict) for verdict in finding.case.verdicts]
        return pl.DataFrame(rows, schema=_TABLE)

    def spread(self) -> Table:
        """How runs of the same operation on equal systems differ.

        Returns
        -------
        frame : polars.DataFrame
            system, operation, ranks, nodes, size_bytes, runs [-], and the fastest, the median and the
            slowest time, fastest_s, median_s and slowest_s; of sizes that several runs have.
        """
        medians = []
        for number, finding in enumerate(self.findings):
            by_size = finding.case.rows.group_by("operation", "ranks", "nodes", "nbytes").agg(
                pl.col("seconds").median()
            )
            about = (pl.lit(number).alias("run"), pl.lit(finding.system).alias("system"))
            medians.append(by_size.with_columns(*about))
        same = ["system", "operation", "ranks", "nodes", "nbytes"]
        frame = (
            pl.concat(medians)
            .group_by(same)
            .agg(
                pl.len().alias("runs"),
                pl.col("seconds").min().alias("fastest_s"),
                pl.col("seconds").median().alias("median_s"),
                pl.col("seconds").max().alias("slowest_s"),
            )
        )
        frame = frame.filter(pl.col("runs") > 1).sort(same)
        return frame.rename({"nbytes": "size_bytes"})

    def thresholds(self) -> Table:
        """Floors for a health check of such a system: what is slower than that is not normal.

        Returns
        -------
        frame : polars.DataFrame
            system, expected_with (its network or platform), operation, ranks, nodes [-], size_bytes,
            longest_s and least_busbw_bytes_per_s: 1 of 130 healthy runs is slower. Sizes of the logs
            for which one time is known from which on they are slow; `list_without_floors` names the others.
        """
        same = ["system", "expected_with", "operation", "ranks", "nodes", "size_bytes"]
        frames = []
        for finding in self.findings:
            network = pl.lit(finding.case.expectation.system, pl.String)
            about = (pl.lit(finding.system).alias("system"), network.alias("expected_with"))
            frames.append(_show_rows(finding.case).with_columns(*about))
        rows = pl.concat(frames).filter(pl.col("slow_s").is_not_null())
        factors = []
        kinds = rows.select("operation", "ranks").unique(maintain_order=True)
        for operation, ranks in kinds.iter_rows():
            if operation in OPERATIONS:
                factors.append((operation, ranks, float(bus_factor(operation, ranks))))
        known = pl.DataFrame(
            factors,
            schema={"operation": pl.String, "ranks": pl.Int64, "factor": pl.Float64},
            orient="row",
        )
        frame = rows.group_by(same).agg(pl.col("slow_s").max().alias("longest_s"))
        frame = frame.join(known, on=["operation", "ranks"]).sort(same)
        floor = pl.col("factor") * pl.col("size_bytes") / pl.col("longest_s")
        return frame.with_columns(floor.alias("least_busbw_bytes_per_s")).drop("factor")

    def chart(self) -> Picture:
        """Draw the bus bandwidth of the runs over the message size: measured, expected with its
        interval, and the rate of the link.

        Returns
        -------
        chart : altair.Chart
            One panel for each of the two runs that are named first.
        """
        from perfkit.plots.diagnoses import measured_against_links  # loads Altair

        shown = sorted(self.findings, key=rank_finding)[:_MOST_PANELS]
        rows = []
        for finding in shown:
            title = f"{finding.case.operation}, {finding.name}"
            for row in _show_rows(finding.case).to_dicts():
                rows.append({"run": title, **row})
        title = "Measured and expected"
        if len(shown) < len(self.findings):
            title += f": {len(shown)} of {len(self.findings)} runs, the worst first"
        return measured_against_links(rows, title=title)

    def headline(self) -> str:
        """The answer in one line, see `perfkit.ground.results.Reported.headline`."""
        first = min(self.findings, key=rank_finding)
        text = say_finding(first)
        if first.word in (Word.SLOW, Word.TOO_GOOD):
            explaining = [cause for cause in self._explain(first) if first.word in cause.explains]
            explaining += [cause for cause in self._between if first.word in cause.explains]
            if explaining:
                text += f"; {explaining[0].sentence}"
        if first.word is Word.EXPECTED and self.causes:
            remarks = [cause for cause in first.causes if cause.name == "missing adapter"]
            text += "".join(f"; yet {remark.sentence}" for remark in remarks)
        if len(self.findings) == 1:
            return text
        counts = self.count_words()
        sick = {word: count for word, count in counts.items() if word in _SICK}
        if len(sick) > 1:
            return f"{say_counts(sick, len(self.findings))}; {escape(first.case.file, 80)}: {text}"
        same = sum(finding.word is first.word for finding in self.findings)
        files = {finding.case.file for finding in self.findings}
        if first.word in (Word.EXPECTED, Word.UNKNOWN) or len(files) == 1:
            return f"{text} ({same} of {len(self.findings)} runs)"
        return f"{text} ({escape(first.case.file, 80)}; {same} of {len(self.findings)} runs {self.verdict})"

    def count_words(self) -> dict[str, int]:
        """Count the runs of each verdict.

        Returns
        -------
        counts : dict
            Runs by verdict, the most first [-].
        """
        counts = Counter(finding.word.value for finding in self.findings)
        return dict(counts.most_common())

    def _explain(self, finding: Finding) -> list[Cause]:
        """Causes of a run. Where none is known, those of other runs of this operation in the same log."""
        known = [cause for cause in finding.causes if cause.name != _UNEXPLAINED]
        if len(known) == len(finding.causes):
            return known
        alike = []
        for other in self.findings:
            is_same_log = other.case.file == finding.case.file and other.system == finding.system
            if is_same_log and other.case.operation == finding.case.operation:
                alike += [cause for cause in other.causes if cause.name != _UNEXPLAINED]
        for cause in (*alike, *self._between):
            if finding.word in cause.explains:
                return [*known, *alike]
        return list(finding.causes)

    def explain(self) -> str:
        """Say it in words.

        Returns
        -------
        text : str
            The answer, a table of ranges of sizes, causes with their evidence, what to try, and what was
            assumed.
        """
        lines = [self.headline(), ""]
        shown = sorted(self.findings, key=rank_finding)[:_MOST_RUNS]
        several = len(self.findings) > 1
        for finding in shown:
            lines += describe_finding(finding, with_file=several)
        if len(shown) < len(self.findings):
            count = format_count(len(self.findings) - len(shown), "more run")
            lines.append(f"and {count}; .table() has them all")
        lines += self._describe_spread()
        for cause in self.causes:
            lines += ["", *describe_cause(cause, self._name_logs(cause))]
        lines += ["", *self._describe_notes(shown)]
        lines += [f"warning: {text}" for text in self.warnings]
        text = "\n".join(lines).rstrip()
        while "\n\n\n" in text:
            text = text.replace("\n\n\n", "\n\n")
        return text

    def __str__(self) -> str:
        return self.explain()

    def __repr__(self) -> str:
        return f"Diagnosis({self.headline()})"

    def sections(self) -> Sections:
        """Parts of a report, see `perfkit.ground.results.Sections`."""
        shown = sorted(self.findings, key=rank_finding)[:_MOST_RUNS]
        yield "", self.chart()
        yield "By sizes", tabulate_findings(shown)
        for cause in self.causes:
            head = name_kind(cause).capitalize()
            yield f"{head}{self._name_logs(cause)}: {cause.sentence}", tabulate_cause(cause)
        spread = self.spread()
        if len(spread):
            yield "Runs beside each other", tabulate_spread(spread)
        thresholds = self.thresholds()
        if len(thresholds):
            yield "Floors of a health check", tabulate_thresholds(thresholds)

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain values, for JSON.

        Returns
        -------
        figures : dict
            verdict, ok, counts (runs of each verdict), answer, runs, causes and warnings.
        """
        runs = []
        for finding in self.findings:
            expectation = finding.case.expectation
            runs.append(
                {
                    "file": finding.case.file,
                    "operation": finding.case.operation,
                    "ranks": finding.case.ranks,
                    "nodes": finding.case.nodes,
                    "system": finding.system,
                    "verdict": finding.word.value,
                    "expected_with": expectation.system,
                    "reason": finding.reason or None,
                    "sizes": [
                        _list_verdict(finding.case, verdict) for verdict in finding.case.verdicts
                    ],
                    "causes": [cause.name for cause in finding.causes],
                }
            )
        return {
            "verdict": self.verdict,
            "ok": self.ok,
            "counts": self.count_words(),
            "answer": self.headline(),
            "runs": runs,
            "causes": [_list_cause(cause) for cause in self.causes],
            "warnings": list(self.warnings),
        }

    @cached_property
    def _logs(self) -> dict[tuple[str, str], list[str]]:
        """Logs of each cause, by its name and sentence."""
        logs: dict[tuple[str, str], list[str]] = {}
        for finding in self.findings:
            for cause in self._explain(finding):
                logs.setdefault((cause.name, cause.sentence), []).append(finding.case.file)
        return logs

    def _name_logs(self, cause: Cause) -> str:
        """Logs that a cause is of, after a comma; empty where there is one log, or for what logs show
        beside each other."""
        if len({finding.case.file for finding in self.findings}) == 1:
            return ""
        return say_logs(self._logs.get((cause.name, cause.sentence), []))

    def _describe_notes(self, shown: Sequence[Finding]) -> list[str]:
        """Lines on what expectations rest on, each once, with its logs where they are not all."""
        logs: dict[str, list[str]] = {}
        for finding in shown:
            for note in list_notes(finding):
                logs.setdefault(note, []).append(finding.case.file)
        every = {finding.case.file for finding in shown}
        lines = []
        for note, files in logs.items():
            of = "" if set(files) == every else say_logs(files).removeprefix(", ") + ": "
            lines.append(f"{of}{note}")
        return lines

    def _describe_spread(self) -> list[str]:
        """Lines on runs of the same operation that differ."""
        lines = []
        for key, frame in self.spread().group_by(
            "system", "operation", "ranks", "nodes", maintain_order=True
        ):
            for row in (frame.row(0, named=True), frame.row(-1, named=True)):
                if row["slowest_s"] > _DIFFER * row["fastest_s"]:
                    lines.append(
                        f"runs differ: {key[1]} of {write_size(row['size_bytes'])} takes "
                        f"{write_microseconds(row['fastest_s'])} to {write_microseconds(row['slowest_s'])} "
                        f"in {row['runs']} runs"
                    )
        return list(dict.fromkeys(lines))


_TABLE: dict[str, Any] = {
    "file": pl.String,
    "operation": pl.String,
    "ranks": pl.Int64,
    "nodes": pl.Int64,
    "sizes": pl.String,
    "from_bytes": pl.Int64,
    "to_bytes": pl.Int64,
    "at_bytes": pl.Int64,
    "measured_s": pl.Float64,
    "expected_s": pl.Float64,
    "low_s": pl.Float64,
    "high_s": pl.Float64,
    "slow_s": pl.Float64,
    "busbw_bytes_per_s": pl.Float64,
    "expected_bytes_per_s": pl.Float64,
    "low_bytes_per_s": pl.Float64,
    "high_bytes_per_s": pl.Float64,
    "slow_bytes_per_s": pl.Float64,
    "link_share": pl.Float64,
    "verdict": pl.String,
}


def list_without_floors(diagnosis: Diagnosis) -> list[str]:
    """List the runs, and the sizes of runs, that give no floors of a health check.

    Parameters
    ----------
    diagnosis : Diagnosis
        The diagnosis.

    Returns
    -------
    lines : list of str
        For each such run its log, its operation and why, in words.
    """
    lines = []
    for finding in diagnosis.findings:
        case = finding.case
        has_floor = case.rows["slow_s"].is_not_null()
        if has_floor.all():
            continue
        reason = finding.reason or "it is not known what to expect"
        if has_floor.any():
            sizes = case.rows.filter(~has_floor)["nbytes"].to_list()
            span = f"{write_size(min(sizes))} to {write_size(max(sizes))}"
            differ = "networks that may join its nodes differ there"
            reason = f"none of {len(set(sizes))} sizes, {span}: {differ}; name a platform"
        lines.append(f"{escape(case.file, 80)}, {case.operation}: {reason}")
    return list(dict.fromkeys(lines))


def _arrange(causes: Sequence[Cause]) -> list[Cause]:
    """Alarms, then causes from the surest on, then remarks."""
    alarms = [cause for cause in causes if cause.name in ALARM_NAMES]
    others = [cause for cause in causes if cause.name not in ALARM_NAMES]
    explaining = [cause for cause in others if cause.explains]
    explaining.sort(key=lambda cause: list(Certainty).index(cause.certainty))
    return [*alarms, *explaining, *(cause for cause in others if not cause.explains)]


def _show_rows(case: Case) -> Table:
    """Rows of a run under the names that people see."""
    rows = case.rows.rename(
        {
            "nbytes": "size_bytes",
            "seconds": "measured_s",
            "busbw": "busbw_bytes_per_s",
            "line_share": "link_share",
        }
    )
    ratio = pl.col("measured_s") / pl.col("expected_s")
    rows = rows.with_columns(
        (pl.col("busbw_bytes_per_s") * ratio).alias("expected_bytes_per_s"),
        pl.col("nodes").cast(pl.Int64),
    )
    names = [
        "file",
        "line",
        "operation",
        "ranks",
        "nodes",
        "dtype",
        "in_place",
        "size_bytes",
        "measured_s",
        "expected_s",
        "low_s",
        "high_s",
        "slow_s",
        "busbw_bytes_per_s",
        "expected_bytes_per_s",
        "link_share",
        "sizes",
        "verdict",
    ]
    return rows.select(names)


def _list_verdict(case: Case, verdict: Verdict) -> dict[str, Any]:
    """A verdict as a row of a table."""
    about = {
        "file": case.file,
        "operation": case.operation,
        "ranks": case.ranks,
        "nodes": case.nodes,
        "sizes": verdict.sizes.value,
        "from_bytes": verdict.smallest,
        "to_bytes": verdict.largest,
        "at_bytes": verdict.nbytes,
    }
    times = {
        "measured_s": verdict.seconds,
        "expected_s": verdict.expected_s,
        "low_s": verdict.low_s,
        "high_s": verdict.high_s,
        "slow_s": verdict.slow_s,
    }
    rates = {
        "busbw_bytes_per_s": verdict.busbw,
        "expected_bytes_per_s": _find_rate(verdict, verdict.expected_s),
        "low_bytes_per_s": _find_rate(verdict, verdict.high_s),
        "high_bytes_per_s": _find_rate(verdict, verdict.low_s),
        "slow_bytes_per_s": _find_rate(verdict, verdict.slow_s),
    }
    said = {"link_share": verdict.line_share, "verdict": verdict.word.value}
    return {**about, **times, **rates, **said}


def _find_rate(verdict: Verdict, seconds: float | None) -> float | None:
    """Bus bandwidth of a time of the size that a verdict names [B/s]; None for no time."""
    return None if not seconds else verdict.busbw * verdict.seconds / seconds


def _list_cause(cause: Cause) -> dict[str, Any]:
    """A cause as plain values."""
    return {
        "name": cause.name,
        "sentence": cause.sentence,
        "certainty": cause.certainty.value,
        "explains": sorted(word.value for word in cause.explains),
        "evidence": [
            {"text": evidence.text, "file": evidence.file, "line": evidence.line}
            for evidence in cause.evidence
        ],
        "advice": list(cause.advice),
        "citations": list(cause.citations),
    }
