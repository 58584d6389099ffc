#!/bin/sh
# Anthropic's Claude Code against a server: baton_serve/bench/clients/with_claude_code.sh http://127.0.0.1:8000 MODEL
# One turn with the tools that Claude Code offers. The model needs a context of 32,768 tokens. Ends with status 1 if the
# turn ended with an error.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
HOME="$folder" ANTHROPIC_BASE_URL="$1" ANTHROPIC_AUTH_TOKEN=none ANTHROPIC_MODEL="$2" ANTHROPIC_SMALL_FAST_MODEL="$2" \
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 CLAUDE_CODE_MAX_OUTPUT_TOKENS=200 \
  timeout 300 claude -p --output-format json "Say hello." < /dev/null > "$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
grep '"is_error":false' "$folder/log" || { cat "$folder/log"; exit 1; }
