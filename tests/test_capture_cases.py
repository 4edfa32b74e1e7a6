"""Small awkward steps, as people write them: each is captured as it would run, or refused with its
line, the reason and a way out."""

import contextlib
import gc
import io
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: E402

from perfkit.recording.steps import capture  # noqa: E402

Step = Callable[[], Any]


def list_names(graph: Any) -> list[str]:
    return [label.name for label in graph.labels]


# -- flexible attention


def is_causal(batch: Any, head: Any, row: Any, column: Any) -> Any:
    return row >= column


def is_near(batch: Any, head: Any, row: Any, column: Any) -> Any:
    return (row - column).abs() < 128


def attend(
    mask: Any = None, *, groups: int = 2, deep: int = 16, amp: bool = False
) -> Callable[[], Step]:
    """Attention of 1,024 rows by `flex_attention`, and its gradients."""

    def make_step() -> Step:
        sizes = [(1, 2, 1024, 16), (1, groups, 1024, 16), (1, groups, 1024, deep)]
        query, key, value = (nn.Parameter(torch.randn(size, device="cuda")) for size in sizes)
        blocks = None
        if mask is not None:
            blocks = create_block_mask(mask, None, None, 1024, 1024, device="cuda")

        def step() -> None:
            with torch.autocast("cuda", torch.bfloat16, enabled=amp):
                compiled = torch.compile(flex_attention)
                out = compiled(query, key, value, block_mask=blocks, enable_gqa=groups < 2)
            out.sum().backward()

        return step

    return make_step


#: Of 8 × 8 blocks of 128 rows a causal mask leaves 36, and a band of one block on each side 22.
@pytest.mark.parametrize(
    ("options", "variant", "share", "dtype"),
    [
        ({}, "forward", 1.0, "fp32"),
        ({"mask": is_causal}, "forward_causal", 0.5, "fp32"),
        ({"mask": is_near}, "forward", 22 / 64, "fp32"),
        ({"groups": 1, "deep": 8}, "forward", 0.75, "fp32"),
        ({"deep": 32, "amp": True}, "forward", 1.5, "bf16"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_flexible_attention_is_flash_attention_on_the_blocks_that_are_left(
    options: dict[str, Any], variant: str, share: float, dtype: str
) -> None:
    graph = capture(attend(**options), device="cuda")
    places = [i for i, label in enumerate(graph.labels) if label.kind == "attention"]
    assert [graph.labels[i].phase for i in places] == ["forward", "backward"]
    forward = graph[places[0]]
    assert forward.variant == variant
    assert graph.dtypes[places[0]] == dtype if graph.dtypes else graph.dtype == dtype
    products = 2 * 2 * 1024 * 1024 * (16 + 16)  # of two heads
    assert graph.column("flops")[places[0]] == pytest.approx(share * products, rel=0.01)


def test_flexible_attention_says_what_it_counts_as_and_has_no_gradient_on_a_cpu() -> None:
    with pytest.warns(UserWarning) as said:
        capture(attend(), device="cuda")
    assert any("flash attention on the blocks" in str(each.message) for each in said)
    with pytest.raises(ValueError, match=r"no backward pass on a CPU, in .*device='cuda'"):
        capture(attend())


def test_a_learned_bias_of_scores_gets_no_gradient_and_that_is_said() -> None:
    found = []

    def make_step() -> Step:
        rows = nn.Parameter(torch.randn(1, 2, 128, 16, device="cuda"))
        bias = nn.Parameter(torch.zeros(2, device="cuda"))

        def step() -> None:
            out = flex_attention(rows, rows, rows, lambda score, b, head, q, k: score + bias[head])
            out.sum().backward()
            found.append(bias.grad)

        return step

    with pytest.warns(UserWarning, match="a learned bias, get no gradient and no update"):
        capture(make_step, device="cuda")
    assert set(found) == {None}


# -- files and objects of other ranks


def test_a_step_that_keeps_its_weights_writes_no_file(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    file.write_text("kept")

    def make_step() -> Step:
        net = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(net.parameters())

        def step() -> None:
            net(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)

        return step

    with pytest.warns(UserWarning, match=r"not written in .*torch\.save"):
        capture(make_step)
    assert file.read_text() == "kept"


def test_known_numbers_are_written_and_read() -> None:
    made = io.BytesIO()
    torch.save(nn.Linear(4, 4).state_dict(), made)

    def make_step() -> Step:
        net = nn.Linear(4, 4).to("cuda")

        def step() -> None:
            made.seek(0)
            net.load_state_dict(torch.load(made, map_location="cuda:0"))
            torch.save({"epoch": 3}, io.BytesIO())
            net(torch.randn(2, 4, device="cuda")).sum().backward()

        return step

    assert "addmm" in list_names(capture(make_step, device="cuda"))


def test_objects_of_other_ranks_count_as_those_of_this_one() -> None:
    sums = []

    def make_step() -> Step:
        net = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))

        def step() -> None:
            loss = net(torch.randn(2, 4)).sum()
            loss.backward()
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, {"loss": loss.item(), "rows": 2})
            seed = [random.random() if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(seed, 0)
            sums.append(sum(each["rows"] for each in told))

        return step

    with pytest.warns(UserWarning, match="objects that ranks send each other"):
        capture(make_step, ranks=4)
    assert set(sums) == {8}


# -- numbers that the step reads


def summarize(numbers: list[float]) -> list[Any]:
    """What Python's own library makes of computed numbers."""
    spread = statistics.pstdev(numbers), statistics.quantiles([*numbers, 2.0])
    return [statistics.mean(numbers), statistics.median(numbers), *spread]


@pytest.mark.parametrize("decides", [False, True])
def test_statistics_of_computed_numbers_may_be_logged_and_do_not_decide(decides: bool) -> None:
    def make_step() -> Step:
        net = nn.Linear(4, 4)

        def step() -> None:
            loss = net(torch.randn(2, 4)).square().mean()
            mean = summarize([loss.item(), 2 * loss.item()])[0]
            if decides and mean > 5:
                loss = loss * 2
            loss.backward()

        return step

    if decides:
        with pytest.raises(ValueError, match=r"test_capture_cases\.py, line"):
            capture(make_step)
    else:
        assert len(capture(make_step))


def test_a_refusal_names_the_line_of_the_step_and_not_one_of_python_itself() -> None:
    def make_step() -> Step:
        net = nn.Linear(4, 4)

        def step() -> None:
            loss = net(torch.randn(2, 4)).square().mean()
            random.randrange(loss.item())
            loss.backward()

        return step

    with pytest.raises(ValueError, match=r"test_capture_cases\.py, line \d+: .random\.randrange"):
        capture(make_step)


# -- what an error leaves


def test_an_error_leaves_no_tensor_behind() -> None:
    def make_step() -> Step:
        net = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(net.parameters())

        def step() -> None:
            net(torch.randn(2, 64)).sum().backward()
            optimizer.step()
            raise OSError

        return step

    def count() -> int:
        gc.collect()
        return sum(type(each) is FakeTensor for each in gc.get_objects())

    before = count()
    for _ in range(2):
        with contextlib.suppress(OSError):
            capture(make_step)
    assert count() == before


# -- calls that differ


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("by_number", [True, False])
def test_a_note_tells_work_of_every_third_call_from_work_that_is_drawn(
    by_number: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    random.seed(seed)

    def make_step() -> Step:
        nets, calls = [nn.Linear(4, 4), nn.Linear(4, 4)], [0]

        def step() -> None:
            calls[0] += 1
            x = nets[0](torch.randn(2, 4))
            is_drawn = int(torch.randint(2, (1,))) > 0 if seed else random.random() < 0.5
            if calls[0] % 3 == 0 if by_number else is_drawn:
                x = nets[1](x)
            x.sum().backward()

        return step

    with pytest.warns(UserWarning) as said:
        capture(make_step)
    [text] = [str(each.message) for each in said]
    assert ("the calls of the step differ" if by_number else "numbers that the step draws") in text


# -- products that change a matrix, and settings


@pytest.mark.parametrize(
    ("name", "sizes", "kind"),
    [
        ("addmm_", [(3, 5), (3, 4), (4, 5)], "gemm"),
        ("addmv_", [(3,), (3, 4), (4,)], "gemm"),
        ("baddbmm_", [(2, 3, 5), (2, 3, 4), (2, 4, 5)], "bmm"),
    ],
)
def test_a_product_that_changes_a_matrix_has_the_work_of_its_factors(
    name: str, sizes: list[tuple[int, ...]], kind: str
) -> None:
    def make_step() -> Step:
        kept, left, right = map(torch.randn, sizes)
        return lambda: getattr(kept, name)(left, right)

    graph = capture(make_step)
    assert [(label.name, label.kind) for label in graph.labels] == [(name, kind)]
    columns = sizes[2][-1] if len(sizes[2]) > 1 else 1
    places = sizes[1][0] * sizes[1][1] * (sizes[1][2] if kind == "bmm" else 1)
    assert graph.features.flops.tolist() == [2 * places * columns]


def test_kernels_that_a_step_switches_off_are_on_again_after_it() -> None:
    def make_step() -> Step:
        torch.backends.cudnn.enabled = False
        torch.backends.mkldnn.set_flags(False)
        torch.autograd.set_multithreading_enabled(False)
        return lambda: torch.ones(2) + 1

    capture(make_step)
    assert torch.backends.cudnn.enabled
    assert torch._C._get_mkldnn_enabled()
    assert torch._C._is_multithreading_enabled()


@pytest.mark.parametrize(
    ("lengths", "said"), [([1, 3], "decreasing order"), ([3, 0], "greater than 0")]
)
def test_lengths_that_no_packed_sequence_has_are_refused_as_by_pytorch(
    lengths: list[int], said: str
) -> None:
    known = torch.tensor(lengths)

    def step() -> None:
        nn.utils.rnn.pack_padded_sequence(torch.randn(4, 2, 8), known)

    with pytest.raises(RuntimeError, match=said):
        capture(lambda: step)


# -- pinned memory


@pytest.mark.filterwarnings("ignore:the time that the host takes to pin")
def test_a_tensor_from_outside_is_pinned_and_stays_known() -> None:
    data, count = torch.randn(64, 8), torch.tensor([3])

    def make_step(pins: bool) -> Step:
        net = nn.Linear(8, 8).to("cuda")

        def step() -> None:
            batch = data.pin_memory() if pins else data
            rows = int(count.pin_memory())
            net(batch.to("cuda")[:rows]).sum().backward()

        return step

    plain, pinned = (capture(lambda p=p: make_step(p), device="cuda") for p in (False, True))
    # a copy by the GPU itself, for which the host waits
    assert list_names(pinned) == ["copy_inputs", *list_names(plain)]
    assert list_names(plain)[0] == "to"
    assert not data.is_pinned()


# -- regions without gradients


def test_inference_mode_is_no_grad() -> None:
    modes: list[bool] = []

    def make_step(region: Any) -> Step:
        frozen = nn.Sequential(
            nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 8)
        )
        frozen.to("cuda")
        head = nn.Linear(8, 8).to("cuda")

        def step() -> None:
            with region():
                modes.append(torch.is_inference_mode_enabled())
                rows = frozen(torch.randn(2, 4, 8, 8, device="cuda")).softmax(-1)
                rows = rows @ rows.T @ rows
                with torch.inference_mode(False):
                    modes.append(torch.is_grad_enabled())
            modes.append(torch.is_inference_mode_enabled())
            head(rows.clone()).sum().backward()

        return step

    without = capture(lambda: make_step(torch.no_grad), device="cuda")
    assert modes[:3] == [False, True, False]
    modes.clear()
    inference = capture(lambda: make_step(torch.inference_mode), device="cuda")
    assert modes[:3] == [True, True, False]
    assert inference.labels == without.labels
    assert inference.column("flops").tolist() == without.column("flops").tolist()
    assert "convolution" in list_names(inference)
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("case", "times"),
    [("trained", 1 + 2 + 3), ("frozen", 1 + 2), ("rolled out", 3 * 2 + 2 + 3), ("checkpoint", 6)],
)
def test_model_flops_of_a_capture_are_those_of_gradients_that_are_needed(
    case: str, times: int
) -> None:
    """Two layers with equal work: the input of the first one needs no gradient. Beside them a call
    without gradients, or work that is computed again."""

    def make_step() -> Step:
        first, second = nn.Linear(8, 8).cuda(), nn.Linear(8, 8).cuda()
        beside = nn.Linear(8, 8).cuda()
        first.requires_grad_(case != "frozen")

        def step() -> None:
            x = torch.randn(4, 8, device="cuda")
            with torch.no_grad():
                if case == "rolled out":
                    for _ in range(3):
                        second(first(x))
                elif case == "trained":
                    beside(x)
            if case == "checkpoint":
                out = torch.utils.checkpoint.checkpoint(second, first(x), use_reentrant=False)
                out = out + beside(x).detach()
            else:
                out = second(first(x))
            out.sum().backward()

        return step

    graph = capture(make_step, device="cuda")
    assert graph.model_flops == times * 2 * 4 * 8 * 8


# -- statistics of several ranks


def join_statistics(*, joins: bool, device: str = "cuda") -> Step:
    net: nn.Module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    if joins:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    net = nn.parallel.DistributedDataParallel(net.to(device))
    return lambda: net(torch.randn(4, 3, 9, 9, device=device)).sum().backward()


@pytest.mark.filterwarnings("ignore:SyncBatchNorm counts")
def test_statistics_of_batch_norm_are_joined_by_collectives() -> None:
    plain, joined = (
        capture(lambda j=joins: join_statistics(joins=j), device="cuda", ranks=4)
        for joins in (False, True)
    )
    sent = [
        (
            joined.labels[place].name,
            joined.labels[place].phase,
            float(joined.column("nbytes")[place]),
        )
        for place in joined.collectives
    ]
    # mean, deviation and count of 8 channels in fp32 from 4 ranks; backward two sums
    assert ("all_gather", "forward", 4 * (2 * 8 + 1) * 4) in sent
    assert ("all_reduce", "backward", 2 * 8 * 4) in sent
    assert len(joined.collectives) == len(plain.collectives) + 2
    assert len(joined) == len(plain) + 3  # and the wait of the host
    assert any("SyncBatchNorm counts as BatchNorm" in note for note in joined.notes)
    assert not any("SyncBatchNorm" in note for note in plain.notes)
    with pytest.raises(ValueError, match=r"SyncBatchNorm on GPUs alone, in .*device='cuda'"):
        capture(lambda: join_statistics(joins=True, device="cpu"), device="cpu", ranks=4)


# -- the counted table of cases


def test_a_line_of_a_case_is_judged_by_its_words(tmp_path: Path, capsys: Any) -> None:
    from benchmarks.capture_cases import Case, judge_line, main

    case = Case("log_max", "captured", r"^(?!!!)")
    assert judge_line(case, ["log_max        []", "log_mean  !! ValueError"]) is None
    assert judge_line(case, ["log_max    !! ValueError: no"]) == "!! ValueError: no"
    assert judge_line(case, ["log_maximum  []"]) == "no line"
    assert main(["--folder", str(tmp_path)]) == 0
    assert "skipped: " in capsys.readouterr().out
