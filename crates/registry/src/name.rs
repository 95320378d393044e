//! Names of images: `[HOST[:PORT]/]PATH[:TAG][@DIGEST]`.

use std::{fmt, str::FromStr};

/// Registry of names without a host.
const DOCKER_HUB: &str = "docker.io";
/// API host of Docker Hub.
const DOCKER_HUB_HOST: &str = "registry-1.docker.io";
/// Implied namespace of official Docker Hub images.
const DOCKER_HUB_OFFICIAL: &str = "library";
const TAG_BYTES_MAX: usize = 128;
const PATH_BYTES_MAX: usize = 255;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid image name `{name}`: {problem}")]
pub struct NameError {
    pub name: String,
    pub problem: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Version {
    Tag(String),
    /// `sha256:…`; a tag next to it is ignored.
    Digest(String),
}

impl Version {
    pub fn as_str(&self) -> &str {
        match self {
            Self::Tag(text) | Self::Digest(text) => text,
        }
    }
}

/// Normalised image name: `debian` equals `docker.io/library/debian:latest`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ImageName {
    /// Host and port; `docker.io` for names without a host.
    registry: String,
    /// Path without the host, with `library/` for official Docker Hub images.
    repository: String,
    version: Version,
}

impl ImageName {
    /// Host and port as users write them.
    pub fn registry(&self) -> &str {
        &self.registry
    }

    /// Returns whether this is the registry of names without a host.
    pub fn is_on_docker_hub(&self) -> bool {
        self.registry == DOCKER_HUB
    }

    /// Host and port of the registry API.
    pub fn api_host(&self) -> &str {
        if self.is_on_docker_hub() { DOCKER_HUB_HOST } else { &self.registry }
    }

    pub fn repository(&self) -> &str {
        &self.repository
    }

    pub fn version(&self) -> &Version {
        &self.version
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let separator = match &self.version {
            Version::Tag(_) => ':',
            Version::Digest(_) => '@',
        };
        write!(f, "{}/{}{separator}{}", self.registry, self.repository, self.version.as_str())
    }
}

impl FromStr for ImageName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let fail = |problem| NameError { name: text.to_owned(), problem };
        let (name, digest) = match text.split_once('@') {
            Some((name, digest)) => (name, Some(digest)),
            None => (text, None),
        };
        if digest.is_some_and(|digest| !is_digest(digest)) {
            return Err(fail("expected `sha256:` and 64 hexadecimal digits after `@`"));
        }
        // A colon after the last slash starts the tag; before it, it belongs to the port.
        let last = name.rfind('/').map_or(0, |slash| slash + 1);
        let (name, tag) = match name[last..].find(':') {
            Some(colon) => (&name[..last + colon], Some(&name[last + colon + 1..])),
            None => (name, None),
        };
        if tag.is_some_and(|tag| !is_tag(tag)) {
            return Err(fail(
                "expected a tag of at most 128 letters, digits, `_`, `.` or `-` that does not start with `.` or `-`",
            ));
        }
        let (registry, path) = match name.split_once('/') {
            Some((host, path)) if host.contains(['.', ':']) || host == "localhost" => (host, path),
            _ => (DOCKER_HUB, name),
        };
        if !is_host(registry) {
            return Err(fail("expected a registry host with an optional port"));
        }
        if !is_path(path) {
            return Err(fail(
                "expected a path of lower-case letters and digits separated by `.`, `_`, `-` or `/`",
            ));
        }
        let repository = if registry == DOCKER_HUB && !path.contains('/') {
            format!("{DOCKER_HUB_OFFICIAL}/{path}")
        } else {
            path.to_owned()
        };
        let version = match digest {
            Some(digest) => Version::Digest(digest.to_owned()),
            None => Version::Tag(tag.unwrap_or("latest").to_owned()),
        };
        Ok(Self { registry: registry.to_owned(), repository, version })
    }
}

pub(crate) fn is_digest(text: &str) -> bool {
    text.strip_prefix("sha256:").is_some_and(|hex| {
        hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
    })
}

fn is_tag(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-');
    (1..=TAG_BYTES_MAX).contains(&text.len()) && text.bytes().all(allowed) && !text.starts_with(['.', '-'])
}

fn is_host(text: &str) -> bool {
    let (host, port) = text.rsplit_once(':').unwrap_or((text, "1"));
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-');
    !host.is_empty() && host.bytes().all(allowed) && !host.starts_with('-') && port.parse::<u16>().is_ok()
}

/// Returns whether the text is a path: components separated by slashes, each of letters and digits, separated by `.`,
/// `_`, `__` or dashes.
fn is_path(text: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let is_part = |part: &str| {
        let separators = part.split(|letter: char| is_letter(u8::try_from(letter).unwrap_or(b'/')));
        let starts_and_ends = part.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
            && part.ends_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit());
        let separated = separators
            .filter(|between| !between.is_empty())
            .all(|between| matches!(between, "." | "_" | "__") || between.bytes().all(|byte| byte == b'-'));
        starts_and_ends && separated
    };
    (1..=PATH_BYTES_MAX).contains(&text.len()) && text.split('/').all(is_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGEST: &str = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[track_caller]
    fn check(name: &str, registry: &str, repository: &str, version: &str) {
        let parsed: ImageName = name.parse().unwrap();
        let found = (parsed.registry(), parsed.repository(), parsed.version().as_str());
        assert_eq!(found, (registry, repository, version), "{name}");
        assert_eq!(parsed.to_string().parse::<ImageName>().unwrap(), parsed, "{name}");
    }

    #[test]
    fn image_names_are_parsed_as_docker_parses_them() {
        check("debian", "docker.io", "library/debian", "latest");
        check("debian:12", "docker.io", "library/debian", "12");
        check("docker.io/debian", "docker.io", "library/debian", "latest");
        check("a/b:1", "docker.io", "a/b", "1");
        check("ghcr.io/a/b", "ghcr.io", "a/b", "latest");
        check("127.0.0.1:5000/a", "127.0.0.1:5000", "a", "latest");
        check("localhost/a:2", "localhost", "a", "2");
        check(&format!("a@{DIGEST}"), "docker.io", "library/a", DIGEST);
        check(&format!("r.io:1/a:3@{DIGEST}"), "r.io:1", "a", DIGEST);
        check("x/a__b.c-d--e_f:V1_.-", "docker.io", "x/a__b.c-d--e_f", "V1_.-");
        assert_eq!("debian".parse::<ImageName>().unwrap().api_host(), "registry-1.docker.io");
        assert_eq!("ghcr.io/a".parse::<ImageName>().unwrap().api_host(), "ghcr.io");
    }

    #[test]
    fn an_invalid_image_name_is_rejected_and_quoted_in_the_error() {
        for name in [
            "",
            "/",
            "a/",
            "/a",
            "A",
            "a b",
            "a:",
            "a:-x",
            "-a",
            "a..b",
            "a___b",
            "a-",
            "a@sha256:0",
            "a@md5:00",
            "ghcr.io/",
            "r.io:port/a",
            "r.io:70000/a",
            "a//b",
            "a/../b",
            "--privileged",
            "é",
        ] {
            let refused = name.parse::<ImageName>().unwrap_err();
            assert!(refused.to_string().contains(&format!("`{name}`")), "{refused}");
        }
        assert!("a".repeat(256).parse::<ImageName>().is_err());
        assert!(format!("a:{}", "b".repeat(129)).parse::<ImageName>().is_err());
    }
}
