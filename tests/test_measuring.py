"""What measurements that were not made would narrow."""

import math
from dataclasses import replace

import pytest

import perfkit as pk
from perfkit.exploration.measuring import RAIL_SPREAD
from perfkit.platform.collective_costs import SIGMA_OF_NODES, SIGMA_TRANSFER
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import spell_platform


def widen(spread: float) -> float:
    return math.exp(1.2816 * spread)


def test_logs_of_more_nodes_narrow_more() -> None:
    """By hand: a link of the datasheet, then rails of as many nodes, with the growth from there to 64."""
    missing = pk.what_to_measure("h100-sxm-8", nodes=64, network="nd-h100-v5")
    rows = {row["measurement"]: row for row in missing.table().iter_rows(named=True)}
    assert list(rows) == [f"all_gather and others on {nodes} nodes" for nodes in (64, 4, 2)]
    for nodes in (64, 4, 2):
        row = rows[f"all_gather and others on {nodes} nodes"]
        growth = SIGMA_OF_NODES * math.sqrt(math.log2(64 / nodes))
        assert row["large_now"] == pytest.approx(
            widen(math.hypot(SIGMA_TRANSFER, SIGMA_OF_NODES * math.sqrt(5))), rel=0.05
        )
        assert row["large_after"] == pytest.approx(widen(math.hypot(RAIL_SPREAD, growth)), rel=0.05)
        assert row["step_now"] is None
        assert f"mpirun -np {8 * nodes} -N 8 all_gather_perf" in row["commands"]
        assert "--base h100-sxm-8@nd-h100-v5 --out mine.toml" in row["commands"]
    assert "narrows most, from x 1." in missing.headline()


def test_what_was_measured_is_not_asked_for_again() -> None:
    table = pk.what_to_measure("h100-sxm-8x8").table()  # rails of ten nodes
    assert not any("nodes" in text for text in table["measurement"])
    assert pk.what_to_measure("zen5-2").headline().endswith("nothing is missing")


def test_a_step_on_a_device_that_nobody_measured() -> None:
    model = pk.Transformer.preset("gpt2", batch=8, sequence=128, dtype="bf16")
    table = pk.what_to_measure("mi300x-8", model).table()
    assert set(table["measurement"]) == {
        "collectives of one node",
        "kernels and hosts of a node",
        "steps of this family on one node",
    }
    gains = (table["step_now"] / table["step_after"]).to_list()
    assert gains == sorted(gains, reverse=True) and gains[0] > 1.05
    assert (table["step_after"] <= table["step_now"]).all()


def test_unknown_networks_and_strategies_are_refused() -> None:
    with pytest.raises(ValueError, match="network is 'efa'"):
        pk.what_to_measure("h100-sxm-8", nodes=2, network="efa")
    with pytest.raises(ValueError, match="strategy is 'fsdp'; it must be a Strategy"):
        pk.what_to_measure("h100-sxm-8", nodes=2, strategy="fsdp")  # type: ignore[arg-type]


def test_the_iteration_is_that_on_all_ranks() -> None:
    model = pk.Transformer.bert(batch=64, parallel="fsdp")
    missing = pk.what_to_measure("h100-sxm-8", model, nodes=2, network="p5")
    with keep_quiet():
        prediction = pk.predict(model, "h100-sxm-8x2@p5", ranks=16)
    upper = prediction.interval()[1] / prediction.time
    assert missing.table()["step_now"][0] == pytest.approx(upper)
    text = missing.explain()
    assert text.startswith(missing.headline())
    assert "    mpirun -np 16 -N 8 all_gather_perf " in text


def test_rings_are_asked_for_where_only_other_collectives_were_measured() -> None:
    measured = pk.load_platform("h100-sxm-8x8")
    fits = measured.collectives
    others = {
        key: fit
        for key, fit in fits.items()
        if not key.startswith(("all_gather.10", "reduce_scatter.10"))
    }
    rows = (
        pk.what_to_measure(replace(measured, collectives=others)).table()["measurement"].to_list()
    )
    assert "all_gather and others on 2 nodes" in rows


def test_commands_take_the_file_of_a_platform(tmp_path) -> None:
    """Also of one with more nodes, and with a network."""
    path = tmp_path / "la.toml"
    pk.load_platform("h100-sxm-8").save(path)
    path.write_text(path.read_text().replace('name = "h100-sxm-8"', 'name = "la"', 1))
    mine = pk.load_platform(path)
    assert mine.name == "la"
    for platform in (mine, mine.with_nodes(4)):
        assert spell_platform(platform) == str(path)
    joined = spell_platform(mine.with_nodes(4, network="p5"))
    assert joined == f"{path}@p5" and pk.load_platform(joined).network.links["inter"].name
    missing = pk.what_to_measure(mine, nodes=2, network="p5")
    assert f"--base {path}@p5 --out mine.toml" in missing.table()["commands"][0]
    # a file is named also where the gallery has its name, and the gallery's is not by that of the file
    copy = tmp_path / "gallery.toml"
    pk.load_platform("h100-sxm-8").with_nodes(64).save(copy)
    assert spell_platform(pk.load_platform(copy).with_nodes(4)) == str(copy)
    assert spell_platform(pk.load_platform("h100-sxm-8x64@p5")) == "h100-sxm-8x64@p5"
    assert spell_platform(pk.load_platform("h100-sxm-8x64")) == "h100-sxm-8x64"


def test_where_a_platform_was_read_from_is_of_that_platform_alone(tmp_path) -> None:
    """Two files with one name, read one after the other; no file says where it was read from."""
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    for path in (first, second):
        replace(pk.load_platform("h100-sxm-8"), name="ours").save(path)
    ours, theirs = pk.load_platform(first), pk.load_platform(second)
    assert ours == theirs and ours.to_toml() == theirs.to_toml() == first.read_text()
    assert spell_platform(ours) == str(first)
    assert spell_platform(theirs) == str(second)
    # a platform that was made from it is in no file yet
    assert spell_platform(replace(ours, name="calibrated")) == "calibrated.toml"
    assert spell_platform(pk.Platform.from_toml(ours.to_toml())) == "ours.toml"


def test_folders_of_a_platform_may_have_any_name(tmp_path) -> None:
    folder = tmp_path / "me@work and home"
    folder.mkdir()
    path = folder / "ours.toml"
    replace(pk.load_platform("h100-sxm-8"), name="ours").save(path)
    for platform in (str(path), pk.load_platform(path), pk.load_platform(f"{path}@p5")):
        missing = pk.what_to_measure(platform, nodes=2, network="nd-h100-v5")
        assert f"--base '{path}@nd-h100-v5' --out" in missing.table()["commands"][0]


def test_an_all_to_all_is_measured_only_for_an_iteration_that_has_one() -> None:
    def list_programs(workload: object) -> set[str]:
        table = pk.what_to_measure("h100-sxm-8", workload, nodes=2, network="p5").table()
        between = table.filter(table["measurement"] == "all_gather and others on 2 nodes")
        commands = between["commands"][0].split()
        return {word for word in commands if word.endswith("_perf")}

    others = {"all_gather_perf", "all_reduce_perf", "reduce_scatter_perf"}
    model = pk.Transformer.bert(batch=64, parallel="fsdp")
    recommender = pk.DLRM("dlrm-ddp", batch=2048)
    assert list_programs(model) == others
    assert list_programs(recommender) == {*others, "alltoall_perf"}
    assert list_programs(None) == {*others, "alltoall_perf"}
