#!/bin/sh
# Installs missing Debian/Ubuntu packages as root, or prints the command that installs them.
#
# Each argument is REQUIREMENT:PACKAGE. REQUIREMENT is a command, the path of a file or folder, or
# module=PYTHON=NAME for a Python module.
set -eu

present() {
  case "$1" in
    module=*)
      rest=${1#module=}
      "${rest%%=*}" -c "import ${rest#*=}" 2>/dev/null ;;
    /*) [ -e "$1" ] ;;
    *) command -v "$1" >/dev/null ;;
  esac
}

missing=""
for argument in "$@"; do
  present "${argument%:*}" || missing="$missing ${argument##*:}"
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "Missing system packages. Install them and run make again: sudo apt-get install$missing" >&2
  exit 1
fi
echo "Installing system packages:$missing"
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086  # one word per package
if ! { apt-get update -qq && apt-get install -qq -y --no-install-recommends $missing >/dev/null; }; then
  echo "These system packages could not be installed; see above:$missing" >&2
  exit 1
fi
