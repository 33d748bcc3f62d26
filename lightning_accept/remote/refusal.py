"""Errors as HTTP replies: a status, a code for programs and a sentence for people."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from lightning_accept.pipeline.messages import Fault
from lightning_accept.remote.wire import fault_to_json


class Refusal(Exception):
    """A request is answered with an error.

    Attributes:
        status: The HTTP status.
        code: What went wrong, as one word that clients look at.
        details: Further JSON-able fields of the reply.
        headers: Further headers of the reply.
    """

    def __init__(
        self, status: int, code: str, message: str, *, headers: dict[str, str] | None = None, **details: Any
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.details = details
        self.headers = headers or {}

    def response(self) -> web.Response:
        """The reply."""
        body = {"error": str(self), "code": self.code, **self.details}
        return web.json_response(body, status=self.status, headers=self.headers)


def failed(fault: Fault) -> Refusal:
    """The refusal with which a client can rebuild the stage's fault."""
    return Refusal(500, "fault", fault.error, fault=fault_to_json(fault))
