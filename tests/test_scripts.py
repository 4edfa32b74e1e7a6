"""Training loops recorded as they are written: where an iteration begins and ends, and what a loop
is told of its GPU, its ranks and its files."""

import copy
import json
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="record needs torch: pip install 'perfkit[measure]'")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from perfkit.platform.gallery import load_platform  # noqa: E402
from perfkit.prediction.predictor import predict  # noqa: E402
from perfkit.prediction.recordings import record  # noqa: E402
from perfkit.recording import scripts  # noqa: E402
from perfkit.recording.scripts import Recording  # noqa: E402
from perfkit.recording.steps import capture  # noqa: E402
from perfkit.workloads.graph import Graph  # noqa: E402

ROWS, WIDTH = 4, 8


def make_model(device: Any = None) -> Any:
    """A layer and its optimizer."""
    model = nn.Linear(WIDTH, WIDTH).to(device)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def train(model: Any, updates: Any, rows: int = ROWS, device: Any = None) -> Any:
    """One step; its loss."""
    updates.zero_grad()
    loss = model(torch.ones(rows, WIDTH, device=device)).sum()
    loss.backward()
    updates.step()
    return loss


def list_names(graph: Graph) -> list[str]:
    """Names of the operations."""
    return [label.name for label in graph.labels]


def list_rows(recording: Recording) -> list[float]:
    """Rows of the product of each kind of iteration."""
    rows = []
    for iteration in recording.iterations:
        place = list_names(iteration.graph).index("addmm")
        rows.append(float(iteration.graph.features.m[place]))
    return rows


def list_notes(recording: Recording, part: str) -> list[str]:
    """Notes with a part of a text."""
    return [note for note in recording.graph.notes if part in note]


# -- iterations
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_loop_gives_the_graph_of_its_step(device: str) -> None:
    def make_step():
        model, updates = make_model(device)
        return lambda: train(model, updates)

    with record(device=device) as recording:
        model, updates = make_model(device)
        for _ in range(1000):
            train(model, updates)
        raise AssertionError("the loop is ended before")
    expected = capture(make_step, device=device)
    assert sorted(list_names(recording.graph)) == sorted(list_names(expected))
    assert recording.graph.features.flops.sum() == expected.features.flops.sum()
    assert (recording.count, len(recording.iterations)) == (4, 1)
    assert "4 iterations recorded, all alike" in repr(recording)
    assert recording.graph.updated_by == "sgd"


def test_a_loop_over_a_model_from_outside_leaves_it_as_it_was() -> None:
    model, updates = make_model()
    before = model.weight.clone()
    with record(device="cpu") as recording:
        while True:
            train(model, updates)
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None
    assert recording.graph.parameters == WIDTH * WIDTH + WIDTH


def test_an_update_of_every_third_step_makes_iterations_of_three() -> None:
    with record(device="cpu") as recording:
        model, updates = make_model()
        for step in range(1000):
            model(torch.ones(ROWS, WIDTH)).sum().backward()
            if step % 3 == 2:
                updates.step()
                updates.zero_grad()
    assert list_names(recording.graph).count("addmm") == 3
    assert not recording.graph.notes


def test_two_optimizers_make_one_iteration() -> None:
    """As of a generator and what judges it: the first one begins it."""
    with record(device="cpu") as recording:
        first, second = make_model(), make_model()
        for _ in range(1000):
            train(*first, rows=2)
            train(*second, rows=3)
    assert list_names(recording.graph).count("addmm") == 2
    assert list_rows(recording) == [3.0]  # what follows the end of the first one's update


def test_iterations_that_differ_are_all_kept_and_said() -> None:
    with (
        pytest.warns(UserWarning, match=r"1 of 4 that were recorded.* 0.8 to 1.4 times its FLOP"),
        record(device="cpu") as recording,
    ):
        model, updates = make_model()
        for step in range(1000):
            train(model, updates, rows=step + 3)
    assert list_rows(recording) == [4.0, 5.0, 6.0, 7.0]
    assert recording.graph is recording.iterations[1].graph  # the median
    assert recording.count == 4


def test_the_most_frequent_iteration_is_the_graph() -> None:
    with (
        pytest.warns(UserWarning, match="the iterations of the loop differ: 3 of 4"),
        record(device="cpu") as recording,
    ):
        model, updates = make_model()
        for step in range(1000):
            train(model, updates)
            if step % 4 == 0:  # as of moving averages of weights
                model(torch.ones(ROWS, WIDTH))
    assert list_names(recording.graph).count("addmm") == 1
    assert [iteration.count for iteration in recording.iterations] == [1, 3]


def test_iterations_to_compare_are_a_choice() -> None:
    with record(device="cpu", iterations=1) as recording:
        model, updates = make_model()
        while True:
            train(model, updates)
    assert "1 iteration recorded" in repr(recording)


def test_a_loop_that_ends_by_itself_is_recorded() -> None:
    with record(device="cpu") as recording:
        model, updates = make_model()
        for _ in range(3):
            train(model, updates)
    assert recording.count == 2


def test_an_optimizer_inside_of_an_optimizer_ends_no_iteration() -> None:
    class Outer(torch.optim.SGD):
        def step(self, closure=None):
            inner.step()
            super().step()

    with record(device="cpu") as recording:
        model, inner = make_model()
        outer = Outer(model.parameters(), 0.1)
        while True:
            train(model, outer)
    assert list_names(recording.graph).count("addmm") == 1
    assert len(recording.graph.labels) == 10  # the weight and the bias are updated twice
    assert recording.graph.updated_by == "outer, sgd"


def test_a_loop_without_an_update_is_refused() -> None:
    with pytest.raises(ValueError, match="without an update of"), record(device="cpu"):
        model, updates = make_model()
        model(torch.ones(ROWS, WIDTH)).sum().backward()
        del updates


def test_a_loop_that_updates_by_hand_ends_its_iterations_with_backward_passes() -> None:
    _, _of_another_loop = make_model()
    with (
        pytest.warns(UserWarning, match="no optimizer of PyTorch; an iteration is what lies"),
        record(device="cpu") as recording,
    ):
        model = nn.Linear(WIDTH, WIDTH)
        for _ in range(100):
            model.zero_grad()
            model(torch.ones(ROWS, WIDTH)).sum().backward()
            with torch.no_grad():
                for weight in model.parameters():
                    weight -= 0.1 * weight.grad
    names = list_names(recording.graph)
    assert (names.count("addmm"), names.count("mm"), names.count("sub_")) == (1, 1, 2)
    assert recording.graph.parameters == WIDTH * WIDTH + WIDTH


def test_a_loop_whose_optimizer_never_updates_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "MOST_PASSES", 8)
    with (
        pytest.raises(ValueError, match=r"no optimizer of the loop has updated in 8 backward"),
        record(device="cpu"),
    ):
        model, _idle = make_model()
        for _ in range(100):
            model(torch.ones(ROWS, WIDTH)).sum().backward()
        raise AssertionError("the loop is ended before")


def test_a_loop_whose_first_optimizer_stalls_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "MOST_PASSES", 8)
    with (
        pytest.raises(ValueError, match=r"SGD, the first optimizer that updated, did not do so"),
        record(device="cpu"),
    ):
        train(*make_model())
        model, updates = make_model()
        for _ in range(100):
            train(model, updates)
        raise AssertionError("the loop is ended before")


@pytest.mark.parametrize("rank", [0.5, "0", True, -1, 2])
def test_a_rank_is_one_of_the_ranks(rank: Any) -> None:
    with pytest.raises(ValueError, match=r"rank is .* must be (a whole number of 0 or|0 to 1)"):
        record(ranks=2, rank=rank)
    with pytest.raises(ValueError, match=r"rank is .* must be (a whole number of 0 or|0 to 1)"):
        capture(lambda: lambda: torch.ones(1) + 1, ranks=2, rank=rank)


def test_a_single_update_is_recorded_from_the_first_forward_pass() -> None:
    with (
        pytest.warns(UserWarning, match="the loop has one update"),
        record(device="cpu") as recording,
    ):
        model, updates = make_model()
        with torch.no_grad():  # as of a first evaluation
            model(torch.ones(100, WIDTH))
        train(model, updates)
    assert list_rows(recording) == [ROWS]
    assert list_names(recording.graph)[0] == "addmm"
    assert recording.count == 1


def test_an_error_of_the_loop_is_raised_and_the_process_is_as_before() -> None:
    with pytest.raises(KeyError, match="wrong"), record(ranks=2):
        train(*make_model())
        raise KeyError("wrong")
    assert not torch.cuda.is_available()
    assert not dist.is_initialized()
    assert "RANK" not in os.environ
    assert type(torch.ones(1)) is torch.Tensor


def test_a_loop_that_needs_a_number_is_refused_with_its_line() -> None:
    with (
        pytest.raises(ValueError, match=r"needs one in .*test_scripts.py.*rows\[rows > 0\]"),
        record(),
    ):
        rows = make_model()[0](torch.ones(ROWS, WIDTH))
        rows = rows[rows > 0]


def test_a_loop_up_to_a_computed_number_is_refused_and_a_long_evaluation_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("perfkit.recording.trails.MOST_READ", 20)

    def run(tolerance: float) -> None:
        model, updates = make_model()
        with torch.no_grad():
            for _ in range(30):
                model(torch.ones(ROWS, WIDTH)).sum().item()
        for _ in range(3):
            loss = model(torch.ones(ROWS, WIDTH)).sum()
            while loss.item() > tolerance:
                loss = loss * 0.5
            loss.backward()
            updates.step()
            updates.zero_grad()

    untried = pytest.warns(
        UserWarning, match=r"while loss.item\(\) > tolerance.* before it was tried"
    )
    with untried, record(device="cpu") as recording:
        run(1e30)
    assert len(recording.graph)
    with (
        pytest.raises(ValueError, match=r"needs one in .*while loss.item\(\) > tolerance"),
        record(device="cpu"),
    ):
        run(1e-3)


def test_a_loop_that_decides_by_its_loss_says_so() -> None:
    with (
        pytest.warns(UserWarning, match=r"decides by computed numbers.*test_scripts.py"),
        record(device="cpu") as recording,
    ):
        model, updates = make_model()
        while True:
            if train(model, updates).item() < 10.0:
                model(torch.ones(ROWS, WIDTH))
    assert list_names(recording.graph).count("addmm") == 2


def test_a_loop_that_keeps_the_best_says_that_it_decides() -> None:
    with pytest.warns(UserWarning) as told, record(device="cpu"):
        model, updates = make_model()
        best = 10.0
        while True:
            loss = train(model, updates).item()
            if loss < best:
                best = loss
                model(torch.ones(ROWS, WIDTH))
    texts = [str(each.message) for each in told]
    assert any("3 of 4 that were recorded" in text for text in texts)
    assert any("decides by computed numbers" in text for text in texts)


def test_a_loop_that_always_differs_may_decide() -> None:
    with (
        pytest.warns(UserWarning, match="may decide by computed numbers"),
        record(device="cpu"),
    ):
        model, updates = make_model()
        for step in range(100):
            train(model, updates, rows=step + 1).item()


def test_rare_work_beside_numbers_that_are_logged_decides_nothing() -> None:
    with (
        pytest.warns(UserWarning, match=r"FLOP; a mean over .* with its count$"),
        record(device="cpu") as recording,
    ):
        model, updates = make_model()
        for step in range(1000):
            train(model, updates).item()
            if step == 2:
                model(torch.ones(ROWS, WIDTH))
    assert [iteration.count for iteration in recording.iterations] == [3, 1]


def test_a_loop_that_logs_every_second_iteration_decides_nothing() -> None:
    """Its probes come in turn with the iterations that log, and were taken for a decision."""
    text = ""
    with pytest.warns(UserWarning) as told, record(device="cpu") as recording:
        model, updates = make_model()
        for step in range(1000):
            loss = train(model, updates)
            mean = loss.mean().item()
            if step % 2 == 0:
                text += f"{(loss + loss).item():.2f} {mean:.2f}"
    assert not any("computed numbers" in str(each.message) for each in told)
    assert [iteration.count for iteration in recording.iterations] == [2, 2]


def test_numbers_that_are_logged_or_checked_decide_nothing() -> None:
    text = ""
    with warnings.catch_warnings(), record(device="cpu") as recording:
        warnings.simplefilter("error")
        model, updates = make_model()
        while True:
            loss = train(model, updates)
            if not loss.item() < 1e9:
                raise RuntimeError("the loss is too large")
            text += f"{loss:.2f}"
            kept = copy.deepcopy([loss.item()])
            assert pickle.loads(pickle.dumps(kept)) == json.loads(json.dumps(kept)) == [loss.item()]
    assert text.startswith("1.001.00")
    assert len(recording.iterations) == 1


@pytest.mark.filterwarnings("ignore:.*was never calibrated")
def test_predict_takes_a_recording() -> None:
    recording = Recording(name="mine")
    with pytest.raises(ValueError, match="mine has no recorded iteration yet"):
        predict(recording, "h100-sxm-8")
    with recording:
        model, updates = make_model("cuda")
        while True:
            train(model, updates)
    assert predict(recording, "h100-sxm-8").time == predict(recording.graph, "h100-sxm-8").time
    with pytest.raises(ValueError, match="recorded before"), recording:
        pass


# -- the GPU
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the iteration has no collective")
def test_a_loop_is_told_of_the_gpu_of_its_platform() -> None:
    told: dict[str, Any] = {}
    with record(ranks=16, platform=load_platform("mi300x-8")):
        told["count"] = torch.cuda.device_count()
        told["name"] = torch.cuda.get_device_name(0)
        told["memory"] = torch.cuda.get_device_properties("cuda").total_memory
        told["free"] = torch.cuda.mem_get_info()[0]
        model, updates = make_model("cuda")
        while True:
            train(model, updates)
    assert told == {
        "count": 8,
        "name": load_platform("mi300x-8").device.name,
        "memory": 192_000_000_000,
        "free": 192_000_000_000,
    }


#: What scripts ask of a GPU or set there, and the answer.
ASKED = [
    ("torch.cuda.is_available()", True),
    ("torch.cuda.is_initialized()", True),
    ("torch.cuda.is_bf16_supported()", True),
    ("torch.cuda.device_count()", 1),
    ("torch.cuda.current_device()", 0),
    ("torch.cuda.get_device_capability()", (8, 0)),
    ("torch.cuda.get_device_properties(0).major", 8),
    ("torch.cuda.get_arch_list()", ["sm_80"]),
    ("torch.cuda.can_device_access_peer(0, 1)", True),
    ("torch.cuda.is_current_stream_capturing()", False),
    ("torch.cuda.memory_allocated()", 0),
    ("torch.cuda.max_memory_allocated('cuda:0')", 0),
    ("torch.cuda.max_memory_reserved()", 0),
    ("torch.cuda.memory_summary()", ""),
    ("torch.cuda.memory_snapshot()", []),
    ("torch.cuda.memory._record_memory_history(max_entries=10)", None),
    ("torch.cuda.set_per_process_memory_fraction(0.5)", None),
    ("torch.cuda.empty_cache()", None),
    ("torch.cuda.ipc_collect()", None),
    ("torch.cuda.init()", None),
    ("torch.cuda.reset_peak_memory_stats()", None),
    ("torch.cuda.reset_accumulated_memory_stats()", None),
    ("torch.cuda.manual_seed_all(1)", None),
    ("torch.cuda.synchronize()", None),
    ("torch.cuda.set_stream(torch.cuda.Stream())", None),
    ("torch.cuda.utilization()", 0),
    ("torch.cuda.profiler.start()", None),
    ("torch.cuda.device(0).__enter__()", None),
    ("torch.Generator('cuda').device.type", "cuda"),
    ("torch.ones(3, device='cuda').record_stream(torch.cuda.current_stream())", None),
    ("torch.ones(3).to(0).device.type", "cuda"),
    ("torch.ones(3, device=0).is_cuda", True),
    ("torch.nn.Linear(2, 2, device=0).weight.is_cuda", True),
    ("torch.accelerator.current_accelerator().type", "cuda"),
    ("torch.accelerator.set_device_index(0)", 0),
    ("torch.accelerator.current_device_index()", 0),
    ("torch.accelerator.synchronize()", None),
    ("torch.accelerator.empty_cache()", None),
    ("torch.accelerator.max_memory_allocated()", 0),
    ("torch.accelerator.current_stream() is torch.cuda.current_stream()", True),
    ("torch.backends.cuda.is_built()", True),
    ("torch.distributed.is_nccl_available()", True),
    ("torch.set_default_device('cuda') or torch.get_default_device().type", "cuda"),
]


def test_what_scripts_ask_of_a_gpu_is_answered() -> None:
    answers = {}
    with record() as recording:
        for question, _ in ASKED:
            answers[question] = eval(question)
        model, updates = make_model("cuda")
        while True:
            train(model, updates, device="cuda")
    assert answers == dict(ASKED)
    assert not recording.graph.notes
    assert torch.get_default_device().type == "cpu"


# -- ranks
# ---------------------------------------------------------------------------------------------------------


def test_a_loop_of_several_ranks_runs_as_a_launcher_starts_it() -> None:
    """The lines of tutorials on DistributedDataParallel."""
    with record(ranks=16, rank=9) as recording:
        rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        told = (rank, local, os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"])
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", rank=rank, world_size=16)
        backend, current = dist.get_backend(), torch.cuda.current_device()
        model, _ = make_model(local)
        replica = DistributedDataParallel(model, device_ids=[local], output_device=local)
        updates = torch.optim.SGD(replica.parameters(), 0.1)
        while True:
            train(replica, updates, device=local)
            dist.barrier()
    assert told == (9, 1, "16", "8")
    assert (backend, current) == ("nccl", 1)
    assert recording.graph.ranks == 16
    assert len(recording.graph.collectives) == 2  # the gradients, and the barrier


def test_a_loop_of_sharded_weights_ends_its_iterations_with_updates() -> None:
    with warnings.catch_warnings(), record(ranks=2) as recording:
        warnings.simplefilter("error")
        model = nn.Linear(WIDTH, WIDTH)
        fully_shard(model)
        updates = torch.optim.SGD(model.parameters(), 0.1)
        while True:
            train(model, updates)
    assert (recording.count, len(recording.iterations)) == (4, 1)
    assert recording.graph.updated_by == "sgd"
    assert list_names(recording.graph).count("all_gather") == 1


def test_the_first_version_of_fsdp_is_refused_with_a_way_out() -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    with pytest.raises(ValueError, match="first version of FSDP"), record(ranks=2):
        model = fsdp.FullyShardedDataParallel(nn.Linear(WIDTH, WIDTH).cuda(), device_id=0)
        model(torch.ones(ROWS, WIDTH, device="cuda"))


def test_one_rank_may_begin_its_group() -> None:
    with record() as recording:
        dist.init_process_group("nccl", rank=0, world_size=1)
        sizes = dist.get_world_size(), dist.get_rank()
        model, updates = make_model("cuda")
        while True:
            train(model, updates)
        dist.destroy_process_group()
    assert sizes == (1, 0)
    assert recording.graph.ranks == 1
    assert not dist.is_initialized()


def test_a_group_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="4 ranks, and ranks is 2; give ranks=4"), record(ranks=2):
        dist.init_process_group("nccl", rank=0, world_size=4)


def test_processes_of_ranks_run_as_one() -> None:
    ran = []

    def main(rank: int, size: int) -> None:
        ran.append((rank, size))
        dist.init_process_group("nccl", rank=rank, world_size=size)
        model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH).to(rank), device_ids=[rank])
        updates = torch.optim.SGD(model.parameters(), 0.1)
        while True:
            train(model, updates, device=rank)

    with record(ranks=4, rank=2) as recording:
        size = torch.cuda.device_count()
        torch.multiprocessing.spawn(main, args=(size,), nprocs=size, join=True)
    assert ran == [(2, 4)]
    assert len(recording.graph.collectives) == 1
    with (
        pytest.raises(ValueError, match=r"starts 2 processes in .*, and the recording is for 4"),
        record(ranks=4),
    ):
        torch.multiprocessing.spawn(main, args=(2,), nprocs=2)


@pytest.mark.filterwarnings("ignore:the iteration has no collective")
def test_objects_of_other_ranks_are_those_of_this_one() -> None:
    with pytest.warns(UserWarning, match="objects that ranks send each other"), record(ranks=2):
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, {"loss": 3})
        sent = ["a"]
        dist.broadcast_object_list(sent, src=0)
        received = [None]
        dist.scatter_object_list(received, ["b", "c"], src=0)
        collected: list[Any] = [None, None]
        dist.gather_object("d", collected, dst=0)
        model, updates = make_model("cuda")
        while True:
            train(model, updates)
    assert gathered == [{"loss": 3}, {"loss": 3}]
    assert (sent, received, collected) == (["a"], ["b"], ["d", "d"])


@pytest.mark.filterwarnings("ignore:the iteration has no collective")
def test_states_of_random_numbers_may_come_from_another_rank() -> None:
    """As Accelerate shares those of its samplers."""
    with record(ranks=2):
        generator = torch.Generator()
        state = generator.get_state().cuda()
        dist.broadcast(state, 0)
        generator.set_state(state.cpu())
        torch.set_rng_state(state.cpu())
        model, updates = make_model("cuda")
        while True:
            train(model, updates)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loop_that_uses_no_gpu_is_told_so(ranks: int) -> None:
    with pytest.warns(UserWarning, match="puts nothing on a GPU"), record(ranks=ranks):
        model: Any = nn.Linear(WIDTH, WIDTH)
        if ranks > 1:
            model = DistributedDataParallel(model)
        updates = torch.optim.SGD(model.parameters(), 0.1)
        while True:
            train(model, updates)


def test_a_loop_without_collectives_is_told_of_them() -> None:
    with pytest.warns(UserWarning, match="no collective between its 2 ranks"), record(ranks=2):
        model, updates = make_model("cuda")
        while True:
            train(model, updates)


# -- files
# ---------------------------------------------------------------------------------------------------------


def test_files_of_weights_are_not_written_and_files_of_the_user_are(tmp_path: Path) -> None:
    weights, settings = tmp_path / "weights.pt", tmp_path / "settings.pt"
    torch.save({"old": torch.ones(2)}, weights)
    with (
        pytest.warns(UserWarning, match=r"not written in .*torch.save\(model.state_dict"),
        record(),
    ):
        old = torch.load(weights, map_location="cuda:0", weights_only=True)["old"].shape
        model, updates = make_model("cuda")
        while True:
            train(model, updates)
            assert model.weight.untyped_storage().data_ptr() != 0
            torch.save(model.state_dict(), weights)
            torch.save({"width": WIDTH}, settings)
    assert old == (2,)
    assert torch.equal(torch.load(weights)["old"], torch.ones(2))
    assert torch.load(settings) == {"width": WIDTH}


def test_pictures_of_computed_numbers_are_not_written(tmp_path: Path) -> None:
    pictures = pytest.importorskip("PIL.Image")
    old = pictures.new("L", (2, 2), 7)
    old.save(tmp_path / "computed.png")
    with pytest.warns(UserWarning, match="pictures is not written"), record(device="cpu"):
        model, updates = make_model()
        while True:
            train(model, updates)
            grey = model(torch.ones(ROWS, WIDTH)).mul(255).to(torch.uint8).numpy()
            pictures.fromarray(grey).save(tmp_path / "computed.png")
            pictures.fromarray(torch.zeros(2, 2, dtype=torch.uint8).numpy()).save(
                tmp_path / "zeros.png"
            )
    assert pictures.open(tmp_path / "computed.png").getpixel((0, 0)) == 7
    assert pictures.open(tmp_path / "zeros.png").getpixel((0, 0)) == 0


# -- data
# ---------------------------------------------------------------------------------------------------------


class Pictures(torch.utils.data.Dataset[Any]):
    """A data set that reads its tensors when it is made, as those of torchvision do."""

    def __init__(self, count: int) -> None:
        self.data = torch.from_numpy(np.full((count, WIDTH), 3, dtype=np.uint8))
        self.labels = (torch.arange(count), [torch.ones(1)])

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place: int) -> tuple[Any, int]:
        return self.data[place].numpy().astype(np.float32), int(self.labels[0][place])


@pytest.mark.filterwarnings("ignore:batches of a data loader")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_that_the_loop_makes_has_its_values(workers: int) -> None:
    batches = []
    with record(device="cuda") as recording:
        loader = torch.utils.data.DataLoader(
            Pictures(16), batch_size=ROWS, num_workers=workers, pin_memory=True
        )
        model, updates = make_model("cuda")
        for rows, labels in loader:
            batches.append((rows.sum().item(), labels.tolist()))
            updates.zero_grad()
            model(rows.to("cuda")).sum().backward()
            updates.step()
    assert batches[:2] == [(96.0, [0, 1, 2, 3]), (96.0, [4, 5, 6, 7])]
    assert len(recording.graph.transfers) == 1


@pytest.mark.filterwarnings("ignore:batches of a data loader")
def test_data_that_are_not_known_count_as_zeros() -> None:
    data = Pictures(WIDTH)
    with pytest.warns(UserWarning, match="they count as zeros"), record(device="cpu"):
        model, updates = make_model()
        data.data = model.weight.detach().to(torch.uint8)
        loader = torch.utils.data.DataLoader(data, batch_size=2)
        while True:
            for rows, _ in loader:
                updates.zero_grad()
                model(rows).sum().backward()
                updates.step()
    assert torch.equal(data.data, torch.zeros(WIDTH, WIDTH, dtype=torch.uint8))
