"""Signatures of the run itself: wrong results, runs apart, one machine, settings, processes, devices."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from perfkit.diagnosis.causes_node import has_multicast, note_multicast_choice
from perfkit.diagnosis.evidence import (
    LARGE_SIZES,
    Plateau,
    advise_unset,
    describe_largest,
    describe_plateau,
    find_plateau,
    is_slow,
    is_too_good,
    join_names,
    list_settings,
    name_settings,
    quote,
    quote_settings,
    take_facts,
    write_rate,
    write_size,
)
from perfkit.diagnosis.nccl_variables import GUIDE, Effect, find_variables
from perfkit.diagnosis.records import Case, Cause, Certainty, Evidence, Range, Word
from perfkit.diagnosis.words import write_rates
from perfkit.ground.units import format_time
from perfkit.readers.log_facts import Setting, Statement

_REMARK = frozenset[Word]()
_PROCESSES = re.compile(r"(?:^|\s)(?:-np|--np|-n|-c|--ntasks)[ =](\d{1,6})\b")
_GPUS = re.compile(r"\s(?:-g|--ngpus)[ =]?(\d{1,4})\b")
_THREADS = re.compile(r"\s(?:-t|--nthreads)[ =]?(\d{1,4})\b")
_LAUNCHER = re.compile(r"\b(?:mpirun|mpiexec|orterun|srun|prterun)\b")
_BOUND = re.compile(
    r"-{1,2}bind-to[ =](?:core|hwthread)\b|--cpus-per-task[ =]1\b|--cpu-bind[ =]\S*core\S*"
)
#: A process of NCCL needs cores for its main, proxy and service threads [-].
_FEW_CORES = 2
#: GPUs that AMD joins pairwise, each with a link to every other of eight.
_MESH = re.compile(r"\bMI(?:300|308|325|350|355)\w*")
#: What one of these links gives, of 64 GB/s: ROCm blog of 2025-03-02 on RCCL and xGMI of MI300X [B/s].
_OF_MESH_LINK = 48e9
#: Share of these links that is no fault [-]: a choice, as no rate of fewer than eight was found.
_OF_MESH_LINKS = 0.6
#: GPUs of racks whose nodes share NVLink.
_RACK = re.compile(r"\bGB[23]00\b")
#: Most GPUs of one machine whose buses are compared [-]: HGX boards have up to 16.
_ONE_BOARD = 16


# -- results, and what ran
# --------------------------------------------------------------------------------------------------


def find_wrong_values(case: Case) -> Cause | None:
    """Results with wrong values, whatever the times.

    Evidence: rows whose column #wrong is above 0 (seen).

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    remark : Cause or None
        None where all results are right, or were not checked.
    """
    if not take_facts(case).wrong_lines:
        return None
    lines = take_facts(case).wrong_lines
    text = f"{len(lines)} results hold wrong values, the first in this line"
    evidence = [Evidence(text, case.file, lines[0])]
    protocols = [
        setting
        for setting in take_facts(case).find_settings("NCCL_PROTO")
        if "LL128" in setting.value and not setting.value.startswith("^")
    ]
    advice = []
    if protocols:
        evidence += quote_settings(case, protocols)
        advice.append(
            "unset NCCL_PROTO: LL128 forced where NCCL would not use it may corrupt data without a word"
        )
    advice += [
        "trust no time and no result of this system until the values are right",
        "the same test with NCCL_P2P_DISABLE=1, with NCCL_SHM_DISABLE=1, and with NCCL_PROTO=Simple: which "
        "way is wrong?",
        "IOMMU and ACS off where GPUs copy to each other over PCIe; nvidia-smi -q for errors of memory and "
        "links; pairs of GPUs and of nodes to find the bad one",
        "another version of NCCL and of the network plugin",
    ]
    return Cause(
        "wrong values",
        "results are wrong: this is worse than any bandwidth",
        tuple(evidence),
        tuple(advice),
        (
            "NVIDIA/nccl-tests#131",
            "NVIDIA/nccl-tests#167",
            "NVIDIA/nccl#1199",
            "NVIDIA/nccl#1261",
            "NVIDIA/nccl#2001",
        ),
        Certainty.SEEN,
        _REMARK,
    )


def find_separate_runs(case: Case) -> Cause | None:
    """Processes that each ran alone, as nccl-tests without MPI does.

    Evidence: the command starts more ranks than the table has, by a whole number (seen).

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    remark : Cause or None
        None where it is not so.
    """
    command = take_facts(case).command
    if command is None:
        return None
    launched, _, options = command.text.partition("_perf")
    launcher = _LAUNCHER.search(launched)
    processes = _PROCESSES.search(launched[launcher.end() :]) if launcher is not None else None
    if processes is None:
        return None
    gpus = _GPUS.search(options)
    threads = _THREADS.search(options)
    of_process = (int(gpus[1]) if gpus else 1) * (int(threads[1]) if threads else 1)
    started = int(processes[1]) * of_process
    if case.ranks != of_process or started <= case.ranks:
        return None
    text = f"{processes[1]} processes are started, the table has the {case.ranks} ranks of one"
    return Cause(
        "separate runs",
        "each process ran alone: this is no run of all of them together",
        (quote(case, command, text),),
        (
            "build nccl-tests with MPI=1 (and MPI_HOME), after make clean; ldd all_reduce_perf | grep mpi",
            "the mpirun that starts it must be of the MPI that it was built with",
        ),
        ("NVIDIA/nccl-tests#27", "NVIDIA/nccl-tests#213"),
        Certainty.SEEN,
        _REMARK,
    )


class _Board(NamedTuple):
    """GPUs of several hosts that may be one machine."""

    buses: int  # different PCI addresses [-]
    text: str  # the addresses by host


def _find_board(case: Case) -> _Board | None:
    """PCI addresses that do not overlap between hosts, as those of one machine; None where they
    do."""
    by_host = take_facts(case).buses
    listed = [bus for buses in by_host.values() for bus in buses]
    is_whole = len(listed) == case.ranks and len(by_host) > 1
    if not is_whole or len(set(listed)) < len(listed) or len(listed) > _ONE_BOARD:
        return None
    text = "; ".join(f"{host} {' '.join(buses)}" for host, buses in list(by_host.items())[:4])
    return _Board(len(listed), text)


def find_one_machine(case: Case) -> Cause | None:
    """Nodes by name that are one machine, such as two containers of it.

    Evidence: the rate is too good, and NCCL counts one node, or lists no connection over a network
    (seen), or PCI addresses do not overlap between the hosts (likely). Systems whose nodes share
    NVLink (MNNVL) are none.

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    cause : Cause or None
        None where it does not fit.
    """
    if case.nodes is None or case.nodes < 2 or not is_too_good(case):
        return None
    if any(remark.topic == "MNNVL" for remark in take_facts(case).remarks):
        return None
    evidence = []
    certainty = None
    if take_facts(case).nodes == 1 and take_facts(case).ranks == case.ranks:
        certainty = Certainty.SEEN
        evidence.append(
            Evidence(f"NCCL counts 1 node, the list of devices {case.nodes} hosts", case.file)
        )
    transports = take_facts(case).transports
    if transports and all(each.way in ("P2P", "SHM") for each in transports):
        certainty = Certainty.SEEN
        text = f"all connections are {transports[0].name}, none passes a network"
        evidence.append(quote(case, transports[0], text))
    board = _find_board(case)
    if board is not None:
        certainty = certainty or Certainty.LIKELY
        text = (
            f"PCI addresses of the hosts do not overlap, together they are one board: {board.text}"
        )
        evidence.append(quote(case, take_facts(case).places[0], text))
    if certainty is None:
        return None
    plateau = find_plateau(case)
    if plateau is not None:
        evidence.append(_compare_limit(case, plateau))
    verb = "are" if certainty is Certainty.SEEN else "seem to be"
    apart = "one pod per node: anti-affinity, or as many GPUs per pod as a node has"
    expectation = case.expectation
    if expectation.busbw_low is not None and expectation.busbw_high is not None:
        rates = write_rates(expectation.busbw_low, expectation.busbw_high)
        apart += f"; between nodes {rates} are expected with {expectation.system}"
    return Cause(
        "one machine",
        f"the {case.nodes} hosts {verb} containers or names of one machine: no network was measured",
        tuple(evidence),
        (
            "print the name of the node from each container (in Kubernetes: spec.nodeName by the downward "
            "API)",
            'NCCL_DEBUG=INFO: "via P2P" between ranks of different hosts says the same',
            apart,
        ),
        ("NVIDIA/nccl#1781",),
        certainty,
        frozenset((Word.TOO_GOOD,)),
    )


def _compare_limit(case: Case, plateau: Plateau) -> Evidence:
    """The largest size beside what no run on these links can exceed."""
    expectation = case.expectation
    data = write_rate(plateau.algbw)
    text = f"{write_rate(plateau.busbw)} at {write_size(plateau.nbytes)} ({data} of data)"
    if expectation.limit is not None and plateau.busbw > expectation.limit:
        data = write_rate(expectation.limit * plateau.algbw / plateau.busbw)
        text += f" are more than {write_rate(expectation.limit)} ({data} of data)"
        if expectation.limit_links:
            text += f", which {expectation.limit_links} carry at most"
    return Evidence(text, case.file, plateau.line)


def find_shared_names(case: Case) -> Cause | None:
    """Machines that bear one name, and so look like one node.

    Evidence: NCCL counts more nodes than the list of devices has hosts (seen), or the list of one host
    has every GPU twice or more (likely). One GPU cannot be two ranks of NCCL.

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    remark : Cause or None
        None where it is not so.
    """
    facts = take_facts(case)
    if case.nodes != 1 or not facts.places:
        return None
    evidence = []
    certainty = None
    if facts.nodes is not None and facts.nodes > 1 and facts.ranks == case.ranks:
        certainty = Certainty.SEEN
        evidence.append(
            Evidence(f"NCCL counts {facts.nodes} nodes, the list of devices 1 host", case.file)
        )
    repeats = _count_repeats([f"{place.device} {place.bus}" for place in facts.places])
    if repeats > 1 and all(place.bus for place in facts.places):
        certainty = certainty or Certainty.LIKELY
        text = f"{facts.places[0].host} lists the same {case.ranks // repeats} GPUs {repeats} times"
        evidence.append(quote(case, facts.places[0], text))
    if certainty is None:
        return None
    return Cause(
        "shared name",
        "several machines have the same host name: what is expected of one node does not hold",
        tuple(evidence),
        ("give each machine or container a name of its own (hostname), and run again",),
        ("NVIDIA/nccl#187", "modal-labs/modal-client#2332"),
        certainty,
        _REMARK,
    )


def _count_repeats(names: Sequence[str]) -> int:
    """How often a list repeats its first part; 1 where it does not."""
    for repeats in range(len(names) // 2, 1, -1):
        part = len(names) // repeats
        is_whole = part * repeats == len(names)
        if is_whole and list(names) == repeats * list(names[:part]):
            return repeats
    return 1


def find_shared_nvlink(case: Case) -> Cause | None:
    """Nodes that share NVLink, such as those of an NVL72 rack: more than adapters carry is right.

    Evidence: NCCL says MNNVL (seen), or the devices are those of such racks (likely).

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    cause : Cause or None
        None where it does not fit.
    """
    if case.nodes is None or case.nodes < 2 or not is_too_good(case):
        return None
    said = [remark for remark in take_facts(case).remarks if remark.topic == "MNNVL"]
    device = case.expectation.device or ""
    if not said and not _RACK.search(device):
        return None
    evidence = [quote(case, said[0], "NCCL joins the nodes by NVLink (MNNVL)")] if said else []
    if not said:
        evidence.append(Evidence(f"{device}: racks of these share NVLink between nodes", case.file))
    evidence += describe_largest(case)
    return Cause(
        "shared NVLink",
        "the nodes share NVLink, so their adapters do not bound them: this is right, and no network was "
        "measured",
        tuple(evidence),
        ("NCCL_MNNVL_ENABLE=0 measures the network between these nodes",),
        ("coreweave/nccl-tests#43",),
        Certainty.SEEN if said else Certainty.LIKELY,
        frozenset((Word.TOO_GOOD,)),
    )


class _Fault(NamedTuple):
    """A fault of some versions of NCCL that was published; others may have it, too."""

    device: re.Pattern[str]
    first: tuple[int, ...]  # first version that is said to have it
    fixed: tuple[int, ...]  # first version of which nobody says so
    operation: str
    nodes: int  # from so many on [-]
    sentence: str
    advice: str
    citation: str


_FAULTS = (
    _Fault(
        re.compile(r"B300"),
        (2, 29),
        (2, 30, 3),
        "all_reduce",
        4,
        "NVLSTree gives 200 GB/s on four nodes and more, where rings give 760",
        "NCCL_ALGO=Ring, or NCCL 2.30.3",
        "NVIDIA/nccl#2035",
    ),
    _Fault(
        re.compile(r"H100|H800|H200"),
        (2, 19, 3),
        (2, 20),
        "all_reduce",
        8,
        "NVLSTree cuts messages into chunks of 64 KiB on many nodes: 104 GB/s, where 280 were before",
        "NCCL_ALGO=^NVLSTree, or another version",
        "NVIDIA/nccl#1112",
    ),
)


def find_known_faults(case: Case) -> Cause | None:
    """Faults of some versions of NCCL that others have published.

    Evidence: the version that the log names, with device, operation and number of nodes (possible).

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    cause : Cause or None
        None where none is known.
    """
    facts = take_facts(case)
    version = _read_version(facts.version)
    if version is None or facts.library == "RCCL" or not is_slow(case, Range.BANDWIDTH):
        return None
    device = case.expectation.device or ""
    for fault in _FAULTS:
        is_affected = fault.first <= version < fault.fixed and fault.device.search(device)
        is_alike = fault.operation == case.operation and (case.nodes or 0) >= fault.nodes
        if is_affected and is_alike and case.expectation.algorithm is None:
            evidence = quote(case, facts.versions[0], f"NCCL {facts.version}")
            return Cause(
                "known fault",
                f"this version of NCCL has a known fault: {fault.sentence}",
                (evidence,),
                (fault.advice,),
                (fault.citation,),
                Certainty.POSSIBLE,
                sizes=LARGE_SIZES,
            )
    return None


def _read_version(text: str | None) -> tuple[int, ...] | None:
    """A version as numbers; None for none."""
    if text is None or not re.fullmatch(r"\d+(?:\.\d+)*", text):
        return None
    return tuple(int(part) for part in text.split("."))


# -- settings
# --------------------------------------------------------------------------------------------------

_SUSPECTS = (
    Effect.FORCED,
    Effect.FEWER_CHANNELS,
    Effect.NO_MULTICAST,
    Effect.NO_SHARED_MEMORY,
    Effect.LIMITED,
)
_NOTED = (
    Effect.FORCED,
    Effect.FEWER_CHANNELS,
    Effect.NO_PEERS,
    Effect.NO_ADAPTERS,
    Effect.NO_GPU_DIRECT,
    Effect.NO_SHARED_MEMORY,
)


def find_settings(case: Case) -> Cause | None:
    """Variables that take a way of the data, or a choice, from NCCL.

    Evidence: NCCL lists them, or the command sets them. That they make the run slow is likely where
    they name an algorithm, a protocol or fewer channels, else possible. An algorithm that the
    expectation takes into account is none of them.

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    cause : Cause or None
        None where none is set, or nothing is slow.
    """
    if not is_slow(case):
        return None
    settings = [
        setting
        for setting in list_settings(case, *_SUSPECTS)
        if setting.name != "NCCL_ALGO" or case.expectation.algorithm is None
    ]
    if not settings:
        return None
    strong = list_settings(case, Effect.FORCED, Effect.FEWER_CHANNELS, Effect.NO_MULTICAST)
    is_strong = any(setting in strong for setting in settings)
    names = name_settings(settings)
    verb = "is" if len(settings) == 1 else "are"
    return Cause(
        "settings",
        f"{names} {verb} set: {_say_effects(settings)}",
        tuple(quote_settings(case, settings)),
        (
            f"{advise_unset(settings)} and compare: what is fast "
            "for one size, operation or version is slow for another",
        ),
        (*_list_citations(settings), GUIDE),
        Certainty.LIKELY if is_strong else Certainty.POSSIBLE,
    )


def _say_effects(settings: Sequence[Setting]) -> str:
    """What settings take from NCCL, each effect once."""
    effects: dict[str, None] = {}
    for setting in settings:
        for variable in find_variables(setting.name, setting.value):
            effects[variable.effect.value] = None
    return ", ".join(effects)


def _list_citations(settings: Sequence[Setting]) -> list[str]:
    """Public cases of settings, each once."""
    cited: dict[str, None] = {}
    for setting in settings:
        for variable in find_variables(setting.name, setting.value):
            cited |= dict.fromkeys(variable.citations)
    return list(cited)


def note_settings(case: Case) -> Cause | None:
    """A remark on variables that decide for NCCL, in a run that is not slow.

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    remark : Cause or None
        None where none is set, where the run is slow, or where it is said otherwise.
    """
    if is_slow(case) or note_multicast_choice(case) is not None:
        return None
    noted = (*_NOTED, Effect.NO_MULTICAST) if has_multicast(case) else _NOTED
    settings = list_settings(case, *noted)
    if not settings:
        return None
    names = name_settings(settings)
    verb = "is" if len(settings) == 1 else "are"
    return Cause(
        "settings",
        f"{names} {verb} set: figures hold for this choice, not for what NCCL would choose",
        tuple(quote_settings(case, settings)),
        ("unset it where it is not meant",),
        (GUIDE,),
        Certainty.SEEN,
        _REMARK,
    )


# -- processes, devices, warnings
# --------------------------------------------------------------------------------------------------


def find_bound_processes(case: Case) -> Cause | None:
    """Processes that are bound to too few cores.

    Evidence: the command binds each to a core, or NCCL sets the affinity to two cores or fewer; and
    small or middle messages are slow, or the network is served by the processor (possible; likely
    where NCCL prints the cores).

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
    evidence = []
    certainty = Certainty.POSSIBLE
    command = take_facts(case).command
    if command is not None:
        bound = _BOUND.search(command.text)
        if bound is not None:
            evidence.append(quote(case, command, f"the command binds processes: {bound[0]}"))
    for affinity in take_facts(case).affinities:
        if affinity.cores <= _FEW_CORES:
            certainty = Certainty.LIKELY
            text = f"{affinity.cores} cores for a process: {affinity.text}"
            evidence.append(quote(case, affinity, text))
            break
    if not evidence:
        return None
    return Cause(
        "few cores",
        "processes are bound to one or two cores, which their threads for the network share",
        tuple(evidence),
        (
            "mpirun --bind-to none or --bind-to numa, srun --cpus-per-task=8 or more, and compare",
            "NCCL_IGNORE_CPU_AFFINITY=1 shows whether the binding is it",
        ),
        ("NVIDIA/nccl#644", "NVIDIA/nccl-tests#57"),
        certainty,
    )


def find_mixed_devices(case: Case) -> Cause | None:
    """GPUs of several kinds in one run.

    Evidence: the list of devices (seen); that they make it slow is likely.

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
    kinds: dict[str, int] = {}
    for place in take_facts(case).places:
        if place.name:
            kinds[place.name] = kinds.get(place.name, 0) + 1
    if len(kinds) < 2:
        return None
    listed = join_names(f"{count} × {name}" for name, count in kinds.items())
    other = next(place for place in take_facts(case).places if place.name != next(iter(kinds)))
    return Cause(
        "mixed devices",
        f"GPUs of {len(kinds)} kinds take part: the slowest sets the pace, and kinds cannot always copy to "
        "each other",
        (quote(case, other, listed),),
        ("test each kind alone (CUDA_VISIBLE_DEVICES, or hosts of one kind)",),
        ("NVIDIA/nccl-tests#131", "aikitoria/open-gpu-kernel-modules#5"),
        Certainty.LIKELY,
    )


def find_part_of_mesh(case: Case) -> Cause | None:
    """Fewer than eight GPUs of boards whose GPUs are joined pairwise.

    Evidence: the device and the number of ranks (seen), and a rate of 60 % or more of what the n - 1 links
    of each give. It is no fault.

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    cause : Cause or None
        None where it does not fit.
    """
    device = case.expectation.device or ""
    if case.nodes != 1 or not 1 < case.ranks < 8 or not _MESH.search(device):
        return None
    plateau = find_plateau(case)
    if plateau is None or not is_slow(case, Range.BANDWIDTH):
        return None
    links = (case.ranks - 1) * _OF_MESH_LINK
    if plateau.busbw < _OF_MESH_LINKS * links:
        return None
    text = (
        f"{case.ranks} of 8 {device}: {case.ranks - 1} of 7 links of each are used, which give about "
        f"{write_rate(links)}"
    )
    return Cause(
        "part of a mesh",
        f"{case.ranks} of eight GPUs use a part of their links: each pair has its own, so this is no fault",
        (Evidence(text, case.file), describe_plateau(case, plateau)),
        (
            "run on all eight to judge the board",
            "for fewer, NCCL_MIN_NCHANNELS=32 and other hints of RCCL's README",
        ),
        (
            "ROCm/rccl#1270",
            "https://rocm.blogs.amd.com/software-tools-optimization/mi300x-rccl-xgmi/",
        ),
        Certainty.SEEN,
    )


class _Warning(NamedTuple):
    """A warning of NCCL or RCCL that explains slow runs."""

    pattern: re.Pattern[str]
    sentence: str
    advice: tuple[str, ...]
    citations: tuple[str, ...]
    certainty: Certainty


_WARNINGS = (
    _Warning(
        re.compile(r"NUMA auto balancing"),
        "the kernel moves memory between NUMA nodes while RCCL runs",
        ("sysctl kernel.numa_balancing=0",),
        ("ROCm/rccl, src/init.cc", "ROCm/legacy-rocm-build#3416"),
        Certainty.LIKELY,
    ),
    _Warning(
        re.compile(r"iommu=pt"),
        "the IOMMU translates every access between devices",
        ("iommu=pt on the command line of the kernel",),
        ("ROCm/rccl, src/init.cc",),
        Certainty.POSSIBLE,
    ),
    _Warning(
        re.compile(r"nvls\.cc.*(?:Cuda failure|CUDA failure)|nvlsAllocateMem"),
        "NVLink SHARP could not be set up",
        ("reset the GPUs after the fabric manager was restarted, or reboot",),
        ("NVIDIA/nccl#1488", "NVIDIA/nccl#1562"),
        Certainty.LIKELY,
    ),
    _Warning(
        re.compile(r"Got completion.*(?:error|status[= ])\s*12"),
        "packets are lost or too large: adapters retry",
        ("MTU alike on all adapters and switches; cables; flow control of RoCE (PFC, ECN)",),
        ("NVIDIA/nccl#709", "NVIDIA/nccl#378"),
        Certainty.LIKELY,
    ),
)


def find_warnings(case: Case) -> Cause | None:
    """Warnings of NCCL or RCCL itself that explain slow runs.

    Evidence: the line (seen); its effect is likely or possible.

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    cause : Cause or None
        None where there is none that is known.
    """
    if not is_slow(case):
        return None
    for known in _WARNINGS:
        for warning in take_facts(case).warnings:
            if known.pattern.search(warning.text):
                return _explain_warning(case, known, warning)
    return None


def _explain_warning(case: Case, known: _Warning, warning: Statement) -> Cause:
    """A cause from a warning that is known."""
    return Cause(
        "warning",
        known.sentence,
        (quote(case, warning, f"NCCL warns: {warning.text}"),),
        known.advice,
        known.citations,
        known.certainty,
    )


# -- not enough to say
# --------------------------------------------------------------------------------------------------


def explain_unknown(case: Case, word: Word) -> Cause | None:
    """What to do where no signature fits.

    Parameters
    ----------
    case : Case
        The run.
    word : Word
        The verdict that nothing explains: slow or too good.

    Returns
    -------
    cause : Cause or None
        None where no range of sizes has this verdict.
    """
    named = [verdict for verdict in case.verdicts if verdict.word is word]
    if not named:
        return None
    evidence = describe_largest(case)
    shows_bandwidth = bool(evidence)
    for verdict in named:
        if not shows_bandwidth and verdict.expected_s is not None:
            text = (
                f"{format_time(verdict.seconds)} at {write_size(verdict.nbytes)}, where "
                f"{format_time(verdict.expected_s)} are expected"
            )
            evidence.append(Evidence(text, case.file))
    advice = []
    if not (take_facts(case).networks or take_facts(case).transports):
        advice.append(
            "run again with NCCL_DEBUG=INFO, which prints network, adapters, channels and settings, and "
            "give perfkit that log"
        )
    advice.append(
        "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,GRAPH,TUNING prints what NCCL chooses for each size"
    )
    if word is Word.TOO_GOOD:
        advice.append(
            "name the system that it should be (--platform): are devices, nodes and adapters what you think?"
        )
    elif case.nodes is not None and case.nodes > 1:
        advice += [
            "the same test on each node alone, then on pairs of nodes: is one of them slow?",
            "NCCL_ALGO=Ring on two nodes shows the adapters; ib_write_bw shows each of them",
        ]
    else:
        advice += [
            "nvbandwidth, or p2pBandwidthLatencyTest: are the links themselves slow, and between which GPUs?",
            "nvidia-smi -q -d PERFORMANCE,CLOCK during the run: do the GPUs slow down?",
        ]
    return Cause(
        "not enough to say",
        "no known cause fits what the log shows",
        tuple(evidence),
        tuple(advice),
        (),
        Certainty.POSSIBLE,
        frozenset((word,)),
    )
