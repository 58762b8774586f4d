"""What an operator chooses of a server, with the defaults."""

from __future__ import annotations

from pathlib import Path

import msgspec

from starsd.server.limits import LIMITS, SCHEDULES, ServerLimits
from starsd.server.link import ModelHead
from starsd.shared.errors import UsageError


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator chooses."""

    models: tuple[ModelHead, ...]
    host: str = "127.0.0.1"
    port: int = 7600
    schedule: str = SCHEDULES[0]
    dev: bool = False
    workers: int = 1
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tokens: Path | None = None
    dtype: str = "int8"
    device: str = "cpu"
    threads: int = 1
    limits: ServerLimits = LIMITS

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise UsageError(f"schedule {self.schedule!r} is unknown, expected one of {', '.join(SCHEDULES)}")
        for name, least, most in (("workers", 1, 64), ("port", 0, 65535), ("threads", 1, 1024)):
            if not least <= (value := getattr(self, name)) <= most:
                raise UsageError(f"{name} is {value}, expected {least} to {most}")


SERVER = ServerConfig(models=())
