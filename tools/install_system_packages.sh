#!/usr/bin/env bash
# What the tests run beside Python: Redis (registry), g++ (CPU kernels), Prometheus (alerts and dashboards). Debian and Ubuntu
# carry them. Installs only what is missing; the tests start and stop servers of their own.
set -euo pipefail
missing=()
command -v redis-server >/dev/null || missing+=(redis-server)
command -v g++ >/dev/null || missing+=(g++)
command -v prometheus >/dev/null || missing+=(prometheus)
[ ${#missing[@]} -gt 0 ] || exit 0
export DEBIAN_FRONTEND=noninteractive
sudo=""
[ "$(id -u)" -eq 0 ] || sudo=sudo
$sudo apt-get update -qq
$sudo apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
