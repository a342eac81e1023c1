"""The model that an app serves, as all routes reach it, and routes whose bodies its threads parse;
GET /v1/models.

Beside the model: its running and last requests (for /status and the log), and traces by
OpenTelemetry: a span for each choice, with one for each of its stages. FastAPI makes the span of
the HTTP request around them. Without the extra ``otel``, or if OpenTelemetry is not set up, nothing
is traced, and requests are not slowed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, TypeVar
from weakref import WeakSet, WeakValueDictionary

import anyio.to_thread
import numpy as np
from fastapi import APIRouter, Depends, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope

from kvlinker.base.errors import (
    InvalidRequestError,
    KVLinkerError,
    ModelNotFoundError,
    PermissionDeniedError,
)
from kvlinker.doors.http.edge.bodies import LONG_BODY_BYTES, check_json
from kvlinker.doors.http.edge.errors import ANTHROPIC_HEADER, error_responses, note_ignored
from kvlinker.doors.http.edge.guards import Caller, CallerParam, Drain
from kvlinker.doors.http.fields.bodies import RequestBody, ResponseBody, Text, ignored_paths
from kvlinker.doors.http.fields.server_status import RecentRequest, RunningRequest
from kvlinker.doors.http.metrics import Metrics
from kvlinker.engines.contract.contract import Failed, Finished, check_room
from kvlinker.engines.contract.machine_models import Model, models_here
from kvlinker.llm import LLM, ReadPrompt
from kvlinker.service.embedding import Embedder, EmbeddingRequest
from kvlinker.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer, TracerProvider

logger = logging.getLogger(__name__)

T = TypeVar("T")

Handler = Callable[[Request], Coroutine[Any, Any, Response]]

MOST_KEPT = 256
"""The most requests that are remembered, of all tenants together."""

MOST_SHOWN = 20
"""The most requests that a caller is shown."""

LEAST_REUSABLE = 1024
"""The tokens that other settings would have found cached, after which the log says so: fewer are
computed in a second or so."""

STAGES = ("load", "queue", "link", "decode")
"""The stages of a choice in their order; each is a field of ``Timing`` and the name of a span."""

MOST_NAMED = 200
"""The most fields that the log names; their names are callers' text."""

LONG_TEXT_BYTES = 256 * 2**10
"""The length of a body from which on its texts take noticeable time and memory to encode."""

LONG_AT_ONCE = 2
"""The most requests with long texts that are encoded at the same time."""


class EncodingThreads:
    """Runs functions that encode a request's texts: those of short texts in the threads that all
    routes share, those of long ones a few at a time in threads of their own."""

    def __init__(self) -> None:
        self._long = anyio.CapacityLimiter(LONG_AT_ONCE)

    async def run(self, request: Request, function: Callable[[], T]) -> T:
        """Return the result of ``function``, for a request whose body has been read."""
        if len(await request.body()) >= LONG_TEXT_BYTES:
            return await self.run_long(function)
        return await anyio.to_thread.run_sync(function)

    async def run_long(self, function: Callable[[], T]) -> T:
        """Return the result of ``function``, which takes long whatever the body's length."""
        return await anyio.to_thread.run_sync(function, limiter=self._long)


class BodyRoute(APIRoute):
    """A route that parses and validates long bodies in a thread. All routes with a body are such.

    A body is validated by its own class: the framework would make another validator of it, without
    the rules of its configuration for JSON of any kind.
    """

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()
        field = self.body_field
        if field is None:
            return handle

        model = field.field_info.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)

        async def read(request: Request) -> Response:
            body = await request.body()
            validated = _ValidatedRequest(request.scope, request.receive, body, model)
            try:
                return await handle(validated)
            except HTTPException as error:
                raise validated.failure or error from None

        return read


class _ValidatedRequest(Request):
    """A request whose body is there. Its ``json`` returns the validated body, which validates to
    itself at once.

    The framework takes any error of ``json`` for one of syntax: ``failure`` is the one that it was.
    """

    def __init__(self, scope: Scope, receive: Receive, body: bytes, model: type[BaseModel]) -> None:
        super().__init__(scope, receive)
        self.failure: Exception | None = None
        self._body = body
        self._model = model

    async def json(self) -> Any:
        try:
            if len(self._body) < LONG_BODY_BYTES:
                return self._validated()
            return await self.app.state.served.encoding.run(self, self._read)
        except (KVLinkerError, RequestValidationError) as error:
            self.failure = error
            raise

    def _read(self) -> Any:
        check_json(self._body)
        return self._validated()

    def _validated(self) -> Any:
        body = json.loads(self._body.decode("utf-8-sig"))
        try:
            return self._model.model_validate(body)
        except ValidationError as error:
            complaints = [
                {**complaint, "loc": ("body", *complaint["loc"])}
                for complaint in error.errors(include_url=False)
            ]
            raise RequestValidationError(complaints, body=body) from error


class EmbeddingTurns:
    """Lets tenants embed in turns, a batch each, and refuses requests beyond the number that may
    wait. Belongs to the event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open = 0
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request until the block ends. Raises OverloadedError."""
        check_room(self._open, 1, most=self._most)
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def embed(
        self, embedder: Embedder, asked: EmbeddingRequest, tenant: str
    ) -> NDArray[np.float32]:
        """Return the vectors [texts, dimensions] of a request. Cancelling it leaves out the batches
        that are still to come."""
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        vectors = np.empty(
            (sum(len(batch.texts) for batch in asked.batches), embedder.dimensions), np.float32
        )
        for batch in asked.batches:
            async with turn:
                computed = await asyncio.wrap_future(embedder.submit(asked, batch))
            vectors[batch.places] = computed
        return vectors


class RunningAnswer(Protocol):
    """The choices of one request, while they are generated."""

    tenant: str
    began: float
    """When it was, by ``time.monotonic``."""

    prompts: Mapping[str, ReadPrompt]
    """By the request's fields that they come from."""

    output_tokens: int
    """Counted over all choices so far."""

    @property
    def ended(self) -> bool:
        """True once all choices have ended."""


class RecentRequests:
    """The running requests and the last ones; a tenant sees its own, and an admin all. Methods may
    be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: WeakSet[RunningAnswer] = WeakSet()
        self._requests: deque[tuple[str, RecentRequest]] = deque(maxlen=MOST_KEPT)
        self._prompt_tokens = 0
        self._is_said = False
        self.reusable = 0
        """The tokens since the start that would have been cached with ``implicit = "auto"``."""

    def begin(self, choices: RunningAnswer) -> None:
        """Count a request as running until its choices have ended."""
        with self._lock:
            self._running.add(choices)

    def running(self, tenant: str | None) -> list[RunningRequest]:
        """Return a tenant's requests that are being answered, the last one first; None for those of
        all."""
        now = time.monotonic()
        with self._lock:
            begun = [choices for choices in self._running if not choices.ended]
        shown = [each for each in begun if tenant in (None, each.tenant)]
        return [
            RunningRequest(
                tenant=each.tenant,
                policy=next(iter(each.prompts.values())).policy.name,
                seconds=round(now - each.began, 1),
                prompt_tokens=sum(len(read.prompt) for read in each.prompts.values()),
                output_tokens=each.output_tokens,
            )
            for each in sorted(shown, key=lambda each: each.began, reverse=True)[:MOST_SHOWN]
        ]

    def add(self, tenant: str, request: RecentRequest) -> None:
        """Remember a request that has ended; say once in the log if other settings would spare
        much."""
        with self._lock:
            self._requests.append((tenant, request))
            self.reusable += request.reusable
            self._prompt_tokens += request.cached + request.recomputed + request.fresh
            says = self.reusable >= LEAST_REUSABLE and not self._is_said
            self._is_said = self._is_said or says
        if says:
            logger.info(
                "Of %d prompt tokens so far, %d stood in earlier prompts at another place, and were"
                " computed again. With --implicit auto (KVLINKER_IMPLICIT=auto) they are found.",
                self._prompt_tokens,
                self.reusable,
            )

    def of(self, tenant: str | None) -> list[RecentRequest]:
        """Return a tenant's last requests, the last one first; None for those of all."""
        with self._lock:
            kept = list(self._requests)
        shown = [request for owner, request in reversed(kept) if tenant in (None, owner)]
        return shown[:MOST_SHOWN]


class Tracing:
    """Makes the traces of requests' choices."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        """With None for ``provider``, the one that a program has set up for itself is used. Raises
        ImportError if OpenTelemetry is not installed."""
        from opentelemetry import trace

        self._tracer = trace.get_tracer("kvlinker", version("kvlinker"), provider)

    @classmethod
    def if_installed(cls, provider: TracerProvider | None = None) -> Tracing | None:
        """Make one; None if OpenTelemetry is not installed."""
        try:
            return cls(provider)
        except ImportError:
            return None

    def begin(self, headers: Mapping[str, str]) -> RequestTrace:
        """Return the trace of the choices of the HTTP request that the caller answers, and that has
        these headers.

        Their spans belong to the request's span, or, where it has none, to the one that
        ``traceparent`` names.
        """
        from opentelemetry import context, propagate, trace

        is_traced = trace.get_current_span().get_span_context().is_valid
        return RequestTrace(
            self._tracer, context.get_current() if is_traced else propagate.extract(headers)
        )


class RequestTrace:
    """Traces the choices of one HTTP request."""

    def __init__(self, tracer: Tracer, parent: Context) -> None:
        """Begin now; spans belong to the one of ``parent``."""
        self._tracer = tracer
        self._parent = parent
        self._begun = time.time_ns()

    def ended(self, choice: int, prompt: ReadPrompt, event: Finished | Failed) -> None:
        """Make the spans of a choice that ends now; ``choice`` is its number among those of its
        prompt."""
        now = time.time_ns()
        finished = event if isinstance(event, Finished) else None
        stages = [] if finished is None else _stages(finished, now)
        span = self._tracer.start_span(
            "generate",
            self._parent,
            attributes={
                "kvlinker.policy": prompt.policy.name,
                "kvlinker.chunks": len(prompt.prompt.spans),
                "kvlinker.choice": choice,
                **_usage(event),
            },
            start_time=stages[0][1] if stages else self._begun,
        )
        if not span.is_recording():
            return
        from opentelemetry import trace

        if finished is None:
            span.set_status(trace.StatusCode.ERROR)
        inside = trace.set_span_in_context(span, self._parent)
        for name, begin, end in stages:
            self._tracer.start_span(name, inside, start_time=begin).end(end)
        span.end(now)


def _usage(event: Finished | Failed) -> dict[str, Any]:
    """Return the attributes of a choice's span: how it ended, and its costs."""
    if isinstance(event, Failed):
        return {"error.type": event.error.code}
    usage = event.usage
    return {
        "kvlinker.tokens.cached": usage.cached_tokens,
        "kvlinker.tokens.exact_cached": usage.exact_cached_tokens,
        "kvlinker.tokens.recomputed": usage.recomputed_tokens,
        "kvlinker.tokens.fresh": usage.fresh_tokens,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.response.finish_reasons": (event.reason,),
    }


def _stages(finished: Finished, now: int) -> list[tuple[str, int, int]]:
    """Return the name, begin and end of each stage of a choice that ends ``now``; times are in
    nanoseconds of Unix time, and stages that took no time are left out."""
    stages = []
    for name in reversed(STAGES):
        begin = now - round(getattr(finished.timing, name) * 1e9)
        if begin < now:
            stages.append((name, begin, now))
        now = begin
    return stages[::-1]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Holds one model, as one app serves it."""

    llm: LLM
    settings: Settings
    metrics: Metrics
    drain: Drain
    embedding: EmbeddingTurns
    body_limits: Mapping[str, int]
    """The most bytes of bodies, by path, where these are fewer than ``MAX_BODY_BYTES``."""
    tracing: Tracing | None
    encoding: EncodingThreads = field(default_factory=EncodingThreads)
    named: set[str] = field(default_factory=set)
    """The ignored fields of requests that the log has named."""
    recent: RecentRequests = field(default_factory=RecentRequests)
    failure: str | None = None
    """Why another model is not served, which was to take the place of this one."""

    @property
    def embedding_name(self) -> str | None:
        """The embedding model's name; None if there is none."""
        return None if self.llm.embedder is None else self.llm.embedder.name

    def report_ignored(self, body: RequestBody, scope: Scope) -> None:
        """Note what of a body was left out, which its answer will name, and the log once. Raises
        InvalidRequestError under the setting ``strict``."""
        paths = list(ignored_paths(body))
        if not paths:
            return
        if self.settings.strict:
            raise InvalidRequestError(
                f"Unknown parameter: {paths[0]!r}. This server is strict: leave it out.",
                param=paths[0],
                code="unknown_parameter",
            )
        note_ignored(scope, paths)
        for name in {re.sub(r"\.\d+\b", "", path) for path in paths} - self.named:
            if len(self.named) < MOST_NAMED:
                self.named.add(name)
                logger.info(
                    "Requests have %r, which is left out: kvlinker knows nothing to do with it.",
                    name,
                )

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFoundError for a request to a model that gives no answers: the embedding
        model, or with the setting ``strict_model`` any but the served names, ``default`` and
        None. Else the one model that is served answers, whatever name a client has for it."""
        if name is not None and (name == self.embedding_name or self.settings.strict_model):
            self.require_model(name)

    def require_model(self, name: str | None) -> None:
        """Raise ModelNotFoundError unless this is one of the served names, ``default`` or None."""
        if name not in (None, "default", *self.settings.served_names):
            raise ModelNotFoundError(
                f"The model {name!r} is not served here. Use {self.llm.model_name!r}, or leave"
                " 'model' out; --served-model-name gives it other names.",
                param="model",
            )


def served_by(scope: Scope) -> ServedModel:
    """Return the model that a request's app serves."""
    served: ServedModel = scope["app"].state.served
    return served


async def _service(request: Request) -> ServedModel:
    return served_by(request.scope)


ServedModelParam = Annotated[ServedModel, Depends(_service)]

router = APIRouter(prefix="/v1/models", tags=["models"], route_class=BodyRoute)


class ModelObject(ResponseBody):
    """A model that is served. ``max_model_len``: tokens that prompt and answer may have
    together."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["kvlinker"] = "kvlinker"
    max_model_len: int


class ModelList(ResponseBody):
    """All models that are served."""

    object: Literal["list"] = "list"
    data: list[ModelObject]


class AnthropicModel(ResponseBody):
    """A model as Anthropic's API describes it."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    max_model_len: int


class AnthropicModels(ResponseBody):
    """All models, as Anthropic's API lists them: on one page."""

    data: list[AnthropicModel]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


class KnownModel(ResponseBody):
    """A model on the server's machine: the size of its files, their weights, and its window, null
    where that is not known."""

    name: str
    nbytes: int
    weights: str
    window: int | None
    is_loaded: bool


class KnownModels(ResponseBody):
    """The models that the server can load. If the server went back to this model from another one,
    ``failure`` says why."""

    data: list[KnownModel]
    failure: str | None


class LoadModelRequest(RequestBody):
    """Names one of the known models."""

    refuses_unknown: ClassVar[bool] = True

    model: Text


class ModelSwitch(ResponseBody):
    """The model that is being loaded."""

    model: str


AnthropicVersion = Annotated[
    str | None,
    Header(
        alias=ANTHROPIC_HEADER,
        description="With it, models are described as Anthropic's API does.",
    ),
]


@router.get("")
async def list_models(
    served: ServedModelParam, version: AnthropicVersion = None
) -> ModelList | AnthropicModels:
    """List the model that is served, under each of its names, and the embedding model."""
    names = [*served.settings.served_names, *filter(None, [served.embedding_name])]
    models = [_model(served, name) for name in names]
    if version is None:
        return ModelList(data=models)
    described = list(map(_as_anthropic, models))
    return AnthropicModels(data=described, first_id=described[0].id, last_id=described[-1].id)


@router.get("/known", responses=error_responses(403))
def known_models(served: ServedModelParam, caller: CallerParam) -> KnownModels:
    """List the models on this machine that the server can load in the place of its own; for
    admins."""
    _require_admin(caller)
    own = {served.settings.model, str(Path(served.settings.model).absolute())}
    known = [KnownModel(**each._asdict(), is_loaded=each.name in own) for each in _loadable(served)]
    return KnownModels(data=known, failure=served.failure)


@router.post("/load", status_code=202, responses=error_responses(400, 403, 404))
def load_model(
    body: LoadModelRequest, served: ServedModelParam, caller: CallerParam
) -> ModelSwitch:
    """Load a known model in the place of the one that is served; for admins.

    Requests under way are finished as when the server stops. Others are answered 503 with the
    progress until the model is loaded. Context caches are kept; context caches of another model
    cannot be used until it is loaded again. If the model cannot be served, the server loads the
    former one.
    """
    _require_admin(caller)
    if body.model not in {each.name for each in _loadable(served)}:
        raise ModelNotFoundError(
            f"The model {body.model!r} is not on this machine. GET /v1/models/known lists those"
            " that are; `kvlinker pull` downloads one.",
            param="model",
        )
    served.drain.begin(body.model)
    return ModelSwitch(model=body.model)


def _require_admin(caller: Caller) -> None:
    if not caller.admin:
        raise PermissionDeniedError("Only admins list and load the models of this machine.")


def _loadable(served: ServedModel) -> list[Model]:
    """Return the models that can take the place of the served one; none under vLLM."""
    if served.settings.engine == "vllm":
        return []
    place = Path(served.settings.model)
    beside = [place.absolute().parent] if place.exists() else []
    return list({each.name: each for each in models_here(beside)}.values())


class _ModelNameConvertor(PathConvertor):
    """Takes any path for a model's name but that of the route that loads one, whose other methods
    are a 405, not a 404."""

    regex = "(?!load$).*"


register_url_convertor("model_name", _ModelNameConvertor())


@router.get("/{name:model_name}", responses=error_responses(404))
async def read_model(
    name: str, served: ServedModelParam, version: AnthropicVersion = None
) -> ModelObject | AnthropicModel:
    """Describe the model of this name."""
    if name != served.embedding_name:
        served.require_model(name)
    model = _model(served, served.llm.model_name if name == "default" else name)
    return model if version is None else _as_anthropic(model)


def _as_anthropic(model: ModelObject) -> AnthropicModel:
    created = datetime.fromtimestamp(model.created, UTC)
    return AnthropicModel(
        id=model.id,
        display_name=model.id,
        created_at=created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_model_len=model.max_model_len,
    )


def _model(served: ServedModel, name: str) -> ModelObject:
    llm = served.llm
    answers = llm.embedder is None or name in served.settings.served_names
    window = llm.max_model_len if answers or not llm.embedder else llm.embedder.max_tokens
    return ModelObject(id=name, created=int(llm.created_at), max_model_len=window)
