"""Getting published files: checked by SHA-256, unpacked by name, whole or not at all."""

import shutil
import tarfile
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from maxgain.errors import DataError, RunError

from ..files import whole_file
from ..wording import clause
from . import checksums

ARRIVALS = ".downloads"
"""The folder that what is being fetched lies in, inside the data set's own."""
SILENCE = 30.0
"""Seconds that a server may say nothing."""
WINDOW = 60.0
"""Seconds over which it must be at least as fast as `SLOWEST`."""
SLOWEST = 1024
"""Bytes per second: SVHN's largest file would take two weeks."""
LARGEST = 8 * 2**30


class StalledError(TimeoutError):
    """A download that would never end."""


@dataclass(frozen=True)
class Download:
    """One published file: a data file itself, or a .tar.gz archive of several."""

    url: str
    sha256: str
    files: tuple[str, ...]  # what it brings

    @property
    def name(self) -> str:
        """The published file's own name."""
        return PurePosixPath(self.url).name

    @property
    def is_archive(self) -> bool:
        """Whether the data files have to be unpacked from it."""
        return self.name.endswith(".tar.gz")


def fetch(download: Download, folder: Path, progress: bool = True) -> None:
    """Bring the files of `download` into `folder`, and their sums into SHA256SUMS; what is there is replaced.

    What arrives lies in a hidden folder until all of it is in its place: an interrupted fetch does not download it
    again, and leaves nothing elsewhere.
    """
    arrivals = folder / ARRIVALS
    _sweep(arrivals, download.name)
    arrived = _retrieve(download, arrivals, progress)
    if download.is_archive:
        unpack(arrived, folder, download.files)
    else:
        _move(arrived, folder / download.name)
    checksums.record(folder, download.files)
    shutil.rmtree(arrivals, ignore_errors=True)


def unpack(archive: Path, folder: Path, files: tuple[str, ...]) -> None:
    """Write the members FOLDER/file of `archive`, for each of `files` and for nothing else, into `folder`.

    A member's own path is only ever compared, never written to, so an archive cannot reach outside `folder`.
    """
    wanted = set(files)
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if member.isfile() and len(path.parts) == 2 and path.name in wanted:
                    source = tar.extractfile(member)
                    assert source is not None, "a regular member has content"
                    with source, whole_file(folder / path.name, replace=True) as target:
                        shutil.copyfileobj(source, target)
                    wanted.remove(path.name)
    except (tarfile.TarError, EOFError, zlib.error, OSError, RunError) as error:
        raise DataError(f"cannot unpack {archive} into {folder}: {clause(error)}.") from error
    if wanted:
        raise DataError(f"{archive} has no {', '.join(sorted(wanted))}.")


def _retrieve(download: Download, folder: Path, progress: bool) -> Path:
    """Download the file into `folder` unless it lies there with the right checksum."""
    import pooch
    import requests

    pooch.get_logger().setLevel("ERROR")
    try:
        return Path(
            pooch.retrieve(
                download.url,
                known_hash=f"sha256:{download.sha256}",
                fname=download.name,
                path=folder,
                downloader=partial(_stream, progress=progress),
            )
        )
    except requests.HTTPError as error:
        reason = f"the server answered {error}".split(" for url")[0]
    except (requests.Timeout, TimeoutError) as error:
        reason = str(error) if isinstance(error, StalledError) else "the server did not answer in time"
    except requests.RequestException:
        reason = "the connection failed; check that this machine is on the network"
    except OSError as error:
        reason = clause(error.strerror or str(error).partition(" | ")[0])  # pooch adds a sentence of its own
    except ValueError:  # how pooch says that the checksum is wrong
        reason = "its SHA-256 is not the expected one, so nothing was kept; try again later"
    raise DataError(f"cannot download {download.url} into {folder.parent}: {reason}.")


def _stream(url: str, target: str, pooch: Any, progress: bool) -> None:
    """Download `url` into the file `target`, in pieces as they arrive, so that a server that drips is noticed."""
    import requests
    import urllib3
    from tqdm import tqdm

    identity = {"Accept-Encoding": "identity"}
    try:
        with (
            requests.get(url, stream=True, timeout=SILENCE, headers=identity) as response,
            open(target, "wb") as file,
        ):
            response.raise_for_status()
            announced = response.headers.get("Content-Length", "")
            total = int(announced) if announced.isdecimal() and len(announced) < 20 else None
            with tqdm(total=total, unit="B", unit_scale=True, disable=not progress) as bar:
                pace = _Pace()
                while piece := response.raw.read1(2**16):
                    pace.advance(len(piece))
                    file.write(piece)
                    bar.update(len(piece))
    except urllib3.exceptions.TimeoutError as error:  # requests knows these only of what it reads itself
        raise requests.Timeout from error
    except urllib3.exceptions.HTTPError as error:
        raise requests.ConnectionError from error


class _Pace:
    """Notices a server that sends, but so slowly or so much that no download would ever end."""

    def __init__(self) -> None:
        self.arrived = self.before = 0
        self.since = time.monotonic()

    def advance(self, count: int) -> None:
        """Counts what arrived; raises where it was too little for too long, or more than any data set has."""
        self.arrived += count
        if self.arrived > LARGEST:
            raise StalledError(f"the server sends more than the {LARGEST:,} bytes that the largest data set has")
        if (elapsed := time.monotonic() - self.since) < WINDOW:
            return
        if (rate := (self.arrived - self.before) / elapsed) < SLOWEST:
            raise StalledError(f"the server sent {rate:.0f} bytes per second where {SLOWEST:,} are the least")
        self.before, self.since = self.arrived, time.monotonic()


def _move(source: Path, target: Path) -> None:
    try:
        source.replace(target)
    except OSError as error:
        raise DataError(f"cannot write {target}: {error.strerror or error}.") from error


def _sweep(arrivals: Path, wanted: str) -> None:
    """Remove what interrupted fetches have left, but for the file that is wanted now."""
    with suppress(OSError):
        for path in arrivals.iterdir():
            if path.name != wanted and path.is_file():
                path.unlink()
