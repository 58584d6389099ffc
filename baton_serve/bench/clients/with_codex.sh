#!/bin/sh
# OpenAI's Codex CLI against a server: baton_serve/bench/clients/with_codex.sh http://127.0.0.1:8000/v1 MODEL
# One turn with the tools that Codex offers, without its sandbox writing anything. The model needs a context of 16,384
# tokens. Ends with status 1 if the turn was not completed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/home" "$folder/work"
cat > "$folder/home/config.toml" <<CONFIG
model = "$2"
model_provider = "baton"
approval_policy = "never"
sandbox_mode = "read-only"
[model_providers.baton]
name = "baton"
base_url = "$1"
wire_api = "responses"
CONFIG
cd "$folder/work"
CODEX_HOME="$folder/home" timeout 300 codex exec --json --skip-git-repo-check "Say hello." < /dev/null > "$folder/log" 2>&1 ||
  { cat "$folder/log"; exit 1; }
grep '"type":"turn.completed"' "$folder/log" || { cat "$folder/log"; exit 1; }
