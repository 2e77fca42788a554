"""Rounds of: train, ``kill -9`` at a random moment, train on.  Prints what came of each.

    python kill_rounds.py fit|loop keras|tf_keras ROUNDS SEED

Goes in: how a run trains: ``fit`` with ``BackupAndRestore``, or a ``loop`` with a
``CheckpointManager`` that saves model, optimizer and iterator every few steps.  Comes out: a line
of JSON a round: when it was killed, of how long an uninterrupted run, how far the newest checkpoint
was, which of its files cannot be read, and whether the run that went on ended with the
uninterrupted run's weights, bit for bit.

Each run is a process of its own, forked from this one, which has imported everything and has not
started TensorFlow: that takes seconds, training a fraction of one.
"""

import importlib
import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
import traceback

import h5py
import numpy as np
import tensorflow as tf

import towerstrategy

EPOCHS = 30
ROWS, BATCH = 13, 4  # the last batch of an epoch has one row, for two towers
SAVE_EVERY = 3  # steps of a loop


def data():
    random_state = np.random.RandomState(0)
    x = random_state.rand(ROWS, 3).astype("f")
    return x, x.sum(1, keepdims=True)


def model_of(kit):
    def dense(units, activation=None):
        return kit.layers.Dense(units, activation,
                                kernel_initializer=kit.initializers.GlorotUniform(seed=units))

    return kit.Sequential([kit.Input([3]), dense(8, "tanh"), dense(1)])


def fit(kit, strategy, folder, begin):
    """``fit``, from where the backup in ``folder`` has got to."""
    with strategy.scope():
        model = model_of(kit)
        model.compile(kit.optimizers.Adam(0.01), "mse")
    callbacks = [kit.callbacks.BackupAndRestore(str(folder)),
                 kit.callbacks.LambdaCallback(on_train_begin=lambda logs: begin())]
    model.fit(*data(), batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0,
              callbacks=callbacks)
    return model.get_weights()


def loop(kit, strategy, folder, begin):
    """A loop of one's own, from where the newest checkpoint in ``folder`` has got to."""
    dataset = tf.data.Dataset.from_tensor_slices(data()).batch(BATCH).repeat(EPOCHS)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    with strategy.scope():
        model, optimizer = model_of(kit), kit.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        done = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, iterator=iterator, done=done)
    manager = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=2)
    manager.restore_or_initialize()

    @tf.function
    def step(x, y):
        def replica(x, y):
            with tf.GradientTape() as tape:
                loss = tf.nn.compute_average_loss(
                    tf.reduce_mean(tf.square(model(x, training=True) - y), 1),
                    global_batch_size=tf.shape(x)[0] * strategy.num_replicas_in_sync)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        strategy.run(replica, (x, y))

    begin()
    for x, y in iterator:
        step(x, y)
        done.assign_add(1)
        if int(done) % SAVE_EVERY == 0:
            manager.save()
    return model.get_weights()


def run(train, kit, folder, result, started):
    """The whole life of one process: trains, and leaves the weights in ``result``."""
    strategy = towerstrategy.TowerStrategy(towerstrategy.split_cpu(3)[1:], "CPU:0")
    weights = train(kit, strategy, folder, lambda: os.write(started, b"."))
    with open(result, "wb") as file:
        np.savez(file, *weights)


def start(*arguments):
    """Runs :func:`run` in a new process; returns its id once training has begun."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(reader)
            run(*arguments, writer)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writer)
    os.read(reader, 1)  # empty if it ended before
    os.close(reader)
    return process


def finish(process):
    """Waits for a process; whether it ended well."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def weights_in(result):
    with np.load(result) as arrays:
        return [arrays[name] for name in arrays.files]


def unreadable(folder):
    """The newest checkpoint's files that cannot be read, or their error."""
    found = []
    for path in sorted(folder.rglob("latest.weights.h5")):
        try:
            with h5py.File(path) as file:
                file.visititems(lambda _, item: item[()] if hasattr(item, "shape") else None)
        except OSError as error:
            found.append(f"{path.name}: {error}")
    for path in sorted(folder.rglob("training_metadata.json")):
        try:
            json.loads(path.read_text())
        except ValueError as error:
            found.append(f"{path.name}: {error}")
    for path in (folder, folder / "chief"):
        newest = tf.train.latest_checkpoint(str(path)) if path.exists() else None
        if newest:
            try:
                reader = tf.train.load_checkpoint(newest)
                for name, dtype in reader.get_variable_to_dtype_map().items():
                    if dtype != tf.variant:  # an iterator's state; restoring it reads it
                        reader.get_tensor(name)
            except Exception as error:
                found.append(f"{newest}: {error}")
    return found


def round_of(train, kit, seconds, wanted, chance, folder):
    """One round; the report that is printed."""
    killed_at = chance.uniform(0, seconds)
    process = start(train, kit, folder / "backup", folder / "killed.npz")
    time.sleep(killed_at)
    os.kill(process, signal.SIGKILL)
    report = {"killed_at": round(killed_at, 3), "of": round(seconds, 3),
              "had_ended": finish(process)}
    broken = unreadable_elsewhere(folder / "backup")
    ended = finish(start(train, kit, folder / "backup", folder / "resumed.npz"))
    equal = ended and all(np.array_equal(one, other) for one, other
                          in zip(weights_in(folder / "resumed.npz"), wanted, strict=True))
    return {**report, "unreadable": broken, "resumed": ended, "equal": equal}


def unreadable_elsewhere(folder):
    """:func:`unreadable`, in a process of its own: this one must not start TensorFlow."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.write(writer, json.dumps(unreadable(folder)).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        found = json.loads(pipe.read())
    finish(process)
    return found


def main(train, kit, rounds, seed):
    train, kit = {"fit": fit, "loop": loop}[train], importlib.import_module(kit)
    chance = random.Random(int(seed))
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        process = start(train, kit, folder / "backup", folder / "whole.npz")
        begun = time.monotonic()
        if not finish(process):
            sys.exit("the uninterrupted run failed")
        seconds = time.monotonic() - begun
        wanted = weights_in(folder / "whole.npz")
        for number in range(int(rounds)):
            place = folder / str(number)
            place.mkdir()
            print(json.dumps(round_of(train, kit, seconds, wanted, chance, place)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
