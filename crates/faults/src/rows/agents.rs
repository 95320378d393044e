//! Agents, runners and the agent's files: killed, frozen, damaged.

#![expect(clippy::unwrap_used, reason = "a row that cannot go on should stop")]

use std::{
    fs,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use windlass_agent::shim::journal::JournalEvent;

use super::fixtures::{
    LabEnv, agent_pid, assert_counted, assert_single_attempt, counting_command, end_detail, kill_agent,
    log_len, pids_matching, read_journal, send_signal, set_pause_at, start_agent, wait_for_log_growth,
};
use crate::{AgentSite, FaultRow, RowTest, Trial};
use windlass_testenv::test_env::{newest_submission, small_task_config};
use windlass_testkit::lab::LabHost;
use windlass_testkit::wait::eventually;

pub(super) const ROWS: &[FaultRow] = &[
    FaultRow {
        id: "F14",
        injection: "agent kill -9 in each of pending, preparing, pulling, creating, running, terminating",
        expected: "task resumed: exit status and whole log reported, all resources released",
        bound: "≤ 15 s after start",
        proves: "G1 G2 G6 O2",
        play: RowTest::Now(|trial| Box::pin(agent_killed(trial))),
    },
    FaultRow {
        id: "F16",
        injection: "runner kill -9; runner SIGSTOP; user's process out of memory",
        expected: "OOM: `oom_killed`, 137, end of the log kept; runner killed or frozen: the task ends, its log is \
                   read from disk",
        bound: "≤ 30 s",
        proves: "O2 O3 O7",
        play: RowTest::Now(|trial| Box::pin(runner_killed(trial))),
    },
    FaultRow {
        id: "F33",
        injection: "plain processes: agent kill -9, a child that forks twice into a new session",
        expected: "every descendant ends with its task, no other process is signalled",
        bound: "≤ 10 s",
        proves: "R7 G6 C5",
        play: RowTest::Now(|trial| Box::pin(escaped_process(trial))),
    },
    FaultRow {
        id: "F35",
        injection: "the agent's journal: torn tail, flipped byte, missing file",
        expected: "truncated or reported, nothing invented; tasks resolved from what is running",
        bound: "start ≤ 5 s",
        proves: "G2 O1 R7",
        play: RowTest::Now(|trial| Box::pin(damaged(trial))),
    },
    FaultRow {
        id: "F36",
        injection: "F14 with containers without an engine, on the network of the host or a separate one",
        expected: "task resumed in the same container: exit status and whole log reported, all resources released",
        bound: "≤ 15 s after start",
        proves: "G1 G2 G6 O2",
        play: RowTest::Now(|trial| Box::pin(agent_of_containers_killed(trial))),
    },
    FaultRow {
        id: "F37",
        injection: "F16 with containers without an engine; their monitor kill -9",
        expected: "as F16; monitor killed: the container ends, the job is lost and its log is read from disk",
        bound: "≤ 30 s",
        proves: "O2 O3 O7 G6",
        play: RowTest::Now(|trial| Box::pin(runner_in_container_killed(trial))),
    },
];

/// Bound of F14.
const RECONNECT_BOUND: Duration = Duration::from_secs(15);

async fn agent_killed(trial: &mut Trial) {
    let ground = LabEnv::new(trial, 1).await;
    kill_agent_in_each_status(trial, ground).await;
}

async fn agent_of_containers_killed(trial: &mut Trial) {
    let blocks = trial.choose(&[1, 2]);
    let ground = LabEnv::without_engine(trial, 1, blocks).await;
    kill_agent_in_each_status(trial, ground).await;
}

async fn kill_agent_in_each_status(trial: &mut Trial, mut ground: LabEnv) {
    for status in ["pending", "preparing", "pulling", "creating"] {
        killed_on_the_way(trial, &mut ground, status).await;
    }
    killed_while_running(trial, &mut ground).await;
    killed_while_terminating(trial, &mut ground).await;
    ground.evaluate(trial).await;
}

fn kill_and_start(trial: &mut Trial, host: &LabHost, what: &'static str) -> Instant {
    kill_agent(host);
    trial.fired(what);
    set_pause_at(host, None);
    start_agent(host);
    Instant::now()
}

async fn killed_on_the_way(trial: &mut Trial, ground: &mut LabEnv, status: &'static str) {
    let host = ground.host(1);
    set_pause_at(host, Some(status));
    kill_agent(host);
    start_agent(host);
    let gate = format!("/var/tmp/{status}");
    let job = ground.job(status, &[&counting_command(&gate), "exit 7"]);
    ground.env.apply(&job).await;
    let run = ground.env.run(status).await;
    let id = newest_submission(&run)["id"].as_str().unwrap().to_owned();
    let is_there = |host: &LabHost| {
        read_journal(host).iter().any(|record| {
            record.submission.to_string() == id
                && (matches!(&record.kind, JournalEvent::Moved { to } if to.as_str() == status)
                    || status == "pending" && record.kind == JournalEvent::Submitted)
        })
    };
    eventually("the task waits at the status", || is_there(ground.host(1)));
    trial.pause(0, 300).await;
    let what = match status {
        "pending" => "killed in pending",
        "preparing" => "killed in preparing",
        "pulling" => "killed in pulling",
        _ => "killed in creating",
    };
    let started = kill_and_start(trial, ground.host(1), what);
    ground.env.says(status, "line 1").await;
    trial.within("resumed", RECONNECT_BOUND, started.elapsed());
    finish_job(ground, status, &gate).await;
}

/// Releases the job and checks that its whole result and output are reported.
async fn finish_job(ground: &mut LabEnv, name: &str, gate: &str) {
    ground.host(1).run(&format!("touch {gate}")).unwrap();
    let run = ground.env.reaches(name, &["failed"]).await;
    assert_eq!(newest_submission(&run)["exit_status"], 7, "{run:#}");
    assert_single_attempt(&run);
    assert_counted(&ground.env.log(&run).await);
}

async fn killed_while_running(trial: &mut Trial, ground: &mut LabEnv) {
    let job = ground.job("running", &[&counting_command("/var/tmp/running"), "exit 7"]);
    ground.env.apply(&job).await;
    ground.env.says("running", "line 3").await;
    trial.pause(0, 500).await;
    let started = kill_and_start(trial, ground.host(1), "killed in running");
    let had = log_len(&mut ground.env, "running").await;
    wait_for_log_growth(&mut ground.env, "running", had).await;
    trial.within("resumed", RECONNECT_BOUND, started.elapsed());
    finish_job(ground, "running", "/var/tmp/running").await;
}

async fn killed_while_terminating(trial: &mut Trial, ground: &mut LabEnv) {
    let host = ground.host(1);
    set_pause_at(host, Some("terminating"));
    kill_agent(host);
    start_agent(host);
    let job = ground.job("terminating", &["echo up; sleep 4712"]);
    ground.env.apply(&job).await;
    ground.env.says("terminating", "up").await;
    ground.env.stop("terminating", true).await;
    let requested = |host: &LabHost| {
        read_journal(host).iter().any(|record| matches!(record.kind, JournalEvent::TerminateRequested { .. }))
    };
    eventually("the end was asked for", || requested(ground.host(1)));
    let started = kill_and_start(trial, ground.host(1), "killed in terminating");
    let run = ground.env.reaches("terminating", &["terminated"]).await;
    trial.within("ended", RECONNECT_BOUND, started.elapsed());
    assert_eq!(run["termination_reason"], "aborted_by_user");
}

/// Process ID of the runner of a run's only job, on this machine: a container has process IDs of its own.
async fn runner_pid(ground: &mut LabEnv, name: &str) -> u32 {
    let run = ground.env.run(name).await;
    let mark = format!("WINDLASS_TASK_ID={}", newest_submission(&run)["id"].as_str().unwrap());
    let has = |pid: u32, file: &str, word: &str| {
        let bytes = fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        bytes.split(|byte| *byte == 0).any(|one| one == word.as_bytes())
    };
    let pids = fs::read_dir("/proc").unwrap().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let found: Vec<u32> =
        pids.filter(|pid| has(*pid, "cmdline", "--inner") && has(*pid, "environ", &mark)).collect();
    assert_eq!(found.len(), 1, "one runner: {found:?}");
    found[0]
}

async fn runner_killed(trial: &mut Trial) {
    let mut ground = LabEnv::new(trial, 1).await;
    kill_and_freeze_runner(trial, &mut ground).await;
    ground.evaluate(trial).await;
}

async fn runner_in_container_killed(trial: &mut Trial) {
    let blocks = trial.choose(&[1, 2]);
    let mut ground = LabEnv::without_engine(trial, 1, blocks).await;
    kill_and_freeze_runner(trial, &mut ground).await;
    kill_monitor(trial, &mut ground).await;
    ground.evaluate(trial).await;
}

async fn kill_and_freeze_runner(trial: &mut Trial, ground: &mut LabEnv) {
    start_counting(trial, ground, "killed").await;
    send_signal(runner_pid(ground, "killed").await, "KILL");
    trial.fired("runner killed");
    let began = Instant::now();
    let run = ground.env.reaches("killed", &["failed"]).await;
    trial.within("runner death reported", Duration::from_secs(30), began.elapsed());
    check_counted_so_far(&ground.env.log(&run).await);
    frozen_runner(trial, ground).await;
    out_of_memory(trial, ground).await;
}

/// Starts a job that counts until it is killed, and waits for some lines.
async fn start_counting(trial: &mut Trial, ground: &mut LabEnv, name: &str) {
    let job = ground.job(name, &[&counting_command("/var/tmp/none")]);
    ground.env.apply(&job).await;
    ground.env.says(name, "line 5").await;
    trial.pause(0, 500).await;
}

fn check_counted_so_far(log: &str) {
    for (number, line) in log.lines().enumerate() {
        assert_eq!(line, format!("line {number}"), "O3");
    }
    assert!(log.lines().count() > 5, "O3: {log}");
}

/// A runner that does not respond does not prevent its task from being stopped.
async fn frozen_runner(trial: &mut Trial, ground: &mut LabEnv) {
    start_counting(trial, ground, "frozen").await;
    send_signal(runner_pid(ground, "frozen").await, "STOP");
    trial.fired("runner frozen");
    let began = Instant::now();
    ground.env.stop("frozen", true).await;
    let run = ground.env.reaches("frozen", &["terminated"]).await;
    trial.within("frozen runner ended", Duration::from_secs(30), began.elapsed());
    assert!(ground.env.log(&run).await.contains("line 5"), "O2");
}

/// Nothing supervises the container any more: it is ended, and its exit status is unknown.
async fn kill_monitor(trial: &mut Trial, ground: &mut LabEnv) {
    start_counting(trial, ground, "alone").await;
    let runner = runner_pid(ground, "alone").await;
    let monitors = pids_matching(ground.host(1), "container-monitor");
    assert_eq!(monitors.len(), 1, "one monitor: {:?}", ground.host(1).processes());
    send_signal(monitors[0], "KILL");
    trial.fired("monitor killed");
    let began = Instant::now();
    let run = ground.env.reaches("alone", &["failed"]).await;
    trial.within("monitor death reported", Duration::from_secs(30), began.elapsed());
    assert_eq!(newest_submission(&run)["exit_status"], Value::Null, "{run:#}");
    check_counted_so_far(&ground.env.log(&run).await);
    eventually("the container has ended", || !std::path::Path::new(&format!("/proc/{runner}")).exists());
}

/// The kernel kills the job's process. The limit is set from outside: a share of this machine's memory would be too
/// much for a trial.
async fn out_of_memory(trial: &mut Trial, ground: &mut LabEnv) {
    let wait = "echo last words; until [ -e /var/tmp/hog ]; do sleep 0.05; done; exec tail /dev/zero";
    let job = ground.job("greedy", &[wait]);
    ground.env.apply(&job).await;
    ground.env.says("greedy", "last words").await;
    let run = ground.env.run("greedy").await;
    let id = newest_submission(&run)["id"].as_str().unwrap().to_owned();
    let limited = limit_memory(&id, 192 << 20);
    assert!(limited > 0, "the task has no control group of its own");
    trial.pause(0, 500).await;
    ground.host(1).run("touch /var/tmp/hog").unwrap();
    let began = Instant::now();
    let run = ground.env.reaches("greedy", &["failed"]).await;
    let detail = end_detail(&ground.env, newest_submission(&run));
    assert_eq!(detail.as_deref(), Some("oom_killed"), "{run:#}");
    assert_eq!(newest_submission(&run)["exit_status"], 137, "{run:#}");
    trial.fired("user's process out of memory");
    trial.within("OOM reported", Duration::from_secs(30), began.elapsed());
    assert!(ground.env.log(&run).await.starts_with("last words\n"), "O2");
}

/// Sets the limit on every control group of a task, and returns their number.
fn limit_memory(id: &str, bytes: u64) -> usize {
    let mut limited = 0;
    let mut dirs = vec![std::path::PathBuf::from("/sys/fs/cgroup")];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                dirs.push(entry.path());
            }
        }
        if dir.ends_with(id) {
            for file in ["memory.max", "memory.limit_in_bytes"] {
                let path = dir.join(file);
                limited += usize::from(path.exists() && fs::write(path, bytes.to_string()).is_ok());
            }
        }
    }
    limited
}

async fn escaped_process(trial: &mut Trial) {
    let mut ground = LabEnv::new(trial, 1).await;
    let away = "(setsid sh -c 'while :; do date > /var/tmp/beat; sleep 0.05; done; : away-4713' &) &";
    ground.env.apply(&small_task_config("parent", &[away, "echo up; sleep 4713"])).await;
    ground.env.says("parent", "up").await;
    let host = ground.host(1);
    eventually("it ran away", || !pids_matching(host, "away-4713").is_empty());
    // An unrelated process on the same machine with a similar command line.
    host.run("setsid sleep 4713000 < /dev/null > /dev/null 2>&1 &").unwrap();
    eventually("the other process runs", || pids_matching(host, "sleep 4713000").len() == 1);
    let bystander = pids_matching(host, "sleep 4713000");
    assert_eq!(bystander.len(), 1);
    trial.pause(0, 500).await;
    kill_agent(host);
    trial.fired("agent killed");
    if trial.rng.chance(50) {
        start_agent(ground.host(1));
    }
    ground.env.stop("parent", true).await;
    let start = Instant::now();
    ground.env.reaches("parent", &["terminated"]).await;
    let host = ground.host(1);
    eventually("nothing runs on", || pids_matching(host, "away-4713").is_empty());
    trial.within("all ended", Duration::from_secs(10), start.elapsed());
    assert_eq!(pids_matching(host, "sleep 4713000"), bystander, "C5: a stranger was signalled");
    send_signal(bystander[0], "KILL");
    ground.evaluate(trial).await;
}

async fn damaged(trial: &mut Trial) {
    let mut ground = LabEnv::new(trial, 1).await;
    for (name, harm) in
        [("torn", truncate_journal as DamageFn), ("flipped", flip_journal_byte), ("missing", remove_journal)]
    {
        let gate = format!("/var/tmp/{name}");
        ground.env.apply(&small_task_config(name, &[&counting_command(&gate)])).await;
        ground.env.says(name, "line 3").await;
        trial.pause(0, 300).await;
        kill_agent(ground.host(1));
        harm(trial, &ground.host(1).path("/var/lib/windlass/home/journal"));
        start_agent(ground.host(1));
        let took = eventually("the agent listens", || is_answering(ground.host(1)));
        trial.within("start", Duration::from_secs(5), took);
        ground.host(1).run(&format!("touch {gate}")).unwrap();
        let run = ground.env.reaches(name, &["done", "failed"]).await;
        assert_single_attempt(&run);
        check_log(&ground.env.log(&run).await, &run);
        ground.env.wait_for_hosts("lab", 1).await;
    }
    let sites: Vec<AgentSite> = ground.sites().into_iter().map(AgentSite::damaged).collect();
    trial.evaluate(&mut ground.env, &sites).await;
}

type DamageFn = fn(&mut Trial, &std::path::Path);

/// Truncates the last record.
fn truncate_journal(trial: &mut Trial, journal: &std::path::Path) {
    let file = fs::File::options().write(true).open(journal).unwrap();
    let len = file.metadata().unwrap().len();
    file.set_len(len - trial.rng.between(1, 20)).unwrap();
    trial.fired("torn tail");
}

/// Flips a bit in the second half.
fn flip_journal_byte(trial: &mut Trial, journal: &std::path::Path) {
    let mut bytes = fs::read(journal).unwrap();
    let at = trial.rng.between(bytes.len() as u64 / 2, bytes.len() as u64 - 1);
    bytes[usize::try_from(at).unwrap()] ^= 0x20;
    fs::write(journal, bytes).unwrap();
    trial.fired("flipped byte");
}

fn remove_journal(trial: &mut Trial, journal: &std::path::Path) {
    fs::remove_file(journal).unwrap();
    trial.fired("missing journal");
}

/// Checks that nothing was invented, and that the output of a successful job is complete.
fn check_log(log: &str, run: &Value) {
    if run["status"] == json!("done") {
        return assert_counted(log);
    }
    let counted = log.strip_suffix("last\n").unwrap_or(log);
    for (number, line) in counted.lines().enumerate() {
        assert_eq!(line, format!("line {number}"), "O1");
    }
}

fn is_answering(host: &LabHost) -> bool {
    let socket = host.path("/var/lib/windlass/door/shim.sock");
    agent_pid(host).is_some() && std::os::unix::net::UnixStream::connect(socket).is_ok()
}
