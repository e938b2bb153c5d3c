"""Certificates and keys of a deployment: an authority, a server certificate, and a key for every node."""

# pyright: reportMissingImports=false

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import ssl
from collections.abc import Sequence
from pathlib import Path

from fedloom.base.errors import ConfigError, first_line
from fedloom.base.files import whole_file

DAYS = 365
AUTHORITY, SERVER = "ca", "server"
NAME = re.compile(r"\w[\w.-]*", re.ASCII)
HOST = re.compile(r"(\*\.)?\w[\w.-]*|[\da-fA-F:]*:[\da-fA-F:.]*", re.ASCII)


def read_authority(path: Path) -> bytes:
    """The certificate of an authority."""
    try:
        blob = path.expanduser().read_bytes()
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=blob.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{path} holds no certificate; use the ca.pem of the people who run the server.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    return blob


def make(folder: Path, hosts: Sequence[str], nodes: Sequence[str]) -> list[Path]:
    """Write an authority, a server certificate for the hosts, and a key pair for every node; private keys are 0600.

    ``ca.pem`` goes to every node, ``<name>.key`` to its node alone; ``server.pem``, ``server.key`` and ``nodes/*.pub``
    stay at the server. Existing files are kept, so that nodes can be added.

    Raises:
        ConfigError: for a name that no node or host can have, if the server's certificate is for other hosts, the
            package ``cryptography`` is missing, or files cannot be read or written.
    """
    for host in hosts:
        if not HOST.fullmatch(host):
            raise ConfigError(f"{host!r} is not a host name; give names like fed.example.org, in the letters of the "
                              "domain name system, or IP addresses.")  # fmt: skip
    for name in nodes:
        if name in (AUTHORITY, SERVER) or not NAME.fullmatch(name):
            raise ConfigError(f"no node can be called {name!r}; choose letters, digits, '-', '_' and '.', but not "
                              f"{AUTHORITY} or {SERVER}, whose keys it would get.")  # fmt: skip
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise ConfigError("certificates need the package cryptography; pip install 'fedloom[flower]'.") from error
    pem, none = serialization.Encoding.PEM, serialization.NoEncryption()
    paths: list[Path] = []

    def write(name: str, blob: bytes, private: bool = False) -> None:
        path, new = folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL
        # a server that runs looks for public keys, and must not see half of one
        with os.fdopen(os.open(path, new, 0o600), "wb") if private else whole_file(path) as file:
            file.write(blob)
        paths.append(path)

    def key(name: str, form: serialization.PrivateFormat) -> ec.EllipticCurvePrivateKey:
        path = folder / f"{name}.key"
        if path.exists():
            return serialization.load_pem_private_key(path.read_bytes(), None)  # type: ignore[return-value]
        private = ec.generate_private_key(ec.SECP384R1())
        write(path.name, private.private_bytes(pem, form, none), private=True)
        return private

    def x509_name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def certificate(
        subject: str, public: ec.EllipticCurvePublicKey, signer: ec.EllipticCurvePrivateKey,
        hosts: Sequence[str] = (),
    ) -> bytes:  # fmt: skip
        now, is_ca = datetime.datetime.now(datetime.timezone.utc), not hosts
        usage = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
                               "encipher_only", "decipher_only"), False)  # fmt: skip
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509_name(subject))
            .issuer_name(x509_name("FedLoom authority"))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=DAYS))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
            .add_extension(
                x509.KeyUsage(digital_signature=True, key_cert_sign=is_ca, crl_sign=is_ca, **usage), critical=True
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        )
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName(list(map(alternative, hosts))), critical=False)
        return builder.sign(signer, hashes.SHA384()).public_bytes(pem)

    def alternative(host: str) -> x509.GeneralName:
        try:
            return x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            return x509.DNSName(host)

    try:
        (folder / "nodes").mkdir(parents=True, exist_ok=True, mode=0o700)
        plain, ssh = serialization.PrivateFormat.PKCS8, serialization.PrivateFormat.OpenSSH
        authority = key(AUTHORITY, plain)
        if not (folder / f"{AUTHORITY}.pem").exists():
            write(f"{AUTHORITY}.pem", certificate("FedLoom authority", authority.public_key(), authority))
        server = key(SERVER, plain)
        if not (folder / f"{SERVER}.pem").exists():
            write(f"{SERVER}.pem", certificate("FedLoom server", server.public_key(), authority, hosts))
        else:
            stored = x509.load_pem_x509_certificate((folder / f"{SERVER}.pem").read_bytes())
            names = stored.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            if missing := [host for host in hosts if alternative(host) not in list(names)]:
                raise ConfigError(
                    f"the server's certificate in {folder} is not for {', '.join(missing)}; remove {SERVER}.pem to "
                    "have another one made."
                )
        for name in nodes:
            if not (folder / "nodes" / f"{name}.pub").exists():
                public = key(name, ssh).public_key()
                encoded = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
                write(f"nodes/{name}.pub", encoded + b"\n")
    except OSError as error:
        raise ConfigError(f"certificates cannot be written to {folder} ({error.strerror}).") from error
    except (ValueError, TypeError, x509.ExtensionNotFound) as error:
        raise ConfigError(f"{folder} holds a key or certificate that cannot be read ({first_line(error)}).") from error
    return paths
