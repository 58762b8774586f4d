"""What people are told of the link to a server: a line when it is away, a line when it is back, none for every try."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from starsd.shared.clock import REAL

if TYPE_CHECKING:
    from starsd.edge.link import Link

AWAY_SECONDS = 2.0  # without a connection, from which on it is news


class LinkNews:
    """`look` now and then; `say` gets the lines. A server that is there from the start is no news."""

    def __init__(self, link: Link, say: Callable[[str], None], now: Callable[[], float] = REAL.now) -> None:
        self._link, self._say, self._now = link, say, now
        self._connected_at = now()
        self._away = False
        self._told = ""  # the newest notice of a server that is there

    def look(self) -> None:
        link, notice = self._link, self._link.channel.notice
        if not link.connected:
            if not self._away and self._now() - self._connected_at > AWAY_SECONDS:
                self._away = True
                self._say(f"{notice or f'server at {link.url} is away'}; answers go on without it")
            return
        self._connected_at = self._now()
        if self._away:
            self._away = False
            self._say(f"server at {link.url} is back")
        if notice and notice != self._told:  # such as that it has no drafter for the model
            self._say(notice)
        self._told = notice or self._told
