"""What runs an app at a site, in place of Flower's own starter: approved apps only, in a process of their own that is ready at once.

The SuperNode (isolation mode "process") holds messages and bundles but runs no code of theirs. This process takes its tasks, one at a
time, and hands them to a child that is forked when PyTorch is loaded already. For every message the child compares the
bundle's hash with the site's list before anything of it is unpacked; a bundle that is not approved is answered with an error
that names the reason.

`main` takes the arguments ADDRESS SECRET_FILE STORE. `consilience federation site` starts it beside the SuperNode it serves.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import time
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Context, Message
from flwr.app.error import Error
from flwr.cli.config_utils import get_fab_metadata
from flwr.cli.install import install_from_fab
from flwr.clientapp import ClientApp
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore import log
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from ...federation.approval import Approvals, hash_of

PAUSE = 0.3                     # seconds between questions for work; the SuperNode is on this machine
TRIES = 6                       # to hand an answer to the SuperNode
IDLE = 600.0                    # seconds without work after which a worker's memory is given back
PRELOAD = ("torch", "consilience.engines.flower.apps", "consilience.parts", "consilience.models", "consilience.metrics")


def serve(address: str, secret: bytes, store: Path) -> None:
    """Take tasks for ever, one after another."""
    client = RuntimeHttpClient.from_server_address(
        server_address=address, insecure=True, root_certificates=None, retry_invoker=make_simple_http_retry_invoker(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec"),
                      SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=frozenset({"/flwr.proto.Runtime/AcquireTask"}))])
    log(INFO, "Waiting for tasks; apps are run if %s lists their hash.", Approvals(store).path)
    workers = Workers(address, store)
    while True:
        given = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP, TaskType.AGENT_APP]))
        if given.HasField("task") and given.token:
            workers.work(given.token, given.task.type, given.task.fab_hash)
        else:
            workers.rest()
            time.sleep(PAUSE)


class Workers:
    """One process at a time, for one app: it answers that app's messages, so that data are read and models built once."""

    def __init__(self, address: str, store: Path) -> None:
        self.address, self.store = address, store
        # Forked from a process that has loaded everything and computed nothing; elsewhere than on Linux forking is not safe.
        self.context: Any = multiprocessing.get_context("fork" if sys.platform.startswith("linux") else "spawn")
        for name in PRELOAD:
            importlib.import_module(name)
        self.process: Any = None
        self.app, self.used = "", 0.0

    def work(self, token: str, kind: str, app: str) -> None:
        """Have a task done, in a fresh process if the last one was for another app or is gone."""
        if self.process is None or not self.process.is_alive() or self.app != app:
            self._begin(app)
        self.pipe.send_bytes(f"{kind} {token}".encode())
        while not self.pipe.poll(1.0):
            if not self.process.is_alive():
                break
        try:
            self.pipe.recv_bytes()
        except (EOFError, OSError):
            log(ERROR, "The process that ran the app died (code %s). Another takes its place.", self.process.exitcode)
            self._end()
        self.used = time.monotonic()

    def rest(self) -> None:
        """Give memory back when nothing was asked for a while."""
        if self.process is not None and time.monotonic() - self.used > IDLE:
            self._end()

    def _begin(self, app: str) -> None:
        self._end()
        self.pipe, theirs = self.context.Pipe()
        self.process = self.context.Process(target=labour, args=(theirs, self.pipe, self.address, str(self.store)), daemon=True)
        self.process.start()
        theirs.close()
        self.app = app

    def _end(self) -> None:
        if self.process is not None:
            self.pipe.close()
            self.process.terminate()
            self.process.join()
            self.process = None


def labour(pipe: Any, other_end: Any, address: str, store: str) -> None:
    """A worker's life: tasks come through the pipe until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)                 # the launcher says when to stop
    other_end.close()            # a pipe closes with its last holder: with our copy open, a killed starter would leave us waiting for ever
    loaded: dict[str, ClientApp] = {}
    while True:
        try:
            kind, token = pipe.recv_bytes().decode().split(" ", 1)
        except (EOFError, OSError):
            return
        answer(address, token, store, kind, loaded)
        pipe.send_bytes(b"done")


def answer(address: str, token: str, store: str, kind: str, loaded: dict[str, ClientApp]) -> None:
    """One message: refuse the app, or run it and send what it answers."""
    client = RuntimeHttpClient.from_server_address(
        server_address=address, insecure=True, root_certificates=None, retry_invoker=make_simple_http_retry_invoker(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"), RuntimeTokenHttpInterceptor(token)])
    heart = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heart.start()
    message: Message | None = None
    context: Context | None = None
    reply: Message | None = None
    outcome, details = SubStatus.FAILED, "the task did not begin"
    try:
        message, context, run, fab = pull_task_input(client)
        why = _objection(Approvals(Path(store)), fab.content, fab.hash_str, run, context, kind)
        if why is not None:
            details = why
            log(WARNING, "REFUSED run %s: %s. Nothing of it was unpacked or run.", run.run_id, why)
            reply = Message(Error(ErrorCode.INVALID_FAB, details), reply_to=message)
        else:
            if fab.hash_str not in loaded:
                install_from_fab(fab.content, skip_prompt=True)
                load = get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
                loaded[fab.hash_str] = load(run.fab_id, run.fab_version, fab.hash_str)
            reply = loaded[fab.hash_str](message=message, context=context)
            outcome, details = SubStatus.COMPLETED, ""
    except Exception as error:      # whatever an app raises is told to the server, and the site goes on
        log(ERROR, "The app raised an exception.", exc_info=error)
        details = f"{type(error).__name__}; the site's log has the details"        # its text could quote data
        if message is not None:
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, details), reply_to=message)
    try:
        if reply is not None and context is not None:
            hand_over(client, reply, context)
        push_task_output(client=client, context=context, sub_status=outcome, details=details)
    except (httpx.HTTPError, RuntimeError, ObjectPushError) as error:
        log(ERROR, "The answer could not be handed over: %s", error)
    finally:
        if heart.is_running:
            heart.stop()
        client.close()


def hand_over(client: RuntimeHttpClient, reply: Message, context: Context) -> None:
    """Give the SuperNode an answer, again where its arrays were cut off.

    A request that is repeated because its reply was late opens a second session, which ends the first. The SuperNode knows of
    the answer by then and waits for its arrays, for ever if nobody brings them: the site would be there and never answer again.
    """
    for left in reversed(range(TRIES)):
        try:
            return push_message(client, reply, context)
        except ObjectPushError as error:
            if not left:
                raise
            log(WARNING, "The answer is handed over again: %s", error)
            time.sleep(PAUSE)


def _objection(approvals: Approvals, content: bytes, claimed: str, run: Run, context: Context, kind: str) -> str | None:
    """Why this app may not run here, noted where the operator finds it; None if it may."""
    why = None
    if kind != TaskType.CLIENT_APP:
        why = f"this site runs client apps, not {kind}"
    elif claimed != hash_of(content):
        why = f"the bundle does not have the hash {claimed} it is sent under"
    else:
        why = approvals.objection(content, dict(context.run_config))
        if why is None and get_fab_metadata(content) != (run.fab_id, run.fab_version):
            why = "the bundle is not the app and version the server says it is"
    if why is not None:
        approvals.refuse(content, why, run.run_id)
    return why


def main() -> None:
    address, secret, store = sys.argv[1], Path(sys.argv[2]).read_bytes(), Path(sys.argv[3])
    try:
        serve(address, secret, store)
    except (KeyboardInterrupt, httpx.HTTPError) as stop:
        log(INFO, "Stopped%s.", f": {stop}" if str(stop) else "")
        os._exit(0 if isinstance(stop, KeyboardInterrupt) else 1)
