"""The shipped lists and the sample calls, with torch unpatched: they agree with each other and with torch."""

from __future__ import annotations

import collections
import inspect
from collections.abc import Iterable, Iterator

import pytest
import torch
from helpers import check_rows, dtype_name
from samples import (
    HALF_DTYPES,
    LIST_NAMES,
    SAMPLES,
    TORCH_WARNINGS,
    Entry,
    Maker,
    Sample,
    call,
    entries,
    is_method,
    lacks,
    resolve,
    tensors,
)

pytestmark = [pytest.mark.filterwarnings(warning) for warning in TORCH_WARNINGS]

ENTRIES = [entry for name in LIST_NAMES for entry in entries(name) if entry.is_in_force]
HERE = [entry for entry in ENTRIES if not lacks(entry.path)]
BY_PATH = collections.defaultdict(list)
for _entry in ENTRIES:
    BY_PATH[_entry.path].append(_entry)

NAMESPACES = (
    "torch",
    "torch.nn.functional",
    "torch.linalg",
    "torch.fft",
    "torch.special",
    "torch._VF",
    "torch.Tensor",
)

# Listed functions whose in-place form stays out, and why.
IN_PLACE_LEFT_OUT = {
    # Listed only for a kernel that the CPU lacks: in place, torch's own error says so, and CUDA has the kernel.
    "torch.nn.functional.rrelu_",
}


def widened(value: object) -> object:
    return value.float() if isinstance(value, torch.Tensor) else value


def samples(chosen: list[Entry]) -> Iterator[tuple[str, str, Sample]]:
    """The name, the path and the sample of each call."""
    for path in dict.fromkeys(entry.path for entry in chosen):
        for number, sample in enumerate(SAMPLES.get(path, ())):
            yield f"{path}-{number}", path, sample


def with_each_half(chosen: Iterable[Entry]) -> Iterator[tuple[Entry, torch.dtype]]:
    for entry in chosen:
        for half in HALF_DTYPES:
            if half in entry.dtypes:
                yield entry, half


def runs_in_half(path: str, sample: Sample, half: torch.dtype) -> bool:
    """Whether torch has kernels for it on the CPU, forward and backward, whose results are numbers."""
    try:
        result = call(path, sample, Maker([half], requires_grad=True))
        if any(each.isnan().any() for each in tensors(result)):
            return any(each.isnan().any() for each in tensors(call(path, sample, Maker([torch.float32]))))
        floating = [each for each in tensors(result) if each.requires_grad]
        if floating:
            sum(torch.view_as_real(each).sum() if each.is_complex() else each.sum() for each in floating).backward()
    except RuntimeError as error:
        return "derivative" in str(error)  # it has none in any type
    return True


def mixes(half: torch.dtype) -> list[list[torch.dtype]]:
    """Every order in which two floating arguments can differ."""
    return [[half, torch.float32], [torch.float32, half]]


def mixed_calls(path: str, half: torch.dtype) -> list[tuple[Sample, list[torch.dtype]]]:
    """The samples that have two floating arguments or more, in both orders of the mix."""
    found = []
    for sample in SAMPLES[path]:
        counter = Maker([torch.float32])
        sample.build(counter)
        if len(counter.made) > 1:
            found += [(sample, mix) for mix in mixes(half)]
    return found


class TestListsAndTorch:
    def test_listed_functions_and_samples_are_the_same(self):
        # Also what another version of torch has, in which its entry is in force.
        assert set(SAMPLES) == {entry.path for name in LIST_NAMES for entry in entries(name)}

    def test_listed_functions_exist_and_banned_ones_have_advice(self):
        assert [entry.path for entry in ENTRIES if not entry.optional and lacks(entry.path)] == []
        assert [entry.path for entry in ENTRIES if entry.list_name == "banned" and not entry.instead] == []

    def test_entries_of_one_path_have_disjoint_dtypes(self):
        for path, found in BY_PATH.items():
            taken = [dtype for entry in found for dtype in entry.dtypes]
            assert len(taken) == len(set(taken)), path

    def test_paths_of_one_function_are_listed_alike(self, subtests):
        # torch._VF has every builtin of torch; only its recurrent functions are looked up there by torch's own modules.
        paths = collections.defaultdict(set)
        for namespace in NAMESPACES:
            owner = resolve(namespace)
            for name in dir(owner):
                path = f"{namespace}.{name}"
                if callable(getattr(owner, name, None)) and (namespace != "torch._VF" or path in BY_PATH):
                    paths[id(getattr(owner, name))].add(path)

        def check(alias, entry):
            assert [found.terms for found in BY_PATH[alias]] == [found.terms for found in BY_PATH[entry.path]]

        rows = (
            (f"{alias} as {entry.path}", alias, entry) for entry in HERE for alias in paths[id(resolve(entry.path))]
        )
        check_rows(subtests, rows, check)

    def test_an_in_place_form_stands_in_the_same_list(self, subtests):
        def check(entry):
            found = [(found.list_name, found.dtypes) for found in BY_PATH[f"{entry.path}_"]]
            assert found == [(entry.list_name, entry.dtypes)]

        chosen = (entry for entry in HERE if not entry.path.endswith("_") and not lacks(f"{entry.path}_"))
        rows = ((entry.path, entry) for entry in chosen if f"{entry.path}_" not in IN_PLACE_LEFT_OUT)
        check_rows(subtests, rows, check)

    def test_conditions_name_parameters(self, subtests):
        def check(entry):
            assert set(entry.when) <= set(inspect.signature(resolve(entry.path)).parameters)

        check_rows(subtests, ((entry.path, entry) for entry in HERE if entry.when), check)


class TestSamples:
    @pytest.mark.slow
    def test_samples_run_in_float32_and_their_forms_agree(self, subtests):
        def check(path, sample):
            results = []
            for form in sample.forms():
                torch.manual_seed(0)
                maker = Maker([torch.float32], requires_grad=sample.grad)
                results.append(tensors(call(path, sample, maker, form)))
                assert maker.made
            for result in results:
                for found, expected in zip(result, results[0], strict=True):
                    # Up to alignment: some kernels of LAPACK depend on it in the last bit.
                    torch.testing.assert_close(found, expected, equal_nan=True)
                    assert torch.isfinite(found).all()

        check_rows(subtests, samples(HERE), check)

    def test_gradients_reach_the_arguments_of_a_sample(self, subtests):
        def check(path, sample):
            torch.manual_seed(0)
            maker = Maker([torch.float32], requires_grad=True)
            outputs = [tensor for tensor in tensors(call(path, sample, maker)) if tensor.requires_grad]
            parts = [torch.view_as_real(out.resolve_conj()) if out.is_complex() else out for out in outputs]
            leaves = [tensor for tensor in maker.made if tensor.requires_grad]
            # Not all ones: a sum hands its operand an expanded gradient, which grouped_mm refuses.
            gradients = torch.autograd.grad(parts, leaves, [torch.full_like(part, 0.5) for part in parts])
            assert all(gradient.dtype == leaf.dtype for gradient, leaf in zip(gradients, leaves, strict=True))

        check_rows(subtests, (row for row in samples(HERE) if row[-1].grad), check)


class TestPromoteList:
    def test_torch_refuses_mixed_dtypes_in_functions_that_promote(self, subtests):
        def check(entry, half):
            refused = 0
            for sample, mix in mixed_calls(entry.path, half):
                try:
                    call(entry.path, sample, Maker(mix))
                except RuntimeError:
                    refused += 1
            assert refused

        chosen = with_each_half(entry for entry in HERE if entry.list_name == "promote")
        check_rows(subtests, ((f"{entry.path}-{dtype_name(half)}", entry, half) for entry, half in chosen), check)


class TestBlacklist:
    def test_the_dtype_argument_casts_as_via_dtype_needs(self, subtests):
        def check(entry, sample, half):
            maker = Maker([half], requires_grad=True)
            args, kwargs = sample.arguments(maker, method=is_method(entry.path))
            result = resolve(entry.path)(*args, **kwargs, dtype=torch.float32)
            (gradient,) = torch.autograd.grad(result.sum(), maker.made)
            assert result.dtype == torch.float32
            assert gradient.dtype == half
            reference = resolve(entry.path)(*(widened(arg) for arg in args), **kwargs)
            torch.testing.assert_close(result, reference)

        chosen = with_each_half(entry for entry in HERE if entry.via_dtype)
        rows = (
            (f"{entry.path}-{number}-{dtype_name(half)}", entry, sample, half)
            for entry, half in chosen
            for number, sample in enumerate(SAMPLES[entry.path])
        )
        check_rows(subtests, rows, check)

    def test_functions_that_need_float32_are_marked(self, subtests):
        inside = {  # what they call inside is marked
            "torch.nn.functional.local_response_norm",
            "torch.nn.functional.lp_pool3d",
        }
        without = {"torch.istft", "torch.Tensor.istft"}  # its sample is complex

        def check(entry):
            runs = [runs_in_half(entry.path, sample, half) for sample in SAMPLES[entry.path] for half in entry.dtypes]
            needs = entry.needs_float32 if isinstance(entry.needs_float32, list) else ["cpu"] * entry.needs_float32
            if entry.path not in without:
                assert any(runs) or entry.path in inside or "cpu" in needs
                assert not all(runs) or "cpu" not in needs

        chosen = (entry for entry in HERE if entry.list_name == "blacklist" and not entry.path.endswith("_"))
        check_rows(subtests, ((entry.path, entry) for entry in chosen), check)

    def test_the_half_type_that_an_entry_leaves_out_runs(self, subtests):
        def check(entry):
            (other,) = set(HALF_DTYPES) - set(entry.dtypes)
            plain = [(sample, [other]) for sample in SAMPLES[entry.path]]
            for sample, mix in plain + mixed_calls(entry.path, other):
                call(entry.path, sample, Maker(mix))

        chosen = (entry for entry in HERE if entry.list_name == "blacklist" and len(entry.dtypes) == 1)
        check_rows(subtests, ((entry.path, entry) for entry in chosen), check)
