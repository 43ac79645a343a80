#!/usr/bin/env bash
# Runs .venv's uv with pip's settings (index, further indexes, links, certificate, trusted hosts), from the
# environment or from pip.conf, wherever uv's own variable is not set: uv reads none of them itself.
#   deploy/uv.sh pip install ...
set -euo pipefail
venv=$(cd "$(dirname "$0")/.." && pwd)/.venv

settings=$("$venv/bin/python" -m pip config list)
pass_on() { # name in pip, name in uv, what uv puts between several values
    local section value
    if [ -n "${!2+set}" ]; then return; fi
    for section in :env: install global; do
        value=$(sed -nE "s/^$section\.$1='(.*)'$/\1/p" <<<"$settings")
        if [ -n "$value" ]; then
            value=${value//\\n/ } # pip's own notation of a list over several lines
            value=$(xargs <<<"$value")
            export "$2=${value// /$3}"
            return
        fi
    done
}
pass_on index-url UV_DEFAULT_INDEX " "
pass_on extra-index-url UV_INDEX " "
pass_on find-links UV_FIND_LINKS ","
pass_on cert SSL_CERT_FILE " "
pass_on trusted-host UV_INSECURE_HOST " "
# As pip does: a package comes from whichever index has the version. With hashes none can slip in another.
export VIRTUAL_ENV=$venv UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}
exec "$venv/bin/uv" "$@"
