//! Image names: `[HOST[:PORT]/]PATH[:TAG][@DIGEST]`. Pure.

/// An image name, parsed as far as a pull needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ImageReference {
    /// Includes the registry's host, without tag and digest; as written.
    pub(super) repository: String,
    pub(super) version: ImageVersion,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ImageVersion {
    Tag(String),
    /// `sha256:…`; an additional tag is ignored.
    Digest(String),
}

/// Registry of a name without a host.
const DEFAULT_REGISTRY: &str = "docker.io";

impl ImageReference {
    pub(super) fn parse(name: &str) -> Self {
        let (name, digest) = match name.split_once('@') {
            Some((name, digest)) => (name, Some(digest).filter(|digest| !digest.is_empty())),
            None => (name, None),
        };
        // A colon after the last slash starts the tag; before it, it starts the registry's port.
        let path = name.rfind('/').map_or(0, |slash| slash + 1);
        let (repository, tag) = match name.get(path..).and_then(|last| last.find(':')) {
            Some(colon) => {
                let (repository, tag) = name.split_at(path + colon);
                (repository, tag.strip_prefix(':').filter(|tag| !tag.is_empty()))
            }
            None => (name, None),
        };
        let version = match (digest, tag) {
            (Some(digest), _) => ImageVersion::Digest(digest.to_owned()),
            (None, Some(tag)) => ImageVersion::Tag(tag.to_owned()),
            (None, None) => ImageVersion::Tag("latest".to_owned()),
        };
        Self { repository: repository.to_owned(), version }
    }

    /// Version argument of the engine's pull. Never empty: that would pull all tags.
    pub(super) fn version(&self) -> &str {
        match &self.version {
            ImageVersion::Tag(text) | ImageVersion::Digest(text) => text,
        }
    }

    /// Returns whether the name may refer to another image tomorrow, by convention.
    pub(super) fn moves(&self) -> bool {
        self.version == ImageVersion::Tag("latest".to_owned())
    }

    /// Returns the registry's host, with its port.
    pub(super) fn registry(&self) -> &str {
        match self.repository.split_once('/') {
            Some((host, _)) if host.contains(['.', ':']) || host == "localhost" => host,
            Some(_) | None => DEFAULT_REGISTRY,
        }
    }

    /// Returns the name with an explicit version.
    pub(super) fn full(&self) -> String {
        match &self.version {
            ImageVersion::Tag(tag) => format!("{}:{tag}", self.repository),
            ImageVersion::Digest(digest) => format!("{}@{digest}", self.repository),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn check(name: &str, registry: &str, repository: &str, version: &str, moves: bool) {
        let parsed = ImageReference::parse(name);
        let found = (parsed.registry(), parsed.repository.as_str(), parsed.version(), parsed.moves());
        assert_eq!(found, (registry, repository, version, moves), "{name}");
    }

    #[test]
    fn image_references_are_parsed() {
        check("debian", "docker.io", "debian", "latest", true);
        check("debian:12", "docker.io", "debian", "12", false);
        check("debian:latest", "docker.io", "debian", "latest", true);
        check("a/b:1", "docker.io", "a/b", "1", false);
        check("ghcr.io/a/b", "ghcr.io", "ghcr.io/a/b", "latest", true);
        check("127.0.0.1:5000/a", "127.0.0.1:5000", "127.0.0.1:5000/a", "latest", true);
        check("localhost/a:2", "localhost", "localhost/a", "2", false);
        check("a@sha256:00ff", "docker.io", "a", "sha256:00ff", false);
        check("r.io:1/a:3@sha256:00ff", "r.io:1", "r.io:1/a", "sha256:00ff", false);
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: windlass_testkit::fuzz_cases(),
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn fuzz_of_image_references(
            words in prop::collection::vec(
                prop::sample::select(&["a", "debian", ":", "/", "@", "sha256:", "latest", ".", "localhost", "5000", "-", "é", " "][..]),
                0..10,
            ),
            noise in "(?s).{0,40}",
        ) {
            for name in [words.concat(), noise] {
                let parsed = ImageReference::parse(&name);
                prop_assert!(!parsed.version().is_empty(), "{parsed:?} would pull every tag");
                prop_assert!(!parsed.registry().is_empty(), "{parsed:?}");
                let _ = parsed.full();
            }
        }
    }
}
