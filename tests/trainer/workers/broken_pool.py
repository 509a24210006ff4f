"""Two ranks with an engine and a reward pool each; rank 1's pool fails. rank<r>.json says what each rank raised."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import torch.distributed as dist

from megatron_tlt.config.schema import RolloutConfig
from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.data.tokenizer import load_tokenizer
from megatron_tlt.errors import RunError
from megatron_tlt.observe.timeline import Timeline
from megatron_tlt.platform.device import initialize_distributed
from megatron_tlt.rewards import RewardPool
from megatron_tlt.rollout.types import SamplingSpec
from megatron_tlt.rollout.vllm_engine import VllmEngine
from megatron_tlt.tasks.types import Problem
from megatron_tlt.trainer.experience import ExperienceCollector
from tests.helpers.limits import open_files_limit

TIMEOUT_S = 600
PROBLEMS = [Problem(f"p/{i}", "p", "abcd"[i : i + 2], "1", "math") for i in range(2)]


def main(model_folder: str, out: str) -> None:
    initialize_distributed(TIMEOUT_S)
    folder = Path(model_folder)
    vllm = {"dtype": "float32", "max_num_seqs": 8, "num_gpu_blocks_override": 16}
    rollout = RolloutConfig(max_prompt_tokens=8, max_response_tokens=4, vllm=vllm)
    engine = VllmEngine(folder, rollout, SpeculationConfig(enabled=False), seed=7)
    with RewardPool(workers=1, timeout_s=10.0, verifiers=["math"]) as pool:
        pool.submit("warm", PROBLEMS[0], "#### 1")
        assert pool.collect()["warm"].correct
        collector = ExperienceCollector(
            engine,
            load_tokenizer(folder),
            pool,
            max_prompt_tokens=rollout.max_prompt_tokens,
            max_response_tokens=rollout.max_response_tokens,
            tensor_parallel_size=1,
            timeline=Timeline(0),
        )
        if dist.get_rank() == 1:
            worker = pool._active[0]._process
            os.kill(worker.pid, signal.SIGKILL)
            wait([worker.stdout])  # closed by now, or a worker that dies slowly could still answer
            with open_files_limit(3):  # the worker cannot be replaced
                pool.submit("first", PROBLEMS[0], "#### 1")
                while pool._threads[0].is_alive():
                    time.sleep(0.05)
        raised, began = "nothing", time.monotonic()
        try:
            collector.collect(PROBLEMS, 2, SamplingSpec(max_tokens=4), (0,))
        except RunError as error:
            raised = str(error)
        seconds = time.monotonic() - began
    Path(out, f"rank{dist.get_rank()}.json").write_text(json.dumps({"raised": raised, "seconds": seconds}))
    dist.barrier()
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:3])
