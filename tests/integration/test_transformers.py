"""Of `ampatch.integrations.transformers`: whatever Trainer's users do, amp is right in it, or says why it cannot be."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from helpers import assert_same_state, completed
from small_nets import EACH_HALF, EACH_LEVEL, ENVIRONMENT, TORCHRUN, norm, types_computed_by, types_of, weights
from small_transformers import bert, gpt2, t5
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers import logging as transformers_logging

from ampatch import amp
from ampatch.errors import AmpWarning, OptionError, UsageError
from ampatch.integrations import accelerate_optimizers
from ampatch.integrations.shared_patches import SharedPatches
from ampatch.integrations.transformers import AmpatchMixin, AmpatchTrainer
from ampatch.ledger import PatchLedger

transformers_logging.set_verbosity_error()
GENERATOR = torch.Generator().manual_seed(0)
SENTENCES = [torch.randint(2, 20, (6,), generator=GENERATOR) for _ in range(32)]
CLASSES = [{"input_ids": each, "labels": int(each[0]) % 3} for each in SENTENCES]
COPIES = [{"input_ids": each, "labels": each} for each in SENTENCES]
UNEVEN = [
    {**each, "labels": torch.where(each["labels"] > n % 18, each["labels"], -100)} for n, each in enumerate(COPIES)
]
# Runs under torchrun: accumulation, skipped steps and a second train() at O2, compared between two ranks.
RANKS = """
import tempfile
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from small_nets import types_of
from small_transformers import gpt2
from test_transformers import COPIES, calling, make

told = []
note = calling(on_step_end=lambda optimizer, **_: told.append(bool(optimizer.step_was_skipped)))
options = {"opt_level": "O2", "half_dtype": "float16", "init_scale": 2.0**22}
given = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "ddp_backend": "gloo", "max_steps": 8}
trainer = make(Path(tempfile.mkdtemp()), options, model=gpt2(), data=COPIES, callbacks=[note], **given)
for _ in range(2):
    trainer.train()
    assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    assert types_of(trainer.model) == {torch.float32}
assert True in told and False in told, told
mine = torch.cat([each.detach().flatten() for each in trainer.model.parameters()] + [torch.tensor(told).float()])
all_ranks = [torch.zeros_like(mine) for _ in range(2)]
dist.all_gather(all_ranks, mine)
assert torch.equal(*all_ranks)
print("alike", flush=True)
dist.destroy_process_group()
"""
FLOAT16 = {"init_scale": 1024.0, "half_dtype": "float16"}

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found")


class Seq2Seq(AmpatchMixin, Seq2SeqTrainer):
    pass


def arguments(folder: Path, kind: type = TrainingArguments, **given: Any) -> Any:
    settings = {"max_steps": 4, "per_device_train_batch_size": 8, "learning_rate": 0.01, "logging_steps": 1}
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "log_level": "error"}
    return kind(str(folder), **{**settings, **quiet, **given})


def asking_for(folder: Path, **values: Any) -> Any:
    """Training arguments with values that Trainer itself would refuse on this machine, or without a package."""
    given = arguments(folder)
    given.__class__ = type("Changed", (type(given),), {"n_gpu": values.pop("n_gpu", 1)})
    vars(given).update(values)
    return given


def make(
    folder: Path, options: Any = None, kind: type = AmpatchTrainer, model: Any = None, data: Any = CLASSES, **given: Any
) -> Any:
    of_trainer = ("compute_metrics", "callbacks", "compute_loss_func", "optimizers", "model_init", "eval_dataset")
    taken = {name: given.pop(name) for name in of_trainer if name in given}
    if issubclass(kind, AmpatchMixin):
        taken["amp"] = options
    of_arguments = Seq2SeqTrainingArguments if issubclass(kind, Seq2SeqTrainer) else TrainingArguments
    model = None if "model_init" in taken else model or bert()
    trainer = kind(model, arguments(folder, of_arguments, **given), train_dataset=data, **taken)
    trainer.remove_callback(PrinterCallback)
    return trainer


def trained(folder: Path, *args: Any, **given: Any) -> Any:
    """A trainer after `train`. Its constructor sets the seed, so that two of them have the same dropout."""
    trainer = make(folder, *args, **given)
    trainer.train()
    return trainer


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def bits(trainer: Any) -> dict[str, Any]:
    return weights(trainer.model)


def calling(**events: Callable[..., None]) -> TrainerCallback:
    """A callback that calls functions at events, with the event's keyword arguments."""

    class Calling(TrainerCallback):
        pass

    for name, function in events.items():
        setattr(Calling, name, lambda self, args, state, control, _f=function, **kwargs: _f(state=state, **kwargs))
    return Calling()


@pytest.fixture(autouse=True)
def amp_is_off_afterwards() -> Iterator[None]:
    methods = AcceleratedOptimizer.step_was_skipped, Accelerator.clip_grad_norm_, PreTrainedModel.save_pretrained
    before = torch.autograd.backward, *methods
    yield
    assert not amp.is_on()
    methods = AcceleratedOptimizer.step_was_skipped, Accelerator.clip_grad_norm_, PreTrainedModel.save_pretrained
    assert before == (torch.autograd.backward, *methods)


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Returns a function that sets what ``accelerate launch --mixed_precision`` sets."""

    def launch(precision: str) -> None:
        AcceleratorState._reset_state()
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)

    yield launch
    AcceleratorState._reset_state()


class TestTraining:
    @EACH_HALF
    @EACH_LEVEL
    def test_a_trainer_learns_what_float32_learns(self, level: str, half: torch.dtype, tmp_path: Path) -> None:
        model = bert()
        computed = types_computed_by(model.classifier)
        trainer = trained(tmp_path, {"opt_level": level, "half_dtype": half, "init_scale": 1024.0}, model=model)
        plain = trained(tmp_path, kind=Trainer)
        assert computed == {half}
        assert logged(trainer, "loss") == pytest.approx(logged(plain, "loss"), rel=0.02)
        assert logged(trainer, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=0.05)
        assert types_of(trainer.model) == {torch.float32}

    @pytest.mark.slow
    @pytest.mark.parametrize("options", ["O0", {"enabled": False}], ids=str)
    def test_with_amp_off_the_bits_are_those_of_trainer(self, options: Any, tmp_path: Path) -> None:
        trainer, plain = trained(tmp_path, options), trained(tmp_path, kind=Trainer)
        assert_same_state(bits(trainer), bits(plain))

    @pytest.mark.parametrize("data", [COPIES, UNEVEN], ids=["even", "uneven"])
    @EACH_LEVEL
    @pytest.mark.covering(1)
    def test_gradients_accumulate_as_in_float32(self, level: str, data: Any, tmp_path: Path) -> None:
        # 32 examples in 7 batches of 5, 3 a step: the last step of an epoch has one batch only.
        batches = {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 3, "max_steps": 6}
        options = {"opt_level": level, "half_dtype": "float16", "init_scale": 256.0}
        trainer = trained(tmp_path, options, model=gpt2(), data=data, **batches)
        plain = trained(tmp_path, kind=Trainer, model=gpt2(), data=data, **batches)
        assert logged(trainer, "loss") == pytest.approx(logged(plain, "loss"), rel=0.01)
        assert logged(trainer, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=0.02)

    @EACH_LEVEL
    def test_unscaled_gradients_of_the_masters_are_clipped(self, level: str, tmp_path: Path) -> None:
        norms = []

        def measure(optimizer: Any, **_: Any) -> None:
            assert {each.grad.dtype for each in amp.master_params(optimizer)} == {torch.float32}
            norms.append(norm(amp.master_params(optimizer)))

        options = {"opt_level": level, **FLOAT16}
        callback = calling(on_pre_optimizer_step=measure)
        trainer = make(tmp_path, options, max_grad_norm=1e-4, callbacks=[callback])
        trainer.train()
        assert norms == pytest.approx([1e-4] * 4, rel=1e-5)
        assert min(logged(trainer, "grad_norm")) > 0.1  # before clipping, and unscaled

    def test_arguments_of_initialize_arrive(self, tmp_path: Path) -> None:
        settings = []
        callback = calling(on_step_end=lambda **_: settings.append(amp.settings()))
        options = {"on_overflow": "raise", "check_finite": True, "half_dtype": "float16"}
        make(tmp_path, options, max_steps=1, callbacks=[callback]).train()
        assert settings[0] == {**settings[0], **options, "opt_level": "O1"}

    def test_the_scale_and_skipped_steps_are_logged_beside_the_loss(self, tmp_path: Path) -> None:
        reported: list[dict[str, float]] = []
        reporter = calling(on_log=lambda logs, **_: reported.append(dict(logs)))
        options = {"half_dtype": "float16", "init_scale": 2.0**18}
        trainer = make(tmp_path, options, max_steps=6, eval_strategy="steps", eval_steps=2, eval_dataset=CLASSES)
        trainer.callback_handler.callbacks.insert(0, reporter)  # as TensorBoard's, before those of the user
        trainer.train()
        scales, skipped = logged(trainer, "loss_scale"), logged(trainer, "skipped_steps")
        assert len(scales) == 6
        assert scales[0] == 2.0**17 >= scales[-1]
        assert 0 < skipped[-1] < 6
        assert [each["loss_scale"] for each in reported if "loss" in each] == scales
        assert all("loss" in entry for entry in trainer.state.log_history if "skipped_steps" in entry)
        assert logged(trained(tmp_path, {"half_dtype": "bfloat16"}), "loss_scale") == []

    @pytest.mark.slow
    def test_a_second_train_keeps_the_scale(self, tmp_path: Path) -> None:
        scales: list[float] = []
        callback = calling(
            on_train_begin=lambda **_: scales.append(amp.get_loss_scale()),
            on_train_end=lambda **_: scales.append(amp.get_loss_scale()),
        )
        options = {"opt_level": "O2", "half_dtype": "float16", "init_scale": 2.0**18}
        trainer = trained(tmp_path, options, callbacks=[callback])
        between = bits(trainer)
        trainer.train()
        assert scales[0] == 2.0**18 > scales[1] == scales[2]
        assert any(not torch.equal(now, between[name]) for name, now in bits(trainer).items())

    @pytest.mark.slow
    @pytest.mark.once
    def test_two_ranks_stay_equal_through_two_calls_of_train(self, tmp_path: Path) -> None:
        script = tmp_path / "ranks.py"
        script.write_text(RANKS)
        environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = completed([sys.executable, *TORCHRUN, str(script)], cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("alike") == 2

    @pytest.mark.slow
    def test_a_batch_size_that_does_not_fit_is_tried_smaller(self, tmp_path: Path) -> None:
        class Full(AmpatchTrainer):
            def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                if len(inputs["labels"]) > 4:
                    raise RuntimeError("CUDA out of memory.")
                return super().training_step(model, inputs, *args, **kwargs)

        trainer = make(tmp_path, "O2", Full, auto_find_batch_size=True)
        trainer.train()
        assert trainer.state.global_step == 4
        assert types_of(trainer.model) == {torch.float32}


class TestOverrides:
    @pytest.mark.slow
    def test_a_training_step_without_super_gives_the_same_bits(self, tmp_path: Path) -> None:
        class Own(AmpatchTrainer):
            def training_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
                model.train()
                loss = model(**inputs).loss
                loss.backward()
                return loss.detach()

        options = {"opt_level": "O2", **FLOAT16}
        own, usual = trained(tmp_path, options, Own), trained(tmp_path, options)
        assert_same_state(bits(own), bits(usual))

    @pytest.mark.parametrize("where", ["a base before the mixin", "the class"])
    def test_a_training_step_of_another_name_or_class_is_guarded(self, where: str, tmp_path: Path) -> None:
        def step_of_a_library(trainer: Any, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            output = model(**inputs).loss
            products.append(torch.mm(torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)).dtype)
            output.backward()
            return output.detach()

        products: list[torch.dtype] = []
        methods = {"training_step": step_of_a_library}
        if where == "the class":
            kind = type("Borrowing", (AmpatchTrainer,), methods)
        else:
            kind = type("Both", (type("First", (), methods), AmpatchTrainer), {})
        make(tmp_path, {"half_dtype": "float16"}, kind, max_steps=1).train()
        assert products == [torch.float16]

    @pytest.mark.slow
    @EACH_LEVEL
    @pytest.mark.parametrize("how", ["label smoother", "compute_loss_func", "compute_loss"])
    @pytest.mark.covering(1)
    def test_loss_functions_get_float32_outputs(self, how: str, level: str, tmp_path: Path) -> None:
        class Weighted(AmpatchTrainer):
            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
                outputs = model(**inputs)
                loss = weighted(outputs, inputs["labels"])
                return (loss, outputs) if return_outputs else loss

        def weighted(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
            seen.append(outputs.logits.dtype)
            return F.cross_entropy(outputs.logits, labels, weight=torch.tensor([1.0, 2.0, 3.0]))

        seen: list[torch.dtype] = []
        kind = Weighted if how == "compute_loss" else AmpatchTrainer
        given: dict[str, Any] = {"compute_loss_func": weighted} if how == "compute_loss_func" else {}
        given |= {"label_smoothing_factor": 0.1} if how == "label smoother" else {}
        options = {"opt_level": level, **FLOAT16}
        trainer = trained(tmp_path, options, kind, **given)
        plain = trained(tmp_path, {"enabled": False}, kind, **given)
        assert logged(trainer, "loss") == pytest.approx(logged(plain, "loss"), rel=0.02)
        assert set(seen) <= {torch.float32}

    def test_casts_are_off_in_callbacks_metrics_and_data(self, tmp_path: Path) -> None:
        def multiply(*_: Any, **__: Any) -> None:
            products.append(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)

        def metrics(_: Any) -> dict[str, float]:
            multiply()
            return {}

        class Data(list[Any]):
            def __getitem__(self, index: Any) -> Any:
                multiply()
                return super().__getitem__(index)

        products: list[torch.dtype] = []
        callback = calling(on_step_end=multiply, on_evaluate=multiply, on_prediction_step=multiply)
        given: dict[str, Any] = {"callbacks": [callback], "compute_metrics": metrics, "eval_dataset": Data(CLASSES)}
        make(
            tmp_path, {"half_dtype": "float16"}, data=Data(CLASSES), eval_strategy="steps", eval_steps=2, **given
        ).train()
        assert len(products) > 50
        assert set(products) == {torch.float32}

    def test_a_training_step_outside_of_train_raises(self, tmp_path: Path) -> None:
        trainer = make(tmp_path)
        with pytest.raises(UsageError, match="outside of train"):
            trainer.training_step(trainer.model, {})

    @pytest.mark.slow
    def test_hyperparameter_search_makes_a_model_for_each_run(self, tmp_path: Path) -> None:
        trainer = make(tmp_path, "O2", model_init=lambda _: bert())
        trainer.train()
        first = trainer.model
        trainer.train()
        assert trainer.model is not first
        assert types_of(first) == types_of(trainer.model) == {torch.float32}


class TestPredicting:
    @pytest.mark.slow
    @EACH_HALF
    @EACH_LEVEL
    @pytest.mark.covering(1)
    def test_evaluation_within_train_and_after_it_gives_the_same_numbers(
        self, level: str, half: torch.dtype, tmp_path: Path
    ) -> None:
        model = bert()
        computed = types_computed_by(model.classifier)

        def metrics(prediction: Any) -> dict[str, float]:
            assert prediction.predictions.dtype == np.float32
            return {"mean": float(prediction.predictions.mean())}

        given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "compute_metrics": metrics}
        options = {"opt_level": level, "half_dtype": half}
        trainer = make(tmp_path, options, model=model, eval_dataset=CLASSES, **given)
        trainer.train()
        before = bits(trainer)
        assert trainer.evaluate()["eval_mean"] == logged(trainer, "eval_mean")[-2]
        assert trainer.predict(CLASSES).metrics["test_loss"] == logged(trainer, "eval_loss")[-1]
        assert computed == {half}
        assert_same_state(bits(trainer), before)

    @pytest.mark.slow
    @EACH_LEVEL
    def test_generation_within_train_computes_in_half(self, level: str, tmp_path: Path) -> None:
        model, kinds = t5(), []
        model.encoder.block[0].layer[0].SelfAttention.q.register_forward_hook(
            lambda module, args, output: kinds.append((output.dtype, module.training))
        )
        given: dict[str, Any] = {"predict_with_generate": True, "generation_max_length": 5, "generation_num_beams": 2}
        given |= {
            "eval_strategy": "steps",
            "eval_steps": 2,
            "eval_dataset": COPIES[:8],
            "compute_metrics": lambda _: {},
        }
        options = {"opt_level": level, "half_dtype": "float16"}
        trainer = make(tmp_path, options, Seq2Seq, model=model, data=COPIES, **given)
        trainer.train()
        predicted = trainer.predict(COPIES[:8]).predictions
        assert predicted.dtype == np.int64
        assert set(kinds) == {(torch.float16, True), (torch.float16, False)}

    def test_calls_of_the_model_in_a_session_compute_in_half(self, tmp_path: Path) -> None:
        trainer = make(tmp_path, {"half_dtype": "float16"}, model=gpt2(), data=COPIES)
        computed = types_computed_by(trainer.model.lm_head)
        with trainer.amp_session():
            trainer.model.generate(SENTENCES[0][None], max_new_tokens=2, pad_token_id=0)
        assert computed == {torch.float16}

    def test_a_callback_may_open_a_session(self, tmp_path: Path) -> None:
        def sample(model: Any, **_: Any) -> None:
            with trainer.amp_session():
                with torch.no_grad():
                    kinds.add(model(SENTENCES[0][None]).logits.dtype)
                kinds.add(torch.mm(torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)).dtype)

        kinds: set[torch.dtype] = set()
        trainer = make(tmp_path, {"half_dtype": "float16"}, callbacks=[calling(on_step_end=sample)], max_steps=1)
        trainer.train()
        assert kinds == {torch.float32, torch.float16}


class TestCheckpoints:
    @EACH_HALF
    @EACH_LEVEL
    def test_a_resumed_run_ends_with_the_same_bits(self, level: str, half: torch.dtype, tmp_path: Path) -> None:
        options = {"opt_level": level, "half_dtype": half, "scale_window": 2, "init_scale": 2.0**14}
        given: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
        whole, scales = make(tmp_path / "whole", options, **given), []
        note = calling(on_train_end=lambda **_: scales.append(amp.state_dict()))
        whole.add_callback(note)
        whole.train()
        saved = tmp_path / "whole" / "checkpoint-3"
        resumed = make(tmp_path / "resumed", options, callbacks=[note], **given)
        resumed.train(resume_from_checkpoint=str(saved))
        assert_same_state(bits(resumed), bits(whole))
        assert_same_state(resumed.optimizer.state_dict(), whole.optimizer.state_dict())
        assert scales[0] == scales[1]
        if half is torch.float16:
            assert scales[0]["loss_scaler0"]["loss_scale"] > 2.0**14

    @EACH_HALF
    def test_saved_models_are_float32_and_their_configs_say_so(self, half: torch.dtype, tmp_path: Path) -> None:
        def save(model: Any, **_: Any) -> None:
            assert types_of(model) >= {half}
            model.save_pretrained(tmp_path / "callback")
            copy.deepcopy(model).save_pretrained(tmp_path / "copy")

        options = {"opt_level": "O2", "half_dtype": half}
        given: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
        trainer = make(tmp_path, options, callbacks=[calling(on_train_end=save)], **given)
        trainer.train()
        trainer.save_model(tmp_path / "after")
        for name in ("checkpoint-2", "callback", "copy", "after"):
            assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == "float32"
            loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / name)
            assert_same_state(loaded.state_dict(), trainer.model.state_dict())

    def test_a_half_model_of_the_users_is_saved_as_half(self, tmp_path: Path) -> None:
        trainer, other = make(tmp_path, "O2"), bert().to(torch.float16)
        with trainer.amp_session():
            other.save_pretrained(tmp_path / "other")
        assert json.loads((tmp_path / "other" / "config.json").read_text())["dtype"] == "float16"

    def test_the_best_model_is_loaded_at_the_end_of_train(self, tmp_path: Path) -> None:
        values = iter([1.0, 3.0, 2.0])
        given: dict[str, Any] = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
        given |= {"load_best_model_at_end": True, "metric_for_best_model": "value", "greater_is_better": True}
        given |= {"compute_metrics": lambda _: {"value": next(values)}, "eval_dataset": CLASSES[:8]}
        trainer = make(tmp_path, "O2", max_steps=3, **given)
        trainer.train()
        best = AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint-2")
        assert_same_state(bits(trainer), best.state_dict())


class TestEndings:
    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt], ids=lambda error: error.__name__)
    @pytest.mark.parametrize("where", ["on_step_end", "on_train_begin", "forward"])
    @pytest.mark.covering(1)
    def test_an_exception_takes_amp_down_and_train_may_be_called_again(
        self, where: str, error: type[BaseException], tmp_path: Path
    ) -> None:
        def stop(*_: Any, **__: Any) -> None:
            if is_first:
                raise error("in the midst")

        is_first, model = True, bert()
        model.bert.register_forward_hook(stop if where == "forward" else lambda *_: None)
        callbacks = [] if where == "forward" else [calling(**{where: stop})]
        trainer = make(tmp_path, "O2", model=model, callbacks=callbacks)
        with pytest.raises(error, match="in the midst"):
            trainer.train()
        assert not amp.is_on()
        assert types_of(trainer.model) == {torch.float32}
        is_first = False
        trainer.train()
        assert trainer.state.global_step == 4


class TestPrecisionOfTheLauncher:
    def test_it_warns_once_and_sets_the_scaler_aside_for_good(self, launch: Any, tmp_path: Path) -> None:
        launch("bf16")
        trainer = make(tmp_path, {"half_dtype": "float16"}, max_steps=1, eval_dataset=CLASSES)
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu")  # as on a GPU in float16
        with pytest.warns(AmpWarning, match=r"mixed_precision='bf16'. amp replaces it, and casts to float16 at"):
            trainer.train()
        trainer.evaluate()  # a second warning would be an error
        assert (trainer.optimizer.scaler, trainer.accelerator.scaler, trainer.accelerator.native_amp) == (
            None,
            None,
            False,
        )

    def test_with_amp_off_the_precision_is_the_launchers(self, launch: Any, tmp_path: Path) -> None:
        launch("bf16")
        assert_same_state(bits(trained(tmp_path, "O0")), bits(trained(tmp_path, kind=Trainer)))


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ("O7", "opt_level is 'O7'"),
            (3, "expected an opt level"),
            ({"opt_levle": "O1"}, "Did you mean 'opt_level'"),
            ({"models": []}, "unknown argument 'models'"),
            ({"opt_level": "O1", "master_weights": True}, "contradicts opt_level='O1'"),
        ],
    )
    def test_bad_options_raise_before_anything_else(self, options: Any, message: str) -> None:
        with pytest.raises(OptionError, match=message):
            AmpatchTrainer(None, None, amp=options)

    def test_values_that_amp_checks_raise_before_the_first_step(self, tmp_path: Path) -> None:
        trainer = make(tmp_path, {"scale_window": 0})
        with pytest.raises(OptionError, match="scale_window"):
            trainer.train()
        assert trainer.state.global_step == 0

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"fp16": True}, "fp16=True, which casts as well"),
            ({"bf16": True}, "bf16=True, which casts as well"),
            ({"fp16_full_eval": True}, "for good"),
            ({"bf16_full_eval": True}, "for good"),
            ({"deepspeed": "zero3.json"}, "deepspeed"),
            ({"fsdp": "full_shard"}, "fsdp"),
            ({"n_gpu": 2}, "DataParallel for 2 GPUs"),
            ({"optim": "lomo"}, "within the backward pass"),
            ({"optim": "galore_adamw_layerwise"}, "within the backward pass"),
        ],
    )
    def test_training_arguments_that_exclude_amp_raise(
        self, given: dict[str, Any], message: str, tmp_path: Path
    ) -> None:
        with pytest.raises(OptionError, match=message):
            AmpatchTrainer(bert(), asking_for(tmp_path, **given))

    def test_a_precision_of_accelerate_that_amp_does_not_replace_raises(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer = make(tmp_path)
        monkeypatch.setattr(type(trainer.accelerator), "mixed_precision", "fp8")
        with pytest.raises(OptionError, match="mixed_precision='fp8'"):
            make(tmp_path)

    def test_arguments_that_exclude_amp_raise_when_amp_is_turned_on_later(self, tmp_path: Path) -> None:
        trainer = make(tmp_path, "O0")
        trainer.args.bf16 = True
        trainer.amp = "O1"
        with pytest.raises(OptionError, match="bf16=True, which casts as well"):
            trainer.train()

    def test_half_weights_raise_if_they_are_to_be_trained(self, tmp_path: Path) -> None:
        model = bert().to(torch.bfloat16)
        with pytest.raises(OptionError, match=r"dtype=torch\.float32"):
            make(tmp_path, model=model).train()
        model.bert.requires_grad_(False)  # a frozen base may be half, under layers that are trained
        model.classifier.float()
        make(tmp_path, model=model, max_steps=1).train()
        assert types_of(model.bert) == {torch.bfloat16}

    def test_a_mixin_after_the_trainer_raises(self) -> None:
        with pytest.raises(UsageError, match=r"class Wrong\(AmpatchMixin, Seq2SeqTrainer\)"):

            class Wrong(Seq2SeqTrainer, AmpatchMixin):
                pass

    def test_arguments_of_amp_among_those_of_the_trainer_raise(self, tmp_path: Path) -> None:
        with pytest.raises(OptionError, match=r"opt_level is an argument of amp.*Type amp=\{'opt_level': 'O2'\}"):
            AmpatchTrainer(bert(), arguments(tmp_path), opt_level="O2")
        with pytest.raises(OptionError, match=r"amp is False; expected an opt level.*amp='O0' turns amp off"):
            AmpatchTrainer(bert(), arguments(tmp_path), amp=False)

    def test_a_class_gives_the_default_of_amp(self, tmp_path: Path) -> None:
        levels: list[str] = []
        note = calling(on_step_end=lambda **_: levels.append(amp.settings()["opt_level"]))
        half = type("Half", (AmpatchTrainer,), {"amp": "O2"})
        for given in (None, "O1"):
            make(tmp_path, given, half, max_steps=1, callbacks=[note]).train()
        assert levels == ["O2", "O1"]


class TestAccelerated:
    """Of `ampatch.integrations.accelerate_optimizers`, without Trainer."""

    def test_parameters_without_masters_are_clipped_themselves(self) -> None:
        parameter = nn.Parameter(torch.ones(2))
        assert accelerate_optimizers.updated(parameter) == [parameter]
        with torch.no_grad():
            amp.initialize(nn.Linear(2, 2), verbosity=0)
            assert accelerate_optimizers.updated([parameter])[0] is parameter
            amp.deinitialize()

    def test_shared_patches_stay_until_the_last_user_leaves(self) -> None:
        class Owner:
            value = 1

        def install(ledger: PatchLedger) -> None:
            ledger.set(Owner, "value", Owner.value + 1)

        patches = SharedPatches(install)
        first, second = patches.installed(), patches.installed()
        first.__enter__()
        second.__enter__()
        assert Owner.value == 2
        first.__exit__(None, None, None)
        assert Owner.value == 2
        second.__exit__(None, None, None)
        assert Owner.value == 1
