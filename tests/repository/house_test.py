"""The house: imports run one way, extras hang on one seam, private names have their places.

Imports within functions, for the type checker and by ``importlib`` count as all others do.
"""

import ast
import fnmatch
import functools
import pathlib

from absl.testing import absltest

import towerstrategy

PACKAGE = pathlib.Path(towerstrategy.__file__).parent
TESTS = pathlib.Path(__file__).parents[1]
ROOT = PACKAGE.parent
LARGEST = 400  # lines; a file has one purpose
LONGEST = 40  # lines of a function, its docstring left out
GUIDE = 300  # lines of BUILD.md


def module_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# Each imports those before it alone; BUILD.md says what they are for.
ORDER = ("_version", "_requirements", "warned", "refused", "_tensorflow", "placement", "batch",
         "merge", "contexts", "arguments", "variables", "extras", "extras.stages", "extras.xla",
         "extras.cpu", "sharding", "replicas", "losses", "extras.machines", "_keras",
         "extras.report", "extras.measured", "extended", "strategy", "multi_gpu", "report", "",
         "extras.check", "__main__")


# What the core does not know: each extra with who puts it in; others call what is put in.
EXTRAS = {"extras.machines": {"strategy"}, "extras.measured": {"strategy"},
          "extras.stages": {"extended"}, "extras.xla": {"extended"}, "extras.cpu": {"extended"},
          "extras.report": {"report", "strategy", "extras.measured", "extras.check"},
          "extras.check": {"__main__"}}


def imports(path):
    """What a file imports; a name that is made while it runs has a star where that is put in."""
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
def files():
    """The package's modules, each with those of the package that it imports."""
    found = {module_of(path): path for path in PACKAGE.rglob("*.py")}

    def meant(name):
        if "*" in name:
            return fnmatch.filter(found, name) if name.startswith("towerstrategy") else ()
        return {name if name in found else name.rpartition(".")[0]} & set(found)

    return {name: {other for each in imports(path) for other in meant(each)} - {name}
            for name, path in found.items()}


def functions():
    """Each function of the package, its file and name, and its lines without its docstring."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = node.body[0]
                said = first.end_lineno - first.lineno + 1 if ast.get_docstring(node) else 0
                yield (f"{path.relative_to(PACKAGE)}: {node.name}",
                       node.end_lineno - node.lineno + 1 - said)


def package_of(name):
    """The first name below the root, which is the empty one itself; of an extra, the first two."""
    parts = name.split(".")[1:]
    return ".".join(parts[:2 if parts[:1] == ["extras"] else 1])


class HouseTest(absltest.TestCase):

    def test_no_circle(self):
        """Else a file cannot be understood, or imported, without those built on it."""
        graph = files()
        while True:
            ground = {name for name, below in graph.items() if not below}
            if not ground:
                break
            graph = {name: below - ground for name, below in graph.items() if name not in ground}
        self.assertEmpty(graph)

    def test_imports_run_one_way(self):
        """Else a package cannot be understood, or changed, without those built on it."""
        upwards = {(name, other) for name, below in files().items() for other in below
                   if ORDER.index(package_of(name)) < ORDER.index(package_of(other))}
        self.assertEmpty(upwards)

    def test_extras_hang_on_one_seam(self):
        """Else who reads the core has to read what few use as well."""
        for extra, seams in EXTRAS.items():
            users = {package_of(name) for name, below in files().items()
                     if extra in map(package_of, below)}
            self.assertEqual(users - {extra}, seams, extra)

    def test_private_keras_names_have_their_package(self):
        """Else a Keras release breaks more than the files that are there for it."""
        outside = {str(path.relative_to(PACKAGE)): name for path in PACKAGE.rglob("*.py")
                   for name in imports(path) if "keras.src" in name
                   and path.relative_to(PACKAGE).parts[0] != "_keras"}
        self.assertEmpty(outside)

    def test_names_that_are_put_together_are_imports_too(self):
        """Else a circle hides behind ``importlib``."""
        self.assertContainsSubset(
            {f"towerstrategy._keras.{folder}.hooks" for folder in ("keras3", "tf_keras")},
            files()["towerstrategy._keras"])

    def test_files_are_small_and_say_what_they_are(self):
        """Else who looks for something has to read a file to its end."""
        sizes = {}
        for path in PACKAGE.rglob("*.py"):
            text = path.read_text()
            sizes[str(path.relative_to(PACKAGE))] = text.count("\n")
            self.assertTrue(ast.get_docstring(ast.parse(text)), path)
        self.assertEmpty({name: size for name, size in sizes.items() if size > LARGEST})

    def test_functions_are_short(self):
        """Else nobody sees at a glance what one does."""
        self.assertEmpty({name: size for name, size in functions() if size > LONGEST})

    def test_the_guide_is_short(self):
        """Else a newcomer reads for a day before the first change."""
        self.assertLessEqual((ROOT / "BUILD.md").read_text().count("\n"), GUIDE)

    def test_tests_mirror_the_packages(self):
        """Else who changes a file does not know which tests hold it."""
        def folders(root):
            return {str(path.parent.relative_to(root))
                    for files in ("*/*.py", "extras/*/*.py") for path in root.glob(files)}

        packages, tests = folders(PACKAGE), folders(TESTS)
        self.assertEqual(tests - packages, {"benchmarks", "gpu", "parity", "repository", "slow"})
        self.assertEmpty(packages - tests)
        for path in TESTS.rglob("*_test.py"):
            self.assertTrue(ast.get_docstring(ast.parse(path.read_text())), path)


if __name__ == "__main__":
    absltest.main()
