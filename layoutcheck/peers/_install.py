"""Putting contracts in front of another project's functions, and taking them away again.

A function may be known under its name in several modules, wherever somebody wrote ``from ... import``: it is replaced
in every loaded module that holds it, and put back in every one. What a contract says is in the project's own module.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pkgutil
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from layoutcheck import _mode
from layoutcheck._contract import guard
from layoutcheck._rules import Rule


@dataclass
class Peer:
    """One project: its name in the package index, the versions that were compared, and its guarded functions.

    ``since`` is the first version and ``before`` the first that is out of the range, as ``"0.5.23"``.
    """

    name: str
    distribution: str
    since: str
    before: str
    targets: dict[str, Target] = field(default_factory=dict)

    def guard(self, where: str, *rules: str | Rule, **keywords: Any) -> None:
        """Declare the contract of a function, ``"a.module:function"``, or a method, ``"a.module:Class.method"``.

        Rules and keywords are those of :func:`layoutcheck.guard`.
        """
        module, _, path = where.partition(":")
        self.targets[path] = Target(module, path, rules, keywords)


@dataclass(frozen=True)
class Target:
    """One function and its contract: ``path`` is its name, or its class's and its own."""

    module: str
    path: str
    rules: tuple[str | Rule, ...]
    keywords: dict[str, Any]

    def guard(self, original: Callable[..., Any], mode: _mode.Mode | None = None) -> Any:
        """The guarded function. Its own annotations say nothing here: the project does not check them either."""
        declared = dict.fromkeys([*inspect.signature(original).parameters, "return_"], Any)
        return guard(original, *self.rules, mode=mode, **declared | self.keywords)


@dataclass(frozen=True)
class _Installed:
    original: Any
    guarded: Any
    holder: type | None  # the class, for a method
    inherited: bool = False  # the class had the method from another one


_lock = threading.Lock()
_installed: dict[str, dict[str, _Installed]] = {}


def install(name: str, *, only: Iterable[str] | None = None, mode: _mode.Mode | None = None) -> tuple[str, ...]:
    """Put the contracts of a project in front of its functions, in every loaded module; return which.

    Imports the modules that define them. ``only`` names some of the functions (see :func:`functions`); ``mode``
    overrides the process's mode for them. What is installed already stays as it is. With ``LAYOUTCHECK=off`` nothing
    is replaced.

    Raises ``ValueError`` for a project without contracts and for a function that has none; ``ImportError`` if the
    project is not there or its version is not in the range that the contracts were compared with.
    """
    peer = _peer(name)
    _check_version(peer)
    wanted = _chosen(peer, only)
    with _lock:
        there = _installed.setdefault(name, {})
        made = {t.path: _guarded(t, mode) for t in wanted if t.path not in there}
        if not _mode.OFF:
            for path, one in made.items():
                _replace(path, one.holder, one.original, one.guarded)
                there[path] = one
    return tuple(t.path for t in wanted)


def uninstall(name: str) -> None:
    """Put a project's own functions back, in every loaded module that holds a guarded one."""
    with _lock:
        for path, one in _installed.pop(name, {}).items():
            if one.inherited:
                delattr(one.holder, path.rpartition(".")[2])
            else:
                _replace(path, one.holder, one.guarded, one.original)


def installed(name: str) -> dict[str, Any]:
    """The guarded functions of a project that are in place now; each has ``.contract``."""
    return {path: one.guarded for path, one in _installed.get(name, {}).items()}


def functions(name: str) -> tuple[str, ...]:
    """The functions of a project that have a contract."""
    return tuple(_peer(name).targets)


def _peer(name: str) -> Peer:
    known = sorted(m.name for m in pkgutil.iter_modules(importlib.import_module(__package__).__path__))
    known = [k for k in known if not k.startswith("_")]
    if name not in known:
        raise ValueError(f"no contracts for {name!r}; there are some for {', '.join(known)}")
    found: Peer = importlib.import_module(f"{__package__}.{name}").PEER
    return found


def _chosen(peer: Peer, only: Iterable[str] | None) -> list[Target]:
    if only is None:
        return list(peer.targets.values())
    if missing := [o for o in only if o not in peer.targets]:
        raise ValueError(f"{peer.name} has no contract for {missing[0]!r}; it has some for {', '.join(peer.targets)}")
    return [peer.targets[o] for o in only]


def _check_version(peer: Peer) -> None:
    try:
        version = importlib.metadata.version(peer.distribution)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"{peer.distribution} is not installed here") from None
    if not _numbers(peer.since) <= _numbers(version) < _numbers(peer.before):
        raise ImportError(
            f"{peer.distribution} {version} is installed; the contracts were compared with versions from {peer.since} "
            f"up to, not including, {peer.before}. Another version may take other layouts: nothing was guarded"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """``(0, 5, 23)`` for ``"0.5.23"`` and for ``"0.5.23+cpu"``; what follows a release's numbers does not count."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(n) for n in release[0].split(".")) if release else ()


def _guarded(target: Target, mode: _mode.Mode | None) -> _Installed:
    module = importlib.import_module(target.module)
    holder, _, name = target.path.rpartition(".")
    owner: Any = getattr(module, holder) if holder else module
    original: Callable[..., Any] = getattr(owner, name)
    inherited = bool(holder) and name not in vars(owner)
    return _Installed(original, target.guard(original, mode), owner if holder else None, inherited)


def _replace(path: str, holder: type | None, old: Any, new: Any) -> None:
    if holder is not None:
        setattr(holder, path.rpartition(".")[2], new)
        return
    for namespace, name in list(_holding(old)):
        namespace[name] = new


def _holding(function: Any) -> Iterator[tuple[dict[str, Any], str]]:
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", None)
        if isinstance(namespace, dict) and namespace is not globals():
            for name, value in list(namespace.items()):
                if value is function:
                    yield namespace, name
