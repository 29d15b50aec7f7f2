"""The HTTP application: routes, error handlers, the OpenAPI description.

Each route checks, submits and answers a request; other modules do the work.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from pipeinfer import __version__
from pipeinfer.core.types import FloatArray, SamplingParams
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server import anthropic_messages as blocks
from pipeinfer.server import chat, embeddings, prompts
from pipeinfer.server import openai_responses as items
from pipeinfer.server import schema_replies as replies
from pipeinfer.server import schema_requests as schema
from pipeinfer.server.answers import Answers, Reader
from pipeinfer.server.asking_again import AnswerRoutes, Kind
from pipeinfer.server.errors import ApiError, bad
from pipeinfer.server.families import knows_tools
from pipeinfer.server.grammars import Grammars
from pipeinfer.server.metrics import CONTENT_TYPE
from pipeinfer.server.middleware import wrap
from pipeinfer.server.pictures import Shown
from pipeinfer.server.race import Races
from pipeinfer.server.requests import NAMES, ServedModel, request_of
from pipeinfer.server.schema_replies import Reply
from pipeinfer.server.settings import Settings
from pipeinfer.server.streaming import ClientLeft, EventStream, finished, pipeline, unless_left

WEB = Path(__file__).parent / "web"
_PAGES = {"index.html": ("/",), "status.html": ("/status",)}  #: and where they are found
Answered = TypeVar("Answered")
_LONG_PROMPTS = ThreadPoolExecutor(2, "long prompts")
_PICTURES = ThreadPoolExecutor(2, "prompts with pictures")
#: what the validator's messages say of itself
_INTERNAL = re.compile(
    r"^Value error, | or object to extract fields from| after validation, not \d+$")
_GONE = 499  #: the client has left and does not read the answer
_log = logging.getLogger("pipeinfer.server")
_Responses: TypeAlias = dict[int | str, dict[str, Any]]
#: docs/serving.md says what each status means
_ERRORS: _Responses = {kind: {"model": replies.ErrorReply} for kind in ("4XX", "5XX")}
_NO_MORE: _Responses = {}
_MESSAGE_ERRORS: _Responses = {kind: {"model": replies.MessageError} for kind in ("4XX", "5XX")}
_EVENTS = {"itemSchema": {"type": "object", "required": ["data"],
                          "properties": {"data": {"type": "string"}}}}
_SSE: _Responses = {200: {"content": {"text/event-stream": _EVENTS}}}
_STREAM: _Responses = {200: {
    "description": "The answer, or with stream: true its chunks as server-sent events that end "
                   "with [DONE].",
    "content": {"text/event-stream": _EVENTS}}}


async def in_thread(wanted: schema.CompletionRequest | schema.ChatRequest,
                    work: Callable[..., Answered], *args: Any) -> Answered:
    """Run work on a prompt outside the event loop; long ones, and those with pictures, share
    threads of their own, so that they keep no short one waiting."""
    text = wanted.prompt if isinstance(wanted, schema.CompletionRequest) else wanted.messages
    shown = isinstance(wanted, schema.ChatRequest) and wanted.has_media
    if not shown and prompts.characters(text) <= prompts.SHORT:
        return await asyncio.to_thread(work, *args)
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(
        _PICTURES if shown else _LONG_PROMPTS, functools.partial(context.run, work, *args))


class Server:
    """The HTTP application over the answers of one client."""

    def __init__(self, answers: Answers) -> None:
        self.answers, self.client = answers, answers.client
        self.created = int(time.time())
        self._grammars: tuple[Tokenizer, Grammars] | None = None
        self.again = AnswerRoutes(answers)
        self.races = Races(self.client)
        self.app = FastAPI(
            title="pipeinfer", version=__version__, docs_url=None, redoc_url=None,
            redirect_slashes=False,  # see middleware.normalized
            description="A large language model over a cluster, with the OpenAI API.",
        )
        self._add_routes()
        self._add_handlers()
        self.files = self._add_files()

    @property
    def settings(self) -> Settings:
        """Of the present engine: it may be another one by the time a request has waited."""
        return self.client.settings

    @property
    def asgi(self) -> ASGIApp:
        public = frozenset({"/health", *self.files})
        return wrap(self.app, self.settings, self.client.metrics, public,
                        self.client.meters)

    # --- requests for answers -----------------------------------------------------------------

    async def completions(self, body: schema.CompletionRequest, request: Request) -> Response:
        """Continue texts, given as text or as token ids."""
        return await self._generate("completion", body, request)

    async def chat_completions(self, body: schema.ChatRequest, request: Request) -> Response:
        """Answer a conversation, by the model's own chat template."""
        return await self._generate("chat", body, request)

    async def responses(self, body: items.ResponseRequest, request: Request) -> Response:
        """Answer items as OpenAI's Responses API does."""
        return await self._generate("response", body, request)

    async def messages(self, body: blocks.MessagesRequest, request: Request) -> Response:
        """Answer a conversation as Anthropic's Messages API does."""
        return await self._generate("message", body, request)

    async def count_tokens(self, body: blocks.CountRequest, request: Request) -> Response:
        """Count the tokens of a conversation's prompt, also of one that exceeds the context."""
        tokenizer = await self._tokenizer_of(body.model, request)

        def count() -> int:
            model = self._served(tokenizer)
            return len(chat.tokens_of(wanted, tokenizer, model.grammars, model.shown(wanted)))

        with schema.own_names(body):
            wanted, _ = body.to_chat()
            return Reply({"input_tokens": await in_thread(wanted, count)})

    async def embed(self, body: schema.EmbeddingRequest, request: Request) -> Response:
        """Embed texts, with a model that is made for it."""
        tokenizer, settings = await self._tokenizer_of(body.model, request), self.settings
        facts = self.client.facts
        if why := facts.get("no_embeddings", "this model has none"):
            raise ApiError(400, why, param="model", code="not_supported")
        if body.dimensions not in (None, facts["n_embd"]):
            raise ApiError(400, f"dimensions: this model's embeddings have {facts['n_embd']}: cut "
                                "them off at the client if it was trained for that",
                           param="dimensions", code="not_supported")
        inputs = await asyncio.to_thread(embeddings.inputs_of, body, tokenizer, self._n_ctx)
        vectors: list[FloatArray] = []
        for start in range(0, len(inputs), settings.parallel):
            one = await self.answers.begin(embeddings.asked(
                inputs[start:start + settings.parallel], facts.get("pooling", "last")))
            await finished(Reader(one, tokenizer), request)
            vectors += map(embeddings.vector_of, one.generations)
        return Reply(embeddings.answer(vectors, sum(map(len, inputs)), settings.name,
                                       body.encoding_format == "base64"))

    async def _generate(
        self, kind: Kind,
        body: schema.CompletionRequest | schema.ChatRequest | schema.Translated,
        request: Request,
    ) -> Response:
        if (before := await self.again.known(kind, body, request)) is not None:
            return before
        notes = schema.ignored(body)
        wanted, more = body.to_chat() if isinstance(body, schema.Translated) else (body, [])
        tokenizer = await self._tokenizer_of(wanted.model, request)
        self.client.check_room(1)  # before any work on the prompt
        model = self._served(tokenizer)
        with schema.own_names(body):
            asked = await in_thread(wanted, request_of, wanted, model)
        asked.notes[:0] = [*notes, *more]
        return await self.again.begin(kind, body, asked, request)

    async def _tokenizer_of(self, name: str | None, request: Request) -> Tokenizer:
        """Return the vocabulary of the model that a request names, once it is served."""
        if self.client.others.names:  # a client that has gone must not bring another model
            await unless_left(self.client.model(name), request)
        tokenizer = self.client.check_ready()
        self._check_model(name)
        return tokenizer

    def _served(self, tokenizer: Tokenizer) -> ServedModel:
        return ServedModel(self.settings, tokenizer, self._compiler(tokenizer), self._n_ctx,
                           self.client.pictures)

    def _check_model(self, name: str | None) -> None:
        if not self.settings.serve.any_model_name and name not in (None, self.settings.name):
            raise ApiError(404, f"model {name!r} is not available; this server has "
                                f"{self.settings.name!r} (rename it with --alias, or start it with "
                                "--any-model-name)",
                           param="model", code="model_not_found")

    def _compiler(self, tokenizer: Tokenizer) -> Grammars:
        if self._grammars is None or self._grammars[0] is not tokenizer:
            self._grammars = tokenizer, Grammars(tokenizer)
        return self._grammars[1]

    @property
    def _n_ctx(self) -> int:
        return int(self.client.facts["n_ctx"])

    # --- text and tokens ----------------------------------------------------------------------

    async def tokenize(self, body: schema.TokenizeRequest) -> Response:
        """Return the token ids of a text."""
        tokenizer = self.client.check_ready()

        def tokens() -> replies.Tokens:
            found = prompts.encode(tokenizer, body.content, special=body.parse_special,
                                   add_bos=None if body.add_special else False)
            if not body.with_pieces:
                return replies.Tokens(tokens=found)
            return replies.Tokens(tokens=[
                replies.Piece(id=token, piece=_readable(tokenizer.piece(token, special=True)))
                for token in found])

        return Reply(await asyncio.to_thread(tokens))

    async def detokenize(self, body: schema.DetokenizeRequest) -> Response:
        """Return the text of token ids."""
        tokenizer = self.client.check_ready()
        tokens = prompts.check_tokens(body.tokens, tokenizer, "tokens")
        content = await asyncio.to_thread(tokenizer.decode, tokens, True)
        return Reply(replies.Content(content=content))

    async def apply_template(self, body: schema.TemplateRequest) -> Response:
        """Return the prompt that a conversation becomes."""
        tokenizer = self.client.check_ready()
        offered = chat.offered_by(body, tokenizer)
        shown = Shown(body.messages, self.client.pictures, self.settings.serve.image_urls)
        text = await asyncio.to_thread(chat.render, body, tokenizer, offered, shown)
        return Reply(replies.Prompt(prompt=text))

    # --- state of the server ------------------------------------------------------------------

    async def models(self) -> Response:
        """List the served model with its context length and capabilities, and the names of those
        that a request brings."""
        others = [name for name in self.client.others.names if name != self.settings.name]
        return Reply({"object": "list", "data": [self._model(), *map(self._named, others)]})

    async def model(self, name: str) -> Response:
        """Return the model that has this name, otherwise 404."""
        if name in self.client.others.names and name != self.settings.name:
            return Reply(self._named(name))
        self._check_model(name)
        return Reply(self._model())

    def _named(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self.created, "owned_by": "pipeinfer"}

    def _model(self) -> dict[str, Any]:
        model = self._named(self.settings.name)
        if self.client.state in ("ready", "asleep") and self.client.tokenizer is not None:
            template = self.client.tokenizer.chat_template or ""
            model["context_length"] = self._n_ctx
            pictures = self.client.pictures
            model["input_modalities"] = ["text", *(pictures.kinds() if pictures else ())]
            model["capabilities"] = {
                "chat": True, "chat_template": bool(template), "completions": True,
                "tools": "template" if knows_tools(template) else "generic",
                "structured_outputs": True, "logprobs": True,
                "embeddings": self.client.facts.get("no_embeddings") == "",
                "decomposers": list(self.settings.decomposers)}
        return model

    async def health(self) -> Response:
        """Return 200 if requests are taken, otherwise 503 with the state and its reason."""
        client = self.client
        state = "loading" if client.tokenizer is None and client.state == "ready" else client.state
        if state == "asleep":  # what restarts servers that are not well must not wake it
            return Reply(replies.Health(status=state))
        if state == "ready":
            facts = client.facts
            return Reply(replies.Health(
                status="ok",
                recoveries=sum(bool(change["lost"]) for change in facts.get("changes", ())),
                lost=facts.get("lost", [])))
        body = replies.Health(status=state)
        if state == "loading":
            body["stages"] = client.loading
        if client.reason:
            body["reason"] = client.reason
        return Reply(body, 503, {"Retry-After": "2"})

    async def metrics(self) -> Response:
        """Return the metrics for Prometheus."""
        client = self.client
        ready = client.state == "ready" and client.tokenizer is not None
        return Response(client.metrics.render(len(client.open), ready), media_type=CONTENT_TYPE)

    async def props(self) -> Response:
        """Return what is served and which features the page may offer."""
        tokenizer, settings = self.client.check_ready(), self.settings
        return Reply(replies.Props(
            model_alias=settings.name, models=list(self.client.others.names),
            total_slots=settings.parallel, n_ctx=self._n_ctx,
            chat_template=tokenizer.chat_template or "",
            bos_token=_token_text(tokenizer, tokenizer.bos_id),
            eos_token=_token_text(tokenizer, tokenizer.eos_id),
            build_info=f"pipeinfer {__version__}",
            default_generation_settings=_defaults(settings.defaults), pipeinfer=self.client.facts,
            race=self.races.offered))

    async def slots(self) -> Response:
        """List the places for requests and their users, as of the engine's last report."""
        self.client.check_ready()
        lanes = list(self.client.status.get("lanes", ()))
        return Reply([
            replies.Slot(id=i, n_ctx=self._n_ctx, is_processing=i < len(lanes),
                         lane=lanes[i] if i < len(lanes) else None)
            for i in range(max(self.settings.parallel, len(lanes)))])

    async def rebalance(self, body: schema.RebalanceRequest) -> Response:
        """Distribute the layers by what each stage takes now; running requests go on."""
        del body  # that it came is enough: see its class
        found = await self.client.rebalance(self.settings.serve.request_timeout)
        return Reply(replies.RebalanceReply(
            changed=found.changed, message=found.message, stages=self.client.facts["stages"]))

    async def rebalance_plan(self) -> Response:
        """Return what a rebalance would change now; nothing is changed."""
        found = await self.client.rebalance(self.settings.serve.request_timeout, preview=True)
        stages = list(found.stages) if found.changed else self.client.facts["stages"]
        return Reply(replies.RebalancePlan(changes=found.changed, message=found.message,
                                           gain=found.gain, stages=stages))

    async def watch(self) -> Response:
        """Stream the engine's status and runs as server-sent events, for the page."""
        self.client.check_watchers()
        return EventStream(pipeline(self.client), self.settings.serve.client_timeout)

    async def race(self, body: schema.RaceRequest) -> Response:
        """Stream the race of three policies over stages that are paced as slow hosts."""
        tokenizer = self.client.check_ready()
        self.races.check()
        return EventStream(self.races.events(body.prompt, bool(tokenizer.chat_template)),
                           self.settings.serve.client_timeout)

    # --- assembly -----------------------------------------------------------------------------

    def _add_routes(self) -> None:
        def route(methods: str, path: str, call: Any, model: Any = None,
                  more: _Responses = _NO_MORE, **extra: Any) -> None:
            errors = _MESSAGE_ERRORS if path.startswith("/v1/messages") else _ERRORS
            self.app.add_api_route(path, call, methods=methods.split(), response_model=model,
                                   responses={**errors, **more}, **extra)
            if methods == "GET" and path != "/pipeline":  # which has no end
                self.app.add_api_route(path, call, methods=["HEAD"], include_in_schema=False)

        official = dict[str, Any]  # as OpenAI's and Anthropic's own description says
        for path, call in (("/v1/completions", self.completions),
                           ("/v1/chat/completions", self.chat_completions),
                           ("/v1/responses", self.responses), ("/v1/messages", self.messages)):
            route("POST", path, call, official, _STREAM)
            route("GET", f"{path}/{{name}}", self.again.retrieve, official, _STREAM)
            route("DELETE", f"{path}/{{name}}", self.again.delete, replies.Deleted)
        route("POST", "/v1/messages/count_tokens", self.count_tokens, official)
        route("POST", "/v1/embeddings", self.embed, official)
        route("POST", "/tokenize", self.tokenize, replies.Tokens)
        route("POST", "/detokenize", self.detokenize, replies.Content)
        route("POST", "/rebalance", self.rebalance, replies.RebalanceReply)
        route("POST", "/race", self.race, None, _SSE)
        route("POST", "/apply-template", self.apply_template, replies.Prompt)
        route("GET", "/v1/models", self.models, official)
        route("GET", "/v1/models/{name:path}", self.model, official)
        route("GET", "/health", self.health, replies.Health, {503: {"model": replies.Health}})
        route("GET", "/props", self.props, replies.Props)
        route("GET", "/rebalance/plan", self.rebalance_plan, replies.RebalancePlan)
        route("GET", "/slots", self.slots, list[replies.Slot])
        route("GET", "/metrics", self.metrics, None,
              {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
              response_class=Response)
        route("GET", "/pipeline", self.watch, None, _SSE, response_class=Response)

    def _add_files(self) -> list[str]:
        """Add a route per file of the web page; return their paths. Other paths under / do not
        exist."""
        paths = []
        for file in sorted(f for f in WEB.rglob("*") if f.is_file()):
            name = file.relative_to(WEB).as_posix()
            for path in [f"/{name}", *_PAGES.get(name, ())]:
                self.app.add_route(path, functools.partial(_send_file, file),
                                   include_in_schema=False)
                paths.append(path)
        return paths

    def _add_handlers(self) -> None:
        metrics = self.client.metrics

        def reply(error: ApiError, request: Request) -> Response:
            if error.status in (429, 503):
                metrics.refused()
            return error.reply(request.url.path)

        async def api(request: Request, error: Exception) -> Response:
            assert isinstance(error, ApiError)
            return reply(error, request)

        async def http(request: Request, error: Exception) -> Response:
            assert isinstance(error, HTTPException)
            text = {404: "there is nothing at this path", 405: "wrong method for this path"}
            headers = dict(error.headers or {})
            if error.status_code in (408, 413):
                headers["Connection"] = "close"
            return reply(ApiError(error.status_code, text.get(error.status_code, error.detail),
                                  headers=headers), request)

        async def invalid(request: Request, error: Exception) -> Response:
            assert isinstance(error, RequestValidationError)
            return reply(explain(error), request)

        async def left(_: Request, __: Exception) -> Response:
            return Response(status_code=_GONE)

        async def bug(request: Request, error: Exception) -> Response:
            return reply(ApiError(500, f"internal server error ({type(error).__name__}); see its "
                                       "log", code="internal_error"), request)

        self.app.add_exception_handler(ApiError, api)
        self.app.add_exception_handler(HTTPException, http)
        self.app.add_exception_handler(RequestValidationError, invalid)
        self.app.add_exception_handler(ClientLeft, left)
        self.app.add_exception_handler(Exception, bug)


async def _send_file(file: Path, _: Request) -> Response:
    return FileResponse(file, headers={"Cache-Control": "no-cache"})


def _readable(piece: bytes) -> str | list[int]:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)


def _defaults(params: SamplingParams) -> dict[str, Any]:
    """Return the default values of the sampling fields that a request may set."""
    return {name: getattr(params, name) for name in (*NAMES, "logit_bias")}


def _token_text(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.token_text(token).decode("utf-8", "replace")


def explain(error: RequestValidationError) -> ApiError:
    """Return a validation error as one message with the first wrong field."""
    found = error.errors()
    # Every alternative of a union reports an error; that of the right type is the most specific.
    first = max((e for e in found if e["loc"][:2] == found[0]["loc"][:2]),
                key=lambda e: (not e["type"].endswith("_type"), len(e["loc"])))
    path = [part for part in first["loc"] if part not in ("body", "path", "query")]
    if first["type"] == "json_invalid":
        return bad(f"the request is not valid JSON: {first['ctx']['error']}")
    if not path:
        return bad("the request is not a JSON object; is its Content-Type application/json?")
    param = ".".join([str(part) for part in path if not _is_branch(part)] or [str(path[-1])])
    says = _INTERNAL.sub("", first["msg"]).replace("dictionary", "object")
    return bad(f"{param}: {says}", param)


def _is_branch(part: Any) -> bool:
    """Whether a part of a location names an alternative of a union and no field."""
    return isinstance(part, str) and (
        part in ("str", "int", "float", "bool") or "[" in part or part[:1].isupper()
        or part.startswith("constrained-"))
