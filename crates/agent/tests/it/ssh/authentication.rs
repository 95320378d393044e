//! Logins that are accepted, and logins that are refused.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;

use super::{SshServer, make_key, run, text, wait_until};

#[test]
fn a_key_that_is_not_authorized_is_refused() {
    let server = SshServer::start();
    make_key(&server.at("other"), "ed25519");
    std::fs::copy(server.at("other"), server.at("id")).unwrap();
    let refused = run(server.ssh(&["-o", "BatchMode=yes"]).arg("true"), b"");
    assert_eq!(refused.status.code(), Some(255));
    assert!(text(&refused.stderr).contains("Permission denied (publickey)"), "{}", text(&refused.stderr));
}

#[test]
fn password_authentication_is_not_offered() {
    let server = SshServer::start();
    let refused = run(
        server
            .ssh(&[
                "-o",
                "PubkeyAuthentication=no",
                "-o",
                "PreferredAuthentications=password,keyboard-interactive",
            ])
            .arg("true"),
        b"",
    );
    assert_eq!(refused.status.code(), Some(255));
    assert!(text(&refused.stderr).contains("Permission denied (publickey)"), "{}", text(&refused.stderr));
}

#[test]
fn rsa_and_ecdsa_keys_are_accepted_but_not_with_sha1() {
    for (kind, name) in [("rsa", "id_rsa"), ("ecdsa", "id_ecdsa")] {
        let server = SshServer::start();
        // Into the user's file, which is read at each login.
        make_key(&server.at(name), kind);
        std::fs::create_dir(server.home().join(".ssh")).unwrap();
        let file = server.home().join(".ssh/authorized_keys");
        std::fs::copy(server.at(&format!("{name}.pub")), &file).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::copy(server.at(name), server.at("id")).unwrap();
        std::fs::remove_file(server.at("id.pub")).unwrap();
        assert_eq!(server.command_output("echo in"), "in\n", "{kind}");
        if kind == "rsa" {
            for (algorithm, code) in [("rsa-sha2-256", 0), ("rsa-sha2-512", 0), ("ssh-rsa", 255)] {
                let option = format!("PubkeyAcceptedAlgorithms={algorithm}");
                let entered = run(server.ssh(&["-o", &option]).arg("true"), b"");
                assert_eq!(entered.status.code(), Some(code), "{algorithm}: {}", text(&entered.stderr));
            }
        }
        // A file that others may write is ignored.
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!(run(server.ssh(&["-o", "BatchMode=yes"]).arg("true"), b"").status.code(), Some(255));
    }
}

#[test]
fn the_host_key_is_stored_and_a_client_rejects_a_different_one() {
    let server = SshServer::start();
    assert_eq!(server.command_output("echo one"), "one\n");
    let kept = std::fs::read_to_string(server.at("host_key")).unwrap();
    assert!(kept.contains("OPENSSH PRIVATE KEY"));
    assert_eq!(std::fs::metadata(server.at("host_key")).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(server.command_output("echo two"), "two\n");
    // The client refuses when the key differs.
    make_key(&server.at("false"), "ed25519");
    let other = std::fs::read_to_string(server.at("false.pub")).unwrap();
    let line = format!("[127.0.0.1]:{} {other}", server.address.port());
    std::fs::write(server.at("known_hosts"), line).unwrap();
    let refused = run(server.ssh(&[]).arg("true"), b"");
    assert_eq!(refused.status.code(), Some(255));
}

#[test]
fn unauthenticated_connections_are_limited_and_free_their_slots() {
    let server = SshServer::start();
    // As many silent connections as there are slots.
    let others: Vec<TcpStream> = (0..64).map(|_| TcpStream::connect(server.address).unwrap()).collect();
    let mut first = others[0].try_clone().unwrap();
    let mut hello = [0u8; 8];
    first.read_exact(&mut hello).unwrap();
    assert_eq!(&hello, b"SSH-2.0-");
    let turned_away = wait_until("one more is turned away", || {
        let mut extra = TcpStream::connect(server.address).unwrap();
        (extra.read(&mut hello).unwrap_or(0) == 0).then_some(true)
    });
    assert!(turned_away);
    drop(first);
    drop(others);
    assert_eq!(
        wait_until("a place is free", || {
            let output = run(server.ssh(&[]).arg("echo in"), b"");
            output.status.success().then(|| text(&output.stdout))
        }),
        "in\n"
    );
}

#[test]
fn garbage_on_the_port_does_not_affect_the_server() {
    let server = SshServer::start();
    for rubbish in
        [b"GET / HTTP/1.1\r\n\r\n".to_vec(), vec![0; 100_000], b"SSH-2.0-x\r\n\xff\xff\xff\xff\xff".to_vec()]
    {
        let mut stream = TcpStream::connect(server.address).unwrap();
        let _ = stream.write_all(&rubbish);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = stream.read_to_end(&mut Vec::new());
    }
    assert_eq!(server.command_output("echo in"), "in\n");
}
