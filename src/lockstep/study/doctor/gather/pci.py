"""What the PCI bus tells by itself: whether there is an NVIDIA GPU, and which bridges redirect traffic (ACS)."""

from __future__ import annotations

import struct
from pathlib import Path

DEVICES = Path("/sys/bus/pci/devices")

_NVIDIA = "0x10de"
_DISPLAY, _BRIDGE = "0x03", "0x0604"
_FIRST_EXTENDED, _ACS, _CONTROL = 0x100, 0x000D, 6
_REDIRECTS = 0b1100
"""Bits of the control register: redirect peer-to-peer requests, and completions."""


def has_nvidia_gpu(devices: Path = DEVICES) -> bool:
    """Say whether an NVIDIA display or 3D controller is on the bus."""
    return any(
        _read(device / "vendor") == _NVIDIA and _read(device / "class")[:4] == _DISPLAY for device in _in(devices)
    )


def redirecting_bridges(devices: Path = DEVICES) -> tuple[str, ...]:
    """Return the addresses of the bridges that redirect peer-to-peer traffic.

    Raises:
        PermissionError: The configuration of a bridge cannot be read as a whole, which root may.
    """
    found = []
    for device in _in(devices):
        if _read(device / "class")[:6] != _BRIDGE:
            continue
        config = (device / "config").read_bytes()
        if len(config) == 64:  # what everybody may read
            raise PermissionError("only root may read the bridges' configuration")
        if is_redirecting(config):
            found.append(device.name)
    return tuple(found)


def is_redirecting(config: bytes) -> bool:
    """Say whether a bridge with this configuration space redirects peer-to-peer requests or completions."""
    offset, visited = _FIRST_EXTENDED, 0
    while _FIRST_EXTENDED <= offset <= len(config) - 8 and visited < 64:
        (header,) = struct.unpack_from("<I", config, offset)
        if header & 0xFFFF == _ACS:
            (control,) = struct.unpack_from("<H", config, offset + _CONTROL)
            return bool(control & _REDIRECTS)
        offset, visited = header >> 20, visited + 1
    return False


def _in(devices: Path) -> list[Path]:
    return sorted(devices.iterdir()) if devices.is_dir() else []


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
