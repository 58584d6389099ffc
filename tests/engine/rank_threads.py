"""Runs the other ranks of an engine in threads of this process: new processes would import torch and transformers."""

import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import pytest

from baton_serve.engine import engine
from baton_serve.engine.errors import EngineError
from baton_serve.engine.loading.loader_choice import load
from baton_serve.engine.parallel import ranks, tp_worker
from baton_serve.engine.parallel.channel import Channel, ChannelError
from baton_serve.engine.parallel.commands import Command, CommandAnswer, CommandFailed
from baton_serve.engine.pooling import loader, pooling_tp_worker
from baton_serve.services.instance.rank_transfers import RANK_PROGRAM
from baton_serve.services.instance.rank_transfers.rank_program import make_worker


class _Thread:
    """Stands in for the process of a rank."""

    pid = os.getpid()  # it never ends before the test does

    def __init__(self, run: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def kill(self) -> None:
        """Do nothing: threads end with their channel."""


class RemoteThreads:
    """Stands in for the hosts beside the first one: their ranks are threads, to which nothing but bytes is passed."""

    address = "127.0.0.1"
    folders: Mapping[str, str] = {}

    def __init__(self, ranks: range) -> None:
        self._ranks = ranks

    def connect(self) -> Mapping[int, socket.socket]:
        return {number: _start(self._make)[0] for number in self._ranks}

    def _make(self, channel: Any) -> tp_worker.TPWorker:
        return tp_worker.TPWorker(channel, self.folders)


def _start(make: tp_worker.MakeWorker) -> tuple[socket.socket, _Thread]:
    """Start the thread of a rank whose worker `make` makes, and return the connection to it."""
    ours, its = socket.socketpair()

    def run() -> None:
        channel: Any = Channel(its, Command, send_timeout_s=30.0)
        # The engine is closed, at the end or after an error of its own.
        with suppress(ChannelError):
            try:
                make(channel).serve()
            except ChannelError:
                raise
            except EngineError as error:
                channel.send(channel.encode(tp_worker.failure(error)))
            except Exception as error:  # noqa: BLE001 - the engine raises it
                channel.send(channel.encode(CommandFailed("other", f"{type(error).__name__}: {error}")))
        its.close()

    return ours, _Thread(run)


def use_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines start their ranks as threads. They load one after another, since transformers patches torch then."""
    loading = threading.Lock()

    def one_after_another(function: Callable[..., Any]) -> Callable[..., Any]:
        def locked(*arguments: Any) -> Any:
            with loading:
                return function(*arguments)

        return locked

    makers: dict[str, Any] = {
        ranks.DECODER_RANK: tp_worker.TPWorker,
        ranks.POOLING_RANK: pooling_tp_worker.PoolingWorker,
        RANK_PROGRAM: make_worker,
    }

    def start(number: int, program: str) -> Any:
        connection, thread = _start(makers[program])
        channel: Any = Channel(connection, CommandAnswer, send_timeout_s=30.0)
        return ranks._Rank(number, thread, channel)  # type: ignore[arg-type]

    monkeypatch.setattr(ranks, "_start", start)
    monkeypatch.setattr(engine, "load", one_after_another(load))
    monkeypatch.setattr(tp_worker, "load", one_after_another(load))
    load_vectors = one_after_another(loader.load_pooling_model)
    monkeypatch.setattr(loader, "load_pooling_model", load_vectors)
    monkeypatch.setattr(pooling_tp_worker, "load_pooling_model", load_vectors)
