"""Signatures of known faults: why a run is slow or too good, with evidence and what to try.

Each signature is a function of a `Case` that gives a `Cause`, or None where it does not fit. They
stand in three lists, in the order of reading. What a line of the log says goes before figures that
have a known rate or shape, and these before figures that merely fit.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import polars as pl

from perfkit.diagnosis import causes_adapters, causes_curve, causes_node, causes_run, causes_sockets
from perfkit.diagnosis.records import Case, Cause, Certainty, Evidence, Range, Word
from perfkit.diagnosis.verdicts import judge_ranges

Signature = Callable[[Case], Cause | None]

#: What must be known before any figure is read.
ALARMS: tuple[Signature, ...] = (
    causes_run.find_wrong_values,
    causes_run.find_separate_runs,
    causes_run.find_shared_names,
)
ALARM_NAMES = frozenset(("wrong values", "separate runs", "shared name"))
#: Why a run is slow or too good, in the order in which equally sure ones are told.
SIGNATURES: tuple[Signature, ...] = (
    causes_run.find_one_machine,
    causes_run.find_shared_nvlink,
    causes_sockets.find_sockets,
    causes_adapters.find_missing_adapter,
    causes_adapters.find_slower_adapter,
    causes_adapters.find_no_gpu_direct,
    causes_node.find_network_within_node,
    causes_node.find_host_memory,
    causes_node.find_unused_nvlink,
    causes_node.find_no_nvlink_sharp,
    causes_curve.find_lost_packets,
    causes_curve.find_worse_algorithm,
    causes_curve.find_late_protocol,
    causes_node.find_few_channels,
    causes_run.find_settings,
    causes_run.find_part_of_mesh,
    causes_curve.find_high_startup,
    causes_sockets.find_wrong_interface,
    causes_adapters.find_few_adapters,
    causes_adapters.find_fewer_rails,
    causes_adapters.find_half_adapters,
    causes_adapters.find_flat_topology,
    causes_run.find_known_faults,
    causes_curve.find_spread,
    causes_run.find_mixed_devices,
    causes_run.find_bound_processes,
    causes_curve.find_unlike_halves,
    causes_run.find_warnings,
)
#: What is left where none of these explains the bandwidth.
FALLBACKS: tuple[Signature, ...] = (causes_node.find_part_of_links,)
#: What is normal though it may look odd.
REMARKS: tuple[Signature, ...] = (
    causes_node.note_multicast_choice,
    causes_adapters.note_few_adapters,
    causes_adapters.note_unknown_rate,
    causes_run.note_settings,
)


def find_causes(case: Case) -> tuple[Cause, ...]:
    """Look for the causes of what a run shows.

    Parameters
    ----------
    case : Case
        The run, with its verdicts.

    Returns
    -------
    causes : tuple of Cause
        Alarms first, then causes, the surest and most telling one first, then remarks. Where
        something is slow or too good and no signature fits, a cause that says so, and what to do.
    """
    alarms = _ask(case, ALARMS)
    causes = [cause for cause in _ask(case, SIGNATURES) if _explains(case, cause)]
    causes.sort(key=_rank)
    causes = _drop_weaker(case, causes)
    if not any(Range.BANDWIDTH in cause.sizes for cause in causes):
        causes += [cause for cause in _ask(case, FALLBACKS) if _explains(case, cause)]
    for word in (Word.SLOW, Word.TOO_GOOD):
        if not any(word in cause.explains for cause in causes):
            unknown = causes_run.explain_unknown(case, word)
            if unknown is not None:
                causes.append(unknown)
    return (*alarms, *_drop_repeated(causes), *_note_facts(case), *_ask(case, REMARKS))


def _drop_repeated(causes: Sequence[Cause]) -> list[Cause]:
    """Leave out what says nothing new: its evidence is that of a surer cause."""
    told: set[Evidence] = set()
    kept = []
    for cause in causes:
        if not cause.evidence or not told.issuperset(cause.evidence):
            kept.append(cause)
        told.update(cause.evidence)
    return kept


def _ask(case: Case, signatures: Sequence[Signature]) -> list[Cause]:
    """Causes of the signatures that fit."""
    answers = [signature(case) for signature in signatures]
    return [answer for answer in answers if answer is not None]


def settle(case: Case) -> Case:
    """Call slow what is low, where the log itself names a cause for it.

    One of ten healthy runs is below an 80 % interval. Where a run is, and a line of its log says what
    would make it so, chance is the weaker explanation.

    Parameters
    ----------
    case : Case
        The run, with its verdicts.

    Returns
    -------
    case : Case
        The same, with verdicts that may have changed.
    """
    low = {verdict.sizes for verdict in case.verdicts if verdict.word is Word.LOW}
    low -= {Range.LATENCY}  # start-ups of healthy machines differ too much for that
    if not low:
        return case
    is_low = pl.col("sizes").is_in(low) & (pl.col("verdict") == Word.LOW.value)
    as_slow_rows = case.rows.with_columns(
        pl.when(is_low).then(pl.lit(Word.SLOW.value)).otherwise("verdict").alias("verdict")
    )
    changed = replace(case, rows=as_slow_rows)
    as_slow = []
    for verdict in judge_ranges(changed):
        is_settled = verdict.word is Word.LOW and verdict.sizes in low
        as_slow.append(replace(verdict, word=Word.SLOW) if is_settled else verdict)
    changed = replace(changed, verdicts=tuple(as_slow))
    for cause in _ask(changed, SIGNATURES):
        is_about = bool(cause.sizes & low) and Word.SLOW in cause.explains
        if is_about and cause.certainty is Certainty.SEEN:
            return changed
    return case


def _note_facts(case: Case) -> list[Cause]:
    """Remarks on what the log itself says would make a run slow, where there is not enough to say
    whether it is; on NVLink SHARP and missing adapters also where it is as expected, as intervals may
    hold both rates."""
    words = {verdict.word for verdict in case.verdicts}
    if words & {Word.SLOW, Word.TOO_GOOD}:
        return []
    signatures: Sequence[Signature] = (
        causes_node.find_no_nvlink_sharp,
        causes_adapters.find_missing_adapter,
    )
    if Word.UNKNOWN in words:
        signatures = SIGNATURES
    as_slow = [replace(verdict, word=Word.SLOW) for verdict in case.verdicts]
    nothing_expected = replace(case.expectation, busbw=None)
    as_slow_case = replace(case, verdicts=tuple(as_slow), expectation=nothing_expected)
    return [
        replace(cause, explains=frozenset())
        for cause in _ask(as_slow_case, signatures)
        if cause.certainty is Certainty.SEEN and Word.SLOW in cause.explains
    ]


def _rank(cause: Cause) -> int:
    """Place of a cause among others; equal ones keep their order."""
    return list(Certainty).index(cause.certainty)


def _explains(case: Case, cause: Cause) -> bool:
    """Whether a cause explains a verdict that the run has, of sizes that it is about."""
    return any(
        verdict.word in cause.explains and verdict.sizes in cause.sizes for verdict in case.verdicts
    )


def _list_slow(case: Case) -> set[Range]:
    """Ranges of sizes that are slow."""
    return {verdict.sizes for verdict in case.verdicts if verdict.word is Word.SLOW}


def _drop_weaker(case: Case, causes: Sequence[Cause]) -> list[Cause]:
    """Leave out what is merely possible where the log itself names a cause for all the same
    sizes."""
    slow = _list_slow(case)
    seen: set[Range] = set()
    for cause in causes:
        if cause.certainty is Certainty.SEEN:
            seen |= cause.sizes
    return [
        cause
        for cause in causes
        if cause.certainty is not Certainty.POSSIBLE or not slow & cause.sizes <= seen
    ]
