"""What captures replace in PyTorch is there, and takes the arguments that the replacements take.

With a new version of PyTorch these tests come first: each failure names a patch of
`perfkit.recording` to look at.
"""

import inspect
import warnings
from importlib import import_module

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from perfkit.recording import patches, precision, sandbox, scripts_answers, steps  # noqa: E402
from perfkit.recording.patches import CHECKED, Patch, apply_patches  # noqa: E402
from perfkit.recording.recorder import Recorder  # noqa: E402

#: Arguments of what is replaced, with = for a default; of a class, those of its constructor. Further
#: arguments may follow where dots stand: the replacement hands them on or ignores them. The kind of
#: object stands for what shows no arguments.
EXPECTED = {
    "torch._subclasses.fake_tensor.FakeTensor.data_ptr": "method_descriptor",
    "torch._subclasses.fake_tensor.FakeTensorMode.may_turn_const": "(self, t)",
    "torch._meta_registrations._meta_grouped_mm_common": "(mat_a, mat_b, ...)",
    "torch.nn.modules.module.Module._apply": "(self, fn, recurse=)",
    "torch.nn.init._no_grad_trunc_normal_": "(tensor, ...)",
    "torch.nn.attention.bias.CausalBias.__new__": "...",
    "torch._dynamo.eval_frame.set_fullgraph_compiled_frame_count": "builtin_function_or_method",
    "torch.nn.parameter.UninitializedParameter.__new__": "(cls, requires_grad=, device=, dtype=)",
    "torch.nn.parameter.UninitializedBuffer.__new__": "(cls, requires_grad=, device=, dtype=, persistent=)",
    "torch.storage.UntypedStorage.resize_": "method_descriptor",
    "torch.set_default_device": "(device)",
    "torch.utils._foreach_utils._foreach_supported_types": "list",
    "torch.utils._foreach_utils._get_foreach_kernels_supported_devices": "()",
    "torch.optim.optimizer._foreach_supported_types": "list",
    "torch.optim.optimizer._get_foreach_kernels_supported_devices": "()",
    "threading.Thread.start": "(self)",
    "threading.excepthook": "...",
    "subprocess.Popen.__init__": "(self, args, ...)",
    "multiprocessing.process.BaseProcess.start": "(self)",
    "sys.excepthook": "...",
    "torch.distributed.device_mesh.DeviceMesh.__init__": "(self, device_type, ...)",
    "torch.distributed.distributed_c10d.Work.wait": "(self, timeout=)",
    "torch._C._distributed_c10d.Reducer._rebuild_buckets": "(self)",
    "torch.nn.parallel.distributed._verify_param_shape_across_processes": "(process_group, tensors, logger=)",
    "torch.nn.parallel.distributed._sync_module_states": "(module, process_group, broadcast_bucket_size, src, params_and_buffers_to_ignore, broadcast_buffers=)",
    "torch._subclasses.fake_tensor.FakeTensor.__new__": "...",
    "torch._subclasses.fake_tensor.FakeTensor.device": "property",
    "torch.cuda.Stream": "(...)",
    "torch.cpu.Stream": "(...)",
    "torch.cuda.Event": "(...)",
    "torch.cpu.Event": "(...)",
    "torch.cuda.stream": "(stream)",
    "torch.cpu.stream": "(stream)",
    "torch.cuda.synchronize": "(device=)",
    "torch.cpu.synchronize": "(device=)",
    "torch.cuda.current_stream": "(device=)",
    "torch.cpu.current_stream": "(device=)",
    "torch.cuda.default_stream": "(device=)",
    "torch.cuda.CUDAGraph": "(...)",
    "torch.cuda.graph_pool_handle": "(...)",
    "torch.cuda.make_graphed_callables": "(callables, ...)",
    "torch.optim.optimizer._get_capturable_supported_devices": "(supports_xla=)",
    "torch.nn.parallel.distributed.DistributedDataParallel.__init__": "(self, module, device_ids=, output_device=, ...)",
    "torch.amp.autocast_mode.autocast.__init__": "(self, ...)",
    "torch.amp.autocast_mode.autocast.__enter__": "(self)",
    "torch.is_autocast_enabled": "builtin_function_or_method",
    "torch.set_autocast_enabled": "builtin_function_or_method",
    "torch.get_autocast_dtype": "builtin_function_or_method",
    "torch.set_autocast_dtype": "builtin_function_or_method",
    "torch.clear_autocast_cache": "builtin_function_or_method",
    "torch.cuda.is_bf16_supported": "(including_emulation=)",
    "torch.cuda.amp.common.amp_definitely_not_available": "()",
    "torch.cuda.nvtx._nvtx": "...",
    "torch.cuda.is_available": "()",
    "torch.cuda.device_count": "()",
    "torch.cuda.get_device_name": "(device=)",
    "torch.cuda.get_device_capability": "(device=)",
    "torch.cuda.get_device_properties": "(device=)",
    "torch.cuda.mem_get_info": "(device=)",
    "torch.accelerator.is_available": "()",
    "torch.accelerator.device_count": "()",
    "torch.accelerator.current_accelerator": "(check_available=)",
    "torch.cuda.get_rng_state": "(device=)",
    "torch.cuda.set_rng_state": "(new_state, device=)",
    "torch.cuda.get_rng_state_all": "()",
    "torch.cuda.set_rng_state_all": "(new_states)",
    "torch.cuda.initial_seed": "()",
    "torch.cuda.current_device": "()",
    "torch.cuda.set_device": "(device)",
    "torch.cuda._exchange_device": "(device)",
    "torch.cuda._maybe_exchange_device": "(device)",
    "torch.cuda.reset_peak_memory_stats": "(device=)",
    "torch.Generator": "...",
    "torch.autograd._engine_run_backward": "(t_outputs, *args, **kwargs)",
    "torch.nn.parameter.UninitializedTensorMixin.materialize": "(self, shape, device=, dtype=)",
    "torch.utils.data.dataloader.DataLoader.__iter__": "(self)",
    "torch._dynamo.eval_frame._callback_from_stance": "(callback)",
    "torch.nn.modules.module._has_any_global_hook": "()",
    "torch.autograd.graph.saved_tensors_hooks.__init__": "(self, pack_hook, unpack_hook)",
    "torch.autograd.graph.save_on_cpu.__init__": "(self, pin_memory=, device_type=)",
    "torch.nn.attention.flex_attention._validate_device": "(query, key, value)",
    "torch.autograd.grad_mode.inference_mode.__enter__": "(self)",
    "torch.autograd.grad_mode.inference_mode.__exit__": "(self, exc_type, exc_value, traceback)",
    "torch.nn.modules.batchnorm.SyncBatchNorm.forward": "(self, input)",
    "torch.nn.parallel.distributed.DistributedDataParallel._passing_sync_batchnorm_handle": "(self, module)",
    "torch.is_inference_mode_enabled": "builtin_function_or_method",
    "torch.cuda.set_stream": "(stream)",
    "torch.cuda.is_initialized": "()",
    "torch.cuda.get_arch_list": "()",
    "torch.cuda.can_device_access_peer": "(device, peer_device)",
    "torch.cuda.is_current_stream_capturing": "()",
    "torch.backends.cuda.is_built": "()",
    "torch.distributed.is_nccl_available": "()",
    "torch.cuda.memory_snapshot": "(mempool_id=, include_traces=)",
    "torch.cuda.memory_summary": "(device=, abbreviated=)",
    "torch.cuda.utilization": "(device=)",
    "torch.cuda.memory_allocated": "(device=)",
    "torch.cuda.max_memory_allocated": "(device=)",
    "torch.cuda.memory_reserved": "(device=)",
    "torch.cuda.max_memory_reserved": "(device=)",
    "torch.Tensor.record_stream": "method_descriptor",
    "torch.accelerator.current_stream": "(device=)",
    "torch.accelerator.set_stream": "(stream)",
    "torch.cuda.temperature": "(device=)",
    "torch.cuda.power_draw": "(device=)",
    "torch.cuda.clock_rate": "(device=)",
    "torch.cuda.init": "()",
    "torch.cuda.ipc_collect": "()",
    "torch.cuda.set_per_process_memory_fraction": "(fraction, device=)",
    "torch.cuda.reset_accumulated_memory_stats": "(device=)",
    "torch.cuda.reset_max_memory_allocated": "(device=)",
    "torch.cuda.reset_max_memory_cached": "(device=)",
    "torch.cuda.memory._record_memory_history": "(enabled=, ...)",
    "torch.cuda.memory._dump_snapshot": "(filename=, ...)",
    "torch.cuda.profiler.start": "()",
    "torch.cuda.profiler.stop": "()",
    "torch.accelerator.synchronize": "(device=)",
    "torch.accelerator.empty_cache": "()",
    "torch.accelerator.reset_peak_memory_stats": "(device_index=)",
    "torch.accelerator.reset_accumulated_memory_stats": "(device_index=)",
    "torch.accelerator.memory_allocated": "(device_index=)",
    "torch.accelerator.max_memory_allocated": "(device_index=)",
    "torch.accelerator.memory_reserved": "(device_index=)",
    "torch.accelerator.max_memory_reserved": "(device_index=)",
    "torch.accelerator.current_device_index": "()",
    "torch.accelerator.current_device_idx": "()",
    "torch.accelerator.set_device_index": "(device)",
    "torch.accelerator.set_device_idx": "(device)",
    "torch.get_default_device": "()",
    "torch.distributed.init_process_group": "(backend=, init_method=, timeout=, world_size=, rank=, store=, group_name=, pg_options=, device_id=, _ranks=)",
    "torch.distributed.destroy_process_group": "(group=)",
    "torch.distributed.get_backend": "(group=)",
    "torch.distributed.all_gather_object": "(object_list, obj, group=)",
    "torch.distributed.gather_object": "(obj, object_gather_list=, dst=, group=, group_dst=)",
    "torch.distributed.broadcast_object_list": "(object_list, src=, group=, device=, group_src=)",
    "torch.distributed.scatter_object_list": "(scatter_object_output_list, scatter_object_input_list=, src=, group=, group_src=)",
    "torch.multiprocessing.spawn": "(fn, args=, nprocs=, join=, daemon=, start_method=)",
    "torch.save": "(obj, f, ...)",
    "torch.distributed.checkpoint.save": "(state_dict, ...)",
    "torch.distributed.checkpoint.async_save": "(state_dict, ...)",
    "safetensors.torch.save_file": "(tensors, filename, metadata=)",
    "safetensors.torch.save_model": "(model, filename, metadata=, force_contiguous=)",
    "numpy.save": "(file, arr, allow_pickle=)",
    "torch.load": "(f, map_location=, ...)",
    "torch.storage.UntypedStorage.data_ptr": "method_descriptor",
    "torch.cuda.random.get_rng_state": "(device=)",
    "torch.cuda.random.set_rng_state": "(new_state, device=)",
    "torch.cuda.random.get_rng_state_all": "()",
    "torch.cuda.random.set_rng_state_all": "(new_states)",
    "torch.cuda.random.initial_seed": "()",
    "torch.set_rng_state": "(new_state)",
    "torch.random.set_rng_state": "(new_state)",
}
#: Private parts of PyTorch that captures use and do not replace.
USED = [
    "torch._subclasses.fake_tensor.in_kernel_invocation_manager",
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch.utils.data.DataLoader._get_iterator",
    "torch.distributed.distributed_c10d._world",
    "torch.distributed.distributed_c10d._update_default_pg",
    "torch.distributed.distributed_c10d._resolve_process_group",
    "torch.testing._internal.distributed.fake_pg.FakeStore",
    "torch._C._distributed_c10d._unregister_process_group",
    "torch._C._distributed_c10d._create_work_from_future",
    "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.Tensor._make_subclass",
    "torch.distributed.fsdp._fully_shard._fsdp_param",
    "torch._C._get_fp32_precision_getter",
    "torch._C._set_fp32_precision_setter",
    "torch._C._DisableAutocast",
    "torch._C._dispatch_get_registrations_for_dispatch_key",
    "torch._C._IncludeDispatchKeyGuard",
    "torch._C._SetExcludeDispatchKeyGuard",
    "torch._C._autograd._unsafe_set_version_counter",
    "torch._C._autograd._get_sequence_nr",
    "torch._C._current_autograd_node",
    "torch._C._current_graph_task_id",
    "torch.library._scoped_library",
    "torch.nn.attention._cur_sdpa_kernel_backends",
    "torch.distributions.Distribution._validate_args",
    "torch.utils._device.CURRENT_DEVICE",
]


def list_all_patches() -> list[Patch]:
    """All patches of a capture for a GPU."""
    recorder = Recorder(accelerator=True)
    note = recorder.values.notes.setdefault
    compiler = steps._Compiler(recorder)
    return [
        *patches.list_patches(recorder),
        *precision.list_patches(note, recorder.places),
        *steps.list_patches(recorder, steps._LazyTensors([]), compiler),
        *scripts_answers.list_patches(recorder, ranks=2, rank=0),
        *sandbox.InferenceModes().list_patches(),
    ]


def describe(value: object) -> str:
    """Arguments of a function or a class, or else the kind of an object."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return describe_by_text(value)
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    names = []
    for parameter in parameters:
        name = stars.get(parameter.kind, "") + parameter.name
        if parameter.default is not inspect.Parameter.empty:
            name += "="
        names.append(name)
    return f"({', '.join(names)})"


def describe_by_text(value: object) -> str:
    """Arguments by the first line of a docstring, as functions of C++ have it, or else the kind of an
    object."""
    line = (getattr(value, "__doc__", None) or "").split("\n")[0]
    name = getattr(value, "__name__", None)
    if name is None or not line.startswith(f"{name}(self: "):
        return type(value).__name__
    names = []
    for argument in line.split("(", 1)[1].split(") -> ")[0].split(", "):
        argument_name = argument.split(":")[0]
        names.append(argument_name + "=" if " = " in argument else argument_name)
    return f"({', '.join(names)})"


PATCHES = list_all_patches()
REPLACED = [patch for patch in PATCHES if not patch.added]


def name_patch(patch: Patch) -> str:
    """The full name of what a patch replaces."""
    return patch.path


def test_each_patch_says_why_and_for_which_versions() -> None:
    """A reason reads on after "which a capture replaces"; the installed version is in the range."""
    installed = tuple(int(part) for part in torch.__version__.split(".")[:2])
    for patch in PATCHES:
        assert patch.reason[0].islower() or patch.reason.startswith(("FSDP", "PyTorch")), patch.path
        assert not patch.reason.endswith((".", ";")), patch.path
        assert patch.versions.first <= installed <= patch.versions.last, patch.path
    assert str(CHECKED) == "2.9 to 2.14"


def test_added_attributes_are_still_missing() -> None:
    """PyTorch may bring an attribute of its own under the same name; then this one hides it."""
    added = [patch for patch in PATCHES if patch.added]
    assert [patch.name for patch in added] == ["__deepcopy__"]
    assert not hasattr(added[0].owner, "__deepcopy__")


@pytest.mark.parametrize("patch", REPLACED, ids=name_patch)
def test_what_a_patch_replaces_takes_known_arguments(patch: Patch) -> None:
    """If PyTorch moves it, or gives it other arguments, the patch may miss calls."""
    assert hasattr(patch.owner, patch.name), f"{patch.path} is gone: {patch.reason}"
    # each optimizer imports this one by name
    path = patch.path
    if patch.name == "_get_capturable_supported_devices":
        path = "torch.optim.optimizer._get_capturable_supported_devices"
    expected = EXPECTED[path]
    arguments = describe(getattr(patch.owner, patch.name))
    if expected.endswith("...)"):
        arguments = arguments[: len(expected) - len("...)")] + "...)"
    if expected != "...":
        assert arguments == expected, f"{patch.path} takes other arguments: {patch.reason}"


@pytest.mark.parametrize(
    "patch", [patch for patch in REPLACED if patch.path.startswith("torch.")], ids=name_patch
)
def test_a_replacement_takes_the_arguments_of_what_it_replaces(patch: Patch) -> None:
    """By position and by name, as a step may call it in both ways."""
    original = getattr(patch.owner, patch.name)
    if not callable(original) or not describe(original).startswith("("):
        return
    try:
        parameters = [*inspect.signature(original).parameters.values()]
    except (TypeError, ValueError):
        return  # a function of C++
    plain = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    holder = [p for p in plain if p.name in ("self", "cls")]
    others = [p for p in plain if p.name not in ("self", "cls") and p.kind != p.POSITIONAL_ONLY]
    required = [p.name for p in others if p.default is p.empty]
    signature = inspect.signature(patch.replacement)
    signature.bind(*holder, **{p.name: None for p in others})
    signature.bind(*holder, **dict.fromkeys(required))
    by_position = [p for p in others if p.kind != p.KEYWORD_ONLY]
    signature.bind(*holder, *by_position)


@pytest.mark.parametrize("path", USED)
def test_private_parts_that_captures_use_are_there(path: str) -> None:
    """Each is a module, or an attribute of one."""
    parts = path.split(".")
    found = torch
    for place, name in enumerate(parts[1:], 2):
        if not hasattr(found, name):
            import_module(".".join(parts[:place]))
        found = getattr(found, name)


def test_a_capture_says_what_pytorch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on without the patch; with it, it says nothing."""

    def make_step():
        model = nn.Linear(4, 4)
        return lambda: model(torch.ones(2, 4)).sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        complete = steps.capture(make_step)
    monkeypatch.delattr(nn.init, "_no_grad_trunc_normal_")
    with pytest.warns(UserWarning, match="has no torch.nn.init._no_grad_trunc_normal_") as caught:
        graph = steps.capture(make_step)
    assert "from 2.9 to 2.14" in str(caught[0].message)
    assert graph.labels == complete.labels
    assert not hasattr(nn.init, "_no_grad_trunc_normal_")


def test_patches_are_undone() -> None:
    """Also where an attribute is inherited, or was added."""

    class Parent:
        inherited = 1

    class Child(Parent):
        own = 2

    rows = [
        Patch(Child, "inherited", 10, "it stays 1"),
        Patch(Child, "own", 20, "it stays 2"),
        Patch(Child, "new", 30, "it is missing", added=True),
        Patch(Child, "gone", 40, "it is missing"),
    ]
    notes: list[str] = []
    with apply_patches(rows, notes.append):
        assert (Child.inherited, Child.own, Child.new) == (10, 20, 30)
        assert not hasattr(Child, "gone")
    assert (Child.inherited, Child.own, hasattr(Child, "new")) == (1, 2, False)
    assert "inherited" not in vars(Child)
    (note,) = notes
    assert "Child.gone, which a capture replaces: it is missing" in note


def test_replaced_constructors_take_names_of_arguments() -> None:
    """Streams that are named by device, hooks and meshes by name."""

    def make_step():
        model = nn.Linear(4, 4)
        hooks = torch.autograd.graph.saved_tensors_hooks

        def step():
            torch.cuda.synchronize(device=0)
            torch.cuda.current_stream(device=0).wait_stream(torch.cuda.default_stream(device=0))
            with hooks(pack_hook=lambda tensor: tensor, unpack_hook=lambda tensor: tensor):
                loss = model(torch.ones(2, 4)).sum()
            loss.backward()

        return step

    assert len(steps.capture(make_step, device="cuda"))


def test_autocast_takes_names_of_arguments() -> None:
    def make_step():
        linear = nn.Linear(8, 8)

        def step():
            was = torch.is_autocast_enabled(device_type="cuda")
            dtype = torch.get_autocast_dtype(device_type="cuda")
            torch.set_autocast_dtype(device_type="cuda", dtype=torch.bfloat16)
            torch.set_autocast_enabled(device_type="cuda", enabled=True)
            linear(torch.ones(4, 8)).sum().backward()
            torch.set_autocast_enabled("cuda", was)
            torch.set_autocast_dtype("cuda", dtype)

        return step

    graph = steps.capture(make_step, device="cuda")
    products = [label for label in graph.labels if label.kind == "gemm"]
    assert products
    assert "bf16" in graph.dtypes


def test_a_mesh_takes_its_ranks_by_name() -> None:
    """As in DeviceMesh("cuda", mesh=[0, 1])."""
    from torch.distributed.device_mesh import DeviceMesh

    def make_step():
        mesh = DeviceMesh("cuda", mesh=[0, 1])
        weight = torch.ones(mesh.size(), 4, requires_grad=True)
        return lambda: weight.sum().backward()

    with pytest.warns(UserWarning, match="no collective"):
        graph = steps.capture(make_step, ranks=2, device="cuda")
    assert len(graph)
