"""The adopted models and optimizers of a session: which there are, and what their tensors are called.

Must not change a model or an optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ampatch.errors import UsageError
from ampatch.scaling.optimizer_step import AdoptedOptimizer
from ampatch.scaling.users_optimizer import OptimizerLike, check_optimizer

_MOST_WRAPPERS = 8  # of nested optimizers; a limit, since they could form a ring


class Adopted:
    """The adopted models and optimizers that still exist.

    Attributes:
        weak_models: the models, held weakly.
        by_id: the records of the optimizers by the optimizer's id, since some optimizers are not hashable.
    """

    def __init__(self) -> None:
        self.weak_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.by_id: dict[int, AdoptedOptimizer] = {}

    @property
    def models(self) -> list[nn.Module]:
        """The models."""
        return list(self.weak_models)

    @property
    def records(self) -> list[AdoptedOptimizer]:
        """The records of the optimizers; a copy, since optimizers may be deleted meanwhile."""
        return list(self.by_id.values())

    @property
    def optimizers(self) -> list[OptimizerLike]:
        """The optimizers."""
        return [optimizer for record in self.records if (optimizer := record.optimizer) is not None]

    def mark(self) -> Callable[[], None]:
        """Returns a function that forgets what was adopted since."""
        models, optimizers = set(self.weak_models), set(self.by_id)

        def forget() -> None:
            self.weak_models &= models
            for key in set(self.by_id) - optimizers:
                del self.by_id[key]

        return forget

    def forget_optimizer(self, key: int) -> None:
        """Forgets an optimizer that was deleted, by its id."""
        record = self.by_id.pop(key, None)
        if record is not None:
            record.gradients.optimizer_died()

    def has(self, optimizer: object) -> bool:
        """Returns True if the optimizer, or one inside it, was adopted."""
        return self._find(optimizer) is not None

    def record_of(self, optimizer: object) -> AdoptedOptimizer:
        """Returns the record of an optimizer, or of the one inside it if a framework wraps it.

        Raises:
            UsageError: it was never passed to ``amp.initialize``.
        """
        record = self._find(optimizer)
        if record is None:
            check_optimizer(optimizer)
            raise UsageError(
                f"this {type(optimizer).__name__} was never handed to amp.initialize, or only with enabled=False while "
                "amp was on for another model. Type: model, optimizer = "
                "amp.initialize(model, optimizer, ...), and use the optimizer that it returns."
            )
        return record

    def _find(self, optimizer: Any) -> AdoptedOptimizer | None:
        for _ in range(_MOST_WRAPPERS):
            record = self.by_id.get(id(optimizer))
            if record is not None:
                return record
            optimizer = getattr(optimizer, "optimizer", None)
        return None

    def named_modules(self) -> dict[int, str]:
        """Returns the names of all modules of the models, by the module's id."""
        return {id(module): name for model in self.models for name, module in model.named_modules()}

    def parameter_names(self) -> dict[int, str]:
        """Returns the names of all parameters of the models, by the parameter's id."""
        return {id(parameter): name for model in self.models for name, parameter in model.named_parameters()}

    def parameter_ids(self) -> set[int]:
        """Returns the ids of all parameters of the models, and of their masters."""
        updated = {id(p) for record in self.records for p in record.gradients.updated.parameters()}
        return updated | set(self.parameter_names())

    def name_of(self, parameter: Tensor) -> str:
        """Returns a parameter's name, or its shape if no model has it, for messages."""
        return self.parameter_names().get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}")
