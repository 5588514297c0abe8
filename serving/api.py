"""The HTTP API of the service: a FastAPI app for each replica that `scripts/serve.py` runs on Ray Serve.

    request ─→ key ─→ body within limits ─→ free slot? ─→ image and questions checked ─→ `Service` ─→ answers

Every refusal is JSON with a `detail` that names the cause.
"""

import asyncio
import base64
import hmac
import json
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Security
from fastapi.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from fastapi_offline import FastAPIOffline
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, BeforeValidator, FailFast, Field, StringConstraints, ValidationError, WithJsonSchema
from starlette.datastructures import UploadFile

from .service import Query, Service, Settings


API_KEY = "TRAFFIC_VLM_API_KEY"  # environment variable
PATHS = ("/v1/answer", "/v1/generate")


def decode_base64(value: Any) -> Any:
    """The bytes of base64 text, which may be a data URL or have line breaks; an upload, bytes already, as it is."""
    if not isinstance(value, str):
        return value
    text = value.partition(",")[2] if value.startswith("data:") else value
    return base64.b64decode("".join(text.split()), validate=True)


Text = Annotated[str, StringConstraints(max_length=2000)]
ImageBytes = Annotated[
    bytes, BeforeValidator(decode_base64), WithJsonSchema({"type": "string", "contentEncoding": "base64"})
]


class AnswerRequest(BaseModel):
    """Questions about one image, which is a file in a form, or base64."""

    image: ImageBytes
    questions: Annotated[list[Text], FailFast(), Field(min_length=1, examples=[["Is there a car?"]])]
    answer_untaught: Annotated[bool | None, Field(description="guess at what was not taught")] = None


class Answer(BaseModel):
    """An item of the pipeline. Fields with a default may be missing."""

    question: str
    answer: str | None
    score: Annotated[float | None, Field(description="probability of the answer")]
    p_yes: Annotated[float | None, Field(description="calibrated P(yes); null for an answer in words")]
    not_sure: bool = False
    unknown_words: list[str] = []
    untaught_words: list[str] = []
    problem: Annotated[str | None, Field(description="why there is no answer")] = None


class AnswerResponse(BaseModel):
    answers: list[Answer]
    image: Annotated[str, Field(description="hash of the image's bytes")]
    seconds: float


class Problem(BaseModel):
    detail: str


PROBLEMS = {
    400: "The form is malformed.",
    401: "The API key is missing or wrong.",
    413: "The request is too long.",
    415: "The body is neither JSON nor a form.",
    422: "The image or a question cannot be read.",
    503: "Too many requests are waiting: try again after Retry-After seconds.",
    504: "Not answered in time.",
}
RESPONSES: dict[int | str, Any] = {
    status: {"model": Problem, "description": text} for status, text in PROBLEMS.items()
}
SCHEMA = AnswerRequest.model_json_schema()
FORM = SCHEMA["properties"] | {"image": {"type": "string", "format": "binary"}}
BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {"type": "object", "properties": FORM, "required": SCHEMA["required"]},
            "encoding": {"questions": {"style": "form", "explode": True}},  # a field for each question
        },
        "application/json": {"schema": SCHEMA},
    },
}


class Metrics:
    """Prometheus metrics of one replica."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        names: dict[str, Any] = {"registry": self.registry, "namespace": "traffic_vlm"}
        self.requests = Counter("requests", "Requests by path and status", ["path", "status"], **names)
        self.seconds = Histogram("request_seconds", "Seconds until a response starts", ["path"], **names)
        self.images = Counter("images", "Images of answered requests, encoded now or cached", ["cached"], **names)
        self.questions = Counter("questions", "Questions answered", **names)
        self.waiting = Gauge("waiting", "Requests in progress", **names)


async def count_request(request: Request, call_next: Any) -> Response:
    """Middleware: count a request by path and status, and measure its seconds."""
    metrics, path = request.app.state.metrics, request.url.path
    path = path if path in PATHS else "other"  # otherwise clients could create any number of metrics
    begin, status = time.perf_counter(), 500
    try:
        response = await call_next(request)
        status = response.status_code
        return response
    finally:
        metrics.requests.labels(path, str(status)).inc()
        metrics.seconds.labels(path).observe(time.perf_counter() - begin)


async def check_key(
    request: Request,
    header: Annotated[str | None, Security(APIKeyHeader(name="X-API-Key", auto_error=False))],
    bearer: Annotated[HTTPAuthorizationCredentials | None, Security(HTTPBearer(auto_error=False))],
) -> None:
    """Dependency: refuse requests without the key. Raises an `HTTPException` 401."""
    given = header or (bearer.credentials if bearer else "")
    if not hmac.compare_digest(given.encode("latin-1"), request.app.state.api_key.encode()):  # the bytes as sent
        raise HTTPException(401, "an API key is needed: the header X-API-Key, or Authorization: Bearer")


async def read_body(request: Request) -> bytes | dict[str, Any]:
    """The body: JSON text, or the fields of a form.

    Raises:
        HTTPException: 400, 413, 415, or 503 if the disk has no room for a large upload.
    """
    max_bytes, size = request.app.state.service.settings.max_bytes, 0

    async def receive() -> Any:
        nonlocal size
        message = await request.receive()
        size += len(message.get("body", b""))
        if size > max_bytes:
            raise HTTPException(413, f"the request is longer than {max_bytes:,} bytes")
        return message

    limited = Request(request.scope, receive)
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type == "application/json":
        return await limited.body()
    if content_type != "multipart/form-data":
        expected = "the content type must be application/json or multipart/form-data"
        raise HTTPException(415, f"{expected}, got {content_type or 'none'}")
    try:
        async with limited.form(max_files=1, max_part_size=max_bytes) as form:
            body: dict[str, Any] = dict(form)
            if "questions" in form:
                body["questions"] = form.getlist("questions")
            if isinstance(body.get("image"), UploadFile):
                body["image"] = await body["image"].read()
            return body
    except OSError as error:
        raise HTTPException(503, f"the upload cannot be stored: {error.strerror}", {"Retry-After": "60"}) from error


def read_query(service: Service, body: bytes | dict[str, Any]) -> Query:
    """The query in a body. Slow, so it must not run in the event loop. Raises an `HTTPException` 422."""
    try:
        read = AnswerRequest.model_validate_json if isinstance(body, bytes) else AnswerRequest.model_validate
        asked = read(body)  # type: ignore[arg-type]
        default = service.settings.answer_untaught
        untaught = default if asked.answer_untaught is None else asked.answer_untaught
        return service.read(asked.image, asked.questions, untaught)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        raise HTTPException(422, f"{place}: {message}" if place else message) from error
    except ValueError as error:
        raise HTTPException(422, str(error)) from error


async def receive_query(request: Request) -> AsyncIterator[Query]:
    """Dependency: the query of a request. It holds one of `max_waiting` slots until the response is complete.

    The slot is taken once the body has arrived: otherwise clients that send slowly would take all slots.
    """
    state, settings = request.app.state, request.app.state.service.settings
    async with asyncio.timeout(settings.seconds):
        body = await read_body(request)
    if state.waiting >= settings.max_waiting:
        raise HTTPException(503, f"{settings.max_waiting} requests are waiting already", {"Retry-After": "1"})
    state.waiting += 1
    try:
        async with asyncio.timeout(settings.seconds):
            query = await asyncio.get_running_loop().run_in_executor(state.readers, read_query, state.service, body)
        yield query
    finally:
        state.waiting -= 1


ReceivedQuery = Annotated[Query, Depends(receive_query)]
router = APIRouter()


@router.post("/v1/answer", response_model=AnswerResponse, openapi_extra={"requestBody": BODY}, responses=RESPONSES)
async def answer(request: Request, query: ReceivedQuery) -> JSONResponse:
    """Answer questions about an image: `score` is the probability of the answer, `p_yes` that of yes."""
    service, metrics, begin = request.app.state.service, request.app.state.metrics, time.perf_counter()
    async with asyncio.timeout(service.settings.seconds):
        await service.answer(query)
    metrics.images.labels(str(query.cached).lower()).inc()
    metrics.questions.inc(len(query.answers))
    return JSONResponse({"answers": query.answers, "image": query.key, "seconds": time.perf_counter() - begin})


@router.post(
    "/v1/generate",
    response_class=StreamingResponse,
    openapi_extra={"requestBody": BODY, "responses": {"200": {"content": {"text/event-stream": {}}}}},
    responses=RESPONSES,
)
async def generate(request: Request, query: ReceivedQuery) -> StreamingResponse:
    """Answer one question after the other, with answers in words as they are generated.

    Events: {"index", "text"}, a piece of the answer in words to the question with this index; {"index", "question",
    "answer", ...}, its complete answer, the only event of a yes/no question; {"detail"}, why there are no more.
    """
    service, metrics = request.app.state.service, request.app.state.metrics
    seconds = service.settings.seconds
    async with asyncio.timeout(seconds):
        await service.encode(query)

    async def events() -> AsyncIterator[str]:
        try:
            async for index, piece in service.stream(query):
                event = {"text": piece} if isinstance(piece, str) else piece
                yield f"data: {json.dumps({'index': index} | event)}\n\n"
                metrics.questions.inc(not isinstance(piece, str))
        except TimeoutError:
            yield f"data: {json.dumps({'detail': f'no token in {seconds:g} seconds'})}\n\n"
        except Exception:
            yield f"data: {json.dumps({'detail': 'an internal error has ended the answers'})}\n\n"
            raise

    return StreamingResponse(events(), media_type="text/event-stream")


@router.get("/metrics", response_class=Response)
async def read_metrics(request: Request) -> Response:
    return Response(generate_latest(request.app.state.metrics.registry), media_type="text/plain; version=0.0.4")


def build_app(settings: Settings, api_key: str | None = None) -> FastAPI:
    """The ASGI app of one replica, with its model loaded.

    Args:
        api_key: what requests to `/v1` and `/metrics` must send; None for no key.
    """
    # Swagger UI is served from a package. Its validator is a website, which would get the address of this server.
    app = FastAPIOffline(
        title="Traffic VLM",
        version="1",
        description="Answers questions about images of traffic scenes.",
        redoc_url=None,
        swagger_ui_parameters={"validatorUrl": None},
    )
    app.state.service, app.state.metrics, app.state.api_key = Service(settings), Metrics(), api_key
    app.state.waiting = 0  # requests whose body has arrived and whose response is not complete
    app.state.metrics.waiting.set_function(lambda: app.state.waiting)
    app.state.readers = ThreadPoolExecutor(4)  # decode images
    app.middleware("http")(count_request)
    app.include_router(router, dependencies=[Depends(check_key)] if api_key else [])

    @app.exception_handler(TimeoutError)
    async def too_slow(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": f"not answered in {settings.seconds:g} seconds"}, 504)

    @app.get("/healthz", include_in_schema=False)
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/", include_in_schema=False)
    async def redirect_to_docs() -> RedirectResponse:
        return RedirectResponse("/docs")

    return app
