"""Who is there: instances register, routers look. One port, two implementations, chosen by the URL's scheme."""

from baton_serve.services.common.registry.factory import (
    check_registry_url,
    hosted_registry,
    registry_client,
    registry_view,
)
from baton_serve.services.common.registry.port import RegistryClient, RegistryView

__all__ = [
    "RegistryClient",
    "RegistryView",
    "check_registry_url",
    "hosted_registry",
    "registry_client",
    "registry_view",
]
