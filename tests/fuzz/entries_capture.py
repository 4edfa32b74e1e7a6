"""Fuzzers of captures: small steps that are drawn from pieces."""

import ctypes
import math
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def _write(tensor: Any, place: Any, value: Any) -> Any:
    tensor[place] = value
    return tensor


#: Pieces of a step: a result from known (`k`, `n`) and computed (`u`, `i`) tensors.
PIECES: list[Callable[[Any, Any, Any, Any], Any]] = [
    lambda k, n, u, i: n[i],
    lambda k, n, u, i: k[n[0] % 4],
    lambda k, n, u, i: n.index_select(0, i),
    lambda k, n, u, i: k.new_empty(4, 4),
    lambda k, n, u, i: k.new_empty(4, 4).fill_(2),
    lambda k, n, u, i: _write(k.new_empty(4, 4), slice(2), 1),
    lambda k, n, u, i: _write(_write(k.new_empty(4, 4), slice(2), 1), slice(2, 4), 3),
    lambda k, n, u, i: _write(k.new_empty(4, 4).zero_(), 0, u[0]),
    lambda k, n, u, i: k.clone().copy_(u),
    lambda k, n, u, i: u.new_empty(4, 4).copy_(k),
    lambda k, n, u, i: k.new_empty(4, 4).uniform_(),
    lambda k, n, u, i: k + 1,
    lambda k, n, u, i: _write(k, 0, 5.0),
    lambda k, n, u, i: _write(k, i, 5.0),
    lambda k, n, u, i: k.masked_fill(u > 0, 0.0),
    lambda k, n, u, i: k.view(16)[i].view(2, 2),
]


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
                result = make(known, places, computed, computed.argmax(1))
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


#: What a step makes of a number that it reads.
USES: list[Callable[[float], float]] = [
    float,
    math.exp,
    math.sqrt,
    lambda loss: float(f"{loss:.3f}"),
    lambda loss: float(loss) ** 2,
]


def read_numbers(rng: Rng, folder: Path) -> Any:
    """A loss that is read as a number: a branch by it is refused, a log of it is not."""
    use, decides, limit = choose(rng, USES), rng.random() < 0.5, float(choose(rng, (0.5, 3, 1e4)))

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
    every, growth, share = (int(choose(rng, (1, 1, 2, 3))), int(choose(rng, (0, 0, 5))), 0.0)
    if rng.random() < 0.3:
        share = 0.5

    def make_step() -> Callable[[], None]:
        layers, count = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(5)), [0]
        optimizer = torch.optim.AdamW(layers.parameters())

        def step() -> None:
            count[0] += 1
            x = torch.ones(3 + growth * count[0], 4)
            for place, layer in enumerate(layers):
                if place == 0 or not share or torch.rand([]) >= share:
                    x = layer(x)
            x.sum().backward()
            if count[0] % every == 0:
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
