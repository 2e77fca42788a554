#!/bin/sh
# Two machines on one: two processes that talk over 127.0.0.1, each with two CPU towers.
#
#     make demo                                  # or any other way to have towerstrategy installed
#     sh examples/two_machines.sh [FIRST_PORT]
#
# Runs the Python that PYTHON names, else that of the environment that is active, else that of .venv.
#
# With real machines, run the last command of worker() once on each: the same "cluster" everywhere,
# with the machines' addresses, and the machine's own number as "index".
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
sys.path.remove("")  # here, where towerstrategy lies without being installed
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
