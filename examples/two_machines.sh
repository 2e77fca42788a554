#!/bin/sh
# Two machines on one: two processes that talk over 127.0.0.1, each with two CPU towers.
#
#     sh examples/two_machines.sh [FIRST_PORT]
#
# With real machines, run the last command once on each: the same "cluster" everywhere, with the
# machines' addresses, and the machine's own number as "index".
set -eu
first=${1:-23450}
cluster="{\"worker\": [\"127.0.0.1:$first\", \"127.0.0.1:$((first + 1))\"]}"
cd "$(dirname "$0")/.."

worker() {
    TF_CONFIG="{\"cluster\": $cluster, \"task\": {\"type\": \"worker\", \"index\": $1}}" \
        "${PYTHON:-python}" examples/two_machines.py
}

worker 1 &
other=$!
worker 0 || { kill $other; exit 1; }
wait $other
