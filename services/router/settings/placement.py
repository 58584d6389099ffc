"""Define the settings of placement, replays and request logs, with their defaults."""

from typing import Annotated

from msgspec import Meta

from baton_serve.services.common.settings.shared_settings import ProcessSettings
from baton_serve.services.router.placement.policy import DecodeFallback, PolicyName
from baton_serve.services.router.placement.prefix_pull import PullPolicy


class RequestLogSettings(ProcessSettings, frozen=True, kw_only=True):
    """The settings of the log lines for single requests."""

    enable_log_requests: Annotated[
        bool,
        Meta(
            description="log each request at level info: its prompt when it arrives, its times when it ends",
            extra={"group": "logs"},
        ),
    ] = False
    max_log_len: Annotated[
        int | None, Meta(description="largest number of logged characters of a prompt (default: all)", ge=0)
    ] = None


class PlacementSettings(RequestLogSettings, frozen=True, kw_only=True):
    """The settings that decide which instances serve a request: policy, replays, and how long the router waits for
    instances.
    """

    placement_policy: Annotated[
        PolicyName,
        Meta(
            description="how the router chooses instances. prefix: those with the shortest predicted TTFT, given"
            " their cached prefixes and queues; the other policies are for comparison",
            extra={"group": "placement"},
        ),
    ] = "prefix"
    kv_pull: Annotated[
        PullPolicy,
        Meta(
            description="whether an instance fetches a prefix that another one has cached before it computes the"
            " rest of the prompt. auto: if that is predicted to be faster; always: if the other one"
            " has a longer prefix; never: it computes the prefix again"
        ),
    ] = "auto"
    disaggregation_min_tokens: Annotated[
        int,
        Meta(
            description="smallest number of uncached prompt tokens for which a prefill instance is used. A prompt"
            " with fewer is computed on the decode instance, which saves the handoff; 0 uses a prefill"
            " instance for every prompt",
            ge=0,
        ),
    ] = 32
    # Not in use any more, but a deployment that still sets it must be able to start (`main.warn_of_removed`).
    joint_prefill_min_tokens: Annotated[
        int | None, Meta(description="has no effect and will be rejected by the next version: leave it out")
    ] = None
    max_replays: Annotated[
        int,
        Meta(description="how often one request may be resumed on other instances after its instance was lost", ge=0),
    ] = 3
    instance_wait_s: Annotated[
        float,
        Meta(
            description="longest time that a request waits for an instance to return after one was lost, or for the"
            " first instances after the start of the router; then it fails with status 503",
            ge=0,
        ),
    ] = 15.0
    decode_fallback: Annotated[
        DecodeFallback,
        Meta(
            description="requests while no decode or unified instance is ready: prefill lets prefill instances generate"
            " the answers, after the start of the router only when --instance-wait-s has passed; fail waits"
            " --instance-wait-s where an instance is expected, then answers with status 503"
        ),
    ] = "prefill"
    # Without it, requests with the same new prefix that arrive together would be spread over instances, and each
    # instance would compute the prefix itself.
    expected_blocks_ttl_s: Annotated[
        float,
        Meta(
            description="time for which the router counts the blocks of a prompt as cached on the instance that"
            " it chose, before that instance reports them. Requests with the same new prefix then go"
            " to the same instance",
            ge=0,
        ),
    ] = 5.0
    instance_timeout_s: Annotated[float, Meta(description="silence of an instance until it counts as lost", gt=0)] = 3.0
    shutdown_timeout_s: Annotated[
        float, Meta(description="time for running requests to finish after SIGTERM", ge=0, extra={"group": "shutdown"})
    ] = 10.0
