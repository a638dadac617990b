"""uvicorn around the application, with a stop that lets answers end."""

from __future__ import annotations

import asyncio
import signal
import socket

import uvicorn

from paceline.decode.llm import LLM
from paceline.errors import UsageError
from paceline.serve.app import create_app
from paceline.serve.metrics import Metrics
from paceline.serve.service import Service, ServiceOptions

__all__ = ["Server", "open_socket"]

_LAST_WORDS_S = 5  # for answers cut short to reach their clients
_KEEP_ALIVE_S = 75  # longer than clients keep an idle connection, so that it is not closed under a request


class Server(uvicorn.Server):
    """Serves `llm` until told to stop by SIGTERM or SIGINT.

    Stopping: no new connection, 503 to new requests, `grace_s` seconds for what runs, then every answer ends with
    what it has (`finish_reason` "cancelled"). `failed` is True where the engine itself gave out.
    """

    def __init__(
        self, llm: LLM, metrics: Metrics, options: ServiceOptions, *, grace_s: float, access_log: bool = False
    ) -> None:
        self.failed = False
        self._grace_s = grace_s
        self.service = Service(llm, metrics, options, self._give_up)
        config = uvicorn.Config(
            create_app(self.service),
            timeout_keep_alive=_KEEP_ALIVE_S,
            log_level="info" if access_log else "warning",
            access_log=access_log,
            timeout_graceful_shutdown=int(grace_s) + _LAST_WORDS_S,
            server_header=False,
            h11_max_incomplete_event_size=64 * 1024,
        )
        super().__init__(config)

    def serve_on(self, listener: socket.socket) -> None:
        """Serve until stopped. A signal that stops is not raised again, so the process ends by itself."""
        before = {s: signal.signal(s, lambda *_: None) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            self.run(sockets=[listener])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.create_task(self.service.thread.drain(self._grace_s))
        try:
            await super().shutdown(sockets)
        finally:
            draining.cancel()

    def _give_up(self) -> None:
        self.failed = True
        self.should_exit = True


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UsageError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.set_inheritable(True)
    except (OSError, OverflowError) as error:
        listener.close()
        raise UsageError(f"cannot listen on {host}:{port}: {error}. Choose another --host or --port.") from error
    return listener


