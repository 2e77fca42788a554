"""Installs the hooks into Keras 3 and tf_keras.

Goes in: the Keras modules that the process has imported (we never import Keras before the user
does).  Comes out: the same modules, hooked, see :mod:`hooks`.  :mod:`keras3` and :mod:`tf_keras`
hold the tables of hooks; the files beside them hold the code that both versions share.
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

# The oldest and newest tested release of each package; docs/versions.md says which tests were run.
TESTED = {"keras": ("3.8", "3.15"), "tf_keras": ("2.16", "2.21")}

# The module of each package that is imported last.
_LAST_MODULES = {"keras": "keras.src.backend.tensorflow.trainer",
                 "tf_keras": "tf_keras.src.engine.training"}
# The same module of Keras 3 on other backends.
_OTHER_BACKENDS = tuple(f"keras.src.backend.{name}.trainer"
                        for name in ("jax", "torch", "numpy", "openvino"))
_BASE_TRAINER = "keras.src.trainers.trainer"  # has the base class of models on every backend

_installed: dict[str, Any] = {}  # hooked packages -> their module ``hooks``


class Scope:
    """A strategy's scope: TensorFlow's scope, in which the hooks are in place, too."""

    def __init__(self, scope: Any) -> None:
        self._scope = scope

    def __enter__(self) -> Any:
        install_hooks()
        strategy = self._scope.__enter__()
        _tf.enter_work()
        return strategy

    def __exit__(self, *error: Any) -> None:
        try:
            install_hooks()  # the first use of tf.keras imports it; that may be in this scope
            self._scope.__exit__(*error)
        finally:
            _tf.leave_work()


def install_hooks() -> None:
    """Installs the hooks into each imported Keras; those for stages once a strategy has stages."""
    for package, last_module in _LAST_MODULES.items():
        if package not in _installed and _is_imported(package, last_module):
            with _naming_versions(package):
                folder = {"keras": "keras3"}.get(package, package)
                tables = importlib.import_module(f"towerstrategy._keras.{folder}.hooks")
                hooks.install(tables.HOOKS)
            _installed[package], names = tables, tables.names
            # Models that were made in this scope after Keras was imported there, before its hooks.
            for candidate in gc.get_objects():
                if issubclass(type(candidate), names.MODEL) \
                        and kind.is_tower_strategy(vars(candidate).get(names.OWNER)):
                    hooks.wrap_methods(candidate, names.ENTRIES)
        if kind.staged and package in _installed:
            with _naming_versions(package):
                hooks.install(_installed[package].STAGES)
    if any(_is_imported("keras", module) for module in _OTHER_BACKENDS):
        module = sys.modules[_BASE_TRAINER]
        model = module.BaseTrainer if hasattr(module, "BaseTrainer") else module.Trainer
        hooks.install({(model, "compile"): hooks.Hook(
            _refuse_other_backends, "ignores strategies on a backend other than TensorFlow")})


def _refuse_other_backends(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Keras 3's ``compile`` on JAX or PyTorch; in a scope it raises: one device would train."""
    scope, backend = tf.distribute.get_strategy(), sys.modules["keras.src.backend"].backend()
    if kind.is_tower_strategy(scope) and backend != "tensorflow":
        raise ValueError(
            f"model {self.name!r} is compiled in the scope of {scope!r}, whose towers are "
            f"TensorFlow's, but Keras runs on {backend!r} here. Set KERAS_BACKEND=tensorflow "
            'before Keras is imported (or "backend" in ~/.keras/keras.json).')
    original(self, *args, **kwargs)


@contextlib.contextmanager
def _naming_versions(package: str) -> Iterator[None]:
    """Turns the error about a missing private name into one that names the tested versions."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        oldest, newest = TESTED[package]
        major, minor = newest.split(".")
        raise RuntimeError(
            f"towerstrategy was tested with {package} {oldest} to {newest}, but the one installed "
            f"is {sys.modules[package].__version__}, where a name that it hooks is missing: "
            f"{error}. Install a tested release: "
            f'pip install "{package}>={oldest},<{major}.{int(minor) + 1}".'
        ) from error


def names_of(model: Any) -> Any:
    """The module of names for the Keras of ``model``: ``keras3.names`` or ``tf_keras.names``."""
    install_hooks()
    for tables in _installed.values():
        if isinstance(model, tables.names.TRAINER):
            return tables.names
    raise refused.wrong_type("model", model, "a Keras or tf_keras model")


def embedding_tables(model: Any) -> list[Any]:
    """The trainable weights of embeddings; their gradients have only the rows looked up."""
    names = names_of(model)
    return [weight for layer in model._flatten_layers() if isinstance(layer, names.EMBEDDING)
            for weight in layer.trainable_weights]


def optimizer_slots(model: Any) -> list[Any]:
    """The variables of a compiled model's optimizers; of unbuilt ones, those they will make."""
    names, variables = names_of(model), []
    optimizers = state.optimizers_of(model, names)
    if not optimizers:
        raise ValueError(f"model {model.name!r} has no optimizer: compile it first.")
    for optimizer in optimizers:
        built = getattr(optimizer, "built", getattr(optimizer, "_built", False))
        if not built and hasattr(optimizer, "build"):  # tf_keras' legacy ones have no build
            optimizer = type(optimizer).from_config(optimizer.get_config())
            with tf.device("CPU:0"):
                optimizer.build(model.trainable_variables)
        variables += state.optimizer_variables(optimizer)
    return list({id(variable): variable for variable in variables}.values())


def _is_imported(package: str, last_module: str) -> bool:
    """Whether the import of ``package`` is complete, with the backend of ``last_module``."""
    module = sys.modules.get(package)
    spec = getattr(module, "__spec__", None)
    return (module is not None and last_module in sys.modules
            and not getattr(spec, "_initializing", False))
