"""What commands answer: which ranks took part, what would help, the same platform under each of its
names, strategies, costs, and warnings that say the same in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

import perfkit as pk
from perfkit.__main__ import main
from perfkit.commands.gains import Gain, describe_gains, find_gains
from perfkit.ground.notes import group_notes, write_warnings
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import load_nodes, load_platform
from perfkit.sharding.holders import name_together

GPT2 = "--model gpt2 --batch 16 --sequence 256 --dtype bf16"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports are written there."""
    monkeypatch.chdir(tmp_path)


def answer(words: str, capsys: Any) -> list[str]:
    """Lines that a command prints."""
    assert main(words.split()) == 0
    lines: list[str] = capsys.readouterr().out.splitlines()
    return lines


def figures(words: str, capsys: Any) -> Any:
    """What a command gives as JSON."""
    assert main([*words.split(), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def refuse(words: str, capsys: Any) -> str:
    """The error of a command."""
    assert main(words.split()) != 0
    error: str = capsys.readouterr().err
    return error


def gpt2() -> pk.Transformer:
    return pk.Transformer.preset("gpt2", batch=16, sequence=256, dtype="bf16")


# -- which ranks take part


def test_the_second_line_says_which_ranks_were_taken_unasked(capsys: Any) -> None:
    second = answer(f"predict {GPT2} --platform h100-sxm-8", capsys)[1]
    assert second == "  ranks: 8, all of h100-sxm-8; --ranks takes another number"
    asked = answer(f"predict {GPT2} --platform h100-sxm-8 --ranks 8", capsys)
    assert not any(line.startswith("  ranks:") for line in asked)


def test_python_says_that_it_took_one_rank_unasked() -> None:
    with keep_quiet():
        unasked = pk.predict(gpt2(), "h100-sxm-8")
        asked = pk.predict(gpt2(), "h100-sxm-8", ranks=1)
        single = pk.predict(gpt2(), "rtx-4090")
        captured = pk.predict(gpt2().graphs(1, accelerator=True)[0], "h100-sxm-8")
    line = "  ranks: 1 of the 8 of h100-sxm-8, as ranks is left out; ranks=8 takes all"
    assert unasked.explain().splitlines()[1] == line
    assert unasked.time == asked.time
    for other in (asked, single, captured):
        assert not any(text.startswith("  ranks:") for text in other.explain().splitlines())


# -- one platform, one name


@pytest.mark.parametrize("nodes", [4, 8])
def test_nodes_and_the_name_with_nodes_are_one_platform(nodes: int, capsys: Any) -> None:
    model = "--model gpt2 --batch 64 --sequence 256 --dtype bf16"
    by_option = figures(f"predict {model} --platform h100-sxm-8 --nodes {nodes}", capsys)
    by_name = figures(f"predict {model} --platform h100-sxm-8x{nodes}", capsys)
    assert by_option == by_name
    assert by_option["platform"] == f"h100-sxm-8x{nodes}"


def test_nodes_of_other_platforms_are_those_of_with_nodes() -> None:
    for name, nodes in (("a100-sxm-efa-8x8", 4), ("h100-sxm-8@p5", 2), ("h100-sxm-8x8", 16)):
        expected = load_platform(name).with_nodes(nodes)
        assert load_nodes(name, nodes).name == expected.name
    assert load_nodes("h100-sxm-8", 1).name == "h100-sxm-8"
    with pytest.raises(ValueError, match="nodes is 0"):
        load_nodes("h100-sxm-8", 0)


# -- what would help


def test_the_last_line_says_what_would_help_most(capsys: Any) -> None:
    words = f"predict {GPT2} --platform h100-sxm-8 --ranks 8"
    last = answer(words, capsys)[-1]
    assert last.startswith("  what helps: twice the ")
    with keep_quiet():
        prediction = pk.predict(gpt2(), "h100-sxm-8", ranks=8)
        host = pk.predict(gpt2(), pk.load_platform("h100-sxm-8").with_scale(host=2.0), ranks=8)
    assert f"speed of the host would save {1 - host.time / prediction.time:.1%}" in last
    assert figures(words, capsys)["twice_s"]["host"] == pytest.approx(host.time)


def test_many_operations_are_not_predicted_again() -> None:
    with keep_quiet():
        prediction = pk.predict(
            pk.Transformer.preset("gpt2", batch=64, sequence=256, dtype="bf16", accumulate=8),
            "h100-sxm-8",
            ranks=8,
        )
    assert find_gains(prediction) is None
    assert "--report FILE" in describe_gains(None)


def test_links_are_no_help_to_a_single_rank() -> None:
    with keep_quiet():
        alone = find_gains(pk.predict(gpt2(), "h100-sxm-8x8", ranks=1))
    assert alone is not None
    assert {gain.resource for gain in alone} == {"peak", "memory", "host"}
    assert [gain.saved for gain in alone] == sorted((gain.saved for gain in alone), reverse=True)


def test_resources_that_save_nothing_are_not_named() -> None:
    assert "nothing alone" in describe_gains([Gain("peak", 1.0, 0.001)])
    both = describe_gains([Gain("peak", 0.5, 0.5), Gain("memory", 0.999, 0.001)])
    assert both == "what helps: twice the FLOP/s of the device would save 50.0%"


# -- strategies


def test_scaling_takes_a_strategy_whose_replicas_grow(capsys: Any) -> None:
    words = "scaling --model gpt2 --batch 4 --sequence 256 --dtype bf16 --platform h100-sxm-8 --tp 2 --zero 1"
    rows = figures(words, capsys)["rows"]
    assert [row["ranks"] for row in rows] == [2, 4, 8]
    with keep_quiet():
        model = pk.Transformer.preset("gpt2", batch=16, sequence=256, dtype="bf16")
        strategy = pk.Strategy(tp=2, dp=4, zero=1)
        expected = pk.predict(model, "h100-sxm-8", strategy=strategy)
    assert rows[-1]["batch"] == 16
    assert expected.time in rows[-1].values()
    assert "dp is given; more ranks are more replicas" in refuse(f"{words} --dp 2", capsys)
    assert "ranks is 3; 2 ranks hold the model once" in refuse(
        f"{words} --ranks 3 --strong", capsys
    )


def test_scaling_refuses_a_replica_that_is_larger_than_the_platform() -> None:
    with pytest.raises(ValueError, match=r"16 ranks for one replica .* h100-sxm-8 has 8"):
        pk.scaling(gpt2(), "h100-sxm-8", strategy=pk.Strategy(tp=2, pp=8))
    with pytest.raises(ValueError, match="strategy is 'fsdp'"):
        pk.scaling(gpt2(), "h100-sxm-8", strategy="fsdp")  # type: ignore[arg-type]


def test_compare_takes_a_strategy(capsys: Any) -> None:
    words = f"compare a100-sxm-8 h100-sxm-8 {GPT2} --tp 2 --zero 1"
    rows = figures(words, capsys)["quantities"]
    with keep_quiet():
        strategy = pk.Strategy(tp=2, dp=4, zero=1)
        expected = pk.predict(gpt2(), "h100-sxm-8", strategy=strategy)
    assert rows[-1]["b"] == pytest.approx(expected.time)
    assert "tp 2 · zero1, 8 ranks" in rows[-1]["quantity"]
    assert "tp is given" in refuse("compare a100-sxm-8 h100-sxm-8 --tp 2", capsys)
    with pytest.raises(ValueError, match="ranks is 4, and strategy takes 8"):
        pk.compare("a100-sxm-8", "h100-sxm-8", gpt2(), ranks=4, strategy=strategy)


def test_two_workloads_are_compared_with_a_strategy() -> None:
    wider = pk.Transformer.preset("gpt2", batch=32, sequence=256, dtype="bf16")
    strategy = pk.Strategy(tp=2, dp=4, zero=1)
    with keep_quiet():
        comparison = pk.compare(gpt2(), wider, platform="h100-sxm-8", strategy=strategy)
    assert comparison.a.ranks == comparison.b.ranks == 8


def test_explore_sets_yours_beside_the_fastest(capsys: Any) -> None:
    words = f"explore {GPT2} --platform h100-sxm-8 --ranks 4 8"
    lines = answer(f"{words} --tp 2 --zero 1 --price 2 --tokens 1e9", capsys)
    [yours] = [line for line in lines if line.startswith("  yours, Strategy(tp=2, pp=1, dp=4")]
    assert "beside the fastest" in yours
    [cost] = [line for line in lines if line.startswith("  yours: tp 2 · zero1, 8 ranks")]
    assert "beside 8 ranks above)" in cost
    found = figures(f"{words} --parallel fsdp", capsys)
    assert found["yours"]["zero"] == 3
    assert found["yours"]["shortage"] is None
    assert figures(words, capsys)["yours"] is None


def test_costs_have_a_faster_strategy_that_does_not_fit(capsys: Any) -> None:
    words = (
        "explore --model gpt3-6.7b --platform a100-sxm-8 --batch 64 --dtype bf16 --mixed "
        "--memory 40e9 --price 2 --tokens 1e9"
    )
    lines = answer(words, capsys)
    [line] = [
        line for line in lines if line.startswith("  faster but too large:") and "; does" in line
    ]
    assert "does not fit: needs" in line
    assert " (-" in line, "it is cheaper"


# -- which rank holds which table


def test_shard_says_which_rank_holds_which_table(capsys: Any) -> None:
    lines = answer("shard --model dlrm-mlperf --platform h100-sxm-8 --steps 100", capsys)
    [head] = [place for place, line in enumerate(lines) if line.endswith("tables of its own")]
    held = lines[head + 1 : head + 9]
    with keep_quiet():
        plan = pk.shard(pk.DLRM("dlrm-mlperf"), "h100-sxm-8", ranks=8, steps=100).plan
    for rank, line in enumerate(held):
        assert line.split()[0] == str(rank)
        tables = [n for n, one in enumerate(plan.placements) if [*one.ranks] == [rank]]
        if tables:
            assert line.endswith(name_together([f"table {number}" for number in tables]))


def test_tables_on_all_ranks_are_named_once(capsys: Any) -> None:
    words = "shard --tables mlperf-dlrm-dcnv2 --batch 65536 --platform h100-sxm-8 --steps 100"
    lines = answer(words, capsys)
    on_all = [line for line in lines if line.startswith("  on all ranks, ")]
    assert any("data_parallel: table " in line for line in on_all)


def test_names_share_what_comes_before_their_numbers() -> None:
    assert name_together(["user", "item"]) == "user, item"
    assert name_together(["t_00", "t_01"]) == "t_00, t_01"
    assert name_together([f"t{number}" for number in range(30)]).endswith("and 6 more")


# -- warnings


def test_warnings_that_differ_in_sizes_or_operations_share_a_line() -> None:
    notes = [
        "all_gather on 64 ranks: nbytes 33.6 MB is outside the fitted range 512 B to 5 MB",
        "no published step",
        "all_gather on 64 ranks: nbytes 4 kB is outside the fitted range 512 B to 5 MB",
        "send_recv on 8 ranks: nbytes 4 kB is outside the fitted range 1.5 kB to 5 MB",
        "send_recv on 8 ranks was not measured",
    ]
    grouped = group_notes(notes)
    assert grouped == [
        f"{notes[0]} (one of 3 such warnings; also of send_recv)",
        "no published step",
        notes[4],
    ]
    assert write_warnings([]) == []
    # names of platforms differ in more than numbers
    assert len(group_notes(["h100-sxm-8: no fit", "a100-sxm-8: no fit"])) == 2


def test_a_comparison_of_clusters_has_few_lines_of_warnings(capsys: Any) -> None:
    words = (
        "compare a100-sxm-efa-8x8 h100-sxm-8x8 --model llama-3-8b --batch 64 --dtype bf16 --mixed "
        "--parallel fsdp --checkpoint"
    )
    lines = answer(words, capsys)
    shown = [line for line in lines if line.startswith("  warning:")]
    everything = figures(words, capsys)["warnings"]
    assert len(everything) > 20
    assert len(shown) < 10
    # those of the iteration come first, of FSDP's collectives
    assert "reduce_scatter" in shown[0]


def test_warnings_of_what_sets_the_pace_come_first() -> None:
    with keep_quiet():
        model = pk.Transformer.preset(
            "llama-3-8b", batch=64, dtype="bf16", mixed=True, parallel="fsdp", checkpoint=True
        )
        bound_by_products = pk.predict(model, "h100-sxm-8x8", ranks=64)
        slow_network = pk.load_platform("h100-sxm-8x8").with_scale(inter=0.02)
        bound_by_messages = pk.predict(model, slow_network, ranks=64)
        too_large = pk.predict("llama-3-8b", "h100-sxm-8", ranks=8)
    assert bound_by_products.bottleneck == "GEMM-bound"
    assert "flash3" in bound_by_products.warnings[0]
    assert bound_by_messages.bottleneck == "communication-bound"
    # gradients in fp32 take longer than weights in bf16
    assert "reduce_scatter" in bound_by_messages.warnings[0]
    assert too_large.warnings[0].startswith("a rank needs")
