"""Ranks that torchrun, srun or mpirun has started: what they read, where they sit, how they meet, and
how all of them end."""

import errno
import json
import os
import re
import socket
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import perfkit as pk
from perfkit.__main__ import main
from perfkit.measure.folders import open_campaign_beside
from perfkit.measure.interfaces import connecting_by, find_interface
from perfkit.measure.launchers import (
    LaunchedRanks,
    launched_ranks,
    list_hosts,
    list_tasks,
)
from perfkit.measure.machine import gather_facts
from perfkit.measure.processes import MeasurementError
from perfkit.measure.seats import Seat, check_seats
from tests.fake_srun import list_variables

ROOT = Path(__file__).resolve().parent.parent

# -- what a launcher says
# ----------------------------------------------------------------------------------------------------

SLURM = {
    "SLURM_JOB_ID": "4711234",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NODELIST": "g[03-05,9]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x4)",
    "SLURMD_NODENAME": "g04",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "16",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "MASTER_ADDR": "a",
}
HYDRA = {
    "PMI_RANK": "5",
    "PMI_SIZE": "16",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "4",
    "MASTER_ADDR": "a",
}


def read(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> LaunchedRanks | None:
    monkeypatch.setattr("os.environ", dict(environment))
    return launched_ranks()


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        (SLURM, "srun"),
        (OPEN_MPI, "mpirun"),
        (HYDRA, "mpiexec"),
        (SLURM | OPEN_MPI | {"SLURM_PROCID": "2"}, "mpirun"),  # its daemons are tasks of srun
        (SLURM | HYDRA | {"SLURM_PROCID": "2"}, "mpiexec"),
        (SLURM | {"PMI_RANK": "5", "PMI_SIZE": "16"}, "srun"),  # srun --mpi=pmi2
        (TORCHRUN | {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "4"}, "torchrun"),
        (
            {
                "RANK": "5",
                "LOCAL_RANK": "1",
                "WORLD_SIZE": "16",
                "LOCAL_SIZE": "4",
                "MASTER_ADDR": "a",
            },
            "RANK and WORLD_SIZE",
        ),
    ],
)
def test_each_launcher_says_rank_ranks_and_ranks_of_a_node(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], launcher: str
) -> None:
    launched = read(monkeypatch, environment)
    assert launched is not None and launched.launcher == launcher
    assert (launched.rank, launched.ranks) == (5, 16)
    assert (launched.local_rank, launched.ranks_per_node, launched.nodes) == (1, 4, 4)


def test_tasks_of_slurm_meet_on_the_first_node(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = read(monkeypatch, SLURM)
    assert launched is not None
    assert (launched.address, launched.port, launched.name) == ("g03", 21234, "rank 5 on g04")
    second_step = read(monkeypatch, SLURM | {"SLURM_STEP_ID": "1"})
    assert second_step is not None and second_step.port != launched.port
    chosen = read(monkeypatch, SLURM | {"MASTER_ADDR": "ib0", "MASTER_PORT": "7"})
    assert chosen is not None and (chosen.address, chosen.port) == ("ib0", 7)
    fewer = {name: value for name, value in SLURM.items() if "STEP_NODELIST" not in name}
    of_job = read(monkeypatch, fewer | {"SLURM_JOB_NODELIST": "h[7-9]"})
    assert of_job is not None and of_job.address == "h7"


def test_a_single_task_is_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as an interactive shell, and a script of sbatch outside of srun."""
    assert read(monkeypatch, {}) is None
    assert read(monkeypatch, SLURM | {"SLURM_STEP_NUM_TASKS": "1"}) is None
    assert read(monkeypatch, {"SLURM_NTASKS": "16", "SLURM_PROCID": "0"}) is None


@pytest.mark.parametrize(
    ("written", "hosts"),
    [
        ("node[01-04,07]", ["node01", "node02", "node03", "node04", "node07"]),
        ("a-1,b", ["a-1", "b"]),
        ("n[9-11]-ib,x[1]", ["n9-ib", "n10-ib", "n11-ib", "x1"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
    ],
)
def test_lists_of_nodes_are_read(written: str, hosts: list[str]) -> None:
    assert list_hosts(written) == hosts


@pytest.mark.parametrize(
    "written",
    [
        "n[1-",
        "n[1-x]",
        "n[]",
        "",
        "n1]",
        "n[3-1]",
        "n[1-²]",
        "n[0-999999999]",
        "n[0-999][0-999]",
        f"n[{'9' * 5000}]",
        "[" * 1000,
    ],
)
def test_lists_of_nodes_that_are_none_are_refused(written: str) -> None:
    with pytest.raises(ValueError, match=r"SLURM_STEP_NODELIST is .*set MASTER_ADDR"):
        list_hosts(written)


def test_lists_of_tasks_are_read() -> None:
    assert list_tasks("8(x2),4,2(x1)") == [8, 8, 4, 2]
    for written in ("8(x2", "", "8(x999999999)", f"{'9' * 5000}", "8(x²)", "8(x65536),8"):
        with pytest.raises(ValueError, match=r"SLURM_STEP_TASKS_PER_NODE is .*; Slurm writes"):
            list_tasks(written)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x3),2"},
            r"SLURM_STEP_TASKS_PER_NODE is '4\(x3\),2'; .* start srun --ntasks-per-node=2 perfkit",
        ),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "", "SLURM_STEP_NUM_NODES": "3"},
            "SLURM_STEP_NUM_TASKS is 16 on 3 nodes; .* start srun --ntasks-per-node=8",
        ),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "", "SLURM_STEP_NUM_NODES": "0"},
            "SLURM_STEP_NUM_TASKS is 16 on 0 nodes",
        ),
        (SLURM | {"SLURM_PROCID": "five"}, "SLURM_PROCID is 'five'; it has to be a whole number"),
        (SLURM | {"SLURM_PROCID": "16"}, "srun says that this is rank 16 of 16 ranks"),
        (SLURM | {"MASTER_PORT": ""}, "MASTER_PORT is missing, which srun sets"),
        (SLURM | {"SLURM_JOB_ID": ""}, "SLURM_JOB_ID is missing"),
        (TORCHRUN | {"MASTER_PORT": "no"}, "MASTER_PORT is 'no'"),
        (
            SLURM | {"MASTER_PORT": "65536"},
            "MASTER_PORT is 65536; ports are numbers from 1 to 65535",
        ),
        (OPEN_MPI | {"MASTER_PORT": "0"}, "MASTER_PORT is 0; ports are"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "3"}, "torchrun says that 3 of 4 ranks are on"),
        (
            SLURM | TORCHRUN,
            r"srun has started torchrun 4 times on a node \(SLURM_STEP_TASKS_PER_NODE\), and each "
            "starts 2 ranks; start it once: srun --ntasks-per-node=1 torchrun",
        ),
        (OPEN_MPI | {"MASTER_ADDR": ""}, "MASTER_ADDR is missing, .*: mpirun -x MASTER_ADDR=HOST"),
        (HYDRA | {"MASTER_ADDR": ""}, "MASTER_ADDR is missing, .*: mpiexec -genv MASTER_ADDR HOST"),
        (
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"},
            "LOCAL_WORLD_SIZE is missing",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_line_to_type(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        read(monkeypatch, environment)


def test_torchrun_once_a_node_of_srun_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    once = SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    launched = read(monkeypatch, once | TORCHRUN)
    assert launched is not None and (launched.rank, launched.launcher) == (3, "torchrun")


# -- where ranks sit
# ----------------------------------------------------------------------------------------------------


def seat(rank: int, node: int, gpu: int, **about: Any) -> Seat:
    usual: dict[str, Any] = {"gpus": 2, "device": "H100", "device_id": f"{node}-{gpu}"}
    return Seat(rank=rank, node=f"{node}", host=f"n{node}", **(usual | about))


def launch(ranks: int, per_node: int, rank: int = 0, port: int = 1) -> LaunchedRanks:
    return LaunchedRanks(
        launcher="srun",
        rank=rank,
        ranks=ranks,
        local_rank=rank % per_node,
        ranks_per_node=per_node,
        node="0",
        host="localhost",
        run="a run",
        address="localhost",
        port=port,
    )


FOUR = [seat(0, 0, 0), seat(1, 0, 1), seat(2, 1, 0), seat(3, 1, 1)]


def test_equal_nodes_with_a_gpu_for_each_rank_are_taken() -> None:
    check_seats(FOUR, launch(4, 2))
    check_seats([seat(0, 0, 0, gpus=8), seat(1, 0, 1, gpus=8)], launch(2, 2))  # part of a node
    check_seats([seat(0, 0, 0, gpus=1), seat(1, 0, 1, gpus=1)], launch(2, 2))  # one for each task
    on_cpus = [replace(each, gpus=None, device=None, device_id=None) for each in FOUR]
    check_seats(on_cpus, launch(4, 2))


@pytest.mark.parametrize(
    ("seats", "per_node", "words"),
    [
        (FOUR[:3], 2, "unequal ranks: 2 on n0, 1 on n1; .*: srun --ntasks-per-node=2 perfkit"),
        (
            [seat(0, 0, 0), seat(1, 1, 0), seat(2, 0, 1), seat(3, 1, 1)],
            2,
            "rank 1 is on n1, between ranks 0 and 2 of n0; .*--distribution=block",
        ),
        (FOUR, 4, "srun says 4 ranks a node, n0 has 2; start srun --ntasks-per-node=2"),
        ([*FOUR[:3], seat(3, 1, 1, gpus=0)], 2, "rank 3 on n1 sees no GPU; .*--gpus-per-node"),
        (
            [*FOUR[:3], seat(3, 1, 0)],
            2,
            "ranks 2 and 3 on n1 have the same GPU, H100, of 2 that each sees",
        ),
        ([*FOUR[:3], seat(3, 1, 1, device="A100")], 2, "n0 has H100, rank 3 on n1 A100; one kind"),
        (
            [seat(0, 0, 0, gpus=8), seat(1, 1, 0, gpus=8)],
            1,
            "one rank is on n0, which has 8 GPUs; .*--ntasks-per-node=8 .*CUDA_VISIBLE_DEVICES=0",
        ),
    ],
)
def test_other_seats_are_refused_with_their_host(
    seats: list[Seat], per_node: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        check_seats(seats, launch(len(seats), per_node))


# -- how ranks meet
# ----------------------------------------------------------------------------------------------------


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
    return number


def test_ranks_that_do_not_arrive_are_named(port: int) -> None:
    pytest.importorskip("torch")
    from perfkit.measure.leader import Leader

    with pytest.raises(
        MeasurementError,
        match=f"ranks 1, 2 of 3 did not arrive at localhost, port {port}, within [0-9] s; .*"
        "srun --ntasks-per-node=3",
    ):
        Leader(launch(3, 3, port=port), patience=0.05)


def test_a_port_in_use_is_named_with_another_one(port: int) -> None:
    pytest.importorskip("torch")
    from perfkit.measure.leader import Leader

    with (
        socket.create_server(("", port)),
        pytest.raises(MeasurementError, match=f"MASTER_PORT={port + 1}"),
    ):
        Leader(launch(2, 2, port=port), patience=0.05)


def test_a_rank_at_the_port_of_another_run_says_so(port: int) -> None:
    pytest.importorskip("torch")
    from torch.distributed import TCPStore

    from perfkit.measure.follower import Follower

    store = TCPStore("localhost", port, 2, True, wait_for_workers=False)
    with pytest.raises(
        MeasurementError, match=r"rank 1 on localhost found no rank 0 of a run at .*MASTER_PORT"
    ):
        Follower(launch(2, 2, rank=1, port=port), patience=0.1)
    store.set("perfkit, owner", "job 7, step 0")
    with pytest.raises(
        MeasurementError, match=r"found job 7, step 0 at localhost, port .* not its own a run; set"
    ):
        Follower(launch(2, 2, rank=1, port=port), patience=30)
    del store


def test_a_rank_without_a_seat_ends_all_and_each_knows_why(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here two ranks of one process: no group is made before all sit."""
    pytest.importorskip("torch")
    from perfkit.measure import follower as following
    from perfkit.measure import leader as leading

    def sit(launched: LaunchedRanks, device: str) -> Seat:
        return seat(launched.rank, 0, 0)

    monkeypatch.setattr(leading, "take_seat", sit)
    monkeypatch.setattr(following, "take_seat", sit)
    endings: list[Any] = []

    def follow() -> None:
        endings.append(following.Follower(launch(2, 2, rank=1, port=port), patience=30).work())

    other = threading.Thread(target=follow, daemon=True)
    other.start()
    with (
        pytest.raises(ValueError, match="ranks 0 and 1 on n0 have the same GPU"),
        leading.lead(launch(2, 2, port=port)) as leader,
    ):
        leader.run({"task": "collectives", "device": "cuda"})
    other.join(timeout=30)
    assert [ending.code for ending in endings] == [2]


def test_the_interface_that_leads_to_other_nodes_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo would take loopback where the name of the host leads there; what the user names stays."""
    own = gather_facts()["loopback"].value
    assert own is not None
    assert find_interface("127.0.0.1") == find_interface("::ffff:127.0.0.1") == own
    assert find_interface("203.0.113.9") is None, "an address of no machine (RFC 5737)"
    monkeypatch.setattr("os.environ", {})
    with connecting_by("ib0"):
        assert os.environ == {"GLOO_SOCKET_IFNAME": "ib0"}
    assert os.environ == {}
    with connecting_by(None):
        assert os.environ == {}
    os.environ["GLOO_SOCKET_IFNAME"] = "eth1"
    with connecting_by("ib0"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"


def test_a_lost_rank_explains_the_errors_of_others(port: int) -> None:
    """The connection of rank 2 to rank 1 broke, and it said so first."""
    pytest.importorskip("torch")
    from perfkit.measure import follower as following
    from perfkit.measure import leader as leading
    from perfkit.measure.leader import Loss

    def follow(rank: int) -> None:
        following.Follower(launch(3, 3, rank=rank, port=port), patience=30).work()

    others = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in (1, 2)]
    for other in others:
        other.start()
    with (
        pytest.raises(MeasurementError, match="rank 1 is gone"),
        leading.lead(launch(3, 3, port=port)) as leader,
    ):
        leader._note_loss(Loss(rank=2, text="closed by peer", may_follow=True))
        leader._note_loss(Loss(rank=1, text="rank 1 is gone"))
        raise leader.explain(RuntimeError("closed by peer"))
    for other in others:
        other.join(timeout=30)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_is_no_rank_is_not_listened_to(port: int) -> None:
    """A scanner of ports, and a rank of somebody else."""
    pytest.importorskip("torch")
    from perfkit.measure import follower as following
    from perfkit.measure import leader as leading

    def disturb_and_follow() -> None:
        follower = following.Follower(launch(2, 2, rank=1, port=port), patience=30)
        door = follower._connection.getpeername()[1]
        strange = [b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"hello": 1, "token": "no"}\n']
        strange.append(b"[" * 3000 + b"\n")  # deeper than Python reads
        for text in strange:
            with socket.create_connection(("localhost", door), timeout=10) as stranger:
                stranger.sendall(text)
                stranger.shutdown(socket.SHUT_WR)
                assert not stranger.recv(1), "rank 0 has read it, and closes the connection"
        endings.append(follower.work())

    endings: list[Any] = []
    other = threading.Thread(target=disturb_and_follow, daemon=True)
    other.start()
    with leading.lead(launch(2, 2, port=port)) as leader:
        leader.end(0, "done")
    other.join(timeout=30)
    assert [(ending.code, ending.answer) for ending in endings] == [(0, "done")]


# -- the whole path, from the command line to the platform
# ----------------------------------------------------------------------------------------------------


def run_fake_srun(folder: Path, port: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Rehearse the calibration of two nodes with two ranks each; ranks are forked, gloo connects
    them."""
    command = [sys.executable, str(ROOT / "tests" / "fake_srun.py"), "--nodes", "2"]
    command += ["--ntasks-per-node", "2", *words, "perfkit", "calibrate", "--device", "cuda"]
    command += ["--base", "h100-sxm-8", "--rehearse", "--out", str(folder / "mine.toml")]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)},
    )


def test_a_killed_rank_ends_all_and_a_second_job_continues(
    port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    done = run_fake_srun(tmp_path, port, "--kill", "2", "--at", "1000", "--requeue")
    assert done.returncode == 0, done.stderr
    assert "ended with [2, 2, -9, 2]" in done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("perfkit: ")]
    assert len(lines) == 2, "rank 0 alone speaks"
    assert lines[0].startswith("perfkit: rank 2 on node02 is gone without a word")
    assert "finished measurements are kept, the same command continues" in lines[0]
    assert "perfkit-run.log has machine" in lines[1]
    assert "partly from" in done.stderr, "what was measured is kept"
    assert done.stdout.count("Platform(") == 1 and done.stdout.count("written to") == 1
    assert "a rehearsal: nothing was timed" in done.stdout
    [measured] = [line for line in done.stdout.splitlines() if line.startswith("measured: ")]
    assert {"gemm", "all_gather.2"} <= {*measured.removeprefix("measured: ").split(", ")}
    assert "host" not in measured
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mine.measurements.json",
        "mine.toml",
        "perfkit-run.log",
    ]
    # ranks are those of the launcher, not the 8 of the base
    raw = json.loads((tmp_path / "mine.measurements.json").read_text())
    assert (raw["ranks_per_node"], raw["nodes"]) == (2, 2)
    check_numbers(pk.load_platform(tmp_path / "mine.toml"), nodes=2)
    words = ["calibrate", "--measurements", str(tmp_path / "mine.measurements.json")]
    assert main([*words, "--out", str(tmp_path / "again.toml")]) == 0
    assert "a rehearsal: nothing was timed" in capsys.readouterr().out, "fitted again"


def check_numbers(platform: pk.Platform, *, nodes: int) -> None:
    """The answers were those that the gallery predicts, within 2 %; so is the platform."""
    base = pk.load_platform("h100-sxm-8")
    assert platform.network.ranks_per_node == 2 and platform.network.nodes == nodes
    assert platform.kernels["gemm"].source.startswith("rehearsal, as h100-sxm-8 predicts")
    for name in ("compute_efficiency", "memory_efficiency"):
        assert platform.kernels["gemm"][name] == pytest.approx(base.kernels["gemm"][name], rel=0.05)
    of_node = platform.collective_time("all_gather", 1e8, ranks=2)
    assert of_node == pytest.approx(base.collective_time("all_gather", 1e8, ranks=2), rel=0.05)
    if nodes > 1:
        wide = base.with_nodes(nodes, ranks_per_node=2)
        for ranks, algorithm in ((2, "rail"), (4, None)):
            found = platform.collective_time("all_reduce", 1e8, ranks=ranks, algorithm=algorithm)
            asked = wide.collective_time("all_reduce", 1e8, ranks=ranks, algorithm=algorithm)
            assert found == pytest.approx(asked, rel=0.1), (ranks, algorithm)


def test_torchrun_goes_the_whole_way_too(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    words += ["2", "-m", "perfkit", "calibrate", "--device", "cuda", "--base", "h100-sxm-8"]
    done = subprocess.run(
        [*words, "--rehearse", "--out", str(tmp_path / "mine.toml")],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Platform(") == 1
    check_numbers(pk.load_platform(tmp_path / "mine.toml"), nodes=1)


def test_the_stand_in_says_what_srun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = read(monkeypatch, list_variables(3, nodes=2, local=2))
    assert launched is not None
    assert (launched.rank, launched.ranks, launched.local_rank) == (3, 4, 1)
    assert (launched.name, launched.address) == ("rank 3 on node02", "localhost")


def test_rehearsals_need_a_base_and_the_way_of_gpus() -> None:
    for arguments in ({"device": "cuda"}, {"base": "h100-sxm-8"}):
        with pytest.raises(ValueError, match=r"rehearse is True; .*name base, such as"):
            pk.calibrate(rehearse=True, **arguments)  # type: ignore[arg-type]


# -- what is kept beside the platform
# ----------------------------------------------------------------------------------------------------


def test_what_is_kept_continues_with_the_same_options_alone(tmp_path: Path) -> None:
    target = tmp_path / "mine.toml"

    def measure(*options: object) -> list[str]:
        campaign = open_campaign_beside(target, *options, progress=False)
        begun: list[str] = []
        campaign.run("probes", {"0": lambda: begun.append("0")})
        return begun

    assert measure("cuda", 4) == ["0"]
    assert measure("cuda", 4) == [], "continued"
    with pytest.warns(UserWarning, match="mine.unfinished.jsonl has measurements for other"):
        assert measure("cuda", 8) == ["0"]
    open_campaign_beside(target, "cuda", 8, progress=False).close()
    assert not [*tmp_path.iterdir()]


def test_file_systems_without_locks_keep_measurements_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    campaign = open_campaign_beside(tmp_path / "mine.toml", "cuda", progress=False)
    assert campaign.run("probes", {"0": lambda: 1}) == {"0": 1}
    assert campaign.file is not None and campaign.file.exists()


def test_one_process_at_a_time_measures_for_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(ValueError, match=r"out is .*mine.toml, for which another process measures"):
        open_campaign_beside(tmp_path / "mine.toml", "cuda", progress=False)
    with pytest.raises(ValueError, match=r"out is .*; finished measurements cannot be kept in"):
        open_campaign_beside(tmp_path / "no" / "mine.toml", "cuda", progress=False)


# -- the job that is printed
# ----------------------------------------------------------------------------------------------------


def test_the_job_asks_for_a_task_for_each_gpu(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = "calibrate --device cuda --base h100-sxm-8 --out 'my file.toml'"
    words = ["calibrate", "--sbatch", "--base", "h100-sxm-8", "--out", "my file.toml"]
    assert main([*words, "--nodes", "3", "--gpus-per-node", "4"]) == 0
    job = capsys.readouterr().out
    for text in (
        "--cpus-per-task=8 ",
        "--nodes=3\n",
        "--ntasks-per-node=4 ",
        "--gpus-per-node=4\n",
    ):
        assert f"#SBATCH {text}" in job
    assert f"\nsrun --kill-on-bad-exit=1 perfkit {line}\n" in job
    assert "torchrun --nnodes=3 --nproc-per-node=4 " in job and f"-m perfkit {line}\n" in job
    script = tmp_path / "job.sh"
    script.write_text(job)
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0

    assert main([*words, "--nodes", "3", "--gpus-per-node", "4", "--rehearse"]) == 0
    rehearsal = capsys.readouterr().out
    assert " --rehearse --out" in rehearsal and "#SBATCH --gpus-per-node" not in rehearsal
    assert "#SBATCH --cpus-per-task" not in rehearsal, "one core is enough"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--sbatch --nodes 2", "gpus_per_node is missing; .*--sbatch --nodes 2 --gpus-per-node 8"),
        ("--nodes 2", "nodes is given; it is for the job that --sbatch prints"),
        ("--sbatch --nodes 2 --gpus-per-node 8 --quick", "quick is given; --sbatch prints a job"),
        ("--sbatch --nodes 2 --gpus-per-node 8 --device cpu", "device is 'cpu'; --sbatch prints"),
        ("--sbatch --nodes 0 --gpus-per-node 8", "nodes is 0"),
        ("--sbatch --nodes 2 --gpus-per-node 8 --base nope-8", "platform is 'nope-8'"),
        ("--rehearse", "--rehearse is given; .*name --base, such as --base h100-sxm-8"),
    ],
)
def test_a_job_that_cannot_be_is_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "--out", "mine.toml", *words.split()]) == 2
    captured = capsys.readouterr()
    assert re.search(message, captured.err), captured.err
    assert not captured.out


@pytest.mark.parametrize("cores", [1, 2])
def test_a_gpu_with_one_core_is_warned_of(
    cores: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from perfkit.calibration import campaign

    def stop(*_: Any, **__: Any) -> None:
        raise MeasurementError("here measuring would begin")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(campaign, "check_processors", lambda ranks, device: ranks)
    monkeypatch.setattr(campaign, "count_cores", lambda: cores)
    monkeypatch.setattr(campaign, "measure_cluster", stop)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(MeasurementError, match="here measuring would begin"):
            pk.calibrate(device="cuda", base="h100-sxm-8", ranks=2, progress=False)
    texts = [str(warning.message) for warning in caught]
    assert [text[:30] for text in texts] == ["this process may use one core,"] * (cores == 1)


def test_one_node_of_many_is_not_measured_unasked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a script of sbatch without srun before perfkit."""
    monkeypatch.setenv("SLURM_NNODES", "3")
    assert main(["calibrate", "--device", "cuda", "--base", "h100-sxm-8", "--out", "m.toml"]) == 2
    assert "SLURM_NNODES is 3, but srun has not started this" in capsys.readouterr().err
