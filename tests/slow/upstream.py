"""TensorFlow's own tests of ``tf.distribute``, with TowerStrategy in MirroredStrategy's place.

Goes in: a test file of TensorFlow's sources; the names of tests in it on the standard input, none
for all.  A test's name stands for all its parameters; those of other strategies and of graph mode
are left out.  Comes out: a line of JSON with each test's outcome.  ``--peer`` runs them with
MirroredStrategy on the same CPU devices.

    python tests/slow/upstream.py --record ~/tensorflow tensorflow/python/distribute/vars_test.py

adds to ``upstream.txt`` the tests of a file that pass with both strategies, and prints those that
pass with MirroredStrategy alone.
"""

import importlib.util
import json
import pathlib
import subprocess
import sys
import unittest

LIST = pathlib.Path(__file__).with_suffix(".txt")
SECONDS = 3600
CPUS = 4
PASSES = ("ok", "skipped")


def outcomes(path, names=(), *flags):
    """What became of each test of a file, run in a process of its own."""
    done = subprocess.run([sys.executable, __file__, *flags, str(path)], input="\n".join(names),
                          capture_output=True, text=True, timeout=SECONDS, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not found:
        raise RuntimeError(f"{path} ended without a result:\n{done.stderr[-3000:]}")
    return json.loads(found[-1])


def recorded():
    """For each file, by its path in TensorFlow's sources, the tests that are to pass."""
    files = {}
    for line in LIST.read_text().splitlines():
        file, name = line.split()
        files.setdefault(file, []).append(name)
    return files


def record(folder, files):
    lines = set(LIST.read_text().splitlines()) if LIST.exists() else set()
    for file in files:
        path = pathlib.Path(folder, file).expanduser()
        peer, ours = outcomes(path, (), "--peer"), outcomes(path)
        failing = {plain(name) for name, outcome in ours.items() if outcome not in PASSES}
        for name in (name for name, outcome in peer.items() if outcome == "ok"):
            if ours[name] == "ok":
                lines.add(f"{file} {name if plain(name) in failing else plain(name)}")
            else:
                print(f"{file} {name}\n    {ours[name]}")
    LIST.write_text("".join(f"{line}\n" for line in sorted(lines)))


def plain(name):
    """The name of a test without its parameters."""
    return name.partition("_test_")[0]


def put_in_place(peer):
    """Has one strategy made wherever TensorFlow's tests make a MirroredStrategy, on CPU devices.

    Returns the names of the distributions, part of their tests' names, that are another strategy.
    """
    import towerstrategy

    towerstrategy.split_cpu(CPUS)
    from tensorflow.python.distribute import combinations, mirrored_strategy, strategy_combinations

    make = (strategy_combinations._mirrored_strategy_with_collective_key_base if peer
            else towerstrategy.TowerStrategy)
    strategy_combinations._mirrored_strategy_with_collective_key_base = lambda devices: make(
        [f"CPU:{number}" for number, _ in enumerate(devices, start=1)])
    if not peer:
        mirrored_strategy.MirroredStrategy = make
    others = []
    for variable, distribution in vars(strategy_combinations).items():
        if not isinstance(distribution, combinations.NamedDistribution):
            continue
        if variable.startswith("mirrored_strategy") and not distribution.required_physical_gpus:
            distribution.required_gpus = None
        else:
            others.append(f"_{distribution}_")
    return others


class Outcomes(unittest.TestResult):
    """Each test's outcome by its name: "ok", "skipped" or what failed."""

    def __init__(self):
        super().__init__()
        self.by_name = {}

    def stopTest(self, test):
        super().stopTest(test)
        self.by_name.setdefault(name_of(test), "ok")

    def addSkip(self, test, reason):
        del reason
        self.by_name[name_of(test)] = "skipped"

    def addFailure(self, test, error):
        self.by_name[name_of(test)] = f"{error[0].__name__}: {str(error[1])[-500:]}"

    addError = addFailure

    def addSubTest(self, test, _, error):
        if error is not None:
            self.addFailure(test, error)


def name_of(test):
    return ".".join(test.id().split(".")[-2:])


def run(path, names, peer):
    """Runs tests of a file in this process and prints their outcomes."""
    from absl import flags

    left_out = ["_mode_graph_", *put_in_place(peer)]
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    flags.FLAGS(sys.argv[:1])
    result, left = Outcomes(), [unittest.defaultTestLoader.loadTestsFromModule(module)]
    while left:
        test = left.pop()
        if isinstance(test, unittest.TestSuite):
            left += test
        elif not any(part in f"{name_of(test)}_" for part in left_out) and (
                not names or {name_of(test), plain(name_of(test))} & set(names)):
            test.run(result)
    print(f"\n{json.dumps(result.by_name)}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--record":
        record(sys.argv[2], sys.argv[3:])
    else:
        run(sys.argv[-1], sys.stdin.read().split(), "--peer" in sys.argv)
