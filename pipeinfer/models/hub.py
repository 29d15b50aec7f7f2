"""Models from the Hugging Face hub, fetched into its own cache, which other programs share.

huggingface_hub sends the requests, reads its settings (HF_ENDPOINT, HF_TOKEN, HF_HOME,
HF_HUB_OFFLINE) and lays the cache out. But it restarts transfers that were cut off, so the bytes
are fetched here: into a blob's `.incomplete` file, from where an earlier process stopped. A blob
gets its name only when its checksum is right. Complete models are used without a request to the
hub.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import httpx2
from huggingface_hub import (
    HfApi,
    constants,
    get_session,
    hf_hub_download,
    hf_hub_url,
    scan_cache_dir,
)
from huggingface_hub.errors import (
    CacheNotFound,
    EntryNotFoundError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status
from msgspec import Struct

from pipeinfer import host
from pipeinfer.errors import ModelError
from pipeinfer.models import heads, hub_files, media
from pipeinfer.models.hub_files import Wanted, size_text

Show = Callable[[str, int, int], None]  #: takes a file's name, its present bytes, and its size

_BLOCK = 1 << 20
_STALLS = 4  #: responses without a byte, one after the other, after which a transfer fails
_log = logging.getLogger("pipeinfer.hub")


class Lines:
    """A `Show` on standard error.

    On a terminal it overwrites one line, elsewhere it prints a line for each tenth of a file.
    """

    def __init__(self) -> None:
        self._said = ""
        self._terminal = sys.stderr.isatty() and host.moves_cursor()

    def __call__(self, name: str, done: int, total: int) -> None:
        """Print the progress of a file."""
        tenth = 10 * done // max(total, 1)
        text = f"pipeinfer: {name}: {10 * tenth} % of {size_text(total)}"
        if self._terminal:
            text = f"pipeinfer: {name}: {size_text(done)} of {size_text(total)}"
            if text != self._said or done == total:
                sys.stderr.write(f"\r\x1b[K{text}" + "\n" * (done == total))
                sys.stderr.flush()
        elif text != self._said:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
        self._said = text


class Unreachable(ModelError):
    """The hub sent no response, or broke the transfer off."""


class Fetched(Struct, frozen=True):
    """A model in the hub's cache.

    path: of its first part
    name: `user/repo:quant`
    """

    path: Path
    name: str


def endpoint() -> str:
    """Return the address of the hub."""
    return str(constants.ENDPOINT)


@functools.cache
def find(wanted: Wanted, *, offline: bool = False) -> Fetched:
    """Return the model from the cache; fetch it if it is missing or another file may be preferred.

    wanted: the model
    offline: whether fetching is forbidden
    A process caches the result. Raises ModelError for a model that is not available.
    """
    there = cached(wanted)
    if offline or constants.is_offline_mode():
        if there is None:
            why = "--offline" if offline else "HF_HUB_OFFLINE"
            raise ModelError(f"{wanted} is not in the hub's cache ({constants.HF_HUB_CACHE}), and "
                             f"{why} forbids to fetch it: `pipeinfer models` lists what is there")
        return there
    if there is not None and (wanted.precise or
                              hub_files.quant_of(there.path.name) == hub_files.PREFERRED[0]):
        return there
    try:
        return pull(wanted)
    except Unreachable as error:
        if there is None:
            raise
        _log.warning("pipeinfer: note: %s; going on with %s", error, there.name)
        return there


# --- the cache ------------------------------------------------------------------------------------


def snapshots() -> Iterator[tuple[str, dict[str, Path]]]:
    """Yield the repositories in the cache, with the files of each revision, the newest first."""
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in sorted(repos, key=lambda one: one.repo_id):
        if repo.repo_type == "model":
            for state in sorted(repo.revisions, reverse=True,
                                key=lambda one: ("main" in one.refs, one.last_modified)):
                yield repo.repo_id, {file.file_path.relative_to(state.snapshot_path).as_posix():
                                     file.file_path for file in state.files}


def cached(wanted: Wanted) -> Fetched | None:
    """Return the model if all of it is in the cache, else None."""
    for repo, files in snapshots():
        if repo == wanted.repo:
            with contextlib.suppress(ModelError):
                first = hub_files.choose(wanted, dict.fromkeys(files, 0))[0]
                return Fetched(files[first], hub_files.name_of(repo, first))
    return None


# --- fetching -------------------------------------------------------------------------------------


def pull(wanted: Wanted, *, verify: bool = False, show: Show | None = None) -> Fetched:
    """Fetch the files that the hub has under this name and the cache lacks.

    wanted: the model
    verify: whether to compare cached files with their checksums, and fetch those that differ again
    show: see `Show`; None: lines on standard error
    A prediction head in the same folder comes along, where the model can be used with it, and the
    nearest projector of pictures.
    Raises ModelError for a model that is not available, and Unreachable where only the network is
    to blame.
    """
    show = show or Lines()
    with _explained(wanted.repo):
        info = HfApi().model_info(wanted.repo, files_metadata=True, timeout=30.0)
    files = {one.rfilename: one for one in info.siblings or ()}
    sizes = {path: int(one.size or 0) for path, one in files.items()}
    chosen = hub_files.choose(wanted, sizes)
    blobs = Path(constants.HF_HUB_CACHE) / f"models--{wanted.repo.replace('/', '--')}" / "blobs"

    def fetch(names: list[str]) -> Path:
        digests = {path: lfs.sha256 for path in names if (lfs := files[path].lfs) is not None}
        if verify:
            _drop_damaged(blobs, digests)
        _check_room(blobs, {digest: sizes[path] for path, digest in digests.items()})
        paths = []
        for path in names:
            with _explained(wanted.repo):
                if path in digests and sizes[path] <= constants.MAX_HTTP_DOWNLOAD_SIZE:
                    url = hf_hub_url(wanted.repo, path, revision=info.sha)
                    _fill_blob(blobs / digests[path], url, f"{wanted.repo}: {path}", sizes[path],
                               functools.partial(show, path))
                paths.append(Path(hf_hub_download(wanted.repo, path)))
        return paths[0]

    first = fetch(chosen)
    beside = (hub_files.head_beside(chosen[0], sizes, start)
              for start in heads.wanted_beside(first))
    if head := next(filter(None, beside), ""):
        fetch([head])
    if shown := media.nearest(chosen[0], [one for one in sizes if one.endswith(".gguf")
                                          and "mmproj" in one]):
        fetch([shown])
    return Fetched(first, hub_files.name_of(wanted.repo, chosen[0]))


def _drop_damaged(blobs: Path, digests: dict[str, str]) -> None:
    for path, digest in digests.items():
        blob = blobs / digest
        if blob.exists():
            with blob.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != digest:
                _log.warning("pipeinfer: note: %s is damaged in the cache (its SHA-256 is another) "
                             "and is fetched again", path)
                blob.unlink()


def _check_room(blobs: Path, sizes: dict[str, int]) -> None:
    """Raise ModelError where the missing files do not fit the disk."""
    missing = 0
    for digest, size in sizes.items():
        if not (blobs / digest).exists():
            part = blobs / f"{digest}.incomplete"
            missing += max(0, size - (part.stat().st_size if part.exists() else 0))
    folder = next(one for one in (blobs, *blobs.parents) if one.is_dir())
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise ModelError(f"{blobs} lacks space: {size_text(missing)} are to be fetched, but the "
                         f"disk has only {size_text(free)}; free some space, or set HF_HOME to a "
                         "folder that has it")


def _fill_blob(blob: Path, url: str, what: str, size: int, show: Callable[[int, int], None]
               ) -> None:
    """Fetch a file whose name is its SHA-256.

    what: the file, for messages
    size: in bytes
    Raises ModelError and Unreachable. The bytes that have arrived stay, unless they are wrong.
    """
    if blob.exists():
        return
    blob.parent.mkdir(parents=True, exist_ok=True)
    part = blob.with_name(f"{blob.name}.incomplete")  # as huggingface_hub names, and prunes, them
    handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    with os.fdopen(handle, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ModelError(
                f"{part}: another process is fetching this file; wait for it") from None
        digest = _Transfer(file, url, what, size, show).run()
        if digest != blob.name:
            file.truncate(0)
            raise ModelError(f"{what} arrived damaged (its SHA-256 is {digest[:12]}..., not "
                             f"{blob.name[:12]}...), and was thrown away; fetch it again")
        os.fsync(file.fileno())
        os.replace(part, blob)


class _Transfer:
    """The transfer of the rest of a file, over as many requests as necessary."""

    def __init__(self, file: BinaryIO, url: str, what: str, size: int,
                 show: Callable[[int, int], None]) -> None:
        self._file, self._url, self._what, self._size, self._show = file, url, what, size, show
        self._have, self._digest = 0, hashlib.sha256()

    def run(self) -> str:
        """Fetch the rest; return the SHA-256 of the whole file.

        Raises Unreachable, HfHubHTTPError, OSError.
        """
        while block := self._file.read(_BLOCK):
            self._take_in(block)
        if self._have > self._size:
            self._restart()
        stalls = 0
        self._show(self._have, self._size)
        while self._have < self._size:
            before, why = self._have, "the answer ended early"
            try:
                self._request()
            except httpx2.TransportError as error:
                why = str(error) or type(error).__name__
            stalls = stalls + 1 if self._have <= before else 0
            if stalls > _STALLS:
                raise Unreachable(
                    f"{self._what} broke off after {size_text(self._have)} of "
                    f"{size_text(self._size)} ({why}); the same command goes on from there")
            if self._have < self._size:
                time.sleep(min(2.0 ** (stalls - 1), 8.0) if stalls else 0.2)
        return self._digest.hexdigest()

    def _request(self) -> None:
        headers = build_hf_headers() | {"Accept-Encoding": "identity"}
        if self._have:
            headers["Range"] = f"bytes={self._have}-"
        with get_session().stream("GET", self._url, headers=headers, follow_redirects=True,
                                  timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
            if self._have and response.status_code in (200, 416):  # from the start, or not at all
                self._restart()
            if response.status_code == 416:
                return
            if response.status_code >= 400:
                response.read()
                hf_raise_for_status(response)
            for block in response.iter_bytes():
                if self._have + len(block) > self._size:
                    self._restart()
                    raise ModelError(f"{self._what} is longer than the hub says; fetch it again")
                self._file.write(block)
                self._take_in(block)
                self._show(self._have, self._size)

    def _take_in(self, block: bytes) -> None:
        self._have += len(block)
        self._digest.update(block)

    def _restart(self) -> None:
        self._file.seek(0)
        self._file.truncate(0)
        self._have, self._digest = 0, hashlib.sha256()


# --- what goes wrong ------------------------------------------------------------------------------


@contextlib.contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Convert errors of the hub and of the network to a ModelError that states what to do."""
    hub = endpoint()
    login = "log in with `hf auth login`, or set HF_TOKEN"
    try:
        yield
    except GatedRepoError as error:
        raise ModelError(f"{repo} is gated: accept its terms at {hub}/{repo}, then {login} to a "
                         f"token that may read it ({_status(error)})") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"there is no repository {repo} on {hub}, or it is private: check the "
                         f"name, or {login} ({_status(error)})") from error
    except LocalTokenNotFoundError as error:
        raise ModelError(f"{repo}: {error}; {login}") from error
    except OfflineModeIsEnabled as error:
        raise ModelError(f"{repo}: HF_HUB_OFFLINE forbids to ask the hub") from error
    except (LocalEntryNotFoundError, FileMetadataError) as error:
        raise _unreachable(repo, error.__cause__ or error) from error
    except (EntryNotFoundError, HFValidationError) as error:
        raise ModelError(f"{repo}: {_first_line(error)}") from error
    except HfHubHTTPError as error:
        raise _refused(repo, error, login) from error
    except httpx2.HTTPError as error:
        raise _unreachable(repo, error) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(f"the disk of {constants.HF_HUB_CACHE} is full: free some space, and "
                             "the same command goes on from there; or set HF_HOME to a folder "
                             "with free space") from error
        raise ModelError(f"{constants.HF_HUB_CACHE}: cannot be written: "
                         f"{error.strerror or error}; set HF_HOME to another folder") from error


def _refused(repo: str, error: HfHubHTTPError, login: str) -> ModelError:
    status = error.response.status_code
    if status in (401, 403):
        return ModelError(f"{endpoint()} refuses {repo} ({status}): the token is not valid for it; "
                          f"{login}")
    kind = Unreachable if status >= 500 or status == 429 else ModelError
    return kind(f"{endpoint()} answered {status} for {repo}: {_first_line(error)}")


def _unreachable(repo: str, error: BaseException) -> Unreachable:
    return Unreachable(
        f"{repo}: {endpoint()} cannot be reached ({_first_line(error)}): check the network, a "
        "proxy (HTTPS_PROXY) or HF_ENDPOINT; `pipeinfer models` lists what is here")


def _status(error: HfHubHTTPError) -> int:
    return int(error.response.status_code)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
