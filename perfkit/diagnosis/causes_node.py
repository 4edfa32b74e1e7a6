"""Signatures within a node: copies through the host, NVLink that is not used, NVLink SHARP, channels."""

import re

from perfkit.diagnosis.evidence import (
    LARGE_SIZES,
    Plateau,
    advise_unset,
    describe_largest,
    describe_plateau,
    describe_startup,
    find_plateau,
    is_on_one_node,
    is_slow,
    list_settings,
    name_settings,
    quote,
    quote_settings,
    take_facts,
    write_rate,
)
from perfkit.diagnosis.known_rates import PCIE_LINES, Path, find_shares
from perfkit.diagnosis.nccl_variables import Effect
from perfkit.diagnosis.records import Case, Cause, Certainty, Evidence, Range, Word
from perfkit.diagnosis.shapes import find_kink
from perfkit.readers.log_facts import Transport

#: GeForce cards, whose driver gives no peer access over PCIe: RTX 20 (NVIDIA/nccl-tests#117, a 2080 Ti
#: has none), 30, 40 (NVIDIA/nccl#1086) and 50 (tinygrad/open-gpu-kernel-modules#29).
_GEFORCE = re.compile(r"GeForce RTX (20|30|40|50)\d0")
#: PCIe generation of these cards (NVIDIA's pages of each): RTX 20 3.0, RTX 30 and 40 4.0, RTX 50 5.0.
_GEFORCE_PCIE = {"20": 3, "30": 4, "40": 4, "50": 5}
#: GPUs whose boards of eight have NVLink switches that can reduce: NVLink 4 and 5, see NVIDIA's Hopper
#: and Blackwell tuning guides. Cards for PCIe, also those with bridges (NVL), have no switch.
_HAS_MULTICAST = re.compile(r"\b(H100|H200|H800|H20|B100|B200|B300|GB200|GB300)\b")
_IS_CARD = re.compile(r"PCIe|\bNVL\b", re.IGNORECASE)
#: First version of NCCL with NVLink SHARP (NVIDIA/nccl-tests#153).
_FIRST_WITH_MULTICAST = (2, 17)
#: Cards that NVLink bridges join in pairs.
_BRIDGED = re.compile(
    r"A100.*PCIe|H100.*PCIe|H100 NVL|H200 NVL|\bA40\b|\bA30\b|RTX A[456]\d00|V100-PCIE|\bA800.*PCIe",
    re.IGNORECASE,
)
#: How NCCL calls NVLink, and AMD's links, where it names what lies between two GPUs.
_NVLINK_PATHS = ("NVL", "LOC", "XGMI")
#: Largest rate that NCCL counts for one channel of a node, by compute capability [B/s]: perChMaxTreeBws
#: in its src/graph/tuning.cc.
_OF_CHANNEL = {"V100": 26.5e9, "A100": 24e9, "H100": 38.7e9, "H200": 38.7e9, "B200": 70e9}
#: What rates of rings may lie below and above published ones [-], and rates of channels beside what NCCL
#: counts for them [-]: choices, for the noise of a run.
_BELOW_RINGS = 0.95
_ABOVE_RINGS = 1.03
_CHANNEL_NOISE = 0.1
#: NVLink that gives less than this times PCIe is not told from it [-]: a choice. NVLink of an A100 gives
#: 9.5 times as much.
_TOLD_APART = 2.0
#: Settings that leave a part of the links between GPUs unused.
_SLOWS_LINKS = (Effect.NO_PEERS, Effect.NO_MULTICAST, Effect.FORCED, Effect.FEWER_CHANNELS)
#: Variables that say how many channels there are at most.
_MOST_CHANNELS = ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_MAX_NRINGS")


def find_pcie_line(case: Case) -> float | None:
    """Find the rate of the PCIe slots of the GPUs.

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    line : float or None
        One way [B/s]; None where it is unknown.
    """
    if case.expectation.links.pcie is not None:
        return case.expectation.links.pcie.value
    geforce = _GEFORCE.search(case.expectation.device or "")
    if geforce is None:
        return None
    return PCIE_LINES[_GEFORCE_PCIE[geforce[1]]]


# -- copies through the memory of the host
# --------------------------------------------------------------------------------------------------

_HOST_ADVICE = (
    "nvidia-smi topo -p2p r shows which GPUs have peer access, nvidia-smi topo -m what lies between them",
    "bind the processes to the socket of their GPUs, and order GPUs by socket; the link between the "
    "sockets is crossed twice otherwise",
    "on AMD EPYC: four NUMA nodes per socket (NPS4), and IOMMU off or iommu=pt",
    "ACS off on all PCIe bridges, so that cards with peer access reach each other directly",
    "lspci -vv, LnkSta against LnkCap: do all slots run at their width and generation?",
    'run with NCCL_DEBUG=INFO: "via P2P" is direct, "via SHM" is through the host',
)


def find_host_memory(case: Case) -> Cause | None:
    """Data between the GPUs of a node that pass through the memory of the host.

    Evidence: NCCL lists SHM connections, or a setting turns direct copies off (seen); GeForce cards,
    which have no peer access, below every published rate of direct copies (likely); other cards
    without NVLink below that (possible).

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    cause : Cause or None
        None where it does not fit.
    """
    if not is_slow(case, Range.BANDWIDTH, Range.MIDDLE):
        return None
    settings = list_settings(case, Effect.NO_PEERS)
    if _list_shared(case) or (settings and case.ranks != case.nodes):
        return _explain_host_memory(case)
    if not is_on_one_node(case) or case.expectation.links.nvlink is not None:
        return None
    if any(each.way == "P2P" for each in take_facts(case).transports):
        return None
    return _guess_host_memory(case)


def _list_shared(case: Case) -> list[Transport]:
    """Connections through shared memory."""
    return [each for each in take_facts(case).transports if each.way == "SHM"]


def _explain_host_memory(case: Case) -> Cause:
    """Copies through the host that the log names."""
    settings = list_settings(case, Effect.NO_PEERS)
    evidence = quote_settings(case, settings)
    transports = take_facts(case).transports
    shared = _list_shared(case)
    if shared:
        count = sum(each.times for each in shared)
        local = count + sum(each.times for each in transports if each.way == "P2P")
        text = f"{count} of {local} connections within a node are {shared[0].name}"
        evidence.append(quote(case, shared[0], text))
    for remark in take_facts(case).remarks:
        if remark.topic == "P2P disabled":
            evidence.append(quote(case, remark, remark.text))
    plateau = find_plateau(case)
    if plateau is not None:
        evidence += [describe_plateau(case, plateau), *_describe_pcie_share(case, plateau)]
    advice = list(_HOST_ADVICE)
    reason = ""
    if settings:
        names = name_settings(settings)
        reason = f", because of {names}"
        advice.insert(0, advise_unset(settings))
    elif _GEFORCE.search(case.expectation.device or ""):
        reason = ": GeForce cards have no peer access"
    elif case.expectation.links.nvlink is not None:
        reason = ", although these GPUs have NVLink"
        advice[:0] = [
            "nvidia-smi nvlink -s: are the links up? systemctl status nvidia-fabricmanager: does it run?",
            "in containers: all GPUs of the node in one container, --ipc=host",
        ]
    return Cause(
        "host memory",
        f"data between GPUs of a node pass through the memory of the host{reason}",
        tuple(evidence),
        tuple(advice),
        ("NVIDIA/nccl#766", "NVIDIA/nccl-tests#228", "NVIDIA/nccl-tests#74", "NVIDIA/nccl#1086"),
        Certainty.SEEN,
    )


def _describe_pcie_share(case: Case, plateau: Plateau) -> list[Evidence]:
    """The rate as a share of PCIe, where its rate is known."""
    line = find_pcie_line(case)
    if line is None:
        return []
    text = f"{plateau.busbw / line:.0%} of the {write_rate(line)} of PCIe"
    return [Evidence(text, case.file, plateau.line)]


def _guess_host_memory(case: Case) -> Cause | None:
    """Copies through the host by device and figures."""
    plateau = find_plateau(case)
    line = find_pcie_line(case)
    if plateau is None or line is None:
        return None
    direct = find_shares(Path.PCIE)
    host = find_shares(Path.HOST_MEMORY)
    share = plateau.busbw / line
    if share >= direct.low:
        return None
    geforce = _GEFORCE.search(case.expectation.device or "")
    text = (
        f"{share:.0%} of the {write_rate(line)} of PCIe; direct copies reach {direct.low:.0%} to "
        f"{direct.high:.0%} in public cases, copies through the host {host.low:.0%} to {host.high:.0%}"
    )
    evidence = [describe_plateau(case, plateau), Evidence(text, case.file, plateau.line)]
    startup = describe_startup(case)
    if startup is not None:
        evidence.append(startup)
    if geforce is None:
        return Cause(
            "host memory",
            "data between GPUs seem to pass through the memory of the host, or over a shared part of PCIe",
            tuple(evidence),
            _HOST_ADVICE,
            (
                "NVIDIA/nccl#766",
                "NVIDIA/nccl-tests#74",
                "NVIDIA/nccl-tests#115",
                "NVIDIA/nccl#1086",
            ),
            Certainty.POSSIBLE,
        )
    device = case.expectation.device or ""
    evidence.insert(
        0,
        Evidence(
            f"{device}: its driver gives no peer access over PCIe, so some of the loss is its nature",
            case.file,
        ),
    )
    return Cause(
        "host memory",
        "data between GPUs pass through the memory of the host, as GeForce cards have no peer access",
        tuple(evidence),
        (*_HOST_ADVICE[:3], *_HOST_ADVICE[4:]),
        (
            "NVIDIA/nccl#1086",
            "NVIDIA/nccl#766",
            "NVIDIA/nccl-tests#307",
            "NVIDIA/nccl-tests#270",
            "NVIDIA/nccl#1285",
        ),
        Certainty.LIKELY,
    )


# -- NVLink that is not used
# --------------------------------------------------------------------------------------------------


def find_unused_nvlink(case: Case) -> Cause | None:
    """GPUs with NVLink whose rate is one of PCIe.

    Evidence: NCCL's shapes cross PCIe or the host inside the node (seen), or the rate is below that of
    PCIe and far below that of NVLink (likely; possible for cards that bridges join in pairs).

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    cause : Cause or None
        None where it does not fit.
    """
    links = case.expectation.links
    if not is_on_one_node(case) or links.nvlink is None or case.ranks < 2:
        return None
    if not is_slow(case, Range.BANDWIDTH):
        return None
    plateau = find_plateau(case)
    line = find_pcie_line(case)
    if plateau is None or line is None or _TOLD_APART * line >= links.nvlink.value:
        return None
    if plateau.busbw > line or (case.expectation.busbw or 0) < _TOLD_APART * line:
        return None
    if _list_shared(case) or list_settings(case, Effect.NO_PEERS):
        return None  # `find_host_memory` says so
    evidence = [describe_plateau(case, plateau), *_describe_pcie_share(case, plateau)]
    certainty = Certainty.LIKELY
    away = [each for each in take_facts(case).graphs if each.within_path not in _NVLINK_PATHS]
    if away:
        certainty = Certainty.SEEN
        text = f"NCCL's {away[0].pattern} takes {away[0].within_path} inside the node, not NVLink"
        evidence.insert(0, quote(case, away[0], text))
    device = case.expectation.device or ""
    if _BRIDGED.search(device) and case.ranks > 2:
        return Cause(
            "bridges in pairs",
            f"{case.ranks} cards are joined by PCIe: NVLink bridges join pairs of {device} only",
            tuple(evidence),
            (
                "nvidia-smi topo -m: NV# stands between bridged cards only",
                "run on one pair to see NVLink (CUDA_VISIBLE_DEVICES=0,1); this rate is then normal for "
                "more cards",
            ),
            ("NVIDIA/nccl-tests#178", "NVIDIA/nccl#1161"),
            min(certainty, Certainty.LIKELY, key=list(Certainty).index),
        )
    return Cause(
        "NVLink not used",
        "the rate is one of PCIe: NVLink between the GPUs is not used",
        tuple(evidence),
        (
            "nvidia-smi nvlink -s: are all links up? nvidia-smi topo -m: NV# between all GPUs?",
            "systemctl status nvidia-fabricmanager: does it run, in the version of the driver?",
            "in virtual machines and containers: are all GPUs of a partition passed in, and its switches?",
            "unset NCCL_P2P_DISABLE and NCCL_P2P_LEVEL",
        ),
        ("NVIDIA/nccl#324", "NVIDIA/nccl#1562"),
        certainty,
    )


def find_part_of_links(case: Case) -> Cause | None:
    """NVLink, or another fabric between the GPUs, that gives a part of its rate.

    Evidence: the rate is more than PCIe carries and less than expected, in all sizes that bandwidth
    decides (possible).

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    cause : Cause or None
        None where it does not fit.
    """
    nvlink = case.expectation.links.nvlink
    expected = case.expectation.busbw
    plateau = find_plateau(case)
    line = find_pcie_line(case)
    if not is_on_one_node(case) or not is_slow(case, Range.BANDWIDTH):
        return None
    if nvlink is None or expected is None or plateau is None or line is None:
        return None
    if plateau.busbw <= line or case.ranks < 2:
        return None
    if list_settings(case, *_SLOWS_LINKS):
        return None  # which explains it
    curve = case.curve
    if find_kink(curve.nbytes, curve.busbw) is not None:
        return None
    evidence = [
        describe_plateau(case, plateau),
        Evidence(
            f"more than the {write_rate(line)} of PCIe, {plateau.busbw / nvlink.value:.0%} of the "
            f"{write_rate(nvlink.value)} of the links between the GPUs",
            case.file,
            plateau.line,
        ),
    ]
    return Cause(
        "part of the links",
        "links between the GPUs give a part of their rate: some may be down, or one GPU is slow",
        tuple(evidence),
        (
            "nvidia-smi nvlink -s and -e (AMD: amd-smi xgmi) on all GPUs: are all links up, at one rate, "
            "without errors?",
            "nvidia-smi -q -d PERFORMANCE,CLOCK during the run: does a GPU slow down?",
            "nvbandwidth, device_to_device, finds the pair that is slow",
            "run with NCCL_DEBUG=INFO: as many channels and nvls channels as on a fast node?",
        ),
        ("Azure/azhpc-diagnostics#73", "NVIDIA/nccl#557"),
        Certainty.POSSIBLE,
        sizes=LARGE_SIZES,
    )


def find_network_within_node(case: Case) -> Cause | None:
    """GPUs of one node that reach each other over the network.

    Evidence: NCCL lists NET connections in a run on one node (seen).

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    cause : Cause or None
        None where it does not fit.
    """
    facts = take_facts(case)
    if not is_on_one_node(case) or not is_slow(case) or (facts.nodes or 1) > 1:
        return None
    over_network = [each for each in facts.transports if each.way == "NET"]
    if not over_network:
        return None
    settings = list_settings(case, Effect.NO_PEERS, Effect.NO_SHARED_MEMORY)
    total = sum(each.times for each in facts.transports)
    count = sum(each.times for each in over_network)
    text = f"{count} of {total} connections within the node are {over_network[0].name}"
    evidence = [quote(case, over_network[0], text), *quote_settings(case, settings)]
    evidence += describe_largest(case)
    advice = []
    if settings:
        advice.append(advise_unset(settings))
    advice += [
        "all GPUs of the node in one container; or --ipc=host and one /dev/shm for all of its containers",
        "names of hosts and NCCL_HOSTID: ranks of one node must agree",
    ]
    return Cause(
        "network within a node",
        "GPUs of one node reach each other over the network, neither directly nor by shared memory",
        tuple(evidence),
        tuple(advice),
        ("NVIDIA/nccl#324", "NVIDIA/nccl#1781", "NVIDIA/nccl#1511", "NVIDIA/nccl#406"),
        Certainty.SEEN,
    )


# -- NVLink SHARP
# --------------------------------------------------------------------------------------------------


def has_multicast(case: Case) -> bool:
    """Say whether the GPUs are of boards whose switches can reduce.

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    has_multicast : bool
        Whether they are, by the name of the device.
    """
    device = case.expectation.device or ""
    return _HAS_MULTICAST.search(device) is not None and _IS_CARD.search(device) is None


def find_no_nvlink_sharp(case: Case) -> Cause | None:
    """An all_reduce without the reduction in NVLink's switches, on boards that have it.

    Evidence: "NVLS multicast support is not available", or 0 nvls channels (seen); else a rate that
    rings reach in public cases (likely). Where the user turned it off or named another algorithm, it
    is a choice and no fault, see `find_settings`. On more than two nodes the adapters bound the
    rate, and nothing is said.

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    cause : Cause or None
        None where it does not fit.
    """
    if not has_multicast(case):
        return None
    if case.operation != "all_reduce" or case.nodes is None or case.nodes > 2:
        return None
    if not is_slow(case, Range.BANDWIDTH) or case.expectation.algorithm is not None:
        return None
    if list_settings(case, Effect.NO_MULTICAST, Effect.FORCED):
        return None
    plateau = find_plateau(case)
    nvlink = case.expectation.links.nvlink
    if plateau is None or nvlink is None:
        return None
    ring = find_shares(Path.NVLINK_RING)
    share = plateau.busbw / nvlink.value
    is_of_ring = _BELOW_RINGS * ring.low <= share <= _ABOVE_RINGS * ring.high
    stated = _quote_multicast(case)
    if take_facts(case).has_nvls and take_facts(case).nvls_channels:
        return None
    # between nodes, another rate is of another cause: sockets leave no channels to it either
    if not is_of_ring and not (stated and is_on_one_node(case)):
        return None
    if not stated and not is_on_one_node(case):
        return None
    text = (
        f"{write_rate(plateau.busbw)} are {share:.0%} of the {write_rate(nvlink.value)} of NVLink; rings "
        f"reach {ring.low:.0%} to {ring.high:.0%} in public cases"
    )
    evidence = [*stated, describe_plateau(case, plateau)]
    if is_of_ring:
        evidence.append(Evidence(text, case.file, plateau.line))
    certainty = Certainty.SEEN if stated and is_of_ring else Certainty.LIKELY
    if (case.expectation.ranks_per_node or case.ranks) < 5 and not stated:
        certainty = Certainty.POSSIBLE  # boards of four GPUs have no switch
    return Cause(
        "NVLink SHARP off",
        "NVLink SHARP is not used: rings carry the all_reduce",
        tuple(evidence),
        (
            "systemctl status nvidia-fabricmanager, and nvidia-smi -q | grep -A 2 Fabric: State Completed, "
            "Status Success; restart it only with a reset of the GPUs",
            "in virtual machines: the partition must have all GPUs of the board, with multicast",
            "driver and CUDA of 12.1 or newer; NCCL_CUMEM_ENABLE=1 and no NCCL_NVLS_ENABLE=0",
            'expect "NVLS multicast support is available" and more than 0 nvls channels with '
            "NCCL_DEBUG=INFO",
        ),
        (
            "NVIDIA/nccl-tests#309",
            "NVIDIA/nccl-tests#212",
            "NVIDIA/nccl#1221",
            "NVIDIA/nccl#1488",
            "NVIDIA/nccl#2140",
        ),
        certainty,
        sizes=LARGE_SIZES,
    )


def _quote_multicast(case: Case) -> list[Evidence]:
    """Lines that say that NVLink SHARP is not there."""
    evidence = []
    facts = take_facts(case)
    numbers = re.match(r"(\d+)\.(\d+)", facts.version or "")
    if numbers is not None and facts.library != "RCCL" and facts.versions:
        version = (int(numbers[1]), int(numbers[2]))
        if version < _FIRST_WITH_MULTICAST:
            text = f"NCCL {facts.version}; NVLink SHARP came with 2.17"
            evidence.append(quote(case, facts.versions[0], text))
    absent = [each for each in take_facts(case).multicast if not each.is_available]
    if absent:
        count = len(absent)
        text = f"NVLS multicast support is not available, on {count} of {len(take_facts(case).multicast)} GPUs"
        evidence.append(quote(case, absent[0], text))
    channels = take_facts(case).channels
    if channels is not None and channels.nvls == 0:
        evidence.append(quote(case, channels, "0 nvls channels"))
    return evidence


# -- channels
# --------------------------------------------------------------------------------------------------


def find_few_channels(case: Case) -> Cause | None:
    """Fewer channels than the links need.

    Evidence: the channels that NCCL prints, or that a variable allows at most, times what NCCL counts
    for one at most, are less than the expected rate, and no less than what was measured (likely).
    Where data pass through the memory of the host, NCCL makes few channels as these need no more.

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    cause : Cause or None
        None where it does not fit.
    """
    if not is_on_one_node(case) or not is_slow(case, Range.BANDWIDTH):
        return None
    if _list_shared(case) or list_settings(case, Effect.NO_PEERS):
        return None  # `find_host_memory` says so
    plateau = find_plateau(case)
    expected = case.expectation.busbw
    settings = list_settings(case, Effect.FEWER_CHANNELS)
    channels = take_facts(case).channels
    if channels is not None and channels.nvls:
        return None
    counts = [int(each.value) for each in settings if each.name in _MOST_CHANNELS]
    if channels is not None:
        counts.append(channels.collective)
    device = case.expectation.device or ""
    rates = [rate for name, rate in _OF_CHANNEL.items() if name in device]
    if not counts or not rates or plateau is None or expected is None:
        return None
    count = min(counts)
    most = count * rates[0]
    if most >= (1 - _CHANNEL_NOISE) * expected or plateau.busbw > (1 + _CHANNEL_NOISE) * most:
        return None
    text = f"{count} channels; NCCL counts {write_rate(rates[0])} at most for one, {write_rate(most)} for all"
    line = plateau.line if channels is None else channels.line
    evidence = [Evidence(text, case.file, line), describe_plateau(case, plateau)]
    evidence += quote_settings(case, settings)
    advice = ["set NCCL_MIN_NCHANNELS to 16 or 32 and compare"]
    reason = ""
    if settings:
        reason = f", because of {name_settings(settings)}"
        advice.insert(0, advise_unset(settings))
    advice.append(
        "see that all NVLinks are up (nvidia-smi nvlink -s): NCCL makes channels by links"
    )
    return Cause(
        "few channels",
        f"{count} channels are too few for these links{reason}",
        tuple(evidence),
        tuple(advice),
        ("uccl-project/uccl#205", "NVIDIA/nccl#1649"),
        Certainty.LIKELY,
        sizes=LARGE_SIZES,
    )


def note_multicast_choice(case: Case) -> Cause | None:
    """A remark that the user turned NVLink SHARP off, on boards that have it.

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    remark : Cause or None
        None where it is not so, and where the settings of a slow run say it.
    """
    if not has_multicast(case):
        return None
    if is_slow(case) and list_settings(case, Effect.NO_MULTICAST):
        return None  # `find_settings` says so
    nvlink = case.expectation.links.nvlink
    if case.operation != "all_reduce" or not is_on_one_node(case) or nvlink is None:
        return None
    settings = [
        setting
        for setting in list_settings(case, Effect.NO_MULTICAST, Effect.FORCED)
        if _turns_off_multicast(setting.name, setting.value)
    ]
    if not settings:
        return None
    sharp = find_shares(Path.NVLINK_SHARP)
    names = name_settings(settings)
    low, high = (write_rate(share * nvlink.value) for share in (sharp.low, sharp.high))
    return Cause(
        "NVLink SHARP by choice",
        f"{names} asks for no NVLink SHARP, which would give an all_reduce {low} to {high} here",
        tuple(quote_settings(case, settings)),
        (f"{advise_unset(settings)} to use it",),
        ("NVIDIA/nccl-tests#309", "NVIDIA/nccl-tests#212"),
        Certainty.SEEN,
        frozenset[Word](),
    )


def _turns_off_multicast(name: str, value: str) -> bool:
    """Whether a setting leaves no way to NVLink SHARP."""
    if name in ("NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE"):
        return True
    if name != "NCCL_ALGO":
        return False
    names_it = "nvls" in value.lower()
    return names_it if value.startswith("^") else not names_it
