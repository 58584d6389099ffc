#!/usr/bin/env bash
# Install the programs that the tests start beside Python, where they are missing and this user may install packages.
#
# Debian and Ubuntu have all of them. Ubuntu's Chromium is a snap; where it cannot be installed, its tests are skipped. Without
# root and sudo, on other distributions, or with NO_APT=1 nothing is installed: what is missing is named, and tests that need it
# are skipped by name. The tests start and stop servers of their own.
set -euo pipefail

missing=()
missing_programs() {
  missing=()
  command -v redis-server >/dev/null || missing+=(redis-server)
  command -v g++ >/dev/null || missing+=(g++)
  command -v prometheus >/dev/null || missing+=(prometheus)
  for name in chromium chromium-browser google-chrome; do if command -v $name >/dev/null; then return; fi; done
  missing+=(chromium)
}

purpose() {
  case $1 in
    redis-server) echo "the registry of a cluster on several hosts" ;;
    g++) echo "kernels of the CPU; without it they run in plain torch" ;;
    prometheus) echo "alerts and dashboards of the chart" ;;
    chromium) echo "the page at /" ;;
  esac
}

missing_programs
[ ${#missing[@]} -gt 0 ] || exit 0
echo "The tests use programs that are not installed here:"
for package in "${missing[@]}"; do echo "  $package: $(purpose "$package")"; done

sudo=""
reason=""
if [ "${NO_APT:-}" = 1 ]; then reason="NO_APT=1 is set"
elif ! command -v apt-get >/dev/null; then reason="apt-get is missing: install them with the package manager of this distribution"
elif [ "$(id -u)" -ne 0 ]; then
  sudo="sudo -n"
  $sudo true 2>/dev/null || reason="this user is not root and has no sudo without a password"
fi
if [ -n "$reason" ]; then
  echo "They are not installed ($reason). Tests that need them are skipped."
  exit 0
fi

echo "Installing them with apt-get."
export DEBIAN_FRONTEND=noninteractive
$sudo apt-get update -qq
for package in "${missing[@]}"; do
  $sudo apt-get install -y -qq --no-install-recommends "$package" >/dev/null ||
    echo "$package cannot be installed: tests that need it are skipped" >&2
done
