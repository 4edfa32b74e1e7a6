"""``perfkit capture``: scripts and modules run as their authors run them, up to a few updates."""

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="capture needs torch: pip install 'perfkit[measure]'")

from perfkit.__main__ import main
from perfkit.recording.scripts import Recording
from perfkit.recording.scripts_runs import Program, ScriptError, record_program

#: A script with arguments of its own, a module beside it, and a file that it writes.
SCRIPT = """
import sys
import torch
from {helper} import make_model

print("script", __name__, sys.argv[1:], torch.cuda.get_device_name())
rows = int(sys.argv[1])
model, updates = make_model(torch)
with open("log.txt", "w") as log:
    for step in range(10**9):
        updates.zero_grad()
        loss = model(torch.ones(rows + step * {grows}, 8, device="cuda")).sum()
        loss.backward()
        updates.step()
        log.write(f"{{step}} {{loss:.1f}}\\n")
"""
HELPER = """
def make_model(torch):
    model = torch.nn.Linear(8, 8).cuda()
    return model, torch.optim.SGD(model.parameters(), 0.1)
"""


def run(line: str) -> int:
    """The exit code of a command line."""
    return main(line.split())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_script(folder: Path, name: str, grows: int = 0) -> None:
    """A script, and a module beside it of a name that no other test uses."""
    (folder / f"{name}.py").write_text(SCRIPT.format(helper=f"helper_of_{name}", grows=grows))
    (folder / f"helper_of_{name}.py").write_text(HELPER)


def test_a_script_runs_as_its_author_runs_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "code").mkdir()
    write_script(folder / "code", "plain")
    before = sys.argv, list(sys.path), os.getcwd(), sys.modules["__main__"]
    assert run("capture code/plain.py --platform h100-sxm-8 -- 4 --platform x -h") == 0
    assert (sys.argv, sys.path, os.getcwd(), sys.modules["__main__"]) == before
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "script __main__ ['4', '--platform', 'x', '-h'] NVIDIA H100 SXM5 80 GB"
    assert lines[1:3] == ["plain.py: 4 iterations recorded, all alike", ""]
    assert any("on 1 of 8 ranks of h100-sxm-8" in line for line in lines)
    assert (folder / "log.txt").read_text().startswith("0 1.0\n1 1.0\n")


def test_a_script_that_prints_losses_is_told_once_that_they_mean_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_script(folder, "losses")
    assert run("capture losses.py --platform h100-sxm-8 -- 4") == 0
    text = capsys.readouterr().out
    assert text.count("placeholders") == 1
    assert text.splitlines()[-1].startswith("Numbers that losses.py prints or writes of what it")
    silent = SCRIPT.format(helper="helper_of_losses", grows=0).replace("{loss:.1f}", "")
    (folder / "silent.py").write_text(silent)
    assert run("capture silent.py --platform h100-sxm-8 -- 4") == 0
    assert "placeholders" not in capsys.readouterr().out


#: What scripts read of a GPU, as they write it: a clock, memory in use, memory in all, a sensor.
READINGS = {
    "elapsed_time": "begin.elapsed_time(end)",
    "max_memory_allocated": "torch.cuda.max_memory_allocated()",
    "memory_reserved": "torch.cuda.memory_reserved(0)",
    "mem_get_info": "torch.cuda.mem_get_info()",
    "utilization": "torch.cuda.utilization()",
}


@pytest.mark.parametrize("name", READINGS)
def test_a_script_that_reads_its_gpu_is_told_that_there_is_none(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    events = "begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))\nrows ="
    script = SCRIPT.format(helper=f"helper_of_{name}", grows=0).replace("{loss:.1f}", "")
    script = script.replace("rows =", events) + f"        print({READINGS[name]})\n"
    (folder / f"{name}.py").write_text(script)
    (folder / f"helper_of_{name}.py").write_text(HELPER)
    assert run(f"capture {name}.py --platform h100-sxm-8 -- 4") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"What {name}.py reads of its GPU ({name}) is a placeholder")


def test_a_module_runs_as_by_python_m(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_script(folder, "by_name")
    words = "capture -m by_name --platform h100-sxm-8 --iterations 1 -- 4"
    assert run(words) == 0
    assert "by_name: 1 iteration recorded" in capsys.readouterr().out


def test_iterations_that_differ_are_averaged(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_script(folder, "growing", grows=100_000)
    assert run("capture growing.py --platform h100-sxm-8 --json - -- 4") == 0
    told = capsys.readouterr()
    assert told.err.startswith("script __main__")  # not among the figures
    figures = json.loads(told.out)
    times = [iteration["time_s"] for iteration in figures["iterations"]]
    assert [iteration["count"] for iteration in figures["iterations"]] == [1, 1, 1, 1]
    assert times == sorted(times)
    assert figures["mean_time_s"] == pytest.approx(sum(times) / 4)
    assert figures["time_s"] == times[1]
    assert any("the iterations of the loop differ" in text for text in figures["warnings"])
    assert run("capture growing.py --platform h100-sxm-8 -- 4") == 0
    assert "mean of the 4 iterations" in capsys.readouterr().out


def test_a_script_that_fails_shows_its_own_lines(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken.py").write_text("def go():\n    return {}['missing']\n\ngo()\n")
    assert run("capture broken.py --platform h100-sxm-8") == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("perfkit: broken.py failed in ")
    assert "broken.py, line 2 with KeyError: 'missing'; it did so before" in lines[-1]
    assert lines[0].endswith('broken.py", line 4, in <module>')
    assert not any("perfkit/recording" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys; sys.exit(3)", "ended by itself with exit code 3, before its second update"),
        ("", "without an update of an optimizer"),
        (
            "import torch; x = torch.nn.Linear(1, 1).weight; x[x > 0]",
            "needs one in",
        ),
        ("raise ValueError('mine')", "failed in .*line 1 with ValueError: mine"),
    ],
)
def test_a_script_without_an_iteration_is_refused(folder: Path, text: str, message: str) -> None:
    (folder / "short.py").write_text(text)
    with pytest.raises((ValueError, ScriptError), match=message):
        record_program(Program("short.py", None), Recording())


@pytest.mark.filterwarnings("ignore:the step ran no operation")
def test_a_script_that_goes_on_after_all_errors_is_stopped(folder: Path) -> None:
    """As one does that retries whatever happens."""
    body = "    try:\n        train()\n    except BaseException:\n        seen.append(1)\n"
    loop = (
        f"import torch\nseen = []\ndef train():\n    updates.step()\nwhile len(seen) < 3:\n{body}"
    )
    start = "import torch\nupdates = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))])\n"
    (folder / "stubborn.py").write_text(start + loop)
    recording = record_program(Program("stubborn.py", None), Recording(device="cpu"))
    assert recording.count == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("capture --platform h100-sxm-8", "give a script, such as train.py, or a module by -m"),
        ("capture a.py -m b --platform h100-sxm-8", "give a script, such as"),
        ("capture none.py --platform h100-sxm-8", "script is 'none.py', which is no file"),
        ("capture a.py --platform h100-sxm-8 --ranks 0", "ranks is 0"),
        ("capture a.py --platform h100-sxm-8 --ranks 2 --rank 2", "rank is 2; it must be 0 to 1"),
        ("capture a.py --platform h100-sxm-8 --ranks 16", "h100-sxm-8' has 8"),
    ],
)
def test_a_line_that_cannot_run_is_refused(
    folder: Path, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "a.py").write_text("raise SystemError")
    assert run(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["LOCAL_RANK", "SLURM_PROCID"])
def test_a_script_that_asks_for_its_rank_is_told_to_get_ranks(folder: Path, name: str) -> None:
    (folder / "train.py").write_text(f"import os\n\nrank = int(os.environ['{name}'])\n")
    with pytest.raises(ScriptError, match=rf"train.py, line 3 for {name}.*--ranks 8"):
        record_program(Program("train.py", None), Recording())
    with pytest.raises(ValueError, match="without an update"):
        record_program(Program("train.py", None), Recording(ranks=2))
