#!/bin/bash
# The service on an instance of AWS: what deploy/machine installs, with the wheels of the bundle, and
# what brings logs and readiness to CloudWatch. Starts nothing; boot.sh does, at the first start.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

for program in aws /opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl; do
  command -v "$program" >/dev/null || {
    echo "error: no $program: use the Deep Learning Base GPU AMI, which has it" >&2
    exit 2
  }
done

# Ubuntu updates itself after its first start, and holds the locks of apt meanwhile.
echo 'DPkg::Lock::Timeout "300";' >/etc/apt/apt.conf.d/90s4kv-wait
[[ ! -d /run/systemd/system ]] || systemctl stop apt-daily.timer apt-daily.service || true

"$here/../machine/install.sh" "$here"/../../dist/*.whl
install -D -m 755 -t /usr/local/lib/s4kv "$here/ready-metric.sh"
install -D -m 644 -t /usr/local/lib/s4kv "$here/cloudwatch-agent.json"
install -D -m 644 -t /etc/systemd/system "$here"/s4kv-logfile.service "$here"/s4kv-metric.{service,timer}
install -d -m 750 /var/log/s4kv # systemd opens a unit's output before it makes its LogsDirectory
install -D -m 644 "$here/logrotate.conf" /etc/logrotate.d/s4kv
