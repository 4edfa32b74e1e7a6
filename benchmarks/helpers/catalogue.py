"""The table of benchmarks: what each one answers, what it needs, how long it takes, and what rests on it.

`python -m benchmarks --list` prints it, `benchmarks/README.md` shows it, and `make bench` says from it how long each
benchmark will take.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from perfkit.ground.units import format_table

README = Path(__file__).parents[1] / "README.md"
#: The lines of the README between which the table stands.
_BEGIN = "<!-- This table is written by python -m benchmarks --docs -->\n\n"
_END = "\n<!-- End of the table -->"


class Need(Enum):
    """What a benchmark needs beside perfkit and what is committed; the value is its word in the table."""

    SHARED = "shared data"
    PLATFORM = "platform file"
    CORES = "2 cores"
    GPU = "GPU"
    TORCH = "torch"
    TRANSFORMERS = "transformers"
    PIP = "pip, network"
    GIT = "git"


#: What the words of needs mean.
NEEDS = {
    Need.SHARED: "measurements of other people in ../shared/data, or in the folder that PERFKIT_SHARED_DATA names",
    Need.PLATFORM: "a calibration of this machine, which `perfkit calibrate` writes",
    Need.CORES: "more than one core, for runs on two ranks",
    Need.GPU: "an NVIDIA GPU to measure; saved measurements are judged without",
    Need.TORCH: "PyTorch: pip install 'perfkit[measure]'",
    Need.TRANSFORMERS: "the package transformers: pip install 'perfkit[models]'",
    Need.PIP: "a network, over which pip installs other tools into a temporary folder",
    Need.GIT: "a checkout with its history",
}


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: a file of this folder that can be run alone.

    Parameters
    ----------
    name : str
        Its module: ``python -m benchmarks.NAME``.
    question : str
        The question that it answers, in one sentence.
    arguments : str
        Arguments of the command that answers it.
    seconds : float
        How long this command takes on two cores: its processor time on an AMD EPYC (family 25, model 17) on
        2026-11-27, rounded [s].
    needs : tuple of Need
        What it needs beside what is committed.
    page, claim : str
        The page whose claim rests on it, and a heading or words there; empty if no page states what it prints.
    quick_seconds : float or None
        How long it takes with what ``--quick`` of `python -m benchmarks` asks for [s]; None if that is the same.
    is_estimated : bool
        Whether the time was not measured but follows from what the command is set to measure.
    """

    name: str
    question: str
    arguments: str
    seconds: float
    needs: tuple[Need, ...]
    page: str
    claim: str
    quick_seconds: float | None = None
    is_estimated: bool = False

    @property
    def command(self) -> str:
        """What to type."""
        return f"python -m benchmarks.{self.name} {self.arguments}".rstrip()

    @property
    def needs_as_text(self) -> str:
        """Words of what it needs."""
        return ", ".join(need.value for need in self.needs)

    @property
    def time_as_text(self) -> str:
        """How long it takes, and whether that is an estimate."""
        duration = format_duration(self.seconds)
        return f"{duration} (estimate)" if self.is_estimated else duration

    @property
    def claim_as_text(self) -> str:
        """The page and the words that rest on it."""
        if not self.page:
            return ""
        return f"{self.page}: {self.claim}"


_ACCURACY, _FORMULAS = "docs/accuracy.md", "docs/formulas.md"
_MEASURED = "reference_data/measured"

BENCHMARKS = (
    # measured on this machine
    Benchmark(
        "accuracy",
        "How far off are predictions of kernels, collectives and iterations that calibration of this machine never saw?",
        "--platform P.toml --json accuracy.json",
        1800,
        (Need.PLATFORM, Need.TORCH),
        _ACCURACY,
        "Kernels and the first calibration",
        quick_seconds=60,
        is_estimated=True,
    ),
    Benchmark(
        "learning",
        "How does the error on unseen runs fall with the number of iterations that calibration measures?",
        f"{_MEASURED}/zen3-2.measurements.json --check {_MEASURED}/zen3-2.check-*.json --families",
        600,
        (),
        _ACCURACY,
        "Iterations of any model",
        quick_seconds=60,
        is_estimated=True,
    ),
    Benchmark(
        "left_out",
        "How far off are kernels and embeddings that are left out of a calibration's fit?",
        "--draws 1 --folds 2",
        25,
        (),
        _ACCURACY,
        "Kernels and the first calibration",
    ),
    Benchmark(
        "few_sizes",
        "How wide must an interval be after a fit to few sizes of a kernel?",
        "",
        27,
        (),
        _FORMULAS,
        "least spread of a sum of terms from few sizes",
    ),
    Benchmark(
        "checks",
        "How far off are the committed runs of `perfkit check`, by family?",
        "zen3-2",
        1,
        (),
        _ACCURACY,
        "Iterations of any model",
    ),
    Benchmark(
        "foreign",
        "How far off are models of families that no calibration has run?",
        "--platform P.toml",
        600,
        (Need.PLATFORM, Need.TORCH, Need.TRANSFORMERS),
        _ACCURACY,
        "Models that no calibration has run",
        is_estimated=True,
    ),
    Benchmark(
        "cpu_truth",
        "How far off are captured programs of 34 kinds on one core, relative to a BERT and a GPT-2 beside them?",
        "--platform P.toml --seed 1",
        600,
        (Need.PLATFORM, Need.TORCH, Need.TRANSFORMERS),
        "",
        "",
        is_estimated=True,
    ),
    Benchmark(
        "imbalance",
        "Is the time predicted that ranks wait for others, with uneven placements and stragglers?",
        "--platform P.toml",
        180,
        (Need.PLATFORM, Need.CORES, Need.TORCH),
        _ACCURACY,
        "Iterations of any model",
        quick_seconds=30,
        is_estimated=True,
    ),
    Benchmark(
        "sharded",
        "How far off are fully sharded steps (FSDP2) on two ranks, predicted from their captures?",
        "--platform P.toml",
        110,
        (Need.PLATFORM, Need.CORES, Need.TORCH),
        "",
        "",
    ),
    Benchmark(
        "sharding_study",
        "Are placements that are predicted to be fast really fast, and is a rule of thumb as good?",
        f"--saved {_MEASURED}/zen3-2.sharding-1.json --platform zen3-2",
        2,
        (),
        _ACCURACY,
        "Placements of embedding tables",
    ),
    Benchmark(
        "memory",
        "Is the peak memory of real steps predicted?",
        "",
        60,
        (Need.TORCH,),
        _FORMULAS,
        "lifetimes, captured",
    ),
    # perfkit itself
    Benchmark(
        "speed",
        "How long does perfkit itself take, beside its bars?",
        "--platform P.toml",
        60,
        (),
        "",
        "",
        quick_seconds=15,
    ),
    Benchmark(
        "beside",
        "Is perfkit slower than it was at an older commit?",
        "COMMIT",
        60,
        (Need.GIT,),
        "CONTRIBUTING.md",
        "Checks",
        is_estimated=True,
    ),
    Benchmark(
        "walk",
        "Which functions does one prediction run, and are they the same whatever was asked before?",
        "",
        4,
        (),
        "",
        "",
    ),
    Benchmark(
        "captures",
        "How long does it take to capture published models, and which operations have no class?",
        "",
        120,
        (Need.TORCH, Need.TRANSFORMERS),
        "",
        "",
        is_estimated=True,
    ),
    Benchmark(
        "capture_cases",
        "Do small awkward steps that once broke captures behave as they should?",
        "",
        40,
        (Need.TORCH,),
        "",
        "",
    ),
    Benchmark(
        "scripts",
        "Which training scripts of others are captured as they are, and is it what they run?",
        "--saved reference_data/measured/scripts.json",
        1,
        (),
        "docs/accuracy.md",
        "Training scripts of others",
        is_estimated=True,
    ),
    Benchmark(
        "drawn_models",
        "Are models drawn from the lists of transformers, torchvision and timm captured as their steps really run?",
        "--saved reference_data/measured/drawn-models.json",
        1,
        (),
        "docs/accuracy.md",
        "Captures of drawn models",
        is_estimated=True,
    ),
    Benchmark(
        "versions",
        "Which parts of perfkit work with which PyTorch?",
        "--saved reference_data/measured/torch-versions.json",
        1,
        (),
        "docs/accuracy.md",
        "Versions of PyTorch",
        is_estimated=True,
    ),
    Benchmark(
        "peers",
        "How many questions do perfkit and other closed-form tools answer in a second?",
        "",
        120,
        (Need.PIP,),
        _ACCURACY,
        "Calculon, llm-analysis and mlsysim",
        is_estimated=True,
    ),
    Benchmark(
        "placement",
        "How near to the lower bound do placements of tables come, and how good are rules of thumb?",
        "",
        600,
        (),
        _ACCURACY,
        "Placements of embedding tables",
        quick_seconds=15,
    ),
    Benchmark(
        "plan_limits",
        "What do limits of plans cost: shards of 128 columns or more, and small tables whole or copied?",
        "",
        25,
        (),
        _ACCURACY,
        "Placements of embedding tables",
        quick_seconds=8,
    ),
    # GPUs that perfkit has measured
    Benchmark(
        "gpu_steps",
        "How far off are whole training steps on one GPU?",
        f"--saved {_MEASURED}/h100-1.check-1.json",
        1,
        (),
        _ACCURACY,
        "Training steps on an H100 and an H200",
    ),
    Benchmark(
        "gpu_survey",
        "How far off are kernels of one GPU that no public table has?",
        f"--saved {_MEASURED}/h200-2.survey.json",
        1,
        (),
        _ACCURACY,
        "A survey of kernels and 20 more steps on an H200",
    ),
    # GPUs that others have measured
    Benchmark(
        "gpu_forms",
        "How far off are products and collectives of GPUs that are left out of the fits?",
        "--systems a100_sxm,h100_sxm",
        8,
        (Need.SHARED,),
        _ACCURACY,
        "GPU kernels and collectives: public measurements of A100 and H100",
    ),
    Benchmark(
        "few_nodes",
        "How far off are collectives on many nodes that are predicted from one or two?",
        "",
        6,
        (Need.SHARED,),
        _ACCURACY,
        "Many nodes from one or two",
    ),
    Benchmark(
        "gpu_products",
        "How far off are large matrix products on GPUs of the gallery?",
        "",
        1,
        (),
        _ACCURACY,
        "GPU kernels and collectives: public measurements of A100 and H100",
    ),
    Benchmark(
        "gpu_attention",
        "How far off is fused attention alone on an H100, by kernel, length and width?",
        "",
        1,
        (),
        _ACCURACY,
        "GPU kernels and collectives: public measurements of A100 and H100",
    ),
    Benchmark(
        "v100_embeddings",
        "How far off are lookups and updates of tables on a V100?",
        "",
        1,
        (Need.SHARED,),
        _ACCURACY,
        "GPU iterations that nobody fitted",
    ),
    Benchmark(
        "lookups",
        "How far off are lookups of tables in device memory, each source with what others give?",
        "",
        1,
        (Need.SHARED,),
        _ACCURACY,
        "Lookups in device memory",
    ),
    Benchmark(
        "host_tables",
        "How far off are lookups and updates of tables beyond device memory on an H100?",
        "",
        1,
        (Need.SHARED,),
        _ACCURACY,
        "Tables beyond device memory",
    ),
    Benchmark(
        "gpu_iterations",
        "How far off are published iterations of DLRMs on single GPUs?",
        "",
        1,
        (),
        _ACCURACY,
        "GPU iterations that nobody fitted",
    ),
    Benchmark(
        "gpu_networks",
        "How far off are published iterations of convolutional nets on single GPUs?",
        "",
        21,
        (Need.SHARED, Need.TORCH),
        _ACCURACY,
        "GPU iterations that nobody fitted",
    ),
    Benchmark(
        "gpu_vision",
        "How far off are published steps of image models on GPUs that are known by datasheet and products?",
        "",
        150,
        (Need.TORCH, Need.TRANSFORMERS),
        _ACCURACY,
        "GPU iterations that nobody fitted",
    ),
    Benchmark(
        "encoders",
        "How far off are published throughputs of a ViT that is built, and of layers of T5 that are captured?",
        "",
        11,
        (Need.TORCH, Need.TRANSFORMERS),
        _ACCURACY,
        "Encoders: ViT and T5",
    ),
    Benchmark(
        "gpu_unet",
        "How far off are published steps of Stable Diffusion's U-Net on 8 to 128 A100?",
        "",
        110,
        (Need.SHARED, Need.TORCH),
        _ACCURACY,
        "Diffusion U-Net",
    ),
    Benchmark(
        "mlperf_dlrm",
        "How far off are the steps of MLPerf's DLRMs on 8 GPUs?",
        "",
        1,
        (),
        _ACCURACY,
        "GPU iterations that nobody fitted",
    ),
    Benchmark(
        "gpu_context",
        "How far off are published steps of Transformers, with scales that were fitted to other steps?",
        "",
        40,
        (),
        _ACCURACY,
        "Whole steps on GPUs, as others published them",
    ),
    Benchmark(
        "scale",
        "How far off are published steps with tensor, context, expert and pipeline parallelism?",
        "",
        330,
        (Need.SHARED,),
        _ACCURACY,
        "Strategies on many GPUs, as others published them",
    ),
    Benchmark(
        "stacks",
        "How far off are published steps of many software stacks, with levels fitted to others?",
        "",
        300,
        (Need.SHARED,),
        _ACCURACY,
        "Steps of many software stacks, as others published them",
    ),
    Benchmark(
        "strategies_beside",
        "How far is `explore` from the event loop of `predict`, for random strategies of all kinds?",
        "",
        25,
        (),
        _ACCURACY,
        "`explore` beside `predict`",
    ),
    Benchmark(
        "published_memory",
        "How far off is the memory of published steps, as allocated and with the reserve of a process?",
        "",
        3,
        (Need.SHARED,),
        _ACCURACY,
        "Memory of steps, as others published it",
    ),
    Benchmark(
        "regions",
        "How far off are published pipelines over links as slow as between regions?",
        "",
        2,
        (),
        _ACCURACY,
        "Slow links between stages and replicas",
    ),
    Benchmark(
        "offload",
        "How far off are published steps that offload to the memory of the host?",
        "",
        2,
        (),
        _ACCURACY,
        "Offload to the host",
    ),
    Benchmark(
        "context_parallel",
        "How far off are published steps with sequences that ranks share?",
        "",
        2,
        (),
        _ACCURACY,
        "Sequences that ranks share",
    ),
    Benchmark(
        "lora",
        "How far off are published iterations with low-rank adapters?",
        "",
        3,
        (),
        _ACCURACY,
        "Low-rank adapters",
    ),
    Benchmark(
        "deepseek",
        "How far off is the speed of DeepSeek-V3, and which facts matter?",
        "",
        2,
        (),
        _ACCURACY,
        "DeepSeek-V3",
    ),
    Benchmark(
        "dlrm_strategies",
        "Does perfkit put strategies for the MLPs of large DLRMs in the order in which MAD-Max puts them?",
        "",
        2,
        (),
        _ACCURACY,
        "DLRMs whose MLPs are shared",
    ),
    Benchmark(
        "updates",
        "When is a fused all_reduce and Adam faster than the two after each other?",
        "",
        1,
        (Need.SHARED,),
        _ACCURACY,
        "Fused all_reduce and Adam",
    ),
    Benchmark(
        "fixes",
        "Are the gains that a trace tells those of the event loop with the change made?",
        "",
        25,
        (),
        _ACCURACY,
        "What would help most, told from traces",
    ),
    Benchmark(
        "traced",
        "What does a platform from a public trace predict of other ranks, other jobs and collectives?",
        "",
        36,
        (Need.SHARED,),
        _ACCURACY,
        "A platform from traces",
    ),
)


def find_benchmark(name: str) -> Benchmark:
    """The row of a module."""
    for benchmark in BENCHMARKS:
        if benchmark.name == name:
            return benchmark
    raise ValueError(f"benchmark is {name!r}; take one of `python -m benchmarks --list`")


def format_duration(seconds: float) -> str:
    """A rounded time in words: seconds below two minutes, else minutes."""
    if seconds < 120:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min"


_HEADS = ("benchmark", "question", "needs", "time", "what rests on it")


def _list_cells(benchmark: Benchmark) -> tuple[str, ...]:
    """The cells of one row, as of `_HEADS`."""
    return (
        benchmark.name,
        benchmark.question,
        benchmark.needs_as_text,
        benchmark.time_as_text,
        benchmark.claim_as_text,
    )


def format_benchmarks(benchmarks: Sequence[Benchmark] = BENCHMARKS) -> str:
    """The table as text."""
    return format_table([_HEADS, *(_list_cells(benchmark) for benchmark in benchmarks)])


def _format_markdown(benchmarks: Sequence[Benchmark]) -> str:
    """The table for the README, with the command in place of the name."""
    lines = [
        "| " + " | ".join(("question", "command", *_HEADS[2:])) + " |",
        "|---|---|---|---|---|",
    ]
    for benchmark in benchmarks:
        cells = list(_list_cells(benchmark))
        cells[0] = benchmark.question
        cells[1] = f"`{benchmark.command}`"
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def fill_readme(text: str, benchmarks: Sequence[Benchmark] = BENCHMARKS) -> str:
    """The README with the table of today.

    Raises
    ------
    ValueError
        If a line is missing between which the table stands.
    """
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    for line in (_BEGIN, _END):
        if line not in (begin, end):
            raise ValueError(f"README has no line {line.strip()!r}; put it there, around the table")
    return before + begin + _format_markdown(benchmarks) + end + after
