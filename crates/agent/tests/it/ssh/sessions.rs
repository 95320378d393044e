//! Programs over SSH: with and without a terminal.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    process::Stdio,
    sync::Arc,
};

use parking_lot::Mutex;

use super::{KillOnDrop, SshServer, noise, run, spawn, text, wait_until};

#[test]
fn a_command_returns_its_stdout_stderr_and_exit_code() {
    let server = SshServer::start();
    let output = run(server.ssh(&[]).arg("echo out; echo err >&2; exit 7"), b"");
    assert_eq!(
        (output.status.code(), text(&output.stdout), text(&output.stderr)),
        (Some(7), "out\n".into(), "err\n".into())
    );
}

#[test]
fn a_command_sees_the_variables_and_the_directory_of_the_job() {
    let server = SshServer::with(&[], &[("MODEL", "big one"), ("HOME", "/wrong")]);
    assert_eq!(server.command_output("echo $MODEL; pwd; echo $HOME; echo $USER"), {
        let home = server.home().display().to_string();
        format!("big one\n{home}\n{home}\nroot\n")
    });
    let sent = run(
        server
            .ssh(&["-o", "SetEnv=LC_TEST=yes LD_PRELOAD=no"])
            .arg("echo $LC_TEST$LD_PRELOAD; echo $SSH_CONNECTION"),
        b"",
    );
    let message = text(&sent.stdout);
    assert!(message.starts_with("yes\n127.0.0.1 "), "{message}");
}

#[test]
fn a_program_killed_by_a_signal_is_reported_as_such() {
    let server = SshServer::start();
    let mut ssh = server.ssh(&["-v", "-o", "LogLevel=DEBUG1"]);
    let output = run(ssh.arg("kill -TERM $$"), b"");
    assert_eq!(output.status.code(), Some(255));
    assert!(text(&output.stderr).contains("exit-signal"), "{}", text(&output.stderr));
}

#[test]
fn the_end_of_input_reaches_the_program() {
    let server = SshServer::start();
    let output = run(server.ssh(&[]).arg("cat; echo done"), b"some input");
    assert_eq!(text(&output.stdout), "some inputdone\n");
    // A program that closes its output early is also waited for.
    let output = run(server.ssh(&[]).arg("exec >&-; cat >/dev/null; exit 4"), b"x");
    assert_eq!(output.status.code(), Some(4));
}

#[test]
fn a_program_that_does_not_read_its_input_still_ends() {
    let server = SshServer::start();
    let output = run(server.ssh(&[]).arg("echo first; exit 5"), &noise(30 << 20));
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(5), "first\n".into()));
}

#[test]
fn large_transfers_in_both_directions_at_once_lose_nothing() {
    let server = SshServer::start();
    let sent = noise(64 << 20);
    let output = run(server.ssh(&[]).arg("cat"), &sent);
    assert!(output.stdout == sent, "{} of {} bytes came back right", output.stdout.len(), sent.len());
}

#[test]
fn transfers_of_200_megabytes_use_little_memory() {
    let server = SshServer::start();
    let bytes = 200 << 20;
    let counted = run(server.ssh(&[]).arg("wc -c"), &vec![7; bytes]);
    assert_eq!(text(&counted.stdout).trim(), bytes.to_string());
    let come = run(server.ssh(&[]).arg(format!("head -c {bytes} /dev/zero")), b"");
    assert_eq!(come.stdout.len(), bytes);
    assert!(resident_kib(server.pid()) < 64 * 1024, "{} KiB", resident_kib(server.pid()));
}

pub(super) fn resident_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_slow_program_throttles_its_client_and_uses_little_server_memory() {
    let server = SshServer::start();
    let sent = noise(100 << 20);
    let (count, file) = (sent.len(), server.home().join("go"));
    let command = format!("while [ ! -e {} ]; do sleep 0.02; done; cat", file.display());
    let mut ssh = server.ssh(&[]);
    let mut child = KillOnDrop(spawn(ssh.arg(command).stdin(Stdio::piped()).stdout(Stdio::piped())));
    let (mut input, mut output) = (child.0.stdin.take().unwrap(), child.0.stdout.take().unwrap());
    let fed = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let (feeder, expected) = (Arc::clone(&fed), sent.clone());
    let feed = std::thread::spawn(move || {
        for piece in sent.chunks(64 * 1024) {
            input.write_all(piece).unwrap();
            feeder.fetch_add(piece.len(), std::sync::atomic::Ordering::Relaxed);
        }
    });
    // The client is blocked when nothing is transferred for a while.
    let mut last = (0, std::time::Instant::now());
    wait_until("the client is held", || {
        let now = fed.load(std::sync::atomic::Ordering::Relaxed);
        if now != last.0 {
            last = (now, std::time::Instant::now());
        }
        (now > 0 && last.1.elapsed().as_millis() > 1500).then_some(())
    });
    assert!(last.0 < 16 << 20, "{} bytes were taken and nobody reads", last.0);
    assert!(resident_kib(server.pid()) < 48 * 1024, "{} KiB", resident_kib(server.pid()));
    std::fs::write(file, "").unwrap();
    let mut back = Vec::with_capacity(count);
    output.read_to_end(&mut back).unwrap();
    feed.join().unwrap();
    assert!(back == expected, "{} of {count} bytes came back right", back.len());
}

#[test]
fn an_image_without_a_shell_runs_programs_by_their_path() {
    let server = SshServer::with(&["--shell", "/no/such/shell"], &[]);
    assert_eq!(server.command_output("/bin/echo 'two words' and  more"), "two words and more\n");
    let needs = run(server.ssh(&[]).arg("echo $HOME | cat"), b"");
    assert_eq!(needs.status.code(), Some(127));
    assert!(
        text(&needs.stderr).contains("this image has no shell (/no/such/shell"),
        "{}",
        text(&needs.stderr)
    );
    let missing = run(server.ssh(&[]).arg("/no/such/program"), b"");
    assert_eq!(missing.status.code(), Some(127));
    assert!(text(&missing.stderr).contains("run /no/such/program: "), "{}", text(&missing.stderr));
    let login = run(server.ssh(&["-T"]).stdin(Stdio::null()), b"");
    assert_eq!(login.status.code(), Some(127));
    assert!(text(&login.stderr).contains("ssh HOST /path/to/program"), "{}", text(&login.stderr));
}

#[test]
fn users_can_log_in_to_an_empty_image() {
    let server = SshServer::in_an_empty_image();
    assert_eq!(
        server.command_output("/agent --version"),
        concat!("windlass-agent ", env!("CARGO_PKG_VERSION"), "\n")
    );
    let login = run(&mut server.ssh(&["-T"]), b"");
    assert_eq!(login.status.code(), Some(127));
    assert!(text(&login.stderr).contains("this image has no shell"), "{}", text(&login.stderr));
    let terminal = run(server.ssh(&["-tt"]).arg("/agent --version"), b"");
    let message = text(&terminal.stdout) + &text(&terminal.stderr);
    assert!(message.contains("failed to open a terminal: No such file or directory"), "{message}");
    assert!(message.contains("windlass-agent "), "{message}");
}

#[test]
fn clients_are_disconnected_when_the_server_stops() {
    let mut server = SshServer::start();
    let mut ssh = server.ssh(&[]);
    let mut child =
        KillOnDrop(spawn(ssh.arg("echo in; sleep 1000").stdout(Stdio::piped()).stderr(Stdio::piped())));
    let mut line = String::new();
    BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "in\n");
    server.stop();
    assert_eq!(wait_until("the client ends", || child.0.try_wait().unwrap()).code(), Some(255));
}

#[test]
fn an_editor_can_bootstrap_over_standard_input() {
    let server = SshServer::with(&["--shell", "/bin/bash"], &[]);
    let script = b"echo listening on port 1234\nuname -s\nexit 3\n";
    let output = run(server.ssh(&["-T"]).arg("bash -s"), script);
    assert_eq!(
        (output.status.code(), text(&output.stdout)),
        (Some(3), "listening on port 1234\nLinux\n".into())
    );
    // And as the login shell, without a command.
    let output = run(&mut server.ssh(&["-T"]), b"echo $0; exit 6\n");
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(6), "-bash\n".into()));
}

#[test]
fn a_program_is_hung_up_when_its_client_disconnects() {
    let server = SshServer::start();
    let mut ssh = server.ssh(&[]);
    let mut child = KillOnDrop(spawn(ssh.arg("echo $$; sleep 1000; true").stdout(Stdio::piped())));
    let mut line = String::new();
    BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let pid = line.trim().to_owned();
    assert!(std::fs::exists(format!("/proc/{pid}")).unwrap());
    drop(child);
    wait_until("the shell and what it runs are gone and reaped", || {
        let left = std::fs::read_dir("/proc").unwrap().flatten().any(|entry| {
            std::fs::read_to_string(entry.path().join("stat"))
                .is_ok_and(|stat| stat.split(' ').nth(5) == Some(pid.as_str()))
        });
        (!left).then_some(())
    });
}

#[test]
fn a_nohup_program_survives_the_end_of_its_session() {
    let server = SshServer::start();
    let file = server.home().join("pid");
    let output = run(
        server
            .ssh(&[])
            .arg(format!("nohup sleep 1000 >/dev/null 2>&1 </dev/null & echo $! > {}", file.display())),
        b"",
    );
    assert!(output.status.success());
    let pid = std::fs::read_to_string(&file).unwrap().trim().to_owned();
    let alive = std::fs::exists(format!("/proc/{pid}")).unwrap();
    let _ = run(std::process::Command::new("kill").arg(&pid), b"");
    assert!(alive, "a background program outlives its session");
}

#[test]
fn many_execs_share_one_connection_and_leave_no_zombies() {
    let server = SshServer::start();
    let master = super::forwards::start_master(&server, &[]);
    for round in 0..30 {
        let output = run(master.ssh(&server).arg(format!("echo {round}; exit {round}")), b"");
        assert_eq!((output.status.code(), text(&output.stdout)), (Some(round), format!("{round}\n")));
    }
    wait_until("no child is left", || {
        let children = format!("/proc/{0}/task/{0}/children", server.pid());
        std::fs::read_to_string(children).is_ok_and(|all| all.trim().is_empty()).then_some(())
    });
}

/// `ssh` on a separate terminal.
struct TerminalClient {
    _child: KillOnDrop,
    pty: Arc<pty_process::blocking::Pty>,
    seen: Arc<Mutex<String>>,
}

impl TerminalClient {
    fn new(server: &SshServer, options: &[&str], command: Option<&str>) -> Self {
        let (pty, pts) = pty_process::blocking::open().unwrap();
        pty.resize(pty_process::Size::new(45, 123)).unwrap();
        let mut line = server.options();
        line.extend(["-p".to_owned(), server.address.port().to_string()]);
        line.extend(options.iter().map(|&option| option.to_owned()));
        line.push("root@127.0.0.1".to_owned());
        line.extend(command.map(str::to_owned));
        let child = pty_process::blocking::Command::new("ssh")
            .args(&line)
            .env("TERM", "xterm-256color")
            .env_remove("SSH_AUTH_SOCK")
            .spawn(pts)
            .unwrap_or_else(|error| panic!("start ssh: {error} (Debian package: openssh-client)"));
        let pty = Arc::new(pty);
        let seen = Arc::new(Mutex::new(String::new()));
        let (reader, into) = (Arc::clone(&pty), Arc::clone(&seen));
        std::thread::spawn(move || {
            let mut buffer = [0u8; 4096];
            while let Ok(count @ 1..) = (&*reader).read(&mut buffer) {
                into.lock().push_str(&text(&buffer[..count]));
            }
        });
        Self { _child: KillOnDrop(child), pty, seen }
    }

    fn keys(&self, keys: &str) {
        (&*self.pty).write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until this was shown, and discards the text up to there.
    #[track_caller]
    fn wait_for_text(&self, what: &str) {
        wait_until(&format!("the terminal shows {what:?}"), || {
            let mut seen = self.seen.lock();
            let at = seen.find(what)?;
            seen.drain(..at + what.len());
            Some(())
        });
    }

    fn ends(&mut self) -> Option<i32> {
        wait_until("ssh ends", || self._child.0.try_wait().unwrap()).code()
    }
}

#[test]
fn a_terminal_has_the_client_size_and_follows_its_changes() {
    let server = SshServer::with(&["--shell", "/bin/sh"], &[]);
    let mut typist = TerminalClient::new(&server, &[], None);
    typist.wait_for_text("# ");
    typist.keys("stty size; echo $TERM; tty\r");
    typist.wait_for_text("45 123");
    typist.wait_for_text("xterm-256color");
    typist.wait_for_text("/dev/pts/");
    typist.wait_for_text("# ");
    typist.pty.resize(pty_process::Size::new(30, 99)).unwrap();
    typist.keys("until [ \"$(stty size)\" = '30 99' ]; do sleep 0.05; done; echo fol''lowed\r");
    typist.wait_for_text("followed");
    typist.keys("exit 5\r");
    assert_eq!(typist.ends(), Some(5));
}

#[test]
fn control_c_interrupts_the_program_and_not_the_shell() {
    let server = SshServer::with(&["--shell", "/bin/sh"], &[]);
    let mut typist = TerminalClient::new(&server, &[], None);
    typist.wait_for_text("# ");
    typist.keys("echo star''ted; sleep 1000\r");
    typist.wait_for_text("started");
    typist.keys("\x03");
    typist.wait_for_text("# ");
    typist.keys("echo code $?\r");
    typist.wait_for_text("code 130");
    typist.keys("\x04");
    assert_eq!(typist.ends(), Some(0));
}

#[test]
fn a_command_on_a_terminal_keeps_its_last_output() {
    let server = SshServer::start();
    let mut typist =
        TerminalClient::new(&server, &["-t"], Some("test -t 0 && seq 1 20000; echo last words; exit 9"));
    typist.wait_for_text("20000\r\nlast words");
    assert_eq!(typist.ends(), Some(9));
    // A process that still holds the terminal does not hold the session.
    let mut typist = TerminalClient::new(&server, &["-t"], Some("trap '' HUP; sleep 30 & echo gone; exit 8"));
    typist.wait_for_text("gone");
    assert_eq!(typist.ends(), Some(8));
}

#[test]
fn a_terminal_hangs_up_when_its_client_disconnects() {
    let server = SshServer::with(&["--shell", "/bin/sh"], &[]);
    let typist = TerminalClient::new(&server, &[], None);
    typist.wait_for_text("# ");
    typist.keys("echo pid=$$=\r");
    typist.wait_for_text("pid=");
    typist.wait_for_text("pid=");
    let pid = wait_until("the shell says its number", || {
        let seen = typist.seen.lock();
        Some(seen.split_once('=')?.0.to_owned())
    });
    assert!(std::fs::exists(format!("/proc/{pid}")).unwrap(), "{pid}");
    drop(typist);
    wait_until("the shell is gone", || (!std::fs::exists(format!("/proc/{pid}")).unwrap()).then_some(()));
}
