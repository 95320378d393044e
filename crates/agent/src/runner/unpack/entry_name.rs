//! Check of names in an archive. Pure: nothing is looked up.

use std::{ffi::OsStr, os::unix::ffi::OsStrExt as _};

use super::{ArchiveError, ArchiveLimits, MAX_COMPONENT, TopLevel, escape_name};

/// Checked path: its components below the content's root. Empty means the root itself.
pub(super) type PathParts<'a> = Vec<&'a OsStr>;

/// Splits the name of an entry. `.` and doubled or trailing slashes are ignored.
pub(super) fn split_path<'a>(
    name: &'a [u8],
    top: TopLevel,
    limits: &ArchiveLimits,
) -> Result<PathParts<'a>, ArchiveError> {
    let entry = || escape_name(name);
    if name.is_empty() {
        return Err(ArchiveError::NoName);
    }
    if name.contains(&0) {
        return Err(ArchiveError::Nul { entry: entry() });
    }
    if name.len() > limits.path {
        return Err(ArchiveError::PathTooLong { entry: entry(), limit: limits.path });
    }
    if name.starts_with(b"/") {
        return Err(ArchiveError::Absolute { entry: entry() });
    }
    let mut parts = Vec::new();
    for part in name.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => return Err(ArchiveError::Parent { entry: entry() }),
            part if part.len() > MAX_COMPONENT => return Err(ArchiveError::NameTooLong { entry: entry() }),
            part => parts.push(OsStr::from_bytes(part)),
        }
    }
    if parts.len() > limits.depth {
        return Err(ArchiveError::TooDeep { entry: entry(), limit: limits.depth });
    }
    if top == TopLevel::Rename {
        if parts.is_empty() {
            return Err(ArchiveError::NoName);
        }
        parts.remove(0);
    }
    Ok(parts)
}

/// Returns whether a symbolic link at `parts` may point to `target`.
///
/// `..` is allowed at the beginning only, and no more often than there are directories above the link. There it is
/// unambiguous, because the directories above an entry are real ones. After a name it could lead anywhere, as the name
/// may be another link. So a chain of links cannot escape either.
pub(super) fn is_link_inside(parts: &[&OsStr], target: &[u8]) -> bool {
    if parts.is_empty() || target.is_empty() || target.starts_with(b"/") || target.contains(&0) {
        return false;
    }
    let mut up = 0;
    let mut down = 0;
    for part in target.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." if down > 0 => return false,
            b".." => up += 1,
            _ => down += 1,
        }
    }
    up < parts.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(name: &str, top: TopLevel, expected: Option<&str>) {
        let limits = ArchiveLimits { path: 100, depth: 4, ..ArchiveLimits::default() };
        let joined = split_path(name.as_bytes(), top, &limits)
            .ok()
            .map(|parts| parts.iter().map(|part| part.to_str().unwrap()).collect::<Vec<_>>().join("/"));
        assert_eq!(joined.as_deref(), expected, "{name:?}");
    }

    #[test]
    fn entry_names_are_parsed_and_unsafe_ones_refused() {
        check("a/b", TopLevel::Keep, Some("a/b"));
        check("./a//b/", TopLevel::Keep, Some("a/b"));
        check("a/b", TopLevel::Rename, Some("b"));
        check("a", TopLevel::Rename, Some(""));
        check("./", TopLevel::Keep, Some(""));
        check("./", TopLevel::Rename, None);
        check("", TopLevel::Keep, None);
        check("/a", TopLevel::Keep, None);
        check("..", TopLevel::Keep, None);
        check("a/../b", TopLevel::Keep, None);
        check("a\0b", TopLevel::Keep, None);
        check("a/..b/...", TopLevel::Keep, Some("a/..b/..."));
        check("a\\..\\b", TopLevel::Keep, Some("a\\..\\b"));
        check("a/b/c/d/e", TopLevel::Keep, None);
        check(&"x".repeat(101), TopLevel::Keep, None);
        let long = ArchiveLimits::default();
        assert!(matches!(
            split_path(&[b'x'; 256], TopLevel::Keep, &long),
            Err(ArchiveError::NameTooLong { .. })
        ));
    }

    #[test]
    fn links_may_point_only_inside_the_archive() {
        let at = |path: &'static str| path.split('/').map(OsStr::new).collect::<Vec<_>>();
        for (link, target, stays) in [
            ("a", "b", true),
            ("a", "..", false),
            ("d/a", "../b", true),
            ("d/a", "../../b", false),
            ("d/e/a", "../../b/c", true),
            ("a", "/etc", false),
            ("a", "", false),
            ("a", "b/../c", false),
            ("d/e/f/a", "x/../../y", false),
            ("a", "./b/./", true),
            ("a", "b\0", false),
        ] {
            assert_eq!(is_link_inside(&at(link), target.as_bytes()), stays, "{link} -> {target}");
        }
        assert!(!is_link_inside(&[], b"a"), "the top itself must not be a link");
    }
}
