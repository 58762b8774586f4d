"""Every error starsd raises on purpose.

    StarsdError
    ├── UsageError                 the request cannot be met as asked: an option, a name, a value
    │   ├── MissingExtraError      a library is not installed; names the extra that brings it
    │   ├── ContextOverflowError   more tokens than the model's or the configured context holds
    │   └── CapacityError          a limit on sessions or memory is reached; what would free some
    ├── ModelError                 a model, head or bundle is not what it claims to be
    │   ├── UnsupportedModelError  a family, file format or option we refuse, with what is supported
    │   └── BundleError            a bundle's files and its manifest disagree
    │       └── OutdatedBundleError  it is of another version of starsd
    ├── DownloadError              a file did not arrive whole
    │   └── HashMismatchError      it arrived, but is not the pinned file
    ├── StorageError               disk full, quota reached, folder not writable
    ├── EngineError                a target engine was driven out of order (our caller's mistake)
    ├── DeviceError                a GPU, or what drives it, is missing or has failed
    └── ProtocolError              a message that the protocol does not allow; `session` says whose, 0: the connection's
        ├── LocalProtocolError     our caller wanted to send it; nothing was sent
        └── RemoteProtocolError    the peer sent it

Messages say what was got and what was expected, in lower case and without a full stop; where a remedy exists
they end with it. A command prints the message on one line and exits with 1.
"""

from __future__ import annotations


class StarsdError(Exception):
    """Base of all errors that starsd raises on purpose."""


class UsageError(StarsdError):
    """The request cannot be met as asked."""


class MissingExtraError(UsageError):
    """A library that this command needs is not installed."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(f"{module} is not installed: run pip install 'starsd[{extra}]'")
        self.module = module
        self.extra = extra


class ContextOverflowError(UsageError):
    """More tokens than the context holds."""


class GrammarError(UsageError):
    """A grammar turned out to be more than can be enforced, behind some tokens of an answer."""


class CapacityError(UsageError):
    """A configured limit is reached."""


class ModelError(StarsdError):
    """A model, head or bundle is not what it claims to be."""


class UnsupportedModelError(ModelError):
    """A family, file format or option that is refused by name."""


class BundleError(ModelError):
    """A bundle's files and its manifest disagree."""


class OutdatedBundleError(BundleError):
    """A bundle in the format of another version of starsd."""


class DownloadError(StarsdError):
    """A file did not arrive whole."""


class HashMismatchError(DownloadError):
    """A file arrived, but is not the one that was pinned."""


class StorageError(StarsdError):
    """Disk full, quota reached, or folder not writable."""


class EngineError(StarsdError):
    """A target engine was driven out of order."""


class DeviceError(StarsdError):
    """A GPU, or what drives it, is missing or has failed."""


class ProtocolError(StarsdError):
    """A message that the protocol does not allow.

    `session` is the one it belongs to; 0 when it belongs to none, and the connection cannot go on.
    """

    def __init__(self, message: str, session: int = 0) -> None:
        super().__init__(message)
        self.session = session


class LocalProtocolError(ProtocolError):
    """Our caller wanted to send what the protocol does not allow; nothing was sent, and nothing changed."""


class RemoteProtocolError(ProtocolError):
    """The peer sent what the protocol does not allow."""
