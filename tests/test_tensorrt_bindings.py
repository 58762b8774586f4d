"""What is said where TensorRT's bindings are not."""

from __future__ import annotations

import pytest

from starsd.shared.errors import DeviceError
from starsd.shared.tensorrt_bindings import load_tensorrt


def test_the_remedy_is_for_jetsons_and_for_pcs(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("starsd.shared.tensorrt_bindings.import_module", missing)
    with pytest.raises(DeviceError) as told:
        load_tensorrt()
    assert "on a Jetson JetPack brings it for the system's" in str(told.value)
    assert str(told.value).endswith("on a PC run pip install 'tensorrt>=10,<11'")
