//! Stories: commands one after the other, and what each came to, held against a file of the tests.
//!
//! What differs from one run to the next is masked: ids, times, ages, ports, directories, the version. With
//! `UPDATE=1` in the environment the files are written instead; read their difference before you commit it.
//!
//! ```ignore
//! let mut story = Story::new("volume", &stage);
//! story.run(&["volume"]);
//! story.run(&["volume", "-o", "json"]);
//! story.end();
//! ```

use std::{
    fmt::Write as _,
    path::Path,
    process::{Command, Output},
};

/// What a command came to.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
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

impl From<Output> for Ran {
    fn from(done: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("a command writes UTF-8");
        Self { code: done.status.code(), stdout: text(done.stdout), stderr: text(done.stderr) }
    }
}

/// Runs a command to its end.
#[track_caller]
pub fn ran(command: &mut Command) -> Ran {
    command.output().unwrap_or_else(|error| panic!("{command:?}: {error}")).into()
}

/// Where commands of a story come from.
pub trait Ground {
    /// What is typed first.
    const PROGRAM: &'static str;
    /// Forms of text that differ each time here, before those that every story knows.
    const FORMS: &'static [Form] = &[];
    /// A directory that goes with the test.
    fn home(&self) -> &Path;
    /// The directory of the kept files.
    fn snapshots(&self) -> &Path;
    /// Text that differs each time, and what is shown for it.
    fn masks(&self) -> Vec<(String, &'static str)>;
    fn command(&self, args: &[&str]) -> Command;
}

#[must_use = "`end` compares it"]
pub struct Story<'a, G: Ground> {
    name: &'static str,
    ground: &'a G,
    masks: Vec<(String, &'static str)>,
    text: String,
    ended: bool,
}

impl<'a, G: Ground> Story<'a, G> {
    /// `name` is that of the file, without its end.
    pub fn new(name: &'static str, ground: &'a G) -> Self {
        Self { name, ground, masks: ground.masks(), text: String::new(), ended: false }
    }

    /// Something else that differs each time, in what ran before too.
    pub fn mask(&mut self, text: &str, mask: &'static str) {
        self.masks.push((text.to_owned(), mask));
    }

    /// Runs a command and writes down what it came to.
    pub fn run(&mut self, args: &[&str]) -> Ran {
        let done = ran(&mut self.ground.command(args));
        self.add(args, &done);
        done
    }

    /// The same for a command that ran already, such as one with more in its environment.
    pub fn add(&mut self, args: &[&str], done: &Ran) {
        let shown: Vec<String> = args.iter().map(|arg| quoted(arg)).collect();
        let line = format!("$ {} {}", G::PROGRAM, shown.join(" "));
        let _ = writeln!(self.text, "{}", masked::<G>(line.trim_end()));
        let _ =
            writeln!(self.text, "exit: {}", done.code.map_or("signal".to_owned(), |code| code.to_string()));
        for (title, stream) in [("stdout", &done.stdout), ("stderr", &done.stderr)] {
            if !stream.is_empty() {
                let end = if stream.ends_with('\n') { "" } else { "[no line end]\n" };
                let _ = write!(self.text, "── {title}\n{}{end}", masked::<G>(stream));
            }
        }
        self.text.push('\n');
    }

    /// Compares the story with its file.
    #[track_caller]
    pub fn end(mut self) {
        self.ended = true;
        let mut text = self.text.trim_end().to_owned();
        for (what, mask) in &self.masks {
            text = text.replace(what, mask);
        }
        let text: Vec<&str> = text.lines().map(str::trim_end).collect();
        let text = text.join("\n") + "\n";
        let path = self.ground.snapshots().join(format!("{}.txt", self.name));
        if std::env::var_os("UPDATE").is_some() {
            let written =
                std::fs::create_dir_all(self.ground.snapshots()).and_then(|()| std::fs::write(&path, text));
            written.unwrap_or_else(|error| panic!("write {}: {error}", path.display()));
            return;
        }
        let kept = std::fs::read_to_string(&path).unwrap_or_default();
        if kept == text {
            return;
        }
        let at = kept.lines().zip(text.lines()).take_while(|(kept, now)| kept == now).count();
        let around = |text: &str| {
            text.lines()
                .skip(at.saturating_sub(3))
                .take(8)
                .map(|line| format!("    {line}\n"))
                .collect::<String>()
        };
        panic!(
            "`{}` differs from line {}\n  kept:\n{}  now:\n{}`UPDATE=1` writes it anew; all of it now:\n{text}",
            path.display(),
            at + 1,
            around(&kept),
            around(&text),
        );
    }
}

impl<G: Ground> Drop for Story<'_, G> {
    fn drop(&mut self) {
        assert!(
            self.ended || std::thread::panicking(),
            "the story `{}` was not compared: `end` it",
            self.name
        );
    }
}

fn quoted(arg: &str) -> String {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./:=@,+%".contains(letter);
    if !arg.is_empty() && arg.chars().all(plain) { arg.to_owned() } else { format!("'{arg}'") }
}

/// A form of text that differs each time: its length where `rest` starts with one, and what is shown for it.
pub type Form = fn(&str) -> Option<(usize, &'static str)>;
const FORMS: [Form; 6] = [uuid, moment, age, address, token, key];

fn masked<G: Ground>(text: &str) -> String {
    mask(text, G::FORMS)
}

fn mask(text: &str, own: &[Form]) -> String {
    let mut out = String::new();
    let (mut at, mut inside, mut aged) = (0, false, false);
    while let Some(letter) = text[at..].chars().next() {
        let found = own.iter().chain(&FORMS).find_map(|form| form(&text[at..])).filter(|_| !inside);
        if let Some((len, mask)) = found {
            out.push_str(mask);
            aged |= mask == "[AGE]" || !own.is_empty();
            at += len;
            continue;
        }
        inside = letter.is_alphanumeric();
        out.push(letter);
        at += letter.len_utf8();
    }
    // A column with ages is as wide as the longest of them; what only this ground knows has no width of its own either.
    if aged { out.split_inclusive('\n').map(narrow).collect() } else { out }
}

/// Two spaces where there are more, but not at the start of the line.
fn narrow(line: &str) -> String {
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

fn uuid(rest: &str) -> Option<(usize, &'static str)> {
    let bytes = rest.as_bytes().get(..36)?;
    let fits = |(at, byte): (usize, &u8)| {
        if matches!(at, 8 | 13 | 18 | 23) { *byte == b'-' } else { byte.is_ascii_hexdigit() }
    };
    bytes.iter().enumerate().all(fits).then_some((36, "[ID]"))
}

/// `2026-11-20T09:00:00…`, and with a space between.
fn moment(rest: &str) -> Option<(usize, &'static str)> {
    let bytes = rest.as_bytes().get(..19)?;
    let fits = |(at, byte): (usize, &u8)| match at {
        4 | 7 => *byte == b'-',
        10 => matches!(byte, b'T' | b' '),
        13 | 16 => *byte == b':',
        _ => byte.is_ascii_digit(),
    };
    if !bytes.iter().enumerate().all(fits) {
        return None;
    }
    let more = rest[19..].find(|letter: char| !(letter.is_ascii_digit() || ".+:Z-".contains(letter)));
    Some((more.map_or(rest.len(), |more| 19 + more), "[TIME]"))
}

/// `5 s ago`, and `now` alone in a cell.
fn age(rest: &str) -> Option<(usize, &'static str)> {
    if let Some(after) = rest.strip_prefix("now") {
        let cell = after.is_empty() || after.starts_with('\n') || after.starts_with("  ");
        return cell.then_some((3, "[AGE]"));
    }
    let digits = rest.find(|letter: char| !letter.is_ascii_digit()).filter(|digits| *digits > 0)?;
    let unit = [" s ago", " min ago", " h ago", " d ago"]
        .into_iter()
        .find(|unit| rest[digits..].starts_with(unit))?;
    Some((digits + unit.len(), "[AGE]"))
}

fn address(rest: &str) -> Option<(usize, &'static str)> {
    let port = rest.strip_prefix("127.0.0.1:")?;
    let digits = port.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(port.len());
    (digits > 0).then_some((10 + digits, "127.0.0.1:[PORT]"))
}

fn token(rest: &str) -> Option<(usize, &'static str)> {
    let secret = rest.strip_prefix("wl_")?;
    let part = |letter: char| letter.is_ascii_alphanumeric() || "-_".contains(letter);
    let len = secret.find(|letter: char| !part(letter)).unwrap_or(secret.len());
    (len > 16).then_some((3 + len, "[TOKEN]"))
}

/// A public key, as OpenSSH writes it.
fn key(rest: &str) -> Option<(usize, &'static str)> {
    let key = rest.strip_prefix("ssh-ed25519 ")?;
    let part = |letter: char| letter.is_ascii_alphanumeric() || "+/=".contains(letter);
    let len = key.find(|letter: char| !part(letter)).unwrap_or(key.len());
    (len > 16).then_some((12 + len, "[KEY]"))
}

#[test]
fn what_differs_each_time_is_masked() {
    let text = "a  0b1d5b2e-8a36-4d0c-9a1c-1f2e3d4c5b6a  now\nb   12 min ago  2026-11-20T09:00:00.5Z\n";
    assert_eq!(mask(text, &[]), "a  [ID]  [AGE]\nb  [AGE]  [TIME]\n");
    assert_eq!(
        mask("at http://127.0.0.1:3999/x, nothing fits now:", &[]),
        "at http://127.0.0.1:[PORT]/x, nothing fits now:"
    );
    assert_eq!(mask("  two   spaces stay", &[]), "  two   spaces stay");
}
