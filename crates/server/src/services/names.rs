//! Validation of names, and generated names for runs that have none.

use crate::error::{Error, Result};

/// Checks the name of a user: letters, digits, `-` and `_`, at most 60.
pub fn check_user(name: &str) -> Result<()> {
    check_word("username", name, 60)
}

/// Checks the name of a project: letters, digits, `-` and `_`, at most 50.
pub fn check_project(name: &str) -> Result<()> {
    check_word("project_name", name, 50)
}

/// Checks the name of a secret: letters, digits, `-` and `_`, at most 200.
pub fn check_secret(name: &str) -> Result<()> {
    check_word("name", name, 200)
}

/// Checks the name of a token: letters, digits, `-` and `_`, at most 60.
pub fn check_token(name: &str) -> Result<()> {
    check_word("name", name, 60)
}

fn check_word(field: &str, name: &str, len_max: usize) -> Result<()> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    if has_only(name, len_max, allowed) {
        return Ok(());
    }
    let rule = format!("expected 1 to {len_max} letters, digits, `-` or `_`, not starting with `-`");
    Err(invalid_name(field, &rule))
}

/// Checks the name of a run, fleet, volume or gateway: `[a-z][a-z0-9-]{1,40}`.
pub fn check_resource(field: &str, name: &str) -> Result<()> {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let starts = name.as_bytes().first().is_some_and(u8::is_ascii_lowercase);
    if has_only(name, 41, allowed) && name.len() >= 2 && starts {
        return Ok(());
    }
    let rule = "expected 2 to 41 lowercase letters, digits or dashes, starting with a letter";
    Err(invalid_name(field, rule))
}

/// Checks the name of an upload: SHA-256 in hexadecimal.
pub fn check_hash(field: &str, text: &str) -> Result<()> {
    let allowed = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    if has_only(text, 64, allowed) && text.len() == 64 {
        return Ok(());
    }
    Err(invalid_name(field, "expected 64 lowercase hexadecimal digits"))
}

/// Error for an invalid name. The name itself is not repeated: it may contain anything.
fn invalid_name(field: &str, rule: &str) -> Error {
    Error::refused(format!("invalid {field}: {rule}"))
}

/// Names are typed into command lines: one that starts with a dash would be parsed as an option there.
fn has_only(name: &str, len_max: usize, allowed: impl Fn(u8) -> bool) -> bool {
    (1..=len_max).contains(&name.len()) && !name.starts_with('-') && name.bytes().all(allowed)
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

/// Generates `<adjective>-<animal>-<n>`; `n` grows with the attempts, if names are in use.
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
    use super::{check_hash, check_project, check_resource, check_secret, check_user, generate};

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
            assert!(check_user(name).is_err(), "{name:?}");
            assert!(check_project(name).is_err(), "{name:?}");
            assert!(check_secret(name).is_err(), "{name:?}");
            assert!(check_resource("name", name).is_err(), "{name:?}");
            assert!(check_hash("hash", name).is_err(), "{name:?}");
        }
        assert!(check_resource("name", "a").is_err() && check_resource("name", "9a").is_err());
    }

    #[test]
    fn a_refused_name_lists_the_allowed_characters() {
        let reported = |refused: crate::error::Result<()>| refused.unwrap_err().to_string();
        assert!(reported(check_user("a b")).contains("1 to 60 letters, digits, `-` or `_`"));
        assert!(
            reported(check_resource("name", "A")).contains("2 to 41 lowercase letters, digits or dashes")
        );
    }

    #[test]
    fn generated_names_are_valid() {
        for attempt in 0..20 {
            let name = generate(attempt).unwrap();
            assert!(check_resource("name", &name).is_ok(), "{name}");
            assert_eq!(name.split('-').count(), 3);
        }
    }
}
