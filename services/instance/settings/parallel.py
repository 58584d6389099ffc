"""The settings by which an instance is divided over several devices."""

from typing import Annotated

from msgspec import Meta

from baton_serve.services.instance.settings.process import NetworkSettings


class ParallelSettings(NetworkSettings, frozen=True, kw_only=True):
    """The settings that divide the model of an instance over several devices."""

    tensor_parallel_size: Annotated[
        int,
        Meta(
            description="number of devices that each layer is split over; each device gets a process",
            ge=1,
            extra={"group": "device", "aliases": ["-tp"]},
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Meta(
            description="number of stages into which the layers are divided, each on --tensor-parallel-size devices;"
            " chunks of prompts follow each other through the stages",
            ge=1,
            extra={"aliases": ["-pp"]},
        ),
    ] = 1
    pipeline_layer_partition: Annotated[
        str | None,
        Meta(
            description="number of layers of each stage, such as 10,12,10; also set by VLLM_PP_LAYER_PARTITION"
            " (default: even, or in proportion to the memory of the devices)"
        ),
    ] = None
    enable_expert_parallel: Annotated[
        bool,
        Meta(description="give each device whole experts of a mixture (MoE), instead of a part of each"),
    ] = False

    @property
    def num_devices(self) -> int:
        """Return the number of devices that the model of the instance is divided over."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
