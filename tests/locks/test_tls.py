"""Locks over TLS: with the right certificates they work, and with the wrong ones the error has a cause and a remedy.

The certificates are made here. Each server has one for 127.0.0.1, from a certificate authority of the tests.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import servers
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from faces import Caller
from support import PATIENCE, until

import holdfast

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 5.0
SLACK_S = 8.0  # for a busy machine
STARTS: dict[str, Callable[[dict[str, Path]], Any]] = {
    "postgresql": lambda files: servers.Postgres.start(tls=files),
    "redis": lambda files: servers.Redis.start(tls=files),
    "etcd": lambda files: servers.Etcd.start(tls=files),
}
VARIABLES = {  # redis-py reads none
    "postgresql": ("PGSSLROOTCERT", "PGSSLCERT", "PGSSLKEY"),
    "etcd": ("ETCDCTL_CACERT", "ETCDCTL_CERT", "ETCDCTL_KEY"),
}


class Authority:
    """A certificate authority, and the files of the certificates that it has signed."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name, self._key = _name(name), ec.generate_private_key(ec.SECP256R1())
        self.file = directory / f"{name}.crt"
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        usage = x509.KeyUsage(
            **dict.fromkeys(("digital_signature", "key_cert_sign", "crl_sign"), True),
            **dict.fromkeys(
                ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
            ),
            decipher_only=False,
        )
        own = self._begin(self._name, self._key).add_extension(constraints, critical=True)
        self._write(self.file, own.add_extension(usage, critical=True))

    def sign(self, name: str, *, address: str = "127.0.0.1") -> tuple[Path, Path]:
        """A certificate for a server at this address, or a client. Returns its file and that of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        builder = self._begin(_name(name), key).add_extension(names, critical=False)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        public = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = builder.add_extension(public, critical=False)
        certificate, private = self._directory / f"{name}.crt", self._directory / f"{name}.key"
        self._write(certificate, builder)
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        private.chmod(0o600)
        return certificate, private

    def _begin(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.timezone.utc)
        day = datetime.timedelta(days=1)
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
            .add_extension(authority, critical=False)
        )

    def _write(self, file: Path, builder: x509.CertificateBuilder) -> None:
        certificate = builder.sign(self._key, hashes.SHA256())
        file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("certificates")
    authority, other = Authority(directory, "authority"), Authority(directory, "another-authority")
    found = {"ca": authority.file, "other_ca": other.file}
    found |= zip(("cert", "key"), authority.sign("server"), strict=True)
    found |= zip(("client_cert", "client_key"), authority.sign("client"), strict=True)
    return found | dict(zip(("other_cert", "other_key"), other.sign("other-client"), strict=True))


@pytest.fixture(scope="module", params=STARTS)
def server(request: pytest.FixtureRequest, certificates: dict[str, Path]) -> Iterator[Any]:
    """A server that talks TLS, and only with clients that have a certificate."""
    files = {name: file for name, file in certificates.items() if "other" not in name}
    found = STARTS[request.param](files)
    yield found
    found.stop()


@pytest.fixture
def url(server: Any) -> str:
    if isinstance(server, servers.Postgres):
        return f"{server.url('postgres', user='postgres')}&name=deploy"
    if isinstance(server, servers.Etcd):
        return server.url("deploy", f"user:{servers.PASSWORD}")
    return str(server.url("deploy"))


def files_of(server: Any) -> dict[str, Path]:
    return (server.nodes[0] if isinstance(server, servers.Etcd) else server).tls  # type: ignore[no-any-return]


def lock_of(url: str) -> Any:
    if url.startswith("etcd"):  # it has no users, and refuses to check a password
        url = url.replace(f"user:{servers.PASSWORD}@", "")
    return holdfast.lock(url)


def whole_text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def assert_refused(url: str, text: str) -> None:
    """In each way to acquire: one error of ours with this text, in time, without the password."""
    lock = holdfast.lock(url)
    for way in (lambda: lock.acquire(timeout=TIMEOUT_S), lambda: anyio.run(lock.aacquire, TIMEOUT_S)):
        began = time.monotonic()
        with pytest.raises(holdfast.ConnectionFailed, match=text) as caught:
            way()
        assert time.monotonic() - began < TIMEOUT_S + SLACK_S
        assert servers.PASSWORD not in whole_text(caught.value)
        assert str(caught.value).count("\n") == 0


def test_a_lock_works_over_tls(url: str) -> None:
    lock = lock_of(url)
    with lock.acquire(timeout=PATIENCE) as hold:
        assert lock_of(url.replace("rediss:", "valkeys:")).try_acquire() is None
        waiting = Caller(lock_of(url).acquire, timeout=PATIENCE)
        until(lambda: lock.status().waiters)
        hold.check()
    waiting.result().release()


@pytest.mark.parametrize("server", VARIABLES, indirect=True)
def test_the_files_are_those_of_the_usual_variables(
    url: str, certificates: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, _, query = url.partition("?")
    variables = VARIABLES[address.partition(":")[0].removesuffix("s")]
    for variable, name in zip(variables, ("ca", "client_cert", "client_key"), strict=True):
        monkeypatch.setenv(variable, str(certificates[name]))
    kept = [word for word in query.split("&") if word.startswith(("name=", "sslmode="))]
    with lock_of("?".join([address, "&".join(kept)]) if kept else address).acquire(timeout=PATIENCE) as hold:
        hold.check()


def test_a_certificate_that_does_not_match_the_host_is_reported(url: str) -> None:
    assert_refused(
        url.replace("127.0.0.1", "127.0.0.2"), r"[Cc]ertificate.*(does not match|not valid for).*Check .*certificates"
    )


def test_a_certificate_of_an_unknown_authority_is_reported(
    server: Any, url: str, certificates: dict[str, Path]
) -> None:
    tls = files_of(server)
    wrong = url.replace(str(tls["ca"]), str(certificates["other_ca"]))
    assert wrong != url
    assert_refused(wrong, r"certificate verify failed.*Check .*certificates")


def test_a_client_without_a_certificate_is_reported(url: str) -> None:
    assert_refused(re.sub(r"&[a-z_]*(cert|certfile|key|keyfile)=[^&]*client[^&]*", "", url), "Check .*certificates")


def test_a_client_with_the_certificate_of_an_unknown_authority_is_reported(
    server: Any, url: str, certificates: dict[str, Path]
) -> None:
    tls = files_of(server)
    wrong = url
    for name in ("cert", "key"):
        wrong = wrong.replace(str(tls[f"client_{name}"]), str(certificates[f"other_{name}"]))
    assert_refused(wrong, "Check .*certificates")


@pytest.mark.parametrize("content", [None, "not a certificate"])
def test_a_file_of_certificates_that_cannot_be_read_is_reported(
    server: Any, url: str, tmp_path: Path, content: str | None
) -> None:
    tls = files_of(server)
    file = tmp_path / "nothing.pem"
    if content:
        file.write_text(content)
    assert_refused(url.replace(str(tls["ca"]), str(file)), "Check .*certificates")


def test_a_client_without_tls_is_reported(url: str) -> None:
    plain = url.replace("rediss:", "redis:").replace("etcds:", "etcd:").replace("verify-full", "disable")
    if plain.startswith("redis"):
        plain = plain.partition("?")[0]
    assert_refused(plain, "Check ")
