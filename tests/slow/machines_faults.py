"""Small clusters on one machine in which something goes wrong.

    python machines_faults.py FOLDER CASE...

Goes in: names of :data:`CASES`.  Comes out: in FOLDER a file ``CASE_WORKER.json`` for each worker
that ended by itself: what it raised (``error``, ``message``), or what it returned (``result``), and
``after``, the seconds since the fault.  Workers that are left after :data:`LIMIT` are killed and
leave no file.

Workers are forked from this process, which has imported everything and has not started TensorFlow.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
import tf_keras

import towerstrategy
from tests.extras.machines import machines_workers
from towerstrategy.extras.machines import clusters

WORKERS = 3
START_LIMIT = 20  # seconds, of the case in which a worker never comes
# Seconds for a whole case, start-up on a busy machine included.
LIMIT = clusters.TRIES * (clusters.INTERVAL + clusters.ANSWER) + 90
KITS = {"keras": keras, "tf_keras": tf_keras}


class Worker:
    """What a case may know and do in one worker."""

    life = 1  # 2 for a worker that was started again

    def __init__(self, case, index, addresses, folder):
        self.case, self.index, self.addresses, self.folder = case, index, addresses, folder

    def strategy(self, towers=1, addresses=None, **options):
        os.environ["TF_CONFIG"] = json.dumps({
            "cluster": {"worker": addresses or self.addresses},
            "task": {"type": "worker", "index": self.index}})
        devices = towerstrategy.split_cpu(towers + 1)[1:]
        return towerstrategy.TowerStrategy(
            devices, "CPU:0", communication_options=tf.distribute.experimental.CommunicationOptions(
                **options) if options else None)

    def fault(self):
        """Notes the time of the fault."""
        (self.folder / f"{self.case}.fault").write_text(str(time.monotonic()))

    def after(self):
        path = self.folder / f"{self.case}.fault"
        return time.monotonic() - float(path.read_text()) if path.exists() else None

    def die(self, how=signal.SIGKILL):
        self.fault()
        os.kill(os.getpid(), how)


def fit(strategy, kit=keras, at=None, epochs=3, callbacks=(), units=4):
    """Trains; calls ``at(epoch, batch)`` after each step, between collective operations."""
    epoch_now = [0]

    class Each(kit.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            epoch_now[0] = epoch

        def on_train_batch_end(self, batch, logs=None):
            if at is not None:
                at(epoch_now[0], batch)

    x = np.random.RandomState(0).rand(22, 3).astype("f")
    with strategy.scope():
        kit.utils.set_random_seed(7)
        start = kit.layers.Input([3]) if kit is keras else kit.layers.InputLayer([3])
        model = kit.Sequential([start, kit.layers.Dense(units, "tanh"), kit.layers.Dense(1)])
        model.compile(kit.optimizers.Adam(0.01), "mse")
    model.fit(x, x.sum(1, keepdims=True), batch_size=4, epochs=epochs, verbose=0,
              shuffle=False, callbacks=[*callbacks, Each()])
    return [weight.tolist() for weight in model.get_weights()]


def dies(who, how):
    def case(worker):
        def at(epoch, batch):
            if worker.index == who and (epoch, batch) == (1, 2):
                worker.die(how)
        fit(worker.strategy(), at=at)
    return case


def raises(worker):
    """Worker 2's own code has a mistake."""
    def at(epoch, batch):
        if worker.index == 2 and (epoch, batch) == (1, 2):
            worker.fault()
            raise KeyError("a mistake")
    fit(worker.strategy(), at=at)


def never_comes(worker):
    worker.fault()
    worker.strategy(timeout_seconds=START_LIMIT)


def ends_first(worker):
    """The chief ends long before the others, who then do something of their own."""
    weights = fit(worker.strategy())
    worker.fault()
    if worker.index:
        time.sleep(clusters.TRIES * clusters.INTERVAL + 5)
    return weights


def stopped_at_the_end(worker):
    weights = fit(worker.strategy())
    if worker.index == 1:
        worker.die(signal.SIGSTOP)
    time.sleep(clusters.INTERVAL)  # the others are asking it
    return weights


def other_addresses(worker):
    addresses = list(worker.addresses)
    if worker.index == 1:
        addresses[2] = "127.0.0.1:1"
    worker.strategy(addresses=addresses)


def other_count(worker):
    addresses = worker.addresses[:2] if worker.index == 1 else worker.addresses
    worker.strategy(addresses=addresses)


def other_model(worker):
    worker.fault()
    fit(worker.strategy(), units=5 if worker.index == 1 else 4)


def port_taken(worker):
    worker.fault()
    if worker.index == 1:
        taken = socket.socket()
        taken.bind(("127.0.0.1", int(worker.addresses[1].split(":")[1])))
        taken.listen()
    worker.strategy(timeout_seconds=START_LIMIT)


def started_again(worker):
    """Worker 1 is killed, and its machine starts it again by itself."""
    if worker.life == 2:
        worker.strategy(timeout_seconds=START_LIMIT)
    else:
        dies(1, signal.SIGKILL)(worker)


def cut_off(worker):
    """Worker 1's link is pulled."""
    def at(epoch, batch):
        if worker.index == 1 and (epoch, batch) == (1, 2):
            worker.fault()
            subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    fit(worker.strategy(), at=at)


def backed_up(kit, killed=None):
    """Trains with a backup; worker ``killed`` dies in the third epoch of four."""
    def case(worker):
        def at(epoch, batch):
            if worker.index == killed and (epoch, batch) == (2, 2):
                worker.die()
        strategy, began = worker.strategy(), []
        backup = KITS[kit].callbacks.BackupAndRestore(str(worker.folder / f"backup_{kit}"))
        starts = KITS[kit].callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: began.append(epoch))
        weights = fit(strategy, KITS[kit], at, 4, [backup, starts])
        return {"weights": weights, "began": began}
    return case


def uninterrupted(kit):
    return lambda worker: fit(worker.strategy(), KITS[kit], epochs=4)


@dataclasses.dataclass(frozen=True)
class Case:
    run: Callable
    absent: tuple[int, ...] = ()
    namespaces: bool = False
    again: bool = False
    workers: int = WORKERS


CASES = {
    "killed": Case(dies(1, signal.SIGKILL)),
    "chief_killed": Case(dies(0, signal.SIGKILL)),
    "stopped": Case(dies(1, signal.SIGSTOP)),
    "cut_off": Case(cut_off, namespaces=True),
    "started_again": Case(started_again, again=True),
    "raises": Case(raises),
    "never_comes": Case(never_comes, absent=(1,)),
    "ends_first": Case(ends_first),
    "stopped_at_the_end": Case(stopped_at_the_end),
    "other_addresses": Case(other_addresses),
    "other_count": Case(other_count),
    "other_model": Case(other_model),
    "port_taken": Case(port_taken),
    **{f"uninterrupted-{kit}": Case(uninterrupted(kit)) for kit in KITS},
    **{f"interrupted-{kit}": Case(backed_up(kit, killed=1)) for kit in KITS},
    **{f"interrupted_four-{kit}": Case(backed_up(kit, killed=1), workers=4) for kit in KITS},
    **{f"resumed-{kit}": Case(backed_up(kit)) for kit in KITS},
}


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def namespaces(count):
    """Network namespaces of this process' own, one a worker, joined by a bridge in another."""
    names = [f"tower{os.getpid()}-{number}" for number in range(count + 1)]
    hub, owner = names[-1], os.getpid()
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge", "up")
        for number, name in enumerate(names[:-1]):
            ip("-n", hub, "link", "add", f"port{number}", "type", "veth",
               "peer", "name", "eth0", "netns", name)
            ip("-n", hub, "link", "set", f"port{number}", "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"10.99.0.{number + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names[:-1]
    finally:
        for name in names if os.getpid() == owner else []:  # a forked worker ends here, too
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def enter(namespace):
    """Moves this process, which has one thread, to a network namespace."""
    with open(f"/var/run/netns/{namespace}") as handle:
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), "setns")


def work(worker, namespace):
    if namespace:
        enter(namespace)
    try:
        found = {"result": CASES[worker.case].run(worker)}
    except BaseException as error:
        traceback.print_exc()
        found = {"error": type(error).__name__, "message": str(error)}
    found["after"] = worker.after()
    (worker.folder / f"{worker.case}_{worker.index}.json").write_text(json.dumps(found))
    sys.exit("error" in found)  # as a script ends, and not at once


def run_case(case, folder):
    """Runs a case; what is left after :data:`LIMIT` is killed."""
    workers = CASES[case].workers
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(namespaces(workers)) if CASES[case].namespaces else None
        addresses = ([f"10.99.0.{number + 1}:2345" for number in range(workers)] if names else
                     [f"127.0.0.1:{port}" for port in machines_workers.ports(workers)])
        def start(index, life=1):
            child = os.fork()
            if not child:
                worker = Worker(case, index, addresses, folder)
                worker.life = life
                work(worker, names and names[index])
            return child

        children = {start(index): index for index in range(workers)
                    if index not in CASES[case].absent}
        statuses = machines_workers.wait_for(
            children, LIMIT, start_again=CASES[case].again and start)
    (folder / f"{case}.json").write_text(json.dumps(statuses))


def main(folder, *cases):
    for case in cases:
        print(f"--- {case}", flush=True)
        run_case(case, pathlib.Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
