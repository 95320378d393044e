//! The code of a job, sent with `windlass apply` from a directory: a clone of a repository that git itself serves, with
//! unpushed changes; a directory without a remote; files.

use std::{
    fs,
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use serde_json::json;
use windlass_testkit::lab::Lab;

use crate::{
    containers,
    hosts::fleet,
    test_env::{HostMode, TestEnv, small_task_config},
};

const TIMEOUT: Duration = Duration::from_secs(30);
/// Minimal requirements, which any machine satisfies.
const SMALL_RESOURCES: &str = "resources: {cpu: 1.., memory: 0.., disk: null}\n";
const RESOURCES: &str = "resources: {cpu: 1.., memory: 0.., disk: null}\nuser: root\n";

fn output_text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// The user's git; `ssh` is the command with which it reaches servers.
struct Git<'a> {
    dir: &'a Path,
    ssh: String,
}

impl Git<'_> {
    fn run(&self, args: &[&str]) -> String {
        let mut command = Command::new("git");
        command.arg("-C").arg(self.dir).args(["-c", "user.name=Ada", "-c", "user.email=ada@example.com"]);
        command.args(["-c", "init.defaultBranch=main"]).args(args).env("GIT_SSH_COMMAND", &self.ssh);
        let output = command.output().unwrap();
        assert!(output.status.success(), "git {args:?}: {}", output_text(&output));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }
}

/// Creates a clone of `url`, pushed there first; then adds a local commit and uncommitted changes. Returns the commit
/// that the remote has.
fn work_tree(dir: &Path, url: &str, ssh: &str) -> String {
    fs::create_dir(dir).unwrap();
    let git = Git { dir, ssh: ssh.to_owned() };
    git.run(&["init", "--quiet"]);
    for (name, text) in
        [("kept", "as pushed\n"), ("changed", "old\n"), ("gone", "x\n"), (".gitignore", "secret\n")]
    {
        fs::write(dir.join(name), text).unwrap();
    }
    git.run(&["add", "."]);
    git.run(&["commit", "--quiet", "-m", "pushed"]);
    git.run(&["remote", "add", "origin", url]);
    git.run(&["push", "--quiet", "-u", "origin", "main"]);
    let pushed = git.run(&["rev-parse", "HEAD"]);
    fs::write(dir.join("committed"), "only here\n").unwrap();
    git.run(&["add", "."]);
    git.run(&["commit", "--quiet", "-m", "not pushed"]);
    fs::write(dir.join("changed"), "new\n").unwrap();
    fs::write(dir.join("bytes"), [0_u8, 255, 10]).unwrap();
    fs::write(dir.join("secret"), "stays here\n").unwrap();
    fs::remove_file(dir.join("gone")).unwrap();
    pushed
}

/// Commands that print the content of the working directory, for [`work_tree`].
const INSPECT_COMMANDS: &str =
    "commands:\n  - git rev-parse HEAD\n  - cat kept changed committed\n  - od -An -tx1 bytes\n  - ls -A\n";

fn expected_output(commit: &str) -> String {
    let files = ".git\n.gitignore\nbytes\nchanged\ncommitted\nkept\n";
    format!("{commit}\nas pushed\nnew\nonly here\n 00 ff 0a\n{files}")
}

/// Applies attached: the output of the command is that of the job.
fn apply(env: &TestEnv, dir: &Path, args: &[&str]) -> Output {
    env.windlass(dir, &[&["apply", "-y"], args].concat())
}

/// `git daemon` for one directory, on a separate port.
struct GitDaemon {
    child: Child,
    port: u16,
}

impl GitDaemon {
    fn start(root: &Path) -> Self {
        Self::start_at(root, "127.0.0.1")
    }

    fn start_at(root: &Path, address: &str) -> Self {
        let port = windlass_testkit::ports::reserve_free_port();
        let programs = Command::new("git").arg("--exec-path").output().unwrap();
        let programs = PathBuf::from(String::from_utf8(programs.stdout).unwrap().trim());
        let mut command = Command::new(programs.join("git-daemon"));
        command
            .args(["--export-all", "--reuseaddr", "--enable=receive-pack"])
            .arg(format!("--listen={address}"));
        command.arg(format!("--port={port}")).arg(format!("--base-path={}", root.display()));
        let child = command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let daemon = Self { child, port };
        let started_at = Instant::now();
        while TcpStream::connect((address, port)).is_err() {
            assert!(started_at.elapsed() < TIMEOUT, "git's daemon does not answer");
            std::thread::sleep(Duration::from_millis(10));
        }
        daemon
    }
}

impl Drop for GitDaemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn a_job_starts_from_the_remote_commit_with_unpushed_changes() {
    starts_from_the_remote(&TestEnv::new(HostMode::Processes).await, RESOURCES);
}

#[tokio::test]
async fn a_confined_job_starts_from_the_remote_commit_with_unpushed_changes() {
    starts_from_the_remote(&TestEnv::confined(HostMode::Processes).await, SMALL_RESOURCES);
}

#[tokio::test]
async fn a_repository_is_cloned_in_a_docker_image_without_git_by_the_git_of_the_host() {
    containers::image();
    let mut env = TestEnv::new(HostMode::Containers).await;
    // The first container creates the network, whose gateway is this machine.
    let mut first = small_task_config("first", &["true"]);
    first["image"] = json!(containers::IMAGE);
    assert_eq!(env.ends(&first).await["status"], "done");
    let gateway =
        containers::docker(&["network", "inspect", "windlass", "-f", "{{(index .IPAM.Config 0).Gateway}}"]);
    let (served, here) = (env.home().join("served"), env.home().join("here"));
    fs::create_dir(&served).unwrap();
    Git { dir: &served, ssh: String::new() }.run(&["init", "--quiet", "--bare", "app.git"]);
    let daemon = GitDaemon::start_at(&served, gateway.trim());
    work_tree(&here, &format!("git://{}:{}/app.git", gateway.trim(), daemon.port), "");
    let commands = "commands:\n  - command -v git || echo no git\n  - cat kept changed committed\n  \
                    - busybox od -An -tx1 bytes\n  - busybox ls -A\n";
    let file = format!(
        "type: task\nname: look\nimage: {}\nworking_dir: /work\nrepos: [.]\n{commands}{SMALL_RESOURCES}",
        containers::IMAGE
    );
    fs::write(here.join("look.yml"), file).unwrap();
    let output = apply(&env, &here, &["-f", "look.yml"]);
    assert!(output.status.success(), "{}\n{}", output_text(&output), env.server_log());
    let files = ".git\n.gitignore\nbytes\nchanged\ncommitted\nkept\nlook.yml\n";
    let want = format!("no git\nas pushed\nnew\nonly here\n 00 ff 0a\n{files}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), want);
}

fn starts_from_the_remote(env: &TestEnv, resources: &str) {
    let (served, here) = (env.home().join("served"), env.home().join("here"));
    fs::create_dir(&served).unwrap();
    Git { dir: &served, ssh: String::new() }.run(&["init", "--quiet", "--bare", "app.git"]);
    let daemon = GitDaemon::start(&served);
    let commit = work_tree(&here, &format!("git://127.0.0.1:{}/app.git", daemon.port), "");
    let file = format!("type: task\nname: look\nrepos: [.]\n{INSPECT_COMMANDS}{resources}");
    // The file itself is one of the changes.
    fs::write(here.join("look.yml"), file).unwrap();
    let output = apply(env, &here, &["-f", "look.yml"]);
    assert!(output.status.success(), "{}\n{}", output_text(&output), env.server_log());
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected_output(&commit) + "look.yml\n");

    // From elsewhere, by URL only: the pushed content, and nothing of the directory.
    let file = format!(
        "type: task\nname: pushed\nrepos: [\"git://127.0.0.1:{}/app.git:code\"]\ncommands: [cat code/changed, ls code]\n{resources}",
        daemon.port
    );
    fs::write(here.join("pushed.yml"), file).unwrap();
    let output = apply(env, &here, &["-f", "pushed.yml"]);
    assert!(output.status.success(), "{}\n{}", output_text(&output), env.server_log());
    assert_eq!(String::from_utf8_lossy(&output.stdout), "old\nchanged\ngone\nkept\n");
}

#[tokio::test]
async fn a_private_repository_is_cloned_over_ssh_and_no_key_stays_on_the_host() {
    // The first host runs the job, the second has the repository.
    let lab = Lab::start(2).unwrap();
    let mut env = TestEnv::new(HostMode::None).await;
    fleet(&mut env, &lab, &lab.hosts()[..1], 1).await;
    assert!(lab.host(2).run("git init --quiet --bare /var/lib/app.git").unwrap().status.success());
    let key = lab.key_file();
    let ssh = format!(
        "ssh -i {} -o IdentitiesOnly=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null",
        key.display()
    );
    let here = env.home().join("here");
    let url = format!("ssh://root@{}/var/lib/app.git", lab.host(2).addr());
    let commit = work_tree(&here, &url, &ssh);
    let file = format!("type: task\nname: private\nrepos: [.]\n{INSPECT_COMMANDS}{RESOURCES}");
    fs::write(env.home().join("private.yml"), file.replace("[.]", "[here]")).unwrap();

    let refused = apply(&env, env.home(), &["-f", "private.yml", "-n", "keyless"]);
    assert!(!refused.status.success(), "{}", output_text(&refused));
    assert!(output_text(&refused).contains("clone the repository"), "{}", output_text(&refused));

    let output = apply(&env, env.home(), &["-f", "private.yml", "--git-identity", key.to_str().unwrap()]);
    assert!(output.status.success(), "{}\n{}", output_text(&output), env.server_log());
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected_output(&commit));
    // The first lines of all such keys are identical.
    let secret = lab.key_pair().unwrap().0.lines().nth(4).unwrap().to_owned();
    let left = lab.host(1).run(&format!("grep -rlF '{secret}' /var /root /home /run /tmp /etc")).unwrap();
    assert_eq!(String::from_utf8_lossy(&left.stdout), "");
    let run = env.run("private").await;
    let events = env.post("/api/events/list", &json!({"limit": 100})).await;
    for seen in [run.to_string(), events.to_string(), env.server_log(), output_text(&output)] {
        assert!(!seen.contains(&secret), "{seen}");
    }
}

#[tokio::test]
async fn a_folder_without_a_remote_is_uploaded_whole_and_files_go_to_their_paths() {
    sends_a_folder(&TestEnv::new(HostMode::Processes).await, RESOURCES);
}

#[tokio::test]
async fn a_confined_job_receives_an_uploaded_folder_and_files() {
    sends_a_folder(&TestEnv::confined(HostMode::Processes).await, SMALL_RESOURCES);
}

fn sends_a_folder(env: &TestEnv, resources: &str) {
    let here = env.home().join("here");
    fs::create_dir_all(here.join("code/below")).unwrap();
    for (name, text) in [
        ("code/run.sh", "#!/bin/sh\necho $1\n"),
        ("code/below/deep", "deep\n"),
        ("code/.gitignore", "*.tmp\n"),
        ("code/left.tmp", "x"),
        ("settings", "a = 1\n"),
    ] {
        fs::write(here.join(name), text).unwrap();
    }
    fs::set_permissions(here.join("code/run.sh"), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .unwrap();
    let file = format!(
        "type: task\nname: whole\nrepos: [\"code:src\"]\nfiles: [settings, \"settings:etc/other\"]\n\
         commands: [src/run.sh runs, cat src/below/deep settings etc/other, ls -A src]\n{resources}"
    );
    fs::write(here.join("whole.yml"), file).unwrap();
    let output = apply(env, &here, &["-f", "whole.yml"]);
    assert!(output.status.success(), "{}\n{}", output_text(&output), env.server_log());
    let want = "runs\ndeep\na = 1\na = 1\n.gitignore\nbelow\nrun.sh\n";
    assert_eq!(String::from_utf8_lossy(&output.stdout), want);
}

#[tokio::test]
async fn a_repository_is_the_working_directory_of_a_task() {
    let env = TestEnv::new(HostMode::Processes).await;
    let served = env.home().join("served");
    fs::create_dir_all(&served).unwrap();
    let bare = served.join("app.git");
    let git = Git { dir: &served, ssh: String::new() };
    git.run(&["init", "--quiet", "--bare", "app.git"]);
    let daemon = GitDaemon::start(&served);
    let url = format!("git://127.0.0.1:{}/app.git", daemon.port);
    let first = work_tree(&env.home().join("tree"), &url, "");
    assert!(bare.is_dir());
    let git = Git { dir: &env.home().join("tree"), ssh: String::new() };
    git.run(&["tag", "old", &first]);
    git.run(&["push", "--quiet", "origin", "main", "old"]);
    let last = git.run(&["rev-parse", "HEAD"]);
    let dir = env.home().join("work");
    fs::create_dir_all(&dir).unwrap();
    // The default branch, a tag and a commit.
    for (reference, want) in [("", &last), (", ref: old", &first), (&*format!(", ref: {first}"), &first)] {
        let file =
            format!("workdir: {{url: '{url}'{reference}}}\nrun: |\n  git rev-parse HEAD\n  cat kept\n");
        fs::write(dir.join("task.yaml"), file).unwrap();
        let output = env.windlass(&dir, &["jobs", "launch", "-y", "task.yaml"]);
        let seen = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(
            seen,
            format!("{want}\nas pushed\n"),
            "{reference}: {}\n{}",
            output_text(&output),
            env.server_log()
        );
    }
}
