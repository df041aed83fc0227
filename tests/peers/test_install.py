"""Contracts in front of a project that is made up here: in every module, for the right versions, and back again."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from layoutcheck import LayoutError, peers

PROJECT = {
    "toyproject/__init__.py": "",
    "toyproject/kernels.py": (
        "import torch\n"
        "def store(rows, cache: 'Nowhere', *, page_size=16): return rows.shape[0]\n"
        "class Base:\n"
        "    def take(self, rows): return 'take'\n"
        "class Pool(Base):\n"
        "    page_size = 8\n"
        "    def set(self, rows): return 'set'\n"
    ),
    "toyproject/user.py": "from toyproject.kernels import store as keep, Pool\n",
    "toyproject/later.py": "from toyproject.kernels import store\n",
}
CONTRACTS = """
from jaxtyping import Float32
from torch import Tensor
from layoutcheck.peers._install import Peer

PEER = Peer("toyproject", "toy-project", since="1.2", before="1.10")
PEER.guard(
    "toyproject.kernels:store", "page_size % 16 == 0", "slot % page_size == 0",
    rows=Float32[Tensor, "token dim"], cache=Float32[Tensor, "slot dim"], page_size=int,
)
PEER.guard(
    "toyproject.kernels:Pool.set", "token % page_size == 0",
    derive=dict(page_size=lambda self, **_: self.page_size), rows=Float32[Tensor, "token dim"],
)
PEER.guard("toyproject.kernels:Pool.take", rows=Float32[Tensor, "token dim"])
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project of version 1.2.3 and its contracts."""
    for name, text in PROJECT.items():
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(text)
    (tmp_path / "contracts").mkdir()
    (tmp_path / "contracts" / "toyproject.py").write_text(CONTRACTS)
    version(tmp_path, "1.2.3")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(peers, "__path__", [*peers.__path__, str(tmp_path / "contracts")])
    yield tmp_path
    peers.uninstall("toyproject")
    for module in [m for m in sys.modules if m.startswith(("toyproject", "layoutcheck.peers.toyproject"))]:
        del sys.modules[module]


def version(path: Path, number: str) -> None:
    info = path / "site" / "toy_project-1.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: toy-project\nVersion: {number}\n")


def call(store):
    return store(torch.zeros(3, 4), torch.zeros(32, 4), page_size=16)


def wrong(store):
    return store(torch.zeros(3, 4), torch.zeros(32, 5), page_size=16)


def test_a_function_is_guarded_wherever_it_is_known(project):
    user = importlib.import_module("toyproject.user")
    original = user.keep
    assert peers.install("toyproject") == ("store", "Pool.set", "Pool.take")
    kernels = importlib.import_module("toyproject.kernels")
    later = importlib.import_module("toyproject.later")
    assert kernels.store is user.keep is later.store
    assert peers.installed("toyproject")["store"] is user.keep
    assert call(user.keep) == 3
    with pytest.raises(LayoutError, match="cache does not match"):
        wrong(user.keep)
    peers.uninstall("toyproject")
    assert kernels.store is user.keep is later.store is original
    assert wrong(user.keep) == 3
    assert peers.installed("toyproject") == {}


def test_a_method_is_guarded_for_instances_that_exist(project):
    kernels = importlib.import_module("toyproject.kernels")
    pool = kernels.Pool()
    peers.install("toyproject")
    assert pool.set(torch.zeros(16, 4)) == "set"
    with pytest.raises(LayoutError, match=r"token % page_size"):
        pool.set(torch.zeros(12, 4))
    peers.uninstall("toyproject")
    assert pool.set(torch.zeros(12, 4)) == "set"


def test_a_method_that_is_inherited_is_guarded_in_the_class_that_is_named(project):
    kernels = importlib.import_module("toyproject.kernels")
    peers.install("toyproject")
    with pytest.raises(LayoutError, match="rows"):
        kernels.Pool().take(torch.zeros(3))
    assert kernels.Base().take(torch.zeros(3)) == "take"
    peers.uninstall("toyproject")
    assert kernels.Pool().take(torch.zeros(3)) == "take"
    assert "take" not in vars(kernels.Pool)


def test_some_functions_and_twice(project):
    assert peers.functions("toyproject") == ("store", "Pool.set", "Pool.take")
    peers.install("toyproject", only=["Pool.set"])
    kernels = importlib.import_module("toyproject.kernels")
    method = kernels.Pool.set
    assert wrong(kernels.store) == 3
    peers.install("toyproject")
    assert kernels.Pool.set is method
    assert set(peers.installed("toyproject")) == {"store", "Pool.set", "Pool.take"}
    with pytest.raises(ValueError, match=r"no contract for 'stores'; it has some for store, Pool.set, Pool.take"):
        peers.install("toyproject", only=["stores"])


def test_a_mode_of_their_own(project):
    peers.install("toyproject", mode="warn")
    with pytest.warns(UserWarning, match="cache does not match"):
        assert wrong(importlib.import_module("toyproject.kernels").store) == 3


def test_annotations_of_the_project_are_not_read(project):
    """``cache: 'Nowhere'`` cannot be, and is replaced; an argument without a contract may be anything."""
    peers.install("toyproject")
    kernels = importlib.import_module("toyproject.kernels")
    assert kernels.store.contract.unresolved == ()


@pytest.mark.parametrize("number", ["1.2", "1.2.0rc1", "1.9.99", "1.2.3+cu128", "1.2.post1"])
def test_versions_inside_the_range(project, number):
    version(project, number)
    peers.install("toyproject")


@pytest.mark.parametrize("number", ["1.1.9", "1.10", "1.10.1", "2", "0.9"])
def test_versions_outside_the_range_are_refused(project, number):
    version(project, number)
    with pytest.raises(
        ImportError, match=rf"toy-project {number} is installed; .* from 1.2 up to, not including, 1.10"
    ):
        peers.install("toyproject")
    assert "toyproject.kernels" not in sys.modules


def test_a_project_that_is_not_there(project):
    (project / "site" / "toy_project-1.dist-info" / "METADATA").unlink()
    (project / "site" / "toy_project-1.dist-info").rmdir()
    with pytest.raises(ImportError, match="toy-project is not installed here"):
        peers.install("toyproject")


def test_a_project_without_contracts():
    with pytest.raises(ValueError, match=r"no contracts for 'numpy'; there are some for .*sglang"):
        peers.install("numpy")


def test_nothing_is_imported_before_it_is_asked_for():
    code = (
        "import sys, layoutcheck, layoutcheck.peers as p; "
        "assert not {'sglang', 'flashinfer', 'torchao', 'triton'} & set(sys.modules); p.functions('sglang'); "
        "assert not {'sglang', 'flashinfer', 'torchao', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_when_off_nothing_is_replaced(project):
    code = (
        f"import sys; sys.path.insert(0, {str(project / 'site')!r}); from layoutcheck import peers; "
        f"peers.__path__.append({str(project / 'contracts')!r}); from toyproject import kernels; f = kernels.store; "
        "peers.install('toyproject'); assert kernels.store is f; assert peers.installed('toyproject') == {}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"LAYOUTCHECK": "off", "PATH": ""})


@pytest.mark.parametrize("name", ["sglang", "flashinfer", "torchao", "torch"])
def test_every_project_has_contracts_and_versions(name):
    assert peers.functions(name)
    peer = importlib.import_module(f"layoutcheck.peers.{name}").PEER
    assert peer.since < peer.before
    assert peer.name == name
