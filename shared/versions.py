"""Which version two peers speak, or why none: docs/protocol.md, Versions."""

from __future__ import annotations

from dataclasses import dataclass

from starsd.shared.errors import ProtocolError
from starsd.shared.messages import Hello, Welcome


@dataclass(frozen=True)
class Versions:
    """What one side speaks. The checks raise ProtocolError."""

    lowest: int
    highest: int

    def __str__(self) -> str:
        return f"{self.lowest} to {self.highest}"

    def agree(self, hello: Hello) -> int:
        """The version a server answers an edge with: the highest that both speak."""
        theirs = Versions(hello.lowest, hello.highest)
        if theirs.highest < self.lowest or theirs.lowest > self.highest:
            older = "client" if theirs.highest < self.lowest else "server"
            raise ProtocolError(f"client speaks protocol {theirs}, expected {self}: update the {older}")
        return min(theirs.highest, self.highest)

    def check_welcome(self, version: int) -> None:
        """Whether an edge speaks what the server chose."""
        if not self.lowest <= version <= self.highest:
            older = "server" if version < self.lowest else "client"
            raise ProtocolError(f"server speaks protocol {version}, expected {self}: update the {older}")

    def check_own(self, message: Hello | Welcome, agreed: int) -> None:
        """Whether what we are about to say is what we speak."""
        if isinstance(message, Hello):
            if (said := Versions(message.lowest, message.highest)) != self:
                raise ProtocolError(f"hello has versions {said}, expected {self}")
        elif message.version != agreed:
            raise ProtocolError(f"welcome has version {message.version}, expected {agreed}")
