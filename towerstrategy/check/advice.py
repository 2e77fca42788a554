"""Which merge device to use, and whether the towers pay, in a sentence.

Goes in: what :mod:`speed` measured.  Comes out: the sentence.
"""

from __future__ import annotations

from collections.abc import Sequence

from towerstrategy.check import speed

# Of merge devices this close the first is advised: those that take the least GPU memory come first.
_AS_FAST = 0.97
# Times the rows a second of one device from which on the towers are said to pay.
_PAYS = 1.1


def sentence(results: Sequence[speed.Result], one_physical: bool, on_gpus: bool) -> str:
    """The advice, for towers that share ``one_physical`` device or not, and are GPUs or not."""
    good = {result.way: result for result in results
            if result.error is None and not result.way.endswith(speed.NO_XLA)}
    alone = good.pop(speed.ONE_DEVICE, None)
    mirrored = good.pop(speed.MIRRORED, None)
    if not good:
        return "Nothing was measured on towers, so there is nothing to advise."
    fastest = max(good.values(), key=lambda result: result.rows_per_second)
    best = next(result for result in good.values()
                if result.rows_per_second >= _AS_FAST * fastest.rows_per_second)
    use = f'Use merge_device="{best.way}"'
    if alone is None:
        return f"{use}; one device was not measured, so whether towers pay is not known."
    times = best.rows_per_second / alone.rows_per_second
    measured = (f"{best.devices} tower{'s' if best.devices > 1 else ''} train {times:.2f} times "
                f"the rows a second of one device{' with XLA' * alone.xla}"
                + ("" if mirrored is None else ", "
                f"MirroredStrategy {mirrored.rows_per_second / alone.rows_per_second:.2f} times"))
    if one_physical or best.devices == 1:
        why = (f"the towers are parts of one {'GPU' if on_gpus else 'CPU'}, whose time they share"
               if best.devices > 1 else "there is one tower")
        more = ("; what is more than once is how the operations use that device, not a second one"
                if times > 1 else "")
        return (f"{use}. This says nothing of several devices, as {why}: {measured} with the same "
                f"batch{more}.")
    if times < _PAYS:
        return (f"{use}, but the towers do not pay for a network of this kind: {measured}; give "
                "each tower more rows, or see the rates between devices above.")
    return f"{use}: the towers pay, {measured} ({times / best.devices:.0%} of linear)."
