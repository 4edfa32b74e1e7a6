"""What a capture takes for known: what was computed from known tensors, and nothing else."""

import copy
import ctypes
import platform
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="capture needs torch: pip install 'perfkit[measure]'")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from perfkit.recording.steps import capture  # noqa: E402
from perfkit.workloads.graph import Graph  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_calls")


class Inputs(NamedTuple):
    """Tensors of a step: what is computed from them may be known to a capture or not."""

    known: Any  # ones, (4, 4)
    numbers: Any  # known, too: 0 to 15, (4, 4)
    computed: Any  # from a weight, (4, 4)
    indices: Any  # of the largest of each computed row, (4,)


Computation = Callable[[Inputs], Any]


def make_inputs(weight: Any) -> Inputs:
    computed = weight * 2
    return Inputs(torch.ones(4, 4), torch.arange(16).view(4, 4), computed, computed.argmax(1))


def train_on_rows(result: Any, weight: Any) -> None:
    """A product with as many rows as the result has small numbers."""
    rows = int((result < 8).sum())
    (torch.ones(rows, 4) @ weight).sum().backward()


def capture_rows(compute: Computation) -> Graph:
    """Capture a step whose size depends on a result."""
    weight = nn.Parameter(torch.randn(4, 4))

    def step() -> None:
        with torch.no_grad():
            result = compute(make_inputs(weight))
        train_on_rows(result, weight)

    return capture(lambda: step)


# -- results that nobody can know: they depend on a computed tensor, or hold memory nobody wrote


def index_by_computed(x: Inputs) -> Any:
    return x.numbers[x.indices]


def index_by_two_computed(x: Inputs) -> Any:
    return x.numbers[x.indices, x.indices]


def embedding_of_computed(x: Inputs) -> Any:
    return F.embedding(x.indices, x.known)


def index_select_by_computed(x: Inputs) -> Any:
    return x.numbers.index_select(0, x.indices)


def gather_by_computed(x: Inputs) -> Any:
    return x.numbers.gather(1, x.indices[:, None])


def take_by_computed(x: Inputs) -> Any:
    return x.numbers.take(x.indices)


def empty_like(x: Inputs) -> Any:
    return torch.empty_like(x.known)


def new_empty(x: Inputs) -> Any:
    return x.known.new_empty(3)


def new_empty_strided(x: Inputs) -> Any:
    return x.known.new_empty_strided((3,), (1,))


def empty(x: Inputs) -> Any:
    return torch.empty(4)


def half_filled(x: Inputs) -> Any:
    return x.known.new_empty(4).index_fill_(0, x.numbers[0, :2], 1.0)


def half_scattered(x: Inputs) -> Any:
    return torch.empty(4).scatter_(0, x.numbers[0, :2], x.known[0])


def scattered_at_computed(x: Inputs) -> Any:
    return torch.empty(4).scatter_(0, x.indices, x.known[0])


def half_sliced(x: Inputs) -> Any:
    result = x.known.new_empty(4)
    result[:2] = 1
    return result


def copied_from_computed(x: Inputs) -> Any:
    return torch.empty_like(x.computed).copy_(x.computed)


def filled_then_copied_from_computed(x: Inputs) -> Any:
    return torch.empty_like(x.computed).fill_(1).copy_(x.computed)


def filled_then_a_part_copied(x: Inputs) -> Any:
    result = torch.empty_like(x.known).fill_(1)
    result[0] = x.computed[0]
    return result


def filled_then_a_part_drawn(x: Inputs) -> Any:
    result = torch.empty_like(x.known).fill_(1)
    result[0].bernoulli_(x.computed[0].abs())
    return result


def known_then_a_part_copied(x: Inputs) -> Any:
    x.known[0] = x.computed[0]
    return x.known


def data_replaced(x: Inputs) -> Any:
    x.known.data = x.computed
    return x.known


def clone_of_empty(x: Inputs) -> Any:
    return torch.empty_like(x.known).clone()


def grown(x: Inputs) -> Any:
    return torch.ones(4).resize_(64)


def where_computed(x: Inputs) -> Any:
    return torch.where(x.computed > 0, x.known, x.known)


def cat_with_computed(x: Inputs) -> Any:
    return torch.cat([x.known, x.computed])


def put_at_computed(x: Inputs) -> Any:
    return x.known.index_put((x.indices,), x.known)


def copied_deeply_from_empty(x: Inputs) -> Any:
    return copy.deepcopy(torch.empty_like(x.known))


def product_with_computed(x: Inputs) -> Any:
    return x.known @ x.computed


def convolved_by_computed(x: Inputs) -> Any:
    return F.conv1d(x.known[None], x.computed[None])


def normalized_by_computed(x: Inputs) -> Any:
    return F.layer_norm(x.known, (4,), x.computed[0], x.computed[0])


def masked_by_computed(x: Inputs) -> Any:
    return x.known.masked_fill(x.computed > 0, 0.0)


def added_at_computed(x: Inputs) -> Any:
    return x.known.index_add(0, x.indices, x.known)


def trained_module(x: Inputs) -> Any:
    return nn.Linear(4, 4)(x.known)


def resized_for_known(x: Inputs) -> Any:
    return torch.empty(0).resize_as_(x.known)


def on_meta(x: Inputs) -> Any:
    return torch.empty_like(torch.ones(4, device="meta"), device="cpu")


UNKNOWN: list[Computation] = [
    index_by_computed,
    index_by_two_computed,
    embedding_of_computed,
    index_select_by_computed,
    gather_by_computed,
    take_by_computed,
    empty_like,
    new_empty,
    new_empty_strided,
    empty,
    half_filled,
    half_scattered,
    scattered_at_computed,
    half_sliced,
    copied_from_computed,
    filled_then_copied_from_computed,
    filled_then_a_part_copied,
    filled_then_a_part_drawn,
    known_then_a_part_copied,
    data_replaced,
    clone_of_empty,
    grown,
    where_computed,
    cat_with_computed,
    put_at_computed,
    copied_deeply_from_empty,
    product_with_computed,
    convolved_by_computed,
    normalized_by_computed,
    masked_by_computed,
    added_at_computed,
    trained_module,
    resized_for_known,
    on_meta,
]


# -- results of known tensors alone, and memory that is filled


def index_by_known(x: Inputs) -> Any:
    return x.numbers[x.numbers[0] % 4]


def embedding_of_known(x: Inputs) -> Any:
    return F.embedding(x.numbers[0] % 4, x.known)


def empty_then_filled(x: Inputs) -> Any:
    return torch.empty(4).fill_(1)


def empty_like_then_filled(x: Inputs) -> Any:
    return torch.empty_like(x.computed).fill_(1)


def new_empty_then_zeros(x: Inputs) -> Any:
    return x.known.new_empty(3).zero_()


def scattered_everywhere(x: Inputs) -> Any:
    return torch.empty(4).scatter_(0, x.numbers[0], x.known[0])


def filled_by_index(x: Inputs) -> Any:
    result = x.known.new_empty(4).index_fill_(0, x.numbers[0, :2], 1.0)
    return result.index_copy_(0, x.numbers[0, 2:], x.known[0, 2:])


def both_halves_sliced(x: Inputs) -> Any:
    result = x.known.new_empty(4)
    result[:2] = 1
    result[2:] = 2
    return result


def copied_from_known(x: Inputs) -> Any:
    return torch.empty_like(x.numbers).copy_(x.known)


def drawn(x: Inputs) -> Any:
    return torch.empty(4).uniform_()


def padded(x: Inputs) -> Any:
    return F.pad(x.known, (1, 1))


def copied_deeply(x: Inputs) -> Any:
    return copy.deepcopy(x.numbers)


def tensor_of_tensors(x: Inputs) -> Any:
    return torch.tensor([x.numbers[0, 0], x.numbers[1, 1]])


def interpolated(x: Inputs) -> Any:
    return F.interpolate(x.known[None, None], scale_factor=2)


def drawn_by_known(x: Inputs) -> Any:
    return torch.multinomial(x.known, 2)


def selected_by_known_mask(x: Inputs) -> Any:
    return x.numbers.masked_select(x.numbers > 3)


def known_after_an_index_by_computed(x: Inputs) -> Any:
    x.numbers[x.indices]
    return x.numbers


KNOWN: list[Computation] = [
    index_by_known,
    embedding_of_known,
    empty_then_filled,
    empty_like_then_filled,
    new_empty_then_zeros,
    scattered_everywhere,
    filled_by_index,
    both_halves_sliced,
    copied_from_known,
    drawn,
    padded,
    copied_deeply,
    tensor_of_tensors,
    interpolated,
    drawn_by_known,
    selected_by_known_mask,
    known_after_an_index_by_computed,
]


@pytest.mark.parametrize("compute", UNKNOWN)
def test_sizes_do_not_depend_on_what_was_not_computed(compute: Computation) -> None:
    with pytest.raises(ValueError, match=r"capture computes no values.*int\(\(result < 8\)"):
        capture_rows(compute)


@pytest.mark.parametrize("compute", KNOWN)
def test_sizes_depend_on_what_was_computed_from_known_tensors(compute: Computation) -> None:
    assert len(capture_rows(compute))


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
    pieces = UNKNOWN + KNOWN
    chosen = [pieces[place] for place in rng.integers(len(pieces), size=3)]
    weight = nn.Parameter(torch.ones(4, 4))

    def step() -> None:
        with torch.no_grad():
            inputs = make_inputs(weight)
            for compute in chosen:
                result = compute(inputs)
                if result.shape == (4, 4) and result.dtype is torch.float32:
                    inputs = inputs._replace(known=result)
        train_on_rows(result, weight)

    return step


def describe_capture(make_step: Callable[[], Any]) -> str:
    """Names and sizes of the captured operations, or the name of the error."""
    try:
        graph = capture(make_step)
    except (ValueError, IndexError) as error:
        return type(error).__name__
    return str([(graph[place].name, graph[place].features) for place in range(len(graph))])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="M_PERTURB is glibc's")
@pytest.mark.parametrize("seed", range(40))
def test_memory_that_nobody_wrote_does_not_decide(seed: int) -> None:
    outcomes = []
    for pattern in (0x01, 0xBF, 0x7F):
        with poison(pattern):
            outcomes.append(describe_capture(lambda: draw_program(seed)))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert "IndexError" not in outcomes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_arrays_of_computed_numbers_are_zeros_in_memory_of_their_own(device: str) -> None:
    weight = nn.Parameter(torch.randn(100, 3))
    arrays = []

    def step() -> None:
        for dtype in (torch.float32, torch.float64, torch.float16):
            array = np.asarray((weight * 2).detach().to(dtype).cpu())
            plain = array.view(np.ndarray)
            junk = [torch.full((100, 3), float("nan")) for _ in range(3)]
            arrays.append(plain.copy())
            del junk  # until here it had memory of its own

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        capture(lambda: step, device=device)
    for array in arrays:
        assert (array == 0).all()
    assert {array.dtype.name for array in arrays} == {"float16", "float32", "float64"}
    [warning] = caught
    assert "arrays of computed numbers" in str(warning.message)


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
    operations = [graph[place] for place in range(len(graph))]
    updates = [operation for operation in operations if operation.kind == "embedding_update"]
    assert updates[-1].features["lookups"] == 64 * batches
