"""Answers to clients: new ones; and with a journal those to an earlier request with the same
Idempotency-Key, or by the answer's id.

This module uses HTTP and answers, no engine.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal, TypeAlias

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server import openai_responses as items
from pipeinfer.server.answer_writer import AnswerWriter
from pipeinfer.server.answers import (
    Answer,
    Answers,
    Reader,
    check_key,
    digest_of,
    identity,
    owner_of,
)
from pipeinfer.server.anthropic_messages import BlockWriter
from pipeinfer.server.errors import ApiError, bad
from pipeinfer.server.journal import Begun
from pipeinfer.server.middleware import key_of
from pipeinfer.server.openai_responses import ItemWriter
from pipeinfer.server.requests import EngineRequest
from pipeinfer.server.schema_replies import Deleted, Reply
from pipeinfer.server.streaming import EventStream, events, whole

Kind: TypeAlias = Literal["chat", "completion", "response", "message"]


class AnswerRoutes:
    """Answers requests by their content, their key, or an answer's id."""

    def __init__(self, answers: Answers) -> None:
        self._client, self._answers = answers.client, answers

    async def known(self, kind: Kind, body: BaseModel, request: Request) -> Response | None:
        """Return the answer to an earlier request with the same Idempotency-Key, None if there
        is none. Raises ApiError."""
        key = check_key(request.headers.get("idempotency-key", ""))
        one = self._answers.of_key(self._owner(request), kind, key, _digest(body))
        return None if one is None else await self._again(one, request, after=_after(request))

    async def begin(self, kind: Kind, body: BaseModel, asked: EngineRequest, request: Request
                    ) -> Response:
        """Submit a new request and answer it; journal it unless the client does not want that.
        Raises ApiError."""
        tokenizer, settings = self._client.check_ready(), self._client.settings
        kept = self._answers.journaled and getattr(body, "store", None) is not False
        if kept and (before := await self.known(kind, body, request)) is not None:
            return before  # it came while this one was being read
        writer = writer_of(kind, body, asked, settings.name, tokenizer, kept=kept)
        begun = Begun(
            writer.answer_id, writer.created, kind, self._owner(request),
            request.headers.get("idempotency-key", ""), _digest(body), identity(settings),
            str(self._client.facts.get("bits", "")), asked,
            body.model_dump(exclude_none=True, by_alias=True) if kind == "response" else None
        ) if kept else None
        return await self._respond(await self._answers.begin(asked, begun), writer, request)

    async def retrieve(self, name: str, request: Request, stream: bool = False) -> Response:
        """Return an answer by its id, or stream it from the event after `starting_after`. An answer
        of /v1/responses is returned as it is now. Raises ApiError."""
        one = self._find(name, request)
        self._answers.wanted(one)
        if not stream and not one.ended:
            writer = self._writer(one, stream=False)
            if isinstance(writer, ItemWriter):
                return Reply(writer.now())
        return await self._again(one, request, stream, _after(request) if stream else -1)

    async def delete(self, name: str, request: Request) -> Response:
        """End a request if it runs, and delete its answer. Raises ApiError."""
        self._answers.drop(self._find(name, request), "disconnected")
        return Reply(Deleted(id=name, object="response.deleted", deleted=True))

    async def _again(self, one: Answer, request: Request, stream: bool | None = None,
                     after: int = -1) -> Response:
        """Answer again. stream: as events; None: as the request wanted. after: number of the last
        event that the client has."""
        if one.asked.count > 1 and after >= 0:
            raise bad("an answer of several choices streams from its beginning alone: leave "
                      "starting_after out", "starting_after")
        return await self._respond(one, self._writer(one, stream), request, after)

    async def _respond(self, one: Answer, writer: AnswerWriter, request: Request,
                       after: int = -1) -> Response:
        numbered = one.begun is not None and one.asked.count == 1
        reader = Reader(one, writer.tokenizer, numbered=numbered and writer.asked.stream)
        writer.start(reader.readings)
        if not writer.asked.stream:
            return Reply(await whole(reader, writer, request))
        return EventStream(events(reader, writer, after if numbered else None),
                           self._client.settings.serve.client_timeout, reader.leave)

    def _writer(self, one: Answer, stream: bool | None) -> AnswerWriter:
        begun, asked = one.begun, one.asked
        assert begun is not None
        if stream is not None:
            asked = dataclasses.replace(asked, stream=stream)
        body = items.ResponseRequest.model_validate(begun.request) \
            if begun.kind == "response" else None
        return writer_of(
            begun.kind, body, asked, self._client.settings.name, self._client.check_ready(),
            answer_id=begun.id, created=begun.at, kept=True)

    def _find(self, name: str, request: Request) -> Answer:
        if not self._answers.journaled:
            self._client.check_ready()
            raise ApiError(404, "this server keeps no answers: start it with --journal FILE",
                           code="not_found")
        return self._answers.find(self._owner(request), name)

    def _owner(self, request: Request) -> str:
        return owner_of(key_of(dict(request.scope["headers"])), self._client.settings)


def writer_of(kind: str, body: BaseModel | None, asked: EngineRequest, name: str,
              tokenizer: Tokenizer, **more: Any) -> AnswerWriter:
    """Return what writes the answer to a request of this kind. body: as the client sent it."""
    if isinstance(body, items.ResponseRequest):
        return ItemWriter(asked, name, tokenizer, is_chat=True, request=body, **more)
    if kind == "message":
        return BlockWriter(asked, name, tokenizer, is_chat=True, **more)
    return AnswerWriter(asked, name, tokenizer, is_chat=kind != "completion", **more)


def _digest(body: BaseModel) -> str:
    return digest_of(f"{type(body).__name__} {json.dumps(body.model_dump(exclude_none=True))}")


def _after(request: Request) -> int:
    """Return the number of the last event that a client has, -1 for none. Raises ApiError (400)."""
    text = request.query_params.get("starting_after", request.headers.get("last-event-id", ""))
    if not text:
        return -1
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise bad("starting_after must be the number of an event", "starting_after")
    return int(text)
