"""Making variables in the scope of a strategy.

Goes in: the arguments of a variable creator.  Comes out: a :class:`one_copy.TowerVariable` at its
home, or a :class:`tower_local.TowerLocalVariable`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts
from towerstrategy.placement import homes as homes_lib, scopes
from towerstrategy.variables import one_copy, tower_local


def create(strategy: tf.distribute.Strategy, next_creator: Callable[..., Any],
           **kwargs: Any) -> Any:
    """Makes a variable of ``strategy`` from the arguments of a variable creator."""
    kwargs.pop("experimental_batch_initialization", None)
    kwargs.pop("caching_device", None)
    beside = kwargs.pop("colocate_with", None)
    beside = beside._primary if isinstance(beside, _tf.DistributedVariable) else beside
    on_read = _check_modes(kwargs)
    workers = strategy.extended.workers
    if workers is not None:
        kwargs["initial_value"] = _chiefs_initial_value(workers, **kwargs)
    if on_read and (len(strategy.extended.worker_devices) > 1 or workers is not None):
        variable = _create_tower_local(strategy, next_creator, **kwargs)
    else:
        variable = _create_one_copy(strategy, beside, next_creator, kwargs)
    if workers is not None and not tf.executing_eagerly():
        variable.chiefs_initial_value = kwargs["initial_value"]
    return variable


def _create_one_copy(strategy: tf.distribute.Strategy, beside: Any,
                     next_creator: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    homes, stage = strategy.extended.homes, strategy.extended.stages.index
    together = beside is not None and bool(strategy.extended.placement.rows)  # in one stage
    if beside is not None and not together:
        beside._home_may_change = False
    home = (homes.choose(0, stage, _is_counter(kwargs)) if beside is None
            else homes_lib.home_of(beside))
    with tf.device(home), _outside_towers():
        variable = next_creator(**kwargs)
    if not isinstance(variable, _tf.BaseResourceVariable):
        return variable
    floats = variable.dtype.is_floating or variable.dtype.is_complex
    if kwargs["aggregation"] is one_copy.Aggregation.MEAN and not floats:
        raise ValueError(
            "creating distributed tf.Variable with aggregation=MEAN and a non-floating dtype is "
            "not supported, please use a different aggregation or dtype (got "
            f"{variable.dtype.name})")
    homes.add(home, homes_lib.size_of(variable))
    if together:
        homes_lib.follow(variable, beside)
    variable._home_may_change = tf.executing_eagerly() and (beside is None or together)
    if contexts.current() is not None:  # the step being traced captures it, so it must not move
        variable._settled = stage
    return one_copy.into_tower_variable(variable, strategy)


def _check_modes(kwargs: dict[str, Any]) -> bool:
    """Checks synchronization and aggregation and sets defaults; True: a tower-local variable."""
    present = {"name": None, **{key: value for key, value in kwargs.items() if value is not None}}
    kwargs["synchronization"] = _tf.check_synchronization(present)
    kwargs["aggregation"] = one_copy.Aggregation(_tf.check_aggregation(present).value)
    return kwargs["synchronization"] is tf.VariableSynchronization.ON_READ


def _create_tower_local(strategy: tf.distribute.Strategy, next_creator: Callable[..., Any],
                        **kwargs: Any) -> tower_local.TowerLocalVariable:
    parts: list[tf.Variable] = []
    if callable(kwargs["initial_value"]):
        # All parts get one tensor.  If parts started from another part, TensorFlow could not
        # initialize them before a function runs: its first call would differ from later calls.
        kwargs["initial_value"] = functools.cache(kwargs["initial_value"])
    for number, device in enumerate(strategy.extended.worker_devices):
        if parts:
            first = (parts[0].name or kwargs.get("name") or "Variable").split(":")[0]
            kwargs["name"] = f"{first}/tower_{number}/"
        with tf.device(device), _outside_towers():
            parts.append(next_creator(**kwargs))
    return tower_local.TowerLocalVariable(strategy, parts, kwargs["aggregation"])


def _chiefs_initial_value(workers: Any, initial_value: Any, dtype: Any = None,
                          name: str | None = None, **_: Any) -> Any:
    """A function that returns worker 0's ``initial_value``, called when the variable is made."""
    if tf.is_symbolic_tensor(initial_value) or isinstance(initial_value, tf.Variable):
        return initial_value  # computed in a function, and so on every worker

    @functools.cache  # one collective, as workers may have different numbers of parts
    def chiefs() -> Any:
        # Outside of a function that is being traced, whose graph does not run yet.
        with tf.init_scope():
            value = initial_value() if callable(initial_value) else initial_value
            if isinstance(value, _tf.CheckpointInitialValue):  # from a file, so on every worker
                return value
            tensor = tf.convert_to_tensor(value, dtype=dtype)
            try:
                return workers.chiefs([tensor])[0]
            except (tf.errors.InvalidArgumentError, tf.errors.InternalError) as error:
                raise ValueError(
                    f"worker {workers.index} makes a variable {name!r} of shape {tensor.shape} and "
                    f"dtype {tensor.dtype.name} where another worker does not. All workers must "
                    f"make the same model and optimizer, in the same order. ({error.message})"
                ) from error

    def value_of_chief() -> Any:
        value = chiefs()
        if tf.executing_eagerly() or not tf.is_tensor(value):
            return value
        # Unless variables start from constants, TensorFlow cannot initialize them before the
        # function runs; it then runs in a tf.cond, in which collective ops get no key.
        return tf.constant(value.numpy(), value.dtype)

    return value_of_chief


def _outside_towers() -> contextlib.AbstractContextManager[str]:
    """A name scope in which variables have the names that they have on a single device."""
    scope = scopes.plain_name(tf.get_current_name_scope())
    return tf.name_scope(f"{scope}/" if scope else "")


def _is_counter(kwargs: dict[str, Any]) -> bool:
    """Whether the variable holds a few integers, or integers of unknown shape."""
    shape, dtype, value = (kwargs.get(name) for name in ("shape", "dtype", "initial_value"))
    if value is None or callable(value):
        value = tf.TensorSpec(shape, tf.float32 if dtype is None else dtype)
    else:
        value = tf.convert_to_tensor(value, dtype=dtype)
    return value.dtype.is_integer and homes_lib.size_of(value) <= homes_lib.COUNTER
