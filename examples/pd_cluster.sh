#!/usr/bin/env bash
# Start a router, a prefill worker and a decode worker one by one, ask a question, and stop them again.
# On several machines: the same commands, with --host 0.0.0.0, --advertise-host and a registry that all can reach.
#   examples/pd_cluster.sh MODEL [DEVICE]
set -euo pipefail
model=$1
device=${2:-auto}
port=${PORT:-8000}
registry=memory://127.0.0.1:$((port + 1))
folder=$(mktemp -d)
(umask 077; head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$folder/key")   # encrypts ZeroMQ, keeps others out

processes=()
trap 'kill "${processes[@]}" 2>/dev/null; wait; rm -r "$folder"' EXIT
start() {
    python -m baton_serve "$@" --registry "$registry" --cluster-key-file "$folder/key" --log-level warning &
    processes+=($!)
}
start router --model "$model" --port "$port"
start prefill --model "$model" --device "$device" --instance-id prefill-0
start decode --model "$model" --device "$device" --instance-id decode-0

instances() { curl -fs "http://127.0.0.1:$port/health" | grep -o '"instance":' | wc -l; }
for _ in $(seq 600); do
    kill -0 "${processes[@]}"                       # a process that has ended ends this script
    [ "$(instances || true)" = 2 ] && break
    sleep 0.5
done

curl -fsS "http://127.0.0.1:$port/v1/completions" -H 'Content-Type: application/json' -H 'x-baton-explain: 1' -d '{
  "prompt": "The quick brown fox jumps over the lazy dog, and the lazy dog sleeps on, and the quick brown fox runs away, and",
  "max_tokens": 8, "temperature": 0}'
echo
