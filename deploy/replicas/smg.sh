#!/bin/sh
# SMG's router in front of two replicas: https://github.com/smg-project/smg, `pip install smg`, tried with 1.13.0.
# It remembers which replica got which start of a prompt. It learns of KV events from gRPC workers only.
listen=127.0.0.1:8080
metrics=127.0.0.1:8079

# By default it asks a replica every 60 seconds whether it is healthy, takes one that failed back after two answers, and
# sends it nothing for 60 seconds after several failures.
exec "${SMG:-smg}" launch --policy cache_aware --host "${listen%:*}" --port "${listen#*:}" \
	--prometheus-host "${metrics%:*}" --prometheus-port "${metrics#*:}" \
	--health-check-interval-secs 1 --health-success-threshold 1 --cb-timeout-duration-secs 2 \
	--worker-urls http://127.0.0.1:8081 http://127.0.0.1:8082
