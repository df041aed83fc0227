"""The command line: every command where it fits, where it does not, and where it is used wrongly."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from layoutcheck import LayoutError, Record, layout, layouts
from layoutcheck._cli import main
from layoutcheck.layouts import _page
from layoutcheck.pools import MXFP8KVPool, UnifiedKVPool

ENTRIES = layouts.entries()


@pytest.fixture
def told(capsys):
    """Run a command: its exit code, what it printed, and what it complained about."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def refused(capsys):
    """Run a command that is used wrongly: what it says."""

    def run(*words: object) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert ended.value.code == 2
        assert out == ""
        assert err.startswith("usage: layoutcheck")
        return err

    return run


def words(sizes: dict[str, int]) -> list[str]:
    return [f"{name}={size}" for name, size in sizes.items()]


# --- list, show -------------------------------------------------------------------------------------------------------


def test_list_prints_every_entry_once_with_its_pattern(told):
    code, out, err = told("list")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in lines] == list(ENTRIES)
    assert lines[list(ENTRIES).index("mxfp8.interleaved")].endswith(f"  {ENTRIES['mxfp8.interleaved']}")


def test_list_takes_no_sizes(refused):
    assert "unrecognized arguments: page=4" in refused("list", "page=4")


@pytest.mark.parametrize("name", ENTRIES)
def test_show_draws_every_entry_open_and_concrete(told, name):
    entry = ENTRIES[name]
    sizes = _page.example(entry)
    drawing = "\n".join(_page.picture(entry, sizes))
    code, out, err = told("show", name)
    assert (code, err) == (0, "")
    assert f"open       {', '.join(entry.dims)}\n" in out
    assert f", with {' '.join(words(sizes))}:\n{drawing}\n" in out
    code, out, err = told("show", name, *words(sizes))
    made = entry(**sizes)
    assert (code, err) == (0, "")
    assert "\nopen" not in out
    assert f"bytes      {made.nbytes} bytes" in out
    assert out.endswith(f"elements:\n{drawing}\n" if not isinstance(entry, Record) else f"bytes:\n{drawing}\n")


def test_show_prints_shape_strides_and_rules(told):
    _, out, _ = told("show", "mxfp8.interleaved", "slot=8192", "head=8", "head_dim=128", "page_size=128")
    lines = [line.split() for line in out.splitlines()]
    assert ["page", "head", "lane", "chunk", "group"] in lines
    assert ["shape", "64", "8", "32", "4", "4"] in lines
    assert ["strides", "4096", "512", "16", "4", "1"] in lines
    assert "rule       new memory is filled with 0" in out
    assert "bytes      262144 bytes (256.00 KiB)" in out


def test_show_prints_expressions_for_what_is_open(told):
    _, out, _ = told("show", "mxfp8.interleaved", "page_size=64")
    assert "open       slot, head, head_dim\n" in out
    assert "bytes      group * head * page * 64\n" in out
    assert ["shape", "page", "head", "32", "2", "group"] in [line.split() for line in out.splitlines()]


def test_show_prints_a_records_sections_with_their_byte_offsets(told):
    _, out, _ = told("show", "dsa.index_132", "page=4", "page_size=64")
    assert "section data: e4m3, from byte 0:" in out
    assert "section scale: fp32, from byte 8192:" in out
    _, out, _ = told("show", "dsa.index_132")
    assert "section scale: fp32, from byte page_size * 128:" in out


def test_show_draws_the_true_beginning_of_what_is_large(told):
    small = dict(slot=1024, head=8, head_dim=128, page_size=64)
    _, out, _ = told("show", "paged.hnd", *words(small | {"slot": 2**50}))
    drawn = out.partition("memory order, in elements, as far as slot=1024:\n")[2]
    assert drawn == "\n".join(_page.picture(ENTRIES["paged.hnd"], small)) + "\n"
    _, out, _ = told("show", "paged.hnd", "slot=64", "page_size=64", f"head={2**30}", f"head_dim={2**20}")
    assert out.endswith("memory order: too large to draw; give smaller sizes\n")


def test_show_refuses_sizes_that_contradict_with_the_librarys_error(told):
    sizes = dict(slot=100, page_size=64, head=8, head_dim=128)
    with pytest.raises(LayoutError) as raised:
        layout("paged.nhd")(**sizes)
    assert told("show", "paged.nhd", *words(sizes)) == (1, "", f"{raised.value}\n")


def test_show_of_wrong_words_says_what_was_meant(refused):
    assert "did you mean 'mxfp8.interleaved' or" in refused("show", "mxfp8.interleave")
    assert "did you mean 'head'?" in refused("show", "mxfp8.interleaved", "heads=8")
    assert "'dtype' is no size of mxfp8.interleaved" in refused("show", "mxfp8.interleaved", "dtype=8")
    for value in ("many", "-4", "2.5", "9" * 19, ""):
        said = refused("show", "mxfp8.interleaved", f"head={value}")
        assert f"head={value}: head is a number of 1 to 18 digits\n" in said
    assert "head is given twice" in refused("show", "mxfp8.interleaved", "head=1", "head=2")
    assert "'8' is no dim=value" in refused("show", "mxfp8.interleaved", "8")
    assert "required: NAME\n" in refused("show")


# --- explain ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENTRIES)
def test_explain_accepts_what_every_entry_allocates(told, name):
    known = _page.example(ENTRIES[name])
    made = ENTRIES[name](**known)
    if isinstance(made, Record):  # a record is checked by its buffer, which may count pages only
        known = {d: known[d] if d in known else made.buffer.values_of(d) for d in ENTRIES[name].buffer.dims}
    shape, stride = (",".join(map(str, n)) for n in (made.shape, made.strides))
    code, out, err = told("explain", name, *words(known), "--shape", shape, "--stride", stride)
    assert (code, err) == (0, "")
    solved = dict(word.split("=") for word in out.splitlines()[1].split())
    assert {d: int(solved[d]) for d in known} == known


def test_explain_prints_the_sizes_that_it_solved(told):
    code, out, _ = told("explain", "mxfp8.interleaved", "--shape", "64,8,32,4,4", "--dtype", "uint8")
    assert code == 0
    assert out.startswith("mxfp8.interleaved: a tensor of shape (64, 8, 32, 4, 4) and dtype uint8 fits\n")
    assert {"page_size=128", "slot=8192", "head=8", "head_dim=128"} <= set(out.split())


@pytest.mark.parametrize(
    ("sizes", "shape", "stride", "dtype"),
    [
        ({}, (4, 2, 32, 4), None, None),
        ({"page_size": 64}, (64, 8, 32, 4, 4), None, None),
        ({"page_size": 128}, (64, 8, 32, 4, 4), (4096, 16, 128, 4, 1), None),
        ({}, (64, 8, 32, 4, 4), None, "bfloat16"),
        ({"slot": 4096}, (64, 8, 32, 4, 4), None, None),
    ],
)
def test_explain_prints_the_error_as_the_library_raises_it(told, sizes, shape, stride, dtype):
    entry = layout("mxfp8.interleaved")
    own = getattr(torch, dtype) if dtype else entry.dtype
    tensor = torch.empty(shape, dtype=own)
    tensor = tensor if stride is None else tensor.as_strided(shape, stride)
    with pytest.raises(LayoutError) as raised:
        entry.check(tensor, **sizes)
    options = ["--shape", ",".join(map(str, shape))]
    options += ["--stride", ",".join(map(str, stride))] if stride else []
    options += ["--dtype", dtype] if dtype else []
    assert told("explain", "mxfp8.interleaved", *options, *words(sizes)) == (1, f"{raised.value}\n", "")


def test_explain_takes_sizes_before_and_after_options(told):
    before = told("explain", "mxfp8.interleaved", "page_size=64", "--shape", "64,8,32,4,4")
    assert before == told("explain", "mxfp8.interleaved", "--shape", "64,8,32,4,4", "page_size=64")
    assert before == told("explain", "--shape", "64,8,32,4,4", "mxfp8.interleaved", "page_size=64")
    assert before[0] == 1


def test_explain_of_wrong_words(refused):
    name, shape = "mxfp8.interleaved", ("--shape", "64,8,32,4,4")
    assert "required: --shape" in refused("explain", name)
    assert "'4,x' is no list of sizes such as 4,2,32,4" in refused("explain", name, "--shape", "4,x")
    assert "5 sizes in --shape, 2 in --stride" in refused("explain", name, *shape, "--stride", "1,2")
    assert "is no element type; there are e4m3" in refused("explain", name, *shape, "--dtype", "fp7")
    assert "did you mean 'page_size'?" in refused("explain", name, *shape, "pagesize=64")
    assert "no tensor can be made of" in refused("explain", name, "--shape", f"{10**17},{10**17}")
    assert "give row=... col=..." in refused("explain", "scale.128x4", "--shape", "1,1,32,4,4")
    assert "give col=...\n" in refused("explain", "scale.128x4", "--shape", "1,1,32,4,4", "row=128")
    assert "unrecognized arguments: --shap" in refused("explain", name, *shape, "--shap", "4")


# --- fit --------------------------------------------------------------------------------------------------------------


def test_fit_prints_how_many_pages_and_which_buffers(told):
    sizes = dict(page_size=128, head=8, head_dim=128)
    count = MXFP8KVPool.fit(60 * 2**30, free="page", layers=3, **sizes)
    code, out, err = told("fit", "MXFP8KVPool", "--bytes", "60GiB", "--layers", 3, *words(sizes))
    assert (code, err) == (0, "")
    assert out.startswith(f"page={count} fits: {MXFP8KVPool.nbytes(page=count, layers=3, **sizes)} bytes")
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [
        ["k", "paged.nhd,"], ["v", "paged.nhd,"], ["k_scale", "mxfp8.interleaved,"], ["v_scale", "mxfp8.interleaved,"],
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "free", "sizes"), [
    ("paged.nhd", "page", dict(page_size=64, head=8, head_dim=128)),
    ("scale.128x4", "row", dict(col=20)),
    ("dsa.index_132", "page", dict(page_size=64)),
    ("rows.thd", "token", dict(head=3, head_dim=96)),
])  # fmt: skip
def test_fit_of_a_layout_is_exact(told, name, free, sizes):
    budget = 10**7 + 1
    chosen = [] if free in ("page", "row") else ["--free", free]  # a page or row is counted without being asked
    code, out, _ = told("fit", name, "--bytes", budget, *chosen, *words(sizes))
    word, count = out.split()[0].split("=")
    used = [ENTRIES[name](**sizes, **{free: int(count) + more}).nbytes for more in (0, 1)]
    assert (code, word) == (0, free)
    assert used[0] <= budget < used[1]
    assert f" fits: {used[0]} bytes" in out


def test_fit_takes_words_for_what_a_pool_chooses_by(told, refused):
    for kv_dtype, buffers in (("fp8", ["kv", "kv_scale"]), ("bf16", ["kv"])):
        code, out, _ = told(
            "fit", "UnifiedKVPool", "--bytes", "1.5GB", "page_size=16", "dim=576", f"kv_dtype={kv_dtype}"
        )
        count = UnifiedKVPool.fit(15 * 10**8, free="page", page_size=16, dim=576, kv_dtype=kv_dtype)
        assert code == 0
        assert out.startswith(f"page={count} fits: ")
        assert [line.split()[0] for line in out.splitlines()[1:]] == buffers
    assert "UnifiedKVPool needs kv_dtype=WORD" in refused("fit", "UnifiedKVPool", "--bytes", "1GB", "dim=576")


def test_fit_says_when_not_even_one_fits(told):
    code, out, _ = told("fit", "MXFP8KVPool", "--bytes", "6KiB", "page_size=128", "head=8", "head_dim=128")
    assert code == 1
    assert out == "not even one page fits: it takes 270336 bytes (264.00 KiB), the budget is 6144 bytes (6.00 KiB)\n"


def test_fit_refuses_sizes_that_contradict(told):
    code, out, err = told("fit", "MXFP8KVPool", "--bytes", "1GiB", "page_size=64", "head=8", "head_dim=100")
    assert (code, out) == (1, "")
    assert "100 % 32" in err


def test_fit_of_wrong_words(refused):
    pool = ("fit", "MXFP8KVPool")
    sizes = ("page_size=64", "head=8", "head_dim=128")
    assert "required: --bytes" in refused(*pool)
    assert "'60QB' is no number of bytes such as" in refused(*pool, "--bytes", "60QB")
    assert "no pool 'MXFP8KVPol'; did you mean 'MXFP8KVPool'?" in refused("fit", "MXFP8KVPol", "--bytes", 1)
    assert "did you mean 'paged.nhd" in refused("fit", "paged.nhdd", "--bytes", 1)
    assert "page_size=x: page_size is a number" in refused(*pool, "--bytes", 1, "page_size=x")
    assert "'col' is no size of this pool (head," in refused(*pool, "--bytes", 1, "col=4")
    assert "needs head_dim" in refused(*pool, "--bytes", 1, *sizes[:2])
    assert "page is what is counted" in refused(*pool, "--bytes", 1, *sizes, "page=3")
    assert "'pages' is no size of this pool" in refused(*pool, "--bytes", 1, *sizes, "--free", "pages")
    assert "try --free page\n" in refused(*pool, "--bytes", 1, *sizes, "--free", "slot")
    assert "--layers must be 1 or more, got 0" in refused(*pool, "--bytes", 1, *sizes, "--layers", 0)
    said = refused("fit", "rows.thd", "--bytes", 1, "head=1", "head_dim=8")
    assert "--free must say what is counted: head, head_dim, token" in said


# --- diff -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def manifests(tmp_path):
    """Write manifests to files, each with other top-level fields."""

    def write(page: int, **fields: object) -> Path:
        pool = MXFP8KVPool.allocate(page=page, page_size=128, head=2, head_dim=64, device="meta")
        path = tmp_path / f"{page}{len(list(tmp_path.iterdir()))}.json"
        path.write_text(json.dumps(pool.manifest() | fields))
        return path

    return write


def test_diff_prints_every_field_that_differs(told, manifests):
    code, out, err = told("diff", manifests(2), manifests(4))
    assert (code, err) == (1, "")
    assert "dims.page: 2 and 4\n" in out
    assert "buffers.v_scale.shape: [2, 2, 32, 4, 2] and [4, 2, 32, 4, 2]\n" in out
    assert len(out.splitlines()) == 2 + 4 * 4


def test_diff_of_the_same(told, manifests):
    assert told("diff", manifests(2), manifests(2)) == (0, "the manifests say the same\n", "")


def test_diff_prints_nothing_that_a_terminal_obeys(told, manifests):
    code, out, _ = told("diff", manifests(2), manifests(2, **{"\x1b[31mred\u202e": "\x07"}))
    assert code == 1
    assert out == r"\x1b[31mred\u202e: absent and '\\x07'" + "\n"


def test_diff_of_what_is_no_manifest(refused, manifests, tmp_path):
    good, other = manifests(2), tmp_path / "other.json"
    assert "absent.json: No such file or directory" in refused("diff", good, tmp_path / "absent.json")
    for text in (b"", b"[1]", b'{"format": 7}', b"\xff\xfe\x00", b"[" * 10**5):
        other.write_bytes(text)
        assert "other.json: no manifest: " in refused("diff", good, other)
        assert "other.json: no manifest: " in refused("diff", other, good)
    assert "required: B.json" in refused("diff", good)


# --- the program ------------------------------------------------------------------------------------------------------


def test_no_command_or_another_one(refused):
    assert "required: COMMAND" in refused()
    assert "invalid choice: 'draw'" in refused("draw")


def test_the_entry_point_is_main():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["layoutcheck"].partition(":")
    assert getattr(importlib.import_module(module), name) is main


def test_as_a_program_it_prints_plain_text_and_exits_with_the_code():
    command = [sys.executable, "-m", "layoutcheck", "explain", "mxfp8.interleaved", "--shape", "4,2,32,4"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (1, "")
    assert ran.stdout.startswith("mxfp8.interleaved: tensor does not match mxfp8.interleaved\n")
    assert "\x1b" not in ran.stdout


def test_a_reader_who_leaves_is_no_error():
    ran = subprocess.Popen(
        [sys.executable, "-m", "layoutcheck", "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    ran.stdout.close()
    assert ran.stderr.read() == ""
    assert ran.wait() == 141
    ran.stderr.close()
