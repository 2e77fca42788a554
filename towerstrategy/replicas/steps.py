"""Several steps over an iterator in one loop, as tf.distribute's first API runs them.

Goes in: what runs a step, an iterator, how many steps.  Comes out: a :class:`StepsContext` with
what the last step has put down, see ``extended.experimental_run_steps_on_iterator``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf


class StepsContext(_tf.MultiStepContext):
    """What a step puts down, and what is there after the last.

    Attributes:
      run_op: the operation that runs all steps; None where they have run.
    """

    run_op: Any = None

    def set_last_step_output(self, name: str, output: Any, reduce_op: Any = None) -> None:
        """Puts down ``output``: reduced by ``reduce_op``, which it must be in a replica."""
        if reduce_op is None and not tf.distribute.in_cross_replica_context():
            raise ValueError(f"set_last_step_output({name!r}) in a replica needs a reduce_op, "
                             'such as "SUM", but got None.')
        super().set_last_step_output(name, output, reduce_op)

    def run_towers(self, call: Callable[[Callable[..., Any]], Any],
                   fn: Callable[..., Any]) -> Any:
        """What ``call`` makes of ``fn``, the towers' function; what they put down comes out too.

        Towers are traced in a function of their own, out of which a tensor has to be returned.
        """
        before = self.last_step_outputs

        def tower(*args: Any, **kwargs: Any) -> Any:
            self._set_last_step_outputs({})
            return fn(*args, **kwargs), self.last_step_outputs

        result, outputs = call(tower)
        for name, value in outputs.items():
            if isinstance(value, tf.distribute.DistributedValues):
                value = tf.distribute.get_strategy().experimental_local_results(value)[0]
            before[name] = value
        self._set_last_step_outputs(before)
        return result

    def _flat(self, strategy: tf.distribute.Strategy) -> list[Any]:
        """The outputs as a loop carries them: of a value that is not reduced, each tower's."""
        return tf.nest.flatten({name: strategy.experimental_local_results(value)
                                for name, value in self.last_step_outputs.items()})

    def _take(self, strategy: tf.distribute.Strategy, flat: list[Any]) -> None:
        """Puts in place of each output what the loop ended with."""
        parts = tf.nest.pack_sequence_as(
            {name: strategy.experimental_local_results(value)
             for name, value in self.last_step_outputs.items()}, flat)
        for name, values in parts.items():
            self.last_step_outputs[name] = (
                _tf.regroup(values) if self._last_step_outputs_reduce_ops[name] is None
                else values[0])


def run(strategy: tf.distribute.Strategy, context: StepsContext, fn: Callable[..., Any],
        iterator: Any, iterations: Any, initial: Mapping[str, Any] | None) -> StepsContext:
    """Calls ``fn(context, iterator.get_next())`` as often as ``iterations`` says.

    Args:
      strategy: the strategy in whose scope this is.
      context: what ``fn`` gets.
      fn: runs one step, as a rule through ``strategy.run``.
      iterator: gives the batches.
      iterations: how many steps, a number or a tensor.
      initial: for each output that ``fn`` sets, by name, a value of its dtype and shape: a loop in
        a graph has to know them.  One that is not reduced has a value for each replica.
    """
    def step(number: tf.Tensor, *_: Any) -> list[Any]:
        result = fn(context, iterator.get_next())
        done = [leaf for leaf in tf.nest.flatten(result, expand_composites=True)
                if isinstance(leaf, (tf.Tensor, tf.Operation))]
        with tf.control_dependencies(done):
            return [number + 1, *context._flat(strategy)]

    _, *flat = tf.while_loop(
        lambda number, *_: number < iterations, step,
        [tf.constant(0), *tf.nest.flatten(dict(initial or {}))], parallel_iterations=1)
    context.run_op = tf.group(flat)
    context._take(strategy, flat)
    return context
