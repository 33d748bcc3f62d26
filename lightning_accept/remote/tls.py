"""The worker's side of TLS."""

from __future__ import annotations

import ssl


def server_context(certfile: str | None, keyfile: str | None) -> ssl.SSLContext | None:
    """The context of ``certfile`` (a certificate chain, PEM) and ``keyfile`` (its key; None if it is in the same file).

    Returns:
        None without a certificate: plain HTTP.

    Raises:
        ValueError: If the files are missing or do not belong together.
    """
    if certfile is None:
        if keyfile is not None:
            raise ValueError("--keyfile needs --certfile beside it")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certfile, keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(
            f"cannot use certificate {certfile!r} with key {keyfile or certfile!r}: {error.strerror or error}"
        ) from error
    return context
