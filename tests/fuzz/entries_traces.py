"""Fuzzers of traces that are well formed: what they name, what they lack, and in which order."""

import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

import perfkit as pk
from tests.fuzz.damage import Rng, choose
from tests.fuzz.harness import Entry, Nonsense
from tests.recordings import Event, exchange, healthy, operation, step, write, write_ranks

#: All operators of PyTorch's library, those of its scripts included.
OPERATORS = sorted(
    {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")}
)


def takes_no_tensor(name: str) -> bool:
    """Whether an operator takes no tensor in one of its forms: numbers, texts, settings."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    if not packet:
        return False
    for form in packet.overloads():
        arguments = getattr(packet, form)._schema.arguments
        if not any("Tensor" in str(argument.type) for argument in arguments):
            return True
    return False


WITHOUT_TENSORS = [name for name in OPERATORS if takes_no_tensor(name)]
#: Words of the names of operators that draw random numbers, or set something.
SETS = re.compile("rand|seed|set_|normal")
SETTINGS = [name for name in OPERATORS if SETS.search(name)]
#: Types and texts of arguments, as traces have them.
ARGUMENTS = (
    ("float", ""),
    ("long int", ""),
    ("Scalar", "7"),
    ("Scalar", "True"),
    ("Scalar", "0.5"),
    ("Scalar", "100000"),
    ("ScalarList", "[1, 2]"),
    ("ScalarList", "[100000, 100000]"),
    ("Scalar", "'name.txt'"),
    ("TensorList(float)", ""),
    ("", ""),
)


def read_settings() -> tuple[Any, ...]:
    """What a trace must leave as it is."""
    return (
        torch.initial_seed(),
        hash(torch.get_rng_state().numpy().tobytes()),
        torch.get_default_dtype(),
        str(torch.get_default_device()),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_num_threads(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )


def name_operators(rng: Rng, folder: Path) -> None:
    """A trace names operators and their arguments; settings, files and output stay."""
    events = [step(0, 100_000)]
    for number in range(6):
        chosen = [choose(rng, ARGUMENTS) for _ in range(rng.integers(1, 3))]
        sizes: list[Any] = []
        for kind, _ in chosen:
            lists = [[2, 3], [2, 3]] if kind.startswith("TensorList") else []
            sizes.append([2, 3] if kind in ("float", "long int") else lists)
        names = choose(rng, (OPERATORS, WITHOUT_TENSORS, SETTINGS))
        called = operation(choose(rng, names), 200.0 * number, 101 + number)
        called[0]["args"] |= {
            "Input Dims": sizes,
            "Input type": [kind for kind, _ in chosen],
            "Concrete Inputs": [text for _, text in chosen],
        }
        events += called
    path = write(folder / "t.json", events)
    before, told = read_settings(), io.StringIO()
    seed = torch.initial_seed()
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    try:
        with redirect_stdout(told):
            pk.read_trace(path).graph()
        if read_settings() != before or told.getvalue() or len(list(folder.iterdir())) > 1:
            raise Nonsense(f"{[each['name'] for each in events if each['cat'] == 'cpu_op']}")
    finally:
        torch.manual_seed(seed)
        torch.set_rng_state(state)
        torch.set_num_threads(threads)


def draw_rank(rng: Rng) -> tuple[list[Event], int]:
    """A step with operations and exchanges, and how many exchanges it has."""
    events = [step(0, 20_000)]
    count = int(rng.integers(1, 5))
    place = 20.0
    for number in range(count):
        events += operation("aten::mm", place, 11 + number, took=float(rng.integers(5, 100)))
        parts = [
            (place + 150 + 40 * part, float(rng.integers(2, 30)))
            for part in range(rng.integers(1, 4))
        ]
        events += exchange(place + 140, 51 + number, parts)
        place += 500
    return events, count


def exchange_in_parts(rng: Rng, folder: Path) -> None:
    """Each exchange is one collective, however many kernels it runs."""
    rank, count = draw_rank(rng)
    met = pk.read_trace(write_ranks(folder, [rank, rank])).collectives()
    if len(met) != 2 * count or set(met["operation"]) != {"all_gather"}:
        raise Nonsense(f"{len(met)} collectives of {2 * count} exchanges")


def lose_events(rng: Rng, folder: Path) -> None:
    """What is left out of a trace is said, and nothing is said of a whole one."""
    loss = choose(rng, ("nothing", "kernels", "all kernels", "host", "sizes", "an end"))
    events = [step(0, 30_000)]
    for number in range(int(rng.integers(4, 12))):
        events += operation("aten::mm", 20 + 300.0 * number, 101 + number)
    kernels = [each for each in events if each["cat"] == "kernel"]
    if loss == "kernels":
        events = [each for each in events if each not in kernels[1::2]]
    elif loss == "all kernels":
        events = [each for each in events if each not in kernels]
    elif loss == "host":
        events = kernels
    elif loss == "sizes":
        for link in range(500, 505):
            events += operation("own::step", 20.0 * link, link, sized=False)
    elif loss == "an end":
        kernels[0]["dur"] = 1e9
    path = write(folder / "t.json", events)
    try:
        trace = pk.read_trace(path)
    except ValueError:
        if loss == "all kernels":
            return
        raise
    said = [text for text in trace.warnings if "profiler also" not in text]
    if loss == "sizes":
        graph_of(trace)
    elif bool(said) == (loss == "nothing"):
        raise Nonsense(f"of a trace without {loss} it says {said}")


def graph_of(trace: pk.Trace) -> None:
    """Make a graph, which has to tell of operations without sizes."""
    import warnings

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trace.graph()
    if not any("have no sizes" in str(each.message) for each in told):
        raise Nonsense("operations without sizes have no work")


def spoil_text(rng: Rng, folder: Path) -> None:
    """A spoiled text is refused with the cause that it has."""
    path = write(folder / "t.json", healthy())
    text = path.read_text()
    at = text.index("aten::add")
    backslash = choose(rng, ("C:\\lib\\", "\\ ", "\\x"))
    no_number = choose(rng, ("N/A", "nan", "inf"))
    end = int(rng.integers(len(text) // 2, len(text) - 1))
    spoiled_texts = {
        "backslash": text[:at] + backslash + text[at:],
        "quotation mark": text[:at] + '"' + text[at:],
        "is no number": text.replace('"dur": 30', f'"dur": {no_number}'),
        "cut off": text[:end],
        "comment": text.replace("[{", "[ // by hand\n{", 1),
        "empty": " \n",
    }
    cause = choose(rng, list(spoiled_texts))
    spoiled = spoiled_texts[cause]
    path.write_text(spoiled)
    try:
        pk.read_trace(path)
    except ValueError as error:
        if cause not in str(error):
            raise Nonsense(f"instead of {cause}: {error}") from None
    else:
        raise Nonsense(f"{cause}: read all the same")


def list_ranks_of_jitter(trace: pk.Trace) -> Any:
    """What each rank took, without waiting."""
    return trace.jitter().by_rank()


def change_order(rng: Rng, folder: Path) -> None:
    """Events and files in another order give the same, whatever the ranks have in common."""
    ranks = []
    for _ in range(3):
        events = []
        for number in range(2):
            events.append(step(3000.0 * number, 2900, number + 1))
            for place in range(3):
                name = choose(rng, ("aten::mm", "aten::add", "aten::relu"))
                link = 10 * number + place + 1
                events += operation(name, 3000.0 * number + 300 * place + 20, link)
        ranks.append(events)
    views: list[Callable[[pk.Trace], Any]] = [
        pk.Trace.idle,
        pk.Trace.breakdown,
        pk.Trace.steps,
        list_ranks_of_jitter,
    ]
    found = []
    for name in ("a", "b"):
        (folder / name).mkdir()
        paths = write_ranks(folder / name, ranks)
        rng.shuffle(paths)  # type: ignore[arg-type]
        try:
            trace = pk.read_trace(paths)
            found.append([view(trace) for view in views])
        except ValueError as error:
            raise Nonsense(f"whole traces are refused: {error}") from None
        for events in ranks:
            rng.shuffle(events)  # type: ignore[arg-type]
    for one, other in zip(*found, strict=True):
        if not one.equals(other):
            raise Nonsense(f"{one} and {other}")


ENTRIES = {
    "trace-operators": Entry(name_operators, 0.1, new=True),
    "trace-exchanges": Entry(exchange_in_parts, 0.2, new=True),
    "trace-losses": Entry(lose_events, 0.2, new=True),
    "trace-causes": Entry(spoil_text, 0.3, new=True),
    "trace-order": Entry(change_order, 0.1, new=True),
}
