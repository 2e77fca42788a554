"""The name scopes of what towers, and their stages, do.

Goes in: a tower's number and device, or the name of an operation.  Comes out: the scope of the
tower's operations, by which errors and profiles name the tower; or the name without such scopes.
"""

from __future__ import annotations

import re

from towerstrategy.placement import names

# What is done once, and in it what the optimizer does with the merged gradients.
ONCE, UPDATE = "merge", "tower_update"
STAGE = "tower_stage_"
GRADIENTS = "gradient_tape/"  # TensorFlow's, of all that a tape records
TOWER = re.compile(r"\btower_(\d+)_[A-Z]+_\d+\b")
_OWN = re.compile(rf"tower_\d+_[A-Z]+_\d+|{ONCE}|{UPDATE}(_\d+)?|{STAGE}\d+(_\d+)?")
_OWNER = re.compile(rf"{TOWER.pattern}|\b{UPDATE}\b")
_STAGE = re.compile(rf"\b{STAGE}(\d+)(?:_\d+)?/")


def of_tower(tower: int, device: str) -> str:
    """The name scope of a tower's operations."""
    return f"tower_{tower}_{names.short_name(device).replace(':', '_')}"


def plain_name(name: str) -> str:
    """The name of an operation, or of a scope, as it is on one device.

    >>> plain_name("tower_1_CPU_2/dense/MatMul")
    'dense/MatMul'
    """
    return "/".join(part for part in name.split("/") if part and not _OWN.fullmatch(part))


def owner_in(name: str) -> str:
    """Whose work an operation is: a tower's, by its scope; the optimizer's; or "", as that of both.

    >>> owner_in("gradient_tape/tower_1_CPU_2/dense/MatMul"), owner_in("merge/AddN")
    ('tower_1_CPU_2', '')
    """
    found = _OWNER.search(name)
    return found[0] if found else ""


def stage_in(name: str) -> int | None:
    """The stage in an operation's name scope; of several, the inner one's."""
    found = _STAGE.findall(name)
    return int(found[-1]) if found else None
