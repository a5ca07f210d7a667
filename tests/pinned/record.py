"""Record what the library computes on this machine: ``python -m tests.pinned.record``.

Do so with a version that is known to be right: on a new machine, with a new torch, or after a change that is meant to
give other numbers. What is recorded for other machines stays. ``--folders`` writes the saved folders and the workdir
anew too, ``--help-texts`` nothing but the help of the commands.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.pinned import kept, machine, processes
from tests.pinned.cells import CELLS, FOLDERS, WORK, Facts, facts
from tests.pinned.help_texts import help_texts

APART = {"killed and resumed": processes.resumed, "two processes": processes.together}


def measured(names: list[str]) -> dict[str, Facts]:
    """The facts of these cells, run in this order."""
    return {name: facts(CELLS[name].run()) for name in names}


def measured_twice() -> dict[str, Facts]:
    """In this process and, in the opposite order, in another; an error where they differ."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
        again = other.submit(measured, list(CELLS)[::-1]).result()
    found = measured(list(CELLS))
    for name in APART:
        found[name], again[name] = apart(name), apart(name)
    differ = [name for name in found if found[name] != again[name]]
    if differ:
        sys.exit(f"these give other numbers every time: {', '.join(differ)}")
    return found


def apart(name: str) -> Facts:
    with tempfile.TemporaryDirectory() as folder:
        return APART[name](Path(folder))


def record_digests() -> None:
    """Of this machine, beside those of others."""
    known = machine.read(machine.DIGESTS)
    before, found = known.get(machine.this_machine(), {}), measured_twice()
    for name in sorted(found.keys() | before.keys()):
        if found.get(name) != before.get(name):
            print("new" if name not in before else "changed" if name in found else "gone", name, sep=": ")
    machine.write(machine.DIGESTS, {**known, machine.this_machine(): found})


def record_folders() -> None:
    """Written anew; what other machines make of them is not known any more."""
    shutil.rmtree(machine.FOLDERS, ignore_errors=True)
    shutil.rmtree(machine.WORKDIR, ignore_errors=True)
    machine.FOLDERS.mkdir()
    written = {name: facts_of_saved(name, machine.FOLDERS / name) for name in FOLDERS}
    WORK.run(workdir=machine.WORKDIR)
    machine.write(machine.KEPT, {"folders": written, "outputs": {}, "workdir": {}})


def facts_of_saved(name: str, folder: Path) -> Facts:
    result = CELLS[FOLDERS[name]].run()
    result.save(folder)
    return facts(result)


def record_kept() -> None:
    """What this machine makes of the folders."""
    known, here = machine.read(machine.KEPT), machine.this_machine()
    known["outputs"][here] = {name: kept.outputs(name, machine.FOLDERS / name) for name in FOLDERS}
    with tempfile.TemporaryDirectory() as folder:
        known["workdir"][here] = kept.continued(kept.work_copy(Path(folder)))
    machine.write(machine.KEPT, known)


def record_help() -> None:
    shutil.rmtree(machine.HELP, ignore_errors=True)
    machine.HELP.mkdir()
    for name, text in help_texts().items():
        (machine.HELP / f"{name}.txt").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.pinned.record", description="Record what is computed here.")
    parser.add_argument("--folders", action="store_true", help="write the saved folders and the workdir anew, too")
    parser.add_argument("--help-texts", action="store_true", help="write the help of the commands anew, nothing else")
    asked = parser.parse_args()
    if asked.help_texts:
        record_help()
        return
    record_digests()
    if asked.folders:
        record_folders()
    record_kept()


if __name__ == "__main__":
    main()
