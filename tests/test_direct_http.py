"""HTTP to instances, over TLS: an authority of one's own is known by SSL_CERT_FILE, and proxies of the environment are not asked."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
from pathlib import Path

import httpx
import pytest

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dynaserve import direct_http, fleet
from dynaserve.errors import ConfigError
from tests.completion_server import running_server


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Of 127.0.0.1, signed by itself, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "an instance")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = tmp_path / "certificate.pem"
    path.write_bytes(secret + made.public_bytes(serialization.Encoding.PEM))
    return path


async def health(url: str) -> int:
    async with direct_http.async_client(url, httpx.Timeout(10.0), httpx.Limits()) as http:
        return (await http.get("/health")).status_code


def test_an_instance_behind_tls_is_known_by_an_authority_that_the_environment_names(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for proxy in ("HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")
    with running_server(certificate) as server:
        with pytest.raises(ConfigError, match=rf"^instance {server.url} does not answer: .*certificate verify failed"):
            fleet.describe(server.url)
        with pytest.raises(httpx.ConnectError):
            asyncio.run(health(server.url))
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert direct_http.get(f"{server.url}/health", timeout_s=10.0).status_code == 200
        assert asyncio.run(health(server.url)) == 200
