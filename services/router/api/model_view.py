"""Decide which model names, aliases and LoRA adapters exist, which one a request means, and the context length, from
connected instances.
"""

from baton_serve.contracts.instance import AdapterRecord
from baton_serve.contracts.pooling import PoolingProfile
from baton_serve.services.router.cluster.cluster import Cluster
from baton_serve.services.router.cluster.offered_adapters import most_common_adapters
from baton_serve.services.router.cluster.routable import serves_model
from baton_serve.services.router.cluster.worker_state import WorkerState
from baton_serve.services.router.protocol.errors import BadRequestError, ModelNotFoundError, UnavailableError
from baton_serve.services.router.settings import RouterSettings
from baton_serve.services.router.text.served_model import ModelNames


class ModelView:
    """Summarizes what the instances of one model report to the registry: names, adapters, context length.

    `ModelService` owns it as long as the router runs. It changes nothing. A value that needs the records of all
    instances is computed again only if `cluster.version` has changed, because every request asks for it. Runs on the
    event loop.
    """

    def __init__(self, settings: RouterSettings, cluster: Cluster) -> None:
        self.shares_router = False
        """True if the router serves other models too; their instances are then distinguished by name."""
        self._cluster = cluster
        self._max_model_len = settings.max_model_len
        self._names = ModelNames(settings)
        self._own_names = self._names.own()
        # Each cached value has the version of the cluster for which it was computed; -1: never.
        self._names_version = -1
        self._known_names: list[str] = []
        self._adapters_version = -1
        self._known_adapters: dict[str, AdapterRecord] = {}
        self._is_known_version = -1
        self._is_known = False

    def workers(self) -> list[WorkerState]:
        """Return the instances that compute prompts or answers of this model: all but the encode instances."""
        return [worker for worker in self.instances() if worker.record.role != "encode"]

    def instances(self) -> list[WorkerState]:
        """Return the instances of this model that the router knows."""
        workers = self._cluster.workers()
        # With a single model, instances need not carry the name that the router knows: the folder's path may differ
        # from host to host.
        if not self.shares_router:
            return workers
        return [worker for worker in workers if serves_model(worker.record, self._own_names)]

    def is_known(self) -> bool:
        """Return whether the router knows an instance of this model."""
        if self._is_known_version != self._cluster.version:
            self._is_known_version = self._cluster.version
            self._is_known = bool(self.workers())
        return self._is_known

    def only_names(self) -> frozenset[str] | None:
        """Return the names of this model if the router serves other models too: requests may be placed only on
        instances that have one of them. Return None if this is the router's only model.
        """
        return self._own_names if self.shares_router else None

    def names(self) -> list[str]:
        """Return the names under which clients may request the model. Answers carry the first of them."""
        if self._names_version != self._cluster.version:
            self._names_version = self._cluster.version
            self._known_names = self._find_names()
        return self._known_names

    def adapters(self) -> dict[str, AdapterRecord]:
        """Return the LoRA adapters of the model's instances by name. If instances have different versions of an
        adapter, return the version that most of them have.
        """
        if self._adapters_version != self._cluster.version:
            self._adapters_version = self._cluster.version
            self._known_adapters = most_common_adapters([worker.record.adapters for worker in self.workers()])
        return self._known_adapters

    def _find_names(self) -> list[str]:
        # Without --served-model-name the instances' names count: they may have been given one that the router was not.
        advertised: list[str] = []
        for worker in self.workers():
            advertised += [worker.record.model, *worker.record.model_aliases]
        return self._names.all(advertised)

    def model_name(self, requested: str | None) -> str:
        """Return the name of the model that the answer to a request carries: the name of the requested adapter, or else
        the model's first name.

        Raises `ModelNotFoundError` if neither the model nor an adapter has the requested name.
        """
        names = self.names()
        if requested is not None and requested not in names:
            if requested in (adapters := self.adapters()):
                return requested
            names = [*names, *adapters]
            raise ModelNotFoundError(
                f"the model {requested!r} does not exist; served: {', '.join(names)}", param="model"
            )
        return names[0]

    def lora_of(self, requested: str | None) -> str:
        """Return the fingerprint of the LoRA adapter that a request names, which identifies its weights, or an empty
        string if the request names no adapter.
        """
        if requested is None or requested in self.names():
            return ""
        adapter = self.adapters().get(requested)
        # The adapter was there when the request was checked (`model_name`), and was unloaded during tokenization.
        if adapter is None:
            raise ModelNotFoundError(f"the model {requested!r} does not exist any more", param="model")
        return adapter.fingerprint

    def max_model_len(self) -> int | None:
        """Return the largest number of tokens, of prompt and answer together, that all known instances accept.

        `--max-model-len` may lower it. Return None if no instance is known and the setting is not given.
        """
        lengths = [worker.record.max_model_len for worker in self.workers()]
        stated = self._max_model_len
        return min([*lengths, *([stated] if stated is not None else [])], default=None)

    def tasks(self) -> list[str]:
        """Return what the model computes: `generate`, or the tasks of a pooling model; empty if no instance is known.

        Besides the tasks that its instances report, a classifier with a single class has `score`, as in vLLM.
        """
        profiles = [worker.record.pooling for worker in self.workers()]
        profile = next((profile for profile in profiles if profile is not None), None)
        if profile is None:
            return ["generate"] if profiles else []
        return [*profile.tasks, *(["score"] if "classify" in profile.tasks and len(profile.labels) == 1 else [])]

    def pooling_profile(self) -> PoolingProfile:
        """Return what a pooling model computes: its tasks, dimensions and labels.

        Raises `BadRequestError` for a model that generates text, and `UnavailableError` if no instance is known.
        """
        profiles = [worker.record.pooling for worker in self.workers()]
        first_profile = next((profile for profile in profiles if profile is not None), None)
        if first_profile is not None:
            return first_profile
        if profiles:
            raise BadRequestError(
                "this model generates text and computes no vectors: serve an embedding, scoring or classification"
                " model, or start the instances with --task embed, score or classify",
                code="unsupported_endpoint",
            )
        raise UnavailableError("no instance that computes vectors is ready: retry later", retry_after_s=1.0)
