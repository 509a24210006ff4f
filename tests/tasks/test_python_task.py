"""A user's function or class as a task: the mixture's contract holds for it, and what breaks it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.cli.preflight_tasks import check_tasks
from megatron_tlt.config.loader import dump_resolved, load_config, load_resolved
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.task import TaskConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.tasks import Problem, build_sources
from megatron_tlt.tasks.limit import PromptLimit
from megatron_tlt.tasks.wording import INSTRUCTIONS
from tests.helpers.user_code import add_module

MODULE = "tlt_user_tasks.problems"
SOURCE = """
import itertools

counter = itertools.count()


def sums(rng, *, largest=99):
    a, b = rng.randint(1, largest), rng.randint(1, largest)
    answer = a + b
    solution = f"{a}+{b}={answer}\\n#### {answer}"
    return {"prompt": f"{a}+{b}=", "answer": answer, "solution": solution, "metadata": {"terms": (a, b)}}


class Words:
    def __init__(self, words, length=1):
        if length < 1:
            raise ValueError(f"length is {length}; at least 1 is needed")
        self.words, self.length = words, length

    def __call__(self, rng):
        text = " ".join(rng.choices(self.words, k=self.length))
        return {"prompt": f"Repeat: {text}", "answer": text}


def any_(rng, **fields):
    fields = {"prompt": "p", "answer": "a"} | fields
    return {key: value for key, value in fields.items() if value != "absent"}


def sets(rng):
    return {"prompt": "p", "answer": "a", "metadata": {"found": {1}}}


def counts(rng):
    return {"prompt": str(next(counter)), "answer": "a"}


def pair(rng):
    return "p", "a"


def raises(rng):
    raise LookupError("no such row")


class Silent:
    pass


def braces(rng):
    return {"prompt": f"{rng.random()}", "answer": "{"}
"""


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        add_module(tmp_path_factory.mktemp("code"), MODULE, SOURCE, monkeypatch)
        yield


def task(name: str, params: dict[str, Any] | None = None, **options: Any) -> TaskConfig:
    return TaskConfig.model_validate({"kind": "python", "name": f"{MODULE}.{name}", "params": params or {}, **options})


def test_a_problem_is_what_the_function_drew() -> None:
    (problem,) = build_sources([task("sums", {"largest": 9})], "train", 3).problems(0, 1)
    a, b = problem.metadata["terms"]
    assert problem == Problem(
        uid=f"{MODULE}.sums/train/3/0",
        source=f"{MODULE}.sums",
        prompt=f"{a}+{b}=",
        answer=str(a + b),
        verifier="math",
        metadata={"terms": [a, b]},
        solution=f"{a}+{b}={a + b}\n#### {a + b}",
        recurs=False,
    )
    assert build_sources([task("sums", verifier="mine.score")], "train", 3).problem(0).verifier == "mine.score"
    words = build_sources([task("Words", {"words": ["a", "b"], "length": 9})], "train", 3).problems(0, 20)
    assert len({problem.prompt for problem in words}) > 5 and all(len(p.answer.split()) == 9 for p in words)


@settings(max_examples=40)
@given(st.integers(3, 30), st.floats(0.2, 0.8), st.lists(st.integers(0, 10), min_size=2, max_size=2, unique=True))
def test_splits_share_no_prompt_and_no_uid_however_few_there_are(
    largest: int, fraction: float, seeds: list[int]
) -> None:
    one = task("sums", {"largest": largest}, held_out_fraction=fraction)
    found = {
        split: [p for seed in seeds for p in build_sources([one], split, seed).problems(0, 60)]
        for split in ("train", "held_out")
    }
    assert not {p.prompt for p in found["train"]} & {p.prompt for p in found["held_out"]}
    uids = [problem.uid for problems in found.values() for problem in problems]
    assert len(set(uids)) == len(uids)


@settings(max_examples=20)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=20))
def test_a_problem_is_a_pure_function_of_its_index(indices: list[int]) -> None:
    tasks = [task("sums"), TaskConfig(name="gcd"), task("Words", {"words": list("abcdef"), "length": 6})]
    once, again = build_sources(tasks, "train", 0), build_sources(tasks, "train", 0)
    assert {i: once.problem(i) for i in indices} == {i: again.problem(i) for i in reversed(indices)}


def test_wording_and_limit_are_those_of_other_tasks() -> None:
    asked = task("sums", chat=True, system_prompt="Add.", answer_format="boxed")
    problem = build_sources([asked], "train", 0).problem(0)
    text = f"{build_sources([task('sums')], 'train', 0).problem(0).prompt}\n\n{INSTRUCTIONS['boxed']}"
    assert problem.metadata["answer_in"] == "boxed" and problem.prompt == text
    assert problem.metadata["messages"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": text}]
    limit = PromptLimit(5, True, lambda problems: [len(p.prompt) for p in problems])
    assert all(len(p.prompt) <= 5 for p in build_sources([task("sums")], "train", 0, limit).problems(0, 50))


def test_a_launch_config_names_it_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    tasks = [{"kind": "python", "name": f"{MODULE}.sums", "params": {"largest": 50}, "weight": 2.0}]
    rollout = {"max_prompt_tokens": 128, "max_response_tokens": 512}
    path.write_text(yaml.safe_dump({"model": {"recipe": {}}, "tasks": tasks, "rollout": rollout}))
    config = load_config(path, check_libraries=False)
    assert (config.tasks[0].verifier, config.tasks[0].params) == ("math", {"largest": 50})
    resolved = tmp_path / "config.resolved.yaml"
    resolved.write_text(dump_resolved(config))
    assert load_resolved(resolved) == config
    assert check_tasks(config).violations == []


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("sum", {}, f"name: found '{MODULE}.sum'; no function or class 'sum' in {MODULE}; did you mean sums?"),
        ("counter", {}, f"name: found '{MODULE}.counter'; not a function or class; "),
        (
            "sums",
            {"smallest": 1},
            "params: found {'smallest': 1}; " + MODULE + ".sums(rng, *, largest=99) refuses them: ",
        ),
        ("Words", {}, f"{MODULE}.Words(words, length=1) refuses them: TypeError: missing a required argument: 'words'"),
        ("Words", {"words": [], "length": 0}, "refuses them: ValueError: length is 0; at least 1 is needed"),
        (
            "counts",
            {},
            "returned different problems for equally seeded generators; allowed: all randomness comes from rng",
        ),
        ("pair", {}, "returned a tuple; allowed: a mapping with prompt and answer"),
        ("raises", {}, f"name: {MODULE}.raises raised LookupError: no such row"),
        ("Silent", {}, "raised TypeError: 'Silent' object is not callable"),
        (
            "any_",
            {"answer": "absent"},
            "returned a mapping without 'answer'; allowed: the keys prompt, answer, solution",
        ),
        ("any_", {"hint": "x"}, "returned a mapping with 'hint'; allowed: the keys prompt, answer, solution, metadata"),
        ("any_", {"prompt": " "}, "returned the prompt ' '; allowed: text that is not empty"),
        ("any_", {"prompt": ["p"]}, "returned the prompt ['p']; allowed: text that is not empty"),
        ("any_", {"answer": True}, "returned the answer True; allowed: text or a number"),
        (
            "any_",
            {"solution": "1"},
            "returned the solution '1'; allowed: text whose last line is '#### answer', or None",
        ),
        ("any_", {"metadata": [1]}, "returned the metadata [1]; allowed: a mapping of JSON values"),
        (
            "sets",
            {},
            "returned metadata that is not JSON; allowed: a mapping of JSON values (TypeError: Object of type",
        ),
    ],
)
def test_what_breaks_the_contract_is_refused_with_its_key(name: str, params: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_sources([TaskConfig(name="gcd"), task(name, params)], "train", 0)
    (line,) = str(caught.value).splitlines()
    assert line.startswith("tasks[1].") and said in line


def test_a_name_must_be_an_import_path_and_two_tasks_of_one_must_agree() -> None:
    with pytest.raises(ConfigError, match=r"tasks\[0\]\.name: found 'sums'; allowed for kind python: the import path"):
        build_sources([TaskConfig(kind="python", name="sums")], "train", 0)
    with pytest.raises(ConfigError, match=r"tasks\[1\]\.held_out_fraction: 0\.2.*0\.1"):
        build_sources([task("sums"), task("sums", held_out_fraction=0.2)], "train", 0)
    with pytest.raises(ValueError, match="a task of kind 'python' takes no 'path'"):
        task("sums", path="a.jsonl")


def test_what_no_response_or_warm_up_can_use_is_said_before_ranks_start() -> None:
    one_prompt = task("any_", {"prompt": "only"}, held_out_fraction=0.5)
    values = {"model": {"recipe": {}}, "tasks": [task("braces"), one_prompt, task("sums", verifier="reasoning_gym")]}
    found = "\n".join(check_tasks(TltConfig.model_validate(values)).violations)
    assert f"tasks[0].name: '{MODULE}.braces', 33 of 33 draws: the answer '{{' has unbalanced braces" in found
    assert f"tasks[0].name: '{MODULE}.braces' drew a problem without 'solution', which the supervised warm-up" in found
    assert "problem at held_out_fraction 0.5; widen params" in found
    assert (
        "tasks[2].verifier: 'reasoning_gym' verifies generated problems only; allowed for kind python: code, math"
        in found
    )
