//! Gateway process whose server is unreachable: it has routes in a file, and orders its certificates itself.

use std::{net::SocketAddr, path::Path, time::Duration};

use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;
use windlass_gateway::{
    node::{AcmeSettings, Node, ServerClient, Settings, TlsSettings},
    route::Service,
    route_cache_file,
    tls::CertificatePem,
};
use windlass_testkit::temp_dir;
use windlass_testkit::wait::eventually_ok_async;

use crate::{
    acme::Authority,
    listener::tls_handshake,
    support::{TestResponse, raw, with_timeout},
};

/// Gateway that ends with the test.
struct RunningGateway {
    plain: SocketAddr,
    encrypted: SocketAddr,
    metrics: SocketAddr,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl RunningGateway {
    fn start(state: &Path, listen: SocketAddr, directory: &str) -> Self {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let acme = AcmeSettings {
            directory: directory.to_owned(),
            contact: Some("ops@example.org".to_owned()),
            roots: Some("/nowhere".to_owned()),
        };
        let settings = Settings {
            // No server listens there.
            server: ServerClient::new("http://127.0.0.1:1", "token", None).unwrap(),
            state: state.to_owned(),
            listen,
            tls: Some(TlsSettings { listen: any, certificate_files: None, acme }),
            metrics: Some(any),
            address: None,
            token_cache_ttl: Duration::from_secs(60),
        };
        let node = Node::start(settings, uuid::Uuid::nil()).unwrap();
        let (plain, encrypted) = node.addresses();
        let metrics = node.metrics_address().unwrap();
        let stop = CancellationToken::new();
        let reported = stop.clone();
        let task = tokio::spawn(async move { node.run(reported).await.unwrap() });
        Self { plain: plain.unwrap(), encrypted: encrypted.unwrap(), metrics, stop, task }
    }

    async fn end(self) {
        self.stop.cancel();
        with_timeout(self.task).await.unwrap();
    }

    /// Sends a request over HTTPS, once there is a certificate for the name.
    async fn get_https(&self, name: &str, path: &str, root: &CertificatePem) -> TestResponse {
        let mut stream = eventually_ok_async(name, async || {
            let stream = TcpStream::connect(self.encrypted).await.unwrap();
            tls_handshake(stream, name, root, b"http/1.1").await
        })
        .await;
        let request = format!("GET {path} HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let _ = with_timeout(stream.read_to_end(&mut answer)).await;
        TestResponse::parse(&String::from_utf8_lossy(&answer))
    }
}

#[tokio::test]
async fn a_gateway_orders_and_keeps_certificates_for_itself_and_its_services() {
    let folder = temp_dir("node").unwrap();
    let service = Service {
        domains: vec!["llm.test".to_owned()],
        https: true,
        auth: false,
        ..Service::new("main", "llm")
    };
    let request =
        json!({"services": [service], "sites": {}, "own": "gateway.test", "certificate": {"type": "acme"}});
    route_cache_file::save(
        &folder.path().join("routes"),
        &json!({"generation": 1, "version": "1", "told": request}),
    )
    .unwrap();

    let listen = SocketAddr::from(([127, 0, 0, 1], windlass_testkit::ports::reserve_free_port()));
    let authority = Authority::new("node", listen);
    let serving = authority.serve().await;
    let directory = format!("http://{}/directory", serving.address);
    let node = RunningGateway::start(folder.path(), listen, &directory);
    let root = CertificatePem {
        name: String::new(),
        chain: std::fs::read(authority.folder.path().join("ca.pem")).unwrap(),
        key: vec![],
    };
    // There is no replica, which is reported over HTTPS.
    assert_eq!(node.get_https("llm.test", "/", &root).await.status, 503);
    // The model endpoint is at the gateway's own name, and requires a token.
    assert_eq!(node.get_https("gateway.test", "/proxy/models/main/models", &root).await.status, 401);
    // Plain requests are redirected now.
    let plain = |name: &str| format!("GET /a HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n");
    for name in ["llm.test", "gateway.test"] {
        let got = TestResponse::parse(&raw(node.plain, plain(name)).await);
        assert_eq!(got.status, 308, "{name}");
    }
    let metrics =
        raw(node.metrics, "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".to_owned()).await;
    for line in [
        "windlass_gateway_generation 1\n",
        "windlass_service_requests_total{project=\"main\",run=\"llm\",class=\"5xx\"} 1\n",
    ] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }
    node.end().await;

    // The authority is gone; its certificates are still in use.
    drop(serving);
    let again = RunningGateway::start(folder.path(), listen, "http://127.0.0.1:1/directory");
    assert_eq!(again.get_https("llm.test", "/", &root).await.status, 503);
    again.end().await;
}
