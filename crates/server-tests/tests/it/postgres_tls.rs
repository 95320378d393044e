//! TLS connections to Postgres: authentication of both sides.

use std::{path::Path, process::Command, time::Duration};

use windlass_model::error_chain::format_chain;
use windlass_server::db::{Db, DbError};
use windlass_testkit::{TempDir, postgres::Postgres, temp_dir};

/// Certificates of one test: two authorities, and certificates of a database and a client signed by the first.
struct Certificates {
    dir: TempDir,
}

impl Certificates {
    fn create() -> Self {
        let made = Self { dir: temp_dir("postgres-tls").unwrap() };
        for authority in ["ca", "other"] {
            made.openssl(&format!(
                "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN={authority} \
                 -keyout {authority}.key -out {authority}.crt"
            ));
        }
        // The address is not among its names.
        made.create_signed("server", "/CN=database", "DNS:localhost,DNS:db.example");
        made.create_signed("client", "/CN=windlass", "DNS:client.example");
        made
    }

    fn create_signed(&self, name: &str, subject: &str, names: &str) {
        self.openssl(&format!(
            "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj {subject} -keyout {name}.key -out {name}.csr"
        ));
        std::fs::write(self.dir.path().join("ext"), format!("subjectAltName={names}\n")).unwrap();
        self.openssl(&format!(
            "x509 -req -in {name}.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -sha256 -extfile ext \
             -out {name}.crt"
        ));
    }

    fn openssl(&self, arguments: &str) {
        let mut command = Command::new("openssl");
        let ran = command.args(arguments.split_whitespace()).current_dir(self.dir.path()).output().unwrap();
        assert!(ran.status.success(), "openssl {arguments}: {}", String::from_utf8_lossy(&ran.stderr));
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.dir.path().join(name)).unwrap()
    }
}

/// A cluster with TLS, with `hosts` as the host lines of `pg_hba.conf`.
async fn start_cluster(certificates: &Certificates, hosts: &str) -> Postgres {
    let cluster = Postgres::start_on_port("postgres-tls").await.unwrap();
    for (file, from) in [("server.crt", "server.crt"), ("server.key", "server.key"), ("root.crt", "ca.crt")] {
        cluster.write_file(file, &certificates.read(from)).unwrap();
    }
    cluster.admin("CREATE USER windlass SUPERUSER PASSWORD 'hidden'").await.unwrap();
    let hba = format!("local all all trust\n{hosts}\n");
    cluster.write_file("pg_hba.conf", hba.as_bytes()).unwrap();
    for set in ["ssl = on", "ssl_ca_file = 'root.crt'"] {
        cluster.admin(&format!("ALTER SYSTEM SET {set}")).await.unwrap();
    }
    cluster.admin("SELECT pg_reload_conf()").await.unwrap();
    // The configuration is reloaded asynchronously, so new sessions may still see the old one.
    while cluster.run("SHOW ssl").await.unwrap() != [["on"]] {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    cluster
}

fn url(cluster: &Postgres, host: &str, query: &str) -> String {
    format!("postgres://windlass:hidden@{host}:{}/windlass?{query}", cluster.port())
}

async fn open_db(url: &str) -> Result<Db, DbError> {
    Db::open(&url.parse().unwrap()).await
}

#[track_caller]
fn assert_refused(opened: Result<Db, DbError>, part: &str) {
    let message = format_chain(&opened.expect_err("it is refused"));
    assert!(message.contains(part), "{message:?} says nothing of {part:?}");
}

/// Number of sessions of the server, and how many of them are encrypted.
async fn count_sessions(cluster: &Postgres) -> (i64, i64) {
    // In one statement: sessions begin and end meanwhile.
    let both = "SELECT count(*), count(*) FILTER (WHERE s.ssl) FROM pg_stat_ssl s \
                JOIN pg_stat_activity a USING (pid) WHERE a.application_name = 'windlass'";
    let rows = cluster.run(both).await.unwrap();
    (rows[0][0].parse().unwrap(), rows[0][1].parse().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_certificate_is_verified_by_authority_and_name() {
    let certificates = Certificates::create();
    let cluster = start_cluster(&certificates, "host all all 127.0.0.1/32 scram-sha-256").await;
    let (ca, other) = (certificates.path("ca.crt"), certificates.path("other.crt"));
    let verify = |mode: &str, root: &str| format!("sslmode={mode}&sslrootcert={root}");

    // The right name and authority, and every session is encrypted: readers, the writer, and the listener.
    let db = open_db(&url(&cluster, "localhost", &verify("verify-full", &ca))).await.unwrap();
    let replica = open_db(&url(&cluster, "localhost", &verify("verify-full", &ca))).await.unwrap();
    let mut received = db.listen();
    let hint = async {
        loop {
            replica.notify(&["jobs_running"]).await.unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let hint = tokio::select! { hint = received.recv() => hint.unwrap(), () = hint => unreachable!() };
    assert_eq!(hint, "jobs_running");
    db.query("SELECT count(*) FROM users", vec![]).await.unwrap();
    let (all, encrypted) = count_sessions(&cluster).await;
    assert!(all >= 3 && all == encrypted, "{encrypted} of {all} are encrypted");
    db.close().await;
    replica.close().await;

    // Another authority, and another name.
    assert_refused(
        open_db(&url(&cluster, "localhost", &verify("verify-full", &other))).await,
        "UnknownIssuer",
    );
    assert_refused(
        open_db(&url(&cluster, "127.0.0.1", &verify("verify-full", &ca))).await,
        "not valid for name",
    );
    assert_refused(open_db(&url(&cluster, "localhost", &verify("verify-ca", &other))).await, "UnknownIssuer");
    // A configured root certificate is checked even where the mode does not require it.
    assert_refused(open_db(&url(&cluster, "localhost", &verify("require", &other))).await, "UnknownIssuer");
    // Modes that do not verify the name accept any.
    for query in [verify("verify-ca", &ca), verify("require", &ca), "sslmode=require".to_owned()] {
        let db = open_db(&url(&cluster, "127.0.0.1", &query)).await.unwrap();
        let (all, encrypted) = count_sessions(&cluster).await;
        assert!(all > 0 && all == encrypted, "{query}: {encrypted} of {all}");
        db.close().await;
    }
    // The database's own certificate is accepted as root, under its own name.
    let own = certificates.path("server.crt");
    open_db(&url(&cluster, "localhost", &verify("verify-full", &own))).await.unwrap().close().await;
    assert_refused(
        open_db(&url(&cluster, "127.0.0.1", &verify("verify-full", &own))).await,
        "not valid for name",
    );
    // Channel binding: the proof of the password is valid only for this connection, and cannot be relayed.
    let bound = format!("{}&channel_binding=require", verify("verify-full", &ca));
    open_db(&url(&cluster, "localhost", &bound)).await.unwrap().close().await;
    // The name is verified, not the address.
    let named = format!("hostaddr=127.0.0.1&{}", verify("verify-full", &ca));
    open_db(&url(&cluster, "db.example", &named)).await.unwrap().close().await;
    assert_refused(open_db(&url(&cluster, "db.elsewhere", &named)).await, "not valid for name");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_certificate_is_presented_if_the_database_requires_one() {
    let certificates = Certificates::create();
    let cluster = start_cluster(&certificates, "hostssl all all 127.0.0.1/32 cert").await;
    let base = format!("sslmode=verify-full&sslrootcert={}", certificates.path("ca.crt"));
    assert_refused(open_db(&url(&cluster, "localhost", &base)).await, "certificate");
    let (cert, key) = (certificates.path("client.crt"), certificates.path("client.key"));
    let shown = format!("{base}&sslcert={cert}&sslkey={key}");
    open_db(&url(&cluster, "localhost", &shown)).await.unwrap().close().await;
    // A plain connection cannot present a certificate.
    assert_refused(open_db(&url(&cluster, "localhost", "sslmode=disable")).await, "pg_hba.conf");
    // A key that other users may read is not used.
    std::fs::set_permissions(Path::new(&key), std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    assert_refused(open_db(&url(&cluster, "localhost", &shown)).await, "chmod 600");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_without_tls_is_used_only_where_that_is_allowed() {
    let cluster = Postgres::start_on_port("postgres-plain").await.unwrap();
    cluster.admin("CREATE USER windlass SUPERUSER").await.unwrap();
    for (mode, host) in [("sslmode=require", "localhost"), ("sslmode=verify-ca&sslrootcert=", "localhost")] {
        let certificates = Certificates::create();
        let root = if mode.ends_with('=') { certificates.path("ca.crt") } else { String::new() };
        let error = open_db(&url(&cluster, host, &format!("{mode}{root}"))).await.unwrap_err();
        let message = format_chain(&error);
        assert!(matches!(error, DbError::Plain { .. }) && message.contains("sslmode=disable"), "{message}");
    }
    // On this machine no setting is needed.
    for query in ["", "sslmode=prefer", "sslmode=disable"] {
        let db = open_db(&url(&cluster, "localhost", query)).await.unwrap();
        let (all, encrypted) = count_sessions(&cluster).await;
        assert!(all > 0 && encrypted == 0, "{query}");
        db.close().await;
    }
}
