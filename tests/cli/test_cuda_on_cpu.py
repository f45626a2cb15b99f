"""The CPU in place of a GPU: scripts for CUDA run, and torch is restored afterwards."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from helpers import together
from optimizers import backward
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ampatch import amp
from ampatch.cuda_on_cpu import stand_in
from ampatch.cuda_on_cpu.torch_cuda import STAND_INS
from ampatch.errors import UsageError

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _stood_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    ledger = stand_in()
    yield
    amp.deinitialize()
    ledger.undo()


class TestStandIn:
    def test_it_is_installed_once_until_it_is_undone(self) -> None:
        first = stand_in()
        patches = first.patches
        assert stand_in() is first
        assert first.patches == patches
        first.undo()
        registered = list(torch.serialization._package_registry)
        second = stand_in()
        assert second is not first
        second.undo()
        assert torch.serialization._package_registry == registered

    def test_undone_twice_it_leaves_torch_as_it_was(self) -> None:
        ledger = stand_in()
        ledger.undo()
        assert ledger.undo() == []
        assert not torch.zeros(1).is_cuda
        assert torch.cuda.memory_allocated is torch.cuda.memory.memory_allocated
        assert "cuda" not in vars(Tensor)
        assert torch.cuda.FloatTensor is not torch.FloatTensor
        assert isinstance(torch.default_generator, torch.Generator)
        assert type(torch.Generator()) is torch.Generator

    def test_a_name_that_a_module_bound_earlier_is_replaced_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stand_in().undo()
        module = sys.modules[__name__]
        monkeypatch.setattr(module, "bound_earlier", torch.zeros, raising=False)
        stand_in()
        assert module.bound_earlier(2, device="cuda").device == CPU
        stand_in().undo()
        assert module.bound_earlier is torch.zeros

    def test_a_replaced_function_is_pickled_by_name(self) -> None:
        assert pickle.loads(pickle.dumps(torch.zeros)) is torch.zeros
        assert pickle.loads(pickle.dumps(Tensor.to)) is Tensor.to


DEVICES: list[Any] = ["cuda", "cuda:1", torch.device("cuda"), torch.device("cuda:0"), torch.device("cuda", 1), 0, 3]

# Functions that take a device, by their arguments before it.
BY_ARGUMENTS: list[tuple[Any, tuple[str, ...], tuple[Any, ...]]] = [
    (torch, ("tensor", "as_tensor", "asarray"), ([1.0],)),
    (torch, ("zeros", "ones", "rand", "randn"), (2,)),
    (torch, ("arange", "eye", "randperm", "hann_window"), (3,)),
    (torch, ("linspace", "logspace"), (0, 1, 3)),
    (torch, ("zeros_like", "randn_like"), (torch.ones(2),)),
    (torch, ("full",), ((2,), 1.0)),
    (torch, ("full_like",), (torch.ones(2), 2.0)),
    (torch, ("scalar_tensor",), (1.0,)),
    (torch, ("empty_strided",), ((2,), (1,))),
    (torch, ("randint",), (3, (2,))),
    (torch, ("tril_indices",), (3, 3)),
    (torch, ("sparse_coo_tensor",), ([[0]], [1.0], (2,))),
    (torch, ("normal",), (0.0, 1.0, (2,))),
    (torch.fft, ("fftfreq",), (3,)),
    (Tensor, ("new_zeros",), (torch.ones(2), 2)),
    (Tensor, ("new_tensor",), (torch.ones(2), [1.0])),
    (Tensor, ("new_full",), (torch.ones(2), (2,), 1.0)),
    (nn, ("Linear", "LSTM", "Embedding"), (2, 2)),
]
FACTORIES: dict[str, Callable[[Any], Any]] = {
    **{
        name: lambda device, of=of, name=name, arguments=arguments: getattr(of, name)(*arguments, device=device)
        for of, names, arguments in BY_ARGUMENTS
        for name in names
    },
    "empty": lambda device: torch.empty(2, device=device, pin_memory=True),
    "nested_tensor": lambda device: torch.nested.nested_tensor([[1.0]], layout=torch.jagged, device=device),
    "as_nested_tensor": lambda device: torch.nested.as_nested_tensor(
        [torch.ones(2)], layout=torch.jagged, device=device
    ),
    "to": lambda device: torch.ones(2).to(device),
    "to, by keyword": lambda device: torch.ones(2).to(device=device, non_blocking=True),
    "cuda": lambda device: torch.ones(2).cuda(device, non_blocking=True),
    "Module.to": lambda device: nn.Linear(2, 2).to(device),
    "Module.cuda": lambda device: nn.Linear(2, 2).cuda(device),
    "Module.to_empty": lambda device: nn.Linear(2, 2).to_empty(device=device),
}


def device_of(made: Tensor | nn.Module) -> torch.device:
    return next(made.parameters()).device if isinstance(made, nn.Module) else made.device


class TestDevices:
    # torch says once in a process that it does not check what sparse tensors are made of.
    @pytest.mark.filterwarnings("ignore:Sparse invariant checks")
    @pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
    def test_a_tensor_made_for_any_gpu_lies_on_the_cpu(self, make: Callable[[Any], Any]) -> None:
        assert {device_of(make(device)) for device in DEVICES} == {CPU}

    @pytest.mark.parametrize("name", ["zeros", "zeros_like", "new_zeros", "Linear", "to", "Module.to"])
    @pytest.mark.parametrize("device", ["meta", torch.device("meta")], ids=repr)
    def test_other_devices_are_left_alone(self, name: str, device: Any) -> None:
        assert device_of(FACTORIES[name](device)).type == "meta"

    def test_a_device_that_does_not_exist_is_still_an_error(self) -> None:
        with pytest.raises(RuntimeError, match="cudaa"):
            torch.zeros(1, device="cudaa")

    def test_a_move_goes_with_a_type_and_a_layout(self) -> None:
        assert torch.ones(2).to("cuda", torch.float16, non_blocking=True).dtype == torch.float16
        assert torch.ones(2).to(torch.ones(1, dtype=torch.float64).cuda()).dtype == torch.float64
        assert torch.ones(2).to(torch.float64).dtype == torch.float64
        images = torch.ones(1, 2, 3, 3).cuda(memory_format=torch.channels_last)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert nn.Linear(1, 1).to("cuda", torch.bfloat16).weight.dtype == torch.bfloat16

    @pytest.mark.parametrize("name", ["to", "cuda"])
    def test_lazy_modules_move_before_they_are_initialised(self, name: str) -> None:
        for device in ("cuda:0", torch.device("cuda")):
            module = getattr(nn.LazyLinear(2), name)(device)
            assert module(torch.ones(1, 3, device="cuda")).shape == (1, 2)

    def test_a_move_copies_nothing(self) -> None:
        x, model = torch.ones(2), nn.Linear(2, 2)
        weight = model.weight
        assert x.cuda() is x
        assert x.to(x.get_device()) is x
        assert x.pin_memory() is x
        assert model.cuda().weight is weight
        assert isinstance(weight, nn.Parameter)

    def test_a_block_on_a_gpu_makes_tensors_on_the_cpu(self) -> None:
        with torch.device("cuda"):
            assert torch.zeros(2).device == CPU
            assert nn.Linear(2, 2).weight.device == CPU
        with torch.device("meta"):
            assert torch.zeros(2).is_meta

    def test_the_default_device_may_be_a_gpu(self) -> None:
        torch.set_default_device("cuda:0")
        try:
            assert torch.rand(2).device == CPU
        finally:
            torch.set_default_device(None)

    @pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")  # deprecated, and yesterday's scripts use it
    @pytest.mark.parametrize("kind", ["torch.cuda.DoubleTensor", "class"])
    def test_the_default_tensor_type_may_be_of_a_gpu(self, kind: str) -> None:
        torch.set_default_tensor_type(torch.cuda.DoubleTensor if kind == "class" else kind)
        try:
            assert torch.zeros(1).dtype == torch.float64
        finally:
            torch.set_default_tensor_type("torch.cuda.FloatTensor")
        assert torch.zeros(1).dtype == torch.float32

    def test_a_generator_for_a_gpu_draws_on_the_cpu(self) -> None:
        generator = torch.Generator(device="cuda").manual_seed(3)
        assert isinstance(generator, torch.Generator)
        assert isinstance(torch.default_generator, torch.Generator)
        drawn = torch.randn(3, generator=generator, device="cuda")
        assert torch.equal(drawn, torch.randn(3, generator=torch.Generator().manual_seed(3)))


class TestQuestionsForTheDevice:
    def test_deprecated_questions_are_answered_with_a_gpu(self) -> None:
        x = torch.zeros(2)
        assert x.is_cuda
        assert x.get_device() == torch.cuda.current_device()
        assert torch.zeros(1, device=x.get_device()).device == CPU
        assert x.type() == "torch.cuda.FloatTensor"
        assert x.half().type() == "torch.cuda.HalfTensor"
        assert x.to_sparse().type() == "torch.cuda.sparse.FloatTensor"

    def test_the_device_attribute_is_the_cpu(self) -> None:
        assert torch.zeros(2).cuda().device == CPU
        assert torch.zeros(2, device=torch.ones(1).cuda().device).device == CPU

    def test_tensors_on_the_meta_device_are_on_no_gpu(self) -> None:
        x = torch.zeros(2, device="meta")
        assert not x.is_cuda
        assert x.type() == "torch.FloatTensor" or "meta" in x.type()

    def test_no_library_is_given_an_address_for_a_gpu(self) -> None:
        assert not hasattr(torch.zeros(2), "__cuda_array_interface__")
        assert torch.zeros(2).numpy().tolist() == [0, 0]

    def test_tensors_are_copied_pickled_and_printed_as_before(self) -> None:
        x = torch.ones(2).cuda()
        assert torch.equal(copy.deepcopy(x), x)
        assert torch.equal(pickle.loads(pickle.dumps(x)), x)
        assert repr(x) == "tensor([1., 1.])"
        assert "numpy" in dir(x)


class TestTensorTypes:
    def test_torch_cuda_types_make_tensors(self) -> None:
        assert torch.cuda.IntTensor([0]).tolist() == [0]
        assert torch.cuda.FloatTensor([1.5]).dtype == torch.float32
        assert torch.cuda.HalfTensor(2, 3).shape == (2, 3)
        assert torch.cuda.LongTensor([1]).dtype == torch.int64
        assert torch.cuda.BoolTensor([True]).dtype == torch.bool

    def test_tensors_and_modules_are_converted_to_torch_cuda_types(self) -> None:
        x = torch.ones(2)
        assert x.type("torch.cuda.HalfTensor").dtype == torch.float16
        assert x.type(torch.cuda.DoubleTensor).dtype == torch.float64
        assert x.type(torch.bfloat16).dtype == torch.bfloat16
        assert x.type(torch.ones(1).half().type()).dtype == torch.float16
        assert nn.Linear(1, 1).type(torch.cuda.HalfTensor).weight.dtype == torch.float16

    def test_tensors_are_instances_of_torch_cuda_types(self) -> None:
        assert isinstance(torch.ones(1), torch.cuda.FloatTensor)
        assert not isinstance(torch.ones(1), torch.cuda.HalfTensor)

    @pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
    def test_storages_move_without_a_copy(self) -> None:
        assert torch.cuda.FloatStorage is torch.FloatStorage
        storage = torch.ones(2).untyped_storage()
        assert storage.cuda() is storage
        assert storage.to(device="cuda").device == CPU
        assert storage.pin_memory().data_ptr() == storage.data_ptr()
        assert torch.FloatStorage([1.0]).cuda(0).tolist() == [1.0]


class TestCheckpoints:
    @pytest.fixture
    def from_gpu(self) -> io.BytesIO:
        """Returns a checkpoint as a machine with GPUs saves it."""

        def tag(storage: Any) -> str:
            return "cuda:1"

        file = io.BytesIO()
        torch.serialization.register_package(-1, tag, lambda storage, location: None)
        torch.save({"w": torch.ones(2)}, file)
        registry = torch.serialization._package_registry
        registry[:] = [entry for entry in registry if entry[1] is not tag]
        file.seek(0)
        return file

    @pytest.mark.parametrize(
        "where",
        [
            *(None, "cuda", "cuda:0", torch.device("cuda:0"), "cpu", {"cuda:1": "cuda:0"}, {"cuda:1": "cpu"}),
            lambda storage, location: storage.cuda(0),
            lambda storage, location: storage,
        ],
        ids=lambda where: "function" if callable(where) else str(where),
    )
    def test_checkpoints_of_gpus_load_with_any_map_location(self, from_gpu: io.BytesIO, where: Any) -> None:
        loaded = torch.load(from_gpu, map_location=where)["w"]
        assert loaded.device == CPU
        assert loaded.tolist() == [1, 1]

    @pytest.mark.skipif(torch.cuda.is_available(), reason="torch can load it")
    def test_the_sample_checkpoint_needs_a_gpu_without_the_stand_in(self, from_gpu: io.BytesIO) -> None:
        stand_in().undo()
        with pytest.raises(RuntimeError, match="CUDA"):
            torch.load(from_gpu)

    def test_checkpoints_saved_here_load_on_the_cpu(self) -> None:
        file = io.BytesIO()
        torch.save(nn.Linear(1, 1).cuda().state_dict(), file)
        stand_in().undo()
        file.seek(0)
        assert torch.load(file)["weight"].device == CPU
        assert b"cuda" not in file.getvalue()


class TestTorchCuda:
    def test_one_gpu_is_there(self) -> None:
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1

    def test_torchrun_gives_each_process_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert torch.cuda.device_count() == 4
        assert len(torch.cuda.get_rng_state_all()) == 4

    def test_each_thread_has_its_own_current_device(self) -> None:
        torch.cuda.set_device("cuda:2")
        try:
            assert torch.cuda.current_device() == 2
            assert torch.zeros(1).get_device() == 2
            with torch.cuda.device(1):
                assert torch.cuda.current_device() == 1
                with torch.cuda.device_of(torch.zeros(1)), torch.cuda.device(None):
                    assert torch.cuda.current_device() == 1
            assert torch.cuda.current_device() == 2
            torch.cuda.set_device(torch.zeros(1).device)
            assert torch.cuda.current_device() == 2
            seen: list[int] = []
            together([lambda: seen.append(torch.cuda.current_device())])
            assert seen == [0]
        finally:
            torch.cuda.set_device(0)

    def test_statistics_of_memory_are_zero(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.empty_cache()
        torch.cuda.ipc_collect()
        assert torch.cuda.max_memory_allocated("cuda:0") / 1024**2 == 0
        assert torch.cuda.memory_reserved() == torch.cuda.memory.memory_allocated(0) == 0
        assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
        assert "no figures" in torch.cuda.memory_summary()
        free, total = torch.cuda.mem_get_info()
        assert 0 < free <= total == torch.cuda.get_device_properties(0).total_memory

    def test_the_gpu_has_a_name_and_properties(self) -> None:
        assert "CPU" in torch.cuda.get_device_name(0)
        assert torch.cuda.get_device_capability() >= (7, 0)
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        assert (properties.major, properties.minor) == torch.cuda.get_device_capability()
        assert properties.name == torch.cuda.get_device_name()
        assert torch.cuda.is_bf16_supported()
        assert torch.cuda.get_device_properties(device="cuda:0").name == torch.cuda.get_device_name(device=0)
        assert torch.cuda.get_arch_list() == []
        assert torch.cuda.get_gencode_flags() == ""

    def test_the_gpus_generator_is_that_of_the_cpu(self) -> None:
        torch.cuda.manual_seed_all(5)
        drawn = torch.rand(2, device="cuda")
        torch.manual_seed(5)
        assert torch.equal(torch.rand(2), drawn)
        state = torch.cuda.get_rng_state()
        drawn = torch.rand(2, device="cuda")
        torch.cuda.set_rng_state_all([state])
        assert torch.equal(torch.rand(2, device="cuda"), drawn)
        torch.cuda.set_rng_state(new_state=state, device=0)
        assert torch.equal(torch.rand(2, generator=torch.cuda.default_generators[0]), drawn)
        torch.cuda.seed_all()
        assert torch.cuda.initial_seed() == torch.initial_seed()

    def test_a_real_gpu_generators_state_is_refused(self) -> None:
        with pytest.raises(UsageError, match=r"16 bytes.*resuming"):
            torch.cuda.set_rng_state(torch.zeros(16, dtype=torch.uint8))

    def test_fork_rng_restores_the_generator(self) -> None:
        torch.manual_seed(1)
        expected = torch.rand(2)
        torch.manual_seed(1)
        with torch.random.fork_rng():
            torch.rand(5, device="cuda")
        assert torch.equal(torch.rand(2), expected)

    def test_cudnn_flags_nvtx_and_the_profiler_are_accepted(self) -> None:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True):
            assert torch.backends.cudnn.enabled
        assert torch.cuda.nvtx.range_push("forward") == 0
        torch.cuda.nvtx.mark("here")
        torch.cuda.nvtx.range_pop()
        with torch.cuda.nvtx.range("block"), torch.cuda.profiler.profile():
            torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        torch.cuda.profiler.stop()

    @pytest.mark.parametrize(
        "name", ["CUDAGraph", "make_graphed_callables", "graph_pool_handle", "caching_allocator_alloc"]
    )
    def test_functions_without_a_stand_in_are_refused_by_name(self, name: str) -> None:
        with pytest.raises(UsageError, match=rf"torch\.cuda\.{name} was called.*machine with a GPU"):
            getattr(torch.cuda, name)()

    def test_data_parallel_internals_are_refused(self) -> None:
        with pytest.raises(UsageError, match=r"torch\.cuda\.comm\.scatter"):
            nn.parallel.scatter(torch.ones(2), [0, 1])
        with pytest.raises(UsageError, match=r"torch\.cuda\.nccl\.unique_id"):
            torch.cuda.nccl.unique_id()

    def test_versions_and_utilization_are_answered(self) -> None:
        assert torch.cuda.nccl.version() == (0, 0, 0)
        assert torch.cuda.utilization() == torch.cuda.temperature() == 0
        torch.cuda.memory._record_memory_history()

    @pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adadelta])
    def test_in_a_cuda_build_cpp_code_sees_no_accelerator(
        self, kind: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # What C++ answers in such a build, whether there is a GPU or not.
        stand_in().undo()
        monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch._C, "_get_accelerator", lambda *_: torch.device("cuda"))
        with contextlib.closing(contextlib.ExitStack()) as undoing:
            undoing.callback(stand_in().undo)
            assert torch.accelerator.current_accelerator() is None
            parameter = nn.Parameter(torch.ones(2).cuda())
            parameter.sum().backward()
            kind([parameter], lr=0.5).step()
            assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
        monkeypatch.undo()

    def test_an_unpatched_request_for_a_gpu_is_one_clear_error(self) -> None:
        with pytest.raises(UsageError, match="device='cpu'"):
            torch.UntypedStorage(3, device="cuda")

    def test_every_function_of_torch_cuda_is_replaced(self) -> None:
        functions = {name for name in torch.cuda.__all__ if inspect.isfunction(getattr(torch.cuda, name))}
        kept = {name for name in functions if getattr(torch.cuda, name).__module__.startswith("torch")}
        assert kept == {"get_gencode_flags", "is_initialized"}

    def test_every_name_in_the_table_is_one_of_torch_cuda(self) -> None:
        assert [name for name in STAND_INS if not hasattr(torch.cuda, name)] == []


class TestStreams:
    def test_work_in_another_stream_is_done_in_order(self) -> None:
        stream = torch.cuda.Stream(priority=-1)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            assert torch.cuda.current_stream() is stream
            x = torch.ones(2, device="cuda") * 2
            with torch.cuda.stream(torch.cuda.default_stream()), torch.cuda.stream(None):
                assert torch.cuda.current_stream() is torch.cuda.default_stream()
            assert torch.cuda.current_stream() is stream
        assert torch.cuda.current_stream() is torch.cuda.default_stream()
        torch.cuda.current_stream().wait_stream(stream)
        x.record_stream(stream)
        stream.wait_event(stream.record_event())
        stream.synchronize()
        assert stream.query()
        assert x.tolist() == [2, 2]
        assert isinstance(stream, torch.cuda.Stream)
        torch.cuda.set_stream(stream)
        assert torch.cuda.current_stream() is stream
        torch.cuda.set_stream(torch.cuda.default_stream())

    def test_events_measure_the_cpus_time_in_milliseconds(self) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        time.sleep(0.01)
        end.record(torch.cuda.current_stream())
        end.synchronize()
        assert end.query()
        assert start.elapsed_time(end) >= 10
        with pytest.raises(UsageError, match="record"):
            torch.cuda.Event().elapsed_time(torch.cuda.Event())


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[Tensor], None]) -> float:
    """Returns the last loss over the first one."""
    torch.manual_seed(1)
    x, y = torch.randn(16, 4, device="cuda"), torch.randn(16, 1).cuda(non_blocking=True)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x).float(), y)
        backward(loss)
        optimizer.step()
        torch.cuda.synchronize()
        losses.append(loss.item())
    return losses[-1] / losses[0]


class TestTraining:
    @pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
    @pytest.mark.parametrize("implementation", ["fused", "foreach"])
    @pytest.mark.covering(1)
    def test_fused_and_foreach_optimizers_step(
        self, model: nn.Module, kind: type[torch.optim.Optimizer], implementation: str
    ) -> None:
        optimizer = kind(model.cuda().parameters(), lr=0.05, **{implementation: True})  # type: ignore[call-arg]
        assert train(model, optimizer, Tensor.backward) < 0.9

    @pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16], ids=str)
    def test_autocast_for_a_gpu_casts_on_the_cpu(self, dtype: torch.dtype | None) -> None:
        x, weight = torch.ones(2, 2, device="cuda"), torch.ones(2, 2, device="cuda")
        assert not torch.is_autocast_enabled()
        with torch.autocast("cuda", dtype=dtype):
            assert torch.is_autocast_enabled()
            assert torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") == torch.get_autocast_gpu_dtype() == (dtype or torch.float16)
            assert (x @ weight).dtype == (dtype or torch.float16)
            with torch.autocast(device_type="cuda", enabled=False):
                assert (x @ weight).dtype == torch.float32
        assert (x @ weight).dtype == torch.float32
        assert torch.get_autocast_dtype("cuda") == torch.float16

    @pytest.mark.filterwarnings("ignore:.*torch.cuda.amp:FutureWarning")  # deprecated, and in many a script
    @pytest.mark.parametrize("deprecated", [False, True])
    def test_a_loop_with_torchs_own_amp_trains(self, model: nn.Module, deprecated: bool) -> None:
        scaler = torch.cuda.amp.GradScaler() if deprecated else torch.amp.GradScaler("cuda")
        assert scaler.is_enabled()
        optimizer = torch.optim.Adam(model.cuda().parameters(), lr=0.05)
        x, y = torch.randn(16, 4).cuda(), torch.randn(16, 1).cuda()
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            with torch.cuda.amp.autocast() if deprecated else torch.autocast("cuda"):
                result = model(x)
            assert result.dtype == torch.float16
            loss = nn.functional.mse_loss(result.float(), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        assert losses[-1] < losses[0] * 0.9

    @pytest.mark.parametrize(("cast_inputs", "dtype"), [(None, torch.float16), (torch.float32, torch.float32)])
    def test_custom_fwd_and_custom_bwd_follow_autocast(
        self, cast_inputs: torch.dtype | None, dtype: torch.dtype
    ) -> None:
        class Double(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type="cuda", cast_inputs=cast_inputs)
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x @ torch.eye(2, device="cuda") * 2

            @staticmethod
            @torch.amp.custom_bwd(device_type="cuda")
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                return gradient @ torch.eye(2, dtype=gradient.dtype) * 2

        x = torch.ones(2, 2, device="cuda", requires_grad=True)
        with torch.autocast("cuda"):
            result = Double.apply(x.half() if cast_inputs else x)
        result.float().sum().backward()
        assert result.dtype == dtype
        assert x.grad is not None
        assert x.grad.tolist() == [[2, 2], [2, 2]]

    @pytest.mark.parametrize("workers", [0, 1])
    def test_a_data_loader_with_pinned_memory_does_not_warn(self, workers: int) -> None:
        loader = DataLoader(TensorDataset(torch.arange(6.0)), 3, False, pin_memory=True, num_workers=workers)
        assert [batch.cuda(non_blocking=True).tolist() for (batch,) in loader] == [[0, 1, 2], [3, 4, 5]]

    @pytest.mark.filterwarnings("ignore:.*use_cuda:FutureWarning")
    def test_profilers_record_the_cpu(self, model: nn.Module, capfd: pytest.CaptureFixture[str]) -> None:
        x = torch.ones(1, 4).cuda()
        both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=both) as new, torch.autograd.profiler.emit_nvtx():
            model(x)
        with torch.autograd.profiler.profile(use_cuda=True) as old:
            model(x)
        for profiler in (new, old):
            assert "aten::addmm" in {event.key for event in profiler.key_averages()}
        assert "CUDA" not in capfd.readouterr().err

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_activation_checkpointing_restores_random_numbers(self, model: nn.Module, use_reentrant: bool) -> None:
        x = torch.randn(3, 4, device="cuda", requires_grad=True)
        layers = nn.Sequential(model, nn.Dropout()).cuda()
        torch.manual_seed(2)
        layers(x).sum().backward()
        assert x.grad is not None
        expected, x.grad = x.grad, None
        torch.manual_seed(2)
        torch.utils.checkpoint.checkpoint(layers, x, use_reentrant=use_reentrant).sum().backward()
        assert torch.equal(x.grad, expected)  # type: ignore[arg-type]

    def test_recurrent_networks_run(self) -> None:
        network = nn.LSTM(4, 8, num_layers=2, bidirectional=True).cuda()
        network.flatten_parameters()
        packed = nn.utils.rnn.pack_sequence([torch.randn(3, 4), torch.randn(2, 4)]).cuda()
        assert packed.is_cuda
        result, _ = network(packed)
        result.data.sum().backward()
        assert network.weight_ih_l0.grad is not None

    # torch's own complaint about its own look at a tensor, where what is compiled goes on after a call that is not.
    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
    def test_torch_compile_compiles(self, model: nn.Module) -> None:
        def function(x: Tensor) -> Tensor:
            return model(x.to("cuda")) + torch.ones(1, device="cuda") * torch.zeros(1).cuda()

        x = torch.randn(2, 4)
        expected = function(x)
        assert torch.allclose(torch.compile(function, backend="aot_eager")(x), expected)

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
    def test_torchscript_compiles(self) -> None:
        assert torch.jit.script(makes_zeros)(torch.ones(2)).tolist() == [1, 1]


def makes_zeros(x: Tensor) -> Tensor:
    return torch.zeros([2], device=x.device).to(x.dtype) + x


class TestDataParallel:
    @pytest.mark.parametrize("options", [{}, {"device_ids": [0, 1]}, {"device_ids": [0], "output_device": 0}], ids=str)
    def test_data_parallel_runs_the_model_once_with_the_whole_batch(
        self, model: nn.Module, options: dict[str, Any]
    ) -> None:
        parallel = nn.DataParallel(model, **options).cuda()
        x = torch.randn(4, 4, device="cuda")
        assert parallel.module is model
        assert torch.equal(parallel(x), model(x))
        assert next(iter(parallel.state_dict())).startswith("module.")
        assert train(parallel, torch.optim.Adam(parallel.parameters(), lr=0.05), Tensor.backward) < 0.9

    def test_data_parallel_as_a_function_runs_the_model_once(self, model: nn.Module) -> None:
        x = torch.randn(4, 4, device="cuda")
        assert torch.equal(nn.parallel.data_parallel(model, x, device_ids=[0, 1]), model(x))
        assert torch.equal(nn.parallel.data_parallel(model, (x,)), model(x))
        assert nn.parallel.data_parallel(
            nn.Bilinear(1, 1, 1), (), module_kwargs={"input1": x[:, :1], "input2": x[:, :1]}
        ).shape == (4, 1)


@pytest.mark.either_way
class TestWithAmp:
    @pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
    def test_a_script_with_amp_trains(self, model: nn.Module, opt_level: str) -> None:
        optimizer = torch.optim.SGD(model.cuda().parameters(), lr=0.05, momentum=0.9)
        model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, half_dtype=torch.float16, verbosity=0)
        types = []
        model[0].register_forward_hook(lambda module, args, result: types.append(result.dtype))
        assert train(nn.DataParallel(model), optimizer, functools.partial(backward, optimizers=optimizer)) < 0.9
        assert set(types) == {torch.float32 if opt_level == "O0" else torch.float16}
        assert next(amp.master_params(optimizer)).is_cuda
        assert amp.state_dict()


SPAWN = """
from ampatch.cuda_on_cpu import stand_in
stand_in()
import sys, torch, torch.distributed as dist
from torch import nn

X, Y = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(7))

def trained(wrap, rank, count):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    model = wrap(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(X[rank::count].to(rank)), Y[rank::count].cuda(rank)).backward()
        optimizer.step()
    return layers.state_dict()

def main(rank, count, folder):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", world_size=count, rank=rank)
    assert dist.get_backend() == "gloo"

    def wrap(layers):
        model = nn.SyncBatchNorm.convert_sync_batchnorm(layers).cuda(rank)
        return nn.parallel.DistributedDataParallel(model, device_ids=[rank], output_device=rank)

    two = trained(wrap, rank, count)
    total = torch.cuda.FloatTensor([rank + 1.0])
    dist.all_reduce(total, group=dist.new_group([0, 1], backend="nccl"))
    assert total.item() == 3.0
    dist.barrier()
    if rank == 0:
        one = trained(nn.Module.cuda, 0, 1)
        assert two.keys() == one.keys()
        for name, expected in one.items():
            torch.testing.assert_close(two[name], expected, rtol=1e-4, atol=1e-5)
        dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=2, args=(2, sys.argv[1]))
    print("done")
"""


@pytest.mark.slow
def test_nccl_ranks_train_over_gloo_as_one_process_would(tmp_path: Path) -> None:
    """The processes are spawned, and batch normalisation is over all of them."""
    (tmp_path / "script.py").write_text(SPAWN, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", "script.py", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
