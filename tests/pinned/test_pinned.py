"""What the library computes is what it computed when it was recorded, to the last bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import leanconv
from tests.pinned import kept, machine
from tests.pinned.cells import CELLS, FOLDERS, Facts, facts
from tests.pinned.help_texts import help_texts
from tests.pinned.record import APART

RECORD = "python -m tests.pinned.record"
DIGESTS = machine.read(machine.DIGESTS)
KEPT = machine.read(machine.KEPT)


def recorded(facts_of: dict[str, Facts]) -> Facts:
    """Those of this machine."""
    here = machine.this_machine()
    if here not in facts_of:
        pytest.skip(f"nothing is recorded for this machine ({here}); record it from a version you trust: {RECORD}")
    return facts_of[here]


def known(name: str) -> Facts:
    cells = recorded(DIGESTS)
    assert name in cells, f"{name!r} is new and not recorded; record it: {RECORD}"
    return cells[name]


def assert_recorded(found: Facts, wanted: Facts) -> None:
    """What is easier to understand comes first."""
    assert found["layers"] == wanted["layers"], "other forms or ranks than were recorded"
    assert found["speedup"] == wanted["speedup"], "another speed-up than was recorded"
    assert found["sha"] == wanted["sha"], "other weights than were recorded"


def stamps(folder: Path) -> dict[str, tuple[int, bytes]]:
    """When every file was written, and what is in it."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != kept.STATE)
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.parametrize("name", CELLS)
def test_a_run_gives_the_recorded_network(name: str) -> None:
    wanted = known(name)
    assert_recorded(facts(CELLS[name].run()), wanted)


@pytest.mark.parametrize("name", APART)
def test_runs_in_processes_of_their_own_give_the_recorded_network(name: str, tmp_path: Path) -> None:
    wanted = known(name)
    assert_recorded(APART[name](tmp_path), wanted)


def test_neither_a_kill_nor_little_memory_changes_what_was_recorded() -> None:
    for cells in DIGESTS.values():
        assert cells["plain"] == cells["killed and resumed"] == cells["plain, little memory"]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_saved_folder_holds_the_recorded_network_on_every_machine(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(machine.FOLDERS / name, tmp_path / name)
    wanted = KEPT["folders"][name]
    assert_recorded(kept.loaded(name, folder), wanted)
    again = leanconv.load_result(folder, model=kept.empty(name)).save(tmp_path / "again")
    assert_recorded(kept.loaded(name, again), wanted)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_saved_folder_gives_the_recorded_outputs(name: str, tmp_path: Path) -> None:
    wanted = recorded(KEPT["outputs"])
    folder = shutil.copytree(machine.FOLDERS / name, tmp_path / name)
    assert kept.outputs(name, folder) == wanted[name]


@pytest.mark.parametrize("finished", [True, False])
def test_what_a_workdir_holds_is_used_and_left_as_it_is(finished: bool, tmp_path: Path) -> None:
    work = kept.work_copy(tmp_path, finished=finished)
    before = stamps(work)
    kept.continued(work)
    after = stamps(work)
    assert {name: after[name] for name in before} == before, "files of the workdir were written again"
    assert after.keys() == stamps(machine.WORKDIR).keys(), "other files than were recorded"


@pytest.mark.parametrize("finished", [True, False])
def test_a_workdir_ends_in_the_recorded_network(finished: bool, tmp_path: Path) -> None:
    wanted = recorded(KEPT["workdir"])
    assert_recorded(kept.continued(kept.work_copy(tmp_path, finished=finished)), wanted)


def test_the_help_of_every_command_is_the_recorded_one() -> None:
    found = help_texts()
    wanted = {path.stem: path.read_text() for path in machine.HELP.glob("*.txt")}
    said = f"the help texts are not the recorded ones; if they (or typer) were meant to change: {RECORD} --help-texts"
    assert found.keys() == wanted.keys(), said
    for name in found:
        assert found[name] == wanted[name], said
