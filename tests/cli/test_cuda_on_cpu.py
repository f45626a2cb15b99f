"""The CPU standing in for a GPU: what scripts written for CUDA do runs, and torch is what it was afterwards."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
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
        second = stand_in()
        assert second is not first
        second.undo()

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
        ledger.undo()

    def test_undoing_leaves_no_entry_for_checkpoints(self) -> None:
        stand_in().undo()
        before = list(torch.serialization._package_registry)
        stand_in().undo()
        assert torch.serialization._package_registry == before

    def test_a_name_that_a_module_bound_earlier_is_replaced_too(self) -> None:
        module = sys.modules[__name__]
        stand_in().undo()
        module.bound_earlier = torch.zeros  # type: ignore[attr-defined]
        stand_in()
        try:
            assert bound_earlier(2, device="cuda").device == CPU  # type: ignore[name-defined]  # noqa: F821
        finally:
            stand_in().undo()
            assert module.bound_earlier is torch.zeros  # type: ignore[attr-defined]
            del module.bound_earlier  # type: ignore[attr-defined]

    def test_a_replaced_function_is_pickled_by_name(self) -> None:
        assert pickle.loads(pickle.dumps(torch.zeros)) is torch.zeros
        assert pickle.loads(pickle.dumps(Tensor.to)) is Tensor.to


DEVICES: list[Any] = ["cuda", "cuda:1", torch.device("cuda"), torch.device("cuda:0"), torch.device("cuda", 1), 0, 3]

FACTORIES: dict[str, Callable[[Any], Tensor]] = {
    "tensor": lambda device: torch.tensor([1.0], device=device),
    "as_tensor": lambda device: torch.as_tensor([1.0], device=device),
    "asarray": lambda device: torch.asarray([1.0], device=device),
    "scalar_tensor": lambda device: torch.scalar_tensor(1.0, device=device),
    "zeros": lambda device: torch.zeros(2, device=device),
    "ones": lambda device: torch.ones(2, device=device),
    "full": lambda device: torch.full((2,), 1.0, device=device),
    "empty": lambda device: torch.empty(2, device=device, pin_memory=True),
    "empty_strided": lambda device: torch.empty_strided((2,), (1,), device=device),
    "rand": lambda device: torch.rand(2, device=device),
    "randn": lambda device: torch.randn(2, device=device),
    "randint": lambda device: torch.randint(3, (2,), device=device),
    "randperm": lambda device: torch.randperm(3, device=device),
    "arange": lambda device: torch.arange(3, device=device),
    "linspace": lambda device: torch.linspace(0, 1, 3, device=device),
    "logspace": lambda device: torch.logspace(0, 1, 3, device=device),
    "eye": lambda device: torch.eye(3, device=device),
    "hann_window": lambda device: torch.hann_window(3, device=device),
    "tril_indices": lambda device: torch.tril_indices(3, 3, device=device),
    "sparse_coo_tensor": lambda device: torch.sparse_coo_tensor([[0]], [1.0], (2,), device=device),
    "fft.fftfreq": lambda device: torch.fft.fftfreq(3, device=device),
    "zeros_like": lambda device: torch.zeros_like(torch.ones(2), device=device),
    "randn_like": lambda device: torch.randn_like(torch.ones(2), device=device),
    "full_like": lambda device: torch.full_like(torch.ones(2), 2.0, device=device),
    "normal": lambda device: torch.normal(0.0, 1.0, (2,), device=device),
    "nested_tensor": lambda device: torch.nested.nested_tensor([[1.0]], layout=torch.jagged, device=device),
    "as_nested_tensor": lambda device: torch.nested.as_nested_tensor(
        [torch.ones(2)], layout=torch.jagged, device=device
    ),
    "new_zeros": lambda device: torch.ones(2).new_zeros(2, device=device),
    "new_tensor": lambda device: torch.ones(2).new_tensor([1.0], device=device),
    "new_full": lambda device: torch.ones(2).new_full((2,), 1.0, device=device),
    "nn.Linear": lambda device: nn.Linear(2, 2, device=device).weight,
    "nn.LSTM": lambda device: nn.LSTM(2, 2, device=device).weight_ih_l0,
    "nn.Embedding": lambda device: nn.Embedding(2, 2, device=device).weight,
    "to": lambda device: torch.ones(2).to(device),
    "to, by keyword": lambda device: torch.ones(2).to(device=device, non_blocking=True),
    "cuda": lambda device: torch.ones(2).cuda(device, non_blocking=True),
    "Module.to": lambda device: nn.Linear(2, 2).to(device).weight,
    "Module.cuda": lambda device: nn.Linear(2, 2).cuda(device).weight,
    "Module.to_empty": lambda device: nn.Linear(2, 2).to_empty(device=device).weight,
}


class TestDevices:
    # torch says once in a process that it does not check what sparse tensors are made of.
    @pytest.mark.filterwarnings("ignore:Sparse invariant checks")
    @pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
    def test_a_tensor_made_for_any_gpu_lies_on_the_cpu(self, make: Callable[[Any], Tensor]) -> None:
        assert [make(device).device for device in DEVICES] == [CPU] * len(DEVICES)

    @pytest.mark.parametrize("name", ["zeros", "zeros_like", "new_zeros", "nn.Linear", "to", "Module.to"])
    def test_other_devices_are_left_alone(self, name: str) -> None:
        assert FACTORIES[name]("meta").device.type == "meta"
        assert FACTORIES[name](torch.device("meta")).device.type == "meta"

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

    def test_lazy_modules_move_before_they_are_initialised(self) -> None:
        for module in (
            nn.LazyLinear(2).cuda(),
            nn.LazyLinear(2).to("cuda:0"),
            nn.LazyLinear(2).to(torch.device("cuda")),
        ):
            assert module(torch.ones(1, 3, device="cuda")).shape == (1, 2)

    def test_a_move_copies_nothing(self) -> None:
        x = torch.ones(2)
        assert x.cuda() is x

    def test_a_parameter_stays_itself_when_its_model_moves(self) -> None:
        model = nn.Linear(2, 2)
        before = model.weight
        assert model.cuda().weight is before
        assert isinstance(before, nn.Parameter)

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

    @pytest.mark.filterwarnings(
        "ignore:torch.set_default_tensor_type"
    )  # it is deprecated, and yesterday's scripts use it
    @pytest.mark.parametrize("kind", ["torch.cuda.DoubleTensor", "class"])
    def test_the_default_type_may_be_a_gpus(self, kind: str) -> None:
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

    def test_memory_is_pinned_by_name_only(self) -> None:
        x = torch.ones(2)
        assert x.pin_memory() is x
        x.record_stream(torch.cuda.current_stream())


class TestWhereATensorSaysItIs:
    def test_old_ways_of_asking_are_told_of_a_gpu(self) -> None:
        x = torch.zeros(2)
        assert x.is_cuda
        assert x.get_device() == torch.cuda.current_device()
        assert x.type() == "torch.cuda.FloatTensor"
        assert x.half().type() == "torch.cuda.HalfTensor"
        assert x.to_sparse().type() == "torch.cuda.sparse.FloatTensor"

    def test_the_device_tells_the_truth(self) -> None:
        assert torch.zeros(2).cuda().device.type == "cpu"
        assert torch.zeros(2, device=torch.ones(1).cuda().device).device == CPU

    def test_what_is_in_no_memory_is_on_no_gpu(self) -> None:
        x = torch.zeros(2, device="meta")
        assert not x.is_cuda
        assert x.type() == "torch.FloatTensor" or "meta" in x.type()

    def test_the_number_of_its_device_is_where_to_go(self) -> None:
        x = torch.ones(2)
        assert x.to(x.get_device()) is x
        assert torch.zeros(1, device=x.get_device()).device == CPU

    def test_no_library_is_given_an_address_for_a_gpu(self) -> None:
        assert not hasattr(torch.zeros(2), "__cuda_array_interface__")
        assert torch.zeros(2).numpy().tolist() == [0, 0]

    def test_it_is_copied_pickled_and_printed_as_ever(self) -> None:
        x = torch.ones(2).cuda()
        assert torch.equal(copy.deepcopy(x), x)
        assert torch.equal(pickle.loads(pickle.dumps(x)), x)
        assert repr(x) == "tensor([1., 1.])"
        assert "numpy" in dir(x)


class TestTypesByName:
    def test_tensors_are_made_from_them(self) -> None:
        assert torch.cuda.IntTensor([0]).tolist() == [0]
        assert torch.cuda.FloatTensor([1.5]).dtype == torch.float32
        assert torch.cuda.HalfTensor(2, 3).shape == (2, 3)
        assert torch.cuda.LongTensor([1]).dtype == torch.int64
        assert torch.cuda.BoolTensor([True]).dtype == torch.bool

    def test_tensors_are_turned_into_them(self) -> None:
        x = torch.ones(2)
        assert x.type("torch.cuda.HalfTensor").dtype == torch.float16
        assert x.type(torch.cuda.DoubleTensor).dtype == torch.float64
        assert x.type(torch.bfloat16).dtype == torch.bfloat16
        assert x.type(torch.ones(1).half().type()).dtype == torch.float16
        assert nn.Linear(1, 1).type(torch.cuda.HalfTensor).weight.dtype == torch.float16

    def test_tensors_are_instances_of_them(self) -> None:
        assert isinstance(torch.ones(1), torch.cuda.FloatTensor)
        assert not isinstance(torch.ones(1), torch.cuda.HalfTensor)

    @pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
    def test_storages_have_theirs(self) -> None:
        assert torch.cuda.FloatStorage is torch.FloatStorage
        storage = torch.ones(2).untyped_storage()
        assert storage.cuda() is storage
        assert storage.to(device="cuda").device == CPU
        assert storage.pin_memory().data_ptr() == storage.data_ptr()
        assert torch.FloatStorage([1.0]).cuda(0).tolist() == [1.0]


class TestCheckpoints:
    @pytest.fixture
    def from_gpu(self) -> io.BytesIO:
        """What a machine with GPUs saved."""

        def tag(storage: Any) -> str:
            return "cuda:1"

        torch.serialization.register_package(-1, tag, lambda storage, location: None)
        try:
            file = io.BytesIO()
            torch.save({"w": torch.ones(2)}, file)
        finally:
            torch.serialization._package_registry[:] = [
                e for e in torch.serialization._package_registry if e[1] is not tag
            ]
        file.seek(0)
        return file

    @pytest.mark.parametrize(
        "where",
        [
            None,
            "cuda",
            "cuda:0",
            torch.device("cuda:0"),
            "cpu",
            {"cuda:1": "cuda:0"},
            {"cuda:1": "cpu"},
            lambda storage, location: storage.cuda(0),
            lambda storage, location: storage,
        ],
        ids=["none", "cuda", "cuda:0", "device", "cpu", "dict", "dict to cpu", "storage.cuda", "storage"],
    )
    def test_what_a_gpu_saved_is_loaded_wherever_it_is_to_go(self, from_gpu: io.BytesIO, where: Any) -> None:
        loaded = torch.load(from_gpu, map_location=where)["w"]
        assert loaded.device == CPU
        assert loaded.tolist() == [1, 1]

    def test_that_was_from_a_gpu(self, from_gpu: io.BytesIO) -> None:
        stand_in().undo()
        if not torch.cuda.is_available():
            with pytest.raises(RuntimeError, match="CUDA"):
                torch.load(from_gpu)

    def test_what_is_saved_here_is_the_cpus(self) -> None:
        file = io.BytesIO()
        torch.save(nn.Linear(1, 1).cuda().state_dict(), file)
        stand_in().undo()
        file.seek(0)
        assert torch.load(file)["weight"].device == CPU
        assert b"cuda" not in file.getvalue()


class TestTorchCuda:
    def test_there_is_one_gpu(self) -> None:
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1

    def test_under_torchrun_every_process_has_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert torch.cuda.device_count() == 4
        assert len(torch.cuda.get_rng_state_all()) == 4

    def test_the_current_device_is_the_one_that_was_set(self) -> None:
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
        finally:
            torch.cuda.set_device(0)

    def test_each_thread_has_its_own_current_device(self) -> None:
        torch.cuda.set_device(1)
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_device()))
        thread.start()
        thread.join()
        torch.cuda.set_device(0)
        assert seen == [0]

    def test_there_are_no_figures_of_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.empty_cache()
        torch.cuda.ipc_collect()
        assert torch.cuda.max_memory_allocated("cuda:0") / 1024**2 == 0
        assert torch.cuda.memory_reserved() == torch.cuda.memory.memory_allocated(0) == 0
        assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
        assert "no figures" in torch.cuda.memory_summary()
        free, total = torch.cuda.mem_get_info()
        assert 0 < free <= total == torch.cuda.get_device_properties(0).total_memory

    def test_it_has_a_name_and_properties(self) -> None:
        assert "CPU" in torch.cuda.get_device_name(0)
        assert torch.cuda.get_device_capability() >= (7, 0)
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        assert (properties.major, properties.minor) == torch.cuda.get_device_capability()
        assert properties.name == torch.cuda.get_device_name()
        assert torch.cuda.is_bf16_supported()
        assert torch.cuda.get_device_properties(device="cuda:0").name == torch.cuda.get_device_name(device=0)
        assert torch.cuda.get_arch_list() == []
        assert torch.cuda.get_gencode_flags() == ""

    def test_its_generator_is_the_cpus(self) -> None:
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

    def test_the_state_of_a_gpus_generator_is_refused(self) -> None:
        with pytest.raises(UsageError, match=r"16 bytes.*resuming"):
            torch.cuda.set_rng_state(torch.zeros(16, dtype=torch.uint8))

    def test_random_numbers_in_a_fork_leave_no_trace(self) -> None:
        torch.manual_seed(1)
        expected = torch.rand(2)
        torch.manual_seed(1)
        with torch.random.fork_rng():
            torch.rand(5, device="cuda")
        assert torch.equal(torch.rand(2), expected)

    def test_cudnn_and_profilers_take_their_switches(self) -> None:
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
    def test_what_has_no_stand_in_is_refused_by_name(self, name: str) -> None:
        with pytest.raises(UsageError, match=rf"torch\.cuda\.{name} was called.*machine with a GPU"):
            getattr(torch.cuda, name)()

    def test_pieces_of_data_parallel_are_refused(self) -> None:
        with pytest.raises(UsageError, match=r"torch\.cuda\.comm\.scatter"):
            nn.parallel.scatter(torch.ones(2), [0, 1])
        with pytest.raises(UsageError, match=r"torch\.cuda\.nccl\.unique_id"):
            torch.cuda.nccl.unique_id()

    def test_what_scripts_only_print_is_answered(self) -> None:
        assert torch.cuda.nccl.version() == (0, 0, 0)
        assert torch.cuda.utilization() == torch.cuda.temperature() == 0
        torch.cuda.memory._record_memory_history()

    @pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adadelta])
    def test_a_build_for_cuda_does_not_go_on_to_a_gpu_in_c(
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

    def test_a_way_to_the_gpu_that_nobody_thought_of_is_one_clear_error(self) -> None:
        with pytest.raises(UsageError, match="device='cpu'"):
            torch.UntypedStorage(3, device="cuda")

    def test_every_function_that_is_not_in_the_table_is_refused(self) -> None:
        names = [name for name in torch.cuda.__all__ if inspect.isfunction(getattr(torch.cuda, name))]
        unlike = {name for name in names if getattr(torch.cuda, name).__module__.startswith("torch")}
        assert unlike == {"get_gencode_flags", "is_initialized"}

    def test_the_table_names_what_torch_has(self) -> None:
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

    def test_a_set_stream_is_the_current_one(self) -> None:
        stream = torch.cuda.Stream()
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

    def test_an_event_that_was_not_recorded_has_no_time(self) -> None:
        with pytest.raises(UsageError, match="record"):
            torch.cuda.Event().elapsed_time(torch.cuda.Event())


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[Tensor], None], steps: int = 20
) -> float:
    """The last loss over the first one."""
    torch.manual_seed(1)
    x, y = torch.randn(16, 4, device="cuda"), torch.randn(16, 1).cuda(non_blocking=True)
    losses = []
    for _ in range(steps):
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
    def test_optimizers_made_for_gpus_step(
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
            assert torch.get_autocast_dtype("cuda") == (dtype or torch.float16)
            assert (x @ weight).dtype == (dtype or torch.float16)
            with torch.autocast(device_type="cuda", enabled=False):
                assert (x @ weight).dtype == torch.float32
        assert (x @ weight).dtype == torch.float32
        assert torch.get_autocast_dtype("cuda") == torch.float16

    @pytest.mark.filterwarnings("ignore:.*torch.cuda.amp:FutureWarning")  # deprecated, and in many a script
    def test_a_loop_with_torchs_own_amp_runs(self, model: nn.Module) -> None:
        for scaler, autocast in (
            (torch.amp.GradScaler("cuda", init_scale=128.0), lambda: torch.autocast("cuda")),
            (torch.cuda.amp.GradScaler(init_scale=128.0), torch.cuda.amp.autocast),
        ):
            assert scaler.is_enabled()
            copied = copy.deepcopy(model).cuda()
            optimizer = torch.optim.Adam(copied.parameters(), lr=0.05)
            x, y = torch.randn(16, 4).cuda(), torch.randn(16, 1).cuda()
            losses = []
            for _ in range(20):
                optimizer.zero_grad()
                with autocast():
                    result = copied(x)
                assert result.dtype == torch.float16
                loss = nn.functional.mse_loss(result.float(), y)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(copied.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                losses.append(loss.item())
            assert losses[-1] < losses[0] * 0.9
            assert scaler.get_scale() == 128.0

    def test_functions_may_cast_their_inputs(self) -> None:
        class Exact(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x @ torch.eye(2, device="cuda")

            @staticmethod
            @torch.amp.custom_bwd(device_type="cuda")
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                return gradient

        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert torch.get_autocast_gpu_dtype() is torch.bfloat16
            assert Exact.apply(torch.ones(2, 2).half().cuda()).dtype is torch.float32

    def test_functions_that_follow_autocast_do_so(self) -> None:
        class Double(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type="cuda")
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x @ torch.eye(2, device="cuda") * 2

            @staticmethod
            @torch.amp.custom_bwd(device_type="cuda")
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                return gradient @ torch.eye(2, dtype=gradient.dtype) * 2

        x = torch.ones(2, 2, device="cuda", requires_grad=True)
        with torch.autocast("cuda"):
            result = Double.apply(x)
        result.float().sum().backward()
        assert result.dtype == torch.float16
        assert x.grad is not None
        assert x.grad.tolist() == [[2, 2], [2, 2]]

    @pytest.mark.parametrize("workers", [0, 1])
    def test_batches_come_from_pinned_memory_without_a_word(self, workers: int) -> None:
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
    def test_activations_are_computed_again(self, model: nn.Module, use_reentrant: bool) -> None:
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
        scripted = torch.jit.script(makes_zeros)
        assert scripted(torch.ones(2)).tolist() == [1, 1]


def makes_zeros(x: Tensor) -> Tensor:
    return torch.zeros([2], device=x.device).to(x.dtype) + x


class TestDataParallel:
    @pytest.mark.parametrize("options", [{}, {"device_ids": [0, 1]}, {"device_ids": [0], "output_device": 0}], ids=str)
    def test_the_model_is_run_once_with_the_whole_batch(self, model: nn.Module, options: dict[str, Any]) -> None:
        parallel = nn.DataParallel(model, **options).cuda()
        x = torch.randn(4, 4, device="cuda")
        assert parallel.module is model
        assert torch.equal(parallel(x), model(x))
        assert next(iter(parallel.state_dict())).startswith("module.")
        assert train(parallel, torch.optim.Adam(parallel.parameters(), lr=0.05), Tensor.backward) < 0.9

    def test_as_a_function_too(self, model: nn.Module) -> None:
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
        optimizer: Any = torch.optim.SGD(model.cuda().parameters(), lr=0.05, momentum=0.9)
        network: Any
        network, optimizer = amp.initialize(
            model, optimizer, opt_level=opt_level, half_dtype=torch.float16, verbosity=0
        )
        types = []
        model[0].register_forward_hook(lambda module, args, result: types.append(result.dtype))
        network = nn.DataParallel(network)

        def backward(loss: Tensor) -> None:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()

        assert train(network, optimizer, backward) < 0.9
        assert set(types) == {torch.float32 if opt_level == "O0" else torch.float16}
        assert next(amp.master_params(optimizer)).is_cuda
        assert amp.state_dict()


PREAMBLE = """
from ampatch.cuda_on_cpu import stand_in
stand_in()
import os, sys, torch, torch.distributed as dist
from torch import nn
"""

SPAWN = (
    PREAMBLE
    + """
import torch.multiprocessing as mp

def main(rank, count, folder):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", world_size=count, rank=rank)
    assert dist.get_backend() == "gloo"
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 4, 1))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(layers).cuda(rank)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[rank], output_device=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(7)
    x, y = torch.randn(4, 1, 4, 4, generator=generator), torch.randn(4, 1, generator=generator)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[rank::count].to(rank)), y[rank::count].cuda(rank)).backward()
        optimizer.step()
    total = torch.cuda.FloatTensor([rank + 1.0])
    dist.all_reduce(total, group=dist.new_group([0, 1], backend="nccl"))
    assert total.item() == 3.0
    dist.barrier()
    if rank == 0:
        torch.save(model.module.state_dict(), f"{folder}/two.pt")
        # The same in one process, with the whole batch.
        dist.destroy_process_group()
        torch.manual_seed(0)
        alone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 4, 1))
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.mse_loss(alone(x), y).backward()
            optimizer.step()
        torch.save(alone.state_dict(), f"{folder}/one.pt")

if __name__ == "__main__":
    mp.spawn(main, nprocs=2, args=(2, sys.argv[1]))
    print("done")
"""
)


IMAGENET = (
    PREAMBLE
    + """
import torch.backends.cudnn as cudnn
from ampatch import amp

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])

def main(folder):
    assert torch.cuda.is_available() and torch.backends.cudnn.enabled
    cudnn.benchmark = True
    torch.cuda.manual_seed_all(0)
    torch.manual_seed(0)
    model, criterion = Net().cuda(), nn.CrossEntropyLoss().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", half_dtype=torch.float16, verbosity=0)
    model = nn.DataParallel(model)
    x = torch.randn(32, 5, 4)
    data = torch.utils.data.TensorDataset(x, (x.sum((1, 2)) > 0).long())
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, num_workers=1, pin_memory=True)
    side, start = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    start.record()
    for epoch in range(4):
        for inputs, target in loader:
            with torch.cuda.stream(side):
                inputs, target = inputs.cuda(non_blocking=True), target.cuda(non_blocking=True)
            torch.cuda.current_stream().wait_stream(side)
            inputs.record_stream(torch.cuda.current_stream())
            loss = criterion(model(inputs), target)
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            torch.cuda.synchronize()
    torch.save({"model": model.state_dict()}, f"{folder}/model.pt")
    saved = torch.load(f"{folder}/model.pt", map_location=lambda storage, place: storage.cuda(0))
    model.load_state_dict(saved["model"])
    print("learnt", loss.item() < 0.69, torch.cuda.max_memory_allocated())

if __name__ == "__main__":
    main(sys.argv[1])
"""
)


def run(script: str, folder: Path, *arguments: str, **environment: str) -> str:
    """What a script prints, which must not complain."""
    path = folder / "script.py"
    path.write_text(script, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.slow
class TestProcesses:
    def test_processes_that_ask_for_nccl_train_over_gloo_as_one_would(self, tmp_path: Path) -> None:
        """With batch normalisation over all of them, in processes that are spawned."""
        assert run(SPAWN, tmp_path, str(tmp_path)) == "done\n"
        two, one = (torch.load(tmp_path / name) for name in ("two.pt", "one.pt"))
        assert two.keys() == one.keys()
        for name, expected in one.items():
            torch.testing.assert_close(two[name], expected, rtol=1e-4, atol=1e-5)

    def test_a_whole_script_trains_and_only_it_prints(self, tmp_path: Path) -> None:
        assert run(IMAGENET, tmp_path, str(tmp_path)) == "learnt True 0\n"
