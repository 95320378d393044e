//! The last lines of a job's output, for the message of its failure. Pure.

use crate::spool::strip::CodeStripper;

/// Number of bytes at the end of the output that are read: enough for five lines with their terminal codes.
pub(super) const SCAN_BYTES: usize = 16 * 1024;
const LINES_MAX: usize = 5;
const BYTES_MAX: usize = 1024;

/// Appends the last lines of `output` to a message.
pub(super) fn append_last_lines(message: &mut String, output: &[u8]) {
    let lines = last_lines(output);
    if !lines.is_empty() {
        if !message.is_empty() {
            message.push('\n');
        }
        message.push_str(&lines);
    }
}

/// Returns the last lines as a terminal would show them, without blank ones.
fn last_lines(output: &[u8]) -> String {
    let mut shown = output.to_vec();
    CodeStripper::default().strip(&mut shown);
    let text = String::from_utf8_lossy(&shown);
    let mut lines: Vec<String> =
        text.rsplit('\n').map(visible_text).filter(|line| !line.is_empty()).take(LINES_MAX).collect();
    lines.reverse();
    let all = lines.join("\n");
    let from = all.ceil_char_boundary(all.len().saturating_sub(BYTES_MAX));
    all[from..].to_owned()
}

/// Returns the visible text of a line after carriage returns, without control characters.
fn visible_text(line: &str) -> String {
    let line = line.trim_end();
    let last = line.rsplit('\r').next().unwrap_or_default();
    last.chars().filter(|char| !char.is_control() || *char == '\t').collect::<String>().trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(output: &str, lines: &str) {
        assert_eq!(last_lines(output.as_bytes()), lines, "{output:?}");
    }

    #[test]
    fn the_last_five_lines_are_rendered_as_a_terminal_shows_them() {
        check("", "");
        check("one", "one");
        check("1\n2\n3\n4\n5\n6\n7\n", "3\n4\n5\n6\n7");
        check("a\r\n\r\n\nb\r\n", "a\nb");
        check("\x1b[31mTraceback\x1b[0m\n  at x\n", "Traceback\n  at x");
        check("10%\r50%\r100%\ndone\x07\x00\n", "100%\ndone");
        check("\x1b]0;title\x07grüße\n", "grüße");
    }

    #[test]
    fn the_last_lines_are_limited_in_size_and_always_valid_text() {
        let long = last_lines("ü".repeat(4000).as_bytes());
        assert!(
            long.len() <= BYTES_MAX && long.len() > BYTES_MAX - 4 && long.chars().all(|char| char == 'ü')
        );
        let lines = last_lines(
            "x".repeat(600).as_bytes().iter().chain(b"\n").copied().collect::<Vec<u8>>().repeat(5).as_slice(),
        );
        assert_eq!(lines.len(), BYTES_MAX);
        assert_eq!(last_lines(b"\xff\xfe ok"), "\u{fffd}\u{fffd} ok");
    }

    #[test]
    fn the_last_lines_are_appended_to_the_message() {
        let mut message = "the commands exited with status 3".to_owned();
        append_last_lines(&mut message, b"\n");
        assert_eq!(message, "the commands exited with status 3");
        append_last_lines(&mut message, b"no such file\n");
        assert_eq!(message, "the commands exited with status 3\nno such file");
    }
}
