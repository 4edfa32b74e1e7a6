"""Signatures of network adapters: missing ones, copies through the host, and half of their rate."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from perfkit.diagnosis.evidence import (
    LARGE_SIZES,
    advise_unset,
    describe_largest,
    describe_plateau,
    find_plateau,
    find_wire_rate,
    is_between_nodes,
    is_slow,
    join_names,
    list_settings,
    quote,
    quote_settings,
    take_facts,
    write_line_rate,
    write_rate,
)
from perfkit.diagnosis.known_rates import ADAPTER_LINES, Path, find_shares
from perfkit.diagnosis.nccl_variables import Effect
from perfkit.diagnosis.records import Case, Cause, Certainty, Evidence, Range, Word
from perfkit.diagnosis.shapes import find_kink
from perfkit.readers.log_facts import Adapter, Setting

_NUMBERED = re.compile(r"(.*?)(\d+)")
#: An adapter of which this share of the line or less is used has half its way [-]: ACS sends data
#: through the root of PCIe and back (9.8 of 25 GB/s, NVIDIA/nccl-tests#112), a bond may use one port
#: (30 of 50, #265), and one connection gives about half (27 of 50, NVIDIA/nccl#2409).
_HALF = 0.62
#: Rates of adapters are printed whole, so a difference above 5 % is another rate [-]: they are sold in
#: steps of two.
_LOWER_RATE = 0.95
#: What the rate of an adapter may miss published ones by, as noise of a run [-]: a choice.
_NOISE = 0.02


# -- missing adapters
# --------------------------------------------------------------------------------------------------


class _Missing(NamedTuple):
    """Adapters that a list should have."""

    hosts: tuple[str, ...]  # that lack them
    names: tuple[str, ...]  # that other hosts list; empty where no host lists them
    gaps: tuple[str, ...]  # left out in a row of numbers; may be adapters of another use
    fewest: int  # adapters that the poorest host has
    complete: int  # adapters that a host should have


def list_data_adapters(case: Case) -> dict[str, tuple[Adapter, ...]]:
    """List the InfiniBand and RoCE adapters of each host, and those of plugins.

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    adapters : dict
        By host, as NCCL numbers them; empty where the log names none.
    """
    by_host: dict[str, list[Adapter]] = {}
    for adapter in take_facts(case).adapters:
        if adapter.fabric != "Socket":
            by_host.setdefault(adapter.host, []).append(adapter)
    return {host: tuple(adapters) for host, adapters in by_host.items()}


def _find_gaps(names: Sequence[str]) -> list[str]:
    """Names that are missing in a row of numbered ones, such as mlx5_1 in mlx5_0 and mlx5_2."""
    matches = [_NUMBERED.fullmatch(name) for name in names]
    stems = {match[1] for match in matches if match is not None}
    if len(stems) != 1 or None in matches:
        return []
    stem = stems.pop()
    numbers = {int(match[2]) for match in matches if match is not None}
    present = range(min(numbers), max(numbers) + 1)
    return [f"{stem}{number}" for number in present if number not in numbers]


def _find_missing(case: Case, by_host: dict[str, tuple[Adapter, ...]]) -> _Missing | None:
    """Adapters that are missing in the lists of NCCL: one host lacks what others have, or all lack one
    of as many as there are GPUs."""
    names = {host: [adapter.name for adapter in found] for host, found in by_host.items()}
    counts = {host: len(found) for host, found in names.items()}
    fewest, most = min(counts.values()), max(counts.values())
    local = case.expectation.ranks_per_node
    # one for each GPU is whole: what some hosts have besides may serve storage
    has_others = local is not None and fewest == local and most % local != 0
    if fewest < most and not has_others:
        whole = max(names.values(), key=len)
        poorest = [host for host, count in counts.items() if count < most]
        absent = [name for name in whole if any(name not in names[host] for host in poorest)]
        return _Missing(tuple(poorest), tuple(absent), (), fewest, most)
    complete = _count_complete(case, fewest)
    if complete is None:
        return None
    gaps = _find_gaps(next(iter(names.values())))
    absent = gaps if len(gaps) == complete - fewest else []
    return _Missing(tuple(names), (), tuple(absent), fewest, complete)


def _count_complete(case: Case, fewest: int) -> int | None:
    """Adapters that a host should have: as many as usual, or as GPUs, of which more than half are there;
    None where these are all, or half as many or fewer."""
    usual = None
    if case.expectation.links.adapters is not None:
        usual = case.expectation.links.adapters.usual
    for count in (usual, case.expectation.ranks_per_node):
        if count is not None and count // 2 < fewest < count:
            return count
    return None


def find_missing_adapter(case: Case) -> Cause | None:
    """A network adapter, or a rail, that is missing.

    Evidence: NCCL lists fewer adapters on one host than on another, or fewer than GPUs but more than
    half as many, often with a gap in their numbers (seen). The rate is as many adapters times what one
    gives.

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    cause : Cause or None
        None where it does not fit.
    """
    if not is_between_nodes(case) or not is_slow(case, Range.BANDWIDTH, Range.MIDDLE):
        return None
    by_host = list_data_adapters(case)
    if not by_host:
        return _find_missing_of_plugin(case)
    missing = _find_missing(case, by_host)
    if missing is None:
        return None
    lost = missing.complete - missing.fewest
    what = f"{lost} of {missing.complete} adapters"
    if missing.names:
        what += f", {join_names(missing.names)},"
    where = "on every node"
    if len(missing.hosts) < len(by_host):
        where = f"on {join_names(missing.hosts, most=3)}"
    verb = "is" if lost == 1 else "are"
    sentence = f"{what} {verb} missing {where}"
    if missing.gaps:
        sentence += f": {join_names(missing.gaps)} {verb} not listed"
    first = by_host[missing.hosts[0]]
    listed = join_names(adapter.name for adapter in first)
    evidence = [quote(case, first[0], f"NCCL lists {missing.fewest} adapters: {listed}")]
    evidence += _describe_rate(case, missing.fewest, missing.complete)
    channels = take_facts(case).channels
    if channels is not None and channels.collective % missing.fewest == 0:
        each = channels.collective // missing.fewest
        text = f"{channels.collective} channels, {each} for each of {missing.fewest} adapters"
        evidence.append(quote(case, channels, text))
    advice = []
    chosen = _list_choices(case)
    if chosen:
        evidence.append(quote(case, chosen[0], f"NCCL_IB_HCA={chosen[0].value}"))
        advice.append("see whether NCCL_IB_HCA leaves it out on purpose")
    advice += _advise_on_missing(missing, has_others=len(missing.hosts) < len(by_host))
    advice.append("the same test over one rail at a time (NCCL_IB_HCA), which shows a bad one")
    return Cause(
        "missing adapter",
        sentence,
        tuple(evidence),
        tuple(advice),
        (
            "NVIDIA/nccl-tests#119 (the rate of one adapter)",
            "NVIDIA/nccl#652 (rates of adapters add up)",
        ),
        Certainty.SEEN,
        sizes=LARGE_SIZES,
    )


def _advise_on_missing(missing: _Missing, *, has_others: bool) -> list[str]:
    """What to try: the same adapter missing on all nodes speaks for a setting, on some for hardware."""
    asked = (*missing.names, *missing.gaps)
    look = "ibstat on each node: which adapter is not active, or set to Ethernet (link layer)?"
    if asked:
        look = f"ibstat {asked[0]}: is it active, and its link layer that of the others?"
    if missing.gaps:
        look += " One for storage may lie between the others; then it is another that is missing"
    if has_others:
        return [look, "cable, transceiver and switch port; the card itself (lspci, dmesg)"]
    return [
        look,
        "all nodes alike: first what may leave it out, NCCL_IB_HCA in the environment, /etc/nccl.conf and "
        "~/.nccl.conf, and the devices of the container (ls /sys/class/infiniband)",
        "then the switch of that rail, to which all nodes are joined",
    ]


def _find_missing_of_plugin(case: Case) -> Cause | None:
    """Adapters of EFA that are missing, by their number: it is the same on all hosts, and a power of two
    on every instance of AWS (1, 4, 8, 16 or 32)."""
    providers = [each for each in take_facts(case).providers if each.adapters]
    if not providers:
        return None
    counts = [each.adapters or 0 for each in providers]
    complete = 1
    while complete < max(counts):
        complete *= 2
    poorest = min(providers, key=lambda each: each.adapters or 0)
    fewest = poorest.adapters or 0
    if fewest == complete:
        return None
    evidence = [quote(case, poorest, f"the plugin of libfabric finds {fewest} adapters")]
    evidence += describe_largest(case)
    lost = complete - fewest
    verb = "is" if lost == 1 else "are"
    host = f" on {poorest.host}" if poorest.host else ""
    return Cause(
        "missing adapter",
        f"{lost} of {complete} adapters {verb} missing{host}",
        tuple(evidence),
        (
            "fi_info -p efa on each node: does it list as many as the instance has?",
            "network interfaces of the instance: one of EFA for each network card",
        ),
        ("aws/aws-ofi-nccl#64", "https://docs.aws.amazon.com/ec2/latest/instancetypes/ac.html"),
        Certainty.SEEN,
        sizes=LARGE_SIZES,
    )


def _describe_rate(case: Case, count: int, complete: int) -> list[Evidence]:
    """The rate of the largest size; and as that of so many adapters, where all data pass them once."""
    plateau = find_plateau(case)
    if plateau is None:
        return []
    evidence = [describe_plateau(case, plateau)]
    rate = find_wire_rate(case, plateau)
    if rate is None or not rate.is_certain:
        return evidence
    each = rate.low / count
    line = _find_line(each)
    text = f"{write_rate(rate.low)} = {count} × {write_rate(each)}"
    if line is not None:
        text += f", what an adapter of {write_line_rate(line)} gives; {complete} would give"
        text += f" {write_rate(complete * each)}"
    evidence.append(Evidence(text, case.file, plateau.line))
    return evidence


def _find_line(rate: float) -> float | None:
    """The adapter that gives a rate, within what was published of single adapters and noise."""
    shares = find_shares(Path.ADAPTER)
    for line in ADAPTER_LINES:
        if (1 - _NOISE) * shares.low * line <= rate <= (1 + _NOISE) * shares.high * line:
            return line
    return None


def _list_choices(case: Case) -> list[Setting]:
    """Settings of NCCL_IB_HCA that may leave adapters out. A name such as mlx5 or mlx5_ is the beginning
    of the names of all adapters of that driver and leaves out none of them (NVIDIA's user guide)."""
    names = [adapter.name for adapter in take_facts(case).adapters]
    drivers = {name.split("_")[0] for name in names if "_" in name}
    choices = []
    for setting in take_facts(case).find_settings("NCCL_IB_HCA"):
        chosen = {entry.strip().removesuffix("_") for entry in setting.value.split(",")}
        if not chosen & drivers:
            choices.append(setting)
    return choices


def find_few_adapters(case: Case) -> Cause | None:
    """Half as many adapters as GPUs, or fewer.

    Evidence: NCCL lists them (likely where NCCL_IB_HCA names them, else possible). Many systems are
    built so; it explains a run that is slow for a system with more.

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    cause : Cause or None
        None where it does not fit.
    """
    if not is_between_nodes(case) or not is_slow(case, Range.BANDWIDTH):
        return None
    by_host = list_data_adapters(case)
    local = case.expectation.ranks_per_node
    if not by_host or local is None:
        return None
    poorest = min(by_host.values(), key=len)
    if not poorest or len(poorest) > local // 2:
        return None
    names = join_names(adapter.name for adapter in poorest)
    evidence = [quote(case, poorest[0], f"NCCL lists {names}, for {local} GPUs")]
    chosen = _list_choices(case)
    advice = ["ibdev2netdev or ibstat on the nodes: are there more adapters, and are they active?"]
    certainty = Certainty.POSSIBLE
    if chosen:
        certainty = Certainty.LIKELY
        evidence.append(quote(case, chosen[0], f"NCCL_IB_HCA={chosen[0].value} names them"))
        advice.insert(0, "unset NCCL_IB_HCA, or name all adapters of the GPUs")
    evidence += _describe_rate(case, len(poorest), local)
    count = "1 adapter carries" if len(poorest) == 1 else f"{len(poorest)} adapters carry"
    return Cause(
        "few adapters",
        f"{count} the data of {local} GPUs",
        tuple(evidence),
        tuple(advice),
        ("NVIDIA/nccl#652", "NVIDIA/nccl-tests#112", "NVIDIA/nccl-tests#119"),
        certainty,
        sizes=LARGE_SIZES,
    )


def note_few_adapters(case: Case) -> Cause | None:
    """A remark that NCCL_IB_HCA names half as many adapters as GPUs or fewer, in a run that is not
    slow for so many.

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    remark : Cause or None
        None where it is not so.
    """
    chosen = _list_choices(case)
    by_host = list_data_adapters(case)
    local = case.expectation.ranks_per_node
    if is_slow(case) or not is_between_nodes(case) or not chosen or not by_host or local is None:
        return None
    count = min(len(adapters) for adapters in by_host.values())
    if count > local // 2:
        return None
    carry = "1 adapter carries" if count == 1 else f"{count} adapters carry"
    return Cause(
        "few adapters",
        f"{carry} the data of {local} GPUs, as NCCL_IB_HCA names no others",
        (quote(case, chosen[0], f"NCCL_IB_HCA={chosen[0].value}"),),
        ("if the nodes have more adapters: unset NCCL_IB_HCA, or name all of the GPUs",),
        ("NVIDIA/nccl#652",),
        Certainty.SEEN,
        frozenset(),
    )


def note_unknown_rate(case: Case) -> Cause | None:
    """A remark that the rate of the adapters decides, where the log names them without it and there is
    not enough to say.

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    remark : Cause or None
        None where it is not so.
    """
    bandwidth = case.find(Range.BANDWIDTH)
    if bandwidth is None or bandwidth.word is not Word.UNKNOWN or not is_between_nodes(case):
        return None
    by_host = list_data_adapters(case)
    plateau = find_plateau(case)
    if not by_host or plateau is None:
        return None
    adapters = min(by_host.values(), key=len)
    rate = find_wire_rate(case, plateau)
    if rate is None or any(adapter.rate is not None for adapter in adapters):
        return None
    each = rate.high / len(adapters)
    line = _find_line(each)
    text = f"each of {len(adapters)} adapters sends {write_rate(each)} at most"
    if line is not None:
        text += f": all that one of {write_line_rate(line)} gives, or half of one of"
        text += f" {write_line_rate(2 * line)}"
    return Cause(
        "unknown rate",
        "the rate of the adapters decides whether this is right, and the log does not say it",
        (quote(case, adapters[0], text),),
        (
            f"ibstat {adapters[0].name} (Rate), then name a platform with such adapters; NCCL 2.21 and later "
            "print it with NCCL_DEBUG_SUBSYS=INIT,NET",
        ),
        (),
        Certainty.SEEN,
        frozenset(),
    )


def find_fewer_rails(case: Case) -> Cause | None:
    """Fewer adapters than usual, by the rate alone.

    Evidence: the log names no adapter, and rings send k times what one adapter of the expected rate
    gives, with k below the usual number (possible).

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    cause : Cause or None
        None where it does not fit.
    """
    if not is_between_nodes(case) or not is_slow(case, Range.BANDWIDTH):
        return None
    plateau = find_plateau(case)
    adapters = case.expectation.links.adapters
    if plateau is None or adapters is None or adapters.is_named or adapters.rate is None:
        return None
    rate = find_wire_rate(case, plateau)
    usual = adapters.usual or adapters.count
    if usual is None or rate is None or not rate.is_certain:
        return None
    line = adapters.rate.value
    if find_kink(case.curve.nbytes, case.curve.busbw) is not None:
        return None  # smaller messages show that the adapters give more
    count = _count_adapters(rate.low, line)
    if count is None or count >= usual:
        return None
    text = f"{write_rate(rate.low)} = {count} × {write_rate(rate.low / count)}, what {count} of {usual}"
    evidence = (
        describe_plateau(case, plateau),
        Evidence(f"{text} adapters of {write_line_rate(line)} give", case.file, plateau.line),
    )
    return Cause(
        "fewer rails",
        f"the rate is that of {count} of {usual} adapters of {write_line_rate(line)}",
        evidence,
        (
            'run with NCCL_DEBUG=INFO and count the adapters in "NET/IB : Using" on every node',
            "ibstat on every node: which adapter is down, or of a lower rate?",
            "the same test over one rail at a time (NCCL_IB_HCA)",
        ),
        ("NVIDIA/nccl#652", "NVIDIA/nccl-tests#119", "NVIDIA/nccl-tests#290"),
        Certainty.POSSIBLE,
        sizes=LARGE_SIZES,
    )


def _count_adapters(rate: float, line: float) -> int | None:
    """How many adapters give a rate, within what was published of single ones; None for no whole
    number."""
    shares = find_shares(Path.ADAPTER)
    most = int(rate / (shares.low * line))
    least = -int(-rate // (shares.high * line))
    return least if 1 <= least <= most else None


# -- adapters that give less
# --------------------------------------------------------------------------------------------------


def find_slower_adapter(case: Case) -> Cause | None:
    """An adapter of a lower rate than the others.

    Evidence: NCCL prints the rate of each, and they differ on a host or between hosts (seen). Rings share
    data evenly, so the slowest rail sets the pace of all.

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
    rated = [
        (adapter.rate, adapter)
        for adapters in list_data_adapters(case).values()
        for adapter in adapters
        if adapter.rate is not None
    ]
    if not rated:
        return None
    most = max(rate for rate, _ in rated)
    slower = [adapter for rate, adapter in rated if rate < _LOWER_RATE * most]
    if not slower or 2 * len(slower) > len(rated):
        return None
    lowest = min(rate for rate, _ in rated)
    names = join_names((f"{adapter.name} of {adapter.host}" for adapter in slower), most=4)
    evidence = [
        quote(
            case, slower[0], f"{names}: {write_line_rate(lowest)}, others {write_line_rate(most)}"
        )
    ]
    evidence += describe_largest(case)
    return Cause(
        "slower adapter",
        f"{names} runs at {write_line_rate(lowest)}, the others at {write_line_rate(most)}",
        tuple(evidence),
        (
            f"ibstat {slower[0].name}: rate and width of the link; cable, transceiver and switch port",
            "if it belongs to storage or management: leave it out with NCCL_IB_HCA",
            "the same test over one rail at a time",
        ),
        ("NVIDIA/nccl#652", "NVIDIA-NeMo/RL#3670"),
        Certainty.SEEN,
        sizes=LARGE_SIZES,
    )


def find_no_gpu_direct(case: Case) -> Cause | None:
    """Adapters that do not reach the memory of GPUs: GPU Direct RDMA is off.

    Evidence: NCCL says so, a setting asks for it, or connections between nodes are listed without
    GDRDMA (seen).

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    cause : Cause or None
        None where it does not fit.
    """
    if not is_between_nodes(case) or not is_slow(case):
        return None
    remarks = [
        each for each in take_facts(case).remarks if each.topic == "GPU Direct RDMA disabled"
    ]
    settings = list_settings(case, Effect.NO_GPU_DIRECT)
    between = [
        transport
        for transport in take_facts(case).transports
        if transport.way == "NET" and transport.network not in (None, "Socket")
    ]
    without = [transport for transport in between if not transport.has_gdrdma]
    uses_sockets = any(network.text == "Socket" for network in take_facts(case).networks)
    if uses_sockets or not (remarks or settings or without):
        return None
    if between and not without:
        return None  # all connections use it, whatever one line says of one adapter
    evidence = quote_settings(case, settings)
    evidence += [quote(case, remark, remark.text) for remark in remarks[:2]]
    if without:
        count = sum(transport.times for transport in without)
        total = sum(transport.times for transport in between)
        names = join_names((transport.name for transport in without), most=3)
        text = f"{count} of {total} connections between nodes lack GDRDMA: {names}"
        evidence.append(quote(case, without[0], text))
    evidence += describe_largest(case)
    advice = []
    if settings:
        advice.append(advise_unset(settings))
    advice += [
        "load nvidia_peermem (lsmod), or use a driver and kernel with DMA-BUF",
        "see that adapters and GPUs are beside each other (nvidia-smi topo -m: PIX or PXB), and that ACS "
        "is off",
        'expect "via NET/IB/0/GDRDMA" with NCCL_DEBUG=INFO; NCCL_NET_GDR_LEVEL=SYS shows whether the '
        "distance is the reason",
    ]
    return Cause(
        "GPU Direct RDMA off",
        "data between nodes pass through the memory of the host, as GPU Direct RDMA is not used",
        tuple(evidence),
        tuple(advice),
        ("NVIDIA/nccl#1412", "NVIDIA/nccl#489", "NVIDIA/nccl#1537", "NVIDIA/nccl-tests#293"),
        Certainty.SEEN,
    )


def find_half_adapters(case: Case) -> Cause | None:
    """Adapters of which about half of the line is used, or less.

    Evidence: the log names all adapters and their connections use GPU Direct RDMA, or says nothing
    against it, and each gives 62 % of its line or less (possible).

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    cause : Cause or None
        None where it does not fit.
    """
    if not is_between_nodes(case) or not is_slow(case, Range.BANDWIDTH):
        return None
    plateau = find_plateau(case)
    adapters = case.expectation.links.adapters
    if plateau is None or adapters is None or adapters.rate is None or not adapters.count:
        return None
    if not adapters.is_named or adapters.network == "Socket":
        return None
    rate = find_wire_rate(case, plateau)
    if rate is None:
        return None
    line = adapters.rate.value
    each = rate.high / adapters.count
    if each > _HALF * line or find_kink(case.curve.nbytes, case.curve.busbw) is not None:
        return None
    listed: list[Adapter] = []
    for of_host in list_data_adapters(case).values():
        listed += of_host
    bonds = [adapter for adapter in listed if "bond" in adapter.name]
    text = (
        f"each of {adapters.count} adapters sends {write_rate(each)} of {write_rate(line)} at most"
    )
    evidence = [describe_plateau(case, plateau), Evidence(text, case.file, plateau.line)]
    advice = [
        "ACS off on all PCIe bridges (lspci -vvv: ACSCtl without SrcValid+), unless it is a virtual "
        "machine",
        "width and generation of the slots: lspci -vv, LnkSta against LnkCap",
        "ib_write_bw between the nodes for each adapter, also from the memory of a GPU (--use_cuda)",
    ]
    more_connections = (
        "NCCL_IB_QPS_PER_CONNECTION=2 or 4, where links are bonded or routes are shared"
    )
    if bonds:
        evidence.append(quote(case, bonds[0], f"{bonds[0].name} is a bond of two ports"))
        advice.insert(0, more_connections)
    else:
        advice.append(more_connections)
    if any(adapter.fabric == "RoCE" for adapter in listed):
        advice.append(
            "flow control of the switches (PFC, ECN): RoCE loses most of its rate without"
        )
    return Cause(
        "half of the adapters' rate",
        "adapters are all there and give about half of their rate or less: ACS, a narrow slot, one port "
        "of a bond, or a congested network",
        tuple(evidence),
        tuple(advice),
        ("NVIDIA/nccl-tests#112", "NVIDIA/nccl-tests#265", "NVIDIA/nccl#2409", "NVIDIA/nccl#378"),
        Certainty.POSSIBLE,
        sizes=LARGE_SIZES,
    )


def find_flat_topology(case: Case) -> Cause | None:
    """A virtual machine whose PCIe tree hides which adapter is beside which GPU.

    Evidence: the addresses of all GPUs of a host are on one bus, which no board of several GPUs has
    (possible).

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    cause : Cause or None
        None where it does not fit.
    """
    if not is_between_nodes(case) or not is_slow(case, Range.BANDWIDTH):
        return None
    if take_facts(case).find_settings("NCCL_TOPO_FILE"):
        return None
    for host, buses in take_facts(case).buses.items():
        is_flat = len(buses) > 2 and len(set(buses)) == len(buses)
        if is_flat and len({_cut_device(bus) for bus in buses}) == 1:
            place = next(each for each in take_facts(case).places if each.host == host)
            return Cause(
                "flat topology",
                "a virtual machine shows all GPUs on one bus, so NCCL may pair GPUs with far adapters",
                (quote(case, place, f"PCI addresses of {host}: {join_names(buses)}"),),
                (
                    "give NCCL the topology of the machine: NCCL_TOPO_FILE, from the provider of the cloud",
                    "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=GRAPH prints what NCCL takes it for",
                ),
                ("NVIDIA/nccl-tests#256", "NVIDIA/nccl-tests#389"),
                Certainty.POSSIBLE,
                sizes=LARGE_SIZES,
            )
    return None


def _cut_device(bus: str) -> str:
    """Domain and bus of a PCI address, without the device; the whole where only a bus is printed."""
    return bus.rsplit(":", 1)[0] if bus.count(":") > 1 else bus
