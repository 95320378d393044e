//! TLS on the server's port: negotiated versions, and headers for browsers.

use std::{
    io::Write as _,
    net::SocketAddr,
    path::Path,
    process::{Command, Stdio},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use windlass_server::config::{Settings, SettingsSource};

use crate::http::{ServerFixture, TestServer};

/// Creates a certificate for `localhost`.
fn create_certificate(folder: &Path) {
    let made = Command::new("openssl")
        .args(
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=test".split(' '),
        )
        .args(["-addext", "subjectAltName=DNS:localhost", "-addext", "basicConstraints=critical,CA:FALSE"])
        .args(["-keyout", "key.pem", "-out", "cert.pem"])
        .current_dir(folder)
        .output()
        .expect("openssl is needed: apt-get install openssl");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
}

/// Response to one request, sent by `openssl`; empty if the handshake fails.
async fn openssl_response(address: SocketAddr, trusted: &Path, version: &'static str) -> String {
    let trusted = trusted.display().to_string();
    let requested = tokio::task::spawn_blocking(move || {
        let mut child = Command::new("openssl")
            .args(["s_client", "-quiet", version, "-servername", "localhost", "-verify_return_error"])
            .args(["-connect", &address.to_string(), "-CAfile", &trusted])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        // The child may have exited already.
        let _ = stdin.write_all(b"GET /healthcheck HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        let message = child.wait_with_output().unwrap().stdout;
        drop(stdin);
        String::from_utf8_lossy(&message).to_lowercase()
    });
    requested.await.unwrap()
}

fn tls_settings(ground: &ServerFixture, given: SettingsSource) -> Settings {
    let given = SettingsSource { port: Some(0), tls_port: Some(0), ..given }.or(ground.given());
    Settings { pipelines: false, ..Settings::new(given, None).unwrap() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_port_with_a_configured_certificate_sends_hsts_and_refuses_old_tls() {
    let ground = ServerFixture::sqlite();
    create_certificate(ground.dir.path());
    let (cert, key) = (ground.dir.path().join("cert.pem"), ground.dir.path().join("key.pem"));
    let given =
        SettingsSource { tls_cert: Some(cert.clone()), tls_key: Some(key), ..SettingsSource::default() };
    let server = TestServer::start_with_settings(tls_settings(&ground, given)).await;
    let address = server.encrypted.unwrap();
    for version in ["-tls1_2", "-tls1_3"] {
        let message = openssl_response(address, &cert, version).await;
        assert!(message.starts_with("http/1.1 200 "), "{version}: {message}");
        assert!(
            message.contains("\r\nstrict-transport-security: max-age=31536000\r\n"),
            "{version}: {message}"
        );
    }
    // A ClientHello of TLS 1.1 and nothing newer: version, random, no session, one cipher, no compression.
    let mut hello = vec![3, 2];
    hello.extend([7; 32]);
    hello.extend([0, 0, 2, 0xc0, 0x13, 1, 0]);
    let length = u8::try_from(hello.len()).unwrap();
    let mut record = vec![0x16, 3, 1, 0, length + 4, 1, 0, 0, length];
    record.extend(hello);
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(&record).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    // A fatal alert: handshake_failure or protocol_version.
    let alert = (answer.first(), answer.get(5), answer.get(6));
    assert!(matches!(alert, (Some(0x15), Some(2), Some(40 | 70))), "{answer:?}");
    // Plain HTTP carries no HSTS header: an attacker on the network could have added it.
    let plain = TcpStream::connect(&server.authority).await.unwrap();
    let (mut reader, mut writer) = plain.into_split();
    writer.write_all(b"GET /healthcheck HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut message = String::new();
    reader.read_to_string(&mut message).await.unwrap();
    assert!(
        message.starts_with("HTTP/1.1 200 ") && !message.to_lowercase().contains("strict-transport"),
        "{message}"
    );
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_port_with_a_self_signed_certificate_sends_no_hsts() {
    let ground = ServerFixture::sqlite();
    let server = TestServer::start_with_settings(tls_settings(&ground, SettingsSource::default())).await;
    let cert = ground.dir.path().join("tls/cert.pem");
    let message = openssl_response(server.encrypted.unwrap(), &cert, "-tls1_3").await;
    assert!(message.starts_with("http/1.1 200 ") && !message.contains("strict-transport"), "{message}");
    server.stop().await;
}
