"""Watching kernels: what counts as an edit, what becomes of a version, and what stays the last good one."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from edited_kernels import edit, kernels  # noqa: F401 - a fixture
from needs import needs_nvrtc
from tiny_kernels import write_kernels

from cuflash import settings
from cuflash.debug import watch
from cuflash.debug.watch import Folder, Session, versions
from cuflash.debug.watch_worker import EditedTrial
from cuflash.errors import InvalidConfigError
from cuflash.gpu.device import Device
from cuflash.problem import describe_problem
from cuflash.tuning.workbench import Workbench

PROBLEM = describe_problem(dtype="fp16", head_dim=32)
DEVICE = Device.from_arch("sm_90")
CONFIG = "num_stages=1 block_n=32"
PLAYED = Path(__file__).parent / "played_dev_worker.py"

# --- the folder ---


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(write_kernels(tmp_path / "tiny"))


def test_nothing_changed(folder: Folder) -> None:
    assert folder.changes() == set()


@pytest.mark.parametrize("name", ["tiny.cu", "common/scale.cuh", "prelude.cuh.in"])
def test_an_edit_is_seen_once(folder: Folder, name: str) -> None:
    path = folder.root / name
    path.write_text(path.read_text() + "// edited\n")
    assert folder.changes() == {name}
    assert folder.changes() == set()


def test_a_new_date_is_no_edit(folder: Folder) -> None:
    os.utime(folder.root / "tiny.cu", (1, 1))
    assert folder.changes() == set()
    edited = folder.root / "tiny.cu"
    edited.write_text("edited")
    assert folder.changes() == {"tiny.cu"}


def test_files_come_and_go(folder: Folder) -> None:
    new = folder.root / "common" / "new.cuh"
    new.write_text("// new")
    (folder.root / "tiny.cu").unlink()
    assert folder.changes() == {"common/new.cuh", "tiny.cu"}
    new.unlink()
    write_kernels(folder.root)
    assert folder.changes() == {"common/new.cuh", "tiny.cu"}


def test_a_save_by_renaming_is_an_edit_and_an_editor_s_own_files_are_none(folder: Folder) -> None:
    swap = folder.root / ".tiny.cu.swp"
    swap.write_text("edited")
    (folder.root / "4913").write_text("")
    assert folder.changes() == set()
    swap.rename(folder.root / "tiny.cu")
    assert folder.changes() == {"tiny.cu"}


def test_a_folder_that_is_gone_is_one_change(folder: Folder) -> None:
    shutil.rmtree(folder.root)
    assert "tiny.cu" in folder.changes()
    assert folder.changes() == set()


# --- versions, compiled only ---


@pytest.fixture
def rounds(kernels: Path) -> Iterator[watch.Version]:  # noqa: F811
    return versions(Session(PROBLEM, DEVICE, CONFIG), Folder(kernels), poll=0.001)


@needs_nvrtc
def test_a_version_that_does_not_compile_never_is_the_last_good_one(
    kernels: Path,  # noqa: F811
    rounds: Iterator[watch.Version],
) -> None:
    first = next(rounds)
    assert (first.ok, first.number, first.files, first.base) == (True, 1, (), None)
    line = edit(kernels, "int wrong = no_such_name;")
    second = next(rounds)
    assert not second.ok and second.kernel is None and second.base is first
    (mistake,) = second.mistakes
    assert (mistake.path, mistake.line) == (kernels / "forward_mma.cu", line)
    assert "no_such_name" in mistake.message
    assert mistake.text == "int wrong = no_such_name; // edit"
    edit(kernels, "// harmless")
    third = next(rounds)
    assert third.ok and third.files == ("forward_mma.cu",) and third.base is first
    assert third.kernel and first.kernel and third.kernel.digest != first.kernel.digest
    edit(kernels, "// harmless, too")
    assert next(rounds).base is third


@needs_nvrtc
def test_a_mistake_in_an_included_file_is_found_there(
    kernels: Path,  # noqa: F811
    rounds: Iterator[watch.Version],
) -> None:
    next(rounds)
    line = edit(kernels, "#error no more of this", "common/mask.cuh")
    version = next(rounds)
    assert version.files == ("common/mask.cuh",)
    assert (version.mistakes[0].path, version.mistakes[0].line) == (
        kernels / "common" / "mask.cuh",
        line,
    )


@needs_nvrtc
def test_a_file_that_is_not_the_kernel_s_starts_no_round(
    kernels: Path,  # noqa: F811
    rounds: Iterator[watch.Version],
) -> None:
    next(rounds)
    edit(kernels, "#error", "forward_simt.cu")
    edit(kernels, "// other")
    assert next(rounds).ok


@needs_nvrtc
def test_a_missing_file_is_a_version_too_and_its_return_another(
    kernels: Path,  # noqa: F811
    rounds: Iterator[watch.Version],
) -> None:
    next(rounds)
    text = (kernels / "common" / "mask.cuh").read_text()
    (kernels / "common" / "mask.cuh").unlink()
    gone = next(rounds)
    assert not gone.ok and "mask.cuh" in str(gone.error) and gone.mistakes == ()
    (kernels / "common" / "mask.cuh").write_text(text)
    assert next(rounds).ok


@needs_nvrtc
def test_the_loop_stops_when_told(kernels: Path) -> None:  # noqa: F811
    session = Session(PROBLEM, DEVICE, CONFIG)
    asked = iter([False, False, True])
    found = list(versions(session, Folder(kernels), stop=lambda: next(asked), poll=0.001))
    assert [version.number for version in found] == [1]


def test_what_cannot_run_is_refused_at_once() -> None:
    with pytest.raises(InvalidConfigError, match="block_n"):
        Session(PROBLEM, DEVICE, "block_n=17")


def test_machine_code_made_by_hand_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_CUBIN_DIR", "somewhere")
    with pytest.raises(InvalidConfigError, match="CUFLASH_CUBIN_DIR"):
        Session(PROBLEM, DEVICE)


# --- versions that run, on a GPU that is played ---


@needs_nvrtc
def test_versions_run_and_a_crash_costs_its_process_alone(
    kernels: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("PLAYED_LOG", str(log))
    request = watch.workbench(PROBLEM).request
    with Workbench(request, (sys.executable, str(PLAYED))) as bench:
        session = Session(PROBLEM, DEVICE, CONFIG, bench)
        rounds = versions(session, Folder(kernels), poll=0.001)
        seen = [next(rounds)]
        for end in ("// crash", "// illegal", "// wrong", "// ms=0.5"):
            edit(kernels, end)
            seen.append(next(rounds))
    first, *bad, last = seen
    assert first.run and (first.run.status, first.run.ms) == ("ok", 1.0) and first.ok
    assert [v.run.status for v in bad if v.run] == ["crash", "launch", "wrong"]
    assert not any(v.ok for v in bad) and all(v.base is first and v.run.error for v in bad if v.run)
    assert last.ok and last.base is first and last.run and last.run.ms == 0.5
    assert (session.count, session.goods, session.first_good, session.good) == (5, 2, first, last)
    # One after each of the two that ended theirs, and none for the rest.
    assert log.read_text().count("prepared") == 3


def test_a_request_can_be_sent_as_it_is() -> None:
    import json

    request = json.loads(json.dumps(watch.workbench(PROBLEM, seed=3).request))
    assert describe_problem(**request["problem"]) == PROBLEM and request["seed"] == 3


def test_a_check_looks_at_the_text_and_timed_calls_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "watch_kernels", settings.watch_kernels)  # so that it comes back
    seen: list[object] = []

    class Played:
        def check(self, config: object) -> str:
            seen.append(settings.watch_kernels())
            return "verdict"

        def call(self, config: object) -> object:
            return lambda: seen.append(settings.watch_kernels())

    trial = EditedTrial(Played(), lambda: seen.append("forgot"))  # type: ignore[arg-type]
    for _ in range(2):
        assert trial.check({}) == "verdict"
        trial.call({})()
    assert seen == [True, "forgot", False] * 2
