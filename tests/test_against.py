"""A measured iteration beside its prediction: how far, whether inside, and what could explain it."""

import math
import re
from pathlib import Path

import pytest

import perfkit as pk
from perfkit.ground.units import format_bytes
from perfkit.platform.estimates import keep_quiet
from perfkit.prediction import against


@pytest.fixture(scope="module")
def predicted() -> pk.Prediction:
    with keep_quiet():
        model = pk.Transformer.bert("bert-base", batch=16, sequence=128, dtype="bf16")
        return pk.predict(model, "a100-sxm-8", ranks=8)


@pytest.fixture(scope="module")
def bound_by_products() -> pk.Prediction:
    with keep_quiet():
        model = pk.Transformer.preset("llama-3-8b", layers=2, batch=8, sequence=4096, dtype="bf16")
        return pk.predict(model, "h100-sxm-8", strategy=pk.Strategy(dp=8, zero=3))


def test_distance_is_that_of_logarithms(predicted: pk.Prediction) -> None:
    one = predicted.against(predicted.time * math.exp(1.2815515 * predicted.spread))
    assert one.distance == pytest.approx(1.0)
    assert one.ratio == pytest.approx(math.exp(1.2815515 * predicted.spread))
    low, high = predicted.interval(0.8)
    inside = [
        predicted.against(seconds).is_inside for seconds in (low, high, 0.99 * low, 1.01 * high)
    ]
    assert inside == [True, True, False, False]
    assert predicted.against(predicted.time).distance == 0
    assert predicted.against(predicted.time * low**2 / predicted.time**2).distance == pytest.approx(
        2
    )


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
    assert "2.00 times as long as predicted, outside of the 80 % interval" in outside
    assert "alone explains it at 0." in outside
    assert "times as far off as the end of that interval" in outside
    assert "times as far off" not in inside
    far = predicted.against(100 * predicted.time).explain()
    assert "no resource alone explains it at a believable speed" in far
    assert "attention" not in far and "a power cap alone does not explain it" in far
    lasting = pk.MeasuredStep(seconds=predicted.time, spread=0.02, iterations=40, memory=40e9)
    text = predicted.against(lasting).explain()
    assert "the run itself: 40 iterations, ± 2.0%" in text and "memory: 40 GB reported" in text


def test_a_power_cap_is_the_first_suspect_of_a_slow_run(bound_by_products: pk.Prediction) -> None:
    predicted = bound_by_products
    platform = predicted.platform
    with keep_quiet():
        slower = predicted._repredict(platform.with_power(560))
        deviation = predicted.against(1.001 * slower.time)
        [line] = deviation._try_power_cap()
        found = re.search(r"a power cap of (\d+) of 700 W alone explains it", line)
        assert found and abs(int(found[1]) - 560) < 6
        # what is capped already has no other cap, and a fast run none
        assert slower.against(2 * slower.time)._try_power_cap() == []
        far = predicted.against(3 * predicted.time)
        [line] = far._try_power_cap()
        capped = predicted._repredict(platform.with_power(490))
    factor = capped.time / predicted.time
    assert f"490 W, the lowest that is modelled, takes {factor:.2f} times as long" in line
    assert f"and {3 / factor:.2f} times are left" in line
    assert "power cap" not in predicted.against(predicted.time / 2).explain()


def test_attention_explains_by_its_share(bound_by_products: pk.Prediction) -> None:
    predicted = bound_by_products
    seconds = sum(time for (_, kind), (_, time) in predicted.parts.items() if kind == "attention")
    # its kernels take twice as long
    [line] = predicted.against(predicted.time + seconds)._try_attention()
    assert "its kernel takes 2.00 times as long" in line
    assert predicted.against(predicted.time + 9 * seconds)._try_attention() == []


@pytest.mark.repository
def test_how_often_steps_are_outside_is_that_of_the_page_of_accuracy() -> None:
    page = Path(__file__).parents[1].joinpath("docs", "accuracy.md").read_text("utf-8")
    table = page.partition("\none source left out\n")[2]
    row = next(line for line in table.split("\n") if line.startswith("all of data/steps"))
    steps, _, _, percentile, _, _, _, inside_80, inside_95 = row.split()[3:12]
    assert int(steps) == against.STEPS
    # a point or two may move with any prediction
    assert 100 - int(inside_80) == pytest.approx(against.OUTSIDE_80, abs=2)
    assert 100 - int(inside_95) == pytest.approx(against.OUTSIDE_95, abs=2)
    assert float(percentile) == pytest.approx(against.ERROR_95, abs=1)


def test_only_transformers_with_a_level_tell_of_published_steps(predicted: pk.Prediction) -> None:
    words = "of 166 published steps whose source was left out, 46 % were outside"
    assert predicted.level is not None
    assert words in " ".join(predicted.against(3 * predicted.time).explain().split())
    with keep_quiet():
        tables = pk.predict(pk.DLRM(), "a100-sxm-8", ranks=8)
    assert words not in tables.against(3 * tables.time).explain()


@pytest.mark.parametrize("measured", [0.0, -1.0, "fast", None, float("nan"), [1.0]])
def test_what_is_no_measurement_is_refused(predicted: pk.Prediction, measured: object) -> None:
    with pytest.raises(ValueError, match="measured is"):
        predicted.against(measured)  # type: ignore[arg-type]


def test_one_run_corrects_the_platform(predicted: pk.Prediction) -> None:
    deviation = predicted.against(1.25 * predicted.time)
    with keep_quiet():
        again = pk.predict(predicted.workload, deviation.correct(), ranks=8)
        other = pk.Transformer.bert("bert-base", batch=32, sequence=512, dtype="bf16")
        before = pk.predict(other, "a100-sxm-8", ranks=8)
        after = pk.predict(other, deviation.correct(), ranks=8)
    assert again.time == pytest.approx(deviation.measured.seconds, rel=1e-9)
    assert after.time == pytest.approx(1.25 * before.time, rel=1e-9)
    assert "all resources x 0.80" in deviation.explain()
    another = pk.MeasuredStep(seconds=1.0, ranks=16)
    with pytest.raises(ValueError, match="not of the same run: ranks is 16"):
        predicted.against(another).correct()


def test_a_measured_time_may_have_its_unit(predicted: pk.Prediction) -> None:
    for measured in ("44ms", "0.044", 0.044):
        assert predicted.against(measured).measured.seconds == 0.044
        assert pk.compare(predicted, measured).ratio == pytest.approx(0.044 / predicted.time)
    with pytest.raises(ValueError, match=r"measured is 'soon'; .*units s, ms.*such as '8h'"):
        predicted.against("soon")


def test_the_first_cause_is_that_the_settings_do_not_fit(predicted: pk.Prediction) -> None:
    with keep_quiet():
        model = pk.Transformer.preset("gpt2", batch=4096, dtype="bf16")
        unfit = pk.predict(model, "h100-sxm-8")
    for ratio in (1.0, 3.0):
        lines = unfit.against(ratio * unfit.time).explain().splitlines()
        assert lines[1].startswith("  these settings do not fit: a rank needs ")
        said = " ".join(" ".join(lines).split())
        assert "your run had smaller micro-batches or other settings (accumulate, micro_" in said
        assert "this run corrects the platform" not in said
    assert "do not fit" not in predicted.against(3 * predicted.time).explain()
