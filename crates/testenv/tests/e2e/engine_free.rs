//! A machine without a container engine: the server's agent chooses to run containers itself.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use windlass_testenv::server::binary_path;
use windlass_testkit::{
    lab::registry::{ImageOptions, Registry},
    without_engine,
};

use crate::test_env::{HostMode, TestEnv};

/// A program that starts the server where no engine is installed.
fn server_without_engine(env: &TestEnv) -> PathBuf {
    let path = env.home().join("windlass-without-engine");
    let words = without_engine::words(env.home(), &binary_path("windlass").unwrap());
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

#[tokio::test(flavor = "multi_thread")]
async fn apply_runs_an_image_on_a_machine_without_an_engine() {
    let registry = Registry::start().await;
    let env = TestEnv::new_unstarted(HostMode::Processes);
    let program = server_without_engine(&env);
    let mut env = env.with_server(program);
    env.start().await;
    let (plain, compressed) = shell_layer(env.home());
    let options = ImageOptions { config: r#"{"Env": ["PATH=/bin"]}"#, ..ImageOptions::default() };
    let (image, _) = registry.put_layers("hello", "1", vec![(compressed, digest(&plain))], options);
    let file = env.home().join("hello.yml");
    let text = format!(
        "type: task\nname: hello\nimage: {image}\ncommands: [\"echo in $(cat /etc/image)\", \"cat /windlass/run/runner.json > /dev/null\"]\n"
    );
    fs::write(&file, text).unwrap();
    let output = env.windlass(env.home(), &["apply", "-y", "-f", file.to_str().unwrap()]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("in of the registry"),
        "{output:?}\n{}",
        env.server_log()
    );
    let note = env.home().join("server/local/runtime");
    assert_eq!(fs::read_to_string(&note).unwrap(), "any-oci", "{}", note.display());
}
