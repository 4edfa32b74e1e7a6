"""Questions of a step about computed tensors: checks, logs and the better of two need no value, and
what decides is refused. Drawn programs mix them."""

import copy
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="capture needs torch: pip install 'perfkit[measure]'")

from torch import nn  # noqa: E402

from perfkit.recording.comparisons import BETTER, SINGLE  # noqa: E402
from perfkit.recording.questions import expect_answer, find_asking_frame  # noqa: E402
from perfkit.recording.steps import capture  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_calls")
Use = Callable[[Any], Any]


def train(use: Use) -> Callable[[], Any]:
    """A step that hands its scores to `use`, and runs a layer once more if that says so."""

    def make_step() -> Callable[[], None]:
        net, x = nn.Linear(4, 4), torch.ones(3, 4)

        def step() -> None:
            scores = net(x)
            if use(scores) is True:
                scores = net(scores)
            scores.sum().backward()

        return step

    return make_step


def list_notes(use: Use) -> list[str]:
    """What a capture says of a step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph = capture(train(use))
    assert [label.kind for label in graph.labels].count("gemm") == 2
    return [str(warning.message) for warning in caught]


# -- what needs no value


def assert_it(scores: Any) -> None:
    assert (scores.abs() < 1e6).all(), "too large"


def raise_if(scores: Any) -> None:
    if (scores > 1e6).any():
        raise OSError


def raise_unless(scores: Any) -> None:
    if not bool((scores < 1e6).all()):
        raise OSError


def raise_otherwise(scores: Any) -> None:
    if (scores < 1e6).all():
        pass
    else:
        print("too large")
        raise OSError


def raise_by_one_of_two(scores: Any) -> None:
    if scores.dim() > 9 or not (scores < 1e6).all() or (scores != scores).any():
        raise OSError


def is_fine(scores: Any) -> bool:
    return bool((scores < 1e6).all().item())


def raise_by_a_function(scores: Any) -> None:
    """What the code does not say: the first answer fails, and the other one is taken."""
    if is_fine(scores):
        return
    raise OSError


def exit_if(scores: Any) -> None:
    if torch.isnan(scores).any():
        print("not a number")
        exit()


def exit_by_a_number(scores: Any) -> None:
    if scores.mean().item() > 50:
        exit()


def check_of_pytorch(scores: Any) -> None:
    torch._check((scores < 1e6).all().item(), lambda: "too large")


def assert_of_pytorch(scores: Any) -> None:
    torch._assert(len(scores) > 0, "no rows")
    torch._assert((scores < 1e6).all(), "too large")


def check_of_distributions(scores: Any) -> Any:
    distribution = torch.distributions.Normal(scores, scores.exp())
    torch.distributions.kl_divergence(distribution, torch.distributions.Normal(0.0, 1.0))
    torch.distributions.Categorical(logits=scores).log_prob(torch.tensor([0, 1, 2]))


def print_answers(scores: Any) -> str:
    return f"{(scores > 0).any()} {torch.equal(scores, scores + 1)} {bool(scores.sum() > 0)}"


def count_answers(scores: Any) -> int:
    return sum(bool(row) for row in (scores > 0).all(1)) + int((scores > 1).any())


PASSING: list[Use] = [
    assert_it,
    raise_if,
    raise_unless,
    raise_otherwise,
    raise_by_one_of_two,
    raise_by_a_function,
    exit_by_a_number,
    check_of_pytorch,
    assert_of_pytorch,
    check_of_distributions,
    print_answers,
    count_answers,
]


@pytest.mark.parametrize("use", PASSING)
def test_a_check_and_a_log_need_no_value(use: Use, capsys: Any) -> None:
    assert not list_notes(use)
    assert "too large" not in capsys.readouterr().out


# -- what is refused with its line


def is_above(scores: Any) -> bool:
    return bool((scores > 0).any())


def is_equal(scores: Any) -> bool:
    return torch.equal(scores, scores * 2)


def loop_until(scores: Any) -> Any:
    while not (scores < 0).all():
        scores = scores - 1
    return None


def stop_early(scores: Any) -> Any:
    for _ in range(3):
        if scores.mean() > 0.01:
            break
        scores = scores * 2


def fail_in_a_branch(scores: Any) -> Any:
    """A branch that a capture cannot follow is no check."""
    if (scores > 0).any():
        scores[scores > 0].sum()


def raise_and_catch(scores: Any) -> bool:
    """An error that the step catches may be a branch."""
    try:
        if (scores > 1e6).any():
            raise OSError
    except OSError:
        return True
    return False


def raise_and_suppress(scores: Any) -> bool:
    with suppress(OSError):
        raise_if(scores)
        return False
    return True


def catch_size(scores: Any) -> bool:
    """A step that catches the error of the capture is not taken to go on."""
    try:
        scores[scores > 0].sum()
    except Exception:
        return True
    return False


def catch_list(scores: Any) -> bool:
    try:
        return bool(scores.tolist()[0][0] > 1e6)
    except Exception:
        return False


def check_large(flag: bool) -> bool:
    return not flag


def decide_by_a_function(scores: Any) -> bool:
    """What is named as a check may be none."""
    return check_large(bool((scores > 1e6).any()))


def loop_until_small(scores: Any) -> Any:
    while scores.mean().item() > 1e-3:
        scores = scores.mul(0.5)
    return None


def loop_until_float(scores: Any) -> Any:
    """A number that is converted tells nothing of what it is compared with."""
    assert_it(scores)
    while float(scores.mean()) > 1e-3:
        pass
    return None


def choose_larger(scores: Any) -> Any:
    return scores.sum() > scores.mean() or None


REFUSED: list[Use] = [
    is_above,
    is_equal,
    loop_until,
    stop_early,
    fail_in_a_branch,
    raise_and_catch,
    raise_and_suppress,
    catch_size,
    catch_list,
    decide_by_a_function,
    loop_until_small,
    loop_until_float,
]


@pytest.mark.parametrize("use", REFUSED)
def test_an_answer_that_decides_is_refused(use: Use) -> None:
    with pytest.raises(ValueError, match=r"capture computes no values.*test_recorded_questions"):
        capture(train(use))


def test_an_error_of_the_step_stays_its_own() -> None:
    def fail(scores: Any) -> None:
        bool((scores > 0).any())
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        capture(train(fail))


# -- the best so far


def keep_best(kind: str) -> Use:
    """A step that keeps its best loss, as a number or a tensor, and its weights besides."""
    infinite = float("inf")
    best: list[Any] = [torch.tensor(infinite) if kind == "tensor" else infinite]
    kept: list[Any] = []

    def use(scores: Any) -> None:
        loss = scores.square().mean()
        value = loss.item() if kind == "number" else loss.detach()
        if value < best[0]:
            best[0] = value
            if kind != "logged":
                kept[:] = [scores.detach().clone()]

    return use


@pytest.mark.parametrize("kind", ["number", "tensor", "mixed"])
def test_the_better_of_two_losses_is_said_and_not_refused(kind: str) -> None:
    [note] = list_notes(keep_best(kind))
    assert note.startswith(BETTER[:60])
    assert "if value < best[0]" in note


def test_the_better_of_two_losses_is_not_said_if_nothing_depends_on_it() -> None:
    assert not list_notes(keep_best("logged"))


class Scaled(torch.optim.SGD):
    """Scales its rate by the larger of a number and a mean of weights, as Adafactor does."""

    def step(self, closure: Any = None) -> Any:
        [weight] = self.param_groups[0]["params"]
        _ = max(0.001, weight.detach().mean()) * 2
        return super().step(closure)


def test_ways_of_an_optimizer_that_differ_in_single_numbers_are_said() -> None:
    def make_step() -> Callable[[], None]:
        weight = nn.Parameter(torch.ones(4, 4))
        optimizer = Scaled([weight], lr=0.1)

        def step() -> None:
            (torch.ones(3, 4) @ weight).sum().backward()
            optimizer.step()

        return step

    start, end = SINGLE.split("{}")
    with pytest.warns(UserWarning, match="max.0.001, weight") as caught:
        capture(make_step)
    [note] = [str(warning.message) for warning in caught]
    assert note.startswith(start)
    assert note.endswith(end)


# -- drawn programs


def draw(seed: int) -> tuple[Use, bool]:
    """A step of several drawn questions, and whether one of them decides."""
    rng = np.random.default_rng(seed)
    uses = [PASSING[place] for place in rng.integers(len(PASSING), size=3)]
    decides = bool(rng.random() < 0.5)
    if decides:
        place = int(rng.integers(4))
        uses.insert(place, REFUSED[int(rng.integers(len(REFUSED)))])
    order = copy.copy(uses)

    def use(scores: Any) -> bool:
        answers = [each(scores) for each in order]
        return any(answer is True for answer in answers)

    return use, decides


@pytest.mark.parametrize("seed", range(6))
def test_drawn_questions_are_refused_if_one_of_them_decides(seed: int) -> None:
    use, decides = draw(seed)
    if decides:
        with pytest.raises(ValueError, match="capture computes no values"):
            capture(train(use))
    else:
        assert not list_notes(use)


# -- what the code of a check says


class Asked:
    """Keeps what is expected of it where it is asked whether it is true."""

    def __init__(self) -> None:
        self.expected: list[bool | None] = []

    def __bool__(self) -> bool:
        self.expected.append(expect_answer(find_asking_frame().f_back))
        return bool(self.expected[-1])


def test_the_code_of_a_check_says_which_answer_passes() -> None:
    asked = Asked()
    assert asked
    if not asked:
        raise OSError
    if asked:
        raise OSError
    if len(asked.expected) > 9 or (not asked and len(asked.expected)):
        raise OSError
    _ = not asked
    print("logged" if asked else "")
    assert asked.expected == [True, True, False, True, None, None]
