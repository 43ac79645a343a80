"""Errors of the endpoint, in the format of OpenAI's API, and to requests of Anthropic's in its."""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

ANTHROPIC_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
RESPONSES_NAMES = {"messages": "input", "response_format": "text.format", ".function": ""}
"""Parts of a field's name in chat requests -> what they are in the Responses API."""


@dataclass(eq=False)
class ApiError(Exception):
    """A response other than 200. `param` names the request's field at fault; `should_retry`
    overrides what the official clients infer from the status, and `retry_after_s` their delay."""

    status: int
    message: str
    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    should_retry: bool | None = None
    retry_after_s: int | None = None

    def __str__(self) -> str:
        return self.message

    def body(self, request_id: str) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
                "request_id": request_id,
            }
        }

    def anthropic_body(self, request_id: str) -> dict[str, Any]:
        usual = "invalid_request_error" if self.status < 500 else "api_error"
        kind = ANTHROPIC_KINDS.get(self.status, usual)
        message = re.sub("^response_format: ", "output_config.format: ", self.message)
        error = {"type": kind, "message": message}
        return {"type": "error", "error": error, "request_id": request_id}

    def response(self, request: Request) -> JSONResponse:
        headers: dict[str, str] = {}
        if self.should_retry is not None:
            headers["x-should-retry"] = "true" if self.should_retry else "false"
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        if "/v1/responses" in request.url.path and (name := self.param):
            for chat_name, own in RESPONSES_NAMES.items():
                name = name.replace(chat_name, own)
            self.message = self.message.replace(f"{self.param}: ", f"{name}: ", 1)
            self.param = name
        body_of = self.anthropic_body if "/v1/messages" in request.url.path else self.body
        return JSONResponse(body_of(request.state.request_id), self.status, headers=headers)


def refuse(param: str, problem: str, code: str | None = None) -> ApiError:
    """A request whose field `param` can't be served."""
    return ApiError(400, f"{param}: {problem}", param=param, code=code)
