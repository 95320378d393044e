//! Selection of output files by the patterns of `output_glob`.

use std::{
    fs, io,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

/// Maximum number of patterns after the alternatives in braces were expanded. Further alternatives are literal text.
const PATTERNS_MAX: usize = 1_000;
/// Maximum number of braces in one pattern. Further braces are literal text.
const BRACES_MAX: usize = 32;

/// Patterns of paths relative to the output directory, as `**/*.bam`, `logs/**` or `*.{txt,csv}`. No pattern selects
/// everything.
#[derive(Clone, Debug, Default)]
pub(super) struct OutputPatterns(Vec<Vec<Vec<u8>>>);

impl OutputPatterns {
    pub(super) fn new<'a>(patterns: impl IntoIterator<Item = &'a str>) -> Self {
        let mut expanded = Vec::new();
        for pattern in patterns {
            expand_braces(pattern.trim_start_matches("./").as_bytes(), BRACES_MAX, &mut expanded);
        }
        let segments = |pattern: Vec<u8>| {
            let parts = pattern.split(|byte| *byte == b'/').filter(|part| !part.is_empty());
            parts.map(<[u8]>::to_vec).collect()
        };
        Self(expanded.into_iter().map(segments).collect())
    }

    fn matches(&self, path: &[&[u8]]) -> bool {
        self.0.iter().any(|pattern| path_matches(pattern, path))
    }

    /// Removes what no pattern selects, and directories that are empty afterwards. Links are not followed.
    pub(super) fn remove_others(&self, dir: &Path) -> io::Result<()> {
        if self.0.is_empty() || !dir.is_dir() {
            return Ok(());
        }
        self.remove_below(dir, &PathBuf::new()).map(drop)
    }

    /// Returns whether anything is left in the directory.
    fn remove_below(&self, dir: &Path, relative: &Path) -> io::Result<bool> {
        let mut is_kept = false;
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            let relative = relative.join(entry.file_name());
            let parts: Vec<&[u8]> = relative.iter().map(|part| part.as_bytes()).collect();
            if entry.file_type()?.is_dir() {
                if self.remove_below(&entry.path(), &relative)? || self.matches(&parts) {
                    is_kept = true;
                } else {
                    fs::remove_dir(entry.path())?;
                }
            } else if self.matches(&parts) {
                is_kept = true;
            } else {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(is_kept)
    }
}

/// Adds the pattern once for each alternative in its braces.
fn expand_braces(pattern: &[u8], braces_left: usize, expanded: &mut Vec<Vec<u8>>) {
    let is_allowed = braces_left > 0 && expanded.len() < PATTERNS_MAX;
    let Some((before, alternatives, after)) = first_braces(pattern).filter(|_| is_allowed) else {
        expanded.push(pattern.to_vec());
        return;
    };
    for alternative in alternatives {
        expand_braces(&[before, alternative, after].concat(), braces_left - 1, expanded);
    }
}

/// Text before the first braces, their alternatives, and the text after them.
type Braces<'a> = (&'a [u8], Vec<&'a [u8]>, &'a [u8]);

fn first_braces(pattern: &[u8]) -> Option<Braces<'_>> {
    let open =
        pattern.iter().position(|byte| *byte == b'{').filter(|at| *at == 0 || pattern[at - 1] != b'\\')?;
    let (mut depth, mut start, mut found) = (0_usize, open + 1, Vec::new());
    for (at, byte) in pattern.iter().enumerate().skip(open) {
        match byte {
            b'{' => depth += 1,
            b',' if depth == 1 => {
                found.push(&pattern[start..at]);
                start = at + 1;
            }
            b'}' if depth == 1 => {
                found.push(&pattern[start..at]);
                return Some((&pattern[..open], found, &pattern[at + 1..]));
            }
            b'}' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// `**` stands for any number of directories, also none.
fn path_matches(pattern: &[Vec<u8>], path: &[&[u8]]) -> bool {
    // `row[n]`: the patterns so far match the first n parts of the path.
    let mut row = vec![false; path.len() + 1];
    row[0] = true;
    for segment in pattern {
        let mut next = vec![false; path.len() + 1];
        if segment == b"**" {
            let mut is_reached = false;
            for (now, before) in next.iter_mut().zip(&row) {
                is_reached |= *before;
                *now = is_reached;
            }
        } else {
            for (at, part) in path.iter().enumerate() {
                next[at + 1] = row[at] && name_matches(segment, part);
            }
        }
        row = next;
    }
    row[path.len()]
}

/// Matches one name: `*` any text, `?` one character, `[a-z]` and `[!a-z]` one of a set, `\` the next character itself.
fn name_matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut at, mut read) = (0, 0);
    // Where the last `*` is, and how much of the name it stands for: a failure lets it stand for one byte more.
    let mut star: Option<(usize, usize)> = None;
    while read < name.len() {
        if pattern.get(at) == Some(&b'*') {
            star = Some((at, read));
            at += 1;
        } else if let Some((pattern_len, name_len)) = match_one(&pattern[at..], &name[read..]) {
            at += pattern_len;
            read += name_len;
        } else if let Some((star_at, stands_for)) = star {
            star = Some((star_at, stands_for + 1));
            (at, read) = (star_at + 1, stands_for + 1);
        } else {
            return false;
        }
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

/// Matches one element of the pattern with the beginning of the name. Returns the length of both.
fn match_one(pattern: &[u8], name: &[u8]) -> Option<(usize, usize)> {
    let character = name.utf8_chunks().next().and_then(|chunk| chunk.valid().chars().next());
    let (value, width) = character.map_or((u32::from(name[0]), 1), |c| (u32::from(c), c.len_utf8()));
    match pattern {
        [b'?', ..] => Some((1, width)),
        [b'[', rest @ ..] => match match_set(rest, value) {
            Some((true, len)) => Some((1 + len, width)),
            Some((false, _)) => None,
            None => (name[0] == b'[').then_some((1, 1)),
        },
        [b'\\', literal, ..] => (name[0] == *literal).then_some((2, 1)),
        [literal, ..] => (name[0] == *literal).then_some((1, 1)),
        [] => None,
    }
}

/// Returns whether the set contains the character, and its length with the closing bracket. `None` if it is not closed.
fn match_set(text: &[u8], value: u32) -> Option<(bool, usize)> {
    let end = 1 + text.iter().skip(1).position(|byte| *byte == b']')?;
    let set = std::str::from_utf8(&text[..end]).ok()?;
    let (is_negated, set) = match set.strip_prefix(['!', '^']) {
        Some(set) => (true, set),
        None => (false, set),
    };
    let set: Vec<u32> = set.chars().map(u32::from).collect();
    let (mut at, mut contains) = (0, false);
    while at < set.len() {
        if let [first, dash, last, ..] = set[at..]
            && dash == u32::from('-')
        {
            contains |= (first..=last).contains(&value);
            at += 3;
        } else {
            contains |= set[at] == value;
            at += 1;
        }
    }
    Some((contains != is_negated, end + 1))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use windlass_testkit::temp_dir;

    use super::*;

    fn selects(pattern: &str, path: &str) -> bool {
        let parts: Vec<&[u8]> = path.split('/').map(str::as_bytes).collect();
        OutputPatterns::new([pattern]).matches(&parts)
    }

    #[test]
    fn output_patterns_match_names_sets_alternatives_and_directories() {
        for (pattern, yes, no) in [
            ("result.txt", "result.txt", "other/result.txt"),
            ("*.txt", "a.txt", "dir/a.txt"),
            ("*/*.txt", "dir/a.txt", "a.txt"),
            ("**/*.txt", "a.txt", "a.txt/b"),
            ("**/*.txt", "one/two/a.txt", "one/two/a.bam"),
            ("logs/**", "logs/a/b", "log/a"),
            ("logs/**", "logs", "a/logs"),
            ("./a?c", "abc", "ac"),
            ("a?c", "aüc", "a12c"),
            ("[a-c][!x]", "by", "bx"),
            ("sample-{1,2}.{bam,bai}", "sample-2.bai", "sample-3.bai"),
            ("{logs/**,{a,b}*}", "logs/x/y", "c"),
            ("a\\*b", "a*b", "axb"),
            ("[", "[", "a"),
            ("*a*b*c", "xaxbxc", "xaxcxb"),
            ("[]]", "]", "x"),
        ] {
            assert!(selects(pattern, yes), "{pattern} {yes}");
            assert!(!selects(pattern, no), "{pattern} {no}");
        }
        let hostile = format!("{}b", "*a".repeat(500));
        assert!(!selects(&hostile, &"a".repeat(2_000)), "the time is bounded");
        assert_eq!(OutputPatterns::new(["{a}".repeat(10_000).as_str()]).0.len(), 1);
        let many = OutputPatterns::new(["{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}"]);
        assert!(many.0.len() < 2 * PATTERNS_MAX, "{}", many.0.len());
    }

    #[test]
    fn files_that_no_output_pattern_selects_are_removed_and_links_are_not_followed() {
        let scratch = temp_dir("glob").unwrap();
        let (dir, outside) = (scratch.path().join("out"), scratch.path().join("outside"));
        fs::create_dir_all(dir.join("kept/deep")).unwrap();
        fs::create_dir_all(dir.join("temporary")).unwrap();
        fs::create_dir(&outside).unwrap();
        for file in ["out/kept/deep/a.txt", "out/kept/b.bam", "out/temporary/c.bam", "outside/d"] {
            fs::write(scratch.path().join(file), "x").unwrap();
        }
        symlink(&outside, dir.join("link")).unwrap();
        OutputPatterns::new([]).remove_others(&dir).unwrap();
        assert!(dir.join("temporary/c.bam").exists(), "without patterns everything is kept");
        OutputPatterns::new(["**/*.txt"]).remove_others(&dir).unwrap();
        let left = |path: &str| dir.join(path).symlink_metadata().is_ok();
        assert!(left("kept/deep/a.txt") && !left("kept/b.bam") && !left("temporary") && !left("link"));
        assert!(outside.join("d").exists());
        OutputPatterns::new(["x"]).remove_others(&dir.join("missing")).unwrap();
    }
}
