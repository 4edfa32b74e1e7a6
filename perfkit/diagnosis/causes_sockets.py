"""Signatures of the network that NCCL takes: sockets instead of adapters, and a wrong interface."""

import re
from collections.abc import Sequence

from perfkit.diagnosis.causes_adapters import list_data_adapters
from perfkit.diagnosis.evidence import (
    Plateau,
    advise_unset,
    describe_plateau,
    describe_startup,
    find_plateau,
    find_wire_rate,
    is_between_nodes,
    is_slow,
    join_names,
    list_settings,
    name_settings,
    quote,
    quote_settings,
    take_facts,
    write_line_rate,
    write_rate,
)
from perfkit.diagnosis.known_rates import find_ethernet
from perfkit.diagnosis.nccl_variables import Effect
from perfkit.diagnosis.records import Case, Cause, Certainty, Evidence
from perfkit.diagnosis.shapes import KINK
from perfkit.diagnosis.systems import is_on_ec2
from perfkit.ground.units import escape
from perfkit.readers.log_facts import Adapter

#: Interfaces of containers, bridges and the host itself, which lead to no other node or are slow.
_VIRTUAL = re.compile(
    r"lo|docker\d*|virbr\d*|br-\w+|veth\w*|cni\d*|flannel\S*|cali\w*|tun\d*|tap\d*|wl\w+"
)
#: Where sockets are guessed by figures alone, they give no more than this share of what is expected
#: [-]: a card of 100 Gb/s gives 6 GB/s over TCP (NVIDIA/nccl#398), adapters of 400 Gb/s for eight GPUs
#: 370.
_FAR_BELOW = 0.25


def _describe_ethernet(case: Case, plateau: Plateau) -> Evidence | None:
    """The rate of a node, as a card of Ethernet that gives it."""
    rate = find_wire_rate(case, plateau)
    if rate is None:
        return None
    low, high = find_ethernet(rate.low), find_ethernet(rate.high)
    if low is None:
        return None
    text = f"a node sends {write_rate(rate.low)} = {write_line_rate(rate.low)}"
    if not rate.is_certain:
        text += f" by a tree, or {write_rate(rate.high)} by a ring"
    text += f", as a card of {write_line_rate(low)}"
    if high is not None and high != low:
        text += f" or {write_line_rate(high)}"
    return Evidence(text + " gives", case.file, plateau.line)


def find_sockets(case: Case) -> Cause | None:
    """TCP sockets instead of InfiniBand, RoCE or EFA.

    Evidence: "Using network Socket" (seen); or, where the log says nothing of networks, a rate that
    Ethernet gives and less than a quarter of what is expected, with a start-up that is slow, too.

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
    plateau = find_plateau(case)
    networks = take_facts(case).networks
    sockets = [network for network in networks if network.text == "Socket"]
    if networks and not sockets:
        return None
    if sockets:
        return _explain_sockets(case, plateau)
    return _guess_sockets(case, plateau)


def _explain_sockets(case: Case, plateau: Plateau | None) -> Cause:
    """Sockets that the log names, and why NCCL takes them."""
    facts = take_facts(case)
    first = next(network for network in facts.networks if network.text == "Socket")
    evidence = [quote(case, first, "NCCL says: Using network Socket")]
    interfaces = [adapter for adapter in facts.adapters if adapter.fabric == "Socket"]
    if interfaces:
        names = join_names(dict.fromkeys(adapter.name for adapter in interfaces))
        evidence.append(quote(case, interfaces[0], f"data pass over {names}"))
    if plateau is not None:
        evidence.append(describe_plateau(case, plateau))
        ethernet = _describe_ethernet(case, plateau)
        if ethernet is not None:
            evidence.append(ethernet)
    startup = describe_startup(case)
    if startup is not None:
        evidence.append(startup)
    settings = list_settings(case, Effect.NO_ADAPTERS)
    topics = {remark.topic for remark in facts.remarks}
    reason = ""
    advice = []
    if settings:
        names = name_settings(settings)
        reason = f", because of {names}"
        evidence[1:1] = quote_settings(case, settings)
        advice.append(advise_unset(settings))
    elif "no libibverbs" in topics:
        reason = ", because libibverbs is missing"
        advice.append("install libibverbs (rdma-core) in the container or on the nodes")
    elif "no IB device" in topics:
        reason = ", because it finds no adapter"
        for name in ("NCCL_IB_HCA", "NCCL_NET_PLUGIN"):
            for setting in facts.find_settings(name):
                evidence.append(quote(case, setting, f"{name}={setting.value}"))
                advice.append(f"see whether {name}={setting.value} leaves out what should be used")
    told = ["no libibverbs", "no IB device"]
    if is_on_ec2(facts) and not settings:
        reason = ", as it does not use EFA"
        if "no network plugin" in topics:
            reason = ", because the plugin of EFA (aws-ofi-nccl) is missing"
        told.append("no network plugin")
        host = facts.hosts[0]
        evidence.append(Evidence(f"hosts are named as on EC2: {escape(host, 40)}", case.file))
        advice = [
            "install aws-ofi-nccl and libfabric in the image, and see that libnccl-net.so is on LD_LIBRARY_PATH",
            "see that the instances have adapters of EFA (fi_info -p efa) and that the container sees them",
            'run with NCCL_DEBUG=INFO and expect "NET/OFI" with the provider efa',
        ]
    else:
        advice += [
            "see that /dev/infiniband is in the container, and that ibv_devinfo lists the adapters as active",
            'on EFA, see that the plugin of libfabric (aws-ofi-nccl) is found: "NET/Plugin" in the log',
            'run with NCCL_DEBUG=INFO and expect "Using network IB", or the name of the plugin',
        ]
    quoted = set[str]()
    for remark in facts.remarks:
        if remark.topic in told and remark.text not in quoted:  # each host says it
            evidence.append(quote(case, remark, remark.text))
            quoted.add(remark.text)
    return Cause(
        "sockets",
        f"NCCL sends data between nodes over TCP sockets{reason}",
        tuple(evidence),
        tuple(advice),
        ("NVIDIA/nccl#451", "NVIDIA/nccl-tests#188", "NVIDIA/nccl#837", "areal-project/AReaL#639"),
        Certainty.SEEN,
    )


def _guess_sockets(case: Case, plateau: Plateau | None) -> Cause | None:
    """Sockets by figures alone."""
    expected = case.expectation.busbw
    if plateau is None or expected is None or plateau.busbw > _FAR_BELOW * expected:
        return None
    if case.curve.busbw.max() > KINK * plateau.busbw:
        return None  # the network itself gives more
    ethernet = _describe_ethernet(case, plateau)
    if ethernet is None:
        return None
    evidence = [describe_plateau(case, plateau), ethernet]
    certainty = Certainty.POSSIBLE
    startup = describe_startup(case)
    if startup is not None:
        evidence.append(startup)
        certainty = Certainty.LIKELY
    return Cause(
        "sockets",
        "the rate is that of TCP over Ethernet; NCCL may not use the faster adapters, or the nodes have "
        "none",
        tuple(evidence),
        (
            'run with NCCL_DEBUG=INFO and look for "Using network"',
            "if it says Socket: unset NCCL_IB_DISABLE and NCCL_NET, see that /dev/infiniband is in the "
            "container and that libibverbs loads",
        ),
        ("NVIDIA/nccl#451", "NVIDIA/nccl-tests#188", "NVIDIA/nccl#398"),
        certainty,
    )


def find_wrong_interface(case: Case) -> Cause | None:
    """Adapters of another network than that of the GPUs.

    Evidence: sockets over an interface of containers or of the host itself (seen), or a list of
    adapters that has InfiniBand and Ethernet at once (possible).

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
    adapters = take_facts(case).adapters
    uses_sockets = any(network.text == "Socket" for network in take_facts(case).networks)
    virtual = [
        adapter
        for adapter in adapters
        if adapter.fabric == "Socket" and _VIRTUAL.fullmatch(adapter.name)
    ]
    if uses_sockets and virtual:
        names = join_names(dict.fromkeys(adapter.name for adapter in virtual))
        return Cause(
            "wrong interface",
            f"sockets use {names}, an interface of containers or of the host itself",
            (quote(case, virtual[0], f"NCCL lists {names}"),),
            (
                "set NCCL_SOCKET_IFNAME to the interface between the nodes (ip -br addr), or exclude "
                f"this one: NCCL_SOCKET_IFNAME=^{virtual[0].name}",
            ),
            ("NVIDIA/nccl-tests#62",),
            Certainty.SEEN,
        )
    fabrics = {adapter.fabric for adapter in adapters} & {"IB", "RoCE"}
    if len(fabrics) < 2:
        return _find_too_many(case)
    others = _list_rarer(adapters)
    names = join_names(dict.fromkeys(adapter.name for adapter in others))
    return Cause(
        "wrong interface",
        f"NCCL uses InfiniBand and Ethernet adapters at once; {names} may belong to storage or management",
        (quote(case, others[0], f"NCCL lists {names} as {others[0].fabric} beside others"),),
        (
            "name the adapters of the GPUs: NCCL_IB_HCA=mlx5_0,mlx5_1, … (nvidia-smi topo -m shows which "
            "are beside a GPU)",
        ),
        ("NVIDIA-NeMo/RL#3670",),
        Certainty.POSSIBLE,
    )


def _find_too_many(case: Case) -> Cause | None:
    """More adapters than GPUs, and no multiple of them: some are of another network."""
    local = case.expectation.ranks_per_node
    by_host = list_data_adapters(case)
    if not by_host or local is None or local < 2:
        return None
    listed = max(by_host.values(), key=len)
    if len(listed) <= local or len(listed) % local == 0:
        return None
    names = join_names((adapter.name for adapter in listed), most=16)
    return Cause(
        "wrong interface",
        f"NCCL uses {len(listed)} adapters for {local} GPUs; some may belong to storage or management",
        (quote(case, listed[0], f"NCCL lists {names}"),),
        (
            "name the adapters of the GPUs: NCCL_IB_HCA=mlx5_0,mlx5_1, … (nvidia-smi topo -m shows which "
            "are beside a GPU)",
        ),
        ("NVIDIA-NeMo/RL#3670",),
        Certainty.POSSIBLE,
    )


def _list_rarer(adapters: Sequence[Adapter]) -> list[Adapter]:
    """Adapters of the fabric that has fewer."""
    by_fabric: dict[str, list[Adapter]] = {}
    for adapter in adapters:
        if adapter.fabric in ("IB", "RoCE"):
            by_fabric.setdefault(adapter.fabric, []).append(adapter)
    return min(by_fabric.values(), key=len)
