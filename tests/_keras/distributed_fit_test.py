"""Keras on datasets that the user has distributed: trains as one device on the same batches."""

import contextlib
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy
import wide

TOWERS, ROWS = 3, 20
PER_REPLICA = tf.distribute.InputOptions(
    experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA)


def arrays():
    random = np.random.default_rng(3)
    return random.normal(size=[ROWS, 4, 3]).astype("float32"), random.integers(0, 2, ROWS)


def cut(rows, size):
    return [rows[start:start + size] for start in range(0, len(rows), size)]


# What one device takes for a batch, rows by number: of the last, towers 1 and 2 (and of "pipelines"
# tower 2 once more) have none.
BATCHES = {
    "global": lambda endless: (itertools.cycle if endless else iter)(cut(range(17), 8)),
    "towers": lambda endless: _joined(
        (itertools.cycle if endless else iter)(cut(range(ROWS), 3))),
    "pipelines": lambda endless: map(_flat, itertools.zip_longest(*(
        (itertools.cycle if endless else iter)(cut(rows, 3))
        for rows in PIPELINES), fillvalue=())),
}
PIPELINES = (range(7), range(7, 14), range(14, 17))


def _flat(parts):
    return [row for part in parts for row in part]


def _joined(parts):
    while group := list(itertools.islice(parts, TOWERS)):
        yield _flat(group)


def on_one_device(kind, endless):
    x, y = arrays()
    signature = tuple(tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in (x, y))
    return tf.data.Dataset.from_generator(
        lambda: ((x[list(rows)], y[list(rows)]) for rows in BATCHES[kind](endless)),
        output_signature=signature)


def distributed(strategy, kind, endless):
    x, y = arrays()

    def batches(rows, size):
        rows = list(rows)
        made = tf.data.Dataset.from_tensor_slices((x[rows], y[rows])).batch(size)
        return made.repeat() if endless else made

    if kind == "global":
        return strategy.experimental_distribute_dataset(batches(range(17), 8))
    if kind == "towers":
        return strategy.distribute_datasets_from_function(lambda _: batches(range(ROWS), 3))
    return strategy.distribute_datasets_from_function(
        lambda context: batches(PIPELINES[context.input_pipeline_id], 3), PER_REPLICA)


def trained(module, strategy, data, endless, **fit):
    """What a training leaves behind, on the datasets that ``data(endless)`` makes."""
    module.utils.set_random_seed(5)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = module.Sequential([
            module.layers.Conv1D(3, 2, activation="tanh"), module.layers.Flatten(),
            module.layers.Dense(2, "softmax")])
        model.build([None, 4, 3])
        model.compile(module.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy",
                      metrics=["accuracy"])
    begun = model.get_weights()
    steps, fit = {}, {"epochs": 2, **fit}
    if endless:
        steps = {"steps": 2}
        fit = {"steps_per_epoch": 3, "validation_steps": 2, **fit}
    elif module is tf_keras:  # which wants steps here, and takes them of one iterator
        steps = {"steps": 3}
        fit = {**fit, "steps_per_epoch": 3, "validation_steps": 3, "epochs": 1}
    history = model.fit(data(endless), validation_data=data(endless), verbose=0, **fit)
    return {"moved": np.abs(begun[0] - model.get_weights()[0]).max() > 1e-3,
            "logs": history.history, "weights": model.get_weights(),
            "evaluate": model.evaluate(data(endless), return_dict=True, verbose=0, **steps),
            "predict": model.predict(data(endless), verbose=0, **steps)}


class DistributedFitTest(parameterized.TestCase):

    def check(self, module, kind, endless=False, towers=TOWERS, **fit):
        strategy = towerstrategy.TowerStrategy(towers)
        got = trained(module, strategy, lambda endless: distributed(strategy, kind, endless),
                      endless, **fit)
        wanted = trained(module, None, lambda endless: on_one_device(kind, endless), endless,
                         **fit)
        self.assertTrue(wanted["moved"])
        tf.nest.assert_same_structure(got, wanted)
        tf.nest.map_structure(lambda *both: np.testing.assert_allclose(*both, 1e-5, 1e-6), got,
                              wanted)

    @wide.parameters((tf_keras, "global"), wide=[
        (keras, "pipelines"), (keras, "global"), (tf_keras, "towers")], rest=[
        (keras, "towers"), (tf_keras, "pipelines")])
    def test_rows_that_run_out(self, module, kind):
        """Else a user who distributes data by hand cannot call fit, or a small batch fails."""
        self.check(module, kind)

    @wide.product(1, 1, module=(keras, tf_keras), kind=tuple(BATCHES))
    @pytest.mark.wide
    def test_endless_with_class_weights(self, module, kind):
        """Else a dataset that repeats ends in an error, begins again each epoch, or has no classes.

        Of a validation dataset tf_keras asks whether it is true, and of any its class weights' map.
        """
        self.check(module, kind, endless=True, steps_per_epoch=2, class_weight={0: 0.5, 1: 2.})

    def test_without_batches(self):
        """Else a forgotten batch() ends in an error about axes."""
        strategy = towerstrategy.TowerStrategy(TOWERS)
        with strategy.scope():
            model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        rows = tf.data.Dataset.from_tensor_slices((np.ones([6, 3]), np.ones([6])))
        with self.assertRaisesRegex(ValueError, "a number, float64, where its rows"):
            model.fit(strategy.distribute_datasets_from_function(lambda _: rows), verbose=0)

    @parameterized.parameters("fit", "evaluate", "predict")
    def test_model_that_is_on_no_towers(self, method):
        """Else who forgets the scope reads of unknown data types, in place of what to do."""
        strategy = towerstrategy.TowerStrategy(TOWERS)
        model = keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        rows = tf.data.Dataset.from_tensor_slices((np.ones([6, 3]), np.ones([6]))).batch(4)
        with self.assertRaisesRegex(ValueError, "inside of the scope.*strategy.adopt"):
            getattr(model, method)(strategy.experimental_distribute_dataset(rows), verbose=0)

    @parameterized.parameters(None, 20)
    def test_threads_that_end_with_an_epoch(self, batches):
        """Else the second epoch of a PyDataset with workers, of which an epoch takes some steps,
        ends in Keras' error about an iterator that is called between two epochs."""
        class Rows(keras.utils.PyDataset):
            num_batches = batches

            def __len__(self):
                return batches

            def __getitem__(self, index):
                return np.ones([5, 4]), np.zeros([5, 3])

        with towerstrategy.TowerStrategy(TOWERS).scope():
            model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
            model.compile("sgd", "mse")
        data = Rows(workers=2)
        self.assertLen(model.fit(data, steps_per_epoch=5, epochs=3, verbose=0).epoch, 3)

    @pytest.mark.wide
    def test_one_tower(self):
        """Else a program for several devices fails on a machine with one."""
        self.check(keras, "global", towers=1, class_weight={0: 0.5, 1: 2.})
