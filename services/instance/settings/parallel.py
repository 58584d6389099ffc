"""Define the settings of tensor and pipeline parallelism, on one or several hosts."""

from typing import Annotated

from msgspec import Meta

from baton_serve.services.instance.settings.handoff_network_cpu import NetworkSettings


class ParallelSettings(NetworkSettings, frozen=True, kw_only=True):
    """The settings that divide the model of an instance over several devices and hosts."""

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

    nnodes: Annotated[
        int,
        Meta(
            description="number of hosts of this instance, each with an equal number of its devices. Start the same"
            " command on each host with its own --node-rank and --cluster-key-file, by which messages are encrypted."
            " The values that devices exchange during a step are not encrypted: use a private network",
            ge=1,
            extra={"group": "hosts", "aliases": ["-n"]},
        ),
    ] = 1
    node_rank: Annotated[
        int,
        Meta(
            description="number of this host among those of --nnodes; routers reach number 0, and the others only"
            " compute",
            ge=0,
            extra={"aliases": ["-r"]},
        ),
    ] = 0
    master_addr: Annotated[
        str,
        Meta(description="host name or IP address of the host with --node-rank 0, as the other hosts reach it"),
    ] = "127.0.0.1"
    master_port: Annotated[
        int, Meta(description="TCP port of --master-addr on which the hosts of an instance meet", ge=1, le=65535)
    ] = 29501
    node_wait_s: Annotated[
        float,
        Meta(
            description="time that a host waits for the other hosts of its instance at each start; then its process"
            " ends with status 1, and is to be started again",
            gt=0,
        ),
    ] = 600.0

    @property
    def num_devices(self) -> int:
        """Return the number of devices that the model of the instance is divided over, on all of its hosts."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def devices_per_node(self) -> int:
        """Return the number of devices of the instance on each of its hosts."""
        return self.num_devices // self.nnodes
