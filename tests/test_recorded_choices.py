"""Rows that computed scores choose, arrays of computed numbers, and known numbers that ranks exchange."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="capture needs torch: pip install 'perfkit[measure]'")

import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from perfkit.recording.choices import balance  # noqa: E402
from perfkit.recording.steps import capture  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_calls")


class Routing(NamedTuple):
    """Tokens that choose some of several experts."""

    tokens: int
    experts: int
    chosen: int


def choose(router: Any, x: Any, routing: Routing) -> Any:
    """Numbers of the experts of each token, (tokens, chosen)."""
    return router(x).topk(routing.chosen, dim=-1).indices


# -- ways to count the tokens of each expert: each gives as many numbers as there are experts


def count_by_bincount(chosen: Any, routing: Routing) -> Sequence[int]:
    return torch.bincount(chosen.flatten(), minlength=routing.experts).tolist()


def count_by_histogram(chosen: Any, routing: Routing) -> Sequence[int]:
    counts = torch.histc(chosen.float(), routing.experts, min=0, max=routing.experts - 1)
    return counts.int().tolist()


def count_by_ones(chosen: Any, routing: Routing) -> Sequence[int]:
    return F.one_hot(chosen, routing.experts).sum((0, 1)).tolist()


def count_by_scatter(chosen: Any, routing: Routing) -> Sequence[int]:
    ones = chosen.new_zeros((routing.tokens, routing.experts)).scatter_(1, chosen, 1)
    return ones.sum(dim=0).cpu().numpy()


def count_by_gates(chosen: Any, routing: Routing) -> Sequence[int]:
    gates = torch.zeros(routing.tokens, routing.experts).scatter(1, chosen, 1)
    return gates.long().sum(0).tolist()


def count_by_ends(chosen: Any, routing: Routing) -> Sequence[int]:
    ends = chosen.flatten().bincount(minlength=routing.experts).cumsum(0)
    return np.diff(ends.cpu().numpy(), prepend=0).tolist()


def count_by_masks(chosen: Any, routing: Routing) -> Sequence[int]:
    numbers = torch.cat([chosen.flatten()])
    return [len(numbers[numbers == expert]) for expert in range(routing.experts)]


def count_others(chosen: Any, routing: Routing) -> Sequence[int]:
    """Tokens without the others: what a mask and its opposite choose adds up."""
    masks = [chosen.flatten() != expert for expert in range(routing.experts)]
    return [chosen.numel() - len(chosen.flatten()[mask]) for mask in masks]


WAYS = [
    count_by_bincount,
    count_by_histogram,
    count_by_ones,
    count_by_scatter,
    count_by_gates,
    count_by_ends,
    count_by_masks,
    count_others,
]


def draw_routing(seed: int, chosen: int) -> Routing:
    """Tokens that divide evenly among the experts."""
    rng = np.random.default_rng(seed)
    experts = int(rng.integers(2, 9))
    return Routing(experts * int(rng.integers(1, 5)), experts, min(chosen, experts))


@pytest.mark.parametrize("count", WAYS)
@pytest.mark.parametrize("chosen", [1, 2])
def test_counts_of_routed_tokens_are_equal_shares(count: Any, chosen: int) -> None:
    routing = draw_routing(WAYS.index(count), chosen)
    expected = routing.tokens * routing.chosen // routing.experts
    counted: list[Sequence[int]] = []

    def make_step() -> Callable[[], None]:
        router, x = nn.Linear(4, routing.experts), torch.ones(routing.tokens, 4)
        experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(routing.experts))

        def step() -> None:
            numbers = choose(router, x, routing)
            counts = [int(each) for each in count(numbers, routing)]
            rows = x[numbers.flatten().argsort() // routing.chosen].split(counts)
            out = [expert(part) for expert, part in zip(experts, rows, strict=True)]
            torch.cat(out).sum().backward()
            counted.append(counts)

        return step

    with pytest.warns(UserWarning, match="each alternative counts as chosen equally often"):
        graph = capture(make_step)
    assert counted[-1] == [expected] * routing.experts
    products = [graph[place] for place in range(len(graph)) if graph.labels[place].name == "addmm"]
    assert [each.features["m"] for each in products[1:]] == [expected] * routing.experts


def test_counts_that_do_not_divide_add_up() -> None:
    assert balance(11, 4) == [3, 3, 3, 2]
    assert balance(2, 3) == [1, 1, 0]
    numbers: list[list[int]] = []

    def make_step() -> Callable[[], None]:
        net, x = nn.Linear(4, 4), torch.ones(10, 4)

        def step() -> None:
            best = net(x).max(-1).indices
            numbers.append(best.bincount(minlength=6).tolist())
            numbers.append(best.unique().tolist())
            scores = net(x)
            least = scores.topk(1).values[:, -1:]
            numbers.append([len(scores[scores >= least]), len(scores[scores < least])])
            scores.sum().backward()

        return step

    with pytest.warns(UserWarning, match="equally often"):
        capture(make_step)
    assert numbers[:3] == [[3, 3, 2, 2, 0, 0], [0, 1, 2, 3], [10, 30]]


# -- numbers of chosen alternatives


def take_column(scores: Any) -> Any:
    places = scores.mean(0).topk(2).indices
    return scores[:, places[0].item()].sum() + scores[:, places[1]].sum()


def shift(scores: Any) -> Any:
    return scores.roll(-int(scores[0].argmax()), 0).sum()


def take_from_a_list(scores: Any) -> Any:
    action = torch.distributions.Categorical(logits=scores[0]).sample().item()
    return scores.sum() * [0.1, 0.2, 0.3, 0.4][action]


def take_some_rows(scores: Any) -> Any:
    return scores[: scores[0].argmax().item()].sum()


def end_at_a_token(scores: Any) -> Any:
    return scores.sum() * 2 if scores[0].argmax().item() == 2 else scores.sum()


def end_behind_a_token(scores: Any) -> Any:
    return scores.sum() * 2 if int(scores[0].argmax() + 1) > 3 else scores.sum()


def take_a_layer(scores: Any) -> Any:
    return [nn.ReLU(), nn.Identity()][scores[:2, 0].argmax().item()](scores).sum()


def use_scores(use: Callable[[Any], Any]) -> Callable[[], Any]:
    """A step whose loss is what `use` makes of its scores, (4, 4)."""

    def make_step() -> Callable[[], None]:
        net, x = nn.Linear(4, 4), torch.ones(4, 4)
        return lambda: use(net(x)).backward()

    return make_step


@pytest.mark.parametrize("use", [take_column, shift, take_from_a_list])
def test_a_chosen_place_may_be_used_where_no_size_depends_on_it(use: Any) -> None:
    assert not capture(use_scores(use)).notes


@pytest.mark.parametrize("use", [take_some_rows, end_at_a_token, end_behind_a_token, take_a_layer])
def test_a_chosen_place_does_not_decide(use: Any) -> None:
    with pytest.raises(ValueError, match=r"capture computes no values.*test_recorded_choices"):
        capture(use_scores(use))


# -- arrays of computed numbers


def use_array(use: Callable[[Any], Any]) -> Callable[[], Any]:
    """A step that hands its scores and classes as arrays to `use`, and runs a layer once more if that
    says so."""

    def make_step() -> Callable[[], None]:
        net, x = nn.Linear(4, 4), torch.ones(3, 4)

        def step() -> None:
            scores = net(x)
            if bool(use(scores.detach().numpy())) is True:
                scores = net(scores)
            scores.sum().backward()

        return step

    return make_step


def write_as_text(array: Any) -> None:
    print(f"{array.mean():.3f} {float(array[0, 0])} {array.tolist()}")


def summarize(array: Any) -> None:
    print(np.sqrt(abs(array)).sum(0), np.concatenate([array, array]).astype(int).std())


def is_wildly_accurate(array: Any) -> bool:
    return bool((array.argmax(1) == np.array([0, 1, 2])).mean() > 2)


def has_large_mean(array: Any) -> bool:
    return bool(array.mean() > 0.5)


def is_last_column_best(array: Any) -> bool:
    return bool(array.argmax(1)[0] == 3)


def has_low_entries(array: Any) -> bool:
    return len(np.flatnonzero(array < -1)) > 0


@pytest.mark.parametrize("use", [write_as_text, summarize, is_wildly_accurate])
def test_an_array_of_computed_numbers_may_be_logged(use: Any) -> None:
    with pytest.warns(UserWarning, match="count as zeros"):
        graph = capture(use_array(use))
    assert [label.kind for label in graph.labels].count("gemm") == 2


@pytest.mark.parametrize("use", [has_large_mean, is_last_column_best, has_low_entries])
def test_an_array_of_computed_numbers_does_not_decide(use: Any) -> None:
    with pytest.raises(ValueError, match=r"capture computes no values.*scores\.detach\(\)\.numpy"):
        capture(use_array(use))


# -- known numbers that ranks exchange


def exchange_all(known: Any, computed: Any) -> dict[str, Any]:
    """What collectives make of numbers."""
    summed, largest, sent, mixed = known.clone(), known.clone(), known.clone(), computed.clone()
    dist.all_reduce(summed)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.broadcast(sent, 0)
    dist.all_reduce(mixed)
    gathered = torch.empty(4, dtype=known.dtype)
    dist.all_gather_into_tensor(gathered, known)
    listed = [torch.zeros_like(known) for _ in range(2)]
    dist.all_gather(listed, known)
    equal, unequal, part = torch.zeros(2), torch.zeros(2), torch.zeros(1)
    dist.all_to_all_single(equal, torch.full((2,), 4.0))
    dist.all_to_all_single(unequal, torch.tensor([1.0, 2.0]))
    dist.reduce_scatter_tensor(part, torch.tensor([1.0, 2.0]))
    into_known = torch.zeros_like(computed)
    dist.all_to_all_single(into_known, computed)
    return locals()


#: What is known of each result on two ranks, by hand; None for what is not.
EXCHANGED = {
    "summed": [6, 8],
    "largest": [3, 4],
    "sent": [3, 4],
    "mixed": None,
    "gathered": [3, 4, 3, 4],
    "equal": [4, 4],
    "unequal": None,
    "part": None,
    "into_known": None,
}


def test_known_numbers_that_ranks_exchange_are_those_of_equal_ranks() -> None:
    seen = dict[str, Any]()

    def make_step() -> Callable[[], None]:
        net = nn.Linear(2, 2)

        def step() -> None:
            results = exchange_all(torch.tensor([3, 4]), net.weight.detach()[0])
            for name in EXCHANGED:
                known = results[name].constant
                seen[name] = None if known is None else known.numpy().copy()
            assert results["listed"][1].tolist() == [3, 4]
            net(torch.ones(3, 2)).sum().backward()

        return step

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        capture(make_step, ranks=2)
    for name, numbers in EXCHANGED.items():
        assert (seen[name] is None) == (numbers is None), name
        assert numbers is None or seen[name].tolist() == numbers, name


def test_rows_are_exchanged_by_counts_of_equal_shares() -> None:
    """Experts on two ranks: counts are exchanged first, as torchtitan does, then rows."""

    def make_step() -> Callable[[], None]:
        router, expert, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.ones(16, 4)

        def step() -> None:
            numbers = router(x).topk(2, -1).indices
            counts = torch.histc(numbers.float(), 4, min=0, max=3)
            theirs = torch.empty_like(counts)
            dist.all_to_all_single(theirs, counts)
            sends, gets = (each.view(2, -1).sum(1).int().tolist() for each in (counts, theirs))
            rows = torch.empty(sum(gets), 4)
            dist.all_to_all_single(rows, x[numbers.flatten().argsort() // 2], gets, sends)
            expert(rows).sum().backward()
            assert gets == [16, 16]

        return step

    with pytest.warns(UserWarning, match="equally often"):
        graph = capture(make_step, ranks=2)
    assert [label.name for label in graph.labels].count("all_to_all") == 2


def test_a_weight_without_a_gradient_in_ddp_is_captured() -> None:
    def make_step() -> Callable[[], None]:
        nets = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
        nets.forward = lambda x: nets["used"](x)
        model = nn.parallel.DistributedDataParallel(nets, find_unused_parameters=True)
        return lambda: model(torch.ones(3, 4)).sum().backward()

    names = [label.name for label in capture(make_step, ranks=2).labels]
    assert names.count("all_reduce") == 2  # gradients, and which weights have one
