"""Every recipe runs, in at most five lines of the public interface."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pandas
import polars
import pytest

import perfkit as pk

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
RECIPES = re.findall(
    r"### ([^\n]+)\n\n(?:[^#`\n][^\n]*(?:\n[^\n]+)*\n\n)?```python\n(.*?)```", TEXT, re.DOTALL
)


def write_log(folder: Path) -> None:
    """A log of all_reduce_perf on the eight GPUs of a node: 20 µs and 240 GB/s."""
    lines = ["# Collective test starting: all_reduce_perf"]
    for rank in range(8):
        device = f"device {rank} [0x1b] NVIDIA H100"
        lines.append(f"# Rank {rank} Group 0 Pid 1 on node0 {device}")
    for power in range(10, 31, 2):
        size = 2**power
        microseconds = 20 + size / 240e3
        algorithm_bandwidth = size / microseconds / 1e3
        bus_bandwidth = algorithm_bandwidth * 1.75
        half = f"{microseconds:.2f} {algorithm_bandwidth:.2f} {bus_bandwidth:.2f} 0"
        lines.append(f"{size} {size // 4} float sum -1 {half} {half}")
    lines.append("# Avg bus bandwidth : 200")
    folder.mkdir()
    (folder / "all_reduce.log").write_text("\n".join(lines))


def write_config(folder: Path) -> None:
    """The configuration of a Llama, as it lies on the Hugging Face Hub."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))


def copy_traces(folder: Path) -> None:
    """Traces of the two ranks of an invented step, see `tests/data/README.md`."""
    folder.mkdir()
    for rank in range(2):
        shutil.copy(
            ROOT / "tests" / "data" / f"step_rank{rank}.kineto.json", folder / f"rank{rank}.json"
        )


def write_training_log(folder: Path) -> None:
    """What Megatron-LM prints of a Llama on 16 GPUs, with an invented time."""
    line = " iteration {}/ 50 | elapsed time per iteration (ms): 9400.0 | global batch size: 128 |"
    folder.mkdir()
    arguments = """
        bf16 ............ True
        data_parallel_size ............ 4
        ffn_hidden_size ............ 14336
        hidden_size ............ 4096
        max_position_embeddings ............ 8192
        normalization ............ RMSNorm
        num_attention_heads ............ 32
        num_layers ............ 32
        num_query_groups ............ 8
        position_embedding_type ............ rope
        seq_length ............ 8192
        sequence_parallel ............ True
        swiglu ............ True
        tensor_model_parallel_size ............ 4
        transformer_impl ............ transformer_engine
        use_distributed_optimizer ............ True
        vocab_size ............ 128256
        """
    steps = [line.format(number) for number in range(1, 31)]
    (folder / "megatron.log").write_text("\n".join([arguments, *steps]))


def write_traces(folder: Path) -> None:
    """Invented traces of two ranks that launch slowly."""
    for rank in range(2):
        text = (ROOT / "tests" / "data" / f"step_rank{rank}.kineto.json").read_bytes()
        (folder / f"rank{rank}.json").write_bytes(text)


@pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")
@pytest.mark.parametrize(
    ("question", "block"), RECIPES, ids=[question[:40] for question, _ in RECIPES]
)
def test_a_recipe_runs(
    question: str, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = block.strip().splitlines()
    before = lines[:-1]
    last = lines[-1]
    assert len(before) < 5, question
    assert not re.search(r"perfkit\.", block), question
    if "dask" in block:
        pytest.importorskip(
            "dask.distributed", reason="no dependency of perfkit: pip install 'dask[distributed]'"
        )
    if "transformers." in block:
        pytest.importorskip("transformers", reason="pip install 'perfkit[models]' brings it")
    if "torch" in block or "pk.capture" in block:
        pytest.importorskip("torch", reason="this recipe runs PyTorch")
    (tmp_path / "reference_data").symlink_to(ROOT / "reference_data")
    write_log(tmp_path / "logs")
    write_traces(tmp_path / "logs")
    write_config(tmp_path / "llama")
    write_training_log(tmp_path / "runs")
    copy_traces(tmp_path / "traces")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"pk": pk, "pandas": pandas, "polars": polars}
    exec("\n".join(before), names)
    result = eval(last, names)
    assert result is not None or list(tmp_path.glob("*.csv"))
    if "nccl_logs" in block:  # between the start-up and the transfer of the log
        time = names["mine"].collective("all_reduce", 25e6, ranks=8).time
        assert 104e-6 < time < 140e-6
        assert "all_reduce" in result
    if isinstance(result, polars.DataFrame):
        assert len(result) > 1
    if isinstance(result, dict):
        assert result
        assert all(value > 0 for value in result.values())


def test_there_are_as_many_as_promised() -> None:
    assert len(RECIPES) == TEXT.count("```python") >= 38
