//! Which names are allowed, and names for runs that were given none.

use crate::error::{Error, Result};

/// Users: letters, digits, `-` and `_`, at most 60.
pub fn user(name: &str) -> Result<()> {
    check("username", name, 60, |byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
}

/// Projects: letters, digits, `-` and `_`, at most 50.
pub fn project(name: &str) -> Result<()> {
    check("project_name", name, 50, |byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
}

/// Secrets: letters, digits, `-` and `_`, at most 200.
pub fn secret(name: &str) -> Result<()> {
    check("name", name, 200, |byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
}

/// Runs, fleets, volumes, gateways: `[a-z][a-z0-9-]{1,40}`.
pub fn resource(field: &str, name: &str) -> Result<()> {
    check(field, name, 41, |byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')?;
    if name.len() < 2 || !name.as_bytes()[0].is_ascii_lowercase() {
        return Err(bad(field));
    }
    Ok(())
}

/// SHA-256 in hexadecimal: how uploads are named.
pub fn hash(field: &str, text: &str) -> Result<()> {
    check(field, text, 64, |byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))?;
    if text.len() == 64 { Ok(()) } else { Err(bad(field)) }
}

/// The name itself is not repeated: it may hold anything.
fn bad(field: &str) -> Error {
    Error::refused(format!("invalid {field}: only certain letters and lengths are allowed"))
}

/// Names are typed into command lines: one that starts with a dash would be read as an option there.
fn check(field: &str, name: &str, len_max: usize, allowed: impl Fn(u8) -> bool) -> Result<()> {
    let fits = (1..=len_max).contains(&name.len()) && !name.starts_with('-');
    if fits && name.bytes().all(allowed) { Ok(()) } else { Err(bad(field)) }
}

const ADJECTIVES: [&str; 64] = [
    "amber", "ample", "ashen", "balmy", "blithe", "bold", "breezy", "brisk", "calm", "candid", "cheery",
    "chilly", "clever", "copper", "coral", "cosy", "crisp", "curly", "dapper", "deft", "dewy", "eager",
    "earnest", "fabled", "fleet", "fluffy", "frosty", "gentle", "gilded", "glad", "golden", "hardy", "hazel",
    "humble", "ivory", "jolly", "keen", "limber", "lively", "lucid", "mellow", "merry", "mild", "misty",
    "nimble", "noble", "olive", "patient", "plucky", "polite", "quiet", "rosy", "rustic", "sandy", "silver",
    "snug", "spry", "steady", "sunny", "swift", "tidy", "velvet", "warm", "witty",
];

const ANIMALS: [&str; 64] = [
    "alpaca", "auk", "badger", "bat", "bear", "beaver", "bison", "bream", "bunting", "camel", "carp", "cat",
    "cod", "colt", "condor", "coot", "crab", "crane", "crow", "deer", "dingo", "dove", "duck", "eagle",
    "egret", "eland", "elk", "falcon", "ferret", "finch", "fox", "gecko", "gnu", "goose", "gull", "hare",
    "hawk", "heron", "ibex", "jay", "kite", "koala", "lark", "lemur", "lynx", "marten", "mole", "moose",
    "newt", "otter", "owl", "panda", "perch", "puffin", "quail", "raven", "robin", "seal", "stoat", "swan",
    "tapir", "toad", "wren", "yak",
];

/// `<adjective>-<animal>-<n>`; `n` grows with the attempts, when names are taken.
pub fn generate(attempt: u8) -> Result<String, getrandom::Error> {
    let mut bits = [0_u8; 4];
    getrandom::fill(&mut bits)?;
    let adjective = ADJECTIVES[usize::from(bits[0]) % ADJECTIVES.len()];
    let animal = ANIMALS[usize::from(bits[1]) % ANIMALS.len()];
    let spread = 10_u16.pow(u32::from(attempt.min(3)));
    let n = u16::from_be_bytes([bits[2], bits[3]]) % (9 * spread) + 1;
    Ok(format!("{adjective}-{animal}-{n}"))
}

#[cfg(test)]
mod tests {
    use super::{generate, hash, project, resource, secret, user};

    const HOSTILE: &[&str] = &[
        "",
        "../x",
        "/etc/passwd",
        "a\0b",
        "a\\b",
        "a b",
        "a\nb",
        "\u{202e}abc",
        "caf\u{e9}",
        "a/../b",
        ".",
        "..",
        "$(x)",
        "%2e%2e",
        "a;b",
        "-rf",
        "--help",
    ];

    #[test]
    fn hostile_names_are_refused_everywhere() {
        let long = "a".repeat(300);
        for name in HOSTILE.iter().copied().chain([long.as_str()]) {
            assert!(user(name).is_err(), "{name:?}");
            assert!(project(name).is_err(), "{name:?}");
            assert!(secret(name).is_err(), "{name:?}");
            assert!(resource("name", name).is_err(), "{name:?}");
            assert!(hash("hash", name).is_err(), "{name:?}");
        }
        assert!(resource("name", "a").is_err() && resource("name", "9a").is_err());
    }

    #[test]
    fn generated_names_are_allowed_names() {
        for attempt in 0..20 {
            let name = generate(attempt).unwrap();
            assert!(resource("name", &name).is_ok(), "{name}");
            assert_eq!(name.split('-').count(), 3);
        }
    }
}
