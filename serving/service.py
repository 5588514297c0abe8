"""The HTTP service of one replica: a FastAPI app with a model, which `scripts/serve.py` runs on Ray Serve.

    request ─→ key ─→ body within limits ─→ image and questions checked ─→ the thread with the model ─→ answers

Requests are answered one after the other, in the order of arrival. Every refusal is JSON with a `detail` that names
the cause. Ray Serve itself refuses requests beyond `--max_waiting`, and those that take longer than `--seconds`.
"""

import asyncio
import hashlib
import hmac
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

from cachetools import LRUCache
from fastapi import Depends, FastAPI, HTTPException, Request, Security
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from starlette.datastructures import UploadFile
from starlette.middleware.cors import CORSMiddleware

from ..common.image_files import MAX_PIXELS, image_warnings, open_image
from ..common.options import option
from ..images_traffic_vlm import decode_base64
from ..pipeline_traffic_vlm import TrafficVLMPipeline
from .options import MAX_QUESTIONS, ModelOptions


LIST_NAMES = ("questions", "labels")  # fields of a form that may be repeated


@dataclass
class ServeOptions(ModelOptions):
    """Options of the model, limits of a request, and options of Ray Serve."""

    threads: int = option(2, "CPU threads of the model")
    max_bytes: int = option(20_000_000, "size of a request; above: 413")
    max_pixels: int = option(MAX_PIXELS, "size of an image; above: 422")
    cached_images: int = option(256, "encoded images to keep, 1.8 MB each in float32")
    allow_origin: list[str] = option([], "web pages that may ask from a browser, such as https://a.org; * for all")
    host: str = option("127.0.0.1", "0.0.0.0 to listen on all networks")
    port: int = 8000
    address: str | None = option(None, "Ray cluster: auto, or ray://host:10001; by default Ray on this machine")
    root_path: str = option("/", "path of all routes, for a proxy that serves other applications, too: /traffic")
    replicas: int = option(1, "processes, each with a model and a cache")
    seconds: float = option(30.0, "time to receive and answer a request; above: 408")
    max_waiting: int = option(256, "requests in a replica, and as many more before it; above: 503")


class ImageRequest(BaseModel):
    """One image, which is a file in a form, or base64."""

    model_config = ConfigDict(extra="forbid")

    image: Annotated[
        bytes,
        BeforeValidator(lambda value: decode_base64(value) if isinstance(value, str) else value),
        WithJsonSchema({"type": "string", "contentEncoding": "base64"}),
    ]
    image_size: Annotated[
        int | None, Field(description="side of the pixels that the model looks at, a multiple of 32", ge=32, le=640)
    ] = None

    def respond(self, pipe: TrafficVLMPipeline, encoded: Any, size: tuple[int, int]) -> dict[str, Any]:
        """The response about the encoded image, whose size is in pixels. Raises a ValueError."""
        raise NotImplementedError


class DescribeRequest(ImageRequest):
    """Describe an image in one or two sentences, of what is sure: `{"caption", "facts": [{"question", "p_yes"}]}`."""

    def respond(self, pipe: TrafficVLMPipeline, encoded: Any, size: tuple[int, int]) -> dict[str, Any]:
        return pipe.describe(encoded)


class LocateRequest(ImageRequest):
    """Locate objects in an image, in its pixels: `{"objects": [{"label", "score", "box", "point"}]}`.

    A box is left, top, right and bottom; a point is the center.
    """

    labels: Annotated[str | list[str], Field(description="classes such as bus; all are all")] = "all"

    def respond(self, pipe: TrafficVLMPipeline, encoded: Any, size: tuple[int, int]) -> dict[str, Any]:
        return {"objects": pipe.locate(encoded, self.labels, size=size)}


class AnswerRequest(ImageRequest):
    """Answer questions about an image: `{"answers": [{"question", "answer", "score", "p_yes"}]}`.

    `score` is the probability of the answer, `p_yes` that of yes. An answer may have `not_sure`, `unknown_words`,
    `untaught_words`, or in its place a `problem`.
    """

    questions: Annotated[list[str], Field(min_length=1, max_length=MAX_QUESTIONS, examples=[["Is there a car?"]])]

    def respond(self, pipe: TrafficVLMPipeline, encoded: Any, size: tuple[int, int]) -> dict[str, Any]:
        return {"answers": pipe(encoded, [text.strip() for text in self.questions])}


def describe_body(request: type[ImageRequest]) -> dict[str, Any]:
    """The description of the body of a request, for OpenAPI."""
    schema = request.model_json_schema()
    form = schema["properties"] | {"image": {"type": "string", "format": "binary"}}
    content = {
        "multipart/form-data": {
            "schema": {"type": "object", "properties": form, "required": schema["required"]},
            # a field for each question or label
            "encoding": {name: {"style": "form", "explode": True} for name in LIST_NAMES if name in form},
        },
        "application/json": {"schema": schema},
    }
    return {"requestBody": {"required": True, "content": content}}


class Service:
    """The pipeline and a cache of encoded images, for one thread."""

    def __init__(self, options: ServeOptions):
        self.options, self.pipe = options, options.load()
        self.cache: LRUCache = LRUCache(options.cached_images)
        self.thread = ThreadPoolExecutor(1)

    def encode(self, asked: ImageRequest) -> tuple[Any, tuple[int, int], list[str]]:
        """(encoded image, size of the image in pixels, warnings). Raises a ValueError if it cannot be read."""
        key = hashlib.sha256(asked.image).digest(), asked.image_size
        if (found := self.cache.get(key)) is None:
            with image_warnings() as warnings:
                picture = open_image(asked.image, max_pixels=self.options.max_pixels)
                encoded = self.pipe.encode(picture, image_size=asked.image_size)
            found = self.cache[key] = encoded, picture.size, warnings
        return found

    def respond(self, kind: type[ImageRequest], body: bytes | dict[str, Any]) -> dict[str, Any]:
        """The response to JSON text, or to the fields of a form. Raises an `HTTPException` 422."""
        try:
            asked = kind.model_validate_json(body) if isinstance(body, bytes) else kind.model_validate(body)
            encoded, size, warnings = self.encode(asked)
            return asked.respond(self.pipe, encoded, size) | ({"warnings": warnings} if warnings else {})
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
            raise HTTPException(422, f"{place}: {message}" if place else message) from error
        except ValueError as error:
            raise HTTPException(422, str(error)) from error


async def check_key(
    request: Request,
    header: Annotated[str | None, Security(APIKeyHeader(name="X-API-Key", auto_error=False))],
    bearer: Annotated[HTTPAuthorizationCredentials | None, Security(HTTPBearer(auto_error=False))],
) -> None:
    """Dependency: refuse requests without the key. Raises an `HTTPException` 401."""
    given = header or (bearer.credentials if bearer else "")
    if not hmac.compare_digest(given.encode("latin-1"), request.app.state.api_key.encode()):  # the bytes as sent
        raise HTTPException(401, "an API key is needed: the header X-API-Key, or Authorization: Bearer")


async def read_body(request: Request, max_bytes: int) -> bytes | dict[str, Any]:
    """The body: JSON text, or the fields of a form. Raises an `HTTPException` 400 or 413."""
    size = 0

    async def receive() -> Any:
        nonlocal size
        message = await request.receive()
        size += len(message.get("body", b""))
        if size > max_bytes:
            raise HTTPException(413, f"the request is longer than {max_bytes:,} bytes")
        return message

    limited = Request(request.scope, receive)
    if request.headers.get("content-type", "").lower().startswith("application/json"):
        return await limited.body()
    async with limited.form(max_files=1, max_part_size=max_bytes) as form:
        body: dict[str, Any] = dict(form) | {name: form.getlist(name) for name in LIST_NAMES if name in form}
        if isinstance(file := body.get("image"), UploadFile):
            body["image"] = await file.read()
        return body


def responding(kind: type[ImageRequest]) -> Callable[..., Any]:
    """A function for a route: it responds to a kind of request, from the thread with the model."""

    async def respond(request: Request) -> Any:
        service: Service = request.app.state.service
        body = await read_body(request, service.options.max_bytes)
        return await asyncio.get_running_loop().run_in_executor(service.thread, service.respond, kind, body)

    return respond


def build_app(options: ServeOptions, api_key: str | None = None) -> FastAPI:
    """The ASGI app of one replica, with its model loaded.

    Args:
        api_key: what requests to `/v1` must send; None for no key.
    """
    app = FastAPI(title="Traffic VLM", version="1", redoc_url=None)
    origins = [origin.rstrip("/") for origin in options.allow_origin]  # as browsers write them
    app.add_middleware(CORSMiddleware, allow_origins=origins, allow_headers=["*"], allow_methods=["POST"])
    app.state.service, app.state.api_key = Service(options), api_key
    keys = [Depends(check_key)] if api_key else []
    for name, kind in (("answer", AnswerRequest), ("locate", LocateRequest), ("describe", DescribeRequest)):
        route = app.post(
            f"/v1/{name}",
            name=name,
            description=inspect.getdoc(kind),
            dependencies=keys,
            openapi_extra=describe_body(kind),
        )
        route(responding(kind))

    @app.api_route("/healthz", methods=["GET", "HEAD"], include_in_schema=False)
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app
