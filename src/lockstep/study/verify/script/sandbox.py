"""Keeps a person's files as they are while a program runs; what it writes is seen by this run alone.

`protect` is called in the process that starts a run, before that has threads or children. There are two ways:

- Overlays: a private mount namespace in which an overlay covers each file system. Programs run as usual.
- Landlock, where a container permits no mounts: the kernel refuses to write outside of a temporary folder.
"""

import ctypes
import itertools
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lockstep.errors import ConfigurationError

# From Linux's headers.
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULESET_VERSION, _RULE_PATH_BENEATH, _PR_SET_NO_NEW_PRIVS = 1, 1, 38
# Rights of Landlock's first version: write a file, remove and make files of all kinds; then the rights that came later.
_WRITES, _REFER, _TRUNCATE = 1 << 1 | 0x1FF << 4, 1 << 13, 1 << 14

# They hold devices, sockets and settings, but no files of a person; apart from disks that a desktop has mounted.
_KEPT, _MEDIA = ("/dev", "/proc", "/run", "/sys"), "/run/media/"

ALLOW = "To let the runs change files, pass --allow-writes in a copy of the folder."
# What an overlay answers where it cannot change a file; see `_Root.cover`.
_REFUSALS = re.compile("Read-only file system|Invalid cross-device link|Value too large for defined data type")


def protect(scratch: Path) -> bool:
    """Protect files from this process and all that it starts from now on; return whether their writes fail.

    Args:
        scratch: An empty folder for what is written, which the caller removes.

    Raises:
        ConfigurationError: The system permits no way to do so.
    """
    try:
        mount_overlays(scratch)
    except OSError as no_overlay:
        try:
            refuse_writes(scratch)
        except OSError as error:
            raise ConfigurationError(
                "verify cannot keep your files as they are while the script runs: the system permits neither overlay "
                f"file systems ({no_overlay}) nor Landlock ({error}).\n{ALLOW}"
            ) from None
        return True
    return False


def explain(failure: str, writes_fail: bool) -> str:
    """Return what a protected run has failed with, and what to do if the protection may be the cause."""
    if failure and writes_fail:
        return f"{failure}\nThis system has no overlay file systems, so writes outside of TMPDIR are refused. {ALLOW}"
    return f"{failure}\n{ALLOW}" if _REFUSALS.search(failure) else failure


def remove(scratch: Path) -> None:
    """Remove the folder of a run."""
    for folder, names, _ in os.walk(scratch):
        for path in (os.path.join(folder, name) for name in names):
            if not os.path.islink(path):
                os.chmod(path, 0o700)  # the kernel's own folder of an overlay cannot be read
    shutil.rmtree(scratch, ignore_errors=True)


def mount_overlays(scratch: Path, namespaces: Sequence[int] = (_CLONE_NEWNS, _CLONE_NEWNS | _CLONE_NEWUSER)) -> None:
    """Give this process a root folder in which all changes are made in ``scratch``, which it then sees empty.

    Args:
        scratch: An empty folder.
        namespaces: Flags of `unshare`; the first that are permitted are used.

    Raises:
        OSError: None are permitted, or no overlay.
    """
    cwd, is_user = os.getcwd(), _enter_namespace(namespaces)
    _call("mount", None, "/", None, _MS_REC | _MS_PRIVATE, None)
    root = _Root(scratch, is_user)
    root.cover("/")
    for folder in filter(os.path.isdir, _KEPT):
        _call("mount", folder, root.at(folder), None, _MS_BIND | _MS_REC, None)
    for point in root.points:
        root.cover(point)
    root.cover_shared_memory()
    # To look at the layers of an overlay from inside is an error, which a walk through the folder would meet.
    _call("mount", "tmpfs", root.at(str(scratch)), "tmpfs", 0, None)
    os.chroot(root.path)
    os.chdir(cwd)


def _enter_namespace(namespaces: Sequence[int]) -> bool:
    """Enter a mount namespace; return whether this needed a user namespace, which has this user alone."""
    user, group = os.geteuid(), os.getegid()
    for flags in namespaces:
        with suppress(OSError):
            _call("unshare", flags)
            break
    else:
        raise PermissionError("unshare is not permitted")
    if not flags & _CLONE_NEWUSER:
        return False
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True


class _Root:
    """A new root folder, below which changes are made in layers, a pair of folders for each file system.

    Args:
        scratch: Gets the root and the layers.
        is_user: Whether this is a user namespace.
    """

    def __init__(self, scratch: Path, is_user: bool) -> None:
        self.path, self._layers, self._memory = (scratch / name for name in ("root", "layers", "memory"))
        self._options, self._numbers = "userxattr" if is_user else "redirect_dir=on", itertools.count()
        for folder in (self.path, self._layers, self._memory):
            folder.mkdir()
        try:
            self._overlay(str(self._memory), str(self._memory), self._layers)
        except OSError:  # the disk cannot hold layers: it is an overlay itself, as in containers, or on the network
            _call("mount", "tmpfs", self._layers, "tmpfs", 0, None)
        _call("mount", "tmpfs", self._memory, "tmpfs", 0, None)
        # In a user namespace an overlay cannot change folders of others on the way to one's own.
        own = map(_own_folder, (os.getcwd(), os.path.expanduser("~"))) if is_user else ()
        self.points = sorted({*_mount_points(), *own} - {""})

    def at(self, path: str) -> str:
        """Return where the new root has a path, as seen from outside."""
        return f"{self.path}{path}"

    def cover(self, folder: str) -> None:
        """Show a mounted file system in the new root, so that it cannot be changed."""
        if not os.path.exists(self.at(folder)):  # hidden by another mount
            return
        with suppress(OSError):
            self._overlay(folder, self.at(folder), self._layers)
            return
        below = {path for path in (*_KEPT, *self.points) if path.startswith(folder.rstrip("/") + "/")}
        if not below or not os.path.isdir(folder):
            # A mounted file, a special file system, or a folder that this user cannot read.
            _call("mount", folder, self.at(folder), None, _MS_BIND | _MS_REC, None)
            read_only = struct.pack("4Q", _MOUNT_ATTR_RDONLY, 0, 0, 0)
            _call("syscall", _MOUNT_SETATTR, _AT_FDCWD, self.at(folder), _AT_RECURSIVE, read_only, len(read_only))
            return
        # In a user namespace an overlay must not hide mounts below it: a new folder, and an overlay for each entry.
        _call("mount", "tmpfs", self.at(folder), "tmpfs", 0, None)
        _copy_owner(folder, self.at(folder))
        for entry in os.scandir(folder):
            copy = self.at(entry.path)
            if entry.is_symlink():
                os.symlink(os.readlink(entry), copy)
                continue
            os.mkdir(copy) if entry.is_dir() else Path(copy).touch()
            if entry.path not in below:
                self.cover(entry.path)

    def cover_shared_memory(self) -> None:
        """Cover /dev/shm, if there is one, with layers that are in memory, too."""
        with suppress(OSError):
            self._overlay("/dev/shm", self.at("/dev/shm"), self._memory)

    def _overlay(self, folder: str, target: str, layers: Path) -> None:
        pair = layers / str(next(self._numbers))
        upper, work = pair / "upper", pair / "work"
        os.chdir(folder)  # a path in an option could not have all letters
        for layer in (pair, upper, work):
            layer.mkdir()
        _copy_owner(folder, upper)
        options = f"{self._options},lowerdir=.,upperdir={upper},workdir={work}"
        _call("mount", "overlay", target, "overlay", 0, options)


def _mount_points() -> set[str]:
    """Return where file systems are mounted that may hold files of a person, apart from the root."""
    lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    # Blanks are written as \040.
    fields = (re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), line.split()[4]) for line in lines)
    points = set(map(os.fsdecode, fields)) - {"/", *_KEPT}
    others = tuple(f"{folder}/" for folder in _KEPT)
    return {point for point in points if point.startswith(_MEDIA) or not point.startswith(others)}


def _own_folder(path: str) -> str:
    """Return the topmost folder of a path that belongs to this user, if it is in one that is covered with others."""
    folders = (Path(path).resolve(), *Path(path).resolve().parents)
    own = [str(folder) for folder in folders if folder.exists() and folder.stat().st_uid == os.geteuid()]
    return own[-1] if own and own[-1].count("/") > 2 else ""


def _copy_owner(folder: str, copy: str | Path) -> None:
    """Give a folder the mode, the times, and if permitted the owner of another."""
    with suppress(OSError):
        os.chown(copy, os.stat(folder).st_uid, os.stat(folder).st_gid)
    with suppress(OSError):
        shutil.copystat(folder, copy)


def refuse_writes(scratch: Path) -> None:
    """Make the kernel refuse writes outside of ``scratch``, which becomes the folder for temporary files.

    Files that others have opened, modes and times are not protected.

    Raises:
        OSError: The kernel has no Landlock.
    """
    version = _call("syscall", _CREATE_RULESET, None, 0, _RULESET_VERSION)
    rights = _WRITES | _REFER * (version >= 2) | _TRUNCATE * (version >= 3)
    ruleset = _call("syscall", _CREATE_RULESET, struct.pack("Q", rights), 8, 0)
    for folder in filter(os.path.isdir, (str(scratch), *_KEPT)):
        rule = struct.pack("=Qi", rights, os.open(folder, os.O_PATH | os.O_CLOEXEC))
        _call("syscall", _ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0)
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("syscall", _RESTRICT_SELF, ruleset, 0)
    os.environ["TMPDIR"], tempfile.tempdir = str(scratch), None


def _call(name: str, *args: str | bytes | Path | int | None) -> int:
    """Call a function of libc, and return its result.

    Raises:
        OSError: It has failed.
    """
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    words = (os.fsencode(arg) if isinstance(arg, str | Path) else arg for arg in args)
    result: int = function(*(ctypes.c_long(word) if isinstance(word, int) else word for word in words))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
