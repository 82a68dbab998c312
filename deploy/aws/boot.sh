#!/bin/bash
# What an instance does at its first start: installs the bundle if the image has none, writes the
# settings, starts the service, and reports to CloudFormation. Success is a completion that came back
# through the proxy; failure comes with the reason and the last lines of the log, before the time is
# up. cfn-gpu-serving.yaml hands this script to the instances as user data.
#
#   S4KV_MODEL, S4KV_KV_DTYPE, S4KV_ARGS     what to serve
#   S4KV_API_KEY_SECRET                      the secret of the API key; S4KV_HUB_TOKEN_SECRET may be empty
#   S4KV_BUNDLE, S4KV_BUNDLE_SHA256          s3://BUCKET/KEY; without a KEY the image has it all
#   S4KV_SIGNAL_URL, S4KV_STACK, S4KV_GROUP  where to report
#   S4KV_LOGS                                the log group
#   S4KV_SECONDS                             the time it has, from the start of the machine
set -Eeuo pipefail

log=/var/log/s4kv-boot.log
folder=/var/lib/s4kv/model
lib=/usr/local/lib/s4kv
instance=$(cat /var/lib/cloud/data/instance-id)
deadline=$((S4KV_SECONDS - $(cut -d. -f1 /proc/uptime) + SECONDS))
key='' token=''
exec >>"$log" 2>&1

say() { echo "s4kv-boot: $*"; }

left() { echo $((deadline > SECONDS ? deadline - SECONDS : 1)); }

bounded() { timeout --kill-after=5 "$(left)" "$@"; }

# One event of the log group, whether or not the agent that sends the logs was ever started.
log_event() {
  timeout 30 aws logs create-log-stream --log-group-name "$S4KV_LOGS" --log-stream-name "$instance/failed"
  python3 -c 'import json, sys, time
print(json.dumps([{"timestamp": int(time.time() * 1000), "message": sys.stdin.read()}]))' |
    timeout 30 aws logs put-log-events --log-group-name "$S4KV_LOGS" \
      --log-stream-name "$instance/failed" --log-events file:///dev/stdin
}

# The wait condition takes a reason, which shows in the events of the stack; the group takes none.
report() {
  python3 -c 'import json, sys
print(json.dumps(dict(zip(("UniqueId", "Status", "Reason", "Data"), [*sys.argv[1:], ""]))))' \
    "$instance" "$1" "$2" |
    curl -fsS --max-time 20 --retry 3 -X PUT -H 'Content-Type:' --data-binary @- "$S4KV_SIGNAL_URL" ||
    say "the wait condition could not be told"
  timeout 30 aws cloudformation signal-resource --stack-name "$S4KV_STACK" --status "$1" \
    --logical-resource-id "$S4KV_GROUP" --unique-id "$instance" ||
    say "no signal is waited for: this machine replaces another"
}

# last_lines LINES BYTES: what the log says lately, without the secrets, no character cut in two.
last_lines() {
  local lines
  lines=$(tail -n "$1" "$log")
  lines=${lines//"${key:-no key yet}"/***}
  echo "${lines//"${token:-no token yet}"/***}" | tail -c "$2" | iconv -c -f utf-8 -t utf-8
}

fail() {
  ((BASH_SUBSHELL)) && exit 1 # the command that this is a part of fails in its turn
  trap - ERR
  set +e
  say "failed: $1"
  journalctl -u s4kv-proxy -o cat --no-pager -n 20
  journalctl -u s4kv -o cat --no-pager -n 200 # last: its end is what the stack's event shows
  last_lines 300 200000 | log_event
  report FAILURE "$1. The log's last lines: $(last_lines 14 800)"
  exit 1
}
trap 'fail "ended with $? in line $LINENO: ${BASH_COMMAND:0:120}"' ERR

secret() {
  bounded aws secretsmanager get-secret-value --secret-id "$1" --query SecretString --output text
}

install_bundle() {
  [[ $S4KV_BUNDLE == */ ]] &&
    fail "the image has no /opt/s4kv: give BundleKey, or an image made by deploy/image"
  local at
  at=$(mktemp -d)
  say "installing $S4KV_BUNDLE"
  bounded aws s3 cp --only-show-errors "$S4KV_BUNDLE" "$at/bundle.tar"
  sha256sum --check --status <<<"$S4KV_BUNDLE_SHA256  $at/bundle.tar" ||
    fail "$S4KV_BUNDLE has not the sha256 of BundleSha256"
  tar -xf "$at/bundle.tar" -C "$at"
  bounded "$at/deploy/aws/install.sh"
  rm -rf "$at"
}

# The model's folder, or its name on the hub, from where the engine gets it.
model() {
  if [[ $S4KV_MODEL == s3://* ]]; then
    bounded aws s3 sync --only-show-errors "$S4KV_MODEL" "$folder" >&2
    chown -R s4kv:s4kv "$folder"
    echo "$folder"
  else
    echo "$S4KV_MODEL"
  fi
}

settings() {
  umask 077
  printf '%s\n' "$key" >/etc/s4kv/api-key
  cat >/etc/s4kv/serve.env <<END
S4KV_MODEL=$1
S4KV_KV=$S4KV_KV_DTYPE
S4KV_ARGS=--served-model-name $S4KV_MODEL $S4KV_ARGS
${token:+HF_TOKEN=$token}
END
  printf 'S4KV_STACK=%s\nAWS_DEFAULT_REGION=%s\n' "$S4KV_STACK" "$AWS_DEFAULT_REGION" >/etc/s4kv/aws.env
  umask 022
  # A first start may download the model for longer than the unit would wait.
  mkdir -p /etc/systemd/system/s4kv.service.d
  printf '[Service]\nTimeoutStartSec=%s\n' "$S4KV_SECONDS" >/etc/systemd/system/s4kv.service.d/first-start.conf
  sed -e "s|@LOGS@|$S4KV_LOGS|" -e "s|@STACK@|$S4KV_STACK|" "$lib/cloudwatch-agent.json" >/etc/s4kv/cloudwatch-agent.json
  /opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl -a fetch-config -m ec2 -s \
    -c file:/etc/s4kv/cloudwatch-agent.json
}

wait_for_a_completion() {
  until /opt/s4kv/bin/s4kv ready --url http://127.0.0.1:8080 --key-file /etc/s4kv/api-key --deadline 30; do
    systemctl --quiet is-failed s4kv && fail "the service failed and is not started again"
    systemctl --quiet is-failed s4kv-proxy && fail "the proxy failed and is not started again"
    ((deadline > SECONDS)) || fail "no completion came through the proxy in time"
    sleep 5
  done
}

[[ -x /opt/s4kv/bin/vllm ]] || install_bundle
say "getting the secrets and the model"
key=$(secret "$S4KV_API_KEY_SECRET")
[[ -z $S4KV_HUB_TOKEN_SECRET ]] || token=$(secret "$S4KV_HUB_TOKEN_SECRET")
served=$(model)
settings "$served"
say "starting the service"
systemctl daemon-reload
systemctl enable --now s4kv-logfile.service
systemctl enable --now --no-block s4kv-proxy.service s4kv.service
wait_for_a_completion
systemctl enable --now s4kv-metric.timer
report SUCCESS "a completion came back through the proxy"
say "done"
