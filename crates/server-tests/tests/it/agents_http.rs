//! The server's calls to real agents over their sockets.

use std::time::{Duration, Instant};

use tokio::{io::AsyncReadExt, net::UnixListener};
use windlass_api::agent::shim::TaskStatus;
use windlass_backend::AgentEndpoint;
use windlass_model::id::SubmissionId;
use windlass_server::agents::{AgentApi, AgentError, CALL_TIMEOUT, enrolment};
use windlass_testkit::wait::eventually_async;

use crate::agents_host::{AgentTestEnv, TestShim, call_context, job, minimal_task, print_measurement};

fn submission_id() -> SubmissionId {
    SubmissionId(uuid::Uuid::from_u128(0x1234_5678_0000_4000_8000_0000_0000_0001))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_is_driven_from_submission_to_removal() {
    let kit = AgentTestEnv::sqlite().await;
    let shim = TestShim::start(&kit, "process").await;
    let (wire, at) = (&kit.wire, |epoch| call_context(shim.instance, submission_id(), epoch));
    let news = wire.host(shim.instance).await.unwrap();
    assert!(news.info.cpus > 0 && !news.version.is_empty());
    let unknown = wire.task(at(1)).await;
    assert!(matches!(unknown, Err(AgentError::UnknownTask { .. })), "{unknown:?}");

    wire.submit_task(at(1), &minimal_task(submission_id())).await.unwrap();
    wire.submit_task(at(1), &minimal_task(submission_id())).await.unwrap();
    kit.wait_for_task(at(1), TaskStatus::Running).await;
    assert_eq!(wire.tasks(shim.instance).await.unwrap(), [submission_id()]);
    let start = job(&["/bin/sh", "-c", "echo $GREETING; sleep 0.2; exit 3"]);
    let started = kit.start_job(at(1), &start).await;
    assert_eq!(wire.start_job(at(1), &start).await.unwrap(), started, "a repeat has the effect of one");
    assert_eq!(kit.wait_until_ended(at(1)).await, ("failed".into(), Some(3)));
    let log = wire.log(at(1), "job", 2, 3).await.unwrap();
    assert_eq!((&log.bytes[..], log.end, log.is_complete), (&b"llo"[..], 6, true));
    // A runner whose log is complete may exit before it receives the acknowledgement.
    let received = wire.log_was_read(at(1), "job", 6).await;
    assert!(matches!(received, Ok(()) | Err(AgentError::Conflict { .. })), "{received:?}");

    let alive = wire.remove_task(at(1)).await;
    assert!(matches!(alive, Ok(()) | Err(AgentError::Conflict { .. })), "{alive:?}");
    kit.discard(at(2)).await;
    let gone = wire.submit_task(at(3), &minimal_task(submission_id())).await;
    assert!(matches!(gone, Err(AgentError::Gone { .. })), "{gone:?}");
    assert!(wire.tasks(shim.instance).await.unwrap().is_empty());
    assert_eq!(wire.connected(), 1, "all of it over one connection");
    wire.forget(shim.instance);
    assert_eq!(wire.connected(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m8_a_task_that_cannot_be_signed_without_postgres_is_not_refused() {
    let kit = AgentTestEnv::postgres().await;
    let shim = TestShim::start(&kit, "process").await;
    let at = call_context(shim.instance, submission_id(), 1);
    kit.wire.submit_task(at, &minimal_task(submission_id())).await.unwrap();
    kit.app.db().close().await;
    let unsigned = kit.wire.submit_task(at, &minimal_task(submission_id())).await;
    assert!(matches!(unsigned, Err(AgentError::Unsigned { .. })), "{unsigned:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_reach_the_job_and_a_stop_ends_its_commands() {
    let kit = AgentTestEnv::sqlite().await;
    let shim = TestShim::start(&kit, "process").await;
    let (wire, at) = (&kit.wire, call_context(shim.instance, submission_id(), 1));
    wire.submit_task(at, &minimal_task(submission_id())).await.unwrap();
    kit.wait_for_task(at, TaskStatus::Running).await;
    // Longer than one flow-control window of the connection.
    let size = 3 << 20;
    let mut start = job(&["/bin/sh", "-c", "wc -c < notes/today; exec sleep 600"]);
    let archive = "11111111-1111-4111-8111-111111111111";
    start.submit.job_spec.file_archives =
        serde_json::from_value(serde_json::json!([{"id": archive, "path": "notes/today"}])).unwrap();
    start.archives = vec![(archive.into(), tar_archive("yesterday", &vec![b'x'; size]).into())];
    kit.start_job(at, &start).await;
    let text = eventually_async("the job writes its log", async || {
        let part = wire.log(at, "job", 0, 1024).await.unwrap();
        (!part.bytes.is_empty()).then(|| String::from_utf8_lossy(&part.bytes).trim().to_owned())
    })
    .await;
    assert_eq!(text, size.to_string());
    let pulled = wire.pull(at).await.unwrap();
    assert!(pulled.no_connections_secs.is_some(), "the runner lives and tells: {pulled:?}");
    wire.metrics(at).await.unwrap();
    let stopped = Instant::now();
    wire.stop_job(at, 5, false).await.unwrap();
    assert_eq!(kit.wait_until_ended(at).await.0, "terminated");
    print_measurement(format_args!("stop, from the call to the recorded end: {:?}", stopped.elapsed()));
    kit.discard(at).await;
}

/// An archive of one file in the simplest tar format.
fn tar_archive(name: &str, content: &[u8]) -> Vec<u8> {
    let mut head = [0_u8; 512];
    head[..name.len()].copy_from_slice(name.as_bytes());
    head[100..108].copy_from_slice(b"0000644\0");
    head[124..136].copy_from_slice(format!("{:011o}\0", content.len()).as_bytes());
    head[148..156].copy_from_slice(b"        ");
    head[156] = b'0';
    head[257..265].copy_from_slice(b"ustar\x0000");
    let sum: u32 = head.iter().map(|&byte| u32::from(byte)).sum();
    head[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let padding = content.len().next_multiple_of(512) - content.len();
    [&head[..], content, &vec![0; padding + 1024]].concat()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l2_an_older_epoch_is_refused_by_the_host() {
    let kit = AgentTestEnv::sqlite().await;
    let shim = TestShim::start(&kit, "simulated").await;
    let (wire, at) = (&kit.wire, |epoch| call_context(shim.instance, submission_id(), epoch));
    wire.submit_task(at(5), &minimal_task(submission_id())).await.unwrap();
    for refused in [
        wire.submit_task(at(4), &minimal_task(submission_id())).await,
        wire.terminate_task(at(4), "x", 0).await,
        wire.remove_task(at(4)).await,
        wire.stop_job(at(4), 5, false).await,
    ] {
        assert!(matches!(refused, Err(AgentError::Fenced { epoch: 4, seen: 5 })), "{refused:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn x8_a_host_of_another_server_rejects_our_credential_and_signature() {
    let kit = AgentTestEnv::sqlite().await;
    let shim = TestShim::start(&kit, "simulated").await;
    let at = call_context(shim.instance, submission_id(), 1);
    let ours = enrolment::enrolment(kit.db(), kit.app.keys(), shim.instance).await.unwrap();
    let strange_key = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";

    shim.enrol(&ours.credential_sha256, strange_key);
    let refused = kit.wire.submit_task(at, &minimal_task(submission_id())).await;
    assert!(
        matches!(&refused, Err(AgentError::Refused { reason }) if reason.contains("signature")),
        "{refused:?}"
    );

    shim.enrol(&"0".repeat(64), &ours.server_key);
    for refused in [
        kit.wire.submit_task(at, &minimal_task(submission_id())).await,
        kit.wire.tasks(shim.instance).await.map(drop),
    ] {
        assert!(matches!(refused, Err(AgentError::Barred { .. })), "{refused:?}");
    }

    shim.enrol(&ours.credential_sha256, &ours.server_key);
    kit.wire.submit_task(at, &minimal_task(submission_id())).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f14_the_next_call_reaches_a_shim_that_was_killed_and_restarted() {
    let kit = AgentTestEnv::sqlite().await;
    let mut shim = TestShim::start(&kit, "process").await;
    let at = call_context(shim.instance, submission_id(), 1);
    kit.wire.submit_task(at, &minimal_task(submission_id())).await.unwrap();
    kit.wait_for_task(at, TaskStatus::Running).await;
    for _ in 0..3 {
        shim.kill();
        shim.start_again();
        assert_eq!(
            kit.wire.tasks(shim.instance).await.unwrap(),
            [submission_id()],
            "the task is still there"
        );
    }
    shim.kill();
    let down = kit.wire.tasks(shim.instance).await;
    assert!(matches!(&down, Err(AgentError::Unreachable { why, .. }) if why.contains("socket")), "{down:?}");
    shim.start_again();
    kit.wait_until_reachable(shim.instance).await;
    kit.discard(at).await;
}

/// A socket that accepts connections, writes `says` and reads.
fn start_socket_sink(kit: &AgentTestEnv, says: &'static [u8]) -> AgentEndpoint {
    let path = kit.dir.path().join("taker.sock");
    let listener = UnixListener::bind(&path).unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let _ = tokio::io::AsyncWriteExt::write_all(&mut stream, says).await;
                let mut received = [0; 1024];
                while stream.read(&mut received).await.is_ok_and(|count| count > 0) {}
            });
        }
    });
    AgentEndpoint::Socket { path }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f9_all_calls_to_a_silent_shim_time_out_together() {
    let kit = AgentTestEnv::sqlite().await;
    let instance = kit.instance(0, start_socket_sink(&kit, b"")).await;
    enrolment::enrolment(kit.db(), kit.app.keys(), instance).await.unwrap();
    let start = Instant::now();
    let all = futures_util::future::join_all((0..20).map(|_| kit.wire.tasks(instance))).await;
    assert!(start.elapsed() < CALL_TIMEOUT + Duration::from_secs(2), "{:?}", start.elapsed());
    for answer in &all {
        assert!(
            matches!(answer, Err(AgentError::Unreachable { why, .. }) if why.contains("no response")),
            "{answer:?}"
        );
    }
    let again = Instant::now();
    assert!(kit.wire.tasks(instance).await.is_err());
    assert!(again.elapsed() < Duration::from_secs(1), "nobody waits twice for the same silence");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shim_with_invalid_replies_is_reported_unreachable() {
    let kit = AgentTestEnv::sqlite().await;
    let instance =
        kit.instance(0, start_socket_sink(&kit, b"HTTP/1.1 200 OK\r\n\r\nhello, who is there? ....")).await;
    let nobody = kit.wire.tasks(instance).await;
    assert!(
        matches!(&nobody, Err(AgentError::Unreachable { why, .. }) if why.contains("credential")),
        "{nobody:?}"
    );
    enrolment::enrolment(kit.db(), kit.app.keys(), instance).await.unwrap();
    let garbled = kit.wire.tasks(instance).await;
    assert!(matches!(garbled, Err(AgentError::Unreachable { .. })), "{garbled:?}");
}
