"""The examples in the docstrings run, and everything public has one."""

import functools
import importlib
import inspect
import json
import os
import pathlib
import subprocess
import sys

import doctests
import pytest
from absl.testing import absltest, parameterized

import towerstrategy

HERE = pathlib.Path(__file__).parent


@functools.cache
def outcome() -> subprocess.CompletedProcess[str]:
    """What ``doctests.py`` prints; its process has as many devices as the examples show."""
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    return subprocess.run([sys.executable, str(HERE / "doctests.py")], capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": path}, check=False)


class DoctestTest(parameterized.TestCase):

    @parameterized.parameters(doctests.modules())
    @pytest.mark.wide
    def test_examples_give_what_they_show(self, module):
        """Else a newcomer who types a docstring's example in gets something else."""
        done = outcome()
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        _, failed = json.loads(done.stdout.splitlines()[-1])[module]
        self.assertEqual(failed, 0, done.stdout)

    @parameterized.parameters("towerstrategy.placement.devices", "towerstrategy.batch.rows",
                              "towerstrategy.strategy", "towerstrategy.multi_gpu")
    @pytest.mark.wide
    def test_examples_are_found(self, module):
        """Else the test above passes because it runs nothing."""
        attempted, _ = json.loads(outcome().stdout.splitlines()[-1])[module]
        self.assertGreater(attempted, 0)

    def test_everything_public_has_an_example(self):
        """Else a public name comes without a line to try it with."""
        strategy = towerstrategy.TowerStrategy
        own = [value for name, value in vars(strategy).items()
               if inspect.isfunction(value) and not name.startswith("_")]
        named = [getattr(towerstrategy, name) for name in towerstrategy.__all__]
        named.append(towerstrategy.report.TowerReport)
        for thing in [*own, *filter(callable, named)]:
            self.assertIn(">>>", inspect.getdoc(thing) or "", thing)

    @parameterized.parameters(doctests.modules())
    def test_public_functions_are_typed(self, module):
        """Else a type checker, told by py.typed to believe us, finds nothing to check."""
        module = importlib.import_module(module)
        things = [value for name, value in vars(module).items() if not name.startswith("_")]
        classes = [thing for thing in things if inspect.isclass(thing)]
        members = [part for cls in classes for part in vars(cls).values()]
        for function in filter(inspect.isfunction, [*things, *members]):
            if function.__code__.co_filename == module.__file__:  # neither imported nor generated
                wanted = set(inspect.signature(function).parameters) - {"self"} | {"return"}
                self.assertEqual(wanted, set(inspect.get_annotations(function)), function)


if __name__ == "__main__":
    absltest.main()
