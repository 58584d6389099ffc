#!/usr/bin/env bash
# The tests of the redis registry start a redis-server of their own; Debian and Ubuntu carry it.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
sudo=""
[ "$(id -u)" -eq 0 ] || sudo=sudo
$sudo apt-get update -qq
$sudo apt-get install -y -qq --no-install-recommends redis-server
