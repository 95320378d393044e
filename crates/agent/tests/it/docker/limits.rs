//! Limits and reachability of a task, as seen from inside.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use windlass_agent::shim::runtime::{BindMount, Runtime};
use windlass_api::agent::shim::NetworkMode;
use windlass_testkit::wait::eventually_async;

use super::{DockerHost, read, wait_written};
use crate::support::{engine, gpus, images::Image, temp_dir};

const MIB: i64 = 1 << 20;

#[tokio::test]
async fn docker_limits_apply_inside_the_container() {
    let host = DockerHost::new().await;
    let mut task = host
        .task(
            "cd /windlass/run
            v1=/sys/fs/cgroup; {
            cat $v1/memory/memory.limit_in_bytes 2>/dev/null || cat $v1/memory.max
            echo $(( $(cat $v1/cpu/cpu.cfs_quota_us 2>/dev/null || cut -d' ' -f1 $v1/cpu.max) * 100 / 100000 ))
            cat $v1/pids/pids.max 2>/dev/null || cat $v1/pids.max
            df -m /dev/shm | tail -1 | awk '{print $2}'
            } > out
            cp /bin/busybox /dev/shm/busybox && /dev/shm/busybox true && echo exec >> out",
        )
        .await;
    task.spec.cpu = 0.5;
    task.spec.memory = 64 * MIB;
    task.spec.shm_size = 16 * MIB;
    task.limits.pids = 77;
    let message = host.message(&task).await;
    assert_eq!(message.lines().collect::<Vec<_>>(), ["67108864", "50", "77", "16", "exec"]);
}

#[tokio::test]
async fn docker_pids_limit_stops_a_fork_bomb() {
    let host = DockerHost::new().await;
    let mut task =
        host.task("for i in $(seq 100); do sleep 5 & done; jobs | wc -l > /windlass/run/out").await;
    task.limits.pids = 20;
    let exit = host.run(&task).await;
    assert_ne!(exit.code, Some(0));
    assert!(exit.tail.iter().any(|line| line.contains("fork")), "{exit:?}");
}

#[tokio::test]
async fn docker_reports_an_oom_kill() {
    let host = DockerHost::new().await;
    // Jobs begin when the shim submits them. By then it watches the container, even if the engine reports nothing.
    let mut task = host
        .task(
            "touch /windlass/run/up; while ! [ -e /windlass/run/go ]; do sleep 0.05; done
            exec awk 'BEGIN { for (;;) text = text \"0123456789012345678901234567890123456789\" text }'",
        )
        .await;
    task.spec.memory = 16 * MIB;
    let handle = host.start(&task).await;
    wait_written(&task, "up").await;
    let seen = host.engine.inspect_container(&handle.id, None).await.unwrap();
    let first = seen.state.and_then(|state| state.pid).unwrap();
    let (exit, ()) = tokio::join!(host.wait(&task, &handle), async {
        eventually_async("the container is watched", async || is_watched(first).then_some(())).await;
        fs::write(task.dir.run().join("go"), "").unwrap();
    });
    assert_eq!((exit.code, exit.oom_killed, exit.lost), (Some(137), true, None));
}

/// Returns whether this process has a handle of the process `pid`.
fn is_watched(pid: i64) -> bool {
    let line = format!("Pid:\t{pid}");
    let mut handles = fs::read_dir("/proc/self/fdinfo").unwrap().flatten();
    handles
        .any(|one| fs::read_to_string(one.path()).unwrap_or_default().lines().any(|message| message == line))
}

#[tokio::test]
async fn docker_tasks_have_only_the_listed_capabilities() {
    let host = DockerHost::new().await;
    let message = host
        .message(&host.task("cd /windlass/run; grep -E 'CapEff|NoNewPrivs|Seccomp:' /proc/self/status | cut -f2 > out").await)
        .await;
    // CHOWN 0, DAC_OVERRIDE 1, KILL 5, SETGID 6, SETUID 7.
    let expected = ["00000000000000e3", "1", "2"];
    assert_eq!(
        message.lines().collect::<Vec<_>>(),
        expected,
        "capabilities, no new privileges, a system call filter"
    );
}

#[tokio::test]
async fn docker_tasks_have_the_groups_that_own_the_devices_of_amd_gpus() {
    let host = DockerHost::new().await;
    let (gpu, script) = gpus::amd_gpu_with_script(host.scratch.path());
    let mut task = host.task(&script).await;
    task.gpus = vec![gpu];
    gpus::assert_has_group(&host.message(&task).await);
}

#[tokio::test]
async fn docker_tasks_cannot_modify_the_agent_binary_or_see_the_engine_socket() {
    let host = DockerHost::new().await;
    let script = "cd /windlass/run
        (echo evil > /windlass/agent) 2>/dev/null && echo wrote
        rm -f /windlass/agent 2>/dev/null && echo removed
        mount -o remount,rw /windlass/agent 2>/dev/null && echo remounted
        chmod 777 /windlass/agent 2>/dev/null && echo changed
        (echo evil > /windlass/git/programs/git) 2>/dev/null && echo wrote
        rm -f /windlass/git/commands/git 2>/dev/null && echo removed
        mount -o remount,rw /windlass/git 2>/dev/null && echo remounted
        find / -xdev -name '*.sock' -type s 2>/dev/null
        grep -c docker.sock /proc/mounts
        ls /windlass
        echo end > out; ls /windlass/run >> out";
    let task = host.task(&format!("({script}) > /windlass/run/seen 2>&1; exit 0")).await;
    host.run(&task).await;
    assert_eq!(read(&task, "seen").lines().collect::<Vec<_>>(), ["0", "agent", "git", "run"]);
    let copies: Vec<_> = fs::read_dir(host.scratch.path().join("bin")).unwrap().collect();
    assert_eq!(copies.len(), 1);
    let copy = fs::read(copies[0].as_ref().unwrap().path()).unwrap();
    assert!(copy == fs::read(crate::support::agent()).unwrap());
}

#[tokio::test]
async fn docker_refuses_to_start_a_task_with_a_modified_agent_binary() {
    let host = DockerHost::new().await;
    let task = host.task("").await;
    let handle = host.docker.create(&task).await.unwrap();
    let copy = fs::read_dir(host.scratch.path().join("bin")).unwrap().next().unwrap().unwrap().path();
    fs::remove_file(&copy).unwrap();
    fs::write(&copy, "evil").unwrap();
    assert!(host.docker.start(&task, &handle).await.is_err());
}

#[tokio::test]
async fn docker_binds_are_read_only_on_request_and_missing_sources_are_not_created() {
    let host = DockerHost::new().await;
    let data = temp_dir("data").unwrap();
    for name in ["open", "closed"] {
        fs::create_dir(data.path().join(name)).unwrap();
        fs::write(data.path().join(name).join("given"), name).unwrap();
    }
    let mut task = host
        .task(
            "cat /open/given /closed/given > /windlass/run/out
            touch /open/new
            touch /closed/new 2>/dev/null && echo wrote >> /windlass/run/out; exit 0",
        )
        .await;
    task.binds = ["open", "closed"]
        .map(|name| BindMount {
            source: data.path().join(name),
            target: format!("/{name}"),
            read_only: name == "closed",
        })
        .to_vec();
    assert_eq!(host.message(&task).await, "openclosed");
    assert!(data.path().join("open/new").exists());
    assert!(!data.path().join("closed/new").exists());
    task.binds[0].source = data.path().join("absent");
    task.spec.id = uuid::Uuid::from_bytes(super::random()).into();
    assert!(host.docker.create(&task).await.is_err(), "a missing source is not made");
    assert!(!data.path().join("absent").exists());
}

#[tokio::test]
async fn docker_mounts_directories_without_set_user_id_programs_and_devices() {
    check_mounts(&DockerHost::new().await, true).await;
}

/// Set-user-id programs and devices of a mounted directory have no effect, also in a mount below it if the engine binds it. Nothing is left
/// of the agent's own mounts once the container runs.
pub(super) async fn check_mounts(host: &DockerHost, binds_mounts_below: bool) {
    let data = temp_dir("data").unwrap();
    let below = data.path().join("below");
    fs::create_dir(&below).unwrap();
    let below = if binds_mounts_below { TestMount::tmpfs(&below) } else { TestMount(below) };
    let file = data.path().join("file");
    for (dir, name) in [(data.path(), "null"), (&below.0, "null")] {
        let device = rustix::fs::makedev(1, 3);
        let (kind, mode) = (rustix::fs::FileType::CharacterDevice, rustix::fs::Mode::from(0o666));
        rustix::fs::mknodat(rustix::fs::CWD, dir.join(name), kind, mode, device).unwrap();
    }
    fs::write(&file, "given").unwrap();
    let mut task = host
        .task(
            "grep -E ' (/data|/data/below|/file|/closed|/closed/below) ' /proc/mounts | grep -c 'nosuid,nodev' > /windlass/run/out
            for one in /data/null /data/below/null; do cat $one && echo opened; done >> /windlass/run/out 2>&1
            cat /file >> /windlass/run/out; touch /data/below/new
            touch /closed/below/no 2>/dev/null && echo wrote >> /windlass/run/out
            touch /windlass/run/up; until [ -e /windlass/run/go ]; do sleep 0.05; done",
        )
        .await;
    let bind = |source: &Path, target: &str| BindMount {
        source: source.to_owned(),
        target: target.to_owned(),
        read_only: target == "/closed",
    };
    task.binds = vec![bind(data.path(), "/data"), bind(&file, "/file"), bind(data.path(), "/closed")];
    let handle = host.start(&task).await;
    wait_written(&task, "up").await;
    let own = host.scratch.path().to_str().unwrap().to_owned();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.lines().any(|line| line.contains(&format!("{own}/binds"))), "{mounts}");
    assert_eq!(fs::read_dir(host.scratch.path().join("binds")).unwrap().count(), 0);
    fs::write(task.dir.run().join("go"), "").unwrap();
    host.wait(&task, &handle).await;
    let text = read(&task, "out");
    let mounts = if binds_mounts_below { "5\n" } else { "3\n" };
    assert!(text.starts_with(mounts), "each mount has the options: {text}");
    assert!(!text.contains("opened") && text.matches("ermission denied").count() == 2, "{text}");
    assert!(text.ends_with("given"), "{text}");
    assert!(below.0.join("new").exists() && !below.0.join("no").exists());
    host.docker.remove(&task.dir, Some(&handle)).await.unwrap();
    assert!(below.0.join("null").exists(), "mounts of the host remain");
}

/// Mount of the host, of which later mounts propagate.
struct TestMount(PathBuf);

impl TestMount {
    fn tmpfs(at: &Path) -> Self {
        rustix::mount::mount(c"tmpfs", at, c"tmpfs", rustix::mount::MountFlags::empty(), c"size=1m").unwrap();
        rustix::mount::mount_change(at, rustix::mount::MountPropagationFlags::SHARED).unwrap();
        Self(at.to_owned())
    }
}

impl Drop for TestMount {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[tokio::test]
async fn docker_inspect_shows_no_registry_credentials() {
    let host = DockerHost::new().await;
    let mut task = host.task("").await;
    task.spec.registry_password = "hunter2-registry".into();
    task.spec.registry_username = "hunter2-user".into();
    let handle = host.docker.create(&task).await.unwrap();
    let seen = host.engine.inspect_container(&handle.id, None).await.unwrap();
    let seen = serde_json::to_string(&seen).unwrap();
    assert!(!seen.contains("hunter2"));
    let labels =
        ["\"ai.dstack.shim.is-task\":\"true\"", &format!("\"ai.dstack.shim.task-id\":\"{}\"", task.spec.id)];
    assert!(labels.iter().all(|label| seen.contains(label)), "{seen}");
}

#[tokio::test]
async fn docker_tasks_on_one_host_have_separate_limits() {
    let host = DockerHost::new().await;
    let script = "cd /windlass/run; touch up; while ! [ -e go ]; do sleep 0.05; done
        cat /sys/fs/cgroup/pids/pids.max 2>/dev/null > out || cat /sys/fs/cgroup/pids.max > out";
    let (mut one, mut two) = (host.task(script).await, host.task(script).await);
    one.limits.pids = 31;
    two.limits.pids = 32;
    let (first, second) = (host.start(&one).await, host.start(&two).await);
    wait_written(&one, "up").await;
    wait_written(&two, "up").await;
    for task in [&one, &two] {
        assert_eq!(task.spec.network_mode, NetworkMode::Host);
        fs::write(task.dir.run().join("go"), "").unwrap();
    }
    host.wait(&one, &first).await;
    host.wait(&two, &second).await;
    assert_eq!((read(&one, "out").as_str(), read(&two, "out").as_str()), ("31", "32"));
}

#[tokio::test]
async fn docker_runs_a_dynamically_linked_image_as_root_regardless_of_its_user() {
    let host = DockerHost::at(&engine::shared_socket(), |settings| {
        settings.entrypoint = vec!["/usr/bin/bash".into(), "/windlass/run/script".into()];
    })
    .await;
    let image = Image::Bash.ensure(&host.engine).await;
    let task =
        host.task_with_image(&image, "id -u > /windlass/run/out; stat -c %U /home >> /windlass/run/out");
    assert_eq!(tokio::time::timeout(Duration::from_secs(60), host.message(&task)).await.unwrap(), "0\nroot");
}

#[tokio::test]
async fn docker_does_not_follow_symlinks_that_a_task_left_in_its_directory() {
    let host = DockerHost::new().await;
    let script = "cd /windlass/run; rm image.json; ln -s VICTIM image.json; ln -s VICTIM .image.json; touch up; sleep 600";
    let victim = host.scratch.path().join("victim");
    fs::write(&victim, "untouched").unwrap();
    let task = host.task(&script.replace("VICTIM", &victim.to_string_lossy())).await;
    let handle = host.start(&task).await;
    wait_written(&task, "up").await;
    assert_eq!(host.docker.create(&task).await.unwrap(), handle);
    assert_eq!(fs::read_to_string(&victim).unwrap(), "untouched");
    assert!(fs::symlink_metadata(task.dir.run().join("image.json")).unwrap().is_file());
}
