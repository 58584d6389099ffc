#!/bin/sh
# guidellm against a server: baton_serve/bench/clients/with_guidellm.sh http://127.0.0.1:8000 MODEL TOKENIZER_FOLDER
# Ends with the status of guidellm, or 1 when a request failed.
set -eu
log=$(mktemp)
trap 'rm -f "$log"' EXIT
HF_HUB_OFFLINE=1 guidellm run \
  --backend "kind=openai_http,target=$1,model=$2" \
  --tokenizer "kind=hf_auto,model=$3" \
  --profile kind=concurrent,streams=4 \
  --constraint kind=max_requests,count=40 \
  --data kind=synthetic_text,prompt_tokens=64,output_tokens=32 \
  --output kind=console --disable-console-interactive > "$log" 2>&1 || { cat "$log"; exit 1; }
grep -A 100 'Request Latency Statistics' "$log"
grep -q 'successful=40 errored=0' "$log"
