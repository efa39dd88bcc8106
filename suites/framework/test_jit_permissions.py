"""A library that somebody else could have put into the cache is built again, and never loaded."""

from __future__ import annotations

import errno
import grp
import hashlib
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusiongate.jit import Source, Target, forget, library, load
from fusiongate.jit.cache import CACHE_VARIABLE, cached_entries, trusted_folder

from .tiny_sources import write_tiny

HOST = Target.host()
STRANGER = 54321
PLANTED = 1000
"""What the planted library adds, where the right one adds 2."""


@pytest.fixture(scope="session")
def planted_library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A library that loads and passes every probe, and is not what the source says."""
    folder = tmp_path_factory.mktemp("planted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(folder / "cache"))
        library(write_tiny(folder, addend=PLANTED), HOST)
    forget()
    return next((folder / "cache").rglob("library.so")).read_bytes()


@pytest.fixture
def cache(built_cache: Path, planted_library: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache, which holds the tiny library; compiling it again is a copy. No group is a user's own."""
    (right,) = built_cache.rglob("library.so")

    def compile_again(source: Source, target: Target, compiler: object, folder: Path) -> Path:
        return Path(shutil.copy(right, folder / "tiny.so"))

    monkeypatch.setattr(load, "compile_library", compile_again)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group(("staff", "x", gid, ["others"])))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    shutil.copytree(built_cache, tmp_path / "cache")
    forget()
    yield tmp_path / "cache"
    forget()


@pytest.fixture
def tiny(cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Source:
    caplog.set_level(logging.INFO, logger="fusiongate")
    return write_tiny(tmp_path / "source")


def plant(cache: Path, planted: bytes) -> Path:
    """Replace the library and its checksum; its folder."""
    (path,) = cache.rglob("library.so")
    path.write_bytes(planted)
    manifest = path.with_name("manifest.json")
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "sha256": hashlib.sha256(planted).hexdigest()}))
    return path.parent


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file belong to another user; for whoever may not do that, only appear to."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, -1)
        return
    lstat = os.lstat

    def appearing(asked: object, *args: object, **named: object) -> os.stat_result:
        status = lstat(asked, *args, **named)  # type: ignore[arg-type]
        return os.stat_result([*status[:4], STRANGER, *status[5:10]]) if Path(str(asked)) == path else status

    monkeypatch.setattr(os, "lstat", appearing)


def loosen_everything(entry: Path) -> None:
    for path in (entry.parent, *entry.parent.rglob("*")):
        path.chmod(path.stat().st_mode | (0o077 if path.is_dir() else 0o066))


def loosen(*names: str, mode: int) -> Callable[[Path], None]:
    def expose(entry: Path) -> None:
        for name in names:
            (entry / name).chmod(mode)

    return expose


def link(entry: Path) -> None:
    """The library lies elsewhere, in a folder that anybody may write."""
    elsewhere = entry.parent.parent.parent / "elsewhere"
    elsewhere.mkdir()
    (entry / "library.so").rename(elsewhere / "library.so")
    (entry / "library.so").symlink_to(elsewhere / "library.so")


def link_folder(entry: Path) -> None:
    elsewhere = entry.parent.parent.parent / "elsewhere"
    entry.rename(elsewhere)
    entry.symlink_to(elsewhere)


@pytest.mark.parametrize(
    "expose",
    [
        loosen_everything,
        loosen("library.so", mode=0o602),
        loosen("library.so", mode=0o660),
        loosen("manifest.json", mode=0o602),
        loosen("", mode=0o777),
        loosen("", mode=0o770),
        loosen("", mode=0o1777),
        link,
        link_folder,
    ],
    ids=[
        "all of it",
        "library",
        "library for a group",
        "manifest",
        "its folder",
        "its folder for a group",
        "its folder, sticky",
        "link",
        "linked folder",
    ],
)
def test_what_others_could_write_is_built_again(
    expose: Callable[[Path], None], cache: Path, tiny: Source, planted_library: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    expose(plant(cache, planted_library))

    assert 5 == library(tiny, HOST).add(3)

    assert 1 == sum("compiling" in message for message in caplog.messages)
    (warning,) = (message for message in caplog.messages if "built again" in message)
    assert "tiny" in warning
    modes = {path.stat().st_mode & 0o022 for path in (cache / "kernels").rglob("*") if path.suffix != ".lock"}
    assert {0} == modes
    caplog.clear()
    forget()
    assert 5 == library(tiny, HOST).add(3)
    assert [] == caplog.messages


@pytest.mark.parametrize("name", ["library.so", "manifest.json", ""], ids=["library", "manifest", "its folder"])
def test_what_belongs_to_another_user_is_built_again(
    name: str,
    cache: Path,
    tiny: Source,
    planted_library: bytes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    give_away(plant(cache, planted_library) / name, monkeypatch)

    assert 5 == library(tiny, HOST).add(3)

    assert 1 == sum(f"belongs to user {STRANGER}" in message for message in caplog.messages)


def test_a_planted_stamp_spares_no_probe(cache: Path, tiny: Source, caplog: pytest.LogCaptureFixture) -> None:
    (stamp,) = cache.rglob("probe-*.json")
    stamp.chmod(0o666)

    assert 5 == library(tiny, HOST).add(3)

    assert 1 == sum("compiling" in message for message in caplog.messages)


def test_another_librarys_folder_is_not_taken_for_this_ones(
    cache: Path, tiny: Source, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who may write the folder of all libraries may not write the libraries, but may change their names."""
    other = write_tiny(tmp_path / "other", addend=7)
    (mine,) = cache.rglob("library.so")
    library(other, HOST)
    ((theirs, _),) = [found for found in cached_entries(cache / "kernels") if found[0].folder != mine.parent]
    shutil.rmtree(mine.parent)
    theirs.folder.rename(mine.parent)
    (cache / "kernels").chmod(0o777)
    caplog.clear()

    library(tiny, HOST)

    assert 1 == sum("compiling" in message for message in caplog.messages)


def test_a_lock_that_others_linked_elsewhere_overwrites_nothing(cache: Path, tiny: Source, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (path,) = cache.rglob("library.so")
    path.unlink()
    lock = path.parent.with_name(f"{path.parent.name}.lock")
    lock.unlink()
    lock.symlink_to(tmp_path / "precious")

    assert 5 == library(tiny, HOST).add(3)

    assert "kept" == (tmp_path / "precious").read_text()


def share(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache.chmod(0o777)
    return cache


def share_with_group(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache.chmod(0o2775)
    return cache


def share_higher_up(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (cache.parent / "team").mkdir()
    (cache.parent / "team").chmod(0o777)
    cache.rename(cache.parent / "team" / "cache")
    monkeypatch.setenv(CACHE_VARIABLE, str(cache.parent / "team" / "cache"))
    return cache.parent / "team"


def belong_to_another(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    give_away(cache, monkeypatch)
    return cache


def belong_to_another_below(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    give_away(cache / "kernels", monkeypatch)
    return cache / "kernels"


def link_into_anothers(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (cache.parent / "linked").symlink_to(cache)
    monkeypatch.setenv(CACHE_VARIABLE, str(cache.parent / "linked"))
    return belong_to_another(cache, monkeypatch)


@pytest.mark.parametrize(
    "expose",
    [share, share_with_group, share_higher_up, belong_to_another, belong_to_another_below, link_into_anothers],
)
def test_in_a_folder_that_others_could_replace_nothing_is_believed(
    expose: Callable[[Path, pytest.MonkeyPatch], Path],
    cache: Path,
    tiny: Source,
    planted_library: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """There is no place for a library in it: the process keeps its own, and says once what would help."""
    entry = plant(cache, planted_library)
    before = hashlib.sha256((entry / "library.so").read_bytes()).hexdigest()
    exposed = expose(cache, monkeypatch)

    for _ in range(2):
        assert 5 == library(tiny, HOST).add(3)
        forget()

    assert 1 == sum("compiling" in message for message in caplog.messages)
    (warning,) = (message for message in caplog.messages if "is not used" in message)
    assert str(exposed) in warning
    assert CACHE_VARIABLE in warning
    (kept,) = (cache if cache.exists() else exposed).rglob("library.so")
    assert before == hashlib.sha256(kept.read_bytes()).hexdigest()


def test_the_users_cache_folder_is_made_private_with_what_is_below(
    cache: Path, tiny: Source, planted_library: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `chmod -R a+rwX` on it; where it lies in a folder that the user has named, that one stays as it is."""
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = cache.rename(tmp_path / "fusiongate")
    loosen_everything(plant(own, planted_library))
    own.chmod(0o777)

    assert 5 == library(tiny, HOST).add(3)

    assert {0} == {path.stat().st_mode & 0o022 for path in (own, *own.rglob("*")) if path.suffix != ".lock"}
    (library_file,) = own.rglob("library.so")
    assert planted_library != library_file.read_bytes()


def test_below_a_sticky_folder_the_cache_is_the_users_own(
    cache: Path, tiny: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in /tmp, where nobody removes or renames what is another's."""
    (tmp_path / "sticky").mkdir()
    (tmp_path / "sticky").chmod(0o1777)
    cache.rename(tmp_path / "sticky" / "cache")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "sticky" / "cache"))

    assert 5 == library(tiny, HOST).add(3)

    assert [] == caplog.messages


def test_a_group_of_ones_own_is_nobody_else(
    cache: Path, tiny: Source, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Distributions that give each user a group of the same name make every folder writable for it."""
    monkeypatch.setattr("pwd.getpwuid", lambda uid: type("", (), {"pw_name": "me", "pw_gid": os.getegid()}))
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group(("me", "x", gid, [])))
    for path in (cache, *cache.rglob("*")):
        path.chmod(path.stat().st_mode | 0o020)

    assert 5 == library(tiny, HOST).add(3)

    assert [] == caplog.messages


def test_folders_are_made_private_whatever_the_umask(
    cache: Path, tiny: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "made" / "anew"))
    old = os.umask(0)
    try:
        for _ in range(2):
            assert 5 == library(tiny, HOST).add(3)
            forget()
    finally:
        os.umask(old)

    assert 1 == sum("compiling" in message for message in caplog.messages)
    for folder in (tmp_path / "made", tmp_path / "made" / "anew", tmp_path / "made" / "anew" / "kernels"):
        assert "drwx------" == stat.filemode(folder.stat().st_mode)


def test_what_root_built_ahead_is_everybodys(
    cache: Path, tiny: Source, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever is root could change this process itself."""
    if os.geteuid():
        pytest.skip("not run: only root can leave root's files behind")
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)

    assert 5 == library(tiny, HOST).add(3)

    assert [] == caplog.messages


def test_what_another_user_owns_is_told_apart_from_what_a_user_namespace_does_not_know(
    cache: Path, tiny: Source, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a container without root's number, root's folders appear to be nobody's."""
    give_away(cache, monkeypatch)
    monkeypatch.setattr("fusiongate.jit.permissions._unknown_owner", lambda: STRANGER)

    assert 5 == library(tiny, HOST).add(3)

    assert [] == caplog.messages


def test_a_library_of_a_user_whom_the_namespace_does_not_know_is_built_again(
    cache: Path, tiny: Source, planted_library: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There the owner of a library may be any user of the outer system, and root would have built none."""
    give_away(plant(cache, planted_library) / "library.so", monkeypatch)
    monkeypatch.setattr("fusiongate.jit.permissions._unknown_owner", lambda: STRANGER)

    assert 5 == library(tiny, HOST).add(3)

    assert 1 == sum("compiling" in message for message in caplog.messages)


def test_a_loose_cache_of_roots_is_none_that_this_user_can_tighten(
    cache: Path, tiny: Source, planted_library: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is looked at in it could be another folder by the time it is loaded."""
    if os.geteuid():
        pytest.skip("not run: only root can leave root's files behind")
    (cache / "kernels").chmod(0o777)
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)

    assert 5 == library(tiny, HOST).add(3)

    (warning,) = (message for message in caplog.messages if "is not used" in message)
    assert f"{cache / 'kernels'} is writable by every user" in warning


def test_a_group_of_ones_own_is_not_alone_where_a_list_names_others(
    cache: Path, tiny: Source, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With an access control list, the group's bits tell what anybody whom it names may do at most."""
    monkeypatch.setattr("pwd.getpwuid", lambda uid: type("", (), {"pw_name": "me", "pw_gid": os.getegid()}))
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group(("me", "x", gid, [])))
    monkeypatch.setattr(os, "listxattr", lambda path, **_: ["system.posix_acl_access"], raising=False)
    (path,) = cache.rglob("library.so")
    path.chmod(0o660)

    assert 5 == library(tiny, HOST).add(3)

    assert 1 == sum("compiling" in message for message in caplog.messages)


def test_what_this_user_may_not_even_look_into_is_built_again(
    cache: Path, tiny: Source, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As root leaves it behind, who was this user for one command."""
    (path,) = cache.rglob("library.so")
    iterdir = Path.iterdir

    def refusing(folder: Path) -> Iterator[Path]:
        if folder == path.parent and not any("compiling" in message for message in caplog.messages):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return iterdir(folder)

    monkeypatch.setattr(Path, "iterdir", refusing)

    assert 5 == library(tiny, HOST).add(3)

    assert 1 == sum("may not be looked at" in message for message in caplog.messages)


def test_a_child_that_is_forked_has_a_folder_of_its_own(
    cache: Path, tiny: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parent's goes when the parent ends."""
    cache.chmod(0o777)
    mine = trusted_folder(make=True)
    assert mine == trusted_folder(make=True)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert mine != trusted_folder(make=True)
