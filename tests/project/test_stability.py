"""What docs/stability.md promises: no public name changes by accident, and what earlier versions saved still loads."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest
import stability
import torch
import yaml

import ampatch
from ampatch import amp

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

ROOT = Path(__file__).parents[2]

each_version = pytest.mark.parametrize("saved", sorted(stability.SAVED.iterdir()), ids=lambda folder: folder.name)


def test_public_names_and_arguments_are_those_of_the_file():
    # If the change is meant: `python tests/stability.py`, a line in CHANGELOG.md, and docs/stability.md.
    assert stability.public_names().splitlines() == stability.NAMES.read_text(encoding="utf-8").splitlines()


def test_this_version_has_saved_states():
    assert (stability.SAVED / ampatch.__version__).is_dir()  # `python tests/stability.py`


def test_version_is_the_same_in_every_file():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(\d[^]]*)\] - (\S+)$", changelog, re.MULTILINE)
    assert newest is not None
    assert newest.groups() == (ampatch.__version__, citation["date-released"])
    assert citation["version"] == ampatch.__version__


@each_version
class TestSavedStates:
    def test_training_at_o2_resumes_from_an_earlier_version(self, saved):
        state = torch.load(saved / "o2.pt", weights_only=True)
        assert {value.dtype for value in state["model"].values()} == {torch.float32}
        model, optimizer = stability.network()
        model.load_state_dict(state["model"])  # without amp
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", half_dtype="float16")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", amp.AmpWarning)  # another version has another policy
            amp.load_state_dict(state["amp"])
        assert amp.get_loss_scale() == 1024.0
        for name, value in model.state_dict().items():
            assert torch.equal(value, state["model"][name])
        stability.step(model, optimizer)
        assert {float(each["step"]) for each in optimizer.state_dict()["state"].values()} == {2.0}

    def test_policy_of_an_earlier_version_is_compared(self, saved):
        policy = torch.load(saved / "o2.pt", weights_only=True)["amp"]
        amp.initialize(*stability.network(), opt_level="O1", half_dtype="float16")
        with pytest.warns(amp.AmpWarning, match="opt_level: 'O2' -> 'O1'"):
            amp.load_state_dict(policy)

    def test_grad_scaler_resumes_from_an_earlier_version(self, saved):
        scaler = ampatch.GradScaler("cpu")
        scaler.load_state_dict(json.loads((saved / "grad_scaler.json").read_text(encoding="utf-8")))
        assert scaler.get_scale() == 512.0

    def test_masters_in_an_optimizer_resume_from_an_earlier_version(self, saved):
        state = torch.load(saved / "mixed_precision.pt", weights_only=True)
        model, _ = stability.network()
        model.to(torch.bfloat16)
        optimizer = ampatch.MixedPrecision(torch.optim.Adam(model.parameters(), lr=0.01))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        masters = list(optimizer.master_params())
        assert {master.dtype for master in masters} == {torch.float32}
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert torch.equal(master.to(torch.bfloat16), parameter)

    def test_report_of_an_earlier_version_is_compared(self, saved):
        comparison = amp.compare(saved / "report.json", saved / "report.json")
        assert comparison.rows
