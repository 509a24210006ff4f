"""An environment behind HTTP: a server that keeps the episodes."""

from __future__ import annotations

import json
import urllib.request
import uuid
from typing import TYPE_CHECKING, Any

from megatron_tlt.environments.interface import Observation

if TYPE_CHECKING:
    from megatron_tlt.tasks.types import Problem


class HttpEnvironment:
    """Posts JSON to ``url/reset``, ``url/step`` and ``url/close``.

    Every request has ``episode``, an id. ``reset`` also has ``problem`` (``uid``, ``prompt``, ``answer``, ``metadata``)
    and ``seed``; ``step`` has ``turn``. The reply to ``step`` is ``{"text": text or null, "reward": number, object or
    null}``.

    Args:
        url: of the server, without a trailing slash.
        headers: of every request, such as one for authentication.
        timeout_s: of one request.
    """

    def __init__(self, url: str, headers: dict[str, str] | None = None, timeout_s: float = 30.0) -> None:
        self._url, self._timeout_s = url.rstrip("/"), timeout_s
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._episode = uuid.uuid4().hex

    def reset(self, problem: Problem, seed: int) -> None:
        """See ``Environment.reset``."""
        shown = {name: getattr(problem, name) for name in ("uid", "prompt", "answer", "metadata")}
        self._post("reset", problem=shown, seed=seed)

    def step(self, turn: str) -> Observation:
        """See ``Environment.step``.

        Raises:
            ValueError: the reply is not an object with ``text`` (text or null).
        """
        reply = self._post("step", turn=turn)
        if not isinstance(reply, dict) or not isinstance(reply.get("text", 0), str | None):
            raise ValueError(f"{self._url}/step replied {str(reply)[:80]!r}; allowed: an object with text and reward")
        return Observation(reply["text"], reply.get("reward"))

    def close(self) -> None:
        """Tells the server that the episode is over."""
        self._post("close")

    def _post(self, path: str, **values: Any) -> Any:
        body = json.dumps({"episode": self._episode, **values}).encode()
        request = urllib.request.Request(f"{self._url}/{path}", body, self._headers)
        with urllib.request.urlopen(request, timeout=self._timeout_s) as reply:
            text = reply.read()
        return json.loads(text) if text else None
