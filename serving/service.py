"""The HTTP service of one replica: a FastAPI app with a model, which `scripts/serve.py` runs on Ray Serve.

    request ─→ key ─→ body within limits ─→ image and questions checked ─→ the thread with the model ─→ answers

Requests are answered one after the other, in the order of arrival. Every refusal is JSON with a `detail` that names
the cause. Ray Serve itself refuses requests beyond `--max_waiting`, and those that take longer than `--seconds`.
"""

import asyncio
import base64
import hashlib
import hmac
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from cachetools import LRUCache
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Security
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from fastapi_offline import FastAPIOffline
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, WithJsonSchema
from starlette.datastructures import UploadFile

from ..common.image_files import MAX_PIXELS, open_image
from ..common.options import option
from .options import MAX_QUESTIONS, ModelOptions


API_KEY = "TRAFFIC_VLM_API_KEY"  # environment variable


@dataclass
class Settings(ModelOptions):
    """Options of the model and limits of a request."""

    may_be_zero: ClassVar[tuple[str, ...]] = ("min_score", "cached_images")
    device: Literal["cpu", "cuda"] | None = option(None, "by default a GPU if there is one")
    threads: int = option(2, "CPU threads of the model")
    max_bytes: int = option(20_000_000, "size of a request; above: 413")
    max_pixels: int = option(MAX_PIXELS, "size of an image; above: 422")
    cached_images: int = option(256, "encoded images to keep, 1.8 MB each in float32")


def decode_base64(value: Any) -> Any:
    """The bytes of base64 text, which may be a data URL or have line breaks; an upload has bytes already."""
    if not isinstance(value, str):
        return value
    return base64.b64decode("".join(value.rpartition(",")[2].split()), validate=True)


class AnswerRequest(BaseModel):
    """Questions about one image, which is a file in a form, or base64."""

    image: Annotated[
        bytes, BeforeValidator(decode_base64), WithJsonSchema({"type": "string", "contentEncoding": "base64"})
    ]
    questions: list[str] = Field(min_length=1, max_length=MAX_QUESTIONS, examples=[["Is there a car?"]])
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


class Problem(BaseModel):
    detail: str


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


class Service:
    """The pipeline and a cache of encoded images, for one thread."""

    def __init__(self, settings: Settings):
        self.settings, self.pipe = settings, settings.load()
        self.cache: LRUCache = LRUCache(settings.cached_images)

    def answer(self, asked: AnswerRequest) -> list[dict[str, Any]]:
        """Items of the pipeline, one for each question. Raises a ValueError if the image cannot be read."""
        key = hashlib.sha256(asked.image).digest()
        encoded = self.cache.get(key)
        if encoded is None:
            encoded = self.pipe.encode(open_image(asked.image, max_pixels=self.settings.max_pixels))
            if self.cache.maxsize:
                self.cache[key] = encoded
        untaught = self.settings.answer_untaught if asked.answer_untaught is None else asked.answer_untaught
        return self.pipe(encoded, [text.strip() for text in asked.questions], answer_untaught=untaught)


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
    """The body: JSON text, or the fields of a form. Raises an `HTTPException` 400, 413 or 415."""
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
    async with limited.form(max_files=1, max_part_size=max_bytes) as form:
        body: dict[str, Any] = dict(form)
        if "questions" in form:
            body["questions"] = form.getlist("questions")
        if isinstance(body.get("image"), UploadFile):
            body["image"] = await body["image"].read()
        return body


def answer_body(service: Service, body: bytes | dict[str, Any]) -> AnswerResponse:
    """The response to a body. Runs in the thread with the model. Raises an `HTTPException` 422."""
    try:
        read = AnswerRequest.model_validate_json if isinstance(body, bytes) else AnswerRequest.model_validate
        return AnswerResponse.model_validate({"answers": service.answer(read(body))})  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        raise HTTPException(422, f"{place}: {message}" if place else message) from error
    except ValueError as error:
        raise HTTPException(422, str(error)) from error


router = APIRouter()


@router.post(
    "/v1/answer",
    response_model=AnswerResponse,
    response_model_exclude_unset=True,
    openapi_extra={"requestBody": BODY},
    responses={status: {"model": Problem} for status in (400, 401, 413, 415, 422)},
)
async def answer(request: Request) -> AnswerResponse:
    """Answer questions about an image: `score` is the probability of the answer, `p_yes` that of yes."""
    state, body = request.app.state, await read_body(request)
    return await asyncio.get_running_loop().run_in_executor(state.model_thread, answer_body, state.service, body)


def build_app(settings: Settings, api_key: str | None = None) -> FastAPI:
    """The ASGI app of one replica, with its model loaded.

    Args:
        api_key: what requests to `/v1` must send; None for no key.
    """
    # Swagger UI is served from a package. Its validator is a website, which would get the address of this server.
    app = FastAPIOffline(
        title="Traffic VLM",
        version="1",
        description="Answers questions about images of traffic scenes.",
        redoc_url=None,
        swagger_ui_parameters={"validatorUrl": None},
    )
    app.state.service, app.state.api_key, app.state.model_thread = Service(settings), api_key, ThreadPoolExecutor(1)
    app.include_router(router, dependencies=[Depends(check_key)] if api_key else [])

    @app.get("/healthz", include_in_schema=False)
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app
