//! All steps from create to remove, in order and repeated.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use windlass_agent::{
    cgroup::Hierarchies,
    shim::oci::OciProgram,
    shim::runtime::{FoundState, LossReason, Runtime, RuntimeError},
    task_dir::{IMAGE_CONFIG, ImageConfig},
};

use super::{OciHost, open_runtime, read, wait_written};
use crate::support::images::Image;

#[tokio::test]
async fn oci_runs_a_task_to_its_end_and_removes_it() {
    let host = OciHost::new();
    let task = host
        .task(
            "echo first >&2; echo $WINDLASS_TASK_ID $FROM_IMAGE $(pwd) $(id -u) > /windlass/run/out; exit 7",
        )
        .await;
    let handle = host.oci.create(&task).await.unwrap();
    assert!(handle.name.starts_with("oci-test-"));
    let states = |found: Vec<windlass_agent::shim::runtime::FoundTask>| -> Vec<_> {
        found.into_iter().map(|one| (one.task, one.handle, one.state)).collect()
    };
    let found = states(host.oci.found().await.unwrap());
    assert_eq!(found, [(task.spec.id, handle.clone(), FoundState::Created)]);
    assert_eq!(host.oci.start(&task, &handle).await.unwrap(), []);
    let exit = host.wait(&task, &handle).await;
    assert_eq!((exit.code, exit.oom_killed, exit.lost), (Some(7), false, None));
    assert_eq!(exit.tail, ["first"]);
    assert_eq!(read(&task, "out"), format!("{} yes /opt/app 0", task.spec.id));
    assert_eq!(states(host.oci.found().await.unwrap())[0].2, FoundState::Ended);
    host.oci.remove(&task.dir, Some(&handle)).await.unwrap();
    assert_eq!(host.oci.found().await.unwrap(), []);
    let exit = host.wait(&task, &handle).await;
    assert_eq!((exit.code, exit.lost), (None, Some(LossReason::Vanished)));
}

#[tokio::test]
async fn oci_passes_the_image_configuration_to_the_runner() {
    let host = OciHost::new();
    let config = async |image: Image| -> ImageConfig {
        let task = host.task_with_image(image, "").await;
        host.oci.create(&task).await.unwrap();
        serde_json::from_slice(&fs::read(task.dir.run().join(IMAGE_CONFIG)).unwrap()).unwrap()
    };
    let busybox = config(Image::Busybox).await;
    assert_eq!((busybox.entrypoint, busybox.cmd), (vec![], vec!["/bin/date".to_owned(), "-u".to_owned()]));
    assert_eq!(busybox.workdir, "/opt/app");
    assert_eq!(config(Image::Bare).await.entrypoint, ["/busybox"]);
    assert_eq!(config(Image::Bash).await.user, "job");
}

#[tokio::test]
async fn oci_starts_the_agent_in_a_minimal_image() {
    let host = OciHost::with(|settings| {
        settings.entrypoint = vec!["/windlass/agent".into(), "--version".into()];
    });
    for image in [Image::Bare, Image::Bash] {
        let exit = host.run(&host.task_with_image(image, "").await).await;
        assert_eq!(exit.code, Some(0), "{image:?}");
        assert_eq!(exit.tail, [concat!("windlass-agent ", env!("CARGO_PKG_VERSION"))]);
    }
}

#[tokio::test]
async fn a2_repeated_oci_calls_have_one_effect() {
    let host = OciHost::new();
    let task = host.task("echo ran >> /windlass/run/out").await;
    let handle = host.oci.create(&task).await.unwrap();
    assert_eq!(host.oci.create(&task).await.unwrap(), handle, "found again");
    host.oci.start(&task, &handle).await.unwrap();
    host.oci.start(&task, &handle).await.unwrap();
    assert_eq!(host.wait(&task, &handle).await.code, Some(0));
    host.oci.start(&task, &handle).await.unwrap();
    assert_eq!(host.oci.create(&task).await.unwrap(), handle, "after its end too");
    assert_eq!(host.wait(&task, &handle).await, host.wait(&task, &handle).await);
    assert_eq!(read(&task, "out"), "ran", "a task that ended is not run again");
    for _ in 0..2 {
        host.oci.stop(&task.dir, &handle, Duration::ZERO).await.unwrap();
    }
    for _ in 0..2 {
        host.oci.remove(&task.dir, Some(&handle)).await.unwrap();
    }
    host.oci.remove(&task.dir, None).await.unwrap();
    host.oci.stop(&task.dir, &handle, Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn oci_wait_never_hangs_on_a_container_that_exits_at_once() {
    let host = OciHost::new();
    let one = async |code: i32| {
        let task = host.task(&format!("exit {code}")).await;
        let handle = host.oci.create(&task).await.unwrap();
        // A caller that already waits must get the exit, as must one that calls late.
        let (waited, started) = tokio::join!(
            async {
                wait_written(&task, "image.json").await;
                loop {
                    match host.oci.wait(&task, &handle).await {
                        Err(RuntimeError::Refused { .. }) => tokio::task::yield_now().await,
                        other => return other.unwrap(),
                    }
                }
            },
            host.oci.start(&task, &handle)
        );
        started.unwrap();
        assert_eq!(waited.code, Some(code));
        assert_eq!(host.wait(&task, &handle).await.code, Some(code));
    };
    for round in 0..5 {
        tokio::join!(one(round), one(round + 10), one(round + 20), one(round + 30));
    }
}

#[tokio::test]
async fn oci_stop_sends_sigterm_and_kills_after_the_grace_period() {
    let host = OciHost::new();
    let polite = host.task("trap 'echo bye > /windlass/run/out; exit 3' TERM; touch /windlass/run/up; while :; do sleep 0.05; done").await;
    let deaf = host.task("trap '' TERM; touch /windlass/run/up; while :; do sleep 0.05; done").await;
    for (task, code) in [(&polite, 3), (&deaf, 137)] {
        let handle = host.start(task).await;
        wait_written(task, "up").await;
        let begun = Instant::now();
        host.oci.stop(&task.dir, &handle, Duration::from_secs(1)).await.unwrap();
        assert!(begun.elapsed() < Duration::from_secs(10));
        assert_ne!(host.oci.found().await.unwrap()[0].state, FoundState::Running);
        let exit = host.wait(task, &handle).await;
        assert_eq!((exit.code, exit.lost), (Some(code), None));
        host.oci.remove(&task.dir, None).await.unwrap();
    }
    assert_eq!(read(&polite, "out"), "bye");
    assert_eq!(host.oci.found().await.unwrap(), []);
}

#[tokio::test]
async fn oci_removes_a_running_container_without_a_handle() {
    let host = OciHost::new();
    let task = host.task("touch /windlass/run/up; sleep 600").await;
    host.start(&task).await;
    wait_written(&task, "up").await;
    host.remove(&task).await;
    assert_eq!(host.oci.found().await.unwrap(), []);
}

#[tokio::test]
async fn oci_containers_outlive_the_shim_and_are_found_again() {
    let host = OciHost::new();
    let script = "touch /windlass/run/up; while ! [ -e /windlass/run/go ]; do sleep 0.05; done; exit 5";
    let task = host.task(script).await;
    let handle = host.start(&task).await;
    wait_written(&task, "up").await;
    let again = open_runtime(&host.scratch, |_| {});
    let found = again.found().await.unwrap();
    assert_eq!((&found[0].handle, found[0].state), (&handle, FoundState::Running));
    again.start(&task, &handle).await.unwrap();
    fs::write(task.dir.run().join("go"), "").unwrap();
    assert_eq!(again.wait(&task, &handle).await.unwrap().code, Some(5));
    assert_eq!(again.found().await.unwrap()[0].state, FoundState::Ended);
    host.remove(&task).await;
}

#[tokio::test]
async fn oci_containers_without_their_monitor_are_killed_and_reported_as_lost() {
    let host = OciHost::new();
    let task = host.task("touch /windlass/run/up; sleep 600").await;
    let handle = host.start(&task).await;
    wait_written(&task, "up").await;
    let record: serde_json::Value =
        serde_json::from_slice(&fs::read(task.dir.root().join("container/record.json")).unwrap()).unwrap();
    let pid = i32::try_from(record["monitor"]["pid"].as_i64().unwrap()).unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    let exit = host.wait(&task, &handle).await;
    assert_eq!((exit.code, exit.lost), (None, Some(LossReason::Vanished)));
    host.remove(&task).await;
}

#[tokio::test]
async fn oci_reports_a_missing_image_a_bad_entry_point_and_a_task_that_was_never_started() {
    let host = OciHost::new();
    let missing = host.task_named("windlass-test/none:1", "");
    assert!(matches!(host.oci.create(&missing).await, Err(RuntimeError::NoImage { .. })));
    let task = host.task("").await;
    let handle = host.oci.create(&task).await.unwrap();
    assert!(matches!(host.oci.wait(&task, &handle).await, Err(RuntimeError::Refused { .. })));
    let host = OciHost::with(|settings| settings.entrypoint = vec!["/no/such/program".into()]);
    let task = host.task("").await;
    let handle = host.oci.create(&task).await.unwrap();
    for _ in 0..2 {
        let refused = host.oci.start(&task, &handle).await.unwrap_err();
        assert!(refused.to_string().contains("/no/such/program"), "{refused}");
    }
    assert!(matches!(host.oci.wait(&task, &handle).await, Err(RuntimeError::Refused { .. })));
    host.remove(&task).await;
}

#[tokio::test]
async fn oci_resolves_the_user_of_a_task_in_the_image() {
    let host = OciHost::new();
    for (user, expected) in
        [("job", "1000 1000 1000 2000"), ("job:extra", "1000 2000 2000 1000"), ("1234", "1234 0 0")]
    {
        let mut task = host.task("echo $(id -u) $(id -g) $(id -G) > /tmp/out; cat /tmp/out >&2").await;
        task.spec.container_user = user.to_owned();
        let exit = host.run(&task).await;
        assert_eq!(exit.tail, [expected], "{user}: {exit:?}");
    }
    let mut task = host.task("").await;
    task.spec.container_user = "unknown-user".to_owned();
    let refused = host.oci.create(&task).await.unwrap_err().to_string();
    assert!(refused.contains("unknown-user") && refused.contains("/etc/passwd"), "{refused}");
}

#[tokio::test]
async fn oci_containers_have_files_of_the_network_and_write_to_their_own_layer_only() {
    let host = OciHost::new();
    let script =
        "cd /windlass/run; hostname > out; cat /etc/hostname >> out; grep -c localhost /etc/hosts >> out
        echo changed > /etc/passwd; rm /bin/date; echo own > /new; mkdir /opt/x";
    let task = host.task(script).await;
    let message = host.message(&task).await;
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let lines: Vec<&str> = message.lines().collect();
    assert_eq!(lines[..2], [name.as_str(), name.as_str()]);
    assert_ne!(lines[2], "0");
    assert!(host.oci.disk_used(&task.dir, &host.oci.create(&task).await.unwrap()).await.unwrap() > 0);
    host.remove(&task).await;
    let again = host
        .task("ls /bin/date /new 2>/dev/null > /windlass/run/out; head -1 /etc/passwd >> /windlass/run/out")
        .await;
    assert_eq!(host.message(&again).await, "/bin/date\nroot:x:0:0::/root:/bin/sh");
    host.remove(&again).await;
}

#[tokio::test]
async fn oci_containers_do_not_see_files_that_an_upper_layer_removed_or_hid() {
    let host = OciHost::new();
    let script = "cd /windlass/run; ls /etc > out; ls /home >> out; stat -c %u /home/job.txt >> out";
    let task = host.task_named(&super::rootless::serve_layered_image(), script);
    host.oci.pull(&task, None, super::ignore_progress()).await.unwrap();
    assert_eq!(host.message(&task).await, "hostname\nhosts\npasswd\nresolv.conf\nclosed\njob.txt\n1000");
    host.remove(&task).await;
}

#[tokio::test]
async fn oci_keeps_only_the_last_output_of_a_container() {
    let host = OciHost::new();
    let task =
        host.task("for i in $(seq 40000); do echo line $i of many that are printed; done; echo last").await;
    let exit = host.run(&task).await;
    assert_eq!(exit.tail.last().map(String::as_str), Some("last"));
    let size =
        |name: &str| fs::metadata(task.dir.root().join("container").join(name)).map_or(0, |meta| meta.len());
    assert!(size("output.log") + size("output.older.log") <= 512 << 10);
    host.remove(&task).await;
}

#[tokio::test]
async fn oci_containers_run_with_crun_and_with_runc() {
    let hierarchies = Hierarchies::mounted().unwrap();
    for path in ["/usr/bin/crun", "/usr/sbin/runc"] {
        assert!(
            Path::new(path).exists(),
            "this test needs {path}: install the Debian packages `crun` and `runc`"
        );
        let host = OciHost::with(|settings| settings.program = OciProgram::at(path.into(), &hierarchies));
        let script = "cd /windlass/run; id -u > out
            timeout 3 wget -q -O - http://169.254.169.254/ 2>&1 | grep -c 'not permitted' >> out; exit 4";
        let mut task = host.task(script).await;
        task.spec.memory = 64 << 20;
        let exit = host.run(&task).await;
        assert_eq!(
            (exit.code, exit.oom_killed, read(&task, "out").as_str()),
            (Some(4), false, "0\n1"),
            "{path}: {exit:?}"
        );
        host.remove(&task).await;
    }
}

#[tokio::test]
async fn oci_finds_only_containers_of_its_own_shim() {
    let (one, other) = (OciHost::new(), OciHost::new());
    let task = one.task("").await;
    let handle = one.oci.create(&task).await.unwrap();
    assert_eq!(other.oci.found().await.unwrap(), []);
    assert_eq!(one.oci.found().await.unwrap().len(), 1);
    // The same shim finds it again after a restart.
    assert_eq!(one.reopen().found().await.unwrap()[0].handle, handle);
}

#[tokio::test]
async fn oci_keeps_an_older_agent_binary_while_a_task_uses_it() {
    let host = OciHost::new();
    let copies = || fs::read_dir(host.scratch.path().join("bin")).unwrap().count();
    let task = host.task("").await;
    let handle = host.oci.create(&task).await.unwrap();
    let newer = host.scratch.path().join("newer");
    fs::copy(crate::support::agent(), &newer).unwrap();
    std::io::Write::write_all(&mut fs::OpenOptions::new().append(true).open(&newer).unwrap(), b"newer")
        .unwrap();
    let upgraded = || super::open_runtime(&host.scratch, |settings| settings.agent.clone_from(&newer));
    let again = upgraded();
    assert_eq!(copies(), 2);
    again.start(&task, &handle).await.unwrap();
    again.remove(&task.dir, Some(&handle)).await.unwrap();
    drop(again);
    let _ = upgraded();
    assert_eq!(copies(), 1);
}

#[tokio::test]
async fn oci_containers_have_the_git_of_the_host_for_images_without_git() {
    let host = OciHost::new();
    let script = "cd /windlass/run; ls -d /windlass/git/programs/git > out
        (echo evil > /windlass/git/programs/git) 2>/dev/null && echo wrote >> out
        mount -o remount,rw /windlass/git 2>/dev/null && echo remounted >> out; exit 0";
    assert_eq!(host.message(&host.task(script).await).await, "/windlass/git/programs/git");
}

/// A file system of a few megabytes for the images of a home.
struct SmallDisk(std::path::PathBuf);

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[tokio::test]
async fn f11_oci_without_disk_space_reports_it_and_still_removes_tasks() {
    let scratch = crate::support::temp_dir("oci-small").unwrap();
    let home = scratch.path().join("home");
    fs::create_dir(&home).unwrap();
    // The copies of the agent and of git need most of it.
    let size = fs::metadata(crate::support::agent()).unwrap().len() + (400 << 20);
    let options = std::ffi::CString::new(format!("size={size}")).unwrap();
    rustix::mount::mount("tmpfs", &home, "tmpfs", rustix::mount::MountFlags::empty(), options.as_c_str())
        .unwrap();
    let _disk = SmallDisk(home.clone());
    let host = OciHost::at(scratch, home);
    let task = host.task("touch /windlass/run/up; sleep 600").await;
    let handle = host.start(&task).await;
    super::wait_written(&task, "up").await;
    let registry = windlass_testkit::lab::registry::Registry::start().await;
    let mut tar = crate::support::images::Tar::new();
    tar.file("much", &vec![7; 300 << 20], 0o644);
    let (name, _) = registry.put("much", "1", tar.done());
    let much = host.task_named(&name, "");
    let pulled = host.oci.pull(&much, None, super::ignore_progress()).await;
    assert!(matches!(pulled, Err(RuntimeError::NoDisk { .. })), "{pulled:?}");
    host.oci.stop(&task.dir, &handle, std::time::Duration::ZERO).await.unwrap();
    assert_eq!(host.wait(&task, &handle).await.code, Some(137));
    host.oci.remove(&task.dir, Some(&handle)).await.unwrap();
    assert_eq!(host.oci.found().await.unwrap(), []);
}

#[tokio::test]
async fn oci_containers_whose_files_are_gone_are_found_and_removed() {
    let host = OciHost::new();
    let task = host.task("touch /windlass/run/up; sleep 600").await;
    host.start(&task).await;
    super::wait_written(&task, "up").await;
    fs::remove_dir_all(task.dir.root().join("container")).unwrap();
    let again = host.reopen();
    let found = again.found().await.unwrap();
    assert_eq!((found.len(), found[0].task, found[0].state), (1, task.spec.id, FoundState::Ended));
    again.remove(&task.dir, Some(&found[0].handle)).await.unwrap();
    assert_eq!(again.found().await.unwrap(), []);
    host.remove(&task).await;
}
