#!/bin/sh
# NVIDIA's AIPerf against a server: with_aiperf.sh http://127.0.0.1:8000 MODEL TOKENIZER_FOLDER
# 40 chats, 4 at a time, of about 64 tokens in and 32 out, counted by the server.
set -eu
folder=$(mktemp -d)
aiperf profile --url "$1" --model "$2" --tokenizer "$3" --endpoint-type chat --streaming --use-server-token-count \
    --request-count 40 --concurrency 4 --synthetic-input-tokens-mean 64 --output-tokens-mean 32 \
    --extra-inputs ignore_eos:true --ui none --output-artifact-dir "$folder"
python - "$folder" <<'CHECK'
import json, pathlib, sys
(found,) = pathlib.Path(sys.argv[1]).rglob("profile_export_aiperf.json")
report = json.loads(found.read_text())
assert report["request_count"]["avg"] == 40 and not report.get("error_summary"), report
assert report["output_sequence_length"]["min"] >= 32, report["output_sequence_length"]
print("aiperf: 40 chats,", round(report["output_token_throughput"]["avg"]), "tokens/s")
CHECK
rm -r "$folder"
