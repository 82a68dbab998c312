#!/bin/bash
# Packer runs it as root on the machine that becomes the image.
set -euo pipefail

# The base sets itself up first.
cloud-init status --wait || true

mkdir /tmp/bundle
tar -xf /tmp/bundle.tar -C /tmp/bundle
/tmp/bundle/deploy/aws/install.sh
/opt/s4kv/bin/s4kv doctor # installation, driver and GPU; fails where something is missing

# What must differ between instances, or is of no use in an image.
rm -rf /tmp/bundle /tmp/bundle.tar /root/.cache /var/lib/apt/lists/* /etc/ssh/ssh_host_*
cloud-init clean --logs --machine-id
