"""Campaigns keep finished measurements, errors say why, and no process or partly written file
remains."""

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfkit.calibration import campaign, cpu_measure
from perfkit.calibration.campaign import calibrate, check
from perfkit.calibration.cpu_measure import measure_samples
from perfkit.calibration.fit import fit_platform
from perfkit.ground.targets import check_target
from perfkit.measure import folders, processes, starter, timing
from perfkit.measure.folders import Campaign, open_campaign
from perfkit.measure.kernels import Case
from perfkit.measure.machine import Fact
from perfkit.measure.processes import (
    ENVIRONMENT,
    START,
    MeasurementError,
    run_processes,
    sharing_imports,
)
from perfkit.measure.records import read_measurements, write_measurements, write_record
from perfkit.measure.samples import Sample
from perfkit.measure.starter import Starter, StarterError, can_fork
from perfkit.measure.timing import find_disagreement, summarize_samples, time_calls, time_loader
from perfkit.platform.platform import Platform
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import Plan

pytestmark = pytest.mark.serial  # measures, and starts processes that do
TINY = DLRM(rows=[100, 50], dim=8, pooling=2, bottom=[8], top=[8], features=4, batch=8)
Children = list[subprocess.Popen[str]]
Patch = pytest.MonkeyPatch
EVERY, DAY = {key: [key] for key in "abc"}, 86400.0
open_quietly = partial(open_campaign, progress=False)


def raise_error(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


refuse = raise_error(OSError(errno.ENOSPC, "No space left on device"))


@pytest.fixture
def children(monkeypatch: Patch) -> Iterator[Children]:
    """Every process that a measurement starts; all must have ended after the test."""
    started: Children = []

    class Watched(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(processes.subprocess, "Popen", Watched)
    yield started
    for process in started:
        assert process.returncode is not None
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "perfkit"


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip(
        "torch", reason="measuring needs torch: pip install 'perfkit[measure]'"
    )


# Finished measurements are kept.


def jobs(calls: list[str], error: BaseException | None = None) -> dict[str, Callable[[], Any]]:
    def run(name: str) -> list[str]:
        calls.append(name)
        if name == "b" and error:
            raise error
        return [name]

    return {name: partial(run, name) for name in "abc"}


def test_a_rerun_continues_where_the_last_one_stopped(tmp_path: Path) -> None:
    calls: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        Campaign(tmp_path / "work", progress=False).run("kernels", jobs(calls, KeyboardInterrupt()))
    kept = Campaign(tmp_path / "work", progress=False)
    assert kept.run("kernels", jobs(calls)) == EVERY and calls == ["a", "b", "b", "c"], (
        "only what was missing"
    )
    kept.run("other stage", jobs(calls))
    assert calls[4:] == [*EVERY], "stages do not share results"
    kept.close()
    for _ in range(2):
        Campaign(None, progress=False).run("kernels", jobs(calls))
    assert calls[7:] == [*EVERY, *EVERY], "without a folder nothing is kept"
    assert not list(tmp_path.iterdir())


def test_campaigns_are_kept_by_options_versions_and_machine(
    cache: Path, monkeypatch: Patch
) -> None:
    """Several nodes may share one home folder."""
    files = [open_quietly("calibrate", "cpu", quick).file for quick in (True, True, False)]
    for holder, name, value in (
        (folders, "list_versions", {"torch": "0"}),
        (folders.system, "node", "node2"),
    ):
        monkeypatch.setattr(holder, name, lambda value=value: value)
        files.append(open_quietly("calibrate", "cpu", True).file)
    assert (
        files[0] == files[1]
        and len({*files}) == 4
        and {file.parent for file in files if file} == {cache}
    )


def test_a_damaged_line_is_named_and_measured_again(cache: Path) -> None:
    kept, calls = open_quietly("x"), []
    kept.run("kernels", jobs(calls))
    for text, lost in ((kept.file.read_text()[:-3], "c"), ('{"a": 1}\n7', "abc")):
        kept.file.write_text(text)
        calls.clear()
        with pytest.warns(
            UserWarning, match=f"{kept.file} is damaged; its lost measurements are repeated"
        ):
            assert open_quietly("x").run("kernels", jobs(calls)) == EVERY
        assert calls == [*lost]


def test_a_campaign_has_the_date_of_its_first_measurement_and_an_end(
    cache: Path, monkeypatch: Patch
) -> None:
    now, calls = [1.7e9], []
    monkeypatch.setattr(folders.time, "time", lambda: now[0])
    kept = open_quietly("x")
    kept.run("kernels", {"a": jobs(calls)["a"]})
    first = kept.day
    now[0] += 5 * DAY
    kept = open_quietly("x")
    assert kept.day != first, "nothing is used yet"
    kept.run("kernels", jobs(calls))
    assert (kept.day, calls) == (first, [*EVERY])
    now[0] += 5 * DAY
    with pytest.warns(UserWarning, match="measurements older than 7 days are measured again"):
        kept = open_quietly("x")
    kept.run("kernels", jobs(calls))
    assert calls == ["a", "b", "c", "a"] and kept.day > first


@pytest.mark.parametrize("days", [29, 31])
def test_campaigns_that_nobody_continues_are_removed(cache: Path, days: int) -> None:
    cache.mkdir()
    paths = [cache / "0123456789abcdef-1.jsonl", cache / "other.txt"]
    for path in paths:
        path.write_text("[]")
        moment = path.stat().st_mtime - days * DAY
        os.utime(path, (moment, moment))
    open_quietly("x").close()
    assert [path.exists() for path in paths] == [days == 29, True]


OTHER = """
import sys
from perfkit.measure.folders import open_campaign
kept = open_campaign("x", progress=False)
kept.run("kernels", {"a": lambda: "theirs"})
print(kept.file, flush=True)
sys.stdin.read()
"""


def test_a_second_process_gets_a_campaign_of_its_own(cache: Path) -> None:
    """Two processes do not mix their measurements, and the end of one removes nothing of the
    other."""
    with subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=-1, stdout=-1, text=True, env=os.environ
    ) as other:
        theirs = Path(other.stdout.readline().strip())
        with pytest.warns(
            UserWarning,
            match=f"process {other.pid} on .* since .* measures the same; .* both disturb",
        ):
            mine = open_quietly("x")
        assert mine.file != theirs and mine.run("kernels", {"a": lambda: "mine"}) == {"a": "mine"}
        mine.close()
        assert theirs.exists() and not mine.file.exists()
        other.kill()
    assert open_quietly("x").run("kernels", {"a": lambda: "mine"}) == {"a": "theirs"}


@pytest.mark.parametrize("fault", ["home", "lock"])
def test_without_a_cache_measuring_continues(fault: str, cache: Path, monkeypatch: Patch) -> None:
    if fault == "home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(
            folders.Path, "home", raise_error(RuntimeError("Could not determine home directory."))
        )
    else:
        monkeypatch.setattr("fcntl.flock", raise_error(OSError(errno.ENOLCK, "No locks available")))
    with pytest.warns(
        UserWarning, match=r"cannot be kept \(.*\); name a folder for them in XDG_CACHE_HOME"
    ):
        kept = open_quietly("x")
    assert kept.run("kernels", jobs([])) == EVERY
    kept.close()


def test_a_pipe_in_the_place_of_kept_measurements_is_left_alone(cache: Path) -> None:
    kept = open_quietly("x")
    kept.close()
    os.mkfifo(kept.file)
    os.utime(kept.file, (0, 0))  # a file of that age would be removed
    with pytest.warns(UserWarning, match="cannot be kept .*jsonl is not a regular file"):
        assert open_quietly("x").file is None
    assert kept.file.is_fifo()


def test_a_full_cache_is_named_and_measuring_continues(cache: Path, monkeypatch: Patch) -> None:
    kept = open_quietly("x")
    monkeypatch.setattr(folders, "open", refuse, raising=False)
    with pytest.warns(
        UserWarning, match=f"{kept.file} cannot be written to .No space left on device.; measuring"
    ):
        assert kept.run("kernels", jobs([])) == EVERY


# Measuring processes end with their parent and leave no files.

CHILD = (
    START.split("    from")[0] + "    print('bound', flush=True)\n    import signal; signal.pause()"
)
PARENT = """
import os, signal, subprocess, sys
environment = {**os.environ, "PERFKIT_PARENT": str(os.getpid())}
subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=environment)
signal.pause()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is of Linux")
def test_a_measuring_process_ends_with_its_parent_and_begins_nothing_without_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout.readline() == "bound\n"
        parent.kill()
        assert parent.communicate(timeout=60) == ("", None), (
            "the pipe ends when the child, which holds it, does"
        )
    environment = {**os.environ, "PERFKIT_PARENT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")


needs_forks = pytest.mark.skipif(not can_fork(), reason="Linux 5.3 or newer forks with handles")


@needs_forks
def test_processes_that_share_imports_are_new_ones_and_say_what_goes_wrong(
    torch: Any, children: Children, tmp_path: Path, monkeypatch: Patch
) -> None:
    """One starter forks both ranks and the next jobs; nothing of a job is left in the next one, and what
    the site prints when Python starts is no answer of the starter."""
    (tmp_path / "sitecustomize.py").write_text("print('welcome')")
    monkeypatch.syspath_prepend(tmp_path)
    job = {"task": "tests.jobs:look"}
    with sharing_imports(), sharing_imports():
        seen = [*run_processes(job, ranks=2), *run_processes(job)]
        assert len(children) == 1, "the starter"
        assert {each["parent"] for each in seen} == {children[0].pid}
        for each in seen:
            assert each["leader"] == each["pid"] and each["jobs"] == 1
            assert each["threads"] == 1 and each["cores"] == 1
            assert ENVIRONMENT.items() <= each["settings"].items()
        ranks = [each["settings"]["RANK"] + each["settings"]["WORLD_SIZE"] for each in seen]
        assert ranks == ["02", "12", "01"] and len({each["pid"] for each in seen}) == 3
        with pytest.raises(MeasurementError, match=r"process 0 stopped .*: KeyError: 'no_such'"):
            run_processes({"task": "kernels", "cases": [["gemm", "no_such", {}]], "seconds": 0.0})
        with pytest.raises(MeasurementError, match="process 0 was killed by signal 9"):
            run_processes({"task": "tests.jobs:kill"})
        with pytest.raises(MeasurementError, match="longer than 0 s"):
            run_processes({"task": "tests.jobs:hang"}, timeout=0.05)
        os.kill(children[0].pid, signal.SIGKILL)
        children[0].wait()
        [alone] = run_processes(job)
        assert alone["parent"] == os.getpid(), "without its starter a new interpreter measures"


@needs_forks
def test_a_starter_that_does_not_answer_is_ended(
    children: Children, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(starter, "_LONGEST", 0.01)
    settings = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    with Starter() as slow:
        with pytest.raises(StarterError, match="does not answer"):
            slow.start(tmp_path, tmp_path / "log.0", settings)
        assert children[0].wait() == -signal.SIGKILL
        with pytest.raises(StarterError):
            slow.start(tmp_path, tmp_path / "log.0", settings)
    assert not [*tmp_path.iterdir()], "nothing was begun"


@pytest.fixture
def python(tmp_path: Path, monkeypatch: Patch) -> Callable[[str], Path]:
    """Replace the interpreter of measuring processes by a script."""

    def stand_in(text: str) -> Path:
        script = tmp_path / "python"
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
        monkeypatch.setattr(processes.sys, "executable", str(script))
        return script

    return stand_in


#: Rank 1 kills itself, the others would sleep for minutes.
SLOW = 'if [ "$RANK" = "1" ]; then kill -9 $$; fi\nexec sleep 300'


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_that_asks_to_end_leaves_no_process_and_no_folder(
    name, python, children, monkeypatch, tmp_path
):
    number, script = getattr(signal, name), python(SLOW)
    usual = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
    found = signal.signal(number, usual)  # background jobs of a shell ignore interrupts
    monkeypatch.setattr(processes.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(processes.time, "sleep", lambda seconds: signal.raise_signal(number))
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            run_processes({"task": "kernels"})
        assert signal.getsignal(number) is usual
    finally:
        signal.signal(number, found)
    assert caught.value.args == (() if name == "SIGINT" else (number,))
    assert len(children) == 1 and [*tmp_path.iterdir()] == [script]


def test_handlers_of_the_program_stay() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with processes.tidy():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    with ThreadPoolExecutor(1) as pool:  # only the main thread may set handlers
        pool.submit(processes.tidy().__enter__).result()


@pytest.mark.parametrize(
    ("ranks", "device", "words"),
    [
        (
            3,
            "cpu",
            "ranks is 3; this machine has 2 cores that this process may use; take at most 2",
        ),
        (
            1,
            "cuda",
            "ranks is 1; this machine has 0 GPUs that PyTorch .* can use; choose device cpu, or",
        ),
    ],
)
def test_ranks_without_a_place_are_refused(ranks, device, words, torch, children, monkeypatch):
    monkeypatch.setattr(processes, "count_cores", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=words):
        processes.check_processors(ranks, device)
    assert processes.check_processors(2) == 2
    monkeypatch.setattr(processes, "gather_facts", lambda: {"loopback": Fact(None, "")})
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(
        MeasurementError, match="ranks cannot connect: this machine has no loopback"
    ):
        run_processes({"task": "collectives"}, ranks=2)
    assert not children


# Errors say why.


def test_the_last_line_of_a_process_is_in_the_error(children: Children) -> None:
    cases = [["elementwise", name, {"elements": 64}] for name in ("relu", "no_such")]
    words = (
        "process 0 stopped with exit code 1; .*run it again; its last line was: KeyError: 'no_such'"
    )
    with pytest.raises(MeasurementError, match=words) as caught:
        run_processes({"task": "kernels", "cases": cases, "seconds": 0.0})
    assert (
        "\n" not in str(caught.value)
        and "Traceback" in "".join(caught.value.__notes__)
        and len(children) == 1
    )


@pytest.mark.parametrize(
    ("ranks", "timeout", "words"),
    [
        (3, 600.0, "measuring process 1 was killed by signal 9; finished meas"),
        (1, 0.05, "longer than 0 s"),
    ],
)
def test_a_killed_rank_and_one_that_hangs_end_all(ranks, timeout, words, python, children):
    python(SLOW)
    with pytest.raises(MeasurementError, match=words):
        run_processes({"task": "collectives"}, ranks=ranks, timeout=timeout)
    assert len(children) == ranks
    assert {process.returncode for process in children} == {-signal.SIGKILL}


def test_measuring_processes_have_clean_settings(python: Any, tmp_path: Path) -> None:
    python(f'env > "{tmp_path}/environment"\nprintf "[1, 2]" > "$3/result.$RANK"')
    assert run_processes({"task": "kernels"}) == [[1, 2]]
    seen = (tmp_path / "environment").read_text().splitlines()
    assert {f"{name}={value}" for name, value in ENVIRONMENT.items()} <= {*seen}


# Files.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "tpu"}, "device is 'tpu'; known are cpu, cuda"),
        ({"ranks": 0}, "ranks is 0; it must be"),
        ({"ranks": "two"}, "ranks is 'two'"),
        ({"ranks": True}, "ranks is True"),
        ({"out": "missing/P.toml"}, "out is .*folder"),
        ({"out": "perfkit"}, "out is .*folder"),
    ],
    ids=str,
)
def test_bad_calibrations_are_refused_before_measuring(arguments, message, cache, monkeypatch):
    cache.mkdir()
    monkeypatch.chdir(cache.parent)
    monkeypatch.setattr(cpu_measure, "run_processes", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(ValueError, match=message):
        calibrate(**arguments)
    with pytest.raises(ValueError, match="seed is -1"):
        check("h100-sxm-8", seed=-1)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(
        ValueError, match=r"json is .*its folder cannot be written to; choose another"
    ):
        check_target("json", cache / "x.json")


RAW = {"format": 1, "kernels": []}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: Patch, toy: Platform) -> Campaign:
    """A campaign with one result, whose calibration measures RAW and fits the toy platform to
    it."""
    work = Campaign(tmp_path / "work", progress=False)
    work.run("kernels", {"a": lambda: [1]})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(campaign, "open_campaign", lambda *_, **__: work)
    monkeypatch.setattr(campaign, "measure_platform", lambda **_: None)
    monkeypatch.setattr(campaign, "write_measurements", lambda _: RAW)
    monkeypatch.setattr(
        campaign, "fit_platform", lambda measurements, name: toy if measurements == RAW else None
    )
    return work


def test_a_full_disk_leaves_no_part_of_a_platform(work, tmp_path, monkeypatch, toy):
    out = tmp_path / "P.toml"
    out.write_text("an older platform")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(OSError, match="No space left on device"):
            calibrate(out=out)
    assert out.read_text() == "an older platform"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["P.toml", "work"]
    assert work.run("kernels", {"a": refuse}) == {"a": [1]}, "what was measured is still there"
    assert calibrate(out=out) == toy == Platform.load(out) and not (tmp_path / "work").exists()
    assert json.loads((tmp_path / "P.measurements.json").read_text()) == RAW


def test_what_cannot_be_fitted_is_kept_and_fitted_later(work, tmp_path, monkeypatch, toy):
    again = partial(calibrate, measurements="P.measurements.json", out="P.toml")
    with monkeypatch.context() as patch:
        patch.setattr(campaign, "fit_platform", fit_platform)
        for out, kept in (
            (None, "perfkit-platform.measurements.json"),
            ("P.toml", "P.measurements.json"),
        ):
            with pytest.raises(
                MeasurementError, match=f"no measurement is lost.* --measurements {kept} --out"
            ):
                calibrate(out=out)
            assert json.loads((tmp_path / kept).read_text()) == RAW
        assert not (tmp_path / "P.toml").exists()
        with pytest.raises(ValueError, match="measurements cannot be fitted"):
            again()
    monkeypatch.setattr(campaign, "measure_platform", refuse)
    assert again() == toy == Platform.load("P.toml")
    with pytest.raises(ValueError, match=r"nowhere\.json cannot be read"):
        calibrate(measurements="nowhere.json")


def test_one_core_leaves_out_what_needs_two(monkeypatch: Patch, toy: Platform, cache: Path) -> None:
    chosen: list[Sample] = []
    monkeypatch.setattr(campaign, "count_cores", lambda: 1)
    monkeypatch.setattr(
        campaign, "measure_samples", lambda _, samples, **__: chosen.extend(samples) or refuse()
    )
    with (
        pytest.warns(UserWarning, match="iterations on two ranks are left out"),
        pytest.raises(OSError),
    ):
        check(toy, seed=3)
    assert len(chosen) == 24
    assert {sample.ranks for sample in chosen} == {1}


# Timing.


def test_calls_are_timed_in_rotation_and_groups(monkeypatch: Patch) -> None:
    found = summarize_samples([1.0, 3.0, 1.0, 3.0, 1.0, 3.0], cpu_share=0.9)
    assert write_record(found) == {
        "median": 2.0,
        "q1": 1.0,
        "q3": 3.0,
        "halves": [1.0, 3.0],
        "n": 6,
        "cpu_share": 0.9,
    }
    assert find_disagreement(found) == 2.0 and find_disagreement(summarize_samples([0.5])) == 0
    calls, clocked = list[int](), list[Any]()
    monkeypatch.setattr(
        timing, "clock", lambda *given, clock=timing.clock: clocked.append(1) or clock(*given)
    )
    turns = [partial(calls.append, i) for i in range(3)]
    found = time_calls(turns, seconds=0)
    assert found.n == 6 and np.ptp(np.bincount(calls)) <= 4
    assert len(clocked) == 8, "the warm-up, the trial call and each sample"


@pytest.mark.parametrize(
    ("workers", "spacing"), [(0, [9, 2, 2, 2, 5]), (4, [9, 1, 0, 0, 8, 0, 0, 0])]
)
def test_a_loader_is_timed_with_its_workers(
    workers: int, spacing: list[int], monkeypatch: Patch
) -> None:
    clock, taken = [0.0], list[int]()

    class Loader:
        num_workers = workers

        def __iter__(self) -> Iterator[int]:
            for seconds in spacing:
                clock[0] += seconds
                taken.append(seconds)
                yield seconds

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    assert time_loader(Loader()) == 2.0 and len(taken) == len(spacing)
    taken.clear()
    time_loader(Loader(), batches=1)
    assert len(taken) == 2 * max(workers, 1)
    Loader.num_workers = 9
    with pytest.raises(ValueError, match=r"loader is .* and ends after \d+ batches; it needs 18"):
        time_loader(Loader())
    with pytest.raises(ValueError, match="batches is 0; it must be a whole number above 0"):
        time_loader([1, 2, 3], batches=0)


@pytest.mark.parametrize(
    ("spreads", "core_share", "kept", "flagged"),
    [
        ((0.05,), 1.0, 1.05, False),
        ((0.0,), 0.9, 1.0, True),
        ((0.5, 0.02), 1, 1.02, False),
        ((0.3, 0.4), 1, 1.3, True),
    ],
)
def test_an_unsteady_run_is_measured_once_more(spreads, core_share, kept, flagged, monkeypatch):
    results = [
        [
            {
                "median": 1.0,
                "q1": 1.0,
                "q3": 1.0,
                "halves": [1.0, 1.0 + spread],
                "core_share": core_share,
            }
        ]
        for spread in spreads
    ]
    monkeypatch.setattr(cpu_measure, "run_processes", lambda *_, **__: results.pop(0))
    (row,) = measure_samples(
        Campaign(None, progress=False), [Sample("x", "dlrm", TINY)], device="cpu", seconds=0.0
    )
    (rank,) = row.passes[0]
    assert (rank.halves[1], rank.flagged, results) == (kept, flagged, [])


def answer_job(job: dict[str, Any], *, ranks: int = 1, timeout: float = 0.0) -> list[Any]:
    """What measuring processes return, by task: one result for each rank."""
    times = {"median": 1.0, "q1": 1.0, "q3": 1.0, "halves": [1.0, 1.0]}
    call = {"operation": "all_reduce", "nbytes": 64, "samples": [1e-5], "core_share": 1.0}
    kernels = [{**times, "nbytes": 8.0} for _ in job.get("cases", ())]
    results = {
        "ladder": [{"nbytes": 2**14, "stream": [1e-6]}],
        "kernels": kernels,
        "collectives": [call],
        "iteration": {**times, "core_share": 1.0},
    }
    return [results[job["task"]] for _ in range(ranks)]


def test_all_that_a_calibration_measures_is_in_its_file(torch: Any, monkeypatch: Patch) -> None:
    """Every part is measured, written, and read again as the record that it was."""
    monkeypatch.setattr(cpu_measure, "run_processes", answer_job)
    work = Campaign(None, progress=False)
    measured = cpu_measure.measure_platform(work, ranks=2, quick=True)
    parts = {field.name: getattr(measured, field.name) for field in fields(measured)}
    assert [name for name, part in parts.items() if not part] == []
    written = json.loads(json.dumps(write_measurements(measured)))
    again = read_measurements(written)
    for name, part in parts.items():
        assert find_kind(getattr(again, name)) is find_kind(part), name
    assert json.loads(json.dumps(write_measurements(again))) == written


def find_kind(part: Any) -> type:
    """Type of a part of measurements, or of what it has many of."""
    if isinstance(part, list):
        return type(part[0])
    if isinstance(part, dict):
        return type(next(iter(part.values())))
    return type(part)


# Real measurements, very small.


def test_a_tiny_campaign_has_the_structure_that_fits_need(tmp_path, monkeypatch, torch, children):
    work = Campaign(tmp_path / "work", progress=False)
    bags = {"table_rows": 50, "dim": 8, "lookups": 20, "bags": 10, "exponent": 0.9, "elements": 160}
    cases = [
        Case("elementwise", "relu", {"elements": 1000}),
        Case("gemm", "nt", {"batch": 1, "m": 8, "n": 8, "k": 8}),
        Case("embedding_forward", "_embedding_bag", bags),
    ]
    monkeypatch.setattr(cpu_measure, "draw_cases", lambda seed, density, cache: cases)
    rows = cpu_measure.measure_kernels(work, density=0.1, seconds=0.0)
    assert [Case(row.kind, row.variant, row.sizes) for row in rows] == cases
    assert [row.nbytes for row in rows[:2]] == [8000, 4 * (3 * 64 + 8)]
    assert all(0 < row.q1 <= row.median <= row.q3 for row in rows)
    samples = [
        Sample("one", "dlrm", TINY),
        Sample("two", "hybrid", TINY, Plan.from_owners([0, 1], ranks=2)),
    ]
    measure = partial(measure_samples, work, samples, device="cpu", seconds=0.0, operations=1)
    found = measure()
    for sample, row in zip(samples, found, strict=True):
        assert (row.sample, len(row.passes)) == (sample, 1)
        counts = [len(graph) for graph in sample.workload.graphs(sample.ranks, sample.plan)]
        assert [len(rank.operation_seconds) for rank in row.passes[0]] == counts
    before = len(children)
    assert measure() == found and len(children) == before, "nothing was measured again"


def test_a_ladder_has_two_sizes_in_each_octave(torch: Any, children: Children) -> None:
    rows = run_processes({"task": "ladder", "largest": 2.0**20})[0]
    assert [row["nbytes"] for row in rows[::2]] == [2**power for power in range(14, 21)]
    assert all(len(row["stream"]) == 4 and min(row["stream"]) > 0 for row in rows)


def test_ranks_make_equally_many_calls_and_the_slowest_rank_counts(
    monkeypatch: Patch, torch: Any, children: Children
) -> None:
    job = {
        "task": "collectives",
        "operations": cpu_measure.COLLECTIVES,
        "sizes": [64, 4096],
        "seconds": 0.0,
    }
    results = run_processes(job, ranks=2, timeout=60)
    assert [len(row["samples"]) for row in results[0]] == [
        len(row["samples"]) for row in results[1]
    ]
    monkeypatch.setattr(cpu_measure, "run_processes", lambda *_, **__: results)
    rows = cpu_measure.measure_collectives(Campaign(None, progress=False), ranks=2)
    pairs = list(itertools.product(cpu_measure.COLLECTIVES, (64, 4096)))
    assert [(row.operation, row.nbytes) for row in rows] == pairs
    slowest = np.maximum(*(result[0]["samples"] for result in results))
    assert [rows[0].median, rows[0].mean] == pytest.approx([np.median(slowest), np.mean(slowest)])
