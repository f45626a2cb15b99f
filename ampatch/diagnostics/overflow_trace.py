"""Traces an overflow: watches every step, and names the operator that first produced inf or NaN.

Owns when a session watches, and the wording of what it found. Must never let a result depend on it.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ampatch.cast_lists import spellings
from ampatch.diagnostics import causes
from ampatch.diagnostics.watch import Values, Watch, WatchedOp, ran_in_half
from ampatch.ledger import PatchLedger
from ampatch.opt_levels import Properties
from ampatch.scaling.loss_scaler import ScalePolicy

#: Stands in the place of a function: the engine adds up the gradients of a tensor that is used several times.
SUM_OF_GRADIENTS = "the sum of several gradients of one tensor"


@dataclass(frozen=True, slots=True)
class TracedTensor:
    """A tensor that went into or came out of the operator.

    Attributes:
        dtype: name of its type.
        shape: its shape.
        largest: its greatest absolute value, "inf" or "nan" in text; None if it is empty.
    """

    dtype: str
    shape: tuple[int, ...]
    largest: float | None

    def __str__(self) -> str:
        largest = "empty" if self.largest is None else f"largest {self.largest:.4g}"
        return f"{self.dtype} {list(self.shape)}, {largest}"


@dataclass(frozen=True, slots=True)
class OverflowTrace:
    """Where inf or NaN first arose in a step.

    Attributes:
        direction: "forward" or "backward"; "input" if data or parameters were not finite to begin with; "unknown" if
            no watched operator produced it.
        function: path of the torch function; for the backward pass, of the one whose gradient was computed.
        operator: operator that produced it, such as "bmm".
        module: name of the innermost module that was running in the forward pass; None outside of the adopted models.
        module_class: name of its class; None if no module was running.
        file: the user's file; None if no user code was running.
        line: number of the line in it.
        source: text of the line.
        inputs: floating-point inputs.
        outputs: floating-point outputs.
        largest_in_float32: largest value of the result in float32, on the same inputs; None if that could not be found
            out.
        remedies: what mends it, the smallest change first, as sentences with text to paste.
        cast_lists: overlay for ``initialize(cast_lists=...)`` that keeps the function in float32; None if none helps.
        max_loss_scale: largest power of two with which the gradient would have been finite at this operator; None in
            a forward pass.
        others: how many other operators produced inf or NaN from finite inputs, and reached a gradient.
        notes: what was not watched.
    """

    direction: str
    function: str = ""
    operator: str = ""
    module: str | None = None
    module_class: str | None = None
    file: str | None = None
    line: int | None = None
    source: str = ""
    inputs: tuple[TracedTensor, ...] = ()
    outputs: tuple[TracedTensor, ...] = ()
    largest_in_float32: float | None = None
    remedies: tuple[str, ...] = ()
    cast_lists: dict[str, Any] | None = None
    max_loss_scale: float | None = None
    others: int = 0
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data: text, numbers, None, lists and dicts. inf and NaN are the texts "inf" and "nan"."""
        return plain_data(asdict(self))  # type: ignore[no-any-return]

    def __str__(self) -> str:
        lines = [self._headline()]
        if self.module_class is not None:
            name = "(the model)" if self.module == "" else self.module
            lines.append(f"  module    {self.module_class if name is None else f'{name} ({self.module_class})'}")
        if self.file is not None:
            lines.append(f"  line      {self.file}:{self.line}" + (f": {self.source}" if self.source else ""))
        lines += [f"  input     {each}" for each in self.inputs]
        lines += [f"  result    {each}" for each in self.outputs]
        if self.largest_in_float32 is not None:
            lines.append(f"  float32   largest {self.largest_in_float32:.4g}")
        lines += [f"  remedy    {each}" for each in self.remedies]
        if self.others:
            more = "1 other operator" if self.others == 1 else f"{self.others} other operators"
            lines.append(f"  also      {more} produced inf or NaN from finite inputs")
        lines += [f"  note      {each}" for each in self.notes]
        return "\n".join(lines)

    def _headline(self) -> str:
        if self.direction == "unknown":
            return "No watched operator produced the inf or NaN of these gradients."
        if self.direction == "input":
            return f"The input of {self.function} was not finite to begin with."
        kinds = {"NaN" if each.largest != each.largest else "inf" for each in self.outputs if not _finite(each.largest)}
        kind = " and ".join(sorted(kinds)) or "inf or NaN"
        what = (
            self.function
            if self.operator in (*self.function.split("."), "cast")
            else f"{self.function} (operator {self.operator})"
        )
        if self.function == SUM_OF_GRADIENTS:
            return f"First {kind}: in {SUM_OF_GRADIENTS}."
        if self.direction == "backward":
            what = f"the backward of {what}"
        if self.operator == "cast":
            what = f"{'a gradient' if self.direction == 'backward' else 'an argument'} for {what}"
            what = f"the cast to {self.outputs[0].dtype} of {what}"
        return f"First {kind}: in {what}."


def _finite(number: float | None) -> bool:
    return number is None or math.isfinite(number)


def plain_data(value: Any) -> Any:
    """Returns dicts and lists of numbers and text; inf and NaN become the texts "inf" and "nan"."""
    if isinstance(value, dict):
        return {key: plain_data(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True)
class Origin:
    """The operator that first produced the inf or NaN of one gradient.

    Attributes:
        op: the operator; None if no watched operator produced it.
        is_unwritten: True if an input was not finite, and no watched operator wrote that.
    """

    op: WatchedOp | None
    is_unwritten: bool = False

    @property
    def is_input(self) -> bool:
        """True if data or a parameter was not finite to begin with."""
        op = self.op
        if op is None or not self.is_unwritten or op.is_backward:
            return False
        return all(values.is_finite or not values.is_unwritten or values.is_leaf for values in op.inputs)


class Examiner:
    """Names the operator of a watched step that first produced inf or NaN.

    Args:
        properties: the values of the opt level, on which the remedy depends.
        policy: how the loss scale behaves.
        name_of_module: returns the name of a module in the user's model.
    """

    def __init__(
        self, properties: Properties, policy: ScalePolicy, name_of_module: Callable[[nn.Module], str | None]
    ) -> None:
        self._properties = properties
        self._dynamic, self._min_loss_scale = policy.dynamic, policy.min_loss_scale
        self._name_of_module = name_of_module

    def describe(
        self, origins: Iterable[Origin], missed_threads: bool = False, loss_scale: float | None = None
    ) -> OverflowTrace | None:
        """Returns the first of several origins in words, after it ran again in float32; None if there are none.

        Args:
            origins: those of an optimizer's gradients.
            missed_threads: whether forward passes ran in threads that were not watched.
            loss_scale: scale of the loss in the backward pass; None if it is unknown.
        """
        every = list(origins)
        if not every:
            return None
        notes: tuple[str, ...] = ("forward passes in other threads were not watched",) if missed_threads else ()
        found = {origin.op.number: origin for origin in every if origin.op is not None}
        if not found:
            return OverflowTrace("unknown", notes=notes)
        first = found[min(found)]
        op = first.op
        assert op is not None
        if first.is_unwritten and not first.is_input:
            return OverflowTrace("unknown", notes=(*notes, _NO_FORWARD))
        rerun = None if first.is_input else causes.in_float32(op)
        if rerun is None and not first.is_input and _ran_in_half(op):
            notes += (_NOT_RUN_AGAIN,)
        named = _to_name(op)
        place = op.place or named.place  # the user's own backward function, or the forward
        modules = named.modules or op.modules
        direction = "input" if first.is_input else "backward" if op.is_backward else "forward"
        remedies, overlay, scale = self._remedies(op, named, direction, rerun, loss_scale)
        return OverflowTrace(
            direction,
            _function_name(op, named),
            "cast" if op.op_name == causes.CAST else op.op_name,
            *self._named_module(modules),
            None if place is None else place.file,
            None if place is None else place.line,
            "" if place is None else place.source,
            tuple(map(_traced, op.inputs)),
            tuple(map(_traced, op.outputs)),
            None if rerun is None else rerun.largest,
            tuple(remedies),
            overlay,
            scale,
            len(found) - 1,
            notes,
        )

    def _named_module(self, modules: Sequence[nn.Module]) -> tuple[str | None, str | None]:
        """Returns name and class of the innermost module that the user's model knows; else None and a class."""
        for module in reversed(modules):
            name = self._name_of_module(module)
            if name is not None:
                return name, type(module).__name__
        return None, type(modules[-1]).__name__ if modules else None

    def _remedies(
        self,
        op: WatchedOp,
        named: WatchedOp,
        direction: str,
        rerun: causes.Rerun | None,
        loss_scale: float | None,
    ) -> tuple[list[str], dict[str, Any] | None, float | None]:
        if direction == "input":
            return ["look at the data, or at the weights (a learning rate that is too high)"], None, None
        if not _ran_in_half(op) or (rerun is not None and not rerun.is_finite):
            return ["none in precision: it is not finite in float32 either"], None, None
        if direction == "backward":
            return self._remedies_of_backward(rerun, loss_scale)
        return self._remedies_of_forward(named)

    def _remedies_of_backward(
        self, rerun: causes.Rerun | None, loss_scale: float | None
    ) -> tuple[list[str], None, float | None]:
        if rerun is None or not rerun.largest or loss_scale is None:
            return ["a lower loss scale"], None, None
        greatest = torch.finfo(self._properties.half_dtype).max
        fits = _power_of_two_below(loss_scale * min(greatest / rerun.largest, 0.5))
        if fits < self._min_loss_scale:
            told = (
                f"no loss scale: it would have to be {fits:g}. Bring this gradient down, or use half_dtype='bfloat16'"
            )
            return [told], None, None
        if self._dynamic:
            return [f"a loss scale of {fits:g} or less; the dynamic scale gets there by itself"], None, fits
        return [f"a lower loss scale: amp.initialize(..., loss_scale={fits:g}), or loss_scale='dynamic'"], None, fits

    def _remedies_of_forward(self, op: WatchedOp) -> tuple[list[str], dict[str, Any] | None, None]:
        told: list[str] = []
        overlay: dict[str, Any] | None = None
        name = _listed_name(op).rpartition(".")[2]
        path, _ = self._named_module(op.modules)
        if self._properties.patch_torch_functions and op.is_called_by_itself and op.op_name != causes.CAST:
            told.append(f"{_listed_name(op)} on float32 tensors: it was called by itself, so that no list can name it")
        elif self._properties.patch_torch_functions:
            overlay = overlay_for(_listed_name(op))
            told.append(f"this function in float32: amp.initialize(..., cast_lists={overlay})")
        elif path:
            told.append(f"this module in float32: amp.initialize(..., keep_fp32=[{path!r}])")
        else:
            told.append(f"{name} in float32, by .float() on its arguments: no submodule has it, for keep_fp32 to name")
        if self._properties.half_dtype is torch.float16:
            told.append("float32's range: amp.initialize(..., half_dtype='bfloat16')")
        return told, overlay, None


def _ran_in_half(op: WatchedOp) -> bool:
    return ran_in_half(op.inputs, op.outputs)


def _to_name(op: WatchedOp) -> WatchedOp:
    """Returns the operator to name for one: in a backward pass that of the forward pass.

    For a gradient that is cast, this is the operator whose result was cast in the forward pass.
    """
    named = op.forward if op.is_backward and op.forward is not None else op
    read = [each for values in named.inputs for each in (values, *values.parts)]
    writers = [values.writer for values in read if values.writer is not None]
    return writers[0] if named is not op and named.op_name == causes.CAST and writers else named


def _listed_name(op: WatchedOp) -> str:
    """Returns the path of a function as a list could name it.

    For a function in Python that calls other listed ones, the operator below has their name.
    """
    if op.op_name == causes.CAST and op.readers:
        return _listed_name(op.readers[0])
    name = op.function_name
    if isinstance(op.function, types.FunctionType) and op.op_name in spellings.known_names():
        return next(map(str, spellings.spellings(op.op_name)), name)
    return name


def _function_name(op: WatchedOp, named: WatchedOp) -> str:
    """Returns the name of the function to blame: an autograd.Function's own if the user wrote the backward."""
    if op.is_backward and op.place is not None and op.node is not None:
        return op.node.removesuffix("Backward")
    if op.is_backward and (op.parameter is not None or (op.forward is None and op.op_name in ("add", "add_"))):
        return SUM_OF_GRADIENTS
    return _listed_name(named)


def overlay_for(path: str) -> dict[str, Any]:
    """Returns the overlay that blacklists a function under every spelling that torch has for its name."""
    namespace, _, name = path.rpartition(".")
    bare = spellings.name_of_operator(name) or name.rstrip("_")
    if namespace in spellings.NAMESPACES and spellings.spellings(bare):
        return {"blacklist": {"*": [bare]}}
    return {"blacklist": {namespace: [name]}}


def _power_of_two_below(number: float) -> float:
    return 2.0 ** math.floor(math.log2(number)) if number > 0 else 0.0


def _traced(values: Values) -> TracedTensor:
    return TracedTensor(str(values.dtype).removeprefix("torch."), values.shape, values.largest)


class OverflowTracer:
    """Watches the steps of a session, and says why one was skipped.

    It watches the thread that runs the first forward pass, from there until the session ends.

    Args:
        properties: the values of the opt level.
        policy: how the loss scale behaves.
        named_modules: returns the names of the adopted models' modules, by the module's id.
    """

    def __init__(
        self, properties: Properties, policy: ScalePolicy, named_modules: Callable[[], dict[int, str]]
    ) -> None:
        self._watch = Watch(keep=ran_in_half)
        self._examiner = Examiner(properties, policy, lambda module: named_modules().get(id(module)))
        self._origins: dict[int, Origin] = {}  # by the id of the parameter, since its optimizer's last step
        self._arrived: set[int] = set()  # ids of the parameters with a gradient since then
        self._has_gone_backward = False  # since the first of these forward passes
        self._forwards: list[int] = []  # the number of the first operator of each

    def install(self, ledger: PatchLedger) -> None:
        """Hooks all modules, so that the first forward pass begins to watch.

        Compiled code runs uncompiled then, because torch.compile leaves code under modes alone.
        """
        handle = torch.nn.modules.module.register_module_forward_pre_hook(self._before_forward)
        ledger.on_undo(handle.remove)
        self._watch.hook_modules()  # behind that one, which asks whether a module is running
        ledger.on_undo(self._watch.forget)
        ledger.on_undo(self._watch.stop)

    def trace_of(self, parameters: Iterable[Tensor], loss_scale: float) -> OverflowTrace:
        """Returns where the first inf or NaN in the gradients of parameters came from; syncs with the device.

        Args:
            parameters: parameters of a model, as an optimizer has them.
            loss_scale: scale of the loss in the backward passes.
        """
        self._note_origins()
        ids = set(map(id, parameters))
        is_watched = bool(ids & self._arrived)  # sharded parameters get their gradients from other tensors
        origins = [origin for key, origin in self._origins.items() if key in ids or not is_watched]
        if not origins:
            note = FINITE_HERE if self._arrived else _NOT_WATCHED
            return OverflowTrace("unknown", notes=(note,))
        return self._examiner.describe(origins, self._watch.missed_threads, loss_scale) or OverflowTrace("unknown")

    def end_step(self, parameters: Iterable[Tensor]) -> None:
        """Forgets the gradients of parameters, after a step that used them or was skipped."""
        self._note_origins()
        ids = set(map(id, parameters))
        if not ids & self._arrived:  # those of sharded parameters
            ids = {*self._origins, *self._arrived}
        for key in ids:
            self._origins.pop(key, None)
            self._arrived.discard(key)

    def _before_forward(self, *_: object) -> None:
        watch = self._watch
        if watch.is_in_forward or not watch.is_this_thread or torch._C._current_graph_task_id() != -1:
            return
        if not torch.is_grad_enabled():
            watch.pop()  # under a mode torch takes other kernels for layers in eval mode
        elif not watch.is_on:
            watch.push()
        self._note_origins()
        if self._has_gone_backward:
            watch.forget()
            self._has_gone_backward = False
            self._forwards.clear()
        self._forwards.append(watch.count)
        if len(self._forwards) > _FORWARDS_KEPT:  # such as in an evaluation that records gradients
            watch.forget(before=self._forwards.pop(0))

    def _note_origins(self) -> None:
        """Remembers the origins of the gradients that have arrived and are not finite."""
        arrived = self._watch.gradients
        if arrived:
            # The latest pass counts: gradients of an earlier one may have been cleared since.
            self._origins |= origins_of_gradients(self._watch)
            self._arrived.update(id(gradient.parameter) for gradient in arrived)
            arrived.clear()
            self._has_gone_backward = True


#: Why no operator is named for gradients that other ranks, or other code, made inf or NaN.
FINITE_HERE = (
    "the gradients that this process computed are finite: another rank's are not, or other code changed them afterwards"
)
_NOT_WATCHED = "no backward pass of these parameters was watched, such as one in another thread, or without modules"
_NOT_RUN_AGAIN = "the remedy was not tried: the operator could not run again in float32, or its inputs were written to"
_NO_FORWARD = "the forward pass of this backward pass was no longer watched, since others followed"

#: Forward passes that are kept if no backward pass follows any of them.
_FORWARDS_KEPT = 8


def origin_at(op: WatchedOp | None) -> Origin:
    """Returns an operator as an origin."""
    return Origin(op, op is not None and any(not each.is_finite and each.is_unwritten for each in op.inputs))


def origins_of_gradients(watch: Watch) -> dict[int, Origin]:
    """Returns the origins of gradients that are not finite, by the id of the parameter; syncs with the device."""
    watch.read()
    reached = [gradient for gradient in watch.gradients if not gradient.values.is_finite]
    if not reached and all(values.is_finite for op in watch.ops if op.parameter is not None for values in op.outputs):
        return {}
    origins = causes.origins(watch.ops)
    found: dict[int, Origin] = {}
    for gradient in reached:
        # What made the loss inf may have led to the gradient by other numbers: log(0), and then 1 / 0.
        ops = [origins.get(id(values)) for values in (gradient.values, gradient.loss)]
        op = min(filter(None, ops), key=lambda each: each.number, default=None)
        found.setdefault(id(gradient.parameter), origin_at(op))
    for added in watch.ops:  # finite gradients may have a sum that is not
        if added.parameter is not None and all(values.is_finite for values in added.inputs):
            sums = [origins[id(values)] for values in added.outputs if id(values) in origins]
            if sums:
                found.setdefault(id(added.parameter), origin_at(min(sums, key=lambda op: op.number)))
    return found
