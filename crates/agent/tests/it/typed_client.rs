//! The server's typed client with the real shim: a whole lifecycle over one connection, observed by the event stream.

use std::time::Duration;

use serde_json::json;
use tokio::{net::UnixStream, time::timeout};
use windlass_api::agent::{
    client::{ShimClient as Host, ShimError, ShimEvents, SignedSpec},
    events::ShimEventKind,
    runner::{JobState, SubmitBody},
    shim::{TaskStatus, TerminateRequest},
};
use windlass_model::id::SubmissionId;
use windlass_testkit::wait::TIMEOUT;

use crate::support::shim::{CREDENTIAL, Setup, Shim, random_uuid, sign};

async fn connect(shim: &Shim, credential: &str) -> Host {
    let stream = UnixStream::connect(shim.socket()).await.unwrap();
    Host::connect(stream, credential).await.unwrap()
}

fn sign_spec(shim: &Shim, name: &str) -> (SubmissionId, SignedSpec) {
    let spec = shim.spec(name);
    let id = serde_json::from_value(spec["id"].clone()).unwrap();
    let body = serde_json::to_vec(&spec).unwrap();
    let signature = sign(&body);
    (id, SignedSpec { body, signature })
}

fn job(commands: &[&str]) -> SubmitBody {
    let job = json!({
        "run": {"id": random_uuid(), "run_spec": {"run_name": "wire"}},
        "job_spec": {"commands": commands, "env": {"GREETING": "hello"}},
        "job_submission": {"id": random_uuid()},
    });
    serde_json::from_value(job).unwrap()
}

/// Reads events until one matches.
async fn wait_for_event<T>(events: &mut ShimEvents, mut wanted: impl FnMut(ShimEventKind) -> Option<T>) -> T {
    let found = async {
        loop {
            let event = events.next().await.unwrap().expect("the stream goes on");
            if let Some(found) = wanted(event.kind) {
                return found;
            }
        }
    };
    timeout(TIMEOUT, found).await.expect("the event comes")
}

async fn wait_for_status(events: &mut ShimEvents, task: SubmissionId, status: TaskStatus) {
    wait_for_event(events, |what| {
        let ShimEventKind::Task { info } = what else { return None };
        (info.id == task && info.status == status).then_some(())
    })
    .await;
}

async fn wait_for_job_end(events: &mut ShimEvents, task: SubmissionId) -> JobState {
    wait_for_event(events, |what| {
        let ShimEventKind::Job { id, state } = what else { return None };
        (id == task && state.state != "running").then_some(state)
    })
    .await
}

#[tokio::test]
async fn a_job_is_driven_from_submission_to_removal_by_events_alone() {
    let shim = Shim::start(Setup::process());
    let host = connect(&shim, CREDENTIAL).await;
    let mut events = host.events(None).await.unwrap();
    let (id, spec) = sign_spec(&shim, "wire-0-0");

    host.submit(&spec, 1).await.unwrap();
    wait_for_status(&mut events, id, TaskStatus::Running).await;
    host.submit_job(id, &job(&["/bin/sh", "-c", "echo $GREETING; exit 3"]), 1).await.unwrap();
    let started = host.run_job(id, 1).await.unwrap().unwrap();
    assert_eq!(host.run_job(id, 1).await.unwrap().unwrap(), started, "a repeat gets the same answer");
    let ended = wait_for_job_end(&mut events, id).await;
    assert_eq!((ended.state.as_str(), ended.exit_status), ("failed", Some(3)));

    let record = host.job(id).await.unwrap();
    assert_eq!(record.states.last(), Some(&ended));
    let log = host.log(id, "job", 0, 1024, Duration::ZERO).await.unwrap();
    assert_eq!((&log.bytes[..], log.end, log.is_complete), (&b"hello\n"[..], 6, true));
    assert_eq!(record.log_end, 6);
    // The runner waits for its reader and ends once everything was read.
    host.acknowledge_log(id, "job", 6).await.unwrap();
    wait_for_status(&mut events, id, TaskStatus::Terminated).await;
    let log = host.log(id, "job", 2, 3, Duration::ZERO).await.unwrap();
    assert_eq!(&log.bytes[..], b"llo", "the log outlives the runner");

    let info = host.terminate(id, &TerminateRequest::default(), 2).await.unwrap();
    assert_eq!((info.status, info.exit_status), (TaskStatus::Terminated, Some(3)));
    assert!(matches!(host.remove(id, 1).await, Err(ShimError::StaleEpoch { seen: 2 })));
    host.remove(id, 2).await.unwrap();
    wait_for_event(&mut events, |what| (what == ShimEventKind::Gone { id }).then_some(())).await;
    assert!(matches!(host.task(id).await, Err(ShimError::TaskNotFound)));
    assert!(matches!(host.submit(&spec, 1).await, Err(ShimError::TaskRemoved)));
    assert!(host.tasks().await.unwrap().tasks.is_empty());
}

#[tokio::test]
async fn a_stop_reaches_the_job_and_archives_reach_the_runner() {
    let shim = Shim::start(Setup::process());
    let host = connect(&shim, CREDENTIAL).await;
    let mut events = host.events(None).await.unwrap();
    let (id, spec) = sign_spec(&shim, "wire-0-1");
    host.submit(&spec, 1).await.unwrap();
    wait_for_status(&mut events, id, TaskStatus::Running).await;
    assert!(
        matches!(host.run_job(id, 1).await, Err(ShimError::Conflict { .. })),
        "no job was handed over yet"
    );

    let archive = random_uuid().to_string();
    let mut submit = job(&["/bin/sh", "-c", "cat notes/today; exec sleep 600"]);
    submit.job_spec.file_archives =
        serde_json::from_value(json!([{"id": archive, "path": "notes/today"}])).unwrap();
    host.submit_job(id, &submit, 1).await.unwrap();
    let mut tar = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(5);
    header.set_mode(0o644);
    tar.append_data(&mut header, "yesterday", &b"rain\n"[..]).unwrap();
    host.upload_archive(id, &archive, &tar.into_inner().unwrap(), 1).await.unwrap();
    host.run_job(id, 1).await.unwrap();
    let log = host.log(id, "job", 0, 1024, TIMEOUT).await.unwrap();
    assert_eq!(&log.bytes[..], b"rain\n");
    host.job_metrics(id).await.unwrap();

    host.stop_job(id, 2, None, false).await.unwrap();
    let ended = wait_for_job_end(&mut events, id).await;
    assert_eq!(ended.state, "terminated");
    assert!(matches!(host.stop_job(id, 1, None, false).await, Err(ShimError::StaleEpoch { seen: 2 })));
}

#[tokio::test]
async fn x5_an_unauthenticated_client_can_only_check_the_health() {
    let shim = Shim::start(Setup::simulated());
    let host = connect(&shim, "guessed").await;
    host.health().await.unwrap();
    let (id, spec) = sign_spec(&shim, "wire-0-2");
    for refused in [
        host.tasks().await.map(drop),
        host.submit(&spec, 1).await,
        host.remove(id, 1).await,
        host.log(id, "job", 0, 1, Duration::ZERO).await.map(drop),
        host.events(None).await.map(drop),
        host.host().await.map(drop),
    ] {
        assert!(matches!(refused, Err(ShimError::Unauthorized { .. })), "{refused:?}");
    }
}
