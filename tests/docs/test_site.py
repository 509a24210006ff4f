"""The documentation: every command and config in it is valid, every link leads somewhere, and the site builds."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from megatron_tlt.cli import build_parser
from megatron_tlt.config.docs import lookup
from megatron_tlt.config.libraries import library_fields
from megatron_tlt.config.passthrough import TARGETS
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.shipped import find_config
from tests.helpers.launch import REPOSITORY

PAGES = sorted(
    path
    for path in (*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "tests").glob("*.md"))
    if "_reference" not in path.parts
)
NAMES = [str(path.relative_to(REPOSITORY)) for path in PAGES]
_BLOCK = re.compile(r"^```([a-z]*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
_READERS = ("megatron_tlt/models/seed_oss.py", "slurm/site.sh", "PARTS/unpack.sh")
"""Files that a reader writes, or that a command before has written."""
_FILES = re.compile(r"\b(?:megatron_tlt|docs|launch|slurm|tools|tests)/[\w./-]+\.(?:py|md|yaml|sh|sbatch|json|def)\b")


def blocks(text: str, language: str) -> Iterator[str]:
    for found in _BLOCK.finditer(text):
        if found[1] == language:
            yield found[2]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command line of bash blocks, without comments, pipes and continuation marks."""
    for block in blocks(text, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"\s(?:\||&&|;)\s", line):
                words = shlex.split(part, comments=True)
                if words:
                    yield words


def command_problem(words: list[str]) -> str | None:
    """What is wrong with a command of the documentation; None if nothing is."""
    program, arguments = words[0], words[1:]
    if program == "tlt":
        return _tlt_problem(arguments)
    if program in ("bash", "sbatch", "python", "python3", "sh"):
        script = next((word for word in arguments if not word.startswith("-")), None)
        if script is not None and "/" in script and not _is_there(script):
            return f"no file {script}"
    return None


def _is_there(path: str) -> bool:
    return (REPOSITORY / path).is_file() or path in _READERS


def _tlt_problem(arguments: list[str]) -> str | None:
    arguments = [word for word in arguments if word != "[...]"]
    try:
        given, rest = build_parser().parse_known_args(arguments)
    except SystemExit:
        return f"tlt {' '.join(arguments)}: the parser refuses it"
    if rest and not hasattr(given, "rest"):
        return f"tlt {' '.join(arguments)}: unknown {rest}"
    for word in arguments:
        if word.startswith("launch/") and word.endswith(".yaml"):
            find_config(REPOSITORY / word)
        key = re.match(r"^([a-z_]+(?:\.[a-z_0-9]+)*)=", word)
        if key and (problem := key_problem(key[1])):
            return problem
    return None


def key_problem(key: str) -> str | None:
    """None if a launch config may have this key."""
    for target in TARGETS:
        if key == target.path or (
            key.startswith(f"{target.path}.") and not library_fields(target.module, target.class_name)
        ):
            return None
    if key.startswith(
        ("rollout.engine_arguments", "algorithm.arguments", "actor.optimizer_arguments", "evaluation.sets")
    ):
        return None
    if key in TltConfig.model_fields:
        return None
    try:
        lookup(key)
    except Exception as error:
        return str(error)
    return None


def keys_of(node: object, prefix: str = "") -> Iterator[str]:
    """The keys of a config in a page, lists' rows without an index; free mappings end a key."""
    if isinstance(node, list):
        for item in node:
            yield from keys_of(item, prefix)
    elif isinstance(node, dict) and not prefix.endswith((".params", ".arguments", "_arguments")):
        for name, value in node.items():
            yield from keys_of(value, f"{prefix}.{name}" if prefix else str(name))
    elif prefix:
        yield prefix


@pytest.mark.parametrize("name", NAMES)
def test_commands_are_accepted(name: str) -> None:
    problems = [problem for words in commands((REPOSITORY / name).read_text()) if (problem := command_problem(words))]
    assert problems == []


@pytest.mark.parametrize("name", NAMES)
def test_configs_have_keys_that_exist_and_code_compiles(name: str) -> None:
    text = (REPOSITORY / name).read_text()
    for block in blocks(text, "yaml"):
        values = yaml.safe_load(block)
        if isinstance(values, dict) and values.keys() <= TltConfig.model_fields.keys():
            problems = [problem for key in keys_of(values) if (problem := key_problem(key))]
            assert problems == [], block
    for block in blocks(text, "python"):
        compile(block, name, "exec")


@pytest.mark.parametrize("name", NAMES)
def test_links_and_files_lead_somewhere(name: str) -> None:
    page = REPOSITORY / name
    text = page.read_text()
    targets = [one or other for one, other in _LINK.findall(_BLOCK.sub("", text))]
    lost = [t for t in targets if "://" not in t and t[0] != "#" and not (page.parent / t.partition("#")[0]).exists()]
    lost += [path for path in _FILES.findall(text) if not _is_there(path)]
    assert lost == []


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("tlt learn my.yaml", "parser refuses"),
        ("tlt plan my.yaml --serch", "unknown"),
        ("tlt train my.yaml trainer.step=3", "trainer.step"),
        ("bash launch/quickstrat.sh", "no file"),
        ("tlt config --docs trainer.steps", None),
        ("sbatch slurm/train.sbatch launch/qwen2.5-32b-8n8g.yaml", None),
    ],
)
def test_a_wrong_command_would_be_found(command: str, said: str | None) -> None:
    found = command_problem(shlex.split(command))
    assert (found is None) if said is None else (found is not None and said in found)


def test_a_wrong_key_would_be_found() -> None:
    found = [
        key for key in keys_of({"trainer": {"steps": 1, "stepps": 2}, "tasks": [{"nick": "x"}]}) if key_problem(key)
    ]
    assert found == ["trainer.stepps", "tasks.nick"]


def test_keys_of_other_libraries_stand_beside_ours_that_exist() -> None:
    text = (REPOSITORY / "docs" / "coming_from.md").read_text()
    ours = re.findall(r"^\| `([a-z_.]+)` \|", text, re.MULTILINE)
    assert len(ours) > 15 and [key for key in ours if key_problem(key)] == []


SHORT = (
    "tlt plan qwen2.5-7b-1n8g",
    "tlt plan launch/qwen2.5-32b-8n8g.yaml --reshard",
    "tlt models",
    "tlt tasks",
    "tlt config --docs trainer.steps",
)


@pytest.mark.parametrize("command", SHORT)
def test_short_commands_run(command: str) -> None:
    entry = "import sys; from megatron_tlt.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = [sys.executable, "-c", entry, *command.split()[1:]]
    done = subprocess.run(arguments, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert any(command.partition(" --")[0].rpartition("/")[2] in (REPOSITORY / name).read_text() for name in NAMES)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if importlib.util.find_spec("sphinx") is None:
        pytest.skip("sphinx is not installed: requirements/dev.txt")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "docs", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    for page in ("index", "_reference/keys", "_reference/metrics", "_reference/commands", "concepts", "coming_from"):
        assert (tmp_path / f"{page}.html").is_file()
    assert "trainer.prompts_per_step" in (tmp_path / "_reference" / "keys.html").read_text()
