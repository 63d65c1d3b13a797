"""A page that shows how far training is, for a browser on the same machine."""

from __future__ import annotations

import html
import json
import logging
import math
import os
import threading
import time
import warnings
from collections import deque
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import keras

from pipetrain.cluster.connection import worker_of
from pipetrain.cluster.hosts import LOOPBACK, named
from pipetrain.schemes.arguments import checked_count

NAMES = (LOOPBACK, "localhost", "[::1]")
VARIABLE = "PIPETRAIN_STATUS_PORT"  # which ``pipetrain launch --status-port`` sets
WINDOW_S = 10.0  # over which the rate is the mean
POLL_S = 0.1  # between two looks whether training has ended
EVERY_S = 0.5  # between two states that are made known
_logger = logging.getLogger(__name__)
STYLE = """
body {font: 15px/1.5 system-ui, sans-serif; max-width: 48rem; margin: 1.5rem auto; padding: 0 1rem}
:root {color-scheme: light dark}
table {border-collapse: collapse; width: 100%}
td, th {padding: .25rem .75rem .25rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #8884}
progress {width: 100%}
"""


class StatusPage(keras.callbacks.Callback):
    """Serves a page and ``/status.json`` while ``fit`` runs: hosts, stages, staleness, samples/s, losses, checkpoint.

    They are served on the loopback interface only, and to requests for this machine's own names. The page of a host
    that OpenSSH reaches is seen by ``ssh -L 8000:127.0.0.1:8000 host``. ``pipetrain launch --status-port 8000`` adds
    it to a script's ``fit``.

    Args:
        port: where it is; 0 for any that is free, which ``port`` then tells.

    Raises:
        ValueError: for what is no port; at the start of ``fit`` for one in use.
    """

    def __init__(self, port: int = 8000) -> None:
        super().__init__()
        self._is_asked_for = True  # by the program, which is told where it cannot be
        self.port = port and checked_count("port", port, "A port is a number, 0 for any that is free", 8000)
        if self.port >= 2**16:
            raise ValueError(f"A port is a number up to {2**16 - 1}. Received: port={port}. Try 8000.")
        self._server: ThreadingHTTPServer | None = None
        self._state: dict[str, Any] = {}
        self._done: deque[tuple[float, int]] = deque()  # times, and steps done by then

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin to serve."""
        session = self.model.session
        self._begun_s, self._shown_s = time.time(), 0.0
        self._steps = self._epoch = self._in_epoch = 0  # which they remain where no epoch is left
        self._last_epoch: dict[str, float] = {}
        self._done.clear()
        self._state = {"model": self.model.name, "scheme": self.model.scheme, "state": "begins"}
        try:
            self._server = ThreadingHTTPServer((LOOPBACK, self.port), _handler(lambda: self._state))
        except OSError as error:
            said = f"No page can be served there: {error.strerror}. Received: port={self.port}. Try another, or 0."
            if self._is_asked_for:
                raise ValueError(said) from error
            warnings.warn(said, stacklevel=2)
            return
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(POLL_S,), name="status page", daemon=True).start()
        session.exits.callback(self._end)
        if self.model.is_verbose:
            _logger.info("Status of this training: http://%s:%d/", LOOPBACK, self.port)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Another epoch."""
        self._epoch, self._in_epoch = epoch, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Another step."""
        self._steps += 1
        self._in_epoch = batch + 1
        now_s = time.monotonic()
        if now_s - self._shown_s > EVERY_S:
            self._shown_s = now_s
            self._done.append((now_s, self._steps))
            while len(self._done) > 2 and now_s - self._done[0][0] > WINDOW_S:
                self._done.popleft()
            self._show(logs or {}, "trains")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The epoch's logs, validation among them, which remain when the next one has begun."""
        self._last_epoch = _finite(logs or {})
        self._show(logs or {}, "trains")

    def on_train_end(self, logs: Any = None) -> None:
        """The last state."""
        self._show(logs or {}, "has ended")

    def _show(self, logs: dict[str, Any], state: str) -> None:
        model, session = self.model, self.model.session
        self._state = {
            "model": model.name,
            "scheme": model.scheme,
            "state": state,
            "epoch": self._epoch + 1,
            "epochs": self.params.get("epochs"),
            "step": self._in_epoch,
            "steps": self.params.get("steps"),
            "in_flight": session.in_flight,
            "samples_per_s": self._rate(session.rows),
            "running_s": round(time.time() - self._begun_s, 1),
            "bubble": session.figures().get("bubble"),
            "logs": _finite(logs),
            "last_epoch": self._last_epoch,
            "last_checkpoint": self._checkpoint(session.callbacks),
            "devices": _devices(model),
        }

    def _rate(self, rows: int | None) -> float | None:
        if len(self._done) < 2 or not rows:
            return None
        (first_s, first), (last_s, last) = self._done[0], self._done[-1]
        return round((last - first) * rows / max(last_s - first_s, 1e-9), 1)

    @staticmethod
    def _checkpoint(callbacks: list[Any]) -> int | None:
        """The update of the newest checkpoint of this ``fit``."""
        return next((each.saved_at for each in callbacks if getattr(each, "saved_at", None) is not None), None)

    def _end(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


def asked_for(users: list[Any]) -> list[StatusPage]:
    """The page that the environment asks for, unless the user has one. Raises ValueError for what is no port."""
    port = os.environ.get(VARIABLE, "")
    if not port or any(isinstance(each, StatusPage) for each in users):
        return []
    if not port.isdecimal():
        raise ValueError(f"A port is a number, 0 for any that is free. Received: {VARIABLE}={port!r}. Try 8000.")
    page = StatusPage(int(port))
    page._is_asked_for = False  # another ``fit`` of the program may have it
    return [page]


def _finite(logs: dict[str, Any]) -> dict[str, float]:
    """What JSON can write of them."""
    return {name: float(value) for name, value in logs.items() if math.isfinite(value)}


def _devices(model: Any) -> list[dict[str, Any]]:
    """Each device in use, its host, its stages, and the staleness of their gradients."""
    found, staleness = model.stages_on.items(), model.staleness
    workers = {device: worker_of(device) for device, _ in found}
    return [
        {
            "device": device,
            "worker": (at := workers[device]) and named(at),
            "stages": stages,
            "staleness": [staleness[stage] for stage in stages],
        }
        for device, stages in found
    ]


def _handler(state: Any) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers GET with the state, as a page or as JSON."""

        timeout = 5  # seconds, for a connection that asks nothing

        def do_GET(self) -> None:
            """The page, or the JSON."""
            name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
            if name not in NAMES:  # a page from elsewhere whose name was made to mean this machine
                return self.send_error(HTTPStatus.FORBIDDEN)
            if self.path == "/status.json":
                return self._send("application/json", json.dumps(state()))
            if self.path == "/":
                return self._send("text/html; charset=utf-8", page(state()))
            return self.send_error(HTTPStatus.NOT_FOUND)

        def _send(self, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing: the terminal is the user's."""

    return Handler


def page(state: dict[str, Any]) -> str:
    """The state as a page, which loads itself again every two seconds; nothing in it comes from elsewhere."""

    def row(*cells: Any) -> str:
        return "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>"

    rows = [row("scheme", state["scheme"]), row("state", state["state"])]
    bar = ""
    if "epoch" in state:
        steps = state["steps"] or "?"
        bar = f'<progress max="{state["steps"] or 1}" value="{state["step"]}"></progress>' if state["steps"] else ""
        rows += [row("epoch", f"{state['epoch']} of {state['epochs']}"), row("step", f"{state['step']} of {steps}")]
        rows += [row("samples/s", state["samples_per_s"] or "not known yet")]
        rows += [row("bubble", "not known" if state["bubble"] is None else f"{state['bubble']:.1%}")]
        rows += [row("in flight", state["in_flight"])]
        rows += [row("running", f"{state['running_s']:.0f} s")]
        checkpoint = state["last_checkpoint"]
        rows += [row("last checkpoint", "none" if checkpoint is None else f"after update {checkpoint}")]
        rows += [row(name, f"{value:.4g}") for name, value in state["logs"].items()]
    places = [
        row(
            each["worker"] or "here", each["device"], *(", ".join(map(str, each[of])) for of in ("stages", "staleness"))
        )
        for each in state.get("devices", ())
    ]
    heads = "<tr><th>worker</th><th>device</th><th>stages</th><th>staleness, in updates</th></tr>"
    places = [heads, *places] if places else []
    before = [row(name, f"{value:.4g}") for name, value in state.get("last_epoch", {}).items()]
    epoch = f"<h2>Last epoch</h2><table>{''.join(before)}</table>" if before else ""
    name = html.escape(str(state["model"]))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="2">'
        f'<meta name="viewport" content="width=device-width"><title>{name}</title><style>{STYLE}</style></head>'
        f"<body><h1>{name}</h1>{bar}<table>{''.join(rows)}</table>{epoch}<h2>Devices</h2><table>{''.join(places)}</table>"
        "</body></html>"
    )
