"""What a report advises: one sentence for each finding, with what to type.

Owns when a finding is worth a sentence, and its wording. Reads the report alone, so that a saved one says the same.
Must say only what the report's numbers show.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from ampatch.cast_lists.spellings import SYMBOLS, entry_for, is_in_place
from ampatch.diagnostics.report.numbers import size_in_text
from ampatch.diagnostics.report.steps import WARNS_ABOVE, lost_at_best, options_for, spelled, underflow_told
from ampatch.diagnostics.shown_names import counted, shown_module, shown_place
from ampatch.grouping import grouped
from ampatch.half_types import HALF_DTYPES, needs_scale

#: Steps skipped in a row that are worth a sentence: a scale that starts too high skips one or two.
_SKIPS_IN_A_ROW = 3
#: Share of skipped steps that is, if so many steps were seen.
_SKIPPED_SHARE, _STEPS_FOR_SHARE = 0.05, 40
#: Share of all bytes written by casts from which on a blacklisted function is worth a sentence.
_COSTLY = 0.25
#: ``init_scale`` of `amp.initialize` where none is given.
_USUAL_SCALE = 2.0**16
#: Sentences about each kind of finding.
_MOST_OF_A_KIND = 3
#: Where casts are off, so that a whitelisted function runs in float32.
_CASTS_OFF = (
    "before amp.initialize, inside amp.disable_casts, in an optimizer's step, and on devices that have none of the "
    "model's parameters"
)


def advice(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns what to do about the findings of a report as plain data, the most useful first.

    Args:
        data: the other fields of `Report.to_dict`.
    """
    return [each for find in _FINDERS for each in itertools.islice(find(data), _MOST_OF_A_KIND)]


_Row = Mapping[str, Any]
_Advice = Iterator[dict[str, Any]]


def _advised(kind: str, text: str, line: _Row | None = None, function: str | None = None) -> dict[str, Any]:
    """Returns a finding, and what to do about it.

    Args:
        kind: name of the kind of finding.
        text: a sentence that says what to do.
        line: the user's line where to do it; None if it is none.
        function: path of the torch function; None if it is about none.
    """
    file, number = (None, None) if line is None else (line["file"], line["line"])
    return {"kind": kind, "text": text, "file": file, "line": number, "function": function}


# Steps


def _without_amp(data: _Row) -> _Advice:
    if data["settings"] is None and data["cost"]["operators"] and not data["totals"]["casts"]:
        text = (
            "Set amp up, as it was not in this block, and nothing was cast: model, optimizer = amp.initialize(model, "
            "optimizer). print(amp.preflight(model, inputs, loss_fn)) says which opt levels the model passes."
        )
        yield _advised("no amp", text)


def _not_finite(data: _Row) -> _Advice:
    steps = data["steps"] if data["settings"] is not None else ()
    taken = [row for row in steps if row["gradient_norm"] is None and not (row["skipped"] or row["overflow"])]
    if taken:
        text = (
            f"Type amp.initialize(..., check_finite=True): {_steps(taken)} had inf or NaN in the gradients, and went "
            "into the weights; with it, such steps are skipped."
        )
        yield _advised("not finite", text)


def _skips(data: _Row) -> _Advice:
    steps, settings = data["steps"], data["settings"]
    if settings is None:  # a GradScaler has skipped them
        begins_at, starts, trace = _USUAL_SCALE, "GradScaler({})", "Run the script by `ampatch run --trace-overflow`"
    else:
        begins_at, starts = settings.get("init_scale"), "amp.initialize(..., {})"
        trace = 'Type amp.initialize(..., on_overflow="trace")'
    trace += ", which names the function that overflows"
    runs = _runs_of_skips(steps)
    for rows in runs:
        after = [row for row in steps if row["step"] > rows[-1]["step"] and row["loss_id"] == rows[0]["loss_id"]]
        if not after:
            scales = f"while the loss scale fell from {spelled(rows[0]['scale'])} to {spelled(rows[-1]['scale'])}"
            yield _advised("skips", f"{trace}: {_steps(rows)} were skipped, up to the last one, {scales}.")
        elif rows[0]["step"] == steps[0]["step"] and rows[0]["scale"] == begins_at:
            scale = after[0]["scale"]
            text = (
                f"Type {starts.format(options_for(scale, True))}: {_steps(rows)} were skipped until the loss scale had "
                f"fallen from {spelled(rows[0]['scale'])} to {spelled(scale)}."
            )
            yield _advised("first skips", text)
        else:
            yield _advised("skips", f"{trace}: {_steps(rows)} were skipped in a row.")
    skipped = sum(row["skipped"] for row in steps)
    if not runs and len(steps) >= _STEPS_FOR_SHARE and skipped > _SKIPPED_SHARE * len(steps):
        yield _advised("skips", f"{trace}: {skipped} of {len(steps)} steps were skipped.")


def _runs_of_skips(steps: Sequence[_Row]) -> list[list[_Row]]:
    """Returns the steps that were skipped in a row, by loss; no runs of a few."""
    runs = []
    for rows in grouped((row["loss_id"], row) for row in steps).values():
        runs += [list(run) for skipped, run in itertools.groupby(rows, itemgetter("skipped")) if skipped]
    return [run for run in runs if len(run) >= _SKIPS_IN_A_ROW]


def _steps(rows: Sequence[_Row]) -> str:
    first, last = rows[0]["step"], rows[-1]["step"]
    if last - first == len(rows) - 1:
        return f"step {first}" if len(rows) == 1 else f"steps {first} to {last}"
    return f"{len(rows)} steps, the first being {first},"


def _underflow(data: _Row) -> _Advice:
    found, settings = data["underflow"], data["settings"]
    if found is None or settings is None or settings["opt_level"] == "O0" or found["lost"] <= WARNS_ABOVE:
        return
    scale, best, half = found["scale"], found["best_scale"], found["half"]
    at_best, told = lost_at_best(found), underflow_told(found)
    if best > scale and at_best < found["lost"] / 2:
        options = options_for(best, settings["loss_scale"] == "dynamic")
        cure = f"{told}. At a scale of {spelled(best)} it would be {at_best:.1%}."
        yield _advised("underflow", f"Type amp.initialize(..., {options}): {cure}")
    elif needs_scale(HALF_DTYPES.get(half)):
        cure = "Type amp.initialize(..., half_dtype=torch.bfloat16), which has float32's range"
        yield _advised("underflow", f"{cure}: {told}, and no scale helps.")


def _all_zero(data: _Row) -> _Advice:
    """Finds gradients that the half type has flushed to zero before they were counted."""
    found, settings = data["underflow"], data["settings"]
    if found is None or settings is None or found["exponents"] or not found["zeros"]:
        return
    if found["scale"] < _USUAL_SCALE and needs_scale(HALF_DTYPES.get(found["half"])):
        options = options_for(_USUAL_SCALE, settings["loss_scale"] == "dynamic")
        text = (
            f"Type amp.initialize(..., {options}): at a loss scale of {found['scale']:g}, all gradients are zero, as "
            f"{found['half']} makes zero of small numbers."
        )
        yield _advised("underflow", text)


# Casts


def _weights_cast_again(data: _Row) -> _Advice:
    """Finds weights that were cast at each of several forward passes, as happens without gradients."""
    has_trained = data["steps"] or data["underflow"]  # a block may have gradients, and no step
    if not _patches(data) or has_trained or data["totals"]["cache_hits"] or not data["totals"]["casts"]:
        return
    layers = [row for row in data["modules"] if row["class"] in _LAYERS and row["weight_bytes"].get("float32")]
    again = [row for row in layers if _calls(row) > 1 and not row["out"].keys().isdisjoint(HALF_DTYPES)]
    if again:
        count, held = max(map(_calls, again)), sum(row["weight_bytes"]["float32"] // 2 for row in again)
        text = (
            f"Put the loop into `with amp.frozen_weights(model):`, which casts each weight once: {count} forward "
            f"passes without gradients cast the weights of {len(again)} layers again each time, "
            f"{size_in_text(held)} of them."
        )
        yield _advised("weights cast again", text)


#: Layers that call one whitelisted function with one input, by which their calls can be counted.
_LAYERS = ("Linear", "Conv1d", "Conv2d", "Conv3d")


def _calls(row: _Row) -> int:
    return sum(row["in"].values())


def _undone(data: _Row) -> _Advice:
    """Finds tensors that were half, were cast to float32, and are cast back without a use in between."""
    for row in sorted(data["functions"], key=lambda row: -row["undone"]):
        if not row["undone"]:
            return
        line = _line_of(data, row["name"])
        what = (
            f"{row['name']}{_at(line)} casts back to half what was cast from half to float32 before, in "
            f"{counted(row['undone'], 'cast')}"
        )
        cure = "Leave out the cast to float32, such as x.float()"
        if data["settings"] and data["settings"]["cast_model_type"] in HALF_DTYPES:
            half = data["settings"]["half_dtype"]
            cure += f". If amp has cast a model's outputs, type amp.initialize(..., cast_model_outputs={half!r})"
        yield _advised("undone", f"{cure}: {what}.", line, row["name"])


def _rounded(data: _Row) -> _Advice:
    """Finds results in float32's precision that an in-place function rounds to half."""
    for row in data["functions"]:
        in_place, better = _forms(row["name"].rpartition(".")[2])
        calls = sum(
            each["calls"]
            for each in row["types"]
            if "float32" in each["in"][1:] and each["in"][:1] == each["out"] and each["out"][0] in HALF_DTYPES
        )
        if row["rule"] is None and better and calls:
            line = _line_of(data, row["name"])
            text = (
                f"Type x = {better} instead of {in_place}{_at(line)}: it rounds float32 to the half type of x, "
                f"in {counted(calls, 'call')}."
            )
            yield _advised("rounded in place", text, line, row["name"])


def _forms(name: str) -> tuple[str, str]:
    """Returns a call of a function in place, and that of its form out of place: "" if there is none."""
    symbols = {f"__i{operator}__": symbol for symbol, operator in SYMBOLS.items()}
    if name in symbols:
        return f"x {symbols[name]}= y", f"x {symbols[name]} y"
    has_other_form = is_in_place(name) and name not in ("copy_", "set_", "__setitem__")
    return f"x.{name}(y)", f"x.{name.removesuffix('_')}(y)" if has_other_form else ""


def _not_half(data: _Row) -> _Advice:
    """Finds whitelisted functions that ran in float32."""
    if not _patches(data):
        return
    for row in data["functions"]:
        calls = sum(each["calls"] for each in row["types"] if {"float32"} == {*each["in"], *each["out"]})
        if row["rule"] == "whitelist" and calls:
            line = _line_of(data, row["name"])
            text = (
                f"See why casts are off{_at(line)}: {row['name']} ran in float32 in {counted(calls, 'call')}, though "
                f"the whitelist has it; casts are off {_CASTS_OFF}."
            )
            yield _advised("not half", text, line, row["name"])


def _costly(data: _Row) -> _Advice:
    """Finds the blacklisted function whose casts write most."""
    if not _patches(data):
        return
    total = data["totals"]["cast_bytes"]
    rows = [row for row in data["functions"] if row["rule"] == "blacklist" and row["cast_bytes"] > _COSTLY * total]
    for row in sorted(rows, key=lambda row: -row["cast_bytes"])[:1]:
        line, settings = _line_of(data, row["name"]), data["settings"]
        side = {"opt_level": settings["opt_level"], "half_dtype": settings["half_dtype"]}
        other = {**side, "cast_lists": {"unlisted": grouped([entry_for(row["name"])])}}
        text = (
            f"Try amp.compare(model, inputs, loss_fn, {side}, {other}), which says whether {row['name']} needs float32 "
            f"in your model: its casts{_at(line)} write {size_in_text(row['cast_bytes'])}, "
            f"{row['cast_bytes'] / total:.0%} of all."
        )
        yield _advised("costly casts", text, line, row["name"])


# Shapes


def _misaligned(data: _Row) -> _Advice:
    classes = {row["name"]: row["class"] for row in data["modules"]}
    done = set()
    for row in data["misaligned"]:
        names = _SIZES.get(classes.get(row["module"], ""), ("m", "k", "n"))
        # k and n alone are distances between rows in memory. One of 1 is no matrix: a convolution of single channels.
        sizes = list(zip(names, row["size"], row["pads"], strict=True))[1:]
        told = [f"{name} from {size} to {pad}" for name, size, pad in sizes if size != pad]
        if not told or any(size == 1 for _, size, _ in sizes):
            continue
        owner, name = row["function"] or "a product", row["module"]
        if name in classes:
            owner = f"{f'module {name}' if name else shown_module(name)} ({classes[name]})"
        text = (
            f"Pad {' and '.join(told)} in {owner}{_at(row)}: tensor cores take {row['dtype']} in multiples of 8, and a "
            "GPU multiplies other sizes more slowly."
        )
        if text not in done:
            done.add(text)
            yield _advised("misaligned", text, row, row["function"])


#: What a product's sizes are called in the layers that compute it.
_CHANNELS = ("the positions", "in_channels / groups", "out_channels / groups")
_SIZES = {
    "Linear": ("the rows of the input", "in_features", "out_features"),
    **dict.fromkeys(("Conv1d", "Conv2d", "Conv3d"), _CHANNELS),
}


# Places


def _patches(data: _Row) -> bool:
    settings = data["settings"]
    return settings is not None and bool(settings["patch_torch_functions"])


def _line_of(data: _Row, function: str) -> _Row | None:
    """Returns the line that calls a function; None if several do, as the report counts findings by function."""
    rows = [row for row in data["lines"] if function in row["functions"]]
    return rows[0] if len(rows) == 1 else None


def _at(line: _Row | None) -> str:
    return "" if line is None or line["file"] is None else f" at {shown_place(line['file'], line['line'])}"


_FINDERS: tuple[Callable[[_Row], _Advice], ...] = (
    _without_amp,
    _not_finite,
    _skips,
    _underflow,
    _all_zero,
    _undone,
    _weights_cast_again,
    _rounded,
    _not_half,
    _misaligned,
    _costly,
)
