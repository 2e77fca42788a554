"""One long run in a process of its own; prints what it held at each epoch's end.

    python long_run.py fit|loop|eager|strategies keras|tf_keras TIMES

Goes in: a kind of run and how long: ``fit`` (TIMES steps, with validation), ``loop`` (TIMES steps
of a ``tf.function`` around ``strategy.run``, evaluation between epochs), ``eager`` (TIMES calls of
``strategy.run`` outside of functions), ``strategies`` (TIMES strategies made, used and dropped, a
model with each).  Comes out: a line of JSON an epoch: steps, KiB of memory, threads, open files,
TensorFlow's graph functions, the graphs that Python holds, traces of the model, strategies that are
still there, and Python objects.
"""

import functools
import gc
import importlib
import json
import os
import sys
import weakref

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework.func_graph import FuncGraph

import towerstrategy

EPOCHS = 20
BATCH = 8
traces = []
living = weakref.WeakSet()


def memory():
    """KiB of memory of this process's own, swapped out or not; not files that it maps."""
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap"))


def report(steps):
    gc.collect()
    found = gc.get_objects()
    print(json.dumps({
        "steps": steps, "memory": memory(), "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "functions": len(context.context().list_function_names()),
        "graphs": sum(isinstance(part, FuncGraph) for part in found), "traces": len(traces),
        "strategies": len(living), "objects": len(found)}), flush=True)


def strategy_of():
    strategy = towerstrategy.TowerStrategy(["CPU:1", "CPU:2"], "CPU:0")
    living.add(strategy)
    return strategy


@functools.cache
def counting_layer(kit):
    class Counting(kit.layers.Layer):
        """Counts how often the model is traced."""

        def call(self, x):
            traces.append(1)
            return x

    return Counting


def model_of(kit):
    return kit.Sequential([kit.Input([4]), kit.layers.Dense(8, "relu"), counting_layer(kit)(),
                           kit.layers.Dense(1)])


def data(steps):
    """Rows for ``steps`` steps; the last one has a single row, for two towers."""
    x = np.random.RandomState(0).rand((steps - 1) * BATCH + 1, 4).astype("f")
    return x, x.sum(1, keepdims=True)


def fit(kit, times):
    steps = times // EPOCHS
    with strategy_of().scope():
        model = model_of(kit)
        model.compile("adam", "mse", metrics=["mae"])
    after = kit.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: report((epoch + 1) * steps))
    model.fit(*data(steps), batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[after],
              validation_data=data(5), validation_batch_size=BATCH)


def loop(kit, times):
    steps, strategy = times // EPOCHS, strategy_of()
    with strategy.scope():
        model, optimizer = model_of(kit), kit.optimizers.Adam()
        metric = kit.metrics.Mean()
    train, test = (
        strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices(data(count)).batch(BATCH)) for count in (steps, 5))

    def loss_of(x, y):
        return tf.reduce_sum(tf.square(model(x, training=True) - y)) / BATCH

    @tf.function
    def train_step(x, y):
        def replica(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(x, y)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            metric.update_state(loss)
            return loss

        return strategy.reduce("SUM", strategy.run(replica, (x, y)), axis=None)

    @tf.function
    def test_step(x, y):
        return strategy.reduce("SUM", strategy.run(loss_of, (x, y)), axis=None)

    for epoch in range(EPOCHS):
        for x, y in train:
            train_step(x, y)
        for x, y in test:
            test_step(x, y)
        metric.result()
        metric.reset_state()
        report((epoch + 1) * steps)


def eager(kit, times):
    steps, strategy = times // EPOCHS, strategy_of()
    with strategy.scope():
        total = tf.Variable(0., aggregation=tf.VariableAggregation.SUM)
    for epoch in range(EPOCHS):
        for step in range(steps):
            rows = strategy.split(tf.ones([1 + step % BATCH]))
            seen = strategy.run(lambda x: total.assign_add(tf.reduce_sum(x)), (rows,))
            strategy.reduce("MEAN", seen, axis=None)
        report((epoch + 1) * steps)


def strategies(kit, times):
    x, y = data(2)

    def use():
        strategy = strategy_of()
        with strategy.scope():
            model = model_of(kit)
            model.compile("adam", "mse", metrics=["mae"])
        model.fit(x, y, batch_size=BATCH, verbose=0)

        @tf.function
        def predict(batch):
            return strategy.run(model, (batch,))

        for batch in strategy.experimental_distribute_dataset(
                tf.data.Dataset.from_tensor_slices(x).batch(BATCH)):
            predict(batch)
        strategy.run(tf.function(lambda: tf.reduce_sum(x)))
        strategy.run(lambda: tf.reduce_sum(x))

    for number in range(times):
        use()
        kit.backend.clear_session()
        if (number + 1) % max(times // EPOCHS, 1) == 0:
            report(number + 1)


if __name__ == "__main__":
    towerstrategy.split_cpu(3)
    kind, kit_name, how_often = sys.argv[1:]
    {"fit": fit, "loop": loop, "eager": eager, "strategies": strategies}[kind](
        importlib.import_module(kit_name), int(how_often))
