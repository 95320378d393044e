//! A thousand hosts in one server process.

use std::{
    fs,
    io::Write,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    time::{Duration, Instant},
};

use futures_util::{StreamExt, stream};
use serde_json::json;
use windlass_backend::AgentEndpoint;
use windlass_model::id::InstanceId;
use windlass_server::{
    agents::{AgentApi, enrolment},
    db::{Unit, instances},
};

use crate::{
    agents_host::{
        AgentTestEnv, TestShim, call_context, minimal_task, new_instance, new_machine, print_measurement,
    },
    agents_ssh::sealed_login,
    sshd::Sshd,
};

const HOSTS: usize = 1000;
/// Maximum number of concurrent calls.
const CALLS_MAX: usize = 64;
const ALL_TIMEOUT: Duration = Duration::from_secs(300);

fn resident_kb() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Both ends of every connection use a file descriptor.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).unwrap();
}

/// Hosts on this machine, or behind an SSH server: each with a separate connection.
async fn insert_instances(
    kit: &AgentTestEnv,
    home: &std::path::Path,
    sshd: Option<&Sshd>,
) -> Vec<InstanceId> {
    let mut unit = Unit::new();
    let mut ids = Vec::new();
    for n in 1..=HOSTS {
        let id = InstanceId(kit.db().new_id().unwrap());
        let path = home.join(format!("host-{n:04}")).join("shim.sock");
        let (reach, sealed) = match sshd {
            None => (AgentEndpoint::Socket { path }, None),
            Some(sshd) => {
                (AgentEndpoint::Ssh { socket: path.display().to_string() }, Some(sealed_login(kit, sshd, id)))
            }
        };
        let machine = new_machine(reach);
        unit = unit.and([instances::insert(new_instance(kit, id, n as i64, Some(&machine), sealed))]);
        ids.push(id);
    }
    kit.write(unit).await;
    // Concurrently, so that many of them share one commit.
    let reported = stream::iter(ids.clone())
        .map(|id| async move { enrolment::enrolment(kit.db(), kit.app.keys(), id).await.unwrap() });
    let reported: Vec<_> = reported.buffered(CALLS_MAX).collect().await;
    for (n, (id, reported)) in (1..).zip(ids.iter().zip(reported)) {
        let dir = home.join(format!("host-{n:04}"));
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir).unwrap();
        let text = json!({"instance_id": id, "credential_sha256": [reported.credential_sha256],
            "server_keys": [reported.server_key]});
        let mut file = fs::OpenOptions::new();
        let mut file = file.create(true).write(true).mode(0o600).open(dir.join("enrolment.json")).unwrap();
        file.write_all(text.to_string().as_bytes()).unwrap();
    }
    ids
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_hosts_are_connected_and_answer() {
    check_all_answer(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_hosts_over_ssh_are_connected_and_answer() {
    let sshd = Sshd::start();
    check_all_answer(Some(&sshd)).await;
}

/// Calls until every host has answered once. A machine that creates both ends of a thousand connections at once may be
/// late for some.
async fn wait_for_all(kit: &AgentTestEnv, ids: &[InstanceId]) {
    let start = Instant::now();
    let mut missing = ids.to_vec();
    while !missing.is_empty() {
        let answers = stream::iter(missing.clone()).map(|id| async move { (id, kit.wire.tasks(id).await) });
        let answers: Vec<_> = answers.buffer_unordered(CALLS_MAX).collect().await;
        missing = answers.iter().filter(|(_, answer)| answer.is_err()).map(|(id, _)| *id).collect();
        let why = answers.into_iter().find_map(|(_, answer)| answer.err());
        assert!(start.elapsed() < ALL_TIMEOUT, "{} hosts do not answer: {why:?}", missing.len());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    print_measurement(format_args!("{HOSTS} hosts came in {:?}", start.elapsed()));
}

async fn check_all_answer(sshd: Option<&Sshd>) {
    raise_file_limit();
    let kit = AgentTestEnv::sqlite().await;
    let home = kit.dir.path().join("agent");
    let ids = insert_instances(&kit, &home, sshd).await;
    let _shim =
        TestShim::of(&kit, ids[0], home, &["--runtime", "simulated", "--hosts", &HOSTS.to_string()]).await;

    let before = resident_kb();
    wait_for_all(&kit, &ids).await;
    let mut residents = Vec::new();
    for round in 0..4 {
        let requested = Instant::now();
        let answers = stream::iter(&ids).map(|id| kit.wire.tasks(*id)).buffer_unordered(CALLS_MAX);
        let failed: Vec<_> = answers.filter_map(|answer| async { answer.err() }).collect().await;
        assert!(failed.is_empty(), "{} hosts do not answer: {}", failed.len(), failed[0]);
        residents.push(resident_kb());
        print_measurement(format_args!(
            "round {round}: {HOSTS} hosts in {:?}, resident {} kB",
            requested.elapsed(),
            residents[round]
        ));
    }
    assert_eq!(kit.wire.connected(), HOSTS);
    if let Some(sshd) = sshd {
        assert_eq!(sshd.connections(), HOSTS, "one each");
    }
    print_measurement(format_args!(
        "each connection, with its stream of events: {} kB",
        (residents[0] - before) / HOSTS as u64
    ));

    // Each host sends an event, and each event is received.
    let run = kit.run("train").await;
    let jobs = stream::iter((0..).zip(ids.clone())).map(|(n, id)| {
        let kit = &kit;
        async move { (id, kit.job_start(run, n, id, "running").await) }
    });
    let jobs: Vec<_> = jobs.buffered(CALLS_MAX).collect().await;
    let requested = Instant::now();
    let submits = stream::iter(jobs.clone()).map(|(instance, job)| {
        let kit = &kit;
        async move { kit.wire.submit_task(call_context(instance, job, 1), &minimal_task(job)).await.unwrap() }
    });
    submits.buffer_unordered(CALLS_MAX).for_each(|()| async {}).await;
    for (_, job) in jobs {
        kit.wait_until_due("jobs", job.0).await;
    }
    print_measurement(format_args!(
        "a task on each of {HOSTS} hosts, submitted and told of: {:?}",
        requested.elapsed()
    ));
}
