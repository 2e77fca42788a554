"""What an installation of a package brings with it: a bill of materials, and the licences.

    python .ci/licences.py towerstrategy dist/sbom.cdx.json > dist/licences.md

Goes in: an installed distribution, and what it requires here, extras left out.  Comes out:
CycloneDX 1.5 as JSON, for tools; a table in Markdown, for people, and a word on stderr about what
does not say under which licence it is.
"""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import re
import sys
from collections.abc import Iterable

from packaging.requirements import Requirement

Distribution = importlib.metadata.Distribution

_CLASSIFIER = "License :: "
_LONGEST = 60  # more than a name: some put the whole text into the field


def closure(name: str) -> dict[str, Distribution]:
    """The distribution and all that it requires here, by normalized name, in order of names."""
    found: dict[str, Distribution] = {}
    waiting = [(name, frozenset[str]())]
    seen = set()
    while waiting:
        name, extras = waiting.pop()
        name = re.sub(r"[-_.]+", "-", name).lower()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        found[name] = distribution = importlib.metadata.distribution(name)
        for line in distribution.requires or ():
            asked = Requirement(line)
            if asked.marker is None or any(asked.marker.evaluate({"extra": extra})
                                           for extra in ("", *extras)):
                waiting.append((asked.name, frozenset(asked.extras)))
    return dict(sorted(found.items()))


def licence(distribution: Distribution) -> str | None:
    """What its metadata says of its licence; None where that is nothing."""
    about = distribution.metadata
    field = (about.get("License") or "").strip()
    classifiers = [line.rpartition(" :: ")[2] for line in about.get_all("Classifier") or ()
                   if line.startswith(_CLASSIFIER)]
    short = field if len(field) <= _LONGEST and field != "UNKNOWN" else ""
    return about.get("License-Expression") or short or " and ".join(classifiers) or None


def bill(found: Iterable[tuple[str, Distribution]]) -> dict[str, object]:
    """CycloneDX's bill of materials."""
    return {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "components": [
        {"type": "library", "name": name, "version": distribution.version,
         "purl": f"pkg:pypi/{name}@{distribution.version}",
         "licenses": [{"license": {"name": licence(distribution) or "unknown"}}]}
        for name, distribution in found]}


def main(name: str, path: str) -> None:
    found = closure(name)
    pathlib.Path(path).write_text(json.dumps(bill(found.items()), indent=1) + "\n")
    print("| package | version | licence |\n|---|---|---|")
    for package, distribution in found.items():
        print(f"| {package} | {distribution.version} | {licence(distribution) or 'unknown'} |")
    silent = [package for package, distribution in found.items() if licence(distribution) is None]
    if silent:
        print(f"no licence in the metadata of: {', '.join(silent)}", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
