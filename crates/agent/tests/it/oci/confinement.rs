//! Attempts to leave a container, and the comparison with a container of Docker.

use std::{collections::BTreeSet, fs};

use bollard::{
    models::{ContainerCreateBody, HostConfig},
    query_parameters::{CreateContainerOptions, RemoveContainerOptionsBuilder},
};
use serde_json::Value;
use windlass_agent::shim::runtime::Runtime;
use windlass_testkit::lab::registry::ImageOptions;

use super::{OciHost, read};
use crate::support::{engine, images::Image, oci};

#[tokio::test]
async fn oci_tasks_cannot_escape_by_mounts_devices_namespaces_or_the_kernel() {
    let host = OciHost::new();
    let script =
        "cd /windlass/run; attempt() { name=$1; shift; \"$@\" >/dev/null 2>&1 && echo $name >> out; }
        touch out
        attempt mount mount -t tmpfs none /mnt
        attempt remount mount -o remount,rw /sys
        attempt mknod mknod /tmp/disk b 8 0
        attempt unshare unshare -m true
        attempt userns unshare -U true
        attempt sysrq sh -c 'echo b > /proc/sysrq-trigger'
        attempt sysctl sh -c 'echo 1 > /proc/sys/kernel/panic'
        attempt core sh -c 'echo x > /proc/sys/kernel/core_pattern'
        attempt cgroup mkdir /sys/fs/cgroup/memory/x
        attempt release sh -c 'echo x > /sys/fs/cgroup/memory/release_agent'
        attempt kcore head -c 1 /proc/kcore
        attempt hostname hostname evil
        attempt kill sh -c 'kill -0 4194303'
        attempt chroot chroot / true
        attempt rawnet ping -c 1 -w 1 127.0.0.1
        attempt disk sh -c 'cat /dev/sda || cat /dev/vda'
        [ $(ls /proc | grep -c '^[0-9]') -lt 20 ] || echo processes >> out
        [ -e /proc/1/root/windlass/agent ] || echo root >> out";
    let task = host.task(script).await;
    let exit = host.run(&task).await;
    assert_eq!(read(&task, "out"), "", "{exit:?}");
    host.remove(&task).await;
}

#[tokio::test]
async fn oci_tasks_do_not_see_each_other_or_the_directories_of_the_agent() {
    let host = OciHost::new();
    let one = host.task("echo secret > /tmp/mine; touch /windlass/run/up; sleep 600").await;
    host.start(&one).await;
    super::wait_written(&one, "up").await;
    let script = format!(
        "cd /windlass/run; (ls /tmp/mine {home} 2>/dev/null; grep -l sleep /proc/[0-9]*/cmdline 2>/dev/null;
        cat /proc/mounts | grep -c {home}) > out; exit 0",
        home = host.scratch.path().display()
    );
    let two = host.task(&script).await;
    let lines = host.message(&two).await;
    // Paths of the host are visible in the options of the root mount at most, which give no access.
    assert!(!lines.contains("/tmp/mine") && !lines.contains("cmdline"), "{lines}");
}

#[tokio::test]
async fn oci_tasks_inherit_no_descriptor_and_no_working_directory_of_the_host() {
    let host = OciHost::new();
    let task = host.task("for fd in /proc/1/fd/*; do readlink $fd; done > /windlass/run/out; true").await;
    for target in host.message(&task).await.lines() {
        let is_own = ["/dev/null", "pipe:[", "/windlass/run/"].iter().any(|own| target.starts_with(own));
        assert!(is_own, "{target}");
    }
    host.remove(&task).await;
    // The OCI runtime has more descriptors while it starts a container: an image could name one of them.
    for descriptor in 3..=12 {
        let config = format!(r#"{{"WorkingDir": "/proc/self/fd/{descriptor}", "Env": ["PATH=/bin"]}}"#);
        let options = ImageOptions { config: &config, ..ImageOptions::default() };
        let image = oci::serve_layers(&format!("cwd{descriptor}"), vec![Image::Busybox.tar()], options);
        let script = "ls -d ../../../../../../usr/bin/dpkg > /windlass/run/out; exit 0";
        let task = host.task_named(&image, script);
        host.oci.pull(&task, None, super::ignore_progress()).await.unwrap();
        let handle = host.oci.create(&task).await.unwrap();
        if host.oci.start(&task, &handle).await.is_ok() {
            host.wait(&task, &handle).await;
            let seen = fs::read_to_string(task.dir.run().join("out")).unwrap_or_default();
            assert!(!seen.contains("dpkg"), "{descriptor}: {seen}");
        }
        host.remove(&task).await;
    }
}

/// Calls that a filter permits without conditions.
fn permitted(config: &Value) -> BTreeSet<String> {
    let calls = config["linux"]["seccomp"]["syscalls"].as_array().unwrap();
    let allowed = calls.iter().filter(|one| one["action"] == "SCMP_ACT_ALLOW" && one["args"].is_null());
    let names = allowed.flat_map(|one| one["names"].as_array().unwrap());
    names.filter_map(|name| name.as_str().map(str::to_owned)).collect()
}

/// Calls that a filter permits for some arguments only, each with its conditions.
fn conditional(config: &Value) -> BTreeSet<(String, String)> {
    let calls = config["linux"]["seccomp"]["syscalls"].as_array().unwrap();
    let allowed = calls.iter().filter(|one| one["action"] == "SCMP_ACT_ALLOW");
    let rules = allowed.filter_map(|one| {
        let condition = |arg: &Value| {
            let number = |name: &str| arg[name].as_u64().unwrap_or(0);
            format!("{} {} {} {}", number("index"), arg["op"], number("value"), number("valueTwo"))
        };
        let conditions: Vec<String> = one["args"].as_array()?.iter().map(condition).collect();
        (!conditions.is_empty()).then(|| (one, conditions.join(", ")))
    });
    let named = rules.flat_map(|(one, conditions)| {
        let names = one["names"].as_array().unwrap().iter().filter_map(|name| name.as_str());
        names.map(|name| (name.to_owned(), conditions.clone())).collect::<Vec<_>>()
    });
    named.collect()
}

fn strings(value: &Value) -> BTreeSet<&str> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

/// Finds the configuration that the engine gave to its OCI runtime.
fn find_config(id: &str) -> Value {
    let output = std::process::Command::new("find")
        .args(["/run", "/var/run", "/tmp", "-name", "config.json", "-path", &format!("*{id}*")])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let path = text.lines().next().expect("the engine's bundle");
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[tokio::test]
async fn oci_containers_are_confined_as_containers_of_docker_are() {
    let host = OciHost::new();
    let task = host.task("").await;
    host.oci.create(&task).await.unwrap();
    let ours: Value =
        serde_json::from_slice(&fs::read(task.dir.root().join("container/config.json")).unwrap()).unwrap();
    let docker = engine::client(&engine::shared_socket());
    let image = Image::Busybox.ensure(&docker).await;
    let body = ContainerCreateBody {
        image: Some(image),
        cmd: Some(vec!["sleep".into(), "600".into()]),
        host_config: Some(HostConfig {
            cap_drop: Some(vec!["ALL".into()]),
            cap_add: Some(task.limits.capabilities.clone()),
            network_mode: Some("host".into()),
            ipc_mode: Some("private".into()),
            ..HostConfig::default()
        }),
        ..ContainerCreateBody::default()
    };
    let made = docker.create_container(None::<CreateContainerOptions>, body).await.unwrap();
    docker.start_container(&made.id, None).await.unwrap();
    let theirs = find_config(&made.id);
    let force = RemoveContainerOptionsBuilder::default().force(true).build();
    docker.remove_container(&made.id, Some(force)).await.unwrap();
    let more: BTreeSet<String> = permitted(&ours).difference(&permitted(&theirs)).cloned().collect();
    let newer = [
        "cachestat",
        "fchmodat2",
        "futex_requeue",
        "futex_wait",
        "futex_wake",
        "map_shadow_stack",
        "name_to_handle_at",
        "pkey_alloc",
        "pkey_free",
        "pkey_mprotect",
        "process_vm_readv",
        "process_vm_writev",
    ];
    assert!(more.iter().all(|name| newer.contains(&name.as_str())), "permitted here only: {more:?}");
    let fewer: BTreeSet<String> = permitted(&theirs).difference(&permitted(&ours)).cloned().collect();
    let denied = ["io_uring_enter", "io_uring_register", "io_uring_setup", "socket"];
    assert!(fewer.iter().all(|name| denied.contains(&name.as_str())), "permitted there only: {fewer:?}");
    let (own, other) = (conditional(&ours), conditional(&theirs));
    assert_eq!(other.difference(&own).collect::<Vec<_>>(), [] as [&_; 0], "conditions there only");
    // Older versions permit all kinds of sockets.
    let more: Vec<_> = own.difference(&other).filter(|(name, _)| name != "socket").collect();
    assert!(more.is_empty(), "conditions here only: {more:?}");
    assert!(own.iter().any(|(name, _)| name == "clone") && own.iter().any(|(name, _)| name == "personality"));
    for set in ["bounding", "effective", "permitted"] {
        let of = |config: &'_ Value| -> BTreeSet<String> {
            strings(&config["process"]["capabilities"][set]).into_iter().map(str::to_owned).collect()
        };
        assert_eq!(of(&ours), of(&theirs), "{set}");
    }
    for paths in ["maskedPaths", "readonlyPaths"] {
        let missing: Vec<_> =
            strings(&theirs["linux"][paths]).difference(&strings(&ours["linux"][paths])).copied().collect();
        assert!(missing.is_empty(), "{paths}: {missing:?}");
    }
    let kinds = |config: &Value| -> BTreeSet<String> {
        // A namespace with a path is an existing one, here the network of the host.
        let all =
            config["linux"]["namespaces"].as_array().unwrap().iter().filter(|one| one["path"].is_null());
        all.filter_map(|one| one["type"].as_str().map(str::to_owned))
            .filter(|kind| kind != "cgroup")
            .collect()
    };
    assert_eq!(kinds(&ours), kinds(&theirs));
    let options = |config: &Value, at: &str| -> BTreeSet<String> {
        let mount = config["mounts"].as_array().unwrap().iter().find(|one| one["destination"] == at);
        strings(&mount.unwrap()["options"]).into_iter().map(str::to_owned).collect()
    };
    for at in ["/proc", "/dev", "/dev/pts", "/sys", "/sys/fs/cgroup", "/dev/mqueue", "/dev/shm"] {
        assert_eq!(options(&ours, at), options(&theirs, at), "{at}");
    }
}
