"""Recipes of docs/recipes.md: their lines, the files that they read, and what they print.

python -m tests.recipes [WORDS]  writes the output below each recipe again, and its picture if it draws
one, and what the README prints; with words, only below recipes whose question has them
"""

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import altair
import pandas
import polars

import perfkit as pk
from perfkit.ground.frames import ResultFrame

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "recipes.md"
#: Longest output [lines] that the page shows, and its widest line [characters].
_LINES = 16
_WIDTH = 110
#: Digits of a number that no table formats [-].
_DIGITS = 4
#: What a recipe has whose output is another on each machine, or that needs what no extra installs.
_VARIES = ("time_loader", "dask")

_RECIPE = re.compile(
    r"### (?P<question>[^\n]+)\n\n"
    r"(?P<prose>(?:[^#`\n!][^\n]*(?:\n[^\n]+)*\n\n)?)"
    r"```python\n(?P<code>.*?)```\n"
    r"(?P<shown>(?:\n```text\n.*?```\n|\n!\[[^\n]*\n)?)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Recipe:
    """A question, the lines that answer it, and what the page shows below them."""

    question: str
    code: str
    shown: str

    @property
    def varies(self) -> bool:
        """Whether its output is not shown, as it depends on the machine."""
        return any(word in self.code for word in _VARIES)

    @property
    def picture(self) -> str:
        """Name of its picture, if it draws one."""
        words = re.findall(r"[a-z0-9]+", self.question.lower())
        return f"recipe_{'_'.join(words[:6])}.svg"


@dataclass(frozen=True)
class Answer:
    """What a recipe gives."""

    value: Any  # of its last line
    printed: str  # by the lines before
    names: dict[str, Any]


def read_recipes(text: str) -> list[Recipe]:
    """The recipes of a page, in its order."""
    return [
        Recipe(found["question"], found["code"], found["shown"].strip("\n"))
        for found in _RECIPE.finditer(text)
    ]


# Files that recipes read.


def write_log(folder: Path) -> None:
    """A log of all_reduce_perf on the eight GPUs of a node: 20 µs and 240 GB/s; and traces of two
    ranks that launch slowly."""
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
    copy_traces(folder)


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
    folder.mkdir(exist_ok=True)
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


def write_files(folder: Path) -> None:
    """Everything that recipes read, in the folder in which they run."""
    (folder / "reference_data").symlink_to(ROOT / "reference_data")
    write_log(folder / "logs")
    write_config(folder / "llama")
    write_training_log(folder / "runs")
    copy_traces(folder / "traces")


# What they print.


def run_recipe(recipe: Recipe) -> Answer:
    """Run the lines of a recipe in this folder."""
    *before, last = recipe.code.strip().splitlines()
    names: dict[str, Any] = {"pk": pk, "pandas": pandas, "polars": polars}
    printed = StringIO()
    with redirect_stdout(printed):
        exec("\n".join(before), names)
        value = eval(last, names)
    return Answer(value, printed.getvalue(), names)


def round_numbers(value: Any) -> Any:
    """The same with few digits."""
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: round_numbers(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(round_numbers(part) for part in value)
    return value


def write_number(number: float) -> str:
    """A number with few digits, such as 0.1235 or 2.128e10."""
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{number:.{_DIGITS}g}")


def write_value(value: Any) -> str:
    """A value as the page shows it: texts and tables of results as they are, other frames narrow,
    numbers with few digits."""
    if value is None or isinstance(value, Path):
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, tuple) and any(part is None for part in value):
        return ""  # charts that were saved
    if isinstance(value, tuple) and any(isinstance(part, polars.DataFrame) for part in value):
        return "\n".join(write_value(part) for part in value)
    if isinstance(value, pandas.DataFrame):
        return value.to_string(
            max_rows=8, max_cols=6, index=False, float_format=f"{{:.{_DIGITS}g}}".format
        )
    if isinstance(value, ResultFrame):
        return str(value)
    if isinstance(value, polars.DataFrame):
        floats = polars.selectors.float()
        with polars.Config(
            tbl_formatting="NOTHING",
            tbl_hide_column_data_types=True,
            tbl_hide_dataframe_shape=True,
            tbl_rows=8,
            tbl_cols=8,
            tbl_width_chars=_WIDTH,
            fmt_str_lengths=40,
        ):
            return str(value.with_columns(floats.map_elements(write_number, polars.String)))
    return str(round_numbers(value))


def write_answer(answer: Answer) -> str:
    """What the page shows of an answer, cut where it is long."""
    text = answer.printed + write_value(answer.value)
    lines = [line.rstrip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    if len(lines) > _LINES:
        lines = [*lines[: _LINES - 1], "..."]
    return "\n".join(line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..." for line in lines)


def is_picture(answer: Answer) -> bool:
    """Whether a recipe draws a chart."""
    return isinstance(answer.value, altair.TopLevelMixin)


def show(recipe: Recipe, answer: Answer) -> str:
    """The lines of the page below a recipe; none where its last line shows nothing."""
    if is_picture(answer):
        return f"![{recipe.question}]({recipe.picture})"
    text = write_answer(answer)
    return f"```text\n{text}\n```" if text else ""


def list_words(picture: str) -> list[str]:
    """All words of a picture in SVG, in their order."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", picture)


@contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    """Run in a folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def fill_page(text: str, pictures: Path, words: str = "") -> str:
    """The page with every output written again whose question has these words; pictures go to
    their folder."""

    def fill(found: re.Match[str]) -> str:
        recipe = Recipe(found["question"], found["code"], "")
        if words not in recipe.question:
            return found[0]
        kept = found[0].removesuffix(found["shown"]) if found["shown"] else found[0]
        if recipe.varies:
            return kept
        with (
            TemporaryDirectory() as folder,
            in_folder(Path(folder)),
            warnings.catch_warnings(action="ignore"),
        ):
            write_files(Path(folder))
            answer = run_recipe(recipe)
            if is_picture(answer):
                answer.value.save(pictures / recipe.picture)
        shown = show(recipe, answer)
        return f"{kept}\n{shown}\n" if shown else kept

    return _RECIPE.sub(fill, text)


def print_readme(text: str) -> str:
    """What the Python of the README prints, in a new process.

    Raises
    ------
    ValueError
        If it fails; with what it printed last.
    """
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    words = [sys.executable, "-W", "ignore", "-X", "utf8", "-c", block]
    run = subprocess.run(words, capture_output=True, encoding="utf-8", cwd=ROOT)
    if run.returncode != 0:
        raise ValueError(f"the Python of the README fails: {run.stderr}")
    return run.stdout


def fill_readme(text: str) -> str:
    """The README with what its Python prints today."""
    printed = f"```text\n{print_readme(text)}```"
    return re.sub(r"```text\n.*?```", lambda _: printed, text, flags=re.DOTALL)


def main() -> None:
    """Write the page, its pictures and the README again."""
    pk.plots.use_svg()  # with the colours and fonts of the notebooks
    words = " ".join(sys.argv[1:])
    filled = fill_page(PAGE.read_text(encoding="utf-8"), PAGE.parent, words)
    PAGE.write_text(filled, encoding="utf-8")
    if not words:
        readme = ROOT / "README.md"
        readme.write_text(fill_readme(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
