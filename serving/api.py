"""The HTTP service: what may be sent, what comes back, and limits that hold whatever is sent.

    request ── key, free place, size? ──→ image and questions read ──→ `Service` ──→ answers, or a problem in words

`build_app` makes the ASGI app of one replica. `scripts/serve.py` runs it on Ray Serve, which brings the processes.
"""

import asyncio
import base64
import hmac
import json
import queue
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, cast

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from starlette.datastructures import UploadFile

from .service import Item, Service, Settings


JSON, FORM = "application/json", "multipart/form-data"
API_KEY = "TRAFFIC_VLM_API_KEY"  # environment variable
OPEN_PATHS = ("/healthz",)  # without a key
LIMITED_PATHS = ("/v1/answer", "/v1/generate")


Text = Annotated[str, StringConstraints(min_length=1, max_length=2000)]


class Asked(BaseModel):
    """The image of a request: base64, or a URL where the server allows them."""

    model_config = ConfigDict(extra="forbid")
    image: str | None = None
    image_url: str | None = None


class AnswerRequest(Asked):
    questions: Annotated[list[Text], Field(min_length=1)]


class GenerateRequest(Asked):
    question: Text


class AnswerModel(BaseModel):
    question: str
    answer: str
    probability: float
    yes_probability: float | None
    unknown_words: list[str]


class AnswerResponse(BaseModel):
    answers: list[AnswerModel]
    image: str  # hash of its bytes
    cached: bool
    seconds: float


class Problem(BaseModel):
    detail: str


class Limits:
    """ASGI middleware: who may ask, how many at a time, how much, and how long.

    It stands before anything is read, so that what is refused costs nothing.
    """

    def __init__(self, app: Any, service: Service, metrics: "Metrics"):
        self.app, self.service, self.metrics = app, service, metrics

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        # Any other path is one to the metrics: strangers could make up endless names for them.
        path = scope["path"] if scope["path"] in LIMITED_PATHS else "other"
        headers, begin, status = dict(scope["headers"]), time.perf_counter(), 500

        async def watched(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        refusal = self._refuse_stranger(headers) or (self._refuse_load(headers) if path != "other" else None)
        counts = refusal is None and path != "other"
        self.service.waiting += counts
        try:
            if refusal is not None:
                await refusal(scope, receive, watched)
            else:
                await self.app(scope, self._counted(receive, self.service.settings.max_bytes), watched)
        finally:
            self.service.waiting -= counts
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.seconds.labels(path).observe(time.perf_counter() - begin)

    def _refuse_stranger(self, headers: dict[bytes, bytes]) -> Response | None:
        key = self.service.settings.api_key
        if key is None:
            return None
        given = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if hmac.compare_digest(given, key.encode()):
            return None
        return problem(401, "an API key is needed: the header X-API-Key, or Authorization: Bearer")

    def _refuse_load(self, headers: dict[bytes, bytes]) -> Response | None:
        settings = self.service.settings
        if self.service.waiting >= settings.max_waiting:
            return problem(503, f"{settings.max_waiting} requests are waiting already", {"Retry-After": "1"})
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > settings.max_bytes:
            return problem(413, too_long(settings.max_bytes))
        return None

    @staticmethod
    def _counted(receive: Any, limit: int) -> Any:
        """A body without a length is counted as it comes."""
        total = 0

        async def counted() -> dict[str, Any]:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > limit:
                raise HTTPException(413, too_long(limit))
            return message

        return counted


def too_long(limit: int) -> str:
    return f"the request is longer than {limit:,} bytes"


def problem(status: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": detail}, status, headers)


class Metrics:
    """What Prometheus reads of one replica."""

    def __init__(self, service: Service):
        self.registry = CollectorRegistry()
        names: dict[str, Any] = {"registry": self.registry, "namespace": "traffic_vlm"}
        self.requests = Counter("requests", "Requests by path and status", ["path", "status"], **names)
        self.seconds = Histogram("request_seconds", "Seconds from the first byte to the last", ["path"], **names)
        self.images = Counter("images", "Images asked about, looked at or kept from before", ["cached"], **names)
        self.questions = Counter("questions", "Questions answered", **names)
        Gauge("waiting", "Requests in work", **names).set_function(lambda: service.waiting)


async def parse(request: Request, service: Service, model: type[Asked]) -> tuple[bytes, Any]:
    """The image's bytes and the checked request, from JSON or a form with an uploaded `image`.

    Raises:
        HTTPException: 415 for another type, 422 for what does not fit.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    upload = None
    if kind == FORM:
        form = await request.form(max_files=1, max_fields=service.settings.max_questions + 8)
        values: dict[str, Any] = {name: form.get(name) for name in form}
        if "questions" in form:
            values["questions"] = form.getlist("questions")
        if isinstance(values.get("image"), UploadFile):
            upload = await values.pop("image").read()
    elif kind == JSON:
        try:
            values = await asyncio.to_thread(json.loads, await request.body())
        except (ValueError, RecursionError) as error:
            raise HTTPException(422, f"the body is no JSON: {error}") from error
    else:
        raise HTTPException(415, f"the content type must be {JSON} or {FORM}, got {kind or 'none'}")
    # Said before each is looked at: of a million wrong ones pydantic makes a million errors.
    if not isinstance(values, dict):
        raise HTTPException(422, "the body must be a JSON object")
    if unknown := values.keys() - model.model_fields.keys():
        known = ", ".join(model.model_fields)
        raise HTTPException(422, f"the body has a field {min(unknown)[:100]!r}; known are {known}")
    questions, limit = values.get("questions"), service.settings.max_questions
    if isinstance(questions, list) and len(questions) > limit:
        raise HTTPException(422, f"{len(questions)} questions: at most {limit} are answered at once")
    try:
        asked: Any = model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise HTTPException(422, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    if sum(one is not None for one in (upload, asked.image, asked.image_url)) != 1:
        raise HTTPException(422, "give one image: an upload, base64 in image, or image_url")
    try:
        if asked.image_url is not None:
            return await service.fetch(asked.image_url), asked
        if upload is None:
            upload = await asyncio.to_thread(base64.b64decode, asked.image, validate=True)
        return cast(bytes, upload), asked
    except ValueError as error:
        raise HTTPException(422, f"image: {error}") from error


def describe_body(model: type[Asked]) -> dict[str, Any]:
    """What OpenAPI says of a body that is JSON or a form."""
    schema = model.model_json_schema()
    asked = {name: field for name, field in schema["properties"].items() if name not in Asked.model_fields}
    form = {"image": {"type": "string", "format": "binary"}} | asked
    shown = {
        FORM: {"schema": {"type": "object", "properties": form, "required": list(form)}},
        JSON: {"schema": schema},
    }
    return {"requestBody": {"required": True, "content": shown}}


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """What takes longer is answered by 504."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise HTTPException(504, f"not answered in {seconds:g} seconds") from error


PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": text}
    for status, text in {
        400: "the body is no form",
        401: "no API key",
        413: "too long",
        415: "neither JSON nor a form",
        422: "an image or questions that cannot be answered",
        503: "too many requests; Retry-After says when to come again",
        504: "not answered in time",
    }.items()
}


def build_app(settings: Settings) -> FastAPI:
    """The ASGI app of one replica, with its model."""
    service = Service(settings)
    metrics = Metrics(service)
    app = FastAPI(title="Traffic VLM", version="1", description="Looks at a traffic scene, and answers questions.")

    async def prepare(request: Request, model: type[Asked]) -> Item:
        content, asked = await parse(request, service, model)
        try:
            questions = service.check(asked.questions if model is AnswerRequest else [asked.question])
            return await service.read(content, questions)
        except ValueError as error:
            raise HTTPException(422, str(error)) from error

    @app.post(
        "/v1/answer",
        response_model=AnswerResponse,
        responses=PROBLEMS,
        openapi_extra=describe_body(AnswerRequest),
    )
    async def answer(request: Request) -> AnswerResponse:
        """Answers to questions about an image, each with its probability; P(yes) where it is yes or no."""
        begin = time.perf_counter()
        async with within(settings.seconds):
            item = await prepare(request, AnswerRequest)
            answers, cached = await service.answer(item)
        metrics.images.labels(str(cached).lower()).inc()
        metrics.questions.inc(len(answers))
        shown = [AnswerModel(**one.to_dict()) for one in answers]
        return AnswerResponse(answers=shown, image=item.key, cached=cached, seconds=time.perf_counter() - begin)

    @app.post(
        "/v1/generate",
        response_class=StreamingResponse,
        responses=PROBLEMS
        | {200: {"content": {"text/event-stream": {}}, "description": "events with text, then answer"}},
        openapi_extra=describe_body(GenerateRequest),
    )
    async def generate(request: Request) -> StreamingResponse:
        """The answer in words, as it grows: events {"text": so far}, and at last {"answer", ...} or {"detail"}."""
        async with within(settings.seconds):
            item = await prepare(request, GenerateRequest)

        def events() -> Iterator[str]:
            try:
                for said in service.stream(item):
                    event = {"text": said} if isinstance(said, str) else said.to_dict()
                    yield f"data: {json.dumps(event)}\n\n"
                metrics.questions.inc()
            except queue.Empty:
                problem = {"detail": f"no word in {settings.seconds:g} seconds"}
                yield f"data: {json.dumps(problem)}\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    @app.get("/healthz")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", response_class=Response)
    async def read_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4")

    app.add_middleware(Limits, service=service, metrics=metrics)  # type: ignore[arg-type]
    return app
