"""The name scopes of the operations of towers and stages.

Goes in: a tower's number and device, or the name of an operation.  Comes out: the scope of the
tower's operations, which errors and profiles show; or the name without such scopes.
"""

from __future__ import annotations

import re

from towerstrategy.placement import names

# The scope of operations that run once, and the scope in it of those that only writes need.
ONCE, UPDATE = "merge", "tower_update"
STAGE = "tower_stage_"
GRADIENTS = "gradient_tape/"  # TensorFlow's scope of the gradients of a tape
TOWER = re.compile(r"\btower_(\d+)_[A-Z]+_\d+\b")
_OWN = re.compile(rf"tower_\d+_[A-Z]+_\d+|{ONCE}|{UPDATE}(_\d+)?|{STAGE}\d+(_\d+)?")
_OWNER = re.compile(rf"{TOWER.pattern}|\b{UPDATE}\b")
_STAGE = re.compile(rf"\b{STAGE}(\d+)(?:_\d+)?/")


def of_tower(tower: int, device: str) -> str:
    """The name scope of a tower's operations."""
    return f"tower_{tower}_{names.short_name(device).replace(':', '_')}"


def plain_name(name: str) -> str:
    """The name that an operation, or a scope, has on one device: without our scopes.

    >>> plain_name("tower_1_CPU_2/dense/MatMul")
    'dense/MatMul'
    """
    return "/".join(part for part in name.split("/") if part and not _OWN.fullmatch(part))


def owner_in(name: str) -> str:
    """The tower's scope, or the update's, in an operation's name; "" if it is in neither.

    >>> owner_in("gradient_tape/tower_1_CPU_2/dense/MatMul"), owner_in("merge/AddN")
    ('tower_1_CPU_2', '')
    """
    found = _OWNER.search(name)
    return found[0] if found else ""


def stage_in(name: str) -> int | None:
    """The stage in an operation's name; of several, the innermost; None if there is none."""
    found = _STAGE.findall(name)
    return int(found[-1]) if found else None
