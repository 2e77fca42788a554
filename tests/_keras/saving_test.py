"""What is saved under the strategy is what a single-device model would have saved.

All files are made first, then loaded in one fresh process that has plain Keras only.
"""

import json
import os
import subprocess
import sys
import tempfile
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import small_models
import wide
from towerstrategy import TowerStrategy, multi_gpu_model

TOWERS = ["CPU:1", "CPU:2"]
# For each kind of model, which of them is saved: what multi_gpu_model returned, what it was given,
# or one that was adopted.
CASES = [(kit, kind, who) for kit in ("keras", "tf_keras") for kind, whose in (
    ("functional", ("parallel", "template", "adopted")), ("unbuilt_sequential", ("template",)),
    ("subclassed", ("parallel",)), ("dicts", ("parallel",))) for who in whose]

# Loads every file of the list that it is given; prints a complaint for each that differs.
LOADER = textwrap.dedent("""
    import json, sys
    import keras, numpy as np, tensorflow as tf, tf_keras
    import small_models

    def names(model):
        return [layer.name for layer in model.layers]

    for case in json.load(open(sys.argv[1])):
        kit = {"keras": keras, "tf_keras": tf_keras}[case["kit"]]
        x, _ = small_models.data(case["kind"])
        objects = {"Subclassed": small_models.subclass_of(kit),
                   "small_models>Subclassed": small_models.subclass_of(kit)}
        expected, path, how = np.load(case["expected"]), case["path"], case["how"]
        try:
            if how == "model":
                model = kit.models.load_model(path, custom_objects=objects)
            elif how == "served":
                loaded = tf.saved_model.load(path)
                serve = getattr(loaded, "serve", None) or loaded.signatures["serving_default"]
                # tf_keras serves a list of inputs whatever the model takes.
                flat = kit is tf_keras and case["kind"] == "dicts"
                model = lambda x: serve(tf.nest.flatten(x) if flat else x)
            else:
                model = small_models.make(kit, case["kind"])
                model(x)
                if how == "weights":
                    model.load_weights(path)
                else:
                    tf.train.Checkpoint(model=model).restore(path).expect_partial()
            got = model(tf.nest.map_structure(tf.constant, x))
            got = np.concatenate([np.array(part) for part in tf.nest.flatten(got)], -1)
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
            if how != "served" and names(model) != case["layers"]:
                print(case, "has layers", names(model))
        except Exception as error:
            print(case, "failed:", type(error), str(error)[:2000])
    assert not any(name.split(".")[0] == "towerstrategy" for name in sys.modules)
    print("all loaded")
""")


def environment():
    """This process', with the tests' folder on the path and the package's off it."""
    tests = os.path.dirname(os.path.abspath(small_models.__file__))
    return {**os.environ, "PYTHONPATH": tests, "CUDA_VISIBLE_DEVICES": "-1",
            "TF_CPP_MIN_LOG_LEVEL": "3"}


def fit(model, kind, **kwargs):
    x, y = small_models.data(kind)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0, **kwargs)


class SavingTest(parameterized.TestCase):

    @pytest.mark.wide
    def test_files_load_in_plain_keras(self):
        """Lost otherwise: deployment, and everybody who has not got this package."""
        folder = self.enter_context(tempfile.TemporaryDirectory())
        cases = []
        for kit_name, kind, who in CASES:
            path = f"{folder}/{kit_name}_{kind}_{who}"
            cases += self._save_all(path, kit_name, dict(small_models.KERAS)[kit_name], kind, who)
        self.assertGreater(len(cases), 6 * len(CASES))
        with open(f"{folder}/cases.json", "w") as file:
            json.dump(cases, file)
        done = subprocess.run([sys.executable, "-c", LOADER, f"{folder}/cases.json"], cwd=folder,
                              env=environment(), capture_output=True, text=True, timeout=600)
        self.assertEqual(done.stdout.strip(), "all loaded", done.stderr[-2000:])
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])

    def _save_all(self, path, kit_name, kit, kind, who):
        """Trains one model and saves it in every way."""
        template = small_models.make(kit, kind)
        if who == "adopted":
            trained = saved = template
            with TowerStrategy(TOWERS).scope():
                template.compile("adam", kit.losses.MeanSquaredError())
        else:
            trained = multi_gpu_model(template, TOWERS)
            saved = trained if who == "parallel" else template
            trained.compile("adam", kit.losses.MeanSquaredError())
        callbacks = [] if who == "template" else [
            kit.callbacks.ModelCheckpoint(f"{path}_callback.keras"),
            kit.callbacks.ModelCheckpoint(f"{path}_callback.weights.h5", save_weights_only=True)]
        fit(trained, kind, callbacks=callbacks)
        x, _ = small_models.data(kind)
        outputs = tf.nest.flatten(saved(tf.nest.map_structure(tf.constant, x)))
        np.save(f"{path}.npy", np.concatenate([np.array(output) for output in outputs], -1))
        files = {f"{path}.keras": "model", f"{path}.weights.h5": "weights",
                 f"{path}_export": "served"}
        saved.save(f"{path}.keras")
        saved.save_weights(f"{path}.weights.h5")
        saved.export(f"{path}_export", **({"verbose": False} if kit is keras else {}))
        files[tf.train.Checkpoint(model=saved).save(f"{path}_checkpoint")] = "checkpoint"
        if kind != "subclassed":
            saved.save(f"{path}.h5")
            files[f"{path}.h5"] = "model"
        if kit is tf_keras:
            saved.save(f"{path}_savedmodel", save_format="tf")
            files[f"{path}_savedmodel"] = "model"
        if callbacks:
            files[f"{path}_callback.keras"] = "model"
            files[f"{path}_callback.weights.h5"] = "weights"
        layers = [layer.name for layer in small_models.make(kit, kind).layers]
        return [{"kit": kit_name, "kind": kind, "path": file, "how": how, "layers": layers,
                 "expected": f"{path}.npy"} for file, how in files.items()]

    @wide.parameters(wide=[(keras, "functional"), (tf_keras, "functional"), (keras, "subclassed")])
    def test_no_nesting_over_rounds(self, kit, kind):
        """Lost otherwise: a model that grows by a layer of wrapping with each save and load."""
        folder = self.enter_context(tempfile.TemporaryDirectory())
        model = small_models.make(kit, kind)
        layers = [layer.name for layer in model.layers]
        sizes = []
        for number in range(5):
            parallel = multi_gpu_model(model, TOWERS)
            parallel.compile("sgd", "mse")
            fit(parallel, kind)
            path = f"{folder}/{number}.keras"
            parallel.save(path)
            sizes.append(os.path.getsize(path))
            model = kit.models.load_model(
                path, custom_objects={"Subclassed": small_models.subclass_of(kit)})
            self.assertEqual([layer.name for layer in model.layers], layers)
        self.assertLess(max(sizes) - min(sizes), 64, sizes)

    @parameterized.named_parameters(*small_models.KERAS)
    def test_pickled(self, kit):
        """Lost otherwise: copy.deepcopy and pickle, as scikit-learn does them."""
        import pickle

        parallel = multi_gpu_model(small_models.make(kit, "functional"), TOWERS)
        parallel.compile("sgd", "mse")
        copied = pickle.loads(pickle.dumps(parallel))
        x, _ = small_models.data("functional")
        np.testing.assert_allclose(copied(x), parallel(x), rtol=1e-6)
