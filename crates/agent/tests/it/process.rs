//! Tasks as plain processes: real ones, in real control groups.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command},
    time::{Duration, Instant},
};

use windlass_agent::{
    cgroup::Hierarchies,
    host::gpu::{Gpu, Vendor},
    proc::{self, ProcessId},
    shim::{
        process::{ProcessRules, ProcessRuntime},
        runtime::{
            BindMount, Exit, FoundState, Handle, LossReason, PolicyLimits, PreparedTask, Runtime,
            RuntimeError,
        },
    },
    task_dir::TaskDir,
};
use windlass_api::agent::shim::ProcessMode;
use windlass_model::id::SubmissionId;
use windlass_testkit::wait::{TIMEOUT, eventually_async, eventually_ok_async};

use crate::support::{TempDir, agent, temp_dir};

/// Short enough for a test, long enough to differ from zero.
const GRACE: Duration = Duration::from_millis(400);

/// One home with one task in it. Everything is removed at the end, and nothing may be left then.
struct ProcessHost {
    home: TempDir,
    task: PreparedTask,
    hierarchies: Hierarchies,
    runtime: ProcessRuntime,
}

impl ProcessHost {
    /// `script` is run instead of the runner.
    fn new(script: &str) -> Self {
        Self::with(script, Hierarchies::mounted().unwrap())
    }

    fn with(script: &str, hierarchies: Hierarchies) -> Self {
        let home = temp_dir("process").unwrap();
        let id = SubmissionId(uuid::Uuid::new_v4());
        let dir = TaskDir::new(home.path(), id);
        fs::create_dir_all(dir.run()).unwrap();
        let spec = serde_json::json!({
            "id": id, "name": "t", "image_name": "none", "process_isolation": "own",
        });
        let task = PreparedTask {
            spec: serde_json::from_value(spec).unwrap(),
            dir,
            gpus: Vec::new(),
            binds: Vec::new(),
            publish: Vec::new(),
            limits: PolicyLimits { pids: 200, new_privileges: false, capabilities: Vec::new() },
            env: vec![("WINDLASS_DEBUG_INNER".to_owned(), script.to_owned())],
        };
        let runtime = process_runtime(home.path(), hierarchies.clone());
        Self { home, task, hierarchies, runtime }
    }

    /// Simulates a restart: nothing in memory is left of the old runtime.
    fn restart(&mut self) {
        self.runtime = process_runtime(self.home.path(), self.hierarchies.clone());
    }

    async fn start(&self) -> Handle {
        let handle = self.runtime.create(&self.task).await.unwrap();
        self.runtime.start(&self.task, &handle).await.unwrap();
        handle
    }

    async fn wait(&self) -> Exit {
        let handle = Handle { name: String::new(), id: String::new() };
        tokio::time::timeout(TIMEOUT, self.runtime.wait(&self.task, &handle)).await.unwrap().unwrap()
    }

    fn scratch(&self, name: &str) -> PathBuf {
        self.task.dir.scratch().join(name)
    }

    /// Waits until the job has written a complete line.
    async fn line(&self, name: &str) -> String {
        let path = self.scratch(name);
        eventually_ok_async(&format!("{name} is written"), async || match fs::read_to_string(&path) {
            Ok(text) if text.ends_with('\n') => Ok(text.trim().to_owned()),
            Ok(_) | Err(_) => Err(format!("{:?}", self.output())),
        })
        .await
    }

    async fn pid(&self, name: &str) -> ProcessId {
        let pid = self.line(name).await.parse().unwrap();
        proc::stat(pid).unwrap().unwrap().name
    }

    fn output(&self) -> String {
        fs::read_to_string(self.task.dir.root().join("output.log")).unwrap_or_default()
    }

    fn group(&self, controller: &str) -> PathBuf {
        let found = find_dir(Path::new("/sys/fs/cgroup").join(controller), &self.task.spec.id.to_string());
        found.unwrap_or_else(|| panic!("no {controller} group of the task"))
    }

    async fn state(&self) -> Option<FoundState> {
        let found = self.runtime.found().await.unwrap();
        found.iter().find(|found| found.task == self.task.spec.id).map(|found| found.state)
    }
}

/// Runtime of tasks that may have the rights of the test.
fn process_runtime(home: &Path, hierarchies: Hierarchies) -> ProcessRuntime {
    let rules = ProcessRules { mode: ProcessMode::Own, ..ProcessRules::default() };
    ProcessRuntime::with(home.to_owned(), agent().to_owned(), hierarchies).with_rules(rules)
}

fn find_dir(below: PathBuf, name: &str) -> Option<PathBuf> {
    let entries: Vec<_> = fs::read_dir(&below).ok()?.flatten().collect();
    let directories = entries.iter().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    directories.map(fs::DirEntry::path).find_map(|path| {
        if path.file_name().is_some_and(|last| last == name) { Some(path) } else { find_dir(path, name) }
    })
}

impl Drop for ProcessHost {
    fn drop(&mut self) {
        let (runtime, dir) = (self.runtime.clone(), self.task.dir.clone());
        let removed = std::thread::spawn(move || {
            let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            tokio.block_on(async { runtime.remove(&dir, None).await.map_err(|error| error.to_string()) })
        });
        let removed = removed.join().unwrap();
        if !std::thread::panicking() {
            removed.unwrap();
            let left = find_dir("/sys/fs/cgroup".into(), &self.task.spec.id.to_string());
            assert_eq!(left, None, "nothing is left of the task's control groups");
            let left: Vec<_> = fs::read_dir(self.task.dir.root()).unwrap().flatten().collect();
            assert_eq!(left.len(), 1, "only the run directory is left: {left:?}");
        }
    }
}

/// A child that does not outlive its test.
struct KillOnDrop(Child);

impl KillOnDrop {
    fn spawn(command: &mut Command) -> Self {
        Self(command.spawn().unwrap())
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.0.id()).unwrap()
    }

    fn code(&mut self) -> Option<i32> {
        self.0.wait().unwrap().code()
    }
}

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn is_alive(name: ProcessId) -> bool {
    proc::stat(name.pid)
        .unwrap()
        .is_some_and(|stat| stat.name == name && stat.state == proc::ProcessState::Alive)
}

/// Returns a script that forks twice with a separate session in between, so that nothing connects it to its parent, and
/// without the marks of its task.
fn daemonize_script() -> String {
    let inner = "echo $$ > away.new; mv away.new away; exec sleep 1000";
    format!("env -i setsid sh -c 'sh -c \"{}\" &'", inner.replace('$', "\\$"))
}

#[tokio::test]
async fn f33_a_detached_descendant_ends_when_its_task_is_stopped() {
    for hierarchies in [Hierarchies::mounted().unwrap(), Hierarchies::default()] {
        let host = ProcessHost::with(&format!("{}; sleep 1000", daemonize_script()), hierarchies);
        let handle = host.start().await;
        let away = host.pid("away").await;
        assert!(is_alive(away));
        host.runtime.stop(&host.task.dir, &handle, Duration::ZERO).await.unwrap();
        assert!(!is_alive(away));
        assert_eq!(host.state().await, Some(FoundState::Ended));
    }
}

#[tokio::test]
async fn f33_a_detached_descendant_ends_when_the_runner_is_killed() {
    for hierarchies in [Hierarchies::mounted().unwrap(), Hierarchies::default()] {
        let script = format!("{}; echo $$ > runner; sleep 1000", daemonize_script());
        let host = ProcessHost::with(&script, hierarchies);
        host.start().await;
        let (away, runner) = (host.pid("away").await, host.pid("runner").await);
        kill(runner);
        let exit = host.wait().await;
        assert_eq!((exit.code, exit.lost, exit.oom_killed), (Some(137), None, false));
        assert!(!is_alive(away));
    }
}

#[tokio::test]
async fn f33_a_killed_init_ends_all_processes_and_the_task_is_reported_lost() {
    let host = ProcessHost::new(&format!("{}; echo $PPID > init; sleep 1000", daemonize_script()));
    host.start().await;
    let (away, init) = (host.pid("away").await, host.pid("init").await);
    kill(init);
    let exit = host.wait().await;
    assert_eq!((exit.code, exit.lost), (None, Some(LossReason::Vanished)));
    assert!(!is_alive(away));
}

fn kill(name: ProcessId) {
    let held = proc::ProcessHandle::open(name).unwrap().unwrap();
    assert!(held.signal(rustix::process::Signal::KILL).unwrap());
}

#[tokio::test]
async fn a_job_that_ignores_sigterm_is_killed_after_its_grace_period() {
    let host = ProcessHost::new("trap '' TERM INT; echo up > up; while :; do sleep 1000; done");
    let handle = host.start().await;
    host.line("up").await;
    let start = Instant::now();
    host.runtime.stop(&host.task.dir, &handle, GRACE).await.unwrap();
    assert!(start.elapsed() >= GRACE);
    assert_eq!(host.wait().await.code, Some(137));
}

#[tokio::test]
async fn a_job_that_handles_sigterm_ends_with_its_own_status() {
    let host = ProcessHost::new("trap 'exit 7' TERM; echo up > up; while :; do sleep 0.01; done");
    let handle = host.start().await;
    host.line("up").await;
    host.runtime.stop(&host.task.dir, &handle, TIMEOUT).await.unwrap();
    let exit = host.wait().await;
    assert_eq!((exit.code, exit.lost), (Some(7), None));
    host.runtime.stop(&host.task.dir, &handle, TIMEOUT).await.unwrap();
}

#[tokio::test]
async fn an_unwritable_exit_record_does_not_change_the_exit_status() {
    let host = ProcessHost::new("rm -rf ../run; exit 7");
    host.start().await;
    let exit = host.wait().await;
    assert_eq!((exit.code, exit.lost), (Some(7), None), "{:?}", exit.tail);
    // The guard needs it.
    fs::create_dir_all(host.task.dir.run()).unwrap();
}

#[tokio::test]
async fn f14_a_task_is_recovered_with_its_exit_status_after_a_restart() {
    let mut host =
        ProcessHost::new("echo $$ > up; while [ ! -e go ]; do sleep 0.01; done; echo said >&2; exit 42");
    host.runtime.create(&host.task).await.unwrap();
    assert_eq!(host.state().await, Some(FoundState::Created));
    let handle = host.start().await;
    let runner = host.pid("up").await;
    host.restart();
    assert_eq!(host.state().await, Some(FoundState::Running));
    host.runtime.start(&host.task, &handle).await.unwrap();
    assert!(is_alive(runner), "a repeated start starts nothing");
    fs::write(host.scratch("go"), "").unwrap();
    let exit = host.wait().await;
    assert_eq!((exit.code, exit.lost, exit.tail), (Some(42), None, vec!["said".to_owned()]));
    host.restart();
    assert_eq!(host.wait().await.code, Some(42));
    assert_eq!(host.state().await, Some(FoundState::Ended));
}

#[tokio::test]
async fn f14_a_shim_killed_before_it_releases_the_init_leaves_nothing_running() {
    let host = ProcessHost::new("echo ran >> ran; exit 3");
    let handle = host.runtime.create(&host.task).await.unwrap();
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let mut init = KillOnDrop::spawn(
        Command::new(agent())
            .args(["runner", "--dir"])
            .arg(host.task.dir.run())
            .current_dir(host.task.dir.scratch())
            .envs([("WINDLASS_INIT_GATE", "1"), ("WINDLASS_DEBUG_INNER", "echo ran >> ran")])
            .stdin(std::os::fd::OwnedFd::from(theirs)),
    );
    let name = proc::stat(init.pid()).unwrap().unwrap().name;
    let record = serde_json::json!({
        "boot": proc::boot_id().unwrap(), "process": name, "targets": [], "made": [],
    });
    fs::write(host.task.dir.root().join("process.json"), record.to_string()).unwrap();
    drop(ours);
    assert_eq!(init.code(), Some(127));
    assert_eq!(host.state().await, Some(FoundState::Created), "it never got as far as running anything");
    host.runtime.start(&host.task, &handle).await.unwrap();
    assert_eq!(host.wait().await.code, Some(3));
    assert_eq!(fs::read_to_string(host.scratch("ran")).unwrap(), "ran\n");
}

#[tokio::test]
async fn c5_another_process_with_the_recorded_pid_is_never_signalled() {
    let host = ProcessHost::new("exit 0");
    let handle = host.start().await;
    host.wait().await;
    let other = KillOnDrop::spawn(Command::new("/bin/sleep").arg("1000"));
    let name = proc::stat(other.pid()).unwrap().unwrap().name;
    let boot = proc::boot_id().unwrap();
    let reused = ProcessId { start: name.start - 1, ..name };
    for (boot, process) in [(boot.as_str(), reused), ("another boot", name)] {
        let record = serde_json::json!({ "boot": boot, "process": process, "targets": [], "made": [] });
        fs::write(host.task.dir.root().join("process.json"), record.to_string()).unwrap();
        host.runtime.stop(&host.task.dir, &handle, Duration::ZERO).await.unwrap();
        host.runtime.remove(&host.task.dir, None).await.unwrap();
    }
    assert!(is_alive(name));
}

#[tokio::test]
async fn c5_tasks_of_another_home_are_neither_found_nor_touched() {
    let host = ProcessHost::new("sleep 1000");
    host.start().await;
    let other = ProcessHost::new("exit 0");
    assert_eq!(other.runtime.found().await.unwrap(), []);
    let theirs = TaskDir::new(other.home.path(), host.task.spec.id);
    fs::create_dir_all(theirs.run()).unwrap();
    other.runtime.remove(&theirs, None).await.unwrap();
    assert_eq!(host.state().await, Some(FoundState::Running));
}

#[tokio::test]
async fn f15_a_task_of_a_previous_boot_is_reported_lost_to_the_reboot() {
    let host = ProcessHost::new("sleep 1000");
    host.runtime.create(&host.task).await.unwrap();
    let process = ProcessId { pid: i32::try_from(std::process::id()).unwrap(), start: 1 };
    let record = serde_json::json!({ "boot": "before", "process": process, "targets": [], "made": [] });
    fs::write(host.task.dir.root().join("process.json"), record.to_string()).unwrap();
    let exit = host.wait().await;
    assert_eq!((exit.code, exit.lost), (None, Some(LossReason::HostRebooted)));
}

#[tokio::test]
async fn limits_are_set_before_the_first_command_runs() {
    let mut host = ProcessHost::new("cat /proc/self/cgroup > groups.new; mv groups.new groups; sleep 1000");
    host.task.spec.cpu = 0.5;
    host.task.spec.memory = 64 << 20;
    host.task.spec.pids = 33;
    host.start().await;
    let groups = host.line("groups").await;
    let id = host.task.spec.id.to_string();
    for controller in ["cpu", "memory", "pids", "freezer"] {
        let own = groups.lines().find(|line| line.split(':').nth(1) == Some(controller)).unwrap();
        assert!(own.contains(&id), "{own}");
    }
    let read = |controller: &str, file: &str| {
        fs::read_to_string(host.group(controller).join(file)).unwrap().trim().to_owned()
    };
    assert_eq!(read("cpu", "cpu.cfs_quota_us"), "50000");
    assert_eq!(read("memory", "memory.limit_in_bytes"), (64 << 20).to_string());
    assert_eq!(read("pids", "pids.max"), "33");
    assert_eq!(host.output(), "", "nothing had to be warned of");
}

#[tokio::test]
async fn a_limit_that_cannot_be_enforced_is_reported_to_the_runner() {
    let mut host =
        ProcessHost::with("printenv WINDLASS_NOTICES > said.new; mv said.new said", Hierarchies::default());
    host.task.spec.memory = 64 << 20;
    host.start().await;
    let message = host.line("said").await;
    assert!(message.contains("the memory limit is not enforced"), "{message}");
}

#[tokio::test]
async fn f16_an_oom_killed_job_is_reported_as_such() {
    let mut host = ProcessHost::new("tail /dev/zero; exit $?");
    host.task.spec.memory = 64 << 20;
    host.start().await;
    let exit = host.wait().await;
    assert_eq!((exit.code, exit.oom_killed, exit.lost), (Some(137), true, None), "{}", host.output());
}

#[tokio::test]
async fn a_fork_bomb_stays_within_its_limit_and_ends_with_its_task() {
    // A shell that cannot fork ends, so it reports that it is up before it begins, and does not fork afterwards.
    let mut host = ProcessHost::new("echo up > up; f() { f | f & }; f; exec sleep 1000");
    host.task.spec.pids = 40;
    let handle = host.start().await;
    host.line("up").await;
    let group = host.group("pids");
    eventually_async("the bomb goes off", async || {
        let current: u64 = fs::read_to_string(group.join("pids.current")).unwrap().trim().parse().unwrap();
        assert!(current <= 40);
        let refused = fs::read_to_string(group.join("pids.events")).unwrap();
        (refused.trim() != "max 0").then_some(())
    })
    .await;
    host.runtime.stop(&host.task.dir, &handle, Duration::ZERO).await.unwrap();
    assert_eq!(fs::read_to_string(group.join("cgroup.procs")).unwrap(), "");
}

#[tokio::test]
async fn a_task_sees_exactly_its_own_gpu_and_a_clean_environment() {
    let mut host = ProcessHost::new("env > env.new; mv env.new env");
    host.task.gpus = vec![Gpu {
        vendor: Vendor::Nvidia,
        id: "GPU-77".to_owned(),
        index: 3,
        name: "G".to_owned(),
        memory_mib: 1,
        compute_capability: None,
        devices: Vec::new(),
    }];
    host.start().await;
    let text = host.line("env").await;
    let mut names: Vec<&str> = text.lines().filter_map(|line| line.split('=').next()).collect();
    names.sort_unstable();
    names.retain(|name| !["PWD", "OLDPWD", "SHLVL", "_"].contains(name));
    assert_eq!(
        names,
        ["CUDA_VISIBLE_DEVICES", "HOME", "LANG", "PATH", "WINDLASS_HOME_ID", "WINDLASS_TASK_ID"]
    );
    assert!(text.lines().any(|line| line == "CUDA_VISIBLE_DEVICES=GPU-77"));
}

#[tokio::test]
async fn a_task_without_gpus_sees_none() {
    let host = ProcessHost::new("env > env.new; mv env.new env");
    host.start().await;
    assert!(host.line("env").await.lines().any(|line| line == "CUDA_VISIBLE_DEVICES="));
}

#[tokio::test]
async fn a_task_starts_with_default_signals_regardless_of_those_of_the_shim() {
    let host =
        ProcessHost::new("grep -E 'Sig(Blk|Ign)' /proc/self/status > signals.new; mv signals.new signals");
    let orders = "{\"enter\":[],\"job_group\":null,\"binds\":[],\"notices\":[]}";
    fs::create_dir_all(host.task.dir.scratch()).unwrap();
    let script = "trap '' INT QUIT HUP TERM CHLD PIPE; exec \"$@\"";
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let mut init = KillOnDrop::spawn(
        Command::new("/bin/sh")
            .args(["-c", script, "sh"])
            .arg(agent())
            .args(["runner", "--dir"])
            .arg(host.task.dir.run())
            .current_dir(host.task.dir.scratch())
            .envs([("WINDLASS_INIT_GATE", "1"), ("WINDLASS_DEBUG_INNER", host.task.env[0].1.as_str())])
            .stdin(std::os::fd::OwnedFd::from(theirs)),
    );
    std::io::Write::write_all(&mut &ours, orders.as_bytes()).unwrap();
    ours.shutdown(std::net::Shutdown::Write).unwrap();
    let signals = host.line("signals").await;
    assert_eq!(init.code(), Some(0));
    for line in signals.lines() {
        let set = u64::from_str_radix(line.split_whitespace().last().unwrap(), 16).unwrap();
        // Signals from 32 on are those of the C library and real-time ones, which `nohup` does not change.
        assert_eq!(set & 0x7fff_ffff, 0, "{line}");
    }
}

#[tokio::test]
async fn mounts_are_private_to_the_task_and_removed_with_it() {
    let mut host = ProcessHost::new(
        "ls at > seen.new; echo no > at/write; ls at >> seen.new
        grep -c 'deep/at [^ ]* ro,nosuid,nodev' /proc/self/mounts >> seen.new; mv seen.new seen; sleep 1000",
    );
    let source = host.home.path().join("source");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("inside"), "").unwrap();
    let target = host.scratch("deep/at");
    fs::create_dir_all(host.task.dir.scratch()).unwrap();
    std::os::unix::fs::symlink("deep/at", host.scratch("at")).unwrap();
    host.task.binds = vec![BindMount {
        source: source.clone(),
        target: target.to_str().unwrap().to_owned(),
        read_only: true,
    }];
    host.start().await;
    assert_eq!(host.line("seen").await, "inside\ninside\n1", "{}", host.output());
    assert_eq!(fs::read_dir(&target).unwrap().count(), 0, "the host sees an empty directory");
    host.runtime.remove(&host.task.dir, None).await.unwrap();
    assert!(!target.exists());
    assert!(source.join("inside").exists());
}

#[tokio::test]
async fn a_mount_that_fails_is_reported_when_the_task_starts() {
    let mut host = ProcessHost::new("sleep 1000");
    let bind = |source: &str, target: &str| BindMount {
        source: source.into(),
        target: target.to_owned(),
        read_only: false,
    };
    host.task.binds = vec![bind("/", "/tmp/../etc")];
    let refused = host.runtime.create(&host.task).await.unwrap_err();
    assert!(matches!(refused, RuntimeError::Refused { .. }), "{refused}");
    host.task.binds = vec![bind("/proc/self/mounts", "/usr")];
    let handle = host.runtime.create(&host.task).await.unwrap();
    let refused = host.runtime.start(&host.task, &handle).await.unwrap_err();
    assert!(refused.to_string().contains("mount /proc/self/mounts at /usr"), "{refused}");
}

#[tokio::test]
async fn the_exit_record_is_not_written_through_symlinks_of_the_job() {
    let host = ProcessHost::new(
        "cd ../run; ln -s ../../../victim exit.json; ln -s ../../../victim .exit.json.$PPID; exit 5",
    );
    fs::write(host.home.path().join("victim"), "whole").unwrap();
    host.start().await;
    assert_eq!(host.wait().await.code, Some(5));
    assert_eq!(fs::read_to_string(host.home.path().join("victim")).unwrap(), "whole");
}

#[tokio::test]
async fn the_ssh_port_is_reported_once_the_runner_writes_it() {
    let script = "sleep 0.1; echo 4022 > ../run/ssh.port; sleep 1000";
    let host = ProcessHost::new(script);
    let config = serde_json::json!({
        "task": host.task.spec.id, "token_sha256": "", "compat_http": null, "ssh_listen": "127.0.0.1:0",
        "ssh_authorized_keys": [], "gpus": [], "wait_secs": 1,
    });
    fs::write(host.task.dir.run().join("runner.json"), config.to_string()).unwrap();
    let handle = host.runtime.create(&host.task).await.unwrap();
    let ports = host.runtime.start(&host.task, &handle).await.unwrap();
    assert_eq!(ports.iter().map(|port| (port.host, port.container)).collect::<Vec<_>>(), [(4022, 10022)]);
}

#[tokio::test]
async fn the_real_runner_starts_and_stops_on_request() {
    let mut host = ProcessHost::new("");
    host.task.env.clear();
    let config = serde_json::json!({
        "task": host.task.spec.id, "token_sha256": "", "compat_http": null, "ssh_listen": "127.0.0.1:0",
        "ssh_authorized_keys": [], "gpus": [], "wait_secs": 300,
    });
    fs::write(host.task.dir.run().join("runner.json"), config.to_string()).unwrap();
    let handle = host.runtime.create(&host.task).await.unwrap();
    let ports = host.runtime.start(&host.task, &handle).await.unwrap();
    assert_eq!(ports.len(), 1, "{}", host.output());
    assert!(std::net::TcpStream::connect(("127.0.0.1", ports[0].host)).is_ok());
    assert!(host.task.dir.run().join("runner.sock").exists());
    host.runtime.stop(&host.task.dir, &handle, TIMEOUT).await.unwrap();
    let exit = host.wait().await;
    assert!(exit.code.is_some_and(|code| code < 128), "{exit:?}");
    assert!(!host.task.dir.run().join("never.started").exists());
}

/// The init is the first process of its namespace, as in a container: the kernel does not deliver most signals to it.
#[tokio::test]
async fn the_init_of_a_pid_namespace_handles_sigterm_and_reaps_orphans() {
    let host = ProcessHost::new("");
    fs::create_dir_all(host.task.dir.scratch()).unwrap();
    let script = "trap 'exit 9' TERM; (true & true &); echo up > up; while :; do sleep 0.01; done";
    let mut unshare = KillOnDrop::spawn(
        Command::new("unshare")
            .args(["--pid", "--fork", "--mount-proc", "--kill-child"])
            .arg(agent())
            .args(["runner", "--dir"])
            .arg(host.task.dir.run())
            .current_dir(host.task.dir.scratch())
            .env("WINDLASS_DEBUG_INNER", script),
    );
    let own = unshare.pid();
    host.line("up").await;
    let init = proc::descendants(own).unwrap().into_iter().find(|stat| stat.parent == own).unwrap().name;
    let orphans = || {
        let all = proc::list().unwrap();
        all.iter().filter(|one| one.parent == init.pid && one.state == proc::ProcessState::Zombie).count()
    };
    eventually_async("orphans are reaped", async || (orphans() == 0).then_some(())).await;
    let held = proc::ProcessHandle::open(init).unwrap().unwrap();
    assert!(held.signal(rustix::process::Signal::TERM).unwrap());
    assert_eq!(unshare.code(), Some(9));
    let word = fs::read_to_string(host.task.dir.run().join("exit.json")).unwrap();
    assert_eq!(word, "{\"exit_status\":9,\"oom_killed\":false}");
}

#[tokio::test]
async fn the_init_process_uses_little_memory() {
    let host = ProcessHost::new("echo $PPID > init; sleep 1000");
    host.start().await;
    let init = host.pid("init").await;
    let status = fs::read_to_string(format!("/proc/{}/status", init.pid)).unwrap();
    let number = |name: &str| -> u64 {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    // Pages that it has written, in KiB: most are the program's tables, adjusted at the start. The pages that it only
    // reads are shared by all tasks and the shim.
    assert!(number("RssAnon:") < 2560, "{status}");
    assert!(number("VmData:") < 1024, "{status}");
    assert_eq!(number("Threads:"), 1);
}
