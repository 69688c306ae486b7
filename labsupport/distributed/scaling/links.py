"""What connects two devices. Rates are what the makers promise: real messages see less."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """What connects two devices: GB/s each way, at best, and who says so."""

    name: str
    gb_s: float
    source: str


LINKS = (
    Link("NVLink, H100 and H200", 450, "NVIDIA H200 page: 900 GB/s, both ways together"),
    Link("PCIe 5.0, 16 lanes", 64, "NVIDIA H200 page: 128 GB/s, both ways together"),
    Link("InfiniBand, 200 Gb/s", 25, "NVIDIA ConnectX-6 page: 200 Gb/s a port"),
    Link("Ethernet, 10 Gb/s", 1.25, "IEEE 802.3ae"),
)
