"""A model of the API server's field ownership, and of how Helm writes objects, for one kind of object.

Fields are the leaves of nested dictionaries; a list counts as one field. The rules are those of
https://kubernetes.io/docs/reference/using-api/server-side-apply/ and
https://helm.sh/docs/faq/changes_since_helm2/#improved-upgrade-strategy-3-way-strategic-merge-patches
"""

import copy
from typing import Any

from tests.helm.chart import Manifest

Path = tuple[str, ...]
DEFAULTS: dict[Path, Any] = {("spec", "replicas"): 1}
"""A field without a value gets its default from the API server."""


class ApplyConflictError(Exception):
    """Another manager owns a field to which an apply gives another value."""


def leaves(tree: Manifest, path: Path = ()) -> dict[Path, Any]:
    found: dict[Path, Any] = {}
    for key, value in tree.items():
        found |= leaves(value, (*path, key)) if isinstance(value, dict) and value else {(*path, key): value}
    return found


def tree(fields: dict[Path, Any]) -> Manifest:
    root: Manifest = {}
    for path, value in fields.items():
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = copy.deepcopy(value)
    return root


class LiveObject:
    """One object in the API server: its fields, and the managers that own each of them."""

    def __init__(self) -> None:
        self.fields: dict[Path, Any] = dict(DEFAULTS)
        self.owners: dict[str, set[Path]] = {}

    def apply(self, manager: str, manifest: Manifest, *, force: bool = False) -> None:
        """Server-side apply. Raises `ApplyConflictError` if another manager owns a field that changes."""
        wanted = leaves(manifest)
        changed = {path for path, value in wanted.items() if self.fields.get(path) != value}
        for other, owned in self.owners.items():
            # "Conflicts": a field that another manager owns with another value. Equal values are shared.
            if other != manager and owned & changed:
                if not force:
                    raise ApplyConflictError(f"{other} owns {sorted(owned & changed)}")
                owned -= changed
        # "Managers who stop specifying a field": it is removed if no other manager owns it, and then has its default.
        given_up = self.owners.get(manager, set()) - set(wanted)
        self.owners[manager] = set(wanted)
        for path in given_up - set().union(*self.owners.values()):
            self._remove(path)
        self.fields |= wanted

    def update(self, manager: str, path: Path, value: Any) -> None:
        """Write one field as an update or through /scale. A changed value makes `manager` the only owner."""
        if self.fields.get(path) == value:
            return
        self.fields[path] = value
        for owned in self.owners.values():
            owned.discard(path)
        self.owners.setdefault(manager, set()).add(path)

    def merge(self, old: Manifest, new: Manifest) -> None:
        """Helm 3's three-way merge: fields only in `old` are removed, fields of `new` set, all others kept."""
        before, wanted = leaves(old), leaves(new)
        for path in before.keys() - wanted.keys():
            self._remove(path)
        for path, value in wanted.items():
            self.update("helm", path, value)

    def _remove(self, path: Path) -> None:
        self.fields.pop(path, None)
        for owned in self.owners.values():
            owned.discard(path)
        if path in DEFAULTS:
            self.fields[path] = DEFAULTS[path]
