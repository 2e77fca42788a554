"""What we hook in Keras 3 and tf_keras.

Goes in: the Keras modules that the process has imported (none is imported from here until a user
has).  Comes out: the same modules, hooked, see :mod:`hooks`.  :mod:`keras3` and :mod:`tf_keras`
hold the tables; the files beside them what both say the same way.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, refused
from towerstrategy._keras import hooks, state
from towerstrategy.placement import kind

# The oldest and the newest release of each that was tested; docs/versions.md says what was run.
TESTED = {"keras": ("3.8", "3.15"), "tf_keras": ("2.16", "2.21")}

# The last module of each that is imported.
_LAST = {"keras": "keras.src.backend.tensorflow.trainer",
         "tf_keras": "tf_keras.src.engine.training"}
# The same of Keras 3 on other backends.
_FOREIGN = tuple(f"keras.src.backend.{name}.trainer"
                 for name in ("jax", "torch", "numpy", "openvino"))
_REFUSED = "keras.src.trainers.trainer"  # the class of their models is there

_installed: dict[str, Any] = {}  # Kerases that are hooked -> their ``hooks``


class Scope:
    """A strategy's scope, around TensorFlow's own: within, the hooks are in place."""

    def __init__(self, scope: Any) -> None:
        self._scope = scope

    def __enter__(self) -> Any:
        install_hooks()
        _tf.enter_work()
        try:
            return self._scope.__enter__()
        except BaseException:
            _tf.leave_work()
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            install_hooks()  # tf.keras is imported where it is first used, as in this scope
            self._scope.__exit__(*error)
        finally:
            _tf.leave_work()


def install_hooks() -> None:
    """Hooks each Keras that has been imported; for stages, too, once a strategy has them."""
    for package, last_module in _LAST.items():
        if package not in _installed and _imported(package, last_module):
            with _naming_versions(package):
                folder = {"keras": "keras3"}.get(package, package)
                tables = importlib.import_module(f"towerstrategy._keras.{folder}.hooks")
                hooks.install(tables.HOOKS)
            _installed[package], names = tables, tables.names
            for made in gc.get_objects():  # within a scope, since it was imported there
                if issubclass(type(made), names.MODEL) \
                        and kind.is_tower_strategy(vars(made).get(names.OWNER)):
                    hooks.enter_with(made, names.ENTRIES)
        if kind.staged and package in _installed:
            with _naming_versions(package):
                hooks.install(_installed[package].STAGES)
    if any(_imported("keras", module) for module in _FOREIGN):
        module = sys.modules[_REFUSED]
        model = module.BaseTrainer if hasattr(module, "BaseTrainer") else module.Trainer
        hooks.install({(model, "compile"): hooks.Hook(
            _compile_elsewhere, "on another backend than TensorFlow it knows no strategy")})


def _compile_elsewhere(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Keras 3's ``compile`` on JAX or PyTorch: such models would train on one device in a scope."""
    scope, backend = tf.distribute.get_strategy(), sys.modules["keras.src.backend"].backend()
    if kind.is_tower_strategy(scope) and backend != "tensorflow":
        raise ValueError(
            f"model {self.name!r} is compiled in the scope of {scope!r}, whose towers are "
            f"TensorFlow's, but Keras runs on {backend!r} here. Set KERAS_BACKEND=tensorflow "
            'before Keras is imported (or "backend" in ~/.keras/keras.json).')
    original(self, *args, **kwargs)


@contextlib.contextmanager
def _naming_versions(package: str) -> Iterator[None]:
    """Within, a private name that is not there becomes an error that says which Keras will do."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        oldest, newest = TESTED[package]
        major, minor = newest.split(".")
        raise RuntimeError(
            f"towerstrategy was tested with {package} {oldest} to {newest}, but the one installed "
            f"is {sys.modules[package].__version__}, where a name that it hooks is not in its "
            f"place: {error}. Install one of those: "
            f'pip install "{package}>={oldest},<{major}.{int(minor) + 1}".'
        ) from error


def names_of(model: Any) -> Any:
    """How the Keras that ``model`` is of names things: ``keras3.names`` or ``tf_keras.names``."""
    install_hooks()
    for tables in _installed.values():
        if isinstance(model, tables.names.TRAINER):
            return tables.names
    raise refused.wrong_type("model", model, "a Keras or tf_keras model")


def tables_of(model: Any) -> list[Any]:
    """The weights of ``model`` in which rows are looked up: gradients have these rows alone."""
    names = names_of(model)
    return [weight for layer in model._flatten_layers() if isinstance(layer, names.LOOK_UP)
            for weight in layer.trainable_weights]


def slots_of(model: Any) -> list[Any]:
    """What the optimizers of a compiled model keep, or will keep once they have seen weights."""
    names, found = names_of(model), []
    optimizers = state.optimizers_of(model, names)
    if not optimizers:
        raise ValueError(f"model {model.name!r} has no optimizer: compile it first.")
    for optimizer in optimizers:
        built = getattr(optimizer, "built", getattr(optimizer, "_built", False))
        if not built and hasattr(optimizer, "build"):  # tf_keras' old ones have none
            optimizer = type(optimizer).from_config(optimizer.get_config())
            with tf.device("CPU:0"):
                optimizer.build(model.trainable_variables)
        found += state.optimizer_variables(optimizer)
    return found


def _imported(package: str, last_module: str) -> bool:
    """Whether ``package`` is imported to the end, the backend of ``last_module`` included."""
    module = sys.modules.get(package)
    spec = getattr(module, "__spec__", None)
    return (module is not None and last_module in sys.modules
            and not getattr(spec, "_initializing", False))
