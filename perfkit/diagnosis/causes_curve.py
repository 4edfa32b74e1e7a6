"""Signatures in the curve of a run: kinks, late switches, a high start-up, unlike halves, spread."""

import polars as pl

from perfkit.diagnosis.evidence import (
    LARGE_SIZES,
    UNLIKE_RUNS,
    advise_unset,
    is_between_nodes,
    is_slow,
    list_settings,
    name_settings,
    quote,
    quote_settings,
    take_facts,
    write_rate,
    write_size,
)
from perfkit.diagnosis.nccl_variables import Effect
from perfkit.diagnosis.records import Case, Cause, Certainty, Curve, Evidence, Range
from perfkit.diagnosis.shapes import (
    SMALL,
    Kink,
    count_turns,
    find_addition,
    find_kink,
    find_late_switch,
)
from perfkit.ground.units import format_time

#: Halves that differ by more than this are no noise [-]: 0.97 to 1.004 in 26 healthy curves, where in
#: place an all_gather copies less.
_UNLIKE = 1.2
#: Sizes that halves are compared from [B]: below, start-up and noise decide.
_LARGE = 2**20
#: Fewer iterations than that show what happens at the first one [-]; nccl-tests has 20 and 5 to warm up.
_FEW_ITERATIONS = 5
#: Turns of the bandwidth, by a factor of two, that are no change of algorithm [-]: these go one way.
_TURNS = 3


def _describe_choices(case: Case, sizes: tuple[int, int]) -> list[Evidence]:
    """What NCCL chose on both sides of a kink, where the log says so."""
    evidence = []
    for nbytes in sizes:
        choices = take_facts(case).find_choices(case.operation, nbytes)
        if choices:
            first = choices[0]
            text = f"NCCL chose {first.algorithm} with {first.protocol} at {write_size(nbytes)}"
            evidence.append(quote(case, first, text))
    return evidence


def _has_changed(case: Case, sizes: tuple[int, int]) -> bool:
    """Whether the log says that NCCL chose differently on both sides."""
    chosen = []
    for nbytes in sizes:
        choices = take_facts(case).find_choices(case.operation, nbytes)
        if not choices:
            return False
        chosen.append((choices[0].algorithm, choices[0].protocol))
    return chosen[0] != chosen[1]


def find_worse_algorithm(case: Case) -> Cause | None:
    """A size from which on the bandwidth is worse: another algorithm or protocol.

    Evidence: a step to larger messages takes much longer than their bytes, in sizes that are slow
    (likely; seen where NCCL prints that it chose another algorithm or protocol there).

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    cause : Cause or None
        None where it does not fit.
    """
    if not is_slow(case, Range.MIDDLE, Range.BANDWIDTH):
        return None
    curve = case.curve
    kink = find_kink(curve.nbytes, curve.busbw)
    if find_lost_packets(case) is not None:
        return None
    if kink is None or not curve.slow[curve.nbytes == kink.after].any():
        return None
    if kink.is_single:
        return _explain_single(case, curve, kink)
    sizes = (kink.before, kink.after)
    growth = kink.after / kink.before
    line = int(curve.lines[curve.nbytes == kink.after][0])
    text = (
        f"{write_rate(kink.rate_before)} at {write_size(kink.before)}, {write_rate(kink.rate_after)} at "
        f"{write_size(kink.after)}: {growth:.3g} times the bytes take {kink.growth:.1f} times as long"
    )
    evidence = [Evidence(text, case.file, line)]
    if kink.recovers:
        text = f"{kink.sizes} sizes are slower, larger ones are as fast as before"
    else:
        text = f"no larger size is as fast: {write_rate(kink.best_after)} at best"
    evidence.append(Evidence(text, case.file))
    evidence += _describe_choices(case, sizes)
    settings = list_settings(case, Effect.FORCED)
    evidence += quote_settings(case, settings)
    is_stated = _has_changed(case, sizes)
    which = "which one, the log does not say" if not is_stated else "as NCCL prints"
    advice = []
    if settings:
        advice.append(advise_unset(settings))
    if not is_stated:
        advice.append(
            "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING prints what NCCL chooses for each size"
        )
    advice += [
        "the same test with NCCL_ALGO=Ring, Tree and NVLSTree, and NCCL_PROTO=Simple: which one is fast?",
        "without tuner plugins (NCCL_TUNER_PLUGIN=none), and with another version of NCCL",
    ]
    if any(each.fabric == "RoCE" for each in take_facts(case).adapters):
        advice.append(
            "flow control of the switches (PFC, ECN): RoCE breaks down at large messages without"
        )
    return Cause(
        "worse algorithm",
        f"from {write_size(kink.after)} on a worse algorithm or protocol is used; {which}",
        tuple(evidence),
        tuple(advice),
        (
            "NVIDIA/nccl#1453",
            "NVIDIA/nccl#1368",
            "NVIDIA/nccl#1876",
            "NVIDIA/nccl#2035",
            "aws/aws-ofi-nccl#65",
        ),
        Certainty.SEEN if is_stated else Certainty.LIKELY,
        sizes=LARGE_SIZES,
    )


def _explain_single(case: Case, curve: Curve, kink: Kink) -> Cause:
    """One size that stands out."""
    line = int(curve.lines[curve.nbytes == kink.after][0])
    text = (
        f"{write_rate(kink.rate_after)} at {write_size(kink.after)}, between "
        f"{write_rate(kink.rate_before)} below and {write_rate(kink.best_after)} above"
    )
    return Cause(
        "single size",
        f"one size alone is slow, {write_size(kink.after)}: a disturbance, or a choice of NCCL for it",
        (Evidence(text, case.file, line), *_describe_choices(case, (kink.before, kink.after))),
        (
            "run again, with more iterations (-n 100): does the same size stand out?",
            "if so, NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING prints what NCCL chooses for it",
        ),
        ("NVIDIA/nccl#307",),
        Certainty.POSSIBLE,
        sizes=LARGE_SIZES,
    )


def find_lost_packets(case: Case) -> Cause | None:
    """A network that loses packets: bandwidth that breaks down and comes back from size to size.

    Evidence: between nodes, the bandwidth of large messages falls to half or less and doubles again, in
    turns (likely with RoCE adapters, else possible). A link alone gives larger messages no less.

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    cause : Cause or None
        None where it does not fit.
    """
    if not is_between_nodes(case) or not is_slow(case, Range.MIDDLE, Range.BANDWIDTH):
        return None
    curve = case.curve
    if not curve.slow[curve.nbytes >= _LARGE].any():
        return None
    half = _find_restless_half(case)
    rates = half["busbw"].to_numpy()
    turns = count_turns(rates)
    if turns < _TURNS:
        return None
    facts = take_facts(case)
    roce = [adapter for adapter in facts.adapters if adapter.fabric == "RoCE"]
    lowest = int(rates.argmin())
    line = int(half["line"][lowest])
    text = (
        f"from {write_size(_LARGE)} on the bandwidth halves and doubles {turns} times: "
        f"{write_rate(float(rates.min()))} to {write_rate(float(rates.max()))}"
    )
    evidence = [Evidence(text, case.file, line)]
    if roce:
        evidence.append(quote(case, roce[0], f"{roce[0].name} is a RoCE adapter"))
    return Cause(
        "lost packets",
        "the bandwidth breaks down and comes back, as where a network loses packets",
        tuple(evidence),
        (
            "flow control of adapters and switches, the same on all of them: PFC for the class of RoCE, ECN",
            "counters of the adapters and switch ports: discards, pause frames, retransmissions",
            "MTU alike everywhere; other traffic on the same links",
        ),
        ("NVIDIA/nccl#378", "NVIDIA/nccl#709"),
        Certainty.LIKELY if roce else Certainty.POSSIBLE,
        sizes=LARGE_SIZES,
    )


def _find_restless_half(case: Case) -> pl.DataFrame:
    """Large messages in place or out of place, by size: those whose bandwidth turns more often, as a size
    may lose packets in one half alone."""
    rows = case.rows.filter((pl.col("nbytes") >= _LARGE) & (pl.col("seconds") > 0)).sort("nbytes")
    halves = rows.partition_by("in_place", maintain_order=True)
    return max(halves, key=lambda each: count_turns(each["busbw"].to_numpy()), default=rows)


def find_late_protocol(case: Case) -> Cause | None:
    """Small messages that keep a protocol for too long.

    Evidence: a larger message takes less time than a smaller one, which is slow (likely).

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    cause : Cause or None
        None where it does not fit.
    """
    if not is_slow(case, Range.MIDDLE, Range.BANDWIDTH):
        return None
    curve = case.curve
    switch = find_late_switch(curve.nbytes, curve.seconds)
    if switch is None or not curve.slow[curve.nbytes == switch.before].any():
        return None
    line = int(curve.lines[curve.nbytes == switch.before][0])
    text = (
        f"{format_time(switch.time_before)} at {write_size(switch.before)}, "
        f"{format_time(switch.time_after)} at {write_size(switch.after)}: more bytes take less time"
    )
    evidence = [Evidence(text, case.file, line)]
    evidence += _describe_choices(case, (switch.before, switch.after))
    settings = list_settings(case, Effect.FORCED)
    evidence += quote_settings(case, settings)
    advice = []
    if settings:
        advice.append(advise_unset(settings))
    advice += [
        "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING prints what NCCL chooses for each size",
        "the same test with NCCL_PROTO=Simple and NCCL_PROTO=^LL: are the smaller sizes faster?",
        "another version of NCCL or of the network plugin, whose thresholds differ",
    ]
    return Cause(
        "late switch",
        f"up to {write_size(switch.before)} a protocol or algorithm for small messages is kept too long",
        tuple(evidence),
        tuple(advice),
        ("NVIDIA/nccl#1291", "NVIDIA/nccl#281"),
        Certainty.LIKELY,
        sizes=frozenset((Range.MIDDLE,)),
    )


def find_high_startup(case: Case) -> Cause | None:
    """A start-up that is too high, outside of the links.

    Evidence: small messages are slow and the largest ones are not, and the same time is added up to
    middle sizes (likely that it is the host; not enough to say what of it).

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    cause : Cause or None
        None where it does not fit.
    """
    if not is_slow(case, Range.LATENCY):
        return None
    curve = case.curve
    addition = find_addition(curve.nbytes, curve.seconds, curve.expected)
    if addition is None:
        return None
    first = Evidence(
        f"{format_time(addition.measured)} for small messages, where {format_time(addition.expected)} are "
        f"expected: {addition.measured / addition.expected:.2g} times",
        case.file,
        int(curve.lines[0]),
    )
    evidence = [first]
    reach = "to small messages"
    if addition.largest_constant > SMALL:
        reach = f"to all sizes up to {write_size(addition.largest_constant)}"
        text = (
            f"about the same {format_time(addition.extra)} are added up to "
            f"{write_size(addition.largest_constant)}"
        )
        if addition.largest_constant < curve.nbytes[-1]:
            text += "; of larger sizes it is too small a share to be seen, or not the same"
        evidence.append(Evidence(text, case.file))
    is_alone = not is_slow(case, Range.BANDWIDTH)
    bandwidth = case.find(Range.BANDWIDTH)
    if is_alone and bandwidth is not None:
        text = f"{write_rate(float(curve.busbw[-1]))} at {write_size(curve.nbytes[-1])} are right"
        evidence.append(Evidence(f"the links are not it: {text}", case.file, int(curve.lines[-1])))
    settings = list_settings(case, Effect.SLOW_HOST, Effect.FORCED)
    evidence += quote_settings(case, settings)
    sentence = f"the host adds a constant time {reach}; not enough to say which part"
    advice = []
    options = take_facts(case).options
    if settings:
        names = name_settings(settings)
        sentence = f"the host adds a constant time {reach}; {names} may do that"
        advice.append(advise_unset(settings))
    elif options is not None and (options.warmup == 0 or options.iterations < _FEW_ITERATIONS):
        text = f"{options.warmup} iterations to warm up, {options.iterations} that are timed"
        evidence.append(quote(case, options, text))
        sentence = (
            "too few iterations: what happens once, at the first operation, counts in every time"
        )
        advice.append("run with -w 5 -n 20, as nccl-tests does by itself")
    advice += [
        "-G 1 replays a CUDA graph: if the time falls, launches by the host are slow",
        "on a machine of your own: performance governor and no deep idle states of the processor "
        "(cpupower frequency-set -g performance, cpupower idle-set -D 2)",
        "in a virtual machine (systemd-detect-virt) the host decides of those: ask who runs it for virtual "
        "processors pinned to cores of their own, beside the GPUs, and for their idle states (halt polling)",
        "processes bound to enough cores beside their GPU; no other load",
        "NCCL_DEBUG=INFO: is a protocol off (NCCL_PROTO), is NCCL_DEBUG=TRACE or NCCL_CHECK_POINTERS on?",
    ]
    if case.nodes is not None and case.nodes > 1:
        advice.append(
            "ib_write_lat (or fi_pingpong) between the nodes: is the network itself slow?"
        )
    return Cause(
        "high start-up",
        sentence,
        tuple(evidence),
        tuple(advice),
        ("NVIDIA/nccl#182", "NVIDIA/nccl-tests#183", "NVIDIA/nccl#2441"),
        Certainty.LIKELY if is_alone else Certainty.POSSIBLE,
        sizes=frozenset((Range.LATENCY, Range.MIDDLE)),
    )


def find_unlike_halves(case: Case) -> Cause | None:
    """Operations in place and out of place that differ.

    Evidence: medians over sizes of 1 MiB and more differ by a fifth or more (likely).

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    cause : Cause or None
        None where it does not fit.
    """
    if not is_slow(case, Range.MIDDLE, Range.BANDWIDTH):
        return None
    times = (
        case.rows.filter((pl.col("nbytes") >= _LARGE) & (pl.col("seconds") > 0))
        .group_by("nbytes")
        .agg(
            pl.col("seconds").filter(pl.col("in_place")).median().alias("in_place"),
            pl.col("seconds").filter(~pl.col("in_place")).median().alias("out_of_place"),
        )
        .drop_nulls()
        .sort("nbytes")
    )
    ratio = (times["out_of_place"] / times["in_place"]).median()
    if times.height < 3 or not isinstance(ratio, float) or 1 / _UNLIKE < ratio < _UNLIKE:
        return None
    slower = "out of place" if ratio > 1 else "in place"
    factor = max(ratio, 1 / ratio)
    text = f"{slower} takes {factor:.2f} times as long, in the median of {times.height} sizes from 1 MiB on"
    return Cause(
        "unlike halves",
        f"operations {slower} are slower than the others; the links are the same",
        (Evidence(text, case.file),),
        (
            "run again: the second half comes after the first, so a change during the run looks the same",
            "more iterations to warm up (-w 20), and power and clocks of the GPUs during the run "
            "(nvidia-smi dmon)",
            "judge the half that your program uses: most frameworks reduce in place",
        ),
        ("NVIDIA/nccl-tests#104",),
        Certainty.LIKELY,
        sizes=LARGE_SIZES,
    )


def find_spread(case: Case) -> Cause | None:
    """Repeats of the same size that differ.

    Evidence: the slowest repeat of a size takes 1.3 times as long as the fastest, in a third of the
    sizes or more (likely).

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    cause : Cause or None
        None where it does not fit.
    """
    if not is_slow(case):
        return None
    repeats = (
        case.rows.filter(pl.col("seconds") > 0)
        .group_by("nbytes", "in_place")
        .agg(
            pl.len().alias("count"),
            pl.col("seconds").min().alias("fastest"),
            pl.col("seconds").max().alias("slowest"),
            pl.col("line").min(),
        )
        .filter(pl.col("count") > 1)
        .with_columns((pl.col("slowest") / pl.col("fastest")).alias("ratio"))
        .sort("ratio", "nbytes", descending=[True, False])
    )
    unlike = repeats.filter(pl.col("ratio") > UNLIKE_RUNS)
    if not unlike.height or unlike.height < repeats.height / 3:
        return None
    worst = unlike.row(0, named=True)
    text = (
        f"{worst['count']} runs of {write_size(worst['nbytes'])} take {format_time(worst['fastest'])} to "
        f"{format_time(worst['slowest'])}"
    )
    evidence = (
        Evidence(text, case.file, worst["line"]),
        Evidence(f"{unlike.height} of {repeats.height} sizes differ by 30 % or more", case.file),
    )
    return Cause(
        "spread",
        "runs of the same size differ: something comes and goes, such as other load, a shared network, or "
        "one bad node",
        evidence,
        (
            "the same test on pairs of nodes: one bad node makes all its pairs slow",
            "other jobs on the same nodes or switches; adaptive routing and flow control (RoCE)",
            "clocks and power of the GPUs during the run (nvidia-smi -q -d PERFORMANCE)",
        ),
        ("NVIDIA/nccl-tests#106", "NVIDIA/nccl-tests#283", "NVIDIA/nccl#378"),
        Certainty.LIKELY,
    )
