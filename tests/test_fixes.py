"""What would help most: gains of small invented traces by hand, and of steps of the event loop."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

import perfkit as pk
from benchmarks.fixes import draw, judge, name_first
from benchmarks.helpers.written_traces import Loop, time_loop, write_traces
from perfkit.__main__ import main
from perfkit.calibration import replay_links
from perfkit.calibration.fixes import Fix, Fixes, estimate_contention
from perfkit.calibration.replay_links import choose_steps, record_run
from perfkit.calibration.replay_run import Item, Link, Run, replay, sort_items
from perfkit.platform.estimates import keep_quiet
from tests import recordings
from tests.recordings import Event, event

DATA = Path(__file__).parent / "data"


def find(fixes: Fixes, kind: str) -> Fix:
    """The first change of a kind."""
    return next(fix for fix in fixes.fixes if fix.kind == kind)


def launch(begin: float, link: int, start: float, took: float, **facts: int) -> list[Event]:
    """A kernel that computes, with its operator and its launch [us]."""
    return [
        event("cpu_op", "aten::mm", begin - 1, 6),
        event("cuda_runtime", "cudaLaunchKernel", begin, 4, correlation=link),
        event("kernel", "sgemm", start, took, correlation=link, **facts),
    ]


def reduce(begin: float, link: int, start: float, took: float, ranks: int = 2) -> list[Event]:
    """An all_reduce on a stream of its own, of 400 kB [us]."""
    facts = {
        "Collective_name": "allreduce",
        "dtype": "Float",
        "In_msg_nelems": 100_000,
        "Out_msg_nelems": 100_000,
        "Group_size": ranks,
        "Process_Group_Name": "0",
        "Process_Group_Ranks": str(list(range(ranks))),
    }
    return [
        event("cpu_op", "record_param_comms", begin - 1, 6, **facts),
        event("cuda_runtime", "cudaLaunchKernel", begin, 4, correlation=link),
        event("kernel", "ncclAllReduce", start, took, tid=20, correlation=link, **facts),
    ]


def test_a_slow_rank_costs_what_its_kernels_take_longer() -> None:
    paths = [DATA / f"step_rank{rank}.kineto.json" for rank in (0, 1)]
    fixes = pk.read_trace(paths).fixes()
    # its product takes 400 µs in place of 300, and rank 0 waits for it
    fix = find(fixes, "balance")
    assert fix.what == "balance rank 1"
    assert fix.gain == pytest.approx(100e-6, rel=0.01)
    assert fix.low < 100e-6 < fix.high
    assert "comes last to 1 collective of a step, together 100 µs" in fix.words


def test_a_host_that_launches_late_is_the_whole_gain_of_graphs(tmp_path: Path) -> None:
    # ten kernels of 10 µs, each 10 µs after its launch, every 100 µs
    events = [recordings.step(0, 1000)]
    for number in range(10):
        begin = 10 + 100 * number
        events += launch(begin, 1 + number, begin + 10, 10)
    fixes = pk.read_trace(recordings.write(tmp_path / "a.json", events)).fixes()
    graphs = find(fixes, "graphs")
    # of 900 µs between launches 5 % are left, at the begin of the step
    assert graphs.gain == pytest.approx(900e-6 - 9 * 10e-6, rel=0.06)
    assert fixes.fixes[0] is graphs
    assert "for 10 launches, the device 100 µs for kernels" in graphs.words


def test_time_in_no_operator_may_be_no_launch_cost(tmp_path: Path) -> None:
    # two kernels of 10 µs; between their launches 5 µs of operators and 985 µs of nothing
    events = [*launch(10, 1, 20, 10), *launch(1000, 2, 1010, 10)]
    fixes = pk.read_trace(recordings.write(tmp_path / "a.json", events)).fixes()
    graphs = find(fixes, "graphs")
    assert graphs.gain > 900e-6
    # at least what an operator takes up to and after its launch
    assert graphs.low < 6e-6
    assert "for 984 µs the host is in no operator" in graphs.words


def test_what_something_else_hides_brings_nothing(tmp_path: Path) -> None:
    # a collective of 100 µs beside a kernel of 500: faster links save nothing
    events = [recordings.step(0, 1000), *launch(10, 1, 20, 100), *reduce(20, 2, 120, 100)]
    events += [*launch(30, 3, 120, 500), *launch(40, 4, 620, 100)]
    hidden = pk.read_trace(recordings.write(tmp_path / "a.json", events)).fixes()
    assert not [fix for fix in hidden.fixes if fix.kind in ("link", "overlap")]
    # the same collective ahead of the kernel
    events = [recordings.step(0, 1000), *launch(10, 1, 20, 100), *reduce(20, 2, 120, 100)]
    events += [*launch(30, 3, 221, 500), *launch(40, 4, 721, 100)]
    exposed = pk.read_trace(recordings.write(tmp_path / "b.json", events)).fixes()
    link = find(exposed, "link")
    assert 0 < link.low < link.gain < link.high < 60e-6
    assert any("read the traces of all ranks" in text for text in exposed.warnings)


def test_a_wait_of_the_host_costs_the_pause_of_the_device_behind_it(tmp_path: Path) -> None:
    # the host waits for a kernel of 400 µs, and launches the next one 100 µs after it
    events = [recordings.step(0, 640), *launch(10, 1, 20, 400)]
    events += [event("cpu_op", "aten::item", 18, 410)]
    events += [event("cuda_runtime", "cudaStreamSynchronize", 20, 405)]
    events += launch(520, 2, 530, 100)
    fixes = pk.read_trace(recordings.write(tmp_path / "a.json", events)).fixes()
    wait = find(fixes, "waits")
    assert wait.gain == pytest.approx(110e-6, rel=0.1)
    assert "aten::item" in wait.words
    # no graph holds the wait: it must go first, and the time of its call is not saved with it
    graphs = find(fixes, "graphs")
    assert "First remove 1 call (cudaStreamSynchronize in aten::item)" in graphs.advice
    assert graphs.low < graphs.gain - 10e-6
    assert ".item()" in wait.advice


def test_a_pause_of_one_host_is_named_and_costs_what_all_wait(tmp_path: Path) -> None:
    # the host of rank 1 launches its second kernel 200 µs late, and the others wait for it
    ranks = []
    for rank in range(3):
        late = 200 * (rank == 1)
        events = [
            recordings.step(0, 500),
            *launch(10, 1, 20, 100),
            *launch(130 + late, 2, 140 + late, 50),
        ]
        ranks.append([*events, *reduce(150 + late, 3, 190 + late, 250 - late, ranks=3)])
    fixes = pk.read_trace(recordings.write_ranks(tmp_path, ranks)).fixes()
    pauses = find(fixes, "pauses")
    assert pauses.gain == pytest.approx(200e-6, rel=0.02)
    assert "at once up to 200 µs (rank 1)" in pauses.words


def test_loading_counts_where_the_device_waits_for_it(tmp_path: Path) -> None:
    events = [recordings.step(0, 730), *launch(10, 1, 20, 100)]
    loader = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    events += [event("user_annotation", loader, 100, 500), *launch(610, 2, 620, 100)]
    fixes = pk.read_trace(recordings.write(tmp_path / "a.json", events)).fixes()
    assert find(fixes, "loading").gain == pytest.approx(500e-6, rel=0.01)


def test_steps_that_are_not_replayed_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    for number in range(5):
        begin = 1000 * number
        events.append(recordings.step(begin, 1000, number))
        events += launch(begin + 10, 1 + 2 * number, begin + 20, 100)
        events += launch(begin + 500, 2 + 2 * number, begin + 510, 100)
    trace = pk.read_trace(recordings.write(tmp_path / "a.json", events))
    assert not [text for text in trace.fixes().warnings if "the replay has" in text]
    # room for three steps of four items, one of which comes before those that count
    monkeypatch.setattr(replay_links, "MOST_ITEMS", 12)
    warnings = trace.fixes().warnings
    assert [text for text in warnings if "the replay has the first 2 of 4 steps" in text]


def test_contention_that_the_trace_does_not_show_is_told(tmp_path: Path) -> None:
    def list_events(collectives: int, slowed: float = 200, *, sized: bool = True) -> list[Event]:
        events = [recordings.step(0, 16 * (slowed + 100))]
        for number in range(16):
            begin = 10 + (slowed + 100) * number
            took = 100.0
            if number < collectives:  # beside a collective a kernel takes longer
                took = slowed
                events += reduce(begin - 5, 100 + number, begin + 10, slowed)
            launched = launch(begin, 1 + number, begin + 10, took)
            if sized:
                launched[0]["args"]["Input Dims"] = [[512, 512], [512, 512]]
            events += launched
        return events

    shown = pk.read_trace(recordings.write(tmp_path / "a.json", list_events(8)))
    assert estimate_contention(record_run(shown.recorded)).likely == pytest.approx(0.5)
    assert not [text for text in shown.fixes().warnings if "0% to 55%" in text]
    # kernels of unknown size may be unequal
    unsized = pk.read_trace(recordings.write(tmp_path / "e.json", list_events(8, sized=False)))
    assert not estimate_contention(record_run(unsized.recorded)).is_measured
    hidden = pk.read_trace(recordings.write(tmp_path / "b.json", list_events(7)))
    assert [text for text in hidden.fixes().warnings if "0% to 55% of their rate" in text]
    alone = pk.read_trace(recordings.write(tmp_path / "c.json", list_events(0)))
    assert not [text for text in alone.fixes().warnings if "of their rate" in text]
    most = pk.read_trace(recordings.write(tmp_path / "d.json", list_events(8, slowed=2000)))
    assert [text for text in most.fixes().warnings if "lost 95% of their rate or more" in text]


def test_a_mean_below_one_call_is_not_zero_calls(tmp_path: Path) -> None:
    # of three ranks one waits for its device, and launches its second kernel late; the others wait
    ranks = []
    for rank in range(3):
        events = [recordings.step(0, 700), *launch(10, 1, 20, 400)]
        if rank == 1:
            events += [event("cpu_op", "aten::item", 18, 410)]
            events += [event("cuda_runtime", "cudaStreamSynchronize", 20, 405)]
            events += [*launch(520, 2, 530, 100), *reduce(530, 3, 640, 50, ranks=3)]
        else:
            events += [*launch(30, 2, 421, 100), *reduce(40, 3, 530, 160, ranks=3)]
        ranks.append(events)
    fixes = pk.read_trace(recordings.write_ranks(tmp_path, ranks)).fixes()
    words = [fix.words for fix in fixes.fixes if fix.kind == "waits"]
    assert words
    assert words[0].startswith("In less than one call of cudaStreamSynchronize from aten::item")


def test_a_trace_without_a_device_has_no_fixes() -> None:
    trace = pk.read_trace(DATA / "cpu_step.kineto.json.gz")
    assert not trace.has_device
    with pytest.raises(ValueError, match="no work of a device"):
        trace.fixes()


def test_the_command_says_why_a_cpu_trace_has_no_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(DATA / "cpu_step.kineto.json.gz")]) == 0
    printed = capsys.readouterr().out
    assert "no advice on what would help: trace is of 'cpu_step.kineto.json.gz'" in printed


def test_a_replay_that_is_far_from_the_trace_gives_no_advice(tmp_path: Path) -> None:
    # marked steps of 1000 µs, in which the host is busy for 900 µs after the last launch
    events = [recordings.step(0, 1000), *launch(10, 1, 20, 50), *launch(60, 2, 80, 20)]
    events.append(event("cpu_op", "aten::sort", 100, 890))
    fixes = pk.read_trace(recordings.write(tmp_path / "a.json", events)).fixes()
    assert fixes.replayed == pytest.approx(100e-6)
    assert fixes.fixes == ()
    assert fixes.headline().startswith("no advice")
    assert "takes 100 µs, the trace says 1 ms, and beyond 25% apart" in fixes.explain()


def test_advice_names_only_what_the_trace_has(tmp_path: Path) -> None:
    # a forward pass alone: no update, no gradients
    events = [recordings.step(0, 1000)]
    for number in range(10):
        begin = 10 + 100 * number
        events += launch(begin, 1 + number, begin + 10, 10)
    fixes = pk.read_trace(recordings.write(tmp_path / "a.json", events)).fixes()
    told = fixes.explain()
    assert "twice the batch" in told
    for word in ("gradient", "update", "foreach"):
        assert word not in told


def test_what_goes_together_is_told_beyond_the_first(tmp_path: Path) -> None:
    fixes = pk.read_trace([DATA / f"step_rank{rank}.kineto.json" for rank in (0, 1)]).fixes()
    last = fixes.fixes[-1]
    apart = replace(fixes, together=(fixes.fixes[0], last))
    assert last.advice in apart.explain(1)
    assert last.advice not in replace(fixes, together=()).explain(1)


def test_together_is_no_sum() -> None:
    paths = [DATA / f"step_rank{rank}.kineto.json" for rank in (0, 1)]
    fixes = pk.read_trace(paths).fixes()
    assert len(fixes.together) > 1
    assert len({fix.kind for fix in fixes.together}) == len(fixes.together)
    assert "batch" not in {fix.kind for fix in fixes.together}
    assert fixes.low <= fixes.gain <= fixes.high
    assert max(fix.gain for fix in fixes.together) <= fixes.gain + 1e-9
    assert fixes.table()["gain_s"].is_sorted(descending=True)
    assert fixes.headline() in fixes.explain()
    assert "  together, " in fixes.explain()


def test_the_replay_gives_back_the_steps_of_the_event_loop(tmp_path: Path) -> None:
    model = pk.Transformer.gpt2(batch=4, sequence=128, dtype="bf16")
    small = pk.Transformer(**{**vars(model), "layers": 1, "vocabulary": 1024, "name": "small"})
    slow = {0: 1.3, 1: 1.0}
    prediction = pk.predict(small, "a100-sxm-8", ranks=2, slowdown=slow)
    loop = Loop(steps=3, noise=0.0, loading=1e-3)
    run = record_run(pk.read_trace(write_traces(tmp_path, prediction, loop)).recorded)
    replayed = replay(run)
    assert replayed.time == pytest.approx(time_loop(prediction, loop), rel=2e-3)
    for begin, item in zip(replayed.begins, run.items, strict=True):
        assert begin == pytest.approx(item.begin, abs=5e-6)


def test_the_gain_of_a_drawn_iteration_is_that_of_the_event_loop() -> None:
    with keep_quiet():
        rows = judge(draw(0))
    truths = {row["kind"]: row for row in rows}
    for kind in ("link", "balance"):
        row = truths[kind]
        assert row["gain"] == pytest.approx(row["truth"], rel=0.1), kind
        assert row["low"] <= row["truth"] <= row["high"], kind
    assert name_first(rows)


def test_items_that_wait_for_each_other_are_refused() -> None:
    items = [Item("work", 0, -1, 0.0, 1.0, name) for name in ("a", "b")]
    links = [[Link(1, 0.0, "stream")], [Link(0, 0.0, "stream")]]
    run = Run(items, [1.0, 1.0], links, [0.0, 0.0], [-math.inf] * 2, None, (-1,), {0: 0.0})
    with pytest.raises(ValueError, match="a of rank 0 waits for itself"):
        sort_items(run)


def test_work_beside_a_collective_is_slower_by_the_contention() -> None:
    items = [
        Item("work", 0, -1, 0.0, 4.0, "mm", role="compute"),
        Item("work", 0, -1, 0.0, 2.0, "all_reduce", work="collective", role="communication"),
    ]
    run = Run(items, [4.0, 2.0], [[], []], [0.0, 0.0], [0.0, 0.0], None, (-1,), {0: 0.0})
    run.recorded_contention = run.contention = 0.5
    assert replay(run).time == pytest.approx(4.0)
    run.seconds[1] = 0.0  # without it half of two seconds is saved
    assert replay(run).time == pytest.approx(3.0)


def test_the_longest_run_of_kept_steps_is_replayed_behind_the_step_before_it() -> None:
    trace = pk.read_trace(DATA / "step_rank0.kineto.json")
    steps = trace.steps()
    window = choose_steps(steps, 10)
    assert window.steps[-1] in steps["step"].to_list()


def test_the_command_tells_the_first_three_and_what_goes_together(
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = [str(DATA / f"step_rank{rank}.kineto.json") for rank in (0, 1)]
    assert main(["trace", *paths]) == 0
    printed = capsys.readouterr().out
    assert "  3. " in printed
    # and the fourth, which is part of what goes together
    assert "  4. compile the model" in printed
    assert "  5. " not in printed
    assert "balance rank 1" in printed
