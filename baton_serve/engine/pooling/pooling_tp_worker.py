"""Computes a tensor-parallel rank's part of a pooling model, in the process of a rank other than 0.

    python -m baton_serve.engine.pooling.pooling_tp_worker DESCRIPTOR PID

It computes every batch that rank 0 sends, for the sums over the ranks in it. Rank 0 alone pools the output.
"""

import os
import sys
from dataclasses import replace

import torch

from baton_serve.engine import device as devices
from baton_serve.engine.model.loaded_model import StageCache
from baton_serve.engine.model.rank_parts import sum_outputs
from baton_serve.engine.parallel.channel import Channel, ChannelError
from baton_serve.engine.parallel.commands import (
    Command,
    CommandDone,
    ComputeVectors,
    JoinGroup,
    LoadRank,
    RankLoaded,
    image_tensors,
    vectors_arrays,
)
from baton_serve.engine.parallel.tp_worker import connect, main
from baton_serve.engine.pooling.loader import load_pooling_model
from baton_serve.engine.pooling.pooled_forward import padded_batch


class PoolingWorker:
    """Loads one rank's part of a pooling model and executes the commands that rank 0 sends. Implements `RankWorker`."""

    def __init__(self, channel: Channel[Command]) -> None:
        """Wait for rank 0's first command on `channel`, and load this rank's part of the model as that command says.
        Raises `EngineError` if loading fails.
        """
        self._channel = channel
        first = channel.receive(None)
        if not isinstance(first, LoadRank) or first.kind == "generate":
            raise ChannelError(f"the first command is {type(first).__name__}")
        # Use as many CPU threads as rank 0.
        torch.set_num_threads(first.threads)
        self._config = config = first.config
        self._rank = first.rank
        self._device = devices.select_device(config.device, first.rank % config.ranks_per_node)
        self._model = load_pooling_model(config, first.kind, self._device, lambda what, fraction: None, first.rank)

    def serve(self) -> None:
        """Report that the model is loaded, and execute commands until rank 0 closes the channel, which raises
        `ChannelError`.
        """
        self._channel.send(self._channel.encode(RankLoaded(StageCache(), self._model.fingerprint)))
        while True:
            match command := self._channel.receive(None):
                case ComputeVectors():
                    self._compute(command)
                case JoinGroup():
                    self._join(command)
                case _:
                    raise ChannelError(f"a pooling model has no {type(command).__name__}")

    def _join(self, command: JoinGroup) -> None:
        self._group = connect(command.store, self._config, self._rank, self._device)
        sum_outputs(self._model.module, self._model.parts, self._group)
        self._channel.send(self._channel.encode(CommandDone()))

    @torch.inference_mode()
    def _compute(self, command: ComputeVectors) -> None:
        images = image_tensors(command, self._device, self._group.broadcast)
        self._model.network(replace(padded_batch(*vectors_arrays(command), self._device), images=images))


if __name__ == "__main__":
    status = main(sys.argv[1:], PoolingWorker)
    sys.stderr.flush()
    os._exit(status)  # not sys.exit: device libraries may wait for ranks that have exited
