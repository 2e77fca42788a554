"""``python -m towerstrategy check``: what it says of a machine is so, and its file says it all."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

import numpy as np
import pytest
from absl.testing import parameterized

import towerstrategy
import wide
from towerstrategy.extras.check import command, machine, same, speed
from towerstrategy.sharding import values

ROOT = pathlib.Path(__file__).parents[3]
# The command with all of its comparisons and ways to train, however busy the machine is.
COMMAND = """
import runpy
from towerstrategy.extras.check import command
command._LAST_START = float("inf")
runpy.run_module("towerstrategy", run_name="__main__", alter_sys=True)
"""
DEVICES = ["CPU:1", "CPU:2"]
SCHEMA = json.loads((ROOT / "docs" / "static" / "check.schema.json").read_text())
TYPES = {"string": [str], "integer": [int], "number": [int, float], "boolean": [bool],
         "null": [type(None)], "object": [dict], "array": [list]}
JOB = same.Job("keras", "convolutions", "cpu")


def result(way, step_ms, devices=4, rows=400):
    return speed.Result(way, devices, rows, step_ms)


class CommandTest(parameterized.TestCase):

    @pytest.mark.wide
    def test_whole(self):
        """Else the first thing that a user with a question is asked to run fails."""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "check.json"
            done = subprocess.run(
                [sys.executable, "-c", COMMAND, "check", "--towers=2", "--seconds=0.1",
                 f"--json={path}"], cwd=ROOT, capture_output=True,
                text=True, timeout=600)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr[-2000:])
            document = json.loads(path.read_text(), parse_constant=self.fail)
        self.assert_fits(document, SCHEMA, "document")
        self.assertEqual(document["schema"], command.SCHEMA)
        self.assertIs(document["passed"], True)
        self.assertEqual(document["towers"], DEVICES)
        facts = document["machine"]
        self.assertEqual(facts["towerstrategy"], towerstrategy.__version__)
        self.assertContainsSubset(["tensorflow", "keras"], facts["packages"])
        self.assertContainsSubset(
            ["python", "platform", "keras_of_tf", "built_with", "environment", "cores", "gpus",
             "driver", "topology", "peer_access"], facts)
        compared = [(each["job"]["keras"], each["job"]["network"]) for each in document["same"]]
        self.assertContainsSubset([("keras", "convolutions"), ("keras", "sequences"),
                                   ("keras", "halves"), ("tf_keras", "sequences")], compared)
        for each in document["same"]:
            self.assertCountEqual(
                each["differences"], ["weights", "optimizer", "losses", "predictions"])
            self.assertIs(each["holds"], True)
        for each in document["speed"]:
            self.assertIsNone(each["error"])
            self.assertGreater(each["step_ms"], 0)
            self.assertGreater(sum(each["state_bytes"].values()), 0)
        self.assertEqual(len(document["speed"]) + len(document["same"])
                         + len(document["left_out"]), 8 + 5)
        for said in (document["advice"], "largest difference", "merge device balanced"):
            self.assertIn(said, done.stdout)

    def assert_fits(self, value, schema, path):
        """Checks ``value`` against as much of JSON Schema as the file uses."""
        if "const" in schema:
            self.assertEqual(value, schema["const"], path)
            return
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        self.assertIn(type(value), [kind for name in kinds for kind in TYPES[name]], path)
        for number, item in enumerate(value if isinstance(value, list) else ()):
            self.assert_fits(item, schema["items"], f"{path}[{number}]")
        if isinstance(value, dict):
            known = schema.get("properties", {})
            self.assertContainsSubset(schema.get("required", ()), value, path)
            for name, item in value.items():
                more = known[name] if name in known else schema["additionalProperties"]
                self.assertTrue(more, f"{path} has {name}, which the schema does not know")
                self.assert_fits(item, more, f"{path}.{name}")

    def _status(self, *arguments):
        """The exit status of a check of one small training, which measures nothing."""
        with mock.patch.object(machine, "prepare", return_value=(DEVICES, True)), \
                mock.patch.object(same, "jobs", return_value=[JOB]), \
                mock.patch.object(speed, "ways", return_value=[]):
            return command.main(["check", *arguments])

    def test_a_difference_is_told(self):
        """Else a machine on which towers compute something else passes."""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "check.json"
            with mock.patch.object(values.Towers, "add_up", lambda towers, parts, *_: parts[0]):
                self.assertEqual(self._status("--json", str(path)), 1)
            document = json.loads(path.read_text())
        self.assertIs(document["passed"], False)
        self.assertIs(document["same"][0]["holds"], False)
        self.assertGreater(document["same"][0]["differences"]["weights"], same.BOUNDS["CPU"])

    @pytest.mark.wide
    def test_a_failing_training_is_told(self):
        """Else a machine on which towers cannot train passes, or the report is lost."""
        with mock.patch.object(values.Towers, "add_up", side_effect=RuntimeError("no kernel")), \
                tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "check.json"
            self.assertEqual(self._status("--json", str(path)), 1)
            document = json.loads(path.read_text())
        self.assert_fits(document, SCHEMA, "document")
        self.assertIn("no kernel", document["same"][0]["error"])

    def test_what_fails_on_one_device_says_nothing_of_towers(self):
        """Else TensorFlow's own fault on a machine is taken for one of its towers."""
        with mock.patch.object(same, "_alone", side_effect=RuntimeError("no kernel")):
            found = same.compare(JOB, DEVICES)
        self.assertIn("one device alone", command._outcome(found))
        good = same.Result(JOB, 1e-5, {"weights": 0.})
        self.assertTrue(command._verdict([good, found])[0])
        self.assertFalse(command._verdict([found])[0])

    def test_nothing_compared_is_no_success(self):
        """Else a machine too slow to compare anything passes."""
        with mock.patch.object(command, "_LAST_START", -1):
            self.assertEqual(self._status(), 1)

    def test_alone(self):
        """Else who types the package's name learns nothing."""
        with mock.patch("builtins.print") as printed, \
                mock.patch("argparse.ArgumentParser.print_help") as helped:
            self.assertEqual(command.main([]), 0)
        self.assertIn(towerstrategy.__version__, printed.call_args.args[0])
        helped.assert_called_once()

    def test_the_verdict_tells_halves_from_floats(self):
        """Else the last line says that weights in float32 differ by 2.6e-03."""
        def found(network, largest):
            return same.Result(same.Job("keras", network, "cpu"), 1., {"weights": largest})

        self.assertEndsWith(
            command._verdict([found("sequences", 1e-6), found(same.HALVES, 2e-3)])[1],
            "as on one device: 1.0e-06 at most, in mixed_float16 2.0e-03 at most.")
        self.assertEndsWith(command._verdict([found("sequences", 1e-6)])[1], "1.0e-06 at most.")

    @parameterized.parameters((["check", "--towers=0"], "at least 1"),
                              (["check", "--towers=3"], "split_cpu"),
                              (["check", "--json=/none/x.json"], "there is no folder '/none'"),
                              (["check", "--json=/tmp"], "'/tmp' is a folder"))
    def test_refused(self, arguments, said):
        """Else a wrong number of towers ends in a traceback, and a wrong file after two minutes."""
        with mock.patch("argparse.ArgumentParser.error", side_effect=SystemExit) as error, \
                self.assertRaises(SystemExit):
            command.main(arguments)
        self.assertIn(said, error.call_args.args[0])


class SameTest(parameterized.TestCase):

    @wide.parameters("convolutions", wide=[
        network for network in same.NETWORKS if network != "convolutions"])
    def test_networks(self, network):
        """Else the right result on a machine is said to be none."""
        self.assertTrue(same.compare(same.Job("keras", network, "balanced"), DEVICES).holds)

    @wide.parameters("convolutions", wide=[same.HALVES], rest=["sequences"])
    def test_a_fault_is_found(self, network):
        """Else a fault of one kind of layer, or of halves, is not seen on the machine that has it.
        """
        job = same.Job("keras", network, "balanced")
        with mock.patch.object(values.Towers, "add_up", lambda towers, parts, *_: parts[0]):
            self.assertGreater(same.compare(job, DEVICES).largest, 5 * same.HALF_BOUND)

    def test_differences(self):
        """Else a NaN, or an array that is missing, counts as the same."""
        wanted = [np.array([1., -4.])]
        self.assertEqual(same._difference([np.array([1., -4.])], wanted, 1e-6), 0)
        self.assertEqual(same._difference([np.array([2., -4.])], wanted, 1e-6), .25)
        self.assertEqual(same._difference([np.array([np.nan, -4.])], wanted, 1e-6), np.inf)
        self.assertEqual(same._difference([], wanted, 1e-6), np.inf)

    def test_a_nan_is_null_in_the_file(self):
        """Else the file is none that a JSON reader takes."""
        found = same.Result(JOB, 1e-5, {"weights": float("inf"), "losses": 0.}).as_dict()
        self.assertIsNone(found["differences"]["weights"])
        self.assertIs(found["holds"], False)
        json.dumps(found, allow_nan=False)


class AdviceTest(parameterized.TestCase):

    @parameterized.named_parameters(
        ("the fastest", {"cpu": 20., "balanced": 11.}, 'Use merge_device="balanced"', "3.64 times"),
        ("as fast, with less memory", {"cpu": 11.2, "balanced": 11.}, '"cpu"', "(89% of linear)"),
        ("do not pay", {"cpu": 50., "balanced": 40.}, '"balanced"', "do not pay"))
    def test_gpus(self, steps, merge_device, said):
        """Else a user is told to train on towers that slow the training down."""
        results = [result(speed.ONE_DEVICE, 10., 1, 100),
                   *(result(way, step) for way, step in steps.items())]
        told = speed.advice(results, one_physical=False, on_gpus=True)
        self.assertIn(merge_device, told)
        self.assertIn(said, told)

    def test_parts_of_one_device(self):
        """Else a machine without several GPUs is said to gain from towers."""
        results = [result(speed.ONE_DEVICE, 10., 1), result("cpu", 10.),
                   result(speed.MIRRORED, 20.)]
        told = speed.advice(results, one_physical=True, on_gpus=False)
        self.assertIn("nothing of several devices, as the towers are parts of one CPU", told)
        self.assertIn("MirroredStrategy 0.50 times", told)
        self.assertNotIn("the gain", told)

    def test_the_verdict_is_what_was_measured(self):
        """Else the last line says that towers cannot pay, and that they trained 1.30 times as
        fast."""
        told = speed.advice([result(speed.ONE_DEVICE, 13., 1), result("cpu", 10.)], True, False)
        self.assertRegex(told, "1.30 times the rows a second.*not from a second one")
        self.assertNotRegex(told, "cannot pay|do not pay")

    def test_xla(self):
        """Else towers are compared with a device that XLA helps and they are not, without a word;
        or what was measured without XLA is taken for a merge device."""
        self.assertEqual([way for way in speed.ways(["GPU:0", "GPU:1"]) if "XLA" in way],
                         ["one device, no XLA", "balanced, no XLA"])
        self.assertFalse([way for way in speed.ways(DEVICES) if "XLA" in way])
        results = [dataclasses.replace(result(speed.ONE_DEVICE, 10., 1, 100), xla=True),
                   result("balanced", 12.), result("balanced" + speed.NO_XLA, 11.)]
        told = speed.advice(results, one_physical=False, on_gpus=True)
        self.assertIn('merge_device="balanced": the towers pay', told)
        self.assertIn("of one device with XLA", told)

    def test_what_failed_is_not_advised(self):
        """Else a merge device that does not work is advised."""
        failed = speed.Result("cpu", 4, 400, error="OutOfMemory")
        self.assertIn("Nothing was measured", speed.advice([failed], False, True))
        good = result("balanced", 11.)
        self.assertIn('"balanced"', speed.advice([failed, good], False, True))


class SpeedTest(parameterized.TestCase):

    def test_an_error_is_a_result(self):
        """Else one way to train that fails takes the other ways' figures with it."""
        with mock.patch.object(speed, "_network", side_effect=MemoryError("full")):
            found = speed.measure("cpu", DEVICES, True, 0.1)
        self.assertEqual(found.error, "MemoryError: full")

    @pytest.mark.wide
    def test_copies_of_mirrored_are_counted(self):
        """Else the memory of MirroredStrategy looks like that of one copy."""
        found = {way: speed.measure(way, DEVICES, True, 0.01)
                 for way in (speed.MIRRORED, "balanced")}
        mirrored, towers = (found[way].state_bytes for way in (speed.MIRRORED, "balanced"))
        self.assertEqual(mirrored["CPU:1"], mirrored["CPU:2"])
        self.assertEqual(sum(towers.values()), mirrored["CPU:1"])
