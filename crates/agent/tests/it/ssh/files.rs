//! File transfers over SSH: `scp`, `sftp`, `rsync`, `git`, `tar`.

use std::{
    io::Read as _,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Command, Stdio},
};

use windlass_testkit::wait::TIMEOUT;

use super::{KillOnDrop, SshServer, noise, run, spawn, text};

#[track_caller]
fn run_ok(command: &mut Command, input: &[u8]) -> String {
    let output = run(command, input);
    assert!(output.status.success(), "{command:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

fn remote(path: &Path) -> String {
    format!("root@127.0.0.1:{}", path.display())
}

#[test]
fn scp_transfers_a_large_file_in_both_directions() {
    let server = SshServer::start();
    let bytes = noise((40 << 20) + 13);
    std::fs::write(server.at("up"), &bytes).unwrap();
    run_ok(server.client("scp", "-P").arg(server.at("up")).arg(remote(&server.home().join("there"))), b"");
    assert!(std::fs::read(server.home().join("there")).unwrap() == bytes);
    run_ok(server.client("scp", "-P").arg(remote(&server.home().join("there"))).arg(server.at("down")), b"");
    assert!(std::fs::read(server.at("down")).unwrap() == bytes);
}

#[test]
fn scp_transfers_a_tree_with_its_modes_and_times() {
    let server = SshServer::start();
    let tree = server.at("tree");
    std::fs::create_dir_all(tree.join("deep/er")).unwrap();
    for number in 0..150 {
        std::fs::write(tree.join(format!("deep/file {number}")), number.to_string()).unwrap();
    }
    std::fs::write(tree.join("deep/er/run"), "#!/bin/sh\n").unwrap();
    std::fs::set_permissions(tree.join("deep/er/run"), std::fs::Permissions::from_mode(0o750)).unwrap();
    run_ok(server.client("scp", "-P").args(["-r", "-p"]).arg(&tree).arg(remote(&server.home())), b"");
    run_ok(
        server
            .client("scp", "-P")
            .args(["-r", "-p"])
            .arg(remote(&server.home().join("tree")))
            .arg(server.at("back")),
        b"",
    );
    let same = Command::new("diff").arg("-r").arg(&tree).arg(server.at("back")).status().unwrap();
    assert!(same.success());
    let (there, here) = (server.at("back/deep/er/run"), tree.join("deep/er/run"));
    let meta = |path: &Path| {
        let meta = std::fs::metadata(path).unwrap();
        (meta.permissions().mode(), std::os::unix::fs::MetadataExt::mtime(&meta))
    };
    assert_eq!(meta(&there), meta(&here));
}

#[test]
fn the_legacy_scp_protocol_runs_the_scp_of_the_image() {
    let server = SshServer::start();
    std::fs::write(server.at("up"), "old ways").unwrap();
    run_ok(
        server.client("scp", "-P").arg("-O").arg(server.at("up")).arg(remote(&server.home().join("there"))),
        b"",
    );
    assert_eq!(std::fs::read_to_string(server.home().join("there")).unwrap(), "old ways");
}

#[test]
fn sftp_supports_the_commands_of_its_client() {
    let server = SshServer::start();
    std::fs::write(server.at("up"), "content").unwrap();
    let up = server.at("up").display().to_string();
    let batch = format!(
        "pwd\nmkdir dir\ncd dir\nput {up} a\nput {up} b\nrename a c\nrename b c\nchmod 600 c\nln -s c link\nln c hard\n\
         ls -la\ndf\nget c {up}.down\nrm hard\nrm link\n-rm none\n-rmdir .\nls\n"
    );
    let message = run_ok(server.client("sftp", "-P").args(["-b", "-", "root@127.0.0.1"]), batch.as_bytes());
    assert!(message.contains(&server.home().display().to_string()), "{message}");
    assert!(message.contains("lrwxrwxrwx"), "{message}");
    assert!(message.lines().any(|line| line.starts_with("-rw-------") && line.ends_with(" c")), "{message}");
    assert!(message.ends_with("sftp> ls\nc            \n") || message.trim_end().ends_with('c'), "{message}");
    assert_eq!(std::fs::read_to_string(server.at("up.down")).unwrap(), "content");
    let refused =
        run(server.client("sftp", "-P").args(["-b", "-", "root@127.0.0.1"]), b"get /no/such/file\n");
    assert!(!refused.status.success());
    assert!(text(&refused.stderr).contains("not found"), "{}", text(&refused.stderr));
}

#[test]
fn files_and_sockets_are_accessed_with_the_rights_of_the_session_user() {
    let server = SshServer::with(&["--user", "nobody", "--home", "/tmp", "--shell", "/bin/sh"], &[]);
    let batch = b"get /etc/shadow /dev/null\n";
    let mut sftp = server.client("sftp", "-P");
    let refused = run(sftp.args(["-b", "-", "job@127.0.0.1"]), batch);
    assert!(text(&refused.stderr).contains("ermission denied"), "{}", text(&refused.stderr));
    let as_job = |command: &str| {
        let mut ssh = server.client("ssh", "-p");
        text(&run(ssh.arg("job@127.0.0.1").arg(command), b"").stdout)
    };
    assert_eq!(as_job("id -un; cat /etc/shadow 2>&1 | grep -c denied; id -G"), "nobody\n1\n65534\n");
    // Sockets of others, too.
    let socket = server.at("secret.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o600)).unwrap();
    let near = server.at("near.sock");
    let mut ssh = server.client("ssh", "-p");
    ssh.args(["-N", "-L", &format!("{}:{}", near.display(), socket.display()), "job@127.0.0.1"]);
    let _client = KillOnDrop(spawn(ssh.stdin(Stdio::null())));
    let mut stream = super::forwards::connect_socket(&near);
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0, "a socket that only root may use is not reached");
    // Root is root.
    assert_eq!(server.command_output("id -un"), "root\n");
}

#[test]
fn rsync_copies_a_tree_and_then_only_the_changes() {
    let server = SshServer::start();
    let tree = server.at("tree");
    std::fs::create_dir_all(tree.join("sub")).unwrap();
    std::fs::write(tree.join("big"), noise(20 << 20)).unwrap();
    std::fs::write(tree.join("sub/small"), "one").unwrap();
    let shell = format!("ssh {} -p {}", server.options().join(" "), server.address.port());
    let sync = || {
        let mut rsync = Command::new("rsync");
        rsync.args(["-a", "--delete", "--stats", "-e", &shell]).arg(format!("{}/", tree.display()));
        run_ok(rsync.arg(remote(&server.home().join("copy"))).env("HOME", server.at("")), b"")
    };
    sync();
    std::fs::write(tree.join("sub/small"), "other").unwrap();
    std::fs::remove_file(tree.join("big")).unwrap();
    let second = sync();
    assert!(second.contains("Number of regular files transferred: 1\n"), "{second}");
    let same = Command::new("diff").arg("-r").arg(&tree).arg(server.home().join("copy")).status().unwrap();
    assert!(same.success());
}

#[test]
fn tar_archives_are_transferred_through_a_pipe() {
    let server = SshServer::start();
    let tree = server.at("tree");
    std::fs::create_dir_all(&tree).unwrap();
    std::fs::write(tree.join("file"), noise(5 << 20)).unwrap();
    let packed = Command::new("tar").args(["-C", tree.to_str().unwrap(), "-c", "."]).output().unwrap().stdout;
    run_ok(server.ssh(&[]).arg("tar x"), &packed);
    assert!(std::fs::read(server.home().join("file")).unwrap() == noise(5 << 20));
    let back = run(server.ssh(&[]).arg("tar c file"), b"");
    assert!(back.stdout.len() > 5 << 20);
}

#[test]
fn git_clones_and_pushes() {
    let server = SshServer::start();
    let git = |dir: &Path, args: &[&str]| {
        let shell = format!("ssh {} -p {}", server.options().join(" "), server.address.port());
        let mut git = Command::new("git");
        git.current_dir(dir).args(args).env("GIT_SSH_COMMAND", shell).env("HOME", server.at(""));
        git.env("GIT_CONFIG_GLOBAL", "/dev/null").env("GIT_CONFIG_SYSTEM", "/dev/null");
        for who in ["AUTHOR", "COMMITTER"] {
            git.env(format!("GIT_{who}_NAME"), "Ada").env(format!("GIT_{who}_EMAIL"), "ada@example.org");
        }
        run_ok(&mut git, b"")
    };
    git(&server.home(), &["init", "-q", "--bare", "-b", "main", "repo.git"]);
    let url = format!("root@127.0.0.1:{}", server.home().join("repo.git").display());
    git(&server.at(""), &["clone", "-q", &url, "work"]);
    std::fs::write(server.at("work/file"), noise(3 << 20)).unwrap();
    git(&server.at("work"), &["add", "."]);
    git(&server.at("work"), &["commit", "-q", "-m", "First"]);
    git(&server.at("work"), &["push", "-q", "origin", "HEAD:main"]);
    assert!(git(&server.at(""), &["ls-remote", &url]).contains("refs/heads/main"));
    git(&server.at(""), &["clone", "-q", &url, "again"]);
    assert!(std::fs::read(server.at("again/file")).unwrap() == noise(3 << 20));
}
