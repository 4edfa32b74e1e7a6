"""Nets: what is captured is what runs, random ones have sizes in range, and files keep them."""

import json
import math
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest

import perfkit as pk
from perfkit.measure import samples
from perfkit.recording.nets import NETS, Net

SMALL = {"batch": 2, "size": 32, "width": 8, "depth": 1, "classes": 10}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "alexnet"}, "name is 'alexnet'; known are resnet"),
        ({"batch": 0}, "batch is 0"),
        ({"width": 12}, "width is 12; it must be a multiple of 8; take 16"),
        ({"size": 16}, "size is 16; .*32 pixels"),
        (
            {"optimizer": "lamb"},
            "optimizer is 'lamb'; known are sgd, sgd_momentum, adagrad, adam, adamw",
        ),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"batch": 4}, "batch is 4; it must divide by the 3 ranks"),
        ({"batch": 6}, "plan is given; this workload has no tables"),
    ],
    ids=str,
)
def test_wrong_nets_are_refused(changes: dict[str, Any], message: str) -> None:
    plan = samples.draw_check(0)[-1].plan
    with pytest.raises(ValueError, match=message):
        Net(**{"name": "resnet", **SMALL, **changes}).graphs(3, plan if "plan" in message else None)


def count_updates(graph: pk.Graph) -> int:
    """Operations of the optimizer."""
    return sum(label.phase == "update" for label in graph.labels)


@pytest.mark.parametrize("name", ["resnet", "xlnet"])
def test_nets_on_a_device_are_what_it_runs(name: str) -> None:
    """Optimizers update lists there, convolutions run in TF32, as on an H100, whose trace has as
    many operations."""
    pytest.importorskip("torch", reason="nets need torch: pip install 'perfkit[measure]'")
    net = Net(name, **{**SMALL, "width": 64})
    (cpu,) = net.graphs(accelerator=False)
    (gpu,) = net.graphs(accelerator=True)
    assert count_updates(gpu) < 10 < count_updates(cpu)
    assert ("tf32" in gpu.dtypes) == (name == "resnet")


# Draws.


def test_all_models_are_in_a_check() -> None:
    drawn = samples.draw_check(3, models="all")
    families = [sample.family for sample in drawn]
    assert [families.count(f) for f in ("convolution", "xlnet", "hybrid", "ddp")] == [6, 1, 6, 4]
    assert len({sample.name for sample in drawn}) == len(drawn)
    for sample in drawn:
        assert sample.ranks == (2 if sample.family in ("hybrid", "ddp") else 1)
    nets = {s.workload.name for s in drawn if s.family in ("convolution", "xlnet")}
    assert nets == set(NETS)


def test_half_of_the_parallel_models_of_a_check_overlap() -> None:
    drawn = samples.draw_check(3, models="all")
    standard = samples.draw_check(3)
    assert drawn[:24] == standard[:24]
    assert drawn[:30] != standard, "half of the parallel DLRMs overlap"
    for family in ("hybrid", "ddp"):
        overlaps = [getattr(s.workload, "overlap") for s in drawn if s.family == family]  # noqa: B009
        assert overlaps.count(True) == overlaps.count(False)


def test_all_models_of_a_check_survive_their_file() -> None:
    for sample in samples.draw_check(3, models="all"):
        data = json.loads(json.dumps(samples.dump(sample.workload)))
        assert samples.load(data) == sample.workload
        del data["overlap"]
        assert getattr(samples.load(data), "overlap") is False, "as in older files"  # noqa: B009


def test_calibration_of_all_families_takes_fifteen_iterations() -> None:
    drawn = samples.draw_calibration(models="all")
    assert len(drawn) == 15
    families = {"dlrm", "transformer", "convolution", "xlnet", "hybrid", "ddp"}
    assert {sample.family for sample in drawn} == families
    for sample in samples.draw_calibration(models="all", hybrid=False):
        assert sample.ranks == 1
    with pytest.raises(ValueError, match="models is 'some'; known are standard, all"):
        samples.draw_calibration(models="some")


# The real thing, very small.

torch = pytest.importorskip("torch", reason="nets need torch: pip install 'perfkit[measure]'")

from perfkit.measure.iterations import OperationTimer, build_step  # noqa: E402
from perfkit.recording.convolutions import build_net  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_calls")

OPTIMIZERS = ("sgd", "adamw")


@pytest.mark.parametrize(("name", "optimizer"), list(zip(NETS, cycle(OPTIMIZERS), strict=False)))
def test_nets_run_what_is_captured(name: str, optimizer: str) -> None:
    net = Net(name, **SMALL, optimizer=optimizer)
    step, module = build_step(net)
    step()
    with OperationTimer() as timer:
        step()
    graph = net.graphs()[0]
    assert [label.name for label in graph.labels] == timer.names
    assert graph.parameters == sum(p.numel() for p in module.parameters())
    assert graph.traffic.sum() == pytest.approx(sum(timer.nbytes), rel=0.1)
    assert graph.family == NETS[name]
    assert graph.ranks == 1
    assert net.graphs()[0] is graph, "captured once"


def test_no_iteration_of_calibration_is_in_a_check() -> None:
    drawn = [sample.workload for sample in samples.draw_calibration(models="all")]
    for seed in range(9):
        for sample in samples.draw_check(seed, models="all"):
            assert sample.workload not in drawn


def name_operations(graph: pk.Graph) -> list[str]:
    """Names of operations, whether they are of a CPU or in place."""
    return [label.name.replace("_for_cpu", "").rstrip("_") for label in graph.labels]


def test_a_step_under_autocast_is_what_is_predicted() -> None:
    sizes = {"batch": 2, "sequence": 64, "layers": 1, "hidden": 128, "heads": 2, "vocabulary": 512}
    model = pk.Transformer.gpt2("gpt2", **sizes, dtype="bf16", mixed=True)
    build_step(model)[0]()
    captured = pk.capture(lambda: build_step(model, device="cuda")[0], device="cuda")
    (built,) = model.graphs(accelerator=True)
    assert name_operations(captured) == name_operations(built)


@pytest.mark.parametrize("name", NETS)
def test_activations_and_gradients_stay_in_range(name: str) -> None:
    """Denormal numbers take a core many times longer, and would be timed instead of the net."""
    torch.manual_seed(0)
    net = replace(Net(name, **SMALL), size=64, depth=2)
    module = build_net(net)
    tokens = net.family == "xlnet"
    out = module(torch.randint(10, (2, 64)) if tokens else torch.randn(2, 3, 64, 64))
    out.square().mean().backward()
    sizes = [p.grad.abs().max().item() for p in module.parameters() if p.grad.abs().max() > 0]
    assert math.isfinite(out.abs().max().item())
    assert 1e-12 < min(sizes) <= max(sizes) < 1e6
