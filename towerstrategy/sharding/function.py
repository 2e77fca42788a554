"""``strategy.function``: a step written for one device, traced once and run by the towers.

Goes in: a function and the options of ``tf.function``.  Comes out: a :class:`Function`, which is
called like a ``tf.function``.  Sub-batches among its arguments are sharded (see :mod:`step`); all
other arguments are replicated.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, arguments, contexts, refused
from towerstrategy.batch import rows as rows_lib, sub_batches
from towerstrategy.merge import merging, results
from towerstrategy.sharding import step

_log = logging.getLogger("towerstrategy")


class Function:
    """What ``strategy.function`` returns; it is called like the function that it was made of.

    Args:
      strategy: the strategy whose towers run it.
      python_function: the function, written for one device.
      input_signature, jit_compile, options: as for ``tf.function``.

    Attributes:
      python_function: the function that it was made of.
    """

    def __init__(self, strategy: Any, python_function: Callable[..., Any],
                 input_signature: Sequence[Any] | None = None, jit_compile: bool | None = None,
                 **options: Any) -> None:
        arguments.check_function("func", python_function)
        functools.update_wrapper(self, python_function)
        self.python_function, self._strategy = python_function, strategy
        self._input_signature, self._options = input_signature, options
        self._compiles = bool(jit_compile)
        # Another such function calls this one, with all rows.  TensorFlow checks the options here.
        self._function_with_all_rows = tf.function(python_function, input_signature, **options)
        self._parameters = inspect.signature(python_function)
        self._functions: dict[Any, Any] = {}  # one tf.function for each choice of sharded arguments
        self._any_rows = True  # whether it is traced for any number of rows
        self._error: Exception | None = None  # that of its last trace

    @_tf.with_short_tracebacks
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if contexts.has_all_rows() and tf.distribute.get_strategy() is self._strategy:
            return self._function_with_all_rows(*args, **kwargs)
        return self._call(lambda function: function, args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Makes it work as a method, with one :class:`Function` for each instance."""
        if instance is None:
            return self
        key = f"_strategy_function_{id(self)}"
        made = vars(instance).get(key)
        if made is None or made.python_function.__self__ is not instance:  # that of a copy's source
            made = self._of(self.python_function.__get__(instance, owner))
            if isinstance(instance, type):  # a class method's
                setattr(instance, key, made)
            else:
                vars(instance)[key] = made  # not setattr: Keras would track it
        return made

    def __deepcopy__(self, memo: Any) -> Function:
        return self._of(copy.deepcopy(self.python_function, memo))

    def _of(self, python_function: Callable[..., Any]) -> Function:
        """A function with the same options."""
        return Function(self._strategy, python_function, self._input_signature, self._compiles,
                        **self._options)

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> Any:
        """As that of ``tf.function``; sharded arguments are as ``strategy.split`` returns them."""
        with self._strategy.extended.modes.within(keeps_graph=True):
            return self._call(lambda function: function.get_concrete_function, args, kwargs)

    def experimental_get_tracing_count(self) -> int:
        """The number of traces."""
        return sum(function.experimental_get_tracing_count()
                   for function in self._functions.values())

    def pretty_printed_concrete_signatures(self, verbose: bool = True) -> str:
        """The arguments for which it has been traced, as that of ``tf.function``."""
        return "\n\n".join(function.pretty_printed_concrete_signatures(verbose)
                           for function in self._functions.values())

    def __repr__(self) -> str:
        return f"<strategy.function of {self.python_function!r}, for {self._strategy!r}>"

    def _call(self, method: Callable[[Any], Any], args: Any, kwargs: Any) -> Any:
        """The result of a ``method`` of the ``tf.function`` for these arguments.

        It is traced for any number of rows, or, if it needs the number in Python, for each number.
        """
        try:
            return self._call_once(method, args, kwargs)
        except Exception:
            if self._error is None or not self._any_rows or self._input_signature is not None:
                raise
        self._any_rows = False
        try:
            return self._call_once(method, args, kwargs)
        except Exception:
            self._any_rows = True
            raise

    def _call_once(self, method: Callable[[Any], Any], args: Any, kwargs: Any) -> Any:
        function, args, kwargs = self._function_and_arguments(args, kwargs)
        inside = tf.distribute.get_strategy() is self._strategy
        with contextlib.nullcontext() if inside else self._strategy.extended.bare_scope(
                self._strategy):
            self._error, extended = None, self._strategy.extended
            rows = _batch_rows((args, kwargs), extended.workers is None)
            with extended.modes.within(batch_rows=rows):
                result = method(function)(*args, **kwargs)
            if self._error is not None:
                raise self._error
            return result

    def _function_and_arguments(self, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """The ``tf.function`` for these arguments, and the arguments as it takes them."""
        if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
            raise RuntimeError(
                f"{self.__name__}, made by strategy.function, runs on all towers, so it belongs "
                "outside of the function given to strategy.run, which runs once in each tower, and "
                "of a model's train_step. There, use tf.function.")
        bound = self._parameters.bind(*args, **kwargs)
        arguments.check_sharded(self._strategy, bound.arguments)
        bound.arguments = _sharded_arguments(bound.arguments, self._any_rows)
        signature = None
        if self._input_signature is not None:
            bound.apply_defaults()
            signature = _towers_signature(self._input_signature, bound.arguments)
        key = (_tf.may_be_recorded(), self._any_rows if signature is None
               else tuple(tf.nest.flatten(signature)))  # a tape may need another trace
        if key not in self._functions:
            self._functions[key] = tf.function(self._step_on_towers(), signature, **self._options)
        return self._functions[key], bound.args, bound.kwargs

    def _step_on_towers(self) -> Callable[..., Any]:
        """The function to trace, which has the same parameters and runs on the towers."""
        strategy, python_function = self._strategy, self.python_function

        def on_towers(*args: Any, **kwargs: Any) -> Any:
            _warn_of_whole_batches(strategy, self.__name__, (args, kwargs))
            self._error, known = None, strategy.extended.variables()
            try:
                with strategy.scope(), strategy.extended.modes.within(compiles=self._compiles):
                    return step.run(strategy, python_function, args, kwargs, self._any_rows)
            except Exception as error:
                self._error = error
                if {*map(id, strategy.extended.variables())} <= {*map(id, known)}:
                    raise
                return None  # so that TensorFlow initializes new variables; it then traces again

        functools.update_wrapper(on_towers, python_function, updated=())
        wrapped: Any = python_function  # TensorFlow counts its traces and looks for its source
        while isinstance(wrapped, functools.partial):
            wrapped = wrapped.func
        on_towers.__wrapped__ = (  # type: ignore[attr-defined]
            wrapped if inspect.isroutine(wrapped) else wrapped.__call__)
        on_towers.__signature__ = self._parameters  # type: ignore[attr-defined]
        on_towers.__name__ = self.__name__.strip("<>")  # AutoGraph looks for a lambda's source
        return on_towers

    __name__: str = "function"


def _sharded_arguments(bound: Mapping[str, Any], any_rows: bool) -> dict[str, Any]:
    """The arguments, traced for any number of rows if ``any_rows``, else for their number.

    Only the rows of one batch are sharded.  Sub-batches whose numbers of rows differ from the first
    one's are another batch: they are concatenated and replicated.
    """
    sharded = [leaf for leaf in tf.nest.flatten(bound) if isinstance(leaf, sub_batches.SubBatches)]
    if not sharded:
        return dict(bound)

    def argument(leaf: Any) -> Any:
        if not isinstance(leaf, sub_batches.SubBatches):
            return leaf
        if leaf.batch == sharded[0].batch and not _has_rows_of(leaf, sharded[0]):
            return merging.concat(leaf.values, 0)
        return sub_batches.with_open_rows(copy.copy(leaf), any_rows)

    return {name: tf.nest.map_structure(argument, value) for name, value in bound.items()}


def _batch_rows(arguments: Any, has_all: bool) -> int:
    """The rows of the batch among a call's arguments; 0 if unknown here, or to other workers.

    ``has_all``: whether this worker has all rows.
    """
    if tf.executing_eagerly():
        for leaf in tf.nest.flatten(arguments):
            if isinstance(leaf, sub_batches.SubBatches) and (has_all or leaf.rows is not None):
                return sum(sub_batches.row_counts(leaf))
    return 0


def _has_rows_of(leaf: sub_batches.SubBatches, first: sub_batches.SubBatches) -> bool:
    """Whether each tower has as many rows of both; asserted in the step if not known before."""
    if leaf is first or leaf.rows is not None:
        return True
    for one, other in zip(leaf.values, first.values):
        rows = rows_lib.rows_in(one), rows_lib.rows_in(other)
        if all(isinstance(count, int) for count in rows):
            if rows[0] != rows[1]:
                return False
        else:
            tf.debugging.assert_equal(
                *(tf.cast(count, tf.int64) for count in rows), "the arguments of a function made "
                "by strategy.function must be of one batch, but have different numbers of rows. "
                "Call it in eager code to give it batches of different sizes.")
    return True


def _towers_signature(signature: Sequence[Any], bound: Mapping[str, Any]) -> tuple[Any, ...]:
    """``signature``, with the specs of the towers' parts for sharded arguments.

    Raises:
      ValueError: an argument does not match the signature.
    """
    if len(bound) < len(signature):
        raise ValueError(f"input_signature has {len(signature)} entries, but the function takes "
                         f"{len(bound)} arguments: {', '.join(bound)}.")
    return tuple(_signature_of(name, spec, bound[name]) for name, spec in zip(bound, signature))


def _signature_of(name: str, spec: Any, value: Any) -> Any:
    try:
        tf.nest.assert_same_structure(spec, value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must have the structure that input_signature says, {spec!r}, but "
                         f"got {refused.shown(value)}.") from None
    return tf.nest.map_structure(lambda leaf, part: _spec_of_leaf(name, leaf, part), spec, value)


def _spec_of_leaf(name: str, spec: Any, value: Any) -> Any:
    if not isinstance(value, _tf.PerReplica):
        return spec
    parts = [tf.type_spec_from_value(part) for part in value.values]
    wanted = sub_batches.with_any_rows(spec)
    for part in parts:
        if not sub_batches.with_any_rows(part).is_subtype_of(wanted):
            raise ValueError(f"{name} must be as input_signature says, {spec!r}, but the towers' "
                             f"parts of it are {parts!r}.")
    rows = [part.shape[0] for part in parts]
    if spec.shape[0] is not None and None not in rows and sum(rows) != spec.shape[0]:
        raise ValueError(f"{name} must have the {spec.shape[0]} rows that input_signature says, "
                         f"{spec!r}, but the towers have {rows}.")
    specs = [wanted] * len(parts)
    return value.spec_of(specs) if isinstance(value, sub_batches.SubBatches) \
        else _tf.PerReplicaSpec(*specs)


def _warn_of_whole_batches(strategy: Any, name: str, args: Any) -> None:
    """Warns if some arguments are tensors and none is split, as one device then does all of it."""
    leaves = tf.nest.flatten(args)
    split = any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in leaves)
    if not split and strategy.num_replicas_in_sync > 1 and any(
            isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0 for leaf in leaves):
        _log.warning("%s, made by strategy.function, was given no batch that is split, so one "
                     "device does all of it. For the towers to do it give it strategy.split(batch) "
                     "or elements of strategy.experimental_distribute_dataset(dataset).", name)


def _refuse_sub_batches(value: Any, dtype: Any = None, name: str | None = None,
                        as_ref: bool = False) -> Any:
    """Refuses a sub-batch that is no argument: its first part would be taken for all rows."""
    del dtype, name, as_ref
    if contexts.has_all_rows():
        raise RuntimeError(
            "a function made by strategy.function takes sub-batches (of strategy.split, or of a "
            "distributed dataset) as its arguments, but used some that were made outside of it, or "
            "taken from an iterator in it. Call it with next(iterator), or with each batch of a "
            f"loop, in eager code or in a tf.function around it. Got {value!r}.")
    return NotImplemented


for _type in (sub_batches.SubBatches, results.TowerResults):
    tf.register_tensor_conversion_function(_type, _refuse_sub_batches, priority=50)
