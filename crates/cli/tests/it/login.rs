//! `windlass login`: nothing is stored before the server accepts the token.

use std::{os::unix::fs::PermissionsExt as _, path::Path};

use crate::{TestHome, server};

const TOKEN: &str = "a-token-for-this-test-only";

fn start_server(home: &TestHome) -> server::TestServer {
    server::start_quiet(&home.path().join("data"), &["--admin-token", TOKEN])
}

fn login_file(home: &TestHome) -> std::path::PathBuf {
    home.path().join("home/login.json")
}

#[test]
fn login_is_verified_and_stored_in_a_private_file() {
    let home = TestHome::new();
    let server = start_server(&home);
    let url = server.url();
    let ran = home.windlass(&["login", "--url", &url, "--token", TOKEN, "-o", "json"]).ok();
    ran.says("as `admin`, project `main`");
    assert_eq!(
        ran.json(),
        serde_json::json!({ "version": 1, "url": url, "user": "admin", "project": "main" })
    );
    assert!(!ran.stderr.contains(TOKEN));
    let mode = std::fs::metadata(login_file(&home)).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    // Later commands use that server, and start none.
    let ps = home.windlass(&["ps", "-o", "json"]).ok();
    assert_eq!(ps.json()["project"], "main");
    assert!(!home.path().join("home/server").exists());
}

#[test]
fn login_with_a_wrong_token_or_project_fails_and_stores_nothing() {
    let home = TestHome::new();
    let server = start_server(&home);
    let url = server.url();
    let wrong = home.windlass(&["login", "--url", &url, "--token", "wrong"]);
    assert_eq!(wrong.code, Some(1));
    wrong.says("does not know this token");
    let project = home.windlass(&["login", "--url", &url, "--token", TOKEN, "--project", "mian"]);
    assert_eq!(project.code, Some(1));
    project.says("did you mean `--project main`?");
    let nobody = home.windlass(&["login", "--url", "http://127.0.0.1:9", "--token", TOKEN]);
    assert_eq!(nobody.code, Some(1));
    nobody.says("reach the server at http://127.0.0.1:9");
    let odd = home.windlass(&["login", "--url", "gopher://x", "--token", TOKEN]);
    odd.says("invalid server address");
    assert!(!Path::exists(&login_file(&home)));
}

#[test]
fn environment_variables_override_the_stored_login() {
    let home = TestHome::new();
    let server = start_server(&home);
    home.windlass(&["login", "--url", &server.url(), "--token", TOKEN]).ok();
    let bad = crate::run_command(home.command(&["ps"]).env("WINDLASS_TOKEN", "other"));
    assert_eq!(bad.code, Some(1));
    bad.says("does not know this token");
    let elsewhere = crate::run_command(home.command(&["ps"]).env("WINDLASS_URL", "http://127.0.0.1:9"));
    // The token of one server is never sent to another.
    assert_eq!(elsewhere.code, Some(2));
    elsewhere.says("no token is known for http://127.0.0.1:9");
    let project = crate::run_command(home.command(&["ps"]).env("WINDLASS_PROJECT", "other"));
    assert_eq!(project.code, Some(1));
    project.says("one of your projects: main");
}

#[test]
fn login_stores_the_certificate_of_a_tls_server_and_trusts_only_it() {
    let (home, other) = (TestHome::new(), TestHome::new());
    let tls = ["--admin-token", TOKEN, "--tls-port", "0"];
    let server = server::start_quiet(&home.path().join("data"), &tls);
    drop(server::start_quiet(&other.path().join("data"), &tls));
    let at = server.https();
    let certificate = home.0.file("copy.pem", "");
    let login = |url: &str, more: &[&str]| {
        home.windlass(&[&["login", "--url", url, "--token", TOKEN], more].concat())
    };

    // A self-signed certificate, and that of another server.
    let theirs = other.path().join("data/tls/cert.pem").display().to_string();
    for more in [&[][..], &["--server-cert", &theirs]] {
        let unknown = login(&at, more);
        assert_eq!(unknown.code, Some(1));
        unknown.says("error[W018]: cannot verify the server at https://");
        unknown.says("pass the certificate of the server with `--server-cert FILE`");
    }
    let empty = login(&at, &["--server-cert", "copy.pem"]);
    assert_eq!(empty.code, Some(2));
    empty.says("`copy.pem` contains no certificate");
    assert!(!Path::exists(&login_file(&home)));

    std::fs::copy(home.path().join("data/tls/cert.pem"), &certificate).unwrap();
    login(&at, &["--server-cert", "copy.pem"]).ok().says("as `admin`, project `main`");
    // The host name is not in the certificate, but the certificate is exactly the given one.
    let port = at.rsplit(':').next().unwrap();
    let elsewhere = format!("https://windlass.localhost:{port}");
    login(&elsewhere, &["--server-cert", "copy.pem"]).ok().says("as `admin`");
    std::fs::remove_file(&certificate).unwrap();
    assert_eq!(home.windlass(&["ps", "-o", "json"]).ok().json()["project"], "main");
}
