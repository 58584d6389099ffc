#!/usr/bin/env python3
"""Write the Grafana dashboards in helm/dashboards: vllm.json (the twelve panels of vLLM's dashboard) and baton.json
(prefill, handoff, decode). With `--check`, only report whether the files are current.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "helm" / "dashboards"
SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
MODEL = 'model_name="$model_name"'
RATE = "[$__rate_interval]"
QUANTILES = (0.99, 0.95, 0.9, 0.5)
WIDTH, HEIGHT = 12, 8


@dataclass(frozen=True, slots=True)
class Query:
    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    queries: Sequence[Query]
    unit: str = "none"
    kind: str = "timeseries"
    description: str = ""


def latency(title: str, metric: str, mean: str) -> Panel:
    """Return a panel with quantiles and mean of a histogram."""
    quantiles = [
        Query(f"histogram_quantile({q}, sum by(le) (rate({metric}_bucket{{{MODEL}}}{RATE})))", f"P{q * 100:g}")
        for q in QUANTILES
    ]
    return Panel(title, [*quantiles, Query(mean_of(metric), mean)], "s")


def mean_of(metric: str) -> str:
    return f"sum(rate({metric}_sum{{{MODEL}}}{RATE})) / sum(rate({metric}_count{{{MODEL}}}{RATE}))"


def sums(metric: str) -> str:
    return f"sum(rate({metric}_sum{{{MODEL}}}{RATE}))"


def heatmap(title: str, metric: str) -> Panel:
    return Panel(title, [Query(f"sum by(le) (increase({metric}_bucket{{{MODEL}}}{RATE}))", "{{le}}")], kind="heatmap")


def by(label: str, expression: str) -> Query:
    return Query(f"sum by({label}) ({expression})", f"{{{{{label}}}}}")


VLLM = [
    latency("E2E Request Latency", "vllm:e2e_request_latency_seconds", "Average"),
    Panel(
        "Token Throughput",
        [
            Query(f"sum(rate(vllm:prompt_tokens_total{{{MODEL}}}{RATE}))", "Prompt Tokens/Sec"),
            Query(f"sum(rate(vllm:generation_tokens_total{{{MODEL}}}{RATE}))", "Generation Tokens/Sec"),
        ],
    ),
    latency("Time Per Output Token Latency", "vllm:time_per_output_token_seconds", "Mean"),
    Panel(
        "Scheduler State",
        [
            Query(f"sum(vllm:num_requests_running{{{MODEL}}})", "Num Running"),
            Query(f"sum(vllm:num_requests_swapped{{{MODEL}}})", "Num Swapped"),
            Query(f"sum(vllm:num_requests_waiting{{{MODEL}}})", "Num Waiting"),
        ],
    ),
    latency("Time To First Token Latency", "vllm:time_to_first_token_seconds", "Average"),
    Panel(
        "Cache Utilization",
        [
            Query(f"vllm:gpu_cache_usage_perc{{{MODEL}}}", "GPU {{instance}}"),
            Query(f"vllm:cpu_cache_usage_perc{{{MODEL}}}", "CPU {{instance}}"),
        ],
        "percentunit",
    ),
    heatmap("Request Prompt Length", "vllm:request_prompt_tokens"),
    heatmap("Request Generation Length", "vllm:request_generation_tokens"),
    Panel("Finish Reason", [by("finished_reason", f"increase(vllm:request_success_total{{{MODEL}}}{RATE})")]),
    Panel("Queue Time", [Query(sums("vllm:request_queue_time_seconds"), "seconds")], "s"),
    Panel(
        "Requests Prefill and Decode Time",
        [
            Query(sums("vllm:request_prefill_time_seconds"), "Prefill"),
            Query(sums("vllm:request_decode_time_seconds"), "Decode"),
        ],
        "s",
    ),
    Panel("Max Generation Token in Sequence Group", [Query(sums("vllm:request_max_num_generation_tokens"), "tokens")]),
]

TTFT, QUEUE, PREFILL = (
    mean_of(f"vllm:{name}_seconds") for name in ("time_to_first_token", "request_queue_time", "request_prefill_time")
)
TOKENIZE, ADMISSION, EXPOSED = (
    mean_of(f"baton:{name}_seconds") for name in ("tokenize", "admission", "handoff_exposed")
)
HELD = mean_of("baton:first_token_held_seconds").replace(
    "baton:first_token_held_seconds_count", "vllm:time_to_first_token_seconds_count"
)
"""Mean over all first tokens, including tokens that were not held back."""
BATON = [
    Panel(
        "Parts of TTFT (mean)",
        [
            Query(TOKENIZE, "tokenise"),
            Query(f"{ADMISSION} - {TOKENIZE}", "queue at the router"),
            Query(QUEUE, "queue at prefill"),
            Query(PREFILL, "prefill"),
            Query(f"{TTFT} - {ADMISSION} - {QUEUE} - {PREFILL} - {HELD}", "network, first step"),
            Query(HELD, "held back for the ITL SLO"),
            Query(TTFT, "first token"),
            Query(EXPOSED, "after it: exposed handoff"),
        ],
        "s",
        description="The prefill instance computes the first token. With an ITL SLO the router may hold it back for "
        "the handoff, which delays the second.",
    ),
    Panel(
        "Handoff (mean)",
        [
            Query(mean_of("baton:handoff_seconds"), "from first request of a block to last block"),
            Query(EXPOSED, "exposed: not hidden behind prefill"),
        ],
        "s",
        description="Exposed time delays the second token.",
    ),
    Panel(
        "Received KV bytes, by transport",
        [by("transport", f'rate(baton:kv_bytes_total{{direction="received"}}{RATE})')],
        "Bps",
    ),
    Panel(
        "Bandwidth of links",
        [Query("baton:kv_link_bytes_per_second", "{{peer}} → {{instance}} {{transport}}")],
        "Bps",
        description="Measured by the consumer in its last transfers.",
    ),
    Panel(
        "Transport probes and changes",
        [
            by("change", f"increase(baton:kv_transport_changes_total{RATE})"),
            by("outcome", f"increase(baton:kv_probes_total{RATE})"),
        ],
        description="Probes by outcome; links that left a transport after failures (demoted) or changed to a better "
        "one (promoted).",
    ),
    Panel(
        "Images by the encode pool",
        [
            Query(f"sum by(result) (rate(baton:encoded_images_total{RATE}))", "encode: {{result}}"),
            Query(f"sum by(result) (rate(baton:image_embeddings_total{RATE}))", "prompts: {{result}}"),
        ],
        description="Missed embeddings did not come from an encode instance: the image was encoded with its prompt.",
    ),
    Panel(
        "Prompt tokens found in a cache, by tier",
        [
            by("tier", f"rate(baton:prefix_hit_tokens_total{{{MODEL}}}{RATE})"),
            Query(f"sum(rate(vllm:prompt_tokens_total{{{MODEL}}}{RATE}))", "all prompt tokens"),
        ],
    ),
    Panel(
        "Placements by decision",
        [
            by("decision", f"rate(baton:placements_total{{{MODEL}}}{RATE})"),
        ],
        "reqps",
    ),
    Panel(
        "Leases and held blocks",
        [
            Query(f"baton:leases{{{MODEL}}}", "leases {{instance}}"),
            Query(f"baton:held_blocks{{{MODEL}}}", "held blocks {{instance}}"),
        ],
    ),
    Panel(
        "Replays and failed handoffs",
        [
            Query(f"sum(increase(baton:replays_total{{{MODEL}}}{RATE}))", "replays"),
            by("reason", f"increase(baton:transfer_errors_total{RATE})"),
            Query(f"sum(increase(baton:transfer_retries_total{RATE}))", "fetches retried"),
            Query(f"sum(increase(baton:checksum_mismatches_total{RATE}))", "blocks with a wrong checksum"),
        ],
    ),
    Panel(
        "Refused requests, by cause",
        [by("cause", f"increase(baton:admission_refusals_total{{{MODEL}}}{RATE})")],
        description="Status 429: the queue is too long, a limit of the API key is reached, or an SLO cannot be met.",
    ),
    Panel(
        "Waiting in the router",
        [
            Query(f"sum(baton:router_waiting_requests{{{MODEL}}})", "prompts"),
            Query(f"sum(baton:router_waiting_tokens{{{MODEL}}})", "tokens"),
        ],
    ),
    Panel("HTTP errors, by status", [by("status", f"increase(baton:http_errors_total{{{MODEL}}}{RATE})")]),
    Panel(
        "Autoscaling signals: prefill",
        [
            Query(
                f"baton:queued_tokens{{{MODEL}}} / (baton:prefill_tokens_per_second{{{MODEL}}} > 0)",
                "wait {{instance}}",
            )
        ],
        "s",
    ),
    Panel(
        "Autoscaling signals: decode",
        [
            Query(f"vllm:gpu_cache_usage_perc{{{MODEL}}}", "KV use {{instance}}"),
            Query(
                f"baton:decode_step_seconds{{{MODEL}}} * (vllm:num_requests_running{{{MODEL}}} > bool 0)",
                "seconds between tokens {{instance}}",
            ),
        ],
    ),
    Panel(
        "Host tier",
        [
            Query(f"vllm:cpu_prefix_cache_hit_rate{{{MODEL}}}", "hits {{instance}}"),
            Query(f"rate(baton:host_stored_blocks_total{{{MODEL}}}{RATE})", "blocks/s out {{instance}}"),
            Query(f"rate(baton:host_loaded_blocks_total{{{MODEL}}}{RATE})", "blocks/s back {{instance}}"),
            Query(f"increase(baton:host_damaged_blocks_total{{{MODEL}}}{RATE})", "damaged blocks {{instance}}"),
        ],
    ),
    latency("Error of the TTFT prediction", "baton:ttft_prediction_error_seconds", "Mean"),
]

DASHBOARDS = {
    "vllm.json": ("Baton: vLLM's dashboard", "baton-vllm", VLLM),
    "baton.json": ("Baton: prefill, handoff, decode", "baton-pd", BATON),
}


def dashboard(title: str, uid: str, panels: Sequence[Panel]) -> dict[str, Any]:
    return {
        "title": title,
        "uid": uid,
        "tags": ["baton", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {"list": [source_variable(), model_variable()]},
        "panels": [panel_json(number, panel) for number, panel in enumerate(panels)],
    }


def source_variable() -> dict[str, Any]:
    return {"name": "DS_PROMETHEUS", "type": "datasource", "query": "prometheus", "label": "Datasource"}


def model_variable() -> dict[str, Any]:
    query = "label_values(vllm:prompt_tokens_total, model_name)"
    return {"name": "model_name", "type": "query", "datasource": SOURCE, "query": query, "refresh": 2, "label": "Model"}


def panel_json(number: int, panel: Panel) -> dict[str, Any]:
    position = {"x": number % 2 * WIDTH, "y": number // 2 * HEIGHT, "w": WIDTH, "h": HEIGHT}
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": SOURCE,
            "expr": query.expression,
            "legendFormat": query.legend,
            "format": "heatmap" if panel.kind == "heatmap" else "time_series",
        }
        for index, query in enumerate(panel.queries)
    ]
    return {
        "id": number + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": targets,
    }


def build() -> dict[str, str]:
    made = {name: dashboard(*parts) for name, parts in DASHBOARDS.items()}
    return {name: json.dumps(content, indent=1, ensure_ascii=False) + "\n" for name, content in made.items()}


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    for name, text in build().items():
        target = FOLDER / name
        if "--check" in sys.argv:
            if not target.exists() or target.read_text() != text:
                return 1
        else:
            target.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
