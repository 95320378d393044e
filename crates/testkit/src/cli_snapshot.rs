//! Transcripts: a sequence of commands with their output, compared with a snapshot file.
//!
//! Values that differ between runs are masked: IDs, times, ages, ports, directories, the version. `insta` compares and
//! stores the files: `cargo insta review` shows each difference and asks, `INSTA_UPDATE=always` accepts all.
//!
//! ```ignore
//! let mut story = CliSnapshot::new("volume", &stage);
//! story.run(&["volume"]);
//! story.run(&["volume", "-o", "json"]);
//! story.end();
//! ```

use std::{
    fmt::Write as _,
    path::Path,
    process::{Command, Output},
    sync::LazyLock,
};

use regex::Regex;

/// Exit code and output of a command.
#[derive(Debug)]
pub struct CommandOutput {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl CommandOutput {
    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{}\n{}", self.stdout, self.stderr);
        self
    }

    #[track_caller]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {}", self.stdout))
    }

    #[track_caller]
    pub fn says(&self, part: &str) {
        assert!(self.stderr.contains(part), "no `{part}` in\n{}", self.stderr);
    }
}

impl From<Output> for CommandOutput {
    fn from(done: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("a command writes UTF-8");
        Self { code: done.status.code(), stdout: text(done.stdout), stderr: text(done.stderr) }
    }
}

/// Runs a command to its end.
#[track_caller]
pub fn run_command(command: &mut Command) -> CommandOutput {
    command.output().unwrap_or_else(|error| panic!("{command:?}: {error}")).into()
}

/// Environment of the commands of a transcript.
pub trait SnapshotEnv {
    /// Program name in the transcript.
    const PROGRAM: &'static str;
    /// Additional patterns to mask, applied after the common ones.
    const PATTERNS: &'static [Pattern] = &[];
    /// A directory that is deleted with the test.
    fn home(&self) -> &Path;
    /// Directory of the snapshot files.
    fn snapshots(&self) -> &Path;
    /// Texts that differ between runs, and their replacements.
    fn masks(&self) -> Vec<(String, &'static str)>;
    fn command(&self, args: &[&str]) -> Command;
    /// Runs a command to its end.
    fn run(&self, args: &[&str]) -> CommandOutput {
        run_command(&mut self.command(args))
    }
}

#[must_use = "`end` compares it"]
pub struct CliSnapshot<'a, G: SnapshotEnv> {
    name: &'static str,
    ground: &'a G,
    masks: Vec<(String, &'static str)>,
    text: String,
    ended: bool,
}

impl<'a, G: SnapshotEnv> CliSnapshot<'a, G> {
    /// `name` is the snapshot's file name without its extension.
    pub fn new(name: &'static str, ground: &'a G) -> Self {
        Self { name, ground, masks: ground.masks(), text: String::new(), ended: false }
    }

    /// Masks another text, also in previous output.
    pub fn mask_patterns(&mut self, text: &str, mask: &'static str) {
        self.masks.push((text.to_owned(), mask));
    }

    /// Runs a command and records its output.
    pub fn run(&mut self, args: &[&str]) -> CommandOutput {
        let done = self.ground.run(args);
        self.add(args, &done);
        done
    }

    /// Records a command that was already run, for example with a different environment.
    pub fn add(&mut self, args: &[&str], done: &CommandOutput) {
        let shown: Vec<String> = args.iter().map(|arg| quote_arg(arg)).collect();
        let line = format!("$ {} {}", G::PROGRAM, shown.join(" "));
        let _ = writeln!(self.text, "{}", mask_for_env::<G>(line.trim_end()));
        let _ =
            writeln!(self.text, "exit: {}", done.code.map_or("signal".to_owned(), |code| code.to_string()));
        for (title, stream) in [("stdout", &done.stdout), ("stderr", &done.stderr)] {
            if !stream.is_empty() {
                let end = if stream.ends_with('\n') { "" } else { "[no line end]\n" };
                let _ = write!(self.text, "── {title}\n{}{end}", mask_for_env::<G>(stream));
            }
        }
        self.text.push('\n');
    }

    /// Compares the transcript with its snapshot.
    #[track_caller]
    pub fn end(mut self) {
        self.ended = true;
        let mut text = self.text.trim_end().to_owned();
        for (what, mask) in &self.masks {
            text = text.replace(what, mask);
        }
        let text: Vec<&str> = text.lines().map(str::trim_end).collect();
        let text = text.join("\n") + "\n";
        let mut settings = insta::Settings::new();
        settings.set_snapshot_path(self.ground.snapshots());
        settings.set_prepend_module_to_snapshot(false);
        settings.set_omit_expression(true);
        settings.set_description("Commands and what each came to");
        settings.bind(|| insta::assert_snapshot!(self.name, text));
    }
}

impl<G: SnapshotEnv> Drop for CliSnapshot<'_, G> {
    fn drop(&mut self) {
        assert!(
            self.ended || std::thread::panicking(),
            "the story `{}` was not compared: `end` it",
            self.name
        );
    }
}

fn quote_arg(arg: &str) -> String {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./:=@,+%".contains(letter);
    if !arg.is_empty() && arg.chars().all(plain) { arg.to_owned() } else { format!("'{arg}'") }
}

/// A regular expression and the replacement of its matches.
pub type Pattern = (&'static str, &'static str);

const AGE_PATTERN: &str = "[AGE]";
const PATTERNS: [Pattern; 7] = [
    (r"\b[[:xdigit:]]{8}-(?:[[:xdigit:]]{4}-){3}[[:xdigit:]]{12}\b", "[ID]"),
    (r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.+:Z-]*", "[TIME]"),
    (r"\b\d+ (?:s|min|h|d) ago\b", AGE_PATTERN),
    // Alone in a cell.
    (r"(?m)\bnow($|  )", "[AGE]$1"),
    (r"\b127\.0\.0\.1:\d+", "127.0.0.1:[PORT]"),
    (r"\bwl_[[:alnum:]_-]{17,}", "[TOKEN]"),
    (r"\bssh-ed25519 [[:alnum:]+/=]{17,}", "[KEY]"),
];

fn mask_for_env<G: SnapshotEnv>(text: &str) -> String {
    mask(text, G::PATTERNS)
}

fn mask(text: &str, own: &[Pattern]) -> String {
    static KNOWN: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| compile_patterns(&PATTERNS));
    let mut out = text.to_owned();
    let own_patterns = compile_patterns(own);
    for (pattern, mask) in KNOWN.iter().chain(&own_patterns) {
        out = pattern.replace_all(&out, *mask).into_owned();
    }
    // A column with ages is as wide as the longest of them. The output of other programs may have any width.
    let is_narrowed = out.contains(AGE_PATTERN) || (!own.is_empty() && out != text);
    if is_narrowed { out.split_inclusive('\n').map(collapse_spaces).collect() } else { out }
}

fn compile_patterns(patterns: &[Pattern]) -> Vec<(Regex, &'static str)> {
    let compile = |(pattern, mask): &Pattern| (Regex::new(pattern).expect("a pattern of the tests"), *mask);
    patterns.iter().map(compile).collect()
}

/// Collapses more than two spaces to two, except at the start of the line.
fn collapse_spaces(line: &str) -> String {
    let text = line.trim_start_matches(' ');
    let mut out = line[..line.len() - text.len()].to_owned();
    let mut spaces = 0;
    for letter in text.chars() {
        spaces = if letter == ' ' { spaces + 1 } else { 0 };
        if spaces <= 2 {
            out.push(letter);
        }
    }
    out
}

#[test]
fn ids_ages_times_and_ports_are_masked_in_snapshots() {
    let text = "a  0b1d5b2e-8a36-4d0c-9a1c-1f2e3d4c5b6a  now\nb   12 min ago  2026-11-20T09:00:00.5Z\n";
    assert_eq!(mask(text, &[]), "a  [ID]  [AGE]\nb  [AGE]  [TIME]\n");
    assert_eq!(
        mask("at http://127.0.0.1:3999/x, nothing fits now:", &[]),
        "at http://127.0.0.1:[PORT]/x, nothing fits now:"
    );
    assert_eq!(mask("  two   spaces stay", &[]), "  two   spaces stay");
    assert_eq!(mask("of 1/2)   busy", &[(r"\d+/\d+(\))", "n/m$1")]), "of n/m)  busy");
}
