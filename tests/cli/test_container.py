"""The two recipes of an image: linted, alike, and of what the repository has."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE, DEFINITION = ROOT / "slurm/container/Dockerfile", ROOT / "slurm/container/tlt.def"


def packages(text: str) -> set[str]:
    found = re.search(r"--no-install-recommends \\\n\s*([^\n]+?)\s*(?:\\\n|\n)", text)
    assert found
    return set(found[1].split())


def test_the_dockerfile_passes_its_linter() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("hadolint")), str(DOCKERFILE)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_both_recipes_start_from_the_same_image_and_install_the_same() -> None:
    docker, apptainer = DOCKERFILE.read_text(), DEFINITION.read_text()
    image = re.search(r"^FROM (\S+)$", docker, re.MULTILINE)
    assert image and f"\nFrom: {image[1]}\n" in apptainer
    assert packages(docker) == packages(apptainer)
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", docker, re.MULTILINE) for name in line.split()}
    assert copied == set(re.findall(r"^    (\S+) /opt/megatron-tlt/\S+$", apptainer, re.MULTILINE))
    assert all((ROOT / name).exists() for name in copied)


def test_both_recipes_add_transformer_engine_on_request() -> None:
    """By one name and default, given to the set-up's own variable."""
    docker, apptainer = DOCKERFILE.read_text(), DEFINITION.read_text()
    name, default = re.search(r"^ARG (\w+)=(\w+)$", docker, re.MULTILINE).groups()  # type: ignore[union-attr]
    assert f"\n%arguments\n    {name}={default}\n" in apptainer
    assert f'TLT_TRANSFORMER_ENGINE="${name}" setup_env' in docker
    assert f'TLT_TRANSFORMER_ENGINE="{{{{ {name} }}}}" setup_env' in apptainer
    assert "TLT_TRANSFORMER_ENGINE:-no" in (ROOT / "tools/setup_env.sh").read_text()
    assert f"--build-arg {name}=yes" in (ROOT / "docs/slurm.md").read_text()


def test_the_post_script_of_the_definition_is_valid_shell() -> None:
    script = DEFINITION.read_text().partition("%post -c /bin/bash\n")[2].partition("\n%environment")[0]
    done = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
