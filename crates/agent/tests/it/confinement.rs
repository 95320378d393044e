//! Confinement of plain processes: forbidden resources are out of reach, and required ones work.

use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use windlass_agent::proc;
use windlass_api::agent::{
    SSH_PORT,
    runner::{JobRecord, Metrics},
    shim::{ConfinementMethod, HostInfo, ProcessMode, ProcessesInfo, TaskStatus},
};
use windlass_model::id::SubmissionId;
use windlass_testkit::wait::{eventually_async, eventually_ok_async};

use crate::{
    ssh,
    support::{
        shim::{Setup, Shim},
        temp_dir,
    },
};

const NOBODY: u32 = 65_534;
/// Default user ids of tasks.
const USERS: std::ops::RangeInclusive<u32> = 1_900_000_000..=1_900_065_535;
const SECRET: &str = "canary-of-another-job-4711";

fn job(script: &str) -> Value {
    json!({
        "run": {"id": "0", "run_spec": {"run_name": "confined"}},
        "job_spec": {"commands": ["/bin/bash", "-c", script]},
    })
}

async fn start(shim: &Shim, change: impl FnOnce(&mut Value)) -> SubmissionId {
    let mut spec = shim.spec("confined");
    change(&mut spec);
    let id = shim.submit(&spec, 1).await;
    shim.wait_for(id, TaskStatus::Running).await;
    id
}

/// Waits for the job's end and returns it with the output.
async fn wait_ended(shim: &Shim, id: SubmissionId) -> (JobRecord, String) {
    let record = eventually_ok_async("the job ends", async || {
        let record: JobRecord = shim.client().get(&format!("/api/tasks/{id}/job")).await.json();
        let is_over = record.states.last().is_some_and(|last| last.state != "running");
        if record.log_complete && is_over { Ok(record) } else { Err(format!("{record:?}\n{}", shim.log())) }
    })
    .await;
    (record, job_output(shim, id).await)
}

async fn job_output(shim: &Shim, id: SubmissionId) -> String {
    let path = format!("/api/tasks/{id}/logs?stream=job&offset=0&limit=1000000");
    shim.client().get(&path).await.expect(200).text().to_owned()
}

async fn run(shim: &Shim, id: SubmissionId, job: &Value) -> String {
    shim.play(id, job).await;
    let (record, text) = wait_ended(shim, id).await;
    assert_eq!(record.states.last().unwrap().exit_status, Some(0), "{record:?}\n{text}");
    text
}

/// Waits for a line of a job that continues to run.
async fn wait_for_line(shim: &Shim, id: SubmissionId, begin: &str) -> String {
    eventually_ok_async(&format!("a line `{begin}`"), async || {
        let text = job_output(shim, id).await;
        let found = text.lines().find_map(|line| line.strip_prefix(begin)).map(|rest| rest.trim().to_owned());
        found.filter(|_| text.ends_with('\n')).ok_or_else(|| format!("{text}\n{}", shim.log()))
    })
    .await
}

async fn process_info(shim: &Shim) -> ProcessesInfo {
    let host: HostInfo = shim.client().get("/api/instance/host").await.json();
    host.processes.unwrap()
}

/// Reads the record of a task that is a plain process.
fn process_record(shim: &Shim, id: SubmissionId) -> Value {
    let file = shim.home().join("tasks").join(id.to_string()).join("process.json");
    serde_json::from_slice(&fs::read(file).unwrap()).unwrap()
}

/// Prints for each attempt whether it worked.
const ATTEMPTS: &str = r#"
attempt() { name=$1; shift; if "$@" > /dev/null 2>&1; then echo "$name: worked"; else echo "$name: refused"; fi; }
echo "ids: $(id -u) $(id -g) $(id -G)"
grep -E '^(CapInh|CapPrm|CapEff|CapBnd|CapAmb|NoNewPrivs|Seccomp):' /proc/self/status
attempt enrolment cat "$AGENT_HOME/enrolment.json"
attempt tasks ls "$AGENT_HOME/tasks/$VICTIM"
attempt token cat "$AGENT_HOME/tasks/$VICTIM/token"
attempt own-token cat "$PWD/../token"
attempt run-directory ls "$PWD/../run"
attempt socket test -e "$AGENT_HOME/shim.sock"
attempt keys cat "$DATA/keys/master"
attempt docker test -r /run/docker.sock
attempt victim-environ cat "/proc/$VICTIM_PID/environ"
attempt any-secret grep -alE 'canary-of-anothe[r]' /proc/[0-9]*/environ
attempt victim-kill kill -9 "$VICTIM_PID"
attempt first-memory cat /proc/1/environ
attempt first-kill kill -9 1
attempt first-root ls /proc/1/root/
attempt mount mount -t tmpfs none "$HOME"
attempt mount-namespace unshare -m true
attempt user-namespace unshare -U true
attempt other-namespace nsenter -t 1 -m true
attempt remount mount -o remount,rw /
attempt etc sh -c 'echo x > /etc/windlass-canary'
attempt usr sh -c 'echo x > /usr/windlass-canary'
attempt kernel sh -c 'echo x > /proc/sys/kernel/core_pattern'
attempt host-name hostname canary
attempt clock date -s 2001-01-01
attempt su su -c true
attempt cgroup sh -c 'for file in $(find /sys/fs/cgroup -name cgroup.procs); do echo 0 > $file && exit 0; done; exit 1'
attempt limits sh -c 'for file in $(find /sys/fs/cgroup -name pids.max -o -name memory.max -o -name memory.limit_in_bytes); do echo 1 > $file && exit 0; done; exit 1'
attempt scratch sh -c 'echo x > file && cat file'
attempt home sh -c 'echo x > $HOME/file && cat $HOME/file'
attempt tmp sh -c 'echo x > /tmp/confined-canary && cat /tmp/confined-canary'
attempt var-tmp sh -c 'echo x > /var/tmp/confined-canary'
attempt shm sh -c 'echo x > /dev/shm/confined-canary'
echo "suid: $("$MOUNTED/id" -u)"
echo "metadata: $(timeout 5 bash -c 'exec 3<>/dev/tcp/169.254.169.254/80' 2>&1 | tail -n 1)"
echo "processes: $(ls -d /proc/[0-9]* | wc -l)"
"#;

/// Attempts of [`ATTEMPTS`] that must work.
const ALLOWED: [&str; 5] = ["scratch", "home", "tmp", "var-tmp", "shm"];

fn attempts(text: &str) -> Vec<(&str, bool)> {
    let of_line = |line: &'_ str| -> Option<(usize, bool)> {
        let (name, message) = line.split_once(": ")?;
        matches!(message, "worked" | "refused").then_some((name.len(), message == "worked"))
    };
    text.lines().filter_map(|line| of_line(line).map(|(end, worked)| (&line[..end], worked))).collect()
}

fn check_attempts(text: &str) {
    let attempts = attempts(text);
    assert_eq!(attempts.len(), 32, "{text}");
    let wrong: Vec<_> = attempts
        .iter()
        .filter(|(name, worked)| *worked != ALLOWED.contains(name))
        .map(|(name, _)| name)
        .collect();
    assert!(wrong.is_empty(), "{wrong:?}\n{text}");
}

fn value<'a>(text: &'a str, name: &str) -> &'a str {
    let found = text.lines().find_map(|line| line.strip_prefix(name));
    found.unwrap_or_else(|| panic!("no {name} in {text}")).trim()
}

/// A world-readable directory with a secret, like a server's data. Not in `/tmp`, which is covered as a whole.
struct SecretDir(PathBuf);

impl SecretDir {
    fn new(name: &str) -> Self {
        let data = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        fs::create_dir_all(data.join("keys")).unwrap();
        fs::write(data.join("keys/master"), "master key").unwrap();
        Self(data)
    }
}

impl Drop for SecretDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Starts a job with a secret in its environment; returns its id and the pid of its command on the host.
async fn start_victim(shim: &Shim) -> (SubmissionId, i32) {
    let id = start(shim, |_| {}).await;
    let mut job = job("echo up; exec sleep 1000");
    job["job_spec"]["env"] = json!({"SECRET": SECRET});
    shim.play(id, &job).await;
    wait_for_line(shim, id, "up").await;
    let marked = format!("SECRET={SECRET}");
    let task = format!("WINDLASS_TASK_ID={id}");
    let pid = eventually_async("its command runs", async || {
        let all = proc::list().unwrap();
        all.iter().map(|stat| stat.name.pid).find(|&pid| proc::was_started_with(pid, &[&marked, &task]))
    })
    .await;
    (id, pid)
}

/// Environment that [`ATTEMPTS`] needs.
fn attempt_env(shim: &Shim, data: &Path, victim: (SubmissionId, i32), mounted: &Path) -> Value {
    json!({
        "AGENT_HOME": shim.home(), "DATA": data, "VICTIM": victim.0.to_string(), "VICTIM_PID": victim.1.to_string(),
        "MOUNTED": mounted,
    })
}

#[tokio::test]
async fn a_confined_job_cannot_escape() {
    let outside = temp_dir("outside").unwrap();
    let data = SecretDir::new("users");
    let shared = outside.path().join("shared");
    fs::create_dir(&shared).unwrap();
    fs::copy("/usr/bin/id", shared.join("id")).unwrap();
    fs::set_permissions(shared.join("id"), fs::Permissions::from_mode(0o4755)).unwrap();
    let mounted = Path::new("/mnt/windlass-test-confined");
    let setup = Setup::confined().policy(&format!("mounts: [{}]\n", shared.display()));
    let shim = Shim::start(setup.arg("--hide").arg(data.0.to_str().unwrap()));
    let info = process_info(&shim).await;
    assert_eq!(
        (info.mode, info.confined_by),
        (ProcessMode::Confined, Some(ConfinementMethod::Users)),
        "{info:?}"
    );
    let victim = start_victim(&shim).await;
    let id = start(&shim, |spec| {
        spec["instance_mounts"] = json!([{"instance_path": shared, "path": mounted}]);
        spec["pids"] = json!(200);
    })
    .await;
    let mut job = job(ATTEMPTS);
    job["job_spec"]["env"] = attempt_env(&shim, &data.0, victim, mounted);
    let text = run(&shim, id, &job).await;
    check_attempts(&text);
    let user = process_record(&shim, id)["user"].as_u64().unwrap().to_string();
    assert!(USERS.contains(&user.parse().unwrap()));
    assert_eq!(value(&text, "ids:"), format!("{user} {user} {user}"));
    assert_eq!(value(&text, "suid:"), user, "{text}");
    for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
        assert_eq!(u64::from_str_radix(value(&text, set), 16), Ok(0), "{text}");
    }
    assert_eq!((value(&text, "NoNewPrivs:"), value(&text, "Seccomp:")), ("1", "2"));
    assert!(value(&text, "processes:").parse::<u32>().unwrap() < 20, "it sees its own: {text}");
    if info.problem.is_none() {
        assert!(value(&text, "metadata:").contains("Operation not permitted"), "{text}");
    }
    assert!(!Path::new("/tmp/confined-canary").exists() && !Path::new("/dev/shm/confined-canary").exists());
    assert!(proc::stat(victim.1).unwrap().is_some(), "the other job lives");
    shim.terminate(id, 1, 0).await;
    shim.remove(id, 1).await;
    assert!(!mounted.exists(), "mount points are taken away");
}

/// The same for an agent without root: the job keeps the agent's user.
#[tokio::test]
async fn a_confined_job_of_a_non_root_agent_cannot_escape() {
    let data = SecretDir::new("namespaces");
    let shim = Shim::start(Setup::confined().user(NOBODY).arg("--hide").arg(data.0.to_str().unwrap()));
    let info = process_info(&shim).await;
    assert_eq!(info.confined_by, Some(ConfinementMethod::Namespaces), "{info:?}");
    assert!(info.problem.unwrap().contains("metadata"), "what is missing is said");
    let victim = start_victim(&shim).await;
    let id = start(&shim, |_| {}).await;
    let mut job = job(ATTEMPTS);
    job["job_spec"]["env"] = attempt_env(&shim, &data.0, victim, Path::new("/usr/bin"));
    let text = run(&shim, id, &job).await;
    let text = text
        // It may see more of its own task: the contents belong to its user.
        .replace("run-directory: worked", "run-directory: refused")
        // The kernel accepts the signal and ignores it: the first process of a namespace cannot be ended from inside.
        .replace("first-kill: worked", "first-kill: refused");
    check_attempts(&text);
    assert_eq!(u64::from_str_radix(value(&text, "CapBnd:"), 16), Ok(0), "{text}");
    assert_eq!((value(&text, "NoNewPrivs:"), value(&text, "Seccomp:")), ("1", "2"));
    assert!(proc::stat(victim.1).unwrap().is_some(), "the other job lives");
}

#[tokio::test]
async fn confined_tasks_have_distinct_users_that_survive_a_shim_restart() {
    let mut shim = Shim::start(Setup::confined());
    let (first, second) = (start(&shim, |_| {}).await, start(&shim, |_| {}).await);
    let user = |shim: &Shim, id| process_record(shim, id)["user"].as_u64().unwrap();
    let users = (user(&shim, first), user(&shim, second));
    assert_ne!(users.0, users.1);
    shim.kill();
    shim.restart();
    for id in [first, second] {
        shim.wait_for(id, TaskStatus::Running).await;
    }
    let third = start(&shim, |_| {}).await;
    assert!(![users.0, users.1].contains(&user(&shim, third)), "users of living tasks are not given again");
    let message = run(&shim, first, &job("id -u; whoami; stat -c %u . \"$HOME\"")).await;
    assert_eq!(message, format!("{0}\nwindlass\n{0}\n{0}\n", users.0));
    shim.terminate(first, 1, 0).await;
    shim.remove(first, 1).await;
    let ledger = format!("/run/windlass/user-ids/{}", users.0);
    assert!(!Path::new(&ledger).exists(), "a user is given back with its task");
}

#[tokio::test]
async fn confined_tasks_cannot_start_more_processes_than_their_limit() {
    let shim = Shim::start(Setup::confined());
    let id = start(&shim, |spec| spec["pids"] = json!(40)).await;
    // A shell that cannot fork ends.
    let script = "(i=0; while [ $i -lt 60 ]; do sleep 1000 > /dev/null 2>&1 & i=$((i + 1)); done; echo all) 2>/dev/null; echo end";
    let text = run(&shim, id, &job(script)).await;
    assert!(text.ends_with("end\n") && !text.contains("all\n"), "{text}");
}

#[tokio::test]
async fn sessions_over_ssh_are_confined_like_the_job() {
    let shim = Shim::start(Setup::confined());
    let keys = temp_dir("keys").unwrap();
    ssh::make_key(&keys.path().join("id"), "ed25519");
    let public = fs::read_to_string(keys.path().join("id.pub")).unwrap();
    let id = start(&shim, |spec| spec["container_ssh_keys"] = json!([public])).await;
    shim.play(id, &job("echo up; exec sleep 1000")).await;
    wait_for_line(&shim, id, "up").await;
    let info = shim.info(id).await;
    let port = info.ports.unwrap().iter().find(|port| port.container == SSH_PORT).unwrap().host;
    let mut client = ssh::client(keys.path(), "ssh", "-p", port);
    let command = "id -u; pwd; tty || true; grep -E '^(CapBnd|NoNewPrivs|Seccomp):' /proc/self/status; echo x > f; \
                   unshare -U true || echo refused";
    client.args(["-tt", "root@127.0.0.1", command]);
    let message = ssh::run(&mut client, b"");
    let text = ssh::text(&message.stdout).replace('\r', "");
    let user = process_record(&shim, id)["user"].as_u64().unwrap();
    assert!(text.starts_with(&format!("{user}\n/run/windlass-task/{id}/scratch\n/dev/pts/0\n")), "{text}");
    assert!(text.contains("CapBnd:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n"), "{text}");
    assert!(text.contains("refused"), "{text}");
    let file = shim.home().join("tasks").join(id.to_string()).join("scratch/f");
    assert_eq!(u64::from(fs::metadata(file).unwrap().uid()), user);
    // The file server, too.
    let mut copy = ssh::client(keys.path(), "sftp", "-P", port);
    copy.args(["-b", "-", "root@127.0.0.1"]);
    let message = ssh::run(&mut copy, b"ls -l f\nls /run/windlass\n");
    assert!(ssh::text(&message.stdout).contains(" f"), "{message:?}");
    assert!(!message.status.success(), "what is hidden is hidden from it: {message:?}");
}

#[tokio::test]
async fn stop_kill_memory_limits_and_metrics_work_for_confined_tasks() {
    let shim = Shim::start(Setup::confined());
    // Stopped with a grace period.
    let id = start(&shim, |_| {}).await;
    shim.play(id, &job("trap 'echo bye; exit 7' INT TERM; echo up; while :; do sleep 0.01; done")).await;
    wait_for_line(&shim, id, "up").await;
    let metrics = format!("/api/tasks/{id}/runner/api/metrics");
    let used: Metrics = shim.client().epoch(1).get(&metrics).await.json();
    assert!(used.memory_usage_bytes > 0 && used.cpu_usage_micro > 0, "{used:?}");
    let done = shim.terminate(id, 1, 20).await;
    assert_eq!(done.exit_status, Some(7), "{done:?}");
    assert!(job_output(&shim, id).await.ends_with("bye\n"));
    // Killed; detached descendants end too.
    let id = start(&shim, |_| {}).await;
    shim.play(id, &job("trap '' INT TERM; (setsid sleep 1000 &); echo up; while :; do sleep 1000; done"))
        .await;
    wait_for_line(&shim, id, "up").await;
    let mark = format!("WINDLASS_TASK_ID={id}");
    let living = || {
        let all = proc::list().unwrap();
        all.iter().filter(|stat| proc::was_started_with(stat.name.pid, &[&mark])).count()
    };
    assert!(living() >= 4, "{}", living());
    shim.terminate(id, 1, 0).await;
    assert_eq!(living(), 0);
    // Its first process is killed: nothing outlives it.
    let id = start(&shim, |_| {}).await;
    shim.play(id, &job("echo up; exec sleep 1000")).await;
    wait_for_line(&shim, id, "up").await;
    let name: proc::ProcessId = serde_json::from_value(process_record(&shim, id)["process"].clone()).unwrap();
    let held = proc::ProcessHandle::open(name).unwrap().unwrap();
    assert!(held.signal(rustix::process::Signal::KILL).unwrap());
    shim.wait_for(id, TaskStatus::Terminated).await;
    let mark = format!("WINDLASS_TASK_ID={id}");
    let all = proc::list().unwrap();
    assert!(!all.iter().any(|stat| proc::was_started_with(stat.name.pid, &[&mark])));
    // Out of memory.
    let id = start(&shim, |spec| spec["memory"] = json!(64 << 20)).await;
    shim.play(id, &job("tail /dev/zero; exit $?")).await;
    let (record, text) = wait_ended(&shim, id).await;
    let last = record.states.last().unwrap();
    assert_eq!(last.exit_status, Some(137), "{record:?} {text}");
    assert!(format!("{last:?}").contains("oom"), "{last:?}");
}

#[tokio::test]
async fn the_flag_and_the_policy_decide_which_plain_processes_are_accepted() {
    let refused = async |shim: &Shim, isolation: &str, why: &[&str]| {
        let mut spec = shim.spec("refused");
        spec["process_isolation"] = json!(isolation);
        let message = shim.try_submit(&spec, 1).await.expect(403).text().to_owned();
        assert!(why.iter().all(|part| message.contains(part)), "{why:?} not in {message}");
    };
    let taken = async |shim: &Shim, isolation: &str, user: &str| {
        let id = start(shim, |spec| spec["process_isolation"] = json!(isolation)).await;
        let message = run(shim, id, &job("id -un")).await;
        assert_eq!(message.trim(), user);
    };
    let shim = Shim::start(Setup::confined());
    refused(&shim, "own", &["confines plain processes", "`processes: own`"]).await;
    let shim = Shim::start(Setup::confined().arg("--processes").arg("own"));
    assert_eq!(process_info(&shim).await.mode, ProcessMode::Own);
    taken(&shim, "own", "root").await;
    taken(&shim, "confined", "windlass").await;
    // The policy takes precedence over the flag.
    let shim = Shim::start(Setup::confined().arg("--processes").arg("own").policy("processes: refused\n"));
    assert_eq!(process_info(&shim).await.mode, ProcessMode::Refused);
    refused(&shim, "own", &["does not accept plain processes", "set an image"]).await;
    refused(&shim, "confined", &["does not accept plain processes", "set an image"]).await;
}

#[tokio::test]
async fn a_job_can_run_as_another_user_only_if_the_policy_lists_that_user() {
    let as_user = |user: Value| {
        let mut job = job("id -u; id -G; echo x > file; grep -E '^(CapBnd|Seccomp):' /proc/self/status");
        job["job_spec"]["user"] = user;
        job
    };
    let shim = Shim::start(Setup::confined().policy("users: [nobody]\n"));
    let id = start(&shim, |_| {}).await;
    let message = run(&shim, id, &as_user(json!({"username": "nobody"}))).await;
    assert_eq!(message, format!("{NOBODY}\n{NOBODY}\nCapBnd:\t0000000000000000\nSeccomp:\t2\n"));
    for (user, why) in [
        (json!({"username": "daemon"}), "add `daemon` to `users`"),
        (json!({"uid": 12345}), "add `12345` to `users`"),
        (json!({"username": "root"}), "never run as root"),
        (json!({"username": "nobody", "gid": 0}), "is not a member"),
    ] {
        let id = start(&shim, |_| {}).await;
        shim.play(id, &as_user(user)).await;
        let record = eventually_ok_async("the job is refused", async || {
            let record: JobRecord = shim.client().get(&format!("/api/tasks/{id}/job")).await.json();
            let is_over = record.states.last().is_some_and(|last| last.state == "failed");
            if is_over { Ok(record) } else { Err(format!("{record:?}")) }
        })
        .await;
        let last = record.states.last().unwrap();
        assert!(format!("{last:?}").contains(why), "{why} is not in {last:?}");
    }
}

#[tokio::test]
async fn a_confined_job_has_its_own_home_terminal_and_temporary_files() {
    let shim = Shim::start(Setup::confined());
    let id = start(&shim, |_| {}).await;
    let mut job = job("pwd; echo $HOME; echo $USER; mktemp; tty");
    job["job_spec"]["tty"] = json!(true);
    let text = run(&shim, id, &job).await.replace('\r', "");
    let place = format!("/run/windlass-task/{id}");
    assert!(text.starts_with(&format!("{place}/scratch\n{place}/home\nwindlass\n/tmp/tmp.")), "{text}");
    assert!(text.contains("/dev/pts/0"), "{text}");
    let own = shim.home().join("tasks").join(id.to_string()).join("private/tmp");
    assert_eq!(fs::read_dir(own).unwrap().count(), 1, "what it leaves in /tmp is the task's");
    assert!(
        Path::new("/run/windlass-task").read_dir().unwrap().next().is_none(),
        "the host sees an empty place"
    );
}

#[tokio::test]
async fn uploaded_code_of_a_confined_job_belongs_to_its_user() {
    let shim = Shim::start(Setup::confined());
    let made = temp_dir("code").unwrap();
    fs::write(made.path().join("hello.txt"), "brought\n").unwrap();
    let archive = std::process::Command::new("tar")
        .args(["-C", made.path().to_str().unwrap(), "-cf", "-", "hello.txt"])
        .output()
        .unwrap();
    let id = start(&shim, |_| {}).await;
    let calls = shim.client().epoch(1);
    let path = |call: &str| format!("/api/tasks/{id}/runner/api/{call}");
    let mut job = job("cat hello.txt; stat -c %u hello.txt; echo x >> hello.txt");
    job["job_spec"]["repo_data"] = json!({"repo_type": "local"});
    calls.post(&path("submit"), &job).await.expect(200);
    let code = calls.call(axum::http::Method::POST, &path("upload_code"), archive.stdout.into()).await;
    code.expect(200);
    calls.post(&path("run"), &json!({})).await.expect(200);
    let (record, text) = wait_ended(&shim, id).await;
    let user = process_record(&shim, id)["user"].as_u64().unwrap();
    assert_eq!(text, format!("brought\n{user}\n"), "{record:?}");
}
