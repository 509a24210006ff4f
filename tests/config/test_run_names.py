"""Which folder a command's run is in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_tlt.config.loader import dump_resolved, load_config
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError
from tests.config.test_loader import write


def test_run_folder_follows_the_command(tmp_path: Path) -> None:
    path = write(tmp_path, run={"name": "quickstart"})

    def folder(*overrides: str) -> str:
        return str(load_config(path, overrides, check_libraries=False).run.dir)

    assert folder() == "runs/quickstart"
    assert folder("speculation.enabled=false") == "runs/quickstart+speculation.enabled=false"
    assert folder("run.dir=runs/mine", "trainer.steps=3") == "runs/mine"
    assert folder("run.name=other") == "runs/other"
    # characters that are made safe must not make two commands one
    assert folder("tasks.0.name='a b'") != folder("tasks.0.name='a/b'")
    long = [f"run.seed={n}" for n in range(20)]
    assert folder(*long) == folder(*long) and len(folder(*long)) <= len("runs/") + 80
    assert folder(*long) != folder(*long[:-1])
    assert str(load_config(write(tmp_path), check_libraries=False).run.dir) == "runs/base"


def test_overrides_that_do_not_identify_a_run_are_no_part_of_its_name(tmp_path: Path) -> None:
    def folder(*overrides: str) -> str:
        return str(load_config(write(tmp_path), overrides, check_libraries=False).run.dir)

    same = ["evaluation.problems=20", "trainer.steps=60", "observe={progress: false}", "launcher.max_restarts=0"]
    assert folder(*same) == folder() == "runs/base"
    assert folder("run.seed=1", *same) == folder("run.seed=1") == "runs/base+run.seed=1"


def test_a_run_in_a_folder_named_by_all_its_overrides_is_still_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, run={"name": "mine"})

    def load(*overrides: str) -> TltConfig:
        return load_config(path, ["run.seed=1", *overrides], check_libraries=False)

    def keep_in(name: str, *overrides: str) -> str:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.resolved.yaml").write_text(dump_resolved(load(*overrides)))
        return f"runs/{name}"

    today = "runs/mine+run.seed=1"
    keep_in("mine+run.seed=2+trainer.steps=30", "run.seed=2")
    assert str(load("trainer.steps=60").run.dir) == today, "that is another run"
    former = keep_in("mine+trainer.steps=30+run.seed=1", "trainer.steps=30")
    for more in ([], ["trainer.steps=60"], ["evaluation.problems=20"]):
        assert str(load(*more).run.dir) == former
    keep_in("mine+run.seed=1+trainer.steps=40")
    with pytest.raises(ConfigError, match=rf"this run is in several folders: .*{re.escape(former)}"):
        load()
    keep_in("mine+run.seed=1", "run.dir=runs/x")
    assert str(load("trainer.steps=60").run.dir) == today


def test_the_folder_that_an_earlier_release_gave_the_same_command_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, run={"name": "mine"})
    for name in ("mine", "mine+trainer.steps=40", "mine+trainer.steps=60"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.resolved.yaml").write_text(
            dump_resolved(load_config(path, check_libraries=False))
        )

    def folder(*overrides: str) -> str:
        return str(load_config(path, overrides, check_libraries=False).run.dir)

    assert folder("trainer.steps=60") == "runs/mine+trainer.steps=60"
    assert folder("trainer.steps=80") == folder() == "runs/mine"
    (tmp_path / "runs" / "mine+trainer.steps=80").mkdir()
    assert folder("trainer.steps=80") == "runs/mine", "no run is in the other folder"
