#!/usr/bin/env bash
# What the tests run beside Python: Redis (registry), g++ (CPU kernels), Prometheus (alerts and dashboards), Chromium (the page at /).
# Debian and Ubuntu carry them; Ubuntu's Chromium is a snap, and where it cannot be installed its tests are skipped. Installs only what is missing; the tests start and stop servers of their own.
set -euo pipefail
missing=()
command -v redis-server >/dev/null || missing+=(redis-server)
command -v g++ >/dev/null || missing+=(g++)
command -v prometheus >/dev/null || missing+=(prometheus)
browser=chromium
for name in chromium chromium-browser google-chrome; do if command -v $name >/dev/null; then browser=""; fi; done
[ ${#missing[@]} -gt 0 ] || [ -n "$browser" ] || exit 0
export DEBIAN_FRONTEND=noninteractive
sudo=""
[ "$(id -u)" -eq 0 ] || sudo=sudo
$sudo apt-get update -qq
if [ ${#missing[@]} -gt 0 ]; then $sudo apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null; fi
if [ -n "$browser" ]; then
  $sudo apt-get install -y -qq --no-install-recommends "$browser" >/dev/null || echo "Chromium cannot be installed: tests of the page are skipped" >&2
fi
