"""The house: imports run one way, extras hang on one seam, private names have their places."""

import ast
import pathlib

from absl.testing import absltest

import towerstrategy

PACKAGE = pathlib.Path(towerstrategy.__file__).parent
TESTS = pathlib.Path(__file__).parents[1]
LARGEST = 460  # lines; a file has one purpose


def module_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# Each imports those before it alone; BUILD.md says what they are for.
ORDER = ("_version", "_requirements", "warned", "refused", "_tensorflow", "placement", "batch",
         "merge", "contexts", "arguments", "variables", "stages", "xla", "cpu", "sharding",
         "replicas", "losses", "machines", "_keras", "report", "measured", "extended", "strategy",
         "multi_gpu", "", "check", "__main__")


# What the core does not know: each extra with who puts it in; others call what is put in.
EXTRAS = {"machines": {"strategy"}, "measured": {"strategy"}, "stages": {"extended"},
          "xla": {"extended"}, "cpu": {"extended"}, "report": {"", "strategy", "measured", "check"},
          "check": {"__main__"}}


def imports(path):
    """What a file imports, within functions and for the type checker too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files():
    """The package's modules, each with those of the package that it imports."""
    found = {module_of(path): path for path in PACKAGE.rglob("*.py")}
    return {name: {each if each in found else each.rpartition(".")[0]
                   for each in imports(path)} & set(found) - {name}
            for name, path in found.items()}


def package_of(name):
    """The first name below the root, which is the empty one itself."""
    return name.split(".")[1] if "." in name else ""


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

    def test_private_keras_names_have_their_floor(self):
        """Else a Keras release breaks more than the rooms that are there for it."""
        outside = {str(path.relative_to(PACKAGE)): name for path in PACKAGE.rglob("*.py")
                   for name in imports(path) if "keras.src" in name
                   and path.relative_to(PACKAGE).parts[0] != "_keras"}
        self.assertEmpty(outside)

    def test_rooms_are_small_and_say_what_they_are(self):
        """Else who looks for something has to read a file to its end."""
        for path in PACKAGE.rglob("*.py"):
            text = path.read_text()
            self.assertLessEqual(text.count("\n"), LARGEST, path)
            self.assertTrue(ast.get_docstring(ast.parse(text)), path)

    def test_tests_mirror_the_floors(self):
        """Else who changes a room does not know which tests hold it."""
        floors = {path.name for path in PACKAGE.iterdir() if path.is_dir()} - {"__pycache__"}
        tests = {path.name for path in TESTS.iterdir() if path.is_dir() and any(path.glob("*.py"))}
        self.assertEqual(tests - floors, {"benchmarks", "gpu", "parity", "repository", "slow"})
        self.assertEmpty(floors - tests)
        for path in TESTS.rglob("*_test.py"):
            self.assertTrue(ast.get_docstring(ast.parse(path.read_text())), path)


if __name__ == "__main__":
    absltest.main()
