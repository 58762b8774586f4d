"""`starsd-edge chat`: a conversation in the terminal. Ctrl-C stops an answer, Ctrl-D or /quit leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console

from starsd.edge.answer import Outcome, drafted, printable
from starsd.edge.link_news import LinkNews
from starsd.edge.session import Session
from starsd.shared.config import Limits, Sampling
from starsd.shared.errors import UsageError

if TYPE_CHECKING:
    from starsd.edge.link import Link

COMMANDS = {
    "/reset": "begin a new conversation",
    "/system": "TEXT follows: begin one with these instructions; nothing follows: with the default ones",
    "/help": "show this",
    "/quit": "leave, as Ctrl-D does",
}


class ChatTerminal:
    """`run` talks until the user leaves. `ask` reads a line, given what to show before it."""

    def __init__(
        self,
        session: Session,
        sampling: Sampling,
        limits: Limits,
        *,
        system: str | None = None,
        console: Console | None = None,
        ask: Callable[[str], str] | None = None,
        link: Link | None = None,
    ) -> None:
        """With a `link`, the user hears when its server goes away and when it is back."""
        self.session = session
        self.sampling = sampling
        self.limits = limits
        self.console = console or Console(highlight=False, emoji=False, markup=False)
        self._ask = ask or _ask
        self._news = LinkNews(link, self._note) if link is not None else None
        self._begin(system)

    def run(self) -> None:
        self._note(f"{' '.join(COMMANDS)} · Ctrl-C stops an answer")
        while True:
            try:
                line = self._ask("\n› ").strip()
                if line == "/quit":
                    return
                if line.startswith("/"):
                    self._obey(*line.partition(" ")[::2])
                elif line:
                    self._answer(line)
            except KeyboardInterrupt:
                self._note("\n/quit or Ctrl-D leaves")
            except EOFError:
                self._note("")  # the shell's prompt gets a line of its own
                return

    def _begin(self, system: str | None) -> None:
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self._system = system
        self.session.forget()
        self._keep = self.session.text.leading_tokens(self.messages)

    def _obey(self, command: str, rest: str) -> None:
        if command == "/reset":
            self._begin(self._system)
            self._note("new conversation")
        elif command == "/system":
            previous = self._system
            try:
                self._begin(rest.strip() or None)
                self._note(f"new conversation with {'these' if self._system else 'the default'} instructions")
            except UsageError as error:  # some templates know no system role
                self._begin(previous)
                self._note(str(error))
        elif command == "/help":
            self._note("\n".join(f"{name:8} {what}" for name, what in COMMANDS.items()))
        else:
            self._note(f"{command} is no command, expected one of {', '.join(COMMANDS)}")

    def _answer(self, line: str) -> None:
        asked = [*self.messages, {"role": "user", "content": line}]
        said: list[str] = []
        try:
            prompt = self.session.text.encode_chat(asked)
            pieces = self.session.generate(
                prompt, self.sampling, self.limits, choice=len(self.messages), keep=self._keep
            )
            with contextlib.closing(pieces):
                for piece in pieces:
                    said.append(piece.text)
                    self._show(printable(piece.text))
                    if piece.outcome:
                        self._note(f"\n{_summary(piece.outcome)}")
        except KeyboardInterrupt:
            self._note("\nstopped")
        except UsageError as error:
            self._note(str(error))
            return
        if self._news is not None:
            self._news.look()
        if said:
            self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]

    def _show(self, text: str) -> None:
        self.console.file.write(text)  # not through rich, which would lay out each piece by itself
        self.console.file.flush()

    def _note(self, text: str) -> None:
        self.console.print(text, style="dim", soft_wrap=True)


def _summary(outcome: Outcome) -> str:
    parts = [f"{outcome.new_tokens} tokens", f"first after {outcome.prefill_seconds:.2f} s"]
    if outcome.tokens_per_second:
        parts.append(f"{outcome.tokens_per_second:.1f} tokens/s{drafted(outcome)}")
    if outcome.finish_reason == "length":
        parts.append("cut at its longest")
    return " · ".join(parts)


def _ask(prompt: str) -> str:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history for input()
    return input(prompt)
