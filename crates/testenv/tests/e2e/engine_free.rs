//! A machine without a container engine: the server's agent chooses to run containers itself.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use windlass_testenv::{images::busybox_layer, server::binary_path};
use windlass_testkit::{
    lab::{
        Lab,
        registry::{ImageOptions, Registry},
    },
    without_engine,
};

use crate::test_env::{HostMode, TestEnv, small_task_config};

/// A program that starts the server `windlass` where no engine is installed.
fn server_without_engine(env: &TestEnv, windlass: &Path) -> PathBuf {
    let path = env.home().join("windlass-without-engine");
    let words = without_engine::words(env.home(), windlass);
    let quoted: Vec<String> =
        words.iter().map(|word| format!("'{}'", word.to_str().unwrap().replace('\'', "'\\''"))).collect();
    let text = format!("#!/bin/sh\nunset DOCKER_HOST\nexec {} \"$@\"\n", quoted.join(" "));
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// A layer with a shell, uncompressed and compressed.
fn shell_layer(dir: &Path) -> (Vec<u8>, Vec<u8>) {
    let root = dir.join("image");
    fs::create_dir_all(root.join("bin")).unwrap();
    fs::copy("/usr/bin/busybox", root.join("bin/busybox")).expect("install the package busybox-static");
    for name in ["sh", "cat", "echo"] {
        symlink("busybox", root.join("bin").join(name)).unwrap();
    }
    fs::create_dir(root.join("etc")).unwrap();
    fs::write(root.join("etc/image"), "of the registry\n").unwrap();
    let output = Command::new("tar").arg("-C").arg(&root).args(["-cf", "-", "."]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let mut child = Command::new("gzip")
        .arg("-1")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let (mut input, plain) = (child.stdin.take().unwrap(), output.stdout.clone());
    let write = std::thread::spawn(move || input.write_all(&plain).unwrap());
    let compressed = child.wait_with_output().unwrap().stdout;
    write.join().unwrap();
    (output.stdout, compressed)
}

fn digest(bytes: &[u8]) -> String {
    let hash = ring::digest::digest(&ring::digest::SHA256, bytes);
    let hex: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

/// Applies a task whose image comes from a registry, on the machine of the server, and returns its output.
async fn apply_image_task(env: &mut TestEnv, command: &str) -> String {
    let registry = Registry::start().await;
    env.start().await;
    let (plain, compressed) = shell_layer(env.home());
    let options = ImageOptions { config: r#"{"Env": ["PATH=/bin"]}"#, ..ImageOptions::default() };
    let (image, _) = registry.put_layers("hello", "1", vec![(compressed, digest(&plain))], options);
    let file = env.home().join("hello.yml");
    let text = format!(
        "type: task\nname: hello\nimage: {image}\ncommands: [\"{command}\", \"cat /windlass/run/runner.json > /dev/null\"]\n"
    );
    fs::write(&file, text).unwrap();
    let output = env.windlass(env.home(), &["apply", "-y", "-f", file.to_str().unwrap()]);
    assert!(output.status.success(), "{output:?}\n{}", env.server_log());
    let note = env.home().join("server/local/runtime");
    assert_eq!(fs::read_to_string(&note).unwrap(), "any-oci", "{}", note.display());
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn apply_runs_an_image_on_a_machine_without_an_engine() {
    let env = TestEnv::new_unstarted(HostMode::Processes);
    let program = server_without_engine(&env, &binary_path("windlass").unwrap());
    let text = apply_image_task(&mut env.with_server(program), "echo in $(cat /etc/image)").await;
    assert!(text.contains("in of the registry"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn apply_runs_an_image_for_an_ordinary_user_on_a_machine_without_an_engine() {
    let env = TestEnv::new_unprivileged();
    let program = server_without_engine(&env, &env.home().join("start"));
    let command = "echo in $(cat /etc/image) $(cat /proc/self/uid_map)";
    let text = apply_image_task(&mut env.with_server(program), command).await;
    // Root of the container is the user of the server.
    let user = windlass_testenv::test_env::UNPRIVILEGED_UID;
    assert!(text.contains(&format!("in of the registry 0 {user} 1\n")), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ssh_host_with_nothing_installed_runs_images_by_the_program_of_config_yml() {
    let lab = Lab::start(1).unwrap();
    let host = lab.host(1);
    let registry = Registry::start_at(lab.gateway()).await;
    let policy = format!("plain_http_registries: ['{}']\n", registry.address());
    fs::write(host.path("/etc/windlass/policy.yml"), policy).unwrap();
    let mut env = TestEnv::new_unstarted(HostMode::None);
    let found = ["/usr/sbin/runc", "/usr/bin/crun"].into_iter().find(|path| Path::new(path).exists());
    let bytes = fs::read(found.expect("install the Debian package `runc`")).unwrap();
    let program = env.home().join("runc-static");
    fs::write(&program, &bytes).unwrap();
    host.hide_engine(true).unwrap();
    let missing = host.run("command -v crun runc docker dockerd podman").unwrap();
    assert!(missing.stdout.is_empty(), "{missing:?}");
    let config = format!("oci_programs: {}@{}\n", program.display(), digest(&bytes));
    fs::write(env.home().join("server/config.yml"), config).unwrap();
    env.start().await;
    env.create_lab_fleet(&lab, lab.hosts(), 1).await;
    let options = ImageOptions { config: r#"{"Env": ["FROM_IMAGE=yes"]}"#, ..ImageOptions::default() };
    let (image, _) = registry.put_with("team/busybox", "1", busybox_layer(None), options);
    let mut job =
        small_task_config("contained", &["echo in an image: $FROM_IMAGE; ls /bin/busybox /windlass"]);
    job["image"] = image.into();
    let run = env.ends(&job).await;
    let log = env.log(&run).await;
    assert_eq!(run["status"], "done", "{log}\n{run:#}");
    assert!(log.starts_with("in an image: yes\n/bin/busybox\n"), "{log}");
    let uploaded = host.run("cat /var/lib/windlass/oci-program/*/runc").unwrap();
    assert!(uploaded.stdout == bytes, "the program of the setting is on the host");
    let note = fs::read_to_string(host.path("/var/lib/windlass/home/runtime")).unwrap();
    assert_eq!(note, "any-oci");
}
