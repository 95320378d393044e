//! A thousand hosts in one server process.

use std::{
    fs,
    io::Write,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    time::{Duration, Instant},
};

use futures_util::{StreamExt, stream};
use serde_json::json;
use windlass_backend::Reach;
use windlass_model::id::InstanceId;
use windlass_server::{
    agents::{Agents, enrol},
    db::{Unit, instances},
};

use crate::{
    agents_host::{Kit, Shim, call, figure, machine, new_instance, task},
    agents_ssh::sealed_login,
    sshd::Sshd,
};

const HOSTS: usize = 1000;
/// Calls under way at once.
const AT_ONCE: usize = 64;
const ALL_WITHIN: Duration = Duration::from_secs(300);

fn resident_kb() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Both ends of every connection are files.
fn allow_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).unwrap();
}

/// Hosts on this machine, or behind an SSH server: each with a connection of its own.
async fn instances(kit: &Kit, home: &std::path::Path, sshd: Option<&Sshd>) -> Vec<InstanceId> {
    let mut unit = Unit::new();
    let mut ids = Vec::new();
    for n in 1..=HOSTS {
        let id = InstanceId(kit.db().new_id().unwrap());
        let path = home.join(format!("host-{n:04}")).join("shim.sock");
        let (reach, sealed) = match sshd {
            None => (Reach::Socket { path }, None),
            Some(sshd) => {
                (Reach::Ssh { socket: path.display().to_string() }, Some(sealed_login(kit, sshd, id)))
            }
        };
        let machine = machine(reach);
        unit = unit.and([instances::insert(new_instance(kit, id, n as i64, Some(&machine), sealed))]);
        ids.push(id);
    }
    kit.write(unit).await;
    // Together, so that many of them are one commit.
    let told = stream::iter(ids.clone())
        .map(|id| async move { enrol::enrolment(kit.db(), kit.app.keys(), id).await.unwrap() });
    let told: Vec<_> = told.buffered(AT_ONCE).collect().await;
    for (n, (id, told)) in (1..).zip(ids.iter().zip(told)) {
        let dir = home.join(format!("host-{n:04}"));
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir).unwrap();
        let text = json!({"instance_id": id, "credential_sha256": [told.credential_sha256],
            "server_keys": [told.server_key]});
        let mut file = fs::OpenOptions::new();
        let mut file = file.create(true).write(true).mode(0o600).open(dir.join("enrolment.json")).unwrap();
        file.write_all(text.to_string().as_bytes()).unwrap();
    }
    ids
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_hosts_are_connected_and_answer() {
    are_connected_and_answer(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_hosts_over_ssh_are_connected_and_answer() {
    let sshd = Sshd::start();
    are_connected_and_answer(Some(&sshd)).await;
}

/// Asks until everybody has answered once. A machine that makes both ends of a thousand connections at once may be
/// late for some.
async fn all_come(kit: &Kit, ids: &[InstanceId]) {
    let asked = Instant::now();
    let mut missing = ids.to_vec();
    while !missing.is_empty() {
        let answers = stream::iter(missing.clone()).map(|id| async move { (id, kit.wire.tasks(id).await) });
        let answers: Vec<_> = answers.buffer_unordered(AT_ONCE).collect().await;
        missing = answers.iter().filter(|(_, answer)| answer.is_err()).map(|(id, _)| *id).collect();
        let why = answers.into_iter().find_map(|(_, answer)| answer.err());
        assert!(asked.elapsed() < ALL_WITHIN, "{} hosts do not answer: {why:?}", missing.len());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    figure(format_args!("{HOSTS} hosts came in {:?}", asked.elapsed()));
}

async fn are_connected_and_answer(sshd: Option<&Sshd>) {
    allow_files();
    let kit = Kit::sqlite().await;
    let home = kit.dir.path().join("agent");
    let ids = instances(&kit, &home, sshd).await;
    let _shim = Shim::of(&kit, ids[0], home, &["--runtime", "hollow", "--hosts", &HOSTS.to_string()]).await;

    let before = resident_kb();
    all_come(&kit, &ids).await;
    let mut residents = Vec::new();
    for round in 0..4 {
        let asked = Instant::now();
        let answers = stream::iter(&ids).map(|id| kit.wire.tasks(*id)).buffer_unordered(AT_ONCE);
        let failed: Vec<_> = answers.filter_map(|answer| async { answer.err() }).collect().await;
        assert!(failed.is_empty(), "{} hosts do not answer: {}", failed.len(), failed[0]);
        residents.push(resident_kb());
        figure(format_args!(
            "round {round}: {HOSTS} hosts in {:?}, resident {} kB",
            asked.elapsed(),
            residents[round]
        ));
    }
    assert_eq!(kit.wire.connected(), HOSTS);
    if let Some(sshd) = sshd {
        assert_eq!(sshd.connections(), HOSTS, "one each");
    }
    figure(format_args!(
        "each connection, with its stream of events: {} kB",
        (residents[0] - before) / HOSTS as u64
    ));

    // Each of them tells, and each is heard.
    let run = kit.run("train").await;
    let jobs = stream::iter((0..).zip(ids.clone())).map(|(n, id)| {
        let kit = &kit;
        async move { (id, kit.job(run, n, id, "running").await) }
    });
    let jobs: Vec<_> = jobs.buffered(AT_ONCE).collect().await;
    let asked = Instant::now();
    let submits = stream::iter(jobs.clone()).map(|(instance, job)| {
        let kit = &kit;
        async move { kit.wire.submit_task(call(instance, job, 1), &task(job)).await.unwrap() }
    });
    submits.buffer_unordered(AT_ONCE).for_each(|()| async {}).await;
    for (_, job) in jobs {
        kit.until_due("jobs", job.0).await;
    }
    figure(format_args!("a task on each of {HOSTS} hosts, submitted and told of: {:?}", asked.elapsed()));
}
