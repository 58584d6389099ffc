"""Define the limits of a router with their defaults: connections, sizes, timeouts (also of a KV transfer), queue, API
keys, SLOs, stored batches.
"""

from typing import Annotated

from msgspec import Meta

from baton_serve.services.router.settings.placement import PlacementSettings


class AdmissionSettings(PlacementSettings, frozen=True, kw_only=True):
    """The settings that decide which requests are accepted: number and size of requests, SLOs, quotas, retries and
    timeouts.
    """

    beam_search_max_tokens: Annotated[
        int,
        Meta(description="max_tokens of beam search requests that do not set it", ge=1, extra={"group": "admission"}),
    ] = 256
    max_sequences: Annotated[
        int, Meta(description="largest number of sequences of a request (prompts times n)", ge=1)
    ] = 128
    max_concurrent_requests: Annotated[
        int,
        Meta(
            description="largest number of prompts that are served at once, waiting ones included; further requests"
            " get status 429; with API keys of several owners, none of them may hold more than are still free",
            ge=1,
        ),
    ] = 4096
    max_queued_tokens: Annotated[
        int,
        Meta(
            description="largest number of prompt tokens that wait in the router; further requests get status 429", ge=0
        ),
    ] = 1_000_000
    # Enough to keep an instance busy. A request that waits in the router instead can still be overtaken by one of
    # higher priority, and be placed by what is cached when its turn comes.
    dispatch_ahead_s: Annotated[
        float,
        Meta(
            description="amount of work that the router sends an instance in advance, in seconds of the"
            " instance's computing time. Further requests wait in the router, in the order of their"
            " priority and shared fairly among API keys. Raise it if instances are idle between"
            " requests",
            gt=0,
        ),
    ] = 1.0
    default_ttft_ms: Annotated[
        float | None,
        Meta(
            description="TTFT SLO in milliseconds of requests without the header x-baton-ttft-ms; a request that is"
            " predicted to miss it gets status 429 (default: no SLO)",
            gt=0,
            extra={"group": "slo"},
        ),
    ] = None
    default_itl_ms: Annotated[
        float | None,
        Meta(
            description="ITL SLO in milliseconds of requests without the header x-baton-itl-ms; a request that is "
            "predicted to miss it gets status 429 (default: no SLO)",
            gt=0,
        ),
    ] = None
    # The gap between the first two tokens contains the rest of the handoff, so it is longer than later ones (ADR 0012).
    first_token_hold: Annotated[
        float,
        Meta(
            description="with an ITL SLO, how long the router may delay the first token of a handed-off request,"
            " as a multiple of that SLO. The second token then follows within the SLO although the"
            " decode worker starts later; 0 sends every first token immediately, which gives the"
            " shortest TTFT",
            ge=0,
        ),
    ] = 3.0
    requests_per_minute: Annotated[
        int,
        Meta(
            description="requests per minute of each API key, unless its line in --api-key-file sets another limit;"
            " 0 sets no limit",
            ge=0,
            extra={"group": "quotas"},
        ),
    ] = 0
    tokens_per_minute: Annotated[
        int,
        Meta(
            description="prompt and generated tokens per minute of each API key, unless its line in --api-key-file "
            "sets another limit; 0 sets no limit",
            ge=0,
        ),
    ] = 0
    tokens_per_day: Annotated[
        int,
        Meta(
            description="prompt and generated tokens per day of each API key, unless its line in --api-key-file "
            "sets another limit; 0 sets no limit",
            ge=0,
        ),
    ] = 0
    min_priority: Annotated[
        int,
        Meta(
            description="smallest priority value that requests of an API key may ask for (smaller values are served"
            " earlier), unless its line in --api-key-file sets another one; without API keys every "
            "value is allowed"
        ),
    ] = 0
    # Without a budget retries could double the load of a cluster that already fails under its load.
    retry_budget: Annotated[
        float,
        Meta(
            description="number of retries that the router may make for each request, as an average over all"
            " requests, after an instance refused or failed one: 0.2 allows one retry for five"
            " requests. A low value prevents that retries increase an overload; 0 disables retries",
            ge=0,
            extra={"group": "admission"},
        ),
    ] = 0.2
    request_timeout_s: Annotated[
        float, Meta(description="longest time from the arrival of a request to the end of its answer", gt=0)
    ] = 3600.0
    handoff_timeout_s: Annotated[
        float,
        Meta(
            description="longest time from placement until the KV blocks of the prompt are on the decode instance", gt=0
        ),
    ] = 120.0
    encode_timeout_s: Annotated[
        float,
        Meta(
            description="longest time for which a prompt waits for embeddings of its images from encode instances; then"
            " the images are encoded with the prompt",
            gt=0,
        ),
    ] = 10.0


class HttpSettings(AdmissionSettings, frozen=True, kw_only=True):
    """The settings that limit the HTTP server: sizes of requests, times and numbers of connections."""

    max_request_bytes: Annotated[
        int, Meta(description="largest size of a request body", ge=1, extra={"group": "http"})
    ] = 8 * 1024 * 1024
    # At least one body of the largest size that makes sense. Short bodies are bounded by the number of connections.
    max_body_memory_bytes: Annotated[
        int,
        Meta(
            description="largest size of the bodies over 64 KiB together that one process holds for the requests that"
            " it serves, also for those of batches; further requests with such a body wait 2 s, then get status 429."
            " If there are several API keys, one of them gets at most half",
            ge=1024 * 1024,
        ),
    ] = 512 * 1024 * 1024
    max_header_bytes: Annotated[
        int, Meta(description="largest size of a request's first line and headers", ge=1024)
    ] = 64 * 1024
    header_timeout_s: Annotated[
        float, Meta(description="longest time for a request's first line and headers", gt=0)
    ] = 10.0
    body_timeout_s: Annotated[float, Meta(description="longest pause while a request body arrives", gt=0)] = 30.0
    slow_client_s: Annotated[
        float,
        Meta(
            description="time after which the connection of a slow client is closed: one that has not sent its"
            " whole request body, or does not read the data sent to it",
            gt=0,
        ),
    ] = 60.0
    # Longer than common proxies keep an idle connection (60 s). If the server closed first, a proxy could send a
    # request into a connection that is just being closed.
    keep_alive_timeout_s: Annotated[
        float,
        Meta(
            description="time that a connection stays open without a request",
            gt=0,
            extra={"aliases": ["--timeout-keep-alive"]},
        ),
    ] = 75.0
    # TCP resets a connection that is closed with unread data, and the client would lose the answer (nginx's name).
    lingering_time_s: Annotated[
        float,
        Meta(description="longest time to read the rest of a request that was answered early, and discard it", gt=0),
    ] = 30.0
    lingering_timeout_s: Annotated[
        float, Meta(description="longest pause while the rest of a request that was answered early arrives", gt=0)
    ] = 5.0
    max_connections: Annotated[
        int,
        Meta(
            description="largest number of connections of one process, at most three quarters of its file "
            "descriptors (ulimit -n); beyond it idle connections are closed first, then new ones get "
            "status 503",
            ge=1,
        ),
    ] = 8192
    # 0 by default, because most routers stand behind a proxy or a load balancer.
    max_connections_per_address: Annotated[
        int,
        Meta(
            description="largest number of connections of one process from one client address, beyond it new ones "
            "get status 503; 0 sets no limit, as needed behind a proxy, whose clients all have its "
            "address",
            ge=0,
        ),
    ] = 0


class BatchSettings(HttpSettings, frozen=True, kw_only=True):
    """The settings of the batch API (`/v1/files` and `/v1/batches`)."""

    batch_folder: Annotated[
        str | None,
        Meta(
            description="folder for the files and batches of clients, which turns on /v1/files and /v1/batches. Routers"
            " may share it, if its file system has locks; batches continue after a restart (default: none)",
            extra={"group": "batches"},
        ),
    ] = None
    batch_max_requests: Annotated[int, Meta(description="largest number of requests of a batch", ge=1)] = 50_000
    batch_max_file_bytes: Annotated[int, Meta(description="largest size of an uploaded file", ge=1)] = 200 * 1024 * 1024
    batch_max_bytes: Annotated[
        int,
        Meta(
            description="largest size of all files in --batch-folder; beyond it uploads are refused. If there are"
            " several API keys, one of them gets at most half",
            ge=1,
        ),
    ] = 20 * 1024**3
    batch_keep_days: Annotated[
        float, Meta(description="days after which files and batches that have ended are deleted", gt=0, le=36500)
    ] = 30.0
    batch_max_concurrency: Annotated[
        int,
        Meta(
            description="largest number of requests of batches that one router process runs at once; at most 16 per"
            " instance run seconds after the last client, and 1 per decode or unified instance beside clients",
            ge=1,
            le=4096,
        ),
    ] = 256
