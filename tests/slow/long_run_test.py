"""Long runs, each in a process of its own: what they hold stays as it was after the warm-up.

``python long_run.py`` prints the figures of one run; here they are printed as a table.
"""

import json
import pathlib
import subprocess
import sys

from absl.testing import parameterized

SCRIPT = pathlib.Path(__file__).with_name("long_run.py")
SECONDS = 1800
COLUMNS = ("steps", "memory", "threads", "files", "functions", "graphs", "traces", "strategies",
           "objects")

# A page of allocator noise a step would be 80 MB; an object leaked a step, 1 MB and more.
MOST_GROWTH = 4096  # KiB from a quarter of the run to its end


def run(kind, library, times):
    """What the run printed, an epoch a dictionary."""
    done = subprocess.run([sys.executable, str(SCRIPT), kind, library, str(times)],
                          capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        raise AssertionError(f"{kind} with {library} failed:\n{done.stderr[-5000:]}")
    epochs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print(f"\n{kind}, {library}")
    print("".join(f"{name:>11}" for name in COLUMNS))
    for epoch in epochs:
        print("".join(f"{epoch[name]:>11}" for name in COLUMNS))
    return epochs


class LongRunTest(parameterized.TestCase):

    def check_flat(self, epochs, names):
        """Nothing grows after the first quarter of the run, and memory but for noise."""
        warm, last = epochs[len(epochs) // 4], epochs[-1]
        self.assertEqual({name: last[name] for name in names}, {name: warm[name] for name in names})
        self.assertLessEqual(last["memory"] - warm["memory"], MOST_GROWTH)

    @parameterized.parameters(("fit", "keras"), ("fit", "tf_keras"), ("loop", "keras"),
                              ("loop", "tf_keras"))
    def test_20000_steps(self, kind, library):
        """Else a training of days ends when the memory does, or traces in each epoch."""
        epochs = run(kind, library, 20_000)
        self.assertEqual(epochs[-1]["steps"], 20_000)
        self.check_flat(epochs, ("threads", "files", "functions", "graphs", "traces"))
        self.assertEqual({epoch["traces"] for epoch in epochs}, {epochs[0]["traces"]})

    def test_calls_in_eager_code(self):
        """Else each call leaves a thread, or what it held."""
        self.check_flat(run("eager", "keras", 4_000), ("threads", "files", "functions", "graphs"))

    @parameterized.parameters("keras", "tf_keras")
    def test_100_strategies(self, library):
        """Else a search over settings fills the memory, a model at a time."""
        epochs = run("strategies", library, 100)
        self.assertEqual([epoch["strategies"] for epoch in epochs], [0] * len(epochs))
        self.check_flat(epochs, ("threads", "files", "functions", "graphs"))
