"""Every function that another system casts has an entry in the lists, or a reason in docs/design/cast-lists.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from samples import LIST_NAMES, LISTS, entries, flatten, lacks

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

DOCUMENT = Path(__file__).parents[2] / "docs" / "design" / "cast-lists.md"
PEERS = ("apex", "torch_autocast_cuda", "torch_autocast_cpu")
LISTED = {entry.path for name in LIST_NAMES for entry in entries(name)}


def peer_names(peer: str) -> set[str]:
    lists = yaml.safe_load((LISTS / "peers" / f"{peer}.yaml").read_text(encoding="utf-8"))
    assert set(lists) <= set(LIST_NAMES)
    return {
        f"{namespace}.{entry['name']}"
        for namespaces in lists.values()
        for namespace, names in namespaces.items()
        for entry in flatten(names)
    }


def table(heading: str) -> list[tuple[list[str], list[str]]]:
    """The names in the first and in the second column of the table under a heading, row by row."""
    _, _, section = DOCUMENT.read_text(encoding="utf-8").partition(f"## {heading}\n")
    section, _, _ = section.partition("\n## ")
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`([^`]+)`", first), re.findall(r"`([^`]+)`", second)) for first, second in rows]


def explained_names() -> list[str]:
    return [name for names, _ in table("Names without an entry") for name in names]


@pytest.mark.parametrize("peer", PEERS)
def test_every_name_of_a_peer_has_an_entry_or_a_reason(peer):
    assert peer_names(peer) - LISTED - set(explained_names()) == set()


@pytest.mark.parametrize("peer", [peer for peer in PEERS if peer != "apex"])
def test_names_of_torch_autocast_exist(peer):
    assert {name for name in peer_names(peer) if lacks(name)} == set()


def test_reasons_are_given_once_and_for_names_of_peers_without_an_entry():
    names = explained_names()
    assert len(names) == len(set(names))
    assert set(names) & LISTED == set()
    assert set(names) <= set().union(*map(peer_names, PEERS))


def test_operators_under_other_names_belong_to_explained_functions():
    rows = table("Operators under other names")
    assert rows
    for operators, functions in rows:
        assert all(hasattr(torch.ops.aten, operator) for operator in operators)
        assert set(functions) <= LISTED | set(explained_names())
        assert len(functions) == 1
