"""Training logs in each form, with invented figures: the time of an iteration, what does not count,
and what the log states of its run."""

import gzip
import re
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

import perfkit as pk
from perfkit.prediction.strategies import price_strategies
from perfkit.readers.training_logs import TrainingLogWarning, parse_training_log
from perfkit.readers.training_models import describe_run

PLAIN_2020 = (
    " iteration {n:8d}/     500 | consumed samples: {n:12d} | elapsed time per iteration (ms): {ms:.1f} |"
    " learning rate: 1.500E-04 | global batch size:    64 | lm loss: 7.1E+00 | loss scale: 1.0 |"
    " number of skipped iterations:   0 | number of nan iterations:   0 |"
)
PLAIN_2025 = (
    " [2025-03-04 05:06:07] iteration {n:8d}/     500 | consumed samples: {n:12d} |"
    " elapsed time per iteration (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): 321.5 |"
    " learning rate: 1.5E-04 | global batch size:    64 | lm loss: 7.1E+00 | grad norm: 1.1 |"
)
IN_SECONDS = (
    "[default7]: iteration {n:8d}/  95367 | consumed samples: 4096 | consumed tokens: 8388608 |"
    " elapsed time per iteration (s): {s:.2f} | global batch size:  64 | lm loss: 6.4E+01 |"
    " samples per second: 2.660 | TFLOPs: 123.45 |"
)
PRIMUS = (
    "[20250203 01:02:03][rank-15/16][INFO ] [--------trainer.py:2488] :  iteration {n:8d}/  500 |"
    " consumed samples: 64 | elapsed time per iteration (ms): {ms:.1f}/999.9 |"
    " hip mem usage/free/total/usage_ratio: 100.00GB/92.00GB/192.00GB/52.08% |"
    " throughput per GPU (TFLOP/s/GPU): 321.5/300.1 | tokens per GPU (tokens/s/GPU): 4567.8/4000.1 |"
    " learning rate: 1.5E-04 | global batch size:   64 | lm loss: 2.3E+00 |"
)
PRIMUS_2026 = (
    "[20260203 01:02:03][rank-15/16][INFO ] [print_rank_last_patches.py:99] :  iteration {n:8d}/  500 |"
    " elapsed time per iteration (ms): {ms:.1f}/999.9 | compute per GPU (TFLOP/s/GPU): 321.5 (avg 300.1) |"
    " tokens/s/GPU inst/harmonic mean: 4567.8/4000.1 | global batch size:   64 | lm loss: 2.3E+00 |"
)
BRIDGE = "ain_fp8_mx/0 Step Time : {s:.2f}s GPU utilization: 321.5MODEL_TFLOP/s/GPU"
NEMO_2 = (
    "Training epoch 0, iteration {n}/499 | lr: 1.9e-06 | global_batch_size: 64 | global_step: {n} |"
    " reduced_train_loss: 1.315 | train_step_timing in s: {s} | TFLOPS_per_GPU: 321.5"
)
NEMO_1 = (
    "Epoch 0: :   1%|▏    | {n}/4900 [10:58<15:32:28, v_num=q, reduced_train_loss=6.8, global_step=5e+3,"
    " consumed_samples=7296.0, train_step_timing in s={s}]"
)
NEMO_JSON = (
    'DLLL {{"timestamp": "17", "type": "LOG", "step": {n}, "data": {{"lr": 1.2e-06, "global_step": {n}.0,'
    ' "train_step_timing in s": {s}, "epoch": 0}}}}'
)
MAXTEXT = (
    "completed step: {n}, seconds: {s:.3f}, TFLOP/s/device: 321.500, Tokens/s/device: 4567.800,"
    " total_weights: 65536, loss: 12.262"
)
NANOGPT = "iter {n}: loss 4.0863, time {ms:.2f}ms, mfu 32.10%"


def write(line: str, count: int = 30, *, slow: tuple[int, ...] = (), seconds: float = 0.5) -> str:
    """Lines of steps: `seconds` each, four times as long in the first five and the slow ones."""
    lines = []
    for number in range(1, count + 1):
        time = 4 * seconds if number <= 5 or number in slow else seconds
        lines.append(line.format(n=number, ms=1000 * time, s=time))
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("line", "dialect"),
    [
        (PLAIN_2020, "megatron"),
        (PLAIN_2025, "megatron"),
        (IN_SECONDS, "megatron"),
        (PRIMUS, "megatron"),
        (PRIMUS_2026, "megatron"),
        (BRIDGE, "megatron-bridge"),
        (NEMO_2, "nemo"),
        (NEMO_1, "nemo"),
        (NEMO_JSON, "nemo"),
        (MAXTEXT, "maxtext"),
        (NANOGPT, "nanogpt"),
    ],
)
@pytest.mark.parametrize("prefix", ["", " 3: ", "[rank0]:", "\x1b[32m", "2025-01-02T03:04:05Z "])
def test_each_form_gives_the_time_of_an_iteration(line: str, dialect: str, prefix: str) -> None:
    text = "\n".join(prefix + each for each in write(line).split("\n"))
    log = parse_training_log(text, file="a.log")
    assert log.dialect == dialect
    assert log.steps["iteration"].to_list() == list(range(1, 31))
    assert log.seconds == pytest.approx(0.5)
    assert (log.summary.iterations, log.summary.skipped) == (20, 10)
    if "321.5" in line:
        assert log.summary.flop_per_s_per_gpu == pytest.approx(321.5e12)
    if "4567.8" in line:
        assert log.summary.tokens_per_s_per_gpu == pytest.approx(4567.8)
    if "lobal" in line and "64" in line:
        assert log.summary.batch == 64


def test_what_primus_prints_beside_its_times() -> None:
    log = parse_training_log(write(PRIMUS))
    assert log.ranks is None  # its ranks stand before the first step, as those of other lines
    assert log.summary.memory == pytest.approx(100 * 2**30)
    start = "[20250203 01:02:03][rank-0/16][INFO ] [trainer.py:1] : building model\n"
    assert parse_training_log(start + write(PRIMUS)).ranks == 16


def write_titan(tps: float, *, colour: str = "", rank: str = "[rank0]:", step: int = 10) -> str:
    """Steps of torchtitan, ten seconds apart by the clock: ten iterations of a second."""
    lines = []
    for number in range(1, 13):
        iteration = 1 if number == 1 else step * (number - 1)
        lines.append(
            f"{rank}[titan] 2025-06-04 08:{number // 6:02d}:{10 * (number % 6):02d},500 - root - INFO - {colour}"
            f"step: {iteration:2d}  loss: 12.2254  memory: 31.00GiB(32.62%)  tps: {tps:,.0f}  tflops: 407.35"
            "  mfu: 41.19%"
        )
    return "\n".join(lines)


MESH = (
    "[rank0]:[titan] 2025-06-04 08:00:00,100 - root - INFO - Building device mesh with parallelism:"
    " pp=1, dp_replicate=2, dp_shard=4, cp=1, tp=2, ep=1, etp=1\n"
)
LLAMA = (
    "[rank0]:[titan] 2025-06-04 08:00:01,100 - root - INFO - Building llama3 8B with ModelArgs(dim=4096,"
    " n_layers=32, n_heads=32, n_kv_heads=8, vocab_size=128256, multiple_of=1024, ffn_dim_multiplier=1.3,"
    " norm_eps=1e-05, rope_theta=500000, max_seq_len=8192, depth_init=True, norm_type='rmsnorm')\n"
    "[rank0]:[titan] 2025-06-04 08:00:02,100 - root - INFO - Model llama3 8B size: 8,030,261,248 total"
    " parameters\n"
    "[rank0]:[titan] 2025-06-04 08:00:02,200 - root - INFO - Applied full activation checkpointing to the"
    " model\n"
    "[rank0]:[titan] 2025-06-04 08:00:02,300 - root - INFO - Compiling each TransformerBlock with"
    " torch.compile\n"
    "[rank0]:[titan] 2025-06-04 08:00:02,400 - root - INFO - Applied HSDP to the model\n"
)
TRAINER = (
    "[rank0]:[titan] 2025-06-04 08:00:03,100 - root - INFO - Trainer is initialized with local batch size 1,"
    " global batch size 16, gradient accumulation steps 2, sequence length 8192, total steps 100 (warmup 2)\n"
)


def test_times_of_torchtitan_follow_from_its_tokens_a_second() -> None:
    # 16 sequences of 8192 tokens on 16 GPUs in a second: 8192 tokens/s a GPU
    log = parse_training_log(MESH + LLAMA + TRAINER + write_titan(8192))
    assert log.seconds == pytest.approx(1.0)
    assert log.steps["left_out"].to_list() == ["warm-up", "warm-up", *[None] * 10]
    assert log.steps["iterations"].to_list() == [1, 9, *[10] * 10]
    assert log.summary.mfu == pytest.approx(0.4119)
    assert log.notes == ()
    coloured = write_titan(8192, colour="\x1b[31m").replace("tps", "\x1b[38;2;180;60;0mtps")
    assert parse_training_log(MESH + LLAMA + TRAINER + coloured).seconds == pytest.approx(1.0)


def test_without_batch_or_ranks_the_clock_says_the_time() -> None:
    assert parse_training_log(write_titan(4711)).seconds == pytest.approx(1.0)
    of_primus = write_titan(4711).replace("[titan] 2025-06-04 ", "[20250604 ").replace(",500", "]")
    assert parse_training_log(of_primus).seconds == pytest.approx(1.0)
    silent = write_titan(4711).replace("2025-06-04 08:", "")
    with pytest.raises(ValueError, match=r"does not state batch, sequence, ranks; keep the lines"):
        parse_training_log(silent, file="titan.log")


def test_tokens_that_contradict_the_clock_are_told() -> None:
    with pytest.warns(TrainingLogWarning, match=r"0\.50 times as much; check batch and GPUs"):
        log = parse_training_log(MESH + LLAMA + TRAINER + write_titan(4096))
    assert log.seconds == pytest.approx(2.0)


def test_all_ranks_of_torchtitan_print_one_step() -> None:
    lines = []
    for line in write_titan(8192).split("\n"):
        lines += [line, line.replace("rank0", "rank1").replace("8,192", "8,000")]
    log = parse_training_log(MESH + LLAMA + TRAINER + "\n".join(lines))
    assert len(log.steps) == 12
    untagged = "\n".join(lines).replace("[rank0]:", "").replace("[rank1]:", "")
    assert len(parse_training_log(MESH + LLAMA + TRAINER + untagged).steps) == 12


def test_the_workload_of_torchtitan_is_the_published_model() -> None:
    log = parse_training_log(MESH + LLAMA + TRAINER + write_titan(8192))
    model = log.workload()
    assert model.graphs()[0].parameters == 8030261248
    wanted = pk.Strategy(
        tp=2, dp=8, zero=3, shards=4, micro_batch=1, checkpoint="full", sequence_parallel=True
    )
    assert log.strategy() == wanted
    assert (log.ranks, log.stack, log.execution) == (16, "torchtitan", "compiled")
    # sizes are those of the line of arguments, also where no model was published with them
    small = LLAMA.replace("n_layers=32", "n_layers=6").replace("8B", "debugmodel")
    small = "\n".join(line for line in small.split("\n") if "total parameters" not in line)
    sizes = parse_training_log(MESH + small + TRAINER + write_titan(8192)).workload()
    assert (sizes.layers, sizes.hidden, sizes.vocabulary) == (6, 4096, 128256)
    # without the line of arguments the name is enough
    named = LLAMA.split("\n", 1)[1]
    again = parse_training_log(MESH + named + TRAINER + write_titan(8192)).workload()
    assert again.graphs()[0].parameters == 8030261248
    assert (again.batch, again.sequence, again.dtype) == (16, 8192, "bf16")


def test_the_device_of_a_log() -> None:
    capacity = (
        "[rank0]:[titan] - INFO - CUDA capacity: NVIDIA H100 80GB HBM3 with 79.11GiB memory\n"
    )
    log = parse_training_log(MESH + capacity + TRAINER + write_titan(8192))
    assert log.summary.device == "NVIDIA H100 80GB HBM3"
    assert parse_training_log(MESH + TRAINER + write_titan(8192)).summary.device is None


def test_what_is_taken_is_not_said_to_be_stated() -> None:
    log = parse_training_log(MESH + LLAMA + TRAINER + write_titan(8192))
    listed = r"^  (?:stated|not stated, taken): (.*)$"
    stated, taken = re.findall(listed, log.explain(), re.MULTILINE)
    assert "norm rms, tp 2, pp 1" in stated and "zero 3" in stated
    for words in ("mixed True", "fused True", "optimizer adamw", "dtype bf16"):
        assert words in taken and words not in stated
    # the same fields, each once
    assert len(stated.split(", ")) + len(taken.split(", ")) == len(log.run.model | log.run.strategy)
    of_megatron = parse_training_log(ARGUMENTS + write(PLAIN_2025)).run.taken
    assert {"causal", "mixed", "fused"} <= of_megatron
    given = {"rotary", "gated", "norm", "tie", "bias", "dtype", "tp", "pp", "cp", "zero"}
    assert not given & of_megatron


def test_meshes_of_2024() -> None:
    mesh = "[rank0]:2024-10-03 15:01:01,100 - root - INFO - Building 2-D device mesh with ['dp', 'tp'], [4, 2]\n"
    old = write_titan(16384).replace("tps:", "wps:")
    log = parse_training_log(mesh + TRAINER + old)
    assert (log.ranks, log.strategy().dp, log.strategy().tp) == (8, 4, 2)
    # 16 sequences of 8192 tokens on 8 GPUs
    assert log.seconds == pytest.approx(1.0)


ARGUMENTS = """using world size: 16, data-parallel-size: 2, tensor-model-parallel size: 4, pipeline-model-parallel size: 2
------------------------ arguments ------------------------
  add_bias_linear ................................. False
  bf16 ............................................ True
  context_parallel_size ........................... 1
  cp_comm_type .................................... ['p2p']
  data_parallel_size .............................. 2
  expert_model_parallel_size ...................... 1
  ffn_hidden_size ................................. 14336
  fp8 ............................................. None
  global_batch_size ............................... 64
  group_query_attention ........................... True
  hidden_dropout .................................. 0.0
  hidden_size ..................................... 4096
  kv_channels ..................................... 128
  max_position_embeddings ......................... 8192
  micro_batch_size ................................ 2
  moe_router_topk ................................. 2
  normalization ................................... RMSNorm
  num_attention_heads ............................. 32
  num_experts ..................................... None
  num_layers ...................................... 32
  num_query_groups ................................ 8
  optimizer ....................................... adam
  overlap_grad_reduce ............................. True
  params_dtype .................................... torch.bfloat16
  pipeline_model_parallel_size .................... 2
  position_embedding_type ......................... rope
  recompute_granularity ........................... full
  recompute_method ................................ block
  recompute_num_layers ............................ 3
  seq_length ...................................... 8192
  sequence_parallel ............................... True
  swiglu .......................................... True
  tensor_model_parallel_size ...................... 4
  tp_comm_overlap ................................. True
  transformer_impl ................................ transformer_engine
  untie_embeddings_and_output_weights ............. True
  use_distributed_optimizer ....................... True
  virtual_pipeline_model_parallel_size ............ 4
  world_size ...................................... 16
-------------------- end of arguments ---------------------
 > padded vocab (size: 128256) with 256 dummy tokens (new size: 128512)
[before the start of training step] datetime: 2025-03-04 05:06:07
"""


def change(text: str, **values: object) -> str:
    """Arguments with other values."""
    for name, value in values.items():
        lines = [
            f"  {name} ............ {value}" if f"  {name} ." in line else line
            for line in text.split("\n")
        ]
        text = "\n".join(lines)
    return text


def test_the_workload_of_megatron_arguments_is_the_one_built_by_hand() -> None:
    log = parse_training_log(ARGUMENTS + write(PLAIN_2025))
    by_hand = pk.Transformer(
        name="logged",
        causal=True,
        batch=64,
        sequence=8192,
        layers=32,
        hidden=4096,
        heads=32,
        vocabulary=128256,
        positions=8192,
        dtype="bf16",
        mixed=True,
        fused=True,
        kv_heads=8,
        inner=14336,
        norm="rms",
        gated=True,
        rotary=True,
        tie=False,
        bias=False,
    )
    assert log.workload() == by_hand
    assert log.strategy() == pk.Strategy(
        tp=4,
        pp=2,
        dp=2,
        micro_batch=2,
        schedule="interleaved",
        chunks=4,
        zero=1,
        sequence_parallel=True,
        tiled=True,
        checkpoint="full",
        checkpoint_layers=3,
    )
    assert (log.ranks, log.stack, log.execution) == (16, "megatron-te", None)
    summary = log.summary
    assert (summary.micro_batch, summary.sequence, summary.tp, summary.dtype) == (
        2,
        8192,
        4,
        "bf16",
    )
    # 64 sequences of 8192 tokens in half a second on 16 GPUs
    assert summary.tokens_per_s_per_gpu == pytest.approx(65536)


def test_lines_of_arguments_behind_prefixes_say_the_same() -> None:
    prefix = "[20250203 01:02:03][rank-0/16][INFO ] [arguments.py:12] : "
    text = "\n".join(prefix + line for line in ARGUMENTS.split("\n"))
    plain = parse_training_log(ARGUMENTS + write(PRIMUS))
    keys = re.sub(r"(?m)^  (\w+) \.+ ", r"  -\1:      ", ARGUMENTS)
    log = parse_training_log(keys + write(PRIMUS))
    assert log.workload() == plain.workload() and log.strategy() == plain.strategy()
    log = parse_training_log(text + "\n" + write(PRIMUS))
    assert log.workload() == plain.workload() and log.strategy() == plain.strategy()


@pytest.mark.parametrize(
    ("values", "field", "wanted"),
    [
        ({"fp8": "hybrid"}, "dtype", "fp8"),
        ({"bf16": "False", "params_dtype": "torch.float16"}, "dtype", "fp16"),
        ({"group_query_attention": "False"}, "kv_heads", 0),
        ({"position_embedding_type": "learned_absolute"}, "rotary", False),
        ({"normalization": "LayerNorm"}, "norm", "layer"),
        ({"kv_channels": 64}, "head_width", 64),
        ({"num_experts": 8}, "experts", 8),
        ({"optimizer": "sgd"}, "optimizer", "sgd_momentum"),
        ({"transformer_impl": "local"}, "attention", "eager"),
    ],
)
def test_an_argument_is_a_field_of_the_model(
    values: dict[str, object], field: str, wanted: object
) -> None:
    log = parse_training_log(change(ARGUMENTS, **values) + write(PLAIN_2025))
    assert getattr(log.workload(), field) == wanted
    assert getattr(parse_training_log(ARGUMENTS + write(PLAIN_2025)).workload(), field) != wanted


@pytest.mark.parametrize(
    ("values", "field", "wanted"),
    [
        ({"recompute_granularity": "selective"}, "checkpoint", "selective"),
        ({"recompute_granularity": "None", "recompute_method": "None"}, "checkpoint", "none"),
        ({"recompute_method": "uniform"}, "checkpoint_group", 3),
        ({"use_distributed_optimizer": "False"}, "zero", 0),
        ({"overlap_grad_reduce": "False"}, "overlap", False),
        ({"virtual_pipeline_model_parallel_size": "None"}, "schedule", "1f1b"),
        ({"context_parallel_size": 2, "cp_comm_type": "['a2a']"}, "cp_kind", "ulysses"),
        ({"context_parallel_size": 2}, "dp", 1),
        ({"tp_comm_overlap": "False"}, "tiled", False),
    ],
)
def test_an_argument_is_a_field_of_the_strategy(
    values: dict[str, object], field: str, wanted: object
) -> None:
    log = parse_training_log(change(ARGUMENTS, **values) + write(PLAIN_2025))
    assert getattr(log.strategy(), field) == wanted
    assert getattr(parse_training_log(ARGUMENTS + write(PLAIN_2025)).strategy(), field) != wanted


def test_experts_of_megatron() -> None:
    more = change(ARGUMENTS, num_experts=8, expert_model_parallel_size=2).replace(
        "-------------------- end",
        "  moe_ffn_hidden_size ............................. 1024\n"
        "  moe_layer_freq .................................. [0, 0, 1, 1, 1]\n"
        "  moe_shared_expert_intermediate_size ............. 2048\n"
        "  moe_token_dispatcher_type ....................... flex\n"
        "-------------------- end",
    )
    log = parse_training_log(more + write(PLAIN_2025))
    model, strategy = log.workload(), log.strategy()
    assert (model.experts, model.top_k, model.expert_width, model.dense_layers) == (8, 2, 1024, 2)
    assert (model.shared_experts, model.shared_width) == (1, 2048)
    assert (strategy.ep, strategy.dispatch) == (2, "once")


OLD = """------------------------ arguments ------------------------
  activations_checkpoint_method ................... uniform
  activations_checkpoint_num_layers ............... 2
  attention_dropout ............................... 0.1
  data_parallel_size .............................. 2
  DDP_impl ........................................ local
  encoder_seq_length .............................. 1024
  ffn_hidden_size ................................. 8192
  fp16 ............................................ True
  global_batch_size ............................... 64
  hidden_dropout .................................. 0.1
  hidden_size ..................................... 2048
  kv_channels ..................................... 128
  max_position_embeddings ......................... 1024
  micro_batch_size ................................ 4
  num_attention_heads ............................. 16
  num_layers ...................................... 24
  num_layers_per_virtual_pipeline_stage ........... 3
  params_dtype .................................... torch.float16
  pipeline_model_parallel_size .................... 4
  seq_length ...................................... 1024
  tensor_model_parallel_size ...................... 2
  world_size ...................................... 16
-------------------- end of arguments ---------------------
 > padded vocab (size: 50257) with 175 dummy tokens (new size: 50432)
"""


def test_arguments_of_2021() -> None:
    log = parse_training_log(OLD + write(PLAIN_2020))
    by_hand = pk.Transformer.preset(
        "gpt3-1.3b",
        batch=64,
        sequence=1024,
        heads=16,
        positions=1024,
        inner=8192,
        dtype="fp16",
        mixed=True,
        fused=True,
        dropout=0.1,
        attention="eager",
    )
    assert replace(log.workload(), name=by_hand.name) == by_hand
    wanted = pk.Strategy(
        tp=2,
        pp=4,
        dp=2,
        micro_batch=4,
        schedule="interleaved",
        chunks=2,
        checkpoint="full",
        checkpoint_group=2,
        overlap=False,
    )
    assert (log.strategy(), log.stack) == (wanted, "megatron")


YAML = """model:
  _target_: megatron.bridge.models.llama.llama_provider.Llama31ModelProvider
  activation_func:
    _call_: false
    _target_: torch.nn.functional.silu
  add_bias_linear: false
  bf16: true
  ffn_hidden_size: 14336
  fp8: null
  gated_linear_unit: true
  hidden_dropout: 0.0
  hidden_size: 4096
  max_position_embeddings: 8192
  normalization: RMSNorm
  num_attention_heads: 32
  num_layers: 32
  num_moe_experts: null
  num_query_groups: 8
  pipeline_model_parallel_size: 1
  position_embedding_type: rope
  seq_length: 8192
  sequence_parallel: false
  share_embeddings_and_output_weights: false
  tensor_model_parallel_size: 1
  vocab_size: 128256
train:
  global_batch_size: 64
  micro_batch_size: 1
trainer:
  devices: 8
  num_nodes: 2
"""


def test_a_configuration_in_yaml_says_the_same_as_arguments() -> None:
    log = parse_training_log(YAML + write(NEMO_2))
    by_arguments = parse_training_log(ARGUMENTS + write(PLAIN_2025)).workload()
    assert log.workload() == by_arguments
    assert (log.ranks, log.strategy().dp, log.stack) == (16, 16, "megatron-te")
    with pytest.warns(TrainingLogWarning, match="num_layers is 32 and 2 in the log; the first"):
        parse_training_log(YAML + "draft:\n  num_layers: 2\n" + write(NEMO_2))


def test_lists_and_defaults_of_yaml() -> None:
    more = (
        "  recompute_granularity: selective\n  recompute_modules:\n  - core_attn\n  - moe_act\n"
        "  cp_comm_type: null\n  micro_batch_size: ${PRIMUS_MBS:4}\n  encoder_seq_length: ${model.seq}\n"
    )
    text = YAML.replace("train:\n", more + "train:\n").replace("  micro_batch_size: 1\n", "")
    log = parse_training_log(text + write(NEMO_2))
    assert log.strategy().checkpoint == "attention+activation"
    assert log.strategy().micro_batch == 4


def test_parameters_that_the_software_counts_check_the_model() -> None:
    counted = " > Total number of parameters in billions: 8.03\n"
    parse_training_log(ARGUMENTS + counted + write(PLAIN_2025)).workload()  # no warning
    wrong = parse_training_log(ARGUMENTS + counted.replace("8.03", "7.06") + write(PLAIN_2025))
    with pytest.warns(
        TrainingLogWarning, match="counts 7,060,000,000 parameters, and .* 8,030,261,248"
    ):
        wrong.workload()


def test_arguments_of_megatron_deepspeed() -> None:
    more = ARGUMENTS.replace(
        "-------------------- end", "  deepspeed ..... True\n  zero_stage ..... 2\n--- end"
    )
    log = parse_training_log(more + write(IN_SECONDS))
    assert (log.stack, log.strategy().zero) == ("deepspeed", 2)


PARAMETERS = """Config param emb_dim: 4096
Config param global_batch_size_to_train_on: 64
Config param ici_tensor_parallelism: 2
Config param logits_via_embedding: False
Config param max_target_length: 8192
Config param mlp_activations: ['silu', 'linear']
Config param mlp_dim: 14336
Config param num_decoder_layers: 32
Config param num_experts: 1
Config param num_kv_heads: 8
Config param num_query_heads: 32
Config param per_device_batch_size: 4.0
Config param remat_policy: full
Config param vocab_size: 128256
"""


def test_parameters_of_maxtext() -> None:
    # what the command says is replaced by the list of parameters
    command = "python3 train.py per_device_batch_size=24 max_target_length=128\n"
    log = parse_training_log(command + PARAMETERS + write(MAXTEXT))
    assert log.workload() == parse_training_log(ARGUMENTS + write(PLAIN_2025)).workload()
    assert log.strategy() == pk.Strategy(tp=2, dp=8, zero=3, checkpoint="full")
    assert log.notes == ()


@pytest.mark.parametrize(
    ("statement", "note"),
    [
        ("opt_type: sgd", "opt_type sgd is priced as adamw"),
        ("ici_expert_parallelism: 8", "ici_expert_parallelism 8 is not read; give ep"),
    ],
)
def test_parameters_of_maxtext_that_are_not_read_are_named(statement: str, note: str) -> None:
    usual = "Config param opt_type: adamw\nConfig param ici_expert_parallelism: 1\n"
    assert parse_training_log(usual + PARAMETERS + write(MAXTEXT)).notes == ()
    with pytest.warns(TrainingLogWarning, match=note):
        parse_training_log(f"Config param {statement}\n" + PARAMETERS + write(MAXTEXT))


def test_parts_of_other_runs_that_are_not_priced_are_named() -> None:
    offloads = ARGUMENTS.replace("  optimizer ...", "  cpu_offloading .... True\n  optimizer ...")
    with pytest.warns(TrainingLogWarning, match="cpu_offloading of activations is not priced"):
        parse_training_log(offloads + write(PLAIN_2025))
    stated = {"training.seq_len": 8192, "optimizer.name": "Muon"}
    assert describe_run(stated, "torchtitan").notes == [
        "optimizer.name Muon is priced as adamw; give optimizer"
    ]
    assert describe_run({**stated, "optimizer.name": "AdamW"}, "torchtitan").notes == []


def test_arguments_of_readers_are_checked(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(write(PLAIN_2025))
    for text in (None, 3, b"iteration"):
        with pytest.raises(ValueError, match="must be the text of a log, a str; read_training_log"):
            parse_training_log(text)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="warm_up is -1"):
        parse_training_log(write(PLAIN_2025), warm_up=-1)
    with pytest.raises(ValueError, match="warm_up is -1"):
        pk.read_training_logs(tmp_path, warm_up=-1)
    for read in (pk.read_training_log, pk.read_training_logs):
        with pytest.raises(ValueError, match="progress is 'no'; it must be True or False"):
            read(tmp_path / "a.log", progress="no")
    log = pk.read_training_log(tmp_path / "a.log")
    with pytest.raises(ValueError, match="model is None; it must be the Transformer of all runs"):
        log.as_run(None, dp=8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="known are tp, "):
        log.strategy(layer=3)


def test_replicas_of_maxtext_without_fsdp_hold_the_whole_model() -> None:
    axes = "Config param ici_data_parallelism: -1\nConfig param ici_fsdp_parallelism: 1\n"
    assert parse_training_log(axes + PARAMETERS + write(MAXTEXT)).strategy().zero == 0


def test_steps_beside_checkpoints_and_evaluations_do_not_count() -> None:
    lines = write(PLAIN_2025, slow=(16, 21)).split("\n")
    lines.insert(
        20, " validation loss at iteration 20 on validation set | lm loss value: 2.3E+00 |"
    )
    lines.insert(15, "saving checkpoint at iteration      15 to /checkpoints")
    log = parse_training_log("\n".join(lines))
    left_out = log.steps["left_out"].to_list()
    assert (left_out[15], left_out[20]) == ("checkpoint", "evaluation")
    assert left_out.count(None) == 18 and log.summary.spread == 0
    assert "left out: 1 of 30 printed steps, checkpoint" in log.explain()


def test_each_start_warms_up_again_and_a_ramp_does_not_count() -> None:
    log = parse_training_log(write(PLAIN_2025) + "\n" + write(PLAIN_2025))
    assert log.steps["left_out"].to_list().count("warm-up") == 20
    ramp = write(PLAIN_2025).replace("size:    64", "size:    32", 20)
    log = parse_training_log(ramp)
    assert log.steps["left_out"].to_list().count("another batch") == 10
    assert log.summary.iterations == 10 and log.summary.batch == 64
    with pytest.warns(
        TrainingLogWarning, match="state a batch of 64 and the last step has 32, which"
    ):
        log = parse_training_log(
            ARGUMENTS + write(PLAIN_2025).replace("size:    64", "size:    32")
        )
    assert log.workload().batch == log.summary.batch == 32


def test_warm_up_is_as_asked_for_and_at_most_half() -> None:
    assert parse_training_log(write(PLAIN_2025, 8)).summary.skipped == 4
    assert parse_training_log(write(PLAIN_2025, 30), warm_up=12).summary.skipped == 12
    assert parse_training_log(write(PLAIN_2025, 1)).summary.iterations == 1
    # the mean of the first hundred iterations holds them
    hundreds = "\n".join(PLAIN_2025.format(n=100 * n, ms=500) for n in range(1, 5))
    assert parse_training_log(hundreds).steps["left_out"].to_list() == ["warm-up", None, None, None]


def test_times_of_single_iterations_are_one_iteration_each() -> None:
    tens = "\n".join(NANOGPT.format(n=10 * n, ms=500) for n in range(5))
    log = parse_training_log(tens)
    assert log.steps["left_out"].to_list() == ["warm-up", *[None] * 4]
    assert (log.summary.iterations, log.summary.skipped) == (4, 1)


def test_several_runs_in_one_file_are_refused() -> None:
    one = ARGUMENTS + write(PLAIN_2025)
    assert len(parse_training_log(one + "\n" + one).steps) == 60
    other = change(ARGUMENTS, micro_batch_size=4) + write(PLAIN_2025)
    with pytest.raises(
        ValueError,
        match=r"several runs: micro_batch_size is 2 at first, and 4 after line \d+; make one file",
    ):
        parse_training_log(one + "\n" + other)
    titan = MESH + TRAINER + write_titan(8192)
    with pytest.raises(
        ValueError, match=r"several runs: local batch is 1, 16, 8192 at first, and 1, 32"
    ):
        parse_training_log(
            titan + "\n" + titan.replace("global batch size 16", "global batch size 32")
        )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("[INFO] epoch=0/micro_step=40/global_step=10, RunningAvgSamplesPerSec=1.2", "DeepSpeed"),
        ("{'train_runtime': 123.4, 'train_samples_per_second': 5.6}", "Hugging Face's Trainer"),
        ("Epoch 0:  1%|  | 7/772 [9:07:58<878:01, 41.36s/it, loss=3.1]", "Lightning"),
        (" 5%|#  | 50/1000 [01:40<31:40,  2.00it/s]", "progress bar"),
        ("\t Train time/batch: 10", "Composer"),
        ("iteration: 1 / 15 | elapsed_time_per_iteration_ms: 4.71K | lm_loss: 5.32", "nanotron"),
    ],
)
def test_a_form_that_is_not_read_is_refused_by_its_name(text: str, name: str) -> None:
    with pytest.raises(ValueError, match=rf"a\.log is of .*{name}.* it is not read: give pk\.tune"):
        parse_training_log(text, file="a.log")


def test_what_is_no_log_of_training_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("see https://example.org/step: 3 tps\n")
    with pytest.raises(
        ValueError, match="holds no step of a training run; read are the lines of Meg"
    ):
        pk.read_training_log(path)
    with pytest.raises(ValueError, match="a folder; read_training_logs takes folders"):
        pk.read_training_log(tmp_path)
    with pytest.raises(ValueError, match="no file holds steps of training"):
        pk.read_training_logs(tmp_path)


def test_a_last_line_that_is_cut_off_leaves_the_steps_before() -> None:
    """A job that is killed may print half a line: without its batch the other steps count."""
    text = write(IN_SECONDS)
    cut = text[: text.rindex("| global batch size")]
    log = parse_training_log(cut)
    assert log.summary == parse_training_log(text).summary
    assert log.run.model["batch"] == 64


@pytest.mark.parametrize("number", ["1e999", "9" * 400, "1e308", "1e-320"])
def test_numbers_that_cannot_be_are_not_taken(number: str) -> None:
    """A damaged batch leaves the others, and a damaged time its step."""
    lines = write(IN_SECONDS).split("\n")
    lines[-1] = lines[-1].replace("size:  64", f"size: {number}")
    log = parse_training_log("\n".join(lines))
    assert (log.summary.batch, len(log.steps)) == (64, 30)
    lines[-1] = lines[-1].replace("(s): 0.50", f"(s): {number}")
    log = parse_training_log("\n".join(lines))
    assert (log.summary.batch, len(log.steps)) == (64, 29)
    assert log.seconds == pytest.approx(0.5)


def test_files_packed_and_folders(tmp_path: Path) -> None:
    text = "\ufeff" + ARGUMENTS + write("\x1b[34m" + PLAIN_2025 + "\x1b[0m")
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "b.out").write_text(write(NEMO_2).replace("\n", "\r"))
    (tmp_path / "c.txt").write_text("job 7 did not start")
    with pytest.warns(TrainingLogWarning, match=r"c\.txt holds no step.* the file is not used"):
        logs = pk.read_training_logs(tmp_path)
    assert [log.name for log in logs] == ["a.log.gz", "b.out"]
    assert [len(log.steps) for log in logs] == [30, 30]
    (tmp_path / "d.log").write_bytes(write(PLAIN_2025).encode("utf-16-le"))  # without its mark
    assert len(pk.read_training_log(tmp_path / "d.log").steps) == 30
    assert isinstance(logs[0].table(), pl.DataFrame) and "500 ms an iteration" in repr(logs[0])


def test_what_is_missing_is_named_and_given() -> None:
    log = parse_training_log(write(PLAIN_2020), file="old.log")
    with pytest.raises(
        ValueError,
        match=r"does not state sequence, layers, .*; give them, log\.workload\(sequence=",
    ):
        log.workload()
    with pytest.raises(ValueError, match=r"does not state how many GPUs .* log\.strategy\(dp=8\)"):
        log.strategy()
    with pytest.raises(ValueError, match="field of a Transformer is 'layer'"):
        log.workload(layer=2)
    model = log.workload("llama-3-8b", sequence=4096)
    assert (model.batch, model.sequence, model.hidden) == (64, 4096, 4096)
    assert log.strategy(dp=8, tp=2).ranks == 16
    assert log.as_run(model, dp=8)["dp"] == 8


def test_a_wrong_preset_is_refused_where_the_log_states_all() -> None:
    log = parse_training_log(ARGUMENTS + write(PLAIN_2025))
    assert log.workload("llama-3-8b") == log.workload()
    for wrong in ("llama3-8b", ""):
        with pytest.raises(ValueError, match=f"preset is '{wrong}'"):
            log.workload(wrong)


def test_a_model_that_is_not_read_is_told() -> None:
    start = "+ torchrun pretrain_t5.py --fp16\n"
    with pytest.warns(TrainingLogWarning, match="the model is t5, which is not read"):
        log = parse_training_log(start + ARGUMENTS + write(PLAIN_2025))
    assert "layers" not in log.run.model and log.strategy().tp == 4


def test_logs_are_runs_for_tune() -> None:
    settings = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2))
    heads = []
    for tp, micro_batch in settings:
        head = change(
            ARGUMENTS,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=1,
            micro_batch_size=micro_batch,
            num_layers=4,
            recompute_granularity="None",
            recompute_method="None",
            tp_comm_overlap="False",
        )
        heads.append(head)
    first = [parse_training_log(head + write(PLAIN_2025)) for head in heads]
    model = first[0].workload()
    strategies = pk.Strategy.stack([log.strategy() for log in first])
    platform = pk.load_platform("a100-sxm-8x2")
    times = price_strategies(model, platform, strategies, stack="megatron-te")["time"]
    logs = []
    rows = []
    for head, time, (tp, micro_batch) in zip(heads, times, settings, strict=True):
        log = parse_training_log(head + write(PLAIN_2025, seconds=float(time)))
        row = {"seconds": log.seconds, "tp": tp, "dp": 16 // tp, "micro_batch": micro_batch}
        row |= {"zero": 1, "sequence_parallel": True, "stack": "megatron-te"}
        if tp == 1:
            del row["tp"]
        if micro_batch == 1:
            del row["micro_batch"]
        logs.append(log)
        rows.append(row)
    assert [log.as_run(model) for log in logs] == rows
    # runs as the platform predicts them, with their software, leave it as it was
    tuning = pk.tune(model, platform, [*logs[:3], *rows[3:]])
    assert tuning.table()["stack"].to_list() == ["megatron-te"] * 5
    assert tuning.scales["scale"].to_list() == pytest.approx([1.0] * len(tuning.scales), abs=0.01)
    # what a log states of its model wins over the model that is given
    smaller = pk.Transformer.preset("llama-3-8b", batch=8, sequence=8192, dtype="bf16")
    row = logs[0].as_run(smaller)
    assert (row["batch"], row["layers"]) == (64, 4)
