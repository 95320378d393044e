//! Listeners: limits, certificates, and a shutdown without dropped requests.

use std::{path::Path, process::Command, sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty};
use hyper::Request;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, ServerName, pem::PemObject as _},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::Notify,
};
use tokio_rustls::{TlsConnector, client::TlsStream};
use windlass_gateway::{
    ListenerLimits,
    tls::{self, CertificatePem, Certificates},
};
use windlass_testkit::temp_dir;

use crate::support::{
    AbortOnDrop, TestProxy, TestResponse, TestSettings, Upstream, default_settings, read_until, service,
    text_response, with_timeout,
};

#[tokio::test]
async fn an_oversized_request_head_gets_431_or_414() {
    let upstream = Upstream::echo().await;
    let bed = TestProxy::new(vec![service(vec![upstream.replica("a")])]).await;
    let big = "x".repeat(40_000);
    assert_eq!(bed.request("GET", "/", &[("X-Big", &big)], "").await.status, 431);
    let many: Vec<(String, String)> = (0..150).map(|n| (format!("X-{n}"), "1".to_owned())).collect();
    let many: Vec<(&str, &str)> = many.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    assert_eq!(bed.request("GET", "/", &many, "").await.status, 431);
    let long = format!("/{}", "x".repeat(20_000));
    assert_eq!(bed.get(&long).await.status, 414);
    // Half of the limits is accepted.
    assert_eq!(bed.request("GET", &long[..10_000], &[("X-Big", &big[..10_000])], "").await.status, 200);
}

#[tokio::test]
async fn slow_clients_of_a_service_are_disconnected() {
    let upstream = Upstream::echo().await;
    let limits = ListenerLimits { head_timeout: Duration::from_millis(200), ..ListenerLimits::USUAL };
    let mut bounds = windlass_gateway::ProxyLimits::USUAL;
    bounds.body_stall_timeout = Duration::from_millis(200);
    let bed = TestProxy::with(
        TestSettings { limits, bounds, ..default_settings() },
        vec![service(vec![upstream.replica("a")])],
    )
    .await;
    // No data; half a head; half a body.
    assert_eq!(bed.raw("").await, "");
    let got = bed.raw("GET / HTTP/1.1\r\nHost: llm.test\r\nX-Slow").await;
    assert!(got.is_empty() || got.starts_with("HTTP/1.1 408"), "{got}");
    let got = bed.raw("POST / HTTP/1.1\r\nHost: llm.test\r\nContent-Length: 10\r\n\r\nhalf").await;
    assert_eq!(TestResponse::parse(&got).status, 408, "{got}");
}

#[tokio::test]
async fn a_stopping_listener_lets_open_requests_finish() {
    let (go, arrived) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (go_on, came) = (Arc::clone(&go), Arc::clone(&arrived));
    let upstream = Upstream::http(move |_| {
        let (go, arrived) = (Arc::clone(&go_on), Arc::clone(&came));
        async move {
            arrived.notify_one();
            go.notified().await;
            text_response("done")
        }
    })
    .await;
    let mut bed = TestProxy::new(vec![service(vec![upstream.replica("a")])]).await;
    let mut stream = bed.connect().await;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: llm.test\r\n\r\n").await.unwrap();
    with_timeout(arrived.notified()).await;
    bed.stop.cancel();
    // New connections are refused at once, while the open request is still awaited.
    crate::support::wait_until("it does not listen", || std::net::TcpStream::connect(bed.address).is_err())
        .await;
    assert!(!bed.task.0.is_finished());
    go.notify_one();
    let answer = read_until(&mut stream, "done").await.to_ascii_lowercase();
    assert!(answer.starts_with("http/1.1 200") && answer.contains("connection: close"), "{answer}");
    with_timeout(&mut bed.task.0).await.unwrap();
}

#[tokio::test]
async fn a_listener_at_its_connection_limit_can_still_be_stopped() {
    let upstream = Upstream::http(|_| async { text_response("done") }).await;
    // The connection that holds the only slot does not release it by itself.
    let limits = ListenerLimits {
        connections_max: 1,
        head_timeout: Duration::from_secs(3600),
        ..ListenerLimits::USUAL
    };
    let mut bed = TestProxy::with(
        TestSettings { limits, ..default_settings() },
        vec![service(vec![upstream.replica("a")])],
    )
    .await;
    let mut stream = bed.connect().await;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: llm.test\r\n\r\n").await.unwrap();
    read_until(&mut stream, "done").await;
    bed.stop.cancel();
    with_timeout(&mut bed.task.0).await.unwrap();
}

/// Certificate created by Debian's OpenSSL, an independent implementation.
fn certificate(folder: &Path, name: &str) -> CertificatePem {
    let (key, chain) = (folder.join("key.pem"), folder.join("chain.pem"));
    let made = Command::new("openssl")
        .args([
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
        ])
        .args(["-subj", "/CN=windlass test", "-addext", &format!("subjectAltName=DNS:{name}")])
        .args(["-addext", "basicConstraints=critical,CA:FALSE"])
        .arg("-keyout")
        .arg(&key)
        .arg("-out")
        .arg(&chain)
        .output()
        .expect("openssl is needed: apt-get install openssl");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    CertificatePem {
        name: name.to_owned(),
        chain: std::fs::read(chain).unwrap(),
        key: std::fs::read(key).unwrap(),
    }
}

pub(crate) async fn tls_connect(
    bed: &TestProxy,
    name: &str,
    trust: &CertificatePem,
    alpn: &[u8],
) -> std::io::Result<TlsStream<TcpStream>> {
    tls_handshake(bed.connect().await, name, trust, alpn).await
}

pub(crate) async fn tls_handshake(
    stream: TcpStream,
    name: &str,
    trust: &CertificatePem,
    alpn: &[u8],
) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(&trust.chain).unwrap()).unwrap();
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![alpn.to_vec()];
    let name = ServerName::try_from(name.to_owned()).unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, stream).await
}

#[tokio::test]
async fn certificates_are_selected_by_name_and_replaced_without_closing_connections() {
    let folder = temp_dir("tls").unwrap();
    let (own, star, renewed) = (
        certificate(folder.path(), "llm.test"),
        certificate(folder.path(), "*.wild.test"),
        certificate(folder.path(), "llm.test"),
    );
    let certificates = Arc::new(Certificates::default());
    certificates.put(&own).unwrap();
    certificates.put(&star).unwrap();
    let upstream = Upstream::echo().await;
    let mut both = service(vec![upstream.replica("a")]);
    both.domains.push("*.wild.test".to_owned());
    both.https = true;
    let tls = Some(tls::server_config(Arc::clone(&certificates)).unwrap());
    let bed = TestProxy::with(TestSettings { tls, ..default_settings() }, vec![both]).await;

    let mut old = tls_connect(&bed, "llm.test", &own, b"http/1.1").await.unwrap();
    tls_connect(&bed, "any.wild.test", &star, b"http/1.1").await.unwrap();
    assert!(tls_connect(&bed, "other.test", &own, b"http/1.1").await.is_err());
    assert!(tls_connect(&bed, "llm.test", &renewed, b"http/1.1").await.is_err());

    certificates.put(&renewed).unwrap();
    tls_connect(&bed, "llm.test", &renewed, b"http/1.1").await.unwrap();
    assert!(tls_connect(&bed, "llm.test", &own, b"http/1.1").await.is_err());
    old.write_all(b"GET /old HTTP/1.1\r\nHost: llm.test\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    with_timeout(old.read_to_string(&mut answer)).await.unwrap();
    assert!(answer.contains("GET /old") && answer.contains("x-forwarded-proto: https"), "{answer}");

    let stream = TokioIo::new(tls_connect(&bed, "llm.test", &renewed, b"h2").await.unwrap());
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    let _connection = AbortOnDrop(tokio::spawn(async move { drop(connection.await) }));
    let request = Request::get("https://llm.test/two").body(Empty::<Bytes>::new()).unwrap();
    let response = with_timeout(sender.send_request(request)).await.unwrap();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    assert!(body.starts_with(b"GET /two\nhost: llm.test\n"), "{body:?}");
}

#[test]
fn a_private_key_that_does_not_match_its_certificate_is_rejected() {
    let folder = temp_dir("tls").unwrap();
    let (a, b) = (certificate(folder.path(), "a.test"), certificate(folder.path(), "b.test"));
    let certificates = Certificates::default();
    let mixed = CertificatePem { name: "a.test".to_owned(), chain: a.chain.clone(), key: b.key };
    assert!(matches!(certificates.put(&mixed), Err(tls::TlsError::Mismatch { .. })));
    let empty = CertificatePem { name: "a.test".to_owned(), chain: vec![], key: a.key };
    assert!(matches!(certificates.put(&empty), Err(tls::TlsError::Empty { .. })));
    assert!(!certificates.has("a.test"));
}
