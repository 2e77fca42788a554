"""_tensorflow: every private TensorFlow name that the package uses exists, and is listed there."""

import ast
import importlib
import pathlib

from absl.testing import parameterized

import towerstrategy
from towerstrategy import _tensorflow

PACKAGE = pathlib.Path(towerstrategy.__file__).parent


def resolve(entry):
    """The object that ``module:Name.attribute`` names."""
    module, _, path = entry.partition(":")
    found = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


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


class NamesTest(parameterized.TestCase):

    @parameterized.parameters(*_tensorflow.PRIVATE_NAMES)
    def test_exists(self, entry):
        """Else a TensorFlow release has moved a name and the failure shows somewhere else."""
        resolve(entry)
        self.assertNotEmpty(_tensorflow.PRIVATE_NAMES[entry])

    def test_each_name_taken_is_listed(self):
        """Else a private name is used that nobody watches."""
        listed = {entry.split(".")[0] if ":" not in entry else
                  f"{entry.split(':')[0]}:{entry.split(':')[1].split('.')[0]}"
                  for entry in _tensorflow.PRIVATE_NAMES}
        for path in (PACKAGE / "_tensorflow").glob("*.py"):
            modules = private_imports(path)
            used = {f"{modules[node.value.id]}:{node.attr}"
                    for node in ast.walk(ast.parse(path.read_text()))
                    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
                    and node.value.id in modules}
            self.assertEmpty(used - listed, path.name)

    def test_nothing_else_imports_private_modules(self):
        """Else a TensorFlow release breaks more than one file."""
        others = {str(path.relative_to(PACKAGE)): private_imports(path)
                  for path in PACKAGE.rglob("*.py") if path.parent.name != "_tensorflow"}
        self.assertEqual({name: found for name, found in others.items() if found}, {})
