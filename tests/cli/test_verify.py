"""``tlt verify``: an intact run gives 0; each kind of damage to each kind of file is named, and gives 1."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron_tlt.checkpoint.files import atomic_folder, set_latest
from megatron_tlt.checkpoint.manifest import FileSum, sha256_sums, write_manifest
from megatron_tlt.checkpoint.run_folder import verify_run
from megatron_tlt.cli import main
from megatron_tlt.platform.files import temporary_sibling
from tests.helpers.launch import REPOSITORY
from tests.observe.synthetic import make_run

STEPS = 6
RELEASE_0 = REPOSITORY / "tests" / "fixtures" / "run_of_release_0" / "run"
ITEMS = [
    "config.resolved.yaml",
    "metrics.jsonl",
    "lengths.jsonl",
    "samples.jsonl",
    "timeline.rank0.jsonl",
    "timeline.rank1.jsonl",
    "summary.json",
    "timeline.json",
    "checkpoints/latest",
    "checkpoints/step_000005",
    "checkpoints/step_000006",
    "drafter/spot/latest",
    "drafter/spot/version-000000012",
    "drafter/newest",
    "hf",
    "reference/step_000006",
]


def with_manifest(folder: Path, *names: str, state: str | None = None) -> Path:
    with atomic_folder(folder) as temporary:
        for name in names:
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).write_bytes(bytes(range(256)))
        if state is not None:
            (temporary / "state.json").write_text(state)
        write_manifest(temporary)
    return folder


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("verify") / "run", steps=STEPS)
    for step in (STEPS - 1, STEPS):
        with_manifest(run / f"checkpoints/step_{step:06d}", "actor/__0_0.distcp", state=json.dumps({"step": step}))
    set_latest(run / "checkpoints", f"step_{STEPS:06d}")
    with_manifest(run / "drafter/spot/version-000000012", "training.safetensors")
    set_latest(run / "drafter/spot", "version-000000012")
    with_manifest(run / "drafter/newest", "model.safetensors")
    with_manifest(run / "hf", "model.safetensors")
    (run / "reference/step_000006").mkdir(parents=True)
    return run


@pytest.fixture
def folder(intact: Path, tmp_path: Path) -> Path:
    return shutil.copytree(intact, tmp_path / "run")


def test_an_intact_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    temporary_sibling(folder / "checkpoints" / "step_000007").mkdir()  # a save in progress
    assert main(["verify", str(folder), "--json", str(tmp_path / "found.json")]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[1].removesuffix(":") for line in lines] == ITEMS
    assert last.endswith("15 items intact, 0 damaged, 1 not verified")
    assert "not verified: it has no manifest.json" in lines[-1]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["intact"] and [item["name"] for item in found["items"]] == ITEMS


def test_a_run_of_release_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(RELEASE_0)]) == 0
    assert "ok       checkpoints/step_000002" in capsys.readouterr().out


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


HARM: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "flipped": flip_a_bit,
    "zeroed": zero,
    "deleted": Path.unlink,
}
IN_MANIFESTS = {
    "checkpoints/step_000005/actor/__0_0.distcp": "checkpoints/step_000005",
    "checkpoints/step_000006/state.json": "checkpoints/step_000006",
    "checkpoints/step_000006/manifest.json": "checkpoints/step_000006",
    "drafter/spot/version-000000012/training.safetensors": "drafter/spot/version-000000012",
    "drafter/newest/model.safetensors": "drafter/newest",
    "hf/model.safetensors": "hf",
    "hf/manifest.json": "hf",
}
BY_STRUCTURE = ["config.resolved.yaml", "metrics.jsonl", "lengths.jsonl", "samples.jsonl", "checkpoints/latest"]


# a digit that changes in a file of rows, which has no checksum, is not found
CASES = [(file, harm) for file in (*IN_MANIFESTS, *BY_STRUCTURE) for harm in HARM]
CASES = [case for case in CASES if not (case[0] in BY_STRUCTURE[:-1] and case[1] == "flipped")]


@pytest.mark.parametrize(("file", "harm"), CASES)
def test_damage_is_named(folder: Path, file: str, harm: str) -> None:
    HARM[harm](folder / file)
    damaged = {item.name: item.problems for item in verify_run(folder, wait=lambda seconds: None) if item.problems}
    assert set(damaged) == {IN_MANIFESTS.get(file, file)}
    if (file, harm) not in (("checkpoints/step_000006/manifest.json", "flipped"), ("hf/manifest.json", "flipped")):
        assert any(file in problem for problem in damaged[IN_MANIFESTS.get(file, file)]), damaged


@pytest.mark.parametrize("file", ["summary.json", "timeline.json", "timeline.rank1.jsonl"])
def test_damage_to_a_file_that_need_not_be_there(folder: Path, file: str) -> None:
    truncate(folder / file)
    assert [i.name for i in verify_run(folder, wait=lambda seconds: None) if i.problems] == [file]


def test_the_command_says_what_is_damaged(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "checkpoints/step_000006/actor/__0_0.distcp"
    flip_a_bit(file)
    assert main(["verify", str(folder), "--json", str(tmp_path / "found.json")]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("damaged  checkpoints/step_000006")
    assert lines[at + 1] == f"  {file}: SHA-256 differs from the manifest's"
    found = json.loads((tmp_path / "found.json").read_text())
    assert not found["intact"]
    assert [item["name"] for item in found["items"] if not item["intact"]] == ["checkpoints/step_000006"]


def test_rows_that_are_lost_between_lines(folder: Path) -> None:
    def problems(name: str, keep: Callable[[list[str]], list[str]]) -> list[str]:
        file = folder / name
        before = file.read_text()
        file.write_text("".join(keep(before.splitlines(keepends=True))))
        found = [p.partition(": ")[2] for i in verify_run(folder, wait=lambda seconds: None) for p in i.problems]
        file.write_text(before)
        return found

    assert problems("metrics.jsonl", lambda rows: rows[:3] + rows[4:]) == ["no row between steps 2 and 4"]
    assert problems("metrics.jsonl", lambda rows: rows[:-1]) == [
        "ends after step 5; the run has done 6 steps or more",
    ]
    assert problems("lengths.jsonl", lambda rows: rows[2:]) == ["begins with step 3; allowed: 0 or 1"]
    assert problems("metrics.jsonl", lambda rows: [*rows, rows[-1]]) == ["step 6 comes after step 6"]
    assert problems("samples.jsonl", lambda rows: [*rows, rows[0]]) == ["step 1 comes after step 6"]
    assert problems("metrics.jsonl", lambda rows: ['{"a": 1}\n', *rows]) == ["1 rows have no step"]


def test_a_checkpoint_of_another_step_and_a_lost_pointer(folder: Path) -> None:
    with_manifest(folder / "checkpoints/step_000004", state='{"step": 3}')
    (folder / "checkpoints/latest").write_text("step_000009\n")
    damaged = {item.name: item.problems for item in verify_run(folder) if item.problems}
    assert set(damaged) == {"checkpoints/latest", "checkpoints/step_000004"}
    assert "has step 3, its folder is step_000004" in damaged["checkpoints/step_000004"][0]
    assert "names 'step_000009', which is not a folder" in damaged["checkpoints/latest"][0]


class TestBesideTheLiveRun:
    def test_a_line_that_is_being_written_is_read_again(self, folder: Path) -> None:
        file = folder / "metrics.jsonl"
        whole = file.read_bytes()
        file.write_bytes(whole + b'{"step": 7, "wal')

        def complete(seconds: float) -> None:
            file.write_bytes(whole + b'{"step": 7, "wall_time": 1}\n')

        assert [item.problems for item in verify_run(folder, wait=complete) if item.problems] == []

    def test_a_checkpoint_that_is_pruned_is_not_damaged(self, folder: Path) -> None:
        def prune(files: Sequence[Path]) -> list[FileSum]:
            if "step_000005" in str(files[0]):
                shutil.rmtree(folder / "checkpoints" / "step_000005")
            return sha256_sums(files)

        found = {item.name: item for item in verify_run(folder, sums=prune)}
        assert [item for item in found.values() if item.problems] == []
        assert found["checkpoints/step_000005"].note == "removed meanwhile"

    def test_a_checkpoint_may_come_before_its_row(self, folder: Path) -> None:
        (folder / "summary.json").unlink()
        for name in ("metrics.jsonl", "lengths.jsonl", "samples.jsonl"):
            rows = (folder / name).read_text().splitlines(keepends=True)
            (folder / name).write_text("".join(row for row in rows if json.loads(row)["step"] < STEPS))
        assert [item.problems for item in verify_run(folder) if item.problems] == []

    def test_a_run_that_has_just_begun(self, tmp_path: Path, intact: Path) -> None:
        shutil.copy(intact / "config.resolved.yaml", tmp_path)
        assert main(["verify", str(tmp_path)]) == 0

    def test_nothing_is_written(self, folder: Path) -> None:
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        assert main(["verify", str(folder)]) == 0
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize("kind", ["none", "empty", "file"])
def test_what_is_no_run_is_refused(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert main(["verify", str(tmp_path / kind)]) == 2
    assert capsys.readouterr().err.startswith("error: RUN_DIR: ")
