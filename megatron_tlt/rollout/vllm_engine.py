"""The in-process vLLM engine, driven step by step in the same process as the actor."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_tlt.config.drafter_kinds import KINDS, model_drafters
from megatron_tlt.config.schema import RolloutConfig
from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.reshard.interface import Part
from megatron_tlt.reshard.views import ViewCache
from megatron_tlt.rollout import vllm_setup, vllm_weights
from megatron_tlt.rollout.chooser import StrategyChooser
from megatron_tlt.rollout.engines import ALL
from megatron_tlt.rollout.interface import OnFinished, OnStep, RolloutEngine, TurnSource
from megatron_tlt.rollout.recorded_states import RecordedStates
from megatron_tlt.rollout.skipped_states import SkippedCounts
from megatron_tlt.rollout.token_drafters import token_drafters_of
from megatron_tlt.rollout.types import Request, Response
from megatron_tlt.rollout.vllm_accounts import SchedulerAccounts
from megatron_tlt.rollout.vllm_choices import RunningRequests, broadcast_strategy
from megatron_tlt.rollout.vllm_drafters import DrafterWeights
from megatron_tlt.rollout.vllm_experts import check_experts
from megatron_tlt.rollout.vllm_patches import apply_all_patches
from megatron_tlt.rollout.vllm_requests import (
    RolloutState,
    abort_request,
    add_request,
    check_requests,
    end_started_steps,
    to_response,
)
from megatron_tlt.rollout.vllm_routing import RoutingRecorder
from megatron_tlt.rollout.vllm_runner_v2 import build_switch
from megatron_tlt.rollout.vllm_sampling import SeededSampler
from megatron_tlt.rollout.vllm_updates import DRAFTER, POLICY, WeightVersions
from megatron_tlt.rollout.vllm_versions import check_vllm
from megatron_tlt.speculation.strategy import StepRecord, Strategy
from megatron_tlt.speculation.token_drafter import TokenDrafter


class VllmEngine(RolloutEngine):
    """One rank of one vLLM engine, driven by the calling thread.

    With several ranks, all ranks must construct their engine at the same time, because vLLM builds process groups.
    With ``rollout.tensor_parallel_size`` 1 the engines are independent afterwards. With more, the ranks of one engine
    must call each method with the same arguments and get the same results. The default process group is not changed.
    """

    capabilities = ALL
    _has_generators = True

    def __init__(
        self,
        model_path: Path,
        rollout: RolloutConfig,
        speculation: SpeculationConfig,
        seed: int,
        token_drafters: Mapping[str, TokenDrafter] | None = None,
    ) -> None:
        """Build the engine and load the Hugging Face folder ``model_path``.

        ``rollout.vllm`` is passed to vLLM's EngineArgs (``dtype``, ``max_num_seqs``, ``gpu_memory_utilization``, ...).
        With speculation enabled, every drafter drafts up to ``speculation.num_speculative_tokens`` tokens: the drafter
        model, if there is one, and the section's token drafters. ``token_drafters`` replaces token drafters by name.

        Raises:
            ConfigError: the configuration does not fit the model, the world size or vLLM's arguments.
            RunError: the installed vLLM is not supported, or a world of several ranks has no process group.
        """
        vllm_setup.prepare_environment(rollout.model_runner)
        self.vllm_version = check_vllm()
        self.cpu_patch_applied = apply_all_patches()
        self._owns_group = vllm_setup.ensure_process_group()
        self._tp_size = rollout.tensor_parallel_size
        if dist.get_world_size() % self._tp_size:
            raise ConfigError(
                f"rollout.tensor_parallel_size is {self._tp_size}; allowed are divisors of the world size, "
                f"{dist.get_world_size()}"
            )
        self._rollout, self._seed = rollout, seed
        self._tp_rank = dist.get_rank() % self._tp_size
        self._routing = RoutingRecorder(rollout)
        with self._routing.attached():
            self._llm = self._build(model_path, rollout, speculation, seed)
        self._tp_group = vllm_setup.engine_group()
        self._scheduler = self._llm.engine_core.engine_core.scheduler
        self._runner = vllm_setup.model_runner_of(self._llm)
        check_experts(self._runner.get_model())
        self.max_model_len: int = self._llm.model_config.max_model_len
        self.vocab_size: int = self._llm.model_config.get_vocab_size()
        self.num_speculative_tokens = speculation.num_speculative_tokens if speculation.enabled else 0
        self.token_drafters = token_drafters_of(speculation) | dict(token_drafters or {})
        self._switch = build_switch(self._runner, self._scheduler, rollout, speculation, self.token_drafters)
        if speculation.enabled:
            self.set_strategy(Strategy(speculation.drafter, speculation.num_speculative_tokens))
        if vllm_setup.counts_random_numbers(rollout):
            SeededSampler(self._runner, self._switch.seed_of)
            self._has_generators = False
        self._rollout_state: RolloutState | None = None
        versions: dict[str, int | None] = {POLICY: None if rollout.vllm.get("load_format") == "dummy" else 0}
        if speculation.enabled and speculation.path is not None:
            versions[DRAFTER] = 0
        self._versions = WeightVersions(versions)
        model = self._runner.get_model()
        self._policy_views = ViewCache[vllm_weights.HeldWeight]([model])
        path = speculation.path if DRAFTER in versions else None
        self._drafter_weights = DrafterWeights(self._runner, model, path) if path else None
        self._accounts = SchedulerAccounts(self._scheduler, self.num_speculative_tokens, rollout.async_scheduling)

    @staticmethod
    def _build(model_path: Path, rollout: RolloutConfig, speculation: SpeculationConfig, seed: int) -> Any:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = vllm_setup.engine_args(model_path, rollout, speculation, seed)
        with (
            vllm_setup.launcher_variables(),
            vllm_setup.isolated_random_state(),
            vllm_setup.untouched_torch_threads(),
            vllm_setup.readable_weights(),
            vllm_setup.build_context(rollout, speculation),
            vllm_setup.shared_memory_of_its_own(),
        ):
            try:
                config = EngineArgs(**arguments)
                return LLMEngine.from_engine_args(config)
            except (ValueError, TypeError) as error:
                # vLLM validates its arguments against the model; its messages are long but name the field
                reason = " ".join(str(error).split())
                raise ConfigError(f"vLLM refused rollout.vllm: {reason}{vllm_setup.cache_hint(reason)}") from error

    @property
    def tensor_parallel_group(self) -> dist.ProcessGroup | None:
        """See ``RolloutEngine.tensor_parallel_group``."""
        return self._tp_group

    def generate(
        self,
        requests: Sequence[Request],
        on_finished: OnFinished | None = None,
        on_step: OnStep | None = None,
        chooser: StrategyChooser | None = None,
        turns: TurnSource | None = None,
    ) -> list[Response]:
        """Generate one response per request, in the order of the requests.

        On a CPU the same weights, requests and strategies give the same tokens and bit-equal log-probabilities, in any
        process. On a GPU they give the same distribution: kernels depend on the batch.
        ``on_finished`` is called with each response when it ends, ``on_step`` after each engine step.
        ``chooser`` sets the strategy before each step; its last strategy remains active. ``turns`` adds requests.
        ``finish_reason`` is "stop" if ``token_ids`` end with a stop token, "abort" after ``abort``, else "length".

        Raises:
            ConfigError: a prompt or a length limit does not fit; raised before anything is generated.
            RunError: weights are incomplete (``versions``), now or after a callback, or vLLM dropped a request.
        """
        self._check_weights()
        check_requests(requests, self._rollout.max_prompt_tokens, self.max_model_len, self.vocab_size)
        self.reset()
        responses: dict[str, Response] = {}
        rollout = self._rollout_state = RolloutState()
        began = time.perf_counter()

        def finish(name: str, completion: Any, now: float) -> None:
            request = rollout.requests.pop(name)
            response = responses[name] = self._respond(request, rollout.internal_of.pop(name), completion, now)
            if on_finished is not None:
                on_finished(response)

        with vllm_setup.isolated_random_state(self._seed):
            try:
                self._queue(requests, rollout)
                while (more := turns.take(not rollout.requests) if turns else None) is not None or rollout.requests:
                    check_requests(more or (), self.max_model_len, self.max_model_len, self.vocab_size)
                    self._queue(more or (), rollout)
                    if not rollout.requests:
                        continue
                    if not self._llm.has_unfinished_requests():
                        break
                    if chooser is not None:
                        self._choose(chooser)
                    self._check_weights()
                    start = time.perf_counter() - began
                    self._switch.begin_step()
                    finished = self._llm.step()
                    now = time.perf_counter() - began
                    record = self._record(start, now - start)
                    if record is not None and chooser is not None and self._tp_rank == 0:
                        chooser.observe(record)
                    if record is not None and on_step is not None:
                        on_step(record)
                    for output in finished:
                        finish(output.request_id, output.outputs[0], now)
                    while rollout.aborted:
                        name = rollout.aborted.pop(0)
                        if name in rollout.internal_of:
                            finish(name, abort_request(self._llm, rollout.internal_of[name]), now)
                for name in rollout.internal_of:
                    raise RunError(f"request {name}: vLLM ended it without a response")
            finally:
                self._rollout_state = None
                if rollout.internal_of:  # a callback or a signal interrupted the rollout: empty the engine
                    self._llm.abort_request(list(rollout.internal_of.values()), internal=True)
                end_started_steps(self._llm)
                self._switch.clear()
                self._routing.clear()
        return [responses[request.request_id] for request in requests]

    def _queue(self, requests: Sequence[Request], rollout: RolloutState) -> None:
        for request in requests:
            internal_id = add_request(self._llm, request, own_generator=self._has_generators)
            rollout.requests[request.request_id], rollout.internal_of[request.request_id] = request, internal_id
            self._switch.add(internal_id, request)

    def _choose(self, chooser: StrategyChooser) -> None:
        """Activate the chooser's strategy on all ranks of the engine; the first rank chooses."""
        running = RunningRequests(self._scheduler.running, self._switch.external_id)
        batch = len(running) or min(len(self._scheduler.waiting), self._runner.max_num_reqs)
        choice = chooser.next(batch, running) if self._tp_rank == 0 else None
        strategy, budgets = broadcast_strategy(choice, running, self._tp_group)
        self._switch.set(strategy, budgets)

    def _record(self, start: float, duration: float) -> StepRecord | None:
        """The step that has just ended; None if none has (the first of asynchronous scheduling only starts one)."""
        step = self._accounts.take_step()
        verified, drafted = self._switch.end_step(bool(step.running))
        if not step.running:
            return None
        return StepRecord(
            verified,
            step.running,
            duration,
            step.num_tokens,
            step.num_draft_tokens,
            tuple(step.accepted_per_position),
            next_strategy=drafted,
            had_prefill=step.had_prefill,
            num_drafts=step.num_drafts,
            start=start,
            catch_up_s=self._switch.take_catch_up_s(),
            drafting_s=self._switch.take_drafting_s(),
        )

    def _respond(self, request: Request, internal_id: str, completion: Any, now: float) -> Response:
        self._switch.finish(internal_id, completion.token_ids)
        draft = self._accounts.take_request(internal_id)
        return self._routing.attach(to_response(request, completion, draft, now), internal_id)

    @property
    def unfinished(self) -> dict[str, int]:
        """See ``RolloutEngine.unfinished``."""
        return dict(RunningRequests((*self._scheduler.running, *self._scheduler.waiting), self._switch.external_id))

    def abort(self, request_id: str) -> None:
        """See ``RolloutEngine.abort``; raises RunError if no unfinished request has this id."""
        if self._rollout_state is None or request_id not in self._rollout_state.internal_of:
            raise RunError(f"request {request_id} cannot be aborted: it is not part of a running rollout")
        self._rollout_state.aborted.append(request_id)

    def set_strategy(self, strategy: Strategy, budgets: Mapping[str, int] | None = None) -> None:
        """Draft under ``strategy`` from the next step on; the distribution of responses does not change.

        Call it between rollouts or in ``on_step``. ``budgets`` lowers the draft token limit by request id (0: none).

        Raises:
            ConfigError: the engine lacks a drafter of the strategy (``drafters``) or was built for fewer draft tokens.
        """
        self._switch.set(strategy, budgets)

    @property
    def strategy(self) -> Strategy:
        """The active strategy; initially that of the ``speculation`` section."""
        return self._switch.strategy

    @property
    def drafters(self) -> tuple[str, ...]:
        """Drafters that a strategy for this engine may use."""
        return self._switch.drafters

    def record_into(self, recorded: RecordedStates | None) -> None:
        """Record the drafter model's inputs for each request in ``recorded`` while it ``records``; None stops it."""
        self._switch.recorded = recorded

    @property
    def skipped(self) -> SkippedCounts:
        """Counts of the tokens that the drafter model skipped under other strategies."""
        return self._switch.skipped

    @property
    def versions(self) -> dict[str, int | None]:
        """The version of each part's weights (``policy``; ``drafter``, where the drafter is a model).

        A version is 0 after loading from the folder. It is None while weights are incomplete: dummy weights, between
        ``begin_update`` and ``finish_update``, after a failed update, or after ``sleep`` dropped them. The engine needs
        the policy's version to generate, and the drafter's version while a strategy uses the drafter model.
        """
        return self._versions.as_dict()

    def begin_update(self, part: Part) -> None:
        """Announce an in-place update of the weights; the part has no version until ``finish_update``.

        Raises:
            RunError: the engine has no such part.
        """
        self._versions.begin(part)

    def finish_update(self, part: Part, version: int) -> None:
        """Set the part's version after all its weights are written, and clear the caches.

        Raises:
            RunError: no update was started, or requests are still running; the part remains without a version.
        """
        self._versions.check_begun(part, version)
        if part == POLICY:
            self.reset()
        self._versions.finish(part, version)

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Write full Hugging Face tensors into the engine in place; returns their number.

        Outside an update this is a whole update, to the next version; between ``begin_update`` and ``finish_update`` it
        is a part of that update. If it fails, the policy has no version.

        Raises:
            RunError: a name is unknown, a shape does not fit, or a weight is missing.
        """
        with self._versions.loading(POLICY):
            count = vllm_weights.load_weights(self._runner.get_model(), named)
            self.reset()
        return count

    def read_weights(self) -> list[vllm_weights.HeldWeight]:
        """(Hugging Face name, this rank's view, its slice of the whole or None); see ``vllm_weights.read_weights``."""
        return self._policy_views.get(lambda: vllm_weights.read_weights(self._runner.get_model()))

    def read_drafter_weights(self) -> list[vllm_weights.HeldWeight]:
        """Like ``read_weights``, for the drafter model's own parameters, under their names in its folder.

        Raises:
            RunError: the engine has no drafter model.
        """
        if self._drafter_weights is None:
            kinds = " or ".join(KINDS)
            raise RunError(f"the engine has no drafter model; allowed: speculation.drafter {kinds}, enabled")
        return self._drafter_weights.read()

    def restore_drafter(self) -> None:
        """Reload the drafter's folder as version 0 if ``sleep`` dropped the drafter's weights."""
        if self.versions.get(DRAFTER, 0) is not None or self._drafter_weights is None:
            return
        self.begin_update(DRAFTER)
        self._drafter_weights.restore()
        self.finish_update(DRAFTER, 0)

    def _check_weights(self) -> None:
        self._versions.require(POLICY)
        if self.strategy.uses(model_drafters()):
            self._versions.require(DRAFTER)
        self._switch.drafter_ready = self._versions.as_dict().get(DRAFTER) is not None

    def reset(self) -> None:
        """Clear the prefix cache and the scheduler's counts, for example after a change of weights."""
        if not self._llm.reset_prefix_cache():
            raise RunError("vLLM could not reset its prefix cache: requests are still running")
        self._accounts.clear()

    def sleep(self, level: int = 1) -> None:
        """Free the device. Level 1 keeps weights on the host, 2 drops them; a CPU frees only skipped hidden states."""
        self._switch.release()
        if not vllm_setup.is_cpu():
            self._llm.sleep(level)
            if level > 1:
                self._versions.drop()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Reallocate device memory: everything, or only ``weights`` or ``kv_cache``."""
        if not vllm_setup.is_cpu():
            self._llm.wake_up(tags)

    def shutdown(self) -> None:
        """Release the engine, and the default process group if this engine created it."""
        if self._llm is None:
            return
        with nullcontext() if self._owns_group else vllm_setup.kept_process_groups():
            self._llm.engine_core.shutdown()
        self._runner = self._llm = None
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
            self._owns_group = False
