"""The registry of instances: instances register in it, and routers read it.

It has one interface (`port`) and two implementations, in a router's memory and in Redis; the URL's scheme selects one.
"""

from baton_serve.services.common.registry.port import RegistryClient, RegistryView
from baton_serve.services.common.registry.registry_choice import (
    check_registry_url,
    hosted_registry,
    registry_client,
    registry_view,
)

__all__ = [
    "RegistryClient",
    "RegistryView",
    "check_registry_url",
    "hosted_registry",
    "registry_client",
    "registry_view",
]
