"""Answers that a client requests again: by its Idempotency-Key, or by the answer's id.

Available only with a journal. This module uses HTTP and journaled requests, no engine.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server import schema_items as items
from pipeinfer.server.block_writer import BlockWriter
from pipeinfer.server.engine_client import EngineClient
from pipeinfer.server.errors import ApiError, bad
from pipeinfer.server.item_writer import ItemWriter
from pipeinfer.server.journal import Begun
from pipeinfer.server.kept import Archive, Follower, Kept, check_key, digest_of, identity, owner_of
from pipeinfer.server.middleware import key_of
from pipeinfer.server.requests import EngineRequest
from pipeinfer.server.responses import ResponsesWriter
from pipeinfer.server.schema_replies import Deleted, Reply
from pipeinfer.server.streaming import EventStream, events, whole

Kind: TypeAlias = Literal["chat", "text", "items", "blocks"]


class RepeatedRequests:
    """The server's access to journaled answers."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def known(self, kind: Kind, body: BaseModel, request: Request) -> Response | None:
        """Return the answer to an earlier request with the same Idempotency-Key, None if there
        is none.

        Raises ApiError.
        """
        key = check_key(request.headers.get("idempotency-key", ""))
        if self._client.archive is None or not key:
            return None
        self._client.check_ready()
        kept = self._client.archive.of_key(self._owner(request), kind, key, _digest(body))
        return None if kept is None else await self.answer(kept, request, after=_after(request))

    async def keep(self, kind: Kind, body: BaseModel, writer: ResponsesWriter, request: Request
                   ) -> Response | None:
        """Journal a new request and answer it; None if the server or the client does not want
        that.

        Raises ApiError.
        """
        archive = self._client.archive
        if archive is None or getattr(body, "store", None) is False:
            return None
        if (before := await self.known(kind, body, request)) is not None:
            return before  # it came while this one was being read
        begun = Begun(
            writer.answer_id, writer.created, kind, self._owner(request),
            request.headers.get("idempotency-key", ""), _digest(body),
            identity(self._client.settings), str(self._client.facts.get("bits", "")),
            dataclasses.replace(writer.asked, tools=None), writer.asked.tools,
            body.model_dump(exclude_none=True, by_alias=True) if kind == "items" else None)
        return await self.answer(archive.begin(begun), request)

    async def retrieve(self, name: str, request: Request, stream: bool = False) -> Response:
        """Return an answer by its id, or stream it from the event after `starting_after`. An answer
        of /v1/responses is returned as it is now. Raises ApiError."""
        kept = self._find(name, request)
        kept.archive.wanted(kept)
        if stream:
            return await self.answer(kept, request, stream=True, after=_after(request))
        if kept.record.begun.kind == "items" and not kept.ended:
            writer = self._writer(kept, self._client.check_ready(), stream=False)
            assert isinstance(writer, ItemWriter)
            return Reply(writer.now())
        return await self.answer(kept, request, stream=False)

    async def delete(self, name: str, request: Request) -> Response:
        """End a request if it runs, and delete its answer. Raises ApiError."""
        kept = self._find(name, request)
        kept.archive.drop(kept, "disconnected")
        return Reply(Deleted(id=name, object="response.deleted", deleted=True))

    async def answer(self, kept: Kept, request: Request, stream: bool | None = None,
                     after: int = -1) -> Response:
        """Return the answer to a journaled request: the tokens that it has, and those that
        follow.

        stream: as events; None: as the request wanted. after: number of the last event that the
            client has.
        Raises ApiError.
        """
        asked = kept.record.begun.asked
        stream = asked.stream if stream is None else stream
        if asked.count > 1 and after >= 0:
            raise bad("an answer of several choices streams from its beginning alone: leave "
                      "starting_after out", "starting_after")
        tokenizer = self._client.check_ready()
        writer = self._writer(kept, tokenizer, stream)
        follower = Follower(kept, tokenizer)
        writer.start(follower.generations)
        if not stream:
            return Reply(await whole(follower, writer, request))
        return EventStream(
            events(follower, writer, after if asked.count == 1 else None),
            self._client.settings.client_timeout, lambda: follower.abort("disconnected"))

    def _writer(self, kept: Kept, tokenizer: Tokenizer, stream: bool) -> ResponsesWriter:
        begun = kept.record.begun
        asked = dataclasses.replace(begun.asked, stream=stream, tools=begun.tools)
        body = items.ResponseRequest.model_validate(begun.request) \
            if begun.kind == "items" else None
        return writer_of(begun.kind, body, asked, self._client.settings.name, tokenizer,
                         answer_id=begun.id, created=begun.at, kept=True)

    def _find(self, name: str, request: Request) -> Kept:
        archive: Archive | None = self._client.archive
        if archive is None:
            self._client.check_ready()
            raise ApiError(404, "this server keeps no answers: start it with --journal FILE",
                           code="not_found")
        return archive.find(self._owner(request), name)

    def _owner(self, request: Request) -> str:
        return owner_of(key_of(dict(request.scope["headers"])), self._client.settings)


def writer_of(kind: str, body: BaseModel | None, asked: EngineRequest, name: str,
              tokenizer: Tokenizer, **more: Any) -> ResponsesWriter:
    """Return what writes the answer to a request of this kind. body: as the client sent it."""
    if isinstance(body, items.ResponseRequest):
        return ItemWriter(asked, name, tokenizer, is_chat=True, request=body, **more)
    if kind == "blocks":
        return BlockWriter(asked, name, tokenizer, is_chat=True, **more)
    return ResponsesWriter(asked, name, tokenizer, is_chat=kind != "text", **more)


def _digest(body: BaseModel) -> str:
    return digest_of(f"{type(body).__name__} {body.model_dump_json(exclude_none=True)}")


def _after(request: Request) -> int:
    """Return the number of the last event that a client has, -1 for none. Raises ApiError (400)."""
    text = request.query_params.get("starting_after", request.headers.get("last-event-id", ""))
    if not text:
        return -1
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise bad("starting_after must be the number of an event", "starting_after")
    return int(text)
