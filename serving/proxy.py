"""What Ray Serve's HTTP proxy adds to the service. The proxy is a separate process."""

from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class UnavailableMiddleware:
    """Answer 503 with Retry-After if a replica dies before it responds. Ray Serve would answer 500."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def note_and_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        await self.app(scope, receive, note_and_send)
        if scope["type"] == "http" and not has_started:
            detail = "the model was stopped before it could answer; it starts again"
            await JSONResponse({"detail": detail}, 503, {"Retry-After": "5"})(scope, receive, send)


def middlewares() -> list[Middleware]:
    """Return the middlewares; `load_ray` names this function to Ray Serve."""
    return [Middleware(UnavailableMiddleware)]
