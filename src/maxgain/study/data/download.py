"""Getting published files: checked by SHA-256, unpacked by name, whole or not at all."""

import shutil
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from maxgain.errors import DataError, RunError

from ..files import whole_file
from ..wording import clause


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
    """Bring the files of `download` into `folder`; a file that is there already is replaced.

    An archive is kept in a hidden folder until all of it is unpacked: an interrupted fetch does not download it
    again.
    """
    if not download.is_archive:
        _retrieve(download, folder, progress)
        return
    archive = _retrieve(download, folder / ".downloads", progress)
    unpack(archive, folder, download.files)
    shutil.rmtree(archive.parent, ignore_errors=True)


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
                    with source, whole_file(folder / path.name) as target:
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
                progressbar=progress,
            )
        )
    except requests.HTTPError as error:
        reason = f"the server answered {error}".split(" for url")[0]
    except requests.Timeout:
        reason = "the server did not answer in time"
    except requests.RequestException:
        reason = "the connection failed; check that this machine is on the network"
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError:  # how pooch says that the checksum is wrong
        reason = "its SHA-256 is not the expected one, so nothing was kept; try again later"
    raise DataError(f"cannot download {download.url} into {folder}: {reason}.")
