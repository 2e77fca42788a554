#!/bin/sh
# Simulates two machines on one: two processes on 127.0.0.1, each with two CPU towers.
#
#     make demo                                  # or any other way to have towerstrategy installed
#     sh examples/two_machines.sh [FIRST_PORT]
#
# It uses the Python in PYTHON, else that of the active environment, else that of .venv.
#
# On real machines, run the last command of worker() once on each machine, with the addresses of the
# machines as "cluster" and the machine's own index as "index".
set -eu
first=${1:-23450}
cluster="{\"worker\": [\"127.0.0.1:$first\", \"127.0.0.1:$((first + 1))\"]}"
cd "$(dirname "$0")/.."

if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    if [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then PYTHON=python
    elif [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; fi
fi
"$PYTHON" -c 'import importlib.util as util, sys
sys.path.remove("")  # the repository, whose towerstrategy is not installed
sys.exit(None in map(util.find_spec, ("tensorflow", "towerstrategy")))' || {
    echo "towerstrategy is not installed for $PYTHON: run \`make demo\` first, which makes .venv," \
        "or say which Python has it: PYTHON=... sh $0" >&2
    exit 1
}

worker() {
    TF_CONFIG="{\"cluster\": $cluster, \"task\": {\"type\": \"worker\", \"index\": $1}}" \
        "$PYTHON" examples/two_machines.py
}

worker 1 &
other=$!
worker 0 || { kill $other; exit 1; }
wait $other
