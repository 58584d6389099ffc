"""Define the settings of an instance process (prefill, decode or unified worker); engine settings carry vLLM's names.

`main` of each role reads them once through `services.common.settings.configuration`. They are immutable afterwards.
"""

from baton_serve.services.instance.settings.instance import (
    InstanceSettings,
    advertised_host,
    instance_id,
    model_names,
    peer_access,
    short_waits,
    visible_device,
    with_local_model,
)

__all__ = [
    "InstanceSettings",
    "advertised_host",
    "instance_id",
    "model_names",
    "peer_access",
    "short_waits",
    "visible_device",
    "with_local_model",
]
