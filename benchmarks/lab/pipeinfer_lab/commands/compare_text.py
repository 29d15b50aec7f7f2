"""`pipeinfer compare-text URL`: whether a server writes the same text in two ways.

Any server with OpenAI's completions, greedy. The second way is another server, other fields in the
request (such as those that switch speculation off), or several requests at once. Where a model's
last bits depend on how many rows it evaluates together, texts differ.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from pipeinfer.cli.terminal import plain, show_over
from pipeinfer.errors import RequestError, UsageError
from pipeinfer.strategies.proposers.base import common_prefix
from pipeinfer.transport import http_client
from pipeinfer.transport.http_client import HttpFailure
from pipeinfer_lab.quality.prompt_sets import file_prompts

_SHOWN = 24  #: characters around the first that differs


def first_difference(one: str, other: str) -> int | None:
    """Return the index of the first character that differs; None for equal texts."""
    return None if one == other else common_prefix(one, other)


class Way:
    """One way to ask. fields: of the request besides prompt and length. clients: at once."""

    def __init__(self, url: str, key: str, fields: str, clients: int) -> None:
        """Raises UsageError for fields that are no JSON object."""
        try:
            self._fields = json.loads(fields or "{}")
        except ValueError:
            self._fields = None
        if not isinstance(self._fields, dict):
            raise UsageError(f"{fields!r} is no JSON object: write fields of a request, such as "
                             "'{\"speculative.n_max\": 0}'")
        self.url, self._clients = url.rstrip("/").removesuffix("/v1"), clients
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def texts(self, prompts: list[str], tokens: int) -> list[str]:
        """Return the texts behind the prompts. Raises RequestError."""
        done: list[str] = []
        with ThreadPoolExecutor(self._clients) as pool:
            for text in pool.map(lambda prompt: self._text(prompt, tokens), prompts):
                done.append(text)
                show_over(f"{self.url}: {len(done)} of {len(prompts)}")
        show_over("")
        return done

    def _text(self, prompt: str, tokens: int) -> str:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, **self._fields}
        try:
            answer = http_client.ask("POST", f"{self.url}/v1/completions", body, timeout=600.0,
                                     headers=self._headers)
        except HttpFailure as error:
            raise RequestError(f"{self.url}: {error}") from error
        if answer.status != 200:
            raise RequestError(f"{self.url} answers {answer.status}: {plain(answer.text)[:300]}")
        return str(answer.json()["choices"][0]["text"])


@click.command("compare-text")
@click.argument("url")
@click.argument("other", required=False)
@click.option("--prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              required=True, help="File with a prompt on each line, or JSON lines.")
@click.option("-n", "tokens", default=128, show_default=True, type=click.IntRange(1))
@click.option("--fields", default="", help="JSON with fields of the requests.")
@click.option("--other-fields", default="", help="Those of the second way.")
@click.option("--clients", default=8, show_default=True, type=click.IntRange(1),
              help="Requests at once of the second way; the first way has one.")
@click.option("--api-key", default="", envvar="PIPEINFER_API_KEY")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def compare_text_command(url: str, other: str | None, prompts: Path, tokens: int, as_json: bool,
                         **given: Any) -> None:
    """Count the answers of a server that differ when they are asked in another way.

    \b
    pipeinfer compare-text http://host:8080 --prompts questions.txt
    pipeinfer compare-text http://host:8080 --prompts questions.txt --clients 1 \\
        --other-fields '{"speculative.n_max": 0}'
    """
    asked = [prompt.question for prompt in file_prompts(prompts)]
    ways = (Way(url, given["api_key"], given["fields"], 1),
            Way(other or url, given["api_key"], given["other_fields"] or given["fields"],
                given["clients"]))
    one, two = (way.texts(asked, tokens) for way in ways)
    found = [first_difference(a, b) for a, b in zip(one, two, strict=True)]
    differ = [(number, at) for number, at in enumerate(found) if at is not None]
    if as_json:
        click.echo(json.dumps({"answers": len(asked), "differ": len(differ), "first": found}))
        return
    for number, at in differ:
        start = max(0, at - _SHOWN)
        click.echo(f"prompt {number + 1}, character {at}: {one[number][start:at + _SHOWN]!r} | "
                   f"{two[number][start:at + _SHOWN]!r}")
    click.echo(f"{len(differ)} of {len(asked)} answers differ")
