"""A measured iteration beside its prediction: how far, whether inside, and what could explain it."""

import math
import re
from pathlib import Path

import pytest

import perfkit as pk
from perfkit.ground.units import format_bytes
from perfkit.platform.estimates import keep_quiet
from perfkit.prediction import against, single_causes


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


@pytest.fixture(scope="module")
def hidden_network() -> pk.Prediction:
    with keep_quiet():
        sizes = {"batch": 64, "sequence": 8192, "dtype": "bf16", "mixed": True, "checkpoint": True}
        model = pk.Transformer.preset("llama-3-8b", layers=8, parallel="fsdp", **sizes)
        return pk.predict(model, "h100-sxm-8x8", ranks=64)


@pytest.mark.parametrize("ratio", [1.15, 2.0, 0.9])
@pytest.mark.parametrize("name", ["predicted", "bound_by_products", "hidden_network"])
def test_a_speed_that_is_named_gives_the_measured_time(
    name: str, ratio: float, request: pytest.FixtureRequest
) -> None:
    prediction = request.getfixturevalue(name)
    deviation = prediction.against(ratio * prediction.time)
    table = deviation.table()
    assert set(table.columns) == {"resource", "elasticity", "scale"}
    sensitivity = dict(prediction.sensitivity().table().select("resource", "elasticity").rows())
    assert dict(table.select("resource", "elasticity").rows()) == pytest.approx(sensitivity)
    assert table["scale"].drop_nulls().len()
    said = "\n".join(deviation._list_resources())
    for resource, _, scale in table.rows():
        if scale is None:
            # not at the farthest speed either
            farthest = 0.25 if ratio > 1 else 4.0
            time = single_causes.predict_time(prediction, resource, farthest)
            assert (time < deviation.measured.seconds) == (ratio > 1), resource
            continue
        assert 0.25 <= scale <= 4.0 and (scale < 1) == (ratio > 1)
        [line] = re.findall(rf"  {resource}\b.* alone explains it at (\S+) times", said)
        time = single_causes.predict_time(prediction, resource, float(line))
        assert time == pytest.approx(deviation.measured.seconds, rel=0.02), resource


def test_a_network_that_overlap_hides_is_named(hidden_network: pk.Prediction) -> None:
    with keep_quiet():
        slower = hidden_network._repredict(hidden_network.platform.with_scale(inter=0.3))
    deviation = hidden_network.against(slower.time)
    assert not deviation.is_inside
    scales = {name: (elasticity, scale) for name, elasticity, scale in deviation.table().rows()}
    elasticity, scale = scales["inter"]
    assert scale == pytest.approx(0.3, rel=0.03)
    # as much of it at the rate of today would be far beyond what is believable
    assert scale**elasticity < 1 + 0.5 * (deviation.ratio - 1)
    assert "inter (bandwidth between nodes) alone explains it at 0.3" in deviation.explain()


def test_a_search_of_many_operations_says_that_it_is_short(
    hidden_network: pk.Prediction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single_causes, "_MANY_OPERATIONS", 1)
    predictions: list[float] = []
    predict_time = single_causes.predict_time

    def count(prediction: pk.Prediction, resource: str, scale: float) -> float:
        predictions.append(scale)
        return predict_time(prediction, resource, scale)

    monkeypatch.setattr(single_causes, "predict_time", count)
    deviation = hidden_network.against(1.5 * hidden_network.time)
    said = " ".join(deviation.explain().split())
    # the end and two steps, for each resource
    assert len(predictions) <= 3 * len(single_causes.list_resources(hidden_network.platform))
    assert "each speed was searched in 2 steps alone" in said
    for resource, shown, time in re.findall(
        r"(\w+) \([^()]*\) alone explains it at (\S+) times its speed, about: (\S+ \S+) predicted",
        said,
    ):
        again = predict_time(hidden_network, resource, float(shown))
        value, unit = time.split()
        assert again == pytest.approx(float(value) * {"s": 1.0, "ms": 1e-3}[unit], rel=0.01)


def test_a_time_that_jumps_past_the_measured_one_is_not_explained() -> None:
    def find_gap(slowness: float) -> float:
        return -1.0 if slowness < 2 else 1.0

    today, end = single_causes._Point(1.0, -1.0), single_causes._Point(4.0, 1.0)
    found = single_causes._search(find_gap, today, end, 0.01, 8)
    assert abs(found.gap) == 1.0 > single_causes.LARGEST_ERROR


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
