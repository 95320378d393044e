//! Commands that a client requests, and their variables.

use std::ffi::{OsStr, OsString};

use crate::runner::{login_session::Session, user::Account};

/// Search path for programs if the image sets none.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Maximum number of variables that a client may set.
pub(super) const CLIENT_VARIABLES_MAX: usize = 64;
/// Maximum size of each of them in bytes.
const CLIENT_VARIABLE_BYTES_MAX: usize = 8 * 1024;

/// Returns whether a client may set this variable: display settings, and what Git needs. The job sets all others.
pub(super) fn is_variable_allowed(name: &str, value: &str) -> bool {
    let known = matches!(name, "LANG" | "LANGUAGE" | "TERM" | "COLORTERM" | "NO_COLOR" | "TZ")
        || name.starts_with("LC_")
        || name.starts_with("GIT_");
    let plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    known && plain && name.len() + value.len() <= CLIENT_VARIABLE_BYTES_MAX && !value.contains('\0')
}

/// Returns the whole environment of a program.
pub(super) fn environment(
    session: &Session,
    own: &[(&str, &OsStr)],
    client: &[(String, String)],
) -> Vec<(OsString, OsString)> {
    let Account { name, home, shell, .. } = &session.account;
    let mut all = session.env.clone();
    if !all.iter().any(|(name, _)| name == "PATH") {
        set_variable(&mut all, "PATH", DEFAULT_PATH.as_ref());
    }
    for (variable, value) in [
        ("HOME", home.as_os_str()),
        ("USER", name.as_ref()),
        ("LOGNAME", name.as_ref()),
        ("SHELL", shell.as_os_str()),
    ] {
        set_variable(&mut all, variable, value);
    }
    for (variable, value) in client {
        set_variable(&mut all, variable, value.as_ref());
    }
    for (variable, value) in own {
        set_variable(&mut all, variable, value);
    }
    all
}

fn set_variable(all: &mut Vec<(OsString, OsString)>, name: &str, value: &OsStr) {
    all.retain(|(known, _)| known != name);
    all.push((name.into(), value.into()));
}

/// Splits a command that needs no shell into words. Returns `None` if only a shell can interpret it.
pub(super) fn split_words(command: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut words = Vec::new();
    let mut word: Option<Vec<u8>> = None;
    let mut bytes = command.iter().copied();
    while let Some(byte) = bytes.next() {
        match byte {
            b' ' | b'\t' => words.extend(word.take()),
            b'\'' => loop {
                match bytes.next()? {
                    b'\'' => {
                        word.get_or_insert_default();
                        break;
                    }
                    inside => word.get_or_insert_default().push(inside),
                }
            },
            b'"' => read_quoted(&mut bytes, word.get_or_insert_default())?,
            b'\\' => word.get_or_insert_default().push(bytes.next()?),
            b'|' | b'&' | b';' | b'<' | b'>' | b'(' | b')' | b'$' | b'`' | b'*' | b'?' | b'[' | b']'
            | b'{' | b'}' | b'~' | b'#' | b'!' | b'\n' => return None,
            // An assignment before the program needs a shell.
            b'=' if words.is_empty() => return None,
            plain => word.get_or_insert_default().push(plain),
        }
    }
    words.extend(word.take());
    (!words.is_empty()).then_some(words)
}

fn read_quoted(bytes: &mut impl Iterator<Item = u8>, word: &mut Vec<u8>) -> Option<()> {
    loop {
        match bytes.next()? {
            b'"' => return Some(()),
            b'$' | b'`' => return None,
            b'\\' => match bytes.next()? {
                escaped @ (b'"' | b'\\' | b'$' | b'`') => word.push(escaped),
                other => word.extend([b'\\', other]),
            },
            inside => word.push(inside),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(command: &str, words: Option<&[&str]>) {
        let message = split_words(command.as_bytes()).map(|words| {
            words.into_iter().map(|word| String::from_utf8(word).unwrap()).collect::<Vec<_>>().join("|")
        });
        assert_eq!(message, words.map(|words| words.join("|")), "{command}");
    }

    #[test]
    fn simple_commands_need_no_shell() {
        check("/app/server --port 80", Some(&["/app/server", "--port", "80"]));
        check("  a\t b  ", Some(&["a", "b"]));
        check("echo 'a b' \"c d\" e\\ f", Some(&["echo", "a b", "c d", "e f"]));
        check("echo '' \"\"", Some(&["echo", "", ""]));
        check("echo \"a\\\"b\" x=1", Some(&["echo", "a\"b", "x=1"]));
        check("it'$HOME's", Some(&["it$HOMEs"]));
    }

    #[test]
    fn commands_with_shell_syntax_are_left_to_the_shell() {
        for command in
            ["a | b", "a; b", "a && b", "a > b", "echo $HOME", "echo \"$HOME\"", "A=1 b", "ls *", "", "  "]
        {
            check(command, None);
        }
        check("echo 'open", None);
        check("echo \"open", None);
        check("echo \\", None);
    }

    #[test]
    fn clients_can_set_only_the_allowed_variables() {
        for name in ["LANG", "LC_ALL", "TERM", "GIT_PROTOCOL", "COLORTERM"] {
            assert!(is_variable_allowed(name, "x"), "{name}");
        }
        for name in ["PATH", "LD_PRELOAD", "HOME", "LC_ALL\0", "BASH_ENV", "DSTACK_RUN_NAME"] {
            assert!(!is_variable_allowed(name, "x"), "{name}");
        }
        assert!(!is_variable_allowed("LANG", &"x".repeat(CLIENT_VARIABLE_BYTES_MAX)));
        assert!(!is_variable_allowed("LANG", "a\0b"));
    }

    #[test]
    fn a_session_gets_job_variables_and_those_of_the_user_take_precedence() {
        let session = Session {
            account: Account { name: "ada".into(), home: "/home/ada".into(), ..Account::root() },
            env: vec![
                ("MODEL".into(), "big".into()),
                ("HOME".into(), "/wrong".into()),
                ("LANG".into(), "C".into()),
            ],
            dir: "/".into(),
        };
        let client = [("LANG".to_owned(), "de_DE.UTF-8".to_owned())];
        let all = environment(&session, &[("TERM", "xterm".as_ref())], &client);
        let value = |name: &str| {
            let mut found =
                all.iter().filter(|(known, _)| known == name).map(|(_, value)| value.to_str().unwrap());
            (found.next(), found.next())
        };
        assert_eq!(value("MODEL"), (Some("big"), None));
        assert_eq!(value("HOME"), (Some("/home/ada"), None));
        assert_eq!(value("LANG"), (Some("de_DE.UTF-8"), None));
        assert_eq!(value("PATH"), (Some(DEFAULT_PATH), None));
        assert_eq!(value("TERM"), (Some("xterm"), None));
    }
}
