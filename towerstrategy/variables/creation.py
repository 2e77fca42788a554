"""Making variables in the scope of a strategy.

Goes in: what TensorFlow's variable creators pass on, and the strategy's homes.  Comes out: a
:class:`one_copy.TowerVariable` at its home, or a :class:`tower_local.TowerLocalVariable`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts
from towerstrategy.placement import homes as homes_lib, scopes
from towerstrategy.placement.workers import Workers
from towerstrategy.variables import one_copy, tower_local


def create(strategy: tf.distribute.Strategy, homes: homes_lib.Homes,
           next_creator: Callable[..., Any],
           **kwargs: Any) -> Any:
    """Makes a variable of ``strategy``; the arguments are those of a variable creator.

    Raises:
      ValueError: ``synchronization=NONE``, which no strategy can honour, or an unknown value.
    """
    kwargs.pop("experimental_batch_initialization", None)
    kwargs.pop("caching_device", None)
    colocate_with = kwargs.pop("colocate_with", None)
    on_read = _check_modes(kwargs)
    devices = strategy.extended.worker_devices
    workers = strategy.extended.workers
    if on_read and (len(devices) > 1 or workers is not None):
        return _create_tower_local(strategy, devices, next_creator, kwargs)
    if workers is not None:
        kwargs["initial_value"] = _chiefs_initial_value(workers, **kwargs)
    stage = strategy.extended.stages.index
    home = _home_for(homes, colocate_with, kwargs, stage)
    with tf.device(home), _outside_towers():
        variable = next_creator(**kwargs)
    if not isinstance(variable, _tf.BaseResourceVariable):
        return variable
    if workers is not None and not tf.executing_eagerly():
        variable.chiefs_initial_value = kwargs["initial_value"]
    _check_mean(kwargs["aggregation"], variable.dtype)
    together = colocate_with is not None and homes.of_stages
    if together:
        homes_lib.follow(variable, _primary(colocate_with))
    variable._home_may_change = tf.executing_eagerly() and (colocate_with is None or together)
    if contexts.current() is not None:  # what runs there takes it from there from now on
        variable._settled = stage
    return one_copy.into_tower_variable(variable, strategy, home)


def _check_modes(kwargs: dict[str, Any]) -> bool:
    """Checks and completes synchronization and aggregation; True for a tower-local variable."""
    name = kwargs.get("name")
    synchronization = kwargs.get("synchronization") or tf.VariableSynchronization.AUTO
    if synchronization is tf.VariableSynchronization.NONE:
        raise ValueError("`NONE` variable synchronization mode is not supported with a strategy. "
                         f"Please change the `synchronization` for variable: {name}")
    if not isinstance(synchronization, tf.VariableSynchronization):
        raise ValueError(f"Invalid variable synchronization mode: {synchronization} for variable: "
                         f"{name}")
    aggregation = kwargs.get("aggregation") or one_copy.Aggregation.NONE
    if not isinstance(aggregation, (one_copy.Aggregation, tf.compat.v1.VariableAggregation)):
        raise ValueError(f"Invalid variable aggregation mode: {aggregation} for variable: {name}")
    if synchronization is tf.VariableSynchronization.AUTO:
        synchronization = tf.VariableSynchronization.ON_WRITE
    kwargs["synchronization"] = synchronization
    kwargs["aggregation"] = one_copy.Aggregation(aggregation.value)
    return synchronization is tf.VariableSynchronization.ON_READ


def _check_mean(aggregation: tf.VariableAggregation, dtype: tf.DType) -> None:
    """Raises ``ValueError`` for a mean of values that have none, as TensorFlow does."""
    if aggregation is one_copy.Aggregation.MEAN and not (dtype.is_floating or dtype.is_complex):
        raise ValueError(
            "creating distributed tf.Variable with aggregation=MEAN and a non-floating dtype is "
            f"not supported, please use a different aggregation or dtype (got {dtype.name})")


def _create_tower_local(strategy: tf.distribute.Strategy, devices: tuple[str, ...],
                        next_creator: Callable[..., Any],
                        kwargs: dict[str, Any]) -> tower_local.TowerLocalVariable:
    parts: list[tf.Variable] = []
    name = kwargs.get("name")
    workers = strategy.extended.workers
    if workers is not None:
        kwargs["initial_value"] = _chiefs_initial_value(workers, **kwargs)
    for number, device in enumerate(devices):
        if parts:
            if workers is None:
                kwargs["initial_value"] = functools.partial(_value_of, parts[0])
            first = (parts[0].name or name or "Variable").split(":")[0]
            kwargs["name"] = f"{first}/tower_{number}/"
        with tf.device(device), _outside_towers():
            parts.append(next_creator(**kwargs))
    variable = tower_local.tower_local(strategy, parts, kwargs["aggregation"])
    if workers is not None and not tf.executing_eagerly():
        variable.chiefs_initial_value = kwargs["initial_value"]
    return variable


def _chiefs_initial_value(workers: Workers, initial_value: Any, dtype: Any = None,
                          name: str | None = None, **_: Any) -> Any:
    """``initial_value`` as worker 0 has it, asked for when the variable is made."""
    if tf.is_tensor(initial_value) and not _tf.is_eager(initial_value):
        return initial_value  # computed in a function, and so on every worker

    @functools.cache  # asked for once a part, and workers may have different numbers of towers
    def chiefs() -> Any:
        # Out of a function that is being traced: it is not run by making its variables.
        with tf.init_scope():
            value = initial_value() if callable(initial_value) else initial_value
            if isinstance(value, _tf.CheckpointInitialValue):  # from a file, so on every worker
                return value
            own = tf.convert_to_tensor(value, dtype=dtype)
            try:
                return workers.chiefs([own])[0]
            except (tf.errors.InvalidArgumentError, tf.errors.InternalError) as error:
                raise ValueError(
                    f"worker {workers.index} makes a variable {name!r} of shape {own.shape} and "
                    f"dtype {own.dtype.name} where another worker does not. All workers must make "
                    f"the same model and optimizer, in the same order. ({error.message})"
                ) from error

    def made() -> Any:
        value = chiefs()
        return _constant(value) if tf.is_tensor(value) and not tf.executing_eagerly() else value

    return made


def _constant(value: tf.Tensor) -> tf.Tensor:
    """An eager tensor as a constant of the graph.

    A function whose variables start from anything else cannot initialize them before it runs, and
    runs in a tf.cond, in which collective ops get no key.
    """
    return tf.constant(value.numpy(), value.dtype)


def _value_of(variable: tf.Variable) -> tf.Tensor:
    return tf.identity(variable.value())


def _outside_towers() -> contextlib.AbstractContextManager[str]:
    """Within, variables have the names that they have on a single device."""
    kept = scopes.plain_name(tf.get_current_name_scope())
    return tf.name_scope(f"{kept}/" if kept else "")


def _home_for(homes: homes_lib.Homes, colocate_with: Any, kwargs: dict[str, Any],
              stage: int | None) -> str:
    size, dtype = _bytes_of(kwargs) if homes.by_bytes else (0, tf.float32)
    if colocate_with is not None:
        colocate_with = _primary(colocate_with)
        home = homes_lib.home_of(colocate_with)
        if not homes.of_stages:
            colocate_with._home_may_change = False
        homes.add(home, size)
        return home
    return homes.choose(size, stage, dtype)


def _primary(variable: Any) -> Any:
    return variable._primary if isinstance(variable, _tf.DistributedVariable) else variable


def _bytes_of(kwargs: dict[str, Any]) -> tuple[int, tf.DType]:
    """Bytes and type of a variable to be made; an initializer of an unknown result is run for it.
    """
    shape, dtype = kwargs.get("shape"), kwargs.get("dtype")
    value = kwargs.get("initial_value")
    if shape is None or not tf.TensorShape(shape).is_fully_defined() or dtype is None:
        if callable(value) and not tf.is_tensor(value):
            if tf.executing_eagerly():
                value = kwargs["initial_value"] = value()
            else:
                with tf.__internal__.FuncGraph("initial_value").as_default():
                    value = tf.convert_to_tensor(value())
        value = tf.convert_to_tensor(value, dtype=dtype) if value is not None else None
        shape = value.shape if value is not None else ()
        dtype = value.dtype if value is not None else tf.float32
    dtype = tf.as_dtype(dtype)
    elements = tf.TensorShape(shape).num_elements() or 0
    return 0 if dtype in (tf.string, tf.variant, tf.resource) else elements * dtype.size, dtype
