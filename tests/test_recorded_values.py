"""What a capture takes for known: what was computed from known tensors, and nothing else."""

import ctypes
import platform
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="capture needs torch: pip install 'perfkit[measure]'")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from perfkit.recording.steps import capture  # noqa: E402
from perfkit.workloads.graph import Graph  # noqa: E402


def count_rows(make: Callable[[Any, Any, Any, Any], Any]) -> Graph:
    """Capture a step whose size depends on a result of known (`k`, `n`) and computed (`u`, `i`)
    tensors."""
    weight = nn.Parameter(torch.randn(4, 4))

    def step() -> None:
        with torch.no_grad():
            computed = weight * 2
            chosen = computed.argmax(1)
            known, places = torch.ones(4, 4), torch.arange(16).view(4, 4)
            result = make(known, places, computed, chosen)
        rows = int((result < 8).sum())
        (torch.ones(rows, 4) @ weight).sum().backward()

    return capture(lambda: step)


#: Results that nobody can know: they depend on a computed tensor, or hold memory nobody wrote.
UNKNOWN: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "index": lambda k, n, u, i: n[i],
    "index of two": lambda k, n, u, i: n[i, i],
    "embedding": lambda k, n, u, i: F.embedding(i, k),
    "index_select": lambda k, n, u, i: n.index_select(0, i),
    "gather": lambda k, n, u, i: n.gather(1, i[:, None]),
    "take": lambda k, n, u, i: n.take(i),
    "empty_like": lambda k, n, u, i: torch.empty_like(k),
    "new_empty": lambda k, n, u, i: k.new_empty(3),
    "new_empty_strided": lambda k, n, u, i: k.new_empty_strided((3,), (1,)),
    "empty": lambda k, n, u, i: torch.empty(4),
    "half filled": lambda k, n, u, i: k.new_empty(4).index_fill_(0, n[0, :2], 1.0),
    "half sliced": lambda k, n, u, i: _fill_half(k.new_empty(4)),
    "copied": lambda k, n, u, i: torch.empty_like(u).copy_(u),
    "filled, then copied": lambda k, n, u, i: torch.empty_like(u).fill_(1).copy_(u),
    "filled, then a part copied": lambda k, n, u, i: _copy_part(torch.empty_like(k).fill_(1), u),
    "filled, then a part drawn": lambda k, n, u, i: _draw_part(torch.empty_like(k).fill_(1), u),
    "known, then a part copied": lambda k, n, u, i: _copy_part(k, u),
    "data replaced": lambda k, n, u, i: _replace(k, u),
    "clone of empty": lambda k, n, u, i: torch.empty_like(k).clone(),
    "grown": lambda k, n, u, i: torch.ones(4).resize_(64),
    "where": lambda k, n, u, i: torch.where(u > 0, k, k),
    "cat": lambda k, n, u, i: torch.cat([k, u]),
    "put": lambda k, n, u, i: k.index_put((i,), k),
}
#: Results of known tensors alone, and memory that is filled.
KNOWN: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "index": lambda k, n, u, i: n[n[0] % 4],
    "embedding": lambda k, n, u, i: F.embedding(n[0] % 4, k),
    "empty, then filled": lambda k, n, u, i: torch.empty(4).fill_(1),
    "empty_like, then filled": lambda k, n, u, i: torch.empty_like(u).fill_(1),
    "new_empty, then zeros": lambda k, n, u, i: k.new_empty(3).zero_(),
    "two halves": lambda k, n, u, i: _fill_halves(k.new_empty(4)),
    "copied from known": lambda k, n, u, i: torch.empty_like(n).copy_(k),
    "drawn": lambda k, n, u, i: torch.empty(4).uniform_(),
    "pad": lambda k, n, u, i: F.pad(k, (1, 1)),
    "known after an index by computed": lambda k, n, u, i: (n[i], n)[1],
}


def _fill_half(tensor: Any) -> Any:
    tensor[:2] = 1
    return tensor


def _fill_halves(tensor: Any) -> Any:
    tensor[:2], tensor[2:] = 1, 2
    return tensor


def _copy_part(tensor: Any, source: Any) -> Any:
    tensor[0] = source[0]
    return tensor


def _draw_part(tensor: Any, share: Any) -> Any:
    tensor[0].bernoulli_(share[0].abs())
    return tensor


def _replace(tensor: Any, source: Any) -> Any:
    tensor.data = source
    return tensor


@pytest.mark.parametrize("name", UNKNOWN)
def test_sizes_do_not_depend_on_what_was_not_computed(name: str) -> None:
    with pytest.raises(ValueError, match=r"capture computes no values.*int\(\(result < 8\)"):
        count_rows(UNKNOWN[name])


@pytest.mark.parametrize("name", KNOWN)
def test_sizes_depend_on_what_was_computed_from_known_tensors(name: str) -> None:
    assert len(count_rows(KNOWN[name]))


@contextmanager
def poison(value: int) -> Iterator[None]:
    """Fill memory with a pattern where it is allocated and where it is released: glibc's
    M_PERTURB."""
    library, perturb = ctypes.CDLL(None), -6
    library.mallopt(perturb, value)
    try:
        yield
    finally:
        library.mallopt(perturb, 0)


def draw_program(seed: int) -> Callable[[], Any]:
    """A step of pieces that are drawn: known tensors are indexed, filled and copied, by known and
    by computed ones, and a size follows from the last of them."""
    rng = np.random.default_rng(seed)
    pieces: list[Callable[[Any, Any, Any, Any], Any]] = [*UNKNOWN.values(), *KNOWN.values()]
    chosen = [pieces[place] for place in rng.integers(len(pieces), size=3)]
    weight = nn.Parameter(torch.ones(4, 4))

    def step() -> None:
        with torch.no_grad():
            known, places = torch.ones(4, 4), torch.arange(16).view(4, 4)
            computed = weight * 2
            for make in chosen:
                result = make(known, places, computed, computed.argmax(1))
                if result.shape == (4, 4) and result.dtype is torch.float32:
                    known = result
        rows = int((result < 8).sum())
        (torch.ones(rows, 4) @ weight).sum().backward()

    return step


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="M_PERTURB is glibc's")
@pytest.mark.parametrize("seed", range(40))
def test_memory_that_nobody_wrote_does_not_decide(seed: int) -> None:
    found = []
    for pattern in (0x01, 0xBF, 0x7F):
        with poison(pattern):
            try:
                graph = capture(lambda: draw_program(seed))
            except (ValueError, IndexError) as error:
                found.append(type(error).__name__)
            else:
                found.append(
                    str(
                        [
                            (operation.name, operation.features)
                            for operation in map(graph.__getitem__, range(len(graph)))
                        ]
                    )
                )
    assert found[0] == found[1] == found[2]
    assert "IndexError" not in found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_arrays_of_computed_numbers_are_zeros_in_memory_of_their_own(device: str) -> None:
    weight, arrays = nn.Parameter(torch.randn(100, 3)), []

    def step() -> None:
        for dtype in (torch.float32, torch.float64, torch.float16):
            array = np.asarray((weight * 2).detach().to(dtype).cpu())
            plain = array.view(np.ndarray)
            junk = [torch.full((100, 3), float("nan")) for _ in range(3)]
            arrays.append((plain.copy(), plain.dtype.name, len(junk)))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        capture(lambda: step, device=device)
    assert all((plain == 0).all() for plain, *_ in arrays)
    assert {name for _, name, _ in arrays} == {"float16", "float32", "float64"}
    assert ["arrays of computed numbers" in str(each.message) for each in caught] == [True]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("batches", [1, 2, 3])
@pytest.mark.parametrize("kind", [nn.EmbeddingBag, nn.Embedding])
def test_sums_of_sparse_gradients_hold_the_rows_of_all_micro_batches(
    kind: Any, batches: int
) -> None:
    rows = []

    def make_step() -> Callable[[], None]:
        table = kind(1_000_000, 8, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        micro_batches = [torch.randint(1_000_000, (64, 1)) for _ in range(batches)]

        def step() -> None:
            optimizer.zero_grad()
            for indices in micro_batches:
                table(indices).sum().backward()
            rows.append(table.weight.grad._nnz())
            optimizer.step()

        return step

    graph = capture(make_step)
    make_step()()
    assert set(rows) == {64 * batches}
    updates = [operation for operation in map(graph.__getitem__, range(len(graph)))]
    updates = [each for each in updates if each.kind == "embedding_update"]
    assert updates[-1].features["lookups"] == 64 * batches
