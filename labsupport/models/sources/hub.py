"""The hub's files, from its cache on this disk or over the network, and why they cannot be had."""

from __future__ import annotations

import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from labsupport.models.sources.catalog import CATALOG
from labsupport.models.sources.packages import DownloadError

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def from_hub(hub_id: str, download: bool, opened: Callable[..., Any]) -> Any:
    """What `opened` makes of the hub's files: of those in the cache, or else of all.

    A download that was interrupted leaves a part of them in the cache: then, and where there is
    nothing, `download` fetches what is missing.

    Args:
        hub_id: "owner/name".
        download: whether the network may be used.
        opened: called with `local_files_only`.

    Raises:
        FileNotFoundError: nothing in the cache, and no `download`.
        DownloadError: the hub cannot be reached, or does not give the model.
        ValueError: what is in the cache is not whole, and no `download`.
    """
    try:
        return opened(local_files_only=True)
    except Exception as error:
        cached = f"{hub_id} in the hub's cache: {first_line(error)}" if in_hub_cache(hub_id) else ""
    if not download:
        if cached:
            raise ValueError(f"{cached}. download=True (--download) fetches what is missing")
        raise FileNotFoundError(
            f"{hub_id} is not in the hub's cache on this machine; download=True (--download) "
            f"fetches it. Without the hub there are: {', '.join(CATALOG)}"
        )
    problem = _hub_problem(hub_id)
    if problem:
        also = f" ({cached})" if cached else ""
        raise DownloadError(f"the hub could not be reached for {hub_id}: {problem}{also}")
    try:
        return opened(local_files_only=False)
    except Exception as error:
        raise DownloadError(f"the hub gave no {hub_id}: {first_line(error)}") from error


def in_hub_cache(hub_id: str) -> bool:
    """Whether the hub's local cache has a model's config and weights."""
    from huggingface_hub import try_to_load_from_cache

    def there(file: str) -> bool:
        return isinstance(try_to_load_from_cache(hub_id, file), str)

    return there("config.json") and any(there(w) or there(f"{w}.index.json") for w in _WEIGHTS)


def _hub_problem(hub_id: str) -> str | None:
    """Why the hub cannot be reached. Transformers would find out too, after half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    url = f"{constants.ENDPOINT}/{hub_id}/resolve/main/config.json"
    request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "labsupport"})
    try:
        with _connect(request):
            return None
    except urllib.error.HTTPError:
        return None  # it answers; what it means, Transformers explains better
    except OSError as error:
        return f"{constants.ENDPOINT}: {getattr(error, 'reason', error)}"


def _connect(request: urllib.request.Request) -> Any:
    """Send a request, through the proxies that the environment names now; a context manager."""
    trusted = ssl.create_default_context()
    if "SSL_CERT_FILE" not in os.environ and not trusted.cert_store_stats()["x509_ca"]:
        # A Python from python.org finds no certificates on macOS.
        import certifi

        trusted.load_verify_locations(certifi.where())
    # Not urlopen, which goes on with the proxies of its first call.
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=trusted))
    return opener.open(request, timeout=10)


def first_line(error: Exception) -> str:
    """The first line of an error's message, without its full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
