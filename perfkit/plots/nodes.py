"""A drawing of a node: one GPU with its memory, the other GPUs, the host and the network."""

import altair as alt

from perfkit.ground.forms import refuse_misfits
from perfkit.ground.hardware import Device, HostMemory, MemoryLevel, Network, Quantity
from perfkit.ground.units import check_type, format_bytes, format_count, format_rate
from perfkit.plots.colours import CLASSES, INK, PALETTE
from perfkit.plots.drawings import Box, Line, Words, lay_out

_WIDTH, _HEIGHT = 640, 372
#: Most boxes of other GPUs; more are counted in the last one.
_MOST_GPUS = 7
#: Colours of parts and of the lines that lead to them.
_COMPUTE, _CACHE, _MEMORY = CLASSES["gemm"], PALETTE[5], CLASSES["lookup"]
_LINK, _HOST, _ADAPTER = CLASSES["communication"], CLASSES["host"], PALETTE[2]
#: The formats whose peak is drawn: the first that a device has.
_FORMATS = ("bf16", "fp16", "fp32")


@refuse_misfits("give the device and the network of a platform")
def draw_node(
    device: Device,
    network: Network,
    *,
    host: HostMemory | None = None,
    host_link: str = "from host",
    multiprocessors: int | None = None,
    title: str = "A node",
) -> alt.LayerChart:
    """Draw a node with the rates of its parts: one device from its arithmetic to its memory, the
    other devices, the host and the network.

    Parameters
    ----------
    device : Device
        What one rank computes on.
    network : Network
        How ranks are connected.
    host : HostMemory, optional
        Memory of the host, and how fast a device copies from it.
    host_link : str, optional
        What these copies pass, such as ``PCIe``.
    multiprocessors : int, optional
        Multiprocessors of the device [-].
    title : str, optional
        Heading.

    Returns
    -------
    chart : altair.LayerChart
        Boxes are parts; the rate beside a line is what it carries, of links one way for one device.
    """
    check_type("device", device, Device)
    check_type("network", network, Network)
    check_type("host_link", host_link, str)
    check_type("title", title, str)
    noun = "GPU" if device.kind == "cuda" else "rank"
    frames = [
        Box(10, 10, 630, 318, "", INK, opacity=0.0, border=1.0),
        Box(22, 42, 272, 240, "", INK, opacity=0.04, border=1.0),
    ]
    boxes: list[Box] = []
    lines: list[Line] = []
    heading_of_node = f"one node: {format_count(network.ranks_per_node, noun)}"
    words = [Words(20, 26, heading_of_node, weight="bold")]
    _add_device(device, noun, multiprocessors, boxes, words)
    if "intra" in network.links:
        _add_other_devices(network, noun, boxes, lines, words)
    if host is not None:
        _add_host(host, host_link, boxes, lines, words)
    if "inter" in network.links:
        _add_network(network, boxes, lines, words)
    note = "rates of links: one way, for one device; of memory: reads and writes together"
    heading = alt.Title(title, subtitle=note)
    return lay_out(boxes, lines, words, frames=frames, width=_WIDTH, height=_HEIGHT, title=heading)


def _add_device(
    device: Device, noun: str, multiprocessors: int | None, boxes: list[Box], words: list[Words]
) -> None:
    """The device, from its arithmetic to its memory."""
    words.append(Words(32, 56, f"{noun} 0: {device.name}"))
    boxes.append(Box(37, 70, 257, 106, _describe_arithmetic(device, multiprocessors), _COMPUTE))
    levels = list(device.memory[-2:])
    top = 128 if len(levels) > 1 else 184
    for level in levels:
        is_main = level is device.memory[-1]
        color = _MEMORY if is_main else _CACHE
        boxes.append(Box(37, top, 257, top + 34, _describe_level(level), color))
        if level.bandwidth is not None:
            words.append(Words(147, top - 11, f"↕ {_write_rate(level.bandwidth)}", "center"))
        top += 56


def _describe_arithmetic(device: Device, multiprocessors: int | None) -> str:
    """How many multiprocessors, and what they compute in a second."""
    lines = []
    if multiprocessors is not None:
        lines.append(f"{multiprocessors} multiprocessors (SM)")
    for name in _FORMATS:
        if name in device.peaks:
            rate = format_rate(device.peaks[name].value, "FLOP/s")
            lines.append(f"{rate} in {name}")
            break
    return "\n".join(lines)


def _describe_level(level: MemoryLevel) -> str:
    """Name and size of a memory."""
    if level.capacity is None:
        return level.name
    return f"{level.name}: {format_bytes(level.capacity.value)}"


def _add_other_devices(
    network: Network, noun: str, boxes: list[Box], lines: list[Line], words: list[Words]
) -> None:
    """The link of the node, and the devices behind it."""
    link = network.links["intra"]
    lines.append(Line(272, 140, 362, 140, _LINK))
    words.append(Words(317, 130, _write_rate(link.bandwidth), "center"))
    others = network.ranks_per_node - 1
    shown = min(others, _MOST_GPUS)
    for number in range(shown):
        middle = 54 + 28 * number
        text = f"{noun} {number + 1}"
        if number + 1 == shown and others > shown:
            text = f"{others - shown + 1} more"
        lines.append(Line(392, middle, 440, middle, _LINK))
        boxes.append(Box(440, middle - 11, 610, middle + 11, text, INK, opacity=0.04, border=1.0))
    boxes.append(Box(362, 42, 392, 240, "", _LINK))
    words.append(Words(377, 140, link.name or "link", "center", angle=270))


def _add_host(
    host: HostMemory, host_link: str, boxes: list[Box], lines: list[Line], words: list[Words]
) -> None:
    """The memory of the host."""
    size = format_bytes(host.capacity.value)
    text = f"host memory: {size}, {_write_rate(host.bandwidth)}"
    lines.append(Line(60, 240, 60, 276, _HOST))
    words.append(Words(68, 257, f"{host_link} {_write_rate(host.from_host)}"))
    boxes.append(Box(22, 276, 250, 308, text, _HOST))


def _add_network(network: Network, boxes: list[Box], lines: list[Line], words: list[Words]) -> None:
    """The adapter of the device, and the other nodes."""
    link = network.links["inter"]
    lines.append(Line(265, 240, 265, 258, _ADAPTER))
    lines.append(Line(265, 258, 317, 258, _ADAPTER))
    lines.append(Line(317, 258, 317, 340, _ADAPTER))
    words.append(Words(325, 257, _write_rate(link.bandwidth)))
    boxes.append(Box(272, 276, 362, 308, "adapter", _ADAPTER))
    others = network.nodes - 1
    boxes.append(Box(210, 340, 424, 366, f"network to {others} other nodes", _ADAPTER))


def _write_rate(rate: Quantity) -> str:
    return format_rate(rate.value, "B/s")
