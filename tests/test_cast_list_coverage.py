"""That no function which another system casts was overlooked: it has an entry here, or a line that says why not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from samples import LIST_NAMES, LISTS, entries, flatten, lacks

DOCUMENT = Path(__file__).parent.parent / "docs" / "design" / "cast-lists.md"
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


def explained_names() -> list[str]:
    """What stands in the first column of the table of names without an entry."""
    _, _, section = DOCUMENT.read_text(encoding="utf-8").partition("## Names without an entry\n")
    section, _, _ = section.partition("\n## ")
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


@pytest.mark.parametrize("peer", PEERS)
def test_every_name_has_an_entry_or_a_reason(peer):
    assert peer_names(peer) - LISTED - set(explained_names()) == set()


@pytest.mark.parametrize("peer", [peer for peer in PEERS if peer != "apex"])
def test_names_of_the_installed_torch_exist(peer):
    assert {name for name in peer_names(peer) if lacks(name)} == set()


def test_reasons_are_given_once_and_for_names_without_an_entry():
    names = explained_names()
    assert len(names) == len(set(names))
    assert set(names) & LISTED == set()


def test_reasons_are_given_for_names_of_a_peer_only():
    assert set(explained_names()) <= set().union(*map(peer_names, PEERS))
