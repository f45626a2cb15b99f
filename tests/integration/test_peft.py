"""Of PEFT's adapters on a frozen half base: `amp.initialize` needs no adapter for them, whatever their users do."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same_bits, assert_same_state, dtype_name
from optimizers import backward
from peft import (
    AdaLoraConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    prepare_model_for_kbit_training,
)
from safetensors.torch import load_file
from small_nets import EACH_HALF, EACH_LEVEL
from small_transformers import llama
from torch import Tensor, nn
from transformers import PrinterCallback, TrainingArguments

from ampatch import amp
from ampatch.diagnostics.peak_memory import peak_allocated
from ampatch.errors import AmpWarning, UsageError
from ampatch.integrations.transformers import AmpatchTrainer

GENERATOR = torch.Generator().manual_seed(0)
BATCHES = [torch.randint(2, 20, (4, 8), generator=GENERATOR) for _ in range(4)]
TASK = "CAUSAL_LM"
SEVERAL = ["embed_tokens", "lm_head", "q_proj"]

lora = functools.partial(LoraConfig, task_type=TASK, r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
METHODS: dict[str, Callable[[], Any]] = {
    "LoRA": lora,
    "rsLoRA": functools.partial(lora, use_rslora=True),
    "DoRA": functools.partial(lora, use_dora=True),
    "LoRA-embeddings": functools.partial(lora, target_modules=SEVERAL),
    "DoRA-embeddings": functools.partial(lora, target_modules=SEVERAL, use_dora=True),
    "LoRA-tokens": functools.partial(lora, trainable_token_indices=[3, 4]),
    "AdaLoRA": lambda: AdaLoraConfig(task_type=TASK, target_modules=["q_proj"], total_step=9),
    "IA3": lambda: IA3Config(task_type=TASK, target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": lambda: LoHaConfig(task_type=TASK, target_modules=["q_proj"], r=4),
    "LoKr": lambda: LoKrConfig(task_type=TASK, target_modules=["q_proj"], r=4),
    "OFT": lambda: OFTConfig(task_type=TASK, target_modules=["q_proj"], r=0, oft_block_size=4),
    "VeRA": lambda: VeraConfig(task_type=TASK, target_modules=["q_proj"], r=4),
    "prompt": lambda: PromptTuningConfig(task_type=TASK, num_virtual_tokens=3),
    "p-tuning": lambda: PromptEncoderConfig(task_type=TASK, num_virtual_tokens=3, encoder_hidden_size=8),
    "prefix": lambda: PrefixTuningConfig(task_type=TASK, num_virtual_tokens=3),
}
# PEFT leaves what these train in the type of the base.
IN_THE_TYPE_OF_THE_BASE: dict[str, Callable[[], Any]] = {
    "modules_to_save": functools.partial(lora, modules_to_save=["lm_head"]),
    "norms": lambda: LNTuningConfig(task_type=TASK, target_modules=["input_layernorm"]),
}
EACH_BASE = pytest.mark.parametrize("half_base", [True, False], ids=["half-base", "float32-base"])

pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found"),
    # transformers 5's, of the names that PEFT 0.21.2 and users of 4.57 call.
    pytest.mark.filterwarnings(
        "ignore:.(is_gradient_checkpointing|gradient_checkpointing_enable|past_key_values). is:FutureWarning"
    ),
]


def adapted(dtype: torch.dtype = torch.float32, config: Any = None, **given: Any) -> PeftModel:
    return get_peft_model(llama().to(dtype), config or lora(), **given)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.02)


def initialize(model: nn.Module, level: str, half: torch.dtype | None, optimizer: Any = None, **options: Any) -> Any:
    """Returns the model's optimizer, a new one if none is given."""
    optimizer = optimizer or adam(model)
    amp.initialize(model, optimizer, opt_level=level, half_dtype=half, verbosity=0, **{"init_scale": 1024.0, **options})
    return optimizer


def train(model: nn.Module, optimizer: Any, steps: int = 4) -> list[float]:
    losses = []
    for step in range(steps):
        loss = model(input_ids=BATCHES[step % 4], labels=BATCHES[step % 4]).loss
        backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@functools.lru_cache
def float32_losses(method: str) -> list[float]:
    model = adapted(config={**METHODS, **IN_THE_TYPE_OF_THE_BASE}[method]())
    losses = train(model, initialize(model, "O0", torch.bfloat16), steps=6)
    amp.deinitialize()
    return losses


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    return {name: each.detach().clone() for name, each in model.state_dict().items() if name in trained}


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=BATCHES[0]).logits.float()  # type: ignore[no-any-return]


def types_of_those(model: nn.Module, *, trained: bool) -> set[torch.dtype]:
    return {each.dtype for each in model.parameters() if each.requires_grad is trained}


class TestTraining:
    @pytest.mark.slow
    @pytest.mark.parametrize("method", METHODS)
    @EACH_BASE
    @EACH_LEVEL
    @EACH_HALF
    @pytest.mark.covering(1)
    def test_an_adapter_learns_what_float32_learns(
        self, method: str, half_base: bool, level: str, half: torch.dtype
    ) -> None:
        wanted = float32_losses(method)
        model = adapted(half if half_base else torch.float32, METHODS[method]())
        losses = train(model, initialize(model, level, half), steps=6)
        assert losses == pytest.approx(wanted, abs=0.02)

    @EACH_BASE
    @EACH_LEVEL
    @EACH_HALF
    def test_lora_has_the_types_of_its_level(self, half_base: bool, level: str, half: torch.dtype) -> None:
        base = half if half_base else torch.float32
        model = adapted(base)
        optimizer = initialize(model, level, None if half_base else half)  # whose default is the type of the base
        assert amp.settings()["half_dtype"] == dtype_name(half)
        assert types_of_those(model, trained=True) == ({half} if level == "O2" else {torch.float32})
        assert types_of_those(model, trained=False) == ({half} if level == "O2" else {base})
        assert {each.dtype for each in amp.master_params(optimizer)} == {torch.float32}
        train(model, optimizer)
        saved = trained_weights(model)
        amp.deinitialize()
        assert types_of_those(model, trained=True) == {torch.float32}
        assert types_of_those(model, trained=False) == {base}
        assert_same_state(trained_weights(model), saved)

    @pytest.mark.slow
    @EACH_LEVEL
    def test_a_frozen_half_base_is_not_copied(self, level: str) -> None:
        base = llama(hidden=256).to(torch.float16)
        size = sum(each.nbytes for each in base.parameters())
        model = get_peft_model(base, lora())
        optimizer = adam(model)
        set_up = functools.partial(initialize, model, level, torch.float16, optimizer)
        saved = functools.partial(get_peft_model_state_dict, model)
        assert peak_allocated(lambda: set_up) < 0.1 * size
        assert peak_allocated(lambda: saved) < 0.1 * size
        assert peak_allocated(lambda: amp.deinitialize) < 0.1 * size

    @pytest.mark.filterwarnings("ignore:Unsupported layer type .*RMSNorm")
    @pytest.mark.parametrize("method", IN_THE_TYPE_OF_THE_BASE)
    def test_half_weights_to_be_trained_warn_at_o1_and_get_masters_at_o2(self, method: str) -> None:
        make, wanted = IN_THE_TYPE_OF_THE_BASE[method], float32_losses(method)
        with pytest.warns(AmpWarning, match=r"AdamW updates half weights, such as base_model\..*use opt_level='O2'"):
            initialize(adapted(torch.float16, make()), "O1", torch.float16)
        amp.deinitialize()
        for level in ("O1", "O2"):
            model = adapted(torch.float16, make())
            for each in model.parameters():
                if level == "O1" and each.requires_grad:
                    each.data = each.data.float()  # what the warning says
            optimizer = initialize(model, level, torch.float16)
            assert train(model, optimizer, 6) == pytest.approx(wanted, abs=0.02)
            assert {each.dtype for each in trained_weights(model).values()} == {torch.float32}
            amp.deinitialize()

    @EACH_LEVEL
    def test_gradient_checkpointing_changes_no_losses(self, level: str) -> None:
        losses = []
        for checkpointed in (False, True):
            base = llama().to(torch.float16)
            if checkpointed:
                base.config.use_cache = False
                base.gradient_checkpointing_enable()
                base.enable_input_require_grads()
            model = get_peft_model(base, lora()).train()
            losses.append(train(model, initialize(model, level, torch.float16)))
            amp.deinitialize()
        assert losses[0] == losses[1]

    @pytest.mark.parametrize("prepare", ["norms", "kbit"])
    @EACH_LEVEL
    def test_a_half_base_with_float32_norms_learns_what_float32_learns(self, level: str, prepare: str) -> None:
        base = llama().to(torch.float16)
        if prepare == "kbit":
            base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
        else:
            for each in base.parameters():
                each.data = each.data.float() if each.ndim == 1 else each.data
        model = get_peft_model(base, lora())
        optimizer = initialize(model, level, torch.float16, **({"keep_fp32": "*norm"} if level == "O2" else {}))
        assert base.model.norm.weight.dtype is torch.float32
        losses = train(model, optimizer)
        amp.deinitialize()
        assert losses == pytest.approx(float32_losses("LoRA")[:4], abs=0.02)

    def test_adalora_at_o2_raises(self) -> None:
        model = adapted(torch.float16, METHODS["AdaLoRA"]())
        optimizer = initialize(model, "O2", torch.float16)
        train(model, optimizer, steps=1)
        with pytest.raises(UsageError, match=r"reads gradients.*Type opt_level='O1'"):
            model.base_model.update_and_allocate(0)

    def test_adalora_prunes_ranks_at_o1(self) -> None:
        config = AdaLoraConfig(task_type=TASK, target_modules=["q_proj"], total_step=12, tinit=1, tfinal=4, target_r=2)
        model = adapted(torch.float16, config)
        optimizer = initialize(model, "O1", torch.float16)
        for step in range(12):
            backward(model(input_ids=BATCHES[0], labels=BATCHES[0]).loss, optimizer)
            optimizer.step()
            model.base_model.update_and_allocate(step)
            optimizer.zero_grad()
        ranks = [int(each.count_nonzero()) for name, each in model.named_parameters() if "lora_E" in name]
        assert sum(ranks) == 4


class TestSaving:
    @EACH_HALF
    @EACH_LEVEL
    @EACH_BASE
    @pytest.mark.covering(1)
    def test_a_saved_adapter_is_float32_and_trains_on_to_the_same_bits(
        self, half_base: bool, level: str, half: torch.dtype, tmp_path: Path
    ) -> None:
        base = half if half_base else torch.float32
        model = adapted(base)
        optimizer = initialize(model, level, half)
        train(model, optimizer)
        model.save_pretrained(tmp_path)
        assert {each.dtype for each in load_file(tmp_path / "adapter_model.safetensors").values()} == {torch.float32}
        kept = copy.deepcopy({"optimizer": optimizer.state_dict(), "amp": amp.state_dict()})
        saved, losses = trained_weights(model), train(model, optimizer)
        wanted = trained_weights(model)
        amp.deinitialize()

        resumed = PeftModel.from_pretrained(llama().to(base), tmp_path, is_trainable=True)
        assert_same_state(trained_weights(resumed), saved)
        optimizer = initialize(resumed, level, half)
        optimizer.load_state_dict(kept["optimizer"])
        amp.load_state_dict(kept["amp"])
        assert train(resumed, optimizer) == losses
        assert_same_state(trained_weights(resumed), wanted)

    @EACH_LEVEL
    @EACH_BASE
    @pytest.mark.parametrize("method", ["prompt", "prefix", "p-tuning"])
    def test_a_saved_prompt_has_the_bits_of_float32_weights(self, method: str, half_base: bool, level: str) -> None:
        model = adapted(torch.float16 if half_base else torch.float32, METHODS[method]())
        optimizer = initialize(model, level, torch.float16)
        train(model, optimizer, steps=2)
        encoder, saved = model.prompt_encoder, get_peft_model_state_dict(model)["prompt_embeddings"]
        assert model.prompt_encoder is encoder
        amp.deinitialize()
        wanted = get_peft_model_state_dict(model)["prompt_embeddings"]
        assert wanted.dtype is torch.float32
        assert_same_bits(saved, wanted)

    @EACH_LEVEL
    def test_load_adapter_in_place_sets_the_weights_of_the_optimizer(self, level: str, tmp_path: Path) -> None:
        model = adapted(torch.float16)
        optimizer = initialize(model, level, torch.float16)
        train(model, optimizer)
        model.save_pretrained(tmp_path)
        parameters, saved = list(model.parameters()), trained_weights(model)
        train(model, optimizer)
        model.load_adapter(tmp_path, "default", is_trainable=True)
        assert_same_state(trained_weights(model), saved)
        told = pytest.warns(AmpWarning, match=r"lora_A\.default\.weight and 7 more: user code replaced half weights")
        with told if level == "O2" else contextlib.nullcontext():
            train(model, optimizer)
        assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
        assert all(not torch.equal(each, saved[name]) for name, each in trained_weights(model).items())


class TestMerging:
    @EACH_BASE
    @EACH_LEVEL
    def test_merged_unmerged_and_disabled_adapters_use_no_old_casts(self, level: str, half_base: bool) -> None:
        model = adapted(torch.float16 if half_base else torch.float32)
        optimizer = initialize(model, level, torch.float16)
        base = logits(model)  # lora_B is zero at first
        train(model, optimizer, 8)
        model.eval()
        with amp.frozen_weights(model):
            trained = logits(model)
            model.merge_adapter()
            assert logits(model) == pytest.approx(trained, abs=2e-3)
            model.unmerge_adapter()
            assert logits(model) == pytest.approx(trained, abs=2e-3)
            with model.disable_adapter():
                assert logits(model) == pytest.approx(base, abs=2e-3)
            assert logits(model) == pytest.approx(trained, abs=2e-3)
        assert (trained - base).abs().max() > 0.1
        before = trained_weights(model)
        train(model, optimizer, 2)
        assert all(not torch.equal(each, before[name]) for name, each in trained_weights(model).items())

    def test_merging_within_a_session_is_in_float32(self) -> None:
        model = adapted(torch.float32)
        train(model, initialize(model, "O1", torch.float16), 8)
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        with amp.disable_casts():
            adapter = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
            wanted = layer.base_layer.weight + layer.scaling["default"] * adapter
        model.merge_adapter()
        assert torch.equal(layer.base_layer.weight, wanted)

    @EACH_BASE
    @EACH_LEVEL
    def test_a_state_dict_has_the_merged_weights(self, level: str, half_base: bool) -> None:
        model = adapted(torch.float16 if half_base else torch.float32)
        train(model, initialize(model, level, torch.float16), 8)
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        name = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
        before = model.state_dict()[name].clone()
        model.merge_adapter()
        assert_same_bits(model.state_dict()[name].float(), layer.base_layer.weight.detach().float())
        assert not torch.equal(model.state_dict()[name], before)

    @EACH_BASE
    @EACH_LEVEL
    def test_merging_after_deinitialize_is_in_float32(self, level: str, half_base: bool) -> None:
        base = torch.float16 if half_base else torch.float32
        model = adapted(base)
        train(model, initialize(model, level, torch.float16), 8)
        amp.deinitialize()
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        adapter = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        wanted = (layer.base_layer.weight.float() + layer.scaling["default"] * adapter).to(base)
        merged = model.merge_and_unload()
        assert {each.dtype for each in merged.parameters()} == {base}
        torch.testing.assert_close(merged.model.layers[0].self_attn.q_proj.weight, wanted, rtol=1e-3, atol=1e-6)


class TestSeveralAdapters:
    @EACH_LEVEL
    def test_an_adapter_added_later_trains_in_float32(self, level: str) -> None:
        model = adapted(torch.float16)
        optimizer = initialize(model, level, torch.float16)
        train(model, optimizer)
        first = trained_weights(model)
        model.add_adapter("second", lora(r=2))
        model.set_adapter("second")
        optimizer.add_param_group({"params": [each for each in model.parameters() if each.requires_grad]})
        second = trained_weights(model)
        train(model, optimizer)
        assert all(not torch.equal(each, second[name]) for name, each in trained_weights(model).items())
        assert {each.dtype for each in trained_weights(model).values()} == {torch.float32}
        model.set_adapter("default")
        assert_same_state(trained_weights(model), first)
        train(model, optimizer)
        assert all(not torch.equal(each, first[name]) for name, each in trained_weights(model).items())

    def test_a_second_initialize_converts_an_adapter_with_whole_modules(self) -> None:
        model = adapted(torch.float32)
        train(model, initialize(model, "O2", torch.float16))
        model.add_adapter("second", lora(r=2, modules_to_save=["lm_head"]))
        model.set_adapter("second")
        optimizer = initialize(model, "O2", torch.float16)
        before = trained_weights(model)
        train(model, optimizer)
        assert {each.dtype for each in before.values()} == {torch.float32}
        assert all(not torch.equal(each, before[name]) for name, each in trained_weights(model).items())

    @EACH_LEVEL
    def test_an_inactive_adapter_keeps_its_bits_at_o1_and_in_keep_fp32(self, level: str) -> None:
        model = adapted(torch.float16)
        model.add_adapter("second", lora(init_lora_weights=False))
        for name, each in model.named_parameters():
            if "second" in name:
                each.data.add_(1e-6)  # bits that float16 does not have
        model.set_adapter("second")
        second = trained_weights(model)
        model.set_adapter("default")
        optimizer = initialize(model, level, torch.float16, **({"keep_fp32": "*.second"} if level == "O2" else {}))
        train(model, optimizer)
        model.set_adapter("second")
        assert_same_state(trained_weights(model), second)
        amp.deinitialize()
        assert_same_state(trained_weights(model), second)


class TestMistakes:
    @EACH_LEVEL
    def test_an_optimizer_made_before_the_adapter_warns(self, level: str) -> None:
        base = llama()
        optimizer = torch.optim.AdamW(base.parameters())
        model = get_peft_model(base, lora())
        with pytest.warns(AmpWarning, match=r"AdamW updates \d+ parameters, all of which are frozen.*lora_A"):
            initialize(model, level, torch.float16, optimizer)


class TestTrainer:
    def make(self, folder: Path, level: str, config: Any = None, **given: Any) -> Any:
        examples = [{"input_ids": each, "labels": each} for each in torch.cat(BATCHES)]
        often = {"max_steps": 6, "save_steps": 2, "eval_steps": 2, "logging_steps": 1, "eval_strategy": "steps"}
        quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "log_level": "error"}
        size = {"per_device_train_batch_size": 4, "learning_rate": 0.02}
        arguments = TrainingArguments(str(folder), **{**often, **quiet, **size, **given})
        settings = {"opt_level": level, "init_scale": 1024.0}
        data = {"train_dataset": examples, "eval_dataset": examples}
        trainer = AmpatchTrainer(adapted(torch.float16, config), arguments, **data, amp=settings)
        trainer.remove_callback(PrinterCallback)
        return trainer

    @pytest.mark.slow
    @EACH_LEVEL
    def test_a_resumed_run_of_the_trainer_ends_with_the_same_bits(self, level: str, tmp_path: Path) -> None:
        whole = self.make(tmp_path, level)
        whole.train()
        assert types_of_those(whole.model, trained=False) == {torch.float16}
        resumed = self.make(tmp_path, level)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
        assert_same_state(trained_weights(resumed.model), trained_weights(whole.model))
