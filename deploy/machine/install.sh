#!/bin/sh
# Install the service on this machine, or bring it up to date: the environment /opt/s4kv, the user
# s4kv, the units s4kv and s4kv-proxy. Settings in /etc/s4kv stay as they are. Starts nothing.
#
#   sudo deploy/machine/install.sh dist/vllm-*.whl dist/s4kv_vllm-*.whl
#
# Arguments are what pip installs: the two wheels, or names and options (--index-url ... s4kv-vllm).
# Without any, the environment is left alone. For Debian 12, Ubuntu 22.04 and newer.
# DESTDIR=DIR lays the files alone under DIR, for an image or to look at them.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=${DESTDIR:-}

lay() { # lay MODE FILE FOLDER
    install -D -m "$1" "$here/$2" "$root$3/$2"
}

keep() { # keep MODE FILE FOLDER: settings are the operator's; ours lies beside a changed one
    if [ -e "$root$3/$2" ] && ! cmp -s "$here/$2" "$root$3/$2"; then
        lay "$1" "$2" "$3/shipped"
        echo "kept $3/$2; the one of this release is $3/shipped/$2"
    else
        lay "$1" "$2" "$3"
    fi
}

if [ -z "$root" ]; then
    if [ "$(id -u)" != 0 ]; then
        echo "error: run it as root: sudo $0" >&2
        exit 2
    fi
    export DEBIAN_FRONTEND=noninteractive
    command -v nginx >/dev/null || had_no_nginx=1
    apt-get update -q
    apt-get install -q -y --no-install-recommends \
        nginx python3-venv python3-dev g++ libnuma1 openssl ca-certificates
    # The package starts a server of its own on port 80.
    [ -z "${had_no_nginx:-}" ] || [ ! -d /run/systemd/system ] || systemctl disable --now nginx
    id s4kv >/dev/null 2>&1 ||
        useradd --system --user-group --home-dir /var/lib/s4kv --shell /usr/sbin/nologin s4kv
    if [ $# -gt 0 ]; then
        [ -x /opt/s4kv/bin/python ] || python3 -m venv /opt/s4kv
        /opt/s4kv/bin/pip install --disable-pip-version-check -q "$@"
    fi
fi

umask 022
lay 755 proxy_key.py /usr/local/lib/s4kv
lay 644 s4kv.service /etc/systemd/system
lay 644 s4kv-proxy.service /etc/systemd/system
keep 600 serve.env /etc/s4kv # it may hold a token of a hub
keep 644 nginx.conf /etc/s4kv

if [ -z "$root" ]; then
    install -d -o s4kv -g s4kv -m 750 /var/lib/s4kv
    [ ! -d /run/systemd/system ] || systemctl daemon-reload
    [ -e /etc/s4kv/api-key ] || (umask 077 && openssl rand -hex 32 >/etc/s4kv/api-key)
    echo "Installed. Set the model in /etc/s4kv/serve.env, then: systemctl enable --now s4kv-proxy s4kv"
fi
