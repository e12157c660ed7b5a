"""Requests about files on SMB servers. Each is a pair for `SmbSession.ask`."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .smb_session import Call

with suppress(ImportError):  # `SmbEngine` names the remedy
    from smbprotocol.file_info import FileDispositionInformation, FileStandardInformation, InfoType
    from smbprotocol.open import CreateDisposition as Disposition
    from smbprotocol.open import CreateOptions as Options
    from smbprotocol.open import (
        DirectoryAccessMask,
        FileAttributes,
        ImpersonationLevel,
        SMB2QueryInfoRequest,
        SMB2QueryInfoResponse,
        SMB2SetInfoRequest,
    )
    from smbprotocol.open import FilePipePrinterAccessMask as Access
    from smbprotocol.open import ShareAccess as Share

    ALL = Share.FILE_SHARE_READ | Share.FILE_SHARE_WRITE | Share.FILE_SHARE_DELETE
    _EXCLUSIVE = Access.FILE_READ_DATA | Access.FILE_WRITE_DATA | Access.FILE_READ_ATTRIBUTES | Access.DELETE


def create(file: Any) -> Call:
    """Create a file that others can only read, and that is deleted when it is closed."""
    options = Options.FILE_NON_DIRECTORY_FILE | Options.FILE_DELETE_ON_CLOSE
    return _open(file, _EXCLUSIVE, Share.FILE_SHARE_READ, Disposition.FILE_CREATE, options)


def open_alone(file: Any) -> Call:
    """Open a file that no other program has open for writing or deleting."""
    return _open(file, _EXCLUSIVE, Share.FILE_SHARE_READ, Disposition.FILE_OPEN, Options.FILE_NON_DIRECTORY_FILE)


def open_for_reading(file: Any, *, alone: bool) -> Call:
    """alone: only if no other program can write to it."""
    share = Share.FILE_SHARE_READ if alone else ALL
    return _open(file, Access.FILE_READ_DATA, share, Disposition.FILE_OPEN, Options.FILE_NON_DIRECTORY_FILE)


def open_lock(file: Any) -> Call:
    """Open a file that others can only read, or create it."""
    access = Access.FILE_READ_DATA | Access.FILE_WRITE_DATA | Access.FILE_READ_ATTRIBUTES
    return _open(file, access, Share.FILE_SHARE_READ, Disposition.FILE_OPEN_IF, Options.FILE_NON_DIRECTORY_FILE)


def open_directory(file: Any) -> Call:
    access = DirectoryAccessMask.FILE_LIST_DIRECTORY | DirectoryAccessMask.FILE_READ_ATTRIBUTES
    return _open(file, access, ALL, Disposition.FILE_OPEN, Options.FILE_DIRECTORY_FILE)


def _open(file: Any, access: int, share: int, disposition: int, options: int) -> Call:
    attributes = FileAttributes.FILE_ATTRIBUTE_NORMAL
    call: Call = file.create(
        ImpersonationLevel.Impersonation, access, attributes, share, disposition, options, send=False
    )
    return call


def delete(file: Any) -> Call:
    """Delete a file that is open, when it is closed."""
    content = FileDispositionInformation()
    content["delete_pending"] = True
    request = SMB2SetInfoRequest()
    request["info_type"] = InfoType.SMB2_0_INFO_FILE
    request["file_info_class"] = content.INFO_CLASS
    request["buffer"] = content
    request["file_id"] = file.file_id
    return request, file.connection.receive


def count_names(file: Any) -> Call:
    """How many names does an open file have? 0: it was deleted."""
    request = SMB2QueryInfoRequest()
    request["info_type"] = InfoType.SMB2_0_INFO_FILE
    request["file_info_class"] = FileStandardInformation.INFO_CLASS
    request["output_buffer_length"] = 24
    request["file_id"] = file.file_id

    def receive(sent: Any) -> int:
        response = SMB2QueryInfoResponse()
        response.unpack(file.connection.receive(sent)["data"].get_value())
        found = FileStandardInformation()
        found.unpack(response["buffer"].get_value())
        return int(found["number_of_links"].get_value())

    return request, receive
