//! A terminal in which a command runs and a test types: tmux, with a separate server for each test.

use std::process::{Command, Stdio};

use windlass_testkit::wait::eventually_ok;

use crate::{TestHome, cli_env::CliEnv, snapshot::SnapshotEnv};

pub(crate) struct Terminal {
    socket: String,
}

impl Terminal {
    /// Runs `windlass ARGS` in a terminal of 120 columns and 40 lines. Its exit code is shown as `exit: N`.
    pub(crate) fn run(ground: &impl SnapshotEnv, args: &[&str]) -> Self {
        Self::command(ground, &ground.command(args))
    }

    pub(crate) fn command(ground: &impl SnapshotEnv, command: &Command) -> Self {
        let mut name = [0_u8; 4];
        getrandom::fill(&mut name).unwrap();
        let socket = ground.home().join(format!("tmux-{:08x}", u32::from_be_bytes(name)));
        let terminal = Self { socket: socket.display().to_string() };
        let quote = |text: &std::ffi::OsStr| format!("'{}'", text.to_string_lossy().replace('\'', "'\\''"));
        let words: Vec<String> =
            std::iter::once(command.get_program()).chain(command.get_args()).map(quote).collect();
        // The pane stays until the test has read it, also after an interrupt, which the shell receives too.
        let script = format!("trap : INT; {}; echo \"exit: $?\"; exec sleep 600", words.join(" "));
        let mut tmux = terminal.tmux(&["-f", "/dev/null", "new-session", "-d", "-x", "120", "-y", "40"]);
        tmux.arg(format!("exec sh -c {}", quote(script.as_ref())));
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => tmux.env(name, value),
                None => tmux.env_remove(name),
            };
        }
        if let Some(dir) = command.get_current_dir() {
            tmux.current_dir(dir);
        }
        let started = tmux.status().expect("run tmux, which this test needs");
        assert!(started.success(), "tmux did not start");
        terminal
    }

    fn tmux(&self, args: &[&str]) -> Command {
        let mut tmux = Command::new("tmux");
        tmux.args(["-S", &self.socket]).args(args).env_remove("TMUX").env("TERM", "xterm-256color");
        tmux.stdin(Stdio::null()).stderr(Stdio::null());
        tmux
    }

    /// Types text, or keys by tmux's names: `Enter`, `C-c`.
    pub(crate) fn keys(&self, keys: &[&str]) {
        assert!(self.tmux(&["send-keys"]).args(keys).status().unwrap().success());
    }

    /// Content of the screen, without colours.
    pub(crate) fn screen(&self) -> String {
        self.capture(&["capture-pane", "-p"])
    }

    /// Content of the screen, with colour sequences.
    pub(crate) fn colours(&self) -> String {
        self.capture(&["capture-pane", "-p", "-e"])
    }

    fn capture(&self, args: &[&str]) -> String {
        let shown = self.tmux(args).output().unwrap();
        String::from_utf8(shown.stdout).unwrap()
    }

    /// Waits until the screen contains a text, and returns the screen.
    #[track_caller]
    pub(crate) fn wait_for_text(&self, part: &str) -> String {
        self.until(&format!("showed `{part}`"), |screen| screen.contains(part))
    }

    /// Waits until the screen satisfies a condition, and returns it.
    #[track_caller]
    pub(crate) fn until(&self, what: &str, is_so: impl Fn(&str) -> bool) -> String {
        eventually_ok(&format!("the screen {what}"), || {
            let screen = self.screen();
            if is_so(&screen) { Ok(screen) } else { Err(screen) }
        })
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.tmux(&["kill-server"]).status();
    }
}

const WAITING: &str = "type: task\nname: later\ncommands: [echo hi]\nschedule:\n  cron: \"0 0 1 1 *\"\n";

#[test]
fn a_confirmation_prompt_repeats_until_it_is_answered() {
    let env = CliEnv::new();
    env.file("later.yml", WAITING);
    env.windlass(&["apply", "-f", "later.yml", "-y", "-d"]).ok();
    let terminal = Terminal::run(&env, &["stop", "later"]);
    terminal.wait_for_text("Stop later? [y/n]");
    terminal.keys(&["perhaps", "Enter"]);
    terminal.keys(&["n", "Enter"]);
    let screen = terminal.wait_for_text("exit: 1");
    assert!(screen.contains("Nothing was stopped."), "{screen}");
    assert_eq!(env.windlass(&["ps", "-o", "name"]).ok().stdout, "later\n");
    let terminal = Terminal::run(&env, &["stop", "--wait", "later"]);
    terminal.wait_for_text("[y/n]");
    terminal.keys(&["yes", "Enter"]);
    terminal.wait_for_text("exit: 0");
    assert_eq!(env.windlass(&["ps", "-o", "name"]).ok().stdout, "");
}

#[test]
fn a_token_that_is_typed_is_not_shown() {
    let env = CliEnv::new();
    let url = env.server.url();
    let terminal = Terminal::run(&env.home, &["login", "--url", &url]);
    terminal.wait_for_text("Token:");
    terminal.keys(&[crate::cli_env::TOKEN, "Enter"]);
    let screen = terminal.wait_for_text("exit: 0");
    assert!(screen.contains("as `admin`") && !screen.contains(crate::cli_env::TOKEN), "{screen}");
}

#[test]
fn colours_are_printed_on_a_terminal_unless_no_color_is_set() {
    let home = TestHome::new();
    let terminal = Terminal::run(&home, &["explain"]);
    terminal.wait_for_text("exit: 0");
    assert!(terminal.colours().contains("\u{1b}[1mCODE"), "{}", terminal.colours());
    let mut plain = home.command(&["explain"]);
    let terminal = Terminal::command(&home, plain.env("NO_COLOR", "1"));
    terminal.wait_for_text("exit: 0");
    assert!(!terminal.colours().contains('\u{1b}'), "{}", terminal.colours());
}
