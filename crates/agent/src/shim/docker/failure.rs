//! What the engine's errors mean. Pure: an error of the client in, an error of the runtime out.
//!
//! Engines pass a registry's refusal on as text, so the words are all there is to go by. The table below was
//! taken from Docker 20.10 and Podman 4.3; words that are not in it end as `Failed`, with the engine's text.

use bollard::errors::Error;

use crate::shim::runtime::RuntimeError;

/// What came of asking a registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Registry {
    /// No such repository, tag or digest.
    Unknown,
    /// Credentials missing, wrong or not enough.
    Refuses,
    /// Docker's hub says the same of a private and of an absent repository.
    UnknownOrRefuses,
    /// It could not be asked: no answer is no verdict about the image.
    Unreachable,
    /// The engine's own disk is full.
    DiskFull,
    /// The name or the platform cannot be served, whoever asks.
    Unusable,
    /// Something else, in the engine's words.
    Odd,
}

const DISK_FULL: &[&str] = &["no space left on device", "disk quota exceeded"];
const UNKNOWN_OR_REFUSES: &[&str] = &["repository does not exist or may require"];
const REFUSES: &[&str] = &[
    "unauthorized",
    "authentication required",
    "no basic auth credentials",
    "incorrect username or password",
    "access denied",
    "access to the resource is denied",
    "invalid username/password",
    "403 forbidden",
    "401 unauthorized",
];
const UNKNOWN: &[&str] =
    &["manifest unknown", "name unknown", "not found", "no such image", "image not known", "404 (not found)"];
const UNUSABLE: &[&str] =
    &["invalid reference format", "no matching manifest", "no image found in", "must be lower"];
const UNREACHABLE: &[&str] = &[
    "connection refused",
    "connection reset",
    "no such host",
    "i/o timeout",
    "tls handshake timeout",
    "client.timeout exceeded",
    "request canceled while waiting",
    "context deadline exceeded",
    "network is unreachable",
    "no route to host",
    "temporary failure in name resolution",
    "server misbehaving",
    "bad gateway",
    "service unavailable",
    "gateway timeout",
    "toomanyrequests",
];

/// Reads the engine's words about a registry. The order matters: a full disk also mentions the layer it failed
/// on, and an unreachable host may be "not found" by a name server.
pub(super) fn registry(said: &str) -> Registry {
    let said = said.to_lowercase();
    let any = |words: &[&str]| words.iter().any(|word| said.contains(word));
    let table = [
        (DISK_FULL, Registry::DiskFull),
        (UNREACHABLE, Registry::Unreachable),
        (UNKNOWN_OR_REFUSES, Registry::UnknownOrRefuses),
        (REFUSES, Registry::Refuses),
        (UNUSABLE, Registry::Unusable),
        (UNKNOWN, Registry::Unknown),
    ];
    table.into_iter().find(|(words, _)| any(words)).map_or(Registry::Odd, |(_, verdict)| verdict)
}

/// Whether the engine could not be reached or did not finish its answer.
pub(super) fn is_away(error: &Error) -> bool {
    #[expect(clippy::wildcard_enum_match_arm, reason = "the client's list of errors grows with its features")]
    match error {
        Error::RequestTimeoutError
        | Error::SocketNotFoundError(_)
        | Error::IOError { .. }
        | Error::HyperResponseError { .. }
        | Error::HyperLegacyError { .. } => true,
        // Podman and newer engines say 503 while they come up or go down.
        Error::DockerResponseServerError { status_code, .. } => *status_code == 503,
        _ => false,
    }
}

pub(super) fn status(error: &Error) -> Option<u16> {
    let Error::DockerResponseServerError { status_code, .. } = error else { return None };
    Some(*status_code)
}

/// The words of the engine, without the client's own in front.
pub(super) fn said(error: &Error) -> String {
    #[expect(clippy::wildcard_enum_match_arm, reason = "the client's list of errors grows with its features")]
    match error {
        Error::DockerResponseServerError { message, .. } => message.trim().to_owned(),
        Error::DockerStreamError { error } => error.trim().to_owned(),
        other => other.to_string(),
    }
}

/// The meaning of an error of any call but a pull.
pub(super) fn of_call(what: impl Into<String>, error: Error) -> RuntimeError {
    let what = what.into();
    if is_away(&error) {
        return RuntimeError::Away { what, source: Box::new(error) };
    }
    let words = said(&error);
    if registry(&words) == Registry::DiskFull {
        return RuntimeError::NoDisk { what };
    }
    match status(&error) {
        // The engine understood and says no: asking again changes nothing.
        Some(400 | 403 | 404 | 409) => RuntimeError::Refused { what, why: words },
        Some(_) | None => RuntimeError::Failed { what, source: Box::new(error) },
    }
}

/// The meaning of an error of a pull or of asking a registry through the engine.
pub(super) fn of_registry(image: &str, with_credentials: bool, error: Error) -> RuntimeError {
    let what = image.to_owned();
    if is_away(&error) {
        return RuntimeError::Away { what: format!("pull image {image}"), source: Box::new(error) };
    }
    match registry(&said(&error)) {
        Registry::Unknown => RuntimeError::NoImage { what },
        Registry::UnknownOrRefuses if with_credentials => RuntimeError::Unauthorized { what },
        Registry::UnknownOrRefuses => RuntimeError::NoImage { what },
        Registry::Refuses => RuntimeError::Unauthorized { what },
        Registry::DiskFull => RuntimeError::NoDisk { what: format!("pull image {image}") },
        Registry::Unusable => RuntimeError::Refused { what, why: said(&error) },
        Registry::Unreachable | Registry::Odd => {
            RuntimeError::Failed { what: format!("pull image {image}"), source: Box::new(error) }
        }
    }
}

/// The meaning of an error of a file of ours.
pub(super) fn of_file(what: impl Into<String>, source: std::io::Error) -> RuntimeError {
    let what = what.into();
    if source.kind() == std::io::ErrorKind::StorageFull {
        return RuntimeError::NoDisk { what };
    }
    RuntimeError::Failed { what, source: Box::new(source) }
}

/// The engine did not answer in time. What was asked may have happened.
pub(super) fn overdue(what: impl Into<String>) -> RuntimeError {
    RuntimeError::Away { what: what.into(), source: Box::new(Error::RequestTimeoutError) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(said: &str, verdict: Registry) {
        assert_eq!(registry(said), verdict, "{said}");
    }

    #[test]
    fn the_words_of_engines_about_registries_are_understood() {
        check(
            "manifest for 127.0.0.1:5000/a:1 not found: manifest unknown: manifest unknown",
            Registry::Unknown,
        );
        check(
            "repository a not found: name unknown: repository name not known to registry",
            Registry::Unknown,
        );
        check(
            "pull access denied for a/b, repository does not exist or may require 'docker login': denied: \
             requested access to the resource is denied",
            Registry::UnknownOrRefuses,
        );
        check("Head \"http://127.0.0.1:1/v2/a/manifests/1\": no basic auth credentials", Registry::Refuses);
        check("unauthorized: authentication required", Registry::Refuses);
        check(
            "Get \"http://127.0.0.1:1/v2/\": dial tcp 127.0.0.1:1: connect: connection refused",
            Registry::Unreachable,
        );
        check(
            "Get \"https://r.example/v2/\": dial tcp: lookup r.example: no such host",
            Registry::Unreachable,
        );
        check("write /data/tmp/GetImageBlob1: no space left on device", Registry::DiskFull);
        check("no matching manifest for linux/arm64 in the manifest list entries", Registry::Unusable);
        check("filesystem layer verification failed for digest sha256:00", Registry::Odd);
    }

    #[test]
    fn an_absent_repository_is_told_from_a_closed_one_by_whether_credentials_were_given() {
        let error = || Error::DockerResponseServerError {
            status_code: 404,
            message: "pull access denied for a/b, repository does not exist or may require 'docker login'"
                .into(),
        };
        assert!(matches!(of_registry("a/b", false, error()), RuntimeError::NoImage { .. }));
        assert!(matches!(of_registry("a/b", true, error()), RuntimeError::Unauthorized { .. }));
    }

    #[test]
    fn an_engine_that_does_not_answer_is_away_and_one_that_says_no_is_not() {
        assert!(matches!(of_call("x", Error::RequestTimeoutError), RuntimeError::Away { .. }));
        let no = Error::DockerResponseServerError { status_code: 400, message: "bad parameter".into() };
        assert!(matches!(of_call("x", no), RuntimeError::Refused { why, .. } if why == "bad parameter"));
        let full = Error::DockerResponseServerError {
            status_code: 500,
            message: "mkdir: no space left on device".into(),
        };
        assert!(matches!(of_call("x", full), RuntimeError::NoDisk { .. }));
    }
}
