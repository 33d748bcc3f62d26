"""HTTPS with a certificate of one's own."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_accept.pipeline.messages import TransportError
from lightning_accept.remote.client import HttpWorker
from lightning_accept.remote.tls import server_context

x509 = pytest.importorskip("cryptography.x509")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "worker")])
    now = datetime.datetime.now(datetime.timezone.utc)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    usage = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=True, key_cert_sign=True, crl_sign=True, **usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, private = folder / "worker.pem", folder / "worker.key"
    pem.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return str(pem), str(private)


@pytest.fixture
def handles() -> Iterator[list[HttpWorker]]:
    made: list[HttpWorker] = []
    yield made
    for handle in made:
        handle.close()
        handle.release()


def test_packets_travel_over_tls_between_all(
    start_worker: Any, certificate: tuple[str, str], handles: list[HttpWorker], deployment: Any, packet: Any
) -> None:
    tls = server_context(*certificate)
    first, last = (start_worker(tls=tls, cafile=certificate[0]) for _ in range(2))
    assert first.url.startswith("https://")
    handles += [HttpWorker(worker.url, "secret", timeout=30.0, cafile=certificate[0]) for worker in (first, last)]
    for handle in handles:
        handle.claim("run-1", "me", "link")
    handles[1].deploy(deployment(stage=2, stages=3, upstream=first.url))
    handles[0].deploy(deployment(stage=1, stages=3, downstream=last.url))
    for job in range(3):
        handles[0].send(packet(job, size=200_000))
        received = handles[1].receive("down", 30.0)
        assert received is not None
        assert received.job == job
        assert received.nbytes == 800_000
    assert last.stages[0].where == last.url


def test_an_unknown_certificate_is_refused_with_the_cure(
    start_worker: Any, certificate: tuple[str, str], handles: list[HttpWorker]
) -> None:
    worker = start_worker(tls=server_context(*certificate))
    handles.append(HttpWorker(worker.url, "secret", timeout=30.0))
    with pytest.raises(TransportError, match=r"no TLS connection to https://127.0.0.1:\d+ for the claim: .*cafile="):
        handles[0].claim("run-1", "me", "link")


def test_a_plain_worker_addressed_with_https(
    start_worker: Any, certificate: tuple[str, str], handles: list[HttpWorker]
) -> None:
    url = start_worker().url.replace("http:", "https:")
    handles.append(HttpWorker(url, "secret", timeout=0.1, cafile=certificate[0]))
    with pytest.raises(TransportError, match=f"{url} for the claim: .*address it with http://"):
        handles[0].claim("run-1", "me", "link")


def test_close_interrupts_a_poll_over_tls(
    start_worker: Any, certificate: tuple[str, str], handles: list[HttpWorker], deployment: Any
) -> None:
    import threading

    worker = start_worker(tls=server_context(*certificate))
    handle = HttpWorker(worker.url, "secret", timeout=30.0, cafile=certificate[0])
    handles.append(handle)
    handle.claim("run-1", "me", "link")
    handle.deploy(deployment())
    errors: list[Exception] = []

    def poll() -> None:
        try:
            handle.poll(300.0)
        except TransportError as error:
            errors.append(error)

    thread = threading.Thread(target=poll)
    thread.start()
    handle.close()
    thread.join(30)
    assert len(errors) == 1


def test_files_that_do_not_work(certificate: tuple[str, str], tmp_path: Path) -> None:
    assert server_context(None, None) is None
    with pytest.raises(ValueError, match="--keyfile needs --certfile"):
        server_context(None, certificate[1])
    with pytest.raises(ValueError, match=r"cannot use certificate .*nowhere"):
        server_context(str(tmp_path / "nowhere"), None)
    with pytest.raises(ValueError, match="cannot use certificate"):
        server_context(certificate[0], None)
