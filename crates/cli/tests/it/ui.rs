//! `windlass ui`: opens the web UI with a code that logs in once.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    os::unix::fs::PermissionsExt as _,
    time::Duration,
};

use crate::{cli_env::CliEnv, run_command};

/// Opens a session as a page of the web UI does; returns the status line and the headers.
fn open_session(server: &str, code: &str) -> String {
    let authority = server.strip_prefix("http://").unwrap();
    let body = format!(r#"{{"code":"{code}"}}"#);
    let request = format!(
        "POST /api/session/open HTTP/1.1\r\nHost: {authority}\r\nOrigin: {server}\r\nX-Windlass-UI: 1\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    let mut stream = TcpStream::connect(authority).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn the_printed_url_logs_in_once_and_is_opened_in_the_browser() {
    let env = CliEnv::new();
    let url = env.server.url();
    let printed = env.windlass(&["ui", "--no-browser"]).ok();
    let code = printed.stdout.trim().strip_prefix(&format!("{url}/ui/#code=")).unwrap().to_owned();
    assert!(open_session(&url, &code).starts_with("HTTP/1.1 200 "));
    assert!(open_session(&url, &code).starts_with("HTTP/1.1 401 "), "a code opens one session");

    let (script, opened) = (env.home.path().join("browser"), env.home.path().join("opened"));
    env.file(
        "browser",
        &format!("#!/bin/sh\nprintf %s \"$1\" > {0}.part && mv {0}.part {0}\n", opened.display()),
    );
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let ran = run_command(env.command(&["ui", "-o", "json"]).env("BROWSER", &script)).ok();
    let shown = ran.json()["url"].as_str().unwrap().to_owned();
    for _ in 0..600 {
        if opened.exists() {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(std::fs::read_to_string(&opened).unwrap(), shown);
}
