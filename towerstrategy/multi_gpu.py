"""``multi_gpu_model``: Keras' old function for data-parallel training, on a ``TowerStrategy``.

Goes in: a Keras model and the GPUs to train it on.  Comes out: a model with the same layers and the
same variables that trains on several towers; the original model does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy import _keras, refused
from towerstrategy._keras import adopting, state
from towerstrategy.placement import devices as devices_lib, homes as homes_lib, names
from towerstrategy.strategy import TowerStrategy
from towerstrategy.variables import one_copy


def multi_gpu_model(model: Any, gpus: int | Sequence[int | str] | None = None,
                    cpu_merge: bool = True, cpu_relocation: bool = False) -> Any:
    """A model like ``model``, with the same weights, that trains on several GPUs.

    Training gives the same result as on one device.  The new model is uncompiled and has the class,
    the layers and the variables of ``model``: training one of the two trains both, and saving
    either gives the same files.  ``model`` can still be compiled and trained on one device.

    Args:
      model: a Keras or tf_keras model: functional, sequential or subclassed, built or not, compiled
        or not.
      gpus: None (all GPUs), a count of GPUs (of logical CPU devices if there is no GPU), or a list
        of GPU ids or device strings, of any length.
      cpu_merge: whether gradients are merged, and the optimizer runs, on the CPU; otherwise on the
        first GPU.
      cpu_relocation: whether the weights move to the CPU, for models that were built on a GPU.

    Returns:
      The new model; ``model`` itself if ``gpus`` is None and there is at most one GPU.

    >>> model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1)])
    >>> parallel_model = multi_gpu_model(model, gpus=["CPU:1", "CPU:2"])
    >>> parallel_model.compile("sgd", "mse")
    >>> history = parallel_model.fit(np.ones([10, 3]), np.ones([10, 1]), batch_size=5, verbose=0)
    >>> bool(np.all(model.predict(np.ones([2, 3]), verbose=0)
    ...             == parallel_model.predict(np.ones([2, 3]), verbose=0)))
    True
    """
    names_of_keras = _keras.names_of(model)
    variables = state.resident(state.variables_of(model, names_of_keras))
    _check_switch("cpu_merge", cpu_merge)
    _check_switch("cpu_relocation", cpu_relocation)
    towers = _towers(gpus)
    if cpu_relocation:
        _relocate(model, variables)
    if not towers:
        return model
    strategy = TowerStrategy(towers, "cpu" if cpu_merge else towers[0])
    return adopting.make_twin(_existing_strategy(model, variables, strategy), model, names_of_keras)


def _towers(gpus: Any) -> list[str]:
    """The full names of the towers' devices; [] if ``gpus`` is None and there is no second GPU."""
    if gpus is None and names.gpu_count() < 2:
        return []
    devices = list(gpus) if isinstance(gpus, (range, np.ndarray)) else gpus
    rows = devices_lib.rows_of(devices, argument="gpus")
    if len(rows[0]) > 1:
        raise ValueError(f"gpus must be a list of devices, a tower each, but got {gpus!r}. "
                         f"{names.devices_here()}")
    return [row[0] for row in rows]


def _check_switch(argument: str, value: Any) -> None:
    """Raises ``TypeError`` unless ``value`` is a bool, or 0 or 1, as in Keras' function."""
    if not isinstance(value, (bool, np.bool_, int)) or value not in (0, 1):
        raise refused.wrong_type(argument, value, "True or False")


def _relocate(model: Any, variables: list[tf.Variable]) -> None:
    """Moves the variables of ``model`` to the CPU."""
    cpu = names.tower_name("CPU:0")
    elsewhere = [variable for variable in variables if variable.device != cpu]
    for variable in elsewhere:
        if isinstance(variable, one_copy.TowerVariable):
            raise ValueError(
                f"cpu_relocation=True comes too late: variable {variable.name!r} of model "
                f"{model.name!r} is on {names.short_name(variable.device)} and already "
                f"trained by {variable.distribute_strategy!r}. Ask for it in the first call of "
                "multi_gpu_model for this model.")
    for variable in elsewhere:
        homes_lib.move(variable, cpu)
    if elsewhere:
        adopting.forget_functions(model)


def _existing_strategy(model: Any, variables: list[tf.Variable],
                       strategy: TowerStrategy) -> TowerStrategy:
    """The strategy of the model, or of a weight, that has this placement; else ``strategy``."""
    owners = [variable.distribute_strategy for variable in variables
              if isinstance(variable, one_copy.TowerVariable)]
    for existing in (model.distribute_strategy, *owners):
        if (isinstance(existing, TowerStrategy)
                and existing.extended.placement == strategy.extended.placement):
            return existing
    return strategy
