"""A chat model behind an OpenAI-compatible address, as an annotator and as a judge.

Does not know: what is asked, tags, training.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from pipeinfer.errors import PipeinferError, UsageError
from pipeinfer.transport import http_client
from pipeinfer.transport.http_client import HttpFailure


class EndpointError(PipeinferError):
    """The endpoint gave no usable answer after all tries."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where and how to ask; ``url`` ends in ``/v1``, the key comes from ``OPENAI_API_KEY``."""

    url: str
    model: str
    timeout: float = 120.0
    tries: int = 3
    pause: float = 1.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise UsageError(f"{self.url!r} is not an http address")

    def ask(self, messages: list[dict[str, str]], *, temperature: float = 0.0,
            max_tokens: int | None = None) -> str:
        """The answer's text; EndpointError when it cannot be had."""
        body: dict[str, Any] = {
            "model": self.model, "messages": messages, "temperature": temperature}
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}"}
        problem = "never asked"
        for attempt in range(self.tries):
            if attempt:
                time.sleep(self.pause * 2 ** (attempt - 1))
            try:
                answer = http_client.ask(
                    "POST", f"{self.url.rstrip('/')}/chat/completions", body,
                    timeout=self.timeout, headers=headers, proxies=True)
                if answer.status != 200:
                    problem = f"status {answer.status}"
                    if answer.status < 500 and answer.status != 429:
                        break
                    continue
                content = answer.json()["choices"][0]["message"]["content"]
                if isinstance(content, str):
                    return content
                problem = "an answer without text"
            except HttpFailure as error:
                problem = str(error)
            except (ValueError, LookupError, TypeError) as error:
                problem = f"{type(error).__name__}: {error}"
        raise EndpointError(f"{self.url} gave no answer: {problem}")
