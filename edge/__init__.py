"""The device half: target engines, the decoding loop, sampling on the device, chat."""
