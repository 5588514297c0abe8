"""The HTTP API of the service.

    request → key → body within limits → free slot? → image and questions checked → `Service` → answers

Every refusal is JSON with a `detail` that names the cause. `build_app` makes the ASGI app of one replica;
`scripts/serve.py` runs it on Ray Serve.
"""

import asyncio
import base64
import hmac
import json
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Security
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from starlette.datastructures import UploadFile

from .docs_page import describe_routes
from .service import MAX_LETTERS, Item, Service, Settings


API_KEY = "TRAFFIC_VLM_API_KEY"  # environment variable
PATHS = ("/v1/answer", "/v1/generate")


def decode_base64(value: Any) -> Any:
    """Decode base64 text. An upload is bytes already."""
    return base64.b64decode(value, validate=True) if isinstance(value, str) else value


Text = Annotated[str, StringConstraints(min_length=1, max_length=MAX_LETTERS)]
ImageBytes = Annotated[
    bytes, BeforeValidator(decode_base64), WithJsonSchema({"type": "string", "contentEncoding": "base64"})
]


class AnswerRequest(BaseModel):
    """Questions about one image: base64 or an upload, or a URL where the server allows URLs."""

    model_config = ConfigDict(extra="forbid")
    image: ImageBytes | None = None
    image_url: str | None = None
    questions: Annotated[list[Text], FailFast(), Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def check_fields(cls, values: Any) -> Any:
        """Report one unknown field; pydantic would report each of a million."""
        unknown = values.keys() - cls.model_fields.keys() if isinstance(values, dict) else ()
        if unknown:
            raise ValueError(f"unknown field {min(unknown)[:100]!r}; known are {', '.join(cls.model_fields)}")
        return values

    @model_validator(mode="after")
    def check_image(self) -> "AnswerRequest":
        if (self.image is None) == (self.image_url is None):
            raise ValueError("give one image: an upload, base64 in image, or image_url")
        return self


class Answer(BaseModel):
    """An item of the pipeline. The fields with defaults are there only if there is something to say."""

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


class Metrics:
    """Prometheus metrics of one replica."""

    def __init__(self, service: Service):
        self.registry = CollectorRegistry()
        names: dict[str, Any] = {"registry": self.registry, "namespace": "traffic_vlm"}
        self.requests = Counter("requests", "Requests by path and status", ["path", "status"], **names)
        self.seconds = Histogram("request_seconds", "Seconds until a response starts", ["path"], **names)
        self.images = Counter("images", "Images of answered requests, encoded now or cached", ["cached"], **names)
        self.questions = Counter("questions", "Questions answered", **names)
        Gauge("waiting", "Requests in progress", **names).set_function(lambda: service.waiting)


async def count_request(request: Request, call_next: Any) -> Response:
    """Middleware: count a request by path and status, and measure its seconds."""
    metrics, path = request.app.state.metrics, request.url.path
    path = path if path in PATHS else "other"  # clients must not create metrics
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
    given = header or (bearer.credentials if bearer else "")
    if not hmac.compare_digest(given.encode("latin-1"), request.app.state.api_key.encode()):
        raise HTTPException(401, "an API key is needed: the header X-API-Key, or Authorization: Bearer")


async def read_body(request: Request) -> AsyncIterator[bytes | dict[str, Any]]:
    """Dependency: the body as JSON text, or as the fields of a form with an uploaded `image`.

    Raises:
        HTTPException: 400, 413, 415 or 503, as in `PROBLEMS`.
    """
    service = request.app.state.service
    settings, max_bytes = service.settings, service.settings.max_bytes
    # A deadline for the body and the answers together.
    request.state.deadline = asyncio.get_running_loop().time() + settings.seconds
    too_long = HTTPException(413, f"the request is longer than {max_bytes:,} bytes")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise too_long
    total = 0

    async def receive() -> Any:
        nonlocal total
        message = await request.receive()
        size = len(message.get("body", b""))
        total += size
        service.body_bytes += size
        if total > max_bytes:
            raise too_long
        if service.body_bytes > settings.max_waiting * max_bytes:
            raise busy("the bodies of other requests fill the memory")
        return message

    limited = Request(request.scope, receive)
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        async with asyncio.timeout_at(request.state.deadline):
            if content_type == "multipart/form-data":
                async with limited.form(max_files=1, max_fields=settings.max_questions + 8) as form:
                    body: Any = dict(form)
                    if "questions" in form:
                        body["questions"] = form.getlist("questions")
                    if isinstance(body.get("image"), UploadFile):
                        body["image"] = await body["image"].read()
            elif content_type == "application/json":
                body = await limited.body()
            else:
                message = "the content type must be application/json or multipart/form-data"
                raise HTTPException(415, f"{message}, got {content_type or 'none'}")
        yield body
    finally:
        service.body_bytes -= total


def busy(message: str) -> HTTPException:
    return HTTPException(503, message, {"Retry-After": "1"})


async def take_slot(request: Request, body: Annotated[Any, Depends(read_body)]) -> AsyncIterator[Any]:
    """Dependency: the body. Hold one of `max_waiting` slots from when it is here until the response is complete.

    Not earlier: a few hundred clients that send their bodies slowly would take all slots.
    """
    service = request.app.state.service
    limit = service.settings.max_waiting
    if service.waiting >= limit:
        raise busy(f"{limit} requests are waiting already")
    service.waiting += 1
    try:
        yield body
    finally:
        service.waiting -= 1


Body = Annotated[Any, Depends(take_slot)]


async def read_item(service: Service, body: bytes | dict[str, Any]) -> Item:
    """Check what a body asks, and decode its image.

    Raises:
        HTTPException: 422.
    """

    def read() -> tuple[bytes | str, list[str]]:
        if isinstance(body, bytes):
            asked: Any = AnswerRequest.model_validate_json(body)
        else:
            asked = AnswerRequest.model_validate(body)
        return asked.image_url if asked.image is None else asked.image, service.check(asked.questions)

    try:
        # Not in the event loop, which all requests share.
        image, questions = await asyncio.get_running_loop().run_in_executor(service.decoders, read)
        return await service.prepare(image, questions)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        raise HTTPException(422, f"{place}: {message}" if place else message) from error
    except ValueError as error:
        raise HTTPException(422, str(error)) from error


def describe_body() -> dict[str, Any]:
    """The OpenAPI description of a body that is JSON or a form."""
    schema = AnswerRequest.model_json_schema()
    form = {"image": {"type": "string", "format": "binary"}, "questions": schema["properties"]["questions"]}
    content = {
        "multipart/form-data": {"schema": {"type": "object", "properties": form, "required": list(form)}},
        "application/json": {"schema": schema},
    }
    return {"requestBody": {"required": True, "content": content}}


router = APIRouter()
PROBLEMS = {
    400: "The body is no form.",
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


@router.post("/v1/answer", response_model=AnswerResponse, openapi_extra=describe_body(), responses=RESPONSES)
async def answer(request: Request, body: Body) -> JSONResponse:
    """Answer questions about an image: `score` is the probability of the answer, `p_yes` that of yes."""
    service, metrics, begin = request.app.state.service, request.app.state.metrics, time.perf_counter()
    async with asyncio.timeout_at(request.state.deadline):
        item = await read_item(service, body)
        answers, cached = await service.answer(item)
    metrics.images.labels(str(cached).lower()).inc()
    metrics.questions.inc(len(answers))
    response = {"image": item.key, "seconds": time.perf_counter() - begin}
    return JSONResponse({"answers": answers, **response})


@router.post(
    "/v1/generate",
    response_class=StreamingResponse,
    openapi_extra=describe_body() | {"responses": {"200": {"content": {"text/event-stream": {}}}}},
    responses=RESPONSES,
)
async def generate(request: Request, body: Body) -> StreamingResponse:
    """Answer one question after the other, with answers in words as they are generated.

    Events: {"index", "text"}, the next piece of an answer in words to the question of this index; after its last
    piece, and for a yes/no question alone, {"index", "question", "answer", ...}; or {"detail"} after an error.
    """
    service, metrics = request.app.state.service, request.app.state.metrics
    seconds = service.settings.seconds
    async with asyncio.timeout_at(request.state.deadline):
        answers = await service.stream(await read_item(service, body))

    async def events() -> AsyncIterator[str]:
        try:
            async for index, piece in answers:
                event = {"text": piece} if isinstance(piece, str) else piece
                yield f"data: {json.dumps({'index': index} | event)}\n\n"
                metrics.questions.inc(not isinstance(piece, str))
        except TimeoutError:
            yield f"data: {json.dumps({'detail': f'no token in {seconds:g} seconds'})}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


@router.get("/metrics", response_class=Response)
async def read_metrics(request: Request) -> Response:
    return Response(generate_latest(request.app.state.metrics.registry), media_type="text/plain; version=0.0.4")


@router.get("/openapi.json", include_in_schema=False)
async def describe(request: Request) -> dict[str, Any]:
    return request.app.openapi()


@router.get("/", include_in_schema=False)
async def redirect_to_docs() -> RedirectResponse:
    return RedirectResponse("/docs")


@router.get("/docs", include_in_schema=False)
async def show_docs(request: Request) -> HTMLResponse:
    return HTMLResponse(describe_routes(request.app.openapi()))


def build_app(settings: Settings, api_key: str | None = None) -> FastAPI:
    """The ASGI app of one replica, with its model loaded.

    Args:
        api_key: what every request must send; None for no key.
    """

    async def too_slow(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": f"not answered in {settings.seconds:g} seconds"}, 504)

    service = Service(settings)
    app = FastAPI(
        title="Traffic VLM",
        version="1",
        description="Answers questions about images of traffic scenes.",
        openapi_url=None,  # `router` serves the description, so that the key protects it as well
        exception_handlers={TimeoutError: too_slow},
    )
    app.state.service, app.state.metrics, app.state.api_key = service, Metrics(service), api_key
    app.middleware("http")(count_request)
    app.include_router(router, dependencies=[Depends(check_key)] if api_key else [])
    return app
