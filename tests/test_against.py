"""A measured iteration beside its prediction: how far, whether inside, and what could explain it."""

import math

import pytest

import perfkit as pk
from perfkit.ground.units import format_bytes
from perfkit.platform.estimates import keep_quiet


@pytest.fixture(scope="module")
def predicted() -> pk.Prediction:
    with keep_quiet():
        model = pk.Transformer.bert("bert-base", batch=16, sequence=128, dtype="bf16")
        return pk.predict(model, "a100-sxm-8", ranks=8)


def test_distance_is_that_of_logarithms(predicted: pk.Prediction) -> None:
    one = predicted.against(predicted.time * math.exp(1.2815515 * predicted.spread))
    assert one.share_as_far == pytest.approx(0.2, abs=1e-6)
    assert one.ratio == pytest.approx(math.exp(1.2815515 * predicted.spread))
    low, high = predicted.interval(0.8)
    inside = [
        predicted.against(seconds).is_inside for seconds in (low, high, 0.99 * low, 1.01 * high)
    ]
    assert inside == [True, True, False, False]
    assert predicted.against(predicted.time).share_as_far == 1


def test_a_slower_resource_is_among_what_explains_it(predicted: pk.Prediction) -> None:
    with keep_quiet():
        slower = predicted.platform.with_scale(host=2.0, intra=0.5, memory=0.9)
        other = pk.predict(predicted.workload, slower, ranks=8)
    deviation = predicted.against(other.time)
    table = deviation.table()
    assert set(table.columns) == {"resource", "elasticity", "scale"}
    assert table["resource"].sort().equals(predicted.sensitivity().table()["resource"].sort())
    for name, elasticity, scale in table.drop_nulls().rows():
        # this much of it alone changes the time by as much
        assert scale**elasticity == pytest.approx(deviation.ratio), name


def test_what_is_not_the_same_run_is_told(predicted: pk.Prediction) -> None:
    step = pk.MeasuredStep(seconds=predicted.time, ranks=16, batch=16, sequence=512, dtype="fp16")
    deviation = predicted.against(step)
    assert deviation.mismatches == (
        "ranks is 16 in the measurement and 8 here",
        "sequence is 512 in the measurement and 128 here",
        "dtype is fp16 in the measurement and bf16 here",
    )
    assert "not the same run: ranks is 16" in deviation.explain()
    same = pk.MeasuredStep(seconds=predicted.time, ranks=8, batch=16)
    assert predicted.against(same).mismatches == ()
    too_fast = predicted.against(predicted.lower_bound / 2)
    assert "the busiest resource alone takes" in too_fast.mismatches[0]


def test_another_device_is_not_the_same_run(predicted: pk.Prediction) -> None:
    other = pk.MeasuredStep(seconds=predicted.time, device="NVIDIA H100 80GB HBM3")
    name = predicted.platform.device.name
    assert predicted.against(other).mismatches == (
        f"the device is NVIDIA H100 80GB HBM3 in the measurement and {name} here",
    )
    same = pk.MeasuredStep(seconds=predicted.time, device="NVIDIA A100-SXM4-80GB")
    assert predicted.against(same).mismatches == ()


def test_memory_beside_both_that_are_predicted(predicted: pk.Prediction) -> None:
    step = pk.MeasuredStep(seconds=predicted.time, memory=40e9)
    memory = predicted.memory()
    text = predicted.against(step).explain()
    total, reserved = format_bytes(memory.total), format_bytes(memory.reserved)
    assert total != reserved
    # the first is what the prediction itself says that a rank needs
    assert f"memory: 40 GB reported, {total} predicted, {reserved} with the context" in text
    assert f"needs {total} of" in predicted.explain()


def test_words_of_a_measurement(predicted: pk.Prediction) -> None:
    inside = predicted.against(predicted.time).explain()
    assert "inside the 80 % interval" in inside and "alone explains it" not in inside
    outside = predicted.against(2 * predicted.time).explain()
    assert "2.00 times as long, outside of the 80 % interval" in outside
    assert "alone explains it at 0." in outside
    assert "  fewer than 1 % of measurements would be as far off" in outside
    far = predicted.against(100 * predicted.time).explain()
    assert "no resource alone explains it at a believable speed" in far
    lasting = pk.MeasuredStep(seconds=predicted.time, spread=0.02, iterations=40, memory=40e9)
    text = predicted.against(lasting).explain()
    assert "the run itself: 40 iterations, ± 2.0%" in text and "memory: 40 GB reported" in text


@pytest.mark.parametrize("measured", [0.0, -1.0, "fast", None, float("nan"), [1.0]])
def test_what_is_no_measurement_is_refused(predicted: pk.Prediction, measured: object) -> None:
    with pytest.raises(ValueError, match="measured is"):
        predicted.against(measured)  # type: ignore[arg-type]
