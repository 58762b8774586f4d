"""The line below the chat page says what the device's sensors do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from web_browser import Chat

pytest_plugins = ("web_browser",)
pytestmark = pytest.mark.browser


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ({"power_w": 7.42, "temperature_c": 53.5, "throttled": False}, "7.4 W · 54 °C"),
        ({"power_w": None, "temperature_c": 91.0, "throttled": True}, "91 °C · throttled"),
        ({"power_w": 0.0, "temperature_c": None, "throttled": None}, "0.0 W"),
    ],
)
def test_sensors_are_shown_and_forgotten(chat: Chat, device: dict[str, Any], said: str) -> None:
    assert chat.page.inner_text("#device") == ""
    chat.fake.status["device"] = device
    chat.until(lambda: chat.page.inner_text("#device") == said)
    chat.fake.status["device"] = dict.fromkeys(device)
    chat.until(lambda: chat.page.inner_text("#device") == "")
