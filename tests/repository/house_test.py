"""The structure of the package: order of imports, extras, private names, sizes of files.

Imports within functions, for the type checker and by ``importlib`` count like all others.
"""

import ast
import fnmatch
import functools
import pathlib
import subprocess
import sys

import pytest
from absl.testing import absltest

import towerstrategy

PACKAGE = pathlib.Path(towerstrategy.__file__).parent
TESTS = pathlib.Path(__file__).parents[1]
ROOT = PACKAGE.parent
MAX_FILE = 400  # lines; a file has one purpose
MAX_FUNCTION = 40  # lines of a function, without its docstring
MAX_GUIDE = 300  # lines of BUILD.md


def module_of(path):
    """The name of the module of a file."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# Each package or module imports only those before it; BUILD.md says what they are for.
ORDER = ("_version", "_requirements", "warned", "refused", "_tensorflow", "placement", "batch",
         "merge", "contexts", "arguments", "variables", "extras", "extras.stages", "extras.xla",
         "extras.cpu", "sharding", "replicas", "losses", "extras.machines", "_keras",
         "extras.report", "extras.measured", "extended", "strategy", "multi_gpu", "report", "",
         "extras.check", "__main__")


# Each extra, which the core does not import, with the modules that import it.
EXTRAS = {"extras.machines": {"strategy"}, "extras.measured": {"extended"},
          "extras.stages": {"extended"}, "extras.xla": {"extended"}, "extras.cpu": {"extended"},
          "extras.report": {"report", "strategy", "extras.measured", "extras.check"},
          "extras.check": {"__main__"}}


def imports(path):
    """The names that a file imports; where a name is computed at run time, that part is ``*``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports by a relative name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            parts = getattr(node.args[0], "values", [node.args[0]])
            yield "".join(getattr(part, "value", "*") if isinstance(part, ast.Constant) else "*"
                          for part in parts)


@functools.cache
def imports_by_module():
    """For each module of the package, the modules of the package that it imports."""
    modules = {module_of(path): path for path in PACKAGE.rglob("*.py")}

    def imported(name):
        if "*" in name:
            return fnmatch.filter(modules, name) if name.startswith("towerstrategy") else ()
        return {name if name in modules else name.rpartition(".")[0]} & set(modules)

    return {name: {other for each in imports(path) for other in imported(each)} - {name}
            for name, path in modules.items()}


def functions():
    """For each function of the package, its file and name, and its lines without the docstring."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = node.body[0]
                docstring = first.end_lineno - first.lineno + 1 if ast.get_docstring(node) else 0
                yield (f"{path.relative_to(PACKAGE)}: {node.name}",
                       node.end_lineno - node.lineno + 1 - docstring)


def package_of(name):
    """The top-level package or module of a module: "" for the root, ``extras.NAME`` for extras."""
    parts = name.split(".")[1:]
    return ".".join(parts[:2 if parts[:1] == ["extras"] else 1])


class HouseTest(absltest.TestCase):

    def test_no_circle(self):
        """Else a file cannot be understood, or imported, without files that import it."""
        graph = imports_by_module()
        while True:
            lowest = {name for name, imported in graph.items() if not imported}
            if not lowest:
                break
            graph = {name: imported - lowest for name, imported in graph.items()
                     if name not in lowest}
        self.assertEmpty(graph)

    def test_imports_run_one_way(self):
        """Else a package cannot be understood, or changed, without packages that import it."""
        upwards = {(name, other) for name, imported in imports_by_module().items()
                   for other in imported
                   if ORDER.index(package_of(name)) < ORDER.index(package_of(other))}
        self.assertEmpty(upwards)

    def test_extras_hang_on_one_seam(self):
        """Else a reader of the core has to read features that few people use."""
        for extra, seams in EXTRAS.items():
            users = {package_of(name) for name, imported in imports_by_module().items()
                     if extra in map(package_of, imported)}
            self.assertEqual(users - {extra}, seams, extra)

    def test_private_keras_names_have_their_package(self):
        """Else a Keras release breaks files outside of ``_keras``."""
        outside = {str(path.relative_to(PACKAGE)): name for path in PACKAGE.rglob("*.py")
                   for name in imports(path) if "keras.src" in name
                   and path.relative_to(PACKAGE).parts[0] != "_keras"}
        self.assertEmpty(outside)

    def test_names_that_are_put_together_are_imports_too(self):
        """Else a circular import by ``importlib`` is not found."""
        self.assertContainsSubset(
            {f"towerstrategy._keras.{folder}.hooks" for folder in ("keras3", "tf_keras")},
            imports_by_module()["towerstrategy._keras"])

    def test_files_are_small_and_say_what_they_are(self):
        """Else a reader who looks for something has to read a file to its end."""
        sizes = {}
        for path in PACKAGE.rglob("*.py"):
            text = path.read_text()
            sizes[str(path.relative_to(PACKAGE))] = text.count("\n")
            self.assertTrue(ast.get_docstring(ast.parse(text)), path)
        self.assertEmpty({name: size for name, size in sizes.items() if size > MAX_FILE})

    def test_functions_are_short(self):
        """Else a reader does not see at a glance what a function does."""
        self.assertEmpty({name: size for name, size in functions() if size > MAX_FUNCTION})

    def test_the_guide_is_short(self):
        """Else a newcomer reads for a day before the first change."""
        self.assertLessEqual((ROOT / "BUILD.md").read_text().count("\n"), MAX_GUIDE)

    def test_tests_mirror_the_packages(self):
        """Else an engineer who changes a file does not know which tests cover it."""
        def folders(root):
            return {str(path.parent.relative_to(root))
                    for pattern in ("*/*.py", "extras/*/*.py") for path in root.glob(pattern)}

        packages, tests = folders(PACKAGE), folders(TESTS)
        self.assertEqual(tests - packages, {"benchmarks", "gpu", "parity", "repository", "slow"})
        self.assertEmpty(packages - tests)
        for path in TESTS.rglob("*_test.py"):
            self.assertTrue(ast.get_docstring(ast.parse(path.read_text())), path)

    @pytest.mark.wide
    def test_tests_of_gpus_are_found(self):
        """Else `make test-gpu` stops at an import, on the machines that it is for."""
        done = subprocess.run([sys.executable, "-m", "pytest", "--collect-only", "-m", "",
                               "--confcutdir=tests/gpu", "tests/gpu"], cwd=ROOT,
                              capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout)


if __name__ == "__main__":
    absltest.main()
