#!/bin/sh
# The metric s4kv/Ready: 1 when a completion came back through the proxy in time, else 0.
/opt/s4kv/bin/s4kv ready --url http://127.0.0.1:8080 --key-file /etc/s4kv/api-key --deadline 20 &&
  value=1 || value=0
exec aws cloudwatch put-metric-data --namespace s4kv --metric-name Ready --value "$value" \
  --dimensions "Stack=$S4KV_STACK"
