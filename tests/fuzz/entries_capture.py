"""Fuzzers of captures: small steps that are drawn from pieces."""

import ctypes
import math
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

import perfkit as pk
from tests.fuzz.damage import Rng, choose
from tests.fuzz.harness import Entry, Nonsense


@contextmanager
def poison(value: int) -> Iterator[None]:
    """Fill memory with a pattern where it is allocated and where it is released: glibc's
    M_PERTURB."""
    library = ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
    perturb = -6
    if library:
        library.mallopt(perturb, value)
    try:
        yield
    finally:
        if library:
            library.mallopt(perturb, 0)


class Tensors(NamedTuple):
    """Tensors of four rows and columns, and four columns."""

    known: Any  # whose values are known
    places: Any  # whose values are known, and whole numbers
    computed: Any  # whose values a step computes
    columns: Any  # computed, too


def select_rows(t: Tensors) -> Any:
    return t.places[t.columns]


def select_known_rows(t: Tensors) -> Any:
    return t.known[t.places[0] % 4]


def select_by_index(t: Tensors) -> Any:
    return t.places.index_select(0, t.columns)


def leave_unwritten(t: Tensors) -> Any:
    return t.known.new_empty(4, 4)


def fill(t: Tensors) -> Any:
    return t.known.new_empty(4, 4).fill_(2)


def write_half(t: Tensors) -> Any:
    fresh = t.known.new_empty(4, 4)
    fresh[:2] = 1
    return fresh


def write_both_halves(t: Tensors) -> Any:
    fresh = t.known.new_empty(4, 4)
    fresh[:2] = 1
    fresh[2:4] = 3
    return fresh


def write_a_computed_row(t: Tensors) -> Any:
    fresh = t.known.new_empty(4, 4).zero_()
    fresh[0] = t.computed[0]
    return fresh


def copy_computed(t: Tensors) -> Any:
    return t.known.clone().copy_(t.computed)


def copy_known(t: Tensors) -> Any:
    return t.computed.new_empty(4, 4).copy_(t.known)


def draw_numbers(t: Tensors) -> Any:
    return t.known.new_empty(4, 4).uniform_()


def add_one(t: Tensors) -> Any:
    return t.known + 1


def write_a_known_row(t: Tensors) -> Any:
    t.known[0] = 5.0
    return t.known


def write_computed_rows(t: Tensors) -> Any:
    t.known[t.columns] = 5.0
    return t.known


def fill_where_computed(t: Tensors) -> Any:
    return t.known.masked_fill(t.computed > 0, 0.0)


def view_and_select(t: Tensors) -> Any:
    return t.known.view(16)[t.columns].view(2, 2)


#: Pieces of a step: each makes a result from known and computed tensors.
PIECES: tuple[Callable[[Tensors], Any], ...] = (
    select_rows,
    select_known_rows,
    select_by_index,
    leave_unwritten,
    fill,
    write_half,
    write_both_halves,
    write_a_computed_row,
    copy_computed,
    copy_known,
    draw_numbers,
    add_one,
    write_a_known_row,
    write_computed_rows,
    fill_where_computed,
    view_and_select,
)


def fresh_memory(rng: Rng, folder: Path) -> Any:
    """A size that follows from pieces: two patterns in fresh memory give the same answer."""
    chosen = [choose(rng, PIECES) for _ in range(int(rng.integers(1, 4)))]
    seed = int(rng.integers(1000))
    weight = torch.nn.Parameter(torch.ones(4, 4))

    def step() -> None:
        torch.manual_seed(seed)
        with torch.no_grad():
            known, places = torch.ones(4, 4), torch.arange(16).view(4, 4)
            computed = weight * 2
            for make in chosen:
                result = make(Tensors(known, places, computed, computed.argmax(1)))
                if result.shape == (4, 4) and result.dtype is torch.float32:
                    known = result
        rows = int((result < 2).sum())
        (torch.ones(rows, 4) @ weight).sum().backward()

    answers = []
    for pattern in (0x01, 0xBF):
        with poison(pattern):
            try:
                answers.append(str(pk.capture(lambda: step).table().rows()))
            except ValueError as error:
                answers.append(str(error))
    if answers[0] != answers[1]:
        raise Nonsense(f"memory that nobody wrote decides: {answers[0][:90]}; {answers[1][:90]}")
    return None


def read_three_digits(loss: float) -> float:
    return float(f"{loss:.3f}")


def square(loss: float) -> float:
    return float(loss) ** 2


#: What a step makes of a number that it reads.
USES: tuple[Callable[[float], float], ...] = (float, math.exp, math.sqrt, read_three_digits, square)


def read_numbers(rng: Rng, folder: Path) -> Any:
    """A loss that is read as a number: a branch by it is refused, a log of it is not."""
    use = choose(rng, USES)
    decides = rng.random() < 0.5
    limit = float(choose(rng, (0.5, 3, 1e4)))

    def make_step() -> Callable[[], None]:
        net, log = torch.nn.Linear(4, 4), list[float]()

        def step() -> None:
            loss = net(torch.ones(3, 4)).square().mean()
            number = use(loss.item())
            log.append(number)
            if decides and number < limit:
                loss = loss * 2
            loss.backward()

        return step

    refused = False
    try:
        pk.capture(make_step)
    except ValueError as error:
        refused = True
        if not decides:
            raise Nonsense(f"a log is refused: {error}") from None
    if decides and not refused:
        raise Nonsense(f"a number that was not computed decides, below {limit}")
    return None


def unlike_calls(rng: Rng, folder: Path) -> Any:
    """Calls that differ by a counter, by growing batches or by draws say so, like ones do not."""
    every = int(choose(rng, (1, 1, 2, 3)))
    growth = int(choose(rng, (0, 0, 5)))
    share = 0.5 if rng.random() < 0.3 else 0.0

    def make_step() -> Callable[[], None]:
        layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(5))
        optimizer = torch.optim.AdamW(layers.parameters())
        count = 0

        def step() -> None:
            nonlocal count
            count += 1
            x = torch.ones(3 + growth * count, 4)
            for place, layer in enumerate(layers):
                if place == 0 or not share or torch.rand([]) >= share:
                    x = layer(x)
            x.sum().backward()
            if count % every == 0:
                optimizer.step()
                optimizer.zero_grad()

        return step

    notes = pk.capture(make_step).notes
    if bool(notes) != (every > 1 or growth > 0 or share > 0):
        raise Nonsense(f"every {every}, growth {growth}, share {share}: notes {notes}")
    return None


def sparse_sums(rng: Rng, folder: Path) -> Any:
    """Sparse gradients of micro-batches add up their rows, as in PyTorch."""
    batches, lookups = int(rng.integers(1, 5)), int(rng.integers(1, 50))
    kind = choose(rng, (torch.nn.Embedding, torch.nn.EmbeddingBag))
    rows: list[int] = []

    def make_step() -> Callable[[], None]:
        table = kind(1000, 4, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            for _ in range(batches):
                table(torch.randint(1000, (lookups, 1))).sum().backward()
            rows.append(table.weight.grad._nnz())
            optimizer.step()

        return step

    pk.capture(make_step)
    if set(rows) != {batches * lookups}:
        raise Nonsense(f"{batches} times {lookups} lookups, and {set(rows)} rows of the gradient")
    return None


def host_tensors(rng: Rng, folder: Path) -> Any:
    """Tensors of the host are moved to the GPU once a call each; work on them is noted."""
    moved, works = int(rng.integers(0, 4)), rng.random() < 0.5

    def make_step() -> Callable[[], None]:
        net = torch.nn.Linear(4, 4).to("cuda")
        placed = torch.ones(3, 4, device="cuda")
        batches = [torch.ones(3, 4) for _ in range(moved)]

        def step() -> None:
            loss = net(placed.to("cuda")).sum()
            for batch in batches:
                loss = loss + net((batch * 2 if works else batch).to("cuda")).sum()
            loss.backward()

        return step

    graph = pk.capture(make_step, device="cuda")
    if len(graph.transfers) != moved or bool(graph.notes) != (works and moved > 0):
        raise Nonsense(f"{moved} moved, work {works}: {len(graph.transfers)} and {graph.notes}")
    return None


ENTRIES: dict[str, Entry] = {
    "captured-memory": Entry(fresh_memory, share=0.02, new=True),
    "captured-numbers": Entry(read_numbers, share=0.02, new=True),
    "captured-calls": Entry(unlike_calls, share=0.02, new=True),
    "captured-sparse-sums": Entry(sparse_sums, share=0.02, new=True),
    "captured-host-tensors": Entry(host_tensors, share=0.02, new=True),
}
