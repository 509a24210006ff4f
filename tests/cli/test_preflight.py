"""What is known before ranks start is said before they start: every violation at once, by every command alike."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_tlt.bench.tiny_models import write_tiny_model
from megatron_tlt.cli import main, runs
from megatron_tlt.cli.preflight import load_checked
from megatron_tlt.cli.preflight_model import check_with_model
from megatron_tlt.cli.preflight_tasks import Findings
from megatron_tlt.cli.prompt_files import FILE, check_prompt_files
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.data.tokenizer import load_tokenizer
from megatron_tlt.data.tokenizer_training import train_tokenizer
from megatron_tlt.errors import ConfigError
from tests.helpers.user_code import add_module

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def row(prompt: object, answer: str = "1") -> dict[str, Any]:
    return {"prompt": prompt, "reward_model": {"ground_truth": answer}}


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in rows))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with weights and a tokenizer of one token per character; no chat template."""
    folder = tmp_path_factory.mktemp("preflight") / "model"
    tokenizer = train_tokenizer(["sum 3+5"], 128, folder / "tokenizer")
    write_tiny_model("llama-llama3-tied", folder, vocab_size=128)  # whose config.json only transformers can read
    tokenizer.save(folder)
    (folder / "tokenizer_meta.json").unlink()  # so that transformers reads it
    return folder


def copy_of(folder: Path, target: Path) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        if file.is_file():
            (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.fixture
def write(tmp_path: Path, model: Path) -> Callable[..., Path]:
    """Writes a launch config over a file task; its prompts are ``rows``."""

    def write_config(rows: list[Any], *, task: dict[str, Any] | None = None, **sections: Any) -> Path:
        prompts = write_rows(tmp_path / "prompts.jsonl", rows)
        values = {
            "run": {"dir": str(tmp_path / "run")},
            "model": {"path": str(model)},
            "tasks": [{"kind": "file", "name": "mine", "path": str(prompts), **(task or {})}],
            "actor": {"transformer_impl": "local"},
            "rollout": {"max_prompt_tokens": 16, "max_response_tokens": 32},
            **sections,
        }
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write_config


GOOD = [row(f"{i}+{i}=") for i in range(60)]


def violations(path: Path, *overrides: str, **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_checked(path, overrides, **options)
    return str(caught.value).splitlines()


def test_everything_that_is_wrong_is_said_at_once(write: Callable[..., Path], tmp_path: Path) -> None:
    torn = ['{"prompt": "1+', row("1" * 20), {"question": "no answer?"}, row("2", answer="{")]
    other = write_rows(tmp_path / "long.jsonl", [*GOOD, row("1" * 20), row("1" * 21)])
    tasks = [
        {"kind": "file", "name": "torn", "path": str(write_rows(tmp_path / "torn.jsonl", [*GOOD, *torn]))},
        {"kind": "file", "name": "long", "path": str(other), "verifier": "maths"},
        {"name": "chain_summ"},
        {"name": "gcd", "params": {"size": 3}},
    ]
    path = write(GOOD, tasks=tasks, trainer={"mini_batches": 7})
    found = violations(path, "actor.megatron.tensor_parallel=2", "rollout.vllm.max_seqs=3")
    assert all(line.startswith(f"{path}: ") for line in found)
    expected = [
        "trainer.mini_batches: found 7",
        "actor.megatron.tensor_parallel: unknown to the installed TransformerConfig",
        "rollout.vllm.max_seqs: unknown to the installed EngineArgs",
        "torn.jsonl:61: not JSON",
        "torn.jsonl:63: no 'answer' text",
        "long.jsonl:61: its prompt has 20 tokens; allowed by rollout.max_prompt_tokens: 16",
        "long.jsonl:62: its prompt has 21 tokens",
        "tasks[1].verifier: unknown verifier 'maths'",
        "tasks[2].name: unknown generator 'chain_summ'",
        "tasks[3].params.size: ",
    ]
    for line in expected:
        assert sum(line in other for other in found) == 1, (line, found)
    assert len(found) == len(expected)


def test_data_sets_of_the_evaluation_are_checked_like_tasks(write: Callable[..., Path], tmp_path: Path) -> None:
    long = write_rows(tmp_path / "set.jsonl", [row("ab"), row("a" * 40)])
    first = {"kind": "file", "name": "set", "path": str(long), "verifier": "maths"}
    sets = [{"name": "one", "tasks": [first, {"name": "gcdd"}]}]
    found = violations(write(GOOD, evaluation={"sets": sets}))
    wanted = ["tasks[0].verifier: unknown verifier 'maths'", "set.jsonl:2: its prompt has 40", "tasks[1].name: unknown"]
    keys = ["evaluation.sets[0]." * line.startswith("tasks") + line for line in wanted]
    assert all(sum(line in other for other in found) == 1 for line in keys), found
    assert len(found) == 3, found
    twice = [{"name": "one", "tasks": [{"name": "gcd"}]}] * 2
    assert "different names" in violations(write(GOOD, evaluation={"sets": twice}))[0]
    more = [{"name": "one", "tasks": [{"name": "gcd", "held_out_fraction": 0.2}]}]
    (line,) = violations(write(GOOD, tasks=[{"name": "gcd"}], evaluation={"sets": more}))
    assert "evaluation.sets[0].tasks[0].held_out_fraction: found 0.2; the 'gcd' task to train on has 0.1" in line


@pytest.mark.parametrize("command", ["train", "eval", "config", "plan", "simulate"])
def test_every_command_refuses_what_cannot_run(
    command: str, write: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path
) -> None:
    absent = {"path": str(tmp_path / "absent"), "architecture": str(model / "config.json")}
    path = write([*GOOD, "{"], task={"verifier": "reasoning_gym"}, model=absent)
    assert main([command, str(path)]) == 2
    error = capsys.readouterr().err
    assert "prompts.jsonl:61: not JSON" in error
    assert "tasks[0].verifier: 'reasoning_gym' verifies generated problems only" in error
    assert "not checked: weights, tokenizer, prompts' lengths in tokens, because model.path: no folder" in error
    assert not (tmp_path / "run").exists(), "no rank and no folder before all is well"


def test_an_absent_model_is_one_error(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write(GOOD, model={"path": str(tmp_path / "absent")})
    assert main(["train", str(path)]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    allowed = "a Hugging Face model folder or a Megatron checkpoint"
    assert lines == [f"error: {path}: model.path: no folder {tmp_path / 'absent'}; allowed: {allowed}"]


def test_users_verifiers_are_imported_before_ranks_start(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import torch\n\ndef score(problem, response):\n    return torch.ones(1).item()\n"
    add_module(tmp_path, "tlt_user_preflight", source, monkeypatch)
    load_checked(write(GOOD, task={"verifier": "tlt_user_preflight.score"}))
    (line,) = violations(write(GOOD, task={"verifier": "tlt_user_preflight.scores"}))
    assert line.endswith(
        "mine.yaml: tasks[0].verifier: found 'tlt_user_preflight.scores'; no function 'scores' in tlt_user_preflight; "
        "did you mean score?"
    )


def test_users_algorithms_are_imported_before_ranks_start(write: Callable[..., Path]) -> None:
    path = write(GOOD)
    load_checked(path, ["algorithm.name=megatron_tlt.algorithms.rloo.Rloo"])
    expected = {
        "algorithm.name=gpro": "algorithm.name: found 'gpro'; allowed: cispo, dapo, distillation, dr_grpo, ",
        "algorithm.loss=clip": "algorithm.loss: found 'clip'; allowed: cispo, clipped, gspo, or a class's import path",
        "algorithm.loss=torch.nn.Linear": "algorithm.loss: found 'torch.nn.Linear'; not a class that takes the algori",
        "algorithm.name=torch.nn.Linear": "algorithm.name: found 'torch.nn.Linear'; not a subclass of megatron_tlt.a",
        "algorithm.arguments={beta: 1}": "algorithm.arguments.beta: grpo does not take it; allowed: no arguments",
    }
    for override, said in expected.items():
        (line,) = violations(path, override)
        assert line.startswith(f"{path}: {said}")


def test_prompts_of_users_tasks_are_counted(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import torch\n\ndef ones(rng, most=9):\n    return {'prompt': '1' * rng.randint(1, most), 'answer': 1}\n"
    add_module(tmp_path, "tlt_user_preflight_tasks", source, monkeypatch)
    task: dict[str, Any] = {"kind": "python", "name": "tlt_user_preflight_tasks.ones", "held_out_fraction": 0.5}
    load_checked(write(GOOD, tasks=[task]))
    (line,) = violations(write(GOOD, tasks=[task | {"params": {"most": 30}}]))
    assert "tasks[0].name: 'tlt_user_preflight_tasks.ones', where prompts have up to " in line
    assert "allowed by rollout.max_prompt_tokens: 16" in line


def test_the_doctor_says_the_same(write: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(write(GOOD, tasks=[{"name": "chain_summ"}])), "--node"]) == 1
    assert "FAIL: config: " in (error := capsys.readouterr().err)
    assert "unknown generator 'chain_summ'" in error


@pytest.mark.parametrize("installed", [False, True])
def test_layers_of_a_library_that_is_not_installed_are_refused(
    installed: bool, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(name: str) -> object:
        return installed or None if name == "transformer_engine" else find_spec(name)

    monkeypatch.setattr("megatron_tlt.cli.preflight.find_spec", found)
    path, said = write(GOOD, actor={}), "actor.transformer_impl: found 'transformer_engine', which is not installed"
    load_checked(path, starts=False)
    assert (f"note: for training: {said}" in capsys.readouterr().err) != installed
    load_checked(path, ["actor.transformer_impl=local"])
    if installed:
        load_checked(path)
        return
    (line,) = violations(path)
    assert said in line and "allowed here: 'local', or the set-up with TLT_TRANSFORMER_ENGINE=yes" in line
    assert main(["doctor", str(path), "--node"]) == 1
    assert f"FAIL: config: {path}: {said}" in capsys.readouterr().err


def test_what_is_well_passes_without_torch_in_this_process(write: Callable[..., Path], model: Path) -> None:
    path = write(GOOD)
    program = (
        "import sys\n"
        "from megatron_tlt.cli.preflight import load_checked\n"
        f"load_checked({str(path)!r})\n"
        "sys.exit(len({'torch', 'transformers', 'vllm'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_prompts_that_are_left_out_are_counted(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    held_out = write_rows(tmp_path / "held.jsonl", [row("2+2="), row("3" * 17)])
    path = write([*GOOD, row("1" * 30), row("1" * 31)], task={"held_out_path": str(held_out)})
    config = load_checked(path, ["rollout.filter_overlong_prompts=true"])
    assert config.rollout.filter_overlong_prompts
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == 2 and all(line.startswith("note: ") for line in notes)
    assert "prompts.jsonl: rollout.filter_overlong_prompts leaves out 2 of 61 prompts" in notes[0]
    assert "up to 31 tokens" in notes[0] and "held.jsonl: " in notes[1] and "1 of 2" in notes[1]
    found = violations(path, "rollout.filter_overlong_prompts=true", "rollout.max_prompt_tokens=1")
    assert any("would leave out all" in line for line in found)


def test_generated_prompts_that_are_too_long_are_named_by_their_size(write: Callable[..., Path], model: Path) -> None:
    path = write(GOOD, tasks=[{"name": "chain_sum", "params": {"sizes": {"min": 2, "max": 12}}}])

    def found(*overrides: str) -> Findings:
        return check_with_model(load_config(path, overrides, check_libraries=False), model)

    (line,) = found().violations
    assert "tasks[0].params.sizes.max: found 12, where prompts have up to 28 tokens; allowed by" in line
    assert found("rollout.max_prompt_tokens=28") == Findings()
    (note,) = found("rollout.filter_overlong_prompts=true").notes
    assert "leaves out 32 of 32 such draws" in note


def test_chat_messages_need_a_chat_template(write: Callable[..., Path], model: Path, tmp_path: Path) -> None:
    chat = [row([{"role": "user", "content": f"{i}?"}]) for i in range(10, 70)]
    path = write([*GOOD, *chat])
    found = violations(path)
    assert len(found) == 2, "one line for each split"
    assert all("its tokenizer has no chat template" in line and "rows in all" in line for line in found)
    folder = copy_of(model, tmp_path / "chat-model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = load_config(path, check_libraries=False)
    assert check_with_model(config, folder).violations == []
    length = len(load_tokenizer(folder).encode("user: 10?\n"))
    rollout = config.rollout.model_copy(update={"max_prompt_tokens": length - 1})
    over = check_with_model(config.model_copy(update={"rollout": rollout}), folder).violations
    assert f"prompts.jsonl:61: its prompt has {length} tokens; allowed by" in "\n".join(over)


def test_a_recipe_has_no_chat_template_and_needs_worked_solutions(write: Callable[..., Path], tmp_path: Path) -> None:
    chat = [{"question": f"{i}?", "answer": f"so\n#### {i}"} for i in range(60)]
    recipe = {"recipe": {"cache_dir": str(tmp_path / "models"), "supervised": {"max_sequence_tokens": 512}}}
    found = violations(write(chat, task={"chat": True}, model=recipe))
    assert (
        "prompts.jsonl:1: chat messages (tasks[0]), but the tokenizer of model.recipe has no chat template" in found[0]
    )
    found = violations(write(GOOD, model=recipe))
    assert "prompts.jsonl:1: no worked solution" in found[0] and "60 such rows in all" in found[-1]


def test_a_model_folder_that_lacks_something_is_named(write: Callable[..., Path], model: Path, tmp_path: Path) -> None:
    folder = copy_of(model, tmp_path / "model")
    config = load_config(write(GOOD, model={"path": str(folder)}), check_libraries=False)

    def found() -> str:
        return "\n".join(check_with_model(config, folder).violations)

    assert found() == ""
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    assert f"{folder}: weights cannot be read: SafetensorError" in found()
    (folder / "model.safetensors").unlink()
    assert f"{folder}: no *.safetensors in it" in found()
    plan = check_with_model(config, folder, whole=False)  # `tlt plan` needs no weights
    assert plan.violations == [] and plan.notes == [
        f"not checked: weights, because there is no *.safetensors in {folder}"
    ]
    (folder / "model.safetensors").write_bytes(whole)
    sizes = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**sizes, "intermediate_size": 64}))
    assert "has shape (128, 64); config.json asks for (64, 64)" in found()
    (folder / "config.json").write_text(json.dumps(sizes))
    (folder / "tokenizer.json").write_text("{")
    assert f"{folder}: transformers cannot read its tokenizer" in found()
    for file in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"):
        (folder / file).unlink(missing_ok=True)
    plan = check_with_model(config, folder, whole=False)
    assert plan.violations == [] and "because there is no tokenizer in" in plan.notes[0]


def test_what_is_not_checked_is_said(
    write: Callable[..., Path], tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = {"path": str(tmp_path / "absent"), "architecture": str(model / "config.json")}
    path = write([*GOOD, row("1" * 30)], model=absent, launcher={"nnodes": 2}, trainer={"prompts_per_step": 2})
    load_checked(path, starts=False)
    notes = capsys.readouterr().err
    assert "note: not checked: weights, tokenizer, prompts' lengths in tokens, because model.path: no folder" in notes
    assert "note: not checked: the rendezvous ports, because no ranks start here" in notes
    found = violations(path)
    assert any("model.path: no folder" in line for line in found)
    assert any("launcher.nnodes: found 2; allowed here: 1" in line for line in found)
    assert any("prompts.jsonl:62: not JSON" in line for line in violations(write([*GOOD, row("2"), "{"], model=absent)))


def test_a_port_in_use_is_named_with_the_variables_that_change_it(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(GOOD, launcher={"nnodes": 2}, trainer={"prompts_per_step": 2})
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setenv("TLT_RENDEZVOUS", f"127.0.0.1:{port}")
        monkeypatch.setenv("TLT_NODE_RANK", "0")
        (line,) = violations(path)
        assert f"TLT_RENDEZVOUS: port {port} on " in line and "TLT_PORT" in line and "Address already in use" in line
        monkeypatch.setenv("TLT_NODE_RANK", "1")
        load_checked(path)


def resumable(config: TltConfig) -> None:
    """Leaves what a run with a checkpoint of step 3 has in its folder."""
    (config.run.dir / "checkpoints").mkdir(parents=True)
    (config.run.dir / "checkpoints" / "latest").write_text("step_000003\n")


def test_a_prompt_file_that_changed_is_noticed_when_a_run_goes_on(write: Callable[..., Path], tmp_path: Path) -> None:
    config = load_config(write(GOOD), check_libraries=False)
    check_prompt_files(config)
    write_rows(tmp_path / "prompts.jsonl", GOOD[:50])
    check_prompt_files(config)  # no step is saved yet: the run starts anew, with the file as it is
    resumable(config)
    check_prompt_files(config)
    write_rows(tmp_path / "prompts.jsonl", GOOD[:49])
    with pytest.raises(
        ConfigError, match=r"tasks\.0\.path: .*prompts\.jsonl has changed since this run started"
    ) as caught:
        check_prompt_files(config)
    assert f"remove {config.run.dir / FILE} to continue" in str(caught.value)
    (config.run.dir / FILE).unlink()
    check_prompt_files(config)
    check_prompt_files(config)
    write_rows(tmp_path / "prompts.jsonl", GOOD[:48])
    (config.run.dir / runs.RESOLVED).touch()
    runs.clear_run(config.run.dir)  # --fresh
    check_prompt_files(config)


def test_train_refuses_a_changed_prompt_file(
    write: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(GOOD)
    config = load_config(path)
    check_prompt_files(config)
    resumable(config)
    write_rows(tmp_path / "prompts.jsonl", GOOD[::-1])
    assert main(["train", str(path)]) == 2
    assert "tasks.0.path: " in capsys.readouterr().err


def test_a_teacher_must_have_the_policys_tokens(model: Path, tmp_path: Path, write: Callable[..., Path]) -> None:
    teacher = {"name": "distillation", "kl": {"reference": str(tmp_path / "teacher")}}
    same = copy_of(model, tmp_path / "teacher")
    load_checked(write(GOOD, algorithm=teacher))
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps(config | {"vocab_size": 64}))
    (line,) = violations(write(GOOD, algorithm=teacher))
    assert "algorithm.kl.reference: " in line
    assert "algorithm.kl.reference: absent" in violations(write(GOOD, algorithm={"name": "distillation"}))[0]
    for kl, said in (({"reference": "x"}, "coefficient is 0"), ({"update_every": 3}, "coefficient is 0")):
        assert said in violations(write(GOOD, algorithm={"kl": kl}))[0]
    both = {"coefficient": 0.1, "reference": str(same), "update_every": 3}
    assert "reference and update_every" in violations(write(GOOD, algorithm={"kl": both}))[0]
