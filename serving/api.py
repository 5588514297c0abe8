"""The HTTP API of the service.

    request → key and free slot? → body within limits → image and questions checked → `Service` → answers

Every refusal is JSON with a `detail` that names the cause. `build_app` makes the ASGI app of one replica;
`scripts/serve.py` runs it on Ray Serve.
"""

import asyncio
import base64
import hmac
import json
import queue
import time
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Security
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import JSONResponse, Response, StreamingResponse
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

from .answerer import Answer
from .service import Item, Service, Settings


API_KEY = "TRAFFIC_VLM_API_KEY"  # environment variable
PATHS = ("/v1/answer", "/v1/generate")


def decode_base64(value: Any) -> Any:
    """Decode base64 text. An upload is bytes already."""
    return base64.b64decode(value, validate=True) if isinstance(value, str) else value


Text = Annotated[str, StringConstraints(min_length=1, max_length=2000)]
ImageBytes = Annotated[
    bytes, BeforeValidator(decode_base64), WithJsonSchema({"type": "string", "contentEncoding": "base64"})
]


class ImageRequest(BaseModel):
    """A request with one image: base64 or an upload, or a URL where the server allows URLs."""

    model_config = ConfigDict(extra="forbid")
    image: ImageBytes | None = None
    image_url: str | None = None

    @model_validator(mode="before")
    @classmethod
    def check_fields(cls, values: Any) -> Any:
        """Report one unknown field; pydantic would report each of a million."""
        unknown = values.keys() - cls.model_fields.keys() if isinstance(values, dict) else ()
        if unknown:
            raise ValueError(f"unknown field {min(unknown)[:100]!r}; known are {', '.join(cls.model_fields)}")
        return values

    @model_validator(mode="after")
    def check_image(self) -> "ImageRequest":
        if (self.image is None) == (self.image_url is None):
            raise ValueError("give one image: an upload, base64 in image, or image_url")
        return self


class AnswerRequest(ImageRequest):
    questions: Annotated[list[Text], FailFast(), Field(min_length=1)]


class GenerateRequest(ImageRequest):
    question: Text


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


async def take_slot(request: Request) -> AsyncIterator[None]:
    """Hold one of `max_waiting` slots until the response is complete."""
    service = request.app.state.service
    limit = service.settings.max_waiting
    if service.waiting >= limit:
        raise HTTPException(503, f"{limit} requests are waiting already", {"Retry-After": "1"})
    service.waiting += 1
    try:
        yield
    finally:
        service.waiting -= 1


def limit_body(request: Request, max_bytes: int) -> Request:
    """Return the request with a body that raises an `HTTPException` (413) beyond `max_bytes`."""
    too_long = HTTPException(413, f"the request is longer than {max_bytes:,} bytes")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise too_long
    total = 0

    async def receive() -> Any:
        nonlocal total
        message = await request.receive()
        total += len(message.get("body", b""))
        if total > max_bytes:
            raise too_long
        return message

    return Request(request.scope, receive)


async def read_item(request: Request, model: type[ImageRequest]) -> Item:
    """Read the body of a request, JSON or a form with an uploaded `image`, and check what it asks.

    Raises:
        HTTPException: 400, 413, 415 or 422, as in `PROBLEMS`.
    """
    service = request.app.state.service
    request = limit_body(request, service.settings.max_bytes)
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if content_type == "multipart/form-data":
            async with request.form(max_files=1, max_fields=service.settings.max_questions + 8) as form:
                values: dict[str, Any] = dict(form)
                if "questions" in form:
                    values["questions"] = form.getlist("questions")
                if isinstance(values.get("image"), UploadFile):
                    values["image"] = await values["image"].read()
                asked: Any = model.model_validate(values)
        elif content_type == "application/json":
            body, loop = await request.body(), asyncio.get_running_loop()
            asked = await loop.run_in_executor(service.decoders, model.model_validate_json, body)
        else:
            message = "the content type must be application/json or multipart/form-data"
            raise HTTPException(415, f"{message}, got {content_type or 'none'}")
        questions = asked.questions if isinstance(asked, AnswerRequest) else [asked.question]
        return await service.prepare(asked.image_url if asked.image is None else asked.image, questions)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        raise HTTPException(422, f"{place}: {message}" if place else message) from error
    except ValueError as error:
        raise HTTPException(422, str(error)) from error


def describe_body(model: type[ImageRequest]) -> dict[str, Any]:
    """Return the OpenAPI description of a body that is JSON or a form."""
    schema = model.model_json_schema()
    form = {name: field for name, field in schema["properties"].items() if not name.startswith("image")}
    form["image"] = {"type": "string", "format": "binary"}
    content = {
        "multipart/form-data": {"schema": {"type": "object", "properties": form, "required": list(form)}},
        "application/json": {"schema": schema},
    }
    return {"requestBody": {"required": True, "content": content}}


router = APIRouter()
LIMITED: dict[str, Any] = {
    "dependencies": [Depends(take_slot)],
    "responses": {status: {"model": Problem} for status in (400, 401, 413, 415, 422, 503, 504)},
}


@router.post("/v1/answer", response_model=AnswerResponse, openapi_extra=describe_body(AnswerRequest), **LIMITED)
async def answer(request: Request) -> JSONResponse:
    """Answer questions about an image, each with its probability, and with P(yes) if it is yes or no."""
    service, metrics, begin = request.app.state.service, request.app.state.metrics, time.perf_counter()
    async with asyncio.timeout(service.settings.seconds):
        item = await read_item(request, AnswerRequest)
        answers, cached = await service.answer(item)
    metrics.images.labels(str(cached).lower()).inc()
    metrics.questions.inc(len(answers))
    response = {"image": item.key, "seconds": time.perf_counter() - begin}
    return JSONResponse({"answers": [one.to_dict() for one in answers], **response})


@router.post(
    "/v1/generate",
    response_class=StreamingResponse,
    openapi_extra=describe_body(GenerateRequest) | {"responses": {"200": {"content": {"text/event-stream": {}}}}},
    **LIMITED,
)
async def generate(request: Request) -> StreamingResponse:
    """Generate an answer in words: events {"text": so far}, then one {"answer", ...} or {"detail"}."""
    service, metrics = request.app.state.service, request.app.state.metrics
    seconds = service.settings.seconds
    async with asyncio.timeout(seconds):
        answers = await service.stream(await read_item(request, GenerateRequest))

    def events() -> Iterator[str]:
        try:
            for part in answers:
                event = {"text": part} if isinstance(part, str) else part.to_dict()
                yield f"data: {json.dumps(event)}\n\n"
            metrics.questions.inc()
        except queue.Empty:
            yield f"data: {json.dumps({'detail': f'no token in {seconds:g} seconds'})}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


@router.get("/metrics", response_class=Response)
async def read_metrics(request: Request) -> Response:
    return Response(generate_latest(request.app.state.metrics.registry), media_type="text/plain; version=0.0.4")


@router.get("/openapi.json", include_in_schema=False)
async def describe(request: Request) -> dict[str, Any]:
    return request.app.openapi()


@router.get("/docs", include_in_schema=False)
async def show_docs() -> Response:
    return get_swagger_ui_html(openapi_url="/openapi.json", title="Traffic VLM")


async def health() -> dict[str, str]:
    return {"status": "ok"}


def build_app(settings: Settings, api_key: str | None = None) -> FastAPI:
    """Return the ASGI app of one replica, with its model loaded.

    Args:
        api_key: what every request except `/healthz` must send; None for no key.
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
    app.get("/healthz")(health)
    return app
