"""The shell of slurm/ as far as it needs no Slurm: containers, arguments, and what a node without Python says."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.launch import REPOSITORY

JOB = {"SLURM_JOB_ID": "7", "TLT_ROOT": str(REPOSITORY)}


def bash(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "TLT_"))}
    return subprocess.run(
        ["bash", *command], cwd=REPOSITORY, env={**own, **environment}, capture_output=True, text=True, timeout=60
    )


def container(image: str) -> list[str]:
    script = (
        'source slurm/common.sh; mapfile -t words < <(container_words "$1" "/a:/a,/b:/b"); printf "%s\\n" "${words[@]}"'
    )
    done = bash("-c", script, "bash", image, **JOB)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_one_variable_chooses_container_or_bare_metal() -> None:
    assert container("/images/tlt.sif") == ["apptainer", "exec", "--nv", "--bind", "/a:/a,/b:/b", "/images/tlt.sif"]
    here = f"--container-workdir={REPOSITORY}"
    assert container("registry#tlt:1") == ["--container-image=registry#tlt:1", "--container-mounts=/a:/a,/b:/b", here]
    assert container("") == [""]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "number of jobs: found ''"),
        (("0", "c.yaml"), "number of jobs: found '0'"),
        (("2", "--nodes=2"), "no config given"),
        (("2", "-N", "2", "c.yaml"), "option of sbatch: found '-N'"),
    ],
)
def test_a_chain_says_what_is_wrong_with_its_arguments(arguments: tuple[str, ...], message: str) -> None:
    done = bash("slurm/chain.sh", *arguments)
    assert done.returncode == 2 and message in done.stderr


@pytest.mark.parametrize("script", ["train", "evaluate", "convert"])
def test_a_job_submitted_from_elsewhere_says_so(script: str, tmp_path: Path) -> None:
    done = bash(f"slurm/{script}.sbatch", "c.yaml", SLURM_JOB_ID="7", SLURM_SUBMIT_DIR=str(tmp_path))
    assert done.returncode == 2 and f"no slurm/common.sh in {tmp_path}" in done.stderr


def test_a_node_without_the_environment_is_named(tmp_path: Path) -> None:
    done = bash("slurm/node.sh", "doctor", TLT_VENV=str(tmp_path), SLURMD_NODENAME="n7")
    assert done.returncode == 2 and f"n7: no Python at {tmp_path}/bin/python" in done.stderr


def test_what_a_cluster_needs_is_sourced_on_every_node(tmp_path: Path) -> None:
    (tmp_path / "site.sh").write_text(f'export TLT_VENV="{tmp_path}"; echo "site of ${{SLURMD_NODENAME}}"\n')
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$TLT_NODE_RANK $OMP_NUM_THREADS $PYTHONPATH $*"\n')
    python.chmod(0o755)
    environment = {
        "TLT_SITE": str(tmp_path / "site.sh"),
        "SLURMD_NODENAME": "n3",
        "SLURM_NODEID": "3",
        "PYTHONPATH": "",
    }
    done = bash("slurm/node.sh", "train", "c.yaml", "a b=1", **environment, OMP_NUM_THREADS="1")
    assert done.stdout.splitlines() == ["site of n3", f"3 1 {REPOSITORY} -m megatron_tlt train c.yaml a b=1"]
