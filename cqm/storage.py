"""Files: safetensors and JSON, written atomically and checksummed.

The library writes all its files through this module. A file is complete or it does not exist: it is
written under a temporary name, flushed to disk and renamed. Loading a file never executes anything
in it.

A *sealed* file carries a checksum of its own content, so that no change to it goes unnoticed; see
`write_sealed` for JSON and `write_sealed_arrays` for arrays. Files that accompany a sealed one need
no seal of their own if their checksum is in it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import platform
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import safetensors

SEAL = "seal"  # key of the checksum in a sealed file
_TEMPORARY = ".partial"
_LOCK = ".lock"
_ABANDONED_SECONDS = 86_400  # age of a temporary file whose writer can no longer be alive
_TYPES = {
    np.dtype(np.float64): "F64",
    np.dtype(np.float32): "F32",
    np.dtype(np.int64): "I64",
    np.dtype(np.int32): "I32",
    np.dtype(np.int16): "I16",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint8): "U8",
    np.dtype(np.uint16): "U16",
    np.dtype(np.uint32): "U32",
    np.dtype(np.uint64): "U64",
    np.dtype(np.bool_): "BOOL",
}


class DamagedFileError(ValueError):
    """A damaged file; the message names it and says how to repair it."""


def inside(directory: str | Path, name: str) -> Path:
    """The path of a plain file name within a directory; names that would leave it are refused.

    >>> inside("data", "../secret")
    Traceback (most recent call last):
    ValueError: file names must be plain, without directories; got '../secret'
    """
    if not name or name in (".", "..") or Path(name).name != name or "\\" in name or "\0" in name:
        raise ValueError(f"file names must be plain, without directories; got {name!r}")
    return Path(directory) / name


def encode_arrays(
    batches: Sequence[Mapping[str, np.ndarray]], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """Encode batches of arrays, to be joined along their first axis, as a safetensors file.

    The pieces of the file are yielded in order. The format is a header followed by the numbers; it
    is written here because safetensors' own writer needs each array in one piece, and joining large
    shards takes longer than hashing them.
    """
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    offset = 0
    for name in sorted(batches[0]):
        pieces = [batch[name] for batch in batches]
        if pieces[0].dtype not in _TYPES:
            raise ValueError(
                f"array {name!r} has type {pieces[0].dtype}, which cannot be stored; "
                f"allowed: {sorted(str(dtype) for dtype in _TYPES)}"
            )
        if len({(piece.dtype, piece.shape[1:]) for piece in pieces}) > 1:
            raise ValueError(f"array {name!r} changes its type or shape between batches")
        size = sum(piece.nbytes for piece in pieces)
        header[name] = {
            "dtype": _TYPES[pieces[0].dtype],
            "shape": [sum(len(piece) for piece in pieces), *pieces[0].shape[1:]],
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in sorted(batches[0]):
        for batch in batches:
            if batch[name].nbytes:
                yield np.ascontiguousarray(batch[name]).data.cast("B")


@dataclass(frozen=True)
class Written:
    """Checksum and size of a file that was written."""

    sha256: str
    num_bytes: int


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write to; it is renamed to its final name once it is safely on disk."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary, file = _open_temporary(path)
        with file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                _rename(temporary, path)
            except BaseException:
                if _is_at(temporary, file.fileno()):  # and is not another writer's by now
                    temporary.unlink(missing_ok=True)
                raise
    except OSError as error:
        if "cannot write" in str(error):  # a file that was written meanwhile
            raise
        raise _explained(error, path) from error


def _open_temporary(path: Path) -> tuple[Path, BinaryIO]:
    """An empty temporary file next to a path, locked until it is closed.

    The lock tells files that are being written from those of a process that died. Locks may not
    reach other machines that share the directory, so the name of this one is in the file's name.
    """
    label = 0
    while True:
        temporary = path.with_name(f".{path.name}.{_host()}.{label}{_TEMPORARY}")
        try:
            file = _open_or_create(temporary)
        except FileNotFoundError:  # removed just now
            if not path.parent.is_dir():
                raise
            continue
        except PermissionError:
            if not temporary.exists():
                raise
            label += 1  # another user's
            continue
        locked = _lock(file)
        if (locked or (locked is None and label == os.getpid())) and _is_at(
            temporary, file.fileno()
        ):
            file.truncate(0)
            return temporary, file
        file.close()
        if locked is None:  # without locks, processes do not share names
            temporary.unlink(missing_ok=True)
        label = os.getpid() if locked is None else label + 1


def _open_or_create(path: Path) -> BinaryIO:
    """Open a file to write, with what it contains."""
    try:
        return open(path, "xb")
    except FileExistsError:
        return open(path, "r+b")


def _host() -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in platform.node())


def _lock(file: BinaryIO) -> bool | None:
    """Lock an open file; False if another has locked it, None if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file still has this name: it may have been renamed or removed meanwhile."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _rename(source: Path, target: Path) -> None:
    """Replace a file, durably: its directory is flushed to disk too."""
    os.replace(source, target)
    with contextlib.suppress(OSError):  # some file systems cannot flush a directory
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def write_pieces(path: str | Path, pieces: Iterable[bytes | memoryview]) -> Written:
    """Write a file atomically and durably, piece by piece."""
    with atomic_file(path) as file:
        return _write_all(file, pieces)


def _write_all(file: BinaryIO, pieces: Iterable[bytes | memoryview]) -> Written:
    digest, num_bytes = hashlib.sha256(), 0
    for piece in pieces:
        file.write(piece)
        digest.update(piece)
        num_bytes += len(piece)
    return Written(digest.hexdigest(), num_bytes)


def canonical_json(value: Any) -> str:
    """Canonical JSON of a value, for comparing and hashing: sorted keys, no spaces, no NaN.

    >>> canonical_json({"b": [1, 2.5], "a": None})
    '{"a":null,"b":[1,2.5]}'
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain_number
    )


def plain_json(value: Any) -> Any:
    """A value as it would be read back: lists in place of tuples, Python's own numbers."""
    return json.loads(canonical_json(value))


def sha256_json(value: Any) -> str:
    """The SHA-256 of a JSON value."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def encode_json(value: Any) -> bytes:
    """Human-readable JSON: indented, keys in the order given."""
    return (json.dumps(value, indent=2, allow_nan=False, default=_plain_number) + "\n").encode()


def _plain_number(value: Any) -> Any:
    """A NumPy number as Python's own."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def differences(old: Any, new: Any, path: str = "") -> str:
    """Differences between two JSON values, one per line; empty if they are equal.

    >>> print(differences({"seed": 1, "horizon": 12}, {"seed": 2, "horizon": 12}))
      seed: 1 -> 2
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        lines = [
            differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
            for key in dict.fromkeys([*old, *new])
        ]
        return "\n".join(filter(None, lines))
    return "" if old == new else f"  {path}: {_short(old)} -> {_short(new)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 60 else text[:57] + "..."


def with_defaults(stored: Any, defaults: Any) -> Any:
    """Stored settings with the defaults of those that are missing, at any depth.

    >>> with_defaults({"training": {"updates": 8}}, {"training": {"updates": 4, "seed": None}})
    {'training': {'updates': 8, 'seed': None}}
    """
    if not isinstance(stored, Mapping) or not isinstance(defaults, Mapping):
        return stored
    return {
        **{key: with_defaults(value, defaults.get(key)) for key, value in stored.items()},
        **{key: value for key, value in defaults.items() if key not in stored},
    }


def write_json(path: str | Path, value: Any) -> None:
    """Write JSON atomically."""
    write_pieces(path, [encode_json(value)])


def write_sealed(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object atomically, with a checksum of its content under the key `seal`."""
    write_json(path, {**content, SEAL: sha256_json(content)})


def read_sealed(
    path: str | Path,
    schema: type[msgspec.Struct],
    *,
    repair: str,
    sealed_since: int = 1,
    older_schema: type[msgspec.Struct] | None = None,
    newest: int | None = None,
) -> dict[str, Any]:
    """Read a sealed JSON object, without its seal; raises if it was changed or is not valid.

    Args:
        path: The file.
        schema: Names and types of its entries. `schema` is among them, an integer that is raised
            when the format changes.
        repair: What the user can do about a damaged file, for the message.
        sealed_since: The first value of `schema` that has a seal; older files may lack it.
        older_schema: Names and types of the entries of files without a seal, if they differ.
        newest: The largest value of `schema` that is known; files with a larger one are refused
            with the advice to upgrade.
    """
    content = read_json(path, repair=repair)
    seal = content.pop(SEAL, None)
    older = seal is None and content.get("schema", 1) in range(1, sealed_since)
    try:
        intact = older or seal == sha256_json(content)
    except RecursionError:  # nested more deeply than anything that is written
        intact = False
    if not intact:
        raise DamagedFileError(f"{path} was changed: its checksum is wrong; {repair}")
    number = content.get("schema")
    if newest is not None and isinstance(number, int) and number > newest:
        raise ValueError(
            f"{path} has schema {number}, written by a newer version of cqm; this version reads "
            f"schemas up to {newest}: upgrade cqm"
        )
    try:
        msgspec.convert(content, (older and older_schema) or schema)
    except msgspec.ValidationError as error:
        raise DamagedFileError(f"{path} is not valid: {error}; {repair}") from error
    return content


def write_described(
    path: str | Path,
    content: Mapping[str, Any],
    arrays_path: str | Path,
    arrays: Mapping[str, np.ndarray],
    metadata: Mapping[str, str],
) -> None:
    """Write arrays, and a sealed JSON object that describes them and holds their `sha256`.

    The two files replace older ones as one. The new description is in place under a second name
    before the arrays are replaced, and takes its own name after that; a process that dies at any
    moment leaves a description that fits the arrays, which `read_described` finds.
    """
    path = Path(path)
    with exclusive(path.parent, wait=True):
        with atomic_file(arrays_path) as file:
            digest = _write_all(file, encode_arrays([arrays], metadata)).sha256
            write_sealed(_next(path), {**content, "sha256": digest})
        try:
            _rename(_next(path), path)
        except OSError as error:
            raise _explained(error, path) from error


def read_described(
    path: str | Path,
    schema: type[msgspec.Struct],
    arrays_path: str | Path,
    *,
    repair: str,
    **options: Any,
) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, str]]:
    """Read what `write_described` wrote: the description, the arrays and their metadata.

    Args:
        path: The description.
        schema: See `read_sealed`.
        arrays_path: The arrays.
        repair: What the user can do about damaged files, for the message.
        **options: Further arguments of `read_sealed`.
    """
    path, arrays_path = Path(path), Path(arrays_path)
    found = False
    for description in (path, _next(path), path):  # again, if a writer overtook this reader
        try:
            content = read_sealed(description, schema, repair=repair, **options)
        except FileNotFoundError:
            continue
        found = True
        try:
            with open_regular(arrays_path) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != content["sha256"]:
                    continue
                arrays, metadata = read_arrays(arrays_path)
                if _is_at(arrays_path, file.fileno()):
                    return content, arrays, metadata
        except FileNotFoundError as error:
            raise DamagedFileError(f"{arrays_path} is missing; {repair}") from error
        except DamagedFileError as error:
            raise DamagedFileError(f"{error}; {repair}") from error
    if not found:
        raise FileNotFoundError(f"{path} does not exist")
    raise DamagedFileError(
        f"{arrays_path} is damaged or belongs to another {path.name}: its checksum is wrong; "
        f"{repair}"
    )


def _next(path: Path) -> Path:
    return path.with_name(f"{path.name}.next")


def append_line(path: str | Path, value: Any) -> None:
    """Append a JSON value as one line to a log that may end in a torn line after a crash."""
    line = json.dumps(value, allow_nan=False).encode() + b"\n"
    try:
        with open(path, "a+b") as file:
            if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                line = b"\n" + line
            file.write(line)
    except OSError as error:
        raise _explained(error, Path(path)) from error


def read_json(path: str | Path, *, repair: str = "") -> dict[str, Any]:
    """Read a JSON object from a file; `repair` is added to the message if it is damaged."""
    advice = f"; {repair}" if repair else ""
    try:
        with open_regular(path) as file:
            text = file.read().decode()
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except DamagedFileError as error:
        raise DamagedFileError(f"{error}{advice}") from error
    except (ValueError, RecursionError) as error:  # includes errors of encoding and of JSON
        raise DamagedFileError(f"{path} is not valid JSON ({error}){advice}") from error
    if not isinstance(value, dict):
        raise DamagedFileError(
            f"{path} must contain a JSON object; got {type(value).__name__}{advice}"
        )
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not allowed")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is too large")
    return number


def open_regular(path: str | Path) -> BufferedReader:
    """Open a file to read; a directory, pipe or device in its place is refused, not waited for."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:  # no permission, or a loop of symbolic links
        raise DamagedFileError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise DamagedFileError(f"{path} must be a file; got a directory, pipe or device")
    return os.fdopen(file, "rb")


@contextlib.contextmanager
def open_arrays(path: str | Path) -> Iterator[Any]:
    """Open a memory-mapped safetensors file; only the arrays asked for are read."""
    open_regular(path).close()
    try:
        with safetensors.safe_open(str(path), framework="numpy") as file:
            yield file
    except (safetensors.SafetensorError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise DamagedFileError(f"{path} is not a complete safetensors file ({error})") from error


def read_arrays(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read all arrays of a safetensors file, and its metadata."""
    with open_arrays(path) as file:
        names = file.keys()
        return {name: file.get_tensor(name) for name in names}, file.metadata() or {}


def write_sealed_arrays(
    path: str | Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file whose metadata has a checksum of all arrays and metadata."""
    sealed = {**metadata, SEAL: _arrays_seal(arrays, metadata)}
    write_pieces(path, encode_arrays([arrays], sealed))


def read_sealed_arrays(
    path: str | Path, *, repair: str
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read a sealed safetensors file: its arrays, and its metadata without the seal."""
    try:
        arrays, metadata = read_arrays(path)
    except DamagedFileError as error:
        raise DamagedFileError(f"{error}; {repair}") from error
    seal = metadata.pop(SEAL, None)
    if seal is None:
        raise DamagedFileError(
            f"{path} has no checksum: it was written by an earlier version of cqm or was changed; "
            f"{repair}"
        )
    if seal != _arrays_seal(arrays, metadata):
        raise DamagedFileError(f"{path} was changed: its checksum is wrong; {repair}")
    return arrays, metadata


def _arrays_seal(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> str:
    layout = {name: [str(values.dtype), *values.shape] for name, values in arrays.items()}
    content = {"metadata": dict(metadata), "layout": layout, "sha256": sha256_arrays(arrays)}
    return sha256_json(content)


def sha256(path: str | Path) -> str:
    """The SHA-256 of a file's contents."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_arrays(arrays: Mapping[str, np.ndarray]) -> str:
    """The SHA-256 of named arrays, independent of their order."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(name.encode())
        if arrays[name].nbytes:
            digest.update(np.ascontiguousarray(arrays[name]).data.cast("B"))
    return digest.hexdigest()


def remove_partial(directory: str | Path) -> None:
    """Remove what interrupted writes left behind: temporary files and a lock nobody holds.

    Files of another machine, whose processes cannot be asked, are removed after a day.
    """
    for path in [*Path(directory).glob(f".*{_TEMPORARY}"), Path(directory) / _LOCK]:
        with contextlib.suppress(OSError), open(path, "r+b") as file:
            if path.name == _LOCK:
                owner = _owner(path)
                own = not owner or owner.endswith(f" on {platform.node()}")
            else:
                own = path.name.split(".")[-3:-2] == [_host()]
            age = time.time() - os.fstat(file.fileno()).st_mtime
            if (own or age > _ABANDONED_SECONDS) and _lock(file) and _is_at(path, file.fileno()):
                path.unlink()


@contextlib.contextmanager
def exclusive(
    directory: str | Path, *, wait: bool = False, patience_seconds: float = 30.0
) -> Iterator[int]:
    """Hold a directory that only one process at a time may write to.

    Yields a file descriptor. The directory is held until this block ends and every process that
    inherited the descriptor has ended, however they end; so a lock never outlives its owners. While
    another process holds it, this raises; the rest of a process that died is waited for. On a file
    system without locks, nothing is held.

    Args:
        directory: The directory; it is created if it does not exist.
        wait: Whether to wait for a living owner too, for writes that take a moment.
        patience_seconds: How long to wait at most.
    """
    path, deadline = Path(directory) / _LOCK, time.monotonic() + patience_seconds
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while (lock := _locked(path)) is None:
            owner = _owner(path)
            if (_is_alive(owner) and not wait) or time.monotonic() > deadline:
                raise ValueError(
                    f"{directory} is in use by {owner or 'another process'}; wait until it ends, "
                    "or choose another directory"
                )
            time.sleep(0.05)
    except OSError as error:
        raise _explained(error, path) from error
    try:
        try:
            os.truncate(lock, 0)
            os.write(lock, f"process {os.getpid()} on {platform.node()}".encode())
        except OSError as error:
            raise _explained(error, path) from error
        yield lock
    finally:
        path.unlink(missing_ok=True)  # before it is released, so that nobody locks a removed file
        os.close(lock)


def _locked(path: Path) -> int | None:
    """A descriptor of a lock file that is ours now; None if it is another's or was removed."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(path, lock):
            return lock
    except BlockingIOError:
        pass
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            return lock
        os.close(lock)
        raise
    os.close(lock)
    return None


def _owner(path: Path) -> str:
    """Who wrote the lock file; empty if it was just created or removed."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _is_alive(owner: str) -> bool:
    """Whether a lock's owner runs; those on other machines are taken to."""
    words = owner.split()
    if len(words) != 4 or not words[1].isdecimal():
        return False
    if words[3] != platform.node():
        return True
    try:
        state = Path(f"/proc/{words[1]}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"  # ended, but its parent has not noticed


def _explained(error: OSError, path: Path) -> OSError:
    """The same error, with the name of the file and advice on what to do."""
    advice = {
        errno.ENOSPC: "the disk is full; free some space and rerun the command",
        errno.EDQUOT: "the disk quota is used up; free some space and rerun the command",
        errno.EROFS: "the file system is read-only; choose another directory",
        errno.EACCES: "no permission; change the directory's permissions or choose another",
        errno.EPERM: "no permission; change the directory's permissions or choose another",
        errno.EISDIR: "a directory is in its place; remove it or choose another directory",
        errno.EEXIST: "part of the path is a file; choose another directory",
        errno.ENOTDIR: "part of the path is a file; choose another directory",
    }.get(error.errno or 0, "nothing was written; rerun the command")
    return type(error)(error.errno, f"cannot write {path}: {error.strerror}: {advice}")
