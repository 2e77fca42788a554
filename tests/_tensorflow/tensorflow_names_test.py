"""_tensorflow: every private TensorFlow name that the package uses exists, and is taken there."""

import ast
import importlib
import pathlib

from absl.testing import parameterized

import towerstrategy

PACKAGE = pathlib.Path(towerstrategy.__file__).parent


def private_imports(path):
    """The ``tensorflow.python`` modules that a file imports, by the names it gives them."""
    modules = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tensorflow.python"):
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("tensorflow.python"):
                    modules[alias.asname or alias.name] = alias.name
    return modules


def names_taken():
    """What ``_tensorflow`` takes from private modules, each with the module."""
    for path in sorted((PACKAGE / "_tensorflow").glob("*.py")):
        modules = private_imports(path)
        yield from sorted({
            (modules[node.value.id], node.attr) for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            and node.value.id in modules})


class NamesTest(parameterized.TestCase):

    @parameterized.parameters(*names_taken())
    def test_exists(self, module, name):
        """Else a TensorFlow release has moved a name and the failure shows somewhere else."""
        getattr(importlib.import_module(module), name)

    def test_nothing_else_imports_private_modules(self):
        """Else a TensorFlow release breaks more than one file."""
        others = {str(path.relative_to(PACKAGE)): private_imports(path)
                  for path in PACKAGE.rglob("*.py") if path.parent.name != "_tensorflow"}
        self.assertEqual({name: found for name, found in others.items() if found}, {})
