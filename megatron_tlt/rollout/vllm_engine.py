"""The in-process vLLM engine: requests in, responses out, step by step, beside an actor in the same process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_tlt.config.schema import RolloutConfig, SpeculationConfig
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.models.hf_folder import SafetensorsFolder
from megatron_tlt.reshard.interface import Part
from megatron_tlt.rollout import vllm_setup, vllm_weights
from megatron_tlt.rollout.types import Request, Response, ShardSlice, StepRecord
from megatron_tlt.rollout.vllm_accounts import SchedulerAccounts
from megatron_tlt.rollout.vllm_cure import apply_all_cures, draft_without_padding
from megatron_tlt.rollout.vllm_drafters import DraftSwitch, read_drafter_weights
from megatron_tlt.rollout.vllm_experts import check_experts
from megatron_tlt.rollout.vllm_updates import DRAFTER, POLICY, WeightVersions
from megatron_tlt.rollout.vllm_versions import check_vllm

OnFinished = Callable[[Response], None]
OnStep = Callable[[StepRecord], None]


class VllmEngine:
    """One rank of one vLLM engine, driven by the calling thread.

    In a world of several ranks all ranks must construct their engine at the same time (vLLM builds process groups);
    with ``rollout.tensor_parallel_size`` 1 the engines are independent afterwards, with more the ranks of one engine
    must call each method with the same arguments, and get the same results. The default process group stays as it is.
    """

    def __init__(self, model_path: Path, rollout: RolloutConfig, speculation: SpeculationConfig, seed: int) -> None:
        """Build the engine and load the Hugging Face folder ``model_path``.

        ``rollout.vllm`` goes to vLLM's EngineArgs (``dtype``, ``max_num_seqs``, ``gpu_memory_utilization``, ...).

        Raises:
            ConfigError: what was asked for does not fit the model, the world or the installed vLLM's arguments.
            RunError: the installed vLLM is not the one this was written against, or no group exists in a larger world.
        """
        vllm_setup.prepare_environment()
        self.vllm_version = check_vllm()
        self.cpu_cure_applied = apply_all_cures()
        self._owns_group = vllm_setup.ensure_process_group()
        self._tp_size = rollout.tensor_parallel_size
        if dist.get_world_size() % self._tp_size:
            raise ConfigError(
                f"rollout.tensor_parallel_size is {self._tp_size}; allowed are divisors of the world size, "
                f"{dist.get_world_size()}"
            )
        self._rollout = rollout
        self._seed = seed
        self._llm = self._build(model_path, rollout, speculation, seed)
        core = self._llm.engine_core.engine_core
        self._runner = core.model_executor.driver_worker.worker.model_runner
        check_experts(self._runner.get_model())
        self.max_model_len: int = self._llm.model_config.max_model_len
        self.vocab_size: int = self._llm.model_config.get_vocab_size()
        self.num_speculative_tokens = speculation.num_speculative_tokens if speculation.enabled else 0
        self.speculating = speculation.enabled
        max_num_seqs = self._llm.vllm_config.scheduler_config.max_num_seqs
        draft_without_padding(core.scheduler, self.num_speculative_tokens, max_num_seqs)
        self._switch = DraftSwitch(self._runner, core.scheduler, max_num_seqs, speculation.drafter)
        self._drafter_names: set[str] = set()
        self._drafter_folder = speculation.path
        versions: dict[str, int | None] = {POLICY: None if self._is_dummy(rollout) else 0}
        if speculation.enabled and speculation.path is not None:
            versions[DRAFTER] = 0
            self._drafter_names = set(SafetensorsFolder(speculation.path).names)
        self._versions = WeightVersions(versions)
        self._accounts = SchedulerAccounts(core.scheduler, self.num_speculative_tokens)

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
            vllm_setup.shared_memory_of_its_own(),
        ):
            try:
                config = EngineArgs(**arguments)
                return LLMEngine.from_engine_args(config)
            except (ValueError, TypeError) as error:
                # vLLM's own validation of its arguments against the model; its messages are long, but name the field
                raise ConfigError(f"vLLM refused rollout.vllm: {' '.join(str(error).split())}") from error

    def generate(
        self,
        requests: Sequence[Request],
        on_finished: OnFinished | None = None,
        on_step: OnStep | None = None,
    ) -> list[Response]:
        """Generate one response per request, in the requests' order.

        The same weights and requests give the same tokens and bit-equal log-probabilities, in any process.
        ``on_finished`` is called with each response as soon as it ends, ``on_step`` after each engine step.
        ``token_ids`` end with the stop token where it stopped at one (``finish_reason`` "stop"; else "length").

        Raises:
            ConfigError: a prompt or a length limit that does not fit; raised before anything is generated.
            RunError: the weights are not whole (``versions``), now or after a callback.
        """
        self._check_weights()
        self._check_requests(requests)
        self.reset()
        index_of: dict[str, int] = {}
        internal_of: dict[str, str] = {}
        responses: list[Response | None] = [None] * len(requests)
        began = time.perf_counter()
        with vllm_setup.isolated_random_state(self._seed):
            try:
                for index, request in enumerate(requests):
                    internal_of[request.request_id] = self._add(request)
                    index_of[request.request_id] = index
                while self._llm.has_unfinished_requests():
                    self._check_weights()
                    start = time.perf_counter() - began
                    finished = self._llm.step()
                    now = time.perf_counter() - began
                    if on_step is not None:
                        step = self._accounts.take_step()
                        on_step(
                            StepRecord(
                                start,
                                now - start,
                                step.running,
                                step.num_tokens,
                                step.num_draft_tokens,
                                step.num_accepted_tokens,
                            )
                        )
                    for output in finished:
                        index = index_of[output.request_id]
                        response = self._response(requests[index], output, internal_of.pop(output.request_id), now)
                        responses[index] = response
                        if on_finished is not None:
                            on_finished(response)
            finally:
                if internal_of:  # a callback or a signal cut the rollout short: leave the engine empty
                    self._llm.abort_request(list(internal_of.values()), internal=True)
        return [response for response in responses if response is not None]

    def _check_requests(self, requests: Sequence[Request]) -> None:
        seen: set[str] = set()
        for request in requests:
            name, length = request.request_id, len(request.prompt_token_ids)
            if name in seen:
                raise ConfigError(f"request {name}: the id is used twice in one rollout")
            seen.add(name)
            if not 0 < length <= self._rollout.max_prompt_tokens:
                raise ConfigError(
                    f"request {name}: its prompt has {length} tokens; allowed are 1 to "
                    f"rollout.max_prompt_tokens, {self._rollout.max_prompt_tokens}"
                )
            if not 0 <= min(request.prompt_token_ids) <= max(request.prompt_token_ids) < self.vocab_size:
                raise ConfigError(
                    f"request {name}: its prompt has token ids {min(request.prompt_token_ids)} to "
                    f"{max(request.prompt_token_ids)}; allowed are 0 to {self.vocab_size - 1}"
                )
            if request.sampling.max_tokens < 1 or length + request.sampling.max_tokens > self.max_model_len:
                raise ConfigError(
                    f"request {name}: a prompt of {length} tokens with max_tokens {request.sampling.max_tokens}; "
                    f"allowed are 1 to {self.max_model_len - length}, the engine's max_model_len being "
                    f"{self.max_model_len}"
                )
            if not 0 <= request.seed < 1 << 63:
                raise ConfigError(f"request {name}: its seed is {request.seed}; allowed are 0 to 2**63 - 1")

    def _add(self, request: Request) -> str:
        """Queue a request; returns vLLM's own id for it."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        try:
            params = SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=max(sampling.top_k, 0),
                max_tokens=sampling.max_tokens,
                stop_token_ids=list(sampling.stop_token_ids),
                seed=request.seed,
                logprobs=0,  # the sampled token's only
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
            return self._llm.add_request(request.request_id, prompt, params)
        except (ValueError, VLLMClientError) as error:
            raise ConfigError(f"request {request.request_id}: {' '.join(str(error).split())}") from error

    def _response(self, request: Request, output: Any, internal_id: str, now: float) -> Response:
        completion = output.outputs[0]
        tokens = tuple(completion.token_ids)
        log_probs = tuple(entry[token].logprob for entry, token in zip(completion.logprobs, tokens, strict=True))
        draft = self._accounts.take_request(internal_id)
        if draft.num_tokens != len(tokens):
            raise RunError(
                f"request {request.request_id}: {draft.num_tokens} tokens accounted for, {len(tokens)} returned"
            )
        return Response(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=tokens,
            log_probs=log_probs,
            finish_reason=str(completion.finish_reason),
            finished_at=now,
            draft=draft,
        )

    def set_speculation(self, enabled: bool) -> None:
        """Switch drafting on or off, between rollouts or in a step's callback; responses keep their distribution.

        Raises:
            ConfigError: on, for an engine that was built without speculation.
        """
        if enabled and not self.num_speculative_tokens:
            raise ConfigError("speculation.enabled was false when the engine was built; it cannot be switched on now")
        if enabled == self.speculating:
            return
        if enabled:
            self._switch.on()
        else:
            self._switch.off()
        self.speculating = enabled

    @property
    def versions(self) -> dict[str, int | None]:
        """The version of each part's weights (``policy``; ``drafter``, where the drafter is a model).

        0 as loaded from the folder, None where the weights are not whole: dummy ones, or between ``begin_update`` and
        ``finish_update``, or after an update that failed, or dropped by ``sleep``. Without its policy's version the
        engine does not generate, without its drafter's not while it speculates.
        """
        return self._versions.as_dict()

    def begin_update(self, part: Part) -> None:
        """Announce that weights will be written in place; until ``finish_update`` the part has no version.

        Raises:
            RunError: the engine has no such part.
        """
        self._versions.begin(part)

    def finish_update(self, part: Part, version: int) -> None:
        """All weights of the part are written: they are ``version`` from now on, and what was cached is forgotten.

        Raises:
            RunError: no update had begun, or requests are still running; the part stays without a version.
        """
        self._versions.check_begun(part, version)
        if part == POLICY:
            self.reset()
        self._versions.finish(part, version)

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Write full Hugging Face tensors into the engine in place; returns how many were given.

        An update of its own, to the next version; between ``begin_update`` and ``finish_update`` a part of that one.
        Where it fails, the policy is left without a version.

        Raises:
            RunError: an unknown name, a shape that does not fit, or a weight that nothing was given for.
        """
        with self._versions.loading(POLICY):
            count = vllm_weights.load_weights(self._runner.get_model(), named)
            self.reset()
        return count

    def read_weights(self) -> Iterator[tuple[str, torch.Tensor, ShardSlice | None]]:
        """Yield (Hugging Face name, this rank's tensor, its slice of the full one or None) for each weight.

        Tensors are views in the engine's dtype; see ``vllm_weights.read_weights``.
        """
        return vllm_weights.read_weights(self._runner.get_model())

    def read_drafter_weights(self) -> Iterator[tuple[str, torch.Tensor, ShardSlice | None]]:
        """As ``read_weights``, for the drafter model's own parameters, under the names in its folder.

        Raises:
            RunError: the engine has no drafter model.
        """
        if DRAFTER not in self._versions.as_dict():
            raise RunError("the engine has no drafter model; allowed: speculation.drafter eagle or eagle3, enabled")
        return read_drafter_weights(self._runner.drafter, self._runner.get_model(), self._drafter_names)

    def restore_drafter(self) -> None:
        """Write the drafter's folder into the engine again, as version 0, where ``sleep`` dropped it."""
        if self.versions.get(DRAFTER, 0) is not None or self._drafter_folder is None:
            return
        folder = SafetensorsFolder(self._drafter_folder)
        self.begin_update(DRAFTER)
        with torch.no_grad():
            for name, view, part in self.read_drafter_weights():
                view.copy_(folder.read(name) if part is None else folder.read(name, part.dim, part.start, part.length))
        self.finish_update(DRAFTER, 0)

    def _check_weights(self) -> None:
        self._versions.require(POLICY)
        if self.speculating and DRAFTER in self._versions.as_dict():
            self._versions.require(DRAFTER)

    def reset(self) -> None:
        """Forget cached prefixes and accounts, as after a change of weights."""
        if not self._llm.reset_prefix_cache():
            raise RunError("vLLM could not reset its prefix cache: requests are still running")
        self._accounts.clear()

    def sleep(self, level: int = 1) -> None:
        """Free the device: level 1 keeps weights on the host, 2 drops them. Nothing to free on a CPU."""
        if not self._is_cpu():
            self._llm.sleep(level)
            if level > 1:
                self._versions.drop()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the device back: all, or only ``weights`` or ``kv_cache``."""
        if not self._is_cpu():
            self._llm.wake_up(tags)

    @staticmethod
    def _is_dummy(rollout: RolloutConfig) -> bool:
        return rollout.vllm.get("load_format") == "dummy"

    @staticmethod
    def _is_cpu() -> bool:
        from vllm.platforms import current_platform

        return bool(current_platform.is_cpu())

    def shutdown(self) -> None:
        """Release the engine; the default process group goes only where this engine started it."""
        if self._llm is None:
            return
        with nullcontext() if self._owns_group else vllm_setup.kept_process_groups():
            self._llm.engine_core.shutdown()
        self._runner = None
        self._llm = None
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
            self._owns_group = False
