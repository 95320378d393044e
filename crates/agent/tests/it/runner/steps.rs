//! Calls in order, out of order, repeated and concurrent.

use std::{
    io::{Read, Write},
    net::TcpStream,
};

use serde_json::json;

use crate::support::runner::{Runner, RunnerResponse, RunnerSetup, job, script};

const ARCHIVE: &str = "0f6f1b1e-8c2e-4a57-9d4c-0d7b3a1c2e11";

fn upload_archive(runner: &Runner, field: &str, name: &str, content: &[u8]) -> RunnerResponse {
    let head =
        "Authorization: Bearer a token for tests\r\nContent-Type: multipart/form-data; boundary=XX\r\n";
    let mut body = format!(
        "--XX\r\nContent-Disposition: form-data; name=\"{field}\"; filename=\"{name}\"\r\n\
         Content-Type: application/octet-stream\r\n\r\n"
    )
    .into_bytes();
    body.extend_from_slice(content);
    body.extend_from_slice(b"\r\n--XX--\r\n");
    runner.call_with("POST", "/api/upload_archive", head, &body)
}

#[test]
fn r26_calls_out_of_order_are_refused_and_change_nothing() {
    let runner = Runner::start();
    let refused = |answer: RunnerResponse, why: &str| assert_eq!((answer.status, answer.text()), (409, why));
    refused(runner.post("/api/run"), "the job has not been submitted");
    refused(runner.call("POST", "/api/upload_code", b"x"), "the job has not been submitted");
    refused(upload_archive(&runner, "archive", ARCHIVE, b"x"), "the job has not been submitted");
    assert_eq!(runner.states(), []);
    runner.go(&script("echo one; exec sleep 100"));
    runner.wait_printed("one");
    let other = serde_json::to_vec(&script("echo two")).unwrap();
    refused(runner.call("POST", "/api/submit", &other), "the job has already been started");
    refused(runner.call("POST", "/api/upload_code", b"x"), "the job has already been started");
    refused(upload_archive(&runner, "archive", ARCHIVE, b"x"), "the job has already been started");
    runner.post("/api/stop");
    assert_eq!(runner.ended().state, "terminated");
    refused(runner.call("POST", "/api/submit", &other), "the job has ended");
    assert_eq!(runner.log_text(), "one\n");
    assert_eq!(runner.states().len(), 2);
}

#[test]
fn r26_a_repeated_call_gets_the_same_response_and_has_no_effect() {
    let runner = Runner::start();
    runner.submit(&script("echo early >> count"));
    let submit = script("echo once >> count; echo said; exec sleep 100");
    runner.submit(&submit);
    runner.submit(&submit);
    let answers: Vec<String> = std::thread::scope(|scope| {
        let calls: Vec<_> = (0..8).map(|_| scope.spawn(|| runner.post("/api/run"))).collect();
        calls.into_iter().map(|call| call.join().unwrap().text().to_owned()).collect()
    });
    let expected = json!({ "working_dir": runner.work(), "username": "root" }).to_string();
    assert_eq!(answers, vec![expected; 8]);
    runner.wait_printed("said");
    runner.post("/api/stop");
    runner.post("/api/stop");
    assert_eq!(runner.ended().state, "terminated");
    assert_eq!(runner.post("/api/stop").status, 200);
    assert_eq!(std::fs::read_to_string(runner.work().join("count")).unwrap(), "once\n");
    assert_eq!(runner.states().len(), 2);
}

#[test]
fn r26_a_job_stopped_before_its_start_never_starts() {
    let mut runner = Runner::start();
    runner.submit(&script("echo never"));
    // A reader is connected, so that the runner keeps responding.
    let mut tail = super::drain::tail(&runner);
    assert_eq!(runner.post("/api/stop").status, 200);
    assert_eq!(runner.post("/api/run").status, 409);
    let end = runner.ended();
    assert_eq!((end.state.as_str(), end.exit_status), ("terminated", None));
    assert_eq!(runner.log(), b"");
    tail.shutdown(std::net::Shutdown::Both).unwrap();
    assert_eq!(runner.exited(), 1);
    let _ = tail.read(&mut [0]);
}

#[test]
fn a_runner_without_a_started_job_exits_after_its_timeout() {
    let mut runner = RunnerSetup::new().wait_secs(1).start();
    runner.submit(&script("echo never"));
    assert_eq!(runner.exited(), 1);
    assert_eq!(runner.log(), b"");
}

#[test]
fn x5_every_call_on_the_socket_needs_the_token() {
    let runner = Runner::start();
    for path in ["/api/healthcheck", "/api/pull", "/api/logs", "/api/nothing"] {
        assert_eq!(runner.call_with("GET", path, "", b"").status, 401, "{path}");
        assert_eq!(
            runner.call_with("GET", path, "Authorization: Bearer guess\r\n", b"").status,
            401,
            "{path}"
        );
    }
    let health = runner.get("/api/healthcheck").json();
    assert_eq!(health["service"], "dstack-runner");
    assert_eq!(runner.get("/api/nothing").status, 404);
}

#[test]
fn a_dstack_server_needs_no_token_on_its_port() {
    let port = windlass_testkit::ports::reserve_free_port();
    let mut setting = RunnerSetup::new();
    setting.config.compat_http = Some(format!("localhost:{port}"));
    let mut runner = setting.start();
    let request = |path: &str| {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        write!(stream, "GET {path} HTTP/1.0\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        serde_json::from_str::<serde_json::Value>(text.split_once("\r\n\r\n").unwrap().1).unwrap()
    };
    assert_eq!(request("/api/healthcheck"), json!({ "service": "dstack-runner", "version": "latest" }));
    // A job without output: there is nothing to read, but its end must still be reported.
    runner.run_to_end(&script("exit 4"));
    let first = request("/api/pull?timestamp=0");
    assert_eq!(first["job_states"].as_array().unwrap().len(), 2);
    assert_eq!((&first["job_states"][1]["exit_status"], &first["has_more"]), (&json!(4), &json!(false)));
    assert_eq!(runner.exited(), 4);
}

#[test]
fn a_job_with_an_invalid_environment_is_refused() {
    let runner = Runner::start();
    for (name, value) in [("A\0B", "x"), ("A=B", "x"), ("", "x"), ("A", "x\0y")] {
        let body = job(json!({ "commands": ["true"], "env": { name: value } }));
        let answer = runner.call("POST", "/api/submit", &serde_json::to_vec(&body).unwrap());
        assert_eq!(answer.status, 400, "{name:?} {value:?}");
    }
    assert_eq!(runner.post("/api/run").status, 409, "nothing was submitted");
}

#[test]
fn archives_are_accepted_only_with_a_valid_id() {
    let runner = Runner::start();
    runner.submit(&script("true"));
    for (field, name) in [("code", ARCHIVE), ("archive", "../../etc/x"), ("archive", ""), ("archive", "x")] {
        assert_eq!(upload_archive(&runner, field, name, b"x").status, 400, "{field} {name}");
    }
    assert_eq!(upload_archive(&runner, "archive", ARCHIVE, b"first").status, 200);
    assert_eq!(upload_archive(&runner, "archive", ARCHIVE, b"second").status, 200);
    let kept = std::fs::read(runner.run_dir().join("uploads").join(ARCHIVE)).unwrap();
    assert_eq!(kept, b"second");
    // Larger than any call that is not an upload.
    let large = vec![b'x'; 3 << 20];
    let head = "Authorization: Bearer a token for tests\r\n";
    assert_eq!(runner.call_with("POST", "/api/upload_code", head, &large).status, 200);
    assert_eq!(std::fs::read_dir(runner.run_dir().join("uploads")).unwrap().count(), 2);
    runner.post("/api/run");
    runner.ended();
    assert!(!runner.run_dir().join("uploads").exists(), "uploads are gone once they served");
}
